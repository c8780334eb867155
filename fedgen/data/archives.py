"""Read image archives in the format of ``dataset_tool`` (StyleGAN, EDM), which DPImageBench uses
too: a ``.zip`` of image files, and ``dataset.json`` with the label of each."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np

from fedgen.data.datasets import (
    Dataset,
    ExampleKeys,
    Images,
    Labels,
    build_dataset,
    data_root,
)
from fedgen.data.images import Channels, ReadOptions, Side, read_images
from fedgen.data.labels import to_numbers, validate_names
from fedgen.data.npz import moves_if_sorted
from fedgen.errors import FedgenError
from fedgen.storage.io import parse_json, read_member
from fedgen.verify import UNREADABLE

_LABELS = "dataset.json"
_MAX_LABELS, _MAX_IMAGE = 2**26, 2**26  # bytes
_MAX_FILES = 10**7


def archives(
    root: str | None,
    train: str,
    test: str,
    classes: int | None = None,
    labels: Sequence[str] | None = None,
    size: Side | None = None,
    channels: Channels | None = None,
    **_: object,
) -> Dataset:
    """Return the images of two archives.

    Args:
        train, test: the archives, relative to the working directory or to ``root``.
        classes: number of labels.
        labels: names of the labels, in order, in place of ``classes``.
        size: crop images to a square and resize them to this many pixels; None: unchanged.
        channels: 1: convert to grey; 3: convert to RGB; None: unchanged.

    Raises:
        FedgenError: for archives that are missing or malformed.
    """
    names = None if labels is None else validate_names(labels)
    if classes is None and names is None:
        raise FedgenError("data.classes", "is not set", "set it to the number of labels")
    count = len(names) if names is not None else int(classes or 0)
    options = ReadOptions(size, channels)
    (images, train_labels), (test_images, test_labels) = (
        _read(place, root, f"data.{key}", count, options, names)
        for key, place in (("train", train), ("test", test))
    )
    return build_dataset(
        Path(train).stem,
        images,
        train_labels,
        test_images,
        test_labels,
        None,
        count,
        ExampleKeys(f"a position in {_LABELS}", "its number", moves_if_sorted(train_labels, count)),
        names=names,
    )


@dataclass(frozen=True)
class _Member:
    """A file in an archive."""

    archive: zipfile.ZipFile
    name: str

    def open(self, mode: Literal["rb"], /) -> IO[bytes]:
        """Return its bytes as a stream."""
        return io.BytesIO(read_member(self.archive, self.name, _MAX_IMAGE))


def _read(
    place: str,
    root: str | None,
    key: str,
    classes: int,
    options: ReadOptions,
    names: Sequence[str] | None,
) -> tuple[Images, Labels]:
    """Return images (n, channels, height, width) and labels (n,) of an archive."""
    file = Path(place)
    try:
        file = file if file.exists() else data_root(root) / file
        with zipfile.ZipFile(file) as archive:
            if len(archive.namelist()) > _MAX_FILES:
                raise ValueError(f"more than {_MAX_FILES:,} files")
            pairs = _pairs(parse_json(read_member(archive, _LABELS, _MAX_LABELS).decode()))
            sources = [(name, _Member(archive, name)) for name, _ in pairs]
            if missing := {name for name, _ in pairs}.difference(archive.namelist()):
                raise ValueError(f"{_LABELS} lists {min(missing)[:100]!r}, which it lacks")
            images = read_images(file, sources, options, key=key).images
    except FileNotFoundError as error:
        remedy = "give a path relative to the working directory or to data.root"
        raise FedgenError(key, f"there is no {file}", remedy) from error
    except (KeyError, ValueError, *UNREADABLE) as error:
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        problem = f"{file} is not a readable archive of images ({reason})"
        raise FedgenError(key, problem, f"write it with {_LABELS}, as dataset_tool does") from error
    numbers = np.array([label for _, label in pairs])
    return images, to_numbers(f"{file}, {_LABELS}", numbers, classes, names)


def _pairs(listing: object) -> list[tuple[str, int]]:
    """Return name and label of each image, in order."""
    entries = listing.get("labels") if isinstance(listing, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{_LABELS} lists no labels")
    if not all(
        isinstance(entry, list)
        and len(entry) == 2
        and isinstance(entry[0], str)
        and type(entry[1]) is int
        for entry in entries
    ):
        raise ValueError(f"{_LABELS} must list pairs [name, label] with whole numbers")
    if len({name for name, _ in entries}) < len(entries):
        raise ValueError(f"{_LABELS} lists an image twice")
    return [(name, label) for name, label in entries]
