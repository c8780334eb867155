"""Exact Gaussian noise on the integers: round(mean + std Z) with Z standard Gaussian.

Z is the inverse normal distribution function of a uniform number with as many bits as needed, so
that each integer has exactly the probability that the Gaussian around ``mean`` assigns to the
numbers that round to it, including the tails. Nothing needs to be charged to delta; the only
assumption is that the bits of ``RandomStreams`` are indistinguishable from random.

Floating point decides almost always: from 64 bits (a sign, and 63 bits of a uniform in (0, 1/2)) it
determines Z within 2^-37, and the integer is final if no rounding boundary lies that close. For the
rest, about 4 in 10^8 numbers, further bits and arbitrary precision decide. This is lazy inversion
(Devroye 1986, section II.2; Karney 2016 for an exact Gaussian): the integer does not depend on the
rounding of floating point, so it is the same on every processor and for any number of threads.

The constant ``_ERROR``: the 63 bits determine U within 2^-65 of the centre of its interval, which
is 2^-65 / phi(z) in z; down to U = 2^-29, phi(z) exceeds z U > 2^-27 (Mills' ratio), so this is
below 2^-38. U in double precision has an error of 2^-53 U, which is below 2^-52 in z. ``ndtri``
(Cephes) is accurate to 2^-46 there; ``tests/privacy/test_gaussian_noise.py`` compares it with
mpmath, to 2^-44. Together the error of z is below 2^-37, and with the rounding of std z, which is
below 2^14, the error of the number before it is rounded to an integer is below 2^-26.
"""

from __future__ import annotations

import math

import mpmath
import torch
from torch import Tensor

from fedgen.randomness import DomainPart, RandomStreams

MAX_STD = 2.0**11
"""Largest standard deviation that the error bound below covers."""

_ERROR = 2.0**-26
_MIN_MAGNITUDE = 2**35  # of the 63 bits; below, U < 2^-29
_MAGNITUDE = 2**63 - 1
_CHUNK = {"cpu": 2**17}  # entries that fit the CPU cache
_MAX_CHUNK = 2**24  # on other devices, each chunk synchronizes


def rounded_gaussian(
    mean: Tensor, std: float, streams: RandomStreams, *where: DomainPart
) -> Tensor:
    """Return round(mean + std Z) in double precision, with an independent Z for each entry.

    A zero is always positive, so that each integer has one encoding: the sign of a zero would
    reveal the sign of ``mean``.

    Args:
        mean: finite values of any shape, on any device, taken as exact numbers. A result beyond
            2^53 is rounded to double precision.
        std: standard deviation in (0, ``MAX_STD``].
        streams, where: random stream of the bits, which are copied to the device of ``mean``.

    Raises:
        ValueError: for a std out of range, or a mean that is not finite.
    """
    if not 0 < std <= MAX_STD:
        raise ValueError(f"std must be above 0 and at most {MAX_STD:g}, got {std:g}")
    means = mean.to(torch.float64).flatten()
    words = torch.from_numpy(streams.noise_bits(means.numel(), *where).view("int64"))
    rounded = torch.empty_like(means)
    size = _CHUNK.get(means.device.type, _MAX_CHUNK)
    for start in range(0, len(means), size):
        chunk = slice(start, start + size)
        bits, integers = words[chunk].to(means.device), means[chunk].round()
        remainder = means[chunk] - integers  # exact
        magnitude = bits & _MAGNITUDE
        z = torch.special.ndtri(magnitude.to(torch.float64).add_(0.5).mul_(2.0**-64))
        noisy = z.mul_(torch.where(bits < 0, 1.0, -1.0))  # the top bit is the sign
        noisy = noisy.mul_(std).add_(remainder)
        shift = noisy.round()
        # also false for non-finite means, so that nonzero() alone synchronizes with the device
        is_decided = (noisy.sub_(shift).abs_() < 0.5 - _ERROR) & (magnitude >= _MIN_MAGNITUDE)
        for index in is_decided.logical_not().nonzero().flatten().tolist():
            if not bool(means[start + index].isfinite()):
                raise ValueError("a mean must be finite")
            further = streams.at(*where, "more", start + index)
            shift[index] = _resolve(float(remainder[index]), std, int(bits[index]), further)
        rounded[chunk] = integers.add_(shift).add_(0.0)  # -0.0 + 0.0 is 0.0
    return rounded.view(mean.shape)


def _resolve(mean: float, std: float, word: int, further: RandomStreams) -> int:
    """Return the integer, using as many bits as needed. ``word``: the first 64 bits, with the sign
    on top."""
    sign, magnitude, digits, count = (-1 if word < 0 else 1), word & _MAGNITUDE, 63, 0
    while True:
        candidates = set()
        # rounding errors of mpmath are far below the uncertainty of U
        with mpmath.workprec(2 * digits + 200):
            for u in (magnitude, magnitude + 1) if magnitude else ():
                length = mpmath.sqrt(2) * mpmath.erfinv(1 - mpmath.ldexp(u, -digits))
                candidates.add(int(mpmath.floor(mean + sign * std * length + mpmath.mpf(0.5))))
        if len(candidates) == 1:
            return candidates.pop()
        magnitude = magnitude << 64 | int(further.noise_bits(1, count)[0])
        digits, count = digits + 64, count + 1


def grid_spacing(std: float, bits: int) -> float:
    """Return the power of two that is 2^bits to 2^(bits + 1) times smaller than ``std``, a function
    of ``std`` alone."""
    return 2.0 ** (math.floor(math.log2(std)) - bits)
