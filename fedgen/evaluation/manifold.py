"""Precision and recall of samples: what share of them looks real, and what share of the real they
cover (Kynkäänniemi, Karras, Laine, Lehtinen, Aila 2019). A mode that is missing costs recall."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Features = NDArray[np.float32]


def precision_and_recall(
    real: Features, made: Features, neighbours: int = 3
) -> tuple[float, float]:
    """The share of the samples' features (m, d) within reach of a real one (n, d), and the other
    way round: a feature reaches as far as its third neighbour of its own kind.

    Raises:
        ValueError: for no more rows than neighbours.
    """
    if min(len(real), len(made)) <= neighbours:
        raise ValueError(f"precision and recall take more than {neighbours} images")
    return _covered(made, real, neighbours), _covered(real, made, neighbours)


def _covered(queries: Features, base: Features, neighbours: int) -> float:
    """The share of ``queries`` within the reach of one of ``base``."""
    from sklearn.metrics import pairwise_distances_chunked

    # a row is a neighbour of itself: the one at 0
    own = pairwise_distances_chunked(
        base, reduce_func=lambda part, _: np.partition(part, neighbours, axis=1)[:, neighbours]
    )
    reach = np.concatenate(list(own))
    inside = pairwise_distances_chunked(
        queries, base, reduce_func=lambda part, _: (part <= reach).any(1)
    )
    return float(np.concatenate(list(inside)).mean())
