"""A target epsilon to the noise, the rounds or the rows that stay below it, by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from fedgen.errors import FedgenError

_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e6


def least_noise(
    epsilon_at: Callable[[float], float],
    target: float,
    rough_at: Callable[[float], float] | None = None,
    close: float = 1e-3,
) -> float:
    """The smallest noise multiplier with epsilon at most ``target``, to ``close`` and never above.

    Args:
        epsilon_at: noise multiplier -> epsilon, non-increasing.
        target: epsilon > 0.
        rough_at: a quick approximation of ``epsilon_at``, off by a factor that varies slowly: a few
            calls of ``epsilon_at`` are then enough.

    Raises:
        FedgenError: if no noise reaches the target.
    """
    close = min(close, target / 20)  # a thousandth is too coarse for a small target
    below = target - close / 2
    noise, factor = 1.0, 2.0
    if rough_at is not None:
        with suppress(FedgenError):  # the account may be too rough to be of use
            noise = least_noise(rough_at, target, close=target / 50)
            rough = rough_at(noise)
            if rough < target / 2:  # the rough estimate is too far off to start from
                return least_noise(epsilon_at, target, close=close)
            found, factor = epsilon_at(noise), 1.1
            if found == rough:  # it is not rough at all
                return least_noise(rough_at, target, close=close / 10)
            less = max(rough_at(1.1 * noise), target / 10)  # near zero it is no power
            slope = max(math.log(rough / less) / math.log(1.1), 0.1)
            for _ in range(5):
                if target - close < found <= target:
                    return noise
                if not target / 2 < found < 2 * target:
                    factor = 2.0
                    break
                # epsilon is nearly a power of the noise: what was found tells which
                again = noise * (found / below) ** (1 / slope)
                before, found = found, epsilon_at(again)
                if 0 < found < math.inf and found != before:
                    slope = max(math.log(before / found) / math.log(again / noise), 0.1)
                noise = again
    high, at_high = noise, epsilon_at(noise)
    low, at_low = high, at_high
    while at_high > target:
        low, at_low, high = high, at_high, factor * high
        if high > _MOST_NOISE:
            raise FedgenError(
                "privacy.target_epsilon",
                f"{target:g} cannot be reached by any noise",
                "raise it, or lower rounds",
            )
        at_high = epsilon_at(high)
    while at_low <= target:
        high, at_high, low = low, at_low, low / factor
        if low < _LEAST_NOISE:
            return high
        at_low = epsilon_at(low)
    turn = 0
    while target - at_high >= close and high / low > 1 + 1e-9:
        # epsilon is nearly a power of the noise: aim along it, and halve every third time
        middle, turn = math.sqrt(low * high), turn + 1
        if turn % 3 and math.inf > at_low > at_high > 0:
            aim = math.log(at_low / below) / math.log(at_low / at_high)
            middle = low * (high / low) ** min(max(aim, 1e-6), 1 - 1e-6)
        found = epsilon_at(middle)
        if found <= target:
            high, at_high = middle, found
        else:
            low, at_low = middle, found
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
