"""The dense generator: an image depends only on its latent vector and label."""

from __future__ import annotations

import torch

from fedgen.models.dense import Generator

SHAPE = (1, 8, 8)


def made(latents: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        images: torch.Tensor = Generator(5, 3, SHAPE, 16)(latents, labels)
    return images


def test_an_image_does_not_depend_on_its_batch() -> None:
    """Batch normalisation would change it, and make a single image flat."""
    latents, labels = torch.randn(6, 5), torch.tensor([0, 1, 2, 0, 0, 0])
    together = made(latents, labels)
    assert together.shape == (6, *SHAPE)
    assert 0 <= together.min() < together.max() <= 1
    alone = torch.cat([made(latents[[i]], labels[[i]]) for i in range(6)])
    assert torch.allclose(together, alone, atol=1e-6)
