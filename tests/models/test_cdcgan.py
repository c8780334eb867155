"""The networks of "Private GANs, revisited": sizes as in its tables, images of any suitable
size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedgen.errors import FedgenError
from fedgen.losses.mode_seeking import mode_seeking_loss
from fedgen.models.cdcgan import Discriminator, Generator


def millions(module: nn.Module) -> float:
    return sum(p.numel() for p in module.parameters()) / 1e6


@pytest.mark.parametrize(("width", "paper"), [(64, 0.44), (96, 0.97), (128, 1.72), (192, 3.86)])
def test_discriminators_have_the_sizes_of_table_4(width: int, paper: float) -> None:
    """The last is 196 wide in the paper, which would have 4.02 M parameters."""
    assert millions(Discriminator(10, (1, 28, 28), width)) == pytest.approx(paper, abs=0.01)


def test_other_sizes_of_the_paper() -> None:
    assert millions(Generator(128, 10, (1, 28, 28), 128)) == pytest.approx(2.27, abs=0.005)
    assert millions(Discriminator(2, (3, 32, 32), 128)) == pytest.approx(2.64, abs=0.005)
    assert millions(Generator(128, 2, (3, 32, 32), 128)) == pytest.approx(3.16, abs=0.005)


@pytest.mark.parametrize("kernel", [4, 5])
@pytest.mark.parametrize("size", [8, 12, 20, 28, 32, 64])
def test_generated_images_have_the_requested_size(size: int, kernel: int) -> None:
    shape, labels = (3, size, size), torch.tensor([0, 1])
    images = Generator(5, 2, shape, 4, kernel, True)(torch.randn(2, 5), labels)
    assert images.shape == (2, *shape)
    assert 0 <= images.min() <= images.max() <= 1
    assert Discriminator(2, shape, 3, kernel)(images, labels).shape == (2,)


def test_an_unsupported_size_is_refused() -> None:
    with pytest.raises(FedgenError, match="30x30"):
        Discriminator(10, (1, 30, 30), 4)


def test_the_mode_seeking_loss_is_small_if_images_differ() -> None:
    latents, near = torch.randn(8, 3), torch.rand(4, 1, 2, 2)
    apart = mode_seeking_loss(torch.cat([near, 1 - near.round()]), latents)
    assert mode_seeking_loss(torch.cat([near, near + 0.01]), latents) > 5 * apart
    assert mode_seeking_loss(torch.cat([near, near]), latents) == pytest.approx(1000, rel=1e-3)
