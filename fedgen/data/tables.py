"""Lists of images: a CSV file with a header and a line per image, or a Parquet file.

| column | |
|---|---|
| ``path`` | file of the image, below the folder of the table; it is the name of the record |
| ``label`` | name of the label; all names are a setting, ``data.labels``, and public |
| ``client`` | optional: client of the image (``partition=by_folder``) |
| ``person`` | optional: person in the image (``privacy.unit=person``) |
| ``split`` | optional: ``train`` or ``test`` |

Clients are numbered in the order of their names, by value if all are whole numbers. A table may be
untrusted: it may not name files outside its folder, nor a file twice.
"""

from __future__ import annotations

import csv
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fedgen.data.labels import infer_names, sort_names
from fedgen.errors import FedgenError

TABLES = (".csv", ".parquet")
"""How names of tables end."""

_SHOWN = 20  # names per line
_LONG = 100  # characters of a name shown
_COLUMNS = ("path", "label", "client", "person", "split")
_SPLITS: dict[str, bool | None] = {"train": False, "test": True, "": None}
_MOST_BYTES, _MOST_ROWS = 2**30, 10**7


@dataclass(frozen=True)
class Record:
    """An image: its file, name, client, label, split (None: unknown) and person."""

    path: Path
    name: str
    client: int
    label: int
    test: bool | None
    person: int = -1


@dataclass(frozen=True)
class Listing:
    """All records, names of labels, number of clients, whether labels are needed to distinguish
    records of the same name, whether persons are known, and the names of columns that are not read.
    """

    records: list[Record]
    labels: list[str]
    clients: int
    labels_in_names: bool = False
    persons: bool = False
    unread: tuple[str, ...] = ()


def read_listing(table: Path, named: Sequence[str] | None) -> Listing:
    """Return the records of a table.

    Args:
        named: names of labels; see ``labels.infer_names``.

    Raises:
        FedgenError: for the first problem.
    """
    rows = _rows(table)
    columns = set(rows[0])
    if lacking := {"path", "label"} - columns:
        problem = f"{table} has no column {' and no column '.join(sorted(lacking))}"
        first = ", ".join(repr(column[:_LONG]) for column in list(rows[0])[:_SHOWN])
        remedy = f"put the column names, separated by commas, in the first line, which has {first}"
        raise FedgenError("data.path", problem, remedy)
    clients = _numbered(row["client"] for row in rows) if "client" in columns else {}
    persons = _numbered(row["person"] for row in rows) if "person" in columns else {}
    if named is None:
        label_names = sort_names(row["label"] for row in rows)
        examples = ",".join(name[:_LONG] for name in label_names[:_SHOWN])
        problem = "is not set: labels are public, and not derived from the table"
        raise FedgenError("data.labels", problem, f"e.g. data.labels=[{examples}]")
    labels = infer_names({row["label"] for row in rows}, named)
    home, seen = table.parent.resolve(), set()
    by_label = {name: number for number, name in enumerate(labels)}
    records = []
    for number, row in enumerate(rows, 2):
        path, split = PurePosixPath(row["path"]), row.get("split", "")
        where = f"{table}, line {number}: {row['path'][:_LONG]!r}"
        if path.is_absolute() or ".." in path.parts or "\0" in row["path"] or not path.parts:
            problem = f"{where} is not a file below the table's folder"
            raise FedgenError("data.path", problem, "give paths from there")
        try:
            really = (table.parent / path).resolve()
            exists = really.is_file()
        except (OSError, RuntimeError, ValueError):  # e.g. a circular link, or too long a name
            really, exists = table, False
        if home not in really.parents:
            problem = f"{where} is outside the table's folder"
            raise FedgenError("data.path", problem, "copy the image there")
        if not exists:
            raise FedgenError("data.path", f"{where} is not a file", "remove the line")
        if really in seen:
            problem = f"{where} is named more than once"
            raise FedgenError("data.path", problem, "list each image once")
        seen.add(really)
        if split not in _SPLITS:
            problem = f"{table}, line {number}: there is no split {split[:_LONG]!r}"
            raise FedgenError("data.path", problem, "write train or test, or leave it out")
        if persons and not row["person"]:
            problem = f"{table}, line {number}: the person is empty"
            raise FedgenError("data.path", problem, "fill it in, or remove the column")
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
    return Listing(records, labels, max(len(clients), 1), persons=bool(persons), unread=unread)


def _numbered(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(sort_names(names))}


def _rows(table: Path) -> list[dict[str, str]]:
    """Return all lines as dictionaries by column, each complete.

    Raises:
        FedgenError: for an unreadable, too large or empty table, duplicate columns, or a line with
            missing or additional fields.
    """
    try:
        if not table.is_file():  # a device is endless
            raise FedgenError("data.path", f"{table} is not a file", "give a table")
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
        problem = f"{table} has two columns with the same name"
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
    """Return its columns as text; missing values are empty."""
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
            return names, [{}]  # reported by the reader
        arrow_table = file.read(use_threads=False)  # threads may outlive the end of this process
    texts = {
        name: ["" if v is None else str(v) for v in column.to_pylist()]
        for name, column in zip(arrow_table.column_names, arrow_table.columns, strict=True)
    }
    rows = [dict(zip(texts, row, strict=True)) for row in zip(*texts.values(), strict=True)]
    return arrow_table.column_names, rows
