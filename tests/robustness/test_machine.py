"""A mistake, or a machine that has not got what it takes: one line, and what was there stays."""

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
def test_a_mistake_is_one_line(word: str, key: str, tmp_path: Path, capsys: Captured) -> None:
    place = tmp_path / "run"
    assert cli.run(["train", *TINY, word, f"run_dir={place}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fedgen: {key}: ")
    assert said.count("\n") == 1
    assert not place.exists()


def test_more_memory_than_there_is(tmp_path: Path, capsys: Captured) -> None:
    words = ["method.batch=99999999999", f"run_dir={tmp_path}/run"]
    assert cli.run(["train", *TINY, *words]) == 3
    said = capsys.readouterr().err
    assert "out of memory" in said and said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "limit", ["-f 40", "-n 6", "-v 2500000"], ids=["disk", "file handles", "address space"]
)
def test_a_machine_that_is_full(limit: str, train: Train, tmp_path: Path) -> None:
    """The run goes on once there is room again, to the same bit."""
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
def test_samples_that_do_not_fit_leave_those_before(
    name: str, train: Train, tmp_path: Path
) -> None:
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


def test_several_clients_have_the_same_threads_on_every_runtime() -> None:
    several = ["partition=iid", "partition.clients=4"]
    found = {
        compose("config", [*several, f"runtime={name}"]).runtime.threads
        for name in ("in_process", "ray", "flower")
    }
    assert found == {1}


def test_whoever_reads_what_is_printed_may_have_seen_enough() -> None:
    """``fedgen account ... | head -1``: a closed pipe is nobody's mistake."""
    words = [sys.executable, "-u", "-m", "fedgen.cli", "account", "published=dp_merf"]
    command = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert command.stdout is not None and command.stderr is not None
    command.stdout.close()
    assert command.stderr.read() == b""
    assert command.wait() == 0
