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
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge
from numpy.typing import NDArray

from fedgen.data.datasets import (
    Dataset,
    ExampleKeys,
    build_dataset,
    data_root,
)
from fedgen.data.images import (
    MAX_SHOWN,
    Channels,
    DecodedFiles,
    ReadOptions,
    Side,
    is_image_name,
    read_images,
    shorten,
)
from fedgen.data.labels import infer_names, sort_names, validate_names
from fedgen.data.npz import from_npz
from fedgen.data.scans import PREAMBLE, Axis, Window, is_dicom, validate_tag
from fedgen.data.tables import TABLES, Listing, Record, number_names, read_listing
from fedgen.data.webdataset import read_archives
from fedgen.errors import FedgenError
from fedgen.randomness import RandomStreams
from fedgen.storage.io import digest

_LEFT_BEHIND = {"__MACOSX", "Thumbs.db", "desktop.ini", "DICOMDIR"}
_FOLDER, _TAG = "folder", "tag:"  # values of data.person
_PERSON_PREFIX = r"^([^_.-]*[0-9])[_-]"  # of file names such as P12_3.png
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
        label: column or field of the labels; several of 0 and 1: all combinations
            (``labels.combine``).
        person: person in each image: a column or field; ``tag:`` and a DICOM keyword; ``folder``;
            or a regular expression on file names, whose first group is the person.
        window: center and width of intensities; see ``scans.py``. None: the one in each DICOM file.
        axis: plane of the slices of NIfTI volumes.

    Raises:
        FedgenError: for invalid folders first, then for all invalid images together; names the
            files.
    """
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
    uses_tag = person is not None and person.startswith(_TAG)
    tag = validate_tag(str(person).removeprefix(_TAG)) if uses_tag else ""
    public_labels = labels
    if labels is None and classes is not None:
        public_labels = list(map(str, range(classes)))
    if person == _FOLDER and (archives or is_file):
        problem = "cannot be folder: only folders of images have folders of persons"
        raise FedgenError("data.person", problem, "name a column of the table, or a field")
    if archives:
        listed = read_archives(archives, public_labels, columns, person)
    elif is_file:
        listed = read_listing(places[0], public_labels, columns, person)
    elif label is not None:
        problem = "does not apply to folders of images, which are named after labels"
        raise FedgenError("data.label", problem, "leave it out, or list the images in a table")
    else:
        listed = _read_listings(places, labels, persons=person == _FOLDER)
    if person is not None and not tag and not any(record.person for record in listed.records):
        listed = replace(listed, records=_match_persons(listed, person))
    options = ReadOptions(size, channels, window, axis, tag, allow_multiple=True)
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
        _person_warnings(records, test) if has_persons else _label_warnings(listed, are_folders),
        "" if has_persons else _suggest_person(files, decoded),
    )


def _person_warnings(records: Sequence[Record], test: NDArray[np.bool_]) -> tuple[str, ...]:
    """Return warnings about implausible persons."""
    training, tested = (
        {r.person for r, is_test in zip(records, test, strict=True) if is_test == split}
        for split in (False, True)
    )
    warnings = []
    if len(training | tested) == 1:
        warnings.append("all images are of one person: check data.person")
    if both := len(training & tested):
        persons = "a person has" if both == 1 else f"{both} persons have"
        warnings.append(f"{persons} images in both splits: test results will be optimistic")
    return tuple(warnings)


def _location(files: Sequence[Record]) -> Path:
    """Return the folder of the first file, for errors."""
    return files[0].file.parent if isinstance(files[0].file, Path) else Path(files[0].name)


def _archives(places: Sequence[Path]) -> list[Path]:
    """Return the tar files among these places, or in the only one; empty if there are others."""
    inside = _visible(places[0]) if len(places) == 1 and places[0].is_dir() else list(places)
    are_archives = all(entry.suffix == ".tar" and entry.is_file() for entry in inside)
    return inside if are_archives else []


def _columns(label: Column | Sequence[Column]) -> Sequence[Column]:
    return [label] if isinstance(label, int | str) else label


def _label_warnings(listed: Listing, are_folders: bool) -> tuple[str, ...]:
    """Return a warning if folders of persons were probably taken for those of labels."""
    few = len(listed.records) < _FEW_IMAGES * len(listed.labels)
    if not (are_folders and listed.clients > 1 and few and len(listed.labels) >= _MANY_LABELS):
        return ()
    names = shorten(listed.labels[:3])
    return (
        f"the labels {names} and others look like persons: for LABEL/PERSON/ set "
        "data.person=folder and data.labels=[...]",
    )


_FEW_IMAGES, _MANY_LABELS = 10, 10


def _match_persons(listed: Listing, expression: str) -> list[Record]:
    """Return the records with the person that the first group of an expression finds in the name of
    each file.

    Raises:
        FedgenError: for an invalid expression, or files that it does not match.
    """
    records = listed.records
    remedy = "give tag:KEYWORD, folder, or a regular expression with a group: '^(P[0-9]+)_'"
    if listed.unread:
        remedy = f"name a column, e.g. {', '.join(listed.unread)}, or give such an expression"
    try:
        pattern = re.compile(expression)
    except re.error as error:
        problem = f"{expression[:100]!r} is neither a column nor a regular expression ({error})"
        raise FedgenError("data.person", problem, remedy) from error
    if pattern.groups < 1:
        problem = f"{expression[:100]!r} is neither a column nor a regular expression with a group"
        raise FedgenError("data.person", problem, remedy)
    matches = [pattern.search(PurePosixPath(record.name).name) for record in records]
    persons = [match[1] if match else None for match in matches]
    if lacking := [r.name for r, person in zip(records, persons, strict=True) if not person]:
        problem = f"does not match {len(lacking)} of {len(records)} file names: {shorten(lacking)}"
        raise FedgenError("data.person", problem, "change the expression, or rename the files")
    return [replace(r, person=str(p)) for r, p in zip(records, persons, strict=True)]


def _suggest_person(files: Sequence[Record], decoded: DecodedFiles) -> str:
    """Return a value of ``data.person`` if several images may show one person, by the names of
    their files or because a file contains several; else an empty text."""
    if decoded.all_dicom:
        return f"{_TAG}PatientID"
    names = [PurePosixPath(record.name).name for record in files]
    found = [match[1] for name in names if (match := re.search(_PERSON_PREFIX, name))]
    if len(found) == len(names) and 1 < len(set(found)) < 0.9 * len(found):
        return _PERSON_PREFIX
    return "(.+)" if len(decoded.images) > len(files) else ""  # a person per file


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


def _clients(place: Path, labels: Sequence[str] | None) -> list[Path]:
    """Return the folders of clients in a folder; the folder itself if it contains labels.

    Args:
        labels: names of the labels, which contain folders of persons; None: they contain images.
    """
    inside = _folders(place)
    if _is_split(place) or not inside:
        return [place]
    if labels is not None:
        names = set(map(str, labels))
        parts = [client / "train" if _is_split(client) else client for client in inside]
        names_below = {folder.name for part in parts for folder in _folders(part)}
        has_label = any(folder.name in names for folder in inside)
        return inside if names_below & names and not has_label else [place]
    return (
        inside
        if all(_folders(subfolder) and not _files(subfolder) for subfolder in inside)
        else [place]
    )


def _files_below(place: Path) -> list[tuple[Path, str]]:
    """Return all files at any depth, and their paths with the name of the folder; links to folders
    are not followed."""
    files = [(file, f"{place.name}/{file.name}") for file in _files(place)]
    folders = [inside for inside in _folders(place) if not inside.is_symlink()]
    deeper = [entry for inside in folders for entry in _files_below(inside)]
    return files + [(file, f"{place.name}/{name}") for file, name in deeper]


def _files(place: Path) -> list[Path]:
    return [entry for entry in _visible(place) if entry.is_file()]


def _read_listings(
    places: Sequence[Path], label_names: Sequence[str] | None, persons: bool
) -> Listing:
    """List all files of all clients.

    Args:
        label_names: names of labels; see ``labels.infer_names``.
        persons: whether the folder of a label contains folders of persons.
    """
    for place in places:
        if place.is_file():
            raise FedgenError("data.path", f"{place} is not a folder", "several paths are folders")
    if persons and label_names is None:
        problem = "is required with data.person=folder, to tell labels from clients and persons"
        raise FedgenError("data.labels", problem, "name the labels, e.g. data.labels=[ill,well]")
    homes = places if len(places) > 1 else _clients(places[0], label_names if persons else None)
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
    table_hint = "; if these are clients or persons, see docs/your-images.md for layouts"
    labels = infer_names(folder_names, label_names, table_hint)
    labelled = [
        (client, test, label)
        for client, home in enumerate(homes)
        for part, test in parts.items()
        for label in _folders(home / part)
    ]
    if persons:
        records = [
            Record(path, name, client, labels.index(label.name), test, person.name)
            for client, test, label in labelled
            for person in _folders(label)
            for path, name in _files_below(person)
        ]
        outside = [str(file) for *_, label in labelled for file in _files(label)]
        if outside:
            problem = f"images outside the folders of persons: {shorten(outside)}"
            raise FedgenError("data.path", problem, "move each into the folder of its person")
    else:
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
            problem = f"folders within a label's folder are not read: {shorten(within)}"
            remedy = "move their images up, or remove them; if each is a person, set "
            raise FedgenError("data.path", problem, f"{remedy}data.person=folder and data.labels")
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
    files = Counter(os.path.realpath(str(record.file)) for record in records)
    if len(files) < len(records):
        duplicates = shorten([name for name, count in files.items() if count > 1])
        problem = f"links list files twice, and an image would be two records: {duplicates}"
        raise FedgenError("data.path", problem, "remove these links")
    named_records, in_names = _disambiguate(records, homes)
    return Listing(named_records, labels, len(homes), in_names)


def _is_image(file: Path) -> bool:
    """Return whether a file is an image, by its name, or because it is DICOM."""
    with suppress(OSError), file.open("rb") as opened:
        if is_dicom(opened.read(PREAMBLE)):
            return True
    return is_image_name(file.name)


def _disambiguate(records: Sequence[Record], homes: Sequence[Path]) -> tuple[list[Record], bool]:
    """Return records with the names of their clients, and whether names repeat within a split, so
    that labels are needed to distinguish them. Labels are never part of a name: as soon as they
    were, the position and split of all other records would change."""
    of = [f"{homes[r.client].name}/" if len(homes) > 1 else "" for r in records]
    if len({home.name for home in homes}) < len(homes):  # several paths with one name
        of = [f"{r.client}/" for r in records]
    plain = [f"{client}{r.name}" for client, r in zip(of, records, strict=True)]
    counts = Counter((name, r.test) for name, r in zip(plain, records, strict=True))
    named_records = [replace(r, name=name) for r, name in zip(records, plain, strict=True)]
    return named_records, max(counts.values()) > 1


def _is_test(record: Record, streams: RandomStreams) -> bool:
    """Return whether a record is in the test split; all of a person are, or none."""
    if record.test is not None:
        return record.test
    key = ("persons", record.person) if record.person else (record.name,)
    return float(torch.rand((), generator=streams.public("folder", "split", *key))) < 0.1
