"""The packages import from a checkout, from a wheel and from a Flower app bundle."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_files
from tiny import TINY, fingerprint

from fedgen import cli

ROOT = Path(__file__).parent.parent
PACKAGES = ("fedgen", "fedgen/strategies", "fedgen/configs")


def imports_from(place: Path) -> None:
    """Import all modules in a fresh process with ``place`` first on the path."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "import fedgen, fedgen.strategies.sample_gradients, fedgen.configs, fedgen.flower_app;"
        "from fedgen.config.compose import compose;"
        "from fedgen.storage import schemas;"
        "compose('config', ['method=gs_wgan']); schemas.schema('privacy');"
        "print(*(m.__path__[0] for m in (fedgen, fedgen.strategies, fedgen.configs)), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(place)],
        capture_output=True,
        text=True,
        check=False,
        cwd=place,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(place / package) for package in PACKAGES]


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def copy_checkout(folder: Path) -> None:
    """Copy the tracked files: no earlier build, no link between folders."""
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())


def test_from_a_checkout(tmp_path: Path) -> None:
    copy_checkout(tmp_path)
    imports_from(tmp_path)


@pytest.mark.slow
def test_from_a_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    copy_checkout(source)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)],
        cwd=source,
        check=True,
        capture_output=True,
    )
    [wheel] = tmp_path.glob("fedgen-*.whl")
    place = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(place)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"fedgen"}
    imports_from(place)


def test_from_a_flower_app_bundle(tmp_path: Path) -> None:
    """Flower's own rules choose the files."""
    files: dict[str, bytes | Path] = {name: ROOT / name for name in tracked()}
    bundle, _ = build_fab_from_files(files)
    (tmp_path / "app.fab").write_bytes(bundle)
    with zipfile.ZipFile(tmp_path / "app.fab") as archive:
        archive.extractall(tmp_path / "app")
    imports_from(tmp_path / "app")


@pytest.mark.slow
def test_flwr_run_on_a_fresh_clone(tmp_path: Path, nothing_left: None) -> None:
    """It ends with the bits of any other runtime, and leaves no process; a failed run has a
    non-zero exit status."""
    copy_checkout(tmp_path)
    settings = [*TINY, "partition=iid", "partition.clients=3", "rounds=3"]
    settings = [word for word in settings if not word.startswith("runtime=")]

    def run(words: list[str]) -> subprocess.CompletedProcess[str]:
        federation = "num-supernodes=3 client-resources-num-cpus=1"
        command = [sys.executable, str(tmp_path / "scripts" / "flwr_run.py")]
        command += ["-c", f'overrides="{" ".join(words)}"', "--federation-config", federation]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = run([*settings, f"run_dir={tmp_path / 'flower'}"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert cli.run(["train", *settings, "runtime=in_process", f"run_dir={tmp_path / 'here'}"]) == 0
    assert fingerprint(tmp_path / "flower") == fingerprint(tmp_path / "here")
    failed = run([*settings, "privacy.delta=7"])
    assert failed.returncode == 1
    assert "fedgen: privacy.delta: must be below 1" in failed.stdout
