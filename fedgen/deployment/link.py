"""Run ``fedgen link``: Flower's SuperLink with access control. Remote callers may only act as a
node with an admitted key: Flower's Control and Runtime APIs, on the same port, would let anyone
admit nodes, start runs and replace the coordinator. They answer only local callers."""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import re
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from omegaconf import DictConfig

from fedgen.deployment.flower_limits import LimitedListener, listeners
from fedgen.deployment.flower_link import parse_address, serve
from fedgen.errors import FedgenError
from fedgen.storage.io import read_bounded, write_atomic
from fedgen.storage.keys import LARGEST, read_public_key

_OWN = ("localhost", "127.0.0.1", "::1")  # addresses for local commands
_MACHINE = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?")
_CA, _CA_KEY, _CERTIFICATE, _KEY = "ca.crt", "ca.key", "server.crt", "server.key"


def link(config: DictConfig) -> str:
    """Serve until terminated, or admit the key of a node at the running link.

    Raises:
        FedgenError: for an invalid setting.
    """
    home = Path(config.home).expanduser()
    if config.accept is not None:
        node = read_public_key(Path(config.accept).expanduser())
        name = config.name or Path(config.accept).name.removesuffix(".pub")
        superlink = parse_address(f"127.0.0.1:{config.port}", str(home / _CA))
        return f"accepted node {name} ({superlink.register(node, name)})"
    with contextlib.ExitStack() as stack:
        bound = [stack.enter_context(listener) for listener in _listeners(config.host, config.port)]
        certificates(home, list(config.hosts), config.days)
        where = f"listening on {config.host}:{config.port}"
        print(f"hand {home / _CA} to each site; {where}", flush=True)
        ca, certificate, key = (home / name for name in (_CA, _CERTIFICATE, _KEY))
        serve(bound, ca, certificate, key, home / "link.sqlite", config.largest * 2**20)
    return "ended"


def _listeners(host: object, port: int) -> list[LimitedListener]:
    """Bind the link's sockets, before anything is written. Raises FedgenError if that fails."""
    try:
        return listeners(str(host), port)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
            raise FedgenError("port", f"{port} cannot be used ({why})", "choose another") from error
        problem = f"{host!r} is no address of this machine ({why})"
        raise FedgenError("host", problem, "e.g. 0.0.0.0, all of its addresses") from error


def certificates(home: Path, names: list[str], days: int) -> None:
    """Create a certificate authority of the link if missing, and a certificate for its names and
    those of this machine, renewed at each start so that they can change. Sites keep ``ca.crt``.

    Raises:
        FedgenError: for an invalid name, or an unreadable authority.
    """
    if not (home / _CA_KEY).exists():
        key = generate_private_key(SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedgen link")])
        built = _builder(name, name, key, 3650)
        built = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        built = built.add_extension(_SIGNS, critical=True)
        _write(home / _CA_KEY, key)
        certificate = built.sign(key, SHA256())
        write_atomic(home / _CA, certificate.public_bytes(Encoding.PEM), shared=True)
    try:
        authority = load_pem_private_key(read_bounded(home / _CA_KEY, LARGEST), None)
        issuer = x509.load_pem_x509_certificate(read_bounded(home / _CA, LARGEST)).subject
        assert isinstance(authority, EllipticCurvePrivateKey)
    except (OSError, ValueError, TypeError, AssertionError) as error:
        raise FedgenError("home", f"{home} has no authority", "restore it, or remove it") from error
    key = generate_private_key(SECP256R1())
    names = list(dict.fromkeys([*names, *_OWN]))
    called = x509.SubjectAlternativeName(list(map(_name, names)))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    built = _builder(subject, issuer, key, days)
    built = built.add_extension(called, critical=False)
    built = built.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    built = built.add_extension(usage, critical=False)
    _write(home / _KEY, key)
    certificate = built.sign(authority, SHA256())
    write_atomic(home / _CERTIFICATE, certificate.public_bytes(Encoding.PEM))


_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(name: str) -> x509.GeneralName:
    if isinstance(name, str):
        with contextlib.suppress(ValueError):
            return x509.IPAddress(ipaddress.ip_address(name))
    if not isinstance(name, str) or not _MACHINE.fullmatch(name):
        raise FedgenError("hosts", f"{name!r} is not a valid host name", "e.g. [link.org]")
    return x509.DNSName(name)


def _write(path: Path, key: EllipticCurvePrivateKey) -> None:
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_atomic(path, text)
