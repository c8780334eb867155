"""Detect noise, collapse and divergence from samples alone, without private records."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedgen.evaluation.metrics import Judged, Metric, Results

NOISE = 0.1
"""Coherence below which samples look like noise. The 8x8 digits have 0.37, MNIST 0.74,
Fashion-MNIST 0.83."""

_COLLAPSED = 4.0  # of 255: diversity below which samples of a label are nearly equal
_COLLAPSED_SHARE = 0.05  # _COLLAPSED relative to the standard deviation of all samples
_SATURATED = 0.99  # share of pixels that are 0 or 255

Verdict = Literal["diverged", "collapsed", "noise"]


def coherence(images: NDArray[np.uint8]) -> float:
    """Return the correlation of neighbouring pixels, horizontally and vertically, around the mean
    image: about 0 for independent pixels, near 1 for smooth shapes; 0 if all images are equal.

    Args:
        images: (n, channels, height, width).
    """
    around = images.astype(float) - images.mean(0)
    pairs = [
        (around[..., 1:], around[..., :-1]),
        (around[..., 1:, :], around[..., :-1, :]),
    ]
    together = sum(float((a * b).sum()) for a, b in pairs)
    alone = sum(float((a**2).sum() + (b**2).sum()) / 2 for a, b in pairs)
    return together / alone if alone else 0.0


def diversity(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> float:
    """Return the root mean squared deviation of pixels (0 to 255) from the mean image of their
    label: 0 if all images of a label are equal.

    Args:
        images: (n, channels, height, width). labels: (n,).
    """
    return float(np.sqrt(np.concatenate(list(_squares(images, labels).values())).mean()))


def _squares(
    images: NDArray[np.uint8], labels: NDArray[np.int64]
) -> dict[int, NDArray[np.float64]]:
    """Return label -> mean squared deviation of each of its images from their mean."""
    of_label = {int(label): images[labels == label] for label in np.unique(labels)}
    return {
        label: ((group - group.mean(0)) ** 2).mean(axis=(1, 2, 3))
        for label, group in of_label.items()
    }


def verdict(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> Verdict | None:
    """Return the failure mode of samples, or None.

    diverged: nearly all pixels are 0 or 255, and images are all equal or uncorrelated noise.
    collapsed: samples of all labels, or of any one label, are nearly equal.
    noise: neighbouring pixels are uncorrelated.

    Args:
        images: (n, channels, height, width), several of each label. labels: (n,).
    """
    within, correlation = diversity(images, labels), coherence(images)
    overall_std = float(images.astype(float).std(axis=0).mean())
    limit = max(_COLLAPSED, _COLLAPSED_SHARE * overall_std)
    saturated = float(((images == 0) | (images == 255)).mean()) >= _SATURATED
    if saturated and (within < _COLLAPSED or correlation < NOISE):
        return "diverged"
    if within < limit:
        return "collapsed"
    if correlation < NOISE:
        return "noise"
    squares = [
        deviations for deviations in _squares(images, labels).values() if len(deviations) > 1
    ]
    return "collapsed" if any(deviations.mean() < limit**2 for deviations in squares) else None


def _compute(judged: Judged) -> dict[str, Any]:
    data = judged.data
    if not len(data.test_labels):
        return {}
    real = diversity(data.test_images, data.test_labels)
    return {"diversity": {"samples": diversity(*judged.samples), "real": real}}


def _describe(results: Results) -> list[tuple[str, str]]:
    scores = results["diversity"]
    text = f"{scores['samples']:.0f} of 255 (real images: {scores['real']:.0f})"
    return [("diversity within labels", text)]


METRIC = Metric(("diversity",), _compute, _describe)
