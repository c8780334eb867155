"""Train runs in several processes in parallel.

A *lane* is a process that trains its runs one after another: a fork of a process with all imports,
so that it starts immediately. Ctrl-C reaches a lane through its parent; if the parent ends, the
lane ends after its round with a checkpoint.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedgen.allocator import keep_freed_memory
from fedgen.errors import FedgenError, Interrupted, run_and_report
from fedgen.reporting.progress import RunProgress, format_epsilon
from fedgen.reporting.summary import summary
from fedgen.run.train import train
from fedgen.storage.io import read_yaml
from fedgen.storage.run_dir import RunDir, make_folder

_server = multiprocessing.get_context("forkserver")
_IMPORTED = ["fedgen.run.train", "matplotlib.figure", "sklearn"]
_POLL_SECONDS = 0.2
_RETRY_SECONDS = 20.0  # a second signal ends a run immediately

Lanes = Mapping[str, Sequence[DictConfig]]
"""Runs, each with its ``run_dir``, by the name of the lane that trains them."""


def worker_count(asked: object, configs: Sequence[DictConfig]) -> int:
    """Return the number of lanes: as requested, or as many as fit the cores.

    Raises:
        FedgenError: for an invalid number.
    """
    if asked is None:
        threads: int = max(config.runtime.threads for config in configs)
        return max(1, (os.cpu_count() or 1) // threads)
    if not isinstance(asked, int) or not 1 <= asked <= 1024:
        raise FedgenError(
            "jobs", f"must be a whole number from 1 to 1024, got {asked!r}", "correct it"
        )
    return asked


def train_all(lanes: Lanes, logs: Path, jobs: int, stage: str, place: Path) -> list[Path]:
    """Train all runs, or resume those that were started, in ``jobs`` lanes.

    Args:
        logs: folder for the output of lanes, ``NAME.log``.
        stage: description of the runs for the progress line.
        place: where the same command resumes, for the message after an interruption.

    Returns:
        The logs of lanes in which a run failed; their later runs were not started.

    Raises:
        Interrupted: if it was asked to end; the runs keep their checkpoints.
    """
    make_folder(logs)
    waiting, running, failed = dict(lanes), dict[str, ForkServerProcess](), list[Path]()

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in running.values():
            process.terminate()
        raise KeyboardInterrupt

    over = set[str]()
    before = {}
    if threading.current_thread() is threading.main_thread():  # Python allows handlers there only
        before = {each: signal.signal(each, pass_on) for each in (signal.SIGINT, signal.SIGTERM)}
    with RunProgress() as progress:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    name = next(iter(waiting))
                    running[name] = _begin(waiting.pop(name), logs / f"{name}.log")
                time.sleep(_POLL_SECONDS)
                for name, process in list(running.items()):
                    if process.exitcode is not None:
                        _end(running.pop(name))
                        if process.exitcode:
                            failed.append(logs / f"{name}.log")
                            progress.say(f"{name} failed: see {failed[-1]}")
                _show(progress, stage, lanes, running, over)
        except KeyboardInterrupt:  # the lanes received it as well
            progress.say(
                "waiting for the runs to save a checkpoint; Ctrl-C again ends them immediately"
            )
            for process in running.values():
                process.join()
            raise Interrupted("interrupted", place) from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for process in running.values():
                _end(process)
    return failed


def _show(
    progress: RunProgress,
    stage: str,
    lanes: Lanes,
    running: Mapping[str, object],
    over: set[str],
) -> None:
    """Show how many runs are done and the progress of the others, with the ε spent.

    Args:
        over: runs known to be done, which are not checked again: checking all takes as long as a
            round.
    """
    facts, done, of = [], 0, 0
    for name, configs in lanes.items():
        runs = [each for each in configs if each.run_dir not in over]
        over.update(each.run_dir for each in runs if RunDir(Path(each.run_dir)).finished)
        left = [each for each in runs if each.run_dir not in over]
        done, of = done + len(configs) - len(left), of + len(configs)
        if left and name in running:
            facts.append(_progress(left[0]))
    progress.show(stage, done, of, "  ".join(facts))


def _progress(config: DictConfig) -> str:
    place = Path(config.run_dir)
    line = RunDir(place).last_spend()
    if line is None:
        return place.name
    spent = format_epsilon(line["epsilon"][config.privacy.adversary])
    judging = " judging" if line["round"] == _rounds(place) and config.evaluation.samples else ""
    return f"{place.name} {line['round']}/{_rounds(place)} ε {spent}{judging}"


@functools.cache
def _rounds(place: Path) -> int:
    """Return the number of rounds of a started run; some methods derive it."""
    return int(OmegaConf.create(read_yaml(place / "config.yaml")).rounds)


def _begin(configs: Sequence[DictConfig], log: Path) -> ForkServerProcess:
    _serve()
    chosen = [OmegaConf.to_container(config, resolve=True) for config in configs]
    process = _server.Process(
        target=_run_worker, args=(chosen, str(log), dict(os.environ)), daemon=False
    )
    process.start()
    return process


def _serve() -> None:
    """Start the process from which lanes are forked, unless it is running, with the same modules as
    here, independent of the working directory."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
    os.environ.update(PYTHONPATH=os.pathsep.join(sys.path), PYTHONSAFEPATH="1")
    try:
        _server.set_forkserver_preload(_IMPORTED)
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _end(process: ForkServerProcess) -> None:
    assert process.pid is not None
    with suppress(ProcessLookupError):  # with its children, which it would leave behind
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # it has no process group yet
    process.join()


def _run_worker(chosen: Sequence[Any], log: str, environ: Mapping[str, str]) -> None:
    """Run the process of a lane."""
    os.setpgid(0, 0)
    keep_freed_memory()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    with Path(os.devnull).open("rb") as nothing, Path(log).open("ab") as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def train_all() -> None:
        for each in chosen:
            config = OmegaConf.create(each)
            if (Path(config.run_dir) / "config.yaml").exists():
                config.resume, config.rounds = config.run_dir, None  # as many as planned
            print(summary(train(config)), flush=True)

    status = run_and_report(train_all)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of an engine may still be waiting for clients


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    while True:  # Python drops exceptions raised during finalization
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_RETRY_SECONDS)
