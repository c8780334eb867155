"""Lists of images: a CSV file with a header and a line per image, or a Parquet file.

| column | |
|---|---|
| ``path`` | file of the image, below the folder of the table; it is the name of the record |
| ``label`` | name of the label; all names are a setting, ``data.labels``, and public |
| ``client`` | optional: client of the image (``partition=by_folder``) |
| ``person`` | optional: person in the image (``privacy.unit=person``) |
| ``split`` | optional: ``train`` or ``test`` |

Settings choose other columns for labels and persons. Clients are numbered in the order of their
names, by value if all are whole numbers. A table may be untrusted: it may not name files outside
its folder, nor a file twice.
"""

from __future__ import annotations

import csv
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from fedgen.data.images import ImageFile
from fedgen.data.labels import combine, infer_names, sort_names
from fedgen.errors import FedgenError

TABLES = (".csv", ".parquet")
"""How names of tables end."""

_SHOWN = 20  # names per line
_LONG = 100  # characters of a name shown
SPLITS: dict[str, bool | None] = {"train": False, "test": True, "": None}
"""Split -> True for test, False for training; None: not specified."""

_MOST_BYTES, _MOST_ROWS = 2**30, 10**7


@dataclass(frozen=True)
class Record:
    """An image file, or a volume: its name, client, label, split (None: unknown) and person (empty:
    unknown)."""

    file: ImageFile
    name: str
    client: int
    label: int
    test: bool | None
    person: str = ""


@dataclass(frozen=True)
class Listing:
    """All records, names of labels, number of clients, whether labels are needed to distinguish
    records of the same name, and the names of columns that are not read."""

    records: list[Record]
    labels: list[str]
    clients: int
    labels_in_names: bool = False
    unread: tuple[str, ...] = ()


def read_listing(
    table: Path,
    label_names: Sequence[str] | None,
    label: str | Sequence[str] | None = None,
    person: str | None = None,
) -> Listing:
    """Return the records of a table.

    Args:
        label_names: names of labels; see ``labels.infer_names``.
        label: column, or binary columns; None: ``label``.
        person: column of persons; ignored if there is none of this name. None: ``person``.

    Raises:
        FedgenError: for the first problem.
    """
    rows = _rows(table)
    columns = [label] if isinstance(label, str) else list(label or ["label"])
    if lacking := [column for column in ("path", *columns) if column not in rows[0]]:
        problem = f"{table} has no column {' and no column '.join(lacking)}"
        first = ", ".join(repr(column[:_LONG]) for column in list(rows[0])[:_SHOWN])
        if label is not None and "path" in rows[0]:
            raise FedgenError("data.label", problem, f"choose from {first}")
        remedy = f"put the column names, separated by commas, in the first line, which has {first}"
        raise FedgenError("data.path", problem, remedy)
    person_column = "person" if person is None else person
    clients = number_names(row["client"] for row in rows) if "client" in rows[0] else {}
    numbers, labels = number_labels(
        str(table), rows, None if label is None else columns, label_names
    )
    records, seen = [], set()
    for number, (row, label_number) in enumerate(zip(rows, numbers, strict=True), 2):
        path, split = PurePosixPath(row["path"]), row.get("split", "")
        where = f"{table}, line {number}: {row['path'][:_LONG]!r}"
        file = _listed_file(table, path, where)
        if file in seen:
            problem = f"{where} is listed more than once"
            raise FedgenError("data.path", problem, "list each image once")
        seen.add(file)
        if split not in SPLITS:
            problem = f"{table}, line {number}: there is no split {split[:_LONG]!r}"
            raise FedgenError("data.path", problem, "write train or test, or leave it out")
        if person_column in row and not row[person_column]:
            problem = f"{table}, line {number}: the person is empty"
            raise FedgenError("data.path", problem, "fill it in, or remove the column")
        records.append(
            Record(
                table.parent / path,
                str(path),
                clients.get(row.get("client", ""), 0),
                label_number,
                SPLITS[split],
                row.get(person_column, ""),
            )
        )
    used = {"path", *columns, "client", person_column, "split"}
    unread = tuple(name[:_LONG] for name in rows[0] if name not in used)[:_SHOWN]
    return Listing(records, labels, max(len(clients), 1), unread=unread)


def _listed_file(table: Path, path: PurePosixPath, where: str) -> Path:
    """Return the file that a path in a table refers to, with links resolved. ``where``: the line of
    the table, for errors."""
    if path.is_absolute() or ".." in path.parts or "\0" in str(path) or not path.parts:
        problem = f"{where} is not a file below the table's folder"
        raise FedgenError("data.path", problem, "give paths from there")
    unreadable = FedgenError("data.path", f"{where} is not a file", "remove the line")
    try:
        file = (table.parent / path).resolve()
        exists = file.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # e.g. a circular link, or a long name
        raise unreadable from error
    if table.parent.resolve() not in file.parents:
        problem = f"{where} is outside the table's folder"
        raise FedgenError("data.path", problem, "copy the image there")
    if not exists:
        raise unreadable
    return file


def number_labels(
    where: str,
    rows: Sequence[Mapping[str, str]],
    columns: Sequence[str] | None,
    label_names: Sequence[str] | None,
) -> tuple[list[int], list[str]]:
    """Return the label of each row, and the public names of all labels.

    Args:
        columns: a column of names; or binary columns, which are combined (``labels.combine``):
            several, or one without ``label_names``. None: the column ``label``.
        label_names: names of the labels.

    Settings alone decide how columns are read: if values did, one record could change the labels
    of others.

    Raises:
        FedgenError: for invalid labels.
    """
    column = columns[0] if columns else "label"
    if columns and (len(columns) > 1 or label_names is None):
        bits = [[_BITS.get(row[name].casefold(), -1) for name in columns] for row in rows]
        remedy = "choose binary columns"
        if len(columns) == 1:
            remedy += ", or name the labels of this column: data.labels=[...]"
        combined, names = combine(where, columns, np.array(bits), label_names, remedy)
        return combined.tolist(), names
    if label_names is None:
        label_names = sort_names(row[column] for row in rows)
        examples = ",".join(name[:_LONG] for name in label_names[:_SHOWN])
        problem = f"is not set: labels are public, and not derived from {where}"
        raise FedgenError("data.labels", problem, f"e.g. data.labels=[{examples}]")
    labels = infer_names({row[column] for row in rows}, label_names)
    index = {name: number for number, name in enumerate(labels)}
    return [index[row[column]] for row in rows], labels


_BITS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}


def number_names(names: Iterable[str]) -> dict[str, int]:
    """Return a number for each distinct name, in sorted order."""
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
