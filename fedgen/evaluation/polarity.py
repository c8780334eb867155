"""Test whether the generators of one group sample inverted images where those of another do not:
the verdict on an inversion bug, from samples only.

Polarity is the slope of an image on the typical image of its label, both centred at mid-grey: one
for a typical image, minus one for its negative, zero for grey. Images with slope above 0.3 count as
upright, below -0.3 as inverted, and proportionally in between: undertrained networks sample near
grey.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Samples = tuple[Images, Labels]

_FULL_EFFECT = 0.3  # slope
LEVEL = 0.01  # significance level
_MIN_SLOPE = 0.5  # minimum mean slope of upright groups


@dataclass(frozen=True)
class Verdict:
    """Result of the comparison of two groups of generators.

    bug: True if the suspect group samples inverted images more often, by more than a margin and at
        level 0.01; False if not by more than the margin, and the images of both groups are upright;
        None if undecided: the generators are undertrained, or differ by more than the margin but
        not at the level. False is no proof: generators omit what few of their clients have,
        including a bug of a minority.
    p_value: share of all assignments of generators to the groups with a difference at least as
        large. It is valid for any noise and luck of each generator, as long as the generators are
        exchangeable without a bug: equal numbers of clients, equal noise, and images that do not
        differ in what makes a generator sample the negative.
    effect: difference of the shares of inverted images; suspect, normal: these shares.
    classes: labels for which the same holds individually (without correction for their number).
    """

    bug: bool | None
    p_value: float
    effect: float
    suspect: float
    normal: float
    classes: list[int]


def typical(images: Images, labels: Labels, classes: int) -> NDArray[np.float64]:
    """Return the mean image of each label centred at mid-grey, (classes, channels, height, width);
    zero without images."""
    shape = images.shape[1:]
    rows = [images[labels == label] for label in range(classes)]
    return np.stack(
        [subset.mean(0) / 255 - 0.5 if len(subset) else np.zeros(shape) for subset in rows]
    )


def verdict(
    suspect: Sequence[Samples],
    normal: Sequence[Samples],
    like: NDArray[np.float64],
    margin: float,
) -> Verdict:
    """Return the verdict on samples (n, channels, height, width), (n,) of several generators per
    group, each trained on its own clients.

    Args:
        like: typical image of each label.
    """
    slopes = [[_slopes(*samples, like) for samples in group] for group in (suspect, normal)]
    inverted = [[np.clip(-values / _FULL_EFFECT, 0, 1) for values in group] for group in slopes]
    shares = [np.array([values.mean() for values in group]) for group in inverted]
    effect, p_value = _test(*shares)
    upright = [
        float(np.mean([np.clip(values / _FULL_EFFECT, 0, 1).mean() for values in group]))
        for group in slopes
    ]
    significant = p_value < LEVEL and effect > margin
    bug: bool | None = None
    if upright[1] >= _MIN_SLOPE and significant:
        bug = True
    elif min(upright) >= _MIN_SLOPE and effect <= margin:
        bug = False
    affected = []
    for label in range(len(like)):
        of_label = [
            np.array(
                [
                    values[samples[1] == label].mean() if (samples[1] == label).any() else 0.0
                    for values, samples in zip(group, drawn, strict=True)
                ]
            )
            for group, drawn in zip(inverted, (suspect, normal), strict=True)
        ]
        larger, p_of_label = _test(*of_label)
        if bug and larger > margin and p_of_label < LEVEL:
            affected.append(label)
    of_suspect, of_normal = (float(group.mean()) for group in shares)
    return Verdict(bug, p_value, effect, of_suspect, of_normal, affected)


def _slopes(images: Images, labels: Labels, like: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the slope of each image on the typical image of its label: (n,)."""
    about = images.reshape(len(images), -1) / 255 - 0.5
    wanted = like.reshape(len(like), -1)[labels]
    slopes: NDArray[np.float64] = (about * wanted).sum(1) / np.maximum((wanted**2).sum(1), 1e-12)
    return slopes


def _test(first: NDArray[np.float64], second: NDArray[np.float64]) -> tuple[float, float]:
    """Return the difference of two means, and its exact one-sided p-value by permutation."""
    values, count = np.concatenate([first, second]), len(first)
    observed = first.mean() - second.mean()
    assignments = np.array(list(itertools.combinations(range(len(values)), count)))
    sums = values[assignments].sum(1)
    differences = sums / count - (values.sum() - sums) / len(second)
    return float(observed), float((differences >= observed - 1e-12).mean())
