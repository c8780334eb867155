"""Checkpoint of the server: its tensors, its counts, and the tag of the corresponding client
states.

Safetensors and JSON, replaced atomically: a process that dies while writing leaves the previous
checkpoint.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch

from fedgen.errors import FedgenError
from fedgen.federation.rounds import RunState
from fedgen.methods.api import Tensors
from fedgen.privacy.ledger import spend_from_json, spend_to_json
from fedgen.storage.io import digest, read_json, write_atomic

SCHEMA = 8
NAME = "checkpoint.json"
SAMPLING_KEY = "draws.key"
"""File with the secret key of cohort sampling. It exists from before the first round: a repeated
round samples the same cohort, regardless of earlier responses."""
_REMEDY = "restore the run directory from a backup, or start a new run"


@dataclass(frozen=True)
class Metadata:
    """Metadata of a checkpoint.

    metrics: size in bytes of the metrics log, and its digest.
    started: number of round starts, including repeats; 0 in mode ``seeded``.
    seconds: duration of all rounds; parts: duration of each part.
    finished: whether the run has finished.
    total_rounds: planned number of rounds, which the budget may limit.
    stopped: reason for stopping early.
    """

    metrics: tuple[int, str]
    started: int
    seconds: float
    parts: dict[str, float]
    finished: bool
    total_rounds: int
    stopped: str | None


def save(folder: Path, state: RunState, metadata: Metadata) -> None:
    """Write a checkpoint and delete the previous one."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.cpu().contiguous() for name, value in state.server.items()}
    data = safetensors.torch.save(tensors)
    file = f"server_{state.rounds:06d}.safetensors"
    write_atomic(folder / file, data)
    os.sync()  # the states of clients must survive a power failure as well
    record = {
        "schema": SCHEMA,
        "rounds": state.rounds,
        "prepared": state.prepared,
        "server": [file, digest(data)],
        "tag": state.tag,
        "kept": {str(client): tag for client, tag in sorted(state.kept_tags.items())},
        "spends": {
            str(client): spend_to_json(spend) for client, spend in sorted(state.spends.items())
        },
        "asks": _counts(state.queries),
        "rows": _counts(state.samples),
        "sent": _counts(state.sent),
        "received": _counts(state.received),
        "extra": asdict(metadata),
    }
    body = json.dumps(record, sort_keys=True)
    sealed = json.dumps({"digest": digest(body.encode()), "record": record}, sort_keys=True)
    write_atomic(folder / NAME, sealed.encode())
    for previous in folder.glob("server_*.safetensors"):
        if previous.name != file:
            previous.unlink()


def load(folder: Path) -> tuple[RunState, Metadata] | None:
    """Return the last checkpoint; None if there is none.

    Raises:
        FedgenError: if it was truncated or altered.
    """
    path = folder / NAME
    if not path.exists():
        return None
    try:
        sealed = read_json(path)
        record = sealed["record"]
        if digest(json.dumps(record, sort_keys=True).encode()) != sealed["digest"]:
            raise ValueError
        if record["schema"] != SCHEMA:
            raise FedgenError(str(path), f"has schema {record['schema']}, not {SCHEMA}", _REMEDY)
        name, expected = (str(value) for value in record["server"])
        state, metadata = _state(record), _metadata(record["extra"])
    except _INVALID_FILE_ERRORS as error:
        raise FedgenError(str(path), "was truncated or altered", _REMEDY) from error
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        raise FedgenError(str(folder / name), "is missing", _REMEDY) from error
    try:
        if digest(data) != expected:
            raise ValueError
        state.server = safetensors.torch.load(data)
    except (ValueError, safetensors.SafetensorError) as error:
        raise FedgenError(str(folder / name), "was truncated or altered", _REMEDY) from error
    return state, metadata


def server_state(state: RunState, fresh: Tensors, folder: Path) -> Tensors:
    """Return the server state of a checkpoint on the devices of a freshly initialized one.

    Raises:
        FedgenError: if its tensors differ in name or shape.
    """
    shapes = [
        {name: value.shape for name, value in tensors.items()} for tensors in (state.server, fresh)
    ]
    if shapes[0] != shapes[1]:
        raise FedgenError(
            str(folder), "contains the state of another method, or was altered", _REMEDY
        )
    return {name: value.to(fresh[name].device) for name, value in state.server.items()}


_INVALID_FILE_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError)
"""Exceptions of reading an invalid file."""


def _state(record: Mapping[str, Any]) -> RunState:
    """Return everything except the state of the server program."""
    return RunState(
        server={},
        rounds=int(record["rounds"]),
        prepared=bool(record["prepared"]),
        tag=int(record["tag"]),
        kept_tags=dict(_counter(record["kept"])),
        spends={int(client): spend_from_json(spend) for client, spend in record["spends"].items()},
        queries=_counter(record["asks"]),
        samples=_counter(record["rows"]),
        sent=_counter(record["sent"]),
        received=_counter(record["received"]),
    )


def _metadata(extra: Mapping[str, Any]) -> Metadata:
    size, log_digest = extra["metrics"]
    stopped = extra["stopped"]
    return Metadata(
        metrics=(int(size), str(log_digest)),
        started=int(extra["started"]),
        seconds=float(extra["seconds"]),
        parts={str(name): float(seconds) for name, seconds in extra["parts"].items()},
        finished=bool(extra["finished"]),
        total_rounds=int(extra["total_rounds"]),
        stopped=None if stopped is None else str(stopped),
    )


def _counts(counter: Counter[int]) -> dict[str, int]:
    return {str(client): count for client, count in sorted(counter.items())}


def _counter(data: dict[str, int]) -> Counter[int]:
    return Counter({int(client): int(count) for client, count in data.items()})
