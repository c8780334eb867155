"""Signatures of keys and lists of a secure sum, so that clients need not trust the server.

The masks of a secure sum do not protect against a server that forges keys or clients for an honest
client to share its secrets with, nor against one that tells some clients that another responded and
others that it dropped out, which would yield shares of both secrets (``masking.py``). Where clients
are sites with their own keys, each signs

    its announcement    run, round and query, the request that it accepted, its index, the cohort
                        size, threshold and colluders of the sum, and its public keys and
                        commitment: clients with other information reject it
    the lists           run, round, query, all announced keys, responders and dropouts

and verifies the signatures of all others by the fingerprints that its site received from them
(``peers``). A client signs one pair of lists per round, after it responded, and reveals shares only
for a pair signed by more than (asked + colluders) / 2 clients and by as many as the noise requires:
two pairs would need an honest client that signed both (Bonawitz et al. 2017, section 6.2, with the
consistency round of figure 4).

Not covered: a site without known peers accepts any client that the server names.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP384R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedgen.federation.secagg.masking import MaskingError
from fedgen.privacy.aggregation import Secure

_DETERMINISTIC = ECDSA(SHA384(), deterministic_signing=True)
_NUMBER = 48  # bytes of a number below the order of P-384
_POINT = 1 + _NUMBER

CREDENTIAL_BYTES = _POINT + 2 * _NUMBER
"""Size of a signature with its public key."""


def fingerprint(key: EllipticCurvePublicKey) -> str:
    """Return the digest of a public key, which sites exchange by telephone."""
    return _point_fingerprint(key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint))


def _point_fingerprint(point: bytes) -> str:
    return "SHA256:" + base64.b64encode(hashlib.sha256(point).digest()).decode().rstrip("=")


def signers_needed(sums: Secure) -> int:
    """Return how many signatures of one pair of lists exclude any other pair."""
    return max(sums.threshold, (sums.asked + sums.colluders) // 2 + 1)


def announcement(
    context: bytes, client: int, sums: Secure, keys: bytes, run_digest: bytes = b""
) -> bytes:
    """Return the text that a client signs when it announces keys. ``accepted_request``: text of the
    accepted request."""
    numbers = (client, sums.asked, sums.threshold, sums.colluders, sums.bits)
    fields = (number.to_bytes(8, "big") for number in numbers)
    return _text(b"keys", context, run_digest, *fields, keys)


def agreement(
    context: bytes, keys: Mapping[int, bytes], responders: list[int], dropouts: list[int]
) -> bytes:
    """Return the text that a client signs before it reveals shares."""
    announced = b"".join(client.to_bytes(8, "big") + keys[client] for client in sorted(keys))
    lists = (
        b"".join(client.to_bytes(8, "big") for client in sorted(clients))
        for clients in (responders, dropouts)
    )
    return _text(b"lists", context, announced, *lists)


def _text(*parts: bytes) -> bytes:
    """Concatenate parts unambiguously."""
    return b"fedgen" + b"".join(len(part).to_bytes(8, "big") + part for part in parts)


@dataclass(frozen=True)
class Signer:
    """Key of a site, and its peers.

    peers: client -> fingerprint of its key; None: unknown, any key is accepted.
    """

    key: EllipticCurvePrivateKey
    peers: Mapping[int, str] | None

    def sign(self, text: bytes) -> bytes:
        """Return a signature, preceded by its public key. The same text has the same signature (RFC
        6979), so that a file with signatures is written again without a change."""
        point = self.key.public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
        r, s = decode_dss_signature(self.key.sign(text, _DETERMINISTIC))
        return point + r.to_bytes(_NUMBER, "big") + s.to_bytes(_NUMBER, "big")

    def check(self, client: int, text: bytes, credential: bytes) -> None:
        """Raise MaskingError unless the client, one of the peers, signed this text."""
        point, signature = credential[:_POINT], credential[_POINT:]
        if self.peers is not None and self.peers.get(client) != _point_fingerprint(point):
            raise MaskingError(f"the key of client {client} does not match its fingerprint")
        r, s = (int.from_bytes(part, "big") for part in (signature[:_NUMBER], signature[_NUMBER:]))
        try:
            key = EllipticCurvePublicKey.from_encoded_point(SECP384R1(), point)
            key.verify(encode_dss_signature(r, s), text, ECDSA(SHA384()))
        except (InvalidSignature, ValueError) as error:
            raise MaskingError(f"client {client} did not sign this") from error

    def is_signed_by(self, client: int, text: bytes, credential: bytes) -> bool:
        """Return whether the client, one of the peers, signed this text."""
        try:
            self.check(client, text, credential)
        except MaskingError:
            return False
        return True
