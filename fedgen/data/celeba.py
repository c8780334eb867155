"""CelebA, from the user's own copy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedgen.data.datasets import Dataset, ExampleKeys, Images, build_dataset, data_root
from fedgen.data.images import ReadOptions, Side, read_images
from fedgen.data.labels import combine
from fedgen.errors import FedgenError
from fedgen.storage.io import read_bounded

_MAX_LIST_BYTES = 2**26


def celeba(
    root: str | None, label: str | Sequence[str] = "Male", size: Side = 32, **_: object
) -> Dataset:
    """Load CelebA from the user's own copy in torchvision's layout:
    ``celeba/img_align_celeba/*.jpg``, ``celeba/list_attr_celeba.txt`` and
    ``celeba/list_eval_partition.txt``. The validation split is not used.

    Args:
        label: attribute, e.g. gender, or several: all combinations (``labels.combine``).
        size: side of the images, which are cropped to the central square.

    Raises:
        FedgenError: if files are missing or malformed, or for an unknown attribute.
    """
    folder = data_root(root) / "celeba"
    attributes = [label] if isinstance(label, str) else list(label)
    try:
        names, attribute_names, values = _attributes(folder / "list_attr_celeba.txt")
        splits = dict(map(str.split, _lines(folder / "list_eval_partition.txt")))
        part = np.array([int(splits[name]) for name in names])
        if any(Path(name).name != name for name in names):
            raise ValueError("an image name contains a path")
        if not {0, 2} <= set(part.tolist()):
            raise ValueError("a split is empty")
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise FedgenError(
            "data.root",
            f"no readable CelebA in {folder} ({type(error).__name__})",
            "put your own copy there: img_align_celeba/, list_attr_celeba.txt, "
            "list_eval_partition.txt",
        ) from error

    if unknown := [attribute for attribute in attributes if attribute not in attribute_names]:
        problem = f"CelebA has no attribute {', '.join(unknown)}"
        raise FedgenError("data.label", problem, f"choose from {', '.join(attribute_names)}")
    columns = values[:, [attribute_names.index(attribute) for attribute in attributes]]
    combined, labels = combine("CelebA", attributes, columns, None)

    def images_of(rows: NDArray[np.bool_]) -> Images:
        files = [(n, folder / "img_align_celeba" / n) for n in np.array(names)[rows].tolist()]
        return read_images(folder, files, ReadOptions(size, 3), key="data.root").images

    train, test = part == 0, part == 2
    places = ExampleKeys("a line of list_attr_celeba.txt", "its number")
    parts = images_of(train), combined[train], images_of(test), combined[test]
    return build_dataset("celeba", *parts, None, len(labels), places, names=labels)


def _attributes(file: Path) -> tuple[list[str], list[str], NDArray[np.bool_]]:
    """Return the names of files (n,) and attributes (k,), and a mask of the attributes (n, k)."""
    lines = _lines(file)
    attributes = lines[1].split()
    rows = [line.split() for line in lines[2:] if line.strip()]
    values = np.array([row[1:] for row in rows])
    if values.shape != (len(rows), len(attributes)):
        raise ValueError("a line does not list all attributes")
    return [row[0] for row in rows], attributes, values == "1"


def _lines(file: Path) -> list[str]:
    return read_bounded(file, _MAX_LIST_BYTES).decode().splitlines()
