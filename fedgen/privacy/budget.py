"""Budget of a run: rounds and query samples per client, fixed before it starts.

Two adversaries are considered. ``server`` sees every message and its sender, so cohort sampling
gives no amplification against it. ``release`` sees the published generator and its samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dp_accounting import DpEvent

from fedgen.privacy.accounting import Accountant, Epsilon, epsilon
from fedgen.privacy.events import Relation, Spend, canonical
from fedgen.privacy.guarantee import Guarantee, guarantee

TAIL = 1e-12
"""Bound on the probability that a run stops early because a client was sampled too often."""

_STOP_SHARE = 0.01  # share of delta that covers such a stop (see `release_epsilon`)


@dataclass(frozen=True)
class Budget:
    """Budget of a run.

    rounds: maximum number of rounds.
    samples_per_client: maximum number of query samples that one client responds to.
    stop_probability: upper bound on the probability that ``samples_per_client`` ends the run early.
    """

    rounds: int
    samples_per_client: int
    stop_probability: float


@dataclass(frozen=True)
class Bound:
    """ε against one adversary, and the spend and the probability of a stop that it is computed
    from."""

    epsilon: Epsilon
    spend: Spend
    stop_probability: float = 0.0

    def guarantee(self, delta: float, relation: Relation) -> Guarantee | None:
        """Return the trade-off curve; None without a bound."""
        return guarantee(self.spend, delta, relation, self.stop_probability)


def bound_of(
    spend: Spend, delta: float, relation: Relation, accountant: Accountant = epsilon
) -> Bound:
    """Return the bound of a spend."""
    return Bound(accountant(spend, delta, relation), spend)


def release_bound(
    event: DpEvent,
    delta: float,
    relation: Relation,
    stop_probability: float,
    accountant: Accountant = epsilon,
) -> Bound | None:
    """Return the bound of the published generator with amplification by secret sampling; None
    without one.

    A run that stops because some client was sampled too often reveals something about the samples.
    Proof of the correction: without the stop the run would be (e, d)-DP. The stop changes its
    distribution by at most p, the probability of a stop, under both data sets, so that the run is
    (e, d + p (1 + e^e))-DP.
    """
    spend = canonical(event)
    if stop_probability == 0:
        return bound_of(spend, delta, relation, accountant)
    bound = accountant(spend, (1 - _STOP_SHARE) * delta, relation)
    if bound.or_infinity > 700:
        return None
    stop_delta = stop_probability * (1 + math.exp(bound.or_infinity))
    return Bound(bound, spend, stop_probability) if stop_delta <= _STOP_SHARE * delta else None


def smaller_bound(first: Bound | None, second: Bound) -> Bound:
    """Return the smaller of two valid bounds."""
    if first is None or second.epsilon.or_infinity < first.epsilon.or_infinity:
        return second
    return first


MAX_DELTA = 0.01
"""Largest δ of a release for any number of records."""


def delta_limit(protected: int | None) -> float:
    """Return the largest δ of a release: 1/n for n protected records, clients or persons, and at
    most ``MAX_DELTA``. A mechanism that publishes each record in full with probability δ is (0,
    δ)-private.

    Args:
        protected: public number of protected units; None: unknown.
    """
    return MAX_DELTA if not protected else min(MAX_DELTA, 1 / protected)


def delta_problem(delta: float, protected: int | None, unit: str) -> tuple[str, str] | None:
    """Return problem and remedy for a δ above ``delta_limit``; None for a smaller one."""
    limit = delta_limit(protected)
    if delta <= limit:
        return None
    counted = f"1 / {protected:,} {unit}s" if protected and limit < MAX_DELTA else f"{limit:g}"
    remedy = f"e.g. privacy.delta={10.0 ** math.floor(math.log10(limit) - 1e-9):g}"
    return f"{delta:g} is above {counted}: it permits publishing some of them in full", remedy
