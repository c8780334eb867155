"""A metric is one file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny

from fedgen.evaluation.metrics import metrics

ROOT = Path(__file__).resolve().parents[2]
BRIGHTNESS = """
from fedgen.evaluation.metrics import Metric

METRIC = Metric(
    ("brightness",),
    lambda judged: {"brightness": float(judged.images.mean())},
    lambda results: [("mean brightness", f"{results['brightness']:.1f} of 255")],
    {"brightness": lambda results: results["brightness"]},
)
"""


def test_metrics_have_distinct_names() -> None:
    keys = [key for each in metrics() for key in each.keys]
    names = [name for each in metrics() for name in each.columns]
    assert len(set(keys)) == len(keys) >= 8 and len(set(names)) == len(names)


@pytest.mark.slow
def test_adding_a_metric_takes_one_file(tmp_path: Path) -> None:
    """It is computed, stored, printed, reported, and a column of the table of a sweep."""
    shutil.copytree(ROOT / "fedgen", tmp_path / "fedgen")
    (tmp_path / "fedgen" / "evaluation" / "brightness.py").write_text(BRIGHTNESS)

    def fedgen(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "fedgen.cli", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    words = [*tiny("mixture_small"), "method=mixture_small", "evaluation=quick"]
    words += ["evaluation.samples=60", "evaluation.real2gen=[]", "run_dir=runs"]
    words += ["evaluation.classifiers.cnn.epochs=1"]
    result = fedgen("train", "-m", *words, "seed=0,1")
    record = json.loads((tmp_path / "runs" / "0" / "results.json").read_text())["brightness"]
    assert f"mean brightness: {record:.1f} of 255" in result
    assert "brightness" in (tmp_path / "runs" / "sweep.csv").read_text().partition("\n")[0]
    fedgen("report", "runs=runs/0", "out=page.html")
    assert "mean brightness" in (tmp_path / "page.html").read_text()
