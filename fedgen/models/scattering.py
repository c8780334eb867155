"""Fixed image features by wavelet scattering (Bruna, Mallat 2013), without trained parameters.

    order 0   x * low
    order 1   |x * psi_1| * low,  |x * psi_2| * low          8 orientations each
    order 2   ||x * psi_1| * psi_2| * low                    64 pairs of orientations

psi_1 and psi_2 are Morlet wavelets, one octave apart; low is a Gaussian, and its output is sampled
at every ``stride``-th pixel. Each of the four groups is scaled to norm one per image, which removes
contrast. (Tramer, Boneh 2021 train private classifiers on such features.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

_ORIENTATIONS = 8
_GROUPS = (1, _ORIENTATIONS, _ORIENTATIONS, _ORIENTATIONS**2)  # maps per channel
_CELLS = 8  # maximum number of positions per side
_AT_ONCE = 500


@dataclass(frozen=True)
class Scattering:
    """Features of images with this shape (channels, height, width).

    device: where they are computed.
    """

    shape: tuple[int, int, int]
    device: str

    @property
    def stride(self) -> int:
        """Distance of positions in pixels: the smallest power of two, from 2, that leaves at most 8
        per side."""
        return max(2, 1 << max(0, math.ceil(math.log2(max(self.shape[1:]) / _CELLS))))

    @property
    def count(self) -> int:
        """Number of features per image."""
        channels, *sides = self.shape
        high, wide = (-(-side // self.stride) for side in sides)
        return channels * sum(_GROUPS) * high * wide

    def __call__(self, images: Tensor) -> Tensor:
        """Images (n, channels, height, width) in [0, 1] -> features (n, count) with norm 1."""
        if not len(images):
            return torch.zeros(0, self.count, device=self.device)
        with torch.no_grad():
            parts = torch.split(images.to(self.device, torch.float32), _AT_ONCE)
            return torch.cat([self._of(part) for part in parts])

    def _of(self, images: Tensor) -> Tensor:
        fine, coarse, low, half = self._filters
        channel = images.flatten(0, 1)[:, None]  # each channel separately
        first = _modulus(channel, fine, 1)
        second = _modulus(channel, coarse, 2)
        both = _modulus(first, coarse, 2)
        maps = (
            _convolve(channel, low, self.stride),
            _convolve(first, low, self.stride),
            _convolve(second, half, self.stride // 2),
            _convolve(both, half, self.stride // 2),
        )
        groups = [group.reshape(len(images), -1) for group in maps]
        return torch.cat([F.normalize(group, dim=1) for group in groups], 1) / 2

    @cached_property
    def _filters(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        filters = (
            _morlets(7, 0.8, 3 * math.pi / 4),
            _morlets(11, 1.6, 3 * math.pi / 8),
            _gaussian(0.8 * self.stride),
            _gaussian(0.4 * self.stride),  # of maps of half the size
        )
        fine, coarse, low, half = (kernel.to(self.device) for kernel in filters)
        return fine, coarse, low, half


def _convolve(maps: Tensor, filters: Tensor, stride: int) -> Tensor:
    """Convolve each map (n, c, h, w) with each filter (k, 1, s, s): (n, c * k, h / stride, w /
    stride)."""
    n, channels, *_ = maps.shape
    convolved = F.conv2d(maps.flatten(0, 1)[:, None], filters, None, stride, filters.shape[-1] // 2)
    return convolved.view(n, channels * len(filters), *convolved.shape[2:])


def _modulus(maps: Tensor, filters: Tensor, stride: int) -> Tensor:
    """Return the absolute value of each map convolved with each complex filter, whose real parts
    come first."""
    n, channels, *_ = maps.shape
    convolved = _convolve(maps, filters, stride)
    real, imaginary = convolved.view(n, channels, 2, -1, *convolved.shape[2:]).unbind(2)
    return (real.square() + imaginary.square() + 1e-8).sqrt().flatten(1, 2)


def _morlets(size: int, sigma: float, frequency: float) -> Tensor:
    """Return Morlet wavelets (2 * orientations, 1, size, size): Gaussians of width ``sigma``, twice
    as long across, times a wave, with zero mean."""
    axis = torch.arange(size, dtype=torch.float64) - size // 2
    down, right = torch.meshgrid(axis, axis, indexing="ij")
    wavelets = []
    for turn in range(_ORIENTATIONS):
        angle = math.pi * turn / _ORIENTATIONS
        along = right * math.cos(angle) + down * math.sin(angle)
        across = down * math.cos(angle) - right * math.sin(angle)
        hill = torch.exp(-(along.square() + (across / 2).square()) / (2 * sigma**2))
        wave = hill * torch.exp(1j * frequency * along)
        wavelets.append((wave - hill * (wave.sum() / hill.sum())) / (4 * math.pi * sigma**2))
    all_ = torch.stack(wavelets)
    return torch.cat([all_.real, all_.imag]).float()[:, None]


def _gaussian(sigma: float) -> Tensor:
    """Return a Gaussian (1, 1, size, size) with sum one, truncated at two widths."""
    radius = math.ceil(1.8 * sigma)
    axis = torch.arange(-radius, radius + 1, dtype=torch.float64)
    line = torch.exp(-axis.square() / (2 * sigma**2))
    hill = torch.outer(line, line)
    return (hill / hill.sum()).float()[None, None]
