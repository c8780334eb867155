"""The GAN of Goodfellow et al. (2014) with the non-saturating loss of the generator: binary
cross-entropy of the logits of a discriminator, conditional on labels. For one network or a stack of
k, like ``wgan_gp``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Score = Callable[[Tensor, Tensor], Tensor]


def discriminator_loss(score: Score, real: Tensor, fake: Tensor, labels: Tensor) -> Tensor:
    """Return -E[log D(real)] - E[log(1 - D(fake))]: a scalar, or (k,) for a stack of k.

    Args:
        score: (images, labels) -> one logit per image.
        real, fake: images (n, channels, height, width) in [0, 1], pairs with equal labels; for a
            stack, all shapes have a leading k.
        labels: (n,), of both.
    """
    rows = labels.dim() - 1
    logits = score(torch.cat([real, fake], rows), torch.cat([labels, labels], rows))
    of_real, of_fake = logits.tensor_split(2, rows)
    return F.softplus(-of_real).mean(rows) + F.softplus(of_fake).mean(rows)


def generator_loss(score: Score, fake: Tensor, labels: Tensor) -> Tensor:
    """Return -log D(fake), summed: its gradient with respect to ``fake`` has one row per image."""
    return F.softplus(-score(fake, labels)).sum()
