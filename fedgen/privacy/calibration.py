"""A target epsilon to the noise, the rounds or the rows that stay below it, by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable

from fedgen.errors import FedgenError

_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e6


def least_noise(epsilon_at: Callable[[float], float], target: float) -> float:
    """The smallest noise multiplier with epsilon at most ``target``, to 1e-3 in epsilon and never
    above it.

    Args:
        epsilon_at: noise multiplier -> epsilon, non-increasing.
        target: epsilon > 0.

    Raises:
        FedgenError: if no noise reaches the target.
    """
    high = 1.0
    while epsilon_at(high) > target:
        high *= 2
        if high > _MOST_NOISE:
            raise FedgenError(
                "privacy.target_epsilon",
                f"{target:g} cannot be reached by any noise",
                "raise it, or lower rounds",
            )
    low = high / 2
    while epsilon_at(low) <= target:
        high, low = low, low / 2
        if low < _LEAST_NOISE:
            return high
    while True:
        middle = math.sqrt(low * high)
        found = epsilon_at(middle)
        if found <= target:
            high = middle
            if target - found < 1e-3:
                return high
        else:
            low = middle
        if high / low < 1 + 1e-9:
            return high


def most_repetitions(epsilon_at: Callable[[int], float], target: float, limit: int) -> int:
    """The largest count <= ``limit`` with epsilon at most ``target``; ``epsilon_at`` is
    non-decreasing in the count. 0 if not even one fits."""
    if epsilon_at(limit) <= target:
        return limit
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        if epsilon_at(middle) <= target:
            low = middle
        else:
            high = middle
    return low
