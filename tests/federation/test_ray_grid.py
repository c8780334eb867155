"""The grid on Ray actors: each message is answered once, whatever happens."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedgen.federation.failures import DEADLINE, DIED
from fedgen.federation.flower_compat import CLIENT_RAISED, NODE_UNAVAILABLE
from fedgen.federation.messages import ASK
from fedgen.federation.runtimes.ray_cluster import cluster
from fedgen.federation.runtimes.ray_grid import RayGrid

pytestmark = pytest.mark.slow
CLIENTS = 6


def app() -> ClientApp:
    """A client that follows its instructions."""
    made = ClientApp()

    @made.query("ask")
    def do(message: Message, context: Context) -> Message:
        order = str(message.content.config_records["facts"]["order"])
        if order == "sleep":
            time.sleep(6)
        if order == "raise":
            raise ValueError("label of row 17 is 3")
        if order == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        facts = {"partition": int(str(context.node_config["partition-id"])), "pid": os.getpid()}
        return Message(RecordDict({"facts": ConfigRecord({**facts})}), reply_to=message)

    return made


@pytest.fixture(scope="module")
def grid() -> Iterator[RayGrid]:
    with cluster(None):
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors do not see the tests
        yield RayGrid.start(app, CLIENTS, 2.0, 1, 0.5, 0.0, 2)


def play(grid: RayGrid, orders: dict[int, str]) -> dict[int, int | str]:
    """Return client -> the partition that responded, or the code of an error."""
    nodes = sorted(grid.get_node_ids())
    sent = {}
    for client, order in orders.items():
        content = RecordDict({"facts": ConfigRecord({"order": order})})
        node = nodes[client] if client < CLIENTS else 999
        message = Message(content, dst_node_id=node, message_type=ASK)
        [name] = grid.push_messages([message])
        sent[name] = client
    result: dict[int, int | str] = {}
    while len(result) < len(sent):
        for reply in grid.pull_messages([n for n, c in sent.items() if c not in result]):
            client = sent[reply.metadata.reply_to_message_id]
            assert client not in result, "answered twice"
            if reply.has_error():
                assert "label of row" not in repr(reply.__dict__)
                result[client] = f"error {reply.error.code}"
            else:
                result[client] = int(str(reply.content.config_records["facts"]["partition"]))
    assert list(grid.pull_messages(list(sent))) == []
    return result


def test_every_client_responds(grid: RayGrid) -> None:
    assert play(grid, dict.fromkeys(range(CLIENTS), "work")) == {c: c for c in range(CLIENTS)}


def test_a_failure_is_a_code_and_others_respond(grid: RayGrid) -> None:
    result = play(grid, {0: "sleep", 1: "raise", 2: "work", 3: "work", 4: "work", 99: "work"})
    assert result == {
        0: f"error {DEADLINE}",
        1: f"error {CLIENT_RAISED}",
        2: 2,
        3: 3,
        4: 4,
        99: f"error {NODE_UNAVAILABLE}",
    }


def test_a_message_that_always_kills_is_given_up_and_others_respond(grid: RayGrid) -> None:
    result = play(grid, {0: "work", 2: "die", 4: "work", 1: "work"})
    assert result == {0: 0, 2: f"error {DIED}", 4: 4, 1: 1}
    assert play(grid, dict.fromkeys(range(CLIENTS), "work")) == {c: c for c in range(CLIENTS)}
