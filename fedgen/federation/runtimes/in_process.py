"""All clients in this process, one after the other: the fastest runtime."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedgen.federation.client.app import client_app
from fedgen.federation.client.context import ClientContexts, ClientSetup
from fedgen.federation.failures import DEADLINE
from fedgen.federation.flower_compat import serialize_roundtrip
from fedgen.federation.messages import sum_responses
from fedgen.federation.runtimes.local_nodes import (
    LocalGrid,
    LocalNodes,
    message_timeout,
    node_client,
)
from fedgen.federation.runtimes.server_app import start

_SLICE_SECONDS = 0.05  # time per pull without sums
_MESSAGES_PER_SUM = 256  # messages per pull with sums


def run(
    server: ServerApp,
    setup: ClientSetup,
    clients: int,
    rebuild: Callable[[], ClientSetup],
    *,
    timeout: float | None,
    serialize: bool,
) -> None:
    """Run a ServerApp against the ClientApp; see ``InProcessGrid`` for the settings."""
    del rebuild  # nothing is rebuilt
    app = client_app(ClientContexts(setup), setup.mods, without_server=False)
    # not with simulated faults (mods): a delayed reply would hold back the responses of others
    sums = setup.terms.aggregation.adds_up and not setup.terms.masked_sums and not setup.mods
    start(server, InProcessGrid(app, clients, timeout, serialize, sums))


class InProcessGrid(LocalGrid):
    """Run the client of each message when its reply is pulled.

    Args:
        app: the ClientApp, called with a context whose ``node_config`` names the partition.
        clients: number of partitions.
        timeout: deadline of a client for a message of a round, in seconds; a later response is
            discarded, because the client cannot be interrupted.
        serialize: serialize each message as a network would.
        sums: whether to sum responses within the process, up to 256 at a time; for sums without
            masks.
    """

    def __init__(
        self,
        app: ClientApp,
        clients: int,
        timeout: float | None,
        serialize: bool,
        sums: bool = False,
    ) -> None:
        super().__init__(clients)
        self._sums_responses = sums
        self._local, self._timeout, self._serialize = (
            LocalNodes(app, clients, without_server=False),
            timeout,
            serialize,
        )
        self._pending: dict[str, Message] = {}

    def _send(self, name: str, message: Message) -> None:
        self._pending[name] = message

    def _pull(self, ids: Iterable[str]) -> list[Message]:
        replies: list[Message] = []
        end = time.monotonic() + _SLICE_SECONDS
        for name in ids:
            if name in self._pending:
                replies.append(self._handle(self._pending.pop(name)))
                is_full = len(replies) == _MESSAGES_PER_SUM
                if is_full if self._sums_responses else time.monotonic() > end:
                    break
        if self._sums_responses:
            return sum_responses(
                [(node_client(reply.metadata.src_node_id), reply) for reply in replies]
            )
        return replies

    def _handle(self, message: Message) -> Message:
        start = time.monotonic()
        if self._serialize:
            reply = serialize_roundtrip(self._local.handle(serialize_roundtrip(message)))
        else:
            reply = self._local.handle(message)
        if time.monotonic() - start > message_timeout(message, self._timeout):
            return Message(Error(DEADLINE), reply_to=message)
        return reply
