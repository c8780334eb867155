"""Serve Flower's SuperLink, and connect to it from the same machine.

Only the files ``flower_*`` of this package and ``flower_compat`` import private parts of Flower; a
test pins the version that they fit.
"""

from __future__ import annotations

import logging
import os
import ssl
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from flwr.proto.control_pb2 import RegisterNodeRequest
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.superlink import extensions
from flwr.superlink.cli import flower_superlink
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

from fedgen.deployment import flower_limits
from fedgen.deployment.flower_limits import LIMIT_HEADER, LOOPBACK, BodyLimit, LimitedListener
from fedgen.errors import FedgenError
from fedgen.storage.io import read_bounded
from fedgen.storage.keys import LARGEST

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""For each process that speaks Flower: nothing is reported, downloaded or installed."""


def initialize() -> None:
    """Configure Flower in this process: see ``QUIET``; poll more often, because Flower's first wait
    of one second would be the longest part of a round."""
    os.environ.update(QUIET)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # fedgen reports errors in one line
    defaults: Any = pull_objects.__kwdefaults__
    defaults["initial_backoff"] = _BACKOFF_SECONDS


def poll_interval(silent: float) -> float:
    """Return the seconds until a link without news for ``silent`` seconds is polled again: each
    poll costs work at the link, and the interval lengthens a wait by a twentieth."""
    return min(max(_POLL_SECONDS, 0.05 * silent), _SELDOM_SECONDS)


_BACKOFF_SECONDS = 0.02
_POLL_SECONDS, _SELDOM_SECONDS = 0.05, 2.0


_OPEN = ("/v1/fleet/", "/health")


class _FleetOnly:
    """Middleware that serves remote callers only the API for nodes."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle a request (ASGI)."""
        caller = (scope.get("client") or ("unknown",))[0]
        if scope["type"] == "lifespan" or caller in LOOPBACK or scope["path"].startswith(_OPEN):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            refused = PlainTextResponse("this API accepts local callers only", 403)
            await refused(scope, receive, send)


def serve(
    bound: Sequence[LimitedListener],
    ca: Path,
    certificate: Path,
    key: Path,
    database: Path,
    largest: int,
) -> None:
    """Run Flower's SuperLink, with node keys and limits, until the process is terminated.

    Args:
        bound: the listening sockets. They are closed in the end.
        ca, certificate, key: files of the TLS certificates.
        database: file of the SuperLink's state.
        largest: limit on the body of a request, in bytes.
    """
    initialize()
    inner, bounds = extensions.get_middleware, Middleware(BodyLimit, largest=largest)
    extensions.get_middleware = lambda: (bounds, Middleware(_FleetOnly), *inner())
    server = SimpleNamespace(run=partial(flower_limits.serve, bound))
    sys.modules[flower_superlink.__module__].__dict__["uvicorn"] = server
    host, port, *_ = bound[0].getsockname()
    place = ["--host", host, "--port", str(port), "--database", str(database)]
    tls = ["--ssl-ca-certfile", str(ca), "--ssl-certfile", str(certificate)]
    keys = ["--ssl-keyfile", str(key), "--enable-supernode-auth", "--isolation", "process"]
    sys.argv = ["flower-superlink", *place, *tls, *keys]
    flower_superlink()


@dataclass(frozen=True)
class Link:
    """A SuperLink on this machine: its address and certificate."""

    address: str
    ca: bytes

    @contextmanager
    def open(self, kind: type[Any], name: str) -> Iterator[Any]:
        """Yield a client of one of its APIs, under the name of a Flower component.

        Raises:
            FedgenError: in place of errors of its calls.
        """
        client = kind.from_server_address(
            server_address=self.address,
            insecure=False,
            root_certificates=self.ca,
            interceptors=[RuntimeVersionHttpInterceptor(component_name=name)],
        )
        try:
            yield client
        except httpx.HTTPStatusError as error:
            raise FedgenError(KEY, error_message(error), "see the SuperLink's log") from error
        except httpx.HTTPError as error:
            if certificate_error(error):
                problem = (
                    f"the certificate of the SuperLink at {self.address} fails "
                    f"verification against ca ({str(error)[:100]})"
                )
                raise FedgenError(KEY, problem, "correct address or ca") from error
            problem = f"no SuperLink responds at {self.address} ({type(error).__name__})"
            raise FedgenError(
                KEY, problem, "start fedgen link, or correct address or ca"
            ) from error
        finally:
            client.close()

    def largest(self) -> int:
        """Return the limit on the body of a request, in bytes.

        Raises:
            FedgenError: if the link does not answer, or is not one of fedgen's.
        """
        try:
            context = ssl.create_default_context(cadata=self.ca.decode())
            response = httpx.get(f"https://{self.address}/health", verify=context)
            return int(response.headers[LIMIT_HEADER])
        except (httpx.HTTPError, ssl.SSLError, ValueError, KeyError) as error:
            problem = f"no fedgen link responds at {self.address} ({type(error).__name__})"
            raise FedgenError(KEY, problem, "start fedgen link, or correct runtime.ca") from error

    def register(self, public_key: bytes, name: str) -> int:
        """Admit a node with this public key (PEM); return its id."""
        with self.open(ControlHttpClient, "flwr CLI") as client:
            try:
                response = client.RegisterNode(
                    RegisterNodeRequest(public_key=public_key, name=name)
                )
            except httpx.HTTPStatusError as error:
                if "already in use" in error_message(error):
                    raise FedgenError("accept", "this key was let in before", "go on") from error
                raise
            return int(response.node_id)


KEY = "runtime.superlink"


def certificate_error(error: Exception) -> bool:
    """Return whether a connection failed because of the peer's certificate."""
    if isinstance(error, httpx.TimeoutException):  # its text mentions SSL, too
        return False
    return any(word in str(error).lower() for word in ("certificate", "wrong_version"))


def parse_address(superlink: str, ca: str) -> Link:
    """Return the SuperLink named by the settings.

    Raises:
        FedgenError: if its certificate cannot be read.
    """
    try:
        return Link(superlink, read_bounded(Path(ca).expanduser(), LARGEST))
    except (OSError, ValueError) as error:
        problem = f"{ca} cannot be read ({getattr(error, 'strerror', None) or error})"
        raise FedgenError("runtime.ca", problem, "fedgen link makes one") from error


def error_message(error: httpx.HTTPStatusError) -> str:
    """Return the message of a SuperLink that refused a request."""
    flower_error = FlowerError.from_json(error.response.text)
    message = flower_error.message if flower_error else error.response.text[:100]
    return f"the SuperLink refused with {error.response.status_code}: {message}"
