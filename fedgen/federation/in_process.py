"""A Flower Grid whose clients live in the same process: the quickest way through a round."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedgen.federation.flower_compat import (
    CLIENT_RAISED,
    empty_run,
    identify_process,
    set_message_id,
    through_the_wire,
)

_FIRST_NODE = 2  # 1 is the server's


class InProcessGrid(Grid):
    """Runs each message's client when its reply is pulled, one message a pull, in order.

    Args:
        app: the ClientApp, called with a context whose ``node_config`` names the partition.
        clients: number of partitions.
        serialize: sends each message through Flower's wire format, as a network would.
    """

    def __init__(self, app: ClientApp, clients: int, serialize: bool) -> None:
        identify_process(run_id=1)
        self._app, self._serialize = app, serialize
        self._run = empty_run(1)
        self._contexts = {
            _FIRST_NODE + partition: Context(
                run_id=1,
                node_id=_FIRST_NODE + partition,
                node_config={"partition-id": partition, "num-partitions": clients},
                state=RecordDict(),
                run_config={},
            )
            for partition in range(clients)
        }
        self._pending: dict[str, Message] = {}
        self._sent = 0
        self.exception: Exception | None = None

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
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Takes messages in; unknown nodes get an error reply."""
        ids = []
        for message in messages:
            self._sent += 1
            set_message_id(message, str(self._sent))
            self._pending[str(self._sent)] = message
            ids.append(str(self._sent))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The reply to the first of these messages that is pending; empty if none is."""
        for message_id in message_ids:
            if message_id in self._pending:
                return [self._handle(self._pending.pop(message_id))]
        return []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Pushes, and pulls all replies."""
        del timeout  # nothing here takes longer than its work
        return [reply for i in self.push_messages(messages) for reply in self.pull_messages([i])]

    def _handle(self, message: Message) -> Message:
        if self._serialize:
            message = through_the_wire(message)
        context = self._contexts.get(message.metadata.dst_node_id)
        try:
            if context is None:
                raise LookupError(f"no node {message.metadata.dst_node_id}")
            reply = self._app(message, context)
        except Exception as error:  # a code leaves the client, never the exception's text
            self.exception = error
            return Message(Error(CLIENT_RAISED), reply_to=message)
        return through_the_wire(reply) if self._serialize else reply
