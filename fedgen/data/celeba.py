"""CelebA, from the user's own copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedgen.data.datasets import Dataset, ExampleKeys, Images, Labels, build_dataset, data_root
from fedgen.data.images import read_images
from fedgen.errors import FedgenError
from fedgen.storage.io import read_bounded

_MAX_LIST_BYTES = 2**26


def celeba(root: str | None, **_: object) -> Dataset:
    """Load CelebA at 32x32 with gender as the label, from the user's own copy in torchvision's
    layout: ``celeba/img_align_celeba/*.jpg``, ``celeba/list_attr_celeba.txt`` and
    ``celeba/list_eval_partition.txt``. The validation split is not used.

    Raises:
        FedgenError: if files are missing or malformed.
    """
    folder = data_root(root) / "celeba"
    try:
        names, male = _celeba_attribute(folder / "list_attr_celeba.txt", "Male")
        parts = dict(map(str.split, _lines(folder / "list_eval_partition.txt")))
        part = np.array([int(parts[name]) for name in names])
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

    def images_of(rows: NDArray[np.bool_]) -> Images:
        files = [(n, folder / "img_align_celeba" / n) for n in np.array(names)[rows].tolist()]
        return read_images(folder, files, 32, 3, key="data.root")

    train, test = part == 0, part == 2
    places = ExampleKeys("a line of list_attr_celeba.txt", "its number")
    return build_dataset(
        "celeba", images_of(train), male[train], images_of(test), male[test], None, 2, places
    )


def _celeba_attribute(file: Path, attribute: str) -> tuple[list[str], Labels]:
    lines = _lines(file)
    column = lines[1].split().index(attribute)
    rows = [line.split() for line in lines[2:] if line.strip()]
    values = np.array([int(row[1 + column] == "1") for row in rows], dtype=np.int64)
    return [row[0] for row in rows], values


def _lines(file: Path) -> list[str]:
    return read_bounded(file, _MAX_LIST_BYTES).decode().splitlines()
