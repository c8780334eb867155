"""Mechanisms: clipping, noise, sensitivity, and the creation of releases."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from mutation import kills
from scipy import stats

from fedgen.errors import FedgenError
from fedgen.privacy.aggregation import LOCAL, Aggregation, Clipped, Release, Trusted
from fedgen.privacy.batch_sampling import (
    FixedSizeSampling,
    FullBatch,
    Participation,
    PoissonSampling,
)
from fedgen.privacy.bounds import Ball
from fedgen.privacy.clipping import ClippedSum, clip_rows, sum_of_rows
from fedgen.privacy.events import Contribution, Relation, Unit
from fedgen.privacy.mechanisms import (
    ClientGaussian,
    ClientMean,
    JointGaussian,
    RowGaussian,
    SumGaussian,
)
from fedgen.privacy.mechanisms import aggregator as total_of
from fedgen.privacy.routing import Routing
from fedgen.randomness import RandomStreams

GRAIN = 1 + 2**-10 * math.sqrt(5)
"""By how much rounding to a grid may stretch a distance of one std over at most five entries."""

any_rows = arrays(
    np.float32, (3, 4), elements=st.floats(width=32, allow_nan=True, allow_infinity=True)
)


def gaussian(clip: float, sigma: float, critics: int = 1) -> RowGaussian:
    return RowGaussian(Ball(clip), sigma, Routing("mean", critics), True, Unit.RECORD)


def all_rows(rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.arange(len(rows)), rows)]


@given(any_rows, st.floats(0.01, 100))
def test_clipped_rows_are_in_the_ball(rows: np.ndarray, bound: float) -> None:
    clipped = clip_rows(torch.from_numpy(rows), bound)
    norms = np.linalg.norm(clipped.double().numpy(), axis=1)
    assert (norms <= bound).all()


@given(arrays(np.float32, (2, 3), elements=st.floats(-1, 1, width=32)))
def test_small_rows_are_unchanged(rows: np.ndarray) -> None:
    given_rows = torch.from_numpy(rows)
    assert torch.equal(clip_rows(given_rows, 2.0), given_rows)


@kills(
    "fedgen/privacy/clipping.py",
    "return torch.where(norms < _MAX_NORM, scale, 0.0)",
    "return scale",
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_an_invalid_row_becomes_zero_and_others_stay(bad: float) -> None:
    rows = torch.tensor([[0.1, 0.2], [bad, 3e38], [0.3, 0.4]])
    clipped = clip_rows(rows, 1.0)
    assert torch.equal(clipped[1], torch.zeros(2))
    assert torch.equal(clipped[[0, 2]], rows[[0, 2]])


@kills(
    "fedgen/privacy/bounds.py",
    "rows if math.isinf(self.clip) else clip_rows(rows, self.clip)",
    "rows",
)
@given(any_rows, any_rows, st.integers(1, 5))
def test_sensitivity_bounds_any_change(before: np.ndarray, after: np.ndarray, critics: int) -> None:
    """Changing the data of one critic moves the response, without noise, by at most the
    sensitivity."""
    mechanism, streams = gaussian(0.7, 1.0, critics), RandomStreams.from_seed(0, "seeded")
    others = [torch.full((3, 4), float(k)) for k in range(critics - 1)]

    def released(rows: np.ndarray) -> np.ndarray:
        answers = [(torch.arange(3), r) for r in [*others, torch.from_numpy(rows)]]
        return mechanism.release((3, 4), answers, streams).arrays["answer"]

    moved = np.linalg.norm(released(before) - released(after), axis=1)
    for relation in Relation:
        assert (moved <= GRAIN * mechanism.sensitivity(relation) + 1e-4).all()


@kills(
    "fedgen/privacy/mechanisms.py",
    "self.bound.radius if removes_client else self.bound.diameter",
    "self.bound.radius",
)
def test_the_bound_is_attained() -> None:
    up, down = torch.tensor([[9.0, 0.0]]), torch.tensor([[-9.0, 0.0]])
    mechanism, streams = gaussian(0.5, 1.0), RandomStreams.from_seed(0, "seeded")
    first, second = (
        mechanism.release((1, 2), all_rows(r), streams).arrays["answer"] for r in (up, down)
    )
    assert np.linalg.norm(first - second) == pytest.approx(
        mechanism.sensitivity(Relation.REPLACE_ONE), rel=1e-4
    )


@kills(
    "fedgen/privacy/mechanisms.py",
    "self.aggregation.sent(exact, self.std, event, self.unit, streams)",
    "self.aggregation.sent(exact, self.std / 2, event, self.unit, streams)",
)
@pytest.mark.parametrize("critics", [1, 4])
def test_noise_has_the_stated_standard_deviation(critics: int) -> None:
    """The variance of 60,000 values is within the chi-square interval of level 1e-6, per coordinate
    of a release; half of the noise, or noise divided by the batch size, is far outside."""
    clip, sigma = 0.5, 1.5
    mechanism = gaussian(clip, sigma, critics)
    rows = torch.zeros(600, 100)
    answers = [(torch.arange(600), rows) for _ in range(critics)]
    noise = mechanism.release((600, 100), answers, RandomStreams.from_seed(1, "seeded")).arrays[
        "answer"
    ]
    scale = sigma * 2 * clip / critics
    statistic = float((noise.astype(np.float64) ** 2).sum()) / scale**2
    low, high = stats.chi2.interval(1 - 1e-6, noise.size)
    assert low < statistic < high
    assert not low < statistic / 4 < high


@kills(
    "fedgen/privacy/aggregation.py",
    ('rounded_gaussian(exact.to(torch.float64) / grid, std / grid, streams, "release")'),
    (
        "rounded_gaussian(exact.to(torch.float64) / grid, std / grid, "
        'RandomStreams.from_seed(0, "seeded"))'
    ),
)
def test_releases_in_different_domains_have_independent_noise(streams: RandomStreams) -> None:
    rows = torch.zeros(20, 50)
    result = [
        gaussian(1.0, 1.0).release((20, 50), all_rows(rows), streams.at(*place)).arrays["answer"]
        for place in [
            ("client", 0, "answer", 0),
            ("client", 1, "answer", 0),
            ("client", 0, "answer", 1),
        ]
    ]
    for first, second in itertools.combinations(result, 2):
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.2


def test_query_samples_with_too_few_responses_are_refused(streams: RandomStreams) -> None:
    with pytest.raises(ValueError, match="as many responses as"):
        gaussian(1.0, 1.0, 2).release((3, 4), all_rows(torch.zeros(3, 4)), streams)


def test_a_release_states_its_cost(streams: RandomStreams) -> None:
    release = gaussian(1.0, 2.5).release((1, 4), all_rows(torch.zeros(1, 4)), streams)
    assert release.event == GaussianDpEvent(2.5)
    assert release.unit is Unit.RECORD


def test_without_a_mechanism_there_is_no_bound(streams: RandomStreams) -> None:
    rows = torch.randn(2, 3) * 100
    mechanism = RowGaussian(Ball(math.inf), 0.0, Routing("mean", 1), False, Unit.RECORD)
    release = mechanism.release((2, 3), all_rows(rows), streams)
    assert np.array_equal(release.arrays["answer"], rows.numpy())
    assert release.event == NonPrivateDpEvent()


@pytest.mark.parametrize("clip", [1.0, math.inf])
def test_no_mechanism_has_a_bound_without_noise(clip: float, streams: RandomStreams) -> None:
    """With and without clipping; sampling before it amplifies nothing."""
    relation, poisson = Relation.ADD_OR_REMOVE_ONE, PoissonSampling(0.1)
    part = sum_of_rows(torch.ones(1, 3), clip)
    releases = [
        RowGaussian(Ball(clip), 0.0, Routing("per_step", 10), True, Unit.RECORD).event(5),
        JointGaussian(clip, 0.0, poisson, relation, Unit.RECORD).release(torch.ones(2, 3), streams),
        SumGaussian(clip, 0.0, poisson, 1.0, relation, Unit.RECORD).release((3,), [part], streams),
        SumGaussian(clip, 0.0, poisson, 1.0, relation, Unit.PERSON).event(),
        ClientMean(clip, 0.0, poisson, 1.0, relation).release((3,), [part], streams),
        ClientGaussian(clip, 0.0, relation, Participation(0.5)).release(
            3, lambda: torch.ones(3), streams
        ),
    ]
    events = [getattr(each, "event", each) for each in releases]
    assert events == [NonPrivateDpEvent()] * len(releases)


def test_only_mechanisms_create_releases() -> None:
    with pytest.raises(TypeError, match="only a mechanism creates"):
        Release({}, GaussianDpEvent(1.0), Unit.RECORD)


# Matrices, sums, and what a trusted aggregator may take in

REPLACE, ADD_OR_REMOVE = Relation.REPLACE_ONE, Relation.ADD_OR_REMOVE_ONE
STREAMS = RandomStreams.from_seed(0, "seeded")


def joint(relation: Relation = ADD_OR_REMOVE) -> JointGaussian:
    return JointGaussian(0.7, 1.0, FullBatch(), relation, Unit.RECORD)


def summed(relation: Relation, divisor: float = 8.0) -> SumGaussian:
    return SumGaussian(0.7, 1.0, FullBatch(), divisor, relation, Unit.RECORD)


@kills(
    "fedgen/privacy/aggregation.py",
    (
        "    grid = grid_spacing(std, _GRID_BITS)\n"
        "    rounded = rounded_gaussian(exact.to(torch.float64) / grid, std / grid, "
        'streams, "release")\n'
        "    return rounded.mul_(grid).to(torch.float32)"
    ),
    (
        "    rounded = torch.from_numpy(streams.secret_uniforms(exact.numel(), "
        '"release")).epsilon_for(exact.shape)\n'
        "    return (exact + std * torch.special.ndtri(rounded)).to(torch.float32)"
    ),
)
@given(any_rows, st.floats(0.1, 300), st.integers(0, 1000))
def test_released_values_lie_on_a_grid_of_the_noise(
    rows: np.ndarray, sigma: float, seed: int
) -> None:
    """Floating-point noise takes only some values: without the grid, the set of reachable sums
    distinguishes neighbours (Mironov 2012)."""
    streams, given_rows = RandomStreams.from_seed(seed, "seeded"), torch.from_numpy(rows)
    summing = SumGaussian(0.7, sigma, FullBatch(), 3.0, REPLACE, Unit.RECORD)
    trusted = of_clients(0.7, sigma, Trusted(0.7))
    vector = given_rows[:1].numpy()
    matrix = JointGaussian(0.7, sigma, FullBatch(), REPLACE, Unit.RECORD)
    for std, result in (
        (1.4 * sigma, gaussian(0.7, sigma).release((3, 4), all_rows(given_rows), streams)),
        (1.4 * sigma, matrix.release(given_rows, streams)),
        (1.4 * sigma / 3, summing.release((4,), [sum_of_rows(given_rows, 0.7)], streams)),
        (0.7 * sigma, total_of(trusted)([vector], 0, streams).numpy()),
    ):
        release = result if isinstance(result, np.ndarray) else result.arrays["answer"]
        steps = release.astype(np.float64) / 2.0 ** math.floor(math.log2(std) - 10)
        assert (steps == np.rint(steps)).all()
        assert np.abs(steps).max() > 10  # and the noise is on it


@pytest.mark.parametrize("sigma", [50.0, 200.0])
def test_reachable_floats_do_not_distinguish_neighbours(sigma: float) -> None:
    """Mironov's attack guesses the neighbour from the floats that its noise can reach. In 400
    trials its accuracy is consistent with the bound at this ε, at level 1e-6."""
    rng, right = np.random.default_rng(0), 0
    for trial in range(400):
        far = rng.random() < 0.5
        rows = torch.full((1, 64), 0.125 if far else 0.0)
        streams = RandomStreams.from_seed(trial, "seeded")
        result = gaussian(1.0, sigma).release((1, 64), all_rows(rows), streams).arrays["answer"]
        std = np.float32(2 * sigma)
        noise = (result / std).astype(np.float32)
        near = [noise, np.nextafter(noise, np.float32(9)), np.nextafter(noise, np.float32(-9))]
        reached = np.any([(std * each).astype(np.float32) == result for each in near], axis=0)
        right += (not reached.all()) == far
    assert right <= stats.binom.isf(1e-6, 400, 0.52)


@given(any_rows, any_rows)
def test_a_matrix_moves_by_at_most_its_sensitivity(before: np.ndarray, after: np.ndarray) -> None:
    """A matrix is any function of its batch: a neighbour gives any other one."""
    first, second = (
        joint().release(torch.from_numpy(m), STREAMS).arrays["answer"] for m in (before, after)
    )
    for relation in Relation:
        assert np.linalg.norm(first - second) <= GRAIN * joint().sensitivity(relation) + 1e-5


@kills(
    "fedgen/privacy/mechanisms.py",
    'clip_rows(matrix.detach().to("cpu", torch.float32)[None], self.clip)[0]',
    'clip_rows(matrix.detach().to("cpu", torch.float32), self.clip)',
)
def test_a_matrix_is_clipped_as_a_whole() -> None:
    """Rows in the ball can form a matrix outside of it."""
    rows = torch.ones(50, 4) * 0.3
    quiet = JointGaussian(0.7, 1e-9, FullBatch(), REPLACE, Unit.RECORD)
    assert np.linalg.norm(quiet.release(rows, STREAMS).arrays["answer"]) <= 0.7


@kills(
    "fedgen/privacy/clipping.py",
    "scale = (clip * margin / norms).clamp(max=1.0)",
    "scale = torch.ones_like(norms)",
)
@kills(
    "fedgen/privacy/clipping.py",
    ("norms = row_norms(rows)\n    blocks"),
    ("norms = row_norms(rows.sum(0)[None]).expand(len(rows))\n    blocks"),
)
@kills(
    "fedgen/privacy/clipping.py",
    ("norms = row_norms(rows)\n    blocks"),
    ("norms = row_norms(rows.mean(0)[None]).expand(len(rows))\n    blocks"),
)
@kills(
    "fedgen/privacy/mechanisms.py",
    "return total.div_(self.divisor)",
    "return total.div_(max(1, int(total.count_nonzero())))",
)
@given(any_rows, arrays(np.float32, (1, 4), elements=st.floats(width=32)), st.integers(0, 2))
@example(np.ones((3, 4), np.float32), np.full((1, 4), -9, np.float32), 0)
def test_a_sum_moves_by_at_most_its_sensitivity(
    rows: np.ndarray, another: np.ndarray, place: int
) -> None:
    """Under each relation, for any records with NaN and infinities; the bound holds for each."""
    replaced = rows.copy()
    replaced[place] = another
    neighbours = {
        ADD_OR_REMOVE: (rows, np.concatenate([rows, another])),
        REPLACE: (rows, replaced),
    }
    for relation, pair in neighbours.items():
        mechanism = summed(relation)
        first, second = (
            mechanism.release((4,), [sum_of_rows(torch.from_numpy(each), 0.7)], STREAMS).arrays[
                "answer"
            ]
            for each in pair
        )
        assert np.linalg.norm(first - second) <= GRAIN * mechanism.sensitivity(relation) + 1e-5


@kills(
    "fedgen/privacy/mechanisms.py",
    (
        "        return GaussianDpEvent(self.noise_multiplier)\n"
        "\n"
        "    def batch_parts(\n"
        "        self, records: Records, streams: RandomStreams, part_size: int\n"
        "    ) -> list[Indices]:\n"
        '        """Sample the batch of the next release, in parts of about ``part_size`` '
        'records."""'
    ),
    (
        "        return self.sampling.event(GaussianDpEvent(self.noise_multiplier))\n"
        "\n"
        "    def batch_parts(\n"
        "        self, records: Records, streams: RandomStreams, part_size: int\n"
        "    ) -> list[Indices]:\n"
        '        """Sample the batch of the next release, in parts of about ``part_size`` '
        'records."""'
    ),
)
@kills(
    "fedgen/privacy/mechanisms.py",
    "return clip_rows(total[None] / max(rows, 1), self.clip)[0]",
    "return total / self.expected",
)
@given(any_rows, st.integers(1, 40), st.integers(1, 40))
def test_the_mean_of_a_client_is_in_the_ball(rows: np.ndarray, times: int, expected: int) -> None:
    """For any number of records, whatever number was expected; without records it is zero."""
    mechanism = ClientMean(0.7, 1e-9, PoissonSampling(0.1), expected, ADD_OR_REMOVE)
    assert mechanism.sensitivity(ADD_OR_REMOVE) == 0.7
    assert mechanism.event() == GaussianDpEvent(1e-9), "a draw among its rows hides nothing"
    parts = [sum_of_rows(torch.from_numpy(np.tile(rows, (times, 1))), 0.7) for _ in range(2)]
    for sums, most in ((parts, 0.7), (parts[:1], 0.7), ([], 0.0)):
        released = mechanism.release((4,), sums, STREAMS).arrays["answer"]
        assert np.linalg.norm(released.astype(float)) <= most + 1e-7
    exact = clip_rows(torch.from_numpy(rows), 0.7).double().mean(0).numpy()
    assert np.allclose(mechanism.release((4,), parts, STREAMS).arrays["answer"], exact, atol=1e-5)
    with pytest.raises(ValueError, match="larger norm than the sensitivity"):
        mechanism.release((4,), [sum_of_rows(torch.from_numpy(rows), 0.8)], STREAMS)


@given(any_rows, st.permutations(range(3)))
def test_the_order_of_records_does_not_matter(rows: np.ndarray, order: list[int]) -> None:
    mechanism = summed(REPLACE)
    first, second, pieces = (
        mechanism.release((4,), given_, STREAMS).arrays["answer"]
        for given_ in (
            [sum_of_rows(torch.from_numpy(rows), 0.7)],
            [sum_of_rows(torch.from_numpy(rows[order]), 0.7)],
            [sum_of_rows(torch.from_numpy(part), 0.7) for part in (rows[:1], rows[1:])],
        )
    )
    assert np.allclose(first, second, atol=2e-4)  # where rounding falls to the other side
    assert np.allclose(first, pieces, atol=2e-4)


@pytest.mark.parametrize("relation", list(Relation))
def test_the_bound_of_a_sum_is_attained(relation: Relation) -> None:
    mechanism = summed(relation)
    up, down = torch.full((1, 4), 9.0), torch.full((1, 4), -9.0)
    other = down if relation is REPLACE else up[:0]
    first, second = (
        mechanism.release((4,), [sum_of_rows(rows, 0.7)], STREAMS).arrays["answer"]
        for rows in (up, other)
    )
    moved = np.linalg.norm(first - second)
    assert moved == pytest.approx(mechanism.sensitivity(relation), rel=GRAIN - 1)


def test_a_part_with_a_larger_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="larger norm than the sensitivity"):
        summed(REPLACE).release((4,), [sum_of_rows(torch.ones(1, 4), 0.8)], STREAMS)
    with pytest.raises(TypeError, match="only the functions of this module create"):
        ClippedSum({}, torch.zeros(0), 1.0)


@kills(
    "fedgen/privacy/ghost_norms.py",
    "dim=dimensions, dtype=torch.float64)",
    "dim=dimensions).double()",
)
def test_long_rows_are_in_the_ball_too() -> None:
    """Ten million entries, for which a norm in single precision is off by a thousandth."""
    row = torch.randn(1, 10**7, generator=torch.Generator().manual_seed(0))
    assert float(clip_rows(row, 1.0).double().norm()) <= 1 + 1e-6


def test_sensitivities_are_those_of_the_design() -> None:
    assert [joint().sensitivity(r) for r in (ADD_OR_REMOVE, REPLACE)] == [1.4, 1.4]
    assert summed(REPLACE, 1.0).sensitivity(ADD_OR_REMOVE) == 0.7
    assert summed(REPLACE, 1.0).sensitivity(REPLACE) == 1.4
    whole = of_clients(0.7, 1.0)
    assert [whole.sensitivity(r) for r in (ADD_OR_REMOVE, REPLACE)] == [0.7, 1.4]
    drawn = replace(whole, participation=Participation(0.1))
    assert [drawn.sensitivity(r) for r in (ADD_OR_REMOVE, REPLACE)] == pytest.approx([7, 14])
    rows = RowGaussian(Ball(0.7), 1.0, Routing("mean", 1), True, Unit.CLIENT)
    assert [rows.sensitivity(r) for r in (ADD_OR_REMOVE, REPLACE)] == [0.7, 1.4]


def of_clients(clip: float, sigma: float, aggregation: Aggregation = LOCAL) -> ClientGaussian:
    return ClientGaussian(clip, sigma, ADD_OR_REMOVE, aggregation=aggregation)


def released_noise(kind: str, relation: Relation) -> tuple[np.ndarray, float]:
    """Return many releases without contributions, and the stated standard deviation."""
    shape, streams = (60_000,), STREAMS.at(kind)
    if kind == "joint":
        mechanism = JointGaussian(0.5, 1.5, FullBatch(), relation, Unit.RECORD)
        return mechanism.release(torch.zeros(shape), streams).arrays["answer"], 1.5
    diameter = 0.5 * (2 if relation is REPLACE else 1)
    if kind == "sum":
        of_sum = SumGaussian(0.5, 1.5, PoissonSampling(0.1), 32.0, relation, Unit.RECORD)
        return of_sum.release(shape, [], streams).arrays["answer"], 1.5 * diameter / 32
    meeting = Trusted(0.5) if kind == "trusted" else LOCAL
    of_client = ClientGaussian(0.5, 1.5, relation, Participation(0.1), meeting)
    result = of_client.release(*shape, lambda: torch.zeros(shape), streams).arrays["answer"]
    if kind == "trusted":
        result = total_of(of_client)([result], 0, streams).numpy()
    return result, 1.5 * diameter / 0.1


@kills(
    "fedgen/privacy/mechanisms.py",
    "return _clip_norms_moved(relation) * self._contribution_clip / self.divisor",
    "return _clip_norms_moved(relation) * self.clip / self.divisor**1.5",
)
@kills(
    "fedgen/privacy/aggregation.py",
    "return noised(_sum(messages), std, streams.salted(context)).double()",
    "return noised(_sum(messages), std / 2, streams.salted(context)).double()",
)
@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("kind", ["joint", "sum", "client", "trusted"])
def test_each_mechanism_adds_the_stated_noise(kind: str, relation: Relation) -> None:
    """An empty batch releases noise alone; its variance is within the chi-square interval of level
    1e-6, and half of the noise, or noise divided by the root of the batch, is far outside."""
    noise, std = released_noise(kind, relation)
    statistic = float((noise.astype(np.float64) ** 2).sum()) / std**2
    low, high = stats.chi2.interval(1 - 1e-6, noise.size)
    assert low < statistic < high
    assert not low < statistic / 4 < high


def test_sampling_is_part_of_the_event() -> None:
    """A mechanism samples as the accounting assumes."""
    poisson, fixed = PoissonSampling(0.25), FixedSizeSampling(3, 12)
    for batches in (poisson, fixed, FullBatch()):
        mechanism = SumGaussian(1.0, 2.0, batches, 3.0, REPLACE, Unit.RECORD)
        [drawn] = mechanism.batch_parts(range(12), STREAMS.at("some"), 64)
        assert mechanism.event() == batches.event(GaussianDpEvent(2.0))
        assert np.array_equal(drawn, batches.sample(12, STREAMS.at("some")))
        assert sorted(set(drawn.tolist())) == drawn.tolist()
    assert len(fixed.sample(12, STREAMS)) == 3
    assert FullBatch().sample(12, STREAMS).tolist() == list(range(12))
    with pytest.raises(ValueError, match="as the accounting assumes"):
        fixed.sample(13, STREAMS)


@pytest.mark.parametrize("make", [lambda *a: summed_of(*a), lambda *a: joint_of(*a)])
def test_sampling_without_neighbours_is_refused(make: object) -> None:
    with pytest.raises(FedgenError, match=r"privacy\.relation"):
        make(FixedSizeSampling(3, 12), ADD_OR_REMOVE)  # type: ignore[operator]


def summed_of(batches: FixedSizeSampling, relation: Relation) -> SumGaussian:
    return SumGaussian(1.0, 1.0, batches, 3.0, relation, Unit.RECORD)


def joint_of(batches: FixedSizeSampling, relation: Relation) -> JointGaussian:
    return JointGaussian(1.0, 1.0, batches, relation, Unit.RECORD)


@kills(
    "fedgen/privacy/batch_sampling.py",
    'streams.secret_bits(records, "batch") < np.uint64(int(self.rate * 2**64))',
    ('streams.secret_bits(records, "batch") < np.uint64(int(1.5 * self.rate * 2**64))'),
)
def test_poisson_batches_are_independent_with_the_stated_rate() -> None:
    """Each record in 4,000 samples within the binomial interval of level 1e-7 (200 records: 2e-5 in
    total); sizes vary like sums of independent bits."""
    batches = PoissonSampling(0.1)
    drawn = np.zeros((4000, 200), dtype=bool)
    for step in range(4000):
        drawn[step, batches.sample(200, STREAMS.at("step", step))] = True
    low, high = stats.binom.interval(1 - 1e-7, 4000, 0.1)
    assert ((low <= drawn.sum(0)) & (drawn.sum(0) <= high)).all()
    variance = drawn.sum(1).var() / (200 * 0.1 * 0.9)
    assert 0.8 < variance < 1.2
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 0.01


def test_records_of_a_fixed_batch_are_equally_likely() -> None:
    counts = np.zeros(20)
    for step in range(3000):
        counts[FixedSizeSampling(5, 20).sample(20, STREAMS.at("fixed", step))] += 1
    low, high = stats.binom.interval(1 - 1e-7, 3000, 0.25)
    assert ((low <= counts) & (counts <= high)).all()


@given(arrays(np.float32, (5,), elements=st.floats(width=32)))
def test_contributions_are_bounded_and_have_equal_weights(vector: np.ndarray) -> None:
    mechanism = of_clients(0.5, 1.0, Trusted(0.5))
    part = mechanism.release(5, lambda: torch.from_numpy(vector), STREAMS).arrays["answer"]
    assert np.linalg.norm(part.astype(float)) <= 0.5


@kills(
    "fedgen/privacy/aggregation.py",
    (
        "                clip_rows(torch.from_numpy(message), self.clip).numpy() for "
        "message in messages\n"
    ),
    "                message for message in messages\n",
)
@given(arrays(np.float32, (1, 5), elements=st.floats(width=32, allow_nan=True)))
def test_an_aggregator_clips_contributions(vector: np.ndarray) -> None:
    """Clients that exceed the clip norm move the sum by no more than others."""
    quiet = of_clients(0.5, 1e-9, Trusted(0.5))
    other = np.full((1, 5), 0.1, np.float32)
    with_it, without = (
        total_of(quiet)(cohort, 0, STREAMS) for cohort in ([other, vector], [other])
    )
    assert float((with_it - without).norm()) <= 0.5 + 1e-6


def test_only_mechanisms_create_contributions() -> None:
    with pytest.raises(TypeError, match="only a mechanism creates"):
        Clipped({"answer": np.zeros((1, 5), dtype=np.float32)}, Contribution(), Unit.CLIENT)


@kills(
    "fedgen/privacy/mechanisms.py",
    "return [batch[part == index] for index in range(number)]",
    "return list(np.array_split(batch, number))",
)
@pytest.mark.parametrize("batches", [PoissonSampling(0.5), FullBatch()])
def test_one_record_changes_its_own_part_alone(batches: PoissonSampling | FullBatch) -> None:
    """Given all streams: a part depends on its own records, and the number of parts is public."""
    mechanism = SumGaussian(1.0, 1.0, batches, 640.0, ADD_OR_REMOVE, Unit.RECORD)
    for step in range(20):
        streams = STREAMS.at("parts", step)
        less, more = (mechanism.batch_parts(range(rows), streams, 64) for rows in (1200, 1201))
        assert len(less) == len(more) == 10
        changed = [place for place in range(10) if not np.array_equal(less[place], more[place])]
        assert len(changed) <= 1
        for place in changed:
            assert np.array_equal(more[place][:-1], less[place])
        assert np.array_equal(np.sort(np.concatenate(more)), batches.sample(1201, streams))
    sizes = [len(part) for part in more]
    assert stats.chisquare(sizes).pvalue > 1e-6


@given(
    st.integers(1, 10**7),
    st.floats(1e-3, 1e3, allow_subnormal=False),
    st.floats(1e-3, 1e3, allow_subnormal=False),
)
def test_the_limit_on_honest_responses_has_its_probability(
    size: int, clip: float, noise: float
) -> None:
    """By the exact tail of the norm of the noise, and not by much more than needed."""
    mechanism = RowGaussian(Ball(clip), noise, Routing("mean", 1), False, Unit.RECORD)
    std = noise * mechanism.sensitivity(REPLACE)
    longest = mechanism.max_norm(size)
    noise_alone = (longest / 1.01 - clip) / std
    assert stats.chi2.logsf(noise_alone**2, size) <= -200 * (1 - 1e-6)
    root = math.sqrt(size)
    most = 1.01 * (clip + std * (root + math.sqrt(2 * 200))) + root * 2**-24
    assert longest <= most * (1 + 1e-9)
