"""Inject a bug at some clients: the intensities of all their images are inverted, as in the
debugging task of Augenstein et al. (2020) and "GS-WGAN", section 5.4."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedgen.data.datasets import Dataset
from fedgen.data.partition import Index
from fedgen.randomness import RandomStreams


def sample_bugged_clients(
    clients: int, fraction: float, streams: RandomStreams
) -> NDArray[np.bool_]:
    """Return (clients,), true for clients with the bug: the rounded ``fraction``, by public
    streams."""
    order = torch.randperm(clients, generator=streams.public("corruption")).numpy()
    has_bug = np.zeros(clients, dtype=bool)
    has_bug[order[: round(fraction * clients)]] = True
    return has_bug


def invert_images(dataset: Dataset, shards: list[Index], has_bug: NDArray[np.bool_]) -> Dataset:
    """Return the data set as these clients hold it; the test split is unchanged."""
    if not has_bug.any():
        return dataset
    rows = np.concatenate([shard for shard, bug in zip(shards, has_bug, strict=True) if bug])
    images = dataset.images.copy()
    images[rows] = 255 - images[rows]
    return replace(dataset, images=images)
