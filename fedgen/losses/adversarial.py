"""Losses of discriminator and generator per score: for real images, for fakes, and for the
generator. Both networks of a GAN use the same one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

ScoreLoss = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Loss:
    """Scores (n,) -> losses (n,). real, fake: of the discriminator. generator: of its fakes."""

    real: ScoreLoss
    fake: ScoreLoss
    generator: ScoreLoss


def logistic() -> Loss:
    """-log D, -log(1 - D), and -log D for the generator, where D is the score's sigmoid: the
    non-saturating loss of Goodfellow et al. (2014)."""
    return Loss(lambda s: F.softplus(-s), F.softplus, lambda s: F.softplus(-s))


def hinge() -> Loss:
    """max(0, 1 - s), max(0, 1 + s), and -s (Lim and Ye 2017)."""
    return Loss(lambda s: F.relu(1 - s), lambda s: F.relu(1 + s), lambda s: -s)


def wasserstein() -> Loss:
    """-s, s, and -s (Arjovsky et al. 2017). Clipped gradients bound steps, not the slope of a
    critic."""
    return Loss(lambda s: -s, lambda s: s, lambda s: -s)
