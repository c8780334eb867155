"""Flower's SuperLink, spoken to as a coordinator and as a node. With ``flower_compat`` the only
file that imports what Flower does not publish; a test names the version that it fits."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app import Error, Message
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto, run_from_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
)
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
)
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
    push_object_contents_from_iterable,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink import extensions
from flwr.superlink.cli import flower_superlink
from flwr.superlink.grid import HttpGrid
from flwr.supernode.fleet_http_connection import http_request_response
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

from fedgen.errors import FedgenError
from fedgen.federation.flower_compat import set_message_id
from fedgen.federation.nodes import GridAround

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""For each process that speaks Flower: nothing is reported, downloaded or installed."""


def be_quiet() -> None:
    """See ``QUIET``."""
    os.environ.update(QUIET)


_REQUEST = "request"
_POLL_SECONDS = 0.02  # between looks at a SuperLink that has nothing yet
_BACKOFF_SECONDS = 0.02  # first wait for an object that its sender is still pushing
_TASK_SECONDS = 30.0  # until a run that was started has its task
_BUNDLE = """\
[project]
name = "fedgen"
version = "{version}"
description = "A run of fedgen: each node runs its own fedgen, and nothing of this."
license = {{ file = "LICENSE" }}
dependencies = ["flwr>=1.41,<1.42"]

[tool.flwr.app]
publisher = "fedgen"
fab-format-version = 1
flwr-version-target = "1.41.0"
fab-include = ["LICENSE", "app.py"]

[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"

[tool.flwr.app.config]
request = ""
"""


def bundle(version: str) -> bytes:
    """The Flower bundle of every run of this version of fedgen: there is no code in it that anybody
    runs. Its hash says which fedgen a coordinator has."""
    files: dict[str, Any] = {
        "pyproject.toml": _BUNDLE.format(version=version).encode(),
        "LICENSE": b"See fedgen's own.\n",
        "app.py": b"server = None\nclient = None\n",
    }
    return build_fab_from_files(files)[0]


def bundle_hash(version: str) -> str:
    """Its hash, as Flower tells it."""
    return hashlib.sha256(bundle(version)).hexdigest()


# --- the coordinator's side -----------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """A SuperLink as this machine reaches it: its address, and the certificate it is known by."""

    address: str
    ca: bytes

    @contextmanager
    def _open(self, kind: type[Any], name: str) -> Iterator[Any]:
        client = kind.from_server_address(
            server_address=self.address,
            insecure=False,
            root_certificates=self.ca,
            interceptors=[RuntimeVersionHttpInterceptor(component_name=name)],
        )
        try:
            yield client
        except httpx.HTTPStatusError as error:
            raise FedgenError(_KEY, _said(error), "see the SuperLink's log") from error
        except httpx.HTTPError as error:
            problem = f"no SuperLink answers at {self.address} ({type(error).__name__})"
            raise FedgenError(_KEY, problem, "start fedgen link, or mend address or ca") from error
        finally:
            client.close()

    def register(self, public_key: bytes, name: str) -> int:
        """Lets a node with this public key (OpenSSH format) in; returns its id."""
        with self._open(ControlHttpClient, "flwr CLI") as client:
            found = client.RegisterNode(RegisterNodeRequest(public_key=public_key, name=name))
            return int(found.node_id)

    def nodes(self) -> list[tuple[str, str]]:
        """(name, status) of all nodes that were let in."""
        with self._open(ControlHttpClient, "flwr CLI") as client:
            found = client.ListNodes(ListNodesRequest())
            return [(each.name, each.status) for each in found.nodes_info]

    @contextmanager
    def serving(self, version: str, request: str) -> Iterator[Grid]:
        """Starts a run, and is its ServerApp: a Grid to the nodes, for as long as the block."""
        content = bundle(version)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        with self._open(ControlHttpClient, "flwr CLI") as control:
            config = user_config_to_proto({_REQUEST: request})
            begun = control.StartRun(StartRunRequest(fab=fab_to_proto(fab), override_config=config))
            try:
                with self._task(begun.run_id) as grid:
                    yield grid
            except BaseException:
                control.StopRun(StopRunRequest(run_id=begun.run_id))
                raise

    @contextmanager
    def _task(self, run_id: int) -> Iterator[Grid]:
        """The task of a run's ServerApp, taken before anybody else takes it. Older ones, of
        coordinators that died before they took theirs, are failed on the way."""
        until = time.monotonic() + _TASK_SECONDS
        with self._open(RuntimeHttpClient, "SuperExec") as client:
            while True:
                wanted = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
                found = client.AcquireTask(wanted)
                if found.token and found.task.run_id == run_id:
                    break
                if time.monotonic() > until:
                    problem = "the run has no task: something else on this machine took it"
                    raise FedgenError(_KEY, problem, "end other flower-superexec processes")
                if not found.token:
                    time.sleep(_POLL_SECONDS)
        grid = HttpGrid(self.address, False, self.ca, token=found.token)
        runtime: Any = grid._runtime_client
        alive = HeartbeatSender(make_task_heartbeat_fn_http(runtime))
        alive.start()
        details = "failed"
        try:
            task = runtime.PullTaskInput(PullTaskInputRequest())
            TaskIdentity.task_id = task.task_id
            TaskIdentity.run_id = task.run.run_id
            TaskIdentity.node_id = task.context.node_id
            grid.set_run(run_from_proto(task.run))
            yield _Patient(grid)
            details = ""
        finally:
            status = "failed" if details else "completed"
            over = PushTaskOutputRequest(sub_status=status, details=details)
            with contextlib.suppress(httpx.HTTPError):  # it ended first: there is nobody to tell
                runtime.PushTaskOutput(over)
            alive.stop()
            grid.close()


_KEY = "runtime.superlink"


class _Patient(GridAround):
    """A grid that leaves its SuperLink time between two looks."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See Grid."""
        found = list(self._inner.pull_messages(message_ids))
        if not found:
            time.sleep(_POLL_SECONDS)
        return found


def _said(error: httpx.HTTPStatusError) -> str:
    """What a SuperLink said to what it refused."""
    found = FlowerError.from_json(error.response.text)
    told = found.message if found else error.response.text[:100]
    return f"the SuperLink refused with {error.response.status_code}: {told}"


# --- the link -------------------------------------------------------------------------------------

_OPEN = ("/v1/fleet/", "/health")
_HERE = ("127.0.0.1", "::1")


class _FleetAlone:
    """Middleware: from elsewhere nothing but what nodes need."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        caller = (scope.get("client") or ("unknown",))[0]
        if scope["type"] == "lifespan" or caller in _HERE or scope["path"].startswith(_OPEN):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await PlainTextResponse("not from there", 403)(scope, receive, send)


def serve(host: str, port: int, ca: Path, certificate: Path, key: Path, database: Path) -> None:
    """Flower's SuperLink, with keys for nodes and the guard, until the process is told to end."""
    be_quiet()
    inner = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(_FleetAlone), *inner())
    place = ["--host", host, "--port", str(port), "--database", str(database)]
    tls = ["--ssl-ca-certfile", str(ca), "--ssl-certfile", str(certificate)]
    keys = ["--ssl-keyfile", str(key), "--enable-supernode-auth", "--isolation", "process"]
    sys.argv = ["flower-superlink", *place, *tls, *keys]
    flower_superlink()


# --- a node's side --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run as a node hears of it: the request's text, and the hash of its bundle."""

    request: str
    bundle: str


class Connection:
    """A node's connection while it is open."""

    def __init__(self, parts: Any) -> None:
        self.node, self._receive, self._send, self._run, _, self._pull, self._push, self._got = (
            parts
        )
        TaskIdentity.task_id, TaskIdentity.node_id = 1, self.node
        # its own first wait, a second, is the longest part of a round
        defaults: Any = pull_objects.__kwdefaults__
        defaults["initial_backoff"] = _BACKOFF_SECONDS

    def run(self, run_id: int) -> Run:
        """What a run is about."""
        found = self._run(run_id)
        return Run(str(found.override_config.get(_REQUEST, "")), found.fab_hash)

    def receive(self) -> Message | None:
        """The next message for this node, whole, if there is one."""
        found = self._receive()
        if found is None:
            return None
        head, tree = found
        run_id, name = head.metadata.run_id, head.metadata.message_id
        TaskIdentity.run_id = run_id
        ids = [each.object_id for each in iterate_object_tree(tree)]
        contents = pull_objects(ids, pull_object_fn=lambda each: self._pull(run_id, each))
        self._got(run_id, name)
        message = inflate_object_from_contents(name, contents)
        assert isinstance(message, Message)
        set_message_id(message, name)
        return message

    def reply(self, message: Message, reply: Message) -> None:
        """Sends a reply. How long it took is not told: it may follow from private rows."""
        run_id = message.metadata.run_id
        set_message_id(reply, reply.object_id)
        with no_object_id_recompute():
            wanted, session = self._send(reply, get_object_tree(reply), 0.0)
            objects = {
                name: each.deflate()
                for name, each in get_all_nested_objects(reply).items()
                if name in wanted
            }
            push = partial(self._push, run_id, session)
            push_object_contents_from_iterable(objects.items(), push_object_fn=push)


def error_reply(message: Message, code: int) -> Message:
    """A reply that is a code and nothing else."""
    return Message(Error(code), reply_to=message)


@contextmanager
def connected(
    address: str, ca: bytes, key: EllipticCurvePrivateKey, say: Callable[[str], None]
) -> Iterator[Connection]:
    """A node's connection to a SuperLink.

    Raises:
        FedgenError: if it does not let the node in.
    """
    be_quiet()
    keys = (key, key.public_key())
    problem = None
    try:
        with http_request_response(address, False, ca, keys, max_retries=3) as parts:
            try:
                yield Connection(parts)
            except Exception as error:  # Flower would write it down and go on
                problem = error
    except SystemExit as error:
        raise FedgenError(
            "superlink",
            f"{address} does not let this node in",
            "mend address or ca; see whether its key was accepted there",
        ) from error
    if problem is not None:
        raise problem


__all__ = ["Connection", "Link", "Run", "RunNotRunningException", "connected"]
