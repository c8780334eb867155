"""The server's state on disk: its tensors, its counts, and the tag of the clients' states that go
with them. Safetensors and JSON, replaced in one step: a process that dies while writing leaves the
checkpoint before."""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch

from fedgen.errors import FedgenError
from fedgen.federation.rounds import RunState
from fedgen.files import digest, read_json, write_whole
from fedgen.method import Tensors
from fedgen.privacy.ledger import spend_from_json, spend_to_json

SCHEMA = 7
NAME = "checkpoint.json"
_DRAWS = "draws.key"
_REMEDY = "restore the run directory from a copy, or start a new run"


@dataclass(frozen=True)
class Beside:
    """What a run keeps beside the server's state.

    metrics: how many bytes of metrics there were, and their digest. begun: rounds begun so far.
    seconds: of all rounds; parts: of each part of them. over: whether the run is. of: rounds that
    it was to have. stopped: why it ended before.
    """

    metrics: tuple[int, str]
    begun: int
    seconds: float
    parts: dict[str, float]
    over: bool
    of: int
    stopped: str | None


def key_of_draws(folder: Path) -> tuple[bytes, bool]:
    """The secret that the server's draws of clients follow from, and whether it was made just now.
    It is kept from before the first round on, apart from the noise, which is kept nowhere: a round
    that is done again is drawn as it was, whoever answered it or not.

    Raises:
        FedgenError: if it was cut short.
    """
    path = folder / _DRAWS
    if made := not path.exists():
        write_whole(path, secrets.token_bytes(32))
    key = path.read_bytes()
    if len(key) != 32:
        raise FedgenError(str(path), "was cut short or altered", _REMEDY)
    return key, made


def save(folder: Path, state: RunState, beside: Beside) -> None:
    """Writes a checkpoint and drops the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.cpu().contiguous() for name, value in state.server.items()}
    data = safetensors.torch.save(tensors)
    file = f"server_{state.rounds:06d}.safetensors"
    write_whole(folder / file, data)
    os.sync()  # what the clients kept must outlive a power cut as well
    record = {
        "schema": SCHEMA,
        "rounds": state.rounds,
        "prepared": state.prepared,
        "server": [file, digest(data)],
        "tag": state.tag,
        "kept": {str(client): tag for client, tag in sorted(state.kept.items())},
        "spends": {str(c): spend_to_json(spend) for c, spend in sorted(state.spends.items())},
        "asks": _counts(state.asks),
        "rows": _counts(state.rows),
        "sent": _counts(state.sent),
        "received": _counts(state.received),
        "extra": asdict(beside),
    }
    body = json.dumps(record, sort_keys=True)
    sealed = json.dumps({"digest": digest(body.encode()), "record": record}, sort_keys=True)
    write_whole(folder / NAME, sealed.encode())
    for old in folder.glob("server_*.safetensors"):
        if old.name != file:
            old.unlink()


def load(folder: Path) -> tuple[RunState, Beside] | None:
    """The last checkpoint; None if there is none.

    Raises:
        FedgenError: if it was cut short or altered.
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
        file, expected = (str(each) for each in record["server"])
        state, beside = _state(record), _beside(record["extra"])
    except _NONE as error:
        raise FedgenError(str(path), "was cut short or altered", _REMEDY) from error
    try:
        data = (folder / file).read_bytes()
    except OSError as error:
        raise FedgenError(str(folder / file), "is missing", _REMEDY) from error
    try:
        if digest(data) != expected:
            raise ValueError
        state.server = safetensors.torch.load(data)
    except (ValueError, safetensors.SafetensorError) as error:
        raise FedgenError(str(folder / file), "was cut short or altered", _REMEDY) from error
    return state, beside


def server_of(state: RunState, fresh: Tensors, folder: Path) -> Tensors:
    """The server's state of a checkpoint, where that of a run that begins has it.

    Raises:
        FedgenError: if it has other parts.
    """
    shapes = [{name: each.shape for name, each in some.items()} for some in (state.server, fresh)]
    if shapes[0] != shapes[1]:
        raise FedgenError(str(folder), "holds another method's state, or was altered", _REMEDY)
    return {name: each.to(fresh[name].device) for name, each in state.server.items()}


_NONE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError)
"""What reading raises of a file that is none."""


def _state(record: Mapping[str, Any]) -> RunState:
    """All but the server's own."""
    return RunState(
        server={},
        rounds=int(record["rounds"]),
        prepared=bool(record["prepared"]),
        tag=int(record["tag"]),
        kept=dict(_counter(record["kept"])),
        spends={int(c): spend_from_json(spend) for c, spend in record["spends"].items()},
        asks=_counter(record["asks"]),
        rows=_counter(record["rows"]),
        sent=_counter(record["sent"]),
        received=_counter(record["received"]),
    )


def _beside(extra: Mapping[str, Any]) -> Beside:
    size, told = extra["metrics"]
    stopped = extra["stopped"]
    return Beside(
        metrics=(int(size), str(told)),
        begun=int(extra["begun"]),
        seconds=float(extra["seconds"]),
        parts={str(name): float(seconds) for name, seconds in extra["parts"].items()},
        over=bool(extra["over"]),
        of=int(extra["of"]),
        stopped=None if stopped is None else str(stopped),
    )


def _counts(counter: Counter[int]) -> dict[str, int]:
    return {str(client): count for client, count in sorted(counter.items())}


def _counter(data: dict[str, int]) -> Counter[int]:
    return Counter({int(client): int(count) for client, count in data.items()})
