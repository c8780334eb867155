"""The link's port: limits on who connects and on what is read, before Flower reads any of it.

| limit | of | value |
|---|---|---|
| connections | an address that is not this machine's | ``MOST_CONNECTIONS`` |
| TLS handshake, request headers | a connection | ``PATIENCE_SECONDS``, ``MOST_HEADERS`` bytes |
| body, in time | a request | ``PATIENCE_SECONDS`` and a second for each ``LEAST_RATE`` bytes |
| body, in bytes | a request without an accepted key | ``SMALL_BODY`` |
| body, in bytes | any request | the setting ``largest`` |

Flower reads a whole body before it looks at the key in the headers, and uvicorn has no limit of
these kinds. The key is checked here first, by Flower's own rules: a signed time that is new.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import resource
import socket
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import uvicorn
from cryptography.exceptions import UnsupportedAlgorithm
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from starlette.responses import PlainTextResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HERE = ("127.0.0.1", "::1")
MOST_CONNECTIONS = 128
PATIENCE_SECONDS = 10.0
MOST_HEADERS = 2**16
LEAST_RATE = 2**16
SMALL_BODY = 2**13


class Door(socket.socket):
    """A listening socket that takes at most ``MOST_CONNECTIONS`` of one address at a time."""

    def __init__(self, family: int) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._open: Counter[str] = Counter()

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection.

        Raises:
            ConnectionAbortedError: if its address has too many, after closing it; asyncio tries
                again.
        """
        accepted, address = super().accept()
        caller = str(address[0])
        if caller not in HERE and self._open[caller] >= MOST_CONNECTIONS:
            accepted.close()
            raise ConnectionAbortedError
        self._open[caller] += 1
        counted = _Counted(accepted.family, accepted.type, accepted.proto, accepted.detach())
        counted.closed = lambda: self._leave(caller)
        return counted, address

    def _leave(self, caller: str) -> None:
        self._open[caller] -= 1
        if not self._open[caller]:
            del self._open[caller]


class _Counted(socket.socket):
    """A connection that tells when it is closed."""

    closed: Callable[[], None] | None = None

    def close(self) -> None:
        """Close it, once."""
        super().close()
        if self.closed is not None:
            self.closed()
            self.closed = None


class Loop(asyncio.SelectorEventLoop):
    """An event loop that ends TLS handshakes which take long."""

    async def create_server(self, *args: Any, **settings: Any) -> Any:
        """As asyncio's."""
        if settings.get("ssl") is not None:
            settings["ssl_handshake_timeout"] = PATIENCE_SECONDS
        return await super().create_server(*args, **settings)


class Timed(HttpToolsProtocol):
    """HTTP/1.1, whose headers and bodies have to arrive in time."""

    _timer: asyncio.TimerHandle | None = None
    _in_headers, _head = True, 0

    def connection_made(self, transport: Any) -> None:
        """As uvicorn's, and time runs for the first headers."""
        super().connection_made(transport)
        self._begin()

    def data_received(self, data: bytes) -> None:
        """As uvicorn's, and time runs for headers from their first byte on."""
        if self._timer is None:
            self._begin()
        self._head += len(data)
        super().data_received(data)
        if self._in_headers and self._head > MOST_HEADERS:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        """As uvicorn's, and time runs for the body."""
        self._in_headers = False
        length = dict(self.headers).get(b"content-length", b"0")
        seconds = PATIENCE_SECONDS + (int(length) if length.isdigit() else 0) / LEAST_RATE
        self._stop()
        self._timer = self.loop.call_later(min(seconds, 3600.0), self.transport.abort)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """As uvicorn's; all of a request is here."""
        self._stop()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's."""
        self._stop()
        super().connection_lost(exc)

    def _begin(self) -> None:
        """Wait for headers."""
        self._head, self._in_headers = 0, True
        self._timer = self.loop.call_later(PATIENCE_SECONDS, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None


class Bounded:
    """Middleware: refuses a body by its length, before any of it is read.

    Args:
        app: an ASGI application.
        largest: bytes of the largest body.
    """

    def __init__(self, app: Any, largest: int) -> None:
        self._app, self._largest = app, largest

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        length = headers.get("content-length", "0")
        most = SMALL_BODY
        if "transfer-encoding" in headers or not length.isdigit():
            await _refused("give a content-length", 411)(scope, receive, send)
            return
        if int(length) > SMALL_BODY and (_is_here(scope) or _is_accepted(scope, headers)):
            most = self._largest
        if int(length) > most:
            said = f"{int(length):,} bytes; the link takes {most:,} (fedgen link largest=MB)"
            await _refused(said, 413)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _refused(said: str, status: int) -> PlainTextResponse:
    """A refusal that ends the connection: what is still to come of the body is not waited for."""
    return PlainTextResponse(said, status, headers={"connection": "close"})


def _is_here(scope: Any) -> bool:
    return (scope.get("client") or ("",))[0] in HERE


def _is_accepted(scope: Any, headers: Mapping[str, str]) -> bool:
    """Whether a request is of a node whose key was accepted: it signs the time."""
    try:
        key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER.lower()], validate=True)
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER.lower()], validate=True)
        signed = headers[TIMESTAMP_HEADER.lower()]
        age = (now() - datetime.datetime.fromisoformat(signed)).total_seconds()
        fresh = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
        if not fresh or not verify_signature(bytes_to_public_key(key), signed.encode(), signature):
            return False
        state = scope["app"].state.linkstate_factory.state()
        return state.get_node_id_by_public_key(key) is not None
    except (KeyError, ValueError, TypeError, AttributeError, UnsupportedAlgorithm):
        return False


class Uvicorn:
    """What Flower's SuperLink calls in uvicorn's place."""

    @staticmethod
    def run(
        *, app: Any, host: str, port: int, ssl_keyfile: str, ssl_certfile: str, **_: Any
    ) -> None:
        """Serve until the process is told to end."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            loop="fedgen.deployment.flower_door:Loop",
            http=Timed,
            ws="none",
            proxy_headers=False,  # an address is what connects, whatever a header says
            access_log=False,  # a line for each request of a stranger would fill a disk
            log_level="critical",
            ssl_keyfile=ssl_keyfile,
            ssl_certfile=ssl_certfile,
        )
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with contextlib.ExitStack() as stack:
            doors = [stack.enter_context(Door(each[0])) for each in addresses]
            for door, found in zip(doors, addresses, strict=True):
                door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if door.family == socket.AF_INET6:  # callers by IPv4 have addresses of their own
                    door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                door.bind(found[4])
                door.setblocking(False)
            uvicorn.Server(config).run(sockets=list(doors))
