"""What each client has spent: append-only, a JSON line a release, written before the reply leaves.

The client's own ledger is authoritative. The server keeps a second one from the events that it
received; where they differ, the larger counts.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from dp_accounting import DpEvent

from fedgen.errors import FedgenError
from fedgen.privacy.events import Spend, canonical, from_json, to_json, total

SCHEMA = 1


class Ledger:
    """The spend of one client, in a file of its own.

    In mode ``seeded`` a round that is done again releases the very same numbers, and is charged
    once. In mode ``secure`` it releases fresh ones, and is charged again.

    Raises:
        FedgenError: if the file is not a ledger of this run and client.
    """

    def __init__(self, path: Path, run: str, client: int, seeded: bool) -> None:
        self._path, self._seeded = path, seeded
        self._written: dict[int, tuple[int, DpEvent]] = {}  # round -> (rows, event), seeded mode
        self._spend: Counter[DpEvent] = Counter()
        self._words: dict[DpEvent, tuple[str, Spend]] = {}
        self._ahead: set[int] = set()  # written, and not yet done again after a rewind
        self.releases, self.rows = 0, 0
        head = json.dumps({"schema": SCHEMA, "run": run, "client": client})
        if path.exists() and path.stat().st_size > 0:
            self._read(head)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(head + "\n")

    def _read(self, head: str) -> None:
        text = self._path.read_text(errors="replace")
        whole, _, torn = text.rpartition("\n")
        lines = whole.split("\n") if whole else []
        if not lines and head.startswith(torn):  # it died while writing the first line
            self._path.write_text(head + "\n")
            return
        if not lines or lines[0] != head:
            raise FedgenError(str(self._path), "belongs to another run or client", _REMEDY)
        for line in lines[1:]:
            try:
                entry = json.loads(line)
                self._note(int(entry["round"]), int(entry["rows"]), from_json(entry["event"]))
            except (ValueError, KeyError, TypeError) as error:
                raise FedgenError(str(self._path), "is not a ledger any more", _REMEDY) from error
        if torn:  # it died while charging: the reply had not left
            os.truncate(self._path, len(whole.encode()) + 1)

    def is_repeat(self, server_round: int) -> bool:
        """Whether the round's release is one that was charged before, to the last bit."""
        return server_round in self._written

    def charge(self, server_round: int, rows: int, event: DpEvent) -> None:
        """Writes the cost of a release of some rows down. Call before it leaves the client."""
        if self.is_repeat(server_round):
            if server_round in self._ahead:
                self._ahead.remove(server_round)
                self._note(server_round, rows, event)
            return
        if event not in self._words:
            self._words[event] = (json.dumps(to_json(event)), canonical(event))
        words = self._words[event][0]
        line = f'{{"round": {server_round}, "rows": {rows}, "event": {words}}}\n'
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            if os.write(file, line.encode()) != len(line):
                raise OSError(f"{self._path} took half a charge")
            if not self._seeded:
                os.fsync(file)  # spend that cannot be repeated outlives a power cut
        finally:
            os.close(file)
        self._note(server_round, rows, event)

    def _note(self, server_round: int, rows: int, event: DpEvent) -> None:
        if self._seeded:
            self._written[server_round] = (rows, event)
        self._spend.update(self._words[event][1] if event in self._words else canonical(event))
        self.releases += 1
        self.rows += rows

    def rewind(self, rounds: int) -> None:
        """Goes back to where ``rounds`` rounds were done; in mode ``seeded`` alone. What was
        written of later rounds stays written, and counts again when the run gets there: the
        release is the same to the last bit."""
        entries = dict(self._written)
        if not self._seeded or all(server_round < rounds for server_round in entries):
            return
        self._spend.clear()
        self.releases, self.rows = 0, 0
        self._ahead = {server_round for server_round in entries if server_round >= rounds}
        for server_round, (rows, event) in entries.items():
            if server_round < rounds:
                self._note(server_round, rows, event)

    def spend(self) -> Spend:
        """All that was charged, canonical."""
        return dict(self._spend)


_REMEDY = "restore it from a copy: spend that is not proven cannot be printed"


def larger(mine: Spend, theirs: Spend) -> Spend:
    """The larger count of each leaf event."""
    return {event: max(mine.get(event, 0), theirs.get(event, 0)) for event in {**mine, **theirs}}


def spends_to_json(spends: Mapping[int, Spend]) -> dict[str, list[list[object]]]:
    """Client -> [[event, count], ...] as plain data."""
    return {
        str(client): [[to_json(event), count] for event, count in spend.items()]
        for client, spend in sorted(spends.items())
    }


def spends_from_json(data: Mapping[str, list[list[object]]]) -> dict[int, Spend]:
    """The inverse of ``spends_to_json``."""
    spends = {}
    for client, leaves in data.items():
        parts = []
        for event, count in leaves:
            if not isinstance(event, dict) or not isinstance(count, int):
                raise ValueError("not a spend")
            parts.append(canonical(from_json(event), count))
        spends[int(client)] = total(parts)
    return spends
