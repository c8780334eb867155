"""Generate images from a mixture of Gaussians over their lowest DCT coefficients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgen.models.augmentation import Augmentation
from fedgen.models.functional import Tensors
from fedgen.models.pixel_maps import map_pixels, pixel_map, quantiles

QUANTILES = 1024
"""Number of entries of an intensity table."""
_RAW_AT_ONCE = 2000  # images
_PIXEL_BITS, _DOUBLE_BITS = 8, 53  # of a pixel, and of integers in a double


def dct_basis(side: tuple[int, int], count: int) -> Tensor:
    """Return the ``count`` lowest cosines along each side, orthonormal (h * w, count^2)."""
    high, wide = (_cosines(length, count) for length in side)
    return torch.einsum("hi,wj->hwij", high, wide).reshape(-1, count**2).float()


def _cosines(length: int, count: int) -> Tensor:
    """Return the ``count`` lowest cosines of a side, orthonormal (length, count)."""
    angles = (torch.arange(length, dtype=torch.float64) + 0.5) * math.pi / length
    cosines = torch.cos(angles[:, None] * torch.arange(count, dtype=torch.float64))
    return F.normalize(cosines, dim=0)


@dataclass(frozen=True)
class ExactDct:
    """DCT coefficients of 8-bit images, computed from integers that a double represents exactly.

    The order of addition has no effect (see ``exact_matmul.py``). Partial sums are at most 256 *
    4^bits * sqrt(h * w): the magnitudes of n cosines of norm 1 add up to at most sqrt(n), and 256
    in place of 255 allows for rounding the cosines.

    vertical, horizontal: cosines of each side as integers, (m, h) and (w, m).
    unit: factor from sums to coefficients.
    """

    vertical: Tensor
    horizontal: Tensor
    unit: float

    @classmethod
    def of(cls, side: tuple[int, int], count: int) -> ExactDct:
        """Round the ``count`` lowest cosines along each side."""
        root = sum(math.ceil(math.log2(length) / 2) for length in side)
        bits = (_DOUBLE_BITS - _PIXEL_BITS - root) // 2
        vertical, horizontal = ((_cosines(length, count) * 2**bits).round() for length in side)
        return cls(vertical.T.contiguous(), horizontal, 1 / (255 * 4**bits))

    def __call__(self, images: Tensor) -> Tensor:
        """Return the coefficients (n, c * m^2) of images (n, c, h, w) in [0, 1]."""
        pixels = (images * 255).round().double()
        rows = pixels @ self.horizontal.to(images.device)
        return (self.vertical.to(images.device) @ rows).flatten(1) * self.unit


@dataclass(frozen=True)
class DctMixture:
    """Sampler of images (n, c, h, w) for labels (n,) from these weights:

    shares, centres: clusters of each label, (labels, k) and (labels, k, d).
    roots: roots of the within-cluster covariance of each label, (labels, d, d).
    basis, means: principal components in DCT coefficients, (c * m^2, d), and the mean of each
        label, (labels, c * m^2).
    drawn, meant: sampled and target intensities of pixels at the same ranks, (c, QUANTILES); see
        ``tables``.
    pixel_drawn, pixel_meant: optional: the same for each pixel, (c, h, w, quantiles).

    shape: shape of images, (c, h, w).
    basis: DCT basis, (h * w, m^2).
    augmentation: of samples; None: none.
    """

    shape: tuple[int, int, int]
    basis: Tensor
    augmentation: Augmentation | None

    def sample(
        self,
        weights: Mapping[str, Tensor],
        labels: Tensor,
        source: torch.Generator,
        warped: bool = True,
    ) -> Tensor:
        """Return images in [0, 1], mapped to the target intensity histogram."""
        raw = self._raw(weights, labels, source)
        if "pixel_drawn" in weights and weights["pixel_drawn"].any():
            images = map_pixels(raw, weights["pixel_drawn"], weights["pixel_meant"])
        else:
            images = self._mapped(weights, raw)
        return self.augmentation(images, source) if warped and self.augmentation else images

    def tables(
        self, weights: Mapping[str, Tensor], labels: Tensor, source: torch.Generator
    ) -> Tensors:
        """Return the map from sampled pixel values to intensities of the same rank, by a histogram
        ``histogram`` (c, levels) next to the weights.

        Args:
            labels: labels of the samples used for it.
        """
        raw = self._raw(weights, labels, source).transpose(0, 1).flatten(1)
        ranks = (torch.arange(QUANTILES) + 0.5) / QUANTILES
        ascending = raw.sort(1).values
        sampled = ascending[:, (ranks * ascending.shape[1]).long()]
        return {"drawn": sampled, "meant": quantiles(weights["histogram"], ranks)}

    def pixel_tables(
        self,
        weights: Mapping[str, Tensor],
        labels: Tensor,
        source: torch.Generator,
        noisy: Tensor,
        noise: float,
    ) -> Tensors:
        """Return the same for each pixel, by a noisy histogram of each pixel (c, h, w, levels); see
        ``pixel_maps``."""
        raw = torch.cat(
            [self._raw(weights, part, source) for part in torch.split(labels, _RAW_AT_ONCE)]
        )
        mapped = self._mapped(weights, raw)
        drawn, meant = pixel_map(raw, mapped, weights["histogram"], noisy.float(), noise)
        return {"pixel_drawn": drawn, "pixel_meant": meant}

    def _mapped(self, weights: Mapping[str, Tensor], raw: Tensor) -> Tensor:
        """Return images in [0, 1] with the target intensities of all pixels together."""
        tables = zip(weights["drawn"], weights["meant"], strict=True)
        channels = [_interpolated(raw[:, channel], *both) for channel, both in enumerate(tables)]
        return torch.stack(channels, 1)

    def _raw(
        self, weights: Mapping[str, Tensor], labels: Tensor, source: torch.Generator
    ) -> Tensor:
        """Return pixels (n, c, h, w) of the mixture, of any range."""
        which = torch.multinomial(weights["shares"][labels], 1, generator=source).flatten()
        noise = torch.randn(len(labels), weights["basis"].shape[1], generator=source)
        components = weights["centres"][labels, which]
        for label, root in enumerate(weights["roots"]):  # one root per image would exhaust memory
            in_class = labels == label
            components[in_class] += noise[in_class] @ root.T
        coefficients = weights["means"][labels] + components @ weights["basis"].T
        channels, *_ = self.shape
        pixels = coefficients.view(len(labels), channels, -1) @ self.basis.T
        return pixels.view(len(labels), *self.shape)


def _interpolated(values: Tensor, sampled: Tensor, targets: Tensor) -> Tensor:
    """Return the piecewise linear function that maps ``sampled``, ascending, to ``targets``."""
    index = torch.searchsorted(sampled, values.contiguous()).clamp(1, len(sampled) - 1)
    low, high = sampled[index - 1], sampled[index]
    share = ((values - low) / (high - low).clamp(min=1e-9)).clamp(0, 1)
    return targets[index - 1] + share * (targets[index] - targets[index - 1])
