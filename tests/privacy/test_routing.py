"""Routing: the draw, its event, and how often the busiest is drawn."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from dp_accounting import GaussianDpEvent
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import Relation, RevealedDraw, canonical
from fedgen.privacy.routing import Routing

routings = st.builds(
    lambda mode, population, share: Routing(mode, population, max(1, int(population * share))),
    st.sampled_from(["per_sample", "per_step", "mean"]),
    st.integers(1, 12),
    st.floats(0, 1),
)


@given(routings, st.integers(1, 10), st.integers())
def test_each_row_has_its_answerers(routing: Routing, rows: int, seed: int) -> None:
    routed = routing.draw(rows, random.Random(seed))
    counts = Counter(row for answered in routed.values() for row in answered)
    assert counts == dict.fromkeys(range(rows), routing.answers_per_row)
    assert all(0 <= member < routing.population for member in routed)
    assert all(answered == sorted(set(answered)) for answered in routed.values())


def test_rows_are_drawn_independently_and_uniformly() -> None:
    """Chi-square at level 1e-6 over pairs (member of row 0, member of row 1)."""
    routing, rng = Routing("per_sample", 4), random.Random(0)
    pairs: Counter[tuple[int, int]] = Counter()
    for _ in range(8000):
        owner = {row: m for m, rows in routing.draw(2, rng).items() for row in rows}
        pairs[owner[0], owner[1]] += 1
    assert len(pairs) == 16
    assert stats.chisquare(list(pairs.values())).pvalue > 1e-6


def test_per_step_draws_once() -> None:
    routed = Routing("per_step", 50).draw(32, random.Random(1))
    assert list(routed.values()) == [list(range(32))]


def test_one_draw_is_one_node() -> None:
    """The batch is inside of the node when one draw serves it, outside when each row has its own;
    taking the first for the second understates epsilon hundredfold."""
    [(per_step, count)] = canonical(Routing("per_step", 1000).event(32, 1.07, True)).items()
    assert count == 1
    assert per_step.event.noise_multiplier == pytest.approx(1.07 / 32**0.5)
    [(per_sample, count)] = canonical(Routing("per_sample", 1000).event(32, 1.07, True)).items()
    assert count == 32
    assert per_sample.event.noise_multiplier == 1.07


def test_what_does_not_amplify() -> None:
    assert isinstance(Routing("per_step", 9).event(4, 1.0, hidden=False), RevealedDraw)
    assert isinstance(Routing("per_step", 9, 2, "poisson").event(4, 1.0, hidden=True), RevealedDraw)
    assert canonical(Routing("mean", 9).event(4, 1.0, hidden=True)) == {GaussianDpEvent(1.0): 4}


def test_poisson_cohorts_have_the_expected_size() -> None:
    routing, rng = Routing("per_step", 100, 10, "poisson"), random.Random(0)
    sizes = [len(routing.draw(1, rng)) for _ in range(2000)]
    assert stats.ttest_1samp(sizes, 10).pvalue > 1e-6
    assert min(sizes) < 10 < max(sizes)


@given(routings, st.integers(1, 6), st.integers(1, 60))
def test_the_busiest_stays_below_its_cap(routing: Routing, rows: int, steps: int) -> None:
    cap = routing.busiest(rows, steps, 1e-6)
    assert routing.stop_probability(rows, steps, cap) <= 1e-6
    rng, asked = random.Random(0), Counter()
    for _ in range(steps):
        for member, answered in routing.draw(rows, rng).items():
            asked[member] += len(answered)
    assert max(asked.values()) <= cap


def test_events_of_steps_add_up() -> None:
    routing = Routing("per_sample", 20)
    once = canonical(routing.event(8, 2.0, True), 5)
    together = canonical(routing.event(40, 2.0, True))
    assert epsilon(once, 1e-5, Relation.REPLACE_ONE) == epsilon(
        together, 1e-5, Relation.REPLACE_ONE
    )
