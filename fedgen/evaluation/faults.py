"""Named faults of a client's images or labels, as functions of statistics.

A fault maps the expected statistics of clean images to those of faulty images. A package named in
``FEDGEN_EXTENSIONS`` adds faults by a list ``FAULTS`` in its module ``faults``.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor

from fedgen.config.extensions import extensions
from fedgen.models.client_statistics import INTENSITIES, Statistics, StatisticsSpace

_MIN_DOMINANT = 0.9  # share of images above which a client has a single label
_BLURS = (0.7, 1.0, 1.5, 2.5)  # standard deviations in pixels
_CUTS = (2, 3, 4)  # factors of a lower resolution
_SCALES = (1 / 16, 1 / 4, 1 / 2)


@dataclass(frozen=True)
class Fault:
    """A fault with its variants.

    expected: (space, mean statistics per image of the other clients, statistics of this client) ->
        (description, mean statistics per image with the fault) of each applicable variant. In
        means, ``images`` are mean images of labels, and ``counts`` shares of labels.
    tested: whether to search for it. Others only explain clients that another test reports.
    """

    name: str
    expected: Callable[[StatisticsSpace, Statistics, Statistics], Iterator[tuple[str, Statistics]]]
    tested: bool = True


def _inverted(
    space: StatisticsSpace, usual: Statistics, client: Statistics
) -> Iterator[tuple[str, Statistics]]:
    del space, client
    histogram = usual.histogram.flip(0)
    yield "inverted", replace(usual, images=-usual.images, histogram=histogram)


def _reoriented(
    space: StatisticsSpace, usual: Statistics, client: Statistics
) -> Iterator[tuple[str, Statistics]]:
    del client
    images = usual.images
    yield "mirrored left to right", replace(usual, images=images.flip(3))
    yield "mirrored top to bottom", replace(usual, images=images.flip(2))
    yield "rotated by 180 degrees", replace(usual, images=images.flip((2, 3)))
    if space.shape[1] == space.shape[2]:
        for turns, direction in ((1, "counterclockwise"), (3, "clockwise")):
            turned = replace(usual, images=images.rot90(turns, (2, 3)))
            yield f"rotated by 90 degrees {direction}", turned
        yield "transposed", replace(usual, images=images.transpose(2, 3))


def _channels_permuted(
    space: StatisticsSpace, usual: Statistics, client: Statistics
) -> Iterator[tuple[str, Statistics]]:
    del client
    channels = range(space.shape[0])
    if 1 < len(channels) <= 4:
        for order in itertools.permutations(channels):
            if order != tuple(channels):
                named = ", ".join(str(channel + 1) for channel in order)
                images = usual.images[:, order]
                yield f"channels in the order {named}", replace(usual, images=images)


def _unrelated_labels(
    space: StatisticsSpace, usual: Statistics, client: Statistics
) -> Iterator[tuple[str, Statistics]]:
    del space, client
    mean = torch.tensordot(usual.counts, usual.images, 1)
    yield "labels unrelated to the images", replace(usual, images=mean.expand_as(usual.images))


def _one_label(
    space: StatisticsSpace, usual: Statistics, client: Statistics
) -> Iterator[tuple[str, Statistics]]:
    share, label = (client.counts / client.total.clamp(min=1)).max(0)
    if share > _MIN_DOMINANT and space.classes > 1:
        [(_, expected)] = _unrelated_labels(space, usual, client)
        yield f"label {int(label)} for all images", expected


def _shifted_labels(
    space: StatisticsSpace, usual: Statistics, client: Statistics
) -> Iterator[tuple[str, Statistics]]:
    del client
    for shift in range(1, space.classes):
        by = shift if shift <= space.classes / 2 else shift - space.classes
        images = usual.images.roll(shift, 0)
        yield f"labels shifted by {by:+d}", replace(usual, images=images)


def _constant(
    space: StatisticsSpace, usual: Statistics, client: Statistics
) -> Iterator[tuple[str, Statistics]]:
    del client
    yield "black images, or intensities from 0 to 1 instead of 255", _scaled(space, usual, 0.0, 0.0)
    yield "grey images", _scaled(space, usual, 0.0, 0.5)
    yield "white images", _scaled(space, usual, 0.0, 1.0)


def _darker(
    space: StatisticsSpace, usual: Statistics, client: Statistics
) -> Iterator[tuple[str, Statistics]]:
    del client
    for scale in _SCALES:
        yield f"intensities times 1/{round(1 / scale)}", _scaled(space, usual, scale, 0.0)


def _blurred(
    space: StatisticsSpace, usual: Statistics, client: Statistics
) -> Iterator[tuple[str, Statistics]]:
    total = client.total.clamp(min=1e-9)
    # the histogram of blurred images cannot be predicted from statistics: use the client's own
    usual = replace(usual, histogram=client.histogram / total)
    for blur in _BLURS:

        def gaussian(frequency: Tensor, blur: float = blur) -> Tensor:
            return torch.exp(-(blur**2) * frequency.square() / 2)

        yield f"blurred with a deviation of {blur:g} pixels", _filtered(space, usual, gaussian)
    for factor in _CUTS:

        def cut(frequency: Tensor, factor: int = factor) -> Tensor:
            return (frequency < math.pi / factor).double()

        yield f"resolution reduced {factor} times", _filtered(space, usual, cut)


def _scaled(space: StatisticsSpace, usual: Statistics, scale: float, offset: float) -> Statistics:
    """Return the expectation for intensities ``scale`` x + ``offset`` in [0, 1]."""
    # value of each entry of a white image
    white = 1 / math.sqrt(space.shape[0] * math.prod(space.side))
    shift = scale + 2 * offset - 1
    images = scale * usual.images + shift * white
    amplitudes = scale * usual.amplitudes
    amplitudes[0] = torch.tensordot(usual.counts, images, 1).square().sum().sqrt()
    shares = usual.histogram.square()
    centres = (torch.arange(INTENSITIES) + 0.5) / INTENSITIES
    bins = ((scale * centres + offset) * (INTENSITIES - 1e-3)).long()
    histogram = torch.zeros_like(shares).index_add_(0, bins, shares).sqrt()
    return replace(usual, images=images, amplitudes=amplitudes, histogram=histogram)


def _filtered(
    space: StatisticsSpace, usual: Statistics, factor: Callable[[Tensor], Tensor]
) -> Statistics:
    """Return the expectation for images with frequencies, in radians per pixel, multiplied by a
    factor."""
    rows, columns = (
        math.pi * torch.arange(kept, dtype=torch.float64) / length
        for kept, length in zip(space.side, space.shape[1:], strict=True)
    )
    frequency = torch.maximum(rows[:, None], columns).flatten()
    coefficients = usual.images.flatten(2) @ space.to_low_pass.T * factor(frequency)
    images = (coefficients @ space.to_low_pass).view_as(usual.images)
    highest = (frequency.max() + math.pi) / 2
    of_band = [
        factor(frequency[band]).mean() if band.any() else highest * 0 for band in space.bands
    ]
    factors = torch.stack([*of_band, factor(highest)])
    return replace(usual, images=images, amplitudes=usual.amplitudes * factors)


def faults() -> list[Fault]:
    """Return the faults of fedgen and of extensions."""
    own = [
        Fault("inverted", _inverted),
        Fault("orientation", _reoriented),
        Fault("channels", _channels_permuted),
        Fault("one label", _one_label, tested=False),  # before the next, which predicts the same
        Fault("unrelated labels", _unrelated_labels),
        Fault("constant", _constant),
        Fault("blurred", _blurred),
        Fault("shifted labels", _shifted_labels, tested=False),
        Fault("darker", _darker, tested=False),
    ]
    for name in extensions():
        if find_spec(f"{name}.faults") is not None:
            own += importlib.import_module(f"{name}.faults").FAULTS
    return own
