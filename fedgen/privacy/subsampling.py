"""Privacy of secret sampling, bounded by privacy loss distributions and by Renyi divergences.

Both bounds hold for sampling where two neighbouring data sets behave identically when the changed
data are not sampled: sampling of disjoint subsets (critics, clients) and of records. They do not
hold if unsampled subsets may reveal past sampling, like critics that train only when they are
sampled: ``tests/privacy/test_subsampling.py`` contains a counterexample with exact numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from dp_accounting.pld import pld_pmf
from numpy.typing import NDArray
from scipy.special import gammaln, log_ndtr, logsumexp, ndtr

ORDERS: tuple[int, ...] = (*range(2, 65), *range(68, 257, 4), *range(272, 1025, 16))
"""Renyi orders of secret sampling."""


def largest_loss(gamma: float, mu: float) -> float:
    """Return the loss above which a sample has mass below 1e-18."""
    loss = mu**2 / 2 + 9 * mu
    return loss if loss > 700 else math.log1p(gamma * math.expm1(loss))


def subset_sampling_pmf(gamma: float, mu: float, step: float) -> pld_pmf.PLDPmf:
    """Return the privacy loss distribution that dominates one secret sample of a fraction ``gamma``
    of disjoint subsets with one Gaussian release of diameter over standard deviation ``mu``.

    Setting. A rule independent of the data forms K disjoint subsets; the contribution of each is
    clipped to norm C. The release is the (mean) contribution of the subsets in a fresh secret
    sample, plus noise. Neighbours replace one record, hence change one subset. A contribution may
    depend on the past, but not on past samples: subsets train on a public schedule. Sampling a
    batch of records is the same: ``gamma`` n out of n without replacement, or each with probability
    ``gamma``, where neighbours replace one record. The release is then a function of the batch with
    values in a ball, or a sum of clipped contributions; a batch that contains the record is coupled
    with the batch that contains another record in its place, or (Poisson) no record in its place.

    Profile. f(a) = gamma * delta_G(log(1 + (a - 1) / gamma); mu) for a >= 1 and f(a) = 1 - a + a *
    f(1 / a) below 1.

    Proof. With probability 1 - gamma the changed subset is not sampled, and the output is the same
    mixture R on both sides: P = (1 - gamma) R + gamma P0, Q = (1 - gamma) R + gamma Q0. All
    components are Gaussians whose means differ by at most the diameter (for samples of more than
    one, one sampled member is exchanged for another), so any two are at most the Gaussian profile
    apart. For a >= 1, a0 = 1 + (a - 1) / gamma and b = a / a0, advanced joint convexity (Balle,
    Barthe, Gaboardi 2018, theorem 2) gives H_a(P|Q) = gamma H_a0(P0 | (1 - b) R + b Q0) <= f(a);
    for a < 1, H_a(P|Q) = 1 - a + a H_{1/a}(Q|P) <= f(a). f is convex, non-increasing, f(0) = 1 and
    f(a) >= max(0, 1 - a): it is the profile of a pair that dominates every step for any past, and
    products of dominating pairs dominate adaptive composition (Zhu, Dong, Wang 2022).

    Numerics. Above zero the loss of the pair is that of the mixture (1 - gamma) N(0, 1) + gamma
    N(mu, 1) against N(0, 1); below zero it is mirrored; the remaining mass is at zero. Bin masses
    are differences of normal tails, exact up to rounding, and the two masses of a bin (under P and
    under Q) are placed on its end points, which connects the dots of the profile from above
    (Doroshenko et al. 2022).
    """
    cells = max(math.ceil(largest_loss(gamma, mu) / step), 1)
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
    """Return log(1 + (exp(loss) - 1) / gamma), also where exp(loss) overflows."""
    with np.errstate(over="ignore"):
        direct = np.log1p(np.expm1(loss) / gamma)
    return np.asarray(np.where(loss < 500, direct, loss - math.log(gamma)), dtype=np.float64)


def _interval_masses(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return N(0, 1) masses between consecutive increasing points, without cancellation in the
    tails."""
    upper = ndtr(-points)
    lower = ndtr(points)
    return np.asarray(np.where(points[:-1] > 0, upper[:-1] - upper[1:], lower[1:] - lower[:-1]))


@lru_cache(maxsize=256)
def subset_sampling_rdp(
    gamma: float, mu: float, orders: Sequence[int] = ORDERS
) -> tuple[float, ...]:
    """Return Renyi divergences (integer orders >= 2) of one sample as in ``subset_sampling_pmf``.

    (l - 1) rdp(l) = log(1 + sum_{j=2..l} binom(l, j) gamma^j T_j), T_2 = exp(mu^2) - 1,
    T_j = 2 exp(j (j - 1) mu^2 / 2) for j >= 3, for j = 3 also sqrt(2 T_2 exp(6 mu^2)).

    Proof. The integral of P^l Q^(1-l) is the sum over j of binom(l, j) gamma^j times the integral
    of (P0 - Q0)^j Q^(1-j); j = 1 vanishes. |d|^j / q^(j-1) is convex in q, so Q may be replaced by
    one Gaussian N(r) with r in the ball. For j >= 3, |a - b|^j <= a^j + b^j. For j = 2, with
    u = p - r and w = q - r, the integral is sum_k |u^k - w^k|^2 / k! over tensor powers; 1 / N(r)
    is log-convex in r, so r may be on the sphere; with t the diameter from r, |u|^2 <= u.t, both
    tensor powers lie in the ball with diameter t^k, and each term is at most mu^(2k) / k!.
    Requires clipping to a ball.
    """
    divergences = []
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
        divergences.append(float(np.logaddexp(0.0, logsumexp(terms))) / (order - 1))
    return tuple(divergences)


def group_sampling_pmfs(
    counts: NDArray[np.float64], weights: NDArray[np.float64], sigma: float, step: float
) -> tuple[pld_pmf.PLDPmf, pld_pmf.PLDPmf]:
    """Return the privacy loss distributions of removing and of adding a person with several records
    that dominate one sum of clipped records over a Poisson batch plus Gaussian noise of ``sigma``
    clip norms: sum_k w_k N(k, sigma^2) against N(0, sigma^2) (Ganesh 2024, "Tight group-level DP
    guarantees for DP-SGD with sampling via mixture of Gaussians mechanisms", for Poisson sampling:
    it also holds for vectors in any directions, and for adaptive steps).

    The profile at each point of a grid is evaluated at the threshold where the loss of the pair
    equals that point, and its dots are connected (Doroshenko et al. 2022). Beyond 9 standard
    deviations the mass, below 1e-18, counts as infinite loss, or as the smallest loss.

    Args:
        counts: k, ascending, the possible numbers of the person's records in a batch.
        weights: w_k, their probabilities.
    """
    squared = sigma**2
    heights = np.log(weights) - counts**2 / (2 * squared)

    def loss(x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the loss at points, and its derivative."""
        value, slope = np.empty_like(x), np.empty_like(x)
        for start in range(0, len(x), 2**16):
            part = slice(start, start + 2**16)
            terms = heights + counts * x[part, None] / squared
            value[part] = logsumexp(terms, axis=1)
            slope[part] = np.exp(terms - value[part, None]) @ counts / squared
        return value, slope

    ends = np.array([-9 * sigma, counts[-1] + 9 * sigma])
    low, high = loss(ends)[0]
    points = np.arange(math.floor(low / step), math.ceil(high / step) + 1)
    grid = points * step
    dense = np.linspace(ends[0], ends[1], 20_001)
    x = np.interp(grid, loss(dense)[0], dense)
    for _ in range(4):  # Newton's method: the loss is convex and increasing
        value, slope = loss(x)
        x = np.clip(x - (value - grid) / np.maximum(slope, 1e-300), *ends)
    above, below = np.zeros_like(x), np.full_like(x, -np.inf)  # below: a logarithm
    for k, w in zip(counts, weights, strict=True):
        above += w * ndtr((k - x) / sigma)
        below = np.logaddexp(below, math.log(w) + log_ndtr((x - k) / sigma))
    # the exponent combines a large and a small factor that would overflow separately
    removed = np.clip(above - np.exp(grid + log_ndtr(-x / sigma)), 0.0, 1.0)
    added = np.clip(ndtr(x / sigma) - np.exp(below - grid), 0.0, 1.0)[::-1]
    pmfs = [
        pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
            step, int(first), int(last), np.minimum.accumulate(profile)
        )
        for first, last, profile in (
            (points[0], points[-1], removed),
            (-points[-1], -points[0], added),
        )
    ]
    return pmfs[0], pmfs[1]
