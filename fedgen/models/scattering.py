"""Fixed image features by wavelet scattering (Bruna, Mallat 2013), without trained parameters.

    order 0   x * low
    order 1   |x * psi_1| * low,  |x * psi_2| * low          8 orientations each
    order 2   ||x * psi_1| * psi_2| * low                    64 pairs of orientations

psi_1 and psi_2 are Morlet wavelets, one octave apart; low is a Gaussian, and its output is sampled
at every ``stride``-th pixel. Each of the four groups is scaled to norm one per image, which removes
contrast. (Tramer, Boneh 2021 train private classifiers on such features.)

The features of an image do not depend on other images of the batch, for any number of threads: all
sums are sums of integers that floating point represents exactly, and the rest is elementwise (see
``exact_matmul.py``). Wavelets are in single precision: the magnitudes of a filter's entries add up
to at most 2^16 for pixels of 8 bits, and to 2^12 for maps of 12 bits, so that no partial sum
exceeds 2^24. Low-pass filters are in double precision: maps of 18 bits and two sides of 17 bits.
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
_AT_ONCE = 2**23  # entries of the maps of order 2
_SINGLE, _DOUBLE = 24, 53  # bits of integers in floating point
_PIXEL, _MAP, _OUTPUT = 8, 12, 18  # bits of pixels, of maps before and of maps after wavelets
_SMOOTHING = 17  # bits of low-pass filters


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
        """Images (n, channels, height, width) in [0, 1], rounded to 8 bits -> features (n, count)
        with norm 1."""
        if not len(images):
            return torch.zeros(0, self.count, device=self.device)
        at_once = max(1, 4 * _AT_ONCE // (math.prod(self.shape) * _GROUPS[-1]))
        # cuDNN may convolve by Fourier transforms, whose rounding is not exact
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=False):
            parts = torch.split(images.to(self.device, torch.float32), at_once)
            return torch.cat([self._of(part) for part in parts])

    def _of(self, images: Tensor) -> Tensor:
        pixels = (images.flatten(0, 1)[:, None] * 255).round()  # each channel separately
        first = self._fine.modulus(pixels, 1)
        second = self._coarse.modulus(pixels * 2 ** (_MAP - _PIXEL), 2)
        both = self._coarse.modulus((first * 2.0 ** (_MAP - _OUTPUT)).round(), 2)
        maps = (
            self._low_pass(pixels, 1),
            self._low_pass(first, 1),
            self._low_pass(second, 2),
            self._low_pass(both, 2),
        )
        groups = [_normalize(group.reshape(len(images), -1)) for group in maps]
        return (torch.cat(groups, 1) / 2).float()

    def _low_pass(self, maps: Tensor, scale: int) -> Tensor:
        """Smooth maps (n, k, h, w) at ``1 / scale`` of the size, and keep each position: (n, k,
        h', w')."""
        high, wide = (self._smoothing(side, scale) for side in self.shape[1:])
        return high @ maps.double() @ wide.T

    def _smoothing(self, side: int, scale: int) -> Tensor:
        """Return the low-pass filter of a side as a matrix (positions, pixels)."""
        side, stride = -(-side // scale), self.stride // scale
        sigma = 0.8 * stride
        radius = math.ceil(1.8 * sigma)
        hill = torch.exp(-torch.arange(-radius, radius + 1).double().square() / (2 * sigma**2))
        hill = (hill / hill.sum() * 2**_SMOOTHING).trunc()
        matrix = torch.zeros(-(-side // stride), side + 2 * radius, dtype=torch.float64)
        for position, row in enumerate(matrix):
            row[position * stride : position * stride + len(hill)] = hill
        return matrix[:, radius : radius + side].to(self.device)

    @cached_property
    def _fine(self) -> Wavelets:
        return Wavelets.of(_morlets(7, 0.8, 3 * math.pi / 4), _PIXEL, self.device)

    @cached_property
    def _coarse(self) -> Wavelets:
        return Wavelets.of(_morlets(11, 1.6, 3 * math.pi / 8), _MAP, self.device)


@dataclass(frozen=True)
class Wavelets:
    """Complex filters for maps of integers.

    integers: real parts, then imaginary ones, as integers (2 * orientations, 1, size, size).
    unit: factor that maps the modulus of a result to integers of ``_OUTPUT`` bits.
    """

    integers: Tensor
    unit: float

    @classmethod
    def of(cls, filters: Tensor, bits: int, device: str) -> Wavelets:
        """Round filters for maps of this number of bits."""
        magnitudes = filters.abs().sum((1, 2, 3))
        integers = (filters * (2 ** (_SINGLE - bits) / magnitudes.max())).trunc()
        limit = integers.abs().sum((1, 2, 3)).view(2, -1).square().sum(0).max().sqrt()
        layout = integers.float().to(device, memory_format=torch.channels_last)  # faster on CPUs
        return cls(layout, 2.0 ** (_OUTPUT - bits) / float(limit))

    def modulus(self, maps: Tensor, stride: int) -> Tensor:
        """Return the absolute value of each map (n, k, h, w) convolved with each filter: integers
        (n, k * orientations, h / stride, w / stride)."""
        n, padding = len(maps), self.integers.shape[-1] // 2
        convolved = F.conv2d(maps.flatten(0, 1)[:, None], self.integers, None, stride, padding)
        squares = convolved.mul_(self.unit).square_()
        real, imaginary = squares.view(n, -1, 2, _ORIENTATIONS, *squares.shape[2:]).unbind(2)
        return (real + imaginary).sqrt_().round_().flatten(1, 2).contiguous()


def _normalize(values: Tensor) -> Tensor:
    """Scale rows (n, d) to norm 1. Their squares are integers in a double: the sum is exact."""
    bits = (_DOUBLE - math.ceil(math.log2(values.shape[1]))) // 2
    integers = (values * 2.0 ** (bits - _DOUBLE + 1)).round()
    return integers / integers.square().sum(1, keepdim=True).sqrt().clamp(min=1)


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
    return torch.cat([all_.real, all_.imag])[:, None]
