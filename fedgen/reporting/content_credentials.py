"""Content credentials of samples (C2PA): a signed statement in a PNG that it was generated, by
which generator, and at which ε."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificates

from fedgen.errors import FedgenError
from fedgen.reporting.figures import DIGITAL_SOURCE_TYPE
from fedgen.storage.io import read_bounded
from fedgen.version import VERSION

_LARGEST = 2**20  # bytes of a file of certificates, or of a key
_CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
_REMEDY = "use a certificate for signing documents or e-mail, and its key"
_UNTRUSTED = "signingCredential.untrusted"
"""Status of a certificate whose authority is in no list of this machine: readers of the image
decide whom they trust."""


def png_signer(
    certificates: Path, key: Path, description: Mapping[str, Any] | None
) -> Callable[[Path], None]:
    """Return a function that signs a PNG in place.

    Args:
        certificates: PEM file of a chain of certificates, that of the key first.
        key: PEM file of a private key without a password.
        description: content of ``generator.json``; None: of a run that is not finished.

    Raises:
        FedgenError: without c2pa-python, or for an invalid certificate or key.
    """
    try:
        import c2pa
    except ImportError as error:
        raise FedgenError("credentials", "needs c2pa", 'pip install "fedgen[c2pa]"') from error
    chain, secret = (_read(path, name) for path, name in _named(certificates, key))
    algorithm = _algorithm(chain, secret)
    manifest = json.dumps(_manifest(description))
    info = c2pa.C2paSignerInfo(algorithm, chain, secret, None)

    def sign(image: Path) -> None:
        signed = io.BytesIO()
        try:
            with (
                c2pa.Signer.from_info(info) as signer,
                c2pa.Builder(manifest) as builder,
                image.open("rb") as source,
            ):
                builder.sign(signer, "image/png", source, signed)
            with c2pa.Reader("image/png", signed) as reader:
                found = json.loads(reader.json()).get("validation_status", [])
        except c2pa.C2paError as error:
            problem = f"{certificates} or {key} cannot sign: {str(error)[:200]}"
            raise FedgenError("credentials", problem, _REMEDY) from error
        if wrong := [status["code"] for status in found if status["code"] != _UNTRUSTED]:
            problem = f"{certificates} is not valid for content credentials ({wrong[0]})"
            raise FedgenError("credentials", problem, _REMEDY)
        image.write_bytes(signed.getvalue())

    return sign


def _named(certificates: Path, key: Path) -> tuple[tuple[Path, str], tuple[Path, str]]:
    return (certificates, "credentials"), (key, "credentials_key")


def _read(path: Path, name: str) -> bytes:
    try:
        return read_bounded(path, _LARGEST)
    except (OSError, ValueError) as error:
        raise FedgenError(name, f"{path} cannot be read", "give a PEM file") from error


def _algorithm(chain: bytes, secret: bytes) -> bytes:
    """Return the name of the signature algorithm; raises FedgenError for an invalid pair."""
    try:
        [certificate, *_] = load_pem_x509_certificates(chain)
    except ValueError as error:
        problem = "contains no certificate"
        raise FedgenError("credentials", problem, "give a PEM file of certificates") from error
    try:
        key = load_pem_private_key(secret, None)
    except (ValueError, TypeError) as error:
        problem = "contains no private key, or one with a password"
        raise FedgenError("credentials_key", problem, "give a PEM file without one") from error
    if key.public_key() != certificate.public_key():
        problem = "is not the key of the first certificate"
        raise FedgenError("credentials_key", problem, "put the certificate of the key first")
    if isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name in _CURVES:
        return _CURVES[key.curve.name].lower().encode()
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return b"ed25519"
    if isinstance(key, rsa.RSAPrivateKey):
        return b"ps256"
    problem = "is of a kind that content credentials do not support"
    raise FedgenError("credentials_key", problem, "use an elliptic curve of P-256, Ed25519 or RSA")


def _manifest(description: Mapping[str, Any] | None) -> dict[str, Any]:
    created = {"action": "c2pa.created", "digitalSourceType": DIGITAL_SOURCE_TYPE}
    assertions: list[dict[str, Any]] = [{"label": "c2pa.actions", "data": {"actions": [created]}}]
    if description is not None:
        privacy = description["privacy"]
        facts = {key: privacy[key] for key in ("epsilon", "delta", "unit", "noise")}
        generator = {"generator_sha256": description["generator_sha256"], **facts}
        assertions.append({"label": "fedgen.generator", "data": generator})
    return {
        "title": "samples of a private generator",
        "claim_generator_info": [{"name": "fedgen", "version": VERSION}],
        "assertions": assertions,
    }
