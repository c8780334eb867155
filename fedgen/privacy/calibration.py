"""Bisection for the noise, rounds or query samples whose ε stays below a target."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from fedgen.errors import FedgenError

_MIN_NOISE, _MAX_NOISE = 1e-3, 1e6


def min_noise_multiplier(
    epsilon_at: Callable[[float], float],
    target: float,
    rough_at: Callable[[float], float] | None = None,
    tolerance: float = 1e-3,
    key: str = "privacy.target_epsilon",
) -> float:
    """Return the smallest noise multiplier with ε at most ``target``, up to ``tolerance`` in ε:
    never above the target.

    Args:
        epsilon_at: noise multiplier -> ε, or another measure, non-increasing.
        target: ε > 0.
        key: setting of the target, for the error.
        rough_at: fast approximation of ``epsilon_at``, off by a slowly varying factor, with which a
            few calls of ``epsilon_at`` suffice.

    Raises:
        FedgenError: if no noise reaches the target.
    """
    tolerance = min(tolerance, target / 20)  # a small target needs a finer tolerance
    below = target - tolerance / 2
    noise, factor = 1.0, 2.0
    if rough_at is not None:
        with suppress(FedgenError):  # the approximation may be too rough
            noise = min_noise_multiplier(rough_at, target, tolerance=target / 50)
            rough = rough_at(noise)
            if rough < target / 2:  # the rough estimate is too far off to start from
                return min_noise_multiplier(epsilon_at, target, tolerance=tolerance)
            epsilon, factor = epsilon_at(noise), 1.1
            if epsilon == rough:  # the approximation is exact
                return min_noise_multiplier(rough_at, target, tolerance=tolerance / 10)
            less = max(rough_at(1.1 * noise), target / 10)  # near 0, ε is no power of the noise
            slope = max(math.log(rough / less) / math.log(1.1), 0.1)
            for _ in range(5):
                if target - tolerance < epsilon <= target:
                    return noise
                if not target / 2 < epsilon < 2 * target:
                    factor = 2.0
                    break
                # ε is nearly a power of the noise: estimate the exponent
                guess = noise * (epsilon / below) ** (1 / slope)
                previous, epsilon = epsilon, epsilon_at(guess)
                if 0 < epsilon < math.inf and epsilon != previous:
                    slope = max(math.log(previous / epsilon) / math.log(guess / noise), 0.1)
                noise = guess
    high, at_high = noise, epsilon_at(noise)
    low, at_low, iteration = high, at_high, 0
    while at_high > target:
        low, at_low, high = high, at_high, factor * high
        if high > _MAX_NOISE:
            raise FedgenError(key, f"no noise reaches {target:g}", "raise it, or lower rounds")
        at_high = epsilon_at(high)
    while at_low <= target:
        high, at_high, low = low, at_low, low / factor
        if low < _MIN_NOISE:
            return high
        at_low = epsilon_at(low)
    while target - at_high >= tolerance and high / low > 1 + 1e-9:
        # ε is nearly a power of the noise: interpolate, and bisect every third time
        middle, iteration = math.sqrt(low * high), iteration + 1
        if iteration % 3 and math.inf > at_low > at_high > 0:
            position = math.log(at_low / below) / math.log(at_low / at_high)
            middle = low * (high / low) ** min(max(position, 1e-6), 1 - 1e-6)
        epsilon = epsilon_at(middle)
        if epsilon <= target:
            high, at_high = middle, epsilon
        else:
            low, at_low = middle, epsilon
    return high


def max_repetitions(epsilon_at: Callable[[int], float], target: float, limit: int) -> int:
    """Return the largest count <= ``limit`` with ε at most ``target``; 0 if one is too many.

    ``epsilon_at`` is non-decreasing in the count.
    """
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
