"""Every random number of a run, derived by counter from three keys.

``public``  initialization, training batches, latents, schedules: anyone may know them.
``secret``  draws that amplify privacy: routing, cohorts, Poisson batches.
``noise``   what the mechanisms add.

A coin is named by where it falls (round, client, critic, purpose) and never taken from a running
stream, so a client that answers more or less often than another flips the same coins for the rest.
Mode ``seeded`` derives the three keys from one root seed: a run repeats bit for bit, and is an
experiment. Mode ``secure`` takes the secret and the noise key from the operating system whenever a
run begins or goes on, and a salt for each answer; they live in memory alone, but for the key of the
server's draws of clients, which the run keeps beside its checkpoints: a round that is done again
asks whom it asked.
Each place has a stream of its own, AES-256 in counter mode under a key that SHAKE-256 derives from
the kind's key and the place, the same code in both modes. That such streams cannot be told from
fair coins is what every epsilon here assumes.
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

Where = int | str
Mode = Literal["seeded", "secure"]


@dataclass(frozen=True)
class Coins:
    """The coins of one place in a run; ``at`` walks to a more specific place."""

    public_key: bytes
    secret_key: bytes
    noise_key: bytes
    mode: Mode
    place: tuple[Where, ...] = ()
    salt: str = ""

    @classmethod
    def of(cls, seed: int | np.integer[Any], mode: Mode) -> Coins:
        """All coins of a run with root ``seed``; see the module for the two modes.

        Raises:
            FedgenError: for a seed that is no whole number of 64 bits.
        """
        least, most = -(2**63), 2**63 - 1
        if not isinstance(seed, int | np.integer) or not least <= seed <= most:
            problem = f"must be a whole number from {least} to {most}, got {seed!r}"
            raise FedgenError("seed", problem, "e.g. 0")
        root = int(seed).to_bytes(16, "little", signed=True)

        def derived(purpose: bytes) -> bytes:
            return hashlib.shake_256(b"fedgen/" + purpose + b"/" + root).digest(32)

        if mode == "secure":
            return cls(derived(b"public"), secrets.token_bytes(32), secrets.token_bytes(32), mode)
        return cls(derived(b"public"), derived(b"secret"), derived(b"noise"), mode)

    def at(self, *where: Where) -> Coins:
        """The coins of a place inside this one, e.g. ``coins.at("client", 3, "round", 7)``."""
        return replace(self, place=(*self.place, *where))

    def salted(self, salt: str) -> Coins:
        """The same public coins, and other secret and noise coins for every other salt."""
        return replace(self, salt=salt)

    def of_release(self, question: str) -> Coins:
        """The coins of one answer. In mode ``seeded`` they follow from the question, by a digest of
        it. In mode ``secure`` a salt from the operating system is theirs alone: no two answers
        share noise, whatever is asked, and however often."""
        return self.salted(secrets.token_hex(16) if self.mode == "secure" else question)

    def drawing_by(self, secret_key: bytes) -> Coins:
        """The same coins but for the secret draws, which follow from a key that was kept."""
        return replace(self, secret_key=secret_key)

    def public(self, *where: Where) -> torch.Generator:
        """A generator (on the CPU) for public draws at this place."""
        seed = int.from_bytes(_stream(self.public_key, (*self.place, *where), 8), "little")
        return torch.Generator().manual_seed(seed >> 1)

    def secret(self, *where: Where) -> random.Random:
        """A source of secret draws at this place (``sample``, ``random``, ``randrange``, ...)."""
        return _StreamRandom(self.secret_key, self._hidden(where))

    def secret_bits(self, count: int, *where: Where) -> NDArray[np.uint64]:
        """Secret words of 64 fair bits each: many at once."""
        return _words(self.secret_key, self._hidden(where), count)

    def secret_uniforms(self, count: int, *where: Where) -> NDArray[np.float64]:
        """Secret uniforms in [0, 1), by 53 bits each: many at once."""
        words = self.secret_bits(count, *where) >> np.uint64(11)
        return words.astype(np.float64) * 2.0**-53

    def noise_bits(self, count: int, *where: Where) -> NDArray[np.uint64]:
        """Words of 64 fair bits each, for noise alone (``fedgen.privacy.noise``)."""
        return _words(self.noise_key, self._hidden(where), count)

    def _hidden(self, where: tuple[Where, ...]) -> tuple[Where, ...]:
        return (*self.place, *where, "salt", self.salt) if self.salt else (*self.place, *where)


_ZEROS = bytes(2**18)  # what a CPU's caches hold: memory that is asked for anew costs more than AES


def _stream(key: bytes, where: tuple[Where, ...], length: int) -> memoryview:
    """``length`` pseudo-random bytes; json keeps different places apart."""
    seed = hashlib.shake_256(key + json.dumps(where).encode()).digest(48)
    stream = Cipher(AES256(seed[:32]), CTR(seed[32:])).encryptor()
    found = np.empty(length + 15, np.uint8).data  # a block more is what the library asks for
    for start in range(0, length, len(_ZEROS)):
        stream.update_into(_ZEROS[: length - start], found[start:])
    return found[:length]


def _words(key: bytes, where: tuple[Where, ...], count: int) -> NDArray[np.uint64]:
    return np.frombuffer(_stream(key, where, 8 * count), dtype="<u8")


class _StreamRandom(random.Random):
    """``random.Random`` over a SHAKE-256 stream, as ``random.SystemRandom`` over the system's."""

    def __init__(self, key: bytes, where: tuple[Where, ...]) -> None:
        self._key, self._where, self._block, self._bits, self._left = key, where, 0, 0, 0
        super().__init__()

    def seed(self, *_: object, **__: object) -> None:
        """The key and the place are the seed."""

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
