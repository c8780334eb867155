"""The cost of a secret sample by brute force: the worst other critics, adaptive ones too."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from fedgen.privacy.gaussian_dp import gaussian_delta
from fedgen.privacy.subsampling import ORDERS, subset_sampling_pmf, subset_sampling_rdp

# One draw: P0 and Q0 at the ends of a diameter, R anywhere in the ball


def one_draw(
    gamma: float, mu: float, rest: tuple[float, float], points: int = 401
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return densities of one release on a square, and the area of a cell; the diameter of the ball
    is mu."""
    x = np.linspace(-7 - mu / 2, 7 + mu / 2, points)
    y = np.linspace(-7 - mu / 2, 7 + mu / 2, points)

    def at(first: float, second: float) -> np.ndarray:
        return np.outer(stats.norm.pdf(x, first), stats.norm.pdf(y, second))

    both = (1 - gamma) * at(*rest)
    return both + gamma * at(mu / 2, 0), both + gamma * at(-mu / 2, 0), (x[1] - x[0]) ** 2


def in_the_ball(mu: float) -> list[tuple[float, float]]:
    angles = np.linspace(0, np.pi, 7)
    return [(r * math.cos(a), r * math.sin(a)) for r in (0, mu / 4, mu / 2) for a in angles]


@pytest.mark.parametrize(("gamma", "mu"), [(0.1, 1.0), (0.3, 2.0), (0.02, 3.0)])
def test_the_bound_for_one_sample_holds_and_is_attained(gamma: float, mu: float) -> None:
    """At each alpha the bound holds for all other critics, also off the line, in both directions,
    and the worst attain it."""
    bound = subset_sampling_pmf(gamma, mu, 1e-4)
    pairs = [one_draw(gamma, mu, rest) for rest in in_the_ball(mu)]
    for eps in (-0.3, -0.01, 0.01, 0.1, 0.5):
        worst = max(
            float(np.maximum(p - math.exp(eps) * q, 0).sum() * cell)
            for first, second, cell in pairs
            for p, q in ((first, second), (second, first))
        )
        ours = bound.get_delta_for_epsilon(eps)
        slack = 3e-5  # of the quadrature; it vanishes on finer grids
        assert worst - slack <= ours <= worst + 1e-4


@pytest.mark.parametrize(("gamma", "mu"), [(0.1, 1.0), (0.3, 1.5), (0.02, 2.0)])
def test_renyi_bound_against_quadrature(gamma: float, mu: float) -> None:
    orders = (2, 3, 5, 8)
    bounds = subset_sampling_rdp(gamma, mu, orders)
    for rest in in_the_ball(mu):
        p, q, cell = one_draw(gamma, mu, rest)
        for order, bound in zip(orders, bounds, strict=True):
            for first, second in ((p, q), (q, p)):
                powers = np.exp(order * np.log(first) + (1 - order) * np.log(second))
                true = math.log(powers.sum() * cell) / (order - 1)
                assert true <= bound * (1 + 1e-6)


# Composed: the best adaptive adversary by dynamic programming


def worst_delta(gamma: float, mu: float, steps: int, eps: float) -> float:
    """Return the largest hockey-stick divergence after ``steps`` samples, over all rules that
    choose the other critics' response at each step from the transcript so far. The divergence is
    E_Q[(e^L - e^eps)+] with the loss L so far: the best next response is a function of L and of the
    number of steps left, so the maximum is computed backwards in time. Values are convex in e^L and
    interpolated linearly in it, hence from above."""
    y = np.linspace(-6 - mu / 2, 6 + mu / 2, 301)
    widest = steps * math.log1p(gamma * math.expm1(mu**2 / 2 + 6 * mu))
    odds = np.exp(np.linspace(-widest, widest, 1601))
    value = np.maximum(odds - math.exp(eps), 0)
    choices = []
    for r in np.linspace(-mu / 2, mu / 2, 9):
        rest = (1 - gamma) * stats.norm.pdf(y, r)
        p = rest + gamma * stats.norm.pdf(y, mu / 2)
        q = rest + gamma * stats.norm.pdf(y, -mu / 2)
        choices.append((p / q, q * (y[1] - y[0])))
    for _ in range(steps):
        after = np.stack(
            [np.interp(odds[:, None] * ratio, odds, value) @ weight for ratio, weight in choices]
        )
        value = after.max(0)
    return float(np.interp(1.0, odds, value))


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
@pytest.mark.parametrize(("gamma", "mu"), [(0.1, 1.0), (0.3, 1.5), (0.05, 2.0)])
def test_composed_bounds_hold_against_the_best_adaptive_adversary(
    gamma: float, mu: float, steps: int
) -> None:
    by_pld = subset_sampling_pmf(gamma, mu, 1e-4).self_compose(steps)
    orders = np.asarray(ORDERS, dtype=float)
    renyi = steps * np.asarray(subset_sampling_rdp(gamma, mu))
    for eps in (0.1, 0.5, 1.5):
        true = worst_delta(gamma, mu, steps, eps)
        bound = by_pld.get_delta_for_epsilon(eps)
        assert true <= bound * (1 + 2e-3) + 1e-7
        assert true >= 0.5 * bound - 1e-4, "the bound is near what can be done"
        assert true <= rdp.compute_delta(orders, renyi, eps)[0]


def test_the_adversary_of_the_search_is_the_known_one() -> None:
    """gamma 0.1, mu 1, two steps, eps 0.3: others that respond like Q0, then like Q0 if the first
    loss was at most eps and otherwise like P0, reach 0.012202. The Poisson accountant gives
    0.011875, less than the truth; ours gives 0.012530."""
    gamma, mu, eps = 0.1, 1.0, 0.3
    ours = subset_sampling_pmf(gamma, mu, 1e-4).self_compose(2)
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
    assert worst_delta(gamma, mu, 2, eps) == pytest.approx(true, rel=5e-3)
    assert poisson.get_delta_for_epsilon(eps) == pytest.approx(0.011875, abs=1e-5)
    assert poisson.get_delta_for_epsilon(eps) < true < ours.get_delta_for_epsilon(eps)


@given(st.floats(1e-3, 0.5), st.floats(0.2, 4.0))
def test_probabilities_sum_to_one(gamma: float, mu: float) -> None:
    pmf = subset_sampling_pmf(gamma, mu, 1e-3)
    assert pmf._infinity_mass + pmf._probs.sum() == pytest.approx(1.0, abs=1e-9)
    assert pmf._probs.min() >= 0


# Critics that train when they are drawn: no amplification, by counterexample


def trained_when_drawn(gamma: float, mu: float, steps: int, eps: float) -> float:
    """Return delta of critics whose state reveals past samples. A is the changed critic, sampled
    with probability gamma, B otherwise. At step 1 A responds with +C or -C (under D or D'), B with
    -C; from then on the sampled critic responds with +C if A was sampled at step 1, otherwise with
    -C: both know it from their state. With M = steps - 1 and S = sqrt(M) mu z - M mu^2 / 2 for a
    standard normal z, exactly delta = gamma E_z delta_G(log(e^eps + (1 / gamma - 1)(e^eps - 1)
    e^S); mu)."""
    later = steps - 1

    def at(z: float) -> float:
        s = math.sqrt(later) * mu * z - later * mu**2 / 2
        odds = math.exp(eps) + (1 / gamma - 1) * math.expm1(eps) * math.exp(s)
        return float(gaussian_delta(mu, math.log(odds))) * stats.norm.pdf(z)

    return gamma * integrate.quad(at, -12, 12, limit=500, epsabs=1e-12)[0]


@pytest.mark.parametrize(
    ("gamma", "mu", "steps", "eps", "true", "amplified"),
    [
        (0.1, 2.0, 2, 4.0, 4.0671e-3, 1.7447e-3),
        (0.2, 1.0, 2, 2.0, 4.802e-4, 2.635e-4),
        (0.01, 2.0, 5, 3.0, 1.4866e-3, 5.467e-5),
        (0.01, 2.0, 5, 4.0, 6.685e-4, 9.27e-6),
    ],
)
def test_critics_that_train_when_sampled_exceed_the_amplified_bound(
    gamma: float, mu: float, steps: int, eps: float, true: float, amplified: float
) -> None:
    result = trained_when_drawn(gamma, mu, steps, eps)
    bound = subset_sampling_pmf(gamma, mu, 1e-4).self_compose(steps).get_delta_for_epsilon(eps)
    assert result == pytest.approx(true, rel=2e-4)
    assert bound == pytest.approx(amplified, rel=2e-3)
    assert result > 1.5 * bound


def test_the_formula_of_the_counterexample_is_its_mechanism() -> None:
    """Two steps, integrated over both outputs of the mechanism."""
    gamma, mu, eps = 0.1, 2.0, 4.0
    x = np.linspace(-9, 9, 2001)
    plus, minus = stats.norm.pdf(x, mu / 2), stats.norm.pdf(x, -mu / 2)
    undrawn = (1 - gamma) * np.outer(minus, minus)
    p, q = undrawn + gamma * np.outer(plus, plus), undrawn + gamma * np.outer(minus, plus)
    true = np.maximum(p - math.exp(eps) * q, 0).sum() * (x[1] - x[0]) ** 2
    assert true == pytest.approx(trained_when_drawn(gamma, mu, 2, eps), rel=1e-4)
