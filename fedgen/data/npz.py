"""Data sets in an ``.npz`` file.

| array | |
|---|---|
| ``train_images`` | uint8 (n, h, w), or (n, h, w, 3), or (n, channels, h, w) |
| ``train_labels`` | integers (n,) or (n, 1); or binary columns (n, k), some of which are chosen |
| ``test_images``, ``test_labels`` | the same |
| ``train_writer`` | optional (n,): the writer of each image |
| ``train_person`` | optional (n,): the person in each image; default: its writer |

Other arrays, e.g. ``val_images``, are ignored.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedgen.data.datasets import Dataset, ExampleKeys, Labels, as_images, build_dataset
from fedgen.data.labels import combine, identities, to_numbers
from fedgen.errors import FedgenError
from fedgen.storage.io import read_arrays


def from_npz(
    name: str,
    file: Path,
    classes: int | None,
    key: str = "data.root",
    names: Sequence[str] | None = None,
    columns: Sequence[int] | None = None,
    column_names: Sequence[str] | None = None,
) -> Dataset:
    """Return the data set in an npz file, as described in the module.

    Args:
        classes: number of labels; None: that of the combinations of ``columns``.
        key: setting that names the file.
        names: names of the labels, in order.
        columns: binary columns of labels (n, k), combined into one label; see
            ``labels.combine``.
        column_names: names of all columns of labels; None: their numbers.
    """
    arrays = npz_arrays(file, ["train_images", "train_labels", "test_images", "test_labels"], key)
    writers, persons = (
        None if array not in arrays else identities(f"{file}, {array}", arrays[array])
        for array in ("train_writer", "train_person")
    )
    if columns is None:
        assert classes is not None
        labels, test_labels = (
            to_numbers(f"{file}, {array}", arrays[array], classes, names)
            for array in ("train_labels", "test_labels")
        )
    else:
        split_labels = []
        for array in ("train_labels", "test_labels"):
            where = f"{file}, {array}"
            chosen = _select_columns(where, arrays[array], columns)
            shown = [column_names[column] if column_names else str(column) for column in columns]
            numbers, label_names = combine(where, shown, chosen, names)
            split_labels.append(numbers)
        labels, test_labels = split_labels
        names, classes = label_names, len(label_names)
    return build_dataset(
        name,
        as_images(file, arrays["train_images"]),
        labels,
        as_images(file, arrays["test_images"]),
        test_labels,
        writers,
        classes,
        ExampleKeys("a position in the file", "its number", moves_if_sorted(labels, classes)),
        persons=writers if persons is None else persons,
        names=names,
    )


def moves_if_sorted(labels: Labels, classes: int) -> str:
    """Return ``ExampleKeys.moves`` for a file: empty unless it is sorted by label."""
    if classes > 1 and len(labels) > classes and (np.diff(labels) >= 0).all():
        return "images are sorted by label (shuffle the file)"
    return ""


def _select_columns(
    where: str, labels: NDArray[np.generic], columns: Sequence[int]
) -> NDArray[np.generic]:
    """Return columns of labels, (n, k)."""
    if labels.ndim != 2 or not all(0 <= column < labels.shape[1] for column in columns):
        problem = f"{', '.join(map(str, columns))}: {where} has shape {labels.shape}"
        remedy = "leave it out"
        if labels.ndim == 2:
            remedy = f"choose columns from 0 to {labels.shape[1] - 1}"
        raise FedgenError("data.label", problem, remedy)
    return labels[:, list(columns)]


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
