"""From a spend to epsilon at a given delta, with a second opinion.

Gaussian releases compose exactly. A secret draw of a subset is bounded twice, by the privacy loss
distribution of its worst profile and by Renyi divergences, and the smaller bound is reported: both
hold, neither always wins. All bounds are for replace-one (records or clients), where a noise
multiplier is std over the diameter of the set that a contribution is clipped to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    SampledWithoutReplacementDpEvent,
)
from dp_accounting.pld import pld_pmf
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammaln, log_ndtr, logsumexp, ndtr
from scipy.stats import binom

from fedgen.privacy.events import RevealedDraw, Spend

# Below, the noise hides so little that a draw's loss is out of floating point's range.
_LEAST_SIGMA = 0.02

ORDERS: tuple[int, ...] = (*range(2, 65), *range(68, 257, 4), *range(272, 1025, 16))


@dataclass(frozen=True)
class Epsilon:
    """An (epsilon, delta) bound; ``value`` is None where there is none."""

    value: float | None
    accountant: str
    second_opinion: float | None

    @property
    def or_infinity(self) -> float:
        """The value, infinity for no bound."""
        return math.inf if self.value is None else self.value


def epsilon(spend: Spend, delta: float) -> Epsilon:
    """The smallest proven epsilon of a spend at ``delta`` in (0, 1).

    Raises:
        ValueError: if the spend mixes kinds that have no common accountant.
    """
    return _epsilon(tuple(sorted(spend.items(), key=lambda item: repr(item[0]))), delta)


@lru_cache(maxsize=4096)
def _epsilon(spend: tuple[tuple[DpEvent, int], ...], delta: float) -> Epsilon:
    spend = tuple((event, count) for event, count in spend if count > 0)
    kinds = {type(event) for event, _ in spend}
    if not spend:
        return Epsilon(0.0, "nothing released", 0.0)
    if NonPrivateDpEvent in kinds:
        return Epsilon(None, "no bound", None)
    if kinds == {GaussianDpEvent}:
        mu = math.sqrt(sum(count / event.noise_multiplier**2 for event, count in spend))
        return Epsilon(gaussian_epsilon(mu, delta), "Gaussian, exact", _gaussian_rdp(mu, delta))
    if kinds == {SampledWithoutReplacementDpEvent}:
        by_pld, by_rdp = _draws_pld(spend, delta), _draws_rdp(spend, delta)
        mu = math.sqrt(sum(count / event.event.noise_multiplier**2 for event, count in spend))
        undrawn = gaussian_epsilon(mu, delta)
        if undrawn <= min(by_pld, by_rdp):
            return Epsilon(undrawn, "Gaussian, as if always drawn", min(by_pld, by_rdp))
        if by_rdp <= by_pld:
            return Epsilon(by_rdp, "RDP of secret subset draws", by_pld)
        return Epsilon(by_pld, "PLD of secret subset draws", by_rdp)
    if kinds == {RevealedDraw} and len(spend) == 1:
        [(event, count)] = spend
        return Epsilon(
            revealed_epsilon(event.probability, event.event.noise_multiplier, count, delta),
            "mixture of exact Gaussians over the number of visits",
            None,
        )
    raise ValueError(f"no common accountant for {sorted(kind.__name__ for kind in kinds)}")


# --- Gaussian: exact (Balle and Wang 2018, theorem 8) ---------------------------------------------


def gaussian_delta(mu: float | NDArray[np.float64], eps: float) -> NDArray[np.float64]:
    """delta at ``eps`` of Gaussian releases with sensitivity over std equal to ``mu`` > 0."""
    mu = np.asarray(mu, dtype=float)
    with np.errstate(over="ignore", under="ignore"):
        first = log_ndtr(mu / 2 - eps / mu)
        second = eps + log_ndtr(-mu / 2 - eps / mu)
        return np.asarray(np.exp(first) * -np.expm1(np.minimum(second - first, 0.0)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """epsilon at ``delta`` of Gaussian releases with sensitivity over std equal to ``mu``."""
    return _smallest_epsilon(lambda eps: float(gaussian_delta(mu, eps)), delta)


def _smallest_epsilon(delta_at: Callable[[float], float], delta: float) -> float:
    if delta_at(0.0) <= delta:
        return 0.0
    high = 1.0
    while delta_at(high) > delta:
        high *= 2
    return float(brentq(lambda eps: delta_at(eps) - delta, 0.0, high, xtol=1e-10)) + 1e-9


def _gaussian_rdp(mu: float, delta: float) -> float:
    orders = np.concatenate([np.linspace(1.01, 2, 100), np.asarray(ORDERS, dtype=float)])
    return _rdp_to_epsilon(orders, orders * mu**2 / 2, delta)


def _rdp_to_epsilon(
    orders: NDArray[np.float64], values: NDArray[np.float64], delta: float
) -> float:
    return float(rdp.compute_epsilon(list(orders), list(values), delta)[0])


# --- draws that the adversary sees ----------------------------------------------------------------


def revealed_epsilon(probability: float, sigma: float, draws: int, delta: float) -> float:
    """epsilon when the record's subset is visited a Binomial(draws, probability) number of times
    and the adversary sees the visits.

    Proof: given the draws the transcript is a composition of N Gaussians, profile
    delta_G(eps; sqrt(N) / sigma); the draws do not depend on the data, and the hockey-stick
    divergence of a mixture over a common public coin is the mean of the divergences.
    """
    low, high = binom.interval(1 - 1e-3 * delta, draws, probability)
    visits = np.arange(max(1, int(low)), int(high) + 2)
    weights = binom.pmf(visits, draws, probability)
    beyond = float(
        binom.sf(visits[-1], draws, probability)
        + binom.cdf(visits[0] - 1, draws, probability)
        - binom.pmf(0, draws, probability)
    )
    mus = np.sqrt(visits) / sigma

    def delta_at(eps: float) -> float:
        return float(weights @ gaussian_delta(mus, eps)) + max(beyond, 0.0)

    return _smallest_epsilon(delta_at, delta)


# --- secret draws of subsets ----------------------------------------------------------------------


def _draws_pld(spend: tuple[tuple[DpEvent, int], ...], delta: float) -> float:
    pmf: pld_pmf.PLDPmf | None = None
    if any(event.event.noise_multiplier < _LEAST_SIGMA for event, _ in spend):
        return math.inf
    step = _discretization(spend)
    for event, count in spend:
        sigma, gamma = event.event.noise_multiplier, event.sample_size / event.source_dataset_size
        part = subset_draw_pmf(gamma, 1 / sigma, step).self_compose(count, 1e-3 * delta)
        pmf = part if pmf is None else pmf.compose(part, 1e-3 * delta)
    assert pmf is not None
    composed = pmf
    if composed.get_delta_for_epsilon(math.inf) > delta:
        return math.inf
    # not get_epsilon_for_delta: it gives up where exp(-loss) underflows
    return _smallest_epsilon(lambda eps: float(composed.get_delta_for_epsilon(eps)), delta)


def _discretization(spend: tuple[tuple[DpEvent, int], ...]) -> float:
    """A grid fine enough that rounding adds little to the composed loss, of at most 1e5 cells."""
    variance, top = 0.0, 0.0
    for event, count in spend:
        gamma = event.sample_size / event.source_dataset_size
        mu = 1 / event.event.noise_multiplier
        variance += count * min(mu**2, gamma**2 * math.expm1(min(mu**2, 50.0)))
        top = max(top, _largest_loss(gamma, mu))
    return float(max(min(math.sqrt(variance) / 5000, 1e-2), top / 1e5))


def _largest_loss(gamma: float, mu: float) -> float:
    """The loss beyond which a draw keeps less than 1e-18 of its mass."""
    loss = mu**2 / 2 + 9 * mu
    return loss if loss > 700 else math.log1p(gamma * math.expm1(loss))


def subset_draw_pmf(gamma: float, mu: float, step: float) -> pld_pmf.PLDPmf:
    """Privacy loss distribution that dominates one secret draw of a fraction ``gamma`` of disjoint
    subsets around one Gaussian release with diameter over std equal to ``mu``.

    Setting. K disjoint subsets by a rule that does not look at the data; a contribution of each is
    clipped to norm C; released is the (mean) contribution of the subset(s) that a fresh secret coin
    drew, plus noise. Neighbours replace one record, so one subset. What a contribution is may
    depend on the past, but not on past draws: subsets train on a public schedule.

    Profile. f(a) = gamma * delta_G(log(1 + (a - 1) / gamma); mu) for a >= 1 and
    f(a) = 1 - a + a * f(1 / a) below 1.

    Proof. With probability 1 - gamma the changed subset is not drawn, and the output is the same
    mixture R on both sides: P = (1 - gamma) R + gamma P0, Q = (1 - gamma) R + gamma Q0. All
    components are Gaussians whose means differ by at most the diameter (a drawn member swapped for
    another, for draws of more than one), so any two are at most the Gaussian profile apart.
    For a >= 1, a0 = 1 + (a - 1) / gamma and b = a / a0, advanced joint convexity (Balle, Barthe,
    Gaboardi 2018, theorem 2) gives H_a(P|Q) = gamma H_a0(P0 | (1 - b) R + b Q0) <= f(a); for a < 1,
    H_a(P|Q) = 1 - a + a H_{1/a}(Q|P) <= f(a). f is convex, non-increasing, f(0) = 1 and
    f(a) >= max(0, 1 - a): it is the profile of a pair, which dominates every step whatever the
    past, and products of dominating pairs dominate adaptive composition (Zhu, Dong, Wang 2022).

    Numerics. Above zero the pair's loss is that of the mixture (1 - gamma) N(0, 1) + gamma N(mu, 1)
    against N(0, 1); below zero it is the mirror image; the rest of the mass sits at zero. Bin
    masses are differences of normal tails, exact to rounding, and each bin's two masses (under P
    and under Q) are put on its end points, which connects the dots of the profile from above
    (Doroshenko et al. 2022).
    """
    cells = max(math.ceil(_largest_loss(gamma, mu) / step), 1)
    grid: NDArray[np.float64] = np.arange(cells + 1, dtype=np.float64) * step
    # the point x of N(0, 1) at which the mixture's loss is `grid`
    x: NDArray[np.float64] = (_log1p_expm1_over(grid, gamma) + mu**2 / 2) / mu
    base, shifted = _interval_masses(x), _interval_masses(x - mu)
    upper = (1 - gamma) * base + gamma * shifted  # P-mass of each bin, grid[i] to grid[i + 1]
    lower = base  # Q-mass of the same bin
    ratio = math.exp(step)
    # a P-mass w at loss l has Q-mass w e^-l: solve left + right = upper,
    # left e^-l + right e^-(l + step) = lower
    with np.errstate(divide="ignore"):
        scaled = np.exp(np.log(lower) + grid[:-1])
    right = np.clip((upper - scaled) / (1 - 1 / ratio), 0.0, upper)
    left = upper - right
    positive = np.zeros(cells + 1)
    positive[:-1] += left
    positive[1:] += right
    infinity = (1 - gamma) * ndtr(-x[-1]) + gamma * ndtr(mu - x[-1])
    # below zero: the mirrored pair; its P-mass at -l is the mass at l, tilted by e^-l
    negative = positive * np.exp(-grid)
    below_all = ndtr(-x[-1])  # mirrored mass beyond the grid: put at -top, towards larger loss
    probabilities = np.concatenate([negative[:0:-1], [positive[0] + negative[0]], positive[1:]])
    probabilities[0] += below_all
    probabilities[cells] += max(0.0, 1 - infinity - probabilities.sum())
    return pld_pmf.DensePLDPmf(step, -cells, probabilities, float(infinity), True)


def _log1p_expm1_over(loss: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
    """log(1 + (exp(loss) - 1) / gamma), also where exp(loss) overflows."""
    with np.errstate(over="ignore"):
        direct = np.log1p(np.expm1(loss) / gamma)
    return np.asarray(np.where(loss < 500, direct, loss - math.log(gamma)), dtype=np.float64)


def _interval_masses(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """N(0, 1) masses between consecutive increasing points, without cancellation in the tail."""
    upper = ndtr(-points)
    lower = ndtr(points)
    return np.asarray(np.where(points[:-1] > 0, upper[:-1] - upper[1:], lower[1:] - lower[:-1]))


def _draws_rdp(spend: tuple[tuple[DpEvent, int], ...], delta: float) -> float:
    values = np.zeros(len(ORDERS))
    for event, count in spend:
        gamma = event.sample_size / event.source_dataset_size
        values += count * np.array(subset_draw_rdp(gamma, 1 / event.event.noise_multiplier))
    return _rdp_to_epsilon(np.asarray(ORDERS, dtype=float), values, delta)


@lru_cache(maxsize=256)
def subset_draw_rdp(gamma: float, mu: float, orders: Sequence[int] = ORDERS) -> tuple[float, ...]:
    """Renyi divergences (integer orders >= 2) of one draw as in ``subset_draw_pmf``.

    (l - 1) rdp(l) = log(1 + sum_{j=2..l} binom(l, j) gamma^j T_j), T_2 = exp(mu^2) - 1,
    T_j = 2 exp(j (j - 1) mu^2 / 2) for j >= 3, for j = 3 also sqrt(2 T_2 exp(6 mu^2)).

    Proof. The integral of P^l Q^(1-l) is the sum over j of binom(l, j) gamma^j times the integral
    of (P0 - Q0)^j Q^(1-j); j = 1 vanishes. |d|^j / q^(j-1) is convex in q, so Q may be replaced by
    one Gaussian N(r) with r in the ball. For j >= 3, |a - b|^j <= a^j + b^j. For j = 2, with
    u = p - r and w = q - r, the integral is sum_k |u^k - w^k|^2 / k! over tensor powers; 1 / N(r)
    is log-convex in r, so r may be on the sphere; with t the diameter from r, |u|^2 <= u.t, both
    tensor powers lie in the ball with diameter t^k, and each term is at most mu^(2k) / k!.
    Needs clipping to a ball.
    """
    found = []
    log_gamma = math.log(gamma)
    log_t2 = mu**2 + math.log(-math.expm1(-(mu**2)))
    log_t3 = min(math.log(2) + 3 * mu**2, 0.5 * (math.log(2) + log_t2 + 6 * mu**2))
    for order in orders:
        j = np.arange(2, order + 1, dtype=float)
        log_t = math.log(2) + j * (j - 1) * mu**2 / 2
        log_t[0] = log_t2
        if order >= 3:
            log_t[1] = log_t3
        log_binom = gammaln(order + 1) - gammaln(j + 1) - gammaln(order - j + 1)
        terms = log_binom + j * log_gamma + log_t
        found.append(float(np.logaddexp(0.0, logsumexp(terms))) / (order - 1))
    return tuple(found)


# --- what a paper's formula would claim -----------------------------------------------------------


def claimed_by_wang(population: int, sigma: float, releases: int, delta: float) -> float:
    """epsilon by the formula of GS-WGAN's appendix A: subsampled RDP without replacement (Wang,
    Balle, Kasiviswanathan 2019) at rate 1 / ``population``, composed over all sample gradients as
    if each had a draw of its own. A claim to print beside what is proven, never a bound."""
    accountant = rdp.RdpAccountant(neighboring_relation=rdp.NeighborRel.REPLACE_ONE)
    event = GaussianDpEvent(sigma)
    if population > 1:
        event = SampledWithoutReplacementDpEvent(population, 1, event)
    accountant.compose(event, releases)
    return float(accountant.get_epsilon(delta))
