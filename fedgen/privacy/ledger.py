"""Ledger of a client's spend: append-only, one JSON line per release, written before the response
is sent.

The ledger of the client is authoritative. The server keeps a second record of the events that it
received; where they differ, the larger count is used. Each line carries a digest of itself and all
lines before it, so that changed, moved or missing lines are detected; the server detects a
truncated end.
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
from fedgen.privacy.events import (
    RevealedSampling,
    Spend,
    canonical,
    from_json,
    to_json,
    total,
    with_sampling_revealed,
)
from fedgen.storage.io import digest, parse_json

SCHEMA = 3
RESERVED, DIED = "answering", "died"
"""Mark files in the folder of a client, by the names of 0.1.0: a response is being computed; a
process died while it computed one."""


@dataclass(frozen=True)
class Account:
    """Sum of a ledger: number of releases, query samples in them, and their canonical spend."""

    releases: int
    samples: int
    spend: Spend


class SpendStore(Protocol):
    """Record of a run's spend outside its directory (``SpendDb``)."""

    def charged(self, run: str, client: int) -> Spend: ...

    def reserve(self, run: str, client: int) -> None: ...

    def charge(self, run: str, client: int, before: Spend, spent: Spend) -> None: ...


class Ledger:
    """Spend of one client, stored in its own file.

    In mode ``seeded``, a repeated round with the same query and history releases the same numbers
    and is charged once. Everything else is charged again: a different query, and in mode ``secure``
    also the same query, because the noise is fresh, unless the stored response is sent again
    (``ClientStore.store_response``).

    Several processes may charge the same file, one at a time (see ``locked``); each reads the
    charges of the others first.

    Args:
        spend_db: second record of the spend, written after the ledger and before a response is
            sent, so that a ledger that was copied or restored is behind it.
        read_only: write nothing, not even to create or repair the file.

    Raises:
        FedgenError: if the file is not the ledger of this run and client, or lacks a charge.
    """

    def __init__(
        self,
        path: Path,
        run: str,
        client: int,
        seeded: bool,
        spend_db: SpendStore | None = None,
        *,
        read_only: bool = False,
    ) -> None:
        self._path, self._seeded, self._looking = path, seeded, read_only
        self._reserved = path.with_name(RESERVED)
        self._run, self._client, self._outside = run, client, spend_db
        self._asked: dict[int, list[str]] = {}  # round -> digests of its queries, in mode seeded
        self._spend: Counter[DpEvent] = Counter()
        self._words: dict[DpEvent, tuple[str, Spend]] = {}
        self._events: dict[str, DpEvent] = {}
        self._head = json.dumps({"schema": SCHEMA, "run": run, "client": client}) + "\n"
        self._size = 0  # bytes read so far
        self._seal = digest(self._head.encode())
        self.releases, self.rows = 0, 0
        self.last = ""  # digest of the query that was charged last
        self.last_round = -1  # of all charges
        if not read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            with self.locked():  # another process may be between its two writes
                self._compare_with_spend_db()
            return
        if path.exists():
            self.refresh()
        self._compare_with_spend_db()

    def _compare_with_spend_db(self) -> None:
        if self._outside is None:
            return
        charged = self._outside.charged(self._run, self._client)
        if any(self._spend[event] < count for event, count in charged.items()):
            problem = "lacks releases that were charged: it is an old copy or was truncated"
            raise FedgenError(str(self._path), problem, "resume the original run directory")
        if not self._looking and self._spend != charged:  # killed between the two
            self._outside.charge(self._run, self._client, charged, dict(self._spend))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other threads and processes from this client while it handles a message."""
        with self._path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.refresh()
            yield

    def refresh(self) -> None:
        """Read charges that this or another process has written since."""
        if self._path.stat().st_size == self._size != 0:
            return
        with self._path.open("rb") as file:
            file.seek(self._size)
            raw = file.read()
        complete = raw[: raw.rfind(b"\n") + 1]
        text = complete.decode(errors="replace")
        if self._size == 0:
            head = self._head.encode()
            if not complete and head.startswith(raw):  # new, or killed while writing the first line
                if not self._looking:
                    self._path.write_bytes(head)
                    self._size = len(head)
                return
            if not text.startswith(self._head):
                raise FedgenError(str(self._path), "belongs to a different run or client", _REMEDY)
            text = text[len(self._head) :]
        for line in text.splitlines():
            try:
                entry = parse_json(line)
                body = line[: line.rindex(', "seal"')]
                self._seal = digest(self._seal.encode(), body.encode())
                if entry["seal"] != self._seal:
                    raise ValueError
                encoded = json.dumps(entry["event"])
                if encoded not in self._events:
                    self._events[encoded] = from_json(entry["event"])
                query = str(entry["asked"]), int(entry["rows"])
                self._record(int(entry["round"]), *query, self._events[encoded])
            except (ValueError, KeyError, TypeError) as error:
                raise FedgenError(str(self._path), "was altered", _REMEDY) from error
        self._size += len(complete)
        torn = len(raw) > len(complete)  # killed while charging, before the response was sent
        if torn and not self._looking:
            os.truncate(self._path, self._size)

    def is_repeated(self, server_round: int, query: str) -> bool:
        """Return whether a release was charged before and repeats it to the last bit."""
        return query in self._asked.get(server_round, [])

    def is_second_query(self, server_round: int, query: str) -> bool:
        """Return whether a different query was charged first in this round. Its secret samples must
        not be reused. Always False in mode ``secure``, where they are fresh."""
        queries = self._asked.get(server_round, [])
        return bool(queries) and queries[0] != query

    def reserve(self) -> None:
        """Reserve the spend of a missing response until the next charge, in ``SpendDb`` and by a
        mark in the folder of the client. A mark that is already there becomes permanent: the
        process that left it died."""
        if self._reserved.exists():
            self._path.with_name(DIED).touch()
        self._reserved.touch()
        if self._outside:
            self._outside.reserve(self._run, self._client)

    def charge(self, server_round: int, query: str, samples: int, event: DpEvent) -> None:
        """Write the event of a release. Call before the response leaves the client.

        Args:
            query: digest of everything that determines the release except the client's records.
            samples: number of query samples.
        """
        if self.is_repeated(server_round, query):
            return
        body = (
            f'{{"round": {server_round}, "asked": "{query}", "rows": {samples}, '
            f'"event": {self._encode(event)[0]}'
        )
        seal = digest(self._seal.encode(), body.encode())
        line = f'{body}, "seal": "{seal}"}}\n'
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            if os.write(file, line.encode()) != len(line):
                raise OSError(f"{self._path}: incomplete write")
            if not self._seeded:
                os.fsync(file)  # spend of fresh noise must survive a power failure
        finally:
            os.close(file)
        self._size += len(line)
        self._seal = seal
        before = dict(self._spend)
        self._record(server_round, query, samples, event)
        if self._outside:
            so_far = {leaf: self._spend[leaf] for leaf in self._encode(event)[1]}
            self._outside.charge(self._run, self._client, before, so_far)
        self._reserved.unlink(missing_ok=True)

    def _encode(self, event: DpEvent) -> tuple[str, Spend]:
        if event not in self._words:
            self._words[event] = (json.dumps(to_json(event)), canonical(event))
        return self._words[event]

    def _record(self, server_round: int, query: str, rows: int, event: DpEvent) -> None:
        if self._seeded:
            self._asked.setdefault(server_round, []).append(query)
        self.last, self.last_round = query, max(self.last_round, server_round)
        self._spend.update(self._encode(event)[1])
        self.releases += 1
        self.rows += rows

    def account(self) -> Account:
        """Return the sum of all charges."""
        return Account(self.releases, self.rows, dict(self._spend))


_REMEDY = "restore it from a backup; fedgen cannot prove the spend otherwise"


def died_while_responding(folder: Path) -> bool:
    """Return whether a process died while it computed a response of the client with this folder.
    Call while no client responds."""
    return any((folder / mark).exists() for mark in (RESERVED, DIED))


def elementwise_max(first: Spend, second: Spend) -> Spend:
    """Return the larger count of each leaf event."""
    return {event: max(first.get(event, 0), second.get(event, 0)) for event in {**first, **second}}


def with_reported(planned: Spend, reported: Iterable[Spend]) -> Spend:
    """Return the larger of the planned and the reported spends. Clients do not know whether a
    missing response has revealed a sample: if one spend counts samples as revealed, all do."""
    spends = [planned, *reported]
    revealed = any(isinstance(event, RevealedSampling) for spend in spends for event in spend)
    return reduce(
        elementwise_max, (with_sampling_revealed(spend) if revealed else spend for spend in spends)
    )


def spend_to_json(spend: Spend) -> list[list[object]]:
    """Return [[event, count], ...] as JSON data."""
    return [[to_json(event), count] for event, count in spend.items()]


def spend_from_json(data: list[list[object]]) -> Spend:
    """Return the spend of JSON data. Raises ValueError for invalid data."""
    parts = []
    for event, count in data:
        if not isinstance(event, dict) or not isinstance(count, int):
            raise ValueError("not a spend")
        parts.append(canonical(from_json(event), count))
    return total(parts)
