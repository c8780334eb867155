"""Connect a node to a SuperLink by Flower's Fleet API."""

from __future__ import annotations

import contextlib
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto, run_from_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
    push_object_contents_from_iterable,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedgen.deployment.flower_coordinator import REQUEST
from fedgen.deployment.flower_link import certificate_error, error_message, initialize
from fedgen.deployment.flower_packing import pack_message, unpack_message
from fedgen.errors import FedgenError
from fedgen.federation.flower_compat import set_message_id


@dataclass(frozen=True)
class Run:
    """A run as a node sees it: the text of the request, and the hash of its bundle."""

    request: str
    bundle: str


class LostError(Exception):
    """The SuperLink is unreachable, or still considers the node connected."""


class RunOverError(Exception):
    """The run of a message has ended."""


class TooLargeError(Exception):
    """Raised when the SuperLink rejects a message for its size."""


class Connection:
    """An open connection of a node.

    Raises:
        LostError: by every call, if the SuperLink does not answer.
        RunOverError: by calls about a message.
        TooLargeError: by ``reply``.
        FedgenError: if the node is not admitted.
    """

    def __init__(self, client: FleetHttpClient, key: EllipticCurvePrivateKey) -> None:
        self._client = client
        public = public_key_to_bytes(key.public_key())
        wanted = ActivateNodeRequest(public_key=public, heartbeat_interval=_HEARTBEAT_SECONDS)
        self._node = Node(node_id=self._call(client.ActivateNode, wanted).node_id)
        TaskIdentity.task_id, TaskIdentity.node_id = 1, self._node.node_id
        self._over = threading.Event()
        self._alive = threading.Thread(target=self._live, daemon=True)
        self._alive.start()

    @property
    def node(self) -> int:
        """Return the id of the node, determined by its key."""
        return int(self._node.node_id)

    def close(self) -> None:
        """Disconnect."""
        self._over.set()
        self._alive.join()
        with contextlib.suppress(httpx.HTTPError):
            self._client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))

    def _live(self) -> None:
        """Send heartbeats."""
        wanted = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=_HEARTBEAT_SECONDS)
        while not self._over.wait(_HEARTBEAT_SECONDS / 3):
            with contextlib.suppress(Exception):  # the next call reports the error
                self._client.SendNodeHeartbeat(wanted)

    @staticmethod
    def _call(method: Callable[[Any], Any], wanted: Any) -> Any:
        try:
            return method(wanted)
        except httpx.HTTPStatusError as error:
            status, message = error.response.status_code, error_message(error)
            if status == httpx.codes.FORBIDDEN:
                raise RunOverError from error
            if status == httpx.codes.REQUEST_ENTITY_TOO_LARGE:
                raise TooLargeError(error.response.text[:100]) from error
            flower_error = FlowerError.from_json(error.response.text)
            if flower_error and flower_error.code == _NOT_ACTIVATED:
                raise LostError(_NOT_ACCEPTED) from error
            if status in _TRANSIENT:
                raise LostError(message) from error
            raise FedgenError("superlink", message, "see whether this key was accepted") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            if certificate_error(error):
                problem = f"its certificate fails verification against ca ({str(error)[:100]})"
                raise FedgenError("superlink", problem, "correct superlink or ca") from error
            raise LostError(f"no response ({type(error).__name__})") from error

    def run(self, run_id: int) -> Run:
        """Return the run with this id."""
        wanted = GetRunRequest(node=self._node, run_id=run_id)
        run = run_from_proto(self._call(self._client.GetRun, wanted).run)
        return Run(str(run.override_config.get(REQUEST, "")), run.fab_hash)

    def receive(self) -> Message | None:
        """Return the next complete message for this node, or None."""
        response = self._call(self._client.PullMessages, PullMessagesRequest(node=self._node))
        if not response.messages_list:
            return None
        head = message_from_proto(response.messages_list[0])
        run_id, name = head.metadata.run_id, head.metadata.message_id
        TaskIdentity.run_id = run_id
        ids = [tree.object_id for tree in iterate_object_tree(response.message_object_trees[0])]
        get = partial(self._call, self._client.PullObject)
        pull = make_pull_object_fn_protobuf(get, self._node, run_id)
        contents = pull_objects(ids, pull_object_fn=pull)
        got = partial(self._call, self._client.ConfirmMessageReceived)
        make_confirm_message_received_fn_protobuf(got, self._node, run_id)(name)
        message = inflate_object_from_contents(name, contents)
        assert isinstance(message, Message)
        set_message_id(message, name)
        return unpack_message(message)

    def reply(self, message: Message, reply: Message) -> None:
        """Send a reply. Its computing time is not sent: it may depend on private records."""
        run_id = message.metadata.run_id
        reply = reply if reply.has_error() else pack_message(reply)
        set_message_id(reply, reply.object_id)
        with no_object_id_recompute():
            bare = remove_content_from_message(reply) if reply.has_content() else reply
            wanted = PushMessagesRequest(
                node=self._node,
                messages_list=[message_to_proto(bare)],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[0.0],
            )
            response = self._call(self._client.PushMessages, wanted)
            objects = {
                name: nested.deflate()
                for name, nested in get_all_nested_objects(reply).items()
                if name in response.objects_to_push
            }
            put = partial(self._call, self._client.PushObject)
            push = make_push_object_fn_protobuf(put, self._node, run_id, response.session_id)
            push_object_contents_from_iterable(objects.items(), push_object_fn=push)


RETRY_SECONDS = 2.0  # between retries

_HEARTBEAT_SECONDS = 10.0  # a killed node may reconnect after two of them
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_NOT_ACTIVATED = 2004  # unknown key, or a connected one
_NOT_ACCEPTED = (
    "the link does not know this key yet (the coordinator: fedgen link accept=KEY.pub), or a node "
    "with it is connected"
)


class LogOnce:
    """Print each problem of a retrying node once."""

    def __init__(self) -> None:
        self._last: str | None = None

    def once(self, trouble: str) -> None:
        """Print a problem unless it was the last one printed."""
        if trouble != self._last:
            often = f"trying again every {RETRY_SECONDS:g} seconds"
            print(f"fedgen: {trouble}; {often}", file=sys.stderr, flush=True)
        self._last = trouble

    def over(self) -> None:
        """Forget the problem: it is resolved."""
        self._last = None


def error_reply(message: Message, code: int) -> Message:
    """Return a reply that contains only an error code."""
    return Message(Error(code), reply_to=message)


@contextmanager
def connected(
    address: str, ca: bytes, key: EllipticCurvePrivateKey, over: threading.Event
) -> Iterator[Connection | None]:
    """Yield a connection to a SuperLink, retried until it succeeds; None once ``over`` is set.
    ``Connection`` lists its errors."""
    initialize()
    signing = NodeAuthHttpInterceptor(key, key.public_key())
    named = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    try:
        client = FleetHttpClient.from_server_address(address, False, ca, [named, signing])
    except (ssl.SSLError, ValueError) as error:
        raise FedgenError(
            "ca", "contains no certificate", "take the coordinator's ca.crt"
        ) from error
    connection, problem_log = None, LogOnce()
    try:
        while connection is None and not over.is_set():
            try:
                connection = Connection(client, key)
            except LostError as error:  # not up, not admitted yet, or killed just now
                problem_log.once(f"{address}: {error}")
                over.wait(RETRY_SECONDS)
        yield connection
    finally:
        if connection is not None:
            connection.close()
        client.close()
