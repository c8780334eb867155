"""Calibration and budgets: never above the target, and close below it."""

from __future__ import annotations

import math

import pytest
from dp_accounting import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
)
from hypothesis import given
from hypothesis import strategies as st

from fedgen.config.compose import compose
from fedgen.errors import FedgenError
from fedgen.privacy.accounting import claimed_by_rdp, epsilon, rough_epsilon
from fedgen.privacy.budget import release_bound
from fedgen.privacy.calibration import max_repetitions, min_noise_multiplier
from fedgen.privacy.events import Relation, canonical, repeat
from fedgen.privacy.gaussian_dp import gaussian_epsilon
from fedgen.privacy.routing import Routing

REPLACE = Relation.REPLACE_ONE


@given(st.floats(0.05, 50), st.integers(1, 10**6))
def test_noise_inverts_accounting(target: float, count: int) -> None:
    def at(sigma: float) -> float:
        return gaussian_epsilon(math.sqrt(count) / sigma, 1e-5)

    result = at(min_noise_multiplier(at, target))
    assert target - 1e-3 <= result <= target


@pytest.mark.parametrize("target", [1.0, 10.0])
def test_noise_for_secret_samples(target: float) -> None:
    routing = Routing("per_sample", 1000)

    def at(sigma: float) -> float:
        return epsilon(canonical(routing.event(640_000, sigma, True)), 1e-5, REPLACE).or_infinity

    sigma = min_noise_multiplier(at, target)
    assert target - 1e-3 <= at(sigma) <= target
    if target == 10:
        assert sigma == pytest.approx(0.739, abs=1e-3)


@pytest.mark.parametrize("off", [0.7, 1.0, 1.3])
def test_a_rough_account_saves_most_of_the_work(off: float) -> None:
    """The result does not change."""
    calls = []

    def at(sigma: float) -> float:
        calls.append(sigma)
        return gaussian_epsilon(300 / sigma, 1e-5)

    result = min_noise_multiplier(
        at, 10.0, lambda sigma: off * gaussian_epsilon(300 / sigma, 1e-5) ** 1.02
    )
    assert len(calls) <= 5
    assert 10 - 1e-3 <= gaussian_epsilon(300 / result, 1e-5) <= 10


def test_a_too_rough_account_does_not_change_the_result() -> None:
    result = min_noise_multiplier(
        lambda sigma: gaussian_epsilon(300 / sigma, 1e-5), 2.0, lambda sigma: 5 + 1e5 / sigma, 1e-3
    )
    assert 2 - 1e-3 <= gaussian_epsilon(300 / result, 1e-5) <= 2


@pytest.mark.parametrize("steep", [0.0, math.inf])
def test_discontinuous_accounts_do_not_change_the_result(steep: float) -> None:
    """Zero or infinity next to the target, rough or not."""

    def at(sigma: float) -> float:
        beside = sigma > 51 if steep == 0 else sigma < 50
        return steep if beside else 100 / sigma

    for rough in (at, lambda sigma: 0.9 * at(sigma)):
        result = min_noise_multiplier(at, 1.99, rough)
        assert at(result) <= 1.99
    assert at(min_noise_multiplier(lambda s: 0.99 * at(s), 1.99, at)) * 0.99 <= 1.99


def test_an_impossible_target_is_refused() -> None:
    with pytest.raises(FedgenError, match=r"privacy\.target_epsilon"):
        min_noise_multiplier(lambda _: 5.0, 1.0)


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_most_repetitions_is_the_largest_that_fits(fits: int, limit: int) -> None:
    assert max_repetitions(lambda n: float(n), fits + 0.5, limit) == min(fits, limit)


@pytest.mark.parametrize("target", [0.5, 3.0])
def test_steps_for_a_target(target: float) -> None:
    """As many samples as fit, and not one more."""
    event = PoissonSampledDpEvent(0.02, GaussianDpEvent(1.2))

    def at(steps: int) -> float:
        return epsilon(canonical(event, steps), 1e-5, Relation.ADD_OR_REMOVE_ONE).or_infinity

    steps = max_repetitions(at, target, 100_000)
    assert at(steps) <= target < at(steps + 1)


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("target", [1.0, 8.0])
def test_noise_for_poisson_samples(target: float, relation: Relation) -> None:
    def spend(sigma: float) -> dict:
        return dict(canonical(PoissonSampledDpEvent(0.01, GaussianDpEvent(sigma)), 2000))

    sigma = min_noise_multiplier(
        lambda s: epsilon(spend(s), 1e-5, relation).or_infinity,
        target,
        lambda s: rough_epsilon(spend(s), 1e-5, relation).or_infinity,
    )
    assert target - 1e-3 <= epsilon(spend(sigma), 1e-5, relation).or_infinity <= target


@pytest.mark.parametrize("target", [0.1, 0.01, 0.0035, 0.001])
@pytest.mark.parametrize("draw", ["poisson", "subset"])
def test_noise_for_a_small_target(target: float, draw: str) -> None:
    """Bounds by Rényi orders have a floor near 0.0035 (0.12 for subsets), and fall to 0 from there;
    the noise is no larger than by plain bisection."""
    relation = Relation.ADD_OR_REMOVE_ONE if draw == "poisson" else Relation.REPLACE_ONE

    def spend(sigma: float) -> dict:
        release = GaussianDpEvent(sigma)
        event = PoissonSampledDpEvent(0.01, release)
        if draw == "subset":
            event = SampledWithoutReplacementDpEvent(1000, 10, release)
        return dict(canonical(event, 100))

    def at(sigma: float) -> float:
        return epsilon(spend(sigma), 1e-5, relation).or_infinity

    sigma = min_noise_multiplier(
        at, target, lambda s: rough_epsilon(spend(s), 1e-5, relation).or_infinity
    )
    assert 0.9 * target <= at(sigma) <= target


def test_noise_for_a_small_target_without_sampling() -> None:
    for target in (1e-3, 1e-4):
        sigma = min_noise_multiplier(lambda s: gaussian_epsilon(10 / s, 1e-5), target)
        assert 0.9 * target <= gaussian_epsilon(10 / sigma, 1e-5) <= target


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("noise", [300.0, 3000.0, 30000.0])
def test_a_floor_is_not_reported_as_a_second_bound(noise: float, relation: Relation) -> None:
    """The second bound of a small ε is close to it, or omitted."""
    events = [GaussianDpEvent(noise), PoissonSampledDpEvent(0.01, GaussianDpEvent(noise / 50))]
    if relation is Relation.REPLACE_ONE:
        events.append(SampledWithoutReplacementDpEvent(1000, 10, GaussianDpEvent(noise / 50)))
    for event in events:
        result = epsilon(canonical(event, 100), 1e-5, relation)
        second = result.second_opinion
        assert second is None or second <= 3 * result.or_infinity + 1e-9
    claimed = claimed_by_rdp(repeat(GaussianDpEvent(noise), 100), 1e-5, relation)
    assert claimed <= max(3 * gaussian_epsilon(20 / noise, 1e-5), 8e-4)


@pytest.mark.parametrize("delta", [0.0, -1.0, 1.0, 2.0, math.nan])
def test_delta_is_checked(delta: float) -> None:
    with pytest.raises(FedgenError, match=r"privacy\.delta"):
        compose("config", [f"privacy.delta={delta}"])


def test_a_likely_stop_forbids_amplification() -> None:
    event = GaussianDpEvent(1.0)
    free, rare = (release_bound(event, 1e-5, REPLACE, stop) for stop in (0.0, 1e-12))
    assert free is not None
    assert rare is not None
    smaller, larger = free.epsilon.or_infinity, rare.epsilon.or_infinity
    assert smaller < larger < smaller + 0.01
    assert release_bound(event, 1e-5, REPLACE, 1e-6) is None
