"""Run ``fedgen tune``: select settings on private data; ε covers the selection.

    1  find the ε of one run at which the release of the selected run meets the target
    2  sample the number of runs and the grid point of each; both stay secret
    3  train them; the last query of each asks for a noisy score
    4  publish the run with the highest score

See ``fedgen.privacy.selection`` for the proof. The bound covers readers of the release. The server
observes all runs, and the ε against it is that of all runs composed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jsonschema
from omegaconf import DictConfig, OmegaConf, open_dict
from scipy.optimize import brentq

from fedgen.commands.evaluate import evaluate
from fedgen.config.compose import compose
from fedgen.config.overrides import grid_points
from fedgen.config.schema import TARGETS
from fedgen.data.catalogue import data_label
from fedgen.errors import FedgenError, Interrupted
from fedgen.federation import checkpoint
from fedgen.methods.families.noisy_sums import RELATION
from fedgen.methods.families.scoring import SCORE
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.calibration import min_noise_multiplier
from fedgen.privacy.events import Selection, Spend, to_json, total
from fedgen.privacy.gaussian_dp import gaussian_epsilon
from fedgen.privacy.ledger import spend_from_json
from fedgen.privacy.selection import sample_count
from fedgen.randomness import RandomStreams
from fedgen.reporting.progress import RunProgress
from fedgen.reporting.summary import summary
from fedgen.run import setup
from fedgen.run.calibrate import planned_bound
from fedgen.run.resume import check_runtime_is_local
from fedgen.run.selection_record import SelectionRecord, read_selection_record
from fedgen.run.train import train
from fedgen.run.worker_pool import complete
from fedgen.storage.folders import locked_folder, make_folder, unused_folder
from fedgen.storage.io import check_no_links, read_json, write_atomic
from fedgen.storage.run_dir import RunDir
from fedgen.storage.schemas import validator

_TUNED = ("method", "warm_up", "rounds")
"""Settings in which grid points may differ."""
OWN_SETTINGS = ("grid", "mean_runs", "shape", "score_epsilon_ratio", "score_samples", "jobs")
"""Settings of the command that its runs do not have."""
_TOLERANCE = 2e-3  # of ε, relative
_MAX_STEPS = 20  # of the search for the ε of a run
_MAX_LOG_RATIO = 3.0  # log of the target over the ε of a run


@dataclass(frozen=True)
class Plan:
    """What one execution of the command does, fixed before any client is queried.

    event: event of the release.
    run_epsilon: ε of each run.
    configs: settings of a run at each grid point.
    """

    event: Selection
    run_epsilon: float
    configs: list[DictConfig]


def tune(config: DictConfig, grid: Sequence[DictConfig]) -> str:
    """Train a random number of runs with settings of a grid, and publish the one with the highest
    score; return its results as text.

    Args:
        grid: settings of each grid point.

    Raises:
        FedgenError: for invalid settings, or if a run failed.
        Interrupted: if a signal stopped it; the same command with ``run_dir`` resumes.
    """
    _check_settings(config, grid)
    if config.run_dir is not None:
        check_no_links(Path(config.run_dir), "run_dir")
    plan = _plan(config, grid)
    tune_dir = Path(config.run_dir or unused_folder(f"runs/tune-{data_label(config)}"))
    make_folder(tune_dir)
    with locked_folder(tune_dir, "run_dir"):
        runs = _sample_or_load_runs(config, plan, tune_dir)
        selected = RunDir(tune_dir / "selected")
        if not (selected.path / "config.yaml").exists():
            _train_runs(config, runs, tune_dir)
            _select_run(config, plan, runs, selected)
        return _publish(config, plan, selected)


# --- checks ---------------------------------------------------------------------------------------


def _check_settings(config: DictConfig, grid: Sequence[DictConfig]) -> None:
    """Raise FedgenError for settings that cannot be tuned."""
    privacy = config.privacy
    if privacy.adversary != "release":
        problem = "must be release; the server observes every run, and their number has no limit"
        raise FedgenError("privacy.adversary", problem, "set it to release")
    for name in (*TARGETS[1:], "noise_multiplier"):
        if privacy.get(name) is not None:
            problem = "cannot be combined with fedgen tune, which finds the noise of each run"
            raise FedgenError(f"privacy.{name}", problem, "use privacy.target_epsilon")
    if privacy.target_epsilon is None:
        raise FedgenError("privacy.target_epsilon", "is not given", "set it")
    if privacy.budget_epsilon is not None:
        problem = "cannot be combined with fedgen tune: which runs fit must not decide the result"
        raise FedgenError("privacy.budget_epsilon", problem, "see fedgen account spent")
    for key in ("resume", "start", "group"):
        if config.get(key) is not None:
            raise FedgenError(key, "is not supported by fedgen tune", f"leave {key} out")
    check_runtime_is_local(config, "tune with a local runtime, not one at {}")
    if len(grid) < 2:
        raise FedgenError("grid", "contains one point", "add others, or use fedgen train")
    if any(point in grid[:number] for number, point in enumerate(grid)):
        problem = "contains equal points, possibly because the command line overrides its keys"
        raise FedgenError("grid", problem, "set each key in one place")
    for key in map(str, grid[0]):
        if key not in (*_TUNED, "names") and any(point[key] != config[key] for point in grid):
            problem = f"sets {key}, and only {', '.join(_TUNED)} may differ between runs"
            raise FedgenError("grid", problem, f"set {key} on the command line")


# --- plan -----------------------------------------------------------------------------------------


def _plan(config: DictConfig, grid: Sequence[DictConfig]) -> Plan:
    """Return the plan with which the release meets the target.

    Raises:
        FedgenError: for an invalid setting, or if no ε of a run meets the target.
    """
    target, delta = config.privacy.target_epsilon, config.privacy.delta
    data, shards = setup.partitioned_data(grid[0].copy())
    if data.is_remote:
        problem = "cannot be at sites: nodes accept single runs, not selections"
        raise FedgenError("data", problem, "tune a simulation")
    rows = len(shards[0]) if len(shards) == 1 else None
    plans: dict[float, Plan] = {}  # by ε of the release

    def spend_of(run: DictConfig) -> Spend:
        resolved = setup.resolve_method(run, len(shards), rows, data.classes, data.shape)
        bound = planned_bound(resolved.method, run, server=False)
        assert bound.stop_probability == 0  # no sampled cohorts
        return bound.spend

    def log_ratio(log_epsilon: float) -> float:
        """Return the log of the ε of the release over the target."""
        run_epsilon = math.exp(log_epsilon)
        runs = [_run_config(config, point, run_epsilon) for point in grid]
        spends = [spend_of(run.copy()) for run in runs]
        event = Selection.of_spends(spends, config.mean_runs, config.shape)
        released = epsilon({event: 1}, delta, RELATION).or_infinity
        plans[released] = Plan(event, run_epsilon, runs)
        progress.show("calibration", len(plans), _MAX_STEPS, f"ε of a run {run_epsilon:.3g}")
        return math.log(min(released, 1e9) / (target * (1 - _TOLERANCE / 2)))

    with RunProgress() as progress:
        low, high = math.log(target) - _MAX_LOG_RATIO, math.log(target)
        problem = (
            f"{target:g} is too small for a selection with a mean of {config.mean_runs:g} runs"
        )
        too_small = FedgenError("privacy.target_epsilon", problem, "raise it, or lower mean_runs")
        try:
            if log_ratio(low) > 0:
                raise too_small
        except FedgenError as error:
            if error.key == "privacy.target_epsilon":
                raise too_small from error
            raise
        brentq(log_ratio, low, high, xtol=_TOLERANCE / 4, maxiter=_MAX_STEPS, disp=False)
    plan = plans[max(released for released in plans if released <= target)]
    for run in plan.configs:  # mistakes are reported before anything is spent
        setup.setup(run.copy())
    return plan


def _run_config(config: DictConfig, point: DictConfig, run_epsilon: float) -> DictConfig:
    """Return the settings of a run with a score at a grid point."""
    run, no_evaluation = point.copy(), compose("config", ["evaluation=none", "logger=none"])
    score_epsilon, delta = config.score_epsilon_ratio * run_epsilon, config.privacy.delta
    noise = min_noise_multiplier(lambda sigma: gaussian_epsilon(1 / sigma, delta), score_epsilon)
    with open_dict(run):
        run.score = {"noise_multiplier": noise, "samples": config.score_samples, "run_index": None}
    run.privacy.target_epsilon = run_epsilon
    if run.rounds is not None:
        run.rounds += 1  # for the score
    run.evaluation, run.logger = no_evaluation.evaluation, no_evaluation.logger
    run.evaluate_every = 0
    run.names.evaluation = run.names.logger = "none"
    return run


def _sample_or_load_runs(config: DictConfig, plan: Plan, tune_dir: Path) -> dict[str, DictConfig]:
    """Return the settings of each run. They are sampled once, and stored in ``tuning.json``.

    Raises:
        FedgenError: if the directory was started with another plan, or ``tuning.json`` is invalid.
    """
    path = tune_dir / "tuning.json"
    described = {
        "event": to_json(plan.event),
        "grid": grid_points(config.grid),
        "noise": config.privacy.noise,
        "seed": config.seed,
        "data": OmegaConf.to_container(config.data, resolve=True),
        "partition": OmegaConf.to_container(config.partition, resolve=True),
    }
    if path.exists():
        try:
            content = read_json(path)
            validator("tuning").validate(content)
        except (ValueError, jsonschema.ValidationError) as error:
            raise FedgenError("run_dir", f"{path} was altered", "restore it") from error
        sampled = content["sampled_points"]
        if content["plan"] != described or max(sampled) >= len(plan.configs):
            problem = f"{tune_dir} was started with other settings, or by another version"
            raise FedgenError("run_dir", problem, "choose another run_dir")
    else:
        if any(tune_dir.iterdir()):  # sampled again, the number would depend on earlier results
            problem = f"{tune_dir} is not empty and has no tuning.json"
            raise FedgenError("run_dir", problem, "restore it, or choose another run_dir")
        source = RandomStreams.from_seed(config.seed, config.privacy.noise).secret("tune")
        count = sample_count(plan.event.mean, plan.event.shape, source)
        sampled = [source.randrange(len(plan.configs)) for _ in range(count)]
        content = {"schema": 1, "plan": described, "sampled_points": sampled}
        write_atomic(path, (json.dumps(content, indent=1) + "\n").encode())
    runs = {}
    for index, point in enumerate(sampled):
        run = plan.configs[point].copy()
        if config.privacy.noise == "seeded":
            # with secure noise, the published digest of the settings would reveal a lower limit on
            # the number of runs
            run.score.run_index = index
        run.run_dir = str(tune_dir / "runs" / f"{index}")
        runs[f"{index}"] = run
    return runs


def _train_runs(config: DictConfig, runs: dict[str, DictConfig], tune_dir: Path) -> None:
    """Train the missing runs, and resume interrupted ones.

    Raises:
        FedgenError: if a run failed: a selection among the others is not that of the theorem.
        Interrupted: if a signal stopped it.
    """
    try:
        failed = complete(runs, tune_dir, config.jobs, "runs")
    except Interrupted as error:
        raise Interrupted("interrupted", tune_dir) from error
    if failed:
        problem = f"{len(failed)} of {len(runs)} runs failed, and every run must finish"
        remedy = f"fix the cause in {failed[0]}, then repeat the command with run_dir={tune_dir}"
        raise FedgenError("tune", problem, remedy)


# --- selection ------------------------------------------------------------------------------------


def _select_run(
    config: DictConfig, plan: Plan, runs: dict[str, DictConfig], selected: RunDir
) -> None:
    """Move the run with the highest score to ``selected``, with the record of the selection.

    Raises:
        FedgenError: if a run exceeds its planned ε.
    """
    scores, client_spends = list[float](), dict[int, list[Spend]]()
    run_dirs = [RunDir(Path(run.run_dir)) for run in runs.values()]
    for run_dir in run_dirs:
        run_dir.check_digests("run_dir")
        privacy, saved = run_dir.privacy(), checkpoint.load(run_dir.checkpoints)
        assert saved is not None
        spent = privacy["views"]["release"]["epsilon"]
        limit = plan.run_epsilon * (1 + _TOLERANCE)
        if spent is None or spent > limit or privacy["without_bound"]:
            problem = f"{run_dir.path} exceeds the planned ε, e.g. because responses were repeated"
            raise FedgenError("tune", problem, "start again with a new run_dir")
        scores.append(float(saved[0].server[SCORE]))
        if privacy["stopped"] or not math.isfinite(scores[-1]):
            problem = f"{run_dir.path} ended without a score, after responses had to be repeated"
            raise FedgenError("tune", problem, "start again with a new run_dir")
        for client, entry in privacy["clients"].items():
            client_spends.setdefault(int(client), []).append(spend_from_json(entry["events"]))
    index = scores.index(max(scores))
    sampled = read_json(selected.path.parent / "tuning.json")["sampled_points"]
    totals = {client: total(spends) for client, spends in client_spends.items()}
    label = " ".join(grid_points(config.grid)[sampled[index]])
    record = SelectionRecord(plan.event, len(plan.configs), label, totals)
    record.write(run_dirs[index])
    (run_dirs[index].path / "epsilon.png").unlink(missing_ok=True)  # of this run alone
    run_dirs[index].path.rename(selected.path)


def _publish(config: DictConfig, plan: Plan, selected: RunDir) -> str:
    """Write the release of the selected run, evaluate it, and return its results as text."""
    record = read_selection_record(selected)
    assert record is not None
    resumed = compose("config", ["logger=none"])
    resumed.resume, resumed.rounds, resumed.names.runtime = str(selected.path), None, None
    train(resumed)
    if config.evaluation.samples:
        evaluation = {"evaluation": config.evaluation, "names": {}, "seed": config.seed}
        target = {"run": str(selected.path), "samples": None, "device": config.device}
        evaluate(OmegaConf.create({**evaluation, **target}))
    lines = [
        summary(selected.path),
        f"selected from a grid of {record.grid_size} points: {record.grid_point}",
        f"each run had ε = {plan.run_epsilon:.3g}; the ε of the release covers the selection",
    ]
    if config.privacy.noise == "secure":
        lines += [f"publish {selected.public} only: the number of runs must stay secret"]
    return "\n".join(lines)
