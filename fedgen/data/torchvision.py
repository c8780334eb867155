"""Data sets that torchvision reads and downloads, in their official splits."""

from __future__ import annotations

from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedgen.data.catalogue import TORCHVISION, facts_of
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

_TEST_SPLITS = dict.fromkeys(("SVHN", "STL10", "PCAM", "GTSRB", "Food101"), "test")
_TEST_SPLITS |= {"Imagenette": "val"}
_LABEL_NAMES = ("CIFAR10", "CIFAR100", "STL10", "EuroSAT", "Food101", "Imagenette")
_EUROSAT_TRAINING = (23, 27)  # 23,000 of 27,000 images


def torchvision_set(
    root: str | None,
    name: str,
    size: Side | None = None,
    channels: Channels | None = None,
    kind: str | None = None,
    **_: object,
) -> Dataset:
    """Return a data set from ``NAME.npz``, from torchvision's files, or by download, in this order.

    EuroSAT has no official split; DPImageBench's is used: a permutation of its 27,000 images by
    torch's generator with seed 0, of which the first 23,000 are the training split.

    Args:
        name: key of ``catalogue.TORCHVISION``.
        size: crop images to a square and resize them to this many pixels; None: unchanged.
        channels: 1: convert to grey; 3: convert to RGB; None: unchanged.
        kind: key in runs of 0.1.0, which used other names.

    Raises:
        FedgenError: if there are no files, and for images that differ in size.
    """
    name = kind or name
    facts, folder = facts_of(TORCHVISION, name), data_root(root)
    if (file := folder / f"{facts.file}.npz").exists():
        return convert_dataset(from_npz(facts.file, file, facts.classes), size, channels)
    if name == "PCAM" and find_spec("h5py") is None:
        raise FedgenError("data.name", "PCAM requires h5py", "pip install h5py")
    try:
        with user_umask():
            parts = _load(name, folder)
    except (RuntimeError, OSError, HTTPException) as error:
        raise FedgenError(
            "data.root",
            f"{name} is not in {folder}, and the download failed ({_reason(error)})",
            f"put {facts.file}.npz or torchvision's files there, or connect to a network",
        ) from error
    except MemoryError:
        raise
    except Exception as error:
        raise _damaged(name, folder, error) from error
    try:
        arrays = [_read(part, name, size, channels) for part in parts]
    except (FedgenError, MemoryError):
        raise
    except Exception as error:
        raise _damaged(name, folder, error) from error
    if name == "EuroSAT":
        arrays = _split_eurosat(*arrays[0])
    (images, labels), (test_images, test_labels) = arrays
    moves = "images are sorted by label (use data=folder)"
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


def _damaged(name: str, folder: Path, error: Exception) -> FedgenError:
    """Return the error for files that cannot be read: their parsers may raise anything."""
    problem = f"{name} in {folder} cannot be read ({_reason(error)})"
    return FedgenError("data.root", problem, "download it again")


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
    argument = {"split": split} if split else {}
    return [
        load(str(folder), train=is_train, download=True, **argument) for is_train in (True, False)
    ]


def _read(
    part: Any, name: str, size: Side | None, channels: Channels | None
) -> tuple[Images, Labels]:
    """Return images (n, channels, height, width) and labels (n,) of torchvision's data set."""
    if hasattr(part, "data"):
        images, labels = np.asarray(part.data), _array_labels(part)
        if name.startswith("EMNIST"):  # its files store images transposed
            images = images.transpose(0, 2, 1)
        if name == "EMNIST-letters":
            labels = labels - 1  # they start at 1
        return convert(as_images(name, images), size, channels), labels
    arrays: list[Images] = []
    numbers: list[int] = []
    for picture, label in (part[row] for row in range(len(part))):
        arrays.append(pixels_of(picture, size, channels))
        if arrays[-1].shape != arrays[0].shape:
            problem = f"is not set, but the images of {name} differ in size"
            raise FedgenError("data.size", problem, "set it, e.g. data.size=32")
        numbers.append(int(label))
    return as_images(name, np.stack(arrays)), np.array(numbers, np.int64)


def _split_eurosat(images: Images, labels: Labels) -> list[tuple[Images, Labels]]:
    """Return the training and the test split."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).numpy()
    count = len(order) * _EUROSAT_TRAINING[0] // _EUROSAT_TRAINING[1]
    return [(images[rows], labels[rows]) for rows in np.split(order, [count])]


def _array_labels(part: Any) -> NDArray[np.int64]:
    labels = part.targets if hasattr(part, "targets") else part.labels
    return np.asarray(labels).astype(np.int64)


def _label_names(part: Any) -> list[str]:
    """Return the names of labels; of Imagenette's synonyms, the first."""
    return [name if isinstance(name, str) else name[0] for name in part.classes]
