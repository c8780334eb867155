"""A client's state between rounds: named parts, in memory or on disk, and what it last replied.

A part is written to a new file, and the client's manifest, replaced atomically, says which files
count: a process that dies in between leaves the state of the last commit. A checkpoint pins the
files of all clients; whatever a killed run wrote after it is dropped when the run resumes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from dp_accounting import DpEvent

from fedgen.errors import FedgenError
from fedgen.federation.messages import Answer
from fedgen.files import digest, write_whole
from fedgen.method import State, Tensors
from fedgen.privacy.events import Unit, from_json, to_json


@dataclass
class _Client:
    """One client: parts in memory (memory store), files on disk, its last deed of each kind, and
    the cost of the last Release, whose arrays are a part like any other."""

    parts: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    files: dict[str, list[str]] = field(default_factory=dict)  # part -> [file, digest]
    dirty: set[str] = field(default_factory=set)
    done: dict[str, int] = field(default_factory=dict)  # kind of message -> last round
    cost: tuple[DpEvent, Unit] | None = None
    written: int = 0


class ClientStore:
    """States of many clients below one folder.

    in_memory: parts stay in memory and reach the disk at checkpoints; otherwise each commit is
        written through, and a part is in memory only while it is used.
    """

    def __init__(self, root: Path, in_memory: bool) -> None:
        self._root, self._in_memory = root, in_memory
        self._clients: dict[int, _Client] = {}
        self._pinned: dict[int, set[str]] = {}

    def folder(self, client: int) -> Path:
        """Where a client keeps its files."""
        return self._root / str(client)

    def state(self, client: int) -> State:
        """The client's parts, read one by one."""
        return _Parts(self, client)

    def done(self, client: int, kind: str) -> int | None:
        """The last round (or number) of this kind of message that the client completed."""
        return self._of(client).done.get(kind)

    def answer(self, client: int) -> Answer:
        """The client's last Release, to be sent again if its round is asked for again. Raises
        LookupError if there is none."""
        cost = self._of(client).cost
        if cost is None:
            raise LookupError(f"client {client} has released nothing")
        arrays = {name: value.numpy() for name, value in self._part(client, _ANSWER).items()}
        return Answer(arrays, *cost)

    def commit(
        self, client: int, kind: str, server_round: int, changed: State, answer: Answer | None
    ) -> None:
        """Replaces the changed parts, all or none, and notes the round as done."""
        entry = self._of(client)
        if answer is not None:
            arrays = {name: torch.from_numpy(value) for name, value in answer.arrays.items()}
            changed = {**changed, _ANSWER: arrays}
            entry.cost = answer.event, answer.unit
        replaced = []
        for name, tensors in changed.items():
            detached = {key: value.detach().cpu() for key, value in tensors.items()}
            if self._in_memory:
                entry.parts[name] = detached
                entry.dirty.add(name)
            else:
                replaced.append(self._write(client, name, detached))
        entry.done[kind] = server_round
        if not self._in_memory:
            manifest = json.dumps(self._manifest(client)).encode()
            write_whole(self.folder(client) / "manifest.json", manifest)
            self._drop(client, [file for file in replaced if file])

    def snapshot(self) -> dict[str, Any]:
        """Everything on disk, and the manifest of all clients; pins the files that it names."""
        for client, entry in self._clients.items():
            for name in sorted(entry.dirty):
                self._write(client, name, entry.parts[name])
            entry.dirty.clear()
        return {str(client): self._manifest(client) for client in sorted(self._clients)}

    def pin(self, snapshot: Mapping[str, Any]) -> None:
        """Keeps the files of this snapshot, and of the present; drops all others."""
        self._pinned = {
            int(client): {file for file, _ in manifest["files"].values()}
            for client, manifest in snapshot.items()
        }
        for client in self._clients:
            known = {path.name for path in self.folder(client).glob("*.safetensors")}
            self._drop(client, sorted(known))

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Goes back to a snapshot; later files are dropped.

        Raises:
            FedgenError: if a file of the snapshot is missing or was altered.
        """
        self._clients = {}
        for name, manifest in snapshot.items():
            entry = _Client(
                files={part: list(file) for part, file in manifest["files"].items()},
                done=dict(manifest["done"]),
                cost=None
                if manifest["cost"] is None
                else (from_json(manifest["cost"]["event"]), Unit(manifest["cost"]["unit"])),
                written=manifest["written"],
            )
            self._clients[int(name)] = entry
            if self._in_memory:
                entry.parts = {p: self._read(int(name), file) for p, file in entry.files.items()}
            else:
                for file in entry.files.values():
                    self._read(int(name), file)
        self.pin(snapshot)

    def forget(self) -> None:
        """Drops all states: critics saw private rows and are of no use after a run."""
        for client in self._clients:
            for path in self.folder(client).glob("*.safetensors"):
                path.unlink()
            (self.folder(client) / "manifest.json").unlink(missing_ok=True)
        self._clients, self._pinned = {}, {}

    # --- inside -----------------------------------------------------------------------------------

    def _of(self, client: int) -> _Client:
        return self._clients.setdefault(client, _Client())

    def _part(self, client: int, name: str) -> dict[str, torch.Tensor]:
        entry = self._of(client)
        if self._in_memory:
            return entry.parts[name]
        return self._read(client, entry.files[name])

    def _names(self, client: int) -> list[str]:
        entry = self._of(client)
        return [
            name for name in (entry.parts if self._in_memory else entry.files) if name != _ANSWER
        ]

    def _manifest(self, client: int) -> dict[str, Any]:
        entry = self._of(client)
        return {
            "files": dict(entry.files),
            "done": dict(entry.done),
            "cost": None
            if entry.cost is None
            else {"event": to_json(entry.cost[0]), "unit": entry.cost[1].value},
            "written": entry.written,
        }

    def _write(self, client: int, name: str, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """Writes a part to a new file; returns the file that it replaces."""
        entry = self._of(client)
        data = safetensors.torch.save({key: v.cpu().contiguous() for key, v in tensors.items()})
        entry.written += 1
        file = f"{name}.{entry.written}.safetensors"
        self.folder(client).mkdir(parents=True, exist_ok=True)
        (self.folder(client) / file).write_bytes(data)
        before = entry.files.get(name)
        entry.files[name] = [file, digest(data)]
        return before[0] if before else None

    def _read(self, client: int, file: list[str]) -> dict[str, torch.Tensor]:
        path = self.folder(client) / file[0]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise FedgenError(str(path), "is missing", _REMEDY) from error
        if digest(data) != file[1]:
            raise FedgenError(str(path), "was cut short or altered", _REMEDY)
        return safetensors.torch.load(data)

    def _drop(self, client: int, files: list[str]) -> None:
        entry = self._of(client)
        kept = self._pinned.get(client, set()) | {file for file, _ in entry.files.values()}
        for file in files:
            if file not in kept:
                (self.folder(client) / file).unlink(missing_ok=True)


class _Parts(Mapping[str, Tensors]):
    """A client's parts, each read from the store when it is asked for."""

    def __init__(self, store: ClientStore, client: int) -> None:
        self._store, self._client = store, client

    def __getitem__(self, name: str) -> Tensors:
        return self._store._part(self._client, name)

    def __contains__(self, name: object) -> bool:
        return name in self._store._names(self._client)

    def __iter__(self) -> Iterator[str]:
        return iter(self._store._names(self._client))

    def __len__(self) -> int:
        return len(self._store._names(self._client))


_ANSWER = "answer"
_REMEDY = "restore the run directory from a copy, or start a new run"
