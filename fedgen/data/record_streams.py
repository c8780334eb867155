"""Public streams keyed by the content of a record: removing one record does not change those of
others.

Streams keyed by position would shift when an earlier record is missing, and an ε about one record
would concern all of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from fedgen.randomness import RandomStreams


def example_key(streams: RandomStreams, *names: str | int) -> bytes:
    """Return a public key."""
    bits = torch.randint(2**62, (), generator=streams.public(*names))
    return int(bits).to_bytes(8, "little")


def keyed_digest(key: bytes, content: bytes) -> bytes:
    """Return a digest of 16 bytes."""
    return hashlib.blake2b(content, key=key, digest_size=16).digest()


def example_content(image: NDArray[np.uint8], label: int) -> bytes:
    """Return the content of a record."""
    return label.to_bytes(8, "little") + image.tobytes()


def example_uniforms(
    images: NDArray[np.uint8], labels: NDArray[np.int64], streams: RandomStreams, *names: str | int
) -> NDArray[np.float64]:
    """Return a uniform number in [0, 1) per record. Equal records have different numbers, by the
    count of earlier ones: their order is irrelevant."""
    key, seen, uniforms = example_key(streams, *names), Counter[bytes](), []
    for content in _contents(images, labels):
        digest = keyed_digest(key, content)
        seen[digest] += 1
        again = keyed_digest(key, digest + seen[digest].to_bytes(8, "little"))
        uniforms.append(int.from_bytes(again[:6], "little") / 2**48)
    return np.array(uniforms)


def _contents(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> Iterable[bytes]:
    return (example_content(image, int(label)) for image, label in zip(images, labels, strict=True))
