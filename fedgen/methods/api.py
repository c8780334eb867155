"""The contract of a method.

A method is a record of pure functions from state to state. Public parameters are captured by the
functions; private data are arguments and leave a client only as messages of a mechanism
(``fedgen.privacy.aggregation``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dp_accounting import DpEvent
from numpy.typing import NDArray
from torch import Tensor

from fedgen.config.constraints import missing_count
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.methods.plan import Plan
from fedgen.privacy.aggregation import LOCAL, Aggregation, Secure, Sent, Trusted
from fedgen.privacy.events import Unit
from fedgen.privacy.routing import Routing
from fedgen.randomness import RandomStreams

Tensors = Mapping[str, Tensor]
"""Named tensors."""

State = Mapping[str, Tensors]
"""State of a client: named parts, each loaded on access. Parts that were never written are missing.
"""


@dataclass(frozen=True)
class Query:
    """Query of the server: arrays with one row per query sample, and arrays shared by all."""

    samples: Tensors
    shared: Tensors = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of query samples."""
        return next(iter(self.samples.values())).shape[0]

    def take(self, index: list[int]) -> Query:
        """Return a query for some of the query samples."""
        if index == list(range(self.count)):
            return self
        return Query({name: rows[index] for name, rows in self.samples.items()}, self.shared)


def _no_state(*_: object) -> State:
    return {}


@dataclass(frozen=True)
class ClientProgram:
    """Functions of a client, the only code with access to private records.

    respond: (state, query, shard, round, streams) -> a Release, or the message that the plan's
        aggregation expects. Must not change anything that ``train`` or a later ``respond`` reads. A
        second query in the same round receives other streams.
    train: (state, broadcast, shard, round, streams) -> changed parts. Runs on a public schedule and
        sends nothing.
    prepare_steps: public number of ``prepare`` calls before the first round.
    prepare: (number, shard, streams) -> parts of the state, independent of the server.
    resamples: whether ``respond`` samples with its own secret streams on a repeated round; False if
        ``train`` has to use the same sample.
    """

    respond: Callable[[State, Query, Shard, int, RandomStreams], Sent]
    train: Callable[[State, Tensors, Shard, int, RandomStreams], State] = _no_state
    prepare_steps: int = 0
    prepare: Callable[[int, Shard, RandomStreams], State] = _no_state
    resamples: bool = True

    @property
    def keeps_state(self) -> bool:
        """Whether a client keeps state between rounds."""
        return self.train is not _no_state


@dataclass(frozen=True, kw_only=True)
class ServerProgram:
    """Functions of the server, which owns the generator. All of them are post-processing.

    init: streams -> state.
    broadcast: (state, round, streams) -> arrays that clients train on.
    query: (state, round, streams) -> query to clients. It may contain the query samples of several
        rounds; one that exceeds the remaining rounds of the run is truncated. None: a round without
        clients.
    update: (state, mean of the responses by the strategy, round, streams) -> state.
    generator: state -> published weights, the input of ``sample``.
    sample: (generator, labels (n,), streams) -> images (n, channels, height, width) in [0, 1].
    classify: (generator, images) -> labels (n,), if a private classifier is published.
    membership_scores: (state, images, labels, streams) -> (n,), larger for images that are likelier
        training records. Used by audits of a run.
    metrics: (state, held-out records or None, streams) -> metrics by name. Must not affect the
        state.
    server_step: (state, round, streams) -> state after a round without a query.
    start_from: (state, sample) -> state, called once after the first phase of a pre-trained method
        (``fedgen.methods.families.pretraining``); sample: labels (n,) -> images, like ``sample``.
    distinct_images: total number of distinct images, equally many per label, if the method
        publishes a set; None: unlimited.
    """

    init: Callable[[RandomStreams], Tensors]
    broadcast: Callable[[Tensors, int, RandomStreams], Tensors] = lambda state, round_, streams: {}
    query: Callable[[Tensors, int, RandomStreams], Query | None]
    update: Callable[[Tensors, Tensor, int, RandomStreams], Tensors]
    generator: Callable[[Tensors], Tensors]
    sample: Callable[[Tensors, Tensor, RandomStreams], Tensor]
    membership_scores: Callable[[Tensors, Tensor, Tensor, RandomStreams], Tensor]
    metrics: Callable[[Tensors, Shard | None, RandomStreams], Mapping[str, float]] = lambda *_: {}
    server_step: Callable[[Tensors, int, RandomStreams], Tensors] = lambda state, round_, streams: (
        state
    )
    start_from: Callable[[Tensors, Callable[[Tensor], Tensor]], Tensors] = lambda state, sample: (
        state
    )
    classify: Callable[[Tensors, Tensor], Tensor] | None = None
    distinct_images: int | None = None


@dataclass(frozen=True)
class WorstCase:
    """Two neighbouring clients and a query, constructed so that their releases differ as much as
    the mechanism allows. Audits of the client program attack them.

    first, second: state (any function of the records) and records of a client.
    read: response -> its most revealing part, query samples first.
    round: round of the query, if rounds differ.
    event: event of a response in that round; None: the first event of ``plan``.
    plan: None: the plan of the method.
    custom_noise: whether the response uses a noise multiplier other than the method's.
    """

    query: Query
    first: tuple[State, Shard]
    second: tuple[State, Shard]
    read: Callable[[Tensor], Tensor] = lambda answer: answer
    round: int = 0
    event: DpEvent | None = None
    plan: Plan | None = None
    custom_noise: bool = False

    def for_unit(self, unit: Unit) -> WorstCase:
        """Return the worst case of the protected unit: a person with several images in place of a
        record."""
        if unit is not Unit.PERSON:
            return self
        (state, first), (second_state, second) = self.first, self.second
        larger, smaller = (
            (state, first.repeat_per_person(_IMAGES)),
            (second_state, second.repeat_per_person(_IMAGES)),
        )
        return replace(self, first=larger, second=smaller)


_IMAGES = 3  # of a person in a worst case

AggregationKind = Literal["local", "secure", "trusted"]
"""Who adds the noise of a sum; see ``fedgen.privacy.aggregation``."""


@dataclass(frozen=True)
class PublicFacts:
    """Public facts about the data before a run.

    clients: number of clients.
    records: number of records of a single client, which replacing one record keeps; None for
        several clients, whose numbers of records are private.
    classes: number of labels.
    shape: shape of an image (channels, height, width).
    requires_all: whether a run ends when a client does not respond. Otherwise a missing response
        reveals the sampled cohort.
    had_dropout: whether a queried client did not respond in this run.
    aggregation_kind: who adds the noise of a sum (``privacy.aggregation``); None: as published.
    ring_bits: bits of an element of a secure sum (``Secure.bits``).
    threshold, colluders: of a secure sum; threshold None: two thirds of the queried clients.
    unit: protected unit; None: as published.
    persons: public number near that of the persons of all clients, for unit person; None: unknown.
    all_clients: number of clients, of which ``clients`` are in the run (``group``); None: the same.
    """

    clients: int
    records: int | None
    classes: int
    shape: tuple[int, int, int]
    requires_all: bool = True
    had_dropout: bool = False
    aggregation_kind: AggregationKind | None = None
    ring_bits: Literal[32, 64] = 32
    threshold: int | Literal["all"] | None = None
    colluders: int = 0
    unit: Unit | None = None
    persons: int | None = None
    all_clients: int | None = None

    def units_of_run(self, rows: float) -> float:
        """Return the public number of records, or of persons if they are the protected unit, of the
        clients in this run: an equal share of that of all clients.

        Args:
            rows: public number of records of all clients.

        Raises:
            FedgenError: if the number of persons is unknown.
        """
        units: float = rows
        if self.unit is Unit.PERSON:
            if self.persons is None:
                raise missing_count("public_persons", "privacy.unit=person requires it")
            units = self.persons
        return units if self.all_clients is None else units * self.clients / self.all_clients

    def with_aggregation(self, kind: AggregationKind) -> PublicFacts:
        """Return the same facts with sums of another kind."""
        threshold = self.threshold if kind == "secure" else None
        return replace(self, aggregation_kind=kind, threshold=threshold)

    @property
    def record_unit(self) -> Unit:
        """Protected unit of sums over records."""
        return Unit.RECORD if self.unit is None else self.unit

    def aggregation(
        self, cohort_size: int, clip: float = math.inf, published: AggregationKind = "local"
    ) -> Aggregation:
        """Return the aggregation of the responses of ``cohort_size`` clients.

        Args:
            clip: norm to which a trusted aggregator clips each row of a response; infinity: none.
            published: aggregation of the published method.

        Raises:
            FedgenError: for an invalid secure sum.
        """
        kind = self.aggregation_kind or published
        if kind != "secure" and self.threshold is not None:
            problem = f"applies to secure sums only, and the aggregation is {kind}"
            raise FedgenError(
                "privacy.threshold", problem, "leave it out, or set privacy.aggregation=secure"
            )
        if kind == "local":
            return LOCAL
        if kind == "trusted":
            return Trusted(clip)
        if self.clients == 1:
            raise FedgenError(
                "privacy.aggregation",
                "a secure sum needs several clients, and there is one",
                "use local, which adds the same noise, or partition=iid or by_writer",
            )
        threshold = -(-2 * cohort_size // 3) if self.threshold is None else self.threshold
        threshold = cohort_size if threshold == "all" else threshold
        if not max(cohort_size / 2, self.colluders) < threshold <= cohort_size:
            raise FedgenError(
                "privacy.threshold",
                f"{threshold} of {cohort_size} responses with {self.colluders} colluders is not "
                "valid",
                "use more than half of the queried clients, more than privacy.colluders, and at "
                "most all",
            )
        return Secure(cohort_size, threshold, self.colluders, self.ring_bits)

    @property
    def cohorts_hidden(self) -> bool:
        """Whether nothing reveals the sampled cohorts."""
        return self.requires_all and not self.had_dropout


@dataclass(frozen=True)
class Method:
    """A method: client program, server program and plan.

    cohort: routing of query samples to clients.
    trained_per_round: clients that a public rotation trains each round; None: the queried clients.
    worst_cases: worst cases for audits, one per kind of query.
    derived_settings: settings that were null and follow from the noise, as numbers.
    aggregate: (responses to one query, round, streams) -> their sum in double precision, with the
        noise of the aggregator.
    """

    client: ClientProgram
    server: ServerProgram
    plan: Plan
    cohort: Routing
    trained_per_round: int | None
    worst_cases: Callable[[], Sequence[WorstCase]]
    aggregate: Callable[[Sequence[NDArray[Any]], int, RandomStreams], Tensor]
    derived_settings: Mapping[str, int] = field(default_factory=dict)
