"""Which private rows a step takes: the draw and its event, written once.

A mechanism holds its batches, draws with them and is accounted by them: a run cannot draw in one
way and count in another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from dp_accounting import DpEvent, PoissonSampledDpEvent, SampledWithoutReplacementDpEvent
from numpy.typing import NDArray

from fedgen.coins import Coins
from fedgen.privacy.events import Relation, RevealedDraw

Rows = NDArray[np.int64]
"""Positions in a shard, ascending."""


@dataclass(frozen=True)
class PoissonBatches:
    """Each row by itself with probability ``rate``: a public constant, the same for all clients (a
    batch size over a private number of rows would reveal that number)."""

    rate: float

    def draw(self, rows: int, coins: Coins) -> Rows:
        """The batch, of any size from none to all."""
        if self.rate >= 1:
            return np.arange(rows)
        # of 2^64 words at most rate 2^64: never more often than is counted
        return np.flatnonzero(coins.secret_bits(rows, "batch") < np.uint64(int(self.rate * 2**64)))

    def event(self, gated: DpEvent) -> DpEvent:
        """What a release costs that sees the batch alone."""
        return PoissonSampledDpEvent(self.rate, gated)

    def allows(self, relation: Relation) -> bool:
        """Whether data sets have neighbours under a relation."""
        del relation
        return True


@dataclass(frozen=True)
class FixedBatches:
    """``size`` of ``population`` rows without replacement; both public, so neighbours replace."""

    size: int
    population: int

    def draw(self, rows: int, coins: Coins) -> Rows:
        """The batch. Raises ValueError for a shard of another size than was promised."""
        if rows != self.population:
            raise ValueError("a fixed batch is drawn from the number of rows that it is counted by")
        order = np.argsort(coins.secret_bits(rows, "batch"), kind="stable")
        return np.sort(order[: self.size])

    def event(self, gated: DpEvent) -> DpEvent:
        """See ``PoissonBatches.event``."""
        return SampledWithoutReplacementDpEvent(self.population, self.size, gated)

    def allows(self, relation: Relation) -> bool:
        """Adding or removing a row would change the public number of rows."""
        return relation is Relation.REPLACE_ONE


@dataclass(frozen=True)
class AllRows:
    """Every row, each time: nothing is drawn."""

    def draw(self, rows: int, coins: Coins) -> Rows:
        """All of them."""
        del coins
        return np.arange(rows)

    def event(self, gated: DpEvent) -> DpEvent:
        """No draw, no amplification."""
        return gated

    def allows(self, relation: Relation) -> bool:
        """See ``PoissonBatches.allows``."""
        del relation
        return True


@dataclass(frozen=True)
class OwnDraw:
    """A client's own secret coin: whether it contributes to a round. One that does not sends noise
    alone, so that nobody sees the draw.

    rate: of contributing; 1: always. hidden: whether nothing else shows the draw. A client that
    does not answer may be one that was drawn: its neighbours at the table would know.
    """

    rate: float = 1.0
    hidden: bool = True

    def drawn(self, coins: Coins) -> bool:
        """The coin, of a client and a question."""
        return len(PoissonBatches(self.rate).draw(1, coins.at("contributes"))) > 0

    def event(self, gated: DpEvent) -> DpEvent:
        """What a release costs that the coin gates."""
        if self.rate >= 1:
            return gated
        if self.hidden:
            return PoissonSampledDpEvent(self.rate, gated)
        return RevealedDraw(self.rate, gated)


ALWAYS = OwnDraw()

Batches = PoissonBatches | FixedBatches | AllRows
