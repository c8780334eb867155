"""Bounds on attacks by the adversary of one view: a trade-off curve, not one (ε, δ) pair.

A profile bounds δ(ε) for all ε at once. It is exact for Gaussian releases (μ-GDP; Dong, Roth, Su
2022, "Gaussian differential privacy"). With sampling it is known on a grid of ε, from bounds that
hold at each point. Each figure here is the best that these points imply, so a coarser grid or a
looser bound only raises it.

A membership test accuses members (records, persons or clients that were included) at its true
positive rate (TPR), and others at its false positive rate (FPR). For every ε of the profile,

    TPR <= δ + e^ε FPR  and  1 - FPR <= δ + e^ε (1 - TPR)

(Wasserman and Zhou 2010; Kairouz, Oh, Viswanath 2015). The profile covers both directions of the
neighbouring relation, so the curve is symmetric.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from fedgen.privacy.events import Contribution, Relation, Spend
from fedgen.privacy.gaussian_dp import gaussian_delta
from fedgen.privacy.ledger import elementwise_max
from fedgen.privacy.profiles import profiles

GRID = np.concatenate([np.linspace(0, 20, 2001), np.geomspace(20, 600, 700)[1:]])
"""Points ε of a profile."""

PRIORS = (0.01, 0.1, 0.5)
FALSE_POSITIVE_RATES = (0.001, 0.01)
SHARE_FOUND = 0.01
"""Minimum share of members that an attacker accuses: the posterior of one who accuses fewer has no
useful bound."""

_MAX_DISTINCT = 16  # spends of clients that are accounted one by one


@dataclass(frozen=True)
class Guarantee:
    """Bounds on every test of membership against one view.

    deltas: upper bounds on δ at the points of ``GRID``.
    mu: μ of Gaussian differential privacy, if the bounds are those of one Gaussian; else None.
    """

    deltas: NDArray[np.float64]
    mu: float | None

    def tpr(self, fpr: float) -> float:
        """Return the largest true positive rate at a false positive rate in [0, 1]."""
        if self.mu is not None:
            return float(ndtr(ndtri(fpr) + self.mu)) if fpr > 0 else 0.0
        with np.errstate(over="ignore"):
            first = self.deltas + np.exp(GRID) * fpr
            second = 1 - np.exp(-GRID) * (1 - self.deltas - fpr)
        return float(np.clip(np.minimum(first, second).min(), 0, 1))

    def fpr(self, tpr: float) -> float:
        """Return the smallest false positive rate at a true positive rate in [0, 1]."""
        if self.mu is not None:
            return float(ndtr(ndtri(tpr) - self.mu)) if tpr < 1 else 1.0
        with np.errstate(over="ignore"):
            first = np.exp(-GRID) * (tpr - self.deltas)
            second = 1 - self.deltas - np.exp(GRID) * (1 - tpr)
        return float(np.clip(np.maximum(first, second).max(), 0, 1))

    @property
    def advantage(self) -> float:
        """Largest difference of the true and the false positive rate: the total variation, δ at
        ε = 0."""
        if self.mu is not None:
            return float(2 * ndtr(self.mu / 2) - 1)
        return float(min(self.deltas[0], 1.0))

    def posterior(self, prior: float) -> float:
        """Return the largest probability that an accusation is right, for an attacker who accuses
        at least the share ``SHARE_FOUND`` of the members.

        Args:
            prior: share of members among those that the attacker tests, in (0, 1).

        Proof. At TPR t and prior p the posterior is p t / (p t + (1 - p) FPR), largest at the
        smallest FPR, which is a convex function of t and 0 at t = 0. So FPR / t does not decrease
        in t, and the posterior is largest at t = ``SHARE_FOUND``.
        """
        false_positives = (1 - prior) * self.fpr(SHARE_FOUND)
        return prior * SHARE_FOUND / (prior * SHARE_FOUND + false_positives)

    def describe(self) -> str:
        """Return μ, the largest true positive rates and the advantage as text, rounded up."""
        mu = "" if self.mu is None else f"μ = {round_up(self.mu)}; "
        powers = ", ".join(
            f"{_percent(self.tpr(fpr))} at {100 * fpr:g} % false positives"
            for fpr in FALSE_POSITIVE_RATES
        )
        return (
            f"{mu}any attack finds at most {powers}; advantage at most {_percent(self.advantage)}"
        )


def guarantee(
    spend: Spend, delta: float, relation: Relation, stop_probability: float = 0.0
) -> Guarantee | None:
    """Return the bounds that follow from a spend; None if there is no bound.

    Args:
        delta: δ of the printed (ε, δ). Discretised losses are truncated by 1e-3 of it, which is
            added to each δ of the profile.
        stop_probability: probability that the run ends early, which reveals something about
            samples; its cost is added (``budget.release_bound``).

    Raises:
        ValueError: for spends that ``accounting.epsilon`` refuses.
    """
    leaves = {event: count for event, count in spend.items() if count > 0}
    if any(isinstance(event, (NonPrivateDpEvent, Contribution)) for event in leaves):
        return None
    if all(isinstance(event, GaussianDpEvent) for event in leaves) and not stop_probability:
        precision = sum(count / event.noise_multiplier**2 for event, count in leaves.items())
        return _gaussian(math.sqrt(precision))
    deltas = np.ones_like(GRID)
    for profile in profiles(leaves, delta, relation):
        deltas = np.fmin(deltas, profile(GRID))  # a bound that cannot be computed is NaN
    if stop_probability:
        deltas = deltas + stop_probability * (1 + np.exp(GRID))
    return Guarantee(np.clip(deltas, 0, 1), None)


def to_json(curve: Guarantee | None) -> dict[str, Any] | None:
    """Return the published figures as JSON data; None without a bound."""
    if curve is None:
        return None
    return {
        "mu": curve.mu,
        "advantage": curve.advantage,
        "tpr": {f"{fpr:g}": curve.tpr(fpr) for fpr in FALSE_POSITIVE_RATES},
        "posterior": {f"{prior:g}": curve.posterior(prior) for prior in PRIORS},
    }


def of_pair(epsilon: float, delta: float) -> Guarantee:
    """Return the bounds that follow from one (ε, δ) pair, which is all that 0.1.0 recorded."""
    return Guarantee(np.where(epsilon <= GRID, delta, 1.0), None)


def round_up(value: float) -> str:
    """Format a number >= 0 with three significant digits, rounded up."""
    if value <= 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.6g}"


def _percent(share: float) -> str:
    return f"{round_up(100 * share)} %"


def _gaussian(mu: float) -> Guarantee:
    return Guarantee(gaussian_delta(mu, GRID) if mu > 0 else np.zeros_like(GRID), mu)


def worst(guarantees: Iterable[Guarantee | None]) -> Guarantee | None:
    """Return bounds that hold for each of several clients; None if one has no bound."""
    bounded = []
    for client in guarantees:
        if client is None:
            return None
        bounded.append(client)
    if all(client.mu is not None for client in bounded):
        return max(bounded, key=lambda client: client.mu or 0.0)
    return Guarantee(reduce(np.maximum, [client.deltas for client in bounded]), None)


def worst_guarantee(spends: Sequence[Spend], delta: float, relation: Relation) -> Guarantee | None:
    """Return bounds that hold for every client, given the spend of each.

    A spend with at least the counts of another costs at least as much, so only spends that no other
    one exceeds are accounted; if there are many of these, one spend with the largest count of each
    event.
    """
    distinct: dict[object, Spend] = {frozenset(spend.items()): spend for spend in spends}
    largest = _largest(list(distinct.values()))
    if len(largest) > _MAX_DISTINCT:
        together: Spend = {}
        for spend in largest:
            together = elementwise_max(together, spend)
        largest = [together]
    return worst(guarantee(spend, delta, relation) for spend in largest)


def _largest(spends: list[Spend]) -> list[Spend]:
    """Return the spends that no other one exceeds in all counts; all of them if they are very
    many."""
    if len(spends) > 64 * _MAX_DISTINCT:
        return spends
    return [
        spend
        for spend in spends
        if not any(
            all(other.get(event, 0) >= count for event, count in spend.items())
            for other in spends
            if other is not spend
        )
    ]
