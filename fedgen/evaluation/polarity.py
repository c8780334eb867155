"""Whether one generator draws inverted images where another does not: the verdict on a pixel flip,
from samples alone (post-processing: it costs no ε).

An image is clearly inverted if it is anticorrelated with what is typical of its label, the mean of
the other generator's images, both taken about mid-grey. Images that are neither, as an untrained
generator's, count for nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]

_CLEARLY = 0.3  # of a correlation
_LEVEL = 0.01
_LEARNT = 0.5  # of the normal images must be upright, of the suspect ones the one or the other


@dataclass(frozen=True)
class Verdict:
    """What samples of two groups say.

    bug: whether the suspect group's generator draws inverted images more often than the normal
        one's, by more than a margin; None if one of them has learnt too little to tell.
    p_value: of the test that it does not, over fresh samples of these two generators.
    effect: the difference of the two shares; suspect, normal: these.
    classes: the labels for which the same test finds it, at a level that holds for all together.
    """

    bug: bool | None
    p_value: float
    effect: float
    suspect: float
    normal: float
    classes: list[int]


def verdict(
    suspect: tuple[Images, Labels], normal: tuple[Images, Labels], classes: int, margin: float
) -> Verdict:
    """The verdict on two sets of samples, (n, channels, height, width) and (n,) in random order:
    what is typical is the mean of one half of the normal ones, and the other half is judged."""
    half = len(normal[1]) // 2
    typical = np.stack(
        [_mean(normal[0][:half][normal[1][:half] == label]) for label in range(classes)]
    )
    of_suspect = _correlations(*suspect, typical)
    of_normal = _correlations(normal[0][half:], normal[1][half:], typical)
    inverted, inverted_normal = of_suspect < -_CLEARLY, of_normal < -_CLEARLY
    share, share_normal = float(inverted.mean()), float(inverted_normal.mean())
    p_value = _p_value(inverted, inverted_normal, margin)
    affected = [
        label
        for label in range(classes)
        if _p_value(
            inverted[suspect[1] == label], inverted_normal[normal[1][half:] == label], margin
        )
        < _LEVEL / classes
    ]
    clear = (of_normal > _CLEARLY).mean(), (np.abs(of_suspect) > _CLEARLY).mean()
    learnt = bool(min(clear) >= _LEARNT)
    return Verdict(
        p_value < _LEVEL if learnt else None,
        p_value,
        share - share_normal,
        share,
        share_normal,
        affected,
    )


def _mean(images: Images) -> NDArray[np.float64]:
    """About mid-grey; nothing is typical of no images."""
    shape = images.shape[1:]
    return images.mean(0) / 255 - 0.5 if len(images) else np.zeros(shape)


def _correlations(
    images: Images, labels: Labels, typical: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Of each image with what is typical of its label, both about mid-grey: (n,) in [-1, 1]."""
    about = images.reshape(len(images), -1) / 255 - 0.5
    wanted = typical.reshape(len(typical), -1)[labels]
    norms = np.linalg.norm(about, axis=1) * np.linalg.norm(wanted, axis=1)
    found: NDArray[np.float64] = (about * wanted).sum(1) / np.maximum(norms, 1e-12)
    return found


def _p_value(first: NDArray[np.bool_], second: NDArray[np.bool_], margin: float) -> float:
    """One-sided, of the hypothesis that the share of ``first`` is at most ``margin`` above that of
    ``second``: the normal approximation with one success and one failure added to each (Agresti,
    Caffo 2000), which keeps its level where shares are zero or one."""
    shares = [(each.sum() + 1) / (len(each) + 2) for each in (first, second)]
    variance = sum(
        share * (1 - share) / (len(each) + 2)
        for share, each in zip(shares, (first, second), strict=True)
    )
    return float(norm.sf((shares[0] - shares[1] - margin) / math.sqrt(variance)))
