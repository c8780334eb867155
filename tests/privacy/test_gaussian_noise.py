"""Gaussian noise on the integers: distribution and tails, independent of floating point."""

from __future__ import annotations

from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutation import kills
from numpy.typing import NDArray
from scipy import stats

from fedgen.privacy import gaussian_noise
from fedgen.privacy.aggregation import noised
from fedgen.privacy.gaussian_noise import MAX_STD, grid_spacing, rounded_gaussian
from fedgen.randomness import RandomStreams

STREAMS = RandomStreams.from_seed(3, "seeded")


class Bits(RandomStreams):
    """Random streams with given first words, and one repeated word after them."""

    def given(self, words: list[int], more: int = 0) -> Bits:
        self.__dict__.update(words=words, more=more)
        return self

    def at(self, *where: int | str) -> Bits:
        return Bits(b"", b"", b"", "seeded").given([], self.__dict__["more"])

    def noise_bits(self, count: int, *where: int | str) -> NDArray[np.uint64]:
        words = self.__dict__["words"] or [self.__dict__["more"]] * count
        return np.array(words, dtype=np.uint64)


def of_bits(words: list[int], mean: float, std: float, more: int = 0) -> list[int]:
    """Return the integers for these words."""
    streams = Bits(b"", b"", b"", "seeded").given(words, more)
    means = torch.full((len(words),), mean, dtype=torch.float64)
    return [int(each) for each in rounded_gaussian(means, std, streams)]


def below(boundary: Fraction, mean: float, std: float) -> mpmath.mpf:
    """Return the probability that a Gaussian is below a boundary, to 300 bits."""
    with mpmath.workprec(400):
        at = mpmath.mpf(boundary.numerator) / boundary.denominator
        return mpmath.ncdf((at - mpmath.mpf(mean)) / mpmath.mpf(std))


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.37, 3.0), (-2.5, 0.8)])
def test_the_distribution_on_the_integers(mean: float, std: float) -> None:
    """Chi-squared at level 1e-6 over 400,000 values, on integers expected 20 times or more."""
    count = 400_000
    result = rounded_gaussian(torch.full((count,), mean, dtype=torch.float64), std, STREAMS).numpy()
    k = np.arange(-200, 201)
    expected = count * np.diff(stats.norm.cdf(np.append(k, 201) - 0.5, mean, std))
    often = expected >= 20
    seen = np.array([(result == each).sum() for each in k[often]])
    rest = count - seen.sum(), count - expected[often].sum()
    observed, promised = np.append(seen, rest[0]), np.append(expected[often], rest[1])
    assert stats.chisquare(observed, promised).pvalue > 1e-6
    assert stats.chisquare(np.roll(observed, 1), promised).pvalue < 1e-6


@kills(
    "fedgen/privacy/gaussian_noise.py",
    "(noisy.sub_(shift).abs_() < 0.5 - _ERROR) & (magnitude >= _MIN_MAGNITUDE)",
    "noisy.sub_(shift).abs_() < 0.5 - _ERROR",
)
@kills(
    "fedgen/privacy/gaussian_noise.py",
    "(noisy.sub_(shift).abs_() < 0.5 - _ERROR) & (magnitude >= _MIN_MAGNITUDE)",
    "magnitude >= _MIN_MAGNITUDE",
)
@pytest.mark.parametrize("power", [2, 8, 24, 28, 29, 40, 63, 64, 80, 100])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_tails_have_their_probability(power: int, sign: int) -> None:
    """By construction: among bit strings with the prefix of U = 2^-power, those above and below a
    boundary between two integers give one and the other, at the exact bit. The first 64 bits are a
    sign and 63 bits of U in (0, 1/2); more follow if needed."""
    mean, std = 0.125, 1000.0
    with mpmath.workprec(400):
        z = -mpmath.sqrt(2) * mpmath.erfinv(1 - mpmath.ldexp(1, 1 - power))
        k = int(mpmath.nint(mean - sign * std * z))  # of where U is 2^-power
        edge = Fraction(2 * k + 1, 2)
        u = below(edge, mean, std) if sign < 0 else 1 - below(edge, mean, std)
        digits = int(mpmath.floor(mpmath.ldexp(u, 128)))  # U to 127 bits behind its sign
    for step, expected in ((-1, 1), (0, None), (1, 0)):
        word, more = divmod(digits + 2 * step, 2**64)
        outer = k + 1 if sign > 0 else k
        inner = k if sign > 0 else k + 1
        result = of_bits([word | (2**63 if sign < 0 else 0)], mean, std, more)
        if expected is not None:
            assert result == [outer if expected else inner]
        else:
            assert result[0] in (outer, inner)


@given(
    st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20),
    st.floats(-1e6, 1e6),
    st.floats(2.0**-20, MAX_STD),
)
@settings(max_examples=30)
def test_both_signs_are_mirror_images(words: list[int], mean: float, std: float) -> None:
    up = of_bits(words, mean, std, more=12345)
    down = of_bits([word | 2**63 for word in words], -mean, std, more=12345)
    assert up == [-each for each in down]


@kills(
    "fedgen/privacy/gaussian_noise.py",
    "noisy = noisy.mul_(std).add_(remainder)",
    "noisy = noisy.mul_(float(torch.tensor(std))).add_(remainder)",
)
@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=10),
    st.floats(8, MAX_STD),
    st.integers(8, 40),
    st.sampled_from([1, -1]),
)
@settings(max_examples=60)
def test_floating_point_agrees_with_exact_arithmetic(
    words: list[int], std: float, power: int, side: int
) -> None:
    """Near a boundary between two integers, by 2^-8 to 2^-40 on either side."""
    for word in words:
        signed = word - 2**64 if word >= 2**63 else word
        more = Bits(b"", b"", b"", "seeded").given([], 999)
        with mpmath.workprec(300):
            u = mpmath.ldexp(2 * (word % 2**63) + 1, -65)
            z = mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * u) * (-1 if signed < 0 else 1)
            apart = mpmath.mpf(0.5) + side * mpmath.ldexp(1, -power) - std * z
            mean = float(apart - mpmath.nint(apart))
        assert of_bits([word], mean, std, more=999) == [
            gaussian_noise._resolve(mean, std, signed, more)
        ]


def test_the_inverse_normal_has_the_required_precision() -> None:
    """Against mpmath, to 2^-44 (its precision is 2^-46), down to where exact arithmetic takes
    over."""
    rng = np.random.default_rng(0)
    u = np.concatenate([2.0 ** -rng.uniform(1, 29, 2000), rng.uniform(0.3, 0.5, 500), [2.0**-29]])
    z = torch.special.ndtri(torch.from_numpy(u)).numpy()
    with mpmath.workprec(200):
        exact = [-mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * mpmath.mpf(float(each))) for each in u]
        worst = max(abs(a - mpmath.mpf(float(b))) for a, b in zip(exact, z, strict=True))
    assert worst < 2.0**-44


def test_noise_does_not_depend_on_the_number_of_threads() -> None:
    mean = torch.linspace(-5, 5, 300_000, dtype=torch.float64)
    result = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        result.append(rounded_gaussian(mean, 1500.0, STREAMS, "threads"))
    torch.set_num_threads(1)
    assert torch.equal(*result)


def test_large_integers_are_kept() -> None:
    far = torch.tensor([2.0**60, -(2.0**60), 1e300], dtype=torch.float64)
    assert torch.equal(rounded_gaussian(far, 1.0, STREAMS), far)


@kills("fedgen/privacy/gaussian_noise.py", "integers.add_(shift).add_(0.0)", "integers.add_(shift)")
@pytest.mark.parametrize("mean", [0.0, -0.0, -1e-6, 1e-6, -0.25, -0.5, 0.5])
def test_zero_has_one_encoding(mean: float) -> None:
    """The sign of a rounded zero would reveal the sign of the mean."""
    drawn = rounded_gaussian(torch.full((20_000,), mean, dtype=torch.float64), 2.0, STREAMS)
    assert (drawn == 0).any() and not torch.signbit(drawn[drawn == 0]).any()
    released = noised(torch.full((20_000,), mean), 1.0, STREAMS.at(str(mean))).numpy()
    assert (released == 0).any()
    assert not np.signbit(released[released == 0]).any()


@pytest.mark.parametrize("std", [0.0, -1.0, 2.0**11 + 1, float("nan")])
def test_a_std_without_a_proof_is_refused(std: float) -> None:
    with pytest.raises(ValueError, match="std"):
        rounded_gaussian(torch.zeros(1), std, STREAMS)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_invalid_mean_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        rounded_gaussian(torch.tensor([0.0, bad]), 1.0, STREAMS)


@given(st.floats(1e-300, 1e300), st.integers(0, 20))
def test_the_grid_follows_from_the_noise(std: float, bits: int) -> None:
    assert 2.0**bits <= std / grid_spacing(std, bits) < 2.0 ** (bits + 1)
