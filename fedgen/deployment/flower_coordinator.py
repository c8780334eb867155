"""Start a run on a SuperLink and act as its ServerApp."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from flwr.app import Message
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto, run_from_proto, user_config_to_proto
from flwr.proto.control_pb2 import StartRunRequest, StopRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, PushTaskOutputRequest
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedgen.deployment.flower_link import KEY, Link, poll_interval
from fedgen.deployment.flower_packing import pack_message, unpack_message
from fedgen.errors import FedgenError
from fedgen.federation.flower_compat import set_message_id
from fedgen.federation.runtimes.local_nodes import GridWrapper

REQUEST = "request"
"""The setting of a Flower run that holds what fedgen asks."""

_TASK_SECONDS = 30.0  # wait for the task of a started run
_ENVELOPE_BYTES = 2**16  # overhead of a message beyond its arrays
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
    """Return the Flower bundle of all runs of this version of fedgen. It contains no code that is
    executed; its hash identifies the version of the coordinator."""
    files: dict[str, Any] = {
        "pyproject.toml": _BUNDLE.format(version=version).encode(),
        "LICENSE": b"See fedgen's own.\n",
        "app.py": b"server = None\nclient = None\n",
    }
    return build_fab_from_files(files)[0]


def bundle_hash(version: str) -> str:
    """Return the hash of the bundle, as computed by Flower."""
    return hashlib.sha256(bundle(version)).hexdigest()


@contextmanager
def serve_request(link: Link, version: str, request: str) -> Iterator[Grid]:
    """Start a run and yield a Grid to the nodes, as its ServerApp, while the block is active."""
    content = bundle(version)
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    with link.open(ControlHttpClient, "flwr CLI") as control:
        config = user_config_to_proto({REQUEST: request})
        begun = control.StartRun(StartRunRequest(fab=fab_to_proto(fab), override_config=config))
        try:
            with _task(link, begun.run_id) as grid:
                yield grid
        except BaseException as error:
            with contextlib.suppress(httpx.HTTPError):  # it has already ended
                control.StopRun(StopRunRequest(run_id=begun.run_id))
            if isinstance(error, RunNotRunningException):
                problem = "the run was ended there"
                raise FedgenError(KEY, problem, "continue with resume=RUN_DIR") from error
            raise


@contextmanager
def _task(link: Link, run_id: int) -> Iterator[Grid]:
    """Claim the task of the ServerApp of a run before anyone else. Older tasks, of coordinators
    that died before they claimed theirs, are marked as failed."""
    until = time.monotonic() + _TASK_SECONDS
    with link.open(RuntimeHttpClient, "SuperExec") as client:
        while True:
            wanted = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
            response = client.AcquireTask(wanted)
            if response.token and response.task.run_id == run_id:
                break
            if time.monotonic() > until:
                problem = "the run has no task: another process on this machine took it"
                raise FedgenError(KEY, problem, "end other flower-superexec processes")
            if not response.token:
                time.sleep(poll_interval(0.0))
    grid = HttpGrid(link.address, False, link.ca, token=response.token)
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
        yield PackedGrid(grid, link.largest() - _ENVELOPE_BYTES)
        details = ""
    finally:
        if alive.is_running:  # before the task ends: Flower answers a later heartbeat by SIGINT
            alive.stop()
        status = "failed" if details else "completed"
        over = PushTaskOutputRequest(sub_status=status, details=details)
        with contextlib.suppress(httpx.HTTPError):  # it has already ended
            runtime.PushTaskOutput(over)
        grid.close()


class PackedGrid(GridWrapper):
    """Grid that sends each message as one object and pauses between polls. Flower would fetch each
    array as a separate object.

    Args:
        largest: limit on the arrays of a message, in bytes.
    """

    def __init__(self, inner: Grid, largest: int) -> None:
        super().__init__(inner)
        self.largest, self._heard = largest, time.monotonic()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See Grid."""
        message_list = list(messages)
        names = list(self._inner.push_messages(list(map(pack_message, message_list))))
        self._heard = time.monotonic()
        if message_list and not names:
            problem = "a query exceeds the link's request limit"
            raise FedgenError(
                KEY, problem, "restart fedgen link with a higher largest=MB, then resume="
            )
        for message, name in zip(message_list, names, strict=True):
            set_message_id(message, name or "")
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See Grid."""
        replies = list(self._inner.pull_messages(message_ids))
        if replies:
            self._heard = time.monotonic()
        else:
            time.sleep(poll_interval(time.monotonic() - self._heard))
        return list(map(unpack_message, replies))
