"""Methods that query a sequence of sums: each is a noisy sum of clipped contributions of records,
and each query may depend on the previous results.

A ``SumSequence`` defines these releases. All clients respond to all queries and keep no state; only
batches are sampled. So a run can resume after any query, and every release has the cost of its own
mechanism, for any sender and time of the query: a client responds to the named sum and charges that
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from dp_accounting import ComposedDpEvent, DpEvent
from torch import Tensor

from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.methods.api import (
    ClientProgram,
    Method,
    PublicFacts,
    Query,
    ServerProgram,
    State,
    WorstCase,
)
from fedgen.methods.plan import Claim, Plan
from fedgen.privacy.aggregation import LOCAL, Sent
from fedgen.privacy.batch_sampling import BatchSampling, FullBatch, Indices
from fedgen.privacy.clipping import ClippedSum
from fedgen.privacy.events import Relation, Unit, repeat
from fedgen.privacy.mechanisms import (
    ClientGaussian,
    Responses,
    SumGaussian,
    aggregator,
)
from fedgen.privacy.routing import Routing
from fedgen.randomness import RandomStreams
from fedgen.storage.io import digest

RELATION = Relation.ADD_OR_REMOVE_ONE
ALL_RECORDS = FullBatch()

Contribute = Callable[[Mapping[str, Tensor], Tensor, Tensor], ClippedSum]
"""(shared arrays of the query, images (n, ...) in [0, 1], labels (n,)) -> sum of the contributions
of these records, each clipped to the norm of the mechanism."""


@dataclass(frozen=True)
class Preparation:
    """A function of images that is the same for all repeats of a query; the process of a client
    caches its result.

    names: shared arrays of the query that it depends on.
    compute: (shared arrays, images) -> (n, ...).
    """

    names: tuple[str, ...]
    compute: Callable[[Mapping[str, Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class SumQuery:
    """A sum that is queried ``repeats`` times in succession.

    name: name of the sum in queries.
    size: number of entries.
    at_once: records in memory at a time.
    preparation: input of ``contribution`` in place of images; None: images.
    """

    name: str
    size: int
    mechanism: SumGaussian | ClientGaussian
    contribution: Contribute
    repeats: int = 1
    at_once: int = 2048
    preparation: Preparation | None = None

    @property
    def is_private(self) -> bool:
        """Whether the sum is noisy."""
        return self.mechanism.is_private


@dataclass(frozen=True)
class SumMechanisms:
    """Mechanisms of the sums of a sequence.

    noise_multiplier: noise multiplier of all sums together, as one Gaussian: a sum with ``share``
        of the budget and ``repeats`` queries has sqrt(repeats / share) times as much, and squared
        ratios of sensitivity to noise add up (Dong, Roth, Su 2022, corollary 3.3). None: no noise.
    rows: public number near the number of records of all clients; each client divides by its equal
        share (``PublicFacts.units_of_run``). At client level, a client contributes the mean over
        its records; at person level, a person contributes the mean over theirs.
    """

    facts: PublicFacts
    noise_multiplier: float | None
    rows: float

    def mechanism(
        self,
        share: float = 1.0,
        repeats: int = 1,
        *,
        clip: float = 1.0,
        sampling: BatchSampling = ALL_RECORDS,
        max_entry: float = 1.0,
        client_clip: float = 1.0,
        person_clip: float = 1.0,
        batch: int | None = None,
    ) -> SumGaussian | ClientGaussian:
        """Return the mechanism of one sum.

        Args:
            share: fraction of the budget.
            repeats: number of queries.
            clip: norm that contributions are clipped to.
            max_entry: maximum entry of a contribution, over ``clip``.
            sampling: sampling of the records of a batch; not used at client level.
            client_clip: norm that the mean contribution of a client is clipped to, over ``clip``.
            batch: expected batch size of all clients, which the sum is divided by; None: the public
                number of records or persons.
            person_clip: norm that the mean contribution of a person is clipped to, over ``clip``;
                see ``SumMechanisms.person_clip``.
        """
        # a trusted aggregator clips the message of a client again
        limit = clip * client_clip if self.facts.unit is Unit.CLIENT else math.inf
        aggregation = self.facts.aggregation(self.facts.clients, limit)
        if self.noise_multiplier is None:
            clip, limit, aggregation = math.inf, math.inf, LOCAL
        noise = (self.noise_multiplier or 0.0) * (repeats / share) ** 0.5
        if self.facts.unit is Unit.CLIENT:
            return ClientGaussian(limit, noise, RELATION, aggregation=aggregation)
        units = self.facts.units_of_run(self.rows) if batch is None else batch
        return SumGaussian(
            clip,
            noise,
            sampling,
            units / self.facts.clients,
            RELATION,
            self.facts.record_unit,
            aggregation,
            max_entry,
            person_clip if self.facts.unit is Unit.PERSON else 1.0,
        )

    def person_clip(self, similarity: float) -> float:
        """Return the root mean square norm of the mean contribution of a person, for contributions
        of norm 1 and the average number of records per person by public numbers. Clipping to it
        loses little, and reduces the noise in proportion.

        Args:
            similarity: mean inner product of two contributions of one person, in [0, 1].
        """
        if self.facts.unit is not Unit.PERSON or self.noise_multiplier is None:
            return 1.0
        records = max(1.0, self.rows / (self.facts.persons or self.rows))
        return math.sqrt((1 + (records - 1) * similarity) / records)


def mean_std(mechanism: SumGaussian | ClientGaussian, clients: int) -> float:
    """Return the standard deviation of the noise in each entry of the mean response, if all clients
    respond."""
    return mechanism.aggregation.mean_std(mechanism.std, clients)


_frozen: list[tuple[bytes, str]] = []  # the last arrays of this process, and their digests


def _freeze(shared: Tensor) -> str:
    """Return a digest, cached for the many clients of a process that receive the same query: a
    comparison takes a tenth of the time."""
    data = shared.numpy().tobytes()
    for cached_data, cached_digest in _frozen:
        if cached_data == data:
            return cached_digest
    _frozen[:] = [(data, digest(data)), *_frozen[:1]]
    return _frozen[0][1]


@dataclass(frozen=True)
class SumSequence:
    """The sums that a run queries, in order."""

    queries: tuple[SumQuery, ...]
    device: str

    @cached_property
    def _by_round(self) -> list[SumQuery]:
        return [query for query in self.queries for _ in range(query.repeats)]

    @property
    def rounds(self) -> int:
        """Number of rounds with a query."""
        return len(self._by_round)

    def query_at(self, round_: int) -> SumQuery:
        """Return the sum of a round; the last sum for later rounds."""
        return self._by_round[min(round_, self.rounds - 1)]

    def repeats(self, name: str) -> int:
        """Return how often a sum is queried."""
        return sum(query.name == name for query in self._by_round)

    def make_query(self, round_: int, shared: Mapping[str, Tensor]) -> Query:
        """Return the query of a round with the arrays that clients need."""
        return Query({self.query_at(round_).name: torch.zeros(1)}, shared)

    @property
    def client(self) -> ClientProgram:
        """The client program."""
        return ClientProgram(self._respond)

    def _respond(
        self, state: State, query: Query, shard: Shard, round_: int, streams: RandomStreams
    ) -> Sent:
        del state
        [sum_query] = [candidate for candidate in self.queries if candidate.name in query.samples]
        round_streams, private = streams.at_round(sum_query.name, round_), shard.on(self.device)
        shared = {name: value.to(self.device) for name, value in query.shared.items()}

        def rows(index: Tensor) -> tuple[Tensor, Tensor]:
            return private.rows(index)

        if (preparation := sum_query.preparation) is not None:
            parts = torch.split(torch.arange(len(shard)), sum_query.at_once)
            digests = [_freeze(query.shared[name]) for name in preparation.names]
            prepared = private.cached(
                " ".join(digests),
                lambda: torch.cat(
                    [preparation.compute(shared, private.rows(index)[0]) for index in parts]
                ),
            )

            def rows(index: Tensor) -> tuple[Tensor, Tensor]:
                return prepared[index.to(prepared.device)], private.labels[
                    index.to(prepared.device)
                ]

        def contribution(index: Indices) -> ClippedSum:
            return sum_query.contribution(shared, *rows(torch.from_numpy(index)))

        def sums(mechanism: SumGaussian) -> Iterator[ClippedSum]:
            return mechanism.sums(shard, round_streams, sum_query.at_once, contribution)

        def mean() -> Tensor:
            count = max(len(shard), 1)
            reference = SumGaussian(math.inf, 0.0, ALL_RECORDS, count, RELATION, Unit.CLIENT)
            return reference.noised(sum_query.size, sums(reference), round_streams)

        if isinstance(sum_query.mechanism, ClientGaussian):
            return sum_query.mechanism.release(sum_query.size, mean, round_streams)
        return sum_query.mechanism.release(
            (sum_query.size,), sums(sum_query.mechanism), round_streams
        )

    def build(
        self,
        server: ServerProgram,
        plan: Plan,
        clients: int,
        worst_cases: Callable[[], Sequence[WorstCase]],
        derived_settings: Mapping[str, int] | None = None,
    ) -> Method:
        """Return the method of a server that queries this sequence from all clients."""
        return Method(
            self.client,
            server,
            plan,
            Routing("mean", clients),
            0,
            lambda: self._check_worst_cases(worst_cases()),
            self.aggregate,
            derived_settings or {},
        )

    def _check_worst_cases(self, cases: Sequence[WorstCase]) -> Sequence[WorstCase]:
        """Raise FedgenError for a sum without a worst case, which audits would not attack."""
        queried = {name for case in cases for name in case.query.samples}
        for query in self.queries:
            if query.name not in queried:
                problem = f"the sum {query.name!r} has no worst case, so audits would not attack it"
                remedy = f"add sequence.worst_case({query.name!r}, ...) to its worst cases"
                raise FedgenError("method", problem, remedy)
        return cases

    def worst_case(
        self,
        name: str,
        shared: Mapping[str, Tensor],
        first: tuple[State, Shard],
        second: tuple[State, Shard],
        read: Callable[[Tensor], Tensor] = lambda response: response,
    ) -> WorstCase:
        """Return the worst case of one of the sums; see ``WorstCase``."""
        [position] = [index for index, query in enumerate(self.queries) if query.name == name]
        round_, mechanism = self._offsets[position], self.queries[position].mechanism
        event, query_ = mechanism.event(), self.make_query(round_, shared)
        case = WorstCase(query_, first, second, read, round_, event)
        return case.for_unit(mechanism.unit)

    def aggregate(self, responses: Responses, round_: int, streams: RandomStreams) -> Tensor:
        """Return the sum of the clients' responses in double precision."""
        return aggregator(self.query_at(round_).mechanism)(responses, round_, streams)

    def event(self, releases: int) -> DpEvent:
        """Return the event of the first ``releases`` releases. If the sequence has fewer, the
        additional ones repeat some round of it; each of its sums is counted for all of them."""
        counts = [
            max(0, min(query.repeats, releases - start)) + max(0, releases - self.rounds)
            for query, start in zip(self.queries, self._offsets, strict=True)
        ]
        events = [
            repeat(query.mechanism.event(), count)
            for query, count in zip(self.queries, counts, strict=True)
            if count
        ]
        return events[0] if len(events) == 1 else ComposedDpEvent(events)

    @cached_property
    def _offsets(self) -> list[int]:
        return [
            sum(query.repeats for query in self.queries[:index])
            for index in range(len(self.queries))
        ]

    def plan(
        self,
        sampler: str,
        amplified_by: str | None,
        published_claim: tuple[str, str] | None,
        length: int | None = None,
    ) -> Plan:
        """Return the plan: bounds against everyone, or with a trusted aggregator against all
        others.

        Args:
            sampler: description of the subsampling.
            amplified_by: description of its amplification; None: no subsampling.
            published_claim: formula and source of a published claim; None: no claim.
            length: see ``Plan.fixed_rounds``.
        """
        mechanisms = [query.mechanism for query in self.queries]
        # a sum without noise leaves no bound
        mechanism = next(
            (candidate for candidate in mechanisms if not candidate.is_private), mechanisms[0]
        )

        def event(rounds: int) -> DpEvent:
            return self.event(min(rounds, self.rounds))

        claim = None
        # no paper accounts for persons
        if published_claim is not None and mechanism.unit is not Unit.PERSON:
            claim = Claim.by_rdp(event, RELATION, *published_claim)
        plan = Plan.from_mechanism(
            mechanism,
            self.event,
            lambda _, round_: (1, self.query_at(round_).size),
            sampler=sampler,
            amplified_by=amplified_by,
            not_amplified_because="each sum contains all records: no subsampling",
            claim=claim,
        )
        ranges = [query.mechanism.value_range for query in self.queries if query.is_private]
        return replace(
            plan,
            max_norm=math.inf,  # sums differ in size
            release_event=event if mechanism.aggregation.is_trusted else None,
            query_rounds=self.rounds,
            fixed_rounds=length,
            value_ranges=tuple(ranges),
        )
