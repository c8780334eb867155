"""Residual classifiers have the numbers of weights that their papers state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedgen.models.residual import resnet, resnext, wide_resnet

COLOUR = (3, 32, 32)


@pytest.mark.parametrize(
    ("net", "millions"),
    [
        (lambda: resnet(COLOUR, 10), 1.7),  # He et al. 2016, table 6
        (lambda: wide_resnet(COLOUR, 10), 8.9),  # Zagoruyko, Komodakis 2016, table 4
        (lambda: wide_resnet(COLOUR, 10, 28, 10), 36.5),
        (lambda: resnext(COLOUR, 10), 34.4),  # Xie et al. 2017, table 7
    ],
)
def test_golden_numbers_of_weights(net: object, millions: float) -> None:
    with torch.device("meta"):
        assert callable(net)
        count = sum(weight.numel() for weight in net().parameters())
    assert round(count / 1e6, 1) == millions


@pytest.mark.parametrize("make", [resnet, wide_resnet, resnext])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 64, 64), (1, 8, 8)])
def test_all_sizes_of_images(make: object, shape: tuple[int, ...]) -> None:
    assert callable(make)
    net = make(shape, 5, depth=11 if make is resnext else 10 if make is wide_resnet else 8)
    assert isinstance(net, nn.Module)
    assert net(torch.zeros(2, *shape)).shape == (2, 5)
