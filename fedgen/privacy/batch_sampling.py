"""Sampling of private batches: each sampler has its privacy event.

A mechanism samples with the same object that accounts for it, so that a run cannot sample in one
way and account in another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from dp_accounting import DpEvent, PoissonSampledDpEvent, SampledWithoutReplacementDpEvent
from numpy.typing import NDArray

from fedgen.privacy.events import Relation, RevealedSampling
from fedgen.randomness import RandomStreams

Indices = NDArray[np.int64]
"""Indices into a shard, ascending."""


class Records(Protocol):
    """Records of a client.

    by_person: indices of records sorted by person (n,), and the offset of each person in them,
        ending with n (persons + 1,); None if the persons are unknown.
    """

    def __len__(self) -> int: ...

    @property
    def by_person(self) -> tuple[Indices, Indices] | None: ...


@dataclass(frozen=True)
class PoissonSampling:
    """Sample each record independently with probability ``rate``, a public constant shared by all
    clients (a batch size over a private number of records would reveal that number).

    Raises:
        ValueError: for a rate outside (0, 1].
    """

    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"sampling rate {self.rate:g} is not in (0, 1]")

    def sample(self, records: int, streams: RandomStreams) -> Indices:
        """Return the batch, of any size from none to all."""
        if self.rate >= 1:
            return np.arange(records)
        # at most rate 2^64 of 2^64 words: never more often than accounted
        return np.flatnonzero(
            streams.secret_bits(records, "batch") < np.uint64(int(self.rate * 2**64))
        )

    def event(self, gated: DpEvent) -> DpEvent:
        """Return the event of a release that depends on the batch only."""
        return PoissonSampledDpEvent(self.rate, gated)

    def allows(self, relation: Relation) -> bool:
        """Return whether data sets have neighbours under a relation."""
        del relation
        return True


@dataclass(frozen=True)
class FixedSizeSampling:
    """Sample ``size`` of ``population`` records without replacement. Both numbers are public, so
    neighbours replace a record."""

    size: int
    population: int

    def sample(self, records: int, streams: RandomStreams) -> Indices:
        """Return the batch. Raises ValueError if the shard does not have ``population`` records."""
        if records != self.population:
            raise ValueError("the shard must have as many records as the accounting assumes")
        order = np.argsort(streams.secret_bits(records, "batch"), kind="stable")
        return np.sort(order[: self.size])

    def event(self, gated: DpEvent) -> DpEvent:
        """See ``PoissonSampling.event``."""
        return SampledWithoutReplacementDpEvent(self.population, self.size, gated)

    def allows(self, relation: Relation) -> bool:
        """Allow replacement only: adding a record would change the public number of records."""
        return relation is Relation.REPLACE_ONE


@dataclass(frozen=True)
class FullBatch:
    """Use every record each time, without sampling."""

    def sample(self, records: int, streams: RandomStreams) -> Indices:
        """Return all records."""
        del streams
        return np.arange(records)

    def event(self, gated: DpEvent) -> DpEvent:
        """Return the event without amplification."""
        return gated

    def allows(self, relation: Relation) -> bool:
        """See ``PoissonSampling.allows``."""
        del relation
        return True


@dataclass(frozen=True)
class Participation:
    """Secret decision of a client, independent of all others, whether to contribute to a round. A
    client that does not contribute sends noise only, so that the decision stays hidden.

    rate: probability of contributing; 1: always.
    hidden: whether nothing else reveals the decision. A missing response may reveal it: the client
        may be one that was sampled, and other participants would learn this.
    """

    rate: float = 1.0
    hidden: bool = True

    def is_sampled(self, streams: RandomStreams) -> bool:
        """Sample the decision for a client and a query."""
        return len(PoissonSampling(self.rate).sample(1, streams.at("contributes"))) > 0

    def event(self, gated: DpEvent) -> DpEvent:
        """Return the event of a release that depends on the decision."""
        if self.rate >= 1:
            return gated
        if self.hidden:
            return PoissonSampledDpEvent(self.rate, gated)
        return RevealedSampling(self.rate, gated)


ALWAYS = Participation()

BatchSampling = PoissonSampling | FixedSizeSampling | FullBatch
