"""The log of a site lists what a proxy between it and the link saw."""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from deployed import Deployment, deployment
from flwr.app import ConfigRecord, Message
from flwr.common.serde import message_from_proto, recorddict_from_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.recorddict_pb2 import RecordDict
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from tiny import tiny

from fedgen import cli
from fedgen.deployment.link import certificates
from fedgen.federation import messages

PUSHED, PUT = "/v1/fleet/push-messages", "/v1/fleet/push-object"
# they say which node, which message or that it is there
BARE = {
    f"/v1/fleet/{name}"
    for name in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "pull-object",
        "confirm-message-received",
        "get-run",
    )
}
pytestmark = pytest.mark.slow


class Proxy:
    """A proxy that a node takes for the link: forwards messages and records them."""

    def __init__(self, place: Path, link_port: int, link_ca: Path) -> None:
        self.seen: list[tuple[str, bytes]] = []
        certificates(place, ["127.0.0.1"], 1)
        self.ca = place / "ca.crt"
        beyond = ssl.create_default_context(cafile=str(link_ca))
        seen = self.seen

        class Between(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                seen.append((self.path, body))
                link = http.client.HTTPSConnection("127.0.0.1", link_port, context=beyond)
                link.request("POST", self.path, body, dict(self.headers))
                result = link.getresponse()
                text = result.read()
                self.send_response(result.status)
                self.send_header("Content-Type", result.headers["Content-Type"])
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
                link.close()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Between)
        own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        own.load_cert_chain(place / "server.crt", place / "server.key")
        self.server.socket = own.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve for the duration of the block."""
        thread = threading.Thread(target=self.server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            self.server.shutdown()
            thread.join()
            self.server.server_close()

    def left(self) -> list[tuple[str, int | None, int | None]]:
        """Return the messages that passed: kind, and bytes of content or a code. No bytes: the link
        had the same content already, or the run was over."""
        objects = {}
        for path, body in self.seen:
            if path == PUT:
                put = PushObjectRequest.FromString(body)
                objects[put.object_id] = put.object_content
        result: list[tuple[str, int | None, int | None]] = []
        used: set[str] = set()
        for path, body in self.seen:
            if path == PUSHED:
                pushed = PushMessagesRequest.FromString(body)
                [proto], [tree] = pushed.messages_list, pushed.message_object_trees
                assert list(pushed.clientapp_runtime_list) == [0.0]
                ids = {each.object_id for each in iterate_object_tree(tree)}
                used |= ids
                head = message_from_proto(proto)
                what = head.metadata.message_type
                if head.has_error():
                    assert not head.error.reason
                    result.append((what, 0, head.error.code))
                elif not ids <= set(objects):
                    result.append((what, None, None))
                else:
                    message = inflate_object_from_contents(tree.object_id, dict(objects))
                    assert isinstance(message, Message)
                    result.append((what, content_bytes(message), None))
        assert used >= set(objects)  # nothing was put there beside messages
        return result


def content_bytes(message: Message) -> int:
    """Count the content of a message in one piece as Flower does."""
    [(_, record)] = message.content.items()
    assert isinstance(record, ConfigRecord)
    [(_, whole)] = record.items()
    assert isinstance(whole, bytes)
    content = recorddict_from_proto(RecordDict.FromString(whole))
    return sum(each.count_bytes() for each in content.values())


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Proxy]]:
    place = tmp_path_factory.mktemp("sites")
    with deployment(place, 2, later=[0]) as here:
        proxy = Proxy(place / "between", here.port, here.ca)
        with proxy.serving():
            here.doors[0] = proxy.port, proxy.ca
            here.start_node(0)
            yield here, proxy


def test_the_log_lists_what_left(sites: tuple[Deployment, Proxy], tmp_path: Path) -> None:
    """A sequence of masked sums, and a run that the policy refuses."""
    here, proxy = sites
    words = ["method=mixture_small", *tiny("mixture_small"), "privacy.aggregation=secure"]
    secret = ["privacy.noise=secure", "privacy.threshold=all"]
    allowed = [*words, *secret, "privacy.target_epsilon=5", f"run_dir={tmp_path / 'run'}"]
    refused = [*words, *secret, "privacy.target_epsilon=6", f"run_dir={tmp_path / 'refused'}"]
    assert cli.run(here.asked(*allowed)) == 0
    assert cli.run(here.asked(*refused)) == 2
    lines = [line for line in here.log(0) if line["what"] == "left"]
    result = [(line["kind"], line["bytes"], line.get("error")) for line in lines]
    left = proxy.left()
    assert len(left) == len(result)
    for number, (kind, size, _) in enumerate(left):
        if size is None:  # an acknowledgement, an account: what tells of rows is like nothing else
            assert kind not in (messages.ASK, messages.SHARES, messages.KEYS, messages.REVEAL)
            left[number] = result[number]
    assert left == result
    assert len(lines) > 20 and any("error" in line for line in lines)
    others = [(path, len(body)) for path, body in proxy.seen if path not in (PUSHED, PUT)]
    assert {path for path, _ in others} <= BARE
    assert max(size for _, size in others) < 300
