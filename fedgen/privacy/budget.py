"""A run's budget of rounds and of rows a client, decided before it starts.

Two adversaries. The ``server`` sees every message and who sent it: cohorts give it no
amplification. The ``release`` adversary sees what is published: the generator and its samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dp_accounting import DpEvent

from fedgen.errors import FedgenError
from fedgen.privacy.accounting import Accountant, Epsilon, epsilon
from fedgen.privacy.events import Relation, canonical

# A calibrated run stops early, because a client was drawn too often, with at most this probability.
TAIL = 1e-12
# The part of delta that pays for such a stop (see `release_epsilon`).
_STOP_SHARE = 0.01


@dataclass(frozen=True)
class Budget:
    """What a run may spend.

    rounds: rounds that may be run.
    rows: rows that any one client may answer in the run.
    stop_probability: an upper bound on the probability that ``rows`` ends the run early.
    """

    rounds: int
    rows: int
    stop_probability: float


def release_epsilon(
    event: DpEvent,
    delta: float,
    relation: Relation,
    stop_probability: float,
    accountant: Accountant = epsilon,
) -> Epsilon | None:
    """epsilon of the published generator when secret draws amplify; None if it cannot be given.

    A run that stops when the draws have asked some client too often shows something of the draws.
    Proof of the correction: without the stop the run would be (e, d)-DP; with it the law changes by
    at most p, the probability of a stop, under both data sets, so it is (e, d + p (1 + e^e))-DP.
    """
    if stop_probability == 0:
        return accountant(canonical(event), delta, relation)
    found = accountant(canonical(event), (1 - _STOP_SHARE) * delta, relation)
    if found.or_infinity > 700:
        return None
    paid = stop_probability * (1 + math.exp(found.or_infinity))
    return found if paid <= _STOP_SHARE * delta else None


def smaller(first: Epsilon | None, second: Epsilon) -> Epsilon:
    """The smaller of two bounds that both hold."""
    if first is None or second.or_infinity < first.or_infinity:
        return second
    return first


LARGEST_DELTA = 0.01
"""Largest δ of a release, whatever the number of records."""


def delta_limit(protected: int | None) -> float:
    """Return the largest δ of a release: 1/n for n protected records, clients or persons, and at
    most ``LARGEST_DELTA``. A mechanism that publishes each record in full with probability δ is
    (0, δ)-private.

    Args:
        protected: public number of protected units; None: unknown.
    """
    return LARGEST_DELTA if not protected else min(LARGEST_DELTA, 1 / protected)


def delta_problem(delta: float, protected: int | None, unit: str) -> tuple[str, str] | None:
    """Return problem and remedy for a δ above ``delta_limit``; None for a smaller one."""
    limit = delta_limit(protected)
    if delta <= limit:
        return None
    counted = f"1 / {protected:,} {unit}s" if protected and limit < LARGEST_DELTA else f"{limit:g}"
    remedy = f"e.g. privacy.delta={10.0 ** math.floor(math.log10(limit) - 1e-9):g}"
    return f"{delta:g} is above {counted}: it permits publishing some of them in full", remedy


def check_delta(delta: float) -> None:
    """Raises FedgenError unless 0 < delta < 1."""
    if not 0 < delta < 1:
        raise FedgenError(
            "privacy.delta",
            f"must lie strictly between 0 and 1, got {delta:g}",
            "take one well below 1 / (number of records or clients), e.g. 1e-5",
        )
