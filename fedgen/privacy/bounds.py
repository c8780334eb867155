"""What an answerer may say about a row: a set that every answer is made to lie in.

| bound | the set, of a row | diameter (a record) | radius (a client) | of |
|---|---|---|---|---|
| ``Ball(C)`` | vectors of L2 norm C at most | 2C | C | GS-WGAN |
| ``Signs(k)`` | k entries of +1 or -1, else 0 | 2 sqrt(k) | sqrt(k) | DataLens |
| ``OneHot(d)`` | d blocks with one 1 each, or none | sqrt(2d) | sqrt(d) | G-PATE |
| ``Bit()`` | 0 or 1 | 1 | 1 | PATE-GAN |

An answer may be any function of the data behind it: without a record it may be any other of the
set, hence the diameter. A client that is removed as a whole says nothing, zero: the radius.
``enforce`` re-makes what it is given: whatever a method hands over, what leaves is in the set. What
is not finite is no answer, zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedgen.privacy.per_example import clip_rows


class Bound(Protocol):
    """A set of vectors, zero among them.

    diameter, radius: the largest L2 distance of two of them, and from zero. peak: their largest
    entry.
    """

    @property
    def diameter(self) -> float: ...

    @property
    def radius(self) -> float: ...

    @property
    def peak(self) -> float: ...

    def enforce(self, rows: Tensor) -> Tensor:
        """Raw answers (n, ...) as members of the set, of the same shape."""


@dataclass(frozen=True)
class Ball:
    """Vectors of L2 norm ``clip`` at most; infinity bounds nothing, and leaves raw answers raw."""

    clip: float

    @property
    def diameter(self) -> float:
        """2C."""
        return 2 * self.clip

    @property
    def radius(self) -> float:
        """C."""
        return self.clip

    peak = radius

    def enforce(self, rows: Tensor) -> Tensor:
        """Longer rows are scaled to length C."""
        return rows if math.isinf(self.clip) else clip_rows(rows, self.clip)


@dataclass(frozen=True)
class Signs:
    """The signs of the ``largest`` entries, zero in place of all others (DataLens)."""

    largest: int

    @property
    def diameter(self) -> float:
        """Of a vote and its opposite."""
        return 2 * math.sqrt(self.largest)

    @property
    def radius(self) -> float:
        """Of a vote and none."""
        return math.sqrt(self.largest)

    peak = 1.0

    def enforce(self, rows: Tensor) -> Tensor:
        """Of a row with fewer entries than ``largest``, all signs."""
        flat = _finite(rows).flatten(1)
        places = flat.abs().topk(min(self.largest, flat.shape[1]), 1).indices
        kept = torch.zeros_like(flat).scatter_(1, places, flat.gather(1, places).sign())
        return kept.view_as(rows)


@dataclass(frozen=True)
class OneHot:
    """A vote for one of the bins (the last dimension) in each of ``blocks`` blocks (the dimension
    before it)."""

    blocks: int

    @property
    def diameter(self) -> float:
        """Of votes that agree in no block."""
        return math.sqrt(2 * self.blocks)

    @property
    def radius(self) -> float:
        """Of a vote and none."""
        return math.sqrt(self.blocks)

    peak = 1.0

    def enforce(self, rows: Tensor) -> Tensor:
        """The largest bin of each block (the first of several); none where all are alike.

        Raises:
            ValueError: for another number of blocks.
        """
        if rows.dim() != 3 or rows.shape[1] != self.blocks:
            raise ValueError(f"votes have {self.blocks} blocks, got {tuple(rows.shape)}")
        rows = _finite(rows)
        votes = torch.zeros_like(rows).scatter_(2, rows.argmax(2, keepdim=True), 1.0)
        return votes * (rows.amax(2, keepdim=True) > rows.amin(2, keepdim=True))


@dataclass(frozen=True)
class Bit:
    """Yes or no: one number of a row. (The number of those who said no is not released.)"""

    diameter = radius = peak = 1.0

    def enforce(self, rows: Tensor) -> Tensor:
        """1 where it is above zero.

        Raises:
            ValueError: for rows of more than one number.
        """
        if rows[:1].numel() > 1:
            raise ValueError(f"a bit is one number, got rows of {tuple(rows.shape[1:])}")
        return (_finite(rows) > 0).to(rows)


def _finite(rows: Tensor) -> Tensor:
    """A row with anything that is not finite becomes zero, as a whole."""
    good = rows.isfinite().flatten(1).all(1)
    return torch.where(good.view(-1, *[1] * (rows.dim() - 1)), rows, 0.0)
