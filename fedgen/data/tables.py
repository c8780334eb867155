"""A list of images: a CSV file with a line for each, and a heading, or a Parquet file.

| column | |
|---|---|
| ``path`` | the image's file, below the table's folder; it is the record's name |
| ``label`` | the label's name; all names are a setting, ``data.labels``, and public |
| ``client`` | optional: whose image it is (``partition=by_folder``) |
| ``person`` | optional: whom it shows (``privacy.unit=person``) |
| ``split`` | optional: ``train`` or ``test`` |

Clients are numbered in the order of their names, by value if all are whole numbers. A table is data
that somebody may have handed over: it names no file outside of its folder, and none twice.
"""

from __future__ import annotations

import csv
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fedgen.data.labels import known, ordered
from fedgen.errors import FedgenError

TABLES = (".csv", ".parquet")
"""How names of tables end."""

_SHOWN = 20  # names in a line
_LONG = 100  # letters of a name in a line
_COLUMNS = ("path", "label", "client", "person", "split")
_SPLITS: dict[str, bool | None] = {"train": False, "test": True, "": None}
_MOST_BYTES, _MOST_ROWS = 2**30, 10**7


@dataclass(frozen=True)
class Record:
    """An image: where it is, what tells it from others, whose, under which label, in which split
    (None: not said), and whom it shows."""

    path: Path
    name: str
    client: int
    label: int
    test: bool | None
    person: int = -1


@dataclass(frozen=True)
class Listed:
    """All records, the labels' names, the number of clients, whether labels are part of records'
    names, whether it is known whom records show, and the names of columns that are not read."""

    records: list[Record]
    labels: list[str]
    clients: int
    labels_in_names: bool = False
    persons: bool = False
    unread: tuple[str, ...] = ()


def listed_in(table: Path, named: Sequence[str] | None) -> Listed:
    """The records of a table; ``named``: see ``labels.known``.

    Raises:
        FedgenError: for the first thing that is wrong with it.
    """
    rows = _rows(table)
    columns = set(rows[0])
    if lacking := {"path", "label"} - columns:
        problem = f"{table} has no column {' and no column '.join(sorted(lacking))}"
        first = ", ".join(repr(each[:_LONG]) for each in list(rows[0])[:_SHOWN])
        remedy = f"name its columns, with commas between them, in the first line, which has {first}"
        raise FedgenError("data.path", problem, remedy)
    clients = _numbered(row["client"] for row in rows) if "client" in columns else {}
    persons = _numbered(row["person"] for row in rows) if "person" in columns else {}
    if named is None:
        there = ordered(row["label"] for row in rows)
        some = ",".join(each[:_LONG] for each in there[:_SHOWN])
        problem = "is not set: labels are public, and not read off a table's rows"
        raise FedgenError("data.labels", problem, f"e.g. data.labels=[{some}]")
    labels = known({row["label"] for row in rows}, named)
    home, seen = table.parent.resolve(), set()
    by_label = {name: number for number, name in enumerate(labels)}
    records = []
    for number, row in enumerate(rows, 2):
        path, split = PurePosixPath(row["path"]), row.get("split", "")
        where = f"{table}, line {number}: {row['path'][:_LONG]!r}"
        if path.is_absolute() or ".." in path.parts or "\0" in row["path"] or not path.parts:
            problem = f"{where} is no file below the table's folder"
            raise FedgenError("data.path", problem, "give paths from there")
        try:
            really = (table.parent / path).resolve()
            there_is = really.is_file()
        except (OSError, RuntimeError, ValueError):  # a link to itself, a name too long
            really, there_is = table, False
        if home not in really.parents:
            problem = f"{where} leads out of the table's folder"
            raise FedgenError("data.path", problem, "copy the image there")
        if not there_is:
            raise FedgenError("data.path", f"{where} is no file", "remove the line")
        if really in seen:
            problem = f"{where} is named more than once"
            raise FedgenError("data.path", problem, "name each image once")
        seen.add(really)
        if split not in _SPLITS:
            problem = f"{table}, line {number}: there is no split {split[:_LONG]!r}"
            raise FedgenError("data.path", problem, "write train or test, or leave it out")
        if persons and not row["person"]:
            problem = f"{table}, line {number}: nobody is named as person"
            raise FedgenError("data.path", problem, "name one, or leave out the column")
        records.append(
            Record(
                table.parent / path,
                str(path),
                clients.get(row.get("client", ""), 0),
                by_label[row["label"]],
                _SPLITS[split],
                persons.get(row.get("person", ""), -1),
            )
        )
    unread = tuple(name[:_LONG] for name in rows[0] if name not in _COLUMNS)[:_SHOWN]
    return Listed(records, labels, max(len(clients), 1), persons=bool(persons), unread=unread)


def _numbered(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(ordered(names))}


def _rows(table: Path) -> list[dict[str, str]]:
    """The lines by the names of their columns, all of them whole."""
    try:
        if not table.is_file():  # a device has no end
            raise FedgenError("data.path", f"{table} is no file", "give a table")
        if table.stat().st_size > _MOST_BYTES:
            raise FedgenError("data.path", f"{table} has more than 1 GB", "take part of it")
        columns, rows = _of_parquet(table) if table.suffix == ".parquet" else _of_csv(table)
    except (OSError, ValueError, csv.Error) as error:
        kind, remedy = "CSV", "write it anew, in UTF-8"
        if table.suffix == ".parquet":
            kind, remedy = "Parquet", "write it anew, of text"
        problem = f"{table} is no readable {kind} file ({error})"
        raise FedgenError("data.path", problem, remedy) from error
    if not rows:
        problem = f"{table} lists no image"
        raise FedgenError("data.path", problem, "a heading (path,label), and a line for each image")
    if len(set(columns)) < len(columns):
        problem = f"{table} has two columns of one name"
        raise FedgenError("data.path", problem, "remove one of them")
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            problem = f"{table}, line {number} has not as many fields as the first line"
            raise FedgenError("data.path", problem, "correct it")
    return [
        {
            column: value if column == "path" else unicodedata.normalize("NFC", value.strip())
            for column, value in row.items()
        }
        for row in rows
    ]


def _of_csv(table: Path) -> tuple[list[str], list[dict[str, str]]]:
    with table.open(newline="", encoding="utf-8-sig") as opened:
        read = csv.DictReader(opened, strict=True)
        return list(read.fieldnames or ()), list(read)


def _of_parquet(table: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Its columns as text; what is missing is none."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        remedy = 'pip install "fedgen[hugging_face]", or save it as CSV'
        raise FedgenError("data.path", f"{table} needs pyarrow", remedy) from error
    with table.open("rb") as opened:
        file = parquet.ParquetFile(opened, pre_buffer=False)
        parts = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
        size = sum(part.total_byte_size for part in parts)
        if size > _MOST_BYTES or file.metadata.num_rows > _MOST_ROWS:
            raise FedgenError("data.path", f"{table} is too large", "take part of it")
        names = file.schema_arrow.names
        if len(set(names)) < len(names):
            return names, [{}]  # said by whoever reads these
        found = file.read(use_threads=False)  # its threads may outlive what ends this process
    texts = {
        name: ["" if v is None else str(v) for v in column.to_pylist()]
        for name, column in zip(found.column_names, found.columns, strict=True)
    }
    rows = [dict(zip(texts, row, strict=True)) for row in zip(*texts.values(), strict=True)]
    return found.column_names, rows
