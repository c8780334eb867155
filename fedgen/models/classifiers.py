"""Classifiers that judge samples."""

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
    return nn.Sequential(convolutions, nn.Linear(features, classes))
