"""The conditional DCGAN of "Private GANs, revisited" (Bie, Kamath, Zhang 2023, appendix B.1): fully
convolutional, a label embedding in both networks, no batch statistics, for square images.

On 28x28 images at width 128 the discriminator has 1.72 M parameters and the generator 2.27 M; on
32x32 images with three channels and two labels 2.64 M and 3.16 M, as in the paper's tables. With
kernels of 5 these are the networks of "Differentially Private Generation of Small Images".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgen.errors import FedgenError
from fedgen.models.dcgan import PixelNorm
from fedgen.models.functional import channels_last


def sides(size: int) -> list[int]:
    """Return the sides in pixels after none, one, two and three convolutions with stride 2.

    Raises:
        FedgenError: for sizes that transposed convolutions do not restore.
    """
    if size % 4 or size < 8:
        raise FedgenError(
            "data",
            f"images of {size}x{size} do not fit the networks",
            "resize them to a multiple of 4 pixels, at least 8",
        )
    return [size, size // 2, size // 4, -(-size // 8)]


def _geometry(side: int, kernel: int) -> tuple[int, int]:
    """Return kernel and padding that halve ``side``, rounding up. An even kernel does so for even
    sides; for odd ones it is one smaller."""
    kernel = kernel - 1 if side % 2 and kernel % 2 == 0 else kernel
    return kernel, (kernel - 1) // 2


def _halve(inputs: int, outputs: int, side: int, kernel: int) -> nn.Conv2d:
    """Return the convolution from ``side`` pixels to half of them."""
    size, padding = _geometry(side, kernel)
    return nn.Conv2d(inputs, outputs, size, 2, padding)


def _double(inputs: int, outputs: int, side: int, kernel: int) -> nn.ConvTranspose2d:
    """Return the transposed convolution from half of ``side`` pixels to ``side``."""
    size, padding = _geometry(side, kernel)
    return nn.ConvTranspose2d(inputs, outputs, size, 2, padding, (side - size) % 2)


class Generator(nn.Module):
    """Latent and label to an image in [0, 1]: both are mapped to grids of features, concatenated,
    followed by three transposed convolutions with stride 2, ReLU, and tanh.

    Args:
        latent: latent dimensions.
        classes: number of labels.
        shape: (channels, size, size) of the images.
        width: channels before the last layer.
        kernel: side of the kernels; an even one is one smaller where the side of a grid is odd.
        pixel_norm: not in the papers; with it, the generator needs far fewer steps.
    """

    def __init__(
        self,
        latent: int,
        classes: int,
        shape: tuple[int, int, int],
        width: int,
        kernel: int = 4,
        pixel_norm: bool = False,
    ) -> None:
        super().__init__()
        channels, size, _ = shape
        *above, self.base = sides(size)
        half = 2 * width
        self.norm = PixelNorm() if pixel_norm else nn.Identity()
        self.label = nn.Embedding(classes, classes)
        # transposed convolutions of a single pixel
        self.from_latent = nn.Linear(latent, half * self.base**2, bias=False)
        self.from_label = nn.Linear(classes, half * self.base**2, bias=False)
        self.up = nn.ModuleList(
            [_double(2 * half, half, above[2], kernel), _double(half, width, above[1], kernel)]
        )
        self.image = _double(width, channels, above[0], kernel)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        """(n, latent), (n,) -> (n, channels, size, size)."""
        grids = [self.from_latent(latents), self.from_label(self.label(labels))]
        features = torch.cat([grid.unflatten(1, (-1, self.base, self.base)) for grid in grids], 1)
        features = channels_last(features)
        features = F.relu(self.norm(features))
        for layer in self.up:
            features = F.relu(self.norm(layer(features)))
        return (torch.tanh(self.image(features)).contiguous() + 1) / 2


class Discriminator(nn.Module):
    """Images and labels to logits: the embedding of the label is an additional channel, followed by
    three convolutions with stride 2, leaky ReLU, and one over the whole remaining grid.

    Args:
        classes: number of labels.
        shape: (channels, size, size) of the images.
        width: channels after the first convolution.
        kernel: see ``Generator``.
    """

    def __init__(
        self, classes: int, shape: tuple[int, int, int], width: int, kernel: int = 4
    ) -> None:
        super().__init__()
        channels, size, _ = shape
        *above, base = sides(size)
        self.label = nn.Embedding(classes, size**2)
        self.convolutions = nn.ModuleList(
            [
                _halve(channels + 1, width, above[0], kernel),
                _halve(width, 2 * width, above[1], kernel),
                _halve(2 * width, 4 * width, above[2], kernel),
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
