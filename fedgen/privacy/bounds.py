"""Bounds on the response of a member to a query sample: sets that contain every bounded response.

| bound | set of rows | diameter (a record) | radius (a client) | used by |
|---|---|---|---|---|
| ``Ball(C)`` | vectors of L2 norm at most C | 2C | C | GS-WGAN |
| ``Signs(k)`` | k entries of +1 or -1, others 0 | 2 sqrt(k) | sqrt(k) | DataLens |
| ``OneHot(d)`` | d blocks with at most one 1 each | sqrt(2d) | sqrt(d) | G-PATE |
| ``Bit()`` | 0 or 1 | 1 | 1 | PATE-GAN |

A response may be any function of the data: without a record it may be any other element of the set,
hence the diameter. A client that is removed as a whole contributes zero: the radius.
``enforce`` maps any tensor into the set; rows that are not finite become zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedgen.privacy.clipping import clip_rows


class Bound(Protocol):
    """A set of vectors that contains zero.

    diameter: largest L2 distance between two of them.
    radius: largest L2 norm.
    max_entry: largest entry.
    """

    @property
    def diameter(self) -> float: ...

    @property
    def radius(self) -> float: ...

    @property
    def max_entry(self) -> float: ...

    def enforce(self, rows: Tensor) -> Tensor:
        """Map raw responses (n, ...) into the set; the shape is unchanged."""


@dataclass(frozen=True)
class Ball:
    """Vectors of L2 norm at most ``clip``; infinity: no bound, and rows are returned unchanged."""

    clip: float

    @property
    def diameter(self) -> float:
        """2C."""
        return 2 * self.clip

    @property
    def radius(self) -> float:
        """C."""
        return self.clip

    max_entry = radius

    def enforce(self, rows: Tensor) -> Tensor:
        """Scale longer rows to norm C."""
        return rows if math.isinf(self.clip) else clip_rows(rows, self.clip)


@dataclass(frozen=True)
class Signs:
    """The signs of the ``kept`` entries of largest magnitude, and zero for all others
    (DataLens)."""

    kept: int

    @property
    def diameter(self) -> float:
        """Distance between a vote and its opposite."""
        return 2 * math.sqrt(self.kept)

    @property
    def radius(self) -> float:
        """Distance between a vote and no vote."""
        return math.sqrt(self.kept)

    max_entry = 1.0

    def enforce(self, rows: Tensor) -> Tensor:
        """Keep the signs of the largest entries; of all entries if a row has fewer than
        ``kept``."""
        flat = _zero_if_not_finite(rows).flatten(1)
        indices = flat.abs().topk(min(self.kept, flat.shape[1]), 1).indices
        kept = torch.zeros_like(flat).scatter_(1, indices, flat.gather(1, indices).sign())
        return kept.view_as(rows)


@dataclass(frozen=True)
class OneHot:
    """A vote for one of the bins (last dimension) in each of ``blocks`` blocks (dimension before
    it)."""

    blocks: int

    @property
    def diameter(self) -> float:
        """Distance between votes that differ in every block."""
        return math.sqrt(2 * self.blocks)

    @property
    def radius(self) -> float:
        """Distance between a vote and no vote."""
        return math.sqrt(self.blocks)

    max_entry = 1.0

    def enforce(self, rows: Tensor) -> Tensor:
        """Vote for the largest bin of each block (the first of equal ones); no vote if all bins are
        equal.

        Raises:
            ValueError: for a different number of blocks.
        """
        if rows.dim() != 3 or rows.shape[1] != self.blocks:
            raise ValueError(f"votes have {self.blocks} blocks, got {tuple(rows.shape)}")
        rows = _zero_if_not_finite(rows)
        votes = torch.zeros_like(rows).scatter_(2, rows.argmax(2, keepdim=True), 1.0)
        return votes * (rows.amax(2, keepdim=True) > rows.amin(2, keepdim=True))


@dataclass(frozen=True)
class Bit:
    """Yes or no: one number per row. (The number of rows that voted no is not released.)"""

    diameter = radius = max_entry = 1.0

    def enforce(self, rows: Tensor) -> Tensor:
        """Return 1 for positive rows and 0 otherwise.

        Raises:
            ValueError: for rows of more than one number.
        """
        if rows[:1].numel() > 1:
            raise ValueError(f"a bit is one number, got shape {tuple(rows.shape[1:])}")
        return (_zero_if_not_finite(rows) > 0).to(rows)


def _zero_if_not_finite(rows: Tensor) -> Tensor:
    """Set a row to zero if any entry is not finite."""
    finite = rows.isfinite().flatten(1).all(1)
    return torch.where(finite.view(-1, *[1] * (rows.dim() - 1)), rows, 0.0)
