"""Images in tar files in the layout of WebDataset: files with the same name up to the first dot are
one sample.

| file | |
|---|---|
| ``KEY.png``, or another image | the image; it is read from the archive, which is not unpacked |
| ``KEY.cls`` | name or number of the label |
| ``KEY.json`` | an object with ``label``, and optionally ``client`` and ``person`` |

A record is identified by its key, which is unique across archives. If archives are named
``train*.tar`` and ``test*.tar``, these are the splits. Archives may be untrusted.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from fedgen.data.images import is_image_name, shorten
from fedgen.data.tables import Listing, Record, number_labels, number_names
from fedgen.errors import FedgenError
from fedgen.storage.io import parse_json

_MAX_IMAGE, _MAX_TEXT = 2**30, 2**16  # bytes
_MAX_FILES = 10**7
_LONG = 100  # characters of a name shown
_TEXTS = ("cls", "json")


@dataclass(frozen=True)
class TarMember:
    """A file in an uncompressed tar archive."""

    archive: Path
    name: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.archive}: {self.name[:_LONG]!r}"

    def open(self, mode: Literal["rb"], /) -> IO[bytes]:
        """Return its bytes as a stream."""
        with self.archive.open(mode) as opened:
            opened.seek(self.offset)
            return io.BytesIO(opened.read(self.size))


def read_archives(
    archives: Sequence[Path],
    label_names: Sequence[str] | None,
    label: str | Sequence[str] | None = None,
    person: str | None = None,
) -> Listing:
    """Return the records of tar files.

    Args:
        label_names: names of labels; see ``tables.number_labels``.
        label: field of ``.json``, or binary fields; None: ``.cls``, or else the field
            ``label``.
        person: field of persons; ignored if samples do not have it. None: ``person``.

    Raises:
        FedgenError: for the first problem.
    """
    rows, files, splits = _read_samples(archives)
    columns = [label] if isinstance(label, str) else list(label or ["label"])
    for column in columns:
        if lacking := [key for key, row in rows.items() if not row.get(column)]:
            problem = f"{len(lacking)} of {len(rows)} samples have no {column}: {shorten(lacking)}"
            known = ", ".join(sorted({name[:_LONG] for row in rows.values() for name in row})[:20])
            if label is not None:
                raise FedgenError("data.label", problem, f"choose from {known}")
            remedy = "add KEY.cls or KEY.json to each, or name a field of KEY.json in data.label"
            raise FedgenError("data.path", problem, remedy)
    where, all_rows = str(archives[0].parent), list(rows.values())
    numbers, labels = number_labels(
        where, all_rows, None if label is None else columns, label_names
    )
    person_field = "person" if person is None else person
    for field in ("client", person_field):
        lacking = [key for key, row in rows.items() if not row.get(field)]
        if 0 < len(lacking) < len(rows):
            problem = f"{len(lacking)} of {len(rows)} samples have no {field}: {shorten(lacking)}"
            remedy = f'add "{field}" to KEY.json of each sample, or of none'
            raise FedgenError("data.path", problem, remedy)
    clients = number_names(row["client"] for row in all_rows if "client" in row)
    records = [
        Record(
            files[key],
            key,
            clients.get(row.get("client", ""), 0),
            number,
            splits[key],
            row.get(person_field, ""),
        )
        for (key, row), number in zip(rows.items(), numbers, strict=True)
    ]
    used = {*columns, "label", "client", person_field}
    names = sorted({name[:_LONG] for row in all_rows for name in row} - used)
    unread = tuple(names[:_MAX_UNREAD])
    return Listing(records, labels, max(len(clients), 1), unread=unread)


_MAX_UNREAD = 20  # names per line


def _read_samples(
    archives: Sequence[Path],
) -> tuple[dict[str, dict[str, str]], dict[str, TarMember], dict[str, bool | None]]:
    """Return fields, image and split of each sample, by key."""
    rows: dict[str, dict[str, str]] = {}
    images: dict[str, TarMember] = {}
    archive_of: dict[str, Path] = {}
    for archive in archives:
        for name, member in _members(archive):
            path = PurePosixPath(name)
            stem, _, kind = path.name.partition(".")
            key = str(path.parent / stem)
            if archive_of.setdefault(key, archive) != archive:
                problem = f"{key[:_LONG]} is in {archive_of[key]} and in {archive}"
                raise FedgenError("data.path", problem, "give each sample its own key")
            row = rows.setdefault(key, {})
            if kind.lower() not in _TEXTS:
                if not is_image_name(name):
                    continue  # e.g. a caption
                if key in images:
                    problem = f"{archive}: {key[:_LONG]} has several images"
                    remedy = "keep one image per sample; keys end at the first dot of a name"
                    raise FedgenError("data.path", problem, remedy)
                images[key] = member
                continue
            text = _read_text(archive, name, member)
            row.update(
                {"label": text.strip()}
                if kind.lower() == "cls"
                else _parse_fields(archive, name, text)
            )
    if lacking := [key for key in rows if key not in images]:
        problem = f"{len(lacking)} of {len(rows)} samples have no image: {shorten(lacking)}"
        raise FedgenError("data.path", problem, "add KEY.png, or remove them")
    if not rows:
        raise FedgenError("data.path", f"{archives[0]} has no images", "add KEY.png and KEY.cls")
    tests = {archive: _split_of(archive) for archive in archives}
    has_test = {True, False} <= set(tests.values())
    return rows, images, {key: tests[archive_of[key]] if has_test else None for key in rows}


def _split_of(archive: Path) -> bool | None:
    """Return whether an archive is for tests, by its name; None: unknown."""
    if archive.name.startswith("test"):
        return True
    return False if archive.name.startswith("train") else None


def _members(archive: Path) -> Iterator[tuple[str, TarMember]]:
    """Yield the files in an archive: name and place.

    Raises:
        FedgenError: for an unreadable archive, too large or too many files.
    """
    try:
        with tarfile.open(archive, "r:") as opened:
            for count, member in enumerate(opened):
                hidden = PurePosixPath(member.name).name.startswith((".", "__"))
                if not member.isfile() or hidden:
                    continue
                if count >= _MAX_FILES:
                    problem = f"{archive} has more than {_MAX_FILES:,} files"
                    raise FedgenError("data.path", problem, "split it")
                if member.size > _MAX_IMAGE or member.issparse():
                    problem = f"{archive}: {member.name[:_LONG]!r} exceeds 1 GB, or is sparse"
                    raise FedgenError("data.path", problem, "remove it")
                yield member.name, TarMember(archive, member.name, member.offset_data, member.size)
    except (OSError, tarfile.TarError, ValueError) as error:
        problem = f"{archive} is not a readable tar file ({type(error).__name__})"
        raise FedgenError("data.path", problem, "recreate it without compression") from error


def _read_text(archive: Path, name: str, member: TarMember) -> str:
    if member.size > _MAX_TEXT:
        problem = f"{archive}: {name[:_LONG]!r} has more than {_MAX_TEXT:,} bytes"
        raise FedgenError("data.path", problem, "keep label, client and person only")
    try:
        return member.open("rb").read().decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"{archive}: {name[:_LONG]!r} is not UTF-8"
        raise FedgenError("data.path", problem, "save it as UTF-8") from error


def _parse_fields(archive: Path, name: str, text: str) -> Mapping[str, str]:
    """Return the texts and numbers in a JSON object, as text."""
    try:
        fields = parse_json(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        problem = f"{archive}: {name[:_LONG]!r} is not a JSON object"
        raise FedgenError("data.path", problem, 'write e.g. {"label": 0}')
    kinds = (str, int, float)
    return {key: _as_text(value) for key, value in fields.items() if isinstance(value, kinds)}


def _as_text(value: str | float) -> str:
    return value.strip() if isinstance(value, str) else json.dumps(value)
