"""Images of the user: an ``.npz``, or files in common layouts.

| layout | clients |
|---|---|
| ``PATH/LABEL/*.png`` | none: one set of images |
| ``PATH/CLIENT/LABEL/*.png`` | the folders in it |
| several paths, each ``LABEL/*.png`` | the paths, in this order |
| any of these with ``LABEL/PERSON/**/*.png``, ``data.person=folder``, ``data.labels`` | the same |
| ``PATH.csv``, ``PATH.parquet`` (``tables.py``) | its column ``client``, if it has one |
| one or more ``.tar``, or a folder of them (``webdataset.py``) | the field ``client``, if given |

Folders may have ``train/`` and ``test/`` above the labels. If no client has a test split, a tenth
of the images is one, by public streams keyed by the name of each image, or of its person. Files
and folders with a leading dot, and those created by file managers, are ignored.

A record is identified by its client and file name, and by its number if a file contains several
(frames, slices); not by its label. Records are ordered by digests of these names, so that changing
an image or its label, or adding or removing an image, moves no other. If a client has one file name
under several labels, their order is that of the labels (``ExampleKeys.moves``): relabelling then
moves a record, and methods that protect replaced records by position refuse the data.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge

from fedgen.data.datasets import (
    Dataset,
    ExampleKeys,
    build_dataset,
    data_root,
)
from fedgen.data.images import (
    Channels,
    ReadOptions,
    Side,
    read_images,
    shorten,
)
from fedgen.data.labels import validate_names
from fedgen.data.layouts import read_folders, visible
from fedgen.data.npz import from_npz
from fedgen.data.persons import (
    FOLDER,
    TAG,
    label_warnings,
    match_persons,
    person_warnings,
    suggest_person,
)
from fedgen.data.scans import Axis, Slices, Window, validate_tag
from fedgen.data.tables import TABLES, Listing, Record, number_names, read_listing
from fedgen.data.webdataset import read_archives
from fedgen.errors import FedgenError
from fedgen.randomness import RandomStreams
from fedgen.storage.io import digest

Column = Annotated[int, Ge(0)] | str
"""Number of a column of an ``.npz``, or its name in a table or archive."""


def folder(
    streams: RandomStreams,
    root: str | None,
    path: str | Sequence[str] | None,
    size: Side | None = None,
    channels: Channels | None = None,
    classes: int | None = None,
    labels: Sequence[str] | None = None,
    names: bool = True,
    label: Column | Sequence[Column] | None = None,
    person: str | None = None,
    window: Window | None = None,
    axis: Axis = "axial",
    slices: Slices | None = None,
    **_: object,
) -> Dataset:
    """Read images of the user, as described in the module.

    Args:
        path: file, table or folder, or several folders or archives, relative to the working
            directory or to ``root``.
        size: crop images to a square and resize them to this many pixels; None: unchanged.
        channels: 1: convert to grey; 3: convert to RGB; None: unchanged.
        classes: number of labels of an ``.npz`` or of archives; a public number, not derived from
            the images.
        labels: public names of the labels, in order, if other clients have the same and some are
            missing here; None: names of the folders. The set of folders is public, including empty
            ones.
        names: whether the names of folders are published as names of labels.
        label: column or field of the labels; several binary ones: all combinations
            (``labels.combine``).
        person: person in each image: a column or field; ``tag:`` and a DICOM keyword; ``folder``;
            or a regular expression on file names; its first group is the person.
        window: center and width of intensities; see ``scans.py``. None: the one in each DICOM file.
        axis: plane of the slices of NIfTI volumes.
        slices: used part of each volume, and of each DICOM file with several frames, as fractions
            of the number of slices; None: all.

    Raises:
        FedgenError: for invalid folders first, then for all invalid images together; names the
            files.
    """
    if slices is not None and slices[0] >= slices[1]:
        remedy = "set the start below the end, e.g. [0.3,0.7]"
        raise FedgenError("data.slices", "selects no slices", remedy)
    paths = [path] if isinstance(path, str) else list(path or [])
    if not all(paths) or not paths:
        raise FedgenError("data.path", "is not set", "give data.path=FILE.npz or a folder")
    places = [_folder_path(entry, root) for entry in paths]
    archives = _archives(places)
    is_file = len(places) == 1 and places[0].is_file()
    if is_file and not archives and places[0].suffix not in TABLES:
        if person is not None:
            problem = "does not apply to an .npz, which has an array train_person, or none"
            raise FedgenError("data.person", problem, "leave it out")
        return _npz(places[0], classes, labels, label)
    columns = None if label is None else list(map(str, _columns(label)))
    uses_tag = person is not None and person.startswith(TAG)
    tag = validate_tag(str(person).removeprefix(TAG)) if uses_tag else ""
    numbered = None if classes is None else list(map(str, range(classes)))
    public_labels = numbered if labels is None else labels
    if archives or is_file:
        if person == FOLDER:
            problem = "cannot be folder: only folders of images have folders of persons"
            raise FedgenError("data.person", problem, "name a column of the table, or a field")
        read = partial(read_archives, archives) if archives else partial(read_listing, places[0])
        listed = read(public_labels, columns, person)
    elif label is not None:
        problem = "does not apply to folders of images, which are named after labels"
        raise FedgenError("data.label", problem, "leave it out, or list the images in a table")
    else:
        listed = read_folders(places, labels, person)
    if person is not None and not tag and not any(record.person for record in listed.records):
        listed = replace(listed, records=match_persons(listed, person))
    options = ReadOptions(size, channels, window, axis, slices, tag, allow_multiple=True)
    are_folders = labels is None and not archives and not is_file
    return _dataset(listed, options, streams, names, are_folders)


def _dataset(
    listed: Listing,
    options: ReadOptions,
    streams: RandomStreams,
    with_names: bool,
    are_folders: bool,
) -> Dataset:
    """Read the files of a list and return the data set.

    Args:
        are_folders: whether labels are the names of folders, without ``data.labels``.
    """
    files = listed.records
    decoded = read_images(_location(files), [(str(f.file), f.file) for f in files], options)
    if decoded.has_scans and are_folders:
        problem = "is required for DICOM and NIfTI, where names of folders may identify patients"
        remedy = "name the labels, e.g. data.labels=[ill,well]"
        raise FedgenError("data.labels", f"{problem}: {shorten(listed.labels)}", remedy)
    if options.tag:
        files = [replace(f, person=tag) for f, tag in zip(files, decoded.tag_values, strict=True)]
    files = [replace(f, person=unicodedata.normalize("NFC", f.person)) for f in files]
    pairs = {(f.person, f.label) for f in files if f.person}
    if len(pairs) == len(dict(pairs)) == len({label for _, label in pairs}) > 1:
        problem = "assigns one person to each label"
        raise FedgenError("data.person", problem, "select what identifies the person")
    parts = [
        (f, f"{f.name}#{number}" if count > 1 else f.name)
        for f, count in zip(files, decoded.counts.tolist(), strict=True)
        for number in range(count)
    ]
    keys = [(digest(os.fsencode(name)), record.label) for record, name in parts]
    order = sorted(range(len(parts)), key=keys.__getitem__)
    records, images = [parts[at][0] for at in order], decoded.images[order]
    test = np.array([_is_test(record, streams) for record in records])
    of = np.array([record.label for record in records], dtype=np.int64)
    clients = np.array([record.client for record in records], dtype=np.int64)
    person_numbers = number_names(record.person for record in records)
    persons = np.array([person_numbers[record.person] for record in records], dtype=np.int64)
    has_persons = "" not in person_numbers
    return build_dataset(
        "folder",
        images[~test],
        of[~test],
        images[test],
        of[test],
        clients[~test] if listed.clients > 1 else None,
        len(listed.labels),
        ExampleKeys(
            "a file by its client and name, or its part by its number",
            "digests of these names",
            _UNDER_SEVERAL if listed.labels_in_names else "",
        ),
        persons[~test] if has_persons else None,
        listed.unread,
        listed.labels if with_names else None,
        person_warnings(records, test) if has_persons else label_warnings(listed, are_folders),
        "" if has_persons else suggest_person(files, decoded),
    )


def _location(files: Sequence[Record]) -> Path:
    """Return the folder of the first file, for errors."""
    return files[0].file.parent if isinstance(files[0].file, Path) else Path(files[0].name)


def _archives(places: Sequence[Path]) -> list[Path]:
    """Return the tar files among these places, or in the only one; empty if there are others."""
    inside = visible(places[0]) if len(places) == 1 and places[0].is_dir() else list(places)
    are_archives = all(entry.suffix == ".tar" and entry.is_file() for entry in inside)
    return inside if are_archives else []


def _columns(label: Column | Sequence[Column]) -> Sequence[Column]:
    return [label] if isinstance(label, int | str) else label


def _npz(
    path: Path,
    classes: int | None,
    labels: Sequence[str] | None,
    label: Column | Sequence[Column] | None,
) -> Dataset:
    """Read an ``.npz``, with the public number or the public names of its labels."""
    if path.name.endswith((".tar.gz", ".tgz")):
        raise FedgenError("data.path", f"{path} is compressed", "decompress it to .tar")
    if path.suffix != ".npz":
        problem = f"{path} is not a folder, a table (.csv, .parquet), a .tar or an .npz"
        raise FedgenError("data.path", problem, "give one of these")
    if label is not None:
        columns = [int(column) for column in map(str, _columns(label)) if column.isdecimal()]
        if len(columns) < len(_columns(label)):
            problem = f"cannot be {label}: the columns of an .npz have no names"
            raise FedgenError("data.label", problem, "give their numbers, e.g. 0 or [0,3]")
        return from_npz("folder", path, None, "data.path", labels, columns)
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


def _is_test(record: Record, streams: RandomStreams) -> bool:
    """Return whether a record is in the test split; all of a person are, or none."""
    if record.test is not None:
        return record.test
    key = ("persons", record.person) if record.person else (record.name,)
    return float(torch.rand((), generator=streams.public("folder", "split", *key))) < 0.1
