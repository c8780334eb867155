"""Who announced a key, and what a cohort agreed on, without the server's word for it.

The masks of a secure sum hide nothing from a server that makes up the keys, or the clients, that an
honest client shares its secrets with, nor from one that tells some clients that another answered
and others that it did not: it would gather shares of both secrets (``masking.py``). Where clients
are sites with keys of their own, each signs

    its announcement    run, round and question, what it was asked to take part in, who it is, how
                        many are asked, counted on and counted out, and its two public keys: whoever
                        was told otherwise takes it for void
    the lists           run, round, question, all announced keys, who answered and who did not

and checks these of all others against the fingerprints that its site was told by the others
(``peers``). A client signs one pair of lists a round, after it answered, and reveals shares after
it saw the same pair signed by more than (asked + colluders) / 2 clients, and by as many as the
noise counts on: two pairs would need an honest client that signed both (Bonawitz et al. 2017,
section 6.2, with the consistency round of its figure 4).

Not covered: a site whose peers are not told takes whoever the server says.
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

from fedgen.federation.masking import MaskingError
from fedgen.privacy.releases import Secure

_NUMBER = 48  # bytes of a number below the order of P-384
_POINT = 1 + _NUMBER

CREDENTIAL_BYTES = _POINT + 2 * _NUMBER
"""Of a signature, with the public key that it is checked by."""


def fingerprint(key: EllipticCurvePublicKey) -> str:
    """What sites tell each other by telephone: a digest of a public key."""
    return _print_of(key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint))


def _print_of(point: bytes) -> str:
    return "SHA256:" + base64.b64encode(hashlib.sha256(point).digest()).decode().rstrip("=")


def signers_needed(sums: Secure) -> int:
    """How many signatures under one pair of lists rule another pair out."""
    return max(sums.threshold, (sums.asked + sums.colluders) // 2 + 1)


def announcement(
    context: bytes, client: int, sums: Secure, keys: bytes, about: bytes = b""
) -> bytes:
    """What a client signs when it announces keys. ``about``: what it was asked to take part in."""
    numbers = (client, sums.asked, sums.threshold, sums.colluders, sums.bits)
    told = (number.to_bytes(8, "big") for number in numbers)
    return _text(b"keys", context, about, *told, keys)


def agreement(
    context: bytes, keys: Mapping[int, bytes], answered: list[int], silent: list[int]
) -> bytes:
    """What a client signs before it reveals shares."""
    book = b"".join(client.to_bytes(8, "big") + keys[client] for client in sorted(keys))
    lists = (b"".join(c.to_bytes(8, "big") for c in sorted(each)) for each in (answered, silent))
    return _text(b"lists", context, book, *lists)


def _text(*parts: bytes) -> bytes:
    """Parts that no other parts come to."""
    return b"fedgen" + b"".join(len(part).to_bytes(8, "big") + part for part in parts)


@dataclass(frozen=True)
class Signer:
    """A site's key, and whom it takes for whom.

    peers: client -> fingerprint of its key; None: nobody was told, and any key will do.
    """

    key: EllipticCurvePrivateKey
    peers: Mapping[int, str] | None

    def sign(self, text: bytes) -> bytes:
        """A signature, after the public key that it is checked by."""
        point = self.key.public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
        r, s = decode_dss_signature(self.key.sign(text, ECDSA(SHA384())))
        return point + r.to_bytes(_NUMBER, "big") + s.to_bytes(_NUMBER, "big")

    def check(self, client: int, text: bytes, credential: bytes) -> None:
        """Raises MaskingError unless a client signed this, or is not one of the peers."""
        point, rest = credential[:_POINT], credential[_POINT:]
        if self.peers is not None and self.peers.get(client) != _print_of(point):
            raise MaskingError(f"client {client} is not the peer that it should be")
        r, s = (int.from_bytes(part, "big") for part in (rest[:_NUMBER], rest[_NUMBER:]))
        try:
            key = EllipticCurvePublicKey.from_encoded_point(SECP384R1(), point)
            key.verify(encode_dss_signature(r, s), text, ECDSA(SHA384()))
        except (InvalidSignature, ValueError) as error:
            raise MaskingError(f"client {client} did not sign this") from error

    def is_by(self, client: int, text: bytes, credential: bytes) -> bool:
        """Return whether a client, one of the peers, signed this."""
        try:
            self.check(client, text, credential)
        except MaskingError:
            return False
        return True
