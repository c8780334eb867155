"""Diffusion as in EDM (Karras, Aittala, Aila, Laine 2022): denoiser around a network, loss, and
sampler. Images are in [-1, 1]; ``DATA`` is their standard deviation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgen.config.constraints import NonNegative, Steps

DATA = math.sqrt(1 / 3)  # of a uniform pixel: not a statistic of private data

Network = Callable[[Tensor, Tensor, Tensor], Tensor]
"""F: images (n, ...), logarithm of the level over four (n,), labels (n,) -> (n, ...)."""
Denoiser = Callable[[Tensor, Tensor, Tensor], Tensor]
"""D: images with noise (n, ...), its levels (n,), labels (n,) -> images without (n, ...)."""


def _wide(levels: Tensor, images: Tensor) -> Tensor:
    return levels.view(-1, *[1] * (images.dim() - 1))


def inputs(noisy: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs of the network (table 1): images of unit variance, and the encoded noise
    level."""
    return noisy / (_wide(levels, noisy).square() + DATA**2).sqrt(), levels.log() / 4


def denoised(outputs: Tensor, noisy: Tensor, levels: Tensor) -> Tensor:
    """Return D from the output of the network (equation 7)."""
    level = _wide(levels, noisy)
    variance = level.square() + DATA**2
    return DATA**2 / variance * noisy + level * DATA / variance.sqrt() * outputs


def loss(outputs: Tensor, noisy: Tensor, levels: Tensor, clean: Tensor) -> Tensor:
    """Return (s^2 + d^2) / (s d)^2 |D - x|^2 of each image divided by its number of pixels,
    (n,)."""
    weight = (levels.square() + DATA**2) / (levels * DATA).square()
    return weight * (denoised(outputs, noisy, levels) - clean).square().flatten(1).mean(1)


def denoiser(network: Network) -> Denoiser:
    """Return D around a network."""
    return lambda noisy, levels, labels: denoised(
        network(*inputs(noisy, levels), labels), noisy, levels
    )


@dataclass(frozen=True)
class Sampler:
    """Algorithm 2 of EDM: from noise to images, along decreasing noise levels.

    steps: number of levels from ``sigma_max`` to ``sigma_min``, followed by zero.
    rho: exponent of their spacing.
    second_order: Heun's correction; without it and without churn, the sampler is DDIM.
    churn: amount of noise added between the levels ``churn_min`` and ``churn_max``.
    guidance: w of D + w (D - D without label), classifier-free (Ho and Salimans 2021); 0: none.
    """

    steps: Steps
    sigma_min: float
    sigma_max: float
    rho: float
    second_order: bool
    churn: NonNegative
    churn_min: NonNegative
    churn_max: float
    guidance: NonNegative

    @property
    def noise_levels(self) -> list[float]:
        """Return the noise levels from the highest to zero (equation 5)."""
        top, low = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        last = max(self.steps - 1, 1)
        levels = [(top + step / last * (low - top)) ** self.rho for step in range(self.steps)]
        return [*levels, 0.0]

    def sample(
        self, denoise: Denoiser, labels: Tensor, none: int, noise: Callable[[], Tensor]
    ) -> Tensor:
        """Return images (n, ...), not clamped.

        Args:
            none: label for unconditional samples.
            noise: returns new noise (n, ...).
        """

        def slope(images: Tensor, level: float) -> Tensor:
            levels = torch.full_like(labels, 1, dtype=images.dtype) * level
            clean = denoise(images, levels, labels)
            if self.guidance:
                plain = denoise(images, levels, torch.full_like(labels, none))
                clean = clean + self.guidance * (clean - plain)
            return (images - clean) / level

        levels = self.noise_levels
        images = levels[0] * noise()
        for now, then in itertools.pairwise(levels):
            if self.churn and self.churn_min <= now <= self.churn_max:
                more = now * (1 + min(self.churn / self.steps, math.sqrt(2) - 1))
                images = images + math.sqrt(more**2 - now**2) * noise()
                now = more
            first = slope(images, now)
            moved = images + (then - now) * first
            if self.second_order and then:
                moved = images + (then - now) * (first + slope(moved, then)) / 2
            images = moved
        return images
