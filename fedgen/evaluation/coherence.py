"""Whether samples look like images at all: told by the samples alone, without a private row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NOISE = 0.1
"""Below, samples look like noise. The 8x8 digits have 0.37, MNIST 0.74, Fashion-MNIST 0.83."""


def coherence(images: NDArray[np.uint8]) -> float:
    """Correlation of neighbouring pixels, side by side or one above the other, around the mean
    image: about 0 for noise that pixels have by themselves, near 1 for smooth shapes; 0 for images
    that are all the same.

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
