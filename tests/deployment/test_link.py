"""The guard and the certificates of the link, and the private parts of Flower that it uses."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import flwr
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.superlink import extensions
from mutation import kills

from fedgen.deployment.flower_coordinator import bundle, bundle_hash
from fedgen.deployment.flower_link import _FleetOnly
from fedgen.deployment.flower_packing import pack_message, unpack_message
from fedgen.deployment.link import certificates
from fedgen.errors import FedgenError
from fedgen.federation.flower_compat import identify_process
from fedgen.federation.secagg.signing import fingerprint
from fedgen.storage.keys import load_or_create_key, read_public_key


def test_the_version_of_flower() -> None:
    """The files ``flower_*`` use private parts of this version."""
    assert flwr.__version__.startswith("1.41.")
    assert extensions.get_middleware() is not None


@kills(
    "fedgen/deployment/flower_link.py",
    '_OPEN = ("/v1/fleet/", "/health")',
    '_OPEN = ("/v1/", "/health")',
)
@pytest.mark.parametrize(
    ("path", "caller", "passes"),
    [
        ("/v1/fleet/pull-messages", "10.0.0.7", True),
        ("/health", "10.0.0.7", True),
        ("/v1/control/start-run", "10.0.0.7", False),
        ("/v1/runtime/acquire-task", "10.0.0.7", False),
        ("/v1/control/start-run", "127.0.0.1", True),
        ("/v1/runtime/acquire-task", "::1", True),
        ("/v1/control/../fleet/x", "10.0.0.7", False),
        ("/", "10.0.0.7", False),
        ("/docs", "10.0.0.7", False),
        ("/v1/control/start-run", None, False),
    ],
)
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_requests_from_elsewhere_are_limited_to_nodes(
    path: str, caller: str | None, passes: bool, kind: str
) -> None:
    reached: list[str] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "client": caller and (caller, 1), "method": "POST"}
    asyncio.run(_FleetOnly(app)(scope, None, send))
    assert reached == ([path] if passes else [])
    if not passes and kind == "http":
        assert sent[0]["status"] == 403


def test_certificates_are_for_the_names_that_nodes_connect_to(tmp_path: Path) -> None:
    certificates(tmp_path, ["link.example.org", "10.1.2.3"], 30)
    ca = x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((tmp_path / "server.crt").read_bytes())
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["link.example.org", "localhost"]
    addresses = [str(a) for a in names.get_values_for_type(x509.IPAddress)]
    assert addresses == ["10.1.2.3", "127.0.0.1", "::1"], "and its own: it lets keys in by them"
    before = (tmp_path / "ca.crt").read_bytes()
    certificates(tmp_path, ["other.example.org"], 30)  # sites keep what they have
    assert (tmp_path / "ca.crt").read_bytes() == before
    for name in ("ca.key", "server.key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_the_key_of_a_node_is_created_once_for_its_owner(tmp_path: Path) -> None:
    key = load_or_create_key(tmp_path / "n.key")
    assert fingerprint(load_or_create_key(tmp_path / "n.key").public_key()) == fingerprint(
        key.public_key()
    )
    assert stat.S_IMODE((tmp_path / "n.key").stat().st_mode) == 0o600
    assert read_public_key(tmp_path / "n.key.pub").startswith(b"-----BEGIN PUBLIC KEY")
    other = generate_private_key(SECP256R1())
    text = other.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    (tmp_path / "other").write_bytes(text)
    with pytest.raises(FedgenError, match="no key on P-384"):
        load_or_create_key(tmp_path / "other")
    with pytest.raises(FedgenError, match="no public key"):
        read_public_key(tmp_path / "n.key")


def test_a_bundle_is_the_same_for_the_same_version() -> None:
    assert bundle("1.0") == bundle("1.0")
    assert bundle_hash("1.0") != bundle_hash("1.1")


def test_an_unsplit_message_is_received_unchanged() -> None:
    identify_process(1)
    content = RecordDict({"a": ConfigRecord({"x": 1, "y": b"2"})})
    message = Message(content, dst_node_id=2, message_type="query.hello")
    there = pack_message(message)
    assert list(there.content) == ["whole"]
    assert dict(unpack_message(there).content["a"]) == {"x": 1, "y": b"2"}
    assert unpack_message(message) is message
    bad = Message(
        RecordDict({"whole": ConfigRecord({"whole": b"\xff\xff"})}),
        dst_node_id=2,
        message_type="query.hello",
    )
    assert unpack_message(bad) is bad
