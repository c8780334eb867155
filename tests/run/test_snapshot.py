"""A snapshot of an unfinished run says that it is unfinished, and does not affect the run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hostile import content
from mutation import kills
from tiny import PARTITIONS, fingerprint, tiny

from fedgen import cli
from fedgen.config.compose import compose
from fedgen.errors import Interrupted
from fedgen.federation.rounds import RunState
from fedgen.reporting.progress import format_epsilon
from fedgen.run import train
from fedgen.run.setup import Setup

WORDS = [*tiny("dpgan_small"), "method=dpgan_small", "sample_every=1", "rounds=4"]
WORDS += ["method.discriminator_steps=1"]


def stop(ready: Setup, state: RunState, result: object) -> None:
    if state.rounds == max(2, ready.privacy.budget.rounds - 4):
        raise KeyboardInterrupt


def interrupted(place: Path, *more: str) -> Path:
    words = [*WORDS, *more, "runtime.checkpoint_every=1", f"run_dir={place}"]
    with pytest.raises(Interrupted):
        train.train(compose("config", words), watch=stop)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("clients", PARTITIONS)
def test_a_run_resumes_after_a_snapshot(
    clients: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = interrupted(tmp_path / "run", *PARTITIONS[clients])
    before = content(run)
    out = tmp_path / "samples.npz"
    assert cli.run(["sample", f"run={run}", "n=20", f"out={out}"]) == 0
    assert "after 1 of 4 rounds: the run is not over" in capsys.readouterr().out
    assert content(run) == before
    shorter = interrupted(tmp_path / "other", *PARTITIONS[clients], "rounds=3")  # other streams
    assert cli.run(["sample", f"run={shorter}", "n=20", f"out={tmp_path}/other.npz"]) == 0
    images, others = (np.load(tmp_path / name)["images"] for name in ("samples.npz", "other.npz"))
    assert images.shape == (20, 1, 8, 8) and (images != others).any()
    words = ["evaluation.samples=100", "evaluation.classifiers.cnn.epochs=1"]
    assert cli.run(["evaluate", f"run={run}", *words]) == 0
    output = capsys.readouterr().out
    assert "after 1 of 4 rounds: the run is not over" in output and "gen2real" in output
    record = json.loads((run / "unfinished.json").read_text())
    assert record["rounds"] == 1 and 0 <= record["gen2real"]["cnn"]["mean"] <= 1
    assert not (run / "results.json").exists() and not list((run / "public").iterdir())
    before, page = content(run), tmp_path / "report.html"
    assert cli.run(["report", f"runs={run}", f"out={page}"]) == 0
    text = page.read_text()
    assert "after 1 of 4 rounds: the run is not over" in text and "not for release" in text
    assert "after 1 rounds: gen2real cnn" in text and content(run) == before
    assert cli.run(["train", f"resume={run}"]) == 0
    whole = tmp_path / "whole"
    words = [*WORDS, *PARTITIONS[clients], "runtime.checkpoint_every=1", f"run_dir={whole}"]
    assert cli.run(["train", *words]) == 0
    assert fingerprint(run) == fingerprint(whole)


def test_an_altered_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = interrupted(tmp_path / "run")
    [file] = (run / "checkpoints").glob("server_*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    for command in (["sample", "n=5", f"out={tmp_path}/x.npz"], ["evaluate"]):
        assert cli.run([command[0], f"run={run}", *command[1:]]) == 2
        error = capsys.readouterr().err
        assert "was truncated or altered" in error and len(error.splitlines()) == 1
    assert not (tmp_path / "x.npz").exists()


def test_a_finished_run_without_its_description_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = interrupted(tmp_path / "run")
    assert cli.run(["train", f"resume={run}"]) == 0
    (run / "public" / "generator.json").unlink()
    assert cli.run(["sample", f"run={run}", "n=5", f"out={tmp_path}/x.npz"]) == 2
    assert "generator.json cannot be read" in capsys.readouterr().err


def test_the_public_report_needs_a_finished_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = interrupted(tmp_path / "run"), tmp_path / "report.html"
    assert cli.run(["report", f"runs={run}", "audience=public", f"out={out}"]) == 2
    assert "give a finished run" in capsys.readouterr().err
    assert cli.run(["report", f"runs=[{run},{run}]", f"out={out}"]) == 2
    assert "finish it" in capsys.readouterr().err
    (run / "unfinished.json").write_text('{"gen2real": 3}')
    assert cli.run(["report", f"runs={run}", f"out={out}"]) == 2
    error = capsys.readouterr().err
    assert "unfinished.json was altered" in error and len(error.splitlines()) == 1
    assert not out.exists()


@kills(
    "fedgen/run/snapshot.py",
    '        open_ledgers(run_dir, identity["run"], clients, seeded),',
    "        {},",
    case="one",
)
@pytest.mark.parametrize("clients", PARTITIONS)
def test_the_epsilon_of_a_snapshot_is_that_of_all_charged_rounds(
    clients: str, tmp_path: Path
) -> None:
    """Not only of the logged ones: clients were charged for five when it was interrupted, and the
    last checkpoint is of four."""
    noise = ["privacy.target_epsilon=null", "privacy.noise_multiplier=2", *PARTITIONS[clients]]
    run, page = interrupted(tmp_path / "run", *noise, "rounds=9"), tmp_path / "report.html"
    assert cli.run(["report", f"runs={run}", f"out={page}"]) == 0
    assert "after 4 of 9 rounds" in page.read_text()
    whole = tmp_path / "whole"
    assert cli.run(["train", *WORDS, *noise, "rounds=5", f"run_dir={whole}"]) == 0
    for view, result in json.loads((whole / "privacy.json").read_text())["views"].items():
        row = f'<td>{view}</td><td class="number"><b>{format_epsilon(result["epsilon"])}</b>'
        assert row in page.read_text()
