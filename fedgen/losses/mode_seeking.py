"""Mode-seeking loss: keeps a conditional generator from producing one image per label (Mao, Lee,
Tseng, Ma, Yang, "Mode Seeking Generative Adversarial Networks", CVPR 2019). It uses no private
records."""

from __future__ import annotations

from torch import Tensor


def mode_seeking_loss(images: Tensor, latents: Tensor) -> Tensor:
    """Return the inverse of the mean ratio of the distance between images with equal labels to the
    distance between their latents: mean absolute differences, of pixels in [-1, 1] (equation 3).

    Args:
        images: (2n, ...) in [0, 1]; images i and n + i have equal labels.
        latents: (2n, d).
    """
    (first, second), (z, other) = images.chunk(2), latents.chunk(2)
    apart = 2 * (first - second).abs().flatten(1).mean(1) / (z - other).abs().mean(1)
    return 1 / (apart.mean() + 1e-3)
