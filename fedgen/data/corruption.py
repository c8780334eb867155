"""Plant a fault in the data of some clients: inverted intensities, as in Augenstein et al. (2020)
and section 5.4 of "GS-WGAN", or another fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedgen.config.schema import PlantedFault
from fedgen.data.datasets import Dataset, Images, Labels
from fedgen.data.partition import Index
from fedgen.errors import FedgenError
from fedgen.randomness import RandomStreams

_Corrupted = tuple[Images, Labels]


def _blurred(images: Images) -> Images:
    """Return the mean over each pixel and its eight neighbours."""
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge").astype(np.uint16)
    height, width = images.shape[2:]
    total = sum(
        padded[:, :, down : down + height, right : right + width]
        for down in range(3)
        for right in range(3)
    )
    return (np.asarray(total) // 9).astype(np.uint8)


def _repeated(images: Images, labels: Labels) -> Images:
    """Replace each image by the first image of the same label."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return images[first[inverse]]


FAULTS: dict[PlantedFault, Callable[[Images, Labels, int], _Corrupted]] = {
    "inverted": lambda images, labels, classes: (255 - images, labels),
    "rotated": lambda images, labels, classes: (np.rot90(images, 1, (2, 3)), labels),
    "mirrored": lambda images, labels, classes: (images[:, :, :, ::-1], labels),
    "labels_shifted": lambda images, labels, classes: (images, (labels + 1) % classes),
    "one_label": lambda images, labels, classes: (images, np.zeros_like(labels)),
    "black": lambda images, labels, classes: (np.zeros_like(images), labels),
    "darker": lambda images, labels, classes: (images // 16, labels),
    "blurred": lambda images, labels, classes: (_blurred(images), labels),
    "repeated": lambda images, labels, classes: (_repeated(images, labels), labels),
}
"""Name -> (images, labels of one client, number of labels) -> the same with the fault."""


def sample_bugged_clients(
    clients: int, fraction: float, streams: RandomStreams
) -> NDArray[np.bool_]:
    """Return (clients,), true for clients with the fault: the rounded ``fraction``, by public
    streams."""
    order = torch.randperm(clients, generator=streams.public("corruption")).numpy()
    has_bug = np.zeros(clients, dtype=bool)
    has_bug[order[: round(fraction * clients)]] = True
    return has_bug


def corrupt(
    dataset: Dataset, shards: list[Index], has_bug: NDArray[np.bool_], fault: PlantedFault
) -> Dataset:
    """Return the data set as these clients hold it; the test split is unchanged.

    Raises:
        FedgenError: if images to rotate are not square.
    """
    if not has_bug.any():
        return dataset
    _, height, width = dataset.shape
    if fault == "rotated" and height != width:
        problem = f"rotated needs square images, and these are {height} x {width}"
        raise FedgenError("corruption.fault", problem, "choose another")
    images, labels = dataset.images.copy(), dataset.labels.copy()
    for rows in (shard for shard, bug in zip(shards, has_bug, strict=True) if bug):
        images[rows], labels[rows] = FAULTS[fault](images[rows], labels[rows], dataset.classes)
    return replace(dataset, images=images, labels=labels)
