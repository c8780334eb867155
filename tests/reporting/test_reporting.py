"""Files of a run for people and scripts."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import yaml
from dp_accounting import GaussianDpEvent
from hypothesis import given
from hypothesis import strategies as st
from mutation import kills
from omegaconf import OmegaConf
from PIL import Image
from scipy.optimize import brentq
from tiny import Train

from fedgen.errors import FedgenError
from fedgen.privacy.events import Relation
from fedgen.privacy.gaussian_dp import gaussian_epsilon
from fedgen.privacy.guarantee import guarantee, to_json
from fedgen.reporting.figures import epsilon_against_rounds, sample_grid
from fedgen.reporting.model_card import card
from fedgen.reporting.privacy_statement import statement
from fedgen.reporting.progress import RunProgress, format_bytes, format_epsilon
from fedgen.reporting.summary import summary
from fedgen.run import memory as memory_
from fedgen.run.memory import PeakMemory, memory_of_tree
from fedgen.storage.folders import make_folder, unused_folder
from fedgen.storage.io import TEMPORARY
from fedgen.storage.run_dir import RunDir
from fedgen.storage.schemas import schema


@given(st.floats(0, 1e4))
def test_epsilon_is_never_rounded_down(value: float) -> None:
    assert float(format_epsilon(value)) >= value
    assert float(format_epsilon(value)) <= value + 0.0101


def test_formatting() -> None:
    assert format_epsilon(None) == "∞"
    assert format_bytes(999) == "999 B"
    assert format_bytes(2_500_000) == "2.5 MB"


@pytest.mark.parametrize("channels", [1, 3])
def test_a_grid_shows_every_image(tmp_path: Path, channels: int) -> None:
    images = np.full((7, channels, 8, 8), 255, np.uint8)
    sample_grid(images, 3, tmp_path / "grid.png")
    picture = np.asarray(Image.open(tmp_path / "grid.png"))
    assert picture.shape[:2] == (3 * 34, 3 * 34)
    assert (picture == 255).sum() == 7 * 32 * 32 * channels


def test_the_figure_accepts_missing_values(tmp_path: Path) -> None:
    epsilon_against_rounds([1, 2], {"a": [None, 2.0], "b": [None, None]}, 1e-5, tmp_path / "e.png")
    assert (tmp_path / "e.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["privacy", "results"])
def test_records_are_validated_against_their_schema(
    train: Train, name: str, tmp_path: Path
) -> None:
    run = train()
    record = json.loads((run / f"{name}.json").read_text())
    jsonschema.validate(record, schema(name))
    for key in schema(name)["required"]:
        harmed = {k: v for k, v in record.items() if k != key}
        with pytest.raises(jsonschema.ValidationError):
            RunDir(tmp_path).write(name, harmed)


def test_the_statement_is_complete(train: Train) -> None:
    run = train("partition=iid", "partition.clients=4", "method.routing=per_sample")
    record = json.loads((run / "privacy.json").read_text())
    text = (run / "public" / "PRIVACY.md").read_text()
    for words in ("not for release", "one client", "replace one", "What is not covered"):
        assert words in text
    for client in record["clients"].values():
        assert f"{client['server']:.4g}" not in text, "participation is the server's business"
    assert "is public" not in text
    removed = statement({**record, "relation": "add_or_remove_one"}, "draws")
    assert "or it had none: how many clients there are is public" in removed
    secure = statement({**record, "noise": "secure"}, "draws")
    assert "not for release" not in secure
    assert "proven ε" in summary(run)


@pytest.mark.parametrize(("seen", "message"), [(0.3, True), (0.6, False), (None, False)])
def test_a_private_classifier_without_published_labels_is_stated(
    train: Train, seen: float | None, message: bool
) -> None:
    run = train("method=mixture_small", "method.private_classifier=ridge", "evaluation=none")
    results = json.loads((run / "results.json").read_text())
    results["real2gen"] = {name: {"mean": seen} for name in ("cnn", "logistic_regression")}
    results["real2real"] = {name: {"mean": 0.9} for name in ("cnn", "logistic_regression")}
    results["classifier"] = {"mean": 0.9, "n": 100}
    (run / "results.json").write_text(json.dumps(results))
    assert ("method.private_classifier=none" in summary(run)) is message


def test_the_model_card_is_readable_by_hubs(train: Train) -> None:
    """It starts with metadata; its Python example draws samples from the folder."""
    run = train("rounds=1")
    text = (run / "public" / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    assert yaml.safe_load(head)["library_name"] == "fedgen"
    assert "An experiment, not for release" in body and "grey images of 8 x 8 pixels" in body
    record = json.loads((run / "privacy.json").read_text())
    assert f"({record['views']['release']['epsilon']:.2f}, 1e-05)-differential privacy" in body
    [code] = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    names: dict[str, object] = {"FOLDER": run / "public"}
    exec(code.replace("1000", "10"), names)
    assert len(names["images"]) == 10  # type: ignore[arg-type]
    record["views"]["release"] |= {"epsilon": None, "reason": "why"}
    text = card({**record, "noise": "secure"}, ["x", "y"], (3, 8, 8), 2, ["ill", "well"])
    assert "There is no privacy bound: why" in text and "2 labels (ill, well)" in text


@pytest.mark.parametrize(
    ("epsilon", "exactly", "by_epsilon"),
    [
        (0.1, "finds at most 1.1 in 100", "finds at most 1.11 in 100"),
        (1.0, "finds at most 1.98 in 100", "finds at most 2.72 in 100"),
        (3.0, "finds at most 5.41 in 100", "finds at most 20.1 in 100"),
        (10.0, "finds at most 37.3 in 100", "may find all"),
    ],
)
def test_the_statement_bounds_attacks(
    train: Train, epsilon: float, exactly: str, by_epsilon: str
) -> None:
    """By the curve of a Gaussian; for a record of 0.1.0 only (ε, δ) is known: at most e^ε in 100 at
    1 in 100 false positives, and at most 1 - e^-ε."""
    record = json.loads((train("rounds=1") / "privacy.json").read_text())
    release = record["views"]["release"]
    mu = brentq(lambda mu: gaussian_epsilon(mu, 1e-5) - epsilon, 1e-3, 10)
    curve = guarantee({GaussianDpEvent(1 / mu): 1}, 1e-5, Relation.REPLACE_ONE)
    assert curve is not None
    release |= {"epsilon": epsilon, "guarantee": to_json(curve)}
    text = statement(record, "draws")
    assert exactly in text and "excludes little" not in text
    del release["guarantee"]
    text = statement(record, "draws")
    assert by_epsilon in text
    assert ("excludes little" in text) == (epsilon == 10)


def test_only_public_is_readable_by_others(train: Train) -> None:
    run = train("rounds=1")
    assert "`public/`" in (run / "SERVER_SIDE.md").read_text()


def test_the_metrics_log_can_be_truncated(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.add_metrics({"round": 1})
    size, _ = run.size()
    run.add_metrics({"round": 2})
    run.add_failure({"kind": "late", "client": 0})
    run.truncate(size)
    assert run.metrics() == [{"round": 1}]
    assert run.failures() == {"late": 1}, "failures stay"


def test_a_line_that_was_cut_short_is_replaced(tmp_path: Path) -> None:
    """A process that dies while it appends one."""
    run = RunDir(tmp_path)
    run.mark_started(0)
    run.mark_started(1)
    run.add_failure({"kind": "failed", "client": 1})
    for name in ("rounds_begun.txt", "failures.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"ki' if name.startswith("failures") else "1")
    assert (run.started_rounds(), run.failures()) == ({0: 1, 1: 1}, {"failed": 1})
    run.mark_started(2)
    run.add_failure({"kind": "late", "client": 0})
    assert (run.started_rounds(), run.failures()) == ({0: 1, 1: 1, 2: 1}, {"failed": 1, "late": 1})


def test_the_last_spend_is_that_of_a_complete_line(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.last_spend() is None
    run.add_metrics({"round": 10, "epsilon": {"server": 1.5}})
    run.add_metrics({"round": 12, "gen2real": {}})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 20, "epsilon": {"ser')
    assert run.last_spend() == {"round": 10, "epsilon": {"server": 1.5}}


def test_memory_includes_child_processes() -> None:
    """An array of 200 MB in a child is counted, and no longer when the child ends."""
    code = "import time; x = bytearray(200_000_000); print(flush=True); time.sleep(60)"
    before = memory_of_tree()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with PeakMemory() as memory:
            pass
        child.kill()
    assert memory.peak - before > 190_000_000
    assert memory_of_tree() - before < 100_000_000


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_unreadable_memory_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a free file handle it is read later, or not at all."""

    def fails() -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(memory_, "memory_of_tree", fails)
    with PeakMemory() as watched:
        pass
    assert watched.peak == 0


def test_a_run_interrupted_before_its_start_can_start_again(tmp_path: Path) -> None:
    """Foreign files in its folder are never overwritten."""
    config = OmegaConf.create({})
    left = tmp_path / "left"
    RunDir.create(left, config, {"run": "a", "branch": ""})
    (left / "config.yaml").rename(left / f"{TEMPORARY}1.yaml")
    RunDir.create(left, config, {"run": "a", "branch": ""})
    (left / "config.yaml").unlink()
    (left / "public" / "samples.png").touch()
    with pytest.raises(FedgenError, match="exists"):
        RunDir.create(left, config, {"run": "a", "branch": ""})


@kills(
    "fedgen/storage/run_dir.py",
    "if not _locked(held, fcntl.LOCK_EX) or not _is_unused(path):",
    "if False:",
)
def test_one_of_several_simultaneous_runs_gets_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them see that the folder does not exist. The identity is that of the run that starts
    there."""
    barrier = threading.Barrier(8)

    def make_folder_together(path: Path) -> None:
        if path == tmp_path / "run":
            barrier.wait(60)
        make_folder(path)

    def create(number: int) -> int | None:
        with suppress(FedgenError):
            RunDir.create(tmp_path / "run", OmegaConf.create({}), {"run": number})
            return number
        return None

    monkeypatch.setattr("fedgen.storage.run_dir.make_folder", make_folder_together)
    for _ in range(20):
        with ThreadPoolExecutor(8) as pool:
            [winner] = [number for number in pool.map(create, range(8)) if number is not None]
        assert json.loads((tmp_path / "run" / "run.json").read_text()) == {"run": winner}
        shutil.rmtree(tmp_path / "run")


def test_runs_that_start_within_one_second_have_different_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        result = list(pool.map(unused_folder, [str(tmp_path / "runs" / "now")] * 40))
    assert len(set(result)) == 40 and all(path.is_dir() for path in result)


@kills(
    "fedgen/storage/run_dir.py",
    ("if stat.S_ISLNK(kind.st_mode) or (stat.S_ISREG(kind.st_mode) and kind.st_nlink > 1):"),
    "if False:",
)
def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """A folder with a symbolic link is foreign."""
    file, folder = tmp_path / "mine.md", tmp_path / "mine"
    file.write_text("mine")
    folder.mkdir()
    for number, (name, mine) in enumerate((("SERVER_SIDE.md", file), ("clients", folder))):
        run = tmp_path / str(number)
        run.mkdir()
        (run / name).symlink_to(mine)
        with pytest.raises(FedgenError, match="exists"):
            RunDir.create(run, OmegaConf.create({}), {})
        assert [path.name for path in run.iterdir()] == [name]
    assert file.read_text() == "mine"


def test_progress_of_long_steps_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of short steps is not."""
    with RunProgress() as progress:
        progress.show("samples", 2000, 2000, "", end=False)
        assert capsys.readouterr().out == ""
        monkeypatch.setattr("fedgen.reporting.progress._QUIET_SECONDS", 0.0)
        progress.show("samples", 1000, 2000, "", end=False)
        assert capsys.readouterr().out.split() == ["samples", "1000/2000"]


def test_a_step_of_minutes_reports_that_it_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedgen.reporting.progress._SILENT_SECONDS", 0.01)
    with RunProgress() as progress:
        progress.show("rounds", 4, 47, "")
        result, ends = "", time.monotonic() + 60
        while "still at rounds 4/47, for 0 min" not in result:
            assert time.monotonic() < ends, result
            result += capsys.readouterr().out
            time.sleep(0.01)
