"""Residual generator after BigGAN (Brock et al. 2019), as adapted in GS-WGAN: spectral norm and
pixel norm instead of batch statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgen.models.dcgan import PixelNorm, upsamplings, with_one_hot
from fedgen.models.functional import SpectralConv2d, SpectralLinear


class UpBlock(nn.Module):
    """Residual block that doubles the resolution: norm, ReLU, upsample, 3x3, norm, ReLU, 3x3."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = PixelNorm()
        self.first = SpectralConv2d(channels, channels, 3, 1, 1)
        self.second = SpectralConv2d(channels, channels, 3, 1, 1)
        self.skip = SpectralConv2d(channels, channels, 1, 1, 0)

    def forward(self, features: Tensor) -> Tensor:
        up = F.interpolate(F.relu(self.norm(features)), scale_factor=2.0)
        residual = self.second(F.relu(self.norm(self.first(up))))
        image: Tensor = residual + self.skip(F.interpolate(features, scale_factor=2.0))
        return image


class Generator(nn.Module):
    """Latent and label to an image in [0, 1]; arguments as ``fedgen.models.dcgan.Generator``,
    with 4 * width channels throughout."""

    def __init__(self, latent: int, classes: int, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        channels, size, _ = shape
        doublings = upsamplings(size)
        self.classes, self.base = classes, size // 2**doublings
        self.project = SpectralLinear(latent + classes, 4 * width * self.base**2)
        self.blocks = nn.Sequential(*(UpBlock(4 * width) for _ in range(doublings)))
        self.norm = PixelNorm()
        self.image = SpectralConv2d(4 * width, channels, 3, 1, 1)
        # spectral norm bounds the logits; this scale allows more contrast
        self.gain = nn.Parameter(torch.zeros(channels))

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        """(n, latent), (n,) -> (n, channels, size, size)."""
        inputs = with_one_hot(latents, labels, self.classes)
        features = self.project(inputs).unflatten(1, (-1, self.base, self.base))
        features = F.relu(self.norm(self.blocks(features)))
        return torch.sigmoid(self.gain.exp()[:, None, None] * self.image(features))
