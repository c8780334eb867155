"""Content credentials of samples (C2PA): a signed statement in a PNG that it was generated, by
which generator, and at which ε."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificates

from fedgen.errors import FedgenError
from fedgen.reporting.figures import DIGITAL_SOURCE_TYPE
from fedgen.storage.io import read_bounded
from fedgen.version import VERSION

_MAX_BYTES = 2**20  # of a file of certificates, or of a key
_CURVES = {"secp256r1": b"es256", "secp384r1": b"es384", "secp521r1": b"es512"}
_REMEDY = "use a certificate for signing documents or e-mail, and its key"
_UNTRUSTED = "signingCredential.untrusted"
"""Status of a certificate from an authority outside the local trust list; accepted, because each
reader has its own list."""


def png_signer(
    certificates: Path, key: Path, description: Mapping[str, Any] | None
) -> Callable[[Path], None]:
    """Return a function that signs a PNG in place.

    Args:
        certificates: PEM file of a chain of certificates, that of the key first.
        key: PEM file of a private key without a password.
        description: content of ``generator.json``; None for an unfinished run.

    Raises:
        FedgenError: without c2pa-python, or for an invalid certificate or key.
    """
    try:
        import c2pa
    except ImportError as error:
        raise FedgenError(
            "credentials", "requires c2pa-python", 'pip install "fedgen[c2pa]"'
        ) from error
    chain, key_pem = _read(certificates, "credentials"), _read(key, "credentials_key")
    algorithm, key_pem = _signature(chain, key_pem)
    manifest = json.dumps(_manifest(description))
    info = c2pa.C2paSignerInfo(algorithm, chain, key_pem, None)

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
                statuses = json.loads(reader.json()).get("validation_status", [])
        except c2pa.C2paError as error:
            problem = f"{certificates} or {key} cannot sign: {str(error)[:200]}"
            raise FedgenError("credentials", problem, _REMEDY) from error
        if wrong := [status["code"] for status in statuses if status["code"] != _UNTRUSTED]:
            problem = f"{certificates} is not valid for content credentials ({wrong[0]})"
            raise FedgenError("credentials", problem, _REMEDY)
        image.write_bytes(signed.getvalue())

    return sign


def _read(path: Path, name: str) -> bytes:
    try:
        return read_bounded(path, _MAX_BYTES)
    except (OSError, ValueError) as error:
        raise FedgenError(name, f"{path} cannot be read", "give a PEM file") from error


def _signature(chain: bytes, key_pem: bytes) -> tuple[bytes, bytes]:
    """Return the name of the signature algorithm, and the key in the form of PKCS 8.

    Raises:
        FedgenError: for an invalid certificate or key, or if they do not belong together.
    """
    try:
        [certificate, *_] = load_pem_x509_certificates(chain)
    except ValueError as error:
        problem = "contains no certificate"
        raise FedgenError("credentials", problem, "give a PEM file of certificates") from error
    starts, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not starts <= datetime.now(UTC) <= ends:
        problem = f"is valid from {starts:%Y-%m-%d} to {ends:%Y-%m-%d} only"
        raise FedgenError("credentials", problem, "renew the certificate")
    try:
        key = load_pem_private_key(key_pem, None)
    except (ValueError, TypeError) as error:
        problem = "contains no unencrypted private key"
        raise FedgenError("credentials_key", problem, "give an unencrypted PEM file") from error
    if key.public_key() != certificate.public_key():
        problem = "is not the key of the first certificate"
        raise FedgenError("credentials_key", problem, "put the certificate of the key first")
    if isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name in _CURVES:
        algorithm = _CURVES[key.curve.name]
    elif isinstance(key, ed25519.Ed25519PrivateKey):
        algorithm = b"ed25519"
    elif isinstance(key, rsa.RSAPrivateKey):
        algorithm = b"ps256"
    else:
        problem = "has a type that content credentials do not support"
        remedy = "use ECDSA on P-256, P-384 or P-521, Ed25519, or RSA"
        raise FedgenError("credentials_key", problem, remedy)
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return algorithm, key.private_bytes(serialization.Encoding.PEM, *form)


def _manifest(description: Mapping[str, Any] | None) -> dict[str, Any]:
    created = {"action": "c2pa.created", "digitalSourceType": DIGITAL_SOURCE_TYPE}
    assertions: list[dict[str, Any]] = [{"label": "c2pa.actions", "data": {"actions": [created]}}]
    title = "Samples of a generator"
    if description is not None:
        privacy = description["privacy"]
        if privacy["epsilon"] is not None:
            title = "Samples of a differentially private generator"
        facts = {key: privacy[key] for key in ("epsilon", "delta", "unit", "noise")}
        generator = {"generator_sha256": description["generator_sha256"], **facts}
        assertions.append({"label": "fedgen.generator", "data": generator})
    return {
        "title": title,
        "claim_generator_info": [{"name": "fedgen", "version": VERSION}],
        "assertions": assertions,
    }
