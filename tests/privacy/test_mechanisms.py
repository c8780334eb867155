"""Mechanisms: the clip, the noise, the sensitivity, and who may make a Release."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from fedgen.coins import Coins
from fedgen.privacy.events import Relation, Unit
from fedgen.privacy.mechanisms import NoMechanism, Release, RowGaussian, clip_rows
from fedgen.privacy.routing import Routing

any_rows = arrays(
    np.float32, (3, 4), elements=st.floats(width=32, allow_nan=True, allow_infinity=True)
)


def gaussian(clip: float, sigma: float, critics: int = 1) -> RowGaussian:
    return RowGaussian(clip, sigma, Routing("mean", critics), True, Unit.RECORD)


def all_rows(rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.arange(len(rows)), rows)]


@given(any_rows, st.floats(0.01, 100))
def test_clipped_rows_are_in_the_ball(rows: np.ndarray, bound: float) -> None:
    clipped = clip_rows(torch.from_numpy(rows), bound)
    norms = np.linalg.norm(clipped.double().numpy(), axis=1)
    assert (norms <= bound).all()


@given(arrays(np.float32, (2, 3), elements=st.floats(-1, 1, width=32)))
def test_small_rows_are_left_alone(rows: np.ndarray) -> None:
    given_rows = torch.from_numpy(rows)
    assert torch.equal(clip_rows(given_rows, 2.0), given_rows)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_a_bad_row_becomes_zero_and_its_neighbours_stay(bad: float) -> None:
    rows = torch.tensor([[0.1, 0.2], [bad, 3e38], [0.3, 0.4]])
    clipped = clip_rows(rows, 1.0)
    assert torch.equal(clipped[1], torch.zeros(2))
    assert torch.equal(clipped[[0, 2]], rows[[0, 2]])


@given(any_rows, any_rows, st.integers(1, 5))
def test_sensitivity_bounds_any_exchange(
    before: np.ndarray, after: np.ndarray, critics: int
) -> None:
    """Exchanging one critic's data moves the answer, noise aside, by at most the sensitivity."""
    mechanism, coins = gaussian(0.7, 1.0, critics), Coins.of(0, "seeded")
    others = [torch.full((3, 4), float(k)) for k in range(critics - 1)]

    def released(rows: np.ndarray) -> np.ndarray:
        answers = [(torch.arange(3), r) for r in [*others, torch.from_numpy(rows)]]
        return mechanism.release((3, 4), answers, coins).arrays["gradients"]

    moved = np.linalg.norm(released(before) - released(after), axis=1)
    for relation in Relation:
        assert (moved <= mechanism.sensitivity(relation) + 1e-4).all()


def test_the_bound_is_met() -> None:
    up, down = torch.tensor([[9.0, 0.0]]), torch.tensor([[-9.0, 0.0]])
    mechanism, coins = gaussian(0.5, 1.0), Coins.of(0, "seeded")
    first, second = (
        mechanism.release((1, 2), all_rows(r), coins).arrays["gradients"] for r in (up, down)
    )
    assert np.linalg.norm(first - second) == pytest.approx(
        mechanism.sensitivity(Relation.REPLACE_ONE), rel=1e-4
    )


@pytest.mark.parametrize("critics", [1, 4])
def test_noise_has_the_promised_standard_deviation(critics: int) -> None:
    """Variance of 60,000 numbers within the chi-square interval of level 1e-6, per coordinate of a
    release; a build with half the noise, or noise over the batch size, falls far outside."""
    clip, sigma = 0.5, 1.5
    mechanism = gaussian(clip, sigma, critics)
    rows = torch.zeros(600, 100)
    answers = [(torch.arange(600), rows) for _ in range(critics)]
    noise = mechanism.release((600, 100), answers, Coins.of(1, "seeded")).arrays["gradients"]
    scale = sigma * 2 * clip / critics
    statistic = float((noise.astype(np.float64) ** 2).sum()) / scale**2
    low, high = stats.chi2.interval(1 - 1e-6, noise.size)
    assert low < statistic < high
    assert not low < statistic / 4 < high


def test_releases_at_different_places_have_independent_noise(coins: Coins) -> None:
    rows = torch.zeros(20, 50)
    found = [
        gaussian(1.0, 1.0).release((20, 50), all_rows(rows), coins.at(*place)).arrays["gradients"]
        for place in [
            ("client", 0, "answer", 0),
            ("client", 1, "answer", 0),
            ("client", 0, "answer", 1),
        ]
    ]
    for first, second in itertools.combinations(found, 2):
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.2


def test_rows_answered_too_seldom_are_refused(coins: Coins) -> None:
    with pytest.raises(ValueError, match="number of answers"):
        gaussian(1.0, 1.0, 2).release((3, 4), all_rows(torch.zeros(3, 4)), coins)


def test_a_release_says_what_it_cost(coins: Coins) -> None:
    release = gaussian(1.0, 2.5).release((1, 4), all_rows(torch.zeros(1, 4)), coins)
    assert release.event == GaussianDpEvent(2.5)
    assert release.unit is Unit.RECORD


def test_without_a_mechanism_there_is_no_bound(coins: Coins) -> None:
    rows = torch.randn(2, 3) * 100
    mechanism = NoMechanism(Routing("mean", 1), Unit.RECORD)
    release = mechanism.release((2, 3), all_rows(rows), coins)
    assert np.array_equal(release.arrays["gradients"], rows.numpy())
    assert "NonPrivate" in repr(release.event)


def test_nobody_else_makes_a_release() -> None:
    with pytest.raises(TypeError, match="made by a mechanism"):
        Release({}, GaussianDpEvent(1.0), Unit.RECORD)
