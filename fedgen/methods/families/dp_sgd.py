"""DP-SGD (Abadi et al. 2016): sums of clipped gradients over Poisson batches, and their plan.

The sum is that of one client, or of the records of all clients (``privacy.aggregation``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dp_accounting import DpEvent

from fedgen.config.constraints import missing_count
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
from fedgen.privacy.aggregation import Sent
from fedgen.privacy.batch_sampling import PoissonSampling
from fedgen.privacy.events import Relation, Unit, repeat
from fedgen.privacy.mechanisms import ClientMean, GradientSum, SumGaussian, aggregator
from fedgen.privacy.routing import Routing
from fedgen.randomness import RandomStreams

RELATION = Relation.ADD_OR_REMOVE_ONE


def gradient_sum(
    facts: PublicFacts,
    noise_multiplier: float | None,
    clip: float,
    batch: int,
    sampling_rate: float | None,
    rows: int | None = None,
) -> GradientSum:
    """Return the mechanism of a step of DP-SGD: a noisy sum over a Poisson batch, divided by the
    public ``batch``, of one client or of all clients; at client level, the noisy sum of the means
    of clients. ``noise_multiplier`` None: neither clipping nor noise.

    Args:
        sampling_rate: probability of each record in a step; None: the rate at which the expected
            batch size is ``batch``.
        rows: public estimate of the number of records of all clients.

    Raises:
        FedgenError: if neither is given.
        ValueError: for a sampling rate outside (0, 1].
    """
    unit = facts.unit or Unit.RECORD
    # a trusted aggregator clips the message of a client again
    client_clip = clip if unit is Unit.CLIENT else math.inf
    aggregation = facts.aggregation(facts.clients, client_clip)
    divisor = float(batch) if aggregation.is_local else batch / facts.clients
    if sampling_rate is None:
        sampling_rate = rate_for_batch(facts, batch, rows, of_each=aggregation.is_local)
    sampling = PoissonSampling(sampling_rate)
    if noise_multiplier is None:
        return SumGaussian(math.inf, 0.0, sampling, divisor, RELATION, unit)
    if unit is Unit.CLIENT:
        return ClientMean(clip, noise_multiplier, sampling, divisor, RELATION, aggregation)
    return SumGaussian(
        clip,
        noise_multiplier,
        sampling,
        divisor,
        RELATION,
        unit,
        aggregation,
    )


def rate_for_batch(
    facts: PublicFacts, batch: int, rows: int | None, *, of_each: bool = False
) -> float:
    """Return the sampling rate at which the expected batch size of all clients, or ``of_each``
    client, is ``batch``; at most 1.

    Args:
        rows: public estimate of the number of records of all clients.

    Raises:
        FedgenError: if it is None, or a batch exceeds the number of protected units.
    """
    if rows is None:
        raise missing_count("public_rows", "method.sampling_rate is derived from it")
    units = facts.units_of_run(rows)
    if batch > units:
        key = "public_persons" if facts.unit is Unit.PERSON else "public_rows"
        raise FedgenError("method.batch", f"{batch} exceeds data.{key}={units:g}", "lower it")
    return min(1.0, batch * (facts.clients if of_each else 1) / units)


def build_method(
    facts: PublicFacts,
    mechanism: GradientSum,
    respond: Callable[[State, Query, Shard, int, RandomStreams], Sent],
    size: int,
    server: ServerProgram,
    worst_case: Callable[[], WorstCase],
    source: str | None,
) -> Method:
    """Return the method in which all clients respond with sums of ``gradient_sum``, or with the
    result of several steps along them, and keep no state.

    Args:
        respond: see ``ClientProgram``.
        size: number of entries of a response.
        worst_case: worst case for audits.
        source: source of the published ε; None: no claim.
    """
    plan = _plan(mechanism, size, source)
    return Method(
        ClientProgram(respond),
        server,
        plan,
        Routing("mean", facts.clients),
        0,
        lambda: [worst_case().for_unit(plan.unit)],
        aggregator(mechanism),
    )


def _plan(mechanism: GradientSum, size: int, source: str | None) -> Plan:
    """Return the plan of steps along noisy sums: a step is one sampled Gaussian against everyone,
    because clients sample their batches secretly; with a trusted aggregator, against all others. At
    client level a step is one Gaussian."""

    def event(steps: int) -> DpEvent:
        return repeat(mechanism.event(), steps)

    assert isinstance(mechanism.sampling, PoissonSampling)
    rate = mechanism.sampling.rate
    is_sampled = rate < 1 and mechanism.unit is not Unit.CLIENT
    reason = "every batch contains all records: no subsampling"
    if mechanism.unit is Unit.CLIENT:
        reason = "all records of a client may change: sampling among them hides nothing"
    claim = None
    if source and mechanism.unit is Unit.RECORD:
        formula = "RDP of the sampled Gaussian, one sample per step"
        claim = Claim.by_rdp(event, RELATION, formula, source)
    return Plan.from_mechanism(
        mechanism,
        event,
        lambda *_: (1, size),
        sampler=f"Poisson sampling at rate {rate:.4g}" if is_sampled else "none",
        amplified_by=f"secret Poisson sampling at rate {rate:.4g}" if is_sampled else None,
        not_amplified_because=reason,
        claim=claim,
    )
