"""Diffusion losses against closed forms: the denoiser of a Gaussian, and its samples."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedgen.losses import edm
from fedgen.losses.edm import Sampler

SAMPLER = Sampler(60, 0.002, 20.0, 7.0, False, 0.0, 0.05, 50.0, 0.0)
MEAN, STD = 0.3, 0.2


def ideal(noisy: torch.Tensor, levels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """E[x | x + s n] for x ~ N(MEAN, STD^2) with label 0, N(-MEAN, STD^2) with label 1, and of mean
    0 without a label."""
    mean = torch.tensor([MEAN, -MEAN, 0.0])[labels].view(-1, 1, 1, 1)
    share = STD**2 / (STD**2 + levels.view(-1, 1, 1, 1) ** 2)
    return mean + share * (noisy - mean)


def drawn(sampler: Sampler, label: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    labels = torch.full((400,), label)
    return sampler.sample(ideal, labels, 2, lambda: torch.randn(400, 1, 4, 4, generator=generator))


@pytest.mark.parametrize(
    "sampler",
    [
        SAMPLER,
        replace(SAMPLER, second_order=True, steps=30),
        replace(SAMPLER, second_order=True, churn=20.0),
        replace(SAMPLER, steps=300, churn=60.0),
    ],
)
def test_samples_have_the_distribution_of_the_denoiser(sampler: Sampler) -> None:
    """6,400 values: mean within five standard errors, standard deviation within five and the
    discretisation error."""
    images = drawn(sampler)
    assert float(images.mean()) == pytest.approx(MEAN, abs=5 * STD / 80)
    assert float(images.std()) == pytest.approx(STD, rel=5 / math.sqrt(2 * 6400) + 0.03)
    assert float(drawn(sampler, 1).mean()) == pytest.approx(-MEAN, abs=5 * STD / 80)


def test_guidance_extrapolates() -> None:
    """D + w (D - D without label): here the denoiser of a mean (1 + w) times as large."""
    guided = drawn(replace(SAMPLER, guidance=0.5))
    assert float(guided.mean()) == pytest.approx(1.5 * MEAN, abs=0.02)


def test_noise_levels_are_those_of_equation_5() -> None:
    """Equation 5 of EDM's paper."""
    levels = replace(SAMPLER, steps=3, sigma_min=1.0, sigma_max=16.0, rho=2.0).noise_levels
    assert levels == pytest.approx([16.0, 6.25, 1.0, 0.0])


def test_a_perfect_network_has_zero_loss() -> None:
    """F for which D is the clean image. An error of e in each pixel has the loss (s^2 + d^2) / (s
    d)^2 times c_out^2 e^2 = e^2 at every noise level, which is the purpose of EDM's weight."""
    clean, noise = torch.rand(5, 1, 4, 4) * 2 - 1, torch.randn(5, 1, 4, 4)
    levels = torch.tensor([0.01, 0.1, 1.0, 3.0, 40.0])
    noisy = clean + levels.view(-1, 1, 1, 1) * noise
    level = levels.view(-1, 1, 1, 1).double()
    whole = level**2 + edm.DATA**2
    skip, out = edm.DATA**2 / whole, level * edm.DATA / whole.sqrt()
    result = (clean.double() - skip * noisy.double()) / out
    assert edm.loss(result, noisy.double(), levels.double(), clean.double()).max() < 1e-10
    off = edm.loss(result + 0.3, noisy.double(), levels.double(), clean.double())
    assert torch.allclose(off, torch.full((5,), 0.09, dtype=torch.float64), atol=1e-6)


def test_the_network_input_has_unit_variance() -> None:
    levels = torch.tensor([0.01, 1.0, 30.0])
    clean = torch.rand(3, 1, 64, 64) * 2 - 1
    noisy = clean + levels.view(-1, 1, 1, 1) * torch.randn(3, 1, 64, 64)
    given, result = edm.inputs(noisy, levels)
    assert torch.allclose(given.flatten(1).std(1), torch.ones(3), atol=0.05)
    assert torch.allclose(result, levels.log() / 4)
