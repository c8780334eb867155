"""Diffusion as EDM has it (Karras, Aittala, Aila, Laine 2022): a denoiser around a network, its
loss, and the sampler. Images lie in [-1, 1]; ``DATA`` is their standard deviation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgen.parameters import NonNegative, Steps

DATA = math.sqrt(1 / 3)  # of a uniform pixel: no statistic of private rows (DPDM's code)

Network = Callable[[Tensor, Tensor, Tensor], Tensor]
"""F: images (n, ...), logarithm of the level over four (n,), labels (n,) -> (n, ...)."""
Denoiser = Callable[[Tensor, Tensor, Tensor], Tensor]
"""D: images with noise (n, ...), its levels (n,), labels (n,) -> images without (n, ...)."""


def _wide(levels: Tensor, images: Tensor) -> Tensor:
    return levels.view(-1, *[1] * (images.dim() - 1))


def inputs(noisy: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """What the network is given (table 1): images of unit variance, and what it is told."""
    return noisy / (_wide(levels, noisy).square() + DATA**2).sqrt(), levels.log() / 4


def denoised(found: Tensor, noisy: Tensor, levels: Tensor) -> Tensor:
    """D from what the network found (equation 7)."""
    level = _wide(levels, noisy)
    whole = level.square() + DATA**2
    return DATA**2 / whole * noisy + level * DATA / whole.sqrt() * found


def loss(found: Tensor, noisy: Tensor, levels: Tensor, clean: Tensor) -> Tensor:
    """(s^2 + d^2) / (s d)^2 |D - x|^2 of each image, over its pixels' number (n,)."""
    weight = (levels.square() + DATA**2) / (levels * DATA).square()
    return weight * (denoised(found, noisy, levels) - clean).square().flatten(1).mean(1)


def denoiser(network: Network) -> Denoiser:
    """D around a network."""
    return lambda noisy, levels, labels: denoised(
        network(*inputs(noisy, levels), labels), noisy, levels
    )


@dataclass(frozen=True)
class Sampler:
    """EDM's algorithm 2: from noise to images, along falling levels.

    steps: their number, from ``highest`` to ``lowest``, and zero behind them. rho: how they are
        spaced.
    second_order: Heun's correction; without it and without churn this is DDIM.
    churn: how much noise is added anew on the way, between the levels churn_from and churn_to.
    guidance: w of D + w (D - D without label), classifier-free (Ho and Salimans 2021); 0: none.
    """

    steps: Steps
    lowest: float
    highest: float
    rho: float
    second_order: bool
    churn: NonNegative
    churn_from: NonNegative
    churn_to: float
    guidance: NonNegative

    @property
    def levels(self) -> list[float]:
        """From the highest to zero (equation 5)."""
        top, low = self.highest ** (1 / self.rho), self.lowest ** (1 / self.rho)
        last = max(self.steps - 1, 1)
        found = [(top + step / last * (low - top)) ** self.rho for step in range(self.steps)]
        return [*found, 0.0]

    def draw(
        self, denoise: Denoiser, labels: Tensor, none: int, noise: Callable[[], Tensor]
    ) -> Tensor:
        """Images (n, ...), not clamped.

        Args:
            none: the label that stands for none. noise: makes fresh noise (n, ...).
        """

        def slope(images: Tensor, level: float) -> Tensor:
            levels = torch.full_like(labels, 1, dtype=images.dtype) * level
            clean = denoise(images, levels, labels)
            if self.guidance:
                plain = denoise(images, levels, torch.full_like(labels, none))
                clean = clean + self.guidance * (clean - plain)
            return (images - clean) / level

        levels = self.levels
        images = levels[0] * noise()
        for now, then in itertools.pairwise(levels):
            if self.churn and self.churn_from <= now <= self.churn_to:
                more = now * (1 + min(self.churn / self.steps, math.sqrt(2) - 1))
                images = images + math.sqrt(more**2 - now**2) * noise()
                now = more
            first = slope(images, now)
            moved = images + (then - now) * first
            if self.second_order and then:
                moved = images + (then - now) * (first + slope(moved, then)) / 2
            images = moved
        return images
