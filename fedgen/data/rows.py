"""Public coins of rows, keyed by what a row is: without one row all others have the same ones.

Coins keyed by a row's place would be others' as soon as a row before it is missing, and an ε about
one row more or less would be about all of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from fedgen.coins import Coins


def key_of(coins: Coins, *names: str | int) -> bytes:
    """A public key."""
    bits = torch.randint(2**62, (), generator=coins.public(*names))
    return int(bits).to_bytes(8, "little")


def keyed(key: bytes, content: bytes) -> bytes:
    """A digest of 16 bytes."""
    return hashlib.blake2b(content, key=key, digest_size=16).digest()


def content_of(image: NDArray[np.uint8], label: int) -> bytes:
    """All that a row is."""
    return label.to_bytes(8, "little") + image.tobytes()


def row_coins(
    images: NDArray[np.uint8], labels: NDArray[np.int64], coins: Coins, *names: str | int
) -> NDArray[np.float64]:
    """A coin in [0, 1) for each row. Rows that are equal have different ones, by how many came
    before: which of them is which makes no difference."""
    key, seen, found = key_of(coins, *names), Counter[bytes](), []
    for content in _contents(images, labels):
        told = keyed(key, content)
        seen[told] += 1
        again = keyed(key, told + seen[told].to_bytes(8, "little"))
        found.append(int.from_bytes(again[:6], "little") / 2**48)
    return np.array(found)


def _contents(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> Iterable[bytes]:
    return (content_of(image, int(label)) for image, label in zip(images, labels, strict=True))
