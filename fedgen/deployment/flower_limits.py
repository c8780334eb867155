"""Limits on requests to the link, applied before Flower reads a request.

| limit | per | value |
|---|---|---|
| connections | remote address (IPv6: /64 network) | ``MAX_CONNECTIONS`` |
| connections | listener, without local ones | ``MAX_TOTAL`` |
| requests | connection | one, and one that waits: more close it |
| unread response | connection | ``TIMEOUT_SECONDS`` without progress |
| TLS handshake | connection | ``TIMEOUT_SECONDS`` |
| headers | request | ``TIMEOUT_SECONDS``, ``MAX_HEADER_BYTES`` |
| body, without an accepted key | request | ``MAX_ANONYMOUS_BODY`` bytes |
| body | request | the setting ``largest``, at ``MIN_BYTES_PER_SECOND`` or faster |

Flower reads a whole body before it checks the key in the headers, and uvicorn has none of these
limits. This module checks the key first, by Flower's rule: the headers carry a fresh, signed
timestamp.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import resource
import socket
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import uvicorn
from cryptography.exceptions import UnsupportedAlgorithm
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from starlette.responses import PlainTextResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LOOPBACK = ("127.0.0.1", "::1")
MAX_CONNECTIONS, MAX_TOTAL = 128, 2048
TIMEOUT_SECONDS = 10.0
MAX_HEADER_BYTES = 2**16
MIN_BYTES_PER_SECOND = 2**16
MAX_ANONYMOUS_BODY = 2**13
LIMIT_HEADER = "fedgen-largest"
"""Header of responses: the limit on the body of a request, in bytes."""


class LimitedListener(socket.socket):
    """Listening socket with at most ``MAX_CONNECTIONS`` open connections per remote address, and
    ``MAX_TOTAL`` in all. Local callers are not limited."""

    def __init__(self, family: int) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._open: Counter[str] = Counter()

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, as ``socket.socket.accept``.

        Raises:
            ConnectionAbortedError: if there are too many connections; this one is closed. asyncio
                ignores this error.
        """
        accepted, address = super().accept()
        caller = _network(str(address[0]))
        local = sum(self._open[host] for host in LOOPBACK)
        full = self._open[caller] >= MAX_CONNECTIONS or self._open.total() - local >= MAX_TOTAL
        if full and caller not in LOOPBACK:
            accepted.close()
            raise ConnectionAbortedError
        self._open[caller] += 1
        counted = _Counted(accepted.family, accepted.type, accepted.proto, accepted.detach())
        counted.on_close = lambda: self._forget(caller)
        return counted, address

    def _forget(self, caller: str) -> None:
        self._open[caller] -= 1
        if not self._open[caller]:
            del self._open[caller]


def _network(address: str) -> str:
    """Return an IPv4 or local address as it is, and the /64 network of another IPv6 address: one
    host may use all addresses of it."""
    if ":" not in address or address in LOOPBACK:
        return address
    return ipaddress.ip_address(address.partition("%")[0]).packed[:8].hex()


class _Counted(socket.socket):
    """Connection that calls ``on_close`` once, when it is closed."""

    on_close: Callable[[], None] | None = None

    def close(self) -> None:
        """Close the connection."""
        super().close()
        if self.on_close is not None:
            self.on_close()
            self.on_close = None


def listeners(host: str, port: int) -> list[LimitedListener]:
    """Bind to every local address that a host name resolves to.

    Raises:
        OSError: if there is none, or the port is in use.
    """
    bound: list[LimitedListener] = []
    refused: OSError | None = None
    for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        listener = LimitedListener(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # so that IPv4 callers appear by their IPv4 address
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
        except OSError as error:
            listener.close()
            refused = error
            continue
        listener.setblocking(False)
        bound.append(listener)
    if not bound:
        raise refused or OSError(f"no address of {host}")
    return bound


class Loop(asyncio.SelectorEventLoop):
    """Event loop whose servers limit the duration of TLS handshakes."""

    async def create_server(self, *args: Any, **settings: Any) -> Any:
        """Create a server with ``TIMEOUT_SECONDS`` for each TLS handshake."""
        if settings.get("ssl") is not None:
            settings["ssl_handshake_timeout"] = TIMEOUT_SECONDS
        return await super().create_server(*args, **settings)


class TimedHttp(HttpToolsProtocol):
    """HTTP/1.1 connection that is aborted when headers or a body arrive too slowly, when a response
    is not read, and when several requests wait for earlier ones: uvicorn would queue any number."""

    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _in_headers, _received = True, 0

    def connection_made(self, transport: Any) -> None:
        """Start the timer of the first request's headers."""
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """Parse data; abort if the headers are too long."""
        if self._timer is None:
            self._await_headers()
        self._received += len(data)
        super().data_received(data)
        if self._in_headers and self._received > MAX_HEADER_BYTES:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        """Start the timer of the body."""
        if self.pipeline:  # one may wait: a response can arrive before its server has finished it
            self.transport.abort()
            raise ValueError("pipelined requests")  # ends the parsing of what has arrived
        self._in_headers = False
        length = dict(self.headers).get(b"content-length", b"0")
        seconds = TIMEOUT_SECONDS + int(length if length.isdigit() else 0) / MIN_BYTES_PER_SECOND
        self._stop()
        self._timer = self.loop.call_later(min(seconds, 3600.0), self.transport.abort)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Stop the timer: the request is complete."""
        self._stop()
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Start the timer of an unread response: the write buffer is full."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(TIMEOUT_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer of an unread response."""
        super().resume_writing()
        self._stop_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._stop()
        self._stop_writing()
        super().connection_lost(exc)

    def _stop_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._write_timer = None

    def _await_headers(self) -> None:
        self._received, self._in_headers = 0, True
        self._timer = self.loop.call_later(TIMEOUT_SECONDS, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None


class BodyLimit:
    """ASGI middleware that rejects a request by the length of its body, before reading it.

    Args:
        app: an ASGI application.
        largest: limit in bytes for local callers and nodes whose key was accepted.
    """

    def __init__(self, app: Any, largest: int) -> None:
        self._app, self._largest = app, largest

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Reject oversized bodies, then call the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not length.isdecimal():
            await _rejected("content-length required", 411)(scope, receive, send)
            return
        limit = MAX_ANONYMOUS_BODY
        if int(length) > limit and (_is_local(scope) or _is_accepted(scope, headers)):
            limit = self._largest
        if int(length) > limit:
            problem = f"body of {int(length):,} bytes exceeds the limit of {limit:,} bytes"
            await _rejected(problem, 413)(scope, receive, send)
            return

        async def send_with_limit(message: Any) -> None:
            if message["type"] == "http.response.start":
                header = (LIMIT_HEADER.encode(), str(self._largest).encode())
                message["headers"] = [*message["headers"], header]
            await send(message)

        await self._app(scope, receive, send_with_limit)


def _rejected(problem: str, status: int) -> PlainTextResponse:
    """Response that closes the connection, so that the rest of the body is not awaited."""
    return PlainTextResponse(problem, status, headers={"connection": "close"})


def _is_local(scope: Any) -> bool:
    return (scope.get("client") or ("",))[0] in LOOPBACK


def _is_accepted(scope: Any, headers: Mapping[str, str]) -> bool:
    """Whether the request's timestamp is fresh and signed with an accepted key."""
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


def serve(
    bound: Sequence[LimitedListener], *, app: Any, ssl_keyfile: str, ssl_certfile: str, **_: Any
) -> None:
    """Serve an ASGI application on bound sockets until the process is terminated. Replaces
    ``uvicorn.run`` in Flower's SuperLink, whose other arguments are ignored."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    config = uvicorn.Config(
        app,
        loop="fedgen.deployment.flower_limits:Loop",
        http=TimedHttp,
        ws="none",
        proxy_headers=False,  # a caller's address is that of its connection, not of a header
        access_log=False,  # a line for each request of a stranger would fill a disk
        log_level="critical",
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
    )
    with contextlib.ExitStack() as stack:
        uvicorn.Server(config).run(sockets=[stack.enter_context(listener) for listener in bound])
