"""How much noise a run has, and how far it goes: solved before anything is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from omegaconf import DictConfig

from fedgen.errors import FedgenError
from fedgen.method import Method
from fedgen.privacy.accounting import Accountant, Epsilon, epsilon, rough_epsilon
from fedgen.privacy.budget import TAIL, Budget, release_epsilon, smaller
from fedgen.privacy.calibration import least_noise, most_repetitions
from fedgen.privacy.events import canonical

UNLIMITED = 10**12  # rows of a client, where a bound does not depend on them


@dataclass(frozen=True)
class Privacy:
    """The privacy of a run, decided before it starts."""

    delta: float
    noise: Literal["seeded", "secure"]
    noise_multiplier: float | None
    budget: Budget
    protected: int | None = None  # public number of records, clients or persons


def decide(config: DictConfig, method: Callable[[float | None], Method]) -> Privacy:
    """The noise and the budget: a target solves for the noise; noise and target end the run in
    time; noise alone runs all rounds.

    Raises:
        FedgenError: if the target cannot be reached, or neither is given.
    """
    target, noise = config.privacy.target_epsilon, config.privacy.noise_multiplier
    delta, rounds = config.privacy.delta, config.rounds
    plan = method(None).plan
    trusted = method(1.0).plan.trusted  # without noise, nobody is trusted with it
    all_rows = plan.rows_per_round * plan.asked(rounds)
    if trusted:
        all_rows = UNLIMITED  # in mode secure rounds done again count too, and need not end a run
    unlimited = Budget(rounds, all_rows, 0.0)
    mode = config.privacy.noise
    if rounds < plan.least:
        problem = f"{rounds} are too few: the generator learns nothing before round {plan.least}"
        raise FedgenError("rounds", problem, "raise it")
    if config.names.privacy == "none":
        if target is not None or noise is not None:
            raise FedgenError("privacy", "none has no target and no noise", "take privacy=dp")
        return Privacy(delta, mode, None, unlimited)
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
            noise = least_noise(
                lambda sigma: planned(method(sigma), config, server, epsilon),
                target,
                lambda sigma: planned(method(sigma), config, server, rough_epsilon),
            )
            return Privacy(delta, mode, noise, calibrated(method(noise), rounds))
        budget = affordable(method(noise), config, server, target)
        if budget.rounds < plan.least:
            raise FedgenError(
                "privacy.target_epsilon",
                f"is spent after {budget.rounds} of the {plan.least} rounds that anything comes of",
                "raise it, or privacy.noise_multiplier",
            )
        return Privacy(delta, mode, noise, budget)
    except FedgenError as error:
        if config.warm_up.method is None or error.key != "privacy.target_epsilon":
            raise
        others = "" if noise is None else "privacy.noise_multiplier, "
        remedy = f"raise it, {others}or warm_up.noise_multiplier, which no other noise makes up for"
        raise FedgenError(error.key, error.problem, remedy) from error


def decide_again(config: DictConfig, method: Method, privacy: Privacy) -> Privacy:
    """A run's privacy, its method being one that costs more than it was to: a target beside a noise
    multiplier ends the run sooner.

    Raises:
        FedgenError: if the first round spends all of it.
    """
    target = config.privacy.target_epsilon
    if target is None or config.privacy.noise_multiplier is None:
        return privacy
    try:
        budget = affordable(method, config, config.privacy.adversary == "server", target)
    except FedgenError as error:
        problem = f"a missing answer may have shown its draws: the rest would exceed ε = {target:g}"
        raise FedgenError("resume", problem, "start a new run") from error
    return replace(privacy, budget=budget)


def calibrated(method: Method, rounds: int) -> Budget:
    """The budget that the noise was solved for: rows of the busiest client but for a tail. Where
    clients trust the server, how often it asks one costs nothing."""
    asked = method.plan.asked(rounds)
    if method.plan.trusted:
        return Budget(rounds, UNLIMITED, 0.0)
    rows = method.cohort.busiest(method.plan.rows_per_round, asked, TAIL)
    stop = method.cohort.stop_probability(method.plan.rows_per_round, asked, rows)
    return Budget(rounds, rows, stop)


def planned(method: Method, config: DictConfig, server: bool, by: Accountant) -> float:
    """epsilon promised for the whole run to one adversary."""
    budget = calibrated(method, config.rounds)
    found = view(method, budget, config.rounds, budget.rows, config.privacy.delta, server, by)
    return found.or_infinity


def view(
    method: Method,
    budget: Budget,
    rounds: int,
    rows: int,
    delta: float,
    server: bool,
    by: Accountant = epsilon,
) -> Epsilon:
    """epsilon to one adversary after ``rounds`` rounds, for a client that answered ``rows``."""
    if method.plan.before is not None:
        return by(canonical(method.plan.before), delta, method.plan.relation)
    against_server = by(canonical(method.plan.server(rows)), delta, method.plan.relation)
    if server or method.plan.release is None:
        return against_server
    event, relation = method.plan.release(rounds), method.plan.relation
    found = release_epsilon(event, delta, relation, budget.stop_probability, by)
    return smaller(found, against_server)


def affordable(method: Method, config: DictConfig, server: bool, target: float) -> Budget:
    """How far given noise may go: rows of a client (against the server), or rounds."""
    per_round, delta = method.plan.rows_per_round, config.privacy.delta
    relation = method.plan.relation
    asked = method.plan.asked(config.rounds)
    all_rows = per_round * asked
    if server or method.plan.release is None:

        def spent(rows: int) -> float:
            return epsilon(
                canonical(method.plan.server(rows)), delta, method.plan.relation
            ).or_infinity

        # where everybody answers everything, whole rounds are spent
        everybody = not method.cohort.drawn
        unit = per_round if everybody else 1
        rows = unit * most_repetitions(lambda count: spent(unit * count), target, all_rows // unit)
        stop = method.cohort.stop_probability(per_round, asked, rows)
        enough = rows == all_rows or not everybody
        rounds = config.rounds if enough else method.plan.rounds(rows // per_round)
        stop = 0.0 if everybody else stop
        if rows == 0:
            raise _impossible(target)
        return Budget(rounds, rows, stop)
    release = method.plan.release
    rounds = most_repetitions(
        lambda count: epsilon(canonical(release(count)), delta, relation).or_infinity,
        target,
        config.rounds,
    )
    if rounds == 0:
        raise _impossible(target)
    return Budget(rounds, UNLIMITED if method.plan.trusted else all_rows, 0.0)


def _impossible(target: float) -> FedgenError:
    return FedgenError(
        "privacy.target_epsilon",
        f"{target:g} is spent by the first round at this noise",
        "raise privacy.noise_multiplier, or leave it out to solve for it",
    )
