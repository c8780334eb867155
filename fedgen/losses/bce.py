"""The GAN of Goodfellow et al. (2014) with the generator's non-saturating loss: binary
cross-entropy of a discriminator's logits, conditional on labels. For one network or a stack of k,
as ``wgan_gp``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Score = Callable[[Tensor, Tensor], Tensor]


def discriminator_loss(
    score: Score, real: Tensor, fake: Tensor, labels: Tensor, mix: Tensor
) -> Tensor:
    """-E[log D(real)] - E[log(1 - D(fake))]: a number, or (k,) for a stack of k.

    Args:
        score: (images, labels) -> one logit for each image.
        real, fake: images (n, channels, height, width) in [0, 1], pairs of one label; in front of
            n, here as in what follows, k for a stack.
        labels: (n,), of both.
        mix: not used; losses with a slope penalty take it.
    """
    del mix
    rows = labels.dim() - 1
    logits = score(torch.cat([real, fake], rows), torch.cat([labels, labels], rows))
    of_real, of_fake = logits.tensor_split(2, rows)
    return F.softplus(-of_real).mean(rows) + F.softplus(of_fake).mean(rows)


def generator_loss(score: Score, fake: Tensor, labels: Tensor) -> Tensor:
    """-log D(fake), summed: its gradient with respect to ``fake`` is one row per image."""
    return F.softplus(-score(fake, labels)).sum()
