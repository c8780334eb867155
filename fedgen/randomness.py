"""Random streams of a run, each derived from one of three keys and a domain.

``public``  initial weights, training batches, latents and schedules; known to everyone.
``secret``  subsampling that amplifies privacy: routing, cohorts, Poisson batches.
``noise``   noise of the mechanisms.

A domain names the purpose of a stream, such as ("client", 3, "round", 7). Streams of different
domains are independent, so a client that responds more or less often does not change the streams of
others.

Mode ``seeded`` derives the three keys from a root seed: the run is reproducible and counts as an
experiment. Mode ``secure`` obtains keys from the operating system. Each response has its own noise
key, which exists in memory only. Secret keys are stored before their first use, so that a resumed
run has the same samples. One key, stored with the checkpoints, samples cohorts: a repeated round
samples the same cohort. Each client has another in its folder: see ``at_release``.

Each stream is AES-256 in counter mode; SHAKE-256 derives the AES key from the key and the domain.
Both modes share this code. Every ε assumes that these streams are indistinguishable from random
bits.
"""

from __future__ import annotations

import hashlib
import json
import random
import secrets
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from fedgen.errors import FedgenError

DomainPart = int | str
Mode = Literal["seeded", "secure"]


@dataclass(frozen=True)
class RandomStreams:
    """The random streams of one domain; ``at`` returns the streams of a subdomain. The domain of
    secret streams may lack rounds (``at_round``)."""

    public_key: bytes
    secret_key: bytes
    noise_key: bytes
    mode: Mode
    domain: tuple[DomainPart, ...] = ()
    salt: str = ""
    secret_domain: tuple[DomainPart, ...] = ()

    @classmethod
    def from_seed(cls, seed: int | np.integer[Any], mode: Mode) -> RandomStreams:
        """Return the streams of a run with root ``seed``; the module describes the modes.

        Raises:
            FedgenError: if ``seed`` is not a 64-bit integer.
        """
        low, high = -(2**63), 2**63 - 1
        if not isinstance(seed, int | np.integer) or not low <= seed <= high:
            problem = f"must be a whole number from {low} to {high}, got {seed!r}"
            raise FedgenError("seed", problem, "e.g. 0")
        root = int(seed).to_bytes(16, "little", signed=True)

        def derived(purpose: bytes) -> bytes:
            return hashlib.shake_256(b"fedgen/" + purpose + b"/" + root).digest(32)

        if mode == "secure":
            return cls(derived(b"public"), secrets.token_bytes(32), secrets.token_bytes(32), mode)
        return cls(derived(b"public"), derived(b"secret"), derived(b"noise"), mode)

    def at(self, *domain: DomainPart) -> RandomStreams:
        """Return the streams of a subdomain, e.g. ``streams.at("client", 3, "round", 7)``."""
        secret_domain = (*self.secret_domain, *domain)
        return replace(self, domain=(*self.domain, *domain), secret_domain=secret_domain)

    def at_round(self, name: str, server_round: int) -> RandomStreams:
        """Return the streams of a client's response in a round. In mode ``secure``, its secret
        samples do not depend on the round: after a death, a run repeats earlier rounds, and the
        next response has the samples of the one that died (``at_release``)."""
        at_name = self.at(name, server_round)
        if self.mode == "seeded":
            return at_name
        return replace(at_name, secret_domain=(*self.secret_domain, name))

    def salted(self, salt: str) -> RandomStreams:
        """Return the same public streams with secret and noise streams specific to ``salt``."""
        return replace(self, salt=salt)

    def at_release(self, charged: int) -> RandomStreams:
        """Return the streams of a client after ``charged`` responses. In mode ``secure``, secret
        samples depend on this number: every charged response has its own, and a response that died
        before its charge is computed again with the same."""
        if self.mode == "seeded":
            return self
        key = hashlib.shake_256(self.secret_key + charged.to_bytes(8, "little")).digest(32)
        return self.with_secret_key(key)

    def for_release(self, query: str) -> RandomStreams:
        """Return the streams of one response. In mode ``seeded`` they are derived from the digest
        of the query. In mode ``secure`` the noise has a fresh key from the operating system, so
        that no two responses share noise."""
        if self.mode == "secure":
            return replace(self, noise_key=secrets.token_bytes(32))
        return self.salted(query)

    def with_secret_key(self, secret_key: bytes) -> RandomStreams:
        """Return the same streams with secret streams derived from a stored key."""
        return replace(self, secret_key=secret_key)

    def for_repetition(self, index: int) -> RandomStreams:
        """Return the streams of one repetition of a run: the same public streams, and independent
        secret and noise streams."""
        part = b"repetition" + index.to_bytes(8, "little")
        secret, noise = (
            hashlib.shake_256(key + part).digest(32) for key in (self.secret_key, self.noise_key)
        )
        return replace(self, secret_key=secret, noise_key=noise)

    def public(self, *domain: DomainPart) -> torch.Generator:
        """Return a CPU generator for public randomness in a subdomain."""
        seed = int.from_bytes(_stream(self.public_key, (*self.domain, *domain), 8), "little")
        return torch.Generator().manual_seed(seed >> 1)

    def secret(self, *domain: DomainPart) -> random.Random:
        """Return a ``random.Random`` for secret sampling in a subdomain."""
        return _StreamRandom(self.secret_key, self._salted(self.secret_domain, domain))

    def secret_bits(self, count: int, *domain: DomainPart) -> NDArray[np.uint64]:
        """Return ``count`` secret words of 64 random bits."""
        return _words(self.secret_key, self._salted(self.secret_domain, domain), count)

    def secret_uniforms(self, count: int, *domain: DomainPart) -> NDArray[np.float64]:
        """Return ``count`` secret uniforms in [0, 1) with 53 random bits each."""
        words = self.secret_bits(count, *domain) >> np.uint64(11)
        return words.astype(np.float64) * 2.0**-53

    def noise_bits(self, count: int, *domain: DomainPart) -> NDArray[np.uint64]:
        """Return ``count`` words of 64 random bits for noise
        (``fedgen.privacy.gaussian_noise``)."""
        return _words(self.noise_key, self._salted(self.domain, domain), count)

    def _salted(
        self, domain: tuple[DomainPart, ...], within: tuple[DomainPart, ...]
    ) -> tuple[DomainPart, ...]:
        return (*domain, *within, "salt", self.salt) if self.salt else (*domain, *within)


_ZEROS = bytes(2**18)  # fits the CPU cache: allocating memory costs more than AES


def _stream(key: bytes, domain: tuple[DomainPart, ...], length: int) -> memoryview:
    """Return ``length`` pseudo-random bytes; JSON encodes different domains differently."""
    seed = hashlib.shake_256(key + json.dumps(domain).encode()).digest(48)
    stream = Cipher(AES256(seed[:32]), CTR(seed[32:])).encryptor()
    output = np.empty(length + 15, np.uint8).data  # the library requires room for another block
    for start in range(0, length, len(_ZEROS)):
        stream.update_into(_ZEROS[: length - start], output[start:])
    return output[:length]


def _words(key: bytes, domain: tuple[DomainPart, ...], count: int) -> NDArray[np.uint64]:
    return np.frombuffer(_stream(key, domain, 8 * count), dtype="<u8")


class _StreamRandom(random.Random):
    """``random.Random`` over one of our streams."""

    def __init__(self, key: bytes, domain: tuple[DomainPart, ...]) -> None:
        self._key, self._where, self._block, self._bits, self._left = key, domain, 0, 0, 0
        super().__init__()

    def seed(self, *_: object, **__: object) -> None:
        """Do nothing: the key and the domain are the seed."""

    def getrandbits(self, k: int, /) -> int:
        while self._left < k:
            block = _stream(self._key, (*self._where, "block", self._block), 64)
            self._bits |= int.from_bytes(block, "little") << self._left
            self._left += 512
            self._block += 1
        value = self._bits & ((1 << k) - 1)
        self._bits >>= k
        self._left -= k
        return value

    def random(self) -> float:
        return float(self.getrandbits(53) * 2.0**-53)
