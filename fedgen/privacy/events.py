"""Coins to privacy events: one random draw, one node around all that it gates.

The vocabulary is dp_accounting's, and one node of our own:

``GaussianDpEvent(sigma)``
    one Gaussian release; ``sigma`` is the noise multiplier, std over L2 sensitivity under the
    stated neighbouring relation.
``SampledWithoutReplacementDpEvent(K, m, event)``
    a fresh, secret, uniform draw of ``m`` out of ``K`` (disjoint subsets, or rows) decides whose
    contribution goes into ``event``; whatever is not drawn contributes nothing and keeps no trace
    of the draw.
``PoissonSampledDpEvent(q, event)``
    the same, each row drawn by itself with probability ``q``.
``PoissonSampledGroup(q, k, event)``
    the same, of k rows that are one person's, each drawn by itself: what ``event`` takes in of the
    person is a Binomial(k, q) number of them.
``RevealedDraw(q, event)``
    the record's subset is drawn with probability ``q``, independently each time, but the adversary
    is assumed to see the draw: no amplification, yet the number of visits is a random number.
``SelfComposedDpEvent(event, count)``
    ``count`` of them.
``ComposedDpEvent(events)``
    one after the other.
``Contribution()``
    a clipped vector without noise, to an aggregator that is trusted: no bound against it.
``NonPrivateDpEvent()``
    no bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import Any

import attr
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
)

_MOST_OF_A_GROUP = 10**6

Spend = Mapping[DpEvent, int]
"""Canonical spend: leaf events (a Gaussian, a draw around a Gaussian, no bound) and how often."""


class Unit(Enum):
    """Whose data one protected unit is."""

    RECORD = "record"
    CLIENT = "client"
    PERSON = "person"


class Relation(Enum):
    """When two data sets are neighbours."""

    REPLACE_ONE = "replace_one"
    ADD_OR_REMOVE_ONE = "add_or_remove_one"


@attr.s(frozen=True, slots=True, auto_attribs=True)
class RevealedDraw(DpEvent):  # type: ignore[misc]
    """A draw with probability ``probability`` that the adversary is assumed to see."""

    probability: float
    event: DpEvent


@attr.s(frozen=True, slots=True, auto_attribs=True)
class PoissonSampledGroup(DpEvent):  # type: ignore[misc]
    """Draws of ``size`` rows of one person, each with probability ``sampling_probability``."""

    sampling_probability: float
    size: int
    event: DpEvent


@attr.s(frozen=True, slots=True, auto_attribs=True)
class Contribution(DpEvent):  # type: ignore[misc]
    """A bounded vector that an aggregator takes in on trust; what comes out is another event."""


def repeat(event: DpEvent, count: int) -> DpEvent:
    """``count`` independent (adaptive) repetitions of ``event``."""
    return event if count == 1 else SelfComposedDpEvent(event, count)


def canonical(event: DpEvent, count: int = 1) -> Spend:
    """The spend of ``count`` times ``event``.

    Gaussians inside a draw melt into one: n-fold composition of noise multiplier sigma is one
    Gaussian with sigma / sqrt(n). A draw of everybody is no draw.

    Raises:
        ValueError: for an event, or a nesting of draws, that has no accountant here.
    """
    match event:
        case SelfComposedDpEvent(event=inner, count=times):
            return canonical(inner, count * times)
        case ComposedDpEvent(events=parts):
            spend: Counter[DpEvent] = Counter()
            for part in parts:
                spend.update(canonical(part, count))
            return spend
        case GaussianDpEvent(noise_multiplier=sigma) if not 0 < sigma < math.inf:
            return {NonPrivateDpEvent(): count}  # whoever says so, of a number that is none too
        case GaussianDpEvent() | NonPrivateDpEvent() | Contribution():
            return {event: count}
        case SampledWithoutReplacementDpEvent(
            source_dataset_size=population, sample_size=taken, event=inner
        ):
            gate = _single_gaussian(inner)
            if taken >= population:
                return canonical(gate, count)
            return {SampledWithoutReplacementDpEvent(population, taken, gate): count}
        case PoissonSampledDpEvent(sampling_probability=rate, event=inner):
            gate = _single_gaussian(inner)
            if rate >= 1:
                return canonical(gate, count)
            return {PoissonSampledDpEvent(rate, gate): count}
        case PoissonSampledGroup(sampling_probability=rate, size=size, event=inner):
            gate = _single_gaussian(inner)
            if rate >= 1 or size == 1:
                return canonical(of_group(PoissonSampledDpEvent(rate, gate), size), count)
            return {PoissonSampledGroup(rate, size, gate): count}
        case RevealedDraw(probability=probability, event=inner):
            gate = _single_gaussian(inner)
            if probability >= 1:
                return canonical(gate, count)
            return {RevealedDraw(probability, gate): count}
        case _:
            raise ValueError(f"no accountant for {event}")


def _single_gaussian(event: DpEvent) -> GaussianDpEvent:
    """All that one draw gates, as a single Gaussian. One stays as it is, to the last digit: what is
    canonical is what it is canonical of, however often it goes there and back."""
    precision, leaves = 0.0, canonical(event)
    if len(leaves) == 1:
        [(alone, count)] = leaves.items()
        if isinstance(alone, GaussianDpEvent) and count == 1:
            return alone
    for leaf, times in leaves.items():
        if not isinstance(leaf, GaussianDpEvent):
            raise ValueError(f"a draw inside a draw has no accountant: {event}")
        precision += times / leaf.noise_multiplier**2
    return GaussianDpEvent(1 / math.sqrt(precision))


def of_group(event: DpEvent, size: int) -> DpEvent:
    """What a sum of bounded rows costs somebody who has ``size`` of them, of the event that it
    costs a single row, by adding or removing. Together they move the sum by at most ``size`` times
    as much; of Poisson draws, by as many times as there are of them in the batch: the loss is at
    most that of a mixture of Gaussians (Ganesh 2024, "Tight group-level DP guarantees for DP-SGD
    with sampling via mixture of Gaussians mechanisms").

    Raises:
        ValueError: for an event that is none of these.
    """
    if size == 1:
        return event
    match event:
        case GaussianDpEvent(noise_multiplier=sigma):
            return GaussianDpEvent(sigma / size)
        case PoissonSampledDpEvent(sampling_probability=rate, event=inner):
            gate = _single_gaussian(inner)
            return of_group(gate, size) if rate >= 1 else PoissonSampledGroup(rate, size, gate)
        case Contribution() | NonPrivateDpEvent():
            return event
        case _:
            raise ValueError(f"no bound for a group of rows: {event}")


def total(spends: list[Spend]) -> Spend:
    """The sum of several spends."""
    counter: Counter[DpEvent] = Counter()
    for spend in spends:
        counter.update(spend)
    return dict(counter)


def with_noise(spend: Spend, factor: float) -> Spend:
    """The spend if every Gaussian had ``factor`` times its noise. Raises ValueError for what has
    none."""
    found: Counter[DpEvent] = Counter()
    for event, count in spend.items():
        match event:
            case GaussianDpEvent(noise_multiplier=sigma):
                found[GaussianDpEvent(factor * sigma)] += count
            case (
                PoissonSampledDpEvent(event=gate)
                | PoissonSampledGroup(event=gate)
                | SampledWithoutReplacementDpEvent(event=gate)
                | RevealedDraw(event=gate)
            ):
                thinned = GaussianDpEvent(factor * gate.noise_multiplier)
                found[attr.evolve(event, event=thinned)] += count
            case _:
                raise ValueError(f"there is no noise in {event}")
    return dict(found)


def with_draws_seen(spend: Spend) -> Spend:
    """The spend if the adversary saw what Poisson draws took: it costs no less."""
    found: Counter[DpEvent] = Counter()
    for event, count in spend.items():
        if isinstance(event, PoissonSampledDpEvent):
            event = RevealedDraw(event.sampling_probability, event.event)
        elif isinstance(event, PoissonSampledGroup):  # as if all were drawn each time
            event = of_group(event.event, event.size)
        found[event] += count
    return dict(found)


def to_json(event: DpEvent) -> dict[str, Any]:
    """The event as plain data; equal events have equal texts, whole numbers or not."""
    match event:
        case GaussianDpEvent(noise_multiplier=sigma):
            return {"event": "gaussian", "noise_multiplier": float(sigma)}
        case SelfComposedDpEvent(event=inner, count=count):
            return {"event": "repeat", "count": count, "of": to_json(inner)}
        case SampledWithoutReplacementDpEvent(
            source_dataset_size=population, sample_size=taken, event=inner
        ):
            return {"event": "draw", "of": population, "take": taken, "gates": to_json(inner)}
        case PoissonSampledDpEvent(sampling_probability=rate, event=inner):
            return {"event": "poisson", "rate": float(rate), "gates": to_json(inner)}
        case PoissonSampledGroup(sampling_probability=rate, size=size, event=inner):
            gated = to_json(inner)
            return {"event": "poisson_group", "rate": float(rate), "size": size, "gates": gated}
        case RevealedDraw(probability=probability, event=inner):
            gated = to_json(inner)
            return {"event": "revealed_draw", "probability": float(probability), "gates": gated}
        case NonPrivateDpEvent():
            return {"event": "non_private"}
        case Contribution():
            return {"event": "contribution"}
        case _:
            raise ValueError(f"no JSON form for {event}")


def from_json(data: Mapping[str, Any]) -> DpEvent:
    """The inverse of ``to_json``; raises ValueError for data that is no event."""
    match data:
        case {"event": "gaussian", "noise_multiplier": float() | int() as sigma}:
            return GaussianDpEvent(float(sigma))
        case {"event": "repeat", "count": int() as count, "of": dict() as inner}:
            return SelfComposedDpEvent(from_json(inner), count)
        case {
            "event": "draw",
            "of": int() as population,
            "take": int() as taken,
            "gates": inner,
        } if 0 < taken <= population:
            return SampledWithoutReplacementDpEvent(population, taken, from_json(inner))
        case {"event": "poisson", "rate": float() | int() as rate, "gates": inner} if (
            0 <= rate <= 1
        ):
            return PoissonSampledDpEvent(float(rate), from_json(inner))
        case {
            "event": "poisson_group",
            "rate": float() | int() as rate,
            "size": int() as size,
            "gates": inner,
        } if 0 <= rate <= 1 and 1 <= size <= _MOST_OF_A_GROUP:
            return PoissonSampledGroup(float(rate), size, from_json(inner))
        case {
            "event": "revealed_draw",
            "probability": float() | int() as probability,
            "gates": inner,
        } if 0 <= probability <= 1:
            return RevealedDraw(float(probability), from_json(inner))
        case {"event": "non_private"}:
            return NonPrivateDpEvent()
        case {"event": "contribution"}:
            return Contribution()
        case _:
            raise ValueError(f"not a privacy event: {data}")


def in_words(spend: Spend) -> str:
    """The spend in a sentence fragment."""
    words = []
    for event, count in spend.items():
        match event:
            case GaussianDpEvent(noise_multiplier=sigma):
                plural = "" if count == 1 else "s"
                words.append(f"{count:,} Gaussian release{plural} at noise multiplier {sigma:.4g}")
            case SampledWithoutReplacementDpEvent(
                source_dataset_size=population, sample_size=taken, event=gate
            ):
                words.append(
                    f"{count:,} secret draws of {taken} out of {population}, each gating one "
                    f"Gaussian release at noise multiplier {gate.noise_multiplier:.4g}"
                )
            case PoissonSampledDpEvent(sampling_probability=rate, event=gate):
                words.append(
                    f"{count:,} secret Poisson draws at rate {rate:.4g}, each gating one Gaussian "
                    f"release at noise multiplier {gate.noise_multiplier:.4g}"
                )
            case PoissonSampledGroup(sampling_probability=rate, size=size, event=gate):
                words.append(
                    f"{count:,} secret Poisson draws at rate {rate:.4g} of up to {size} images of "
                    f"a person, each gating one Gaussian release at noise multiplier "
                    f"{gate.noise_multiplier:.4g} of one of them"
                )
            case RevealedDraw(probability=probability, event=gate):
                words.append(
                    f"{count:,} draws with probability {probability:.4g} that the adversary sees, "
                    f"each gating one Gaussian release at noise multiplier "
                    f"{gate.noise_multiplier:.4g}"
                )
            case Contribution():
                words.append(f"{count:,} contributions without noise, to a trusted aggregator")
            case _:
                words.append("releases without noise")
    return ", ".join(words) or "nothing"
