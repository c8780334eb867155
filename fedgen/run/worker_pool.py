"""Train a set of runs in several processes in parallel: sweeps, benchmarks, and the generators of
``fedgen debug``.

Each run has a process of its own, a fork of a process with all imports, so that it starts
immediately. Ctrl-C reaches it through its parent; if the parent ends, the run ends after its round
with a checkpoint.
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
from fedgen.config import validation
from fedgen.errors import FedgenError, Interrupted, run_and_report
from fedgen.reporting.progress import RunProgress, format_epsilon
from fedgen.reporting.summary import summary
from fedgen.run.resume import check_same_settings
from fedgen.run.train import train
from fedgen.storage.folders import make_folder
from fedgen.storage.io import read_yaml
from fedgen.storage.run_dir import RunDir

_server = multiprocessing.get_context("forkserver")
_IMPORTED = ["fedgen.run.train", "matplotlib.figure", "sklearn"]
_POLL_SECONDS = 0.2
_RETRY_SECONDS = 20.0  # a second signal ends a run immediately

Runs = Mapping[str, DictConfig]
"""Settings of each run, with its ``run_dir``, by name."""


def complete(runs: Runs, place: Path, jobs: object, stage: str) -> list[Path]:
    """Train the missing runs of a set, and resume the interrupted ones. Nothing runs if the
    settings of one are not valid, or are not those that it was started with.

    Args:
        place: folder of the runs, without links, where the same command resumes.
        jobs: see ``worker_count``.
        stage: description of the runs for the progress line.

    Returns:
        The logs of failed runs, ``logs/NAME.log``.

    Raises:
        FedgenError: for a mistake of the user.
        Interrupted: if it was asked to end; the runs keep their checkpoints.
    """
    for config in runs.values():
        validation.check(config)
    for config in runs.values():
        if (Path(config.run_dir) / "config.yaml").exists():
            check_same_settings(config, Path(config.run_dir))
    count = worker_count(jobs, list(runs.values()))
    missing = {name: c for name, c in runs.items() if not RunDir(Path(c.run_dir)).finished}
    return _train_all(missing, place, count, stage) if missing else []


def worker_count(jobs: object, configs: Sequence[DictConfig]) -> int:
    """Return the number of runs in parallel: as requested, or as many as fit the cores.

    Raises:
        FedgenError: for an invalid number.
    """
    if jobs is None:
        threads: int = max(config.runtime.threads for config in configs)
        return max(1, (os.cpu_count() or 1) // threads)
    if not isinstance(jobs, int) or not 1 <= jobs <= 1024:
        raise FedgenError(
            "jobs", f"must be a whole number from 1 to 1024, got {jobs!r}", "correct it"
        )
    return jobs


def _train_all(runs: Runs, place: Path, jobs: int, stage: str) -> list[Path]:
    """Train all runs, or resume those that were started, in ``jobs`` processes; see
    ``complete``."""
    logs = place / "logs"
    make_folder(logs)
    waiting, running, failed = dict(runs), dict[str, ForkServerProcess](), list[Path]()

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in running.values():
            process.terminate()
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():  # Python allows handlers there only
        before = {
            number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)
        }
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
                done = len(runs) - len(waiting) - len(running)
                texts = [_progress(runs[name]) for name in running]
                progress.show(stage, done, len(runs), "  ".join(texts))
        except KeyboardInterrupt:  # the runs received it as well
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


def _begin(config: DictConfig, log: Path) -> ForkServerProcess:
    _serve()
    settings = OmegaConf.to_container(config, resolve=True)
    process = _server.Process(
        target=_run_worker, args=(settings, str(log), dict(os.environ)), daemon=False
    )
    process.start()
    return process


def _serve() -> None:
    """Start the process from which runs are forked, unless it is running, with the same modules as
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


def _run_worker(settings: Any, log: str, environ: Mapping[str, str]) -> None:
    """Train a run in this process."""
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

    def run() -> None:
        config = OmegaConf.create(settings)
        if (Path(config.run_dir) / "config.yaml").exists():
            config.resume, config.rounds = config.run_dir, None  # as many as planned
        print(summary(train(config)), flush=True)

    status = run_and_report(run)
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
