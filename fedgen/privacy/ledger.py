"""What each client has spent: append-only, a JSON line a release, written before the reply leaves.

The client's own ledger is authoritative. The server keeps a second one from the events that it
received; where they differ, the larger counts. Each line carries a seal over itself and all before
it: a line that is changed, moved or left out is noticed, as is the end, cut off, by the server.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Protocol

from dp_accounting import DpEvent

from fedgen.errors import FedgenError
from fedgen.files import as_json, digest
from fedgen.privacy.events import (
    RevealedDraw,
    Spend,
    canonical,
    from_json,
    to_json,
    total,
    with_draws_seen,
)

SCHEMA = 3


@dataclass(frozen=True)
class Account:
    """What a ledger comes to: releases charged, rows answered in them, and their canonical sum."""

    releases: int
    rows: int
    spend: Spend


class Outside(Protocol):
    """Where a run's clients write their spend down outside of its directory (``SpentFile``)."""

    def charged(self, run: str, client: int) -> Spend: ...

    def charge(self, run: str, client: int, before: Spend, spent: Spend) -> None: ...


class Ledger:
    """The spend of one client, in a file of its own.

    In mode ``seeded`` a round that is done again, with the same question after the same past,
    releases the very same numbers and is charged once. Everything else is charged anew: another
    question, and in mode ``secure`` the same one too, for fresh numbers, unless its answer was held
    and is sent again (``ClientStore.hold``).

    Several processes may charge one file, one at a time (see ``locked``): each reads what the
    others wrote before it charges.

    Args:
        outside: where spend is written down a second time, after the first, and before anything
            leaves: a ledger that was copied or restored is behind it.
        looking: nothing is written, not even where the file was cut short or is not there.

    Raises:
        FedgenError: if the file is not a ledger of this run and client, or lacks a charge.
    """

    def __init__(
        self,
        path: Path,
        run: str,
        client: int,
        seeded: bool,
        outside: Outside | None = None,
        *,
        looking: bool = False,
    ) -> None:
        self._path, self._seeded, self._looking = path, seeded, looking
        self._run, self._client, self._outside = run, client, outside
        self._asked: dict[int, list[str]] = {}  # round -> its questions, in mode seeded
        self._spend: Counter[DpEvent] = Counter()
        self._words: dict[DpEvent, tuple[str, Spend]] = {}
        self._events: dict[str, DpEvent] = {}
        self._head = json.dumps({"schema": SCHEMA, "run": run, "client": client}) + "\n"
        self._size = 0  # bytes read so far
        self._seal = digest(self._head.encode())
        self.releases, self.rows = 0, 0
        self.last = ""  # the question that was charged last
        if not looking:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            with self.locked():  # another process may be between its two charges
                self._hold_against_outside()
            return
        if path.exists():
            self.refresh()
        self._hold_against_outside()

    def _hold_against_outside(self) -> None:
        if self._outside is None:
            return
        charged = self._outside.charged(self._run, self._client)
        if any(self._spend[event] < count for event, count in charged.items()):
            problem = "lacks releases that its data were charged with: it is a copy, or was cut"
            raise FedgenError(str(self._path), problem, "go on with the run that made them")
        if not self._looking and self._spend != charged:  # killed between the two
            self._outside.charge(self._run, self._client, charged, dict(self._spend))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other threads and processes from this client while it handles a message."""
        with self._path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.refresh()
            yield

    def refresh(self) -> None:
        """Reads what was written since, by whomever."""
        if self._path.stat().st_size == self._size != 0:
            return
        with self._path.open("rb") as file:
            file.seek(self._size)
            raw = file.read()
        whole = raw[: raw.rfind(b"\n") + 1]
        text = whole.decode(errors="replace")
        if self._size == 0:
            head = self._head.encode()
            if not whole and head.startswith(raw):  # new, or it died while writing the first line
                if not self._looking:
                    self._path.write_bytes(head)
                    self._size = len(head)
                return
            if not text.startswith(self._head):
                raise FedgenError(str(self._path), "belongs to another run or client", _REMEDY)
            text = text[len(self._head) :]
        for line in text.splitlines():
            try:
                entry = as_json(line)
                body = line[: line.rindex(', "seal"')]
                self._seal = digest(self._seal.encode(), body.encode())
                if entry["seal"] != self._seal:
                    raise ValueError
                words = json.dumps(entry["event"])
                if words not in self._events:
                    self._events[words] = from_json(entry["event"])
                asked = str(entry["asked"]), int(entry["rows"])
                self._note(int(entry["round"]), *asked, self._events[words])
            except (ValueError, KeyError, TypeError) as error:
                raise FedgenError(str(self._path), "was altered", _REMEDY) from error
        self._size += len(whole)
        torn = len(raw) > len(whole)  # it died while charging: the reply had not left
        if torn and not self._looking:
            os.truncate(self._path, self._size)

    def is_repeat(self, server_round: int, asked: str) -> bool:
        """Whether the release is one that was charged before, to the last bit."""
        return asked in self._asked.get(server_round, [])

    def is_second(self, server_round: int, asked: str) -> bool:
        """Whether another question was asked and charged in the round before this one, which must
        not meet the secret draws of the first. Never in mode ``secure``: they are new each time."""
        questions = self._asked.get(server_round, [])
        return bool(questions) and questions[0] != asked

    def charge(self, server_round: int, asked: str, rows: int, event: DpEvent) -> None:
        """Writes the cost of a release of some rows down. Call before it leaves the client.

        ``asked``: a digest of all that the release is a function of, but for the client's rows.
        """
        if self.is_repeat(server_round, asked):
            return
        body = (
            f'{{"round": {server_round}, "asked": "{asked}", "rows": {rows}, '
            f'"event": {self._in_words(event)[0]}'
        )
        seal = digest(self._seal.encode(), body.encode())
        line = f'{body}, "seal": "{seal}"}}\n'
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            if os.write(file, line.encode()) != len(line):
                raise OSError(f"{self._path} took half a charge")
            if not self._seeded:
                os.fsync(file)  # spend that cannot be repeated outlives a power cut
        finally:
            os.close(file)
        self._size += len(line)
        self._seal = seal
        before = dict(self._spend)
        self._note(server_round, asked, rows, event)
        if self._outside:
            so_far = {leaf: self._spend[leaf] for leaf in self._in_words(event)[1]}
            self._outside.charge(self._run, self._client, before, so_far)

    def _in_words(self, event: DpEvent) -> tuple[str, Spend]:
        if event not in self._words:
            self._words[event] = (json.dumps(to_json(event)), canonical(event))
        return self._words[event]

    def _note(self, server_round: int, asked: str, rows: int, event: DpEvent) -> None:
        if self._seeded:
            self._asked.setdefault(server_round, []).append(asked)
        self.last = asked
        self._spend.update(self._in_words(event)[1])
        self.releases += 1
        self.rows += rows

    def account(self) -> Account:
        """All that was charged."""
        return Account(self.releases, self.rows, dict(self._spend))


_REMEDY = "restore it from a copy: spend that is not proven cannot be printed"


def larger(mine: Spend, theirs: Spend) -> Spend:
    """The larger count of each leaf event."""
    return {event: max(mine.get(event, 0), theirs.get(event, 0)) for event in {**mine, **theirs}}


def with_told(planned: Spend, told: Iterable[Spend]) -> Spend:
    """The larger of what a plan counts and of what clients told, who do not know that a missing
    answer may have shown a draw: where one of them counts draws as seen, they are in all."""
    found = [planned, *told]
    seen = any(isinstance(event, RevealedDraw) for each in found for event in each)
    return reduce(larger, (with_draws_seen(each) if seen else each for each in found))


def spend_to_json(spend: Spend) -> list[list[object]]:
    """[[event, count], ...] as plain data."""
    return [[to_json(event), count] for event, count in spend.items()]


def spend_from_json(data: list[list[object]]) -> Spend:
    """The inverse of ``spend_to_json``. Raises ValueError if it is none."""
    parts = []
    for event, count in data:
        if not isinstance(event, dict) or not isinstance(count, int):
            raise ValueError("not a spend")
        parts.append(canonical(from_json(event), count))
    return total(parts)
