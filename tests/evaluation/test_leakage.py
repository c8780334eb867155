"""Leakage metrics detect copies, and report none for a good generator."""

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
    """Return images with noise, as of a generator that copies approximately."""
    noise = np.random.default_rng(0).normal(0, level * 255, images.shape)
    return np.clip(images + noise, 0, 255).astype(np.uint8)


def test_nearest() -> None:
    result, which = nearest(MEMBERS[5:6], MEMBERS)
    assert (result[0, 0], which[0, 0]) == (pytest.approx(0, abs=1e-6), 5)
    white, black = np.full((1, 1, 8, 8), 255, np.uint8), np.zeros((1, 1, 8, 8), np.uint8)
    assert nearest(white, black)[0][0, 0] == pytest.approx(1)


@pytest.mark.parametrize("level", [0.0, 0.03])
def test_copies_are_detected(level: float) -> None:
    samples = noisy(MEMBERS, level)
    result = memorization(samples, MEMBERS, OTHERS)
    assert result["copied"] > (0.99 if level == 0 else 0.5)
    assert result["by_chance"] == 0
    assert result["p_value"] < 1e-20
    attack = membership_inference(samples, MEMBERS, OTHERS)
    assert attack["auc"] > 0.99
    assert attack["tpr_at_1_percent_fpr"] > 0.9


def test_fresh_images_of_the_same_distribution_are_not_copies() -> None:
    """Error rates of 1e-3 (a p-value), and five standard deviations."""
    result = memorization(FRESH, MEMBERS, OTHERS)
    assert result["p_value"] > 1e-3
    attack = membership_inference(FRESH, MEMBERS, OTHERS)
    assert abs(attack["auc"] - 0.5) < 5 * np.sqrt(801 / (12 * 400**2))
    assert attack["tpr_at_1_percent_fpr"] < 0.05


@pytest.mark.parametrize("modes", [3, 300])
def test_the_p_value_is_valid_for_any_generator(modes: int) -> None:
    """Also for a generator that repeats a few images: over 200 splits of the same images, p < 0.05
    in at most 10 % (a probability of 1e-3 by chance, at a rate of 5 %)."""
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 256, (200, 1, 1, 2), dtype=np.uint8)  # some neighbours come by chance
    samples = np.repeat(rng.integers(0, 256, (modes, 1, 1, 2), dtype=np.uint8), 300 // modes, 0)
    small = 0
    for _ in range(200):
        order = rng.permutation(200)
        small += memorization(samples, rows[order[:100]], rows[order[100:]])["p_value"] < 0.05
    assert small <= 20


def test_duplicate_training_images_are_not_counted_as_copies() -> None:
    result = memorization(MEMBERS, MEMBERS, MEMBERS)
    assert (result["copied"], result["by_chance"], result["p_value"]) == (0, 0, 1)
