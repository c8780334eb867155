"""Lower bounds on ε from attacks, each with a stated probability of error.

Two kinds: many releases on a crafted pair of neighbours, distinguished by a threshold on a score;
and one run with many canaries, each included or excluded independently at random (Steinke, Nasr,
Jagielski 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import beta, binom

from fedgen.privacy.gaussian_dp import gaussian_epsilon

Scores = NDArray[np.float64]

_THRESHOLDS = 99


def gaussian_lower_bound(first: Scores, second: Scores, delta: float, confidence: float) -> float:
    """Return the lower bound on ε at ``delta`` of a composition of Gaussians that produced these
    scores.

    A Gaussian mechanism with sensitivity over standard deviation mu satisfies ndtri(1 - fpr) -
    ndtri(fnr) <= mu for every test (Dong, Roth, Su 2022, section 2). The threshold is chosen on one
    half of the scores; Clopper-Pearson intervals bound the error rates on the other.

    Args:
        first, second: scores of releases on two neighbours; larger values indicate ``first``.
        confidence: probability that the bound holds, e.g. 0.99.
    """
    rates = _error_rates(first, second, confidence, _mu)
    mu = _mu(*rates)
    return gaussian_epsilon(mu, delta) if mu > 0 else 0.0


def lower_bound(first: Scores, second: Scores, delta: float, confidence: float) -> float:
    """Return the lower bound on ε at ``delta`` of any mechanism that produced these scores: 1 - fnr
    <= e^epsilon fpr + delta holds for every test (Kairouz, Oh, Viswanath 2015). Arguments as for
    ``gaussian_lower_bound``."""
    implied = partial(_implied, delta=delta)
    return implied(*_error_rates(first, second, confidence, implied))


def _implied(fpr: float, fnr: float, delta: float) -> float:
    odds = max((1 - delta - fnr) / fpr, (1 - delta - fpr) / fnr)
    return math.log(odds) if odds > 1 else 0.0


def _mu(fpr: float, fnr: float) -> float:
    return float(ndtri(1 - fpr) - ndtri(fnr))


def _error_rates(
    first: Scores, second: Scores, confidence: float, worth: Callable[[float, float], float]
) -> tuple[float, float]:
    """Return upper bounds on the false positive and the false negative rate, from the second
    halves, at the threshold with the largest worth on the first halves."""
    half = len(first) // 2
    best, _ = _threshold(first[:half], second[:half], confidence, worth)
    return _rates(first[half:], second[half:], best, confidence)


def _threshold(
    a: Scores, b: Scores, confidence: float, worth: Callable[[float, float], float]
) -> tuple[float, float]:
    """Return the threshold with the largest worth on these scores, and that worth."""
    thresholds = np.quantile(np.concatenate([a, b]), np.linspace(0.005, 0.995, _THRESHOLDS))
    worths = {
        threshold: worth(*_rates(a, b, threshold, confidence))
        for threshold in np.unique(thresholds).tolist()
    }
    best = max(worths, key=worths.__getitem__)
    return best, worths[best]


def _rates(a: Scores, b: Scores, threshold: float, confidence: float) -> tuple[float, float]:
    errors = int((b >= threshold).sum()), int((a < threshold).sum())
    return (
        _clopper_pearson(errors[0], len(b), (1 - confidence) / 2),
        _clopper_pearson(errors[1], len(a), (1 - confidence) / 2),
    )


def _clopper_pearson(count: int, trials: int, error: float) -> float:
    """Return the upper end of the Clopper-Pearson interval for ``count`` of ``trials`` trials,
    exceeded with probability at most ``error``."""
    return 1.0 if count >= trials else float(beta.isf(error, count + 1, trials - count))


def byte_features(array: NDArray[np.generic], groups: NDArray[np.int8]) -> NDArray[np.float64]:
    """Count byte-level features of an array that do not depend on its values.

    Args:
        array: numbers of one release.
        groups: group of each entry (-1, 0 or 1), of the same shape.

    Returns:
        For each group: numbers of negative zeros, positive zeros, subnormal and non-finite entries
        (0 for integers), then of entries with each bit set, lowest first.
    """
    counts: list[int] = []
    for group in (-1, 0, 1):
        values = np.ascontiguousarray(array[groups == group])
        kinds = [0, 0, 0, 0]
        if values.dtype.kind == "f":
            zero, small = values == 0, np.abs(values) < np.finfo(values.dtype).tiny
            negative, finite = np.signbit(values), np.isfinite(values)
            masks = zero & negative, zero & ~negative, small & ~zero, ~finite
            kinds = [int(np.count_nonzero(mask)) for mask in masks]
        words = values.view(np.uint8).reshape(-1, values.itemsize)
        bits = np.unpackbits(words, axis=1, bitorder="little").sum(0, dtype=np.int64)
        counts += [*kinds, *bits.tolist()]
    return np.array(counts, dtype=np.float64)


def feature_lower_bound(
    first: NDArray[np.float64], second: NDArray[np.float64], delta: float, confidence: float
) -> float:
    """Return the lower bound on ε for the most distinguishing feature (``lower_bound``).

    Feature and threshold are chosen on the first halves of the releases and evaluated on the
    second, so that the choice does not affect the confidence.

    Args:
        first, second: features of releases on two neighbours, (releases, features).
    """
    half, implied = len(first) // 2, partial(_implied, delta=delta)

    def worth(choice: tuple[int, int]) -> float:
        sign, place = choice
        halves = sign * first[:half, place], sign * second[:half, place]
        return _threshold(*halves, confidence, implied)[1]

    varying = np.flatnonzero(np.ptp(np.concatenate([first, second]), axis=0)).tolist()
    choices = [(sign, place) for place in varying for sign in (1, -1)]
    if not choices:
        return 0.0
    sign, place = max(choices, key=worth)
    return lower_bound(sign * first[:, place], sign * second[:, place], delta, confidence)


def one_run_lower_bound(
    correct: int, guesses: int, canaries: int, delta: float, confidence: float
) -> float:
    """Return the lower bound on ε from one run with many canaries: ``correct`` of ``guesses`` about
    which of ``canaries`` were included, each independently with probability 1/2 (Steinke, Nasr,
    Jagielski 2023, theorem 5.2; canaries without a guess abstain).

    For an (epsilon, delta)-private run with r guesses on m canaries, the number of correct guesses
    is at least v with probability at most P[B >= v] + 2 m delta max_i P[v > B >= v - i] / i, where
    B is Binomial(r, 1 / (1 + e^-eps)).
    """

    def probability(eps: float) -> float:
        rate = 1 / (1 + math.exp(-eps))
        i = np.arange(1, correct + 1)
        below = binom.sf(correct - 1 - i, guesses, rate) - binom.sf(correct - 1, guesses, rate)
        slack = float((below / i).max()) if correct else 0.0
        return float(binom.sf(correct - 1, guesses, rate)) + 2 * canaries * delta * slack

    if probability(0.0) > 1 - confidence:
        return 0.0
    low, high = 0.0, 64.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) <= 1 - confidence else (low, middle)
    return low
