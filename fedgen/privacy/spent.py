"""What the rows of a data set have cost over all runs in mode ``secure``: one file outside of the
run directories, so that a directory that is copied, restored or deleted takes nothing back.

A run is entered, with the most that it may spend, before any client is asked. Its clients write
down here what they have spent before an answer leaves. Entries are never removed and counts never
fall: the file's own triggers refuse it.

The bound. Runs on the same rows compose (adaptively: a later run may follow from what an earlier
one showed). A row is of one client in each run, at most the one that spent most of each event, so
the sum over the runs of these largest counts bounds what every row has cost, however each run
shares the rows out. What every client, or person, has cost it bounds only over runs in which they
have the same rows: elsewhere one client's rows are many clients'. A run that is not over counts
with all that it may spend: it can be resumed. What that is where a missing answer shows a draw is
entered beside it. The adversary is the one who sees what every client sends (``server``).
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
from fedgen.files import as_json, home
from fedgen.privacy.accounting import Epsilon, epsilon
from fedgen.privacy.events import Relation, Spend, Unit, from_json, to_json, total
from fedgen.privacy.ledger import spend_from_json, spend_to_json, with_told

_WAIT_SECONDS = 60.0  # for other processes that write
_TABLES = """
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
CREATE TRIGGER IF NOT EXISTS shown_stay BEFORE DELETE ON shown
    BEGIN SELECT RAISE(ABORT, 'what was seen stays seen'); END;
CREATE TRIGGER IF NOT EXISTS runs_stay BEFORE DELETE ON runs
    BEGIN SELECT RAISE(ABORT, 'an entry stays'); END;
CREATE TRIGGER IF NOT EXISTS charges_stay BEFORE DELETE ON charges
    BEGIN SELECT RAISE(ABORT, 'a charge stays'); END;
CREATE TRIGGER IF NOT EXISTS charges_grow BEFORE UPDATE ON charges
    WHEN NEW.count < OLD.count OR NEW.run != OLD.run OR NEW.client != OLD.client
        OR NEW.event != OLD.event
    BEGIN SELECT RAISE(ABORT, 'a charge does not fall'); END;
"""
_MOVE = "UPDATE runs SET folder = ? WHERE run = ?"
_READ = "SELECT run, data, shares, folder, unit, relation, most, over FROM runs "


@dataclass(frozen=True)
class Entry:
    """One run on a data set.

    data: the digest of its rows. shares: a digest of whose they are, by what they are. folder:
    where the run was begun, or went on last. most: what a client spends at most, by the plan; of a
    run that is over, for the rows that it was asked for. charged: client -> what it has spent, by
    its own ledger. gaps: ``most`` where a missing answer may have shown a draw; None where no draw
    can be shown so. whole: the digest of its rows and of the test split's: where names decide which
    rows train, other names leave others. Runs are on the same data where either digest is the same.
    """

    run: str
    data: str
    shares: str
    folder: str
    unit: Unit
    relation: Relation
    most: Spend
    over: bool = False
    charged: dict[int, Spend] = field(default_factory=dict)
    gaps: Spend | None = None
    whole: str = ""

    @property
    def kind(self) -> tuple[Unit, Relation, str]:
        """What runs have in common whose costs add up."""
        return self.unit, self.relation, "" if self.unit is Unit.RECORD else self.shares

    @property
    def cost(self) -> Spend:
        """What the run counts with against any row."""
        return with_told(self.most, self.charged.values())


@dataclass(frozen=True)
class SpentFile:
    """The file. Each call opens it anew: threads, forks and other machines of a shared home may
    call at the same time.

    Raises:
        FedgenError: by every call, if it cannot be read or written.
    """

    path: Path

    @classmethod
    def at_home(cls) -> SpentFile:
        """That of this machine."""
        try:
            return cls(home() / "spent.sqlite")
        except RuntimeError as error:
            raise FedgenError("FEDGEN_HOME", str(error), "name another place") from error

    def enter(
        self, entry: Entry, check: Callable[[Entry, Sequence[Entry]], None], anew: bool = False
    ) -> None:
        """Enters a run that is about to ask, unless it counts already with all that it may spend.
        ``check`` gets the run as it is to count, and all others on its data, and raises to refuse;
        no other run is entered meanwhile. ``anew``: it was checked for less."""
        with self._open() as file:
            file.execute("BEGIN IMMEDIATE")
            known, over = _most(file, entry.run)
            charged = _charged(file, entry.run)
            entry = replace(entry, most=with_told(entry.most, [known or {}]), charged=charged)
            anew = anew or over or entry.most != known
            file.execute(_MOVE, (entry.folder, entry.run))  # it goes on there now
            if entry.whole:
                file.execute("INSERT OR IGNORE INTO wholes VALUES (?, ?)", (entry.run, entry.whole))
            if entry.gaps is not None:
                gaps, kept = json.dumps(spend_to_json(entry.gaps)), "REPLACE" if anew else "IGNORE"
                file.execute(f"INSERT OR {kept} INTO gaps VALUES (?, ?)", (entry.run, gaps))
            if known is not None and not anew:
                return
            others = _entries(file, entry.data, entry.whole)
            check(entry, [each for each in others if each.run != entry.run])
            most = json.dumps(spend_to_json(entry.most))
            if known is not None:
                longer = "UPDATE runs SET over = 0, most = ? WHERE run = ?"
                file.execute(longer, (most, entry.run))
                return
            kinds = entry.unit.value, entry.relation.value
            file.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, 0)",
                (entry.run, entry.data, entry.shares, entry.folder, *kinds, most),
            )

    def moved(self, run: str, folder: str) -> None:
        """Notes where a run is now that is over, and asks for nothing more."""
        with self._open() as file:
            file.execute(_MOVE, (folder, run))

    def widen(self, run: str, most: Spend) -> None:
        """Notes that a run may spend so much, and no less than was said before, unless it is
        over."""
        with self._open() as file:
            file.execute("BEGIN IMMEDIATE")
            words = json.dumps(spend_to_json(with_told(most, [_most(file, run)[0] or {}])))
            file.execute("UPDATE runs SET most = ? WHERE run = ? AND over = 0", (words, run))

    def show(self, run: str, most: Spend) -> None:
        """Notes for good that a missing answer may have shown a draw of a run, which counts with so
        much then."""
        with self._open() as file:
            file.execute("INSERT OR IGNORE INTO shown VALUES (?)", (run,))
        self.widen(run, most)

    def showed(self, run: str) -> bool:
        """Whether that was noted: a directory that is a copy from before it does not tell."""
        if not self.path.exists():  # looking makes nothing
            return False
        with self._open() as file:
            return file.execute("SELECT 1 FROM shown WHERE run = ?", (run,)).fetchone() is not None

    def close(self, run: str, most: Spend) -> None:
        """Notes that a run is over, and spends no more than that; if it was over, no less than was
        noted then."""
        with self._open() as file:
            file.execute("BEGIN IMMEDIATE")
            before, over = _most(file, run)
            words = json.dumps(spend_to_json(with_told(most, [(before or {}) if over else {}])))
            file.execute("UPDATE runs SET over = 1, most = ? WHERE run = ?", (words, run))

    def charge(self, run: str, client: int, before: Spend, spent: Spend) -> None:
        """Notes what a client has spent in a run so far, durably. Call before an answer leaves.

        before: what it had spent until then. Where there is more here, a copy of the run goes on
            beside it, and this one is refused: each charge is one that nobody else has made.
        """
        rows = [(run, client, json.dumps(to_json(event)), n) for event, n in spent.items()]
        with self._open() as file:
            file.execute("BEGIN IMMEDIATE")
            here = _charged(file, run, client).get(client, {})
            if any(count > before.get(event, 0) for event, count in here.items()):
                problem = f"a copy of run {run} spends client {client}'s rows beside it"
                raise FedgenError("run_dir", problem, "go on with one of them")
            file.executemany(
                "INSERT INTO charges VALUES (?, ?, ?, ?) ON CONFLICT (run, client, event) "
                "DO UPDATE SET count = max(count, excluded.count)",
                rows,
            )

    def charged(self, run: str, client: int) -> Spend:
        """What a client has spent in a run."""
        with self._open() as file:
            return _charged(file, run, client).get(client, {})

    def entries(self, data: str, whole: str = "") -> list[Entry]:
        """All runs on a data set, in the order in which they were entered."""
        with self._open() as file:
            return _entries(file, data, whole)

    def elsewhere(self, known: Sequence[Entry]) -> list[str]:
        """The folders of all runs but those that are ``known``: on other data."""
        with self._open() as file:
            found = file.execute("SELECT run, folder FROM runs ORDER BY rowid").fetchall()
        runs = {entry.run for entry in known}
        return [folder for run, folder in found if run not in runs]

    def beside(self, run: str) -> list[Entry]:
        """All runs on a run's data, itself too; none if it was not entered."""
        with self._open() as file:
            whole = "SELECT data, (SELECT data FROM wholes WHERE run = ?1) FROM runs WHERE run = ?1"
            found = file.execute(whole, (run,)).fetchone()
            return _entries(file, found[0], found[1] or "") if found else []

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            opened = sqlite3.connect(self.path, timeout=_WAIT_SECONDS)
            with closing(opened) as file, file:
                file.execute("PRAGMA synchronous = FULL")  # outlives a power cut
                if not file.execute("SELECT 1 FROM sqlite_master WHERE name = 'shown'").fetchone():
                    file.executescript(_TABLES)
                yield file
        except (sqlite3.Error, OSError, ValueError, TypeError, KeyError) as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise OSError(errno.ENOSPC, "no space left", str(self.path)) from error
            problem = f"what data sets have cost cannot be kept ({error})"
            remedy = "restore it, or have the environment variable FEDGEN_HOME name another place"
            raise FedgenError(str(self.path), problem, remedy) from error


def _entries(file: sqlite3.Connection, data: str, whole: str) -> list[Entry]:
    found = []
    for run, rows, shares, folder, unit, relation, most, over in file.execute(
        _READ + "WHERE data = ? OR run IN (SELECT run FROM wholes WHERE data = ?) ORDER BY rowid",
        (data, whole),
    ).fetchall():
        spend = spend_from_json(as_json(most))
        kinds = Unit(unit), Relation(relation)
        charged = _charged(file, run)
        shown = file.execute("SELECT most FROM gaps WHERE run = ?", (run,)).fetchone()
        gaps = spend_from_json(as_json(shown[0])) if shown else None
        found.append(Entry(run, rows, shares, folder, *kinds, spend, bool(over), charged, gaps))
    return found


def _most(file: sqlite3.Connection, run: str) -> tuple[Spend | None, bool]:
    """What a run may spend, None if it was not entered, and whether it is over."""
    found = file.execute("SELECT most, over FROM runs WHERE run = ?", (run,)).fetchone()
    return (spend_from_json(as_json(found[0])), bool(found[1])) if found else (None, False)


def _charged(file: sqlite3.Connection, run: str, only: int | None = None) -> dict[int, Spend]:
    spends: dict[int, dict[DpEvent, int]] = {}
    for client, event, count in file.execute(
        "SELECT client, event, count FROM charges WHERE run = ?1 AND client = ifnull(?2, client)",
        (run, only),
    ):
        spends.setdefault(client, {})[from_json(as_json(event))] = int(count)
    return dict(spends)


def spent_together(entries: Sequence[Entry], delta: float) -> Epsilon:
    """A bound on what runs of one kind have cost any row, or any client."""
    [relation] = {entry.relation for entry in entries}
    return epsilon(total([entry.cost for entry in entries]), delta, relation)
