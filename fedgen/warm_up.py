"""A warm start: a method whose networks have learnt from another's samples before they meet a row.

    first    its releases, at a noise multiplier of their own
    rest     rounds of the server alone: it plays the method with itself, as a single client
             without noise whose rows are fresh samples of what was released. PSG begins its set
             with such
    then     the method's own rounds

One run, one ledger, one epsilon: the releases of both phases compose, and what lies between is
post-processing. DP-FETA (Li, Gong et al., "From Easy to Hard", S&P 2025) is this, with
``central_images`` before ``dpdm``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from dp_accounting import ComposedDpEvent, DpEvent
from numpy.typing import NDArray
from torch import Tensor

from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.method import (
    Claim,
    ClientProgram,
    Method,
    Plan,
    Query,
    State,
    Tensors,
    WorstCase,
)
from fedgen.models.functional import join, part
from fedgen.privacy.accounting import claimed_by_rdp
from fedgen.privacy.releases import Sent


@dataclass(frozen=True)
class WarmUp:
    """Two methods as one.

    plain: ``then`` without noise, for one client, all of whose rows are in every batch.
    rest: rounds between the two. batch: samples of such a round.
    """

    first: Method
    then: Method
    plain: Method
    classes: int
    rest: int
    batch: int

    @property
    def asks(self) -> int:
        """Rounds of the first."""
        return self.first.plan.asked(self.first.plan.length or 0)

    @property
    def begins(self) -> int:
        """The second's first round."""
        return self.asks + self.rest

    # --- clients: each phase's own answers ------------------------------------------------------

    def answer(self, state: State, query: Query, shard: Shard, round_: int, coins: Coins) -> Sent:
        """Of the phase that the round is of, at its cost, whatever is asked."""
        if round_ < self.asks:
            return self.first.client.answer({}, query, shard, round_, coins.at("first"))
        return self.then.client.answer(state, query, shard, round_ - self.begins, coins)

    def total(self, answers: Sequence[NDArray[Any]], round_: int, coins: Coins) -> Tensor:
        """See ``Method``."""
        if round_ < self.asks:
            return self.first.total(answers, round_, coins)
        return self.then.total(answers, round_ - self.begins, coins)

    # --- the server -----------------------------------------------------------------------------

    def init(self, coins: Coins) -> Tensors:
        """Both states."""
        first, then = self.first.server.init(coins.at("first")), self.then.server.init(coins)
        return join(first=first, then=then)

    def query(self, state: Tensors, round_: int, coins: Coins) -> Query | None:
        """The phase's; none in between."""
        if round_ < self.asks:
            return self.first.server.query(part(state, "first"), round_, coins.at("first"))
        if round_ < self.begins:
            return None
        return self.then.server.query(part(state, "then"), round_ - self.begins, coins)

    def update(self, state: Tensors, answers: Tensor, round_: int, coins: Coins) -> Tensors:
        """The phase's."""
        if round_ < self.asks:
            here = coins.at("first")
            found = self.first.server.update(part(state, "first"), answers, round_, here)
            return {**state, **join(first=found)}
        found = self.then.server.update(part(state, "then"), answers, round_ - self.begins, coins)
        return {**state, **join(then=found)}

    def alone(self, state: Tensors, round_: int, coins: Coins) -> Tensors:
        """A round of the second method on samples of the first."""
        here, number = coins.at("rest", round_), round_ - self.asks
        labels = torch.randint(0, self.classes, (self.batch,), generator=here.public("labels"))
        known = self.first.server.generator(part(state, "first"))
        images = self.first.server.sample(known, labels, here)
        samples = Shard((images.cpu() * 255).round().to(torch.uint8), labels)
        server, then = self.plain.server, part(state, "then")
        if number == 0:
            own = here.at("begin")
            begun = server.begin(then, lambda labels: self.first.server.sample(known, labels, own))
            then = dict(begun)
        asked = server.query(then, number, here)
        assert asked is not None
        sent = self.plain.client.answer({}, asked, samples, number, here)
        mean = self.plain.total([sent.arrays["answer"]], number, here).float()
        return {**state, **join(then=server.update(then, mean, number, here))}

    def recognize(self, state: Tensors, images: Tensor, labels: Tensor, coins: Coins) -> Tensor:
        """As the second does."""
        return self.then.server.recognize(part(state, "then"), images, labels, coins)

    def shown(self, state: Tensors, held_out: Shard | None, coins: Coins) -> Mapping[str, float]:
        """Of the second."""
        return self.then.server.shown(part(state, "then"), held_out, coins)

    def generator(self, state: Tensors) -> Tensors:
        """The second's."""
        return self.then.server.generator(part(state, "then"))

    # --- what it costs --------------------------------------------------------------------------

    def event(
        self, first: Callable[[int], DpEvent], then: Callable[[int], DpEvent], answered: int
    ) -> DpEvent:
        """Of so many releases, by each phase's account."""
        if answered <= self.asks:
            return first(answered)
        return ComposedDpEvent([first(self.asks), then(answered - self.asks)])

    def plan(self) -> Plan:
        """Of both phases."""
        first, then = self.first.plan, self.then.plan
        rest = (self.asks, self.rest)
        asked = replace(then, rest=rest).asked
        server, seen, release = partial(self.event, first.server, then.server), None, None
        of_rounds = server
        if first.release is not None and then.release is not None:
            of_rounds = partial(self.event, first.release, then.release)

            def release(rounds: int) -> DpEvent:
                return of_rounds(asked(rounds))

        if first.seen is not None and then.seen is not None:
            seen = partial(self.event, first.seen, then.seen)
        claim = None
        if first.claim is not None and then.claim is not None:
            claim = Claim(
                lambda rounds, delta: claimed_by_rdp(
                    of_rounds(asked(rounds)), delta, then.relation
                ),
                f"{first.claim.formula}, and {then.claim.formula}",
                f"{first.claim.source}, and {then.claim.source}",
            )

        def amplified(who: str) -> str | None:
            draws = first.amplified_by[who], then.amplified_by[who]
            return "; then ".join(each for each in draws if each) or None

        return replace(
            then,
            sampler=f"{first.sampler}; then {then.sampler}",
            answer=self._shape,
            server=server,
            release=release,
            seen=seen,
            amplified_by={who: amplified(who) for who in then.amplified_by},
            claim=claim,
            rest=rest,
            extents=first.extents + then.extents,
        )

    def _shape(self, rows: int, round_: int) -> tuple[int, ...]:
        if round_ < self.asks:
            return self.first.plan.answer(rows, round_)
        return self.then.plan.answer(rows, round_ - self.begins)

    def worst_cases(self) -> list[WorstCase]:
        """Each phase's."""
        plan, begins = self.then.plan, self.begins
        sooner = [replace(each, fixed=True) for each in self.first.worst_cases()]
        later = self.then.worst_cases()
        return [*sooner, *(replace(each, round=each.round + begins, plan=plan) for each in later)]


def last_method(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Of a run's server, what its method has: without what went before it."""
    return part(state, "then") or state


def not_sums() -> FedgenError:
    """Of a method that cannot be begun so."""
    return FedgenError(
        "warm_up",
        "is for methods whose clients answer with noised sums of gradients of rows",
        "take warm_up=none, or method=dpgan, dp_wgan_gp, psg or dpdm",
    )


def warm_up(
    first: Method, then: Method, plain: Callable[[], Method], classes: int, rest: int, batch: int
) -> Method:
    """``then``, begun on samples of ``first``; see ``WarmUp``.

    Args:
        first: a method that is over when its clients were asked.
        then: a method of one kind of answer, from all clients in each round, who keep no state.

    Raises:
        FedgenError: for others.
    """
    if first.plan.length is None or first.plan.length != first.plan.asking_rounds:
        raise FedgenError(
            "warm_up.method", "goes on after its releases", "take mixture or central_images"
        )
    asks_all = not then.cohort.drawn and not then.client.preparations
    asks_all &= then.trained_per_round == 0 and then.plan.asking_rounds is None
    units = {(each.plan.unit, each.plan.relation) for each in (first, then)}
    if not asks_all or len(units) > 1:
        raise not_sums()
    both = WarmUp(first, then, plain(), classes, rest, batch)
    server = replace(
        then.server,
        init=both.init,
        broadcast=lambda *_: {},
        query=both.query,
        update=both.update,
        generator=both.generator,
        recognize=both.recognize,
        shown=both.shown,
        alone=both.alone,
    )
    return replace(
        then,
        client=ClientProgram(both.answer),
        server=server,
        plan=both.plan(),
        worst_cases=both.worst_cases,
        total=both.total,
    )
