"""The run directory: all files of a run, each replaced atomically or appended line by line; a
truncated last line is ignored."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import jsonschema
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from fedgen.errors import FedgenError
from fedgen.storage.folders import make_folder, not_writable
from fedgen.storage.io import (
    check_no_links,
    digest,
    is_temporary,
    read_json,
    read_yaml,
    write_atomic,
)
from fedgen.storage.line_files import append_line, last_lines, read_lines
from fedgen.storage.schemas import validator

_SEALED = (
    "privacy.json",
    *(f"public/{n}" for n in ("PRIVACY.md", "generator.json", "generator.safetensors")),
    "public/samples.png",
    "public/README.md",
    "public/account.json",  # only with privacy.noise=secure
    "selection.json",  # only of a run that fedgen tune selected
)
_WRITTEN = (
    *("metrics.jsonl", "failures.jsonl", "sums.jsonl", "rounds_begun.txt", "results.json"),
    *("privacy.json", "epsilon.png", "public/samples.png", "public/generator.safetensors"),
    *("public/generator.json", "public/PRIVACY.md", "public/README.md"),
    "public/account.json",
)
"""Files that a run writes before it ends."""
_NEW_RUN_FILES = (
    *("SERVER_SIDE.md", "run.json", "config.yaml", "nodes.json", "partition.png", "unanswered"),
    *("clients", "samples", "public", "checkpoints", "metrics.jsonl", "failures.jsonl"),
)
"""Paths that a new run may create before its first query to a client."""
_READ_LOCK_SECONDS = 1.0  # limit on the time of a reader

SERVER_SIDE = """\
# Not for release

Keep this folder on the server. Publish only `public/`, and only that of a run with secure noise,
which `fedgen release` produces. A seeded run is an experiment: publish nothing of it.
`public/PRIVACY.md` states which of the two this is.

Ledgers, bytes and failures reveal which clients responded and when; checkpoints may reveal more.
Evaluation uses private images without noise, and `nearest.png` shows some of them; `partition.png`
counts the labels of each client.
"""


class RunDir:
    """Paths and writers of a run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.clients = path / "clients"
        self.samples = path / "samples"
        self.public = path / "public"
        self.unanswered = path / "unanswered"  # exists if a client did not respond
        self._begun = path / "rounds_begun.txt"
        self._metrics = path / "metrics.jsonl"
        self._failures = path / "failures.jsonl"
        self._sums = path / "sums.jsonl"
        self._opened: dict[str, str] | None = None
        self._made, self._before = (
            False,
            set[str](),
        )  # created by this process; entries that existed before

    @classmethod
    def create(cls, path: Path, config: DictConfig, identity: dict[str, Any]) -> RunDir:
        """Create a run directory with its resolved configuration. Of several concurrent processes,
        one succeeds.

        Raises:
            FedgenError: if ``path`` is in use.
        """
        taken = FedgenError(
            "run_dir", f"{path} exists", f"choose another, or continue with resume={path}"
        )
        if path.exists() and not _is_unused(path):
            raise taken
        run = cls(path)
        run._made = not path.exists()
        run._before = {entry.name for entry in path.iterdir()} if not run._made else set()
        make_folder(path)
        try:
            with (path / "SERVER_SIDE.md").open("ab") as held:  # written by every run
                if not _locked(held, fcntl.LOCK_EX) or not _is_unused(path):
                    raise taken
                held.truncate(0)
                held.write(SERVER_SIDE.encode())
                for folder in (run.clients, run.samples, run.public):
                    make_folder(folder)
                run.identify(identity)
                write_atomic(path / "config.yaml", OmegaConf.to_yaml(config, resolve=True).encode())
        except OSError as error:
            raise not_writable(path, error) from error
        return run

    def undo(self) -> None:
        """Remove the files of a new run that this process created, before any query to a client."""
        for name in _NEW_RUN_FILES:
            left = self.path / name
            if left.is_symlink() or (name in self._before and not left.is_dir()):
                continue
            with suppress(FileNotFoundError):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
                if name in self._before:  # an empty folder (``_is_unused``)
                    left.mkdir(0o700)
        if self._made:
            with suppress(OSError):  # unless it has other content
                self.path.rmdir()

    def prepare_resume(self) -> None:
        """Reject conflicting paths and recreate missing folders, which archives and git leave out
        when they are empty. Call before a resumed run writes.

        Raises:
            FedgenError: if a file stands where the run needs a folder, or a folder where it needs
                a file.
        """
        for folder in (self.clients, self.samples, self.public, self.checkpoints):
            if folder.exists() and not folder.is_dir():
                problem = f"{folder} is not a folder, and the run writes files into one"
                raise FedgenError("resume", problem, "move it away")
        files = [self.path / name for name in _WRITTEN]
        files += [self.samples / image.name for image in self.samples.glob("round_*.png")]
        for file in files:
            if file.exists() and not file.is_file():
                problem = f"{file} is a folder, where the run writes a file"
                raise FedgenError("resume", problem, "move it away")
        for folder in (self.clients, self.samples, self.public):
            make_folder(folder)

    def identify(self, identity: dict[str, Any]) -> None:
        """Write the identity of the run."""
        write_atomic(self.path / "run.json", (json.dumps(identity) + "\n").encode())

    @classmethod
    def open(cls, path: Path, key: str) -> tuple[RunDir, DictConfig, dict[str, Any]]:
        """Open an existing run directory with its configuration and identity.

        Args:
            key: setting that names it, for errors.

        Raises:
            FedgenError: if it is invalid.
        """
        try:
            for name in ("config.yaml", "run.json"):
                (path / name).lstat()  # another folder may contain links
            check_no_links(path, key)
            config = OmegaConf.create(read_yaml(path / "config.yaml"))
            identity = cls(path).identity()
            for name in ("run", "data", "settings", "device", "branch"):
                identity[name]
        # AssertionError: of OmegaConf, for a file with one scalar
        except (OSError, ValueError, KeyError, TypeError, AssertionError, YAMLError) as error:
            remedy = "give a directory created by fedgen train"
            if key == "runs" and (path / "generator.json").exists():
                remedy = "for a folder with only the published files, use audience=public"
            raise FedgenError(key, f"{path} is not a run directory", remedy) from error
        if not isinstance(config, DictConfig):
            raise FedgenError(key, f"{path}/config.yaml was altered", "restore it")
        return cls(path), config, identity

    def identity(self) -> dict[str, Any]:
        """Return what ``create`` recorded about the run.

        Raises:
            OSError, ValueError: if it was altered.
        """
        identity = read_json(self.path / "run.json")
        if not isinstance(identity, dict):
            raise ValueError("run.json is not an object")
        return identity

    def add_metrics(self, line: dict[str, Any]) -> None:
        """Append a line of metrics, independent of the clock, so that runs can be compared."""
        append_line(self._metrics, line)

    def nodes(self, assignment: dict[int, int]) -> dict[int, int]:
        """Return the node of each client at the start of the run.

        Args:
            assignment: current node of each client, recorded the first time.

        Raises:
            FedgenError: if the record was altered.
        """
        path = self.path / "nodes.json"
        if not path.exists():
            write_atomic(path, json.dumps(assignment).encode())
            return assignment
        try:
            return {int(client): int(node) for client, node in read_json(path).items()}
        except (ValueError, AttributeError, TypeError) as error:
            raise FedgenError(str(path), "was altered", "restore it") from error

    def add_failure(self, line: dict[str, Any]) -> None:
        """Append a failure of a client, as seen by the server."""
        append_line(self._failures, line)

    def failures(self) -> Counter[str]:
        """Return the number of failures by kind, including those in repeated rounds."""
        return Counter(kind for kind, _ in self._failed())

    @property
    def published(self) -> list[Path]:
        """Return the files that a finished run published, ignoring other files in ``public``."""
        sealed = sorted(name for name in self.results()["sha256"] if name in _SEALED)
        return [self.path / name for name in sealed if name.startswith("public/")]

    def failure_lines(self) -> list[dict[str, Any]]:
        """Return all failures, as seen by the server."""
        self._failed()
        return read_lines(self._failures)

    def unplanned(self) -> set[int]:
        """Return the clients that sent unplanned releases and have no bound."""
        return {client for kind, client in self._failed() if kind == "unplanned"}

    def _failed(self) -> list[tuple[str, int]]:
        try:
            return [(str(line["kind"]), int(line["client"])) for line in read_lines(self._failures)]
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise FedgenError(str(self._failures), "was altered", "restore it") from error

    def mark_started(self, round_: int) -> None:
        """Record on disk that a round starts, before any client is queried."""
        append_line(self._begun, round_, durable=True)

    def started_rounds(self) -> Counter[int]:
        """Return the number of attempts of each round."""
        try:
            return Counter(int(line) for line in read_lines(self._begun))
        except (TypeError, ValueError, OverflowError) as error:
            raise FedgenError(str(self._begun), "was altered", "restore it") from error

    def sums(self) -> dict[str, str]:
        """Return the digest of the clients of each query in its first sum."""
        if self._opened is None:
            try:
                self._opened = {str(query): str(of) for query, of in read_lines(self._sums)}
            except (TypeError, ValueError) as error:
                raise FedgenError(str(self._sums), "was altered", "restore it") from error
        return self._opened

    def record_sum(self, query: str, of: str) -> str:
        """Record the clients of the sum of a query before the sum is used; return those of its
        first sum."""
        if query not in self.sums():
            append_line(self._sums, [query, of])
            self.sums()[query] = of
        return self.sums()[query]

    def size(self) -> tuple[int, str]:
        """Return the number of bytes of metrics, and their digest."""
        data = self._metrics.read_bytes() if self._metrics.exists() else b""
        return len(data), digest(data)

    def check_size(self, size: int, expected_digest: str) -> None:
        """Raise FedgenError if the metrics do not start with those of an earlier ``size``."""
        data = self._metrics.read_bytes() if self._metrics.exists() else b""
        if digest(data[:size]) != expected_digest:
            raise FedgenError(str(self._metrics), "was truncated or altered", "restore it")

    def truncate(self, metrics: int = 0) -> None:
        """Truncate the metrics to this number of bytes."""
        if self._metrics.exists() and self._metrics.stat().st_size > metrics:
            os.truncate(self._metrics, metrics)

    def metrics(self) -> list[dict[str, Any]]:
        """Return all lines of metrics.

        Raises:
            FedgenError: for an invalid line.
        """
        lines = read_lines(self._metrics)
        try:
            for line in lines:
                validator("metrics").validate(line)
        except jsonschema.ValidationError as error:
            raise FedgenError(str(self._metrics), "was altered", "restore it") from error
        return lines

    def accuracies(self, key: str) -> list[tuple[float, float]]:
        """Return (rounds, gen2real of the first classifier) during a finished run and at its end.

        Raises:
            FedgenError: named by ``key``, if it is not finished.
        """
        lines, results = self.metrics(), self.results(key)
        judged = {line["round"]: line["gen2real"] for line in lines if line.get("gen2real")}
        judged[results["rounds"]] = results["gen2real"]
        first = {at: next(iter(scores.values()), None) for at, scores in judged.items()}
        means = {at: None if score is None else score["mean"] for at, score in first.items()}
        return [(float(at), mean) for at, mean in sorted(means.items()) if mean is not None]

    def last_spend(self) -> dict[str, Any] | None:
        """Return the last complete line of metrics with an ε, if any, even while another process
        writes."""
        return next((line for line in last_lines(self._metrics) if "epsilon" in line), None)

    def results(self, key: str = "run") -> dict[str, Any]:
        """Return the results of a finished run.

        Raises:
            FedgenError: named by ``key``, if it is not finished, or its privacy record changed
                since the results were written, or has another ε.
        """
        results = self._read("results", key)
        self._check_digest("privacy.json", results["sha256"].get("privacy.json"), key)
        views = self.privacy(key)["views"]
        if results["epsilon"] != {name: view["epsilon"] for name, view in views.items()}:
            problem = f"{self.path}/results.json and privacy.json have different ε"
            raise FedgenError(key, problem, "restore them")
        return results

    def privacy(self, key: str = "run") -> dict[str, Any]:
        """Return the privacy record of a finished run.

        Raises:
            FedgenError: named by ``key``, if it is not finished.
        """
        return self._read("privacy", key)

    def attack_results(self, key: str) -> dict[str, Any] | None:
        """Return the results of ``fedgen attack`` on the current generator; None if there are none.

        Raises:
            FedgenError: named by ``key``, if they were altered.
        """
        if not (self.path / "attack.json").exists():
            return None
        record = self._read("attack", key)
        current = self.results(key)["generator_sha256"]
        return record if record["generator_sha256"] == current else None

    def selection(self, key: str) -> dict[str, Any] | None:
        """Return the record of a run that ``fedgen tune`` selected; None for other runs.

        Raises:
            FedgenError: named by ``key``, if it was altered.
        """
        return self._read("selection", key) if (self.path / "selection.json").exists() else None

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each file about the spend or in the release."""
        return {
            name: hashlib.sha256((self.path / name).read_bytes()).hexdigest()
            for name in _SEALED
            if name not in ("public/account.json", "selection.json") or (self.path / name).exists()
        }

    def check_digests(self, key: str) -> None:
        """Raise FedgenError if one of these files changed since the results were written."""
        for name, expected_digest in self.results(key)["sha256"].items():
            self._check_digest(name, expected_digest, key)

    def _check_digest(self, name: str, expected_digest: object, key: str) -> None:
        path = self.path / name
        if name not in _SEALED or not path.is_file():
            raise FedgenError(key, f"{self.path} has no {name}", "restore it")
        if hashlib.sha256(path.read_bytes()).hexdigest() != expected_digest:
            raise FedgenError(key, f"{path} was changed after the run wrote it", "restore it")

    def _read(self, name: str, key: str) -> dict[str, Any]:
        try:
            content: dict[str, Any] = read_json(self.path / f"{name}.json")
            validator(name).validate(content)
        except (jsonschema.ValidationError, ValueError) as error:
            raise FedgenError(key, f"{self.path}/{name}.json was altered", "restore it") from error
        except OSError as error:
            remedy = f"finish it: fedgen train resume={self.path}"
            raise FedgenError(key, f"{self.path} has no {name}", remedy) from error
        return content

    @property
    def trained(self) -> bool:
        """Return whether the run has its generator and all other output except the evaluation."""
        try:
            return "judged" in self.results()
        except FedgenError:
            return False

    @property
    def finished(self) -> bool:
        """Return whether the run has all of its output, of which the evaluation is last."""
        try:
            return bool(self.results().get("judged"))
        except FedgenError:
            return False

    def keep_previous(self, rounds: int) -> None:
        """Move the output after this many rounds to ``ended_after_N``, because the run is being
        extended."""
        left = [self.public / "generator.json", self.path / "privacy.json"]
        place = self.path / f"ended_after_{rounds}"
        if not any(path.exists() for path in left):
            return
        make_folder(place)
        for name in ("public", "evaluation", "results.json", "privacy.json", "epsilon.png"):
            if (self.path / name).exists() and not (place / name).exists():
                (self.path / name).rename(place / name)
        make_folder(self.public)

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Lock the directory against other processes: two that resume one run would spend its
        budget twice.

        Args:
            key: setting that names it, for errors.

        Raises:
            FedgenError: if another process holds the lock.
        """
        with (self.path / "config.yaml").open() as held:  # a file that is never replaced
            until = time.monotonic() + _READ_LOCK_SECONDS
            while not _locked(held, fcntl.LOCK_EX):
                if time.monotonic() > until:
                    problem = f"{self.path} is in use by another process"
                    raise FedgenError(key, problem, "wait for its end")
                time.sleep(_READ_LOCK_SECONDS / 20)
            yield

    @contextmanager
    def reading(self) -> Iterator[bool]:
        """Yield whether no process trains in the directory; none can start meanwhile."""
        with (self.path / "config.yaml").open() as held:
            yield _locked(held, fcntl.LOCK_SH)

    def write(self, name: str, data: dict[str, Any], form: str | None = None) -> None:
        """Write ``NAME.json`` atomically, checked by the schema ``form`` (None: of that name)."""
        validator(form or name).validate(data)
        text = json.dumps(data, indent=2, allow_nan=False) + "\n"
        write_atomic(self.path / f"{name}.json", text.encode())


def _locked(held: IO[Any], kind: int) -> bool:
    try:
        fcntl.flock(held, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_unused(path: Path) -> bool:
    """Return whether a folder contains only the files of a run that was interrupted before it
    started."""
    return path.is_dir() and all(map(_is_leftover, path.iterdir()))


def _is_leftover(path: Path) -> bool:
    """Return whether a run that was interrupted before it started left this; config.yaml is written
    last."""
    try:
        kind = path.lstat()
    except FileNotFoundError:  # another process was faster
        return True
    if stat.S_ISLNK(kind.st_mode) or (stat.S_ISREG(kind.st_mode) and kind.st_nlink > 1):
        return False
    if path.name in ("clients", "samples", "public"):
        return path.is_dir() and not any(path.iterdir())
    if path.name == "SERVER_SIDE.md":
        return path.is_file() and path.read_bytes() in (b"", SERVER_SIDE.encode())
    if path.name == "run.json":
        try:
            return path.is_file() and {"run", "branch"} <= set(read_json(path))
        except (OSError, ValueError, TypeError):
            return False
    return is_temporary(path)
