"""Mistakes, and machines without enough resources: one line, and existing files stay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny import TINY, Train, fingerprint

from fedgen import cli
from fedgen.config.compose import compose
from fedgen.storage.io import TEMPORARY

Captured = pytest.CaptureFixture[str]

MISTAKES = [
    ("privacy=nan", "privacy"),
    ("data=0", "data"),
    ("partition=1e308", "partition"),
    ("evaluation=[[1]]", "evaluation"),
    ("method=null", "method"),
    ("runtime=[]", "runtime"),
    ("method.responders=${nope}", "method.responders"),
    ("method.critic.width=99999999999999999999", "method.critic.width"),
    ("seed=1e400", "seed"),
    ("~runtime=1e-300", "runtime"),
    ("runtime.faults.nan=${rounds}", "runtime.faults.nan"),
    ("+runtime.faults.mood=0.1", "runtime.faults.mood"),
    ("rounds=nan", "rounds"),
    ("privacy.target_epsilon=nan", "privacy.target_epsilon"),
    ("method.generator_betas=[1]", "method.generator_betas"),
]


@pytest.mark.parametrize(("word", "key"), MISTAKES)
def test_a_resource_error_is_one_line(
    word: str, key: str, tmp_path: Path, capsys: Captured
) -> None:
    place = tmp_path / "run"
    assert cli.run(["train", *TINY, word, f"run_dir={place}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fedgen: {key}: ")
    assert error.count("\n") == 1
    assert not place.exists()


def test_insufficient_memory_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    words = ["method.batch=99999999999", f"run_dir={tmp_path}/run"]
    assert cli.run(["train", *TINY, *words]) == 3
    error = capsys.readouterr().err
    assert "out of memory" in error and error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "limit", ["-f 40", "-n 6", "-v 2500000"], ids=["disk", "file handles", "address space"]
)
def test_a_full_disk_is_one_line(limit: str, train: Train, tmp_path: Path) -> None:
    """The run resumes once there is space again, to the same bit."""
    words = ["rounds=6", "log_every=1", "runtime.checkpoint_every=1"]
    whole = train(*words, name="whole")
    run = tmp_path / "run"
    command = [sys.executable, "-m", "fedgen.cli", "train", *TINY, *words, f"run_dir={run}"]
    limited = ["bash", "-c", f'ulimit {limit}; trap "" XFSZ; exec "$@"', "bash", *command]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"fedgen: {run}" if limit.startswith("-f") else "fedgen: ")
    if (run / "config.yaml").exists():
        assert cli.run(["train", f"resume={run}"]) == 0
        assert fingerprint(run) == fingerprint(whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["s.npz", "s.png", "s.parquet"])
def test_failed_sampling_keeps_earlier_samples(name: str, train: Train, tmp_path: Path) -> None:
    run, out = train("rounds=2"), tmp_path / name
    assert cli.run(["sample", f"run={run}", "n=20", f"out={out}"]) == 0
    before = out.read_bytes()
    words = ["sample", f"run={run}", "n=3000", f"out={out}", "seed=1"]
    command = [sys.executable, "-m", "fedgen.cli", *words]
    limited = ["bash", "-c", 'ulimit -f 40; trap "" XFSZ; exec "$@"', "bash", *command]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "cannot be written" in done.stderr and "Traceback" not in done.stderr
    assert out.read_bytes() == before
    assert [p.name for p in tmp_path.glob(f"{TEMPORARY}*")] == []


def test_clients_have_the_same_threads_on_every_runtime() -> None:
    several = ["partition=iid", "partition.clients=4"]
    result = {
        compose("config", [*several, f"runtime={name}"]).runtime.threads
        for name in ("in_process", "ray", "flower")
    }
    assert result == {1}


def test_a_closed_pipe_is_not_an_error() -> None:
    """``fedgen account ... | head -1``."""
    words = [sys.executable, "-u", "-m", "fedgen.cli", "account", "published=dp_merf"]
    command = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert command.stdout is not None and command.stderr is not None
    command.stdout.close()
    assert command.stderr.read() == b""
    assert command.wait() == 0
