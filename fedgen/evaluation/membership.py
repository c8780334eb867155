"""Membership inference from samples of a published generator.

The likelihood ratio of "Membership Inference Attacks From First Principles" (Carlini et al., IEEE
S&P 2022), for generators: the attacker repeats the run with and without each record, describes the
samples of each repetition by a few statistics relative to the record, and compares those of the
attacked run with both distributions. Attacks on a single run, without repetitions, score records by
the density of samples around them ("LOGAN", Hayes et al., PETS 2019; "GAN-Leaks", Chen et al., CCS
2020) in features that a classifier of samples has learned.

Results are not private. Distances of samples to the closest training record are not reported as
evidence of privacy: data that pass such tests have been found highly vulnerable to membership
inference ("The DCR Delusion", arXiv 2505.01524).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedgen.evaluation.utility import Images, Labels
from fedgen.randomness import RandomStreams

Floats = NDArray[np.float64]
CONFIDENCE = 0.95
_HIDDEN = 128  # units of the classifier
_EPOCHS = 30
_RESAMPLES = 400
_BATCH = 256  # records whose distances to samples are computed at once
_BANDWIDTH_SAMPLES = 500
_SELECTED = 20  # statistics of many that are used
_FLOOR = 1e-6  # of a variance, relative: without noise, statistics may be constant
_MEMORY = 2000  # samples per label that a record is compared with


class SampleClassifier:
    """A classifier of labels that is trained on samples: one hidden layer.

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
        every = np.zeros((len(images), self._classes))
        every[:, self._model.classes_] = self._model.predict_proba(flat(images))
        return every


def flat(images: Images) -> Floats:
    """Return pixels in [0, 1], (n, pixels)."""
    return images.reshape(len(images), -1) / 255


def bandwidth(samples: Floats) -> float:
    """Return the median distance of a sample (n, d) to the nearest other sample, for a kernel."""
    from sklearn.neighbors import NearestNeighbors

    some = samples[:_BANDWIDTH_SAMPLES]
    distances, _ = NearestNeighbors(n_neighbors=2).fit(some).kneighbors(some)
    return max(float(np.median(distances[:, 1])), 1e-6)


def proximity(records: Floats, samples: Floats, width: float) -> Floats:
    """Return for each record (n, d) its mean product with samples (k, d), the logarithm of their
    density around it (a Gaussian kernel of this width), and minus its distance to the nearest,
    (n, 3)."""
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
        among = samples[sample_labels == label][:_MEMORY]
        rows = labels == label
        statistics[rows] = proximity(records[rows], among if len(among) else samples, width)
    return statistics


def likelihood_ratios(statistics: Floats, present: NDArray[np.bool_]) -> Floats:
    """Return the score of each record in each repetition, (repetitions, records): the logarithm of
    the likelihood ratio of two Gaussians with one covariance, fitted to the statistics of all other
    repetitions.

    Repetitions 2 i and 2 i + 1 include complementary records (``canaries.presence``). Both are left
    out together: otherwise the means of the others would be biased against the true answer. Of many
    statistics, those are taken that differ most in the others.

    Args:
        statistics: (repetitions, records or 1, statistics); 1: all records have the same.
        present: whether each record was included, (repetitions, records).
    """
    repetitions, records = present.shape
    scores = np.empty((repetitions, records))
    for record in range(records):
        rows, included = statistics[:, min(record, statistics.shape[1] - 1)], present[:, record]
        for pair in range(0, repetitions, 2):
            others = np.r_[:pair, pair + 2 : repetitions]
            attacked = rows[pair : pair + 2]
            scores[pair : pair + 2, record] = _ratio(rows[others], included[others], attacked)
    return scores


def _ratio(rows: Floats, included: NDArray[np.bool_], attacked: Floats) -> Floats:
    """Return the logarithm of the likelihood ratio of attacked rows, by Gaussians that are fitted
    to others."""
    from sklearn.covariance import ledoit_wolf

    means = np.stack([rows[~included].mean(0), rows[included].mean(0)])
    within = rows - means[included.astype(int)]
    scale = within.std(0) + _FLOOR * np.abs(means).max(0) + np.finfo(float).tiny
    if rows.shape[1] > _SELECTED:
        distances = np.abs(means[1] - means[0]) / scale
        chosen = np.argpartition(-distances, _SELECTED)[:_SELECTED]
        within, means, scale = within[:, chosen], means[:, chosen], scale[chosen]
        attacked = attacked[:, chosen]
    covariance = ledoit_wolf(within / scale, assume_centered=True)[0] + _FLOOR * np.eye(len(scale))
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
    scores: Floats, present: NDArray[np.bool_], fpr: float, streams: RandomStreams
) -> OperatingPoint | None:
    """Return the point of an attack that accepts scores above a threshold; None if there are too
    few non-members to observe this rate.

    The interval is the wider of two: of resampled rows, because records of one run are not
    independent, and that of Clopper and Pearson, because no resample of none is some.

    Args:
        scores: (rows, columns); rows are independent.
        present: whether each was a member.
    """
    from scipy.stats import binomtest

    if fpr * np.count_nonzero(~present) < 1:
        return None
    tpr = _tpr(scores[present], scores[~present], fpr)
    generator = np.random.default_rng(streams.public("resamples").initial_seed())
    resampled = []
    for _ in range(_RESAMPLES):
        rows = generator.integers(0, len(scores), len(scores))
        members = present[rows]
        if members.any() and not members.all():
            resampled.append(_tpr(scores[rows][members], scores[rows][~members], fpr))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    count = np.count_nonzero(present)
    exact = binomtest(round(tpr * count), count).proportion_ci(CONFIDENCE)
    return OperatingPoint(fpr, tpr, min(float(low), exact.low), max(float(high), exact.high))


def _tpr(members: Floats, others: Floats, fpr: float) -> float:
    allowed = math.floor(fpr * len(others))
    threshold = np.partition(others, -allowed - 1)[-allowed - 1]
    return float((members > threshold).mean())


def roc(scores: Floats, present: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return false and true positive rates at all thresholds."""
    from sklearn.metrics import roc_curve

    fpr, tpr, _ = roc_curve(present.ravel(), scores.ravel())
    return fpr, tpr
