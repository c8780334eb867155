"""Read Camelyon17 as distributed by WILDS (Koh et al., ICML 2021), from the user's copy: patches of
lymph nodes from five hospitals."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from fedgen.data.datasets import Dataset, ExampleKeys, build_dataset, data_root
from fedgen.data.images import Channels, ReadOptions, Side, read_images
from fedgen.data.npz import moves_if_sorted
from fedgen.errors import FedgenError
from fedgen.storage.io import read_bounded

_VALIDATION_CENTER, _TEST_CENTER = 1, 2
_COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "center", "split")
_MAX_TABLE_BYTES = 2**27


def camelyon17(
    root: str | None, size: Side = 32, channels: Channels | None = None, **_: object
) -> Dataset:
    """Load ``camelyon17_v1.0/metadata.csv`` and ``patches/`` in the official split: training images
    of three hospitals, test images of a fourth. The two validation splits are not used.

    Hospitals are clients (``partition=by_folder``), and patients are persons.

    Args:
        size: side of the images, resized from 96 pixels.
        channels: 1: convert to grey; 3 or None: RGB.

    Raises:
        FedgenError: if files are missing or malformed.
    """
    folder = data_root(root) / "camelyon17_v1.0"
    try:
        patients, nodes, xs, ys, tumor, centers, splits = _columns(folder / "metadata.csv")
    except (OSError, ValueError, TypeError, OverflowError, KeyError, csv.Error) as error:
        reason = f"no column {error}" if isinstance(error, KeyError) else error
        problem = f"{folder / 'metadata.csv'} cannot be read ({reason})"
        remedy = "put WILDS' copy there: metadata.csv and patches/"
        raise FedgenError("data.root", problem, remedy) from error
    is_train = (splits == 0) & ~np.isin(centers, (_VALIDATION_CENTER, _TEST_CENTER))
    parts = []
    for rows in (np.flatnonzero(is_train), np.flatnonzero(centers == _TEST_CENTER)):
        names = [
            f"patches/patient_{patients[row]:03d}_node_{nodes[row]}/"
            f"patch_patient_{patients[row]:03d}_node_{nodes[row]}_x_{xs[row]}_y_{ys[row]}.png"
            for row in rows.tolist()
        ]
        files = [(name, folder / name) for name in names]
        if not files:
            problem = f"{folder / 'metadata.csv'} lists no images to train on, or none to test on"
            raise FedgenError("data.root", problem, "download it again")
        options = ReadOptions(size, channels or 3)
        parts.append((read_images(folder, files, options, key="data.root").images, tumor[rows]))
    (images, labels), (test_images, test_labels) = parts
    return build_dataset(
        "camelyon17",
        images,
        labels,
        test_images,
        test_labels,
        np.unique(centers[is_train], return_inverse=True)[1],
        2,
        ExampleKeys("a line of metadata.csv", "its number", moves_if_sorted(labels, 2)),
        persons=patients[is_train],
        names=["normal", "tumor"],
    )


def _columns(file: Path) -> list[np.ndarray]:
    """Return the columns of the table as whole numbers, each (n,)."""
    lines = read_bounded(file, _MAX_TABLE_BYTES).decode().splitlines()
    rows = list(csv.DictReader(lines))
    return [np.array([int(row[column]) for row in rows], np.int64) for column in _COLUMNS]
