"""A node's key: it is known by it to the link, and to other sites."""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP384R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedgen.errors import FedgenError
from fedgen.files import read_bounded, write_whole


def key_at(path: Path) -> EllipticCurvePrivateKey:
    """A node's private key; made, with its public half beside it, where there is none.

    Raises:
        FedgenError: if the file is no such key.
    """
    if not path.exists():
        made = generate_private_key(SECP384R1())
        text = made.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        write_whole(path, text)
        public = public_text(made.public_key())
        write_whole(path.with_name(path.name + ".pub"), public, shared=True)
    try:
        found = load_ssh_private_key(read_bounded(path, LARGEST), None)
    except OSError as error:
        raise FedgenError("key", f"{path} cannot be read ({error.strerror})", _NEW) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise FedgenError(
            "key", f"{path} is no private key", "name another, or a new one"
        ) from error
    if not isinstance(found, EllipticCurvePrivateKey) or not isinstance(found.curve, SECP384R1):
        raise FedgenError("key", f"{path} is no key on P-384", "name a new file: it is made")
    return found


def public_text(key: EllipticCurvePublicKey) -> bytes:
    """A public key as a line that can be handed on."""
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def public_at(path: Path) -> bytes:
    """A public key that somebody handed over, checked, as a SuperLink takes it.

    Raises:
        FedgenError: if it is none on P-384.
    """
    try:
        text = read_bounded(path, LARGEST)
        found = load_ssh_public_key(text)
    except OSError as error:
        raise FedgenError("accept", f"{path} cannot be read ({error.strerror})", _REMEDY) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise FedgenError("accept", f"{path} is no public key", _REMEDY) from error
    if not isinstance(found, EllipticCurvePublicKey) or not isinstance(found.curve, SECP384R1):
        raise FedgenError("accept", f"{path} is no key on P-384", _REMEDY)
    return found.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


LARGEST = 2**16
"""Bytes of a file of a key or certificate."""

_NEW = "name a new file: it is made"
_REMEDY = "take the KEY.pub that fedgen node made beside its key"
