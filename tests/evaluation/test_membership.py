"""Scores, operating points and confidence intervals of attacks, on synthetic statistics."""

from __future__ import annotations

import numpy as np
import pytest
from mutation import kills
from numpy.typing import NDArray
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from fedgen.data.canaries import presence_in_repetition
from fedgen.evaluation.membership import (
    CONFIDENCE,
    SampleClassifier,
    log_likelihood_ratios,
    operating_point,
    proximity_by_label,
    true_positive_rates,
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
        roc_auc_score(members.ravel(), log_likelihood_ratios(statistics, members).ravel())
        for statistics, members in (repetitions(12, 40, 0.0, seed) for seed in range(8))
    ]
    assert abs(np.mean(areas) - 0.5) < 6 * 0.5 / np.sqrt(12 * 40 * 8 / 2) / np.sqrt(2)


def test_the_likelihood_ratio_is_near_optimal() -> None:
    """Two Gaussians at distance 2; compare with the AUC of the Neyman-Pearson test."""
    statistics, members = repetitions(64, 30, 2.0, 0)
    area = roc_auc_score(members.ravel(), log_likelihood_ratios(statistics, members).ravel())
    assert norm.cdf(2 / np.sqrt(2)) - 0.03 < area < norm.cdf(2 / np.sqrt(2)) + 0.01


@kills(
    "fedgen/evaluation/membership.py",
    "return math.floor(fpr * (non_members + 1) * (1 + 1e-9))",
    "return math.floor(fpr * non_members) + 1",
)
def test_the_expected_false_positive_rate_is_not_exceeded() -> None:
    """Without an effect, also where the threshold is the largest score of a non-member; three
    standard errors."""
    for others in (99, 199):
        rates = []
        for trial in range(300):
            scores = np.random.default_rng(trial).normal(size=(2 * others, 1))
            members = (np.arange(2 * others) < others)[:, None]
            point = operating_point(scores, members, 0.01, STREAMS)
            assert point is not None
            rates.append(point.tpr)
        assert np.mean(rates) < 0.01 + 3 * np.std(rates) / np.sqrt(300)
    assert operating_point(scores[:98], members[:98], 0.01, STREAMS) is None


@kills(
    "fedgen/evaluation/membership.py",
    "min(float(low), exact_low), max(float(high), exact_high)",
    "float(low), float(high)",
)
def test_intervals_cover_the_rate_at_extreme_thresholds() -> None:
    """The lower limit exceeds the true rate in at most 2.5 % of 200 trials (false alarm below
    1e-3), where the threshold is the largest score of a non-member."""
    above = 0
    for trial in range(200):
        generator = np.random.default_rng(trial)
        members = np.stack([presence_in_repetition(10, n, STREAMS.at(trial)) for n in range(20)])
        scores = generator.normal(size=(20, 10)) + 2.0 * members
        point = operating_point(scores, members, 0.01, STREAMS)
        assert point is not None
        above += point.low > norm.sf(norm.isf(0.01) - 2)
    assert above <= 13


@kills(
    "fedgen/evaluation/membership.py",
    "rows = generator.integers(0, len(scores), len(scores))",
    "rows = np.arange(len(scores))",
)
def test_intervals_cover_the_rate_of_dependent_scores() -> None:
    """The effect varies between runs, so an interval for independent scores is too narrow. At least
    33 of 40 cover (nominal 95 %; false alarm below 1e-3)."""
    covered = 0
    for trial in range(40):
        generator = np.random.default_rng(trial)
        members = np.stack([presence_in_repetition(100, n, STREAMS.at(trial)) for n in range(40)])
        effects = 1 + 2 * generator.normal(size=(40, 1))
        scores = generator.normal(size=(40, 100)) + effects * members
        point = operating_point(scores, members, 0.1, STREAMS)
        truth = norm.sf((norm.isf(0.1) - 1) / np.sqrt(5))
        assert point is not None
        covered += point.low <= truth <= point.high
    assert CONFIDENCE == 0.95 and covered >= 33


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


def test_curves_pass_through_the_operating_points() -> None:
    scores = np.random.default_rng(0).normal(size=(400, 1))
    members = (np.arange(400) < 200)[:, None]
    scores[members] += 1
    rates = [0.001, 0.01, 0.1, 1.0]
    curve = true_positive_rates(scores, members, rates)
    points = [operating_point(scores, members, fpr, STREAMS) for fpr in rates[1:3]]
    assert curve[1:3] == [point.tpr for point in points if point is not None]
    assert curve[0] == 0 and curve[3] > 0.99, "200 non-members are too few for 0.1 %"
