"""Sums of clipped gradients over Poisson batches, and what they cost: DP-SGD (Abadi et al. 2016),
of one client, or of all rows together (``privacy.aggregation``)."""

from __future__ import annotations

import math
from collections.abc import Callable

from dp_accounting import DpEvent

from fedgen.coins import Coins
from fedgen.data.datasets import Shard
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
    State,
    WorstCase,
)
from fedgen.privacy.accounting import claimed_by_rdp
from fedgen.privacy.batches import PoissonBatches
from fedgen.privacy.events import Contribution, Relation, Unit, repeat
from fedgen.privacy.mechanisms import ClientMean, GradientSum, PlainSum, SumGaussian, total
from fedgen.privacy.releases import Local, Sent, Trusted
from fedgen.privacy.routing import Routing

RELATION = Relation.ADD_OR_REMOVE_ONE


def gradient_sum(
    facts: PublicFacts,
    noise_multiplier: float | None,
    clip: float,
    batch: int,
    sampling_rate: float,
) -> GradientSum:
    """What a step of DP-SGD asks of private rows: a noised sum over a Poisson batch, divided by
    the public ``batch``, of one client or of all together; or, at client level, the noised sum of
    clients' means. None neither clips nor noises.

    Raises:
        FedgenError: for a sampling rate that is none.
    """
    if not 0 < sampling_rate <= 1:
        raise FedgenError(
            "method.sampling_rate",
            f"must lie above 0 and be at most 1, got {sampling_rate:g}",
            "it is the expected batch over the number of rows",
        )
    batches, unit = PoissonBatches(sampling_rate), facts.unit or Unit.RECORD
    # an aggregator that is trusted clips again what a client sends as a whole
    most = clip if unit is Unit.CLIENT else math.inf
    meeting = facts.aggregation(facts.clients, most)
    divisor = float(batch) if isinstance(meeting, Local) else batch / facts.clients
    if noise_multiplier is None:
        return PlainSum(batches, divisor, unit)
    if unit is Unit.CLIENT:
        return ClientMean(clip, noise_multiplier, batches, divisor, RELATION, meeting)
    return SumGaussian(
        clip,
        noise_multiplier,
        batches,
        divisor,
        RELATION,
        unit,
        meeting,
        most=facts.images_per_person,
    )


def method_of(
    facts: PublicFacts,
    mechanism: GradientSum,
    answer: Callable[[State, Query, Shard, int, Coins], Sent],
    size: int,
    server: ServerProgram,
    worst_case: Callable[[], WorstCase],
    rate: float,
    source: str | None,
) -> Method:
    """The method whose clients, all of them, answer with such sums, or with where they lead, and
    keep nothing.

    Args:
        answer: see ``ClientProgram``. size: its numbers. worst_case: what an audit plays.
        rate: of the Poisson draw. source: of the epsilon that is claimed; None: nobody claims one.
    """
    plan = _plan(mechanism, size, rate, source)
    return Method(
        ClientProgram(answer),
        server,
        plan,
        Routing("mean", facts.clients),
        0,
        lambda: [worst_case().of_person(plan.images_per_person)],
        total(mechanism),
    )


def _plan(mechanism: GradientSum, answer: int, rate: float, source: str | None) -> Plan:
    """What steps along noised sums promise to spend at most: a step is one sampled Gaussian,
    against everybody, since clients draw their batches in secret; where the aggregator makes the
    noise, against all others. At client level a step is one Gaussian. ``answer``: its numbers."""
    private = not isinstance(mechanism, PlainSum)
    trusted = isinstance(mechanism.aggregation, Trusted)

    def event(answered: int) -> DpEvent:
        return repeat(mechanism.event(), answered)

    drawn = rate < 1 and mechanism.unit is not Unit.CLIENT
    by = f"secret Poisson draw of rows at rate {rate:.4g}" if private and drawn else None
    reason = None if by else "every row is in every batch: there is no draw"
    if mechanism.unit is Unit.CLIENT:
        reason = "a client's rows may change together: the draw among them hides nothing"
    if not private:
        reason = "nothing is clipped and nothing is noised"
    return Plan(
        unit=mechanism.unit,
        relation=RELATION,
        sampler=f"Poisson draw of rows at rate {rate:.4g}" if drawn else "none",
        rows_per_round=1,
        answer=lambda *_: (1, answer),
        server=(lambda answered: repeat(Contribution(), answered)) if trusted else event,
        release=event if trusted else None,
        seen=event if trusted else None,
        amplified_by={"server": None if trusted else by, "release": by},
        reasons={"server": TRUSTING if trusted else reason, "release": reason},
        claim=Claim(
            lambda rounds, delta: claimed_by_rdp(event(rounds), delta, RELATION),
            "RDP of the sampled Gaussian, one draw a step",
            source,
        )
        if source and isinstance(mechanism, SumGaussian) and mechanism.unit is Unit.RECORD
        else None,
        images_per_person=mechanism.most if isinstance(mechanism, SumGaussian) else 1,
        aggregation=mechanism.aggregation,
        extents=() if isinstance(mechanism, PlainSum) else (mechanism.extent,),
    )
