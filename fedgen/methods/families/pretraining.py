"""Pre-training: a method whose networks first learn from the samples of another method.

    first    releases at their own noise multiplier
    then     server rounds: the server runs the second method as a single client without noise, on
             samples of the first in place of records. PSG initializes its set with such samples
    last     rounds of the second method

One run, one ledger, one ε: the releases of both phases compose, and the server rounds between are
post-processing. DP-FETA (Li, Gong et al., "From Easy to Hard", S&P 2025) is this construction, with
``central_images`` before ``dpdm``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from dp_accounting import ComposedDpEvent, DpEvent
from numpy.typing import NDArray
from torch import Tensor

from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.methods.api import ClientProgram, Method, Query, State, Tensors, WorstCase
from fedgen.methods.plan import Claim, Plan
from fedgen.models.functional import concat_parts, part
from fedgen.privacy.accounting import claimed_by_rdp
from fedgen.privacy.aggregation import Sent
from fedgen.randomness import RandomStreams

_MAX_SAMPLES = 16_384
"""Samples that server rounds choose from: drawing them may take longer than training on them."""
_SAMPLED_AT_ONCE = 1_024


@dataclass(frozen=True)
class _Drawn:
    """Samples by these streams of a state of the first method, identified by its tensors."""

    state: tuple[Tensor, ...]
    streams: RandomStreams
    samples: Shard

    def is_of(self, state: Tensors, streams: RandomStreams) -> bool:
        """Return whether these are the samples of this state by these streams."""
        return (
            self.streams == streams
            and len(self.state) == len(state)
            and all(mine is theirs for mine, theirs in zip(self.state, state.values(), strict=True))
        )


@dataclass(frozen=True)
class WarmUp:
    """Two methods in succession.

    reference: ``then`` without noise for one client, with all records in each batch.
    rounds: server rounds between the two.
    batch: samples per server round, chosen from all samples.
    """

    first: Method
    then: Method
    reference: Method
    classes: int
    rounds: int
    batch: int
    _drawn: list[_Drawn] = field(default_factory=list, compare=False, repr=False)

    @property
    def first_queries(self) -> int:
        """Number of queries of the first method."""
        return self.first.plan.queries_in(self.first.plan.fixed_rounds or 0)

    @property
    def first_round(self) -> int:
        """First round of the second method."""
        return self.first_queries + self.rounds

    # --- clients --------------------------------------------------------------------------------

    def respond(
        self, state: State, query: Query, shard: Shard, round_: int, streams: RandomStreams
    ) -> Sent:
        """Respond as the method of the round's phase does, at its cost, to any query."""
        if round_ < self.first_queries:
            return self.first.client.respond({}, query, shard, round_, streams.at("first"))
        return self.then.client.respond(state, query, shard, round_ - self.first_round, streams)

    def aggregate(
        self, responses: Sequence[NDArray[Any]], round_: int, streams: RandomStreams
    ) -> Tensor:
        """See ``Method``."""
        if round_ < self.first_queries:
            return self.first.aggregate(responses, round_, streams)
        return self.then.aggregate(responses, round_ - self.first_round, streams)

    # --- the server -----------------------------------------------------------------------------

    def init(self, streams: RandomStreams) -> Tensors:
        """Return the states of both methods."""
        first, then = self.first.server.init(streams.at("first")), self.then.server.init(streams)
        return concat_parts(first=first, then=then)

    def query(self, state: Tensors, round_: int, streams: RandomStreams) -> Query | None:
        """Return the query of the current phase; None for server rounds."""
        if round_ < self.first_queries:
            return self.first.server.query(part(state, "first"), round_, streams.at("first"))
        if round_ < self.first_round:
            return None
        return self.then.server.query(part(state, "then"), round_ - self.first_round, streams)

    def update(
        self, state: Tensors, responses: Tensor, round_: int, streams: RandomStreams
    ) -> Tensors:
        """Update the state of the current phase."""
        if round_ < self.first_queries:
            first_streams = streams.at("first")
            updated = self.first.server.update(
                part(state, "first"), responses, round_, first_streams
            )
            return {**state, **concat_parts(first=updated)}
        self._drawn.clear()  # they are not used again
        updated = self.then.server.update(
            part(state, "then"), responses, round_ - self.first_round, streams
        )
        return {**state, **concat_parts(then=updated)}

    def server_step(self, state: Tensors, round_: int, streams: RandomStreams) -> Tensors:
        """Run a round of the second method on samples of the first."""
        round_streams, number = streams.at("rest", round_), round_ - self.first_queries
        generator = self.first.server.generator(part(state, "first"))
        everything = self._samples(part(state, "first"), streams)
        rows = torch.randperm(len(everything.labels), generator=round_streams.public("rows"))
        rows = rows[: self.batch]
        samples = Shard(everything.images[rows], everything.labels[rows])
        server, then = self.reference.server, part(state, "then")
        if number == 0:
            start_streams = round_streams.at("begin")
            initialized = server.start_from(
                then, lambda labels: self.first.server.sample(generator, labels, start_streams)
            )
            then = dict(initialized)
        query = server.query(then, number, round_streams)
        assert query is not None
        message = self.reference.client.respond({}, query, samples, number, round_streams)
        mean = self.reference.aggregate([message.arrays["answer"]], number, round_streams).float()
        return {**state, **concat_parts(then=server.update(then, mean, number, round_streams))}

    def _samples(self, first: Tensors, streams: RandomStreams) -> Shard:
        """Return the samples of all server rounds, which are the same after a resume."""
        for drawn in self._drawn:
            if drawn.is_of(first, streams):
                return drawn.samples
        sample_streams, count = streams.at("samples"), self.batch * self.rounds
        count = max(self.batch, min(count, _MAX_SAMPLES))
        labels = torch.randint(0, self.classes, (count,), generator=sample_streams.public("labels"))
        generator = self.first.server.generator(first)
        parts = []
        for number, part_labels in enumerate(torch.split(labels, _SAMPLED_AT_ONCE)):
            sampled = self.first.server.sample(generator, part_labels, sample_streams.at(number))
            parts.append((sampled.cpu() * 255).round().to(torch.uint8))
        samples = Shard(torch.cat(parts), labels)
        self._drawn[:] = [_Drawn(tuple(first.values()), streams, samples)]
        return samples

    def membership_scores(
        self, state: Tensors, images: Tensor, labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Return the scores of the second method."""
        return self.then.server.membership_scores(part(state, "then"), images, labels, streams)

    def metrics(
        self, state: Tensors, held_out: Shard | None, streams: RandomStreams
    ) -> Mapping[str, float]:
        """Return the metrics of the second method."""
        return self.then.server.metrics(part(state, "then"), held_out, streams)

    def generator(self, state: Tensors) -> Tensors:
        """Return the generator of the second method."""
        return self.then.server.generator(part(state, "then"))

    # --- privacy --------------------------------------------------------------------------------

    def event(
        self, first: Callable[[int], DpEvent], then: Callable[[int], DpEvent], releases: int
    ) -> DpEvent:
        """Return the event of ``releases`` releases from the events of the phases."""
        if releases <= self.first_queries:
            return first(releases)
        return ComposedDpEvent([first(self.first_queries), then(releases - self.first_queries)])

    def plan(self) -> Plan:
        """Return the plan of both phases."""
        first, then = self.first.plan, self.then.plan
        between = (self.first_queries, self.rounds)
        queries_in = replace(then, server_rounds=between).queries_in
        server, seen, release = (
            partial(self.event, first.server_event, then.server_event),
            None,
            None,
        )
        event = server
        if first.release_event is not None and then.release_event is not None:
            event = partial(self.event, first.release_event, then.release_event)

            def release(rounds: int) -> DpEvent:
                return event(queries_in(rounds))

        if (
            first.event_if_sampling_revealed is not None
            and then.event_if_sampling_revealed is not None
        ):
            seen = partial(
                self.event, first.event_if_sampling_revealed, then.event_if_sampling_revealed
            )
        claim = None
        if first.claim is not None and then.claim is not None:
            claim = Claim(
                lambda rounds, delta: claimed_by_rdp(
                    event(queries_in(rounds)), delta, then.relation
                ),
                f"{first.claim.formula}, and {then.claim.formula}",
                f"{first.claim.source}, and {then.claim.source}",
            )

        def amplified(adversary: str) -> str | None:
            parts = first.amplified_by[adversary], then.amplified_by[adversary]
            return "; then ".join(part_ for part_ in parts if part_) or None

        return replace(
            then,
            sampler=f"{first.sampler}; then {then.sampler}",
            response_shape=self._shape,
            server_event=server,
            release_event=release,
            event_if_sampling_revealed=seen,
            amplified_by={adversary: amplified(adversary) for adversary in then.amplified_by},
            claim=claim,
            server_rounds=between,
            value_ranges=first.value_ranges + then.value_ranges,
        )

    def _shape(self, rows: int, round_: int) -> tuple[int, ...]:
        if round_ < self.first_queries:
            return self.first.plan.response_shape(rows, round_)
        return self.then.plan.response_shape(rows, round_ - self.first_round)

    def worst_cases(self) -> list[WorstCase]:
        """Return the worst cases of both phases."""
        plan, first_round = self.then.plan, self.first_round
        first_cases = [replace(case, custom_noise=True) for case in self.first.worst_cases()]
        last_cases = self.then.worst_cases()
        return [
            *first_cases,
            *(replace(case, round=case.round + first_round, plan=plan) for case in last_cases),
        ]


def main_method_state(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the server state of the main method, without that of a first phase."""
    return part(state, "then") or state


def requires_sums() -> FedgenError:
    """Return the error for a method that does not support pre-training."""
    return FedgenError(
        "warm_up",
        "supports methods whose clients respond with noisy sums of gradients only",
        "use warm_up=none, or method=dpgan, dp_wgan_gp, psg or dpdm",
    )


def warm_up(
    first: Method,
    then: Method,
    reference: Callable[[], Method],
    classes: int,
    rounds: int,
    batch: int,
) -> Method:
    """Return ``then`` pre-trained on samples of ``first``; see ``WarmUp``.

    Args:
        first: a method that ends with its last query.
        then: a method with one kind of query, to all clients in each round, whose clients keep no
            state.

    Raises:
        FedgenError: for other methods.
    """
    if first.plan.fixed_rounds is None or first.plan.fixed_rounds != first.plan.query_rounds:
        raise FedgenError(
            "warm_up.method", "continues after its releases", "use mixture or central_images"
        )
    queries_all = not then.cohort.is_sampled and not then.client.prepare_steps
    queries_all &= then.trained_per_round == 0 and then.plan.query_rounds is None
    units = {(method.plan.unit, method.plan.relation) for method in (first, then)}
    if not queries_all or len(units) > 1:
        raise requires_sums()
    both = WarmUp(first, then, reference(), classes, rounds, batch)
    server = replace(
        then.server,
        init=both.init,
        broadcast=lambda *_: {},
        query=both.query,
        update=both.update,
        generator=both.generator,
        membership_scores=both.membership_scores,
        metrics=both.metrics,
        server_step=both.server_step,
    )
    return replace(
        then,
        client=ClientProgram(both.respond),
        server=server,
        plan=both.plan(),
        worst_cases=both.worst_cases,
        aggregate=both.aggregate,
    )
