"""All clients in this process, one after the other: the fastest runtime."""

from __future__ import annotations

import time
from collections.abc import Callable

from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedgen.federation.client.app import client_app
from fedgen.federation.client.context import ClientContexts, ClientSetup
from fedgen.federation.failures import DEADLINE
from fedgen.federation.flower_compat import serialize_roundtrip
from fedgen.federation.runtimes.local_nodes import LocalGrid, LocalNodes, message_timeout
from fedgen.federation.runtimes.server_app import start

_SLICE_SECONDS = 0.05  # time slice of handling messages


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
    start(server, InProcessGrid(app, clients, timeout, serialize))


class InProcessGrid(LocalGrid):
    """Run the client of each message when its reply is pulled.

    Args:
        app: the ClientApp, called with a context whose ``node_config`` names the partition.
        clients: number of partitions.
        timeout: deadline of a client for a message of a round, in seconds; a later response is
            discarded, because the client cannot be interrupted.
        serialize: serialize each message as a network would.
    """

    def __init__(
        self, app: ClientApp, clients: int, timeout: float | None, serialize: bool
    ) -> None:
        super().__init__(clients)
        self._local, self._timeout, self._serialize = (
            LocalNodes(app, clients, without_server=False),
            timeout,
            serialize,
        )
        self._pending: dict[str, Message] = {}

    def _send(self, name: str, message: Message) -> None:
        self._pending[name] = message

    def _pull(self, ids: list[str]) -> list[Message]:
        replies = []
        end = time.monotonic() + _SLICE_SECONDS
        for name in ids:
            if name in self._pending:
                replies.append(self._handle(self._pending.pop(name)))
                if time.monotonic() > end:
                    break
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
