"""A copy is caught, a good generator is not."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import COINS

from fedgen.data.datasets import digits
from fedgen.evaluation.leakage import membership_inference, memorization, nearest
from fedgen.evaluation.utility import Images

DATA = digits(COINS)
ROWS = DATA.images
MEMBERS, OTHERS, FRESH = ROWS[:400], ROWS[400:800], ROWS[800:]


def noisy(images: Images, level: float) -> Images:
    """As a generator that copies, not exactly."""
    noise = np.random.default_rng(0).normal(0, level * 255, images.shape)
    return np.clip(images + noise, 0, 255).astype(np.uint8)


def test_nearest() -> None:
    found, which = nearest(MEMBERS[5:6], MEMBERS)
    assert (found[0], which[0]) == (0, 5)
    white, black = np.full((1, 1, 8, 8), 255, np.uint8), np.zeros((1, 1, 8, 8), np.uint8)
    assert nearest(white, black)[0][0] == pytest.approx(1)


@pytest.mark.parametrize("level", [0.0, 0.03])
def test_copies_are_caught(level: float) -> None:
    samples = noisy(MEMBERS, level)
    found = memorization(samples, MEMBERS, OTHERS)
    assert found["copied"] > 0.8
    assert found["by_chance"] < 0.01
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


def test_rows_on_both_sides_are_nobodys_copies() -> None:
    found = memorization(MEMBERS, MEMBERS, MEMBERS)
    assert (found["copied"], found["by_chance"], found["p_value"]) == (0, 0, 1)
    with pytest.raises(ValueError, match="compared"):
        memorization(MEMBERS, MEMBERS, OTHERS[:10])
