"""``fedgen repeat``: a rehearsal with other seeds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from mutation import kills
from tiny import Train, tiny

from fedgen import cli

SCORES = ["evaluation.samples=260", "evaluation.classifiers.cnn.epochs=1"]


@pytest.mark.slow
@kills("fedgen/commands/repeat.py", "config.seed = trained.seed + 1 + number", "pass")
def test_the_range_over_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each repetition has another seed and the same ε, and is trained once; the release prints the
    range before it trains."""
    small = [word for word in tiny("dp_merf_small") if not word.startswith("evaluation")]
    run = tmp_path / "run"
    words = ["method=dp_merf_small", *small, "evaluation=quick", *SCORES, f"run_dir={run}"]
    assert cli.run(["train", *words]) == 0
    capsys.readouterr()
    assert cli.run(["repeat", f"run={run}", "repetitions=2"]) == 0
    shown = capsys.readouterr().out
    line = (
        r"gen2real cnn: (\S+) to (\S+) % in 3 runs with other seeds, mean \S+ %, this run (\S+) %"
    )
    found = re.search(line, shown)
    assert found is not None
    runs = [run, run / "repetitions" / "0", run / "repetitions" / "1"]
    results = [json.loads((place / "results.json").read_text()) for place in runs]
    accuracies = [f"{100 * result['gen2real']['cnn']['mean']:.1f}" for result in results]
    assert found.groups() == (min(accuracies, key=float), max(accuracies, key=float), accuracies[0])
    assert len({result["generator_sha256"] for result in results}) == 3
    assert len({result["epsilon"]["server"] for result in results}) == 1
    assert not results[1]["real2gen"]
    before = (runs[1] / "results.json").stat().st_mtime_ns
    assert cli.run(["repeat", f"run={run}", "repetitions=3"]) == 0
    shown = capsys.readouterr().out
    assert "in 4 runs" in shown and (runs[1] / "results.json").stat().st_mtime_ns == before
    packed = [f"run={run}", f"out={tmp_path / 'a.zip'}", "registry=false", "audit=false"]
    assert cli.run(["release", *packed]) == 0
    assert "in 4 runs with other seeds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["privacy.noise=secure"], "has secret noise"),
        ([], "has no evaluation by classifiers"),
    ],
)
def test_other_runs_are_refused(
    words: list[str], problem: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train("method=dp_merf_small", *words)
    capsys.readouterr()
    assert cli.run(["repeat", f"run={run}"]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1
