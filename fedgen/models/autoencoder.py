"""A small autoencoder of square images, and a generator of its codes, without batch statistics."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgen.errors import FedgenError
from fedgen.models.dcgan import with_one_hot


class Autoencoder(nn.Module):
    """Images to codes of length 1 by two convolutions with stride 2 and a linear layer, and back.

    Args:
        code: numbers in a code.
        shape: (channels, size, size) of the images.
        width: channels after the first convolution.

    Raises:
        FedgenError: for a size that is no multiple of 4.
    """

    def __init__(self, code: int, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        channels, size, _ = shape
        if size % 4:
            raise FedgenError(
                "data", f"images of {size}x{size} do not fit", "resize them to a multiple of 4"
            )
        self.grid = 2 * width, size // 4, size // 4
        features = 2 * width * (size // 4) ** 2
        self.down = nn.ModuleList(
            [nn.Conv2d(channels, width, 4, 2, 1), nn.Conv2d(width, 2 * width, 4, 2, 1)]
        )
        self.code = nn.Linear(features, code)
        self.project = nn.Linear(code, features)
        self.up = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
        self.image = nn.ConvTranspose2d(width, channels, 4, 2, 1)

    def encode(self, images: Tensor) -> Tensor:
        """(n, channels, size, size) in [0, 1] -> codes (n, code)."""
        features = images
        for layer in self.down:
            features = F.leaky_relu(layer(features), 0.2)
        return F.normalize(self.code(features.flatten(1)), dim=1)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the images of codes."""
        features = F.leaky_relu(self.project(codes), 0.2).view(-1, *self.grid)
        return torch.sigmoid(self.image(F.leaky_relu(self.up(features), 0.2)))

    def forward(
        self, inputs: Tensor, wanted: Literal["code", "image", "distance"] = "distance"
    ) -> Tensor:
        """Return the codes of images, the images of codes, or the squared distances of images to
        their reconstructions, (n,)."""
        if wanted == "image":
            return self.decode(inputs)
        codes = self.encode(inputs)
        if wanted == "code":
            return codes
        return (self.decode(codes) - inputs).flatten(1).square().sum(1)


class CodeGenerator(nn.Module):
    """Latent and label to a code of length 1: two hidden layers.

    Args:
        latent: latent dimensions.
        classes: number of labels.
        code: numbers in a code.
        width: of the hidden layers.
    """

    def __init__(self, latent: int, classes: int, code: int, width: int) -> None:
        super().__init__()
        self.classes = classes
        self.first = nn.Linear(latent + classes, width)
        self.second = nn.Linear(width, width)
        self.code = nn.Linear(width, code)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        """(n, latent), (n,) -> (n, code)."""
        hidden = F.relu(self.first(with_one_hot(latents, labels, self.classes)))
        return F.normalize(self.code(F.relu(self.second(hidden))), dim=1)
