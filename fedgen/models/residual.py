"""Residual classifiers for small images, from the papers: ResNet, wide ResNet and ResNeXt.

All have three stages, of which the second and third halve the sides, then a global average.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

Block = Callable[[int, int, int], nn.Module]
"""(channels in, channels out, stride) -> block."""


def resnet(shape: tuple[int, ...], classes: int, depth: int = 110) -> nn.Module:
    """Return a residual network of two convolutions per block, with 16, 32 and 64 channels (He et
    al., CVPR 2016, section 4.2), and projections where the number of channels changes.

    Args:
        shape: (channels, height, width).
        classes: number of labels.
        depth: 6 n + 2 layers.
    """
    stem = [_convolution(shape[0], 16), nn.BatchNorm2d(16), nn.ReLU()]
    return _network(stem, 16, (16, 32, 64), _blocks(depth, 2, 6), _basic, [], classes)


def wide_resnet(
    shape: tuple[int, ...], classes: int, depth: int = 40, width: int = 4, dropout: float = 0.3
) -> nn.Module:
    """Return a wide residual network: normalization before convolutions, and dropout between them
    (Zagoruyko, Komodakis, BMVC 2016, table 1).

    Args:
        shape, classes: see ``resnet``.
        depth: 6 n + 4 layers.
        width: factor of 16, 32 and 64 channels.
        dropout: probability.
    """
    widths = (16 * width, 32 * width, 64 * width)
    head = [nn.BatchNorm2d(widths[-1]), nn.ReLU()]

    def block(inputs: int, outputs: int, stride: int) -> nn.Module:
        return _Preactivated(inputs, outputs, stride, dropout)

    stem = [_convolution(shape[0], 16)]
    return _network(stem, 16, widths, _blocks(depth, 4, 6), block, head, classes)


def resnext(
    shape: tuple[int, ...], classes: int, depth: int = 29, groups: int = 8, width: int = 4
) -> nn.Module:
    """Return a network of bottlenecks with grouped convolutions (Xie et al., CVPR 2017, section
    5.3). With the defaults, it is the paper's ResNeXt-29 with 8 groups of 64 channels.

    Args:
        shape, classes: see ``resnet``.
        depth: 9 n + 2 layers.
        groups: groups of each convolution (cardinality).
        width: factor of 64, 128 and 256 channels after each block; those of the grouped convolution
            are ``groups`` times 64, 128 and 256.
    """

    def block(inputs: int, outputs: int, stride: int) -> nn.Module:
        inner = groups * outputs // width
        layers = [
            *(nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(_convolution(inner, inner, stride, groups), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        ]
        return _Residual(nn.Sequential(*layers), _projection(inputs, outputs, stride))

    stem = [_convolution(shape[0], 64), nn.BatchNorm2d(64), nn.ReLU()]
    widths = (64 * width, 128 * width, 256 * width)
    return _network(stem, 64, widths, (depth - 2) // 9, block, [], classes)


def _blocks(depth: int, offset: int, layers: int) -> int:
    return (depth - offset) // layers


def _network(
    stem: list[nn.Module],
    inputs: int,
    widths: tuple[int, ...],
    blocks: int,
    block: Block,
    head: list[nn.Module],
    classes: int,
) -> nn.Module:
    layers = list(stem)
    for stage, width in enumerate(widths):
        for number in range(blocks):
            stride = 2 if stage and not number else 1
            layers.append(block(inputs, width, stride))
            inputs = width
    layers += [*head, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    net = nn.Sequential(*layers)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):  # He et al., ICCV 2015
            fan_out = math.prod(module.kernel_size) * module.out_channels
            nn.init.normal_(module.weight, 0.0, math.sqrt(2 / fan_out))
    return net.to(memory_format=torch.channels_last)


def _convolution(inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, groups=groups, bias=False)


def _projection(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def _basic(inputs: int, outputs: int, stride: int) -> nn.Module:
    layers = [
        *(_convolution(inputs, outputs, stride), nn.BatchNorm2d(outputs), nn.ReLU()),
        *(_convolution(outputs, outputs), nn.BatchNorm2d(outputs)),
    ]
    return _Residual(nn.Sequential(*layers), _projection(inputs, outputs, stride))


class _Residual(nn.Module):
    def __init__(self, residual: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.residual, self.shortcut = residual, shortcut

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.shortcut(images) + self.residual(images))


class _Preactivated(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.activated = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU())
        self.residual = nn.Sequential(
            *(_convolution(inputs, outputs, stride), nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Dropout(dropout), _convolution(outputs, outputs)),
        )
        changes = inputs != outputs or stride > 1
        self.projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else None

    def forward(self, images: Tensor) -> Tensor:
        activated = self.activated(images)
        shortcut = images if self.projection is None else self.projection(activated)
        result: Tensor = shortcut + self.residual(activated)
        return result
