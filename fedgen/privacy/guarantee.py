"""What an adversary of one view can achieve at most: a trade-off curve, not one (ε, δ) pair.

A profile bounds δ(ε) for all ε at once. It is exact for Gaussian releases (μ-GDP; Dong, Roth, Su
2022, "Gaussian differential privacy"). With sampling it is known on a grid of ε, from bounds that
hold at each point; every figure here is the best that the points imply, so that a coarser grid or a
looser bound only raises what an attacker may do.

A test of membership accuses those that were included, the members, at a true positive rate (TPR),
and others at a false positive rate (FPR). For every ε of the profile,

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
"""Minimum share of members that an attacker finds, for a posterior to be bounded."""

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
        """Return the largest probability that an accused one is a member, for an attacker who
        accuses at least the share ``SHARE_FOUND`` of the members.

        Args:
            prior: share of members among those that the attacker chooses from, in (0, 1).

        Proof. At TPR t the posterior is p t / (p t + (1 - p) FPR), largest at the smallest FPR. The
        smallest FPR is a convex function of t and 0 at 0, so that FPR / t does not decrease in t,
        and t = ``SHARE_FOUND`` is best.
        """
        false_positives = (1 - prior) * self.fpr(SHARE_FOUND)
        return prior * SHARE_FOUND / (prior * SHARE_FOUND + false_positives)

    def dominating_mu(self, fpr: float) -> float:
        """Return a μ whose Gaussian curve lies above this one at every false positive rate from
        ``fpr``, in (0, 0.5), to its mirror image, and above the least such μ by less than 0.01;
        infinity if there is none.

        Between two points of the search the curve is at most at the second, the Gaussian at least
        at the first, so each interval is covered as a whole; and by symmetry it suffices to search
        up to the point where the false positive and false negative rates are equal.
        """
        if self.mu is not None:
            return self.mu
        rates = np.geomspace(fpr, 0.5, 2000)
        rates[0] = fpr
        powers = np.array([self.tpr(rate) for rate in rates])
        with np.errstate(invalid="ignore"):
            needed = ndtri(powers[1:]) - ndtri(rates[:-1])
        return float(max(needed.max(), 0.0))

    def describe(self) -> str:
        """Return the figures of ``to_json`` as text, rounded up."""
        mu = "" if self.mu is None else f"μ = {round_up(self.mu)}; "
        powers = ", ".join(
            f"{_percent(self.tpr(fpr))} at {100 * fpr:g} % false positives"
            for fpr in FALSE_POSITIVE_RATES
        )
        return (
            f"{mu}any attack finds at most {powers}; advantage at most {_percent(self.advantage)}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the figures that people read, as JSON data."""
        return {
            "mu": self.mu,
            "advantage": self.advantage,
            "tpr": {f"{fpr:g}": self.tpr(fpr) for fpr in FALSE_POSITIVE_RATES},
            "posterior": {f"{prior:g}": self.posterior(prior) for prior in PRIORS},
        }


def guarantee(
    spend: Spend, delta: float, relation: Relation, stop_probability: float = 0.0
) -> Guarantee | None:
    """Return the bounds that follow from a spend; None if there is no bound.

    Args:
        delta: δ of the (ε, δ) printed beside them; discretised losses leave out 1e-3 of it, which
            is added to each δ of the profile.
        stop_probability: probability that the run ends early, which reveals something about
            samples; its cost is added (``budget.release_epsilon``).

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
        deltas = np.minimum(deltas, profile(GRID))
    if stop_probability:
        deltas = deltas + stop_probability * (1 + np.exp(GRID))
    return Guarantee(np.clip(deltas, 0, 1), None)


def of_pair(epsilon: float, delta: float) -> Guarantee:
    """Return the bounds that follow from one (ε, δ) pair, for records that hold nothing else."""
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
    """Return bounds that hold for all of several clients; None if there are none for one."""
    bounded = []
    for one in guarantees:
        if one is None:
            return None
        bounded.append(one)
    mus = [one.mu for one in bounded if one.mu is not None]
    if len(mus) == len(bounded):
        return max(bounded, key=lambda one: one.mu or 0.0)
    return Guarantee(reduce(np.maximum, [one.deltas for one in bounded]), None)


def worst_guarantee(spends: Sequence[Spend], delta: float, relation: Relation) -> Guarantee | None:
    """Return bounds that hold for every client, given the spend of each.

    A spend with at least the counts of another dominates it; so of many clients only the largest
    spends are accounted, and of very many different ones the larger count of each event.
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
    """Return the spends that no other one dominates; all of them if they are very many."""
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
