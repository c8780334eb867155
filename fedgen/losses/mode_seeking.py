"""What keeps a conditional generator from drawing one image for each label (Mao, Lee, Tseng, Ma,
Yang, "Mode Seeking Generative Adversarial Networks", CVPR 2019). It needs no private rows."""

from __future__ import annotations

from torch import Tensor


def mode_seeking_loss(images: Tensor, latents: Tensor) -> Tensor:
    """The inverse of how far images of one label are apart, for how far their latents are: mean
    absolute differences, of pixels from -1 to 1 (equation 3).

    Args:
        images: (2n, ...) in [0, 1]; image i and image n + i have one label.
        latents: (2n, d).
    """
    (first, second), (z, other) = images.chunk(2), latents.chunk(2)
    apart = 2 * (first - second).abs().flatten(1).mean(1) / (z - other).abs().mean(1)
    return 1 / (apart.mean() + 1e-3)
