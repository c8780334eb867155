"""Spend on a data set over all runs in mode ``secure``, stored outside the run directories, so that
copying, restoring or deleting a directory does not reduce it.

A run is registered with its maximum spend before any client is queried. Its clients record their
spend before a response is sent. Entries are never removed and counts never decrease; triggers of
the database enforce this.

Bound. Runs on the same records compose adaptively. In each run, a record belongs to one client,
whose count of each event is at most the maximum over clients, so the sum of these maxima over runs
bounds the cost of every record for any partitions. For clients or persons the bound covers only
runs with the same partition, because otherwise the records of one client belong to several. An
unfinished run counts with its maximum spend, because it can be resumed. The adversary sees all
messages of clients (``server``).

Reserve, then settle. Where a missing response may reveal a sample, the maximum spend without that
amplification is registered too. A client reserves it in the database before it computes a response,
and the transaction that charges the response settles it. A process that dies in between leaves the
reservation, and the run counts with the larger spend from then on, even if its folder is copied,
moved or deleted. The same holds after a dropout that the server observed. The client also marks its
folder (``Ledger.reserve``), for a run that resumes on a machine with another database.

Proof. In a round of a client, only the computation of the response depends on the sample, so a
missing response depends on a sample only if this computation did not end. Its reservation is on
disk before it starts, and only a charge after its end deletes it. Hence in a run without
reservations and recorded dropouts no missing response depends on a sample, and the amplified spend
holds, provided that the survival of all processes does not depend on samples either. The larger
spend needs no such assumption. A stored key and the number of earlier charges determine each sample
(``RandomStreams.at_release``, ``at_round``), so a death does not lead to another sample, and the
samples of charged responses are independent. Their number is that of the plan, regardless of the
time of a death. So the number of visits is binomial even if an adversary sees all samples and
causes deaths.
"""

from __future__ import annotations

import errno
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from dp_accounting import DpEvent

from fedgen.errors import FedgenError
from fedgen.privacy.accounting import Epsilon, epsilon
from fedgen.privacy.events import Relation, Spend, Unit, from_json, to_json, total
from fedgen.privacy.ledger import spend_from_json, spend_to_json, with_reported
from fedgen.storage.io import fedgen_home, parse_json

_WAIT_SECONDS = 60.0  # for locks of other processes
_TABLES = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS runs (
    run TEXT PRIMARY KEY, data TEXT NOT NULL, shares TEXT NOT NULL, folder TEXT NOT NULL,
    unit TEXT NOT NULL, relation TEXT NOT NULL, most TEXT NOT NULL,
    over INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS charges (
    run TEXT NOT NULL, client INTEGER NOT NULL, event TEXT NOT NULL, count INTEGER NOT NULL,
    PRIMARY KEY (run, client, event)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS gaps (run TEXT PRIMARY KEY, most TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS wholes (run TEXT PRIMARY KEY, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS shown (run TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS reserved (
    run TEXT NOT NULL, client INTEGER NOT NULL, PRIMARY KEY (run, client)) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS shown_stay BEFORE DELETE ON shown
    BEGIN SELECT RAISE(ABORT, 'dropouts cannot be deleted'); END;
CREATE TRIGGER IF NOT EXISTS runs_stay BEFORE DELETE ON runs
    BEGIN SELECT RAISE(ABORT, 'runs cannot be deleted'); END;
CREATE TRIGGER IF NOT EXISTS charges_stay BEFORE DELETE ON charges
    BEGIN SELECT RAISE(ABORT, 'charges cannot be deleted'); END;
CREATE TRIGGER IF NOT EXISTS charges_grow BEFORE UPDATE ON charges
    WHEN NEW.count < OLD.count OR NEW.run != OLD.run OR NEW.client != OLD.client
        OR NEW.event != OLD.event
    BEGIN SELECT RAISE(ABORT, 'charges cannot decrease'); END;
COMMIT;
"""
_MOVE = "UPDATE runs SET folder = ? WHERE run = ?"
_READ = "SELECT run, data, shares, folder, unit, relation, most, over FROM runs "


@dataclass(frozen=True)
class Entry:
    """One run on a data set.

    data: digest of the records.
    partition: digest of the assignment of records to clients, by content.
    folder: where the run was started or last resumed.
    max_spend: maximum spend of a client by the plan; for a finished run, by its queries.
    charged: client -> spend by its own ledger.
    reserve: ``max_spend`` if a missing response may have revealed a sample; None if a missing
        response cannot reveal one.
    has_dropout: whether a missing response may have revealed a sample, or is being computed.
    full_data: digest of the records including the test split: file names may decide the split, so
        other names yield other training records. Runs with either digest in common are on the same
        data.
    """

    run: str
    data: str
    partition: str
    folder: str
    unit: Unit
    relation: Relation
    max_spend: Spend
    is_finished: bool = False
    charged: dict[int, Spend] = field(default_factory=dict)
    reserve: Spend | None = None
    has_dropout: bool = False
    full_data: str = ""

    @property
    def kind(self) -> tuple[Unit, Relation, str]:
        """Key of runs whose spends add up."""
        return self.unit, self.relation, "" if self.unit is Unit.RECORD else self.partition

    @property
    def spend(self) -> Spend:
        """Spend that the run counts with. Of a finished run, ``max_spend`` includes dropouts."""
        spends = list(self.charged.values())
        if self.reserve is not None and self.has_dropout and not self.is_finished:
            spends.append(self.reserve)
        return with_reported(self.max_spend, spends)


@dataclass(frozen=True)
class SpendDb:
    """The database. Each call opens it anew: threads, forks and other machines with a shared home
    folder may call concurrently.

    Raises:
        FedgenError: in every method, if the database cannot be read or written.
    """

    path: Path

    @classmethod
    def default(cls) -> SpendDb:
        """Return the database of this user."""
        try:
            return cls(fedgen_home() / "spent.sqlite")
        except RuntimeError as error:
            raise FedgenError("FEDGEN_HOME", str(error), "set it to another folder") from error

    def register(self, entry: Entry, check: Callable[[Entry, Sequence[Entry]], None]) -> None:
        """Register a run before its first query, unless its spend was accepted before.

        Args:
            check: receives the run as it would count and all other runs on its data, and raises to
                refuse; no other run is registered meanwhile.
        """
        with self._open() as file:
            file.execute("BEGIN IMMEDIATE")
            registered, is_finished = _max_spend(file, entry.run)
            entry = replace(
                entry,
                max_spend=with_reported(entry.max_spend, [registered or {}]),
                charged=_charged(file, entry.run),
                has_dropout=_has_dropout(file, entry.run),
            )
            file.execute(_MOVE, (entry.folder, entry.run))  # the run resumes there
            if entry.full_data:
                file.execute(
                    "INSERT OR IGNORE INTO wholes VALUES (?, ?)", (entry.run, entry.full_data)
                )
            if entry.reserve is not None:
                reserve = with_reported(entry.reserve, [_reserve(file, entry.run) or {}])
                entry = replace(entry, reserve=reserve)
                encoded = json.dumps(spend_to_json(reserve))
                file.execute("INSERT OR REPLACE INTO gaps VALUES (?, ?)", (entry.run, encoded))
            if not is_finished and not entry.has_dropout and entry.max_spend == registered:
                return
            others = _entries(file, entry.data, entry.full_data)
            check(entry, [other for other in others if other.run != entry.run])
            max_spend = json.dumps(spend_to_json(entry.max_spend))
            if registered is not None:
                statement = "UPDATE runs SET over = 0, most = ? WHERE run = ?"
                file.execute(statement, (max_spend, entry.run))
                return
            kinds = entry.unit.value, entry.relation.value
            file.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, 0)",
                (entry.run, entry.data, entry.partition, entry.folder, *kinds, max_spend),
            )

    def set_folder(self, run: str, folder: str) -> None:
        """Record the current folder of a finished run."""
        with self._open() as file:
            file.execute(_MOVE, (folder, run))

    def record_dropout(self, run: str) -> None:
        """Record permanently that a missing response may have revealed a sample of a run."""
        with self._open() as file:
            file.execute("INSERT OR IGNORE INTO shown VALUES (?)", (run,))

    def reserve(self, run: str, client: int) -> None:
        """Reserve the spend of a run with dropouts until its next ``charge`` to this client. Call
        before a response is computed, while no other process serves this client: a reservation that
        already exists is that of a process that died, and is recorded as a dropout."""
        with self._open() as file:
            file.execute("BEGIN IMMEDIATE")
            row = (run, client)
            if file.execute("INSERT OR IGNORE INTO reserved VALUES (?, ?)", row).rowcount == 0:
                file.execute("INSERT OR IGNORE INTO shown VALUES (?)", (run,))

    def has_dropout(self, run: str, *, reserved: bool = True) -> bool:
        """Return whether a missing response may have revealed a sample of a run.

        Args:
            reserved: whether responses that have not ended count. False while the run is training.
        """
        if not self.path.exists():  # do not create the database
            return False
        with self._open() as file:
            return _has_dropout(file, run, reserved)

    def finish(self, run: str, max_spend: Spend) -> None:
        """Record that a run is finished with this maximum spend; if it was finished before, with no
        less than was recorded then."""
        with self._open() as file:
            file.execute("BEGIN IMMEDIATE")
            previous, was_finished = _max_spend(file, run)
            encoded = json.dumps(
                spend_to_json(with_reported(max_spend, [(previous or {}) if was_finished else {}]))
            )
            file.execute("UPDATE runs SET over = 1, most = ? WHERE run = ?", (encoded, run))

    def charge(self, run: str, client: int, before: Spend, spent: Spend) -> None:
        """Record the total spend of a client in a run durably, and settle its reservation. Call
        before a response is sent.

        Args:
            before: spend before this charge. If more is recorded, a copy of the run is active at
                the same time, and this one is refused.
        """
        rows = [(run, client, json.dumps(to_json(event)), count) for event, count in spent.items()]
        with self._open() as file:
            file.execute("BEGIN IMMEDIATE")
            recorded = _charged(file, run, client).get(client, {})
            if any(count > before.get(event, 0) for event, count in recorded.items()):
                problem = f"a copy of run {run} is also charging client {client}"
                raise FedgenError("run_dir", problem, "resume only one of them")
            file.executemany(
                "INSERT INTO charges VALUES (?, ?, ?, ?) ON CONFLICT (run, client, event) "
                "DO UPDATE SET count = max(count, excluded.count)",
                rows,
            )
            file.execute("DELETE FROM reserved WHERE run = ? AND client = ?", (run, client))

    def charged(self, run: str, client: int) -> Spend:
        """Return the spend of a client in a run."""
        with self._open() as file:
            return _charged(file, run, client).get(client, {})

    def entries(self, data: str, full_data: str = "") -> list[Entry]:
        """Return all runs on a data set in order of registration."""
        with self._open() as file:
            return _entries(file, data, full_data)

    def other_folders(self, entries: Sequence[Entry]) -> list[str]:
        """Return the folders of all runs not in ``entries``, which are on other data."""
        with self._open() as file:
            rows = file.execute("SELECT run, folder FROM runs ORDER BY rowid").fetchall()
        runs = {entry.run for entry in entries}
        return [folder for run, folder in rows if run not in runs]

    def runs_on_same_data(self, run: str) -> list[Entry]:
        """Return all runs on the data of a run, including itself; empty if it is not registered."""
        with self._open() as file:
            statement = (
                "SELECT data, (SELECT data FROM wholes WHERE run = ?1) FROM runs WHERE run = ?1"
            )
            digests = file.execute(statement, (run,)).fetchone()
            return _entries(file, digests[0], digests[1] or "") if digests else []

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            connection = sqlite3.connect(self.path, timeout=_WAIT_SECONDS)
            with closing(connection) as file, file:
                file.execute("PRAGMA synchronous = EXTRA")  # outlives a power cut
                if not file.execute(
                    "SELECT 1 FROM sqlite_master WHERE name = 'reserved'"
                ).fetchone():
                    file.executescript(_TABLES)
                yield file
        except (sqlite3.Error, OSError, ValueError, TypeError, KeyError) as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise OSError(errno.ENOSPC, "no space left", str(self.path)) from error
            problem = f"cannot record the spend on data sets ({error})"
            remedy = "restore it, or set the environment variable FEDGEN_HOME to another folder"
            raise FedgenError(str(self.path), problem, remedy) from error


def _entries(file: sqlite3.Connection, data: str, full_data: str) -> list[Entry]:
    entries = []
    for run, digest, shares, folder, unit, relation, max_spend, is_finished in file.execute(
        _READ + "WHERE data = ? OR run IN (SELECT run FROM wholes WHERE data = ?) ORDER BY rowid",
        (data, full_data),
    ).fetchall():
        spend = spend_from_json(parse_json(max_spend))
        unit_and_relation = Unit(unit), Relation(relation)
        charged = _charged(file, run)
        entries.append(
            Entry(
                run,
                digest,
                shares,
                folder,
                *unit_and_relation,
                spend,
                bool(is_finished),
                charged,
                _reserve(file, run),
                _has_dropout(file, run),
            )
        )
    return entries


def _max_spend(file: sqlite3.Connection, run: str) -> tuple[Spend | None, bool]:
    """Return the maximum spend of a run, None if it is not registered, and whether it is
    finished."""
    row = file.execute("SELECT most, over FROM runs WHERE run = ?", (run,)).fetchone()
    return (spend_from_json(parse_json(row[0])), bool(row[1])) if row else (None, False)


def _reserve(file: sqlite3.Connection, run: str) -> Spend | None:
    row = file.execute("SELECT most FROM gaps WHERE run = ?", (run,)).fetchone()
    return spend_from_json(parse_json(row[0])) if row else None


def _has_dropout(file: sqlite3.Connection, run: str, reserved: bool = True) -> bool:
    tables = ("shown", "reserved") if reserved else ("shown",)
    return any(
        file.execute(f"SELECT 1 FROM {table} WHERE run = ?", (run,)).fetchone() for table in tables
    )


def _charged(file: sqlite3.Connection, run: str, only: int | None = None) -> dict[int, Spend]:
    spends: dict[int, dict[DpEvent, int]] = {}
    for client, event, count in file.execute(
        "SELECT client, event, count FROM charges WHERE run = ?1 AND client = ifnull(?2, client)",
        (run, only),
    ):
        spends.setdefault(client, {})[from_json(parse_json(event))] = int(count)
    return dict(spends)


def composed_epsilon(entries: Sequence[Entry], delta: float) -> Epsilon:
    """Return a bound on the cost of runs of one kind for any record or client."""
    [relation] = {entry.relation for entry in entries}
    return epsilon(total([entry.spend for entry in entries]), delta, relation)
