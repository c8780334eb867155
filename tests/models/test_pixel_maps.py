"""Maps of pixels: between the distribution of samples and a noisy histogram of each pixel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedgen.models.pixel_maps import LEVELS, map_pixels, pixel_map, quantiles

SHAPE = 1, 6, 5


def samples(count: int = 4000) -> tuple[Tensor, Tensor]:
    """Return raw pixels and the same as intensities, a third of them black."""
    source = torch.Generator().manual_seed(0)
    raw = torch.randn((count, *SHAPE), generator=source)
    return raw, ((raw + 0.4) / 3).clamp(0, 1)


def histograms(images: Tensor) -> Tensor:
    """Return the shares of coarse levels (c, h, w, levels)."""
    level = (images * (LEVELS - 1e-3)).long()
    return torch.stack([(level == number).float().mean(0) for number in range(LEVELS)], -1)


def pooled(images: Tensor) -> Tensor:
    """Return the shares of fine levels in all pixels (c, levels)."""
    level = (images * (8 * LEVELS - 1e-3)).long()
    shares = [(level == number).float().mean() for number in range(8 * LEVELS)]
    return torch.stack(shares)[None]


def test_a_histogram_without_information_changes_hardly_anything() -> None:
    raw, mapped = samples()
    noisy = histograms(mapped) + 5 * torch.randn(
        (*SHAPE, LEVELS), generator=torch.Generator().manual_seed(1)
    )
    drawn, meant = pixel_map(raw, mapped, pooled(mapped), noisy, 1e3)
    assert float((map_pixels(raw, drawn, meant) - mapped).abs().mean()) < 0.01


@pytest.mark.parametrize("shift", [-0.3, 0.2])
def test_an_exact_histogram_is_that_of_the_result(shift: float) -> None:
    raw, mapped = samples()
    target = histograms((mapped + shift).clamp(0, 1))
    drawn, meant = pixel_map(raw, mapped, pooled(mapped), target, 1e-6)
    result = histograms(map_pixels(raw, drawn, meant))
    assert float((result - target).abs().max()) < 0.03
    assert float((histograms(mapped) - target).abs().max()) > 0.15


def test_noise_is_shrunk() -> None:
    """The result is nearer to the truth than either the samples or the noisy histogram."""
    raw, mapped = samples()
    truth = histograms((mapped + 0.05).clamp(0, 1))
    noise = 0.04
    noisy = truth + noise * torch.randn(truth.shape, generator=torch.Generator().manual_seed(2))
    drawn, meant = pixel_map(raw, mapped, pooled(mapped), noisy, noise)
    errors = [
        float((each - truth).square().mean())
        for each in (histograms(map_pixels(raw, drawn, meant)), histograms(mapped), noisy)
    ]
    assert errors[0] < min(errors[1:])


def test_quantiles_invert_a_histogram() -> None:
    shares = torch.tensor([[0.5, 0.0, 0.25, 0.25], [0.0, 0.0, 0.0, 1.0]])
    result = quantiles(shares, torch.tensor([0.25, 0.625, 0.875]))
    assert torch.allclose(result[0], torch.tensor([0.0, 0.625, 0.875]))
    assert torch.allclose(result[1], torch.tensor([0.8125, 0.90625, 0.96875]))
