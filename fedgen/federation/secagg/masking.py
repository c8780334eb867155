"""Secure aggregation: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine
Learning" (CCS 2017, figure 4, semi-honest, double masks), on the graph of neighbours of Bell et al.
2020 ("SecAgg+") for many clients.

    keys      each client announces two fresh public keys and a commitment to the seed of its
              self-mask
    shares    each client sends encrypted Shamir shares of two secrets to its neighbours, and keeps
              one of each: its mask key, which determines the masks with neighbours, and the seed
              of its self-mask
    open      each client decrypts the shares from its neighbours and reports those that fail
              authentication
    masked    ring elements + self-mask + masks with the neighbours that sent shares (minus, if
              their index is smaller), modulo the ring: uniform for anyone who lacks one of these
    reveal    for itself and each of these neighbours one share: of its seed if it responded, of
              its key if not

The masks of neighbours cancel in the sum. The server removes the self-masks of responders, and the
masks that dropouts left in the messages of their neighbours. Late messages stay hidden: their
self-masks are never revealed.

A client reveals one secret of each neighbour, once, and only for a set of responders that is large
enough for the noise (``Secure.threshold``). Keys are fresh for each query, masks are used once, and
a client that masked a message in a round announces no other keys for it (``client/app.py``): the
difference of two sums over different clients would be the message of one of them.

**What is hidden.** As long as fewer than ``shamir`` neighbours of each client collude with the
server, it learns only the revealed secret of an honest client; then the messages of honest
responders are uniform, given the sum over each connected component of the graph between them
(Bonawitz et al., lemma 6.1). Small graphs are complete. Otherwise the graph is a ring of clients in
an order that no party chooses (a digest of all keys), each a neighbour of the next ``degree`` / 2
clients on both sides: it is disconnected only if ``degree`` / 2 consecutive clients are dropouts or
colluders. The degree keeps the probability of this, and of ``shamir`` colluders in one
neighbourhood, below 2^-60 per round (``_degree``), as long as dropouts and colluders do not depend
on the neighbours. A colluder that sees the keys of others before it announces its own may try
several, which multiplies the probability: such a server deviates from the protocol, and signed sums
have no ring.

Clients that sign detect a server that forges keys or sends different lists to clients
(``signing.py``): between sites, not in a simulation.

**Clients that violate the protocol** gain no information. Invalid keys, signatures and shares are
rejected before any client responds, and the exchange restarts without the clients concerned
(``server.py``). A revealed share is checked against the commitment: a wrong one is ignored if the
others suffice; its sender or its dealer violates the protocol. Not attributable: wrong ring
elements, shares that do not reconstruct the committed secret, and wrong shares if too few correct
ones remain. The commitment, a SHA-256 digest of 256 random bits and their context, hides the seed
under the assumption that digest and mask stream are computationally independent.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from scipy.stats import hypergeom

from fedgen.federation.secagg.secret_sharing import SHARE_BYTES, recover_secret, split_secret
from fedgen.privacy.aggregation import Secure

Words = NDArray[np.uint32] | NDArray[np.uint64]

KEY_BYTES = 96
"""Size of an announcement: two public keys and a commitment."""

SEALED_BYTES = 2 * SHARE_BYTES + 16
"""Size of the encrypted shares for a neighbour: a share of each secret, and the authentication
tag."""

_MAX_FAILURE = 2.0**-60
_NONCE = bytes(12)  # each key encrypts one text


def mask_context(run: str, server_round: int, query: str) -> bytes:
    """Return the context of masks: run, round and digest of the query, so that clients with
    different queries have different masks, which do not cancel."""
    return f"{run}/{server_round}/{query}".encode()


class MaskingError(Exception):
    """A message that the protocol does not allow; the client does not respond."""


@dataclass(frozen=True)
class Graph:
    """Graph of the clients that announced keys.

    order: all clients in the order of the ring.
    degree: number of neighbours of each.
    shamir: number of shares that recover a secret.
    """

    order: tuple[int, ...]
    degree: int
    shamir: int

    def neighbours(self, client: int) -> list[int]:
        """Return the client and its neighbours in the order of their shares."""
        if self.degree >= len(self.order) - 1:
            return list(self.order)
        position, half = self.order.index(client), self.degree // 2
        steps = range(-half, half + 1)
        return [self.order[(position + step) % len(self.order)] for step in steps]


def build_graph(keys: Mapping[int, bytes], sums: Secure, complete: bool = False) -> Graph:
    """Return the graph that every client derives from the keys; ``complete``: all clients are
    neighbours, for a server that may choose the dropouts and knows the neighbours.

    If ``complete``, the server may also forward shares to some clients only. Then with 2 ``shamir``
    > clients + colluders (Bonawitz et al. 2017, section 6.2), any set of clients that opens shares
    of one part of the clients, and any set that reveals shares of the rest, would have an honest
    client in common, which does only one of both.

    Raises:
        MaskingError: for keys of too few clients, or of more than the cohort.
    """
    if not sums.threshold <= len(keys) <= sums.asked:
        raise MaskingError("the keys do not match the cohort")
    all_keys = hashlib.sha256(_encode_keys(keys))  # hashed once, not for each client

    def place(client: int) -> bytes:
        own = all_keys.copy()
        own.update(client.to_bytes(8, "big"))
        return own.digest()

    degree = len(keys) - 1 if complete else _degree(len(keys), sums.threshold, sums.colluders)
    half = (degree + 1) // 2
    shamir = (max(half, sums.colluders) if degree == len(keys) - 1 else half) + 1
    if complete:  # two sets of clients that each give a secret back share an honest one
        shamir = (len(keys) + sums.colluders) // 2 + 1
    return Graph(tuple(sorted(keys, key=place)), degree, shamir)


def _encode_keys(keys: Mapping[int, bytes]) -> bytes:
    return b"".join(client.to_bytes(8, "big") + keys[client] for client in sorted(keys))


@lru_cache(maxsize=64)
def _degree(count: int, threshold: int, colluders: int) -> int:
    """Return the smallest even degree for which the graph is connected and no neighbourhood has too
    many colluders, each except with probability ``_MAX_FAILURE``; the complete graph if there are
    too few clients.

    Of ``count`` clients with keys, ``count - threshold`` may drop out and ``colluders`` collude,
    whichever clients announced no keys; one more colluder is allowed, because its cost is printed.
    A sequence of half the degree of these starts at a given position with probability at most
    (their share)^half, sampled without replacement; there are ``count`` positions.
    """
    colluders += 1
    bad = count - threshold + colluders
    for degree in range(2, count - 1, 2):
        disconnected = (math.comb(bad, degree // 2) / math.comb(count, degree // 2)) * count
        captured = count * float(hypergeom.sf(degree // 2, count - 1, colluders, degree))
        if disconnected < _MAX_FAILURE and captured < _MAX_FAILURE:
            return degree
    return count - 1


def check_keys(announced: bytes) -> None:
    """Raise ValueError for public keys of small order, such as zeros, which allow no key
    agreement, and for equal mask and box keys."""
    mask_key, box_key = announced[:32], announced[32:64]
    if mask_key == box_key:
        raise ValueError("mask key and box key are equal")
    for key in (mask_key, box_key):
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))


@dataclass
class Masker:
    """Mask secrets of one client for one query, in memory only.

    context: context of the masks (``mask_context``).
    complete_graph: whether all clients are neighbours.
    """

    client: int
    sums: Secure
    context: bytes
    _mask_key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _box_key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _seed: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _keys: dict[int, bytes] = field(default_factory=dict, repr=False)
    _digest: bytes = b""
    _graph: Graph | None = None
    _shares: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    _box_secrets: dict[int, bytes] = field(
        default_factory=dict, repr=False
    )  # until shares are opened
    _opened: bool = False
    _used: bool = False
    _revealed: bool = False
    complete_graph: bool = False

    def announce(self) -> bytes:
        """Return the public keys of masks and of boxes, and the commitment to the seed."""
        private_keys = self._mask_private_key, self._box_private_key
        keys = b"".join(key.public_key().public_bytes_raw() for key in private_keys)
        return keys + _commitment(self._seed, self.context)

    def seal_shares(self, keys: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return encrypted shares of both secrets for each neighbour.

        Raises:
            MaskingError: for keys that do not belong to a cohort with this client.
        """
        flat = [key for text in keys.values() for key in (text[:32], text[32:64])]
        if self._graph is not None or keys.get(self.client) != self.announce():
            raise MaskingError("the keys do not include those of this client")
        if len(set(flat)) < len(flat) or any(len(text) != KEY_BYTES for text in keys.values()):
            raise MaskingError("duplicate or malformed keys")
        self._graph, self._keys = build_graph(keys, self.sums, self.complete_graph), dict(keys)
        self._digest = hashlib.sha256(_encode_keys(keys)).digest()
        neighbours, shamir = self._graph.neighbours(self.client), self._graph.shamir
        key_shares, seed_shares = (
            split_secret(secret, shamir, len(neighbours)) for secret in (self._mask_key, self._seed)
        )
        dealt = dict(zip(neighbours, zip(key_shares, seed_shares, strict=True), strict=True))
        self._shares[self.client] = dealt.pop(self.client)
        return {
            other: self._box(other).encrypt(
                _NONCE, key + seed, self._associated_data(self.client, other)
            )
            for other, (key, seed) in dealt.items()
        }

    @property
    def keys(self) -> Mapping[int, bytes]:
        """Keys of the clients that shares were sent for, including this one."""
        return self._keys

    def open(self, sealed: Mapping[int, bytes]) -> list[int]:
        """Decrypt the shares from neighbours, once.

        Args:
            sealed: neighbour -> encrypted shares; missing neighbours count as dropouts.

        Returns:
            Neighbours whose shares fail authentication. If there are any, no words are masked with
            these keys.

        Raises:
            MaskingError: if seals were opened before, or too few neighbours dealt.
        """
        if self._graph is None or self._opened:
            raise MaskingError("shares for these keys were opened before, or no keys received")
        others = set(self._graph.neighbours(self.client)) - {self.client}
        if not set(sealed) <= others or len(sealed) + 1 < self._graph.shamir:
            raise MaskingError("the shares do not match the neighbours")
        self._opened, broken = True, []
        for other, text in sealed.items():
            try:
                plain = self._box(other, True).decrypt(
                    _NONCE, text, self._associated_data(other, self.client)
                )
            except InvalidTag:
                broken.append(other)
            else:
                self._shares[other] = plain[:SHARE_BYTES], plain[SHARE_BYTES:]
        if broken:
            self._shares.clear()
        self._box_secrets.clear()
        return broken

    @property
    def is_ready(self) -> bool:
        """Whether all received shares were opened and no message was masked."""
        return self._opened and bool(self._shares) and not self._used

    def mask(self, words: Words) -> Words:
        """Return the words under all masks.

        Raises:
            MaskingError: if no shares were opened, or these keys masked words before.
        """
        if not self.is_ready:
            raise MaskingError("no shares were opened, or these keys masked words before")
        self._used = True
        masked = words + stream(self._seed, len(words), words.dtype)
        for other in self._shares.keys() - {self.client}:
            pair = stream(self._mask_key_with(other), len(words), words.dtype)
            (np.add if self.client < other else np.subtract)(masked, pair, out=masked)
        return masked

    def reveal(self, responders: Iterable[int], dropouts: Iterable[int]) -> dict[int, bytes]:
        """Return, for this client and each neighbour that sent shares, the share of one secret,
        never of both.

        Raises:
            MaskingError: for too few responders, a client on both lists, or a second call.
        """
        responder_set, dropout_set = set(responders), set(dropouts)
        if self._revealed:
            raise MaskingError("shares are revealed once")
        self.check_lists(responder_set, dropout_set)
        self._revealed = True
        return {client: shares[client in responder_set] for client, shares in self._shares.items()}

    def check_lists(self, responders: set[int], dropouts: set[int]) -> None:
        """Raise MaskingError for lists by which this client would reveal no shares."""
        if self._graph is None or not self._used:
            raise MaskingError("no message was masked")
        if responders & dropouts or self.client not in responders:
            raise MaskingError("the lists overlap or omit this client")
        if len(responders) < self.sums.threshold or not responders | dropouts <= set(self._keys):
            raise MaskingError("too few responders")
        if not set(self._shares) <= responders | dropouts:
            raise MaskingError("a neighbour is on neither list")
        if not responders & set(self._graph.neighbours(self.client)) <= set(self._shares):
            # its mask is not part of this client's message, which would be exposed in the sum
            raise MaskingError("a neighbour responded, but its shares did not arrive")

    @cached_property  # loading a private key costs as much as a key agreement
    def _mask_private_key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self._mask_key)

    @cached_property
    def _box_private_key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self._box_key)

    def _mask_key_with(self, other: int) -> bytes:
        public = self._keys[other][:32]
        return _pair_key(self._mask_private_key, public, self.client, other, self.context)

    def _associated_data(self, source: int, target: int) -> bytes:
        """Return the associated data of a seal: dealer, recipient and a digest of all keys."""
        return _names(source, target) + self._digest

    def _box(self, other: int, of_other: bool = False) -> ChaCha20Poly1305:
        pair = (other, self.client) if of_other else (self.client, other)
        if other not in self._box_secrets:  # serves both directions
            self._box_secrets[other] = _agree(self._box_private_key, self._keys[other][32:64])
        purpose = b"box" + self.context + _names(*pair)
        return ChaCha20Poly1305(_derive(self._box_secrets[other], purpose))


def unmask(
    total: Words,
    keys: Mapping[int, bytes],
    responders: set[int],
    dropouts: set[int],
    revealed: Mapping[int, Mapping[int, bytes]],
    sums: Secure,
    context: bytes,
    complete: bool = False,
) -> tuple[Words, dict[int, set[int]]]:
    """Remove the masks from the sum of the responders' messages.

    Args:
        dropouts: clients that sent shares and did not respond.
        revealed: helper -> client -> share.

    Returns:
        The sum, and helper -> dealers of its wrong shares, which were ignored: the helper revealed
        another share than it received, or the dealer dealt it a wrong one.

    Raises:
        MaskingError: if too few shares were revealed, or too many wrong ones.
    """
    result, graph, wrong = total.copy(), build_graph(keys, sums, complete), dict[int, set[int]]()
    for client in responders | dropouts:
        neighbours = graph.neighbours(client)
        helpers_ = sorted(enumerate(neighbours, 1), key=lambda position: position[1] in wrong)
        shares = {
            position: revealed[helper][client]
            for position, helper in helpers_
            if client in revealed.get(helper, {})
        }
        text, responded = keys[client], client in responders

        def is_secret(secret: bytes, text: bytes = text, seed: bool = responded) -> bool:
            if seed:
                return _commitment(secret, context) == text[64:]
            return _public(secret) == text[:32]

        # X25519 accepts variants of a mask key: one more agreement is required
        max_wrong = sums.colluders + (not responded)
        if len(shares) < graph.shamir:
            raise MaskingError("too few shares")
        secret, wrong_positions = recover_secret(shares, graph.shamir, is_secret, max_wrong)
        if secret is None:
            helpers = ", ".join(str(neighbours[position - 1]) for position in sorted(shares))
            raise MaskingError(
                f"the revealed shares of client {client} do not match its commitment; this client "
                f"or some of those that revealed them ({helpers}) violate the protocol"
            )
        for position in wrong_positions:
            wrong.setdefault(neighbours[position - 1], set()).add(client)
        if responded:
            result -= stream(secret, len(result), result.dtype)
            continue
        private = X25519PrivateKey.from_private_bytes(secret)
        for other in responders.intersection(neighbours):
            pair = _pair_key(private, keys[other][:32], client, other, context)
            mask = stream(pair, len(result), result.dtype)
            result = result - mask if other < client else result + mask
    return result, wrong


def stream(key: bytes, count: int, dtype: np.dtype[Any]) -> Words:
    """Return uniform words of ``dtype`` (uint32 or uint64) by AES-256 in counter mode. A key must
    be used once."""
    cipher = Cipher(AES256(key), CTR(bytes(16))).encryptor()
    text = cipher.update(bytes(dtype.itemsize * count))
    return np.frombuffer(text, dtype=dtype.newbyteorder("<")).astype(dtype, copy=False)


def _pair_key(
    private: X25519PrivateKey, public: bytes, one: int, other: int, context: bytes
) -> bytes:
    """Derive the key of the mask between two clients.

    It depends on both clients' numbers: different public keys can agree on the same secret (X25519
    ignores bit 255 and clears the cofactor), and with equal masks a client that announces a variant
    of another's key would cancel that client's masks.
    """
    purpose = b"mask" + _names(*sorted((one, other))) + context
    return _derive(_agree(private, public), purpose)


def _commitment(seed: bytes, context: bytes) -> bytes:
    return hashlib.sha256(b"fedgen/seed" + seed + context).digest()


def _public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _agree(private: X25519PrivateKey, public: bytes) -> bytes:
    """Return the X25519 shared secret. Raises MaskingError for an invalid public key."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise MaskingError("invalid key") from error


def _derive(shared: bytes, purpose: bytes) -> bytes:
    """Derive a 32-byte key for one purpose from a shared secret."""
    return HKDF(SHA256(), 32, None, b"fedgen/" + purpose).derive(shared)


def _names(source: int, target: int) -> bytes:
    return source.to_bytes(8, "big") + target.to_bytes(8, "big")
