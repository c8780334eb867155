"""Layouts of folders: which folders are clients, splits, labels and persons."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fedgen.data.images import MAX_SHOWN, is_image_name, mask, shorten
from fedgen.data.labels import infer_names, sort_names
from fedgen.data.persons import FOLDER
from fedgen.data.scans import PREAMBLE, is_dicom
from fedgen.data.tables import Listing, Record
from fedgen.errors import FedgenError

_LEFT_BEHIND = {"__MACOSX", "Thumbs.db", "desktop.ini", "DICOMDIR"}


def visible(place: Path) -> list[Path]:
    """Return the entries of a folder, without those of file managers and hidden ones."""
    return sorted(
        entry
        for entry in place.iterdir()
        if not entry.name.startswith(".") and entry.name not in _LEFT_BEHIND
    )


def _folders(place: Path) -> list[Path]:
    folders = {entry.name: entry for entry in visible(place) if entry.is_dir()}
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
    return [entry for entry in visible(place) if entry.is_file()]


def read_folders(
    places: Sequence[Path], label_names: Sequence[str] | None, person: str | None
) -> Listing:
    """List all files of all clients.

    Args:
        label_names: names of labels; see ``labels.infer_names``.
        person: ``folder`` if the folder of a label contains folders of persons; see ``folder``.
    """
    persons = person == FOLDER
    client_folders = _client_folders(places, label_names, persons)
    split = [_is_split(client_folder) for client_folder in client_folders]
    if len(set(split)) > 1:
        without = client_folders[split.index(False)]
        problem = f"{without} has no train/ and test/, and others have"
        raise FedgenError("data.path", problem, "let all of them have both, or none")
    parts: dict[str, bool | None] = {"train": False, "test": True} if split[0] else {"": None}
    label_folders = [
        _LabelFolder(path, client, test)
        for client, client_folder in enumerate(client_folders)
        for part, test in parts.items()
        for path in _folders(client_folder / part)
    ]
    layouts_hint = "; if these are clients or persons, see docs/your-images.md for layouts"
    labels = infer_names({folder.path.name for folder in label_folders}, label_names, layouts_hint)
    list_records = _records_of_persons if persons else partial(_records_of_labels, person=person)
    records = list_records(label_folders, labels)
    unlabelled = [
        str(file)
        for client_folder in client_folders
        for part in parts
        for file in _files(client_folder / part)
        if _is_image(file)
    ]
    if unlabelled and label_folders:
        problem = f"images outside the label folders have no label: {shorten(unlabelled)}"
        raise FedgenError("data.path", problem, "move them into one, or away")
    if not records:
        where = ", ".join(map(str, client_folders[:MAX_SHOWN]))
        loose = f"{len(unlabelled)} images and no folder"
        problem = f"{where} has {f'{loose} of a label' if unlabelled else 'no images'}"
        remedy = "one sub-folder per label, or a table of them (path,label); without labels: one"
        remedy += f" sub-folder, e.g. {client_folders[0] / 'all'}"
        raise FedgenError("data.path", problem, remedy)
    files = Counter(os.path.realpath(str(record.file)) for record in records)
    if len(files) < len(records):
        duplicates = shorten([name for name, count in files.items() if count > 1])
        problem = f"links list files twice, and an image would be two records: {duplicates}"
        raise FedgenError("data.path", problem, "remove these links")
    named_records, in_names = _disambiguate(records, client_folders)
    return Listing(named_records, labels, len(client_folders), in_names)


class _LabelFolder(NamedTuple):
    """Folder of one label of one client. test: split that it names, if any."""

    path: Path
    client: int
    test: bool | None


def _client_folders(
    places: Sequence[Path], label_names: Sequence[str] | None, persons: bool
) -> Sequence[Path]:
    """Return the folder of each client; ``persons``: whether persons have folders."""
    for place in places:
        if place.is_file():
            raise FedgenError("data.path", f"{place} is not a folder", "several paths are folders")
    if persons and label_names is None:
        problem = "is required with data.person=folder, to tell labels from clients and persons"
        raise FedgenError("data.labels", problem, "name the labels, e.g. data.labels=[ill,well]")
    folders = places if len(places) > 1 else _clients(places[0], label_names if persons else None)
    if len({path.resolve() for path in folders}) < len(folders):
        problem = "has one folder as two clients, and an image would be two records"
        raise FedgenError("data.path", problem, "have each once")
    return folders


def _records_of_persons(folders: Sequence[_LabelFolder], labels: Sequence[str]) -> list[Record]:
    """Return the images in the folders of persons within those of labels."""
    outside = [str(file) for folder in folders for file in _files(folder.path)]
    if outside:
        problem = f"images outside the folders of persons: {shorten(outside)}"
        raise FedgenError("data.path", problem, "move each into the folder of its person")
    return [
        Record(path, name, client, labels.index(label.name), test, person.name)
        for label, client, test in folders
        for person in _folders(label)
        for path, name in _files_below(person)
    ]


def _records_of_labels(
    folders: Sequence[_LabelFolder], labels: Sequence[str], person: str | None
) -> list[Record]:
    """Return the images in the folders of labels; ``person``: the setting, for errors."""
    within = [
        subfolder.name
        for folder in folders
        for subfolder in _folders(folder.path)
        if _files(subfolder)
    ]
    if within:
        problem = f"{len(within)} folders within those of labels are not read, such as "
        problem += f"{mask(within[0])} (letters and digits replaced)"
        if person is not None:
            remedy = "if each is a person, set it to folder, and data.labels"
            raise FedgenError("data.person", f"is {person[:100]!r}, and {problem}", remedy)
        remedy = "move their images up, or remove them; if each is a person, set "
        raise FedgenError("data.path", problem, f"{remedy}data.person=folder and data.labels")
    return [
        Record(path, path.name, client, labels.index(label.name), test)
        for label, client, test in folders
        for path in _files(label)
    ]


def _is_image(file: Path) -> bool:
    """Return whether a file is an image, by its name, or because it is DICOM."""
    with suppress(OSError), file.open("rb") as opened:
        if is_dicom(opened.read(PREAMBLE)):
            return True
    return is_image_name(file.name)


def _disambiguate(
    records: Sequence[Record], client_folders: Sequence[Path]
) -> tuple[list[Record], bool]:
    """Return records with the names of their clients, and whether names repeat within a split, so
    that labels are needed to distinguish them. Labels are never part of a name: as soon as they
    were, the position and split of all other records would change."""
    of = [f"{client_folders[r.client].name}/" if len(client_folders) > 1 else "" for r in records]
    if len({client_folder.name for client_folder in client_folders}) < len(
        client_folders
    ):  # several paths with one name
        of = [f"{r.client}/" for r in records]
    plain = [f"{client}{r.name}" for client, r in zip(of, records, strict=True)]
    counts = Counter((name, r.test) for name, r in zip(plain, records, strict=True))
    named_records = [replace(r, name=name) for r, name in zip(records, plain, strict=True)]
    return named_records, max(counts.values()) > 1
