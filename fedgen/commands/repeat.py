"""Run ``fedgen repeat``: train a rehearsal again with other seeds, and evaluate each repetition.

A rehearsal is evaluated with one sample of the noise. A release has other noise, and is not
evaluated.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from fedgen.config.compose import compose
from fedgen.errors import FedgenError, Interrupted
from fedgen.run.resume import check_runtime_is_local, open_run
from fedgen.run.worker_pool import complete
from fedgen.storage.folders import make_folder
from fedgen.storage.run_dir import RunDir

_FOLDER = "repetitions"


def repeat(config: DictConfig) -> str:
    """Return the range of gen2real accuracy over a run and its repetitions, as text. Finished
    repetitions are kept in the run directory.

    Raises:
        FedgenError: for a run that cannot be repeated, or if a repetition failed.
    """
    run_dir, trained, _ = open_run(Path(config.run), "run")
    problem, remedy = None, "take a rehearsal: a run of fedgen train with evaluation"
    if trained.get("audit") is not None or trained.get("score") is not None:
        problem = "was an audit, or selected by fedgen tune"
    elif trained.privacy.noise != "seeded":
        problem = "has secret noise"
    elif not trained.evaluation.samples or not trained.evaluation.classifiers:
        problem = "has no evaluation by classifiers"
    elif not run_dir.finished:
        problem, remedy = "is not finished", f"finish it: fedgen train resume={run_dir.path}"
    if problem is not None:
        raise FedgenError("run", f"{run_dir.path} {problem}", remedy)
    check_runtime_is_local(trained, "repeat a run with a local runtime, not one at {}")
    place = run_dir.path / _FOLDER
    try:
        make_folder(place)
    except FedgenError as error:
        raise FedgenError("run", error.problem, "make room for this folder") from error
    runs = {f"{n}": _repetition(trained, n, place / f"{n}") for n in range(config.repetitions)}
    try:
        failed = complete(runs, place, config.jobs, "repetitions")
    except FedgenError as error:
        if error.key == "run_dir":
            raise FedgenError("run", error.problem, f"move {place} away") from error
        raise
    except Interrupted as error:
        raise Interrupted(f"{error}; repeat the command to resume") from error
    if failed:
        problem = f"{len(failed)} of {len(runs)} failed"
        raise FedgenError("repetitions", problem, f"see {failed[0]}")
    return "\n".join(describe_range(run_dir))


def _repetition(trained: DictConfig, number: int, place: Path) -> DictConfig:
    """Return the settings of a repetition: another seed, and only what its evaluation needs."""
    config, quiet = trained.copy(), compose("config", ["logger=none"])
    config.seed = trained.seed + 1 + number
    config.logger, config.names.logger, config.evaluate_every = quiet.logger, "none", 0
    evaluation = config.evaluation
    evaluation.real2gen, evaluation.judge = [], False
    evaluation.fid, evaluation.leakage = False, False
    config.run_dir = str(place)
    return config


def describe_range(run_dir: RunDir) -> list[str]:
    """Return a line per classifier: the range over a run and its finished repetitions; none without
    repetitions."""
    runs = [run_dir, *map(RunDir, sorted((run_dir.path / _FOLDER).glob("[0-9]*")))]
    finished = [run.results()["gen2real"] for run in runs if run.finished]
    if len(finished) < 2:
        return []
    lines = []
    for name in finished[0]:
        values = 100 * np.array([scores[name]["mean"] for scores in finished if name in scores])
        lines.append(
            f"gen2real {name}: {values.min():.1f} to {values.max():.1f} % in {len(values)} runs "
            f"with other seeds, mean {values.mean():.1f} %, this run {values[0]:.1f} %"
        )
    return lines
