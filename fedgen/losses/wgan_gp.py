"""Wasserstein GAN with gradient penalty (Gulrajani et al. 2017), with drift penalty (Karras et al.
2018), conditional on labels: equations 12 and 13 of GS-WGAN."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import grad

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
    """Return E[D(fake)] - E[D(real)] + lambda E[(|grad D(x_hat)| - 1)^2] + drift E[D(real)^2]: a
    scalar, or (k,) for a stack of k critics.

    Args:
        score: (images, labels) -> one score per image.
        real, fake: images (n, channels, height, width) in [0, 1], pairs with equal labels; for a
            stack, all shapes have a leading k.
        labels: (n,), of both.
        mix: (n,) in [0, 1]; x_hat = mix * real + (1 - mix) * fake.
    """
    rows = labels.dim() - 1
    scores = score(torch.cat([real, fake], rows), torch.cat([labels, labels], rows))
    real_scores, fake_scores = scores.tensor_split(2, rows)
    wasserstein = fake_scores.mean(rows) - real_scores.mean(rows)
    share = mix[..., None, None, None]
    penalty = slope_penalty(score, share * real + (1 - share) * fake, labels)
    drift = real_scores.square().mean(rows)
    return wasserstein + gradient_penalty * penalty + drift_penalty * drift


def slope_penalty(score: Score, images: Tensor, labels: Tensor) -> Tensor:
    """Return E[(|grad D(x)| - 1)^2] over images x (n, ...); (k,) for a stack with (k, n, ...)."""
    at = images.detach().requires_grad_()
    [slopes] = grad(score(at, labels).sum(), at, create_graph=True)
    norms = torch.sqrt(slopes.flatten(-3).square().sum(-1) + 1e-12)
    return (norms - 1).square().mean(-1)


def generator_loss(score: Score, fake: Tensor, labels: Tensor) -> Tensor:
    """Return -D(fake), summed: its gradient with respect to ``fake`` has one row per image."""
    return -score(fake, labels).sum()
