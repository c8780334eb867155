"""A data set as the ``datasets`` library reads it: by its name on Hugging Face's hub, or a folder
in one of two layouts: ``train*.parquet`` and ``test*.parquet``, or folders of these names, with
images in them; or ``imagefolder``. Nothing else in a folder says what is read: no card, and no path
that leads out of it.

Each row has an image and a label, and may have columns that tell whose it is and whom it shows.
A record is a row of the split, or in ``imagefolder`` a file, identified by its name. Files are
ordered by a digest of the name: in the library's own order, by label, relabelling one image would
change the row numbers of others. The test split is ``test``, or
``validation``: none is drawn, since rows have no names that a draw could go by, and by their places
one row less would move others between the splits. No code comes with a data set: the library runs
none since version 4.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedgen.data.datasets import Dataset, Places, checked
from fedgen.data.images import check_conversion, read_images
from fedgen.data.labels import named, numbers, ordered
from fedgen.errors import FedgenError
from fedgen.files import digest

_SHOWN = 20  # names in a line
_TEST = ("test", "validation")


def hugging_face(
    path: str | None,
    subset: str | None = None,
    image: str = "image",
    label: str = "label",
    client: str | None = None,
    person: str | None = None,
    size: int | None = None,
    channels: int | None = None,
    labels: Sequence[str] | None = None,
    names: bool = True,
    **_: object,
) -> Dataset:
    """See the module.

    Args:
        path: a name on the hub, or a folder. A folder's rows are read where they are; what comes
            from the hub stays in the library's cache.
        subset: the library's name of a configuration, where there are several.
        image, label: columns.
        client: the column that tells whose a row is (``partition=by_folder``); None: nobody's.
        person: the column that tells whom a row shows; None: not said.
        size: images are cropped to a square and resized to this many pixels; None leaves them.
        channels: 1 makes all of them grey, 3 RGB; None leaves them.
        labels: names of the labels, in order: public; None: those of the data set's description.
        names: whether names of the description are published as the labels' names.

    Raises:
        FedgenError: for the first thing that is wrong.
    """
    if not path:
        problem, remedy = "is not set", "give data.path=NAME or a folder"
        raise FedgenError("data.path", problem, remedy)
    check_conversion(size, channels)
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
    asked = columns | {"client": None, "person": None}
    test = _rows(path, splits["test"], asked, size, channels)
    clients, persons = (
        None if columns[key] is None else _numbered(path, key, train[key])
        for key in ("client", "person")
    )
    order, places = _places(path, splits["train"], train["file"], of)
    return checked(
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
) -> tuple[NDArray[np.int64], Places]:
    """Return the order of rows (n,), and the places that result."""
    moves = ""
    if split.info.builder_name == "imagefolder":
        names = [None if file is None else os.path.basename(file) for file in files]  # noqa: PTH119
        if Path(path).expanduser().is_dir() and None not in names:
            digests = [digest(os.fsencode(str(name))) for name in names]
            order = sorted(range(len(names)), key=lambda row: (digests[row], labels[row]))
            if len(set(digests)) < len(digests):
                moves = "file names occur under several labels (rename the files)"
            return np.array(order), Places("a file by its name", "digests of names", moves)
        moves = "the library orders rows by their labels (copy the images, take data=folder)"
    elif len(np.unique(labels)) > 1 and (np.diff(labels) >= 0).all():
        moves = "rows are sorted by label (shuffle the rows of the data set)"
    return np.arange(len(labels)), Places("a row of the split", "its number", moves)


def _numbered(path: str, key: str, names: Sequence[Any]) -> NDArray[np.int64]:
    """Numbers of clients or persons, in the order of their names."""
    kinds = {type(name) for name in names}
    if len(kinds) > 1 or not kinds <= {str, int}:
        problem = f"{path} has rows that do not name one by a word or a whole number"
        raise FedgenError(f"data.{key}", problem, "name another column, or mend these rows")
    number = {name: at for at, name in enumerate(ordered(str(name) for name in names))}
    return np.array([number[str(name)] for name in names], dtype=np.int64)


def _splits(path: str, subset: str | None) -> Mapping[str, Any]:
    """The data set's ``train`` and ``test``."""
    datasets = library("data")
    here = Path(path).expanduser()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        if not here.is_dir():
            found = datasets.load_dataset(path, subset)
        else:  # its private rows are not copied into the library's cache
            found = datasets.load_dataset(*_layout(here), streaming=True)
    except _wrong(datasets) as error:
        said = " ".join(str(error).split())[:200]
        problem = f"{path} cannot be read as a data set ({said})"
        remedy = "give a folder, a name on Hugging Face's hub, and data.subset if it has several"
        raise FedgenError("data.path", problem, remedy) from error
    test = next((split for split in _TEST if split in found), None)
    if "train" not in found or test is None:
        problem = f"{path} has no splits train and test, but {', '.join(map(str, found)) or 'none'}"
        remedy = "split it by the library's train_test_split, or take data=folder"
        raise FedgenError("data.path", problem, remedy)
    return {"train": found["train"], "test": found[test]}


def _layout(place: Path) -> tuple[str, None, str | None, dict[str, list[str]] | None]:
    """Kind, name, folder and files of a folder, as ``load_dataset`` takes them."""
    tables = sorted(file for file in place.rglob("*.parquet") if _is_below(file, place))
    if not tables:
        return "imagefolder", None, str(place), None
    of = {
        split: [str(each) for each in tables if _starts(split, each.name, each.parent.name)]
        for split in ("train", *_TEST)
    }
    return "parquet", None, None, {split: files for split, files in of.items() if files}


def _starts(split: str, *names: str) -> bool:
    return any(name.startswith(split) for name in names)


def _is_below(file: Path, place: Path) -> bool:
    try:
        return place.resolve() in file.resolve().parents
    except (OSError, RuntimeError, ValueError):  # a link to itself, a name too long
        return False


def _wrong(datasets: Any) -> tuple[type[Exception], ...]:
    """What the library raises for data that are none."""
    from yaml import YAMLError

    own = (datasets.exceptions.DatasetsError, YAMLError)
    return (*own, OSError, ValueError, RuntimeError, TypeError, KeyError, ImportError)


def _names(path: str, feature: Any, told: Sequence[str] | None, by_folder: bool) -> list[str]:
    """The labels' names, which are public."""
    if told is not None:
        return named(told)
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
    return ordered({*names, *labels})


def _rows(
    path: str,
    split: Any,
    columns: Mapping[str, str | None],
    size: int | None,
    channels: int | None,
) -> dict[str, Any]:
    """Images (n, channels, h, w), their files' paths or None, and the other columns as lists."""
    datasets = library("data")
    wanted = {key: column for key, column in columns.items() if column is not None}
    feature = split.features[wanted["image"]]
    if isinstance(feature, datasets.Image):
        split = split.cast_column(wanted["image"], datasets.Image(decode=False))
    elif not _holds_bytes(feature):
        some = [name for name, kind in split.features.items() if _holds_bytes(kind)]
        problem = f"the column {wanted['image']!r} of {path} holds no images"
        remedy = f"name one of {', '.join(some[:_SHOWN])}" if some else "store files as bytes"
        raise FedgenError("data.image", problem, remedy)
    found: dict[str, Any] = {key: [] for key in wanted}
    try:
        for row in split:
            for key, column in wanted.items():
                found[key].append(row[column])
    except _wrong(datasets) as error:
        problem = f"{path} cannot be read to its end ({type(error).__name__})"
        raise FedgenError("data.path", problem, "copy it again") from error
    if not found["image"]:
        raise FedgenError("data.path", f"{path} has no rows", "give it some")
    place = Path(path).expanduser()
    cells = [{"bytes": each} if isinstance(each, bytes) else each or {} for each in found["image"]]
    sources = [(f"row {n}", _source(each, place)) for n, each in enumerate(cells)]
    files = [each.get("path") for each in cells]
    return found | {"image": read_images(path, sources, size, channels), "file": files}


def _holds_bytes(feature: Any) -> bool:
    """Whether a column holds encoded images: bytes, or a struct of bytes and perhaps a path."""
    datasets = library("data")
    if isinstance(feature, datasets.Image):
        return True
    inner = feature.get("bytes") if isinstance(feature, dict) else feature
    return isinstance(inner, datasets.Value) and inner.dtype in ("binary", "large_binary")


def _source(image: Mapping[str, Any], place: Path) -> Path | IO[bytes]:
    """An image's file; one that is nowhere, or out of the folder, is no image."""
    if image.get("path") is None or image.get("bytes") is not None:
        return io.BytesIO(image.get("bytes") or b"")
    file = Path(image["path"])
    return io.BytesIO() if place.is_dir() and not _is_below(file, place) else file


def _numbers(
    path: str, label: str, values: Sequence[Any], feature: Any, names: Sequence[str]
) -> NDArray[np.int64]:
    """Labels as class indices; a column holds these, or names."""
    own = getattr(feature, "names", None)
    if own is not None:  # numbers of the data set's own order of names; -1: none is known
        values = [str(own[v]) if v is not None and 0 <= v < len(own) else None for v in values]
    if missing := sum(value is None for value in values):
        problem = f"{path} has {missing:,} rows without a label"
        raise FedgenError("data.labels", problem, "remove these rows")
    if not all(isinstance(value, str | int | float) for value in values):
        problem = f"the column {label!r} of {path} holds neither names nor whole numbers"
        raise FedgenError("data.label", problem, "name a column of one label for each image")
    return numbers(path, np.array(values), len(names), names)


def library(key: str) -> Any:
    """The library, which is installed by an extra; ``key``: the setting that needs it."""
    try:
        import datasets
    except ImportError as error:
        problem = "needs the datasets library"
        raise FedgenError(key, problem, 'pip install "fedgen[hugging_face]"') from error
    return datasets
