"""Data sets that torchvision reads and downloads, in their official splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedgen.data.catalogue import TORCHVISION
from fedgen.data.datasets import (
    Dataset,
    ExampleKeys,
    Images,
    Labels,
    as_images,
    build_dataset,
    data_root,
)
from fedgen.data.images import Channels, Side, convert, convert_dataset, pixels_of
from fedgen.data.npz import from_npz, moves_if_sorted
from fedgen.errors import FedgenError
from fedgen.storage.io import user_umask

_BY_SPLIT = {"SVHN": "test", "STL10": "test", "PCAM": "test", "GTSRB": "test", "Food101": "test"}
_TEST_SPLITS = {**_BY_SPLIT, "Imagenette": "val"}
_LABEL_NAMES = ("CIFAR10", "CIFAR100", "STL10", "EuroSAT", "Food101", "Imagenette")
_EUROSAT_TRAINING = (23, 27)  # of 27,000 images, 23,000


def torchvision_set(
    root: str | None,
    name: str,
    size: Side | None = None,
    channels: Channels | None = None,
    **_: object,
) -> Dataset:
    """Return a data set from an ``.npz``, else from torchvision's files, else from its download.

    EuroSAT has no official split; this is the one of DPImageBench: a permutation of its 27,000
    images by torch's generator with seed 0, and 23,000 of them to train on.

    Args:
        name: key of ``catalogue.TORCHVISION``.
        size: crop images to a square and resize them to this many pixels; None: unchanged.
        channels: 1: convert to grey; 3: convert to RGB; None: unchanged.

    Raises:
        FedgenError: if there are no files, and for images that differ in size.
    """
    facts, folder = TORCHVISION[name], data_root(root)
    if (file := folder / f"{facts.file}.npz").exists():
        return convert_dataset(from_npz(facts.file, file, facts.classes), size, channels)
    try:
        with user_umask():
            parts = _load(name, folder)
    except (RuntimeError, OSError) as error:
        raise FedgenError(
            "data.root",
            f"{name} is neither in {folder} nor could it be downloaded ({_reason(error)})",
            f"put {facts.file}.npz or torchvision's files there, or connect to a network",
        ) from error
    try:
        arrays = [_read(part, name, size, channels) for part in parts]
    except (OSError, ValueError, IndexError, KeyError) as error:
        problem = f"{name} in {folder} cannot be read ({_reason(error)})"
        raise FedgenError("data.root", problem, "download it again") from error
    if name == "EuroSAT":
        arrays = _split_eurosat(*arrays[0])
    (images, labels), (test_images, test_labels) = arrays
    moves = "files are in the order of labels (use data=folder)"
    if hasattr(parts[0], "data"):
        moves = moves_if_sorted(labels, facts.classes)
    return build_dataset(
        facts.file,
        images,
        labels,
        test_images,
        test_labels,
        None,
        facts.classes,
        ExampleKeys("a position in torchvision's files", "its number", moves),
        names=_label_names(parts[0]) if name in _LABEL_NAMES else None,
    )


def _reason(error: Exception) -> str:
    """Return the first line of an error."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _load(name: str, folder: Path) -> list[Any]:
    """Return torchvision's data sets to train on and to test on; EuroSAT: all images."""
    import torchvision

    kind, _, split = name.partition("-")
    load = getattr(torchvision.datasets, kind)
    if name == "EuroSAT":
        return [load(str(folder), download=True)]
    if name in _TEST_SPLITS:
        splits = ("train", _TEST_SPLITS[name])
        return [load(str(folder), split=part, download=True) for part in splits]
    of_split = {"split": split} if split else {}
    return [
        load(str(folder), train=is_train, download=True, **of_split) for is_train in (True, False)
    ]


def _read(
    part: Any, name: str, size: Side | None, channels: Channels | None
) -> tuple[Images, Labels]:
    """Return images (n, channels, height, width) and labels (n,) of torchvision's data set."""
    if hasattr(part, "data"):
        images, labels = np.asarray(part.data), _array_labels(part)
        if name.startswith("EMNIST"):  # its files list pixels by column
            images = images.transpose(0, 2, 1)
        if name == "EMNIST-letters":
            labels = labels - 1  # its files number them from 1
        return convert(as_images(name, images), size, channels), labels
    pictures = [
        (pixels_of(picture, size, channels), int(label))
        for picture, label in (part[row] for row in range(len(part)))
    ]
    if len({pixels.shape for pixels, _ in pictures}) > 1:
        problem = f"is not set, and the images of {name} differ in size"
        raise FedgenError("data.size", problem, "set it, e.g. data.size=32")
    images = as_images(name, np.stack([pixels for pixels, _ in pictures]))
    return images, np.array([label for _, label in pictures], np.int64)


def _split_eurosat(images: Images, labels: Labels) -> list[tuple[Images, Labels]]:
    """Return the training and the test split."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).numpy()
    count = len(order) * _EUROSAT_TRAINING[0] // _EUROSAT_TRAINING[1]
    return [(images[rows], labels[rows]) for rows in np.split(order, [count])]


def _array_labels(part: Any) -> NDArray[np.int64]:
    labels = part.targets if hasattr(part, "targets") else part.labels
    return np.asarray(labels).astype(np.int64)


def _label_names(part: Any) -> list[str]:
    """Return the names of labels; Imagenette has several for each."""
    return [name if isinstance(name, str) else name[0] for name in part.classes]
