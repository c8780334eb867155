"""Who answers a question about generated images, and what that costs: all critics of one client, or
clients with a critic each; everybody, or whom a secret draw chooses.

One client protects its records: one record is in one critic's part, and so is behind one of the
answers that are averaged. Of several, each is protected as a whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from dp_accounting import DpEvent, GaussianDpEvent

from fedgen.coins import Coins
from fedgen.ensemble.critics import Ballot, Companion, Critics, Losses, Networks, Settings, at_once
from fedgen.errors import FedgenError
from fedgen.method import (
    TRUSTING,
    Claim,
    ClientProgram,
    Method,
    Plan,
    PublicFacts,
    Query,
    ServerProgram,
    WorstCase,
)
from fedgen.privacy.accounting import claimed_by_rdp
from fedgen.privacy.batches import OwnDraw
from fedgen.privacy.bounds import Bound
from fedgen.privacy.events import Contribution, Relation, Unit, repeat
from fedgen.privacy.mechanisms import Mechanism, NoMechanism, RowGaussian, total
from fedgen.privacy.releases import Aggregation, Local, Secure, Trusted
from fedgen.privacy.routing import Mode, Routing, Sampling


@dataclass(frozen=True)
class Answering:
    """Public parameters of who answers a row.

    bound: what an answer to a row is made to lie in.
    critics: of a single client; each of several clients holds one.
    routing, answerers, sampling: see ``Routing``; over critics for one client, over clients for
        several.
    by_clients: each client draws itself, by a secret coin for each round, and those not drawn
        answer noise alone.
    on_query: critics train when they are drawn, instead of on a public rotation.

    Raises:
        FedgenError: for parameters that contradict each other.
    """

    facts: PublicFacts
    bound: Bound
    critics: int
    routing: Mode = "mean"
    answerers: int = 1
    sampling: Sampling = "fixed"
    by_clients: bool = False
    on_query: bool = False

    def __post_init__(self) -> None:
        _check(self)
        _check_draws(self)

    @property
    def federated(self) -> bool:
        """Whether clients answer with one critic each."""
        return self.facts.clients > 1

    @property
    def count(self) -> int:
        """Critics of a client."""
        return 1 if self.federated else self.critics

    @property
    def unit(self) -> Unit:
        """Who is protected."""
        return Unit.CLIENT if self.federated else Unit.RECORD

    @property
    def inside(self) -> Routing:
        """The draw over the critics of a client."""
        if self.federated:
            return Routing("mean", 1)
        return Routing(self.routing, self.count, self.answerers)

    @property
    def cohort(self) -> Routing:
        """The server's draw over clients."""
        if not self.federated:
            return Routing("mean", 1)
        if self.by_clients:
            return Routing("mean", self.facts.clients)
        return Routing(self.routing, self.facts.clients, self.answerers, self.sampling)

    @property
    def own(self) -> OwnDraw:
        """A client's own coin."""
        if not self.by_clients:
            return OwnDraw()
        return OwnDraw(self.answerers / self.facts.clients, self.facts.draws_are_hidden)

    @property
    def meeting(self) -> Aggregation:
        """How answers of clients meet."""
        radius = self.bound.radius / self.own.rate
        return self.facts.aggregation(self.cohort.answers_per_row, radius)

    @property
    def relation(self) -> Relation:
        """Of what the mechanism is private to."""
        summed = self.federated and not isinstance(self.meeting, Local)
        if self.by_clients or (summed and not self.cohort.drawn):
            return Relation.ADD_OR_REMOVE_ONE
        return Relation.REPLACE_ONE

    def mechanism(self, noise_multiplier: float | None) -> Mechanism:
        """What bounds and noises an answer; without noise, for None."""
        if noise_multiplier is None:
            return NoMechanism(self.bound, self.inside, self.unit, self.own)
        return RowGaussian(
            self.bound,
            noise_multiplier,
            self.inside,
            not self.on_query,
            self.unit,
            self.relation,
            self.own,
            self.meeting,
        )


def claimed(gate: DpEvent, rows: int, formula: str, source: str) -> Claim:
    """What a paper's formula gives: RDP of ``gate`` for each of a round's answered rows."""
    return Claim(
        lambda rounds, delta: claimed_by_rdp(
            repeat(gate, rounds * rows), delta, Relation.REPLACE_ONE
        ),
        formula,
        source,
    )


def claim_of_votes(
    noise_multiplier: float | None, rows: int, formula: str, source: str
) -> Claim | None:
    """What a paper claims whose teachers all vote on each row; nothing without noise."""
    if noise_multiplier is None:
        return None
    return claimed(GaussianDpEvent(noise_multiplier), rows, formula, source)


def critics_of(
    answering: Answering,
    noise_multiplier: float | None,
    nets: Networks,
    losses: Losses,
    ballot: Ballot,
    rows: int,
    answer: tuple[int, ...],
    settings: Settings,
    companion: Companion | None = None,
) -> Critics:
    """The critics of a client.

    Args:
        rows: of a question. answer: the shape of what is answered to one of them.
    """
    return Critics(
        nets,
        answering.mechanism(noise_multiplier),
        ballot,
        answer,
        answering.inside,
        answering.on_query and not answering.federated,
        rows,
        answering.count,
        min(settings["critics_per_step"], answering.count),
        at_once(nets.critic, nets.device),
        settings["critic_steps"],
        settings["critic_batch"],
        (settings["critic_learning_rate"], settings["critic_betas"]),
        losses,
        settings["warm_start"],
        companion,
    )


def method_of(
    answering: Answering,
    client: Critics,
    server: ServerProgram,
    settings: Settings,
    claim: Claim | None,
) -> Method:
    """The method of these critics and this server."""
    facts, federated, rows = answering.facts, answering.federated, client.rows_per_query
    turn = settings["critics_per_step"]

    def worst_case() -> WorstCase:
        coins = Coins.of(0, "seeded")
        asked = server.query(server.init(coins), 0, coins)
        assert asked is not None
        labels = torch.ones_like(asked.rows["labels"])
        question = Query({**asked.rows, "labels": labels}, asked.shared)
        return client.worst_case(question, facts.shape, answering.relation)

    return Method(
        ClientProgram(
            client.release,
            client.train,
            len(client.groups) if client.warm_start else 0,
            client.prepare,
            draws_anew=not client.on_query,
        ),
        server,
        _plan(answering, client.mechanism, rows, client.answer, claim),
        answering.cohort,
        None if federated and answering.on_query else min(turn, facts.clients),
        lambda: [worst_case()],
        total(client.mechanism),
    )


def _plan(
    answering: Answering,
    mechanism: Mechanism,
    rows: int,
    answer: tuple[int, ...],
    claim: Claim | None,
) -> Plan:
    """What a run promises to spend at most.

    Federated, the server knows whom it asked and sees each answer by itself: a client's cost is
    what it answered. In the release view alone the draw of clients is secret, and what is published
    follows from the sums of the answers, in which the noise of all who answer adds up (nobody who
    answers is this adversary: they know their own). One client draws its critic in secret: the draw
    amplifies against the server too, and so do coins that clients flip themselves.

    Where the noise is made for the sum of the answers, ``mechanism``'s is that of the sum.
    """
    facts, federated, on_query = answering.facts, answering.federated, answering.on_query
    draw = answering.cohort if federated else answering.inside
    hidden = not on_query and (facts.draws_are_hidden or not federated)
    noise = mechanism.noise_multiplier if isinstance(mechanism, RowGaussian) else None
    meeting, own = mechanism.aggregation, mechanism.draw
    local, trusted = isinstance(meeting, Local), isinstance(meeting, Trusted)
    by_clients = own.rate < 1
    of_sums = federated and local and facts.all_answer and draw.count_is_fixed
    of_sums = of_sums and not by_clients  # their own bound holds for everybody

    def server(answered: int) -> DpEvent:
        if trusted:
            return repeat(Contribution(), answered)
        if federated and not by_clients:
            return mechanism.event(answered)
        return repeat(mechanism.event(rows), answered // rows)

    def release(rounds: int) -> DpEvent:
        assert noise is not None
        if of_sums:
            return repeat(draw.event_of_sums(rows, noise, hidden), rounds)
        if by_clients:
            return repeat(mechanism.event(rows), rounds)
        return repeat(draw.event(rows, noise, hidden), rounds)

    def seen(answered: int) -> DpEvent:
        assert noise is not None
        everybody = Routing("mean", draw.answers_per_row if of_sums else 1)
        return everybody.event_of_sums(answered, noise, hidden=False)

    if noise is None:
        reason: str | None = "nothing is clipped and nothing is noised"
    elif by_clients:
        reason = None if own.hidden else "a client that fails shows by the gap whom a draw chose"
    elif not draw.drawn:
        reason = "everybody answers every sample: there is no draw"
    elif on_query:
        reason = "critics train when they are drawn, so their state tells of past draws"
    elif draw.sampling == "poisson":
        reason = "a Poisson cohort shows who is absent by a missing answer"
    elif not hidden:
        reason = "a client that fails shows by the gap whom a draw chose"
    else:
        reason = None
    who = "clients" if federated else "critics"
    by = f"secret draw of {draw.take} of {draw.population} {who}" if reason is None else None
    if by_clients:
        by = f"secret coins of clients at rate {own.rate:.4g}" if reason is None else None
    asked = federated and not by_clients
    server_reason = "the server knows whom it asks" if asked and by else reason
    published = trusted or (asked and not (isinstance(meeting, Secure) and not draw.drawn))
    if of_sums and noise is not None and draw.answers_per_row > 1:
        by = f"{by}, whose noise adds up" if by else None
        reason = reason and f"{reason}; the noise of those who answer adds up"
    return Plan(
        unit=answering.unit,
        relation=mechanism.relation,
        sampler=f"coin of each client at rate {own.rate:.4g}"
        if by_clients
        else f"{draw.sampling} draw of {draw.take} of {draw.population} {who}, "
        f"{draw.mode.replace('_', ' ')}"
        if draw.drawn
        else "none",
        rows_per_round=rows,
        answer=lambda rows, _: (rows, *answer),
        longest=mechanism.longest(math.prod(answer))
        if isinstance(mechanism, RowGaussian) and local
        else math.inf,
        server=server,
        release=release if published and noise is not None else None,
        seen=seen if published and noise is not None else None,
        amplified_by={"server": None if asked or trusted else by, "release": by},
        reasons={"server": TRUSTING if trusted else server_reason, "release": reason},
        claim=claim,
        aggregation=meeting,
        extents=(mechanism.extent,) if isinstance(mechanism, RowGaussian) else (),
    )


def _check(who: Answering) -> None:
    """Raises FedgenError for parameters that contradict each other."""
    facts, population = who.facts, who.facts.clients if who.federated else who.count
    if facts.rows is not None and who.count > facts.rows:
        raise FedgenError(
            "method.critics",
            f"{who.count} critics are more than {facts.rows} rows",
            "lower it: each critic needs rows of its own",
        )
    if not 1 <= who.answerers <= population:
        raise FedgenError(
            "method.answerers", f"{who.answerers} of {population} cannot be drawn", "lower it"
        )
    if who.sampling == "poisson" and not who.federated:
        raise FedgenError(
            "method.cohort_sampling",
            "one client draws a fixed number of critics",
            "set method.cohort_sampling=fixed, or take several clients",
        )
    if who.on_query and who.routing == "mean":
        raise FedgenError(
            "method.critic_schedule",
            "on_query needs a draw, and routing=mean has none",
            "set method.critic_schedule=public",
        )


def _check_draws(who: Answering) -> None:
    """Raises FedgenError for draws of clients, or sums of their answers, that cannot be."""
    facts, federated = who.facts, who.federated
    if facts.unit is not None and facts.unit is not who.unit:
        raise FedgenError(
            "privacy.unit",
            f"cannot be {facts.unit.value} with {facts.clients} client(s)",
            "several clients hold a critic each and are protected as a whole; one protects records",
        )
    if who.by_clients and (not federated or who.routing != "per_step" or who.on_query):
        raise FedgenError(
            "method.draws",
            "clients flip a coin a round: several clients, and all rows of a round alike",
            "take several clients, method.routing=per_step and method.critic_schedule=public, or "
            "method.draws=server",
        )
    if facts.aggregating not in ("secure", "trusted") or not federated:
        return
    if who.routing == "per_sample":
        raise FedgenError(
            "privacy.aggregation",
            f"{facts.aggregating} adds up answers of the same clients to every row",
            "set method.routing=mean or per_step, or privacy.aggregation=local",
        )
    if who.sampling == "poisson" and who.routing != "mean" and not who.by_clients:
        raise FedgenError(
            "privacy.aggregation",
            f"{facts.aggregating} counts on a number of answers, and a Poisson cohort has any",
            "set method.draws=clients, or method.cohort_sampling=fixed",
        )
