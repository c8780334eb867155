"""State of a client between rounds: named parts, in memory or on disk, and its last
response if its noise is secret and no masks protect it.

A part is written to a new file, and the manifest of the client, replaced atomically, lists the
current files: a process that dies in between leaves the state of the last commit, and any other
process can continue with the client. ``keep`` retains the current files under a tag; ``restore``
returns to them. Two tags are retained: the last one, and the one that the server's checkpoint
names, which a server that dies before its next checkpoint restores.
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
from fedgen.federation.messages import Response
from fedgen.methods.api import State, Tensors
from fedgen.privacy.events import Unit, from_json, to_json
from fedgen.storage.io import digest, parse_json, read_json, write_atomic

_MANIFEST = "manifest.json"
_RESPONSE_FILE = "answer.held"
_RESPONSE_PART = "answer"  # arrays of the last response, hidden from the program
_REMEDY = "restore the run directory from a backup, or start a new run"


@dataclass
class _Entry:
    """One client: parts in memory (memory store), files on disk, the last round of each kind of
    message, and the event of the last response, if that is stored.

    history: digest of everything that the state depends on except the client's records.
    version: version of the manifest on disk that this is a copy of.
    """

    parts: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    files: dict[str, list[str]] = field(default_factory=dict)  # part -> [file, digest]
    dirty: set[str] = field(default_factory=set)
    completed: dict[str, int] = field(default_factory=dict)  # kind of message -> last round
    cost: tuple[DpEvent, Unit] | None = None
    written: int = 0
    history: str = ""
    kept: dict[str, list[str]] = field(default_factory=dict)  # tag -> its files
    version: tuple[int, int, int] | None = None


class ClientStore:
    """States of many clients below one folder.

    in_memory: keep parts in memory and write them when they are kept; otherwise each commit is
        written to disk, and other processes may work on the same clients (one at a time).
    cache_bytes: for a store on disk, size of the cache of recently used parts.
    """

    def __init__(self, root: Path, in_memory: bool, cache_bytes: float = 0.0) -> None:
        self._root, self._in_memory = root, in_memory
        self._cache = _Cache(cache_bytes)
        self._clients: dict[int, _Entry] = {}

    def folder(self, client: int) -> Path:
        """Return the folder of a client's files."""
        return self._root / str(client)

    def state(self, client: int) -> State:
        """Return the parts of a client, loaded on access."""
        return _LazyState(self, client, self._entry(client))

    def last_round(self, client: int, kind: str) -> int | None:
        """Return the last round (or number) of this kind of message that the client completed."""
        return self._entry(client).completed.get(kind)

    def history(self, client: int) -> str:
        """Return the digest of all messages that the client's state depends on."""
        return self._entry(client).history

    def response(self, client: int) -> Response:
        """Return the client's last response, for a repeated query. Raises LookupError if there is
        none."""
        entry = self._entry(client)
        if entry.cost is None:
            raise LookupError(f"client {client} has no response")
        arrays = {
            name: value.numpy() for name, value in self._part(client, entry, _RESPONSE_PART).items()
        }
        return Response(arrays, *entry.cost)

    def store_response(self, client: int, query: str, response: Response) -> None:
        """Store the response to a query durably in place of the last one, independent of
        ``restore``."""
        data = safetensors.torch.save(_tensors(response))
        header = {"asked": query, "event": to_json(response.event), "unit": response.unit.value}
        body = json.dumps(header, sort_keys=True).encode()
        self.folder(client).mkdir(parents=True, exist_ok=True)
        sealed = b"\n".join([digest(body, data).encode(), body, data])
        write_atomic(self.folder(client) / _RESPONSE_FILE, sealed)

    def stored_response(self, client: int, query: str) -> Response | None:
        """Return the stored response if it belongs to this query.

        Raises:
            FedgenError: if its file was altered.
        """
        stored_query, response = self._response_file(client)
        return response if stored_query == query else None

    def commit(
        self,
        client: int,
        kind: str,
        server_round: int,
        changed: State,
        response: Response | None,
        message: str = "",
    ) -> None:
        """Replace the changed parts atomically, and record the round. ``message``: digest of the
        message that caused the change; empty if training does not depend on it."""
        entry = self._entry(client)
        if message:
            entry.history = digest(entry.history.encode(), kind.encode(), message.encode())
        if response is not None:
            changed = {**changed, _RESPONSE_PART: _tensors(response)}
            entry.cost = response.event, response.unit
        replaced = []
        for name, tensors in changed.items():
            detached = {key: value.detach().cpu() for key, value in tensors.items()}
            if self._in_memory:
                entry.parts[name] = detached
                entry.dirty.add(name)
            else:
                replaced += self._write(client, entry, name, detached)
        entry.completed[kind] = server_round
        if not self._in_memory:
            self._write_manifest(client, entry, _MANIFEST)
            self._delete(client, entry, replaced)

    def keep(self, client: int, tag: int, confirmed: int) -> None:
        """Retain the current state under a tag, and that of ``confirmed``, the last tag for which
        the server received a reply; no others. A repeated or outdated call does nothing."""
        entry = self._entry(client)
        if any(int(existing) >= tag for existing in entry.kept):
            return
        for name in sorted(entry.dirty):
            self._write(client, entry, name, entry.parts[name])
        entry.dirty.clear()
        entry.kept = {
            existing_tag: files
            for existing_tag, files in entry.kept.items()
            if int(existing_tag) == confirmed
        }
        entry.kept[str(tag)] = [file for file, _ in entry.files.values()]
        self._write_manifest(client, entry, _tag_name(tag))
        self._remove_unused(client, entry)

    def check(self, client: int, tag: int) -> None:
        """Verify the stored response and all files that ``restore`` would read, without changes."""
        folder = self.folder(client)
        for path in folder.iterdir() if folder.exists() else ():
            if not path.is_file():
                raise FedgenError(str(path), "is not a file", _REMEDY)
        self._response_file(client)
        if tag > 0:
            for file in self._read_manifest(client, _tag_name(tag)).files.values():
                self._read(client, file)

    def restore(self, client: int, tag: int) -> None:
        """Return to the state of a tag, or the initial state for tag 0; later states are deleted.

        Raises:
            FedgenError: if a file is missing or was altered.
        """
        entry = self._read_manifest(client, _tag_name(tag)) if tag > 0 else _Entry()
        for name, file in entry.files.items():
            tensors = self._read(client, file)
            if self._in_memory:
                entry.parts[name] = tensors
        self._clients[client] = entry
        self._remove_unused(client, entry)

    def forget(self, client: int) -> None:
        """Delete everything, including the stored response: the run has finished."""
        self.restore(client, 0)
        (self.folder(client) / _RESPONSE_FILE).unlink(missing_ok=True)

    # --- implementation ---------------------------------------------------------------------------

    def _entry(self, client: int) -> _Entry:
        """Return the client's entry; a store on disk checks for changes by other processes."""
        entry = self._clients.get(client)
        if not self._in_memory:
            version = _file_version(self.folder(client) / _MANIFEST)
            if entry is None or entry.version != version:
                entry = _Entry() if version is None else self._read_manifest(client, _MANIFEST)
                entry.version = version
        elif entry is None:
            entry = _Entry()
        self._clients[client] = entry
        return entry

    def _part(self, client: int, entry: _Entry, name: str) -> dict[str, torch.Tensor]:
        if self._in_memory:
            return entry.parts[name]
        file = entry.files[name]
        tensors = self._cache.get((client, name), file[1])
        if tensors is None:
            tensors = self._read(client, file)
            self._cache.put((client, name), file[1], tensors)
        return tensors

    def _response_file(self, client: int) -> tuple[str, Response | None]:
        """Return the query of the stored response, and the response."""
        path = self.folder(client) / _RESPONSE_FILE
        if not path.exists():
            return "", None
        try:
            expected, body, data = path.read_bytes().split(b"\n", 2)
            if digest(body, data).encode() != expected:
                raise ValueError
            header = parse_json(body.decode())
            tensors = safetensors.torch.load(data)
            arrays = {name: value.numpy() for name, value in tensors.items()}
            return header["asked"], Response(
                arrays, from_json(header["event"]), Unit(header["unit"])
            )
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise FedgenError(str(path), "was truncated or altered", _REMEDY) from error

    def _names(self, entry: _Entry) -> list[str]:
        return [
            name
            for name in (entry.parts if self._in_memory else entry.files)
            if name != _RESPONSE_PART
        ]

    def _write(
        self, client: int, entry: _Entry, name: str, tensors: Mapping[str, torch.Tensor]
    ) -> list[str]:
        """Write a part to a new file; return the file that it replaces, if any."""
        contiguous = {key: value.contiguous() for key, value in tensors.items()}
        data = safetensors.torch.save(contiguous)
        entry.written += 1
        file = f"{name}.{entry.written}.safetensors"
        self.folder(client).mkdir(parents=True, exist_ok=True)
        (self.folder(client) / file).write_bytes(data)
        previous = entry.files.get(name)
        entry.files[name] = [file, digest(data)]
        if not self._in_memory:
            self._cache.put((client, name), entry.files[name][1], contiguous)
        return [previous[0]] if previous else []

    def _read(self, client: int, file: list[str]) -> dict[str, torch.Tensor]:
        path = self.folder(client) / file[0]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise FedgenError(str(path), "is missing", _REMEDY) from error
        if digest(data) != file[1]:
            raise FedgenError(str(path), "was truncated or altered", _REMEDY)
        return safetensors.torch.load(data)

    def _write_manifest(self, client: int, entry: _Entry, name: str) -> None:
        manifest: dict[str, Any] = {
            "files": entry.files,
            "done": entry.completed,
            "cost": entry.cost and {"event": to_json(entry.cost[0]), "unit": entry.cost[1].value},
            "written": entry.written,
            "history": entry.history,
            "kept": entry.kept,
        }
        body = json.dumps(manifest, sort_keys=True)
        sealed = f'{{"digest": "{digest(body.encode())}", "manifest": {body}}}'
        path = self.folder(client) / name
        write_atomic(path, sealed.encode(), durable=False)
        if name == _MANIFEST:
            entry.version = _file_version(path)

    def _read_manifest(self, client: int, name: str) -> _Entry:
        path = self.folder(client) / name
        try:
            sealed = read_json(path)
            manifest = sealed["manifest"]
            if digest(json.dumps(manifest, sort_keys=True).encode()) != sealed["digest"]:
                raise ValueError
        except FileNotFoundError as error:
            raise FedgenError(str(path), "is missing", _REMEDY) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FedgenError(str(path), "was truncated or altered", _REMEDY) from error
        cost = manifest["cost"]
        return _Entry(
            files=manifest["files"],
            completed=manifest["done"],
            cost=None if cost is None else (from_json(cost["event"]), Unit(cost["unit"])),
            written=manifest["written"],
            history=manifest["history"],
            kept=manifest["kept"],
        )

    def _remove_unused(self, client: int, entry: _Entry) -> None:
        """Write the manifest and remove all files that are no longer used."""
        used = {_tag_name(int(tag)) for tag in entry.kept}
        if not self._in_memory and (entry.files or entry.completed or entry.kept):
            self._write_manifest(client, entry, _MANIFEST)
            used.add(_MANIFEST)
        for path in self.folder(client).glob("*.json"):
            if path.name not in used:
                path.unlink()
        files = self.folder(client).glob("*.safetensors")
        self._delete(client, entry, [path.name for path in files])

    def _delete(self, client: int, entry: _Entry, files: list[str]) -> None:
        """Delete those of the files that neither the current state nor a tag uses."""
        used = {file for file, _ in entry.files.values()}.union(*entry.kept.values())
        for file in files:
            if file not in used:
                (self.folder(client) / file).unlink(missing_ok=True)


def _tensors(response: Response) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in response.arrays.items()}


def _tag_name(tag: int) -> str:
    return f"kept.{tag}.json"


def _file_version(path: Path) -> tuple[int, int, int] | None:
    """Return the version of a file that is always replaced atomically; None if it does not
    exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


class _Cache:
    """Cache of recently used parts, by digest: parts replaced by another process are not found.
    Thread-safe."""

    def __init__(self, limit: float) -> None:
        self._limit, self._bytes = limit, 0
        self._lock = threading.Lock()
        self._parts: OrderedDict[tuple[int, str], tuple[str, dict[str, torch.Tensor], int]] = (
            OrderedDict()
        )

    def get(self, key: tuple[int, str], digest_: str) -> dict[str, torch.Tensor] | None:
        with self._lock:
            entry = self._parts.get(key)
            if entry is None or entry[0] != digest_:
                return None
            self._parts.move_to_end(key)
            return entry[1]

    def put(self, key: tuple[int, str], digest_: str, tensors: dict[str, torch.Tensor]) -> None:
        size = sum(value.nbytes for value in tensors.values())
        with self._lock:
            previous = self._parts.pop(key, None)
            self._bytes -= previous[2] if previous else 0
            if size > self._limit:
                return
            self._parts[key] = digest_, tensors, size
            self._bytes += size
            while self._bytes > self._limit:
                self._bytes -= self._parts.popitem(last=False)[1][2]


class _LazyState(Mapping[str, Tensors]):
    """Parts of a client, each loaded from the store on access."""

    def __init__(self, store: ClientStore, client: int, entry: _Entry) -> None:
        self._store, self._client, self._entry = store, client, entry

    def __getitem__(self, name: str) -> Tensors:
        return self._store._part(self._client, self._entry, name)

    def __contains__(self, name: object) -> bool:
        kept = self._entry.parts if self._store._in_memory else self._entry.files
        return name in kept and name != _RESPONSE_PART

    def __iter__(self) -> Iterator[str]:
        return iter(self._store._names(self._entry))

    def __len__(self) -> int:
        return len(self._store._names(self._entry))
