"""A copy is caught, a good generator is not."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import STREAMS

from fedgen.data.digits import digits
from fedgen.evaluation.leakage import membership_inference, memorization, nearest
from fedgen.evaluation.utility import Images

DATA = digits(STREAMS)
ROWS = DATA.images
MEMBERS, OTHERS, FRESH = ROWS[:400], ROWS[400:800], ROWS[800:]


def noisy(images: Images, level: float) -> Images:
    """As a generator that copies, not exactly."""
    noise = np.random.default_rng(0).normal(0, level * 255, images.shape)
    return np.clip(images + noise, 0, 255).astype(np.uint8)


def test_nearest() -> None:
    found, which = nearest(MEMBERS[5:6], MEMBERS)
    assert (found[0, 0], which[0, 0]) == (pytest.approx(0, abs=1e-6), 5)
    white, black = np.full((1, 1, 8, 8), 255, np.uint8), np.zeros((1, 1, 8, 8), np.uint8)
    assert nearest(white, black)[0][0, 0] == pytest.approx(1)


@pytest.mark.parametrize("level", [0.0, 0.03])
def test_copies_are_caught(level: float) -> None:
    samples = noisy(MEMBERS, level)
    found = memorization(samples, MEMBERS, OTHERS)
    assert found["copied"] > (0.99 if level == 0 else 0.5)
    assert found["by_chance"] == 0
    assert found["p_value"] < 1e-20
    attack = membership_inference(samples, MEMBERS, OTHERS)
    assert attack["auc"] > 0.99
    assert attack["tpr_at_1_percent_fpr"] > 0.9


def test_a_generator_that_knows_the_law_alone_is_not() -> None:
    """Fresh rows of the same law: error rates of 1e-3 (a p-value), and five standard deviations."""
    found = memorization(FRESH, MEMBERS, OTHERS)
    assert found["p_value"] > 1e-3
    attack = membership_inference(FRESH, MEMBERS, OTHERS)
    assert abs(attack["auc"] - 0.5) < 5 * np.sqrt(801 / (12 * 400**2))
    assert attack["tpr_at_1_percent_fpr"] < 0.05


@pytest.mark.parametrize("modes", [3, 300])
def test_the_p_value_is_one_whatever_the_generator(modes: int) -> None:
    """Also of a generator that knows a few images alone, each many times: over 200 splits of the
    same rows, p < 0.05 in at most 10 % (a probability of 1e-3 by chance, if the rate were 5 %)."""
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 256, (200, 1, 1, 2), dtype=np.uint8)  # some neighbours come by chance
    samples = np.repeat(rng.integers(0, 256, (modes, 1, 1, 2), dtype=np.uint8), 300 // modes, 0)
    small = 0
    for _ in range(200):
        order = rng.permutation(200)
        small += memorization(samples, rows[order[:100]], rows[order[100:]])["p_value"] < 0.05
    assert small <= 20


def test_rows_that_occur_twice_are_nobodys_copies() -> None:
    found = memorization(MEMBERS, MEMBERS, MEMBERS)
    assert (found["copied"], found["by_chance"], found["p_value"]) == (0, 0, 1)
