"""Classifiers that evaluate samples.

Their weights are in channels-last format, in which pooling and convolutions are several times
faster on CPUs.
"""

from __future__ import annotations

import torch
from torch import nn


def small_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """GS-WGAN's downstream CNN: two convolutions of 32 and 64 kernels with ReLU and dropout.

    Args:
        shape: (channels, height, width).
        classes: number of labels.
    """
    convolutions = nn.Sequential(
        nn.Conv2d(shape[0], 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
    )
    features = convolutions(torch.zeros(1, *shape)).shape[1]
    net = nn.Sequential(convolutions, nn.Linear(features, classes))
    return net.to(memory_format=torch.channels_last)


class EvaluationNet(nn.Module):
    """Two convolutions and a hidden layer of 128, all with batch normalization.

    Args:
        shape: (channels, height, width).
        classes: number of labels.
    """

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        convolutions = nn.Sequential(
            *_normalized(nn.Conv2d(shape[0], 32, 3, padding=1), nn.BatchNorm2d(32)),
            nn.MaxPool2d(2),
            *_normalized(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64)),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
        )
        size = (shape[1] // 4) * (shape[2] // 4) * 64
        hidden = _normalized(nn.Linear(size, 128), nn.BatchNorm1d(128))
        self.features = nn.Sequential(convolutions, *hidden)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(128, classes))
        self.to(memory_format=torch.channels_last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (n, classes) of images (n, ...) in [0, 1]."""
        logits: torch.Tensor = self.head(self.features(images))
        return logits


def _normalized(layer: nn.Module, normalization: nn.Module) -> list[nn.Module]:
    return [layer, normalization, nn.ReLU()]
