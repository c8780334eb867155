"""A node's connection to a SuperLink, by Flower's Fleet API."""

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
from fedgen.deployment.flower_link import not_believed, said, settle
from fedgen.deployment.flower_packing import packed, unpacked
from fedgen.errors import FedgenError
from fedgen.federation.flower_compat import set_message_id


@dataclass(frozen=True)
class Run:
    """A run as a node hears of it: the request's text, and the hash of its bundle."""

    request: str
    bundle: str


class LostError(Exception):
    """The SuperLink is out of reach, for now; or takes the node for one that is still connected."""


class RunOverError(Exception):
    """The run that a message was of has ended."""


class TooLargeError(Exception):
    """Raised when the SuperLink rejects a message for its size."""


class Connection:
    """A node's connection while it is open.

    Raises:
        LostError: by every call, if the SuperLink does not answer.
        RunOverError: by those about a message.
        TooLargeError: by ``reply``.
        FedgenError: if it does not let the node in.
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
        """The node's id, by its key."""
        return int(self._node.node_id)

    def close(self) -> None:
        """Leaves."""
        self._over.set()
        self._alive.join()
        with contextlib.suppress(httpx.HTTPError):
            self._client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))

    def _live(self) -> None:
        """Says that it is there, often enough."""
        wanted = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=_HEARTBEAT_SECONDS)
        while not self._over.wait(_HEARTBEAT_SECONDS / 3):
            with contextlib.suppress(Exception):  # the next call says what is wrong
                self._client.SendNodeHeartbeat(wanted)

    @staticmethod
    def _call(method: Callable[[Any], Any], wanted: Any) -> Any:
        try:
            return method(wanted)
        except httpx.HTTPStatusError as error:
            status, told = error.response.status_code, said(error)
            if status == httpx.codes.FORBIDDEN:
                raise RunOverError from error
            if status == httpx.codes.REQUEST_ENTITY_TOO_LARGE:
                raise TooLargeError(error.response.text[:100]) from error
            known = FlowerError.from_json(error.response.text)
            if known and known.code == _NOT_ACTIVATED:
                raise LostError(_NOT_LET_IN) from error
            if status in _TRANSIENT:
                raise LostError(told) from error
            raise FedgenError("superlink", told, "see whether this key was accepted") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            if not_believed(error):
                problem = f"it is not who ca says ({str(error)[:100]})"
                raise FedgenError("superlink", problem, "mend superlink or ca") from error
            raise LostError(f"no answer ({type(error).__name__})") from error

    def run(self, run_id: int) -> Run:
        """What a run is about."""
        wanted = GetRunRequest(node=self._node, run_id=run_id)
        found = run_from_proto(self._call(self._client.GetRun, wanted).run)
        return Run(str(found.override_config.get(REQUEST, "")), found.fab_hash)

    def receive(self) -> Message | None:
        """The next message for this node, whole, if there is one."""
        found = self._call(self._client.PullMessages, PullMessagesRequest(node=self._node))
        if not found.messages_list:
            return None
        head = message_from_proto(found.messages_list[0])
        run_id, name = head.metadata.run_id, head.metadata.message_id
        TaskIdentity.run_id = run_id
        ids = [each.object_id for each in iterate_object_tree(found.message_object_trees[0])]
        get = partial(self._call, self._client.PullObject)
        pull = make_pull_object_fn_protobuf(get, self._node, run_id)
        contents = pull_objects(ids, pull_object_fn=pull)
        got = partial(self._call, self._client.ConfirmMessageReceived)
        make_confirm_message_received_fn_protobuf(got, self._node, run_id)(name)
        message = inflate_object_from_contents(name, contents)
        assert isinstance(message, Message)
        set_message_id(message, name)
        return unpacked(message)

    def reply(self, message: Message, reply: Message) -> None:
        """Sends a reply. How long it took is not told: it may follow from private rows."""
        run_id = message.metadata.run_id
        reply = reply if reply.has_error() else packed(reply)
        set_message_id(reply, reply.object_id)
        with no_object_id_recompute():
            bare = remove_content_from_message(reply) if reply.has_content() else reply
            wanted = PushMessagesRequest(
                node=self._node,
                messages_list=[message_to_proto(bare)],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[0.0],
            )
            found = self._call(self._client.PushMessages, wanted)
            objects = {
                name: each.deflate()
                for name, each in get_all_nested_objects(reply).items()
                if name in found.objects_to_push
            }
            put = partial(self._call, self._client.PushObject)
            push = make_push_object_fn_protobuf(put, self._node, run_id, found.session_id)
            push_object_contents_from_iterable(objects.items(), push_object_fn=push)


AGAIN_SECONDS = 2.0  # between two tries of what did not work

_HEARTBEAT_SECONDS = 10.0  # a node that was killed may come back after two of them
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_NOT_ACTIVATED = 2004  # no such key, or one that is connected
_NOT_LET_IN = (
    "the link does not know this key yet (the coordinator: fedgen link accept=KEY.pub), or a node "
    "with it is connected"
)


class Told:
    """What a node that tries again has said: the same trouble is said once."""

    def __init__(self) -> None:
        self._last: str | None = None

    def once(self, trouble: str) -> None:
        """Says it, unless it was said last."""
        if trouble != self._last:
            often = f"trying again every {AGAIN_SECONDS:g} seconds"
            print(f"fedgen: {trouble}; {often}", file=sys.stderr, flush=True)
        self._last = trouble

    def over(self) -> None:
        """The trouble is over."""
        self._last = None


def error_reply(message: Message, code: int) -> Message:
    """A reply that is a code and nothing else."""
    return Message(Error(code), reply_to=message)


@contextmanager
def connected(
    address: str, ca: bytes, key: EllipticCurvePrivateKey, over: threading.Event
) -> Iterator[Connection | None]:
    """A node's connection to a SuperLink, tried for until there is one, or ``over`` is set (None);
    see ``Connection`` for what it raises."""
    settle()
    signing = NodeAuthHttpInterceptor(key, key.public_key())
    named = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    try:
        client = FleetHttpClient.from_server_address(address, False, ca, [named, signing])
    except (ssl.SSLError, ValueError) as error:
        raise FedgenError("ca", "holds no certificate", "take the coordinator's ca.crt") from error
    connection, told = None, Told()
    try:
        while connection is None and not over.is_set():
            try:
                connection = Connection(client, key)
            except LostError as error:  # not there yet, not accepted yet, or killed a moment ago
                told.once(f"{address}: {error}")
                over.wait(AGAIN_SECONDS)
        yield connection
    finally:
        if connection is not None:
            connection.close()
        client.close()
