"""A client's state between rounds: named parts, in memory or on disk, and what it last replied.

A part is written to a new file, and the client's manifest, replaced in one step, says which files
count: a process that dies in between leaves the state of the last commit, and any other process can
go on with the client. ``keep`` holds on to the files of the present under a tag; ``restore`` goes
back to them. The last two tags are kept: a server that died between the clients' keeping and its
own checkpoint comes back to the one before.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from dp_accounting import DpEvent
from safetensors import SafetensorError

from fedgen.errors import FedgenError
from fedgen.federation.messages import Answer
from fedgen.files import as_json, digest, read_json, write_whole
from fedgen.method import State, Tensors
from fedgen.privacy.events import Unit, from_json, to_json

_MANIFEST = "manifest.json"
_HELD = "answer.held"
_ANSWER = "answer"  # the arrays of the last Release: a part like any other, hidden from the program
_REMEDY = "restore the run directory from a copy, or start a new run"


@dataclass
class _Client:
    """One client: parts in memory (memory store), files on disk, its last deed of each kind, and
    the cost of the last Release. ``history``: a digest of all that the state is a function of, but
    for the client's rows. ``stamp``: the manifest on disk that this is a copy of."""

    parts: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    files: dict[str, list[str]] = field(default_factory=dict)  # part -> [file, digest]
    dirty: set[str] = field(default_factory=set)
    done: dict[str, int] = field(default_factory=dict)  # kind of message -> last round
    cost: tuple[DpEvent, Unit] | None = None
    written: int = 0
    history: str = ""
    kept: dict[str, list[str]] = field(default_factory=dict)  # tag -> files that it counts on
    stamp: tuple[int, int, int] | None = None


class ClientStore:
    """States of many clients below one folder.

    in_memory: parts stay in memory and reach the disk when they are kept; otherwise each commit is
        written through, and other processes may work on the same clients (one at a time).
    cache_bytes: of a store that writes through, how many bytes of parts, the last used, may stay in
        memory as well.
    """

    def __init__(self, root: Path, in_memory: bool, cache_bytes: float = 0.0) -> None:
        self._root, self._in_memory = root, in_memory
        self._cache = _Cache(cache_bytes)
        self._clients: dict[int, _Client] = {}

    def folder(self, client: int) -> Path:
        """Where a client keeps its files."""
        return self._root / str(client)

    def state(self, client: int) -> State:
        """The client's parts, read one by one."""
        return _Parts(self, client, self._of(client))

    def done(self, client: int, kind: str) -> int | None:
        """The last round (or number) of this kind of message that the client completed."""
        return self._of(client).done.get(kind)

    def history(self, client: int) -> str:
        """A digest of every message that made the client's state what it is."""
        return self._of(client).history

    def answer(self, client: int) -> Answer:
        """The client's last Release, to be sent again if its round is asked for again. Raises
        LookupError if there is none."""
        entry = self._of(client)
        if entry.cost is None:
            raise LookupError(f"client {client} has released nothing")
        arrays = {name: value.numpy() for name, value in self._part(client, entry, _ANSWER).items()}
        return Answer(arrays, *entry.cost)

    def hold(self, client: int, asked: str, answer: Answer) -> None:
        """Writes the answer to a question down, in place of the last one, where neither a restored
        state nor a power cut takes it back."""
        data = safetensors.torch.save(_tensors(answer))
        told = {"asked": asked, "event": to_json(answer.event), "unit": answer.unit.value}
        body = json.dumps(told, sort_keys=True).encode()
        self.folder(client).mkdir(parents=True, exist_ok=True)
        sealed = b"\n".join([digest(body, data).encode(), body, data])
        write_whole(self.folder(client) / _HELD, sealed)

    def held(self, client: int, asked: str) -> Answer | None:
        """The answer that was held, if it is the one to this question.

        Raises:
            FedgenError: if its file was altered.
        """
        question, answer = self._held(client)
        return answer if question == asked else None

    def commit(
        self,
        client: int,
        kind: str,
        server_round: int,
        changed: State,
        answer: Answer | None,
        message: str = "",
    ) -> None:
        """Replaces the changed parts, all or none, and notes the round as done. ``message``: a
        digest of what led to the change, empty if training does not depend on it."""
        entry = self._of(client)
        if message:
            entry.history = digest(entry.history.encode(), kind.encode(), message.encode())
        if answer is not None:
            changed = {**changed, _ANSWER: _tensors(answer)}
            entry.cost = answer.event, answer.unit
        replaced = []
        for name, tensors in changed.items():
            detached = {key: value.detach().cpu() for key, value in tensors.items()}
            if self._in_memory:
                entry.parts[name] = detached
                entry.dirty.add(name)
            else:
                replaced += self._write(client, entry, name, detached)
        entry.done[kind] = server_round
        if not self._in_memory:
            self._write_manifest(client, entry, _MANIFEST)
            self._drop(client, entry, replaced)

    def keep(self, client: int, tag: int) -> None:
        """Holds on to the present state under a tag, and to the one kept before; no other. A call
        that comes again, or after a later one, does nothing: the server's checkpoint may still
        name the tag before."""
        entry = self._of(client)
        if any(int(other) >= tag for other in entry.kept):
            return
        for name in sorted(entry.dirty):
            self._write(client, entry, name, entry.parts[name])
        entry.dirty.clear()
        last = max(map(int, entry.kept), default=tag)
        entry.kept = {t: files for t, files in entry.kept.items() if int(t) == last}
        entry.kept[str(tag)] = [file for file, _ in entry.files.values()]
        self._write_manifest(client, entry, _kept(tag))
        self._tidy(client, entry)

    def check(self, client: int, tag: int) -> None:
        """Reads all that ``restore`` would need and what is held, and changes nothing.

        Raises:
            FedgenError: if a file of it is missing or was altered.
        """
        folder = self.folder(client)
        for path in folder.iterdir() if folder.exists() else ():
            if not path.is_file():
                raise FedgenError(str(path), "is no file", _REMEDY)
        self._held(client)
        if tag > 0:
            for file in self._read_manifest(client, _kept(tag)).files.values():
                self._read(client, file)

    def restore(self, client: int, tag: int) -> None:
        """Goes back to what was kept under a tag, or to nothing for tag 0; all that came later is
        dropped.

        Raises:
            FedgenError: if a file of it is missing or was altered.
        """
        entry = self._read_manifest(client, _kept(tag)) if tag > 0 else _Client()
        for name, file in entry.files.items():
            tensors = self._read(client, file)
            if self._in_memory:
                entry.parts[name] = tensors
        self._clients[client] = entry
        self._tidy(client, entry)

    def forget(self, client: int) -> None:
        """Drops everything, what is held too: the run is over."""
        self.restore(client, 0)
        (self.folder(client) / _HELD).unlink(missing_ok=True)

    # --- inside -----------------------------------------------------------------------------------

    def _of(self, client: int) -> _Client:
        """The client's entry; a store that writes through looks whether others moved on."""
        entry = self._clients.get(client)
        if not self._in_memory:
            stamp = _stamp(self.folder(client) / _MANIFEST)
            if entry is None or entry.stamp != stamp:
                entry = _Client() if stamp is None else self._read_manifest(client, _MANIFEST)
                entry.stamp = stamp
        elif entry is None:
            entry = _Client()
        self._clients[client] = entry
        return entry

    def _part(self, client: int, entry: _Client, name: str) -> dict[str, torch.Tensor]:
        if self._in_memory:
            return entry.parts[name]
        file = entry.files[name]
        found = self._cache.get((client, name), file[1])
        if found is None:
            found = self._read(client, file)
            self._cache.put((client, name), file[1], found)
        return found

    def _held(self, client: int) -> tuple[str, Answer | None]:
        """The question whose answer is held, and the answer."""
        path = self.folder(client) / _HELD
        if not path.exists():
            return "", None
        try:
            seal, body, data = path.read_bytes().split(b"\n", 2)
            if digest(body, data).encode() != seal:
                raise ValueError
            told = as_json(body.decode())
            found = safetensors.torch.load(data)
            arrays = {name: value.numpy() for name, value in found.items()}
            return told["asked"], Answer(arrays, from_json(told["event"]), Unit(told["unit"]))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise FedgenError(str(path), "was cut short or altered", _REMEDY) from error

    def _names(self, entry: _Client) -> list[str]:
        return [n for n in (entry.parts if self._in_memory else entry.files) if n != _ANSWER]

    def _write(
        self, client: int, entry: _Client, name: str, tensors: Mapping[str, torch.Tensor]
    ) -> list[str]:
        """Writes a part to a new file; returns the file that it replaces, if any."""
        whole = {key: value.contiguous() for key, value in tensors.items()}
        data = safetensors.torch.save(whole)
        entry.written += 1
        file = f"{name}.{entry.written}.safetensors"
        self.folder(client).mkdir(parents=True, exist_ok=True)
        (self.folder(client) / file).write_bytes(data)
        before = entry.files.get(name)
        entry.files[name] = [file, digest(data)]
        if not self._in_memory:
            self._cache.put((client, name), entry.files[name][1], whole)
        return [before[0]] if before else []

    def _read(self, client: int, file: list[str]) -> dict[str, torch.Tensor]:
        path = self.folder(client) / file[0]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise FedgenError(str(path), "is missing", _REMEDY) from error
        if digest(data) != file[1]:
            raise FedgenError(str(path), "was cut short or altered", _REMEDY)
        return safetensors.torch.load(data)

    def _write_manifest(self, client: int, entry: _Client, name: str) -> None:
        manifest: dict[str, Any] = {
            "files": entry.files,
            "done": entry.done,
            "cost": entry.cost and {"event": to_json(entry.cost[0]), "unit": entry.cost[1].value},
            "written": entry.written,
            "history": entry.history,
            "kept": entry.kept,
        }
        body = json.dumps(manifest, sort_keys=True)
        sealed = f'{{"digest": "{digest(body.encode())}", "manifest": {body}}}'
        path = self.folder(client) / name
        write_whole(path, sealed.encode(), durable=False)
        if name == _MANIFEST:
            entry.stamp = _stamp(path)

    def _read_manifest(self, client: int, name: str) -> _Client:
        path = self.folder(client) / name
        try:
            sealed = read_json(path)
            manifest = sealed["manifest"]
            if digest(json.dumps(manifest, sort_keys=True).encode()) != sealed["digest"]:
                raise ValueError
        except FileNotFoundError as error:
            raise FedgenError(str(path), "is missing", _REMEDY) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FedgenError(str(path), "was cut short or altered", _REMEDY) from error
        cost = manifest["cost"]
        return _Client(
            files=manifest["files"],
            done=manifest["done"],
            cost=None if cost is None else (from_json(cost["event"]), Unit(cost["unit"])),
            written=manifest["written"],
            history=manifest["history"],
            kept=manifest["kept"],
        )

    def _tidy(self, client: int, entry: _Client) -> None:
        """Writes down what counts now, and removes every file that does not."""
        counted = {_kept(int(tag)) for tag in entry.kept}
        if not self._in_memory and (entry.files or entry.done or entry.kept):
            self._write_manifest(client, entry, _MANIFEST)
            counted.add(_MANIFEST)
        for path in self.folder(client).glob("*.json"):
            if path.name not in counted:
                path.unlink()
        known = self.folder(client).glob("*.safetensors")
        self._drop(client, entry, [path.name for path in known])

    def _drop(self, client: int, entry: _Client, files: list[str]) -> None:
        """Removes those of the files that neither the present nor a tag counts on."""
        counted = {file for file, _ in entry.files.values()}.union(*entry.kept.values())
        for file in files:
            if file not in counted:
                (self.folder(client) / file).unlink(missing_ok=True)


def _tensors(answer: Answer) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in answer.arrays.items()}


def _kept(tag: int) -> str:
    return f"kept.{tag}.json"


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Tells one version of a file that is always replaced whole from another."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class _Cache:
    """The parts that were used last, as long as they fit. A part is told by its digest: one that
    another process replaced is not found. Threads share it."""

    def __init__(self, limit: float) -> None:
        self._limit, self._bytes = limit, 0
        self._lock = threading.Lock()
        self._parts: OrderedDict[tuple[int, str], tuple[str, dict[str, torch.Tensor], int]] = (
            OrderedDict()
        )

    def get(self, key: tuple[int, str], seal: str) -> dict[str, torch.Tensor] | None:
        with self._lock:
            found = self._parts.get(key)
            if found is None or found[0] != seal:
                return None
            self._parts.move_to_end(key)
            return found[1]

    def put(self, key: tuple[int, str], seal: str, tensors: dict[str, torch.Tensor]) -> None:
        size = sum(value.nbytes for value in tensors.values())
        with self._lock:
            before = self._parts.pop(key, None)
            self._bytes -= before[2] if before else 0
            if size > self._limit:
                return
            self._parts[key] = seal, tensors, size
            self._bytes += size
            while self._bytes > self._limit:
                self._bytes -= self._parts.popitem(last=False)[1][2]


class _Parts(Mapping[str, Tensors]):
    """A client's parts, each read from the store when it is asked for."""

    def __init__(self, store: ClientStore, client: int, entry: _Client) -> None:
        self._store, self._client, self._entry = store, client, entry

    def __getitem__(self, name: str) -> Tensors:
        return self._store._part(self._client, self._entry, name)

    def __contains__(self, name: object) -> bool:
        kept = self._entry.parts if self._store._in_memory else self._entry.files
        return name in kept and name != _ANSWER

    def __iter__(self) -> Iterator[str]:
        return iter(self._store._names(self._entry))

    def __len__(self) -> int:
        return len(self._store._names(self._entry))
