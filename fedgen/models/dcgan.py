"""DCGAN generator and critic (Radford et al. 2016) as in GS-WGAN: conditional on a label, without
batch statistics, for square images with one or three channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgen.errors import FedgenError
from fedgen.models.functional import SpectralConv2d, SpectralEmbedding, SpectralLinear


def upsamplings(size: int) -> int:
    """Return how often a generator doubles its resolution to reach ``size`` from at most 8, at
    least twice.

    Raises:
        FedgenError: for sizes that doubling does not reach.
    """
    doublings = 2
    while size / 2**doublings > 8:
        doublings += 1
    if size % 2**doublings or size < 8:
        raise FedgenError(
            "data",
            f"images of {size}x{size} do not fit the generators",
            "resize them to 8, 12, 16, 20, 24, 28, 32, 40, 48, 56 or 64 pixels",
        )
    return doublings


def with_one_hot(latents: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return latents (n, d) concatenated with one-hot labels, (n, d + classes)."""
    # a comparison, since torch.nn.functional.one_hot does not work under vmap
    return torch.cat(
        [latents, (labels[:, None] == torch.arange(classes, device=labels.device)).to(latents)], 1
    )


class PixelNorm(nn.Module):
    """Scale the feature vector of each pixel to unit mean square (Karras et al. 2018)."""

    def forward(self, features: Tensor) -> Tensor:
        return features * torch.rsqrt(features.square().mean(1, keepdim=True) + 1e-8)


class Generator(nn.Module):
    """Latent and label to an image in [0, 1]: a linear layer to width * 2^k channels on the
    smallest grid, k transposed convolutions 4x4 stride 2 with pixel norm, a 3x3 convolution,
    sigmoid.

    Args:
        latent: latent dimensions.
        classes: number of labels.
        shape: (channels, size, size) of the images.
        width: channels before the last layer.
    """

    def __init__(self, latent: int, classes: int, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        channels, size, _ = shape
        doublings = upsamplings(size)
        self.classes, self.base = classes, size // 2**doublings
        first = width * 2**doublings
        self.project = nn.Linear(latent + classes, first * self.base**2)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(first >> i, first >> (i + 1), 4, 2, 1) for i in range(doublings)
        )
        self.norm = PixelNorm()
        self.image = nn.Conv2d(width, channels, 3, 1, 1)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        """(n, latent), (n,) -> (n, channels, size, size)."""
        inputs = with_one_hot(latents, labels, self.classes)
        features = self.project(inputs).unflatten(1, (-1, self.base, self.base))
        features = F.relu(self.norm(features))
        for layer in self.up:
            features = F.relu(self.norm(layer(features)))
        return torch.sigmoid(self.image(features))


class Classifier(nn.Module):
    """Three 5x5 convolutions with stride 2, leaky ReLU, and a linear layer, as in DP-GAN-DPAC.

    Args: as for ``Critic``.
    """

    def __init__(self, classes: int, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        channels, size, _ = shape
        self.convolutions = nn.ModuleList(
            nn.Conv2d(inputs, outputs, 5, 2, 2)
            for inputs, outputs in [(channels, width), (width, 2 * width), (2 * width, 4 * width)]
        )
        self.logits = nn.Linear(4 * width * (-(-size // 8)) ** 2, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(n, channels, size, size) -> logits (n, classes)."""
        features = images
        for layer in self.convolutions:
            features = F.leaky_relu(layer(features), 0.2)
        logits: Tensor = self.logits(features.flatten(1))
        return logits


class Critic(nn.Module):
    """GS-WGAN's critic: three 5x5 convolutions with stride 2, all spectrally normalized, leaky
    ReLU, and a score that is linear in the features with a projection of the label (Miyato and
    Koyama 2018). At width 64 on 28x28 images it has 1.07 M parameters.

    Args:
        classes: number of labels.
        shape: (channels, size, size) of the images.
        width: channels after the first convolution.
    """

    def __init__(self, classes: int, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        channels, size, _ = shape
        self.convolutions = nn.ModuleList(
            SpectralConv2d(inputs, outputs, 5, 2, 2)
            for inputs, outputs in [(channels, width), (width, 2 * width), (2 * width, 4 * width)]
        )
        features = 4 * width * (-(-size // 8)) ** 2
        self.score = SpectralLinear(features, 1)
        self.label = SpectralEmbedding(classes, features)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """(n, channels, size, size), (n,) -> scores (n,)."""
        features = images
        for layer in self.convolutions:
            features = F.leaky_relu(layer(features), 0.2)
        features = features.flatten(1)
        scores: Tensor = self.score(features)[:, 0] + (self.label(labels) * features).sum(1)
        return scores
