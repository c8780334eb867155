"""Find clients with noisy statistics that differ from those of the others by more than noise and
normal variation between clients, and explain the difference by a named fault.

Each client is compared with the mean over the others, excluding clients already reported. D is the
difference between its statistics and their prediction from the means of labels; d is the same
difference if all of its images had a fault. <D, d> / <d, d>, with the inverse covariance of the
noise as inner product, estimates the share of its images with the fault. Estimates are compared
with those of the other clients, by median and median absolute deviation, and by mean and variance,
so that normal variation between clients is not reported. Two more tests need no named fault: the
squared distance |D|^2, and whether images of a label are copies. The p-value of a client is the
smallest of its tests, times their number; Benjamini and Hochberg's procedure limits false
discoveries among all clients.

Assumptions: more than half of the clients have no fault, and the estimates of clients without a
fault have a distribution with tails no heavier than Student's t. p-values are approximate:
``scripts/debug_power.py`` counts false alarms.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from fedgen.evaluation.faults import Fault, faults
from fedgen.models.client_statistics import NOISE, Statistics, StatisticsSpace, label_means

FEWEST = 5
"""Smallest number of clients that can be compared."""

_FALSE_DISCOVERIES = 0.01
_MAX_ITERATIONS = 8
_CLEAR_COUNT = 3.0  # standard deviations of the noise that the count of a label has to exceed
_FIT_LEVEL = 0.01
_MIN_EXPLAINED = 0.9  # share of the squared distance that suffices without a fit
_AS_GOOD = 2 * math.log(100)  # alternatives at most 100 times less likely
_QUARTILE = 0.6744897501960817  # upper quartile of the standard normal distribution
_ANY, _REPEATED = "different", "repeated images"


@dataclass(frozen=True)
class Explanation:
    """A fault that may explain the difference of a client.

    share: estimated share of its images with the fault.
    error: standard error of the share by noise.
    p_value: goodness of fit: probability of a remaining distance at least this large for a client
        without a fault; None for repeated images, which have no predicted statistics.
    explained: share of the squared distance beyond noise that it explains; None as above.
    others: other faults that explain it as well.
    """

    fault: str
    share: float
    error: float
    p_value: float | None
    explained: float | None
    others: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """Result, per client.

    p_values: (clients,).
    differs: (clients,), true for clients that are reported.
    explanations: of those that differ; None: cause unknown.
    """

    p_values: NDArray[np.float64]
    differs: NDArray[np.bool_]
    explanations: dict[int, Explanation | None]

    @property
    def ranking(self) -> list[int]:
        """Clients, the most different first."""
        return [int(client) for client in np.argsort(self.p_values, kind="stable")]


def compare(space: StatisticsSpace, clients: Sequence[Statistics], std: float) -> Comparison:
    """Compare clients by their noisy statistics.

    Args:
        clients: sums over records, with noise of standard deviation ``std`` times ``NOISE``, of at
            least ``FEWEST`` clients.
    """
    named = faults()
    differs = np.zeros(len(clients), dtype=bool)
    differs = _smaller_cluster(_views(space, clients, std, differs))
    for _ in range(_MAX_ITERATIONS):
        views = _views(space, clients, std, differs)
        estimates = [_estimates(view, named) for view in views]
        names = [name for name in estimates[0] if all(name in of_client for of_client in estimates)]
        tests = {name: np.array([of_client[name] for of_client in estimates]) for name in names}
        p_of_test = np.stack([_p_values(*values.T) for values in tests.values()])
        p_values = np.minimum(1.0, p_of_test.min(0) * len(tests))
        reported = _benjamini_hochberg(p_values)
        if (reported == differs).all() or (~reported).sum() <= len(clients) / 2:
            break
        differs = reported
    distances = np.array([(view.distance(view.usual), view.distance_noise) for view in views])
    clean = distances[~reported] if (~reported).sum() >= 2 else distances
    explanations = {
        int(client): _explanation(views[client], named, clean, tests[_REPEATED][client])
        for client in np.flatnonzero(reported)
    }
    return Comparison(p_values, reported, explanations)


def _views(
    space: StatisticsSpace, clients: Sequence[Statistics], std: float, differs: NDArray[np.bool_]
) -> list[_View]:
    """Pair each client with the sum of the others, excluding reported clients."""
    total = functools.reduce(operator.add, itertools.compress(clients, ~differs))
    terms = int((~differs).sum())
    return [
        _View.of(space, total, terms, client, std)
        if excepted
        else _View.of(space, total - client, terms - 1, client, std)
        for client, excepted in zip(clients, differs, strict=True)
    ]


def _smaller_cluster(views: Sequence[_View]) -> NDArray[np.bool_]:
    """Return the smaller of two clusters of clients along the direction in which they differ most.

    Initial guess of the faulty clients: many with the same fault would otherwise shift the mean.
    """
    differences = torch.stack([view.difference(view.usual) for view in views])
    differences -= differences.mean(0)
    _, vectors = torch.linalg.eigh(differences @ differences.T)
    along = vectors[:, -1].numpy()
    order, count = np.argsort(along), len(along)
    below = np.cumsum(along[order])[:-1]  # of the first clients in this order; all add up to 0
    first = np.arange(1, count)
    between = below**2 * (1 / first + 1 / (count - first))
    smaller = order[: first[between.argmax()]]
    if 2 * len(smaller) > count:
        smaller = order[first[between.argmax()] :]
    return np.isin(np.arange(count), smaller)


# --- one client against the others ------------------------------------------------------------


@dataclass(frozen=True)
class _Metric:
    """Inner products of differences between observed and predicted sums, in the inverse of the
    covariance by noise: that of the sums, and that of the counts, by which the mean of each label
    is multiplied in a prediction.

    by_count: what one more image of each label adds to a prediction, in standard deviations of the
        noise of the sums: to the images of the label, (labels, entries), and to the sums over all
        labels, (labels, others).
    spread: root of the covariance of the counts, (labels, ...).
    """

    by_count: tuple[Tensor, Tensor]
    spread: Tensor

    def product(self, first: Tensor, second: Tensor) -> float:
        """Return the inner product of two flat vectors."""
        left, right = self._along(first), self._along(second)
        return float(first @ second - left @ torch.linalg.solve(self._inner, right))

    @functools.cached_property
    def _inner(self) -> Tensor:
        images, others = self.by_count
        squares = torch.diag(images.square().sum(1)) + others @ others.T
        inner = self.spread.T @ squares @ self.spread
        return inner + torch.eye(len(inner), dtype=inner.dtype)

    def _along(self, vector: Tensor) -> Tensor:
        images, others = self.by_count
        of_images, of_others = torch.split(vector, [images.numel(), others.shape[1]])
        along: Tensor = (images * of_images.view_as(images)).sum(1) + others @ of_others
        return self.spread.T @ along


@dataclass(frozen=True)
class _View:
    """A client and the mean over others.

    counts: estimated counts of the labels.
    spread: root of their covariance by noise, (labels, ...).
    weights: of the images of each label, (labels,), lower if the mean over the others is noisy, and
        zero if they have too few; weight: the same, of sums over all labels.
    usual: expected statistics per image; ``counts`` are shares of labels.
    std: standard deviation of the noise, over ``NOISE``.
    """

    space: StatisticsSpace
    client: Statistics
    counts: Tensor
    spread: Tensor
    weights: Tensor
    weight: float
    usual: Statistics
    std: float

    @classmethod
    def of(
        cls, space: StatisticsSpace, total: Statistics, terms: int, client: Statistics, std: float
    ) -> _View:
        """Compare a client with the sum of ``terms`` others."""
        count_noise = std * float(NOISE.counts)
        clear = total.counts > _CLEAR_COUNT * count_noise * math.sqrt(terms)
        means, errors = label_means(space, total, std * math.sqrt(terms))
        positive = total.counts.clamp(min=0)
        shares = (positive + 1e-9) / (positive + 1e-9).sum()
        total_noise = std * float(NOISE.total) * math.sqrt(terms)
        images = total.total.clamp(min=max(total_noise, 1e-9))
        usual = Statistics(
            means,
            shares,
            total.all_images / images,
            torch.ones((), dtype=torch.float64),
            total.amplitudes / images,
            total.histogram / images,
        )
        counts, spread = _estimated_counts(client, shares, std)
        # the error of a mean over others, times the count, over the noise in a sum
        errors = errors * (counts / (std * float(NOISE.images))).square()
        of_totals = counts / torch.where(clear, total.counts, math.inf) * count_noise
        of_images = (counts * total_noise / images)[:, None]
        spread = torch.cat([spread, torch.diag(of_totals * math.sqrt(terms)), of_images], 1)
        # of a mean over all images of others, in the same way
        error_of_all = terms * (counts.sum() / images).square()
        weights = torch.where(clear, (1 + errors + error_of_all).rsqrt(), 0.0)
        weight = float((1 + error_of_all).rsqrt())
        return cls(space, client, counts, spread, weights, weight, usual, std)

    @property
    def entries(self) -> int:
        """Number of compared entries."""
        image = self.usual.all_images.numel()
        others = len(self.usual.amplitudes) + len(self.usual.histogram)
        return (int((self.weights > 0).sum()) + 1) * image + others

    def predicted(self, expected: Statistics) -> Tensor:
        """Return the sums of this client if its images were as expected, flat, in standard
        deviations of their noise."""
        images, others = self._by_count(expected)
        return torch.cat([(self.counts[:, None] * images).flatten(), self.counts @ others])

    def difference(self, expected: Statistics) -> Tensor:
        """Return the sums of this client less the predicted ones."""
        client = self.client
        parts = [
            client.all_images.flatten() / NOISE.all_images,
            client.amplitudes / NOISE.amplitudes,
            client.histogram / NOISE.histogram,
        ]
        observed = [
            self._images(client.images).flatten(),
            torch.cat(parts) * self.weight / self.std,
        ]
        return torch.cat(observed) - self.predicted(expected)

    def metric(self, expected: Statistics) -> _Metric:
        """Return the metric of differences from this prediction."""
        return _Metric(self._by_count(expected), self.spread)

    def _by_count(self, expected: Statistics) -> tuple[Tensor, Tensor]:
        images = expected.images.flatten(1)
        rest = torch.cat(
            [expected.amplitudes / NOISE.amplitudes, expected.histogram / NOISE.histogram]
        )
        parts = [images / NOISE.all_images, rest.expand(len(images), -1)]
        return self._images(expected.images), torch.cat(parts, 1) * self.weight / self.std

    def _images(self, images: Tensor) -> Tensor:
        return self.weights[:, None] * images.flatten(1) / NOISE.images / self.std

    def distance(self, expected: Statistics) -> float:
        """Return the squared distance to a prediction less its expectation by noise, relative to
        the squared norm of the usual prediction."""
        difference = self.difference(expected)
        square = self.metric(expected).product(difference, difference)
        return (square - self.entries) / self.norm

    @property
    def distance_noise(self) -> float:
        """Standard deviation of ``distance`` by noise."""
        return math.sqrt(2 * self.entries) / self.norm

    @functools.cached_property
    def norm(self) -> float:
        """Squared norm of the usual prediction."""
        return max(float(self.predicted(self.usual).square().sum()), 1e-9)

    @functools.cached_property
    def _from_usual(self) -> tuple[_Metric, Tensor, Tensor]:
        """Metric and difference from the usual prediction, and that prediction."""
        metric, predicted = self.metric(self.usual), self.predicted(self.usual)
        return metric, self.difference(self.usual), predicted

    def share(self, expected: Statistics) -> tuple[float, float]:
        """Return the estimated share of images that are as expected and not as usual, and its
        standard deviation by noise."""
        metric, difference, predicted = self._from_usual
        effect = self.predicted(expected) - predicted
        square = max(metric.product(effect, effect), 1e-9)
        return metric.product(difference, effect) / square, 1 / math.sqrt(square)

    def remaining(self, expected: Statistics) -> float:
        """Return the distance that remains if the estimated share of images is as expected."""
        share = min(max(self.share(expected)[0], 0.0), 1.0)
        mixed = (
            (1 - share) * usual + share * other
            for usual, other in zip(self.usual, expected, strict=True)
        )
        return self.distance(Statistics(*mixed))

    def repeated(self) -> tuple[float, float]:
        """Return the squared deviation of the means of labels over the variance within labels, one
        if the images of a label are copies of one image, and its standard deviation by noise. What
        all labels have in common is not counted."""
        client, usual, compared = self.client, self.usual, self.weights > 0
        least = max(self.std * float(NOISE.counts), 1e-9)
        expected = torch.tensordot(self.counts, usual.images, 1)
        common = (client.all_images - expected) / max(float(self.counts.sum()), least)
        counts = self.counts[compared].clamp(min=least)
        means = usual.images[compared]
        deviations = client.images[compared] - counts[:, None, None, None] * (means + common)
        squares, entries = deviations.flatten(1).square().sum(1), usual.all_images.numel()
        variance = (self.std * float(NOISE.images)) ** 2
        deviation = float(((squares - entries * variance) / counts).sum())
        noise = ((4 * variance * squares + 2 * entries * variance**2) / counts.square()).sum()
        energy = float(usual.amplitudes[:-1].square().sum() * counts.sum())
        within = max(energy - float(means.flatten(1).square().sum(1) @ counts), 1e-9)
        return deviation / within, math.sqrt(float(noise)) / within


def _estimated_counts(client: Statistics, shares: Tensor, std: float) -> tuple[Tensor, Tensor]:
    """Return counts of labels, shrunk towards the usual shares as far as noise explains the
    difference, and the root of their covariance by noise."""
    variance = (std * float(NOISE.counts)) ** 2
    variances = torch.tensor([(std * float(NOISE.total)) ** 2, len(shares) * variance])
    totals = torch.stack([client.total, client.counts.sum()])
    inverse = 1 / variances.double().clamp(min=1e-24)
    total = (inverse * totals).sum() / inverse.sum()
    between = float((client.counts - total * shares).square().mean()) - variance
    factor = max(between, 0.0) / max(between + variance, variance, 1e-24)
    counts = total * shares + factor * (client.counts - total * shares)
    of_counts = math.sqrt(factor * variance) * torch.eye(len(shares), dtype=torch.float64)
    of_total = (1 - factor) * inverse.sum().rsqrt() * shares[:, None]
    return counts, torch.cat([of_counts, of_total], 1)


def _variants(
    view: _View, named: Sequence[Fault], tested: bool
) -> Iterator[tuple[str, Statistics]]:
    """Return expected statistics with each variant of each fault."""
    for fault in named:
        if fault.tested or not tested:
            yield from fault.expected(view.space, view.usual, view.client)


def _estimates(view: _View, named: Sequence[Fault]) -> dict[str, tuple[float, float]]:
    """Return the estimate and its standard deviation by noise, of each test."""
    shares = {name: view.share(expected) for name, expected in _variants(view, named, tested=True)}
    # above the noise, distances vary between clients by factors; in units of the noise, all clients
    # have about the same variance by noise, which the variance between clients includes
    distance = math.asinh(view.distance(view.usual) / (2 * view.distance_noise)), 0.0
    return {**shares, _ANY: distance, _REPEATED: view.repeated()}


def _explanation(
    view: _View,
    named: Sequence[Fault],
    clean: NDArray[np.float64],
    repeated: NDArray[np.float64],
) -> Explanation | None:
    """Return the fault that leaves the smallest distance, or repeated images; None if the cause is
    unknown.

    Args:
        clean: distances of clients that are not reported, and their noise, (clients, 2).
        repeated: estimate of repeated images and its noise, (2,).
    """
    variants = dict(_variants(view, named, tested=False))
    remaining = {name: view.remaining(expected) for name, expected in variants.items()}
    best = min(remaining, key=lambda name: remaining[name])
    values, noise = clean.T
    p_value = _p_value(remaining[best], view.distance_noise, values, noise)
    beyond = max(view.distance(view.usual) - float(np.median(values)), 1e-12)
    explained = (view.distance(view.usual) - remaining[best]) / beyond
    share, error = view.share(variants[best])
    if (p_value >= _FIT_LEVEL or explained >= _MIN_EXPLAINED) and share > 2 * error:
        others = [
            name
            for name, value in remaining.items()
            if 0 < (value - remaining[best]) * view.norm < _AS_GOOD
        ]
        return Explanation(best, share, error, p_value, min(explained, 1.0), others)
    share, error = repeated
    if share > max(0.5, 4 * error):
        return Explanation(_REPEATED, float(share), float(error), None, None)
    return None


# --- all clients ------------------------------------------------------------------------------


def _p_values(values: NDArray[np.float64], noise: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the p-value of each client's estimate among those of the others."""
    everyone = np.arange(len(values))
    return np.array(
        [
            _p_value(values[c], noise[c], values[everyone != c], noise[everyone != c])
            for c in everyone
        ]
    )


def _p_value(
    value: float, noise: float, others: NDArray[np.float64], their_noise: NDArray[np.float64]
) -> float:
    """Return the probability of an estimate at least as large, of a client like the others: by
    their median and median absolute deviation, which others with a fault hardly change, or by their
    mean and variance, which are more precise.

    Args:
        noise, their_noise: standard deviations by noise.
    """
    count, their_variance = len(others), float(np.mean(their_noise**2))
    centre = float(np.median(others))
    # half of the deviations are within 0.6745 standard deviations, of variance between + noise^2
    squares = ((others - centre) / _QUARTILE) ** 2
    between = max(float(np.median(squares - their_noise**2)), 0.0)
    of_centre = (between + their_variance) * math.pi / 2 / count
    robust = (value - centre) / math.sqrt(between + noise**2 + of_centre + 1e-300)
    between = max(float(np.var(others, ddof=1)), their_variance) - their_variance
    of_mean = (between + their_variance) / count
    precise = (value - float(np.mean(others))) / math.sqrt(between + noise**2 + of_mean + 1e-300)
    # a median absolute deviation is as precise as a variance of 0.37 times as many values
    freedom = np.array([max(1.0, 0.37 * count), count - 1])
    return min(1.0, 2 * float(stats.t.sf([robust, precise], freedom).min()))


def _benjamini_hochberg(p_values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which clients to report at a false discovery rate of 1 %."""
    order = np.argsort(p_values)
    limits = _FALSE_DISCOVERIES * np.arange(1, len(order) + 1) / len(order)
    below = np.flatnonzero(p_values[order] <= limits)
    reported = np.zeros(len(order), dtype=bool)
    if len(below):
        reported[order[: below[-1] + 1]] = True
    return reported
