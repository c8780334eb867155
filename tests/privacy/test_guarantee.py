"""The trade-off curve bounds every attacker, and is exact if a closed form is known."""

from __future__ import annotations

import json
import math

import mpmath
import numpy as np
import pytest
import riskcal.analysis as riskcal
from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
)
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given, settings
from hypothesis import strategies as st
from mutation import kills
from scipy import stats

from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import (
    Contribution,
    PoissonSampledGroup,
    Relation,
    RevealedSampling,
    Spend,
)
from fedgen.privacy.gaussian_dp import gaussian_delta
from fedgen.privacy.guarantee import (
    GRID,
    MIN_TPR,
    Guarantee,
    from_json,
    guarantee,
    of_pair,
    round_up,
    to_json,
    worst,
    worst_guarantee,
)

ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE
RATES = (1e-4, 1e-3, 0.01, 0.1, 0.3, 0.5, 0.9)


def bounds(spend: Spend, relation: Relation = ADD) -> Guarantee:
    result = guarantee(spend, 1e-5, relation)
    assert result is not None
    return result


def exact_tpr(mu: float, fpr: float) -> float:
    """By arithmetic of 40 digits."""
    with mpmath.workdps(40):
        threshold = -mpmath.sqrt(2) * mpmath.erfinv(2 * mpmath.mpf(fpr) - 1)
        return float(mpmath.ncdf(mpmath.mpf(mu) - threshold))


@pytest.mark.parametrize(
    ("mu", "tpr", "posterior"),
    [  # one Gaussian at ε = 3 and ε = 10, δ = 1e-5
        (0.7191174350105713, 0.0540019135433901, 0.8959286672047311),
        (2.000445620265311, 0.3722491552253281, 0.9992440934148266),
    ],
)
def test_a_gaussian_has_the_exact_curve(mu: float, tpr: float, posterior: float) -> None:
    result = bounds({GaussianDpEvent(1 / mu): 1})
    assert result.tpr(0.01) == pytest.approx(tpr, rel=1e-12)
    assert result.posterior(0.5) == pytest.approx(posterior, rel=1e-12)
    assert result.advantage == pytest.approx(2 * stats.norm.cdf(mu / 2) - 1, rel=1e-12)
    for fpr in RATES:
        assert result.tpr(fpr) == pytest.approx(exact_tpr(mu, fpr), rel=1e-12)
        assert result.fpr(result.tpr(fpr)) == pytest.approx(fpr, rel=1e-9)
    assert result.mu == pytest.approx(mu, rel=1e-12)


@pytest.mark.parametrize("order", [1.5, 2, 5])
def test_rho_bounds_renyi_divergences(order: float) -> None:
    """Of two Gaussians, by quadrature: ρ times the order."""
    result = bounds({GaussianDpEvent(2.0): 3})
    x = np.linspace(-30, 40, 400_001)
    log_p, log_q = stats.norm.logpdf(x, result.mu), stats.norm.logpdf(x)
    integral = np.exp(order * log_p + (1 - order) * log_q).sum() * (x[1] - x[0])
    assert result.rho == pytest.approx(math.log(integral) / (order - 1) / order, rel=1e-9)
    assert bounds({PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0)): 9}).rho is None


@given(mu=st.floats(0.01, 8), fpr=st.floats(1e-6, 0.999))
def test_a_profile_on_a_grid_loses_little_and_never_allows_less(mu: float, fpr: float) -> None:
    exact = bounds({GaussianDpEvent(1 / mu): 1})
    rough = Guarantee(GRID, exact.deltas, None)
    assert exact.tpr(fpr) * (1 - 1e-9) <= rough.tpr(fpr) <= exact.tpr(fpr) * 1.001 + 1e-3
    assert rough.fpr(fpr) <= exact.fpr(fpr) * (1 + 1e-9)
    assert rough.advantage == pytest.approx(exact.advantage, rel=1e-9)
    assert exact.posterior(0.1) * (1 - 1e-9) <= rough.posterior(0.1)


def likelihood_ratio_tpr(rate: float, sigma: float, fpr: float) -> float:
    """Return the TPR of the best test of one sampled Gaussian, (1 - q) N(0) + q N(1) against N(0),
    by its threshold: the likelihood ratio increases with the output."""
    threshold = stats.norm.isf(fpr) * sigma
    power = stats.norm.sf(threshold / sigma) * (1 - rate)
    return float(power + rate * stats.norm.sf((threshold - 1) / sigma))


@kills(
    "fedgen/privacy/guarantee.py",
    "second = 1 - np.exp(-self.points) * (1 - self.deltas - fpr)",
    "second = 1 - np.exp(-self.points) * (1 + self.deltas - fpr)",
)
@kills(
    "fedgen/privacy/guarantee.py",
    "first = self.deltas + np.exp(self.points) * fpr",
    "first = np.exp(self.points) * fpr",
)
@settings(deadline=None, max_examples=15)
@given(rate=st.floats(0.01, 0.99), sigma=st.floats(0.3, 5), fpr=st.sampled_from(RATES))
def test_no_test_of_one_sampled_gaussian_is_above_the_curve(
    rate: float, sigma: float, fpr: float
) -> None:
    """In both directions: a member who was added, and one who was removed."""
    result = bounds({PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)): 1})
    added = likelihood_ratio_tpr(rate, sigma, fpr)
    assert result.tpr(fpr) >= added * (1 - 1e-9)
    # removed: the same test with members and others exchanged, TPR 1 - FPR'
    assert result.tpr(1 - added) >= (1 - fpr) * (1 - 1e-9)


EVENTS: dict[str, tuple[Spend, Relation]] = {
    "poisson": ({PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0)): 1000}, ADD),
    "poisson, replaced": ({PoissonSampledDpEvent(0.05, GaussianDpEvent(2.0)): 50}, REPLACE),
    "fixed size": ({SampledWithoutReplacementDpEvent(100, 5, GaussianDpEvent(1.5)): 40}, REPLACE),
    "revealed": ({RevealedSampling(0.1, GaussianDpEvent(2.0)): 30}, ADD),
    "revealed, mixed": (
        {RevealedSampling(0.1, GaussianDpEvent(2.0)): 3, GaussianDpEvent(5.0): 1},
        ADD,
    ),
    "group": ({PoissonSampledGroup(0.02, 5, GaussianDpEvent(4.0)): 100}, ADD),
    "mixed": (
        {PoissonSampledDpEvent(0.02, GaussianDpEvent(1.0)): 100, GaussianDpEvent(3.0): 2},
        ADD,
    ),
    "by Renyi divergences": (
        {PoissonSampledDpEvent(1e-4, GaussianDpEvent(1.0)): 20_000_000},
        ADD,
    ),
}


@pytest.mark.parametrize("name", EVENTS)
def test_the_profile_agrees_with_epsilon(name: str) -> None:
    """At δ, up to the resolution of the grid; it starts at most at 1 and does not increase."""
    spend, relation = EVENTS[name]
    result, value = bounds(spend, relation), epsilon(spend, 1e-5, relation).or_infinity
    assert (np.diff(result.deltas) <= 1e-12).all()
    assert 0 <= result.deltas.min() <= result.deltas.max() <= 1
    reached = GRID[np.argmax(result.deltas <= 1e-5 * (1 + 1e-6))]
    assert reached == pytest.approx(value, abs=0.011, rel=0.2)
    assert result.tpr(0.01) <= 1e-5 + math.exp(value) * 0.01 * 1.02


@kills(
    "fedgen/privacy/guarantee.py",
    "        deltas = deltas + stop_probability * (1 + np.exp(GRID))",
    "        pass",
)
def test_a_run_that_may_stop_costs_more() -> None:
    spend: Spend = {PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0)): 100}
    one, other = (guarantee(spend, 1e-5, ADD, stop) for stop in (0.0, 1e-6))
    assert one is not None and other is not None
    assert (other.deltas >= np.minimum(one.deltas + 2e-6, 1)).all()
    gaussian = guarantee({GaussianDpEvent(1.0): 1}, 1e-5, ADD, 1e-6)
    assert gaussian is not None and gaussian.mu is None
    assert gaussian.tpr(0.01) > bounds({GaussianDpEvent(1.0): 1}).tpr(0.01)


@pytest.mark.parametrize("event", [NonPrivateDpEvent(), Contribution()])
def test_no_curve_without_a_bound(event: DpEvent) -> None:
    assert guarantee({event: 1, GaussianDpEvent(1.0): 1}, 1e-5, ADD) is None
    assert guarantee({event: 0, GaussianDpEvent(1.0): 1}, 1e-5, ADD) is not None
    assert worst_guarantee([{event: 1}, {GaussianDpEvent(1.0): 1}], 1e-5, ADD) is None


@given(st.floats(1e-9, 1e3))
def test_figures_are_rounded_up_to_three_digits(value: float) -> None:
    assert value * (1 - 1e-11) <= float(round_up(value)) <= value * 1.0101


def test_an_empty_spend_has_the_trivial_curve() -> None:
    result = bounds({})
    assert (result.tpr(0.01), result.advantage, result.mu) == (0.01, 0.0, 0.0)
    assert result.posterior(0.1) == pytest.approx(0.1)


@kills("fedgen/privacy/guarantee.py", "return max(bounded,", "return min(bounded,")
@kills("fedgen/privacy/guarantee.py", "reduce(np.maximum,", "reduce(np.minimum,")
def test_the_worst_of_several_clients_is_above_each() -> None:
    gaussians: list[Spend] = [{GaussianDpEvent(2.0): count} for count in (1, 5, 3)]
    result = worst_guarantee(gaussians, 1e-5, ADD)
    assert result is not None and result.mu == bounds(gaussians[1]).mu
    busiest = worst(map(bounds, gaussians))
    assert busiest is not None and busiest.mu == result.mu
    mixed = [*gaussians, EVENTS["poisson"][0], EVENTS["revealed"][0]]
    together = worst_guarantee(mixed, 1e-5, ADD)
    assert together is not None
    for spend in mixed:
        assert (together.deltas >= bounds(spend).deltas).all()


def test_the_largest_counts_bound_very_many_clients() -> None:
    """No spend dominates another: each is large in an event of its own."""
    events = [GaussianDpEvent(10.0 + number) for number in range(20)]
    spends: list[Spend] = [{event: 2, events[0]: 1} for event in events[1:]]
    together = worst_guarantee(spends, 1e-5, ADD)
    assert together is not None and together.mu is not None
    assert together.mu == pytest.approx(bounds(dict.fromkeys(events[1:], 2) | {events[0]: 1}).mu)
    assert all(together.mu >= (bounds(spend).mu or 0) for spend in spends)


@settings(deadline=None, max_examples=60)
@given(
    mu=st.floats(0.05, 5),
    prior=st.sampled_from([0.01, 0.1, 0.5]),
    threshold=st.floats(-3, 6),
)
def test_no_attacker_with_enough_recall_exceeds_the_posterior(
    mu: float, prior: float, threshold: float
) -> None:
    """For any threshold of an attacker who finds at least one in a hundred members."""
    result, others = stats.norm.sf(threshold - mu), stats.norm.sf(threshold)
    if result < MIN_TPR:
        return
    precision = prior * result / (prior * result + (1 - prior) * others)
    exact = bounds({GaussianDpEvent(1 / mu): 1})
    assert precision <= exact.posterior(prior) * (1 + 1e-9)
    assert precision <= Guarantee(GRID, exact.deltas, None).posterior(prior) * (1 + 1e-9)
    assert float(gaussian_delta(mu, 0.0)) == pytest.approx(exact.advantage)


@st.composite
def compositions(draw: st.DrawFn) -> Spend:
    """Gaussian releases, sampled ones, or both."""
    sigmas, counts = st.floats(0.6, 6), st.integers(1, 30)
    spend: dict[DpEvent, int] = {}
    for kind in draw(st.sampled_from([("gaussian",), ("sampled",), ("gaussian", "sampled")])):
        event: DpEvent = GaussianDpEvent(draw(sigmas))
        if kind == "sampled":
            event = PoissonSampledDpEvent(draw(st.floats(0.001, 0.5)), event)
        spend[event] = draw(counts)
    return spend


def losses(spend: Spend, pessimistic: bool) -> pld.PrivacyLossDistribution:
    """Return privacy losses rounded up or down."""
    composed = None
    for event, count in spend.items():
        gate = event if isinstance(event, GaussianDpEvent) else event.event
        one = pld.from_gaussian_mechanism(
            gate.noise_multiplier,
            pessimistic_estimate=pessimistic,
            value_discretization_interval=1e-3,
            sampling_prob=getattr(event, "sampling_probability", 1.0),
        ).self_compose(count)
        composed = one if composed is None else composed.compose(one)
    return composed


@kills(
    "fedgen/privacy/guarantee.py",
    "second = 1 - np.exp(-self.points)",
    "second = np.exp(-self.points)",
)
@settings(deadline=None, max_examples=25)
@given(spend=compositions(), fpr=st.sampled_from(RATES))
def test_riskcal_finds_no_better_attack(spend: Spend, fpr: float) -> None:
    """With losses rounded down, its curve is below the true one; rounded up, above it, and ours is
    close to it."""
    result = bounds(spend)
    down, up = (losses(spend, pessimistic) for pessimistic in (False, True))
    attack, bound = (1 - riskcal.get_beta_from_pld(loss, alpha=fpr) for loss in (down, up))
    assert attack * (1 - 1e-6) - 1e-9 <= result.tpr(fpr) <= bound * 1.02 + 1e-3
    advantage = riskcal.get_advantage_from_pld(down)
    assert advantage * (1 - 1e-6) - 1e-9 <= result.advantage


@settings(deadline=None, max_examples=25)
@given(spend=compositions(), rate=st.floats(1e-7, 1))
def test_published_points_lose_little(spend: Spend, rate: float) -> None:
    """Nothing at the published rates, and little elsewhere; never below the exact profile."""
    whole = bounds(spend)
    data = to_json(whole)
    read = from_json(json.loads(json.dumps(data)))
    assert data is not None and len(data["profile"] or ()) <= 150
    for fpr in (0.001, 0.01):
        assert read.tpr(fpr) == pytest.approx(whole.tpr(fpr), rel=1e-9)
    assert read.advantage == pytest.approx(whole.advantage, rel=1e-9)
    assert read.posterior(0.5) == pytest.approx(whole.posterior(0.5), rel=1e-9)
    assert whole.tpr(rate) * (1 - 1e-9) <= read.tpr(rate)
    if rate >= 1e-6:
        assert read.tpr(rate) <= whole.tpr(rate) * 1.05 + 0.01


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"mu": -1.0},
        {"mu": math.inf},
        {"mu": None, "profile": None},
        {"mu": None, "profile": []},
        {"mu": None, "profile": [[0.0]]},
        {"mu": None, "profile": [[0.0, 1.5]]},
        {"mu": None, "profile": [[0.0, math.nan]]},
        {"mu": None, "profile": [[math.nan, 0.5]]},
        {"mu": None, "profile": [[1.0, 0.5], [0.0, 0.6]]},
        {"mu": None, "profile": [[-1.0, 0.5]]},
        {"mu": None, "profile": [[float(n), 0.5] for n in range(10_000)]},
        {"mu": None, "profile": [[0.0, "much"]]},
    ],
)
def test_a_foreign_profile_is_checked(data: dict[str, object]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        from_json(data)


@kills("fedgen/privacy/guarantee.py", "ndtri(powers[1:]) - ndtri", "ndtri(powers[:-1]) - ndtri")
@settings(deadline=None, max_examples=25)
@given(spend=compositions(), rate=st.floats(0.001, 0.5))
def test_a_dominating_gaussian_is_below_the_curve_nowhere(spend: Spend, rate: float) -> None:
    result = bounds(spend)
    mu = result.dominating_mu()
    assert mu < math.inf
    gaussian = bounds({GaussianDpEvent(1 / mu): 1})
    if result.tpr(rate) <= 0.999:
        assert result.tpr(rate) <= gaussian.tpr(rate) * (1 + 1e-9)
    exact = bounds({GaussianDpEvent(1.0): 1})
    rough = Guarantee(GRID, exact.deltas, None).dominating_mu()
    assert 1.001 <= rough <= 1.006, "rounded up between rates"


@kills("fedgen/privacy/guarantee.py", "+ 2 * self.deltas *", "+ self.deltas *")
def test_the_curve_of_one_pair() -> None:
    pair = of_pair(3.0, 1e-5)
    assert pair.tpr(0.01) == pytest.approx(1e-5 + 0.01 * math.exp(3))
    best = max(pair.tpr(fpr) - fpr for fpr in np.linspace(0, 1, 100_001))
    assert pair.advantage == pytest.approx(best, abs=1e-4) and pair.advantage >= best
    nothing = of_pair(math.inf, 1e-5)
    assert nothing.advantage == 1.0
    assert nothing.tpr(1e-9) == 1.0
    assert nothing.fpr(0.5) == 0.0
