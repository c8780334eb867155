"""Random augmentation of images: a public prior, not derived from data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Augmentation:
    """Random transformations that preserve the label. Rotation, scale, shear and shift are uniform
    between minus and plus the value given here; elastic displacements are normal.

    share: share of images that are transformed.
    rotation: degrees.
    scale: relative change of each side.
    shear: relative to a side.
    shift: relative to a side.
    elastic: standard deviation of smooth displacements on a 5 x 5 grid, relative to a side.
    """

    share: float
    rotation: float
    scale: float
    shear: float
    shift: float
    elastic: float

    def __call__(self, images: Tensor, source: torch.Generator) -> Tensor:
        """Return transformed images (n, c, h, w) with bilinear interpolation; zero outside."""
        count, device = len(images), images.device

        def uniform(most: float) -> Tensor:
            return (torch.rand(count, generator=source) * 2 - 1) * most

        turn, shear = uniform(math.radians(self.rotation)), uniform(self.shear)
        wide, high = 1 + uniform(self.scale), 1 + uniform(self.scale)
        first = torch.stack([turn.cos() * wide, shear - turn.sin(), uniform(2 * self.shift)], 1)
        second = torch.stack([turn.sin(), turn.cos() * high, uniform(2 * self.shift)], 1)
        places = F.affine_grid(
            torch.stack([first, second], 1), list(images.shape), align_corners=False
        )
        knots = torch.randn(count, 2, 5, 5, generator=source) * 2 * self.elastic
        smooth = F.interpolate(knots, images.shape[2:], mode="bicubic", align_corners=True)
        kept = torch.rand(count, generator=source) >= self.share
        grid = (places + smooth.permute(0, 2, 3, 1)).to(device)
        warped = F.grid_sample(images, grid, align_corners=False)
        return torch.where(kept.to(device)[:, None, None, None], images, warped)
