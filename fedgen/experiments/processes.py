"""Runs in processes of their own, several at a time.

A *lane* is a process that trains its runs one after the other. Ctrl-C reaches it through the
process that began it, and when that one ends, in whatever way, a lane ends after its round, with a
checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from omegaconf import DictConfig, OmegaConf

from fedgen.errors import FedgenError, Interrupted, status_of
from fedgen.experiments.training import train
from fedgen.reporting.progress import RunProgress, epsilon_in_words
from fedgen.reporting.run_dir import RunDir, make_folder
from fedgen.reporting.words import summary

_POLL_SECONDS = 0.2
_AGAIN_SECONDS = 20.0  # a run that was told twice ends at once

Lanes = Mapping[str, Sequence[DictConfig]]
"""Runs, each with its ``run_dir``, by the name of the lane that trains them."""


def jobs_at_a_time(asked: object, configs: Sequence[DictConfig]) -> int:
    """How many lanes there may be at a time: what was asked for, or as many as the cores have
    threads for.

    Raises:
        FedgenError: for a number that cannot be.
    """
    if asked is None:
        threads: int = max(config.runtime.threads for config in configs)
        return max(1, (os.cpu_count() or 1) // threads)
    if not isinstance(asked, int) or not 1 <= asked <= 1024:
        raise FedgenError(
            "jobs", f"must be a whole number from 1 to 1024, got {asked!r}", "mend it"
        )
    return asked


def train_beside(lanes: Lanes, logs: Path, jobs: int, stage: str, go_on: str) -> list[Path]:
    """Trains all runs, or goes on with those that were begun, ``jobs`` lanes at a time.

    Args:
        logs: the folder of what lanes say, ``NAME.log``.
        stage: what runs are called while it goes on.
        go_on: the command that goes on, for whoever interrupts it.

    Returns:
        The logs of lanes in which a run failed; its later runs were left.

    Raises:
        Interrupted: if it was asked to end; the runs have kept what they had.
    """
    make_folder(logs)
    waiting, running, failed = dict(lanes), dict[str, subprocess.Popen[bytes]](), list[Path]()

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in running.values():
            process.terminate()
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():  # Python allows it no other
        before = {each: signal.signal(each, pass_on) for each in (signal.SIGINT, signal.SIGTERM)}
    with RunProgress() as progress:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    name = next(iter(waiting))
                    running[name] = _begin(waiting.pop(name), logs / f"{name}.log")
                time.sleep(_POLL_SECONDS)
                for name, process in list(running.items()):
                    if process.poll() is not None:
                        _end(running.pop(name))
                        if process.returncode:
                            failed.append(logs / f"{name}.log")
                            progress.say(f"{name} failed: see {failed[-1]}")
                _show(progress, stage, lanes, running)
        except KeyboardInterrupt:  # the lanes were told as well
            progress.say("waiting for the runs to keep what they have; once more to end at once")
            for process in running.values():
                process.wait()
            raise Interrupted(f"interrupted; go on with {go_on}") from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for process in running.values():
                _end(process)
    return failed


def _show(progress: RunProgress, stage: str, lanes: Lanes, running: Mapping[str, object]) -> None:
    """How many runs are done, and how far those are that go on, with the epsilon spent."""
    facts, done, of = [], 0, 0
    for name, configs in lanes.items():
        left = [each for each in configs if not RunDir(Path(each.run_dir)).finished]
        done, of = done + len(configs) - len(left), of + len(configs)
        if left and name in running:
            facts.append(_how_far(left[0]))
    progress.show(stage, done, of, "  ".join(facts))


def _how_far(config: DictConfig) -> str:
    place = Path(config.run_dir)
    line = RunDir(place).last_spend()
    if line is None:
        return place.name
    spent = epsilon_in_words(line["epsilon"][config.privacy.adversary])
    return f"{place.name} {line['round']}/{config.rounds} ε {spent}"


def _begin(configs: Sequence[DictConfig], log: Path) -> subprocess.Popen[bytes]:
    chosen = [OmegaConf.to_container(config, resolve=True) for config in configs]
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fedgen.experiments.processes"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # the same modules as here
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps(chosen).encode() + b"\n")
    process.stdin.flush()  # and stays open: that it closes tells the lane that nobody waits for it
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # with what it began itself: a killed one could not
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def _lane() -> None:
    """What the process of a lane does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    configs = [OmegaConf.create(each) for each in json.loads(sys.stdin.readline())]
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def train_all() -> None:
        for config in configs:
            if (Path(config.run_dir) / "config.yaml").exists():
                config.resume = config.run_dir
            print(summary(train(config)), flush=True)

    status = status_of(train_all)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of an engine may still wait for clients


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    while True:  # Python drops what is raised at a bad moment, as while an object is finalized
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_AGAIN_SECONDS)


if __name__ == "__main__":
    _lane()
