"""Residual classifiers for small images, from the papers: ResNet, wide ResNet and ResNeXt.

Each has three stages, of which the second and third halve height and width, followed by global
average pooling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from fedgen.errors import FedgenError

Architecture = Literal["resnet", "wide_resnet", "resnext"]
_DEPTHS = {"resnet": (6, 2), "wide_resnet": (6, 4), "resnext": (9, 2)}
"""Architecture -> (a, b): depths are a n + b."""
MakeBlock = Callable[[int, int, int], nn.Module]
"""(channels in, channels out, stride) -> block."""


def check_depth(architecture: Architecture, depth: int, key: str) -> None:
    """Raise FedgenError for a depth that the architecture does not have. ``key``: its setting."""
    factor, offset = _DEPTHS[architecture]
    if depth < factor + offset or (depth - offset) % factor:
        problem = f"{architecture} has {factor} n + {offset} layers, got {depth}"
        nearest = factor * max(1, round((depth - offset) / factor)) + offset
        raise FedgenError(key, problem, f"e.g. {nearest}")


def residual_network(
    shape: tuple[int, ...],
    classes: int,
    architecture: Architecture,
    depth: int,
    width: int = 1,
    groups: int = 1,
    dropout: float = 0.0,
) -> nn.Module:
    """Return a network of one of the architectures, each with those of the arguments that it
    has."""
    if architecture == "resnet":
        return resnet(shape, classes, depth)
    if architecture == "wide_resnet":
        return wide_resnet(shape, classes, depth, width, dropout)
    return resnext(shape, classes, depth, groups, width)


def resnet(shape: tuple[int, ...], classes: int, depth: int = 110) -> nn.Module:
    """Return a residual network of two convolutions per block, with 16, 32 and 64 channels (He et
    al., CVPR 2016, section 4.2), and projections where the number of channels changes.

    Args:
        shape: (channels, height, width).
        classes: number of labels.
        depth: 6 n + 2 layers.
    """
    stem = [_conv3x3(shape[0], 16), nn.BatchNorm2d(16), nn.ReLU()]
    return _network(stem, 16, (16, 32, 64), _blocks("resnet", depth), _basic_block, [], classes)


def wide_resnet(
    shape: tuple[int, ...], classes: int, depth: int = 40, width: int = 4, dropout: float = 0.3
) -> nn.Module:
    """Return a wide residual network: normalization before convolutions, and dropout between them
    (Zagoruyko, Komodakis, BMVC 2016, table 1).

    Args:
        shape, classes: see ``resnet``.
        depth: 6 n + 4 layers.
        width: multiplier of the 16, 32 and 64 channels.
        dropout: probability.
    """
    widths = (16 * width, 32 * width, 64 * width)
    head = [nn.BatchNorm2d(widths[-1]), nn.ReLU()]

    def block(inputs: int, outputs: int, stride: int) -> nn.Module:
        return _PreActivationBlock(inputs, outputs, stride, dropout)

    stem = [_conv3x3(shape[0], 16)]
    return _network(stem, 16, widths, _blocks("wide_resnet", depth), block, head, classes)


def resnext(
    shape: tuple[int, ...], classes: int, depth: int = 29, groups: int = 8, width: int = 4
) -> nn.Module:
    """Return a network of bottlenecks with grouped convolutions (Xie et al., CVPR 2017, section
    5.3). With the defaults, it is the paper's ResNeXt-29 with 8 groups of 64 channels.

    Args:
        shape, classes: see ``resnet``.
        depth: 9 n + 2 layers.
        groups: groups of each convolution (cardinality).
        width: multiplier of a block's 64, 128 and 256 output channels; its grouped convolution has
            ``groups`` times 64, 128 and 256 channels.
    """

    def block(inputs: int, outputs: int, stride: int) -> nn.Module:
        inner = groups * outputs // width
        layers = [
            *(nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(_conv3x3(inner, inner, stride, groups), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        ]
        return _ResidualBlock(nn.Sequential(*layers), _projection(inputs, outputs, stride))

    stem = [_conv3x3(shape[0], 64), nn.BatchNorm2d(64), nn.ReLU()]
    widths = (64 * width, 128 * width, 256 * width)
    return _network(stem, 64, widths, _blocks("resnext", depth), block, [], classes)


def _blocks(architecture: Architecture, depth: int) -> int:
    """Return the number of blocks per stage."""
    factor, offset = _DEPTHS[architecture]
    return (depth - offset) // factor


def _network(
    stem: list[nn.Module],
    inputs: int,
    widths: tuple[int, ...],
    blocks: int,
    block: MakeBlock,
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


def _conv3x3(inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, groups=groups, bias=False)


def _projection(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def _basic_block(inputs: int, outputs: int, stride: int) -> nn.Module:
    layers = [
        *(_conv3x3(inputs, outputs, stride), nn.BatchNorm2d(outputs), nn.ReLU()),
        *(_conv3x3(outputs, outputs), nn.BatchNorm2d(outputs)),
    ]
    return _ResidualBlock(nn.Sequential(*layers), _projection(inputs, outputs, stride))


class _ResidualBlock(nn.Module):
    def __init__(self, residual: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.residual, self.shortcut = residual, shortcut

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.shortcut(images) + self.residual(images))


class _PreActivationBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.activated = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU())
        self.residual = nn.Sequential(
            *(_conv3x3(inputs, outputs, stride), nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Dropout(dropout), _conv3x3(outputs, outputs)),
        )
        changes = inputs != outputs or stride > 1
        self.projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else None

    def forward(self, images: Tensor) -> Tensor:
        activated = self.activated(images)
        shortcut = images if self.projection is None else self.projection(activated)
        result: Tensor = shortcut + self.residual(activated)
        return result
