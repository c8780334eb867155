"""Bounds on attacks by the adversary of one view: a trade-off curve, not one (ε, δ) pair.

A profile bounds δ(ε) for all ε at once. It is exact for Gaussian releases (μ-GDP; Dong, Roth, Su
2022, "Gaussian differential privacy"). With sampling it is known on a grid of ε, from bounds that
hold at each point. Each figure here is the best that these points imply, so a coarser grid or a
looser bound only raises it.

A membership test classifies a member (a record, person or client that was included) as a member
with probability TPR, its true positive rate, and others with probability FPR, its false positive
rate. The curve is the largest TPR at each FPR, one minus the trade-off function of Dong, Roth, Su.
For every ε of the profile,

    TPR <= δ + e^ε FPR  and  1 - FPR <= δ + e^ε (1 - TPR)

(Wasserman and Zhou 2010; Kairouz, Oh, Viswanath 2015). The profile covers both directions of the
neighbouring relation, so the curve is symmetric.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent
from numpy.typing import NDArray
from scipy.special import expit, ndtr, ndtri

from fedgen.privacy.events import Contribution, Relation, Spend
from fedgen.privacy.gaussian_dp import gaussian_delta
from fedgen.privacy.ledger import elementwise_max
from fedgen.privacy.privacy_profiles import profiles

GRID = np.concatenate([np.linspace(0, 20, 2001), np.geomspace(20, 600, 700)[1:]])
"""Points ε of a profile."""

PRIORS = (0.01, 0.1, 0.5)
FALSE_POSITIVE_RATES = (0.001, 0.01)
MIN_TPR = 0.01
"""Minimum true positive rate of an attacker: the precision of one who finds fewer members has no
useful bound."""

_MAX_DISTINCT = 16  # spends of clients that are accounted one by one


_CURVE_POINTS = np.concatenate(
    [np.geomspace(1e-6, 0.1, 40), np.linspace(0.1, 1, 50), FALSE_POSITIVE_RATES]
)
"""False positive rates at which the points of a published profile lose nothing."""


@dataclass(frozen=True)
class Guarantee:
    """Bounds on every test of membership against one view.

    points, deltas: the profile, ε >= 0 in ascending order and upper bounds on δ there.
    mu: μ of Gaussian differential privacy, if the bounds are those of one Gaussian; else None.
    """

    points: NDArray[np.float64]
    deltas: NDArray[np.float64]
    mu: float | None

    def tpr(self, fpr: float) -> float:
        """Return the largest true positive rate at a false positive rate in [0, 1]."""
        if self.mu is not None:
            return float(ndtr(ndtri(fpr) + self.mu)) if fpr > 0 else 0.0
        return float(np.clip(self._lines(fpr).min(), 0, 1))

    def _lines(self, fpr: float) -> NDArray[np.float64]:
        """Return the bounds on the true positive rate by each point of the profile, in both
        directions (2, points)."""
        with np.errstate(over="ignore"):
            first = self.deltas + np.exp(self.points) * fpr
            second = 1 - np.exp(-self.points) * (1 - self.deltas - fpr)
        return np.stack([first, second])

    def fpr(self, tpr: float) -> float:
        """Return the smallest false positive rate at a true positive rate in [0, 1]."""
        if self.mu is not None:
            return float(ndtr(ndtri(tpr) - self.mu)) if tpr < 1 else 1.0
        return float(np.clip(self._inverse_lines(tpr).max(), 0, 1))

    def _inverse_lines(self, tpr: float) -> NDArray[np.float64]:
        """Return the bounds on the false positive rate by each point of the profile, in both
        directions (2, points)."""
        with np.errstate(over="ignore", invalid="ignore"):
            first = np.exp(-self.points) * (tpr - self.deltas)
            second = 1 - self.deltas - np.exp(self.points) * (1 - tpr)
        return np.stack([first, second])

    def thinned(self) -> Guarantee:
        """Return the same bounds by fewer points, without loss at the rates that are published and
        little between them."""
        if self.mu is not None:
            return self
        both = [self._lines(fpr).argmin(axis=1) for fpr in _CURVE_POINTS]
        both.append(self._inverse_lines(MIN_TPR).argmax(axis=1))
        kept = np.unique([0, self._advantages().argmin(), *np.concatenate(both)])
        return Guarantee(self.points[kept], self.deltas[kept], None)

    @property
    def advantage(self) -> float:
        """Largest difference of the true and the false positive rate: the total variation distance.
        For each ε of the profile it is at most (e^ε - 1 + 2 δ) / (e^ε + 1), where the two lines of
        the module meet."""
        if self.mu is not None:
            return float(2 * ndtr(self.mu / 2) - 1)
        return float(min(self._advantages().min(), 1.0))

    def _advantages(self) -> NDArray[np.float64]:
        """Return the bounds on the advantage by each point of the profile."""
        return np.asarray(np.tanh(self.points / 2) + 2 * self.deltas * expit(-self.points))

    @property
    def rho(self) -> float | None:
        """ρ of zero-concentrated differential privacy, μ²/2 (Bun and Steinke 2016, proposition
        1.6); None if the bounds are not those of one Gaussian."""
        return None if self.mu is None else self.mu**2 / 2

    def dominating_mu(self, fpr: float = FALSE_POSITIVE_RATES[0]) -> float:
        """Return μ if the bounds are those of one Gaussian, else the least μ of a Gaussian whose
        curve is nowhere below this one at false positive rates of at least ``fpr`` and false
        negative rates of at least ``fpr``; infinity if there is none.

        Both curves are symmetric, so rates up to the point where both error rates are equal
        suffice. Between two rates of a grid, the true positive rate is at most that at the larger
        one, so the result is rounded up, by less than 0.004.
        """
        if self.mu is not None:
            return self.mu
        rates = np.geomspace(fpr, 0.5, 2000)
        powers = np.array([self.tpr(rate) for rate in rates])
        below = rates[:-1] <= 1 - powers[:-1]
        if not below.any():
            return math.inf
        return float((ndtri(powers[1:]) - ndtri(rates[:-1]))[below].max())

    def posterior(self, prior: float) -> float:
        """Return the largest probability that an accusation is right, for an attacker who accuses
        at least the share ``MIN_TPR`` of the members.

        Args:
            prior: share of members among those that the attacker tests, in (0, 1).

        Proof. At TPR t and prior p the posterior is p t / (p t + (1 - p) FPR), largest at the
        smallest FPR, which is a convex function of t and 0 at t = 0. So FPR / t does not decrease
        in t, and the posterior is largest at t = ``MIN_TPR``.
        """
        false_positives = (1 - prior) * self.fpr(MIN_TPR)
        return prior * MIN_TPR / (prior * MIN_TPR + false_positives)

    def describe(self) -> str:
        """Return μ, the largest true positive rates and the advantage as text, rounded up."""
        mu = "" if self.mu is None else f"μ = {round_up(self.mu)}; "
        powers = ", ".join(
            f"{percent(self.tpr(fpr))} at {100 * fpr:g} % false positives"
            for fpr in FALSE_POSITIVE_RATES
        )
        return f"{mu}any attack finds at most {powers}; advantage at most {percent(self.advantage)}"


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
    return Guarantee(GRID, np.clip(deltas, 0, 1), None)


def to_json(curve: Guarantee | None) -> dict[str, Any] | None:
    """Return the published figures as JSON data; None without a bound."""
    if curve is None:
        return None
    profile = None
    if curve.mu is None:
        thinned = curve.thinned()
        profile = np.stack([thinned.points, thinned.deltas], axis=1).tolist()
    return {
        "mu": curve.mu,
        "rho": curve.rho,
        "advantage": curve.advantage,
        "tpr": {f"{fpr:g}": curve.tpr(fpr) for fpr in FALSE_POSITIVE_RATES},
        "posterior": {f"{prior:g}": curve.posterior(prior) for prior in PRIORS},
        "profile": profile,
    }


def from_json(data: Mapping[str, Any]) -> Guarantee:
    """Return the bounds of JSON data, which may come from others; raises ValueError, KeyError or
    TypeError for invalid data."""
    if data["mu"] is not None:
        mu = float(data["mu"])
        if not 0 <= mu < math.inf:
            raise ValueError("not a guarantee")
        return _gaussian(mu)
    profile = np.array(data["profile"], dtype=float)
    if profile.ndim != 2 or profile.shape[1] != 2 or not 0 < len(profile) <= len(GRID):
        raise ValueError("not a guarantee")
    points, deltas = profile.T
    is_ascending = points[0] >= 0 and (np.diff(points) > 0).all() and np.isfinite(points).all()
    if not is_ascending or not ((deltas >= 0) & (deltas <= 1)).all():
        raise ValueError("not a guarantee")
    return Guarantee(points, deltas, None)


def of_pair(epsilon: float, delta: float) -> Guarantee:
    """Return the bounds that follow from one (ε, δ) pair, which is all that 0.1.0 recorded; no
    bounds for ε above ``GRID``."""
    if epsilon > GRID[-1]:  # exp(ε) may overflow
        return Guarantee(np.zeros(1), np.ones(1), None)
    return Guarantee(np.array([epsilon]), np.array([delta]), None)


def round_up(value: float) -> str:
    """Format a number >= 0 with three significant digits, rounded up."""
    if value <= 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.6g}"


def percent(share: float) -> str:
    """Format a share in [0, 1] as a percentage, rounded up."""
    return f"{round_up(100 * share)} %"


def _gaussian(mu: float) -> Guarantee:
    return Guarantee(GRID, gaussian_delta(mu, GRID) if mu > 0 else np.zeros_like(GRID), mu)


def worst(guarantees: Iterable[Guarantee | None]) -> Guarantee | None:
    """Return bounds that hold for each of several clients; None if one has no bound."""
    bounded = []
    for client in guarantees:
        if client is None:
            return None
        bounded.append(client)
    if all(client.mu is not None for client in bounded):
        return max(bounded, key=lambda client: client.mu or 0.0)
    return Guarantee(GRID, reduce(np.maximum, [client.deltas for client in bounded]), None)


def worst_guarantee(spends: Sequence[Spend], delta: float, relation: Relation) -> Guarantee | None:
    """Return bounds that hold for every client, given the spend of each."""
    return worst(guarantee(spend, delta, relation) for spend in largest_spends(spends))


def largest_spends(spends: Sequence[Spend]) -> list[Spend]:
    """Return spends whose bounds hold for every client, given the spend of each.

    A spend with at least the counts of another costs at least as much, so these are the spends that
    no other one exceeds; if there are many, one spend with the largest count of each event.
    """
    distinct: dict[object, Spend] = {frozenset(spend.items()): spend for spend in spends}
    largest = _largest(list(distinct.values()))
    if len(largest) <= _MAX_DISTINCT:
        return largest
    together: Spend = {}
    for spend in largest:
        together = elementwise_max(together, spend)
    return [together]


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
