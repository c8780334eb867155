"""Gaussian noise on the integers, to the last bit: round(mean + std Z), Z standard Gaussian.

Z is the inverse normal distribution function of a uniform number that has as many bits as it takes,
so that each integer has exactly the probability that the Gaussian around ``mean`` gives to what is
rounded to it, however far out, and nothing is left to be charged to delta but that the bits of
``Coins`` pass for fair ones.

Floating point decides nearly all: from 64 bits (a sign, and 63 of a uniform in (0, 1/2)) it knows Z
to within 2^-37, and an integer is settled if no rounding boundary lies that near. For the rest,
some 4 in 10^8 numbers, further bits and as many digits as they need decide. That is inversion, done
lazily (Devroye 1986, section II.2; Karney 2016 for a Gaussian to the last bit): the integer does
not depend on how floating point rounds, so that it is the same on every processor and on any number
of threads.

``_ERROR``: the 63 bits leave U open by 2^-65 on each side of their middle, which is 2^-65 / phi(z)
in z; down to U = 2^-29, phi(z) is above z U > 2^-27 (Mills' ratio), so this is below 2^-38. U in
double precision is off by 2^-53 U, which is below 2^-52 in z. ``ndtri`` (Cephes) is good to 2^-46
there: ``tests/privacy/test_noise.py`` holds it against mpmath, to 2^-44. Together that is below
2^-37 for z, and with the rounding of std z, which is below 2^14, below 2^-26 for what is rounded to
the integer.
"""

from __future__ import annotations

import math

import mpmath
import torch
from torch import Tensor

from fedgen.coins import Coins, Where

MOST_STD = 2.0**11
"""The largest std that the error below is derived for."""

_ERROR = 2.0**-26
_LEAST = 2**35  # of the 63 bits: below, U < 2^-29
_MAGNITUDE = 2**63 - 1
_AT_ONCE = {"cpu": 2**17}  # numbers: what a CPU's caches hold
_MOST_AT_ONCE = 2**24  # elsewhere: each turn waits for the device


def rounded_gaussian(mean: Tensor, std: float, coins: Coins, *where: Where) -> Tensor:
    """Return round(mean + std Z) in double precision, with an independent Z for each entry.

    A zero is always positive, so that each integer has one encoding: the sign of a zero would
    reveal the sign of ``mean``.

    Args:
        mean: finite values of any shape, on any device, taken as exact numbers. A result beyond
            2^53 is rounded to double precision.
        std: standard deviation in (0, ``MOST_STD``].
        coins, where: random stream of the bits, which are copied to the device of ``mean``.

    Raises:
        ValueError: for a std out of range, or a mean that is not finite.
    """
    if not 0 < std <= MOST_STD:
        raise ValueError(f"std must be above 0 and at most {MOST_STD:g}, got {std:g}")
    exact = mean.to(torch.float64).flatten()
    words = torch.from_numpy(coins.noise_bits(exact.numel(), *where).view("int64"))
    if not bool(exact.isfinite().all()):
        raise ValueError("a mean must be finite")
    rounded = torch.empty_like(exact)
    at_once = _AT_ONCE.get(exact.device.type, _MOST_AT_ONCE)
    for start in range(0, len(exact), at_once):
        some = slice(start, start + at_once)
        bits, whole = words[some].to(exact.device), exact[some].round()
        rest = exact[some] - whole  # exactly
        magnitude = bits & _MAGNITUDE
        z = torch.special.ndtri(magnitude.to(torch.float64).add_(0.5).mul_(2.0**-64))
        noisy = z.mul_(torch.where(bits < 0, 1.0, -1.0))  # the top bit is the sign
        noisy = noisy.mul_(std).add_(rest)
        moved = noisy.round()
        open_ = (noisy.sub_(moved).abs_() >= 0.5 - _ERROR) | (magnitude < _LEAST)
        for place in open_.nonzero().flatten().tolist():
            more = coins.at(*where, "more", start + place)
            moved[place] = _settled(float(rest[place]), std, int(bits[place]), more)
        rounded[some] = whole.add_(moved).add_(0.0)  # -0.0 + 0.0 is 0.0
    return rounded.view(mean.shape)


def _settled(mean: float, std: float, word: int, more: Coins) -> int:
    """The integer, from as many bits as it takes. ``word``: the first 64, the top one the sign."""
    sign, whole, digits, turn = (-1 if word < 0 else 1), word & _MAGNITUDE, 63, 0
    while True:
        ends = set()
        # what mpmath rounds is by far below what U leaves open
        with mpmath.workprec(2 * digits + 200):
            for u in (whole, whole + 1) if whole else ():
                length = mpmath.sqrt(2) * mpmath.erfinv(1 - mpmath.ldexp(u, -digits))
                ends.add(int(mpmath.floor(mean + sign * std * length + mpmath.mpf(0.5))))
        if len(ends) == 1:
            return ends.pop()
        whole = whole << 64 | int(more.noise_bits(1, turn)[0])
        digits, turn = digits + 64, turn + 1


def grid_of(std: float, bits: int) -> float:
    """The power of two that is 2^bits to 2^(bits + 1) times below ``std``, and follows from it
    alone."""
    return 2.0 ** (math.floor(math.log2(std)) - bits)
