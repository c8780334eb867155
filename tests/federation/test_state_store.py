"""Client states: commits are atomic, tags can be restored, and altered files are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fedgen.errors import FedgenError
from fedgen.federation.client.state_store import ClientStore
from fedgen.federation.messages import ASK, TRAIN, Response
from fedgen.privacy.events import Unit

ANSWER = Response({"answer": np.ones(2, np.float32)}, GaussianDpEvent(1.0), Unit.RECORD)


def part(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), value)}


def values(store: ClientStore, client: int = 0) -> dict[str, float]:
    return {name: float(p["w"][0]) for name, p in store.state(client).items()}


def files(store: ClientStore, client: int = 0) -> int:
    return len(list(store.folder(client).glob("*.safetensors")))


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
    assert store.last_round(0, TRAIN) == 2
    assert store.last_round(0, ASK) == 2
    result = store.response(0)
    assert np.array_equal(result.arrays["answer"], ANSWER.arrays["answer"])
    assert result.event == ANSWER.event
    assert store.last_round(1, TRAIN) is None
    with pytest.raises(LookupError):
        store.response(1)


def test_a_tag_can_be_restored(tmp_path: Path, in_memory: bool) -> None:
    store = ClientStore(tmp_path, in_memory)
    store.commit(0, TRAIN, 1, {"a": part(1)}, None)
    store.commit(0, ASK, 1, {}, ANSWER)
    store.keep(0, 1, 0)
    for server_round in range(2, 5):
        store.commit(0, TRAIN, server_round, {"a": part(server_round), "c": part(9)}, None)
    store.keep(0, 2, 1)  # and the server dies before it has noted it
    again = ClientStore(tmp_path, in_memory)
    again.restore(0, 1)
    assert values(again) == {"a": 1}
    assert again.last_round(0, TRAIN) == 1
    assert again.response(0).event == ANSWER.event
    assert files(again) == 2, "what came later is dropped"
    again.restore(0, 0)
    assert not list(again.folder(0).iterdir())


def test_the_disk_does_not_fill_up(tmp_path: Path, in_memory: bool) -> None:
    store = ClientStore(tmp_path, in_memory)
    for server_round in range(20):
        store.commit(0, TRAIN, server_round, {"a": part(server_round)}, None)
        if server_round % 5 == 0:
            store.keep(0, 1 + server_round // 5, server_round // 5)
    assert files(store) <= 3
    assert len(list(store.folder(0).glob("kept.*"))) == 2


def test_a_confirmed_tag_is_retained_until_another_is(tmp_path: Path, in_memory: bool) -> None:
    """The server's checkpoint names it as long as replies to later calls are lost."""
    store = ClientStore(tmp_path, in_memory)
    for tag in range(1, 6):
        store.commit(0, TRAIN, tag, {"a": part(tag)}, None)
        store.keep(0, tag, min(tag - 1, 1))
    assert len(list(store.folder(0).glob("kept.*"))) == 2
    for tag in (5, 1):
        again = ClientStore(tmp_path, in_memory)
        again.restore(0, tag)
        assert values(again) == {"a": tag}


def test_a_late_tag_has_no_effect(tmp_path: Path, in_memory: bool) -> None:
    """The server's checkpoint names a later tag."""
    store = ClientStore(tmp_path, in_memory)
    store.commit(0, TRAIN, 1, {"a": part(1)}, None)
    store.keep(0, 4, 0)
    store.keep(0, 3, 0)
    again = ClientStore(tmp_path, in_memory)
    again.restore(0, 4)
    assert values(again) == {"a": 1}


def test_a_repeated_tag_keeps_the_previous_one(tmp_path: Path, in_memory: bool) -> None:
    """An actor died after it tagged its state and was called again; then the server died before it
    recorded the tag, and restores the previous one."""
    store = ClientStore(tmp_path, in_memory)
    for tag in (1, 2, 2):
        store.commit(0, TRAIN, tag, {"a": part(tag)}, None) if tag != 2 else None
        store.keep(0, tag, tag - 1)
    again = ClientStore(tmp_path, in_memory)
    again.restore(0, 1)
    assert values(again) == {"a": 1}


def test_several_processes_share_a_state(tmp_path: Path) -> None:
    """What one commits, tags or restores, the other sees, with and without a cache."""
    stores = [ClientStore(tmp_path, False, cache_bytes=1e6), ClientStore(tmp_path, False)]
    for turn in range(8):
        stores[turn % 2].commit(0, TRAIN, turn, {"a": part(turn)}, None)
        assert values(stores[1 - turn % 2]) == {"a": turn}
        if turn == 3:
            stores[0].keep(0, 1, 0)
    stores[1].restore(0, 1)
    assert values(stores[0]) == {"a": 3}
    assert stores[0].last_round(0, TRAIN) == 3


def test_the_cache_is_bounded(tmp_path: Path) -> None:
    """It contains the last states used; others are read again."""
    store = ClientStore(tmp_path, False, cache_bytes=60.0)  # two parts of 24 bytes
    for name in "abc":
        store.commit(0, TRAIN, 0, {name: part(ord(name))}, None)
    reads = []
    read = store._read
    store._read = lambda client, file: reads.append(file[0][0]) or read(client, file)  # type: ignore
    state = store.state(0)
    for name in "cbcba":
        assert float(state[name]["w"][0]) == ord(name)
    assert reads == ["a"]


@given(st.integers(0, 200), st.booleans(), st.sampled_from(["a.*.safetensors", "kept.1.json"]))
def test_an_altered_file_is_refused(
    tmp_path_factory: pytest.TempPathFactory, byte: int, cut: bool, which: str
) -> None:
    place = tmp_path_factory.mktemp("store")
    store = ClientStore(place, in_memory=False)
    store.commit(0, TRAIN, 1, {"a": part(1)}, None)
    store.keep(0, 1, 0)
    [file] = store.folder(0).glob(which)
    data = bytearray(file.read_bytes())
    byte %= len(data)
    if cut:
        data = data[:byte]
    else:
        data[byte] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(FedgenError, match="truncated or altered"):
        ClientStore(place, in_memory=False).restore(0, 1)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, in_memory=False)
    store.commit(0, TRAIN, 1, {"a": part(1)}, None)
    store.keep(0, 1, 0)
    for which in ("a.*.safetensors", "kept.1.json"):
        [file] = store.folder(0).glob(which)
        file.unlink()
        with pytest.raises(FedgenError, match="is missing"):
            ClientStore(tmp_path, in_memory=False).restore(0, 1)


class StoreMachine(RuleBasedStateMachine):
    """Any sequence of commits, tags, restarts and restores, against a dictionary."""

    factory: pytest.TempPathFactory
    in_memory = False

    def __init__(self) -> None:
        super().__init__()
        self.place = self.factory.mktemp("machine")
        self.store = ClientStore(self.place, self.in_memory, cache_bytes=30.0)
        self.now: dict[str, float] = {}
        self.kept: dict[int, dict[str, float]] = {0: {}}
        self.turn = 0

    @rule(name=st.sampled_from("ab"), value=st.integers(0, 99))
    def commit(self, name: str, value: int) -> None:
        self.turn += 1
        self.store.commit(0, TRAIN, self.turn, {name: part(value)}, None)
        self.now = {**self.now, name: float(value)}

    @rule(back=st.integers(0, 1))
    def keep(self, back: int) -> None:
        tag = max(self.kept) + 1 + self.turn % 3  # some calls are not heard
        confirmed = sorted(self.kept)[-1 - min(back, len(self.kept) - 1)]  # and some replies
        self.store.keep(0, tag, confirmed)
        self.kept = {t: v for t, v in self.kept.items() if t in (0, confirmed)} | {tag: self.now}

    @rule(back=st.integers(0, 1))
    def restart_and_restore(self, back: int) -> None:
        tag = sorted(self.kept)[-1 - min(back, len(self.kept) - 1)]
        self.store = ClientStore(self.place, self.in_memory, cache_bytes=30.0)
        self.store.restore(0, tag)
        self.now = self.kept[tag]
        self.kept = {t: v for t, v in self.kept.items() if t <= tag}

    @precondition(lambda self: not self.in_memory)
    @rule()
    def die(self) -> None:
        self.store = ClientStore(self.place, self.in_memory, cache_bytes=30.0)

    @invariant()
    def same(self) -> None:
        assert values(self.store) == self.now
        assert files(self.store) <= 6


def test_any_history(tmp_path_factory: pytest.TempPathFactory, in_memory: bool) -> None:
    StoreMachine.factory, StoreMachine.in_memory = tmp_path_factory, in_memory
    StoreMachine.TestCase().runTest()
