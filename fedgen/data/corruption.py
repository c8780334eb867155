"""A bug of some clients: the intensities of all their images are inverted, as in the debugging task
of Augenstein et al. (2020) and "GS-WGAN", section 5.4."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedgen.coins import Coins
from fedgen.data.datasets import Dataset
from fedgen.data.partition import Index


def with_the_bug(clients: int, fraction: float, coins: Coins) -> NDArray[np.bool_]:
    """(clients,) who has it: the rounded ``fraction`` of all, by public coins."""
    order = torch.randperm(clients, generator=coins.public("corruption")).numpy()
    found = np.zeros(clients, dtype=bool)
    found[order[: round(fraction * clients)]] = True
    return found


def plant_flip(dataset: Dataset, shards: list[Index], bugged: NDArray[np.bool_]) -> Dataset:
    """The data set as these clients hold it; its test split stays."""
    if not bugged.any():
        return dataset
    rows = np.concatenate([shard for shard, bug in zip(shards, bugged, strict=True) if bug])
    images = dataset.images.copy()
    images[rows] = 255 - images[rows]
    return replace(dataset, images=images)
