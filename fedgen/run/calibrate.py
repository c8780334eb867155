"""Calibrate the noise multiplier and the budget of a run before any client is queried."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from omegaconf import DictConfig

from fedgen.config.schema import TARGETS
from fedgen.errors import FedgenError
from fedgen.methods.api import Method
from fedgen.privacy.accounting import Accountant, epsilon, rough_epsilon
from fedgen.privacy.budget import TAIL, Bound, Budget, bound_of, release_bound, smaller_bound
from fedgen.privacy.calibration import max_repetitions, min_noise_multiplier
from fedgen.privacy.events import canonical
from fedgen.privacy.guarantee import Guarantee

UNLIMITED = 10**12  # query samples of a client, where the bound does not depend on them


@dataclass(frozen=True)
class Privacy:
    """Privacy parameters of a run, fixed before it starts."""

    delta: float
    noise: Literal["seeded", "secure"]
    noise_multiplier: float | None
    budget: Budget
    protected: int | None = None  # public number of records, clients or persons


@dataclass(frozen=True)
class OtherTarget:
    """Target other than ε: its setting, its value, and the measure of a bound that it limits."""

    key: str
    value: float
    measure: Callable[[Guarantee], float]

    def planned(self, method: Method, config: DictConfig, server: bool) -> float:
        """Return the measure of the whole run against one adversary, by the points that are
        published (``Guarantee.thinned``); infinity without a bound."""
        bound = planned_bound(method, config, server)
        curve = bound.guarantee(config.privacy.delta, method.plan.relation)
        return math.inf if curve is None else self.measure(curve.thinned())


def other_target(config: DictConfig) -> OtherTarget | None:
    """Return the target other than ε, None if there is none.

    Raises:
        FedgenError: for several targets, or one that no run reaches.
    """
    privacy, fpr = config.privacy, config.privacy.get("at_fpr")
    measures: dict[str, Callable[[Guarantee], float]] = {
        "target_mu": lambda curve: curve.dominating_mu(),
        "target_advantage": lambda curve: curve.advantage,
        "target_tpr": lambda curve: curve.tpr(fpr),
    }
    given = [name for name in TARGETS if privacy.get(name) is not None]
    if len(given) > 1:
        problem = f"cannot be combined with privacy.{given[0]}"
        raise FedgenError(f"privacy.{given[1]}", problem, "set one of them to null")
    if not given or given == ["target_epsilon"]:
        return None
    [name] = given
    if name == "target_tpr" and privacy.target_tpr <= fpr:
        problem = f"{privacy.target_tpr:g} is not above privacy.at_fpr={fpr:g}, the rate by chance"
        raise FedgenError("privacy.target_tpr", problem, "raise it, or lower privacy.at_fpr")

    return OtherTarget(f"privacy.{name}", privacy[name], measures[name])


def _noise_for_target(
    config: DictConfig, method: Callable[[float | None], Method], server: bool
) -> float:
    """Return the smallest noise multiplier that meets the target."""
    if (other := other_target(config)) is not None:
        return min_noise_multiplier(
            lambda sigma: other.planned(method(sigma), config, server),
            other.value,
            tolerance=other.value / 500,
            key=other.key,
        )
    return min_noise_multiplier(
        lambda sigma: planned_epsilon(method(sigma), config, server, epsilon),
        config.privacy.target_epsilon,
        lambda sigma: planned_epsilon(method(sigma), config, server, rough_epsilon),
    )


def calibrate(config: DictConfig, method: Callable[[float | None], Method]) -> Privacy:
    """Return the noise multiplier and the budget. A target alone determines the noise, a noise
    multiplier alone allows all rounds, and a noise multiplier with a target for ε ends the run
    before it exceeds the target.

    Raises:
        FedgenError: if the target cannot be reached, or neither is given.
    """
    noise, other = config.privacy.noise_multiplier, other_target(config)
    target = config.privacy.target_epsilon if other is None else other.value
    delta, rounds, mode = config.privacy.delta, config.rounds, config.privacy.noise
    plan = method(None).plan
    trusted = method(1.0).plan.is_trusted  # without noise, trust is irrelevant
    all_rows = plan.samples_per_round * plan.queries_in(rounds)
    if trusted:
        all_rows = UNLIMITED  # in mode secure, repeated rounds count too, and need not end a run
    unlimited = Budget(rounds, all_rows, 0.0)
    if rounds < plan.min_rounds:
        problem = (
            f"{rounds} are too few: the generator is not trained before round {plan.min_rounds}"
        )
        raise FedgenError("rounds", problem, "raise it")
    if config.names.privacy == "none":
        if target is not None or noise is not None:
            raise FedgenError("privacy", "none has no target and no noise", "use privacy=dp")
        return Privacy(delta, mode, None, unlimited)
    if other is not None and noise is not None:
        problem = f"cannot be combined with {other.key}, which determines the noise"
        raise FedgenError("privacy.noise_multiplier", problem, "set one of them to null")
    if target is None and noise is None:
        raise FedgenError(
            "privacy",
            "neither privacy.target_epsilon nor privacy.noise_multiplier is given",
            "give one, or take privacy=none",
        )
    if target is None:
        return Privacy(delta, mode, noise, unlimited)
    server = config.privacy.adversary == "server"
    if server and trusted:
        problem = "cannot be server: clients trust it, and there is no bound against it"
        raise FedgenError("privacy.adversary", problem, "set it to release")
    try:
        if noise is None:
            noise = _noise_for_target(config, method, server)
            return Privacy(delta, mode, noise, planned_budget(method(noise), rounds))
        budget = affordable_rounds(method(noise), config, server, target)
        if budget.rounds < plan.min_rounds:
            raise FedgenError(
                "privacy.target_epsilon",
                f"is spent after {budget.rounds} rounds; the method needs {plan.min_rounds}",
                "raise it, or privacy.noise_multiplier",
            )
        return Privacy(delta, mode, noise, budget)
    except FedgenError as error:
        if config.warm_up.method is None or not error.key.startswith("privacy.target_"):
            raise
        others = "" if noise is None else "privacy.noise_multiplier, "
        remedy = (
            f"raise it, {others}or warm_up.noise_multiplier; noise in later rounds cannot lower "
            "the ε of the warm-up"
        )
        raise FedgenError(error.key, error.problem, remedy) from error


@dataclass(frozen=True)
class Progress:
    """Upper bounds on the rounds that a run has started, and on the query samples that a client was
    charged for."""

    rounds: int
    samples: int


def calibrate_after_dropout(
    config: DictConfig, method: Method, privacy: Privacy, progress: Progress
) -> Privacy:
    """Return the privacy of a run after a dropout, when its method costs more than planned. With a
    target and a noise multiplier, the run ends earlier. If it had gone further before the dropout,
    the budget remains: as the time of the dropout may depend on samples, only the ε of all planned
    rounds covers it.

    Raises:
        FedgenError: if no client was charged, and the first round exceeds the target.
    """
    target = config.privacy.target_epsilon
    if target is None or config.privacy.noise_multiplier is None:
        return privacy
    try:
        budget = affordable_rounds(method, config, config.privacy.adversary == "server", target)
    except FedgenError as error:
        if progress.samples:
            return privacy
        problem = (
            "a missing response may have revealed sampled cohorts: the remaining rounds "
            f"would exceed ε = {target:g}"
        )
        raise FedgenError("resume", problem, "start a new run") from error
    spent = progress.samples > budget.samples_per_client or progress.rounds > budget.rounds
    return privacy if spent else replace(privacy, budget=budget)


def planned_budget(method: Method, rounds: int) -> Budget:
    """Return the budget for which noise is calibrated: the maximum number of rounds, and of query
    samples of any client, except with a small probability of stopping. The number of queries to a
    client costs nothing if the server is trusted."""
    queries = method.plan.queries_in(rounds)
    if method.plan.is_trusted:
        return Budget(rounds, UNLIMITED, 0.0)
    rows = method.cohort.max_load(method.plan.samples_per_round, queries, TAIL)
    stop = method.cohort.stop_probability(method.plan.samples_per_round, queries, rows)
    return Budget(rounds, rows, stop)


def planned_epsilon(method: Method, config: DictConfig, server: bool, by: Accountant) -> float:
    """Return the ε of the whole run against one adversary."""
    return planned_bound(method, config, server, by).epsilon.or_infinity


def planned_bound(
    method: Method, config: DictConfig, server: bool, by: Accountant = epsilon
) -> Bound:
    """Return the bound of the whole run against one adversary."""
    budget, delta = planned_budget(method, config.rounds), config.privacy.delta
    return bound_for(method, budget, config.rounds, budget.samples_per_client, delta, server, by)


def bound_for(
    method: Method,
    budget: Budget,
    rounds: int,
    rows: int,
    delta: float,
    server: bool,
    by: Accountant = epsilon,
) -> Bound:
    """Return the bound against one adversary after ``rounds`` rounds, for a client with ``rows``
    query samples."""
    plan, relation = method.plan, method.plan.relation
    if plan.prior_event is not None:
        return bound_of(canonical(plan.prior_event), delta, relation, by)
    against_server = bound_of(canonical(plan.server_event(rows)), delta, relation, by)
    if server or plan.release_event is None:
        return against_server
    event = plan.release_event(rounds)
    against_reader = release_bound(event, delta, relation, budget.stop_probability, by)
    return smaller_bound(against_reader, against_server)


def affordable_rounds(method: Method, config: DictConfig, server: bool, target: float) -> Budget:
    """Return the limit that a given noise multiplier allows: query samples per client (against the
    server), or rounds."""
    per_round, delta = method.plan.samples_per_round, config.privacy.delta
    relation = method.plan.relation
    queries = method.plan.queries_in(config.rounds)
    all_rows = per_round * queries
    if server or method.plan.release_event is None:

        def spent(rows: int) -> float:
            return epsilon(
                canonical(method.plan.server_event(rows)), delta, method.plan.relation
            ).or_infinity

        # if all clients respond to everything, only whole rounds are spent
        all_clients = not method.cohort.is_sampled
        unit = per_round if all_clients else 1
        rows = unit * max_repetitions(lambda count: spent(unit * count), target, all_rows // unit)
        stop = method.cohort.stop_probability(per_round, queries, rows)
        enough = rows == all_rows or not all_clients
        rounds = config.rounds if enough else method.plan.rounds_for(rows // per_round)
        stop = 0.0 if all_clients else stop
        if rows == 0:
            raise _unreachable(target)
        return Budget(rounds, rows, stop)
    release = method.plan.release_event
    rounds = max_repetitions(
        lambda count: epsilon(canonical(release(count)), delta, relation).or_infinity,
        target,
        config.rounds,
    )
    if rounds == 0:
        raise _unreachable(target)
    return Budget(rounds, UNLIMITED if method.plan.is_trusted else all_rows, 0.0)


def _unreachable(target: float) -> FedgenError:
    return FedgenError(
        "privacy.target_epsilon",
        f"{target:g} is spent by the first round at this noise",
        "raise privacy.noise_multiplier, or leave it out to solve for it",
    )


def planned_bounds(method: Method, privacy: Privacy) -> dict[str, Bound]:
    """Return the bound by adversary, ``server`` and ``release``, of a run that spends its whole
    budget."""
    budget = privacy.budget
    return {
        name: bound_for(
            method,
            budget,
            budget.rounds,
            budget.samples_per_client,
            privacy.delta,
            name == "server",
        )
        for name in ("server", "release")
    }
