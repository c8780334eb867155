"""Data sets read by the ``datasets`` library: by name on the Hugging Face hub, or a folder in one
of two layouts: ``train*.parquet`` and ``test*.parquet``, or folders with these names that contain
images; or ``imagefolder``. Nothing else in a folder determines what is read: neither a card nor a
path that leads outside.

Each row has an image and a label, and may have columns for its client and its person. A record is a
row of the split, or in ``imagefolder`` a file, identified by its name. Files are ordered by a
digest of the name: in the order of the library, by label, relabelling one image would change the
positions of others. The test split is ``test``, or ``validation``: none is sampled, because rows
have no names by which to sample, and by position one row less would move others between the splits.
No code of a data set is executed: the library has not supported it since version 4.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedgen.data.datasets import Dataset, ExampleKeys, build_dataset
from fedgen.data.images import Channels, ReadOptions, Side, read_images
from fedgen.data.labels import sort_names, to_numbers, validate_names
from fedgen.errors import FedgenError
from fedgen.storage.io import digest

_SHOWN = 20  # names per line
_TEST = ("test", "validation")


def hugging_face(
    path: str | None,
    subset: str | None = None,
    image: str = "image",
    label: str = "label",
    client: str | None = None,
    person: str | None = None,
    size: Side | None = None,
    channels: Channels | None = None,
    labels: Sequence[str] | None = None,
    names: bool = True,
    **_: object,
) -> Dataset:
    """Read a data set, as described in the module.

    Args:
        path: name on the hub, or a folder. A folder is read in place; data from the hub are kept in
            the cache of the library.
        subset: configuration, if the data set has several.
        image, label: names of columns.
        client: column of clients (``partition=by_folder``); None: none.
        person: column of persons; None: none.
        size: crop images to a square and resize them to this many pixels; None: unchanged.
        channels: 1: convert to grey; 3: convert to RGB; None: unchanged.
        labels: public names of the labels, in order; None: those of the description of the data
            set.
        names: whether names in the description are published as names of labels.

    Raises:
        FedgenError: for the first problem.
    """
    if not path:
        problem, remedy = "is not set", "give data.path=NAME or a folder"
        raise FedgenError("data.path", problem, remedy)
    splits = _splits(path, subset)
    features = splits["train"].features or {}
    columns = {"image": image, "label": label, "client": client, "person": person}
    for key, column in columns.items():
        if column is not None and column not in features:
            problem = f"{path} has no column {column!r}"
            remedy = f"name one of {', '.join(list(features)[:_SHOWN])}"
            raise FedgenError(f"data.{key}", problem, remedy)
    by_folder = splits["train"].info.builder_name == "imagefolder"
    label_names = _names(path, features[label], labels, by_folder)
    train = _rows(path, splits["train"], columns, size, channels)
    of = _numbers(path, label, train["label"], features[label], label_names)
    test_columns = columns | {"client": None, "person": None}
    test = _rows(path, splits["test"], test_columns, size, channels)
    clients, persons = (
        None if columns[key] is None else _numbered(path, key, train[key])
        for key in ("client", "person")
    )
    order, places = _places(path, splits["train"], train["file"], of)
    return build_dataset(
        "hugging_face",
        train["image"][order],
        of[order],
        test["image"],
        _numbers(path, label, test["label"], features[label], label_names),
        None if clients is None else clients[order],
        len(label_names),
        places,
        None if persons is None else persons[order],
        names=label_names if labels is not None or names else None,
    )


def _places(
    path: str, split: Any, files: Sequence[str | None], labels: NDArray[np.int64]
) -> tuple[NDArray[np.int64], ExampleKeys]:
    """Return the order of records (n,), and their ``ExampleKeys``."""
    moves = ""
    if split.info.builder_name == "imagefolder":
        names = [None if file is None else os.path.basename(file) for file in files]  # noqa: PTH119
        if Path(path).expanduser().is_dir() and None not in names:
            digests = [digest(os.fsencode(str(name))) for name in names]
            order = sorted(range(len(names)), key=lambda row: (digests[row], labels[row]))
            if len(set(digests)) < len(digests):
                moves = "file names occur under several labels (rename the files)"
            return np.array(order), ExampleKeys("a file by its name", "digests of names", moves)
        moves = "the library sorts images by label (copy the images, use data=folder)"
    elif len(np.unique(labels)) > 1 and (np.diff(labels) >= 0).all():
        moves = "images are sorted by label (shuffle the data set)"
    return np.arange(len(labels)), ExampleKeys("a position in the split", "its number", moves)


def _numbered(path: str, key: str, names: Sequence[Any]) -> NDArray[np.int64]:
    """Return numbers of clients or persons, in the order of their names."""
    kinds = {type(name) for name in names}
    if len(kinds) > 1 or not kinds <= {str, int}:
        problem = f"{path} has values that are neither text nor integers"
        raise FedgenError(f"data.{key}", problem, "choose another column, or correct these values")
    number = {name: at for at, name in enumerate(sort_names(str(name) for name in names))}
    return np.array([number[str(name)] for name in names], dtype=np.int64)


def _splits(path: str, subset: str | None) -> Mapping[str, Any]:
    """Return ``train`` and ``test`` of the data set."""
    datasets = library("data")
    local_path = Path(path).expanduser()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        if not local_path.is_dir():
            splits = datasets.load_dataset(path, subset)
        else:  # private records are not copied to the cache
            splits = datasets.load_dataset(*_layout(local_path), streaming=True)
    except _wrong(datasets) as error:
        message = " ".join(str(error).split())[:200]
        problem = f"{path} cannot be read as a data set ({message})"
        remedy = "give a folder, a name on Hugging Face's hub, and data.subset if it has several"
        raise FedgenError("data.path", problem, remedy) from error
    test = next((split for split in _TEST if split in splits), None)
    if "train" not in splits or test is None:
        problem = (
            f"{path} needs splits train and test, but has {', '.join(map(str, splits)) or 'none'}"
        )
        remedy = "split it by the library's train_test_split, or take data=folder"
        raise FedgenError("data.path", problem, remedy)
    return {"train": splits["train"], "test": splits[test]}


def _layout(place: Path) -> tuple[str, None, str | None, dict[str, list[str]] | None]:
    """Return kind, name, folder and files of a folder, as arguments of ``load_dataset``."""
    tables = sorted(file for file in place.rglob("*.parquet") if _is_below(file, place))
    if not tables:
        return "imagefolder", None, str(place), None
    of = {
        split: [str(table) for table in tables if _starts(split, table.name, table.parent.name)]
        for split in ("train", *_TEST)
    }
    return "parquet", None, None, {split: files for split, files in of.items() if files}


def _starts(split: str, *names: str) -> bool:
    return any(name.startswith(split) for name in names)


def _is_below(file: Path, place: Path) -> bool:
    try:
        return place.resolve() in file.resolve().parents
    except (OSError, RuntimeError, ValueError):  # e.g. a circular link, or too long a name
        return False


def _wrong(datasets: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions that the library raises for invalid data."""
    from yaml import YAMLError

    library_errors = (datasets.exceptions.DatasetsError, YAMLError)
    return (*library_errors, OSError, ValueError, RuntimeError, TypeError, KeyError, ImportError)


def _names(
    path: str, feature: Any, label_names: Sequence[str] | None, by_folder: bool
) -> list[str]:
    """Return the public names of labels."""
    if label_names is not None:
        return validate_names(label_names)
    described = getattr(feature, "names", None)
    if not described:
        problem = f"is not set, and {path} does not describe its labels"
        raise FedgenError("data.labels", problem, "name them in order: they are public")
    names = [str(name) for name in described]
    if not by_folder:
        return names
    # the library omits empty folders: the published number of labels would depend on one record
    folders = [path for path in Path(path).expanduser().rglob("*") if path.is_dir()]
    parents = {folder.parent for folder in folders if folder.name in names}
    labels = [f.name for f in folders if f.parent in parents and f.name[0] not in "._"]
    return sort_names({*names, *labels})


def _rows(
    path: str,
    split: Any,
    columns: Mapping[str, str | None],
    size: int | None,
    channels: int | None,
) -> dict[str, Any]:
    """Return images (n, channels, h, w), the paths of their files or None, and the other columns as
    lists."""
    datasets = library("data")
    wanted = {key: column for key, column in columns.items() if column is not None}
    feature = split.features[wanted["image"]]
    if isinstance(feature, datasets.Image):
        split = split.cast_column(wanted["image"], datasets.Image(decode=False))
    elif not _holds_bytes(feature):
        image_columns = [name for name, kind in split.features.items() if _holds_bytes(kind)]
        problem = f"the column {wanted['image']!r} of {path} contains no images"
        remedy = (
            f"name one of {', '.join(image_columns[:_SHOWN])}"
            if image_columns
            else "store files as bytes"
        )
        raise FedgenError("data.image", problem, remedy)
    values: dict[str, Any] = {key: [] for key in wanted}
    try:
        for row in split:
            for key, column in wanted.items():
                values[key].append(row[column])
    except _wrong(datasets) as error:
        problem = f"{path} cannot be read to its end ({type(error).__name__})"
        raise FedgenError("data.path", problem, "copy it again") from error
    if not values["image"]:
        raise FedgenError("data.path", f"{path} has no images", "give it some")
    place = Path(path).expanduser()
    cells = [
        {"bytes": value} if isinstance(value, bytes) else value or {} for value in values["image"]
    ]
    sources = [(f"row {n}", _source(cell, place)) for n, cell in enumerate(cells)]
    files = [cell.get("path") for cell in cells]
    images = read_images(path, sources, ReadOptions(size, channels)).images
    return values | {"image": images, "file": files}


def _holds_bytes(feature: Any) -> bool:
    """Return whether a column contains encoded images: bytes, or a struct of bytes and optionally a
    path."""
    datasets = library("data")
    if isinstance(feature, datasets.Image):
        return True
    inner = feature.get("bytes") if isinstance(feature, dict) else feature
    return isinstance(inner, datasets.Value) and inner.dtype in ("binary", "large_binary")


def _source(image: Mapping[str, Any], place: Path) -> Path | IO[bytes]:
    """Return the file of an image; a missing file, or one outside the folder, is invalid."""
    if image.get("path") is None or image.get("bytes") is not None:
        return io.BytesIO(image.get("bytes") or b"")
    file = Path(image["path"])
    return io.BytesIO() if place.is_dir() and not _is_below(file, place) else file


def _numbers(
    path: str, label: str, values: Sequence[Any], feature: Any, names: Sequence[str]
) -> NDArray[np.int64]:
    """Return labels as class indices; a column contains these, or names."""
    described = getattr(feature, "names", None)
    if described is not None:  # indices into its own names; -1: unknown
        values = [
            str(described[v]) if v is not None and 0 <= v < len(described) else None for v in values
        ]
    if missing := sum(value is None for value in values):
        problem = f"{path} has {missing:,} images without a label"
        raise FedgenError("data.labels", problem, "remove these images")
    if not all(isinstance(value, str | int | float) for value in values):
        problem = f"the column {label!r} of {path} contains neither names nor integers"
        raise FedgenError("data.label", problem, "choose a column with one label per image")
    return to_numbers(path, np.array(values), len(names), names)


def library(key: str) -> Any:
    """Return the library, which is an optional dependency.

    Args:
        key: setting that requires it.
    """
    try:
        import datasets
    except ImportError as error:
        problem = "needs the datasets library"
        raise FedgenError(key, problem, 'pip install "fedgen[hugging_face]"') from error
    return datasets
