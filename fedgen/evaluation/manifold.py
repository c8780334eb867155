"""Precision and recall of samples: the share of samples near real images, and the share of real
images near samples (Kynkäänniemi, Karras, Laine, Lehtinen, Aila 2019). A missing mode lowers
recall."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Features = NDArray[np.float32]


def precision_and_recall(
    real: Features, generated: Features, neighbours: int = 3
) -> tuple[float, float]:
    """Return the share of features of samples (m, d) within the radius of a real one (n, d), and
    vice versa: the radius is the distance to the third neighbour of the same kind.

    Raises:
        ValueError: for no more rows than neighbours.
    """
    if min(len(real), len(generated)) <= neighbours:
        raise ValueError(f"precision and recall take more than {neighbours} images")
    return _coverage(generated, real, neighbours), _coverage(real, generated, neighbours)


def _coverage(queries: Features, base: Features, neighbours: int) -> float:
    """Return the share of ``queries`` within the radius of one of ``base``."""
    from sklearn.metrics import pairwise_distances_chunked

    # each row is its own nearest neighbour, at distance 0
    radius_chunks = pairwise_distances_chunked(
        base, reduce_func=lambda part, _: np.partition(part, neighbours, axis=1)[:, neighbours]
    )
    reach = np.concatenate(list(radius_chunks))
    inside = pairwise_distances_chunked(
        queries, base, reduce_func=lambda part, _: (part <= reach).any(1)
    )
    return float(np.concatenate(list(inside)).mean())
