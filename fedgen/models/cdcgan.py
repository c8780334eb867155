"""The conditional DCGAN of "Private GANs, revisited" (Bie, Kamath, Zhang 2023, appendix B.1): fully
convolutional, a label embedding in both networks, no batch statistics, for square images.

On 28x28 images at width 128 the discriminator has 1.72 M parameters and the generator 2.27 M; on
32x32 images with three channels and two labels 2.64 M and 3.16 M, as in the paper's tables.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgen.errors import FedgenError
from fedgen.models.dcgan import PixelNorm


def grids(size: int) -> list[int]:
    """Pixels on a side after none, one, two and three convolutions with stride 2.

    Raises FedgenError for sizes that transposed convolutions do not come back to.
    """
    if size % 4 or size < 8:
        raise FedgenError(
            "data",
            f"images of {size}x{size} do not fit the networks",
            "resize them to a multiple of 4 pixels, at least 8",
        )
    return [size, size // 2, size // 4, -(-size // 8)]


class Generator(nn.Module):
    """Latent and label to an image in [0, 1]: each to a grid of features, side by side, then three
    transposed convolutions with stride 2, ReLU, and tanh.

    Args:
        latent: latent dimensions.
        classes: number of labels.
        shape: (channels, size, size) of the images.
        width: channels before the last layer.
        pixel_norm: not in the paper; the generator learns in far fewer steps with it.
    """

    def __init__(
        self,
        latent: int,
        classes: int,
        shape: tuple[int, int, int],
        width: int,
        pixel_norm: bool = False,
    ) -> None:
        super().__init__()
        channels, size, _ = shape
        *_, middle, base = grids(size)
        self.norm = PixelNorm() if pixel_norm else nn.Identity()
        self.base, half = base, 2 * width
        self.label = nn.Embedding(classes, classes)
        # transposed convolutions of a single pixel
        self.from_latent = nn.Linear(latent, half * base**2, bias=False)
        self.from_label = nn.Linear(classes, half * base**2, bias=False)
        odd = middle % 2  # then a kernel of three makes it
        self.up = nn.ModuleList(
            [
                nn.ConvTranspose2d(2 * half, half, 4 - odd, 2, 1),
                nn.ConvTranspose2d(half, width, 4, 2, 1),
            ]
        )
        self.image = nn.ConvTranspose2d(width, channels, 4, 2, 1)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        """(n, latent), (n,) -> (n, channels, size, size)."""
        grids = [self.from_latent(latents), self.from_label(self.label(labels))]
        features = torch.cat([grid.unflatten(1, (-1, self.base, self.base)) for grid in grids], 1)
        features = F.relu(self.norm(features))
        for layer in self.up:
            features = F.relu(self.norm(layer(features)))
        return (torch.tanh(self.image(features)) + 1) / 2


class Discriminator(nn.Module):
    """Images and labels to logits: the label's embedding is one more channel, then three
    convolutions with stride 2, leaky ReLU, and one as large as what is left.

    Args:
        classes: number of labels.
        shape: (channels, size, size) of the images.
        width: channels after the first convolution.
    """

    def __init__(self, classes: int, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        channels, size, _ = shape
        *_, middle, base = grids(size)
        self.label = nn.Embedding(classes, size**2)
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2d(channels + 1, width, 4, 2, 1),
                nn.Conv2d(width, 2 * width, 4, 2, 1),
                nn.Conv2d(2 * width, 4 * width, 4 - middle % 2, 2, 1),
            ]
        )
        self.logit = nn.Linear(4 * width * base**2, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """(n, channels, size, size) in [0, 1], (n,) -> logits (n,)."""
        plane = self.label(labels).view(len(labels), 1, *images.shape[2:])
        features = torch.cat([2 * images - 1, plane], 1)
        for layer in self.convolutions:
            features = F.leaky_relu(layer(features), 0.2)
        logits: Tensor = self.logit(features.flatten(1))[:, 0]
        return logits
