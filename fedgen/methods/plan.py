"""Privacy cost of a run as a function of its length."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dp_accounting import DpEvent

from fedgen.privacy.accounting import claimed_by_rdp
from fedgen.privacy.aggregation import LOCAL, Aggregation
from fedgen.privacy.events import Contribution, Relation, Unit, repeat
from fedgen.privacy.mechanisms import Mechanism

TRUSTED_AGGREGATOR_REASON = "no bound: clients trust the server with contributions without noise"
"""Reason for the missing bound against a trusted aggregator."""


@dataclass(frozen=True)
class Claim:
    """ε by the formula of a paper, (rounds, delta) -> ε. Not a bound."""

    epsilon: Callable[[int, float], float]
    formula: str
    source: str

    @classmethod
    def by_rdp(
        cls, event: Callable[[int], DpEvent], relation: Relation, formula: str, source: str
    ) -> Claim:
        """Return the claim of a paper that composes RDP.

        Args:
            event: rounds -> the event that the paper accounts for.
        """
        return cls(
            lambda rounds, delta: claimed_by_rdp(event(rounds), delta, relation), formula, source
        )


_MAX_SHORT_PLAN = 100
"""Maximum number of queries of a short plan."""


@dataclass(frozen=True)
class Plan:
    """The privacy cost of a run as a function of its length, fixed before it starts.

    sampler: description of the subsampling.
    samples_per_round: query samples per round.
    query_rounds: number of initial rounds that query clients; later rounds are server rounds. None:
        all.
    server_rounds: server rounds in between: index of the first, and their number.
    fixed_rounds: number of rounds of the method; None: as configured.
    prior_event: event of a client for whatever the run starts from; None: nothing.
    response_shape: (query samples, round) -> shape of a response.
    max_norm: L2 norm that a row of an honest response exceeds with probability below e^-200;
        infinity if unknown, and if an aggregator clips the responses or sees only sums.
    server_event: query samples of one client in the run -> its event against the server.
    release_event: rounds -> event of any client against the release adversary, from public
        parameters only, because sampled cohorts are not public. None where the server bound holds
        for both, as for a single client.
    event_if_sampling_revealed: query samples of one client -> its event against a release adversary
        who knows the sampled cohorts. None as ``release_event``.
    amplified_by: adversary -> description of the amplification.
    not_amplified_because: adversary -> reason for missing amplification.
    aggregation: who adds the noise of a sum.
    value_ranges: for each kind of sum, standard deviation of its noise and maximum entry of a
        contribution.
    """

    unit: Unit
    relation: Relation
    sampler: str
    samples_per_round: int
    response_shape: Callable[[int, int], tuple[int, ...]]
    server_event: Callable[[int], DpEvent]
    release_event: Callable[[int], DpEvent] | None
    event_if_sampling_revealed: Callable[[int], DpEvent] | None
    amplified_by: Mapping[str, str | None]
    not_amplified_because: Mapping[str, str | None]
    claim: Claim | None
    query_rounds: int | None = None
    server_rounds: tuple[int, int] = (0, 0)
    fixed_rounds: int | None = None
    prior_event: DpEvent | None = None
    max_norm: float = math.inf
    aggregation: Aggregation = LOCAL
    value_ranges: tuple[tuple[float, float], ...] = ()

    @classmethod
    def from_mechanism(
        cls,
        mechanism: Mechanism,
        event: Callable[[int], DpEvent],
        response_shape: Callable[[int, int], tuple[int, ...]],
        *,
        samples_per_round: int = 1,
        sampler: str = "none",
        amplified_by: str | None,
        not_amplified_because: str | None,
        server_reason: str | None = None,
        claim: Claim | None = None,
    ) -> Plan:
        """Return the plan of repeated releases of a mechanism. The bound holds against every
        adversary except a trusted aggregator. Where the release adversary sees less than the
        server, callers replace ``release_event``.

        Args:
            event: number of query samples of a client -> its event.
            response_shape, samples_per_round, sampler: see ``Plan``.
            amplified_by: description of the amplification; None: no amplification.
            not_amplified_because: reason if ``amplified_by`` is None.
            server_reason: reason if there is no amplification against the server alone.
            claim: claim of a paper about the mechanism with noise.
        """
        private, aggregation = mechanism.is_private, mechanism.aggregation
        trusted = aggregation.is_trusted
        reason = None if amplified_by else not_amplified_because
        if not private:
            amplified_by, reason, claim = None, "neither clipping nor noise", None
        server_reason = reason or server_reason
        entries_per_row = math.prod(response_shape(samples_per_round, 0)[1:])
        return cls(
            unit=mechanism.unit,
            relation=mechanism.relation,
            sampler=sampler,
            samples_per_round=samples_per_round,
            response_shape=response_shape,
            max_norm=mechanism.max_norm(entries_per_row)
            if private and aggregation.is_local
            else math.inf,
            server_event=(lambda samples: repeat(Contribution(), -(-samples // samples_per_round)))
            if trusted
            else event,
            release_event=(lambda rounds: event(rounds * samples_per_round)) if trusted else None,
            event_if_sampling_revealed=event if trusted else None,
            amplified_by={
                "server": None if trusted or server_reason else amplified_by,
                "release": amplified_by,
            },
            not_amplified_because={
                "server": TRUSTED_AGGREGATOR_REASON if trusted else server_reason,
                "release": reason,
            },
            claim=claim,
            aggregation=aggregation,
            value_ranges=(mechanism.value_range,) if private else (),
        )

    @property
    def is_short(self) -> bool:
        """Whether one-time queries are so few that a secure run checkpoints after each response."""
        return 0 < self.one_time_queries <= _MAX_SHORT_PLAN

    @property
    def resends_responses(self) -> bool:
        """Whether a repeated round, also in mode ``secure``, uses the responses already charged for
        it: no budget is left for others, and the run could not finish without them."""
        return self.query_rounds is not None and self.is_short and self.aggregation.requires_all

    @property
    def is_trusted(self) -> bool:
        """Whether clients trust an aggregator, against which there is no bound."""
        return self.aggregation.is_trusted

    def queries_in(self, rounds: int) -> int:
        """Return how many of the first ``rounds`` rounds query clients."""
        first, count = self.server_rounds
        rounds -= min(max(rounds - first, 0), count)
        return rounds if self.query_rounds is None else min(rounds, self.query_rounds)

    def rounds_for(self, queries: int) -> int:
        """Return the number of rounds that contain ``queries`` queries."""
        first, count = self.server_rounds
        return queries if queries <= first else queries + count

    @property
    def one_time_queries(self) -> int:
        """Number of initial rounds whose queries are not repeated later."""
        return self.server_rounds[0] if self.query_rounds is None else self.query_rounds

    @property
    def min_rounds(self) -> int:
        """Minimum number of rounds for a usable generator."""
        return sum(self.server_rounds) + 1 if any(self.server_rounds) else self.query_rounds or 1
