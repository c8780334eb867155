"""A user's own images: an ``.npz``, or folders as people have them.

| layout | clients |
|---|---|
| ``PATH/LABEL/*.png`` | none: one set of images |
| ``PATH/CLIENT/LABEL/*.png`` | the folders in it |
| several paths, each ``LABEL/*.png`` | the paths, in this order |
| ``PATH.csv``, ``PATH.parquet`` (``tables.py``) | its column ``client``, if it has one |

Inside of each, ``train/`` and ``test/`` may come before the labels. Where nobody has a test split,
a tenth of the images is one, by public coins that are keyed by each image's name. Files and folders
whose names begin with a dot are passed over, as is what file managers leave behind.

A record is told by its client and its file name, whatever its label: rows are in the order of these
names' digests, so that an image that changes, or changes its label, moves no other, nor does one
more or less. Where a client has one file name under several labels, their order is that of the
labels (``Places.moves``): an image of another label is another place then, which methods
that protect replaced records by their place refuse.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedgen.coins import Coins
from fedgen.data.datasets import (
    Dataset,
    Places,
    checked,
    from_npz,
    root_of,
)
from fedgen.data.images import SHOWN, check_conversion, read_images, some_of
from fedgen.data.labels import known, named, ordered
from fedgen.data.tables import TABLES, Listed, Record, listed_in
from fedgen.errors import FedgenError
from fedgen.files import digest

_LEFT_BEHIND = {"__MACOSX", "Thumbs.db", "desktop.ini"}


def folder(
    coins: Coins,
    root: str | None,
    path: str | Sequence[str] | None,
    size: int | None = None,
    channels: int | None = None,
    classes: int | None = None,
    labels: Sequence[str] | None = None,
    names: bool = True,
    **_: object,
) -> Dataset:
    """A user's own images, as in the module's text.

    Args:
        path: a file, a table or a folder, or several folders, from the working directory or below
            ``root``.
        size: images are cropped to a square and resized to this many pixels; None leaves them.
        channels: 1 makes all of them grey, 3 RGB; None leaves them.
        classes: number of labels of an ``.npz``; a public number, not one to be read off the rows.
        labels: names of the labels, in order: public, also where the images of others, elsewhere,
            have the same ones and some are missing here; None: names of the folders. The set of
            folders is public, empty ones included.
        names: whether the folders' names are published as names of the labels.

    Raises:
        FedgenError: for what is wrong with them, with the files that it is about; of folders first,
            of images all at once.
    """
    paths = [path] if isinstance(path, str) else list(path or [])
    if not all(paths) or not paths:
        raise FedgenError("data.path", "is not set", "give data.path=FILE.npz or a folder")
    check_conversion(size, channels)
    places = [_place(each, root) for each in paths]
    if len(places) == 1 and places[0].suffix in TABLES and not places[0].is_dir():
        listed = listed_in(places[0], labels)
    elif len(places) == 1 and places[0].is_file():
        if places[0].suffix != ".npz":
            problem = f"{places[0]} is no folder, no table (.csv, .parquet) and no .npz"
            raise FedgenError("data.path", problem, "give one of these")
        if labels is not None:
            told = len(named(labels))
            if classes not in (None, told):
                raise FedgenError("data.classes", f"is {classes}, of {told} labels", "leave it out")
            classes = told
            labels = named(labels)
        if classes is None:
            problem, remedy = "is not set", "give the number of labels of the npz, or data.labels"
            raise FedgenError("data.classes", problem, remedy)
        return from_npz("folder", places[0], classes, "data.path", labels)
    else:
        listed = _listed(places, labels)
    records = sorted(listed.records, key=lambda r: (digest(os.fsencode(r.name)), r.label))
    sources = [(str(record.path), record.path) for record in records]
    images = read_images(records[0].path.parent, sources, size, channels)
    test = np.array([_is_test(record, coins) for record in records])
    of = np.array([record.label for record in records], dtype=np.int64)
    clients = np.array([record.client for record in records], dtype=np.int64)
    persons = np.array([record.person for record in records], dtype=np.int64)
    return checked(
        "folder",
        images[~test],
        of[~test],
        images[test],
        of[test],
        clients[~test] if listed.clients > 1 else None,
        len(listed.labels),
        Places(
            "a file by its client and name",
            "digests of these names",
            _UNDER_SEVERAL if listed.labels_in_names else "",
        ),
        persons[~test] if listed.persons else None,
        listed.unread,
        listed.labels if labels is not None or names else None,
    )


_UNDER_SEVERAL = "file names occur under several labels (rename the files)"


def _place(path: str, root: str | None) -> Path:
    """Where a path is: from the working directory, or below the root."""
    here, below = Path(path).expanduser(), root_of(root) / Path(path).expanduser()
    found = here if here.exists() else below
    if not found.exists():
        raise FedgenError(
            "data.path", f"{path} does not exist", "give a folder, a table or an .npz, from here"
        )
    return found


def _visible(place: Path) -> list[Path]:
    return sorted(
        each
        for each in place.iterdir()
        if not each.name.startswith(".") and each.name not in _LEFT_BEHIND
    )


def _folders(place: Path) -> list[Path]:
    found = {each.name: each for each in _visible(place) if each.is_dir()}
    return [found[name] for name in ordered(found)]


def _is_split(place: Path) -> bool:
    return (place / "train").is_dir() and (place / "test").is_dir()


def _clients(place: Path) -> list[Path]:
    """The folders of clients in a folder; itself if there are none: labels hold files."""
    inside = _folders(place)
    if _is_split(place) or not inside:
        return [place]
    return inside if all(_folders(each) and not _files(each) for each in inside) else [place]


def _files(place: Path) -> list[Path]:
    return [each for each in _visible(place) if each.is_file()]


def _listed(places: Sequence[Path], told: Sequence[str] | None) -> Listed:
    """All files of all clients; ``told``: see ``labels.known``."""
    for place in places:
        if place.is_file():
            raise FedgenError("data.path", f"{place} is no folder", "several paths are folders")
    homes = places if len(places) > 1 else _clients(places[0])
    if len({home.resolve() for home in homes}) < len(homes):
        problem = "has one folder as two clients, and an image would be two records"
        raise FedgenError("data.path", problem, "have each once")
    split = [_is_split(home) for home in homes]
    if len(set(split)) > 1:
        without = homes[split.index(False)]
        problem = f"{without} has no train/ and test/, and others have"
        raise FedgenError("data.path", problem, "let all of them have both, or none")
    parts: dict[str, bool | None] = {"train": False, "test": True} if split[0] else {"": None}
    found = {p.name for home in homes for part in parts for p in _folders(home / part)}
    labels = known(found, told)
    labelled = [
        (client, test, label)
        for client, home in enumerate(homes)
        for part, test in parts.items()
        for label in _folders(home / part)
    ]
    records = [
        Record(path, path.name, client, labels.index(label.name), test)
        for client, test, label in labelled
        for path in _files(label)
    ]
    within = [str(each) for *_, label in labelled for each in _folders(label) if _files(each)]
    if within:
        problem = f"folders within a label's folder are not looked into: {some_of(within)}"
        raise FedgenError("data.path", problem, "move their images up, or remove them")
    beside = [
        str(each)
        for home in homes
        for part in parts
        for each in _files(home / part)
        if _is_image(each)
    ]
    if beside and labelled:
        problem = f"images beside the labels' folders belong to no label: {some_of(beside)}"
        raise FedgenError("data.path", problem, "move them into one, or away")
    if not records:
        where, loose = ", ".join(map(str, homes[:SHOWN])), f"{len(beside)} images and no folder"
        problem = f"{where} has {f'{loose} of a label' if beside else 'no images'}"
        remedy = "one sub-folder per label, or a table of them (path,label); without labels: one"
        remedy += f" sub-folder, e.g. {homes[0] / 'all'}"
        raise FedgenError("data.path", problem, remedy)
    named_records, in_names = _named_apart(records, homes)
    return Listed(named_records, labels, len(homes), in_names)


def _is_image(file: Path) -> bool:
    """By its name alone."""
    from PIL import Image

    Image.init()
    return Image.EXTENSION.get(file.suffix.lower()) in Image.OPEN


def _named_apart(records: Sequence[Record], homes: Sequence[Path]) -> tuple[list[Record], bool]:
    """Records with what tells each, and whether that takes their labels as well: these are no part
    of the name, by which all others' place and split would be others as soon as it takes them."""
    of = [f"{homes[r.client].name}/" if len(homes) > 1 else "" for r in records]
    if len({home.name for home in homes}) < len(homes):  # paths of one name
        of = [f"{r.client}/" for r in records]
    plain = [f"{client}{r.name}" for client, r in zip(of, records, strict=True)]
    counts = Counter((name, r.test) for name, r in zip(plain, records, strict=True))
    named_records = [replace(r, name=name) for r, name in zip(records, plain, strict=True)]
    return named_records, max(counts.values()) > 1


def _is_test(record: Record, coins: Coins) -> bool:
    if record.test is not None:
        return record.test
    return float(torch.rand((), generator=coins.public("folder", "split", record.name))) < 0.1
