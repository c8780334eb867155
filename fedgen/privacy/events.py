"""Privacy events: one node for each random choice, containing the events that it subsamples.

The vocabulary is that of dp_accounting, plus four nodes of our own (``PoissonSampledGroup``,
``RevealedSampling``, ``Selection``, ``Contribution``):

``GaussianDpEvent(sigma)``
    one Gaussian release; ``sigma`` is the noise multiplier, the standard deviation over the L2
    sensitivity under the neighbouring relation.
``SampledWithoutReplacementDpEvent(K, m, event)``
    a fresh, secret, uniform sample of ``m`` out of ``K`` (disjoint subsets, or records) selects the
    contributions to ``event``; data outside the sample contribute nothing and keep no trace of it.
``PoissonSampledDpEvent(q, event)``
    the same, with each record sampled independently with probability ``q``.
``PoissonSampledGroup(q, k, event)``
    the same for k records of one person: Binomial(k, q) of them contribute to ``event``.
``RevealedSampling(q, event)``
    the subset of a record is sampled with probability ``q``, independently each time, and the
    adversary sees the sample: no amplification, but a random number of visits.
``Selection(alternatives, mean, shape)``
    a secret random number of runs, each at a random point of a grid; only the best run is released
    (``fedgen.privacy.selection``). dp_accounting's ``RepeatAndSelectDpEvent`` has one event; a grid
    has several alternatives.
``SelfComposedDpEvent(event, count)``
    ``count`` adaptive repetitions.
``ComposedDpEvent(events)``
    sequential composition.
``Contribution()``
    a clipped vector without noise for a trusted aggregator: no bound against the aggregator.
``NonPrivateDpEvent()``
    no bound.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
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

_MAX_GROUP = 10**6
_MAX_PARAMETER = 10**6  # of the distribution of the number of runs
_MAX_DESCRIBED = 2  # alternatives of a selection

Spend = Mapping[DpEvent, int]
"""Canonical spend: leaf event (Gaussian, subsampled Gaussian, no bound) -> count."""


class Unit(Enum):
    """Protected unit: the data that a neighbouring data set adds, removes or replaces."""

    RECORD = "record"
    CLIENT = "client"
    PERSON = "person"


class Relation(Enum):
    """Neighbouring relation."""

    REPLACE_ONE = "replace_one"
    ADD_OR_REMOVE_ONE = "add_or_remove_one"


@attr.s(frozen=True, slots=True, auto_attribs=True)
class RevealedSampling(DpEvent):  # type: ignore[misc]
    """Sampling, with probability ``probability``, whose outcome the adversary is assumed to see."""

    probability: float
    event: DpEvent


@attr.s(frozen=True, slots=True, auto_attribs=True)
class PoissonSampledGroup(DpEvent):  # type: ignore[misc]
    """Poisson sampling of the ``size`` records of one person at rate ``sampling_probability``."""

    sampling_probability: float
    size: int
    event: DpEvent


@attr.s(frozen=True, slots=True, auto_attribs=True)
class Contribution(DpEvent):  # type: ignore[misc]
    """A bounded vector sent to a trusted aggregator; the output of the aggregator is another
    event."""


@attr.s(frozen=True, slots=True, auto_attribs=True)
class Selection(DpEvent):  # type: ignore[misc]
    """The best of a random number of runs.

    alternatives: distinct spends of runs at the grid points, each as sorted (event, count).
    mean, shape: of the truncated negative binomial distribution of the number of runs; shape 1 is
        the geometric, 0 the logarithmic distribution.
    """

    alternatives: tuple[tuple[tuple[DpEvent, int], ...], ...]
    mean: float
    shape: float

    @classmethod
    def of_spends(cls, spends: Iterable[Spend], mean: float, shape: float) -> Selection:
        """Return the selection among runs with these spends. Raises ValueError if one contains a
        selection."""
        spends = list(spends)
        if any(isinstance(event, cls) for event in itertools.chain(*spends)):
            raise ValueError("a run contains a selection")
        distinct = {tuple(sorted(spend.items(), key=repr)) for spend in spends}
        return cls(tuple(sorted(distinct, key=repr)), mean, shape)

    def map_events(self, change: Callable[[DpEvent], DpEvent]) -> Selection:
        """Return the selection with a change to each event of a run."""
        spends = [
            total([canonical(change(event), count) for event, count in spend])
            for spend in self.alternatives
        ]
        return Selection.of_spends(spends, self.mean, self.shape)


def repeat(event: DpEvent, count: int) -> DpEvent:
    """Return the event of ``count`` adaptive repetitions of ``event``."""
    return event if count == 1 else SelfComposedDpEvent(event, count)


def canonical(event: DpEvent, count: int = 1) -> Spend:
    """Return the canonical spend of ``count`` repetitions of ``event``.

    Gaussians within one sample are merged: n-fold composition of noise multiplier sigma is one
    Gaussian with sigma / sqrt(n). Sampling at rate 1 is no sampling.

    Raises:
        ValueError: for an event or nested sampling without an accountant.
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
            return {NonPrivateDpEvent(): count}  # also for NaN
        case Selection(alternatives=spends) if any(
            isinstance(part, NonPrivateDpEvent | Contribution)
            for part, _ in itertools.chain(*spends)
        ):
            return {NonPrivateDpEvent(): count}
        case GaussianDpEvent() | NonPrivateDpEvent() | Contribution() | Selection():
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
                return canonical(group_event(PoissonSampledDpEvent(rate, gate), size), count)
            return {PoissonSampledGroup(rate, size, gate): count}
        case RevealedSampling(probability=probability, event=inner):
            gate = _single_gaussian(inner)
            if probability >= 1:
                return canonical(gate, count)
            return {RevealedSampling(probability, gate): count}
        case _:
            raise ValueError(f"no accountant for {event}")


def _single_gaussian(event: DpEvent) -> GaussianDpEvent:
    """Return the events within a sample as one Gaussian. A single Gaussian is returned unchanged,
    so that ``canonical`` is idempotent to the last bit."""
    precision, leaves = 0.0, canonical(event)
    if len(leaves) == 1:
        [(leaf, count)] = leaves.items()
        if isinstance(leaf, GaussianDpEvent) and count == 1:
            return leaf
    for leaf, times in leaves.items():
        if not isinstance(leaf, GaussianDpEvent):
            raise ValueError(f"nested sampling has no accountant: {event}")
        precision += times / leaf.noise_multiplier**2
    return GaussianDpEvent(1 / math.sqrt(precision))


def group_event(event: DpEvent, size: int) -> DpEvent:
    """Return the event of a sum of bounded records for a person with ``size`` records, given its
    event for one record under adding or removing. Together they move the sum by at most ``size``
    times as much. With Poisson sampling, the shift is at most as many times as large as there are
    of them in the batch, and the loss is at most that of a mixture of Gaussians (Ganesh 2024,
    "Tight group-level DP guarantees for DP-SGD with sampling via mixture of Gaussians mechanisms").

    Raises:
        ValueError: for any other event.
    """
    if size == 1:
        return event
    match event:
        case GaussianDpEvent(noise_multiplier=sigma):
            return GaussianDpEvent(sigma / size)
        case PoissonSampledDpEvent(sampling_probability=rate, event=inner):
            gate = _single_gaussian(inner)
            return group_event(gate, size) if rate >= 1 else PoissonSampledGroup(rate, size, gate)
        case Selection():
            return event.map_events(lambda part: group_event(part, size))
        case Contribution() | NonPrivateDpEvent():
            return event
        case _:
            raise ValueError(f"no bound for a group of records: {event}")


def total(spends: list[Spend]) -> Spend:
    """Return the sum of several spends."""
    counter: Counter[DpEvent] = Counter()
    for spend in spends:
        counter.update(spend)
    return dict(counter)


def scale_noise(spend: Spend, factor: float) -> Spend:
    """Return the spend with ``factor`` times the noise of every Gaussian. Raises ValueError for an
    event without noise."""
    scaled: Counter[DpEvent] = Counter()
    for event, count in spend.items():
        match event:
            case GaussianDpEvent(noise_multiplier=sigma):
                scaled[GaussianDpEvent(factor * sigma)] += count
            case (
                PoissonSampledDpEvent(event=gate)
                | PoissonSampledGroup(event=gate)
                | SampledWithoutReplacementDpEvent(event=gate)
                | RevealedSampling(event=gate)
            ):
                gaussian = GaussianDpEvent(factor * gate.noise_multiplier)
                scaled[attr.evolve(event, event=gaussian)] += count
            case _:
                raise ValueError(f"there is no noise in {event}")
    return dict(scaled)


def with_sampling_revealed(spend: Spend) -> Spend:
    """Return the spend against an adversary who sees Poisson samples; never smaller."""
    revealed: Counter[DpEvent] = Counter()
    for event, count in spend.items():
        if isinstance(event, PoissonSampledDpEvent):
            event = RevealedSampling(event.sampling_probability, event.event)
        elif isinstance(event, PoissonSampledGroup):  # as if all records were sampled each time
            event = group_event(event.event, event.size)
        revealed[event] += count
    return dict(revealed)


def to_json(event: DpEvent) -> dict[str, Any]:
    """Return the event as JSON data; equal events have equal representations."""
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
        case RevealedSampling(probability=probability, event=inner):
            gated = to_json(inner)
            return {"event": "revealed_draw", "probability": float(probability), "gates": gated}
        case Selection(alternatives=spends, mean=mean, shape=shape):
            runs = [[[to_json(part), count] for part, count in spend] for spend in spends]
            return {
                "event": "select",
                "mean": float(mean),
                "shape": float(shape),
                "alternatives": runs,
            }
        case NonPrivateDpEvent():
            return {"event": "non_private"}
        case Contribution():
            return {"event": "contribution"}
        case _:
            raise ValueError(f"no JSON form for {event}")


def from_json(data: Mapping[str, Any]) -> DpEvent:
    """Return the event of JSON data; raises ValueError for invalid data."""
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
        } if 0 <= rate <= 1 and 1 <= size <= _MAX_GROUP:
            return PoissonSampledGroup(float(rate), size, from_json(inner))
        case {
            "event": "revealed_draw",
            "probability": float() | int() as probability,
            "gates": inner,
        } if 0 <= probability <= 1:
            return RevealedSampling(float(probability), from_json(inner))
        case {
            "event": "select",
            "mean": float() | int() as mean,
            "shape": float() | int() as shape,
            "alternatives": [_, *_] as runs,
        } if 1 + 1e-6 <= mean <= _MAX_PARAMETER and 0 <= shape <= _MAX_PARAMETER:
            spends = [
                total([canonical(from_json(part), count) for part, count in spend])
                for spend in runs
            ]
            return Selection.of_spends(spends, float(mean), float(shape))
        case {"event": "non_private"}:
            return NonPrivateDpEvent()
        case {"event": "contribution"}:
            return Contribution()
        case _:
            raise ValueError(f"not a privacy event: {data}")


def describe(spend: Spend) -> str:
    """Describe the spend in a sentence fragment."""
    parts = []
    for event, count in spend.items():
        match event:
            case GaussianDpEvent(noise_multiplier=sigma):
                plural = "" if count == 1 else "s"
                parts.append(f"{count:,} Gaussian release{plural} at noise multiplier {sigma:.4g}")
            case SampledWithoutReplacementDpEvent(
                source_dataset_size=population, sample_size=taken, event=gate
            ):
                parts.append(
                    f"{count:,} secret samples of {taken} out of {population}, each with one "
                    f"Gaussian release at noise multiplier {gate.noise_multiplier:.4g}"
                )
            case PoissonSampledDpEvent(sampling_probability=rate, event=gate):
                parts.append(
                    f"{count:,} secret Poisson samples at rate {rate:.4g}, each with one Gaussian "
                    f"release at noise multiplier {gate.noise_multiplier:.4g}"
                )
            case PoissonSampledGroup(sampling_probability=rate, size=size, event=gate):
                parts.append(
                    f"{count:,} secret Poisson samples at rate {rate:.4g} of up to {size} images "
                    f"of a person, each with one Gaussian release at noise multiplier "
                    f"{gate.noise_multiplier:.4g} for one image"
                )
            case RevealedSampling(probability=probability, event=gate):
                parts.append(
                    f"{count:,} samples with probability {probability:.4g} that the adversary "
                    f"sees, each with one Gaussian release at noise multiplier "
                    f"{gate.noise_multiplier:.4g}"
                )
            case Selection(alternatives=spends, mean=mean, shape=shape):
                described = [describe(dict(spend)) for spend in spends[:_MAX_DESCRIBED]]
                if (others := len(spends) - len(described)) > 0:
                    described.append(f"one of {others} other set{'s' * (others > 1)} of releases")
                parts.append(
                    f"the best of a random number of runs (truncated negative binomial, mean "
                    f"{mean:g}, shape {shape:g}; the number is secret), each with: "
                    f"{'; or '.join(described)}"
                )
            case Contribution():
                parts.append(f"{count:,} contributions without noise to a trusted aggregator")
            case _:
                parts.append("releases without noise")
    return ", ".join(parts) or "nothing"
