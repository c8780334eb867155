"""Shares of a secret (Shamir 1979), some of which may be wrong."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

PRIME = 2**256 + 297


SHARE_BYTES = 33
"""Size of a share of a secret."""


_MAX_SUBSETS = 2000  # subsets of shares tried to recover a secret


def split_secret(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Split a secret into shares at 1 to ``count``, of which any ``threshold`` recover it (Shamir
    1979)."""
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    shares = []
    for x in range(1, count + 1):
        y = 0
        for coefficient in reversed(coefficients):
            y = (y * x + coefficient) % PRIME
        shares.append(y.to_bytes(SHARE_BYTES, "big"))
    return shares


def recover_secret(
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
        ValueError: if there are fewer than ``threshold`` shares.
    """
    if len(shares) < threshold:
        raise ValueError("too few shares")
    numbers = {position: int.from_bytes(share, "big") for position, share in shares.items()}
    subsets = itertools.islice(_subsets(list(shares), threshold), _MAX_SUBSETS)
    for index, positions in enumerate(subsets):
        value = _interpolate(0, positions, numbers)
        if value < 2**256 and is_secret(secret := value.to_bytes(32, "big")):
            others = shares.keys() - set(positions) if index else ()
            wrong = [
                position_
                for position_ in others
                if _interpolate(position_, positions, numbers) != numbers[position_]
            ]
            agreeing = len(shares) - len(wrong)
            certain = agreeing > threshold - 2 + max(colluders, len(wrong))
            return secret, wrong if certain else []
    return None, []


def _subsets(positions: list[int], size: int) -> Iterator[tuple[int, ...]]:
    """Yield all subsets of a size; the first ones each omit one position."""
    first, spare = positions[:size], positions[size:]
    yield tuple(first)
    if spare:
        for omitted in first:
            yield tuple({*first, spare[0]} - {omitted})
    yield from itertools.combinations(reversed(positions), size)


def _interpolate(x: int, positions: tuple[int, ...], numbers: Mapping[int, int]) -> int:
    """Evaluate at x the polynomial that interpolates the numbers at some positions."""
    order = tuple(sorted(positions))
    return (
        sum(
            weight * numbers[position]
            for weight, position in zip(_weights(x, order), order, strict=True)
        )
        % PRIME
    )


@lru_cache(maxsize=1024)
def _weights(point: int, positions: tuple[int, ...]) -> tuple[int, ...]:
    """Return Lagrange weights for the value at a point."""
    weights = []
    for x in positions:
        top = bottom = 1
        for other in positions:
            if other != x:
                top, bottom = top * (point - other) % PRIME, bottom * (x - other) % PRIME
        weights.append(top * pow(bottom, -1, PRIME) % PRIME)
    return tuple(weights)
