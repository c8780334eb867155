"""The verdict on a pixel flip, on images whose bug is known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom
from tiny import COINS

from fedgen.data.datasets import digits
from fedgen.evaluation.polarity import _p_value, verdict

DIGITS = digits(COINS)
Rows = tuple[NDArray[np.uint8], NDArray[np.int64]]


def drawn(
    count: int, inverted: float, seed: int, labels: tuple[int, ...] = tuple(range(10))
) -> Rows:
    """Real digits with noise, some of them inverted: of these labels alone."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, len(DIGITS.labels), count)
    images, found = DIGITS.images[rows].astype(float), DIGITS.labels[rows]
    flip = (rng.random(count) < inverted) & np.isin(found, labels)
    images[flip] = 255 - images[flip]
    noisy = images + rng.normal(0, 30, images.shape)
    return noisy.clip(0, 255).astype(np.uint8), found


def test_a_bug_is_found_where_it_is() -> None:
    found = verdict(drawn(2000, 0.8, 0), drawn(2000, 0.0, 1), 10, 0.1)
    assert found.bug is True
    assert found.p_value < 1e-6
    assert found.effect == pytest.approx(0.8, abs=0.1)
    assert found.classes == list(range(10))


def test_the_labels_affected_are_named() -> None:
    found = verdict(drawn(4000, 1.0, 0, labels=(3, 7)), drawn(4000, 0.0, 1), 10, 0.05)
    assert found.bug is True
    assert found.classes == [3, 7]


def test_two_groups_alike_have_none() -> None:
    for seed in range(20):
        found = verdict(drawn(500, 0.0, seed), drawn(500, 0.0, 100 + seed), 10, 0.1)
        assert found.bug is False
        assert not found.classes


def test_a_normal_group_with_the_bug_is_no_bug_of_the_suspects() -> None:
    assert verdict(drawn(2000, 0.5, 0), drawn(2000, 0.45, 1), 10, 0.1).bug is not True


def test_generators_that_learnt_nothing_tell_nothing() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 2000)
    noise = [rng.integers(0, 256, (2000, 1, 8, 8)).astype(np.uint8) for _ in range(2)]
    found = verdict((noise[0], labels), (noise[1], labels), 10, 0.1)
    assert found.bug is None
    upright = drawn(2000, 0.0, 1)
    assert verdict((noise[0], labels), upright, 10, 0.1).bug is None


def test_a_label_without_samples_is_no_trouble() -> None:
    images, labels = drawn(600, 0.0, 0)
    some = labels != 4
    found = verdict((images, labels), (images[some], labels[some]), 10, 0.1)
    assert found.bug is False


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.9])
@pytest.mark.parametrize("count", [100, 1000])
def test_the_test_keeps_its_level(share: float, count: int) -> None:
    """On the edge of the hypothesis it is wrong at most about as often as it says: 5,000 trials at
    level 0.01; more than twice that has a chance below 1e-9."""
    rng = np.random.default_rng(count)
    wrong = 0
    for _ in range(5000):
        first, second = rng.random(count) < share + 0.1, rng.random(count) < share
        wrong += _p_value(first, second, 0.1) < 0.01
    assert wrong <= binom.isf(1e-9, 5000, 0.01) * 1.2
