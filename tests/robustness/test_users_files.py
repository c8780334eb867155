"""Files of the user: existing files stay, and created ones are private."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from tiny import TINY, Train, fingerprint, tiny

from fedgen import cli
from fedgen.errors import FedgenError
from fedgen.federation.runtimes.ray_cluster import ray_folder
from fedgen.storage import io

Captured = pytest.CaptureFixture[str]


def tree(place: Path) -> dict[str, bytes | None]:
    """All files in a folder, with their contents."""
    result = sorted(place.rglob("*"))
    return {str(f.relative_to(place)): f.read_bytes() if f.is_file() else None for f in result}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run") / "run"
    words = [*tiny("dp_merf_small"), "method=dp_merf_small", f"run_dir={place}"]
    assert cli.run(["train", *words]) == 0
    return place


@pytest.mark.parametrize("out", ["samples", "grid.png", "s.npz", "s.parquet"])
def test_writing_samples_keeps_existing_files(out: str, run: Path, tmp_path: Path) -> None:
    stem, _, suffix = out.partition(".")
    for name in (f"{stem}.new", f"{stem}.new.{suffix}", f"{out}.new", f".{out}.tmp"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "thesis.txt").write_text("precious")
    before = tree(tmp_path)
    assert cli.run(["sample", f"run={run}", "n=4", f"out={tmp_path / out}"]) == 0
    after = tree(tmp_path)
    assert {name: after[name] for name in before} == before
    assert {Path(name).parts[0] for name in set(after) - set(before)} == {out}


def test_a_refused_run_leaves_the_folder_unchanged(tmp_path: Path, capsys: Captured) -> None:
    """Over its budget, which is known when its folder is created."""
    place, empty = tmp_path / "place", tmp_path / "empty"
    place.mkdir()
    empty.mkdir()
    (place / "thesis.new").write_text("precious")
    (place / "run.json").write_text("{}")
    before = tree(tmp_path)
    words = ["train", *tiny("dp_merf_small"), "method=dp_merf_small", "privacy.noise=secure"]
    words.append("privacy.budget_epsilon=0.01")
    for where in (place, empty, tmp_path / "none"):
        assert cli.run([*words, f"run_dir={where}"]) == 2
        assert tree(tmp_path) == before
    link = tmp_path / "link"
    link.symlink_to(empty)
    assert cli.run([*words, f"run_dir={link}"]) == 2
    assert link.is_symlink() and not list(empty.iterdir())
    assert "Traceback" not in capsys.readouterr().err


def test_a_run_does_not_start_among_existing_files(tmp_path: Path, capsys: Captured) -> None:
    words = ["train", *tiny("dp_merf_small"), "method=dp_merf_small"]
    for name, text in (("run.json", "{}"), ("SERVER_SIDE.md", "mine"), ("config.yaml.new", "")):
        place = tmp_path / name
        place.mkdir()
        (place / name).write_text(text)
        assert cli.run([*words, f"run_dir={place}"]) == 2
        assert "exists; choose another" in capsys.readouterr().err
        assert tree(place) == {name: text.encode()}


def test_a_new_evaluation_keeps_other_files(train: Train) -> None:
    run = train("rounds=2")
    (run / "evaluation").mkdir(exist_ok=True)
    (run / "evaluation" / "notes.txt").write_text("mine")
    (run / "evaluation.new").mkdir()
    assert cli.run(["evaluate", f"run={run}", "evaluation=none"]) == 0
    assert (run / "evaluation" / "notes.txt").read_text() == "mine"
    assert (run / "evaluation.new").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["samples", "public"])
def test_empty_folders_lost_by_archives_are_recreated(
    missing: str, train: Train, tmp_path: Path
) -> None:
    words = ["rounds=6", "log_every=1", "runtime.checkpoint_every=2", "sample_every=6"]
    whole = train(*words, name="whole")
    run = tmp_path / "run"
    dies = ["runtime.faults.server_dies=4", f"run_dir={run}"]
    subprocess.run(
        [sys.executable, "-m", "fedgen.cli", "train", *TINY, *words, *dies],
        check=False,
        capture_output=True,
    )
    assert (run / "checkpoints" / "checkpoint.json").exists()
    for file in (run / missing).iterdir():
        file.unlink()
    (run / missing).rmdir()
    assert cli.run(["train", f"resume={run}"]) == 0
    assert fingerprint(run) == fingerprint(whole)


@pytest.mark.parametrize("name", ["results.json", "epsilon.png", "public/samples.png"])
def test_obstacles_are_reported_before_anything_is_written(
    name: str, train: Train, tmp_path: Path, capsys: Captured
) -> None:
    run = train("rounds=2", "method=dp_merf_small", "privacy.noise=secure")
    (run / name).unlink()
    (run / name).mkdir()
    before = {k: v for k, v in tree(run).items() if not k.endswith("lock")}
    home = tree(Path(os.environ["FEDGEN_HOME"]))
    assert cli.run(["train", f"resume={run}"]) == 2
    assert f"{name} is a folder, where the run writes a file" in capsys.readouterr().err
    assert {k: v for k, v in tree(run).items() if not k.endswith("lock")} == before
    assert tree(Path(os.environ["FEDGEN_HOME"])) == home


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("method", ["gs_wgan_small", "mixture_small"])
def test_run_directories_are_readable_by_their_owner_alone(
    method: str, exists: bool, tmp_path: Path
) -> None:
    """Whatever the umask: they contain models of private records and nearest neighbours.
    ``public/`` follows the umask."""
    place = tmp_path / "run"
    if exists:
        place.mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        words = [*tiny(method), f"method={method}", f"run_dir={place}", "logger=tensorboard"]
        judged = ["evaluation.classifiers={}", "evaluation.leakage=true", "evaluation.samples=30"]
        assert cli.run(["train", *words, *judged, "sample_every=1"]) == 0
        assert cli.run(["sample", f"run={place}", "n=4", f"out={tmp_path / 'out'}"]) == 0
        assert os.umask(0o022) == 0o022, "the umask is the user's again"
    finally:
        os.umask(before)
    assert (place / "evaluation" / "nearest.png").exists()
    for path in place.rglob("*"):
        mode, public = stat.S_IMODE(path.stat().st_mode), "public" in path.parts
        allowed = (0o755 if path.is_dir() else 0o644) if public else 0o700
        assert mode & ~allowed == 0, f"{path} has {mode:o}"
        assert not public or mode == allowed, f"{path} has {mode:o}"
    for path in (tmp_path / "out").rglob("*.png"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    for path in Path(os.environ["FEDGEN_CACHE"]).rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_temporary_files_are_new_and_removed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), io.temporary_path(tmp_path / "a.txt") as fresh:
        assert fresh.exists() and fresh.parent == tmp_path
        raise OSError(errno.ENOSPC, "full")
    assert not list(tmp_path.iterdir())
    with io.temporary_path(tmp_path / "b", folder=True) as fresh:
        (fresh / "c").touch()
        fresh.rename(tmp_path / "b")
    assert tree(tmp_path) == {"b": None, "b/c": b""}


def test_a_file_system_without_guarantees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(number: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(FedgenError, match="does not support fsync"):
        io.write_atomic(tmp_path / "a", b"1")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("most", [0, 10])
def test_large_files_are_not_read(most: int, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * most)
    assert io.read_bounded(tmp_path / "a", most) == b"x" * most
    (tmp_path / "a").write_bytes(b"x" * (most + 1))
    with pytest.raises(ValueError, match="larger than"):
        io.read_bounded(tmp_path / "a", most)
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(ValueError, match="not a regular file"):
            io.read_bounded(path, most)


@pytest.mark.parametrize(
    "words",
    [
        ["node", "key=/dev/zero", "home={}", "policy={}/p", "ca={}/c"],
        ["link", "accept=/dev/zero", "home={}"],
        ["train", "runtime=deployed", "runtime.ca=/dev/zero", "data=public_facts",
         "data.classes=10", "data.shape=[1,8,8]", "data.public_rows=100", "partition=nodes",
         "evaluation=none", "run_dir={}/run"],
        ["evaluate", "samples={}/zero.npz", "data=digits"],
        ["data", "check", "data=folder", "data.path={}/zero.csv", "data.labels=[a,b]"],
        ["data", "check", "data=folder", "data.path={}/zero.npz", "data.classes=2"],
        ["sample", "run={}/public", "n=4", "out={}/s.npz"],
        ["train", "evaluation.fid=true", "evaluation.inception_weights=/dev/zero",
         "run_dir={}/run"],
    ],
)  # fmt: skip
def test_a_device_in_place_of_a_key_is_one_line(
    words: list[str], tmp_path: Path, capsys: Captured
) -> None:
    for name in ("zero.npz", "zero.csv"):
        (tmp_path / name).symlink_to("/dev/zero")
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "generator.json").symlink_to("/dev/zero")
    assert cli.run([word.format(tmp_path) for word in words]) == 2
    assert len(capsys.readouterr().err.splitlines()) <= 2


def command(tmp_path: Path, line: str) -> subprocess.CompletedProcess[str]:
    """A line of bash, in which ``$FEDGEN`` is the command."""
    own = {**os.environ, "FEDGEN": f"{sys.executable} -m fedgen.cli"}
    return subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=own, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("$FEDGEN account method=dp_merf_small >&-", 0),
        ("$FEDGEN account bogus 2>&-", 2),
        ("mkdir gone; cd gone; rmdir ../gone; $FEDGEN account method=dp_merf_small", 2),
    ],
)
def test_unusual_environments_cause_no_traceback(line: str, status: int, tmp_path: Path) -> None:
    done = command(tmp_path, line)
    assert "Traceback" not in done.stderr
    assert done.returncode == status, done.stderr
    assert "bogus" not in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["account", f"rounds={'9' * 5000}"], "rounds: is too long"),
        (["account", f"seed={'[' * 500}1{']' * 500}"], "seed: is too long or nested too deeply"),
        (["account", "hydra.run.dir=x"], "hydra.run.dir: is an option of Hydra's"),
        (["account", "hydra.verbose=true"], "hydra.verbose: is an option of Hydra's"),
        (["account", "spent", "rounds=5"], "rounds: is not read by fedgen account spent"),
        (["account", "published=all", "rounds=5"], "rounds: is not read by"),
        (["account", "privacy.threshold=3"], "privacy.threshold: applies to secure sums only"),
        (["link", "name=x"], "name: is of accept=KEY.pub"),
        (["link", "host=nonsense"], "host: 'nonsense' is no address of this machine"),
        (["link", "host=8.8.8.8"], "host: '8.8.8.8' is no address of this machine"),
        (["node", "log", "superlink=a:1"], "superlink: is not read by fedgen node log"),
        (["new", "method", "a", "name=b"], "name: is given twice"),
        (["account", f"seed={2**70}"], "seed: must be below"),
        (
            ["train", "evaluation.judge=true", "evaluation.samples=300", "data=folder",
             "data.path=few.npz", "data.classes=2", "method=mixture_small", "data.public_rows=40"],
            "evaluation.judge: needs at least 10 test images, the data set has 9",
        ),
    ],
)  # fmt: skip
def test_settings_without_effect_are_refused(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    rows = {"train_images": images, "train_labels": np.arange(40) % 2}
    np.savez("few.npz", **rows, test_images=images[:9], test_labels=np.arange(9) % 2)
    before = tree(tmp_path)
    assert cli.run(words) == 2
    error = capsys.readouterr().err
    assert f"fedgen: {message}" in error
    assert len(error.strip().splitlines()) == 1
    assert tree(tmp_path) == before


def test_names_of_new_methods_follow_python(tmp_path: Path) -> None:
    assert cli.run(["new", "method", "hinge_gan", f"out={tmp_path}"]) == 0
    assert (tmp_path / "hinge_gan" / "configs" / "method" / "hinge_gan.yaml").exists()


def test_a_source_tree_without_metadata_has_a_version() -> None:
    """With fedgen on PYTHONPATH alone."""
    code = (
        "import importlib.metadata as m; v = m.version\n"
        "def gone(name):\n"
        "    if name == 'fedgen': raise m.PackageNotFoundError(name)\n"
        "    return v(name)\n"
        "m.version = gone\n"
        "from fedgen.version import VERSION; print(VERSION)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert f'version = "{done.stdout.strip()}"' in project.read_text()


@pytest.mark.parametrize("text", ["08:30", "0:15x", "0bad12", "0b3f", "_:5", "1e-5", "1_0", "010"])
def test_written_settings_are_read_back(text: str, tmp_path: Path) -> None:
    """Texts that look like numbers stay texts, and those that YAML quotes keep their value."""
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml({"labels": [text, 10, -3, 0, 0.5]}))
    assert OmegaConf.create(io.read_yaml(tmp_path / "config.yaml")).labels[0] == text


def test_files_written_from_python_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        io.write_atomic(tmp_path / "a", b"", shared=True)
        with io.private_umask():
            io.write_atomic(tmp_path / "b", b"", shared=True)
            with io.user_umask():
                (tmp_path / "c").touch()
            (tmp_path / "d").touch()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "abcd"]
    assert modes == [0o644, 0o644, 0o644, 0o600]


@pytest.mark.parametrize("text", ["epsilon: 5:30", "threshold: 010", "peers: {010: ab}", "a: 0x10"])
def test_ambiguous_yaml_numbers_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(ValueError, match="which YAML parses as"):
        io.read_yaml(tmp_path / "policy.yaml")
    (tmp_path / "policy.yaml").write_text("peers: {'010': ab, 0: cd}\nepsilon: 0.5\n")
    io.read_yaml(tmp_path / "policy.yaml")


def test_only_ray_folders_of_killed_processes_are_removed() -> None:
    """By a mark with host, process and start time; the name alone proves nothing."""
    theirs = Path(tempfile.mkdtemp(prefix="fedgen-ray-", dir="/tmp"))
    killed = Path(tempfile.mkdtemp(prefix="fedgen-ray-", dir="/tmp"))
    (theirs / "thesis.txt").write_text("precious")
    (killed / "fedgen-owner").write_text(f"{socket.gethostname()} {os.getpid()} 1.0")
    try:
        with ray_folder() as first, ray_folder():
            assert Path(first).exists(), "its process is alive"
            assert (theirs / "thesis.txt").exists()
            assert not killed.exists()
    finally:
        shutil.rmtree(theirs)
