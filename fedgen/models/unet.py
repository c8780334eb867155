"""Denoising network of a diffusion model: a small U-Net (Ho, Jain, Abbeel 2020) of layers without
interaction between examples, for square images."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgen.config.constraints import Depth
from fedgen.errors import FedgenError


def _norm(channels: int) -> nn.GroupNorm:
    """Return group normalization with groups of at least four channels, at most 32 groups."""
    return nn.GroupNorm(math.gcd(channels, min(max(1, channels // 4), 32)), channels)


class Stage(nn.Module):
    """Two 3x3 convolutions after normalization and SiLU, with the embedding of level and label
    added in between, and a skip connection; optionally followed by a head of self-attention over
    all positions."""

    def __init__(self, inputs: int, outputs: int, embedding_size: int, attends: bool) -> None:
        super().__init__()
        self.before, self.between = _norm(inputs), _norm(outputs)
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.told = nn.Linear(embedding_size, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1)
        if attends:
            self.norm = _norm(outputs)
            self.asks = nn.Conv2d(outputs, 3 * outputs, 1)
            self.answers = nn.Conv2d(outputs, outputs, 1)
        self.attends = attends

    def forward(self, features: Tensor, embedding: Tensor) -> Tensor:
        """(n, inputs, h, w), (n, embedding_size) -> (n, outputs, h, w)."""
        hidden = self.first(F.silu(self.before(features))) + self.told(embedding)[:, :, None, None]
        hidden = self.second(F.silu(self.between(hidden)))
        features = (hidden + self.skip(features)) / math.sqrt(2)
        if not self.attends:
            return features
        query, key, value = self.asks(self.norm(features)).flatten(2).chunk(3, 1)
        weight = (query.transpose(1, 2) @ key / math.sqrt(features.shape[1])).softmax(2)
        seen = self.answers((value @ weight.transpose(1, 2)).view_as(features))
        attended: Tensor = (features + seen) / math.sqrt(2)
        return attended


class Resolution(nn.Module):
    """Stages on the way down, the lower resolutions, and one more stage on the way up, each
    concatenated with the features from the way down."""

    def __init__(
        self,
        inputs: int,
        widths: Sequence[int],
        size: int,
        embedding_size: int,
        blocks: int,
        attention: Sequence[int],
    ) -> None:
        super().__init__()
        width, attends = widths[0], size in attention
        sizes = [inputs] + [width] * blocks
        self.down = nn.ModuleList(
            Stage(channels, width, embedding_size, attends)
            for channels in [inputs] + [width] * (blocks - 1)
        )
        self.inner: nn.Module = Stage(width, width, embedding_size, attends)
        below = width
        if len(widths) > 1:
            self.inner = Resolution(width, widths[1:], size // 2, embedding_size, blocks, attention)
            below = widths[1]
        befores = [below] + [width] * blocks
        self.up = nn.ModuleList(
            Stage(before + skip, width, embedding_size, attends)
            for before, skip in zip(befores, reversed(sizes), strict=True)
        )

    def forward(self, features: Tensor, embedding: Tensor) -> Tensor:
        """(n, inputs, h, w), (n, embedding_size) -> (n, widths[0], h, w)."""
        kept = [features]
        for stage in self.down:
            kept.append(stage(kept[-1], embedding))
        if isinstance(self.inner, Resolution):
            features = self.inner(F.avg_pool2d(kept[-1], 2), embedding)
            features = F.interpolate(features, scale_factor=2, mode="nearest")
        else:
            features = self.inner(kept[-1], embedding)
        for stage in self.up:
            features = stage(torch.cat([features, kept.pop()], 1), embedding)
        return features


class UNet(nn.Module):
    """F of EDM (Karras et al. 2022): noisy images, noise level and label to images.

    Args:
        classes: number of labels; the label ``classes`` means unconditional.
        shape: (channels, size, size) of the images.
        width: channels at full resolution.
        multipliers: of each resolution, relative to ``width``.
        blocks: stages per resolution on the way down.
        attention: sizes of feature maps with self-attention.
        patch: side of a patch in pixels; 2: a quarter of the positions.

    Raises:
        FedgenError: for a size that cannot be halved that often, or divided into patches, or
            attention at sizes that do not occur.
    """

    def __init__(
        self,
        classes: int,
        shape: tuple[int, int, int],
        width: int,
        multipliers: Sequence[int],
        blocks: Depth,
        attention: Sequence[int],
        patch: int = 1,
    ) -> None:
        super().__init__()
        channels, size, _ = shape
        if patch < 1 or size % patch:
            raise FedgenError(
                "method.network.patch",
                f"squares of {patch}x{patch} do not tile images of {size}x{size}",
                "e.g. 1",
            )
        channels, size = channels * patch**2, size // patch
        if not multipliers:
            raise FedgenError("method.network.multipliers", "there are none", "e.g. [1, 2]")
        sides = [size >> halved for halved in range(len(multipliers))]
        if others := [side for side in attention if side not in sides]:
            raise FedgenError(
                "method.network.attention",
                f"no feature maps of side {others[0]}",
                f"choose from: {', '.join(map(str, sides))}",
            )
        if size % 2 ** (len(multipliers) - 1):
            raise FedgenError(
                "method.network.multipliers",
                f"feature maps of {size}x{size} cannot be halved {len(multipliers) - 1} times",
                "take fewer, or resize the images",
            )
        embedding_size, widths = 4 * width, [multiplier * width for multiplier in multipliers]
        self.width, self.patch = width, patch
        self.level = nn.ModuleList(
            [nn.Linear(2 * width, embedding_size), nn.Linear(embedding_size, embedding_size)]
        )
        self.label = nn.Embedding(classes + 1, embedding_size)
        self.enter = nn.Conv2d(channels, width, 3, padding=1)
        self.whole = Resolution(width, widths, size, embedding_size, blocks, attention)
        self.norm = _norm(widths[0])
        self.leave = nn.Conv2d(widths[0], channels, 3, padding=1)

    def forward(self, images: Tensor, levels: Tensor, labels: Tensor) -> Tensor:
        """(n, channels, size, size), logarithm of the noise level divided by four (n,), labels (n,)
        -> (n, channels, size, size)."""
        steps = torch.arange(self.width, device=images.device) / max(self.width - 1, 1)
        angles = levels[:, None] * 100 * 1e-2**steps  # from fine to coarse
        embedding = torch.cat([angles.sin(), angles.cos()], 1)
        embedding = self.level[1](F.silu(self.level[0](embedding))) + self.label(labels)
        patches = F.pixel_unshuffle(images, self.patch)
        features = self.whole(self.enter(patches), F.silu(embedding))
        return F.pixel_shuffle(self.leave(F.silu(self.norm(features))), self.patch)
