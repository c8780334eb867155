"""The noise of a sum: distribution and range of secure sums, and the share of each client."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutation import kills
from scipy import stats
from tiny import STREAMS

from fedgen.errors import FedgenError
from fedgen.methods.api import PublicFacts
from fedgen.privacy import aggregation
from fedgen.privacy.aggregation import LOCAL, Aggregation, Secure, Share, Trusted
from fedgen.privacy.batch_sampling import FullBatch, Participation
from fedgen.privacy.bounds import Ball
from fedgen.privacy.clipping import sum_of_rows
from fedgen.privacy.events import Relation, Unit
from fedgen.privacy.gaussian_noise import grid_spacing
from fedgen.privacy.mechanisms import (
    ClientGaussian,
    JointGaussian,
    RowGaussian,
    SumGaussian,
)
from fedgen.privacy.mechanisms import aggregator as total_of
from fedgen.privacy.routing import Routing
from fedgen.randomness import RandomStreams

ADD_OR_REMOVE = Relation.ADD_OR_REMOVE_ONE
SIZE = 60_000


def share(
    kind: str, meeting: Aggregation, client: int, sigma: float = 1.5, what: float = 0.0
) -> tuple[np.ndarray, object]:
    """Return the share of a client for each mechanism: a contribution of ``what`` in every
    entry."""
    streams, vector = STREAMS.at(kind, client), torch.full((1, SIZE), what)
    if kind == "client":
        own = ClientGaussian(0.5, sigma, ADD_OR_REMOVE, aggregation=meeting)
        return own.release(SIZE, lambda: vector, streams).arrays["answer"], own
    if kind == "not drawn":
        never = ClientGaussian(0.5, sigma, ADD_OR_REMOVE, Participation(1e-9), meeting)
        return never.release(SIZE, lambda: vector, streams).arrays["answer"], never
    if kind == "sum":
        of_sum = SumGaussian(0.5, sigma, FullBatch(), 8.0, ADD_OR_REMOVE, Unit.RECORD, meeting)
        return of_sum.release((SIZE,), [sum_of_rows(vector, 0.5)], streams).arrays["answer"], of_sum
    if kind == "joint":
        joint = JointGaussian(0.5, sigma, FullBatch(), ADD_OR_REMOVE, Unit.RECORD, meeting)
        return joint.release(vector, streams).arrays["answer"], joint
    rows = RowGaussian(
        Ball(0.5),
        sigma,
        Routing("mean", 1),
        True,
        Unit.CLIENT,
        ADD_OR_REMOVE,
        aggregation=meeting,
    )
    return rows.release((1, SIZE), [(torch.arange(1), vector)], streams).arrays["answer"], rows


@kills(
    "fedgen/privacy/aggregation.py",
    "return std / math.sqrt(self.honest)",
    "return std / math.sqrt(self.asked)",
)
@kills(
    "fedgen/privacy/aggregation.py",
    "return std / math.sqrt(self.honest)",
    "return std / self.honest",
)
@kills(
    "fedgen/privacy/aggregation.py",
    "return self.threshold - self.colluders",
    "return self.threshold",
)
@kills(
    "fedgen/privacy/mechanisms.py",
    "return self.aggregation.sent(exact, self.std, event, self.unit, streams)",
    (
        "std = self.std if exact.any() else 1e-9 * self.std\n"
        "        return self.aggregation.sent(exact, std, event, self.unit, streams)"
    ),
)
@pytest.mark.parametrize("kind", ["client", "not drawn", "sum", "joint", "rows"])
@pytest.mark.parametrize(("asked", "threshold", "colluders"), [(5, 4, 1), (3, 3, 0), (2, 2, 1)])
def test_the_counted_shares_have_the_stated_noise(
    kind: str, asked: int, threshold: int, colluders: int
) -> None:
    """The variance of h shares is within the chi-squared interval of level 1e-6, also for clients
    without contributions; noise with one share too few, or with shares calibrated to all n clients,
    is outside."""
    meeting = Secure(asked, threshold, colluders)
    words, mechanism = zip(
        *(share(kind, meeting, client) for client in range(threshold - colluders)), strict=True
    )
    noise = total_of(mechanism[0])(list(words), 0, STREAMS).numpy()
    statistic = float((noise**2).sum()) / mechanism[0].std ** 2
    low, high = stats.chi2.interval(1 - 1e-6, noise.size)
    assert low < statistic < high
    for wrong in ((threshold - colluders - 1) / meeting.honest, meeting.honest / asked):
        assert wrong == 1 or not low < statistic * wrong < high


@kills(
    "fedgen/privacy/aggregation.py",
    'torch.from_numpy(words.view(f"i{self.bits // 8}").astype(np.float64))',
    "torch.from_numpy(words.astype(np.float64))",
)
@pytest.mark.parametrize("kind", ["client", "sum", "joint", "rows"])
def test_the_sum_of_n_shares_is_distributed_like_one_release(kind: str) -> None:
    """Kolmogorov-Smirnov at level 1e-6. Noise of one share less would be detected."""
    alone, _ = share(kind, LOCAL, 0, what=0.002)
    for clients in (2, 10):
        meeting = Secure(clients, clients, 0)
        parts = [share(kind, meeting, c + 1, what=0.002 / clients) for c in range(clients)]
        total = total_of(parts[0][1])([words for words, _ in parts], 0, STREAMS).numpy()
        assert stats.ks_2samp(total.ravel(), alone.ravel()).pvalue > 1e-6
        off_by_one = total * math.sqrt(clients / (clients - 1))
        if clients == 2:
            assert stats.ks_2samp(off_by_one.ravel(), alone.ravel()).pvalue < 1e-6


@given(st.floats(-1, 1), st.floats(-1, 1), st.integers(2, 6))
def test_a_neighbour_moves_the_sum_by_its_contribution_and_no_more(
    one: float, other: float, clients: int
) -> None:
    """Under the same streams, in steps of the grid: rounding follows the noise, and extends the
    contribution of a client by at most one step."""
    meeting = Secure(clients, clients, 0)
    mechanism = ClientGaussian(0.5, 1.0, ADD_OR_REMOVE, aggregation=meeting)
    grid = grid_spacing(meeting.share_std(mechanism.std), 6)

    def total(what: float) -> torch.Tensor:
        words = [
            mechanism.release(1, lambda: torch.tensor([what]), STREAMS.at("m", 0)),
            *(
                mechanism.release(1, lambda: torch.zeros(1), STREAMS.at("m", c))
                for c in range(1, clients)
            ),
        ]
        return total_of(mechanism)([each.arrays["answer"] for each in words], 0, STREAMS)

    moved = float((total(one) - total(other)).abs())
    apart = abs(np.clip(one, -0.5, 0.5) - np.clip(other, -0.5, 0.5))
    assert abs(moved - apart) <= grid + 1e-5


def law_of_shares(means: list[float], std: float, reach: int) -> np.ndarray:
    """Return the distribution of the sum of round(mean + N(0, std^2)), on -reach..reach, by
    convolution."""
    steps = np.arange(-reach, reach + 1)
    result = np.array([1.0])
    for mean in means:
        below = stats.norm.cdf((np.append(steps, reach + 1) - 0.5 - mean) / std)
        result = np.convolve(result, np.diff(below))
    middle = len(result) // 2
    return result[middle - reach : middle + reach + 1]


def law_of_the_mechanism(mean: float, std: float, count: int, reach: int) -> np.ndarray:
    """Return the distribution of round(mean + N(0, count std^2) + count - 1 uniforms), by
    quadrature of the sum of uniforms (Irwin and Hall)."""
    steps, fine = np.arange(-reach, reach + 1), 400
    uniform = np.full(fine, 1 / fine)
    sums = np.array([1.0])
    for _ in range(count - 1):
        sums = np.convolve(sums, uniform)
    places = (np.arange(len(sums)) - (len(sums) - 1) / 2) / fine
    wide = std * math.sqrt(count)
    upper = stats.norm.cdf((steps[:, None] + 0.5 - mean - places) / wide)
    lower = stats.norm.cdf((steps[:, None] - 0.5 - mean - places) / wide)
    return np.asarray((upper - lower) @ sums)


@kills("fedgen/privacy/aggregation.py", "_SHARE_BITS = 6", "_SHARE_BITS = -1")
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("std", [0.45, 0.6, 0.8])
def test_the_lemma_of_secure_sums(count: int, std: float) -> None:
    """With share noise as narrow as the grid, so that the remaining term is visible: the sum of
    rounded Gaussians is the rounded Gaussian mechanism, up to twice the term of the docstring in
    each probability. At 64 steps, as in fedgen, the term is e^-40,000."""
    means = list(np.linspace(0.1, 0.4, count))
    sum_ = law_of_shares(means, std, 30)
    mechanism = law_of_the_mechanism(float(np.sum(means)), std, count, 30)
    term = math.exp(-2 * math.pi**2 * std**2 * (count - 1) / count)
    apart = np.abs(sum_ - mechanism).max()
    assert apart <= 2 * term + 1e-5
    if std == 0.45 and count == 2:
        assert apart > 0.05 * term  # it does show, and falls as it should
    share_std = Secure(count, count, 0).share_std(1.0)
    assert 2**6 <= share_std / grid_spacing(share_std, aggregation._SHARE_BITS) < 2**7


@kills(
    "fedgen/privacy/aggregation.py",
    "float(decoded.abs().max()) >= self._max_sum",
    "float(decoded.abs().max()) >= 9 * self._max_sum",
)
def test_words_wrap_around_and_the_sum_is_exact() -> None:
    """Words exceed the ring, the sum does not. A sum near its end is refused."""
    meeting = Secure(4, 4, 0)
    mechanism = ClientGaussian(1e6, 1e-4, ADD_OR_REMOVE, aggregation=meeting)
    far = [9e5, -9e5, 8e5, -7e5]
    words = [
        mechanism.release(1, lambda w=w: torch.tensor([w]), STREAMS.at(c)).arrays["answer"]
        for c, w in enumerate(far)
    ]
    total = float(total_of(mechanism)(words, 0, STREAMS))
    assert total == pytest.approx(sum(far), abs=8 * mechanism.std)
    step = total_of(mechanism)([words[0]], 0, STREAMS) - total_of(mechanism)(
        [words[0] + 1], 0, STREAMS
    )
    with pytest.raises(FedgenError, match="the sum is out of range"):
        end = np.full((1, 1), 2**31 - 5, np.int32)
        total_of(mechanism)([end], 0, STREAMS)
    assert float(step.abs()) < 1e6


def test_sums_beyond_32_bits_are_refused_before_a_run() -> None:
    meeting = Secure(100, 67, 0)
    meeting.check_range(1.0, 1e5)
    with pytest.raises(FedgenError, match="32 bits cannot hold"):
        meeting.check_range(1.0, 1e7)
    wide = Secure(100, 67, 0, 64)
    wide.check_range(1.0, 1e7)
    with pytest.raises(FedgenError, match="64 bits cannot hold"):
        wide.check_range(1.0, 1e16)  # double precision would not know its whole numbers


@pytest.mark.parametrize("bits", [32, 64])
def test_a_sum_is_the_same_in_either_ring(bits: int) -> None:
    """Words of another width, and the same result; in 64 bits if 32 are too few."""
    large = 10.0 if bits == 32 else 1e7
    sums = Secure(3, 3, 0, bits)  # type: ignore[arg-type]
    mechanism = ClientGaussian(2 * large, 1e-3 / large, ADD_OR_REMOVE, aggregation=sums)
    assert sums.fits(mechanism.std, 3 * large)
    assert Secure(3, 3, 0).fits(mechanism.std, 3 * large) == (bits == 32)
    vectors = [torch.tensor([-large, large / 3, 0.1]) * sign for sign in (1, -0.5, 1)]
    words = [
        mechanism.release(3, lambda v=v: v, STREAMS.at(c)).arrays["answer"]
        for c, v in enumerate(vectors)
    ]
    assert {each.dtype.itemsize for each in words} == {bits // 8}
    total = total_of(mechanism)(words, 0, STREAMS)[0]
    exact = sum(each.double() for each in vectors)
    assert float((total - exact).abs().max()) < 8 * mechanism.std * 3**0.5


@pytest.mark.parametrize(
    ("clients", "threshold", "colluders", "message"),
    [
        (1, None, 0, "needs several clients"),
        (10, 5, 0, "5 of 10 responses"),
        (10, 11, 0, "11 of 10 responses"),
        (10, 7, 7, "7 colluders is not valid"),
    ],
)
def test_impossible_secure_sums_are_refused(
    clients: int, threshold: int | None, colluders: int, message: str
) -> None:
    facts = PublicFacts(
        clients,
        None,
        10,
        (1, 8, 8),
        aggregation_kind="secure",
        threshold=threshold,
        colluders=colluders,
    )
    with pytest.raises(FedgenError, match=message):
        facts.aggregation(clients)


def test_two_thirds_of_the_cohort_are_counted_on_by_default() -> None:
    facts = PublicFacts(10, None, 10, (1, 8, 8), aggregation_kind="secure", colluders=2)
    assert facts.aggregation(10) == Secure(10, 7, 2)
    assert Secure(10, 7, 2).honest == 5
    whole = PublicFacts(10, None, 10, (1, 8, 8), aggregation_kind="secure", threshold="all")
    assert whole.aggregation(10) == Secure(10, 10, 0)


def test_only_mechanisms_create_shares() -> None:
    with pytest.raises(TypeError, match="only a mechanism creates"):
        Share({"answer": np.zeros((1, 5), np.int32)}, None, Unit.CLIENT)  # type: ignore[arg-type]


def test_the_noise_of_an_aggregator_depends_on_the_responses() -> None:
    mechanism = ClientGaussian(1.0, 1.0, ADD_OR_REMOVE, aggregation=Trusted(1.0))
    one, other = np.full((1, 500), 0.01, np.float32), np.full((1, 500), 0.011, np.float32)
    noises = [total_of(mechanism)([each], 0, STREAMS).numpy() - each for each in (one, other)]
    assert abs(np.corrcoef(noises[0], noises[1])[0, 1]) < 0.2
    again = total_of(mechanism)([one], 0, RandomStreams.from_seed(7, "seeded")).numpy() - one
    assert np.array_equal(noises[0], again)


@kills(
    "fedgen/privacy/aggregation.py",
    ('rounded_gaussian(exact.to(torch.float64) / grid, share / grid, streams, "share")'),
    ('rounded_gaussian((exact.double() / grid).round(), share / grid, streams, "share")'),
)
def test_rounding_follows_the_noise() -> None:
    """A contribution of three tenths of a step is visible in the mean of four million values (z =
    9): rounded before the noise, it would be lost, or extend the norm."""
    meeting = Secure(2, 2, 0)
    mechanism = ClientGaussian(1e6, 1e-6, ADD_OR_REMOVE, aggregation=meeting)
    grid = grid_spacing(meeting.share_std(mechanism.std), 6)
    sent = mechanism.release(4_000_000, lambda: torch.full((4_000_000,), 0.3 * grid), STREAMS)
    mean = float(total_of(mechanism)([sent.arrays["answer"]], 0, STREAMS).mean())
    error = meeting.share_std(mechanism.std) / 2000
    assert abs(mean - 0.3 * grid) < 4.5 * error < abs(mean)
