"""Routing: the sample, its event, and the count of the most sampled client."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from hypothesis import given
from hypothesis import strategies as st
from mutation import kills
from scipy import stats

from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import Relation, RevealedSampling, canonical
from fedgen.privacy.routing import Routing

routings = st.builds(
    lambda mode, population, share: Routing(mode, population, max(1, int(population * share))),
    st.sampled_from(["per_sample", "per_step", "mean"]),
    st.integers(1, 12),
    st.floats(0, 1),
)


@given(routings, st.integers(1, 10), st.integers())
def test_each_query_sample_has_its_responders(routing: Routing, rows: int, seed: int) -> None:
    routed = routing.assign(rows, random.Random(seed))
    counts = Counter(row for answered in routed.values() for row in answered)
    assert counts == dict.fromkeys(range(rows), routing.responses_per_sample)
    assert all(0 <= member < routing.population for member in routed)
    assert all(answered == sorted(set(answered)) for answered in routed.values())


def test_responders_are_sampled_independently_and_uniformly() -> None:
    """Chi-square at level 1e-6 over pairs (responder to query sample 0, responder to query sample
    1)."""
    routing, rng = Routing("per_sample", 4), random.Random(0)
    pairs: Counter[tuple[int, int]] = Counter()
    for _ in range(8000):
        owner = {row: m for m, rows in routing.assign(2, rng).items() for row in rows}
        pairs[owner[0], owner[1]] += 1
    assert len(pairs) == 16
    assert stats.chisquare(list(pairs.values())).pvalue > 1e-6


def test_per_step_samples_once() -> None:
    routed = Routing("per_step", 50).assign(32, random.Random(1))
    assert list(routed.values()) == [list(range(32))]


@kills(
    "fedgen/privacy/routing.py",
    "gate = GaussianDpEvent(noise_multiplier / math.sqrt(samples / draws))",
    "gate, draws = GaussianDpEvent(noise_multiplier), samples",
)
def test_one_sample_is_one_node() -> None:
    """The batch is inside of the node if one sample serves it, outside if each query sample has its
    own; confusing them understates ε by a factor of a hundred."""
    [(per_step, count)] = canonical(Routing("per_step", 1000).event(32, 1.07, True)).items()
    assert count == 1
    assert per_step.event.noise_multiplier == pytest.approx(1.07 / 32**0.5)
    [(per_sample, count)] = canonical(Routing("per_sample", 1000).event(32, 1.07, True)).items()
    assert count == 32
    assert per_sample.event.noise_multiplier == 1.07


@kills(
    "fedgen/privacy/routing.py",
    "math.sqrt(self.responses_per_sample) * noise_multiplier, hidden",
    "self.responses_per_sample * noise_multiplier, hidden",
)
@pytest.mark.parametrize(("noise", "delta"), [(0.5, 1e-3), (0.5, 0.05), (1.0, 1e-2)])
def test_the_bound_for_the_sum_of_two_responses_holds_and_is_attained(
    noise: float, delta: float
) -> None:
    """Two of three clients are sampled, each adds its own noise, and the sum is seen. The worst
    responses of the other two give the stated ε, and none give more."""
    result = epsilon(
        canonical(Routing("per_sample", 3, 2).event_of_sum(1, noise, True)),
        delta,
        Relation.REPLACE_ONE,
    ).or_infinity
    std, x = 2 * noise * 2**0.5, np.linspace(-20, 20, 8001)

    def seen(mine: float, others: tuple[float, float]) -> np.ndarray:
        pairs = [sum(others), mine + others[0], mine + others[1]]
        return sum(stats.norm.pdf(x, mean, std) for mean in pairs) / 3

    ends = np.linspace(-1, 1, 9)
    worst = max(
        float(
            np.maximum(seen(a, rest) - math.exp(result) * seen(-a, rest), 0).sum() * (x[1] - x[0])
        )
        for rest in itertools.product(ends, ends)
        for a in (1, -1)
    )
    assert worst == pytest.approx(delta, rel=0.02)
    assert worst <= delta * (1 + 1e-6)


def test_a_sum_of_rounded_responses_is_a_rounded_sum() -> None:
    """Of two, on a grid of a third of the noise's standard deviation; responses lie between its
    points."""
    std, first, second = 3.0, 0.3, -1.1
    points = np.arange(-60, 61)

    def rounded(mean: float) -> np.ndarray:
        edges = stats.norm.cdf(np.append(points, points[-1] + 1) - 0.5, mean, std)
        return np.diff(edges)

    def integral(t: np.ndarray) -> np.ndarray:  # of a Gaussian's distribution function
        s = std * 2**0.5
        return t * stats.norm.cdf(t / s) + s * stats.norm.pdf(t / s)

    at = points - (first + second)  # the density of a Gaussian and two uniforms: second differences
    one = integral(at + 1.0) - 2 * integral(at + 0.0) + integral(at - 1.0)
    both = np.convolve(rounded(first), rounded(second))[60:-60]
    assert np.abs(both - one).sum() < 1e-12


def test_routings_without_amplification() -> None:
    assert isinstance(Routing("per_step", 9).event(4, 1.0, hidden=False), RevealedSampling)
    assert isinstance(
        Routing("per_step", 9, 2, "poisson").event(4, 1.0, hidden=True), RevealedSampling
    )
    assert canonical(Routing("mean", 9).event(4, 1.0, hidden=True)) == {GaussianDpEvent(1.0): 4}


def test_poisson_cohorts_have_the_expected_size() -> None:
    routing, rng = Routing("per_step", 100, 10, "poisson"), random.Random(0)
    sizes = [len(routing.assign(1, rng)) for _ in range(2000)]
    assert stats.ttest_1samp(sizes, 10).pvalue > 1e-6
    assert min(sizes) < 10 < max(sizes)


@given(routings, st.integers(1, 6), st.integers(1, 60))
def test_the_most_sampled_client_stays_below_its_cap(
    routing: Routing, rows: int, steps: int
) -> None:
    cap = routing.max_load(rows, steps, 1e-6)
    assert routing.stop_probability(rows, steps, cap) <= 1e-6
    rng, asked = random.Random(0), Counter()
    for _ in range(steps):
        for member, answered in routing.assign(rows, rng).items():
            asked[member] += len(answered)
    assert max(asked.values()) <= cap


def test_events_of_steps_add_up() -> None:
    routing = Routing("per_sample", 20)
    once = canonical(routing.event(8, 2.0, True), 5)
    together = canonical(routing.event(40, 2.0, True))
    assert epsilon(once, 1e-5, Relation.REPLACE_ONE) == epsilon(
        together, 1e-5, Relation.REPLACE_ONE
    )


@kills(
    "fedgen/privacy/routing.py",
    ("exceeding = binom.sf(thresholds // times, draws, rate)  # by the samples of this step alone"),
    "times, exceeding = 1, binom.sf(thresholds, draws, rate)",
)
@pytest.mark.parametrize("mode", ["per_sample", "per_step"])
def test_repeated_steps_count_with_the_same_sample(mode: str) -> None:
    """Exactly, over all outcomes of five steps of which the first is repeated three times, and the
    second twice."""
    routing, rows, times = Routing(mode, 3), 2, (3, 2, 1, 1, 1)  # type: ignore[arg-type]
    draws = rows if mode == "per_sample" else 1
    law: Counter[int] = Counter()
    weight = {0: 2 / 3, 1: 1 / 3}
    for hits in itertools.product((0, 1), repeat=5 * draws):
        visits = sum(hit * times[place // draws] for place, hit in enumerate(hits))
        law[visits] += math.prod(weight[hit] for hit in hits)  # type: ignore[assignment]
    for cap in range(0, rows * 8 + 1, rows // draws):
        more = sum(p for visits, p in law.items() if visits > cap * draws // rows)
        result = routing.stop_probability(rows, 5, cap, (3, 2))
        assert result == pytest.approx(min(1.0, 3 * more), abs=1e-12)
