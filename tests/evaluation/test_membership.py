"""Scores, operating points and confidence intervals of attacks, on synthetic statistics."""

from __future__ import annotations

import numpy as np
import pytest
from mutation import kills
from numpy.typing import NDArray
from scipy.stats import norm

from fedgen.data.canaries import presence_in_repetition
from fedgen.evaluation.membership import (
    CONFIDENCE,
    SampleClassifier,
    log_likelihood_ratios,
    operating_point,
    proximity_by_label,
    roc,
)
from fedgen.randomness import RandomStreams

STREAMS = RandomStreams.from_seed(0, "seeded")


def repetitions(
    count: int, canaries: int, effect: float, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return statistics that are normal, and move by ``effect`` if a canary is included."""
    generator = np.random.default_rng(seed)
    members = np.stack(
        [presence_in_repetition(canaries, number, STREAMS.at(seed)) for number in range(count)]
    )
    statistics = generator.normal(size=(count, canaries, 3))
    statistics[:, :, 1] += effect * members
    return statistics, members


def auc(scores: NDArray[np.float64], members: NDArray[np.bool_]) -> float:
    fpr, tpr = roc(scores, members)
    return float(np.trapezoid(tpr, fpr))


@kills(
    "fedgen/evaluation/membership.py",
    "fitted = np.r_[:pair, pair + 2 : repetitions]",
    "fitted = np.r_[:repetitions]",
)
@kills(
    "fedgen/evaluation/membership.py",
    "fitted = np.r_[:pair, pair + 2 : repetitions]",
    "fitted = np.r_[:pair, pair + 1 : repetitions]",
)
def test_an_attack_without_an_effect_has_an_auc_of_one_half() -> None:
    """Fitting to the attacked repetition, or leaving out only half of a pair, biases it. Six
    standard errors."""
    areas = [
        auc(log_likelihood_ratios(statistics, members), members)
        for statistics, members in (repetitions(12, 40, 0.0, seed) for seed in range(8))
    ]
    assert abs(np.mean(areas) - 0.5) < 6 * 0.5 / np.sqrt(12 * 40 * 8 / 2) / np.sqrt(2)


def test_the_likelihood_ratio_is_near_optimal() -> None:
    """Two Gaussians at distance 2; compare with the AUC of the Neyman-Pearson test."""
    statistics, members = repetitions(64, 30, 2.0, 0)
    area = auc(log_likelihood_ratios(statistics, members), members)
    assert norm.cdf(2 / np.sqrt(2)) - 0.03 < area < norm.cdf(2 / np.sqrt(2)) + 0.01


@kills(
    "fedgen/evaluation/membership.py",
    "allowed = math.floor(fpr * len(non_members))",
    "allowed = math.ceil(fpr * len(non_members))",
)
def test_an_operating_point_does_not_exceed_its_false_positive_rate() -> None:
    scores = np.arange(250.0)[:, None]
    members = (np.arange(250) % 2 == 0)[:, None]  # others: 125, of which one may be accepted
    point = operating_point(scores, members, 0.01, STREAMS)
    assert point is not None and point.tpr == 1 / 125  # 248, above 247 and below 249
    assert operating_point(scores, members, 0.001, STREAMS) is None


@kills(
    "fedgen/evaluation/membership.py",
    "rows = generator.integers(0, len(scores), len(scores))",
    "rows = np.arange(len(scores))",
)
def test_intervals_cover_the_true_rate() -> None:
    """Scores of a run share an offset, so a binomial interval is too narrow: it covers at least 32
    of 40 times (nominal 95 %; false alarm below 1e-3)."""
    covered = 0
    for trial in range(40):
        generator = np.random.default_rng(trial)
        members = np.stack(
            [presence_in_repetition(20, number, STREAMS.at(trial)) for number in range(40)]
        )
        scores = generator.normal(size=(40, 20)) + members
        scores += 2 * generator.normal(size=(40, 1))
        point = operating_point(scores, members, 0.1, STREAMS)
        spread = np.sqrt(5)
        truth = norm.sf(norm.isf(0.1) - 1 / spread)
        assert point is not None
        covered += point.low <= truth <= point.high
    assert CONFIDENCE == 0.95 and covered >= 32


def test_proximity_uses_samples_with_the_label_of_the_record() -> None:
    samples, labels = np.array([[0.0, 0.0], [3.0, 4.0], [1.0, 0.0]]), np.array([0, 1, 0])
    records = np.array([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    found = proximity_by_label(records, np.array([0, 1, 2]), samples, labels, 1.0)
    assert found[:, 2].tolist() == [0, -5, 0]  # label 2: all samples
    assert found[0, 1] == pytest.approx(np.log((1 + np.exp(-0.5)) / 2))
    assert found[1, 1] == pytest.approx(-12.5)


def test_absent_labels_have_probability_zero() -> None:
    images = np.zeros((2000, 1, 4, 4), np.uint8)
    images[::2, :, :2] = 255
    labels = np.where(np.arange(2000) % 2 == 0, 3, 1)
    classifier = SampleClassifier(images, labels, 5, STREAMS)
    probabilities = classifier.probabilities(images[:2])
    assert probabilities[0, 3] > 0.9 and probabilities[1, 1] > 0.9
    assert np.allclose(probabilities.sum(1), 1) and (probabilities[:, [0, 2, 4]] == 0).all()
    assert classifier.features(images[:2]).shape == (2, 128)
