"""Nodes of fedgen's own grids, one per client, and the grid interface."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedgen.errors import missing_resource
from fedgen.federation.flower_compat import (
    CLIENT_RAISED,
    NODE_UNAVAILABLE,
    Run,
    empty_run,
    identify_process,
    set_message_id,
)
from fedgen.federation.messages import IN_A_ROUND

_FIRST_NODE = 2  # 1 is the server


def node_client(node: int) -> int:
    """Return the client of a node."""
    return node - _FIRST_NODE


def message_timeout(message: Message, timeout: float | None) -> float:
    """Return the deadline of a client for a message, in seconds."""
    limited = timeout is not None and message.metadata.message_type in IN_A_ROUND
    return timeout if limited and timeout is not None else math.inf


class LocalNodes:
    """Nodes of this process: call the ClientApp with a context that names the partition.

    without_server: whether no server is in this process; otherwise a missing resource of the
        machine ends the server as well.
    """

    def __init__(self, app: ClientApp, clients: int, without_server: bool = True) -> None:
        self._app, self._clients, self._without_server = app, clients, without_server
        self._contexts: dict[int, Context] = {}

    def handle(self, message: Message) -> Message:
        """Return the reply to a message. An error reply carries a code, never the text of an
        exception."""
        node = message.metadata.dst_node_id
        try:
            return self._app(message, self._context(node))
        except Exception as error:
            if not self._without_server and missing_resource(error) is not None:
                raise
            return Message(Error(CLIENT_RAISED), reply_to=message)

    def _context(self, node: int) -> Context:
        if node not in self._contexts:
            self._contexts[node] = Context(
                run_id=1,
                node_id=node,
                node_config={"partition-id": node_client(node), "num-partitions": self._clients},
                state=RecordDict(),
                run_config={},
            )
        return self._contexts[node]


class LocalGrid(Grid):
    """A Flower grid over ``clients`` nodes that answers every message, at the latest with an error
    at its deadline."""

    def __init__(self, clients: int) -> None:
        identify_process(run_id=1)
        self._run = empty_run(1)
        self._nodes = range(_FIRST_NODE, _FIRST_NODE + clients)
        self._sent = 0
        self._lost: dict[str, Message] = {}

    @abstractmethod
    def _send(self, name: str, message: Message) -> None:
        """Accept a message for an existing node."""

    def set_run(self, run: Run) -> None:
        """Set Flower's description of the run."""
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
        """Create a message, like ``Message(...)``."""
        return Message(
            content, dst_node_id=dst_node_id, message_type=message_type, ttl=ttl, group_id=group_id
        )

    def get_node_ids(self) -> Iterable[int]:
        """Return all nodes."""
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Accept messages; a message to an unknown node receives an error."""
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
        """Return available replies to these messages; wait briefly if there are none."""
        if self._lost:
            message_ids = list(message_ids)
            if lost := [self._lost.pop(name) for name in message_ids if name in self._lost]:
                return lost
        return self._pull(message_ids)

    @abstractmethod
    def _pull(self, ids: Iterable[str]) -> list[Message]:
        """See ``pull_messages``."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and pull all replies. ``timeout`` is ignored: the grid has its own."""
        del timeout
        waiting = dict.fromkeys(self.push_messages(messages))
        replies: list[Message] = []
        while waiting:
            for reply in self.pull_messages(waiting):
                del waiting[reply.metadata.reply_to_message_id]
                replies.append(reply)
        return replies


class GridWrapper(Grid):
    """A grid that delegates to another; subclasses override single methods."""

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
