"""Flower's SuperLink: served here, and spoken to by the machine that it is on.

The files ``flower_*`` of this room, with ``flower_compat``, are all that imports what Flower does
not publish; a test names the version that they fit.
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
from fedgen.deployment.keys import LARGEST
from fedgen.errors import FedgenError
from fedgen.files import read_bounded

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""For each process that speaks Flower: nothing is reported, downloaded or installed."""


def settle() -> None:
    """Flower in this process: see ``QUIET``; and it looks again soon for what is still on its way.
    Its own first wait, a second, would be the longest part of a round."""
    os.environ.update(QUIET)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # what goes wrong is said by us, in a line
    defaults: Any = pull_objects.__kwdefaults__
    defaults["initial_backoff"] = _BACKOFF_SECONDS


def pause(silent: float) -> float:
    """Seconds until a link that had nothing for ``silent`` seconds is asked again: it works for
    every question, and a wait becomes longer by a twentieth."""
    return min(max(_POLL_SECONDS, 0.05 * silent), _SELDOM_SECONDS)


_BACKOFF_SECONDS = 0.02
_POLL_SECONDS, _SELDOM_SECONDS = 0.05, 2.0


_OPEN = ("/v1/fleet/", "/health")


class _FleetAlone:
    """Middleware: from elsewhere nothing but what nodes need."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
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
    settle()
    inner, bounds = extensions.get_middleware, Middleware(BodyLimit, largest=largest)
    extensions.get_middleware = lambda: (bounds, Middleware(_FleetAlone), *inner())
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
    """A SuperLink as this machine reaches it: its address, and the certificate it is known by."""

    address: str
    ca: bytes

    @contextmanager
    def open(self, kind: type[Any], name: str) -> Iterator[Any]:
        """A client of one of its APIs, under the name of a Flower component.

        Raises:
            FedgenError: in place of what goes wrong with its calls.
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
            raise FedgenError(KEY, said(error), "see the SuperLink's log") from error
        except httpx.HTTPError as error:
            if not_believed(error):
                problem = f"the SuperLink at {self.address} is not who ca says ({str(error)[:100]})"
                raise FedgenError(KEY, problem, "mend address or ca") from error
            problem = f"no SuperLink answers at {self.address} ({type(error).__name__})"
            raise FedgenError(KEY, problem, "start fedgen link, or mend address or ca") from error
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
            problem = f"no fedgen link answers at {self.address} ({type(error).__name__})"
            raise FedgenError(KEY, problem, "start fedgen link, or correct runtime.ca") from error

    def register(self, public_key: bytes, name: str) -> int:
        """Lets a node with this public key (PEM) in; returns its id."""
        with self.open(ControlHttpClient, "flwr CLI") as client:
            try:
                found = client.RegisterNode(RegisterNodeRequest(public_key=public_key, name=name))
            except httpx.HTTPStatusError as error:
                if "already in use" in said(error):
                    raise FedgenError("accept", "this key was let in before", "go on") from error
                raise
            return int(found.node_id)


KEY = "runtime.superlink"


def not_believed(error: Exception) -> bool:
    """Whether a connection failed over the other side's certificate."""
    if isinstance(error, httpx.TimeoutException):  # whose text speaks of SSL, too
        return False
    return any(word in str(error).lower() for word in ("certificate", "wrong_version"))


def link_at(superlink: str, ca: str) -> Link:
    """A SuperLink, by the settings that name it.

    Raises:
        FedgenError: if its certificate cannot be read.
    """
    try:
        return Link(superlink, read_bounded(Path(ca).expanduser(), LARGEST))
    except (OSError, ValueError) as error:
        problem = f"{ca} cannot be read ({getattr(error, 'strerror', None) or error})"
        raise FedgenError("runtime.ca", problem, "fedgen link makes one") from error


def said(error: httpx.HTTPStatusError) -> str:
    """What a SuperLink said to what it refused."""
    found = FlowerError.from_json(error.response.text)
    told = found.message if found else error.response.text[:100]
    return f"the SuperLink refused with {error.response.status_code}: {told}"
