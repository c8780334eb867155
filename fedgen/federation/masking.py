"""Sums that nobody sees the terms of: Bonawitz et al., "Practical Secure Aggregation for
Privacy-Preserving Machine Learning" (CCS 2017, figure 4, semi-honest, double masks), on the graph
of neighbours of Bell et al. 2020 ("SecAgg+") where there are many clients.

    keys      each client announces two fresh public keys and a commitment to the seed of its
              self-mask
    shares    each client deals encrypted Shamir shares of two secrets to itself and its neighbours:
              its mask key, from which the masks with neighbours follow, and its self-mask seed
    open      each client decrypts the shares from its neighbours and reports those that fail
              authentication
    masked    words + own mask + masks with those neighbours that dealt (minus, if their number is
              smaller), modulo the ring: uniform for whoever lacks one of these
    reveal    for each of these one share: of its seed if its words arrived, of its key if not

The masks of neighbours cancel in the sum. The server takes away the own masks of those that
answered, and what the silent ones left in their neighbours' words. Words that arrive late stay
hidden: their own mask is revealed by nobody.

A client reveals one secret of each neighbour, once, and only of a set of answers that its noise
counts on (``Secure.threshold``). Keys are new for each question, masks serve once, and a client
that masked words in a round announces no other keys for it (``client_app``): the difference of two
sums over other clients would be what one of them sent.

**What is hidden.** As long as fewer than ``shamir`` of those around each client collude with the
server, it learns no secret of an honest client but the one that is revealed; then the words of the
honest clients that answered are uniform, given the sum over each connected part of the graph
between them (Bonawitz et al., lemma 6.1). The graph is complete where it is small. Else it is a
ring of clients in an order that nobody chose (a digest of all keys), each the neighbour of the
``degree`` / 2 next ones on both sides: it is in two parts only if ``degree`` / 2 clients in a row
are silent or colluding. The degree keeps that, and ``shamir`` colluders in one neighbourhood,
below 2^-60 a round (``_degree``), as long as clients drop out and collude whoever their neighbours
are. A colluder that sees the others' keys before it announces its own may try several, and each try
counts: that server deviates from the protocol, and signed sums have no ring.

A server that forges keys, or tells clients different lists, is noticed where clients sign
(``signing.py``): between sites, not in a simulation.

**Clients that violate the protocol** gain no information. Invalid keys, signatures and shares are
rejected before any client responds, and the exchange restarts without the clients concerned
(``sums.py``). A revealed share is checked against the commitment: a wrong one is ignored if the
others suffice; its sender or its dealer violates the protocol. Not attributable: wrong words,
shares that do not reconstruct the committed secret, and wrong shares if too few correct ones
remain. The commitment, a SHA-256 digest of 256 random bits and their context, hides the seed under
the assumption that digest and mask stream are computationally independent.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
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

from fedgen.privacy.releases import Secure

Words = NDArray[np.uint32] | NDArray[np.uint64]

KEY_BYTES = 96
"""Size of an announcement: two public keys and a commitment."""

_PRIME = 2**256 + 297
SHARE_BYTES = 33
"""Of a share of a secret."""

SEALED_BYTES = 2 * SHARE_BYTES + 16
"""Of what a client deals to a neighbour: a share of each secret, and the seal."""

_RARE = 2.0**-60
_MAX_SUBSETS = 2000  # of shares tried for a secret
_NONCE = bytes(12)  # a key seals one text


def context_of(run: str, server_round: int, asked: str) -> bytes:
    """What masks are for: a run, a round, and the digest of the question, so that clients that are
    asked different things have different masks, which do not cancel."""
    return f"{run}/{server_round}/{asked}".encode()


class MaskingError(Exception):
    """A message that the protocol does not allow: nothing is said."""


@dataclass(frozen=True)
class Graph:
    """Who is whose neighbour, of the clients that announced keys.

    order: all of them, in the order of the ring. degree: neighbours of each. shamir: shares that
    give a secret back.
    """

    order: tuple[int, ...]
    degree: int
    shamir: int

    def around(self, client: int) -> list[int]:
        """The client and its neighbours, in the order that shares are dealt in."""
        if self.degree >= len(self.order) - 1:
            return list(self.order)
        place, half = self.order.index(client), self.degree // 2
        steps = range(-half, half + 1)
        return [self.order[(place + step) % len(self.order)] for step in steps]


def graph(keys: Mapping[int, bytes], sums: Secure, whole: bool = False) -> Graph:
    """The graph that everybody derives from the same keys; ``whole``: all are neighbours, where who
    is silent may be a server's choice, who knows who is whose neighbour.

    Where ``whole``, a server may also pass shares on to some clients and not to others. Then with
    2 ``shamir`` > clients + colluders (Bonawitz et al. 2017, section 6.2), as many clients as open
    shares of a part of the clients, and as many as reveal shares of the rest, would have an honest
    client in common, which does only one of both.

    Raises:
        MaskingError: for keys of too few clients, or of more than were to be asked.
    """
    if not sums.threshold <= len(keys) <= sums.asked:
        raise MaskingError("keys of a cohort that was not to be asked")
    told = _book(keys)

    def place(client: int) -> bytes:
        return hashlib.sha256(told + client.to_bytes(8, "big")).digest()

    degree = len(keys) - 1 if whole else _degree(len(keys), sums.threshold, sums.colluders)
    half = (degree + 1) // 2
    shamir = (max(half, sums.colluders) if degree == len(keys) - 1 else half) + 1
    if whole:  # two sets of clients that each give a secret back share an honest one
        shamir = (len(keys) + sums.colluders) // 2 + 1
    return Graph(tuple(sorted(keys, key=place)), degree, shamir)


def _book(keys: Mapping[int, bytes]) -> bytes:
    return b"".join(client.to_bytes(8, "big") + keys[client] for client in sorted(keys))


@lru_cache(maxsize=64)
def _degree(count: int, threshold: int, colluders: int) -> int:
    """The least even degree that keeps the graph whole and colluders few in each neighbourhood,
    each but for probability ``_RARE``; all others, if there are too few for that.

    Of ``count`` clients that announced keys ``count - threshold`` may be silent from then on and
    ``colluders`` collude, whoever announced none; one colluder more is allowed for, since what that
    would cost is printed. A run of half the degree of these begins at a given place with at most
    (their share)^half, drawn without replacement; there are ``count`` places.
    """
    colluders += 1
    bad = count - threshold + colluders
    for degree in range(2, count - 1, 2):
        run = (math.comb(bad, degree // 2) / math.comb(count, degree // 2)) * count
        caught = count * float(hypergeom.sf(degree // 2, count - 1, colluders, degree))
        if run < _RARE and caught < _RARE:
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
    """One client's secrets for one question. They are in memory alone, and end with it.

    context: what the masks are for (``context_of``). whole: of the graph.
    """

    me: int
    sums: Secure
    context: bytes
    _mask_key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _box_key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _seed: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _keys: dict[int, bytes] = field(default_factory=dict, repr=False)
    _digest: bytes = b""
    _graph: Graph | None = None
    _held: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    _opened: bool = False
    _used: bool = False
    _told: bool = False
    whole: bool = False

    def announce(self) -> bytes:
        """Return the public keys of masks and of boxes, and the commitment to the seed."""
        keys = _public(self._mask_key) + _public(self._box_key)
        return keys + _commitment(self._seed, self.context)

    def deal(self, keys: Mapping[int, bytes]) -> dict[int, bytes]:
        """Shares of both secrets for each neighbour, sealed.

        Raises:
            MaskingError: for keys that are not those of a cohort with this client in it.
        """
        flat = [key for text in keys.values() for key in (text[:32], text[32:64])]
        if self._graph is not None or keys.get(self.me) != self.announce():
            raise MaskingError("these are not the keys of a cohort with me in it")
        if len(set(flat)) < len(flat) or any(len(text) != KEY_BYTES for text in keys.values()):
            raise MaskingError("one client twice")
        self._graph, self._keys = graph(keys, self.sums, self.whole), dict(keys)
        self._digest = hashlib.sha256(_book(keys)).digest()
        around, shamir = self._graph.around(self.me), self._graph.shamir
        of_key, of_seed = (_split(s, shamir, len(around)) for s in (self._mask_key, self._seed))
        dealt = dict(zip(around, zip(of_key, of_seed, strict=True), strict=True))
        self._held[self.me] = dealt.pop(self.me)
        return {
            other: self._box(other).encrypt(_NONCE, key + seed, self._about(self.me, other))
            for other, (key, seed) in dealt.items()
        }

    @property
    def book(self) -> Mapping[int, bytes]:
        """The keys that this client dealt shares for, its own among them."""
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
        others = set(self._graph.around(self.me)) - {self.me}
        if not set(sealed) <= others or len(sealed) + 1 < self._graph.shamir:
            raise MaskingError("these are not shares of my neighbours")
        self._opened, broken = True, []
        for other, text in sealed.items():
            try:
                plain = self._box(other, True).decrypt(_NONCE, text, self._about(other, self.me))
            except InvalidTag:
                broken.append(other)
            else:
                self._held[other] = plain[:SHARE_BYTES], plain[SHARE_BYTES:]
        if broken:
            self._held.clear()
        return broken

    @property
    def is_ready(self) -> bool:
        """Whether all seals were opened, and no words masked."""
        return self._opened and bool(self._held) and not self._used

    def mask(self, words: Words) -> Words:
        """Return the words under all masks.

        Raises:
            MaskingError: if no shares were opened, or these keys masked words before.
        """
        if not self.is_ready:
            raise MaskingError("no shares were opened, or these keys masked words before")
        self._used = True
        masked = words + stream(self._seed, len(words), words.dtype)
        for other in self._held.keys() - {self.me}:
            pair = stream(self._pair(self._mask_key, other), len(words), words.dtype)
            (np.add if self.me < other else np.subtract)(masked, pair, out=masked)
        return masked

    def reveal(self, answered: Iterable[int], silent: Iterable[int]) -> dict[int, bytes]:
        """For itself and each neighbour that dealt a share of one secret, never of both.

        Raises:
            MaskingError: for fewer answers than the noise counts on, a client on both lists, or a
                second time.
        """
        heard, unheard = set(answered), set(silent)
        if self._told:
            raise MaskingError("shares are revealed once")
        self.check_lists(heard, unheard)
        self._told = True
        return {c: shares[c in heard] for c, shares in self._held.items()}

    def check_lists(self, heard: set[int], unheard: set[int]) -> None:
        """Raise MaskingError for lists by which this client would reveal no shares."""
        if self._graph is None or not self._used:
            raise MaskingError("nothing was masked")
        if heard & unheard or self.me not in heard:
            raise MaskingError("not two lists of one cohort")
        if len(heard) < self.sums.threshold or not heard | unheard <= set(self._keys):
            raise MaskingError("too few answers")
        if not set(self._held) <= heard | unheard:
            raise MaskingError("a neighbour is on neither list")
        if not heard & set(self._graph.around(self.me)) <= set(self._held):
            # its mask is not in my words: in a sum without it they would stand by themselves
            raise MaskingError("a neighbour answered whose shares never came here")

    def _pair(self, own: bytes, other: int) -> bytes:
        return _pair_key(own, self._keys[other][:32], self.me, other, self.context)

    def _about(self, source: int, target: int) -> bytes:
        """Return the associated data of a seal: dealer, recipient and a digest of all keys."""
        return _names(source, target) + self._digest

    def _box(self, other: int, of_other: bool = False) -> ChaCha20Poly1305:
        pair = (other, self.me) if of_other else (self.me, other)
        key = _agree(self._box_key, self._keys[other][32:64], b"box" + self.context + _names(*pair))
        return ChaCha20Poly1305(key)


def unmasked(
    total: Words,
    keys: Mapping[int, bytes],
    answered: set[int],
    silent: set[int],
    told: Mapping[int, Mapping[int, bytes]],
    sums: Secure,
    context: bytes,
    whole: bool = False,
) -> tuple[Words, dict[int, set[int]]]:
    """Remove the masks from the sum of the responders' masked words.

    Args:
        silent: those that dealt and did not answer. told: helper -> client -> share.

    Returns:
        The sum, and helper -> dealers of its wrong shares, which were ignored: the helper revealed
        another share than it received, or the dealer dealt it a wrong one.

    Raises:
        MaskingError: if too few shares were revealed, or too many wrong ones.
    """
    found, net, wrong = total.copy(), graph(keys, sums, whole), dict[int, set[int]]()
    for client in answered | silent:
        around = net.around(client)
        places = sorted(enumerate(around, 1), key=lambda place: place[1] in wrong)
        shares = {
            place: told[helper][client]
            for place, helper in places
            if client in told.get(helper, {})
        }
        text, has_answered = keys[client], client in answered

        def is_secret(secret: bytes, text: bytes = text, seed: bool = has_answered) -> bool:
            if seed:
                return _commitment(secret, context) == text[64:]
            return _public(secret) == text[:32]

        # a mask key has variants that X25519 takes for the same: one more place to agree in
        liars = sums.colluders + (not has_answered)
        secret, bad = _secret(shares, net.shamir, is_secret, liars)
        if secret is None:
            helpers = ", ".join(str(around[place - 1]) for place in sorted(shares))
            raise MaskingError(
                f"the revealed shares of client {client} do not match its commitment; this client "
                f"or some of those that revealed them ({helpers}) violate the protocol"
            )
        for place in bad:
            wrong.setdefault(around[place - 1], set()).add(client)
        if has_answered:
            found -= stream(secret, len(found), found.dtype)
            continue
        for other in answered.intersection(around):
            pair = _pair_key(secret, keys[other][:32], client, other, context)
            mask = stream(pair, len(found), found.dtype)
            found = found - mask if other < client else found + mask  # what ``other`` put in
    return found, wrong


def stream(key: bytes, count: int, dtype: np.dtype[Any]) -> Words:
    """Return uniform words of ``dtype`` (uint32 or uint64) by AES-256 in counter mode. A key must
    be used once."""
    cipher = Cipher(AES256(key), CTR(bytes(16))).encryptor()
    text = cipher.update(bytes(dtype.itemsize * count))
    return np.frombuffer(text, dtype=dtype.newbyteorder("<")).astype(dtype, copy=False)


def _pair_key(own: bytes, public: bytes, one: int, other: int, context: bytes) -> bytes:
    """Derive the key of the mask between two clients.

    It depends on both clients' numbers: different public keys can agree on the same secret (X25519
    ignores bit 255 and clears the cofactor), and with equal masks a client that announces a variant
    of another's key would cancel that client's masks.
    """
    return _agree(own, public, b"mask" + _names(*sorted((one, other))) + context)


def _commitment(seed: bytes, context: bytes) -> bytes:
    return hashlib.sha256(b"fedgen/seed" + seed + context).digest()


def _public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _agree(own: bytes, other: bytes, what: bytes) -> bytes:
    """The key that two clients have for one purpose."""
    private = X25519PrivateKey.from_private_bytes(own)
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise MaskingError("no key") from error
    return HKDF(SHA256(), 32, None, b"fedgen/" + what).derive(shared)


def _names(source: int, target: int) -> bytes:
    return source.to_bytes(8, "big") + target.to_bytes(8, "big")


def _split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shamir 1979: shares at 1 to ``count``, any ``threshold`` of which give the secret back."""
    line = [int.from_bytes(secret, "big")]
    line += [secrets.randbelow(_PRIME) for _ in range(threshold - 1)]
    found = []
    for x in range(1, count + 1):
        y = 0
        for coefficient in reversed(line):
            y = (y * x + coefficient) % _PRIME
        found.append(y.to_bytes(SHARE_BYTES, "big"))
    return found


def _secret(
    shares: Mapping[int, bytes],
    threshold: int,
    is_secret: Callable[[bytes], bool],
    colluders: int = 0,
) -> tuple[bytes | None, list[int]]:
    """Recover a secret from shares of which some may be wrong.

    Tries subsets of ``threshold`` shares in order. With one wrong share, or any number after the
    first ``threshold``, at most ``threshold`` + 1 trials are needed.

    Returns:
        The secret, or None if no tried subset reconstructs it; and the places of wrong shares. The
        list is empty if the first subset succeeds, or if it is uncertain: another polynomial of
        this degree with the same secret agrees with the true one at no more than ``threshold`` - 2
        further places. More agreeing shares than that, by more than the larger of ``colluders`` and
        the number of wrong shares, are proof as long as no more clients lie.

    Raises:
        MaskingError: if there are fewer than ``threshold`` shares.
    """
    if len(shares) < threshold:
        raise MaskingError("too few shares")
    numbers = {place: int.from_bytes(share, "big") for place, share in shares.items()}
    tried = itertools.islice(_subsets(list(shares), threshold), _MAX_SUBSETS)
    for number, places in enumerate(tried):
        value = _value_at(0, places, numbers)
        if value < 2**256 and is_secret(secret := value.to_bytes(32, "big")):
            others = shares.keys() - set(places) if number else ()
            wrong = [x for x in others if _value_at(x, places, numbers) != numbers[x]]
            agreeing = len(shares) - len(wrong)
            certain = agreeing > threshold - 2 + max(colluders, len(wrong))
            return secret, wrong if certain else []
    return None, []


def _subsets(places: list[int], size: int) -> Iterator[tuple[int, ...]]:
    """Yield all subsets of a size; the first ones each omit one place."""
    first, spare = places[:size], places[size:]
    yield tuple(first)
    if spare:
        for out in first:
            yield tuple({*first, spare[0]} - {out})
    yield from itertools.combinations(reversed(places), size)


def _value_at(x: int, places: tuple[int, ...], numbers: Mapping[int, int]) -> int:
    """Evaluate at x the polynomial that interpolates the numbers at some places."""
    order = tuple(sorted(places))
    return sum(w * numbers[p] for w, p in zip(_weights(x, order), order, strict=True)) % _PRIME


@lru_cache(maxsize=1024)
def _weights(at: int, places: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's weights for the value at a point."""
    found = []
    for x in places:
        top = bottom = 1
        for other in places:
            if other != x:
                top, bottom = top * (at - other) % _PRIME, bottom * (x - other) % _PRIME
        found.append(top * pow(bottom, -1, _PRIME) % _PRIME)
    return tuple(found)
