"""What fedgen's own grids share: nodes that are partitions, and a client's way with a message."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedgen.errors import lacks
from fedgen.federation.flower_compat import (
    CLIENT_RAISED,
    NODE_UNAVAILABLE,
    empty_run,
    identify_process,
    set_message_id,
)
from fedgen.federation.messages import IN_A_ROUND

_FIRST_NODE = 2  # 1 is the server's


def client_of(node: int) -> int:
    """The partition behind a node."""
    return node - _FIRST_NODE


def seconds_for(message: Message, timeout: float | None) -> float:
    """How long a client may take for a message."""
    limited = timeout is not None and message.metadata.message_type in IN_A_ROUND
    return timeout if limited and timeout is not None else math.inf


class Nodes:
    """The nodes of this process: calls the ClientApp with a context that names the partition.
    ``alone``: no server is in this process. Where one is, what the machine lacks ends it as well.
    """

    def __init__(self, app: ClientApp, clients: int, alone: bool = True) -> None:
        self._app, self._clients, self._alone = app, clients, alone
        self._contexts: dict[int, Context] = {}

    def handle(self, message: Message) -> Message:
        """A message's reply. An error reply carries a code, never an exception's text."""
        node = message.metadata.dst_node_id
        try:
            return self._app(message, self._context(node))
        except Exception as error:
            if not self._alone and lacks(error) is not None:
                raise
            return Message(Error(CLIENT_RAISED), reply_to=message)

    def _context(self, node: int) -> Context:
        if node not in self._contexts:
            self._contexts[node] = Context(
                run_id=1,
                node_id=node,
                node_config={"partition-id": client_of(node), "num-partitions": self._clients},
                state=RecordDict(),
                run_config={},
            )
        return self._contexts[node]


class OwnGrid(Grid):
    """A Flower Grid over ``clients`` partitions. A grid of ours answers every message: by an error
    at the latest when its time is up."""

    def __init__(self, clients: int) -> None:
        identify_process(run_id=1)
        self._run = empty_run(1)
        self._nodes = range(_FIRST_NODE, _FIRST_NODE + clients)
        self._sent = 0
        self._lost: dict[str, Message] = {}

    @abstractmethod
    def _send(self, name: str, message: Message) -> None:
        """Takes in a message for a node that there is."""

    def set_run(self, run: Run) -> None:
        """Flower's description of the run."""
        self._run = run

    @property
    def run(self) -> Run:
        """Flower's description of the run."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A new message; ``Message(...)`` does the same."""
        return Message(
            content, dst_node_id=dst_node_id, message_type=message_type, ttl=ttl, group_id=group_id
        )

    def get_node_ids(self) -> Iterable[int]:
        """All nodes."""
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Takes messages in; one to an unknown node is answered by an error."""
        names = []
        for message in messages:
            self._sent += 1
            name = str(self._sent)
            set_message_id(message, name)
            names.append(name)
            if message.metadata.dst_node_id in self._nodes:
                self._send(name, message)
            else:
                self._lost[name] = Message(Error(NODE_UNAVAILABLE), reply_to=message)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies to some of these messages; waits a little if there is none."""
        asked = list(message_ids)
        lost = [self._lost.pop(name) for name in asked if name in self._lost]
        return lost or self._pull(asked)

    @abstractmethod
    def _pull(self, asked: list[str]) -> list[Message]:
        """See ``pull_messages``."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Pushes, and pulls all replies. ``timeout`` is the grid's own."""
        del timeout
        waiting = list(self.push_messages(messages))
        replies: list[Message] = []
        while waiting:
            for reply in self.pull_messages(waiting):
                waiting.remove(reply.metadata.reply_to_message_id)
                replies.append(reply)
        return replies


class GridAround(Grid):
    """A Grid that passes everything on to another; what is special about it overrides a method."""

    def __init__(self, inner: Grid) -> None:
        self._inner = inner

    def set_run(self, run: Run) -> None:
        """See Grid."""
        self._inner.set_run(run)

    @property
    def run(self) -> Run:
        """See Grid."""
        return self._inner.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """See Grid."""
        return self._inner.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """See Grid."""
        return self._inner.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See Grid."""
        return self._inner.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See Grid."""
        return self._inner.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """See Grid."""
        return self._inner.send_and_receive(messages, timeout=timeout)
