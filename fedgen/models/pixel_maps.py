"""Map the intensities of a pixel to the target distribution of that pixel, by rank.

Targets combine the distribution of samples with a noisy histogram of ``LEVELS`` coarse levels per
pixel, which is shrunk to that of the samples where noise explains their difference.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LEVELS = 8  # coarse levels of a noisy histogram
QUANTILES = 64  # entries of the map of a pixel
_PRIOR_WEIGHT = 0.01  # of the pooled histogram, for the shape within a coarse level


def pixel_map(
    raw: Tensor, mapped: Tensor, histogram: Tensor, noisy: Tensor, noise: float
) -> tuple[Tensor, Tensor]:
    """Return the map of each pixel: values of samples at equidistant ranks, and the target
    intensities at the same ranks, each (c, h, w, quantiles).

    Args:
        raw: pixels of samples, of any range (n, c, h, w).
        mapped: the same in [0, 1], with intensities by ranks among all pixels.
        histogram: shares of fine intensity levels in all pixels (c, fine levels), a multiple of
            ``LEVELS``.
        noisy: shares of the levels of each pixel, with noise (c, h, w, levels).
        noise: standard deviation of the noise in each of these.
    """
    fine = _histograms(mapped, histogram.shape[1])
    coarse = torch.unflatten(fine, -1, (LEVELS, -1)).sum(-1)
    variance = noise**2 + coarse * (1 - coarse) / len(raw)
    difference = noisy - coarse
    # local variance of the difference, in excess of that of the noise
    squares = (difference.square() - variance).permute(3, 0, 1, 2)
    local = F.avg_pool2d(squares, 3, 1, 1, count_include_pad=False).permute(1, 2, 3, 0)
    weight = local.clamp(min=0) / (local.clamp(min=0) + variance).clamp(min=1e-12)
    target = (coarse + weight * difference).clamp(min=0)
    target /= target.sum(-1, keepdim=True).clamp(min=1e-9)
    prior = _PRIOR_WEIGHT * histogram[:, None, None]
    within = torch.unflatten(fine + prior, -1, (LEVELS, -1))
    shares = within / within.sum(-1, keepdim=True).clamp(min=1e-12) * target[..., None]
    ranks = (torch.arange(QUANTILES) + 0.5) / QUANTILES
    ascending = raw.permute(1, 2, 3, 0).sort(-1).values
    sampled = ascending[..., (ranks * len(raw)).long()]
    return sampled, quantiles(shares.flatten(-2), ranks)


def map_pixels(raw: Tensor, sampled: Tensor, targets: Tensor) -> Tensor:
    """Return images (n, c, h, w) in [0, 1]: the piecewise linear map of each pixel (c, h, w,
    quantiles), applied to ``raw``."""
    values = raw.permute(1, 2, 3, 0).contiguous()
    index = torch.searchsorted(sampled.contiguous(), values).clamp(1, sampled.shape[-1] - 1)
    low, high = sampled.gather(-1, index - 1), sampled.gather(-1, index)
    share = ((values - low) / (high - low).clamp(min=1e-9)).clamp(0, 1)
    start = targets.gather(-1, index - 1)
    mapped = start + share * (targets.gather(-1, index) - start)
    return mapped.permute(3, 0, 1, 2).contiguous()


def quantiles(shares: Tensor, ranks: Tensor) -> Tensor:
    """Return the intensities at these ranks (..., ranks) of histograms over equal levels of [0, 1]
    (..., levels); the lowest level is 0."""
    levels = shares.shape[-1]
    cumulative = shares.cumsum(-1) / shares.sum(-1, keepdim=True).clamp(min=1e-12)
    cumulative = cumulative.contiguous()
    rows = ranks.to(cumulative).expand(*cumulative.shape[:-1], -1).contiguous()
    level = torch.searchsorted(cumulative, rows).clamp(max=levels - 1)
    before = torch.cat([torch.zeros_like(cumulative[..., :1]), cumulative], -1).gather(-1, level)
    width = (cumulative.gather(-1, level) - before).clamp(min=1e-9)
    within = ((rows - before) / width).clamp(0, 1)
    return torch.where(level == 0, 0.0, (level + within) / levels)


def _histograms(images: Tensor, levels: int) -> Tensor:
    """Return the shares of the levels of each pixel (c, h, w, levels)."""
    index = (images * (levels - 1e-3)).long().permute(1, 2, 3, 0)
    counts = torch.zeros(*index.shape[:3], levels)
    return counts.scatter_add_(-1, index, torch.ones_like(index, dtype=counts.dtype)) / len(images)
