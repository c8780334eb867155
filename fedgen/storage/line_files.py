"""Files of JSON lines, to which a run appends; a truncated last line is ignored."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedgen.errors import FedgenError
from fedgen.storage.io import parse_json, sync

_LINE_BYTES = 2**16  # more than a line of metrics


def append_line(path: Path, line: object, durable: bool = False) -> None:
    """Append a line of JSON, replacing a truncated one.

    Args:
        durable: wait for the disk.
    """
    with path.open("a+b") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LINE_BYTES))
        torn = len(file.read().rpartition(b"\n")[2])
        if torn:
            file.truncate(file.seek(0, os.SEEK_END) - torn)
        file.write(json.dumps(line).encode() + b"\n")
        if durable:
            sync(file, path)


def read_lines(path: Path) -> list[Any]:
    """Return the lines of an append-only file as JSON, without a truncated last one; empty if the
    file is missing.

    Raises:
        FedgenError: for other invalid lines.
    """
    if not path.exists():
        return []
    try:
        return [parse_json(line) for line in path.read_text().split("\n")[:-1]]
    except ValueError as error:
        raise FedgenError(str(path), "was altered", "restore it") from error


def last_lines(path: Path) -> Iterator[Any]:
    """Yield the last complete lines as JSON, newest first, even while another process writes; none
    if the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LINE_BYTES))
            complete_lines = file.read().rpartition(b"\n")[0]
        yield from (json.loads(line) for line in reversed(complete_lines.splitlines()))
    except (OSError, ValueError):
        return
