"""The door of a client: idempotent, charged before anything leaves, and its own keeper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import Message
from tiny import COINS, SHARD, make

from fedgen.federation import messages
from fedgen.federation.client_app import ClientHome, client_app
from fedgen.federation.client_store import ClientStore
from fedgen.federation.in_process import InProcessGrid
from fedgen.privacy.ledger import Ledger

Ask = Callable[[int], Message]


@pytest.fixture
def home(tmp_path: Path) -> ClientHome:
    ledger = Ledger(tmp_path / "ledger.jsonl", "run", 0, seeded=False)
    store = ClientStore(tmp_path, in_memory=True)
    return ClientHome(0, make(noise=1.0).client, SHARD, COINS, store, ledger, rows=18)


@pytest.fixture
def ask(home: ClientHome) -> Ask:
    method = make(noise=1.0)
    server = method.server.init(COINS)
    grid = InProcessGrid(client_app(lambda _: home), 1, serialize=False)

    def once(server_round: int) -> Message:
        query = method.server.query(server, server_round, COINS)
        content = messages.pack_query(server_round, query)
        message = Message(content, dst_node_id=2, message_type=messages.ASK)
        [reply] = grid.send_and_receive([message])
        return reply

    return once


def test_a_repeated_question_gets_the_same_answer_and_costs_nothing(
    home: ClientHome, ask: Ask
) -> None:
    first, again, next_ = (messages.read_answer(ask(r)) for r in (0, 0, 1))
    assert (first.arrays["gradients"] == again.arrays["gradients"]).all()
    assert (first.arrays["gradients"] != next_.arrays["gradients"]).any()
    assert home.ledger.releases == 2


def test_a_round_of_the_past_is_not_answered_again(home: ClientHome, ask: Ask) -> None:
    """Its noise would be the old one: a server that asks something else could subtract it."""
    assert not ask(0).has_error()
    assert not ask(1).has_error()
    assert ask(0).has_error()
    assert home.ledger.releases == 2


def test_the_client_enforces_its_budget(home: ClientHome, ask: Ask) -> None:
    replies = [ask(server_round) for server_round in range(4)]
    assert [reply.has_error() for reply in replies] == [False, False, False, True]
    assert home.ledger.rows == 18


def test_a_charge_comes_before_the_reply(
    home: ClientHome, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails after the release is made, its cost is on record."""

    def fail(*_: object) -> None:
        raise OSError("the line is dead")

    monkeypatch.setattr(messages, "pack_release", fail)
    assert ask(0).has_error()
    assert home.ledger.releases == 1


def test_a_release_that_cannot_be_charged_does_not_leave(
    home: ClientHome, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(home.ledger, "charge", fail)
    assert ask(0).has_error()


def test_training_carries_nothing_back(home: ClientHome) -> None:
    """The acknowledgement of a training message is the same whatever the rows are."""
    method = make(noise=1.0)
    grid = InProcessGrid(client_app(lambda _: home), 1, serialize=False)
    broadcast = method.server.broadcast(method.server.init(COINS), 0, COINS)
    content = messages.pack_broadcast(0, messages.pack_arrays(broadcast))
    replies = []
    for shard in (SHARD, type(SHARD)(255 - SHARD.images, torch.zeros_like(SHARD.labels))):
        home.shard = shard
        message = Message(content, dst_node_id=2, message_type=messages.TRAIN)
        replies.extend(grid.send_and_receive([message]))
    assert replies[0].content == replies[1].content == messages.pack_acknowledgement()
