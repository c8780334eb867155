"""Statistics of images that reveal faulty clients when they are compared between clients: sums over
records, each of a contribution with norm at most 1.

    images       low-pass image, in the block of the label
    counts       1, in the entry of the label
    all_images   low-pass image, for all labels together: less noisy than a sum of ``images``
    total        1
    amplitudes   norm of the image in each band of spatial frequencies
    histogram    square root of the share of pixels at each intensity

Intensities are scaled from [0, 1] to [-1, 1], so that an inverted image is the negative one. A
low-pass image has the lowest DCT coefficients of the image, as an image of at most ``_MAX_SIDE``
pixels per side: mirroring and rotation commute with this reduction.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedgen.models.dct import dct_basis
from fedgen.privacy.clipping import ClippedSum, joint_sum, sum_of_rows
from fedgen.privacy.exact_matmul import product

INTENSITIES = 8
"""Number of bins of the histogram."""

_MAX_SIDE = 16
_BANDS = (0, 1, 2, 4, 8, _MAX_SIDE)  # edges in DCT coefficients; frequencies above are one more
# weights of the parts of a contribution: their squares add up to less than 1
_IMAGE, _COUNT, _ALL_IMAGES, _TOTAL, _AMPLITUDE, _HISTOGRAM = 0.56, 0.39, 0.56, 0.28, 0.28, 0.24
_OF_LABEL = math.hypot(_IMAGE, _COUNT)
_OF_ALL = math.hypot(_ALL_IMAGES, _TOTAL, _AMPLITUDE, _HISTOGRAM)


@dataclass(frozen=True)
class Statistics:
    """Sums of one client or group of clients, or their expectation.

    images: sum of low-pass images by label, (labels, channels, h, w), each of norm at most 1.
    counts: number of images by label, (labels,).
    all_images: sum of low-pass images, (channels, h, w).
    total: number of images.
    amplitudes: (bands,).
    histogram: (``INTENSITIES``,).
    """

    images: Tensor
    counts: Tensor
    all_images: Tensor
    total: Tensor
    amplitudes: Tensor
    histogram: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter(vars(self).values())

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(*(a + b for a, b in zip(self, other, strict=True)))

    def __sub__(self, other: Statistics) -> Statistics:
        return Statistics(*(a - b for a, b in zip(self, other, strict=True)))


NOISE = Statistics(
    *(
        torch.tensor(1 / weight, dtype=torch.float64)
        for weight in (_IMAGE, _COUNT, _ALL_IMAGES, _TOTAL, _AMPLITUDE, _HISTOGRAM)
    )
)
"""Standard deviation of the noise in each statistic if the sum of contributions has noise of
standard deviation 1."""


@dataclass(frozen=True)
class StatisticsSpace:
    """Layout of the sums for images of one shape (channels, height, width)."""

    shape: tuple[int, int, int]
    classes: int

    @cached_property
    def side(self) -> tuple[int, int]:
        """Size of a low-pass image, with the proportions of the image."""
        factor = min(1.0, _MAX_SIDE / max(self.shape[1:]))
        return max(1, round(self.shape[1] * factor)), max(1, round(self.shape[2] * factor))

    @property
    def size(self) -> int:
        """Number of entries of all sums."""
        return (self.classes + 1) * (self._entries + 1) + len(_BANDS) + INTENSITIES

    @property
    def _entries(self) -> int:
        """Number of entries of a low-pass image."""
        return self.shape[0] * math.prod(self.side)

    def contribution(self, images: Tensor, labels: Tensor) -> ClippedSum:
        """Return the sum of the contributions of images (n, ...) in [0, 1] with labels (n,)."""
        pixels = 2 * images.double() - 1
        scale = math.sqrt(math.prod(self.shape))
        channels = pixels.flatten(2).flatten(0, 1)
        coefficients = product(channels, self._basis.to(images.device), (1.0, 1.0)) / scale
        low_pass = product(coefficients, self.to_low_pass.to(images.device), (1.0, 1.0))
        low_pass = low_pass.view(len(images), self._entries)
        squares = coefficients.square().view(len(images), *self.shape[:1], math.prod(self.side))
        in_band = torch.stack([squares[:, :, band].sum((1, 2)) for band in self.bands], 1)
        total = (pixels / scale).square().flatten(1).sum(1, keepdim=True)
        above = (total - in_band.sum(1, keepdim=True)).clamp(min=0)
        amplitudes = torch.cat([in_band, above], 1).sqrt()
        bins = (images * (INTENSITIES - 1e-3)).long().flatten(1)
        histogram = pixels.new_zeros(len(images), INTENSITIES)
        histogram.scatter_add_(1, bins, torch.ones_like(bins, dtype=torch.float64))
        histogram = (histogram / math.prod(self.shape)).sqrt()
        one = low_pass.new_ones(len(images), 1)
        of_label = torch.cat([_IMAGE * low_pass, _COUNT * one], 1)
        of_all = torch.cat(
            [
                _ALL_IMAGES * low_pass,
                _TOTAL * one,
                _AMPLITUDE * amplitudes,
                _HISTOGRAM * histogram,
            ],
            1,
        )
        return joint_sum(
            sum_of_rows(of_label, _OF_LABEL, labels, self.classes), sum_of_rows(of_all, _OF_ALL)
        )

    def split(self, sums: Tensor) -> Statistics:
        """Return the statistics in a sum of contributions (``size``,)."""
        entries = self._entries
        sizes = [self.classes * (entries + 1), entries, 1, len(_BANDS), INTENSITIES]
        of_label, all_images, total, amplitudes, histogram = torch.split(sums, sizes)
        of_label = of_label.view(self.classes, entries + 1)
        return Statistics(
            (of_label[:, :-1] / _IMAGE).view(self.classes, self.shape[0], *self.side),
            of_label[:, -1] / _COUNT,
            (all_images / _ALL_IMAGES).view(self.shape[0], *self.side),
            total[0] / _TOTAL,
            amplitudes / _AMPLITUDE,
            histogram / _HISTOGRAM,
        )

    def to_pixels(self, low_pass: Tensor) -> Tensor:
        """Return mean low-pass images (n, channels, h, w) as images in [0, 1] of full size."""
        scale = math.sqrt(math.prod(self.shape))
        flat = low_pass.flatten(2).to(torch.float64) @ self.to_low_pass.T @ self._basis.T * scale
        return ((flat.view(len(low_pass), *self.shape) + 1) / 2).clamp(0, 1).float()

    @cached_property
    def _basis(self) -> Tensor:
        """DCT basis of the coefficients that are kept, (height * width, h * w)."""
        rows, columns = self.side
        full = dct_basis(self.shape[1:], max(self.side)).double()
        kept = torch.arange(max(self.side) ** 2).view(max(self.side), -1)[:rows, :columns]
        return full[:, kept.flatten()]

    @cached_property
    def bands(self) -> list[Tensor]:
        """Mask of the DCT coefficients in each band."""
        rows, columns = (torch.arange(length) for length in self.side)
        frequency = torch.maximum(rows[:, None], columns).flatten()
        edges = itertools.pairwise(_BANDS)
        return [(first <= frequency) & (frequency < end) for first, end in edges]

    @cached_property
    def to_low_pass(self) -> Tensor:
        """Orthonormal map from the kept DCT coefficients to the pixels of a low-pass image."""
        return StatisticsSpace((1, *self.side), 1)._basis.T


def label_means(space: StatisticsSpace, total: Statistics, noise: float) -> tuple[Tensor, Tensor]:
    """Return the mean low-pass image of each label (labels, channels, h, w), and the variance of
    the error in each entry (labels,), from noisy sums over clients.

    Deviations of labels from the mean over all images are shrunk by the known noise, in each band
    of frequencies: a label with few images resembles the mean over all.

    Args:
        noise: standard deviation of the noise of the sums, over ``NOISE``.
    """
    least = max(2 * noise * float(NOISE.counts), 1e-9)
    counts, images = total.counts.clamp(min=least), total.images.flatten(2)
    overall = total.all_images.flatten(1) / total.total.clamp(min=least)
    deviations = images / counts[:, None, None] - overall
    variances = (noise * float(NOISE.images) / counts).square()
    shrunk, errors = _shrunk(space, deviations, variances)
    return (overall + shrunk).view_as(total.images), errors


def mean_images(space: StatisticsSpace, sums: Tensor, std: float) -> Tensor:
    """Return the mean low-pass image of each label at each client, (clients, labels, channels, h,
    w), from noisy sums (clients, ``size``).

    Deviations of a client from the mean over clients are shrunk like those of labels: clients
    without a detectable difference have nearly the mean over clients, others their own images.

    Args:
        std: standard deviation of the noise in each entry of ``sums``.
    """
    clients = [space.split(row) for row in sums.double()]
    total = functools.reduce(operator.add, clients)
    expected, _ = label_means(space, total, std * math.sqrt(len(clients)))
    means = []
    for client in clients:
        counts = client.counts.clamp(min=max(std * float(NOISE.counts), 1e-9))
        deviations = (client.images / counts[:, None, None, None] - expected).flatten(2)
        variances = (std * float(NOISE.images) / counts).square()
        means.append(expected + _shrunk(space, deviations, variances)[0].view_as(expected))
    return torch.stack(means)


def _shrunk(space: StatisticsSpace, deviations: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the posterior mean of deviations (labels, channels, pixels) that were observed with
    noise of variance (labels,), and the posterior variance (labels,). The prior variance in each
    band of frequencies is estimated from all labels."""
    coefficients = deviations @ space.to_low_pass.T  # white noise stays white
    shrunk, errors = torch.zeros_like(coefficients), torch.zeros_like(noise)
    weights = 1 / noise.square().clamp(min=1e-24)
    for band in space.bands:
        if band.any():
            energies = coefficients[:, :, band].square().mean((1, 2)) - noise
            variance = ((weights * energies).sum() / weights.sum()).clamp(min=0)
            factors = variance / (variance + noise).clamp(min=1e-24)
            shrunk[:, :, band] = factors[:, None, None] * coefficients[:, :, band]
            errors += factors * noise * band.double().mean()
    return shrunk @ space.to_low_pass, errors
