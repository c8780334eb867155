"""Events: canonical form, JSON, and refusals."""

from __future__ import annotations

import json
import math

import pytest
from dp_accounting import (
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
)
from hypothesis import example, given
from hypothesis import strategies as st
from mutation import kills

from fedgen.privacy.events import RevealedSampling, canonical, describe, from_json, to_json

gaussians = st.floats(0.1, 100).map(GaussianDpEvent)
events = st.recursive(
    st.one_of(
        gaussians,
        st.builds(SampledWithoutReplacementDpEvent, st.integers(2, 99), st.just(1), gaussians),
        st.builds(RevealedSampling, st.floats(0.01, 0.99), gaussians),
        st.builds(PoissonSampledDpEvent, st.floats(0.01, 0.99), gaussians),
        st.just(NonPrivateDpEvent()),
    ),
    lambda inner: st.builds(SelfComposedDpEvent, inner, st.integers(1, 50)),
)


@given(events)
def test_json_keeps_events(event: object) -> None:
    assert from_json(json.loads(json.dumps(to_json(event)))) == event


@given(events, st.integers(1, 9))
def test_canonical_counts(event: object, count: int) -> None:
    once, often = canonical(event), canonical(event, count)
    assert {leaf: number * count for leaf, number in once.items()} == dict(often)


@kills(
    "fedgen/privacy/events.py", "if isinstance(leaf, GaussianDpEvent) and count == 1:", "if False:"
)
@given(events)
@example(PoissonSampledDpEvent(0.5, GaussianDpEvent(0.73)))
def test_canonical_events_survive_json(event: object) -> None:
    """To the last digit: the account of a client is compared with the plan."""
    for leaf in canonical(event):
        again = from_json(json.loads(json.dumps(to_json(leaf))))
        assert canonical(again) == {leaf: 1}


def test_an_integer_rate_is_read() -> None:
    """As in settings: sampling_rate=1."""
    event = PoissonSampledDpEvent(1, GaussianDpEvent(2))
    text = json.dumps(to_json(event))
    assert from_json(json.loads(text)) == event
    assert text == json.dumps(to_json(PoissonSampledDpEvent(1.0, GaussianDpEvent(2.0))))


def test_gaussians_within_one_sample_merge() -> None:
    gate = SelfComposedDpEvent(GaussianDpEvent(2.0), 16)
    [leaf] = canonical(SampledWithoutReplacementDpEvent(100, 1, gate))
    assert leaf.event.noise_multiplier == pytest.approx(2.0 / 4)


def test_sampling_everything_is_no_sampling() -> None:
    assert canonical(SampledWithoutReplacementDpEvent(1, 1, GaussianDpEvent(3.0)), 5) == {
        GaussianDpEvent(3.0 * math.sqrt(1)): 5
    }


def test_nested_sampling_is_refused() -> None:
    inner = SampledWithoutReplacementDpEvent(10, 1, GaussianDpEvent(1.0))
    with pytest.raises(ValueError, match="nested sampling"):
        canonical(SampledWithoutReplacementDpEvent(10, 1, inner))


def test_unknown_events_are_refused() -> None:
    with pytest.raises(ValueError, match="no accountant"):
        canonical(LaplaceDpEvent(1.0))
    with pytest.raises(ValueError, match="not a privacy event"):
        from_json({"event": "laplace"})


@given(events)
def test_every_spend_has_a_description(event: object) -> None:
    assert describe(canonical(event))
