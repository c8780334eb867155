"""Accountants against golden values, second libraries and brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import (
    GaussianDpEvent,
    NonPrivateDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from fedgen.privacy import accounting
from fedgen.privacy.accounting import epsilon, gaussian_delta, gaussian_epsilon
from fedgen.privacy.events import RevealedDraw, canonical, repeat


def draws(population: int, sigma: float, count: int) -> dict:
    event = SampledWithoutReplacementDpEvent(population, 1, GaussianDpEvent(sigma))
    return dict(canonical(repeat(event, count)))


def both(spend: dict, delta: float = 1e-5) -> tuple[float, float]:
    """(by PLD, by RDP) of secret draws."""
    items = tuple(spend.items())
    return accounting._draws_pld(items, delta), accounting._draws_rdp(items, delta)


# GS-WGAN centralized, K = 1000, B = 32, T = 20,000, noise scale 1.07, delta 1e-5


def test_per_sample_routing_as_published_settings() -> None:
    by_pld, by_rdp = both(draws(1000, 1.07, 640_000))
    assert by_rdp == pytest.approx(4.500, abs=5e-4)
    assert by_pld == pytest.approx(5.51, abs=6e-3)
    assert epsilon(draws(1000, 1.07, 640_000), 1e-5).value == by_rdp


def test_the_papers_formula() -> None:
    assert accounting.claimed_by_wang(1000, 1.07, 640_000, 1e-5) == pytest.approx(9.24, abs=5e-3)


def test_one_draw_for_all_gradients_of_a_step() -> None:
    spend = draws(1000, 1.07 / math.sqrt(32), 20_000)
    assert epsilon(spend, 1e-5).value == pytest.approx(346.7, abs=0.05)


def test_federated_users() -> None:
    by_pld, by_rdp = both(draws(866, 1.07, 960_000))
    assert by_rdp == pytest.approx(6.71, abs=6e-3)
    assert by_pld == pytest.approx(8.33, abs=9e-3)


@pytest.mark.parametrize(("visits", "expected"), [(34, 605.7), (20, 379.4), (36, 637.4)])
def test_no_amplification(visits: int, expected: float) -> None:
    spend = canonical(GaussianDpEvent(1.07), visits * 32)
    assert epsilon(spend, 1e-5).value == pytest.approx(expected, abs=0.05)


# The exact Gaussian


@given(st.floats(0.05, 30), st.floats(-11, -1))
def test_gaussian_epsilon_inverts_the_profile(mu: float, log_delta: float) -> None:
    delta = 10**log_delta
    found = gaussian_epsilon(mu, delta)
    assert float(gaussian_delta(mu, found)) <= delta
    if found > 1e-6:
        assert float(gaussian_delta(mu, found - 1e-6)) >= delta * (1 - 1e-3)


@pytest.mark.parametrize("mu", [0.3, 1.0, 4.0])
def test_gaussian_against_dp_accounting(mu: float) -> None:
    library = pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=1e-4)
    assert gaussian_epsilon(mu, 1e-5) == pytest.approx(
        library.get_epsilon_for_delta(1e-5), abs=2e-3
    )


def test_composition_of_gaussians_is_one_gaussian() -> None:
    many = canonical(SelfComposedDpEvent(GaussianDpEvent(3.0), 9))
    assert epsilon(many, 1e-5).value == pytest.approx(gaussian_epsilon(1.0, 1e-5))


# Secret draws against brute force: P0 and Q0 at the ends of the ball, R anywhere in it


def hockey_stick(p: np.ndarray, q: np.ndarray, alpha: float, x: np.ndarray) -> float:
    return float(integrate.trapezoid(np.maximum(p - alpha * q, 0), x))


@pytest.mark.parametrize(("gamma", "mu"), [(0.1, 1.0), (0.3, 2.0), (0.02, 3.0)])
def test_one_draw_is_dominated_and_met(gamma: float, mu: float) -> None:
    """At each alpha the bound holds for all other critics and is met by the worst."""
    x = np.linspace(-12 - mu, 12 + mu, 40_001)
    p0, q0 = stats.norm.pdf(x, mu / 2), stats.norm.pdf(x, -mu / 2)
    bound = accounting.subset_draw_pmf(gamma, mu, 1e-4)
    for eps in (0.01, 0.1, 0.5):
        worst = 0.0
        for r in np.linspace(-mu / 2, mu / 2, 21):
            rest = stats.norm.pdf(x, r)
            p, q = (1 - gamma) * rest + gamma * p0, (1 - gamma) * rest + gamma * q0
            worst = max(worst, hockey_stick(p, q, math.exp(eps), x))
        ours = bound.get_delta_for_epsilon(eps)
        assert ours >= worst * (1 - 1e-6)
        assert ours <= worst + 1e-4


def test_two_adaptive_steps_beat_the_poisson_bound_and_not_ours() -> None:
    """gamma 0.1, mu 1, eps 0.3; the others answer like Q0, then like Q0 if the first loss was at
    most eps and else like P0: true delta 0.012202, Poisson 0.011875, ours 0.012530."""
    gamma, mu, eps = 0.1, 1.0, 0.3
    ours = accounting.subset_draw_pmf(gamma, mu, 1e-4).self_compose(2)
    assert ours.get_delta_for_epsilon(eps) == pytest.approx(0.012530, abs=2e-5)
    x = np.linspace(-9, 9, 3001)
    p0, q0 = stats.norm.pdf(x, mu / 2), stats.norm.pdf(x, -mu / 2)
    first_p, first_q = (1 - gamma) * q0 + gamma * p0, q0
    low = np.log(first_p / first_q) <= eps
    seconds = {
        True: ((1 - gamma) * q0 + gamma * p0, q0),
        False: (p0, (1 - gamma) * p0 + gamma * q0),
    }
    true = 0.0
    for small in (True, False):
        second_p, second_q = seconds[small]
        joint_p = np.outer(first_p[low == small], second_p)
        joint_q = np.outer(first_q[low == small], second_q)
        true += np.maximum(joint_p - math.exp(eps) * joint_q, 0).sum() * (x[1] - x[0]) ** 2
    poisson = pld.from_gaussian_mechanism(
        1 / mu, sampling_prob=gamma, value_discretization_interval=1e-4
    ).self_compose(2)
    assert true == pytest.approx(0.012202, abs=1e-5)
    assert poisson.get_delta_for_epsilon(eps) < true < ours.get_delta_for_epsilon(eps)


@pytest.mark.parametrize("r", [-0.5, 0.0, 0.5])
def test_renyi_bound_against_quadrature(r: float) -> None:
    gamma, mu = 0.1, 1.0
    x = np.linspace(-14, 14, 60_001)
    p0, q0, rest = (stats.norm.pdf(x, m) for m in (mu / 2, -mu / 2, r))
    p, q = (1 - gamma) * rest + gamma * p0, (1 - gamma) * rest + gamma * q0
    orders = (2, 3, 5, 8)
    for order, bound in zip(orders, accounting.subset_draw_rdp(gamma, mu, orders), strict=True):
        powers = np.exp(order * np.log(p) + (1 - order) * np.log(q))
        true = math.log(integrate.trapezoid(powers, x)) / (order - 1)
        assert true <= bound * (1 + 1e-9)


@given(st.floats(1e-3, 0.5), st.floats(0.2, 4.0))
def test_the_distribution_is_one(gamma: float, mu: float) -> None:
    pmf = accounting.subset_draw_pmf(gamma, mu, 1e-3)
    assert pmf._infinity_mass + pmf._probs.sum() == pytest.approx(1.0, abs=1e-9)
    assert pmf._probs.min() >= 0


# Draws that the adversary sees


def test_revealed_draws_against_simulation() -> None:
    """delta at the epsilon found, estimated from 4,000 draws of the number of visits."""
    sigma, draws_, probability = 2.0, 400, 0.05
    found = accounting.revealed_epsilon(probability, sigma, draws_, 1e-3)
    visits = np.random.default_rng(0).binomial(draws_, probability, 4000)
    deltas = gaussian_delta(np.sqrt(np.maximum(visits, 1e-9)) / sigma, found)
    assert deltas.mean() == pytest.approx(1e-3, rel=6 * deltas.std() / deltas.mean() / 63)


def test_revealed_costs_more_than_hidden() -> None:
    gate = GaussianDpEvent(1.07 / math.sqrt(32))
    hidden = canonical(SampledWithoutReplacementDpEvent(1000, 1, gate), 20_000)
    seen = canonical(RevealedDraw(1 / 1000, gate), 20_000)
    assert epsilon(seen, 1e-5).or_infinity > 600 > epsilon(hidden, 1e-5).or_infinity


# Laws


@settings(max_examples=20)
@given(st.integers(1, 3000), st.integers(2, 500), st.floats(0.5, 3))
def test_monotone_in_steps_noise_and_rate(count: int, population: int, sigma: float) -> None:
    here = epsilon(draws(population, sigma, count), 1e-5).or_infinity
    slack = 1e-3 + 2e-3 * here  # of the grid
    assert epsilon(draws(population, sigma, 2 * count), 1e-5).or_infinity >= here - slack
    assert epsilon(draws(population, 1.5 * sigma, count), 1e-5).or_infinity <= here + slack
    assert epsilon(draws(2 * population, sigma, count), 1e-5).or_infinity <= here + slack


def test_nothing_costs_nothing_and_no_noise_has_no_bound() -> None:
    assert epsilon({}, 1e-5).value == 0.0
    assert epsilon({NonPrivateDpEvent(): 1}, 1e-5).value is None


def test_kinds_without_a_common_accountant_are_refused() -> None:
    spend = {**canonical(GaussianDpEvent(1.0)), **draws(10, 1.0, 1)}
    with pytest.raises(ValueError, match="no common accountant"):
        epsilon(spend, 1e-5)
