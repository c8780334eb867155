"""Fixed image features by wavelet scattering (Bruna, Mallat 2013), without trained parameters.

    order 0   x * low
    order 1   |x * psi_1| * low,  |x * psi_2| * low          8 orientations each
    order 2   ||x * psi_1| * psi_2| * low                    64 pairs of orientations

psi_1 and psi_2 are Morlet wavelets, one octave apart; low is a Gaussian, and its output is sampled
at every ``stride``-th pixel. Each of the four groups is scaled to norm one per image, which removes
contrast. (Tramer, Boneh 2021 train private classifiers on such features.)

The features of an image do not depend on other images of the batch, for any number of threads: all
sums are sums of integers that floating point represents exactly, and the rest is elementwise (see
``exact_matmul.py``). Wavelet convolutions use single precision. The magnitudes of a filter add up
to at most 2^16 for 8-bit pixels and 2^12 for 12-bit maps, so no partial sum exceeds 2^24. Low-pass
filters use double precision. 18-bit maps times a 17-bit filter along each side give at most 2^52.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

_ORIENTATIONS = 8
_GROUPS = (1, _ORIENTATIONS, _ORIENTATIONS, _ORIENTATIONS**2)  # maps per channel
_CELLS = 8  # maximum number of positions per side
_MAP_ENTRIES = {"cpu": 2**23, "cuda": 2**25}  # of order 2 at a time; on a CPU, what fits its caches
_SINGLE_BITS, _DOUBLE_BITS = 24, 53  # of integers in floating point
_PIXEL_BITS, _MAP_BITS, _OUTPUT_BITS = 8, 12, 18  # of pixels, and of maps before and after wavelets
_FILTER_BITS = 17  # of low-pass filters

# NNPACK, which torch uses without oneDNN, and FFT convolutions of cuDNN are not exact
torch.backends.nnpack.set_flags(False)  # type: ignore[no-untyped-call]
_WITHOUT_CUDNN = threading.Lock()  # the flag is that of the process


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
        """Return features (n, count) of images (n, channels, height, width) in [0, 1], rounded to 8
        bits. Their norm is 1, or less if a group is zero (a black image)."""
        if not len(images):
            return torch.zeros(0, self.count, device=self.device)
        entries = _MAP_ENTRIES[torch.device(self.device).type]
        at_once = max(1, entries // (math.prod(self.shape) * _GROUPS[-1]))
        with torch.no_grad(), _WITHOUT_CUDNN, torch.backends.cudnn.flags(enabled=False):
            parts = torch.split(images.to(self.device, torch.float32), at_once)
            return torch.cat([self._of(part) for part in parts])

    def _of(self, images: Tensor) -> Tensor:
        pixels = (images.flatten(0, 1)[:, None] * 255).round()  # each channel separately
        fine = self._fine.modulus(pixels, 1)
        coarse = self._coarse.modulus(pixels * 2 ** (_MAP_BITS - _PIXEL_BITS), 2)
        both = self._coarse.modulus((fine * 2.0 ** (_MAP_BITS - _OUTPUT_BITS)).round(), 2)
        maps = (
            self._low_pass(pixels, 1),
            self._low_pass(fine, 1),
            self._low_pass(coarse, 2),
            self._low_pass(both, 2),
        )
        groups = [_normalize(group.reshape(len(images), -1)) for group in maps]
        return (torch.cat(groups, 1) / 2).float()

    def _low_pass(self, maps: Tensor, scale: int) -> Tensor:
        """Smooth maps (n, k, h, w) at ``1 / scale`` of the size, and sample them at each position:
        (n, k, h', w')."""
        vertical, horizontal = (self._low_pass_matrix(side, scale) for side in self.shape[1:])
        return vertical @ maps.double() @ horizontal.T

    def _low_pass_matrix(self, side: int, scale: int) -> Tensor:
        """Return the low-pass filter of a side as a matrix (positions, pixels)."""
        side, stride = -(-side // scale), self.stride // scale
        sigma = 0.8 * stride
        radius = math.ceil(1.8 * sigma)
        gaussian = torch.exp(-torch.arange(-radius, radius + 1).double().square() / (2 * sigma**2))
        gaussian = (gaussian / gaussian.sum() * 2**_FILTER_BITS).trunc()
        matrix = torch.zeros(-(-side // stride), side + 2 * radius, dtype=torch.float64)
        for position, row in enumerate(matrix):
            row[position * stride : position * stride + len(gaussian)] = gaussian
        return matrix[:, radius : radius + side].to(self.device)

    @cached_property
    def _fine(self) -> Wavelets:
        return Wavelets.of(_morlets(7, 0.8, 3 * math.pi / 4), _PIXEL_BITS, self.device)

    @cached_property
    def _coarse(self) -> Wavelets:
        return Wavelets.of(_morlets(11, 1.6, 3 * math.pi / 8), _MAP_BITS, self.device)


@dataclass(frozen=True)
class Wavelets:
    """Complex filters for maps of integers.

    integers: real parts, then imaginary ones, as integers (2 * orientations, 1, size, size).
    unit: factor that maps the modulus of a result to integers of ``_OUTPUT_BITS``.
    """

    integers: Tensor
    unit: float

    @classmethod
    def of(cls, filters: Tensor, bits: int, device: str) -> Wavelets:
        """Scale filters for maps of ``bits`` bits, and truncate them to integers."""
        magnitudes = filters.abs().sum((1, 2, 3))
        integers = (filters * (2 ** (_SINGLE_BITS - bits) / magnitudes.max())).trunc()
        limit = integers.abs().sum((1, 2, 3)).view(2, -1).square().sum(0).max().sqrt()
        kernels = integers.float().to(device, memory_format=torch.channels_last)  # faster on CPUs
        return cls(kernels, 2.0 ** (_OUTPUT_BITS - bits) / float(limit))

    def modulus(self, maps: Tensor, stride: int) -> Tensor:
        """Return the absolute value of each map (n, k, h, w) convolved with each filter, rounded to
        integers: (n, k * orientations, h / stride, w / stride)."""
        n, padding = len(maps), self.integers.shape[-1] // 2
        convolved = F.conv2d(maps.flatten(0, 1)[:, None], self.integers, None, stride, padding)
        squares = convolved.mul_(self.unit).square_()
        real, imaginary = squares.view(n, -1, 2, _ORIENTATIONS, *squares.shape[2:]).unbind(2)
        return (real + imaginary).sqrt_().round_().flatten(1, 2).contiguous()


def _normalize(values: Tensor) -> Tensor:
    """Scale rows (n, d) to norm 1; zero rows stay zero. Entries are rounded to integers, so that a
    double holds the sum of their squares exactly."""
    bits = (_DOUBLE_BITS - math.ceil(math.log2(values.shape[1]))) // 2
    integers = (values * 2.0 ** (bits - _DOUBLE_BITS + 1)).round()
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
        envelope = torch.exp(-(along.square() + (across / 2).square()) / (2 * sigma**2))
        wave = envelope * torch.exp(1j * frequency * along)
        offset = envelope * (wave.sum() / envelope.sum())
        wavelets.append((wave - offset) / (4 * math.pi * sigma**2))
    filters = torch.stack(wavelets)
    return torch.cat([filters.real, filters.imag])[:, None]
