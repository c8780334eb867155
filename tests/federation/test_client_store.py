"""States of clients: all or nothing, snapshots, and files that were tampered with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent
from hypothesis import given
from hypothesis import strategies as st

from fedgen.errors import FedgenError
from fedgen.federation.client_store import ClientStore
from fedgen.federation.messages import ASK, TRAIN, Answer
from fedgen.privacy.events import Unit

ANSWER = Answer({"gradients": np.ones(2, np.float32)}, GaussianDpEvent(1.0), Unit.RECORD)


def part(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), value)}


def values(store: ClientStore, client: int = 0) -> dict[str, float]:
    return {name: float(p["w"][0]) for name, p in store.state(client).items()}


@pytest.fixture(params=[True, False], ids=["memory", "disk"])
def in_memory(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_commits_replace_what_changed(tmp_path: Path, in_memory: bool) -> None:
    store = ClientStore(tmp_path, in_memory)
    assert values(store) == {}
    store.commit(0, TRAIN, 1, {"a": part(1), "b": part(2)}, None)
    store.commit(0, TRAIN, 2, {"b": part(3)}, None)
    store.commit(0, ASK, 2, {}, ANSWER)
    assert values(store) == {"a": 1, "b": 3}
    assert store.done(0, TRAIN) == 2
    assert store.done(0, ASK) == 2
    found = store.answer(0)
    assert np.array_equal(found.arrays["gradients"], ANSWER.arrays["gradients"])
    assert found.event == ANSWER.event
    assert store.done(1, TRAIN) is None
    with pytest.raises(LookupError):
        store.answer(1)


def test_a_snapshot_can_be_gone_back_to(tmp_path: Path, in_memory: bool) -> None:
    store = ClientStore(tmp_path, in_memory)
    store.commit(0, TRAIN, 1, {"a": part(1)}, None)
    store.commit(0, ASK, 1, {}, ANSWER)
    snapshot = json.loads(json.dumps(store.snapshot()))
    store.pin(snapshot)
    for server_round in range(2, 5):
        store.commit(0, TRAIN, server_round, {"a": part(server_round), "c": part(9)}, None)
    again = ClientStore(tmp_path, in_memory)
    again.restore(snapshot)
    assert values(again) == {"a": 1}
    assert again.done(0, TRAIN) == 1
    assert again.answer(0).event == ANSWER.event
    files = {path.name for path in again.folder(0).glob("*.safetensors")}
    assert len(files) == 2, "later files are dropped"


def test_the_disk_does_not_fill_up(tmp_path: Path, in_memory: bool) -> None:
    store = ClientStore(tmp_path, in_memory)
    for server_round in range(20):
        store.commit(0, TRAIN, server_round, {"a": part(server_round)}, None)
        if server_round % 5 == 0:
            store.pin(store.snapshot())
    assert len(list(store.folder(0).glob("*.safetensors"))) <= 2
    store.forget()
    assert not list(store.folder(0).glob("*"))


@given(st.integers(0, 200), st.booleans())
def test_a_touched_file_is_refused(
    tmp_path_factory: pytest.TempPathFactory, byte: int, cut: bool
) -> None:
    place = tmp_path_factory.mktemp("store")
    store = ClientStore(place, in_memory=False)
    store.commit(0, TRAIN, 1, {"a": part(1)}, None)
    snapshot = store.snapshot()
    [file] = store.folder(0).glob("a.*.safetensors")
    data = bytearray(file.read_bytes())
    byte %= len(data)
    if cut:
        data = data[:byte]
    else:
        data[byte] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(FedgenError, match="cut short or altered"):
        ClientStore(place, in_memory=False).restore(snapshot)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, in_memory=False)
    store.commit(0, TRAIN, 1, {"a": part(1)}, None)
    snapshot = store.snapshot()
    [file] = store.folder(0).glob("a.*.safetensors")
    file.unlink()
    with pytest.raises(FedgenError, match="is missing"):
        ClientStore(tmp_path, in_memory=False).restore(snapshot)
