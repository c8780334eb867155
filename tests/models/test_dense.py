"""The dense generator: an image follows from its own latent and label alone."""

from __future__ import annotations

import torch

from fedgen.models.dense import Generator

SHAPE = (1, 8, 8)


def made(latents: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        images: torch.Tensor = Generator(5, 3, SHAPE, 16)(latents, labels)
    return images


def test_an_image_is_the_same_whatever_is_drawn_beside_it() -> None:
    """Batch normalization would make it another: alone it would even be flat."""
    latents, labels = torch.randn(6, 5), torch.tensor([0, 1, 2, 0, 0, 0])
    together = made(latents, labels)
    assert together.shape == (6, *SHAPE)
    assert 0 <= together.min() < together.max() <= 1
    alone = torch.cat([made(latents[[i]], labels[[i]]) for i in range(6)])
    assert torch.allclose(together, alone, atol=1e-6)
