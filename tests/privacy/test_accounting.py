"""Accountants against golden values and second libraries."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import (
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld import pld_privacy_accountant as pld_accountant
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st
from mutation import kills
from opacus.accountants import PRVAccountant, RDPAccountant
from scipy import stats

from fedgen.privacy import accounting
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import Relation, RevealedSampling, canonical, repeat
from fedgen.privacy.gaussian_dp import gaussian_delta, gaussian_epsilon

REPLACE, ADD_OR_REMOVE = Relation.REPLACE_ONE, Relation.ADD_OR_REMOVE_ONE


def draws(population: int, sigma: float, count: int) -> dict:
    event = SampledWithoutReplacementDpEvent(population, 1, GaussianDpEvent(sigma))
    return dict(canonical(repeat(event, count)))


def both(spend: dict, delta: float = 1e-5) -> tuple[float, float]:
    """Return ε of secret samples (by PLD, by RDP)."""
    items = tuple(spend.items())
    return accounting._by_pld(items, delta, REPLACE), accounting._by_rdp(items, delta, REPLACE)


# GS-WGAN centralized, K = 1000, B = 32, T = 20,000, noise scale 1.07, delta 1e-5


@kills(
    "fedgen/privacy/privacy_profiles.py",
    (
        "poisson = isinstance(event, PoissonSampledDpEvent) and relation is "
        "Relation.ADD_OR_REMOVE_ONE"
    ),
    "poisson = not isinstance(event, GaussianDpEvent)",
)
def test_per_sample_routing_as_published_settings() -> None:
    by_pld, by_rdp = both(draws(1000, 1.07, 640_000))
    assert by_rdp == pytest.approx(4.500, abs=5e-4)
    assert by_pld == pytest.approx(5.51, abs=6e-3)
    assert epsilon(draws(1000, 1.07, 640_000), 1e-5, REPLACE).value == by_rdp


def test_the_formula_of_the_paper() -> None:
    event = SampledWithoutReplacementDpEvent(1000, 1, GaussianDpEvent(1.07))
    claimed = accounting.claimed_by_rdp(repeat(event, 640_000), 1e-5, REPLACE)
    assert claimed == pytest.approx(9.24, abs=5e-3)


def test_one_sample_for_all_gradients_of_a_step() -> None:
    spend = draws(1000, 1.07 / math.sqrt(32), 20_000)
    assert epsilon(spend, 1e-5, REPLACE).value == pytest.approx(346.7, abs=0.05)


def test_federated_users() -> None:
    by_pld, by_rdp = both(draws(866, 1.07, 960_000))
    assert by_rdp == pytest.approx(6.71, abs=6e-3)
    assert by_pld == pytest.approx(8.33, abs=9e-3)


@pytest.mark.parametrize(("visits", "expected"), [(34, 605.7), (20, 379.4), (36, 637.4)])
def test_no_amplification(visits: int, expected: float) -> None:
    spend = canonical(GaussianDpEvent(1.07), visits * 32)
    assert epsilon(spend, 1e-5, REPLACE).value == pytest.approx(expected, abs=0.05)


# DP-SGD: Poisson draws, add or remove one


def poisson(rate: float, sigma: float, count: int) -> dict:
    return dict(canonical(repeat(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), count)))


@pytest.mark.parametrize(
    ("rate", "sigma", "count", "delta", "by_rdp", "by_pld"),
    [
        (128 / 60_000, 1.0, 450_000, 1e-5, 9.97, 9.28),  # DPGAN, batch 128 (the paper: 10)
        (512 / 60_000, 2.0, 174_000, 1e-5, 10.08, 9.39),  # DPGAN, batch 512
        (600 / 60_000, 2.1, 30_000, 1e-5, 4.08, 3.77),  # DP-CGAN as GS-WGAN ran it
        (1 / 1200, 1.5, 160_000, 1e-5, 1.01, 0.93),  # DP-Sinkhorn, whole matrix clipped
    ],
)
def test_sampled_gaussian(
    rate: float, sigma: float, count: int, delta: float, by_rdp: float, by_pld: float
) -> None:
    result = epsilon(poisson(rate, sigma, count), delta, ADD_OR_REMOVE)
    assert result.value == pytest.approx(by_pld, abs=6e-3)
    assert result.second_opinion == pytest.approx(by_rdp, abs=6e-3)


@pytest.mark.slow
def test_opacus_agrees() -> None:
    """Poisson sampling under add or remove: Opacus' PRV accountant gives 9.29 for DPGAN at batch
    128 and rounds up by at most 0.01; its RDP accountant agrees up to rounding."""
    rate, sigma, steps, delta = 128 / 60_000, 1.0, 450_000, 1e-5
    result = []
    for accountant in (PRVAccountant(), RDPAccountant()):
        accountant.history = [(sigma, rate, steps)]
        result.append(float(accountant.get_epsilon(delta)))
    ours = epsilon(poisson(rate, sigma, steps), delta, ADD_OR_REMOVE)
    assert result[0] == pytest.approx(9.29, abs=5e-3)
    assert ours.or_infinity <= result[0] <= ours.or_infinity + 0.011
    assert result[1] == pytest.approx(ours.second_opinion, rel=1e-3)


def test_one_poisson_batch_for_all_rows_of_a_matrix() -> None:
    """DP-Sinkhorn's paper: 50 rows clipped one by one, from one batch; claimed 9.2."""
    whole = SelfComposedDpEvent(GaussianDpEvent(1.5), 50)
    spend = canonical(PoissonSampledDpEvent(1 / 1200, whole), 160_000)
    assert epsilon(spend, 1e-5, ADD_OR_REMOVE).value == pytest.approx(845, abs=1)
    counted = poisson(1 / 1200, 1.5, 50 * 160_000)
    assert epsilon(counted, 1e-5, ADD_OR_REMOVE).second_opinion == pytest.approx(9.2, abs=0.05)


@given(st.floats(1e-3, 0.2), st.floats(0.6, 4), st.integers(1, 500))
@settings(max_examples=8)
def test_poisson_samples_against_dp_accounting(rate: float, sigma: float, count: int) -> None:
    event = PoissonSampledDpEvent(rate, GaussianDpEvent(sigma))
    library = pld_accountant.PLDAccountant(value_discretization_interval=2e-4)
    library.compose(event, count)
    expected = library.get_epsilon(1e-5)
    result = epsilon(canonical(event, count), 1e-5, ADD_OR_REMOVE).or_infinity
    assert result == pytest.approx(expected, abs=2e-3, rel=2e-3)


@pytest.mark.parametrize(("count", "sigma"), [(1, 2.0), (9, 4.0)])
def test_the_conventions_of_dp_accounting(count: int, sigma: float) -> None:
    """Its PLD accountant doubles a Gaussian's sensitivity under replace-one, its RDP accountant
    does not: fedgen uses a noise multiplier as stated, under both relations."""
    event = GaussianDpEvent(sigma)
    exact = {r: epsilon(canonical(event, count), 1e-5, r).or_infinity for r in Relation}
    assert exact[REPLACE] == exact[ADD_OR_REMOVE] == gaussian_epsilon(count**0.5 / sigma, 1e-5)
    by_pld = pld_accountant.PLDAccountant(pld_accountant.NeighborRel.REPLACE_ONE)
    by_pld.compose(GaussianDpEvent(2 * sigma), count)
    assert by_pld.get_epsilon(1e-5) == pytest.approx(exact[REPLACE], abs=1e-3)
    by_rdp = rdp_privacy_accountant.RdpAccountant(
        neighboring_relation=rdp_privacy_accountant.NeighborRel.REPLACE_ONE
    )
    by_rdp.compose(event, count)
    assert exact[REPLACE] < by_rdp.get_epsilon(1e-5) < exact[REPLACE] * 1.25


def test_different_events_compose() -> None:
    """Gaussians and samples: at most the sum, at least the larger; alone as before."""
    drawn, plain = poisson(0.01, 1.0, 1000), dict(canonical(GaussianDpEvent(8.0)))
    both_ = epsilon({**drawn, **plain}, 1e-5, ADD_OR_REMOVE).or_infinity
    apart = [epsilon(spend, 1e-5 / 2, ADD_OR_REMOVE).or_infinity for spend in (drawn, plain)]
    assert epsilon(drawn, 1e-5, ADD_OR_REMOVE).or_infinity < both_ < sum(apart)


def test_a_fixed_batch_has_no_neighbours_by_adding() -> None:
    with pytest.raises(ValueError, match="no neighbours"):
        epsilon(draws(100, 1.0, 1), 1e-5, ADD_OR_REMOVE)


def test_poisson_batches_under_replace_one_cost_more() -> None:
    """At a noise multiplier over the diameter 2C, and no more than a fixed-size sample at that
    rate."""
    spend = poisson(0.01, 1.0, 500)
    replace, add = (epsilon(spend, 1e-5, r).or_infinity for r in (REPLACE, ADD_OR_REMOVE))
    assert add <= replace
    assert replace == pytest.approx(epsilon(draws(100, 1.0, 500), 1e-5, REPLACE).or_infinity)


@kills(
    "fedgen/privacy/privacy_profiles.py",
    "rounding = 2 * float(np.finfo(float).eps) * (releases + cells)",
    "rounding = 0.0",
)
@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize(
    ("sigma", "count"), [(30.0, 10_000), (10.0, 1000), (5.0, 100), (20.0, 50_000)]
)
def test_small_deltas_are_not_lost_in_rounding(
    sigma: float, count: int, relation: Relation
) -> None:
    """Sampling almost everything is a Gaussian with a known ε: no bound is below it, for any small
    delta."""
    spend = {PoissonSampledDpEvent(1 - 1e-10, GaussianDpEvent(sigma)): count}
    for delta in (1e-5, 1e-8, 1e-9, 1e-10, 1e-11, 1e-12, 1e-14, 1e-16):
        exact = gaussian_epsilon(count**0.5 / sigma, delta)
        assert accounting._by_pld(tuple(spend.items()), delta, relation) >= exact * (1 - 1e-7)
        assert epsilon(spend, delta, relation).or_infinity >= exact * (1 - 1e-7)


@pytest.mark.parametrize("delta", [1e-17, 3e-16, 1e-10, 1e-5, 1e-2])
def test_extreme_compositions_are_bounded_or_infinite(delta: float) -> None:
    """Very many steps with little noise: no excessive memory is requested."""
    several = poisson(1e-9, 2.0, 13), poisson(1e-3, 2.0, 1000), poisson(0.5, 30, 1)
    for spend in (poisson(0.0445, 0.1, 10**9), poisson(1e-6, 1e3, 10**9), *several):
        result = epsilon(spend, delta, ADD_OR_REMOVE)
        assert result.value is not None
        assert result.value >= 0


# Many clients


@pytest.mark.parametrize("kind", ["gaussian", "draws", "poisson"])
@pytest.mark.slow
def test_each_of_thousands_of_histories_is_bounded(kind: str) -> None:
    """The ε of each of 3,400 clients is at least that of its history alone, and at most slightly
    larger; the largest is exact."""
    make = {
        "gaussian": lambda n: dict(canonical(GaussianDpEvent(3.0), n)),
        "draws": lambda n: draws(100, 1.0, n),
        "poisson": lambda n: poisson(0.01, 1.0, n),
    }[kind]
    relation = ADD_OR_REMOVE if kind == "poisson" else REPLACE
    counts = list(range(1, 3401))
    result = accounting.epsilons([make(n) for n in counts], 1e-5, relation)
    assert [e.or_infinity for e in result] == sorted(e.or_infinity for e in result)
    for n in (1, 7, 120, 1999, 3333, 3400):
        alone = epsilon(make(n), 1e-5, relation).or_infinity
        assert alone - 1e-3 <= result[n - 1].or_infinity <= alone * 1.06 + 1e-3
    assert result[-1] == epsilon(make(3400), 1e-5, relation)


# The exact Gaussian


@given(st.floats(0.05, 30), st.floats(-11, -1))
def test_gaussian_epsilon_inverts_the_profile(mu: float, log_delta: float) -> None:
    delta = 10**log_delta
    result = gaussian_epsilon(mu, delta)
    assert float(gaussian_delta(mu, result)) <= delta
    if result > 1e-6:
        assert float(gaussian_delta(mu, result - 1e-6)) >= delta * (1 - 1e-3)


@pytest.mark.parametrize("mu", [0.3, 1.0, 4.0])
def test_gaussian_against_dp_accounting(mu: float) -> None:
    library = pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=1e-4)
    assert gaussian_epsilon(mu, 1e-5) == pytest.approx(
        library.get_epsilon_for_delta(1e-5), abs=2e-3
    )


def test_composition_of_gaussians_is_one_gaussian() -> None:
    many = canonical(SelfComposedDpEvent(GaussianDpEvent(3.0), 9))
    assert epsilon(many, 1e-5, REPLACE).value == pytest.approx(gaussian_epsilon(1.0, 1e-5))


# Draws that the adversary sees


def test_revealed_samples_against_simulation() -> None:
    """delta at the resulting ε, estimated from 4,000 samples of the number of visits."""
    sigma, draws_, probability = 2.0, 400, 0.05
    result = accounting.revealed_epsilon(probability, sigma, draws_, 1e-3)
    visits = np.random.default_rng(0).binomial(draws_, probability, 4000)
    deltas = gaussian_delta(np.sqrt(np.maximum(visits, 1e-9)) / sigma, result)
    assert deltas.mean() == pytest.approx(1e-3, rel=6 * deltas.std() / deltas.mean() / 63)


@kills(
    "fedgen/privacy/privacy_profiles.py",
    "gaussian_delta(mus, point) for point in eps]) + tail_mass",
    "gaussian_delta(mus, point) for point in eps])",
)
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_revealed_samples_count_all_visits(delta: float) -> None:
    """At the resulting ε, the mean over all numbers of visits is within delta."""
    result = accounting.revealed_epsilon(0.05, 1.0, 60, delta)
    visits = np.arange(1, 61)
    weights = stats.binom.pmf(visits, 60, 0.05)
    true = math.fsum(weights * gaussian_delta(np.sqrt(visits), result))
    assert true <= delta * (1 + 1e-9)


def test_revealed_costs_more_than_hidden() -> None:
    gate = GaussianDpEvent(1.07 / math.sqrt(32))
    hidden = canonical(SampledWithoutReplacementDpEvent(1000, 1, gate), 20_000)
    seen = canonical(RevealedSampling(1 / 1000, gate), 20_000)
    assert (
        epsilon(seen, 1e-5, REPLACE).or_infinity > 600 > epsilon(hidden, 1e-5, REPLACE).or_infinity
    )


# Laws


@settings(max_examples=20)
@given(st.integers(1, 3000), st.integers(2, 500), st.floats(0.5, 3))
def test_monotone_in_steps_noise_and_rate(count: int, population: int, sigma: float) -> None:
    here = epsilon(draws(population, sigma, count), 1e-5, REPLACE).or_infinity
    slack = 1e-3 + 2e-3 * here  # of the grid
    assert epsilon(draws(population, sigma, 2 * count), 1e-5, REPLACE).or_infinity >= here - slack
    assert epsilon(draws(population, 1.5 * sigma, count), 1e-5, REPLACE).or_infinity <= here + slack
    assert epsilon(draws(2 * population, sigma, count), 1e-5, REPLACE).or_infinity <= here + slack


@settings(max_examples=15)
@given(st.integers(1, 3000), st.floats(1e-3, 0.3), st.floats(0.6, 4), st.sampled_from(Relation))
def test_poisson_samples_are_monotone_too(
    count: int, rate: float, sigma: float, relation: Relation
) -> None:
    here = epsilon(poisson(rate, sigma, count), 1e-5, relation).or_infinity
    slack = 1e-3 + 2e-3 * here  # of the grid
    assert epsilon(poisson(rate, sigma, 2 * count), 1e-5, relation).or_infinity >= here - slack
    assert epsilon(poisson(rate, 1.5 * sigma, count), 1e-5, relation).or_infinity <= here + slack
    assert epsilon(poisson(rate / 2, sigma, count), 1e-5, relation).or_infinity <= here + slack


@settings(max_examples=30)
@given(
    st.floats(0, 5.5), st.floats(-4, -0.1), st.floats(-0.5, 1.2), st.floats(-9, -3), st.booleans()
)
def test_the_best_order_is_found_without_trying_all(
    count: float, rate: float, sigma: float, delta: float, of_records: bool
) -> None:
    """Counts, rates, noise and deltas over powers of ten."""
    event = PoissonSampledDpEvent(10**rate, GaussianDpEvent(10**sigma))
    leaves, relation = ((event, int(10**count)),), ADD_OR_REMOVE if of_records else REPLACE
    orders = tuple(rdp_privacy_accountant.DEFAULT_RDP_ORDERS) if of_records else accounting.ORDERS
    of_all, _ = accounting._at_orders(leaves, 10**delta, relation, orders)
    result = accounting._by_rdp(leaves, 10**delta, relation)
    assert of_all <= result <= 1.001 * of_all


def test_an_empty_spend_is_free_and_a_release_without_noise_has_no_bound() -> None:
    assert epsilon({}, 1e-5, REPLACE).value == 0.0
    assert epsilon({NonPrivateDpEvent(): 1}, 1e-5, REPLACE).value is None


def test_revealed_and_secret_samples_are_bounded_together() -> None:
    """Secret ones count as revealed too; and different kinds, as if each had sampled the record."""
    gate = GaussianDpEvent(2.0)
    mixed = {RevealedSampling(0.1, gate): 3, PoissonSampledDpEvent(0.1, gate): 4}
    seen = epsilon({RevealedSampling(0.1, gate): 7}, 1e-5, ADD_OR_REMOVE)
    assert epsilon(mixed, 1e-5, ADD_OR_REMOVE) == seen
    assert (
        seen.or_infinity
        > epsilon({PoissonSampledDpEvent(0.1, gate): 7}, 1e-5, ADD_OR_REMOVE).or_infinity
    )
    spend = {RevealedSampling(0.1, GaussianDpEvent(1.0)): 3, **draws(10, 1.0, 1)}
    always = epsilon({GaussianDpEvent(1.0): 4}, 1e-5, REPLACE)
    assert epsilon(spend, 1e-5, REPLACE) == always


@kills(
    "fedgen/privacy/accounting.py",
    ("return revealed_epsilon(rate_of(event), gaussian_of(event).noise_multiplier, count, delta)"),
    (
        "return revealed_epsilon(\n"
        "        rate_of(event) / 2, gaussian_of(event).noise_multiplier, count, delta\n"
        "    )"
    ),
)
def test_secret_samples_cost_no_more_than_revealed_ones() -> None:
    """With almost no noise, the number of visits dominates: FedAvg-GAN as published, under both
    relations, is not 5.0e6."""
    rate, gate = 10 / 3400, GaussianDpEvent(0.01)
    result = epsilon({PoissonSampledDpEvent(rate, gate): 1000}, 1e-5, ADD_OR_REMOVE)
    assert result.value == pytest.approx(64_764, rel=1e-4)
    assert (result.second_opinion or 0) > 5e6
    fixed = epsilon({SampledWithoutReplacementDpEvent(3400, 10, gate): 1000}, 1e-5, REPLACE)
    assert fixed.value == pytest.approx(64_764, rel=1e-4)


@kills("fedgen/privacy/privacy_profiles.py", "many = len(eps) > _FEW_POINTS", "many = True")
def test_one_epsilon_does_not_loop_over_all_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a sequence of ε, dp_accounting runs a Python loop over all buckets of the privacy loss
    distribution; fedgen must pass single values."""
    dimensions, whole = [], pld.PrivacyLossDistribution.get_delta_for_epsilon

    def counted(loss: pld.PrivacyLossDistribution, points: object) -> object:
        dimensions.append(np.ndim(points))  # type: ignore[arg-type]
        return whole(loss, points)

    monkeypatch.setattr(pld.PrivacyLossDistribution, "get_delta_for_epsilon", counted)
    spend = {PoissonSampledDpEvent(0.021, GaussianDpEvent(1.3)): 700}
    assert 0 < epsilon(spend, 1e-5, ADD_OR_REMOVE).or_infinity < 10
    assert set(dimensions) == {0}
