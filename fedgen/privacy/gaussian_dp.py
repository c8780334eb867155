"""Privacy profile of a Gaussian release, exact (Balle and Wang 2018, theorem 8)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr

_MAX_EPSILON = 1e100  # beyond, rounding errors exceed delta


def gaussian_delta(
    mu: float | NDArray[np.float64], eps: float | NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return δ at ``eps`` of Gaussian releases with sensitivity over standard deviation ``mu`` >
    0."""
    mu = np.asarray(mu, dtype=float)
    with np.errstate(over="ignore", under="ignore"):
        first = log_ndtr(mu / 2 - eps / mu)
        second = eps + log_ndtr(-mu / 2 - eps / mu)
        return np.asarray(np.exp(first) * -np.expm1(np.minimum(second - first, 0.0)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return ε at ``delta`` of Gaussian releases with sensitivity over standard deviation
    ``mu``."""
    return smallest_epsilon(lambda eps: float(gaussian_delta(mu, eps)), delta)


def smallest_epsilon(
    delta_at: Callable[[float], float], delta: float, tolerance: float = 1e-10
) -> float:
    """Return the smallest ε with ``delta_at(ε) <= delta``, found to ``tolerance`` and rounded up;
    infinity if there is none."""
    if delta_at(0.0) <= delta:
        return 0.0
    high = 1.0
    while delta_at(high) > delta:
        high *= 2
        if high > _MAX_EPSILON:
            return math.inf
    return (
        float(brentq(lambda eps: delta_at(eps) - delta, 0.0, high, xtol=tolerance)) + 10 * tolerance
    )
