"""Wasserstein GAN with gradient penalty (Gulrajani et al. 2017), with drift penalty (Karras et al.
2018), conditional on labels: equations 12 and 13 of GS-WGAN."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad

Score = Callable[[Tensor, Tensor], Tensor]


def critic_loss(
    score: Score,
    real: Tensor,
    fake: Tensor,
    labels: Tensor,
    mix: Tensor,
    *,
    gradient_penalty: float,
    drift_penalty: float,
) -> Tensor:
    """E[D(fake)] - E[D(real)] + lambda E[(|grad D(x_hat)| - 1)^2] + drift E[D(real)^2].

    Args:
        score: (images, labels) -> (n,).
        real, fake: images (n, channels, height, width) in [0, 1], pairs of one label.
        labels: (n,), of both.
        mix: (n,) in [0, 1]; x_hat = mix * real + (1 - mix) * fake.
    """
    scores = score(torch.cat([real, fake]), torch.cat([labels, labels]))
    real_scores, fake_scores = scores[: len(labels)], scores[len(labels) :]
    wasserstein = fake_scores.mean() - real_scores.mean()
    share = mix.view(-1, 1, 1, 1)
    slopes = grad(lambda images: score(images, labels).sum())(share * real + (1 - share) * fake)
    norms = torch.sqrt(slopes.flatten(1).square().sum(1) + 1e-12)
    penalty = (norms - 1).square().mean()
    return wasserstein + gradient_penalty * penalty + drift_penalty * real_scores.square().mean()


def generator_loss(score: Score, fake: Tensor, labels: Tensor) -> Tensor:
    """-D(fake), summed: its gradient with respect to ``fake`` is one row per image."""
    return -score(fake, labels).sum()
