"""Images of the user: an ``.npz``, or folders in common layouts.

| layout | clients |
|---|---|
| ``PATH/LABEL/*.png`` | none: one set of images |
| ``PATH/CLIENT/LABEL/*.png`` | the folders in it |
| several paths, each ``LABEL/*.png`` | the paths, in this order |
| ``PATH.csv``, ``PATH.parquet`` (``tables.py``) | its column ``client``, if it has one |

Each may have ``train/`` and ``test/`` above the labels. If no client has a test split, a tenth of
the images is one, by public streams keyed by the name of each image. Files and folders with a
leading dot, and those created by file managers, are ignored.

A record is identified by its client and file name, not by its label: records are ordered by digests
of these names, so that changing an image or its label, or adding or removing an image, moves no
other. If a client has one file name under several labels, their order is that of the labels
(``ExampleKeys.moves``): relabelling then moves a record, and methods that protect replaced records
by position refuse the data.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedgen.data.datasets import (
    Dataset,
    ExampleKeys,
    build_dataset,
    data_root,
)
from fedgen.data.images import MAX_SHOWN, Channels, Side, read_images, shorten
from fedgen.data.labels import infer_names, sort_names, validate_names
from fedgen.data.npz import from_npz
from fedgen.data.tables import TABLES, Listing, Record, read_listing
from fedgen.errors import FedgenError
from fedgen.randomness import RandomStreams
from fedgen.storage.io import digest

_LEFT_BEHIND = {"__MACOSX", "Thumbs.db", "desktop.ini"}


def folder(
    streams: RandomStreams,
    root: str | None,
    path: str | Sequence[str] | None,
    size: Side | None = None,
    channels: Channels | None = None,
    classes: int | None = None,
    labels: Sequence[str] | None = None,
    names: bool = True,
    **_: object,
) -> Dataset:
    """Read images of the user, as described in the module.

    Args:
        path: file, table or folder, or several folders, relative to the working directory or to
            ``root``.
        size: crop images to a square and resize them to this many pixels; None: unchanged.
        channels: 1: convert to grey; 3: convert to RGB; None: unchanged.
        classes: number of labels of an ``.npz``; a public number, not derived from the images.
        labels: public names of the labels, in order, if other clients have the same and some are
            missing here; None: names of the folders. The set of folders is public, including empty
            ones.
        names: whether the names of folders are published as names of labels.

    Raises:
        FedgenError: for invalid folders first, then for all invalid images together; names the
            files.
    """
    paths = [path] if isinstance(path, str) else list(path or [])
    if not all(paths) or not paths:
        raise FedgenError("data.path", "is not set", "give data.path=FILE.npz or a folder")
    places = [_folder_path(entry, root) for entry in paths]
    if len(places) == 1 and places[0].suffix in TABLES and not places[0].is_dir():
        listed = read_listing(places[0], labels)
    elif len(places) == 1 and places[0].is_file():
        return _npz(places[0], classes, labels)
    else:
        listed = _read_listings(places, labels)
    records = sorted(listed.records, key=lambda r: (digest(os.fsencode(r.name)), r.label))
    sources = [(str(record.path), record.path) for record in records]
    images = read_images(records[0].path.parent, sources, size, channels)
    test = np.array([_is_test(record, streams) for record in records])
    of = np.array([record.label for record in records], dtype=np.int64)
    clients = np.array([record.client for record in records], dtype=np.int64)
    persons = np.array([record.person for record in records], dtype=np.int64)
    return build_dataset(
        "folder",
        images[~test],
        of[~test],
        images[test],
        of[test],
        clients[~test] if listed.clients > 1 else None,
        len(listed.labels),
        ExampleKeys(
            "a file by its client and name",
            "digests of these names",
            _UNDER_SEVERAL if listed.labels_in_names else "",
        ),
        persons[~test] if listed.persons else None,
        listed.unread,
        listed.labels if labels is not None or names else None,
    )


def _npz(path: Path, classes: int | None, labels: Sequence[str] | None) -> Dataset:
    """Read an ``.npz``, with the public number or the public names of its labels."""
    if path.suffix != ".npz":
        problem = f"{path} is not a folder, a table (.csv, .parquet) or an .npz"
        raise FedgenError("data.path", problem, "give one of these")
    if labels is not None:
        labels = validate_names(labels)
        if classes not in (None, len(labels)):
            problem = f"is {classes}, of {len(labels)} labels"
            raise FedgenError("data.classes", problem, "leave it out")
        classes = len(labels)
    if classes is None:
        problem, remedy = "is not set", "give the number of labels of the npz, or data.labels"
        raise FedgenError("data.classes", problem, remedy)
    return from_npz("folder", path, classes, "data.path", labels)


_UNDER_SEVERAL = "file names occur under several labels (rename the files)"


def _folder_path(path: str, root: str | None) -> Path:
    """Return the location of a path, relative to the working directory or to the root."""
    local, below = Path(path).expanduser(), data_root(root) / Path(path).expanduser()
    location = local if local.exists() else below
    if not location.exists():
        raise FedgenError(
            "data.path",
            f"{path} does not exist",
            "give a folder, a table or an .npz, relative to the working directory",
        )
    return location


def _visible(place: Path) -> list[Path]:
    return sorted(
        entry
        for entry in place.iterdir()
        if not entry.name.startswith(".") and entry.name not in _LEFT_BEHIND
    )


def _folders(place: Path) -> list[Path]:
    folders = {entry.name: entry for entry in _visible(place) if entry.is_dir()}
    return [folders[name] for name in sort_names(folders)]


def _is_split(place: Path) -> bool:
    return (place / "train").is_dir() and (place / "test").is_dir()


def _clients(place: Path) -> list[Path]:
    """Return the folders of clients in a folder; the folder itself if it contains labels."""
    inside = _folders(place)
    if _is_split(place) or not inside:
        return [place]
    return (
        inside
        if all(_folders(subfolder) and not _files(subfolder) for subfolder in inside)
        else [place]
    )


def _files(place: Path) -> list[Path]:
    return [entry for entry in _visible(place) if entry.is_file()]


def _read_listings(places: Sequence[Path], label_names: Sequence[str] | None) -> Listing:
    """List all files of all clients.

    Args:
        label_names: names of labels; see ``labels.infer_names``.
    """
    for place in places:
        if place.is_file():
            raise FedgenError("data.path", f"{place} is not a folder", "several paths are folders")
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
    folder_names = {p.name for home in homes for part in parts for p in _folders(home / part)}
    labels = infer_names(folder_names, label_names)
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
    within = [
        str(subfolder)
        for *_, label in labelled
        for subfolder in _folders(label)
        if _files(subfolder)
    ]
    if within:
        problem = f"folders within a label's folder are not looked into: {shorten(within)}"
        raise FedgenError("data.path", problem, "move their images up, or remove them")
    unlabelled = [
        str(file)
        for home in homes
        for part in parts
        for file in _files(home / part)
        if _is_image(file)
    ]
    if unlabelled and labelled:
        problem = f"images outside the label folders have no label: {shorten(unlabelled)}"
        raise FedgenError("data.path", problem, "move them into one, or away")
    if not records:
        where, loose = (
            ", ".join(map(str, homes[:MAX_SHOWN])),
            f"{len(unlabelled)} images and no folder",
        )
        problem = f"{where} has {f'{loose} of a label' if unlabelled else 'no images'}"
        remedy = "one sub-folder per label, or a table of them (path,label); without labels: one"
        remedy += f" sub-folder, e.g. {homes[0] / 'all'}"
        raise FedgenError("data.path", problem, remedy)
    named_records, in_names = _disambiguate(records, homes)
    return Listing(named_records, labels, len(homes), in_names)


def _is_image(file: Path) -> bool:
    """Return whether a file is an image, by its name."""
    from PIL import Image

    Image.init()
    return Image.EXTENSION.get(file.suffix.lower()) in Image.OPEN


def _disambiguate(records: Sequence[Record], homes: Sequence[Path]) -> tuple[list[Record], bool]:
    """Return records with names, and whether names repeat within a split, so that labels are needed
    to distinguish them. Labels are never part of a name: as soon as they were, the position and
    split of all other records would change."""
    of = [f"{homes[r.client].name}/" if len(homes) > 1 else "" for r in records]
    if len({home.name for home in homes}) < len(homes):  # several paths with one name
        of = [f"{r.client}/" for r in records]
    plain = [f"{client}{r.name}" for client, r in zip(of, records, strict=True)]
    counts = Counter((name, r.test) for name, r in zip(plain, records, strict=True))
    named_records = [replace(r, name=name) for r, name in zip(records, plain, strict=True)]
    return named_records, max(counts.values()) > 1


def _is_test(record: Record, streams: RandomStreams) -> bool:
    if record.test is not None:
        return record.test
    return float(torch.rand((), generator=streams.public("folder", "split", record.name))) < 0.1
