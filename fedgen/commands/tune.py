"""Run ``fedgen tune``: choose settings by private data, within ε.

    1  find ε of one run, so that the best of a random number of runs meets the target
    2  sample the number of runs and the setting of each; both stay secret
    3  train them; the last query of each asks for a noisy score
    4  publish the run with the highest score, at the ε of the selection

See ``fedgen.privacy.selection`` for the proof. The bound covers readers of the release. An
operator of the training observes all runs, whose ε add up.
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
from fedgen.errors import FedgenError, Interrupted
from fedgen.federation import checkpoint
from fedgen.methods.families.noisy_sums import RELATION
from fedgen.methods.families.scoring import SCORE
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.calibration import min_noise_multiplier
from fedgen.privacy.events import Selection, Spend, to_json, total
from fedgen.privacy.gaussian_dp import gaussian_epsilon
from fedgen.privacy.ledger import spend_from_json
from fedgen.privacy.selection import draw_count
from fedgen.randomness import RandomStreams
from fedgen.reporting.progress import RunProgress
from fedgen.reporting.summary import summary
from fedgen.run import setup
from fedgen.run.calibrate import planned_bound
from fedgen.run.resume import check_runtime_is_local
from fedgen.run.selected import SelectedRun
from fedgen.run.train import train
from fedgen.run.worker_pool import complete
from fedgen.storage.folders import make_folder, unused_folder
from fedgen.storage.io import check_no_links, read_json, write_atomic
from fedgen.storage.run_dir import RunDir
from fedgen.storage.schemas import validator

_TUNED = ("method", "warm_up", "rounds")
"""Settings in which the runs may differ."""
OWN_SETTINGS = ("grid", "runs", "shape", "score_share", "score_samples", "jobs")
"""Settings of the command, which its runs do not have."""
_TOLERANCE = 2e-3  # of ε, relative
_MOST_STEPS = 20  # of the search for ε of a run
_WIDEST = 3.0  # log of the target over ε of a run


@dataclass(frozen=True)
class Plan:
    """What one execution of the command does, fixed before any client is queried.

    event: cost of the release.
    epsilon: of one run.
    settings: one for each point of the grid.
    """

    event: Selection
    epsilon: float
    settings: list[DictConfig]


def tune(config: DictConfig, grid: Sequence[DictConfig]) -> str:
    """Train a random number of runs with settings of a grid, and publish the best one; return its
    results as text.

    Args:
        grid: settings of each point.

    Raises:
        FedgenError: for a mistake of the user, or if a run failed.
        Interrupted: if it was asked to end; the same command with ``run_dir`` resumes.
    """
    _check(config, grid)
    place = Path(config.run_dir or unused_folder(f"runs/tune-{config.names.data}"))
    check_no_links(place, "run_dir")
    plan = _plan(config, grid)
    make_folder(place)
    selected = RunDir(place / "selected")
    if not (selected.path / "config.yaml").exists():
        runs = _drawn_runs(config, plan, place)
        try:
            failed = complete(runs, place, config.jobs, "runs")
        except Interrupted as error:
            raise Interrupted("interrupted", place) from error
        if failed:
            problem = f"{len(failed)} of {len(runs)} runs failed, and all of them must finish"
            raise FedgenError(
                "tune", problem, f"see {failed[0]}, and repeat it with run_dir={place}"
            )
        _select(plan, [RunDir(Path(run.run_dir)) for run in runs.values()], selected)
    return _publish(config, plan, selected)


# --- checks ---------------------------------------------------------------------------------------


def _check(config: DictConfig, grid: Sequence[DictConfig]) -> None:
    """Raise FedgenError for settings that cannot be tuned."""
    privacy = config.privacy
    if privacy.adversary != "release":
        problem = "cannot be server: an operator observes all runs, and their number is unlimited"
        raise FedgenError("privacy.adversary", problem, "set it to release")
    for name in (*TARGETS[1:], "noise_multiplier"):
        if privacy.get(name) is not None:
            problem = "cannot be combined with fedgen tune, which finds the noise of each setting"
            raise FedgenError(f"privacy.{name}", problem, "use privacy.target_epsilon")
    if privacy.target_epsilon is None:
        raise FedgenError("privacy.target_epsilon", "is not given", "set it")
    for key in ("resume", "start", "group"):
        if config.get(key) is not None:
            raise FedgenError(key, "is not supported by fedgen tune", f"leave {key} out")
    if config.names.data == "public_facts":
        problem = "is not supported: nodes accept single runs"
        raise FedgenError("data", problem, "tune a simulation")
    check_runtime_is_local(config, "tune with a local runtime, not one at {}")
    if len(grid) < 2:
        raise FedgenError("grid", "contains one setting", "add others, or use fedgen train")
    if any(point in grid[:number] for number, point in enumerate(grid)):
        problem = "contains equal settings; those of the command line replace those of the grid"
        raise FedgenError("grid", problem, "give each setting in one place")
    for key in map(str, grid[0]):
        if key not in (*_TUNED, "names") and any(point[key] != config[key] for point in grid):
            problem = f"sets {key}, and only {', '.join(_TUNED)} may differ between runs"
            raise FedgenError("grid", problem, f"set {key} on the command line")


# --- plan -----------------------------------------------------------------------------------------


def _plan(config: DictConfig, grid: Sequence[DictConfig]) -> Plan:
    """Return the plan whose release meets the target.

    Raises:
        FedgenError: for an invalid setting, or if no ε of a run does.
    """
    target, delta = config.privacy.target_epsilon, config.privacy.delta
    data, shards = setup.partitioned_data(grid[0].copy())
    rows = len(shards[0]) if len(shards) == 1 else None
    found: dict[float, Plan] = {}

    def spend_of(run: DictConfig) -> Spend:
        resolved = setup.resolve_method(run, len(shards), rows, data.classes, data.shape)
        bound = planned_bound(resolved.method, run, server=False)
        assert bound.stop_probability == 0  # no sampled cohorts
        return bound.spend

    def cost_at(log_epsilon: float) -> float:
        of_run = math.exp(log_epsilon)
        runs = [_scored(config, point, of_run) for point in grid]
        spends = [spend_of(run.copy()) for run in runs]
        event = Selection.among(spends, config.runs, config.shape)
        cost = epsilon({event: 1}, delta, RELATION).or_infinity
        found[cost] = Plan(event, of_run, runs)
        progress.show("calibration", len(found), _MOST_STEPS, f"ε of a run {of_run:.3g}")
        return math.log(min(cost, 1e9) / (target * (1 - _TOLERANCE / 2)))

    with RunProgress() as progress:
        low, high = math.log(target) - _WIDEST, math.log(target)
        problem = f"{target:g} is too small to choose among runs (runs={config.runs:g})"
        too_small = FedgenError("privacy.target_epsilon", problem, "raise it, or lower runs")
        try:
            if cost_at(low) > 0:
                raise too_small
        except FedgenError as error:
            if error.key == "privacy.target_epsilon":
                raise too_small from error
            raise
        brentq(cost_at, low, high, xtol=_TOLERANCE / 4, maxiter=_MOST_STEPS, disp=False)
    plan = found[max(cost for cost in found if cost <= target)]
    for run in plan.settings:  # mistakes are reported before anything is spent
        setup.setup(run.copy())
    return plan


def _scored(config: DictConfig, point: DictConfig, of_run: float) -> DictConfig:
    """Return the settings of a run at one point of the grid, with a score.

    Args:
        of_run: ε of the run.
    """
    run, quiet = point.copy(), compose("config", ["evaluation=none", "logger=none"])
    share, delta = config.score_share * of_run, config.privacy.delta
    noise = min_noise_multiplier(lambda sigma: gaussian_epsilon(1 / sigma, delta), share)
    with open_dict(run):
        run.score = {"noise_multiplier": noise, "samples": config.score_samples, "run": None}
    run.privacy.target_epsilon = of_run
    run.rounds += 1  # for the score; a method with a fixed number ignores it
    run.evaluation, run.logger, run.evaluate_every = quiet.evaluation, quiet.logger, 0
    run.names.evaluation = run.names.logger = "none"
    return run


def _drawn_runs(config: DictConfig, plan: Plan, place: Path) -> dict[str, DictConfig]:
    """Return the settings of each run, drawn once: ``tuning.json`` keeps the draw.

    Raises:
        FedgenError: if the directory is of another plan.
    """
    path = place / "tuning.json"
    described = {
        "event": to_json(plan.event),
        "grid": grid_points(config.grid),
        "noise": config.privacy.noise,
        "seed": config.seed,
    }
    if path.exists():
        try:
            content = read_json(path)
            validator("tuning").validate(content)
            drawn = content["drawn"]
            same = content["plan"] == described and max(drawn) < len(plan.settings)
        except (ValueError, jsonschema.ValidationError) as error:
            raise FedgenError("run_dir", f"{path} was altered", "restore it") from error
        if not same:
            problem = f"{place} was started with other settings, or by another version"
            raise FedgenError("run_dir", problem, "choose another run_dir")
    else:
        source = RandomStreams.from_seed(config.seed, config.privacy.noise).secret("tune")
        count = draw_count(plan.event.mean, plan.event.shape, source)
        drawn = [source.randrange(len(plan.settings)) for _ in range(count)]
        content = {"schema": 1, "plan": described, "drawn": drawn}
        write_atomic(path, (json.dumps(content, indent=1) + "\n").encode())
    runs = {}
    for number, setting in enumerate(drawn):
        run = plan.settings[setting].copy()
        if config.privacy.noise == "seeded":
            run.score.run = number  # in mode secure, the digest of the settings is published
        run.run_dir = str(place / "runs" / f"{number}")
        runs[f"{number}"] = run
    return runs


# --- selection ------------------------------------------------------------------------------------


def _select(plan: Plan, runs: Sequence[RunDir], selected: RunDir) -> None:
    """Move the run with the highest score to ``selected``, with the record of the selection.

    Raises:
        FedgenError: if the cost of a run exceeds its plan, for example after a process died.
    """
    scores, spends = list[float](), dict[int, list[Spend]]()
    for run in runs:
        run.check_digests("run_dir")
        record, saved = run.privacy(), checkpoint.load(run.checkpoints)
        assert saved is not None
        cost = record["views"]["release"]["epsilon"]
        if cost is None or cost > plan.epsilon * (1 + _TOLERANCE) or record["without_bound"]:
            problem = f"{run.path} cost more than planned, because responses were lost or repeated"
            raise FedgenError("tune", problem, "start again with a new run_dir")
        scores.append(float(saved[0].server[SCORE]))
        for client, entry in record["clients"].items():
            spends.setdefault(int(client), []).append(spend_from_json(entry["events"]))
    best = runs[scores.index(max(scores))]
    together = {client: total(parts) for client, parts in spends.items()}
    SelectedRun(plan.event, len(plan.settings), together).write(best)
    (best.path / "epsilon.png").unlink(missing_ok=True)  # of this run alone
    best.path.rename(selected.path)


def _publish(config: DictConfig, plan: Plan, selected: RunDir) -> str:
    """Write the release of the selected run, evaluate it, and return its results as text."""
    number = int(Path(RunDir.open(selected.path, "run_dir")[1].run_dir).name)
    drawn = read_json(selected.path.parent / "tuning.json")["drawn"]
    label = " ".join(grid_points(config.grid)[drawn[number]])
    again = compose("config", ["logger=none"])
    again.resume, again.rounds, again.names.runtime = str(selected.path), None, None
    train(again)
    if config.evaluation.samples:
        evaluation = {"evaluation": config.evaluation, "names": {}, "seed": config.seed}
        where = {"run": str(selected.path), "samples": None, "device": config.device}
        evaluate(OmegaConf.create({**evaluation, **where}))
    return "\n".join(
        [
            summary(selected.path),
            f"selected from a grid of {len(plan.settings)} settings: {label}",
            f"each run had ε = {plan.epsilon:.3g}; the selection is inside the ε of the release",
            f"publish {selected.public} only: the number of runs must stay secret",
        ]
    )
