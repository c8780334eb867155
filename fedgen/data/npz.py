"""Data sets in an ``.npz`` file: ``train_images`` (n, h, w) or (n, h, w, 3) uint8, ``train_labels``
(n,) integers, and the same with ``test_``; optional ``train_writer`` (n,), the writer of each
image, and ``train_person`` (n,), the person in it; default: its writer."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedgen.data.datasets import Dataset, ExampleKeys, as_images, build_dataset
from fedgen.data.labels import identities, to_numbers
from fedgen.errors import FedgenError
from fedgen.storage.io import read_arrays


def from_npz(
    name: str,
    file: Path,
    classes: int,
    key: str = "data.root",
    names: Sequence[str] | None = None,
) -> Dataset:
    """Return the data set in an npz file, as described in the module.

    Args:
        key: setting that names the file.
        names: names of the labels, in order.
    """
    arrays = npz_arrays(file, ["train_images", "train_labels", "test_images", "test_labels"], key)
    writers, persons = (
        None if name not in arrays else identities(f"{file}, {name}", arrays[name])
        for name in ("train_writer", "train_person")
    )
    labels, test_labels = (
        to_numbers(f"{file}, {name}", arrays[name], classes, names)
        for name in ("train_labels", "test_labels")
    )
    moves = ""
    if classes > 1 and len(labels) > classes and (np.diff(labels) >= 0).all():
        moves = "images are sorted by label (shuffle the file)"
    return build_dataset(
        name,
        as_images(file, arrays["train_images"]),
        labels,
        as_images(file, arrays["test_images"]),
        test_labels,
        writers,
        classes,
        ExampleKeys("a position in the file", "its number", moves),
        persons=writers if persons is None else persons,
        names=names,
    )


def npz_arrays(
    file: Path, needed: list[str], key: str = "data.root"
) -> dict[str, NDArray[np.generic]]:
    """Return the arrays of an npz file, without unpickling."""
    try:
        with file.open("rb") as opened:
            arrays = read_arrays(opened)
    except MemoryError as error:
        raise FedgenError(key, f"{file}: {error}", "take part of it") from error
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise FedgenError(
            key, f"{file} is not a readable npz file ({error})", "write it anew"
        ) from error
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise FedgenError(
            key, f"{file} lacks {', '.join(missing)}", f"it needs {', '.join(needed)}"
        )
    if any(arrays[name].size == 0 for name in needed):
        raise FedgenError(key, f"{file} has no images", "give it some")
    return arrays
