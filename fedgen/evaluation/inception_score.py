"""Inception score (Salimans et al. 2016) with a given classifier."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PARTS = 10


def inception_score(probabilities: NDArray[np.float64]) -> tuple[float, float]:
    """Return exp(mean KL(p(y|x) || p(y))) of probabilities (n, classes), each row with sum 1: mean
    and standard deviation over ten parts, between 1 and the number of classes.

    Raises:
        ValueError: for fewer rows than parts.
    """
    if len(probabilities) < PARTS:
        raise ValueError(f"an inception score takes at least {PARTS} images")
    scores = []
    for part in np.array_split(probabilities, PARTS):
        marginal = part.mean(0, keepdims=True)
        ratio = np.log(np.maximum(part, 1e-12)) - np.log(np.maximum(marginal, 1e-12))
        scores.append(np.exp((part * ratio).sum(1).mean()))
    return float(np.mean(scores)), float(np.std(scores))
