"""The statistics of audits: they hold with the stated confidence, and detect violations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from mutation import kills
from scipy import stats

from fedgen.privacy.audit_bounds import (
    byte_features,
    feature_lower_bound,
    gaussian_lower_bound,
    lower_bound,
    one_run_lower_bound,
)
from fedgen.privacy.gaussian_dp import gaussian_epsilon


def gaussian_scores(mu: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(mu, 1, count), rng.normal(0, 1, count)


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.5])
def test_bounds_of_gaussians_are_close_and_valid(mu: float) -> None:
    """At 99 % confidence, 100 audits exceed the truth more than 6 times with probability 7e-5."""
    truth = gaussian_epsilon(mu, 1e-5)
    result = [gaussian_lower_bound(*gaussian_scores(mu, 4000, s), 1e-5, 0.99) for s in range(100)]
    assert sum(each > truth for each in result) <= 6
    assert np.median(result) > 0.6 * truth


@pytest.mark.parametrize("bound", [gaussian_lower_bound, lower_bound])
def test_no_bound_is_found_without_a_difference(bound: object) -> None:
    result = [bound(*gaussian_scores(0.0, 200, s), 1e-5, 0.9) for s in range(200)]  # type: ignore[operator]
    assert sum(each > 0 for each in result) <= stats.binom.isf(1e-4, 200, 0.1)


@kills(
    "fedgen/privacy/audit_bounds.py",
    "return _rates(first[half:], second[half:], best, confidence)",
    "return _rates(first[:half], second[:half], best, confidence)",
)
@pytest.mark.parametrize("bound", [gaussian_lower_bound, lower_bound])
def test_thresholds_are_evaluated_on_other_scores(bound: object) -> None:
    """A difference in the first halves alone counts nothing."""
    first, second = gaussian_scores(0.0, 1000, 3)
    first[:500] += 10
    assert bound(first, second, 1e-5, 0.95) == 0.0  # type: ignore[operator]
    assert bound(first[:500], second[:500], 1e-5, 0.95) > 1  # type: ignore[operator]


def test_bounds_of_randomized_response_are_close_and_valid() -> None:
    """Pure ε = 1: the true answer with probability e / (1 + e)."""
    rng, keep = np.random.default_rng(0), math.e / (1 + math.e)
    result = []
    for _ in range(100):
        first, second = (rng.random(4000) < keep).astype(float), (rng.random(4000) >= keep) * 1.0
        result.append(lower_bound(first, second, 1e-5, 0.99))
    assert sum(each > 1 for each in result) <= 6
    assert np.median(result) > 0.8


def test_half_of_the_noise_is_detected() -> None:
    claimed = gaussian_epsilon(1.0, 1e-5)
    assert gaussian_lower_bound(*gaussian_scores(2.0, 4000, 0), 1e-5, 0.99) > claimed


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_one_run_bounds_hold_with_their_confidence(epsilon: float) -> None:
    """m independent randomized responses of pure ε, 400 runs at 95 % confidence: exceeding more
    than 38 times has probability 1e-4."""
    canaries, rng = 200, np.random.default_rng(1)
    keep = 1 / (1 + math.exp(-epsilon))
    result = [
        one_run_lower_bound(int(rng.binomial(canaries, keep)), canaries, canaries, 0.0, 0.95)
        for _ in range(400)
    ]
    assert sum(each > epsilon for each in result) <= stats.binom.isf(1e-4, 400, 0.05)
    if epsilon:
        assert np.median(result) > 0.6 * epsilon


def test_one_run_known_values() -> None:
    """10 of 10 correct: P[Binomial(10, p) = 10] = 0.05 at p = 0.05^(1/10)."""
    p = 0.05 ** (1 / 10)
    expected = math.log(p / (1 - p))
    assert one_run_lower_bound(10, 10, 10, 0.0, 0.95) == pytest.approx(expected, abs=1e-5)
    assert one_run_lower_bound(10, 10, 10, 1e-5, 0.95) < expected
    assert one_run_lower_bound(5, 10, 10, 0.0, 0.95) == 0.0
    assert one_run_lower_bound(0, 0, 10, 1e-5, 0.95) == 0.0


def test_delta_only_lowers_the_bound() -> None:
    bounds = [one_run_lower_bound(80, 100, 100, d, 0.95) for d in (0.0, 1e-6, 1e-4, 1e-2)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1]


def byte_scores(values: np.ndarray) -> np.ndarray:
    return np.stack([byte_features(row, np.zeros(row.shape, np.int8)) for row in values])


def test_the_sign_of_zero_is_detected_in_bytes() -> None:
    """A release of 100 values that contains a negative zero in one of ten cases, or never."""
    rng = np.random.default_rng(0)
    values = rng.integers(-9, 10, (2, 2000, 100)).astype(np.float32) + 0.0
    first, second = values
    assert feature_lower_bound(byte_scores(first), byte_scores(second), 1e-5, 0.99) == 0.0
    zeros = np.abs(first) == 0
    first[zeros & (rng.random(first.shape) < 0.02)] = -0.0
    assert feature_lower_bound(byte_scores(first), byte_scores(second), 1e-5, 0.99) > 2


def test_features_of_bytes() -> None:
    array = np.array([-0.0, 0.0, 1e-40, np.nan, 1.0], np.float32)
    counts = byte_features(array, np.zeros(5, np.int8)).reshape(3, 36)[1]
    assert counts[:4].tolist() == [1, 1, 1, 1]
    assert counts[-1] == 1, "one sign bit is set"
    ring = byte_features(np.array([-1, 2], np.int32), np.array([1, 0], np.int8)).reshape(3, 36)
    assert ring[2].tolist() == [0] * 4 + [1] * 32
    assert ring[1].tolist() == [0] * 4 + [0, 1] + [0] * 30


def test_features_are_evaluated_on_other_releases() -> None:
    rng, result = np.random.default_rng(0), []
    for _ in range(100):
        first, second = rng.integers(0, 2, (2, 200, 30)).astype(float)
        result.append(feature_lower_bound(first, second, 1e-5, 0.9))
    assert sum(each > 0 for each in result) <= stats.binom.isf(1e-4, 100, 0.1)
