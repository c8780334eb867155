"""Mechanisms: bound the contribution of a client and state the sensitivity of the sum of
contributions.

| mechanism | bounds | sensitivity, add or remove one / replace one | used by |
|---|---|---|---|
| ``RowGaussian`` | each row separately | its ``bounds.py`` diameter / the same | GS-WGAN, votes |
| ``JointGaussian`` | a whole matrix | 2C / 2C | DP-Sinkhorn |
| ``SumGaussian`` | each record of a sum, or person | C / 2C | DP-SGD (``descent``); DP-MERF |
| ``ClientGaussian`` | the vector of a client | C / 2C | FedAvg-GAN; DP-MERF at client level |
| ``ClientMean`` | the mean of a client over a batch | C / 2C | DP-SGD at client level |

A gradient row or matrix is an arbitrary function of its data: without a record it may become any
other vector in the ball, hence 2C under both relations. In a sum, a removed example counts as zero,
as does a client that is removed as a whole (``RowGaussian`` with unit client under add-or-remove:
the radius in place of the diameter). A noise multiplier is the standard deviation over the
sensitivity under the relation of the mechanism. A contribution with a value that is not finite
becomes zero before anything is bounded, and the message does not show it. The ``aggregation`` of
the mechanism (``aggregation.py``) decides who adds the noise and which message a client sends. The
contribution of a client to a sum over clients has the sensitivity of the sum, because a neighbour
changes one client.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from dp_accounting import DpEvent, GaussianDpEvent, NonPrivateDpEvent
from numpy.typing import NDArray
from torch import Tensor

from fedgen.errors import FedgenError
from fedgen.privacy.aggregation import LOCAL, SEAL, Aggregation, Release, Sent, noised
from fedgen.privacy.batch_sampling import (
    ALWAYS,
    BatchSampling,
    FullBatch,
    Indices,
    Participation,
    Records,
)
from fedgen.privacy.bounds import Bound
from fedgen.privacy.clipping import ClippedSum, clip_rows, clipped_mean
from fedgen.privacy.events import Relation, Unit, repeat
from fedgen.privacy.routing import Routing
from fedgen.randomness import RandomStreams

Responses = Sequence[NDArray[Any]]


class Mechanism(ABC):
    """Base class of all mechanisms. With a noise multiplier of 0, a mechanism is the non-private
    reference: it releases its input without noise, usually at an infinite clip norm, and its event
    has no bound."""

    aggregation: Aggregation
    noise_multiplier: float
    relation: Relation
    unit: Unit

    @abstractmethod
    def sensitivity(self, relation: Relation) -> float:
        """Return the L2 sensitivity of a release under a relation."""

    @property
    def is_private(self) -> bool:
        """Whether noise is added."""
        return self.noise_multiplier > 0

    @property
    @abstractmethod
    def value_range(self) -> tuple[float, float]:
        """Standard deviation of the noise of a sum, and maximum entry of a contribution."""

    def max_norm(self, size: int) -> float:
        """Return the L2 norm that no row (``size`` entries) of an honest response exceeds; infinity
        if unknown."""
        del size
        return math.inf

    @property
    def std(self) -> float:
        """Standard deviation of the noise in each entry."""
        return self.noise_multiplier * self.sensitivity(self.relation) if self.is_private else 0.0

    def _sent(self, exact: Tensor, event: DpEvent, streams: RandomStreams) -> Sent:
        """Return the message for a contribution (rows first)."""
        if self.is_private:
            return self.aggregation.sent(exact, self.std, event, self.unit, streams)
        return Release({"answer": exact.to("cpu", torch.float32).numpy()}, event, self.unit, SEAL)

    def _noised(self, exact: Tensor, streams: RandomStreams) -> Tensor:
        """Return a sum with the full noise, in single precision, on its device."""
        return noised(exact, self.std, streams) if self.is_private else exact.float()


def aggregator(mechanism: Mechanism) -> Callable[[Responses, int, RandomStreams], Tensor]:
    """Return (responses, round, streams) -> sum of the responses, in double precision."""
    return lambda answers, round_, streams: mechanism.aggregation.total(
        answers, mechanism.std, streams
    )


_TAIL_NATS = 200.0
_MAX_PARTS = 10_000


@dataclass(frozen=True)
class RowGaussian(Mechanism):
    """Bounded rows, averaged over the critics or clients that respond, plus Gaussian noise: the
    sanitizer of GS-WGAN (paper, equations 8 to 11) for any routing, and noisy counts of votes.

    Row r of the response is (1 / m) * sum of bound(row) over m responders + N(0, (sigma * S)^2 I)
    with S = diameter / m. The contribution of a responder is an arbitrary function of its data
    within the bound, so replacing, adding or removing its data moves the mean by at most S. A
    client that is removed as a whole contributes nothing: S = radius / m. N rows, queried
    adaptively, are exactly one Gaussian of noise multiplier sigma / sqrt(N). Functions of the noisy
    mean (a threshold, the most frequent bin) are post-processing.

    bound: set that contains every bounded row.
    routing: routing within the client; for one critic ``Routing("mean", 1)``.
    hidden: whether the routing is secret and leaves no trace in any state (see ``Routing.event``).
    participation: secret decision of the client whether to contribute to a round. The contribution
        is divided by its probability, so that the mean over all clients is unbiased.
    """

    bound: Bound
    noise_multiplier: float
    routing: Routing
    hidden: bool
    unit: Unit
    relation: Relation = Relation.REPLACE_ONE
    participation: Participation = ALWAYS
    aggregation: Aggregation = LOCAL

    def sensitivity(self, relation: Relation) -> float:
        """Return the L2 sensitivity of one row of the response."""
        removes_client = self.unit is Unit.CLIENT and relation is Relation.ADD_OR_REMOVE_ONE
        distance = self.bound.radius if removes_client else self.bound.diameter
        return distance / self.routing.responses_per_sample / self.participation.rate

    @property
    def value_range(self) -> tuple[float, float]:
        """Standard deviation of the noise, and maximum entry of a contribution."""
        return self.std, self.bound.max_entry / self.participation.rate

    def max_norm(self, size: int) -> float:
        """Return the maximum norm of a row of ``size`` entries (see ``_max_noisy_norm``)."""
        return _max_noisy_norm(self.bound.radius / self.participation.rate, self.std, size)

    def event(self, rows: int) -> DpEvent:
        """Return the event of a release of ``rows`` rows; one participation decision covers all of
        them."""
        if not self.is_private:
            return NonPrivateDpEvent()
        if self.participation.rate < 1:
            return self.participation.event(
                GaussianDpEvent(self.noise_multiplier / math.sqrt(rows))
            )
        return self.routing.event(rows, self.noise_multiplier, self.hidden)

    def release(
        self,
        shape: tuple[int, ...],
        responses: Iterable[tuple[Tensor, Tensor]],
        streams: RandomStreams,
        contributes: bool = True,
    ) -> Sent:
        """Sanitize raw responses to ``shape[0]`` query samples.

        Args:
            shape: shape of the release, query samples first.
            responses: pairs of query sample indices (n,) and raw rows (n, *shape[1:]), unbounded;
                not evaluated if the client does not participate.
            streams: streams of this client and round, which also provide the noise.
            contributes: whether the client has any contribution.

        Raises:
            ValueError: if a query sample has a different number of responses than the sensitivity
                assumes.
        """
        summed = torch.zeros(shape, dtype=torch.float64)
        if self.participation.is_sampled(streams) and contributes:
            summed, counts = _bounded_sum(shape, responses, self.bound)
            if not torch.equal(counts, torch.full_like(counts, self.routing.responses_per_sample)):
                raise ValueError(
                    "each query sample needs as many responses as its sensitivity assumes"
                )
        exact = summed / self.routing.responses_per_sample / self.participation.rate
        return self._sent(exact, self.event(shape[0]), streams)


@dataclass(frozen=True)
class JointGaussian(Mechanism):
    """A gradient matrix from one batch, clipped as a whole (Frobenius norm), plus Gaussian noise:
    the released code of DP-Sinkhorn. The paper clips each row instead, although all rows share one
    batch, and accounts for each row as if it had its own batch."""

    clip: float
    noise_multiplier: float
    sampling: BatchSampling
    relation: Relation
    unit: Unit
    aggregation: Aggregation = LOCAL

    def __post_init__(self) -> None:
        _check_relation(self.sampling, self.relation)

    def sensitivity(self, relation: Relation) -> float:
        """Return the L2 sensitivity of the matrix, the same under both relations."""
        del relation
        return 2 * self.clip

    @property
    def value_range(self) -> tuple[float, float]:
        """Standard deviation of the noise, and maximum entry of a contribution."""
        return self.std, self.clip

    def max_norm(self, size: int) -> float:
        """Return the maximum norm of a row of ``size`` entries (see ``_max_noisy_norm``)."""
        return _max_noisy_norm(self.clip, self.std, size)

    def event(self) -> DpEvent:
        """Return the event of one release."""
        if not self.is_private:
            return NonPrivateDpEvent()
        return self.sampling.event(GaussianDpEvent(self.noise_multiplier))

    def sample_batch(self, records: int, streams: RandomStreams) -> Indices:
        """Sample the batch of the next release."""
        return self.sampling.sample(records, streams)

    def release(self, matrix: Tensor, streams: RandomStreams) -> Sent:
        """Sanitize a raw matrix (any shape) computed from the sampled batch."""
        clipped = clip_rows(matrix.detach().to("cpu", torch.float32)[None], self.clip)[0]
        return self._sent(clipped, self.event(), streams)


@dataclass(frozen=True)
class SumGaussian(Mechanism):
    """Sum over the records of a batch, each contribution clipped, plus Gaussian noise, divided by a
    public number: DP-SGD (Abadi et al. 2016, algorithm 1), and over all records, once, the mean
    embedding of DP-MERF.

    The sum of an empty batch is released and charged like any other, so that an empty batch does
    not show. The batch is summed in parts (``batch_parts``): unless the unit is a person, adding a
    record leaves the arithmetic of all other parts unchanged, to the last bit, and the parts are
    added in double precision.

    If the unit is a person, a person contributes as much as one record, regardless of their number
    of records. Without sampling they contribute the mean of their clipped contributions, clipped to
    ``person_clip`` times C (``sums``). A sampled batch consists of persons, who contribute one
    record each, chosen at random (``batch_parts``).

    divisor: expected batch size or public number of records (of persons, if they are the unit),
        never a realized size.
    max_entry: maximum entry of a record's contribution, over C.
    person_clip: norm that the mean of a person is clipped to, over C; 1, which no mean exceeds,
        unless the unit is a person and there is no sampling.
    """

    clip: float
    noise_multiplier: float
    sampling: BatchSampling
    divisor: float
    relation: Relation
    unit: Unit
    aggregation: Aggregation = LOCAL
    max_entry: float = 1.0
    person_clip: float = 1.0

    def __post_init__(self) -> None:
        _check_relation(self.sampling, self.relation)
        if self.person_clip != 1 and not (self._averages_persons and 0 < self.person_clip <= 1):
            raise ValueError(f"person_clip={self.person_clip:g} applies to means of persons")

    def sensitivity(self, relation: Relation) -> float:
        """Return the L2 sensitivity of the released sum to one record or person."""
        return _clip_norms_moved(relation) * self._contribution_clip / self.divisor

    @property
    def _averages_persons(self) -> bool:
        """Whether a person contributes the mean over their records."""
        return self.unit is Unit.PERSON and isinstance(self.sampling, FullBatch)

    @property
    def _contribution_clip(self) -> float:
        """Maximum norm of the contribution of a record or person."""
        return self.clip * self.person_clip

    @property
    def value_range(self) -> tuple[float, float]:
        """Standard deviation of the noise, and maximum entry of the sum of ``divisor`` records."""
        return self.std, self.max_entry * self.clip

    def event(self) -> DpEvent:
        """Return the event of one release."""
        if not self.is_private:
            return NonPrivateDpEvent()
        return self.sampling.event(GaussianDpEvent(self.noise_multiplier))

    def batch_parts(
        self, records: Records, streams: RandomStreams, part_size: int
    ) -> list[Indices]:
        """Sample the batch of the next release, in parts of about ``part_size`` records; if the
        unit is a person, one record of each sampled person."""
        if self.unit is not Unit.PERSON:
            return _split_batch(self.sampling, len(records), streams, self.divisor, part_size)
        order, starts = _by_person(records)
        counts = np.diff(starts)
        choices = streams.secret_bits(len(counts), "record of person") % counts.astype(np.uint64)
        chosen = order[starts[:-1] + choices.astype(np.int64)]
        parts = _split_batch(self.sampling, len(counts), streams, self.divisor, part_size)
        return [np.sort(chosen[persons]) for persons in parts]

    def sums(
        self,
        records: Records,
        streams: RandomStreams,
        part_size: int,
        contribution: Callable[[Indices], ClippedSum],
    ) -> Iterator[ClippedSum]:
        """Yield the clipped sums over the parts of the batch of the next release; without sampling,
        the clipped mean over the records of each person if that is the unit.

        Args:
            contribution: records -> sum of their clipped contributions.
        """
        if not self._averages_persons:
            yield from map(contribution, self.batch_parts(records, streams, part_size))
            return
        order, starts = _by_person(records)
        counts, persons_per_part = np.diff(starts), max(1, part_size // _RECORDS_PER_PERSON)
        for persons in _split_batch(
            self.sampling, len(counts), streams, self.divisor, persons_per_part
        ):
            if self.person_clip < 1:
                for person in persons:
                    rows = order[starts[person] : starts[person + 1]]
                    parts = [contribution(piece) for piece in _pieces(rows, part_size)]
                    yield clipped_mean(parts, len(rows), self._contribution_clip)
                continue
            for count in np.unique(counts[persons]):
                first = starts[:-1][persons[counts[persons] == count]]
                for rows in _batches_of_persons(
                    order[first[:, None] + np.arange(count)], part_size
                ):
                    yield contribution(rows).divided_by(int(count))

    def noised(self, size: int, sums: Iterable[ClippedSum], streams: RandomStreams) -> Tensor:
        """Sanitize a sum of clipped contributions on its device, with the full noise for any
        aggregation.

        Args:
            size: number of entries of the sum, independent of the batch.
            sums: sums over the parts of the batch.

        Returns:
            The noisy sum (size,) in single precision.

        Raises:
            ValueError: if a part was clipped to a larger norm than the sensitivity assumes.
        """
        return self._noised(self._exact(size, sums), streams)

    def _exact(self, size: int, sums: Iterable[ClippedSum]) -> Tensor:
        total: Tensor | None = None
        for part in sums:
            if part.clip > self._contribution_clip:
                raise ValueError("a part was clipped to a larger norm than the sensitivity assumes")
            flat = part.flat()
            total = flat if total is None else total.add_(flat)
        total = torch.zeros(size, dtype=torch.float64) if total is None else total
        return total.div_(self.divisor)

    def release(
        self, shape: tuple[int, ...], sums: Iterable[ClippedSum], streams: RandomStreams
    ) -> Sent:
        """Return the sum in this shape as the client's message."""
        exact = self._exact(math.prod(shape), sums).view(1, *shape)
        return self._sent(exact, self.event(), streams)


@dataclass(frozen=True)
class ClientMean(Mechanism):
    """``SumGaussian`` at client level: a client contributes the mean over a batch of its records,
    each clipped to C, so that the norm of the mean is at most C for any records and any number of
    them. Plus Gaussian noise: DP-FedSGD (McMahan et al. 2018, algorithm 1, with one local step).

    Neighbours are a client with its records and one without any, which contributes nothing but
    noise. All records of a client may change together, so sampling among them neither hides nor
    costs anything: the event is a Gaussian without sampling.

    expected: public approximate batch size, which determines the number of parts.
    """

    clip: float
    noise_multiplier: float
    sampling: BatchSampling
    expected: float
    relation: Relation
    aggregation: Aggregation = LOCAL
    unit = Unit.CLIENT

    def sensitivity(self, relation: Relation) -> float:
        """Return the L2 sensitivity of the sum of the means of all clients."""
        return _clip_norms_moved(relation) * self.clip

    @property
    def value_range(self) -> tuple[float, float]:
        """Standard deviation of the noise, and maximum entry of a contribution."""
        return self.std, self.clip

    def event(self) -> DpEvent:
        """Return the event of one release."""
        if not self.is_private:
            return NonPrivateDpEvent()
        return GaussianDpEvent(self.noise_multiplier)

    def batch_parts(
        self, records: Records, streams: RandomStreams, part_size: int
    ) -> list[Indices]:
        """Sample the batch of the next release, in parts of about ``part_size`` records."""
        return _split_batch(self.sampling, len(records), streams, self.expected, part_size)

    def noised(self, size: int, sums: Iterable[ClippedSum], streams: RandomStreams) -> Tensor:
        """See ``SumGaussian.noised``."""
        return self._noised(self._mean(size, sums), streams)

    def _mean(self, size: int, sums: Iterable[ClippedSum]) -> Tensor:
        total, rows = None, 0
        for part in sums:
            if part.clip > self.clip:
                raise ValueError("a part was clipped to a larger norm than the sensitivity assumes")
            flat = part.flat()
            total, rows = flat if total is None else total.add_(flat), rows + len(part.norms)
        total = torch.zeros(size, dtype=torch.float64) if total is None else total
        # the norm is at most C for any count
        return clip_rows(total[None] / max(rows, 1), self.clip)[0]

    def release(
        self, shape: tuple[int, ...], sums: Iterable[ClippedSum], streams: RandomStreams
    ) -> Sent:
        """Return the mean in this shape as the client's message."""
        exact = self._mean(math.prod(shape), sums).view(1, *shape)
        return self._sent(exact, self.event(), streams)


GradientSum = SumGaussian | ClientMean
"""Mechanisms of DP-SGD."""


def _split_batch(
    sampling: BatchSampling, records: int, streams: RandomStreams, divisor: float, part_size: int
) -> list[Indices]:
    """Split a batch into a public number of parts. An independent secret random number assigns each
    record to a part: given the numbers of all others, adding a record changes no other part."""
    batch = sampling.sample(records, streams)
    number = min(max(1, round(divisor / part_size)), _MAX_PARTS)
    if number == 1:
        return [batch]
    part = streams.secret_bits(records, "part")[batch] % np.uint64(number)
    return [batch[part == index] for index in range(number)]


def _by_person(records: Records) -> tuple[Indices, Indices]:
    """Return ``records.by_person``. Raises ValueError if the persons are unknown."""
    if records.by_person is None:
        raise ValueError("a mechanism that protects persons needs the person in each record")
    return records.by_person


def _batches_of_persons(records: Indices, part_size: int) -> Iterator[Indices]:
    """Yield records (persons, records of each) of as many persons as fit ``part_size``; a person
    with more records is split. An additional person may move others to the next sum: partial sums
    are in double precision, so that rounding errors stay within the margin of clipping."""
    persons = max(1, part_size // records.shape[1])
    for first in range(0, len(records), persons):
        yield from _pieces(np.sort(records[first : first + persons].ravel()), part_size)


def _pieces(records: Indices, part_size: int) -> list[Indices]:
    return np.split(records, range(part_size, len(records), part_size))


_RECORDS_PER_PERSON = 4  # assumed mean, for the size of parts


def descent(
    mechanism: GradientSum,
    start: Mapping[str, Tensor],
    size: int,
    sums: Callable[[Mapping[str, Tensor], RandomStreams], Iterable[ClippedSum]],
    move: Callable[[Mapping[str, Tensor], Tensor, RandomStreams], Mapping[str, Tensor]],
    steps: Sequence[RandomStreams],
) -> Release:
    """Run gradient descent on noisy sums: DP-SGD (Abadi et al. 2016, algorithm 1), on the device of
    ``start``.

    Each step is a separate release, which may depend on the previous ones. The final point is a
    function of these releases alone, so releasing it costs their adaptive composition and no more.

    Args:
        start: initial point, public or released before.
        size: number of entries of a sum.
        sums: (point, streams) -> clipped sums over the batch of a step; the only access to records.
        move: (point, noisy sum (size,), streams) -> next point.
        steps: streams of each step.
    """
    point = start
    for streams in steps:
        point = move(point, mechanism.noised(size, sums(point, streams), streams), streams)
    flat = torch.cat([point[name].flatten() for name in sorted(point)])
    arrays = {"answer": flat.to("cpu", torch.float32).numpy()[None]}
    return Release(arrays, repeat(mechanism.event(), len(steps)), mechanism.unit, SEAL)


@dataclass(frozen=True)
class ClientGaussian(Mechanism):
    """Contribution of a client, a vector of norm at most C: DP-FedAvg (McMahan et al. 2018) and
    statistics at client level. Which clients are in the run is public; the neighbour of a client is
    one that contributes nothing and still sends its noise.

    participation: secret decision of the client whether to contribute to a round. The contribution
        is divided by its probability, so that the mean over all clients is unbiased.
    """

    clip: float
    noise_multiplier: float
    relation: Relation
    participation: Participation = ALWAYS
    aggregation: Aggregation = LOCAL
    unit = Unit.CLIENT

    def sensitivity(self, relation: Relation) -> float:
        """Return the L2 sensitivity of the sum of all contributions."""
        return _clip_norms_moved(relation) * self.clip / self.participation.rate

    @property
    def value_range(self) -> tuple[float, float]:
        """Standard deviation of the noise, and maximum entry of a contribution."""
        return self.std, self.clip / self.participation.rate

    def max_norm(self, size: int) -> float:
        """Return the maximum norm of a contribution of ``size`` entries (see
        ``_max_noisy_norm``)."""
        return _max_noisy_norm(self.clip / self.participation.rate, self.std, size)

    def event(self) -> DpEvent:
        """Return the event of one release."""
        if not self.is_private:
            return NonPrivateDpEvent()
        return self.participation.event(GaussianDpEvent(self.noise_multiplier))

    def release(self, size: int, vector: Callable[[], Tensor], streams: RandomStreams) -> Sent:
        """Return the message of a client (1, size): its vector, computed if the client
        participates, or zero, plus noise."""
        exact = torch.zeros((1, size))
        if self.participation.is_sampled(streams):
            raw = vector().detach().to("cpu", torch.float32).view(1, size)
            exact = clip_rows(raw, self.clip) / self.participation.rate
        return self._sent(exact, self.event(), streams)


def _max_noisy_norm(clip: float, std: float, size: int) -> float:
    """Bound the norm of a vector of norm at most ``clip`` plus noise of ``std`` in each of its
    ``size`` entries, exceeded with probability below e^-200: a longer vector is not an honest
    response.

    Proof. The squared norm of the noise over std^2 is chi-squared with ``size`` degrees of freedom
    and exceeds size + 2 sqrt(size t) + 2 t with probability at most e^-t (Laurent and Massart 2000,
    lemma 1). One percent more covers the grid, which moves each entry by less than std / 1,024, and
    single precision, whose smallest numbers are covered separately. The probability that an honest
    response is rejected, times any e^epsilon of interest, is below the rounding error of any delta.
    """
    smallest = math.sqrt(size) * 2**-24
    squared = size + 2 * math.sqrt(size * _TAIL_NATS) + 2 * _TAIL_NATS
    return 1.01 * (clip + std * math.sqrt(squared)) + smallest


def _clip_norms_moved(relation: Relation) -> int:
    """Return by how many clip norms a neighbour moves a sum of clipped contributions."""
    return 1 if relation is Relation.ADD_OR_REMOVE_ONE else 2


def _check_relation(sampling: BatchSampling, relation: Relation) -> None:
    """Raise FedgenError if the sampling is undefined for neighbours under the relation."""
    if not sampling.allows(relation):
        raise FedgenError(
            "privacy.relation",
            f"{type(sampling).__name__} has no neighbours by {relation.value.replace('_', ' ')}",
            "use Poisson sampling, or replace_one",
        )


def _bounded_sum(
    shape: tuple[int, ...], responses: Iterable[tuple[Tensor, Tensor]], bound: Bound
) -> tuple[Tensor, Tensor]:
    """Return the sum of bounded responses per row in double precision, and their count per row."""
    total = torch.zeros(shape, dtype=torch.float64)
    counts = torch.zeros(shape[0], dtype=torch.long)
    for index, rows in responses:
        total.index_add_(0, index, bound.enforce(rows.detach().to("cpu", torch.float32)).double())
        counts.index_add_(0, index, torch.ones_like(index))
    return total, counts
