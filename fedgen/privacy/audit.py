"""Lower bounds on epsilon from attacks: what a mechanism that is as private as it says does not
exceed, but for a stated probability.

Two kinds. Many releases of a crafted pair of neighbours, told apart by a threshold on a score; and
one run with many canaries, each in or out by a coin of its own (Steinke, Nasr, Jagielski 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import beta, binom

from fedgen.privacy.accounting import gaussian_epsilon

Scores = NDArray[np.float64]

_THRESHOLDS = 99


def gaussian_lower_bound(first: Scores, second: Scores, delta: float, confidence: float) -> float:
    """epsilon at ``delta`` that a composition of Gaussians must have, if it made these scores.

    A Gaussian mechanism with sensitivity over std mu satisfies ndtri(1 - fpr) - ndtri(fnr) <= mu
    for every test (Dong, Roth, Su 2022, section 2). The threshold is chosen on one half of the
    scores, the two error rates are bounded on the other by Clopper and Pearson.

    Args:
        first, second: scores of releases on two neighbours; larger speaks for ``first``.
        confidence: that the bound holds, e.g. 0.99.
    """
    rates = _error_rates(first, second, confidence, _mu)
    mu = _mu(*rates)
    return gaussian_epsilon(mu, delta) if mu > 0 else 0.0


def lower_bound(first: Scores, second: Scores, delta: float, confidence: float) -> float:
    """As ``gaussian_lower_bound`` for any mechanism: epsilon with 1 - fnr <= e^epsilon fpr + delta
    for every test (Kairouz, Oh, Viswanath 2015)."""

    def implied(fpr: float, fnr: float) -> float:
        odds = max((1 - delta - fnr) / fpr, (1 - delta - fpr) / fnr)
        return math.log(odds) if odds > 1 else 0.0

    return implied(*_error_rates(first, second, confidence, implied))


def _mu(fpr: float, fnr: float) -> float:
    return float(ndtri(1 - fpr) - ndtri(fnr))


def _error_rates(
    first: Scores, second: Scores, confidence: float, worth: Callable[[float, float], float]
) -> tuple[float, float]:
    """Upper bounds on the false positive and the false negative rate of the threshold that is worth
    most on the first halves, from the second halves."""
    half = len(first) // 2
    thresholds = np.quantile(
        np.concatenate([first[:half], second[:half]]), np.linspace(0.005, 0.995, _THRESHOLDS)
    )

    def rates(a: Scores, b: Scores, threshold: float) -> tuple[float, float]:
        wrong = int((b >= threshold).sum()), int((a < threshold).sum())
        return (
            _at_most(wrong[0], len(b), (1 - confidence) / 2),
            _at_most(wrong[1], len(a), (1 - confidence) / 2),
        )

    best = max(thresholds, key=lambda t: worth(*rates(first[:half], second[:half], t)))
    return rates(first[half:], second[half:], best)


def _at_most(count: int, of: int, error: float) -> float:
    """Clopper and Pearson's upper end for a probability that made ``count`` of ``of``."""
    return 1.0 if count >= of else float(beta.isf(error, count + 1, of - count))


def one_run_lower_bound(
    correct: int, guesses: int, canaries: int, delta: float, confidence: float
) -> float:
    """epsilon that one run with many canaries shows: ``correct`` of ``guesses`` about which of
    ``canaries`` were in, each by a fair coin of its own (Steinke, Nasr, Jagielski 2023, theorem
    5.2; canaries that are not guessed abstain).

    Of an (epsilon, delta)-private run, the number of correct guesses exceeds v with probability at
    most P[B >= v] + 2 m delta max_i P[v > B >= v - i] / i, with B Binomial(r, 1 / (1 + e^-eps)).
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
