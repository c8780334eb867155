"""Signing keys: of nodes, by which the link and other sites identify them, and of machines."""

from __future__ import annotations

import fcntl
import os
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
from fedgen.storage.io import read_bounded, write_atomic


def load_or_create_key(path: Path) -> EllipticCurvePrivateKey:
    """Load a private key. Create the pair if it is missing; of concurrent processes, one does.

    Raises:
        FedgenError: if the file is not a valid key.
    """
    if not path.exists():
        _create(path)
    try:
        key = load_ssh_private_key(read_bounded(path, LARGEST), None)
    except OSError as error:
        raise FedgenError("key", f"{path} cannot be read ({error.strerror})", _NEW) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise FedgenError(
            "key", f"{path} is not a private key", "choose another file, or a new path"
        ) from error
    if not isinstance(key, EllipticCurvePrivateKey) or not isinstance(key.curve, SECP384R1):
        raise FedgenError(
            "key", f"{path} is no key on P-384", "give a new path: the file is created"
        )
    return key


def _create(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if path.exists():  # another process created it
            return
        public = path.with_name(path.name + ".pub")
        if public.exists():
            problem = f"{public} exists, but not its private key {path}"
            raise FedgenError("key", problem, "restore the key, or give a new path")
        new_key = generate_private_key(SECP384R1())
        text = new_key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        write_atomic(path, text)
        write_atomic(public, public_text(new_key.public_key()), shared=True)
    finally:
        os.close(folder)


def public_text(key: EllipticCurvePublicKey) -> bytes:
    """Return a public key as one line of text."""
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def read_public_key(path: Path) -> bytes:
    """Read and check an untrusted public key, in the format of a SuperLink.

    Raises:
        FedgenError: if it is not a key on P-384.
    """
    try:
        text = read_bounded(path, LARGEST)
        key = load_ssh_public_key(text)
    except OSError as error:
        raise FedgenError("accept", f"{path} cannot be read ({error.strerror})", _REMEDY) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise FedgenError("accept", f"{path} is no public key", _REMEDY) from error
    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP384R1):
        raise FedgenError("accept", f"{path} is no key on P-384", _REMEDY)
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


MACHINE_KEY = "key"
"""File in ``fedgen_home`` with the key by which this machine signs accounts and releases."""

LARGEST = 2**16
"""Bytes of a file of a key or certificate."""

_NEW = "give a new path: the file is created"
_REMEDY = "use the KEY.pub that fedgen node created next to its key"
