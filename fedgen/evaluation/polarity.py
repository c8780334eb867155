"""Whether the generators of one group draw inverted images where those of another do not: the
verdict on a pixel flip, from samples alone.

An image is upright or inverted by its slope on what is typical of its label, both taken about
mid-grey: one for an image that is typical, minus one for its negative, zero for grey. From a slope
of 0.3 on it is wholly upright, from -0.3 on wholly inverted, and in between partly: networks that
have learnt little draw near grey.
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

_WHOLLY = 0.3  # of a slope
LEVEL = 0.01  # of the tests
_LEARNT = 0.5  # of a group's images that must be upright


@dataclass(frozen=True)
class Verdict:
    """What samples of two groups' generators say.

    bug: True if the suspect group's draw inverted images more often, by more than a margin and at
        level 0.01; False if not by more than the margin, and both groups' images are
        upright; None if that cannot be told: the generators have learnt too little, or differ by
        more than the margin and not at the level. False is no proof: generators leave out what few
        of their clients have, and a bug of a minority with it.
    p_value: the share of all ways to call as many of the generators suspect that show a difference
        as large. It holds whatever noise and luck made of each generator, as long as the groups'
        generators are exchangeable without a bug: of as many clients each, under the same noise,
        whose images differ in nothing that makes a generator draw the negative.
    effect: the difference of the shares of inverted images; suspect, normal: these.
    classes: the labels for which the same holds, each by itself (no correction for their number).
    """

    bug: bool | None
    p_value: float
    effect: float
    suspect: float
    normal: float
    classes: list[int]


def typical(images: Images, labels: Labels, classes: int) -> NDArray[np.float64]:
    """The mean image of each label about mid-grey, (classes, channels, height, width); zero where
    there is none."""
    shape = images.shape[1:]
    rows = [images[labels == label] for label in range(classes)]
    return np.stack([each.mean(0) / 255 - 0.5 if len(each) else np.zeros(shape) for each in rows])


def verdict(
    suspect: Sequence[Samples],
    normal: Sequence[Samples],
    like: NDArray[np.float64],
    margin: float,
) -> Verdict:
    """The verdict on the samples (n, channels, height, width), (n,) of several generators of each
    group, each trained on clients of its own. ``like``: what is typical of each label."""
    slopes = [[_slopes(*each, like) for each in group] for group in (suspect, normal)]
    inverted = [[np.clip(-each / _WHOLLY, 0, 1) for each in group] for group in slopes]
    shares = [np.array([each.mean() for each in group]) for group in inverted]
    effect, p_value = _test(*shares)
    upright = [
        float(np.mean([np.clip(each / _WHOLLY, 0, 1).mean() for each in group])) for group in slopes
    ]
    found = p_value < LEVEL and effect > margin
    bug: bool | None = None
    if upright[1] >= _LEARNT and found:
        bug = True
    elif min(upright) >= _LEARNT and effect <= margin:
        bug = False
    affected = []
    for label in range(len(like)):
        of_label = [
            np.array(
                [
                    each[samples[1] == label].mean() if (samples[1] == label).any() else 0.0
                    for each, samples in zip(group, drawn, strict=True)
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
    """Of each image on what is typical of its label: (n,)."""
    about = images.reshape(len(images), -1) / 255 - 0.5
    wanted = like.reshape(len(like), -1)[labels]
    found: NDArray[np.float64] = (about * wanted).sum(1) / np.maximum((wanted**2).sum(1), 1e-12)
    return found


def _test(first: NDArray[np.float64], second: NDArray[np.float64]) -> tuple[float, float]:
    """The difference of two means, and its exact p-value by permutation, one-sided."""
    whole, count = np.concatenate([first, second]), len(first)
    observed = first.mean() - second.mean()
    chosen = np.array(list(itertools.combinations(range(len(whole)), count)))
    sums = whole[chosen].sum(1)
    differences = sums / count - (whole.sum() - sums) / len(second)
    return float(observed), float((differences >= observed - 1e-12).mean())
