"""The noise of mechanisms against moments and tails of a Gaussian, over very many numbers.

    python scripts/check_noise.py [--numbers 1e9] [--seed 0]

Print the deviation of each moment in standard errors, and the number of values beyond each integer
number of standard deviations next to its expectation. Exit with 1 if a deviation has a probability
below 1e-6 in total.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time

import torch
from scipy import stats

from fedgen.privacy.gaussian_noise import rounded_gaussian
from fedgen.randomness import RandomStreams

_AT_ONCE = 2**22
_STD = 1024.0
_MOMENTS = range(1, 9)
_TAILS = range(1, 7)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numbers", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    streams, begin = RandomStreams.from_seed(chosen.seed, "seeded"), time.perf_counter()
    at_once = min(_AT_ONCE, math.ceil(chosen.numbers))
    turns = math.ceil(chosen.numbers / at_once)
    count, zeros = turns * at_once, torch.zeros(at_once, dtype=torch.float64)
    sums = torch.zeros(len(_MOMENTS), dtype=torch.float64)
    beyond = {(k, sign): 0 for k in _TAILS for sign in (1, -1)}
    for turn in range(turns):
        k = rounded_gaussian(zeros, _STD, streams, "check", turn)
        for tail, sign in beyond:
            beyond[tail, sign] += int((sign * k >= tail * _STD).sum())
        z, power = k / _STD, torch.ones(())
        for place in range(len(_MOMENTS)):
            power = power * z
            sums[place] += power.sum()
    level = 1e-6 / (len(_MOMENTS) + len(beyond))
    allowed, worst = stats.norm.isf(level / 2), 0.0
    for order, total in zip(_MOMENTS, sums.tolist(), strict=True):
        # rounding to integers adds a uniform on [-1/2, 1/2]: nothing to odd moments, to the second
        # 1 / (12 std^2), to the others less than a standard error
        exact = stats.norm.moment(order) + (order == 2) / (12 * _STD**2)
        error = math.sqrt((stats.norm.moment(2 * order) - stats.norm.moment(order) ** 2) / count)
        off = (total / count - exact) / error
        worst = max(worst, abs(off))
        print(f"moment {order}: {total / count:.9f}, should be {exact:.9f}: {off:+.2f} s.e.")
    for (tail, sign), seen in beyond.items():
        p = stats.norm.sf(tail - 0.5 / _STD)
        off = (seen - count * p) / math.sqrt(count * p)
        worst = max(worst, abs(off) if count * p > 100 else 0.0)
        print(f"beyond {sign * tail:+d} std: {seen:,}, should be {count * p:,.1f}: {off:+.2f}")
    record = {"numbers": count, "worst_in_standard_errors": round(worst, 2)}
    print(json.dumps({**record, "seconds": round(time.perf_counter() - begin, 1)}))
    sys.exit(1 if worst > allowed else 0)


if __name__ == "__main__":
    main()
