"""All clients in this process, one after the other: the quickest way through a round."""

from __future__ import annotations

import time
from collections.abc import Callable

from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedgen.federation.client_app import Homes, Site, client_app
from fedgen.federation.failures import DEADLINE
from fedgen.federation.flower_compat import through_the_wire
from fedgen.federation.nodes import Nodes, OwnGrid, seconds_for
from fedgen.federation.server_app import start

_SLICE_SECONDS = 0.05  # of handling messages before replies are handed out


def run(
    server: ServerApp,
    site: Site,
    clients: int,
    again: Callable[[], Site],
    *,
    timeout: float | None,
    serialize: bool,
) -> None:
    """Runs a ServerApp against the ClientApp of a site; see ``InProcessGrid`` for the settings."""
    del again  # everything is here
    app = client_app(Homes(site), site.mods, alone=False)
    start(server, InProcessGrid(app, clients, timeout, serialize))


class InProcessGrid(OwnGrid):
    """Runs each message's client when its reply is pulled.

    Args:
        app: the ClientApp, called with a context whose ``node_config`` names the partition.
        clients: number of partitions.
        timeout: seconds that a client may take for a message of a round; its answer is dropped if
            it takes longer, as nothing here can stop it.
        serialize: sends each message through Flower's wire format, as a network would.
    """

    def __init__(
        self, app: ClientApp, clients: int, timeout: float | None, serialize: bool
    ) -> None:
        super().__init__(clients)
        self._here, self._timeout, self._serialize = (
            Nodes(app, clients, alone=False),
            timeout,
            serialize,
        )
        self._pending: dict[str, Message] = {}

    def _send(self, name: str, message: Message) -> None:
        self._pending[name] = message

    def _pull(self, asked: list[str]) -> list[Message]:
        replies = []
        end = time.monotonic() + _SLICE_SECONDS
        for name in asked:
            if name in self._pending:
                replies.append(self._handle(self._pending.pop(name)))
                if time.monotonic() > end:
                    break
        return replies

    def _handle(self, message: Message) -> Message:
        begin = time.monotonic()
        if self._serialize:
            reply = through_the_wire(self._here.handle(through_the_wire(message)))
        else:
            reply = self._here.handle(message)
        if time.monotonic() - begin > seconds_for(message, self._timeout):
            return Message(Error(DEADLINE), reply_to=message)
        return reply
