"""Membership inference on generators.

``log_likelihood_ratios`` adapts the attack of "Membership Inference Attacks From First Principles"
(Carlini et al., IEEE S&P 2022) to generators: repeat the run with and without each record, compute
statistics of the weights or of the samples, and compare both distributions. Attacks on a single
generator, without repetitions, score a record by the density of samples around it (as the Monte
Carlo attack of Hilprecht et al., PETS 2019) and by the distance to the nearest sample
("GAN-Leaks", Chen et al., CCS 2020), in features of a classifier that is trained on samples.

Results have no privacy guarantee. Distances of samples to the closest training record are not
reported as evidence of privacy: data that pass such tests have been found highly vulnerable to
membership inference ("The DCR Delusion", arXiv 2505.01524).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedgen.evaluation.utility import Images, Labels
from fedgen.randomness import RandomStreams

Floats = NDArray[np.float64]
CONFIDENCE = 0.95
_HIDDEN = 128  # hidden units of the classifier
_EPOCHS = 30
_BOOTSTRAP_RESAMPLES = 400
_BATCH = 256  # records that are compared with samples at once
_BANDWIDTH_SAMPLES = 500
_MAX_STATISTICS = 20  # statistics with the largest standardized difference
# added to standard deviations, relative to means, and to the diagonal of covariances: without noise
# statistics may be constant
_REGULARIZATION = 1e-6
_MAX_SAMPLES_PER_LABEL = 2000


class SampleClassifier:
    """Classifier of labels with one hidden layer, trained on samples.

    Args:
        images: samples (n, channels, height, width) uint8.
        labels: (n,), at least two different ones.
        classes: number of labels of the data set.
    """

    def __init__(
        self, images: Images, labels: Labels, classes: int, streams: RandomStreams
    ) -> None:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.neural_network import MLPClassifier

        seed = streams.public("classifier").initial_seed() % 2**32
        self._classes = classes
        self._model = MLPClassifier((_HIDDEN,), max_iter=_EPOCHS, random_state=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # it stops after its epochs
            self._model.fit(flat(images), labels)

    def features(self, images: Images) -> Floats:
        """Return the activations of the hidden layer, (n, units)."""
        hidden = flat(images) @ self._model.coefs_[0] + self._model.intercepts_[0]
        return np.asarray(np.maximum(hidden, 0))

    def probabilities(self, images: Images) -> Floats:
        """Return the probability of each label, (n, classes)."""
        probabilities = np.zeros((len(images), self._classes))
        probabilities[:, self._model.classes_] = self._model.predict_proba(flat(images))
        return probabilities


def flat(images: Images) -> Floats:
    """Return pixels in [0, 1], (n, pixels)."""
    return images.reshape(len(images), -1) / 255


def bandwidth(samples: Floats) -> float:
    """Return the median distance of a sample (n, d) to the nearest other sample, for a kernel."""
    from sklearn.neighbors import NearestNeighbors

    first = samples[:_BANDWIDTH_SAMPLES]
    if len(first) < 2:
        return 1.0
    distances, _ = NearestNeighbors(n_neighbors=2).fit(first).kneighbors(first)
    return max(float(np.median(distances[:, 1])), 1e-6)


def proximity(records: Floats, samples: Floats, width: float) -> Floats:
    """Return three scores of each record, (n, 3): its mean inner product with the samples; the
    logarithm of a kernel density estimate at the record (Gaussian kernel with standard deviation
    ``width``, up to a constant); and its negative distance to the nearest sample.

    Args:
        records: (n, d).
        samples: (k, d).
    """
    from scipy.special import logsumexp

    statistics = np.empty((len(records), 3))
    norms = np.square(samples).sum(1)
    for start in range(0, len(records), _BATCH):
        part = records[start : start + _BATCH]
        squares = np.square(part).sum(1)[:, None] + norms - 2 * part @ samples.T
        squares = np.maximum(squares, 0)
        density = logsumexp(-squares / (2 * width**2), axis=1) - math.log(len(samples))
        nearest = -np.sqrt(squares.min(1))
        mean_product = part @ samples.mean(0)
        statistics[start : start + _BATCH] = np.stack([mean_product, density, nearest], 1)
    return statistics


def proximity_by_label(
    records: Floats, labels: Labels, samples: Floats, sample_labels: Labels, width: float
) -> Floats:
    """Return ``proximity`` of each record to the samples of its label; to all samples if there are
    none of its label."""
    statistics = np.empty((len(records), 3))
    for label in np.unique(labels):
        with_label = samples[sample_labels == label][:_MAX_SAMPLES_PER_LABEL]
        rows = labels == label
        compared = with_label if len(with_label) else samples
        statistics[rows] = proximity(records[rows], compared, width)
    return statistics


def log_likelihood_ratios(statistics: Floats, members: NDArray[np.bool_]) -> Floats:
    """Return the log-likelihood ratio of each record in each repetition, (repetitions, records),
    under two Gaussians with a shared covariance (Ledoit-Wolf), fitted to the other pairs of
    repetitions.

    Repetitions 2 i and 2 i + 1 include complementary records (``presence_in_repetition``). Both are
    left out together: leaving out one would bias the fitted means against the true membership. Of
    many statistics, those with the largest standardized difference of means are used.

    Args:
        statistics: (repetitions, records or 1, statistics); 1: all records have the same.
        members: whether each record was included, (repetitions, records).
    """
    repetitions, records = members.shape
    scores = np.empty((repetitions, records))
    for record in range(records):
        rows, included = statistics[:, min(record, statistics.shape[1] - 1)], members[:, record]
        for pair in range(0, repetitions, 2):
            fitted = np.r_[:pair, pair + 2 : repetitions]
            scores[pair : pair + 2, record] = _log_likelihood_ratio(
                rows[fitted], included[fitted], rows[pair : pair + 2]
            )
    return scores


def _log_likelihood_ratio(rows: Floats, included: NDArray[np.bool_], attacked: Floats) -> Floats:
    """Return the log-likelihood ratio of attacked rows, under Gaussians fitted to ``rows``."""
    from sklearn.covariance import ledoit_wolf

    means = np.stack([rows[~included].mean(0), rows[included].mean(0)])
    within = rows - means[included.astype(int)]
    scale = within.std(0) + _REGULARIZATION * np.abs(means).max(0) + np.finfo(float).tiny
    if rows.shape[1] > _MAX_STATISTICS:
        distances = np.abs(means[1] - means[0]) / scale
        columns = np.argpartition(-distances, _MAX_STATISTICS)[:_MAX_STATISTICS]
        within, means, scale = within[:, columns], means[:, columns], scale[columns]
        attacked = attacked[:, columns]
    covariance = ledoit_wolf(within / scale, assume_centered=True)[0] + _REGULARIZATION * np.eye(
        len(scale)
    )
    direction = np.linalg.solve(covariance, (means[1] - means[0]) / scale)
    return np.asarray((attacked - means.mean(0)) / scale @ direction)


@dataclass(frozen=True)
class OperatingPoint:
    """The true positive rate of an attack at a false positive rate, with bounds of a confidence
    interval (``CONFIDENCE``)."""

    fpr: float
    tpr: float
    low: float
    high: float


def operating_point(
    scores: Floats,
    members: NDArray[np.bool_],
    fpr: float,
    streams: RandomStreams,
    confidence: float = CONFIDENCE,
) -> OperatingPoint | None:
    """Return the true positive rate at ``fpr`` of the attack that classifies scores above a
    threshold as members; None if there are too few non-members to set the threshold.

    The threshold is the j-th largest score of n non-members. Its false positive rate is distributed
    as Beta(j, n + 1 - j), with mean j / (n + 1), the largest not above ``fpr``. The interval is the
    union of two. One is exact for independent scores: it takes the Clopper-Pearson limits at
    thresholds that have a rate below (for the lower limit) and above ``fpr`` with high probability.
    The other is the bootstrap interval over rows, because scores within a row are
    dependent.

    Args:
        scores: (rows, columns); rows, repetitions or images, are resampled.
        members: membership of each score.
        confidence: of the interval.
    """
    non_members = np.sort(scores[~members])[::-1]
    rank = _rank(len(non_members), fpr)
    if not rank:
        return None
    generator = np.random.default_rng(streams.public("resamples").initial_seed())
    resampled = []
    for _ in range(_BOOTSTRAP_RESAMPLES):
        rows = generator.integers(0, len(scores), len(scores))
        are_members = members[rows]
        others = scores[rows][~are_members]
        if are_members.any() and _rank(len(others), fpr):
            resampled.append(_tpr(scores[rows][are_members], others, fpr))
    tail = (1 - confidence) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    exact_low, exact_high = _exact_interval(scores[members], non_members, fpr, tail)
    tpr = _tpr(scores[members], non_members, fpr)
    return OperatingPoint(fpr, tpr, min(float(low), exact_low), max(float(high), exact_high))


def _rank(non_members: int, fpr: float) -> int:
    """Return the rank, from 1, of the threshold among the scores of non-members; 0 if there is
    none."""
    return math.floor(fpr * (non_members + 1) * (1 + 1e-9))


def _tpr(members: Floats, non_members: Floats, fpr: float) -> float:
    rank = min(_rank(len(non_members), fpr), len(non_members))
    threshold = np.partition(non_members, -rank)[-rank]
    return float((members > threshold).mean())


def _exact_interval(
    members: Floats, descending: Floats, fpr: float, tail: float
) -> tuple[float, float]:
    """Return a confidence interval of the true positive rate at ``fpr`` for independent scores.
    Each limit may fail by the threshold or by the number of members above it, with probability
    ``tail`` / 2 each.

    Args:
        members: scores of members.
        descending: scores of non-members in descending order.
    """
    from scipy.stats import beta, binomtest

    n, ranks = len(descending), np.arange(1, len(descending) + 1)
    below = beta.cdf(fpr, ranks, n + 1 - ranks)  # probability that the rate is at most fpr
    strict, loose = ranks[below >= 1 - tail / 2], ranks[below <= tail / 2]
    low, high = 0.0, 1.0
    if len(strict):
        above = int((members > descending[strict[-1] - 1]).sum())
        low = float(binomtest(above, len(members)).proportion_ci(1 - tail).low)
    if len(loose):
        above = int((members > descending[loose[0] - 1]).sum())
        high = float(binomtest(above, len(members)).proportion_ci(1 - tail).high)
    return low, high


def true_positive_rates(
    scores: Floats, members: NDArray[np.bool_], rates: Sequence[float]
) -> list[float]:
    """Return the true positive rate at each false positive rate; 0 where there are too few
    non-members to set a threshold."""
    of_members, non_members = scores[members], scores[~members]
    return [
        _tpr(of_members, non_members, fpr) if _rank(len(non_members), fpr) else 0.0 for fpr in rates
    ]
