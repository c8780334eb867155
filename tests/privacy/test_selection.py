"""Private selection: the theorem's bound, against dp_accounting, closed forms, and exact laws."""

from __future__ import annotations

import itertools
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import (
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
)
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from mutation import kills
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammaln
from scipy.stats import chisquare

from fedgen import verify
from fedgen.privacy.accounting import epsilon, epsilons
from fedgen.privacy.events import (
    Contribution,
    PoissonSampledGroup,
    Relation,
    RevealedSampling,
    Selection,
    canonical,
    describe,
    from_json,
    group_event,
    to_json,
    with_sampling_revealed,
)
from fedgen.privacy.gaussian_dp import gaussian_epsilon
from fedgen.privacy.groups import group_epsilons
from fedgen.privacy.guarantee import guarantee
from fedgen.privacy.selection import (
    COUNT_ERROR,
    REAL_ORDERS,
    gamma_of,
    sample_count,
    selection_divergences,
)

ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE
ORDERS = np.array(sorted(REAL_ORDERS))
DISTRIBUTIONS = [(1.5, 0.0), (3.0, 1.0), (10.0, 0.0), (10.0, 1.0), (20.0, 3.0)]


def count_probabilities(mean: float, shape: float, most: int = 5000) -> NDArray[np.float64]:
    """P(K = 1), ..., P(K = most), by definition 1 of the paper."""
    gamma, k = gamma_of(mean, shape), np.arange(1, most + 1)
    if shape == 0:
        return np.asarray((1 - gamma) ** k / (k * -math.log(gamma)))
    logs = k * math.log1p(-gamma) - math.log(math.expm1(-shape * math.log(gamma)))
    logs += gammaln(k + shape) - gammaln(k + 1) - gammaln(shape)
    return np.asarray(np.exp(logs))


# --- the number of runs ---------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "shape"), DISTRIBUTIONS)
def test_gamma_gives_the_mean(mean: float, shape: float) -> None:
    probabilities = count_probabilities(mean, shape)
    assert probabilities.sum() == pytest.approx(1, abs=1e-9)
    assert probabilities @ np.arange(1, 5001) == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize(("mean", "shape"), DISTRIBUTIONS)
@kills(
    "fedgen/privacy/selection.py",
    "probability *= (1 - gamma) * (count + eta) / (count + 1)",
    "probability *= (1 - gamma) * (count + eta) / count",
)
def test_counts_have_the_stated_distribution(mean: float, shape: float) -> None:
    """A correct sampler fails with probability 1e-6 for each distribution."""
    source, size = random.Random(7), 20_000
    drawn = np.array([sample_count(mean, shape, source) for _ in range(size)])
    expected = size * count_probabilities(mean, shape)
    few = expected < 10
    observed = np.array([(drawn == k + 1).sum() for k in np.flatnonzero(~few)])
    rest = size - observed.sum(), size - expected[~few].sum()
    result = chisquare([*observed, rest[0]], [*expected[~few], rest[1]])
    assert result.pvalue > 1e-6


def test_the_sampling_error_is_negligible() -> None:
    assert COUNT_ERROR * math.exp(50) < 1e-25


# --- the bound ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "shape"), DISTRIBUTIONS)
@pytest.mark.parametrize("mu", [0.05, 0.5, 2.0])
@kills("fedgen/privacy/selection.py", "bounds = divergences + constant +", "bounds = divergences +")
def test_epsilon_agrees_with_dp_accounting(mu: float, mean: float, shape: float) -> None:
    runs = [
        (GaussianDpEvent(1 / mu), {GaussianDpEvent(1 / mu): 1}),
        (
            PoissonSampledDpEvent(0.05, GaussianDpEvent(2 / mu)),
            {PoissonSampledDpEvent(0.05, GaussianDpEvent(2 / mu)): 1},
        ),
    ]
    for event, spend in runs:
        accountant = rdp.RdpAccountant(list(ORDERS))
        accountant.compose(RepeatAndSelectDpEvent(event, mean, shape))
        ours = epsilon({Selection.of_spends([spend], mean, shape): 1}, 1e-6, ADD).or_infinity
        assert ours == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-4, abs=1e-8)


@pytest.mark.parametrize(("mean", "shape"), DISTRIBUTIONS)
def test_concentrated_privacy_gives_the_closed_form(mean: float, shape: float) -> None:
    """For ρ-concentrated runs the best λ' is sqrt(log(1/γ) / ρ), if it is above 1."""
    rho, gamma, orders = 0.02, gamma_of(mean, shape), np.geomspace(1.001, 1e4, 400_000)
    bound = selection_divergences(rho * orders, orders, mean, shape)
    root = 2 * math.sqrt(rho * math.log(1 / gamma)) - rho
    formula = rho * orders + (1 + shape) * root + math.log(mean) / (orders - 1)
    rising = np.minimum.accumulate(formula[::-1])[::-1]
    assert bound == pytest.approx(rising, rel=1e-6)


def test_pure_privacy_triples_with_a_geometric_count() -> None:
    """(2 + η) ε: 3 ε for the geometric distribution, as Liu and Talwar 2019 proved, and 2 ε for the
    logarithmic one."""
    orders = np.array([2.0, 1e9])
    for shape, factor in ((1.0, 3.0), (0.0, 2.0)):
        bound = selection_divergences(np.array([0.5, 0.5]), orders, 10.0, shape)
        assert bound[-1] == pytest.approx(factor * 0.5, rel=1e-6)


def law_of_best(
    law: NDArray[np.float64], probabilities: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Law of the best of K outputs, numbered by score, from the law of one."""
    below = np.concatenate([[0.0], np.minimum(np.cumsum(law), 1.0)])
    powers = below[:, None] ** np.arange(1, len(probabilities) + 1)
    return np.asarray(np.diff(powers @ probabilities))


def renyi(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Renyi divergence at ``ORDERS``, the larger of both directions."""
    values = []
    for p, q in ((first, second), (second, first)):
        logs = ORDERS[:, None] * np.log(p) + (1 - ORDERS[:, None]) * np.log(q)
        values.append(np.logaddexp.reduce(logs, axis=1) / (ORDERS - 1))
    return np.maximum(*values)


@pytest.mark.parametrize(("mean", "shape"), DISTRIBUTIONS)
@kills(
    "fedgen/privacy/selection.py",
    "(1 + shape) * np.min((1 - 1 / orders) * divergences + log_inverse_gamma / orders)",
    "shape * np.min((1 - 1 / orders) * divergences + log_inverse_gamma / orders)",
)
@kills(
    "fedgen/privacy/selection.py",
    "+ math.log(mean) / (orders - 1)",
    "- math.log(mean) / (orders - 1)",
)
def test_exact_distributions_of_finite_mechanisms_are_within_the_bound(
    mean: float, shape: float
) -> None:
    """Adversarial pairs, with a rare best output, and random pairs."""
    probabilities, source = count_probabilities(mean, shape), np.random.default_rng(3)
    pairs = []
    for ratio, rare in itertools.product((1.2, 2.0, 10.0), (1e-4, 0.01, 0.05, 0.3)):
        high = min(rare * ratio, 0.9)
        pairs.append((np.array([1 - rare, rare]), np.array([1 - high, high])))
        pairs.append((np.array([rare, 1 - rare]), np.array([high, 1 - high])))
    for _ in range(30):
        first, second = source.dirichlet(np.ones(4), 2)
        pairs.append((first, 0.7 * first + 0.3 * second))
    for first, second in pairs:
        bound = selection_divergences(renyi(first, second), ORDERS, mean, shape)
        best = law_of_best(first, probabilities), law_of_best(second, probabilities)
        assert (renyi(*best) <= bound + 1e-6).all()


def test_a_fixed_number_of_runs_exceeds_the_bound() -> None:
    """A fixed number of ten multiplies the divergence by ten: all ten may be as bad."""
    first, second = np.array([0.5, 0.5]), np.array([0.25, 0.75])
    fixed = np.eye(60)[9]
    best = law_of_best(first, fixed), law_of_best(second, fixed)
    bound = selection_divergences(renyi(first, second), ORDERS, 10.0, 1.0)
    assert renyi(*best)[-1] == pytest.approx(10 * math.log(2), rel=1e-3)
    assert renyi(*best)[-1] > 2 * bound[-1]


# --- several settings, units and kinds of events --------------------------------------------------


@kills(
    "fedgen/privacy/privacy_profiles.py",
    "largest = np.max([divergences(spend, relation, orders) for spend in spends], axis=0)",
    "largest = np.mean([divergences(spend, relation, orders) for spend in spends], axis=0)",
)
def test_the_worst_setting_counts_at_each_order() -> None:
    gaussian = {GaussianDpEvent(2.0): 1}
    for other in (
        {PoissonSampledDpEvent(0.01, GaussianDpEvent(0.7)): 40},
        {GaussianDpEvent(1.0): 1},
        {GaussianDpEvent(4.0): 1},
    ):
        event = Selection.of_spends([gaussian, other], 5.0, 1.0)
        alone = [
            epsilon({Selection.of_spends([spend], 5.0, 1.0): 1}, 1e-5, ADD).or_infinity
            for spend in (gaussian, other)
        ]
        assert epsilon({event: 1}, 1e-5, ADD).or_infinity >= max(alone)
    once = Selection.of_spends([gaussian], 5.0, 1.0)
    assert Selection.of_spends([gaussian, gaussian], 5.0, 1.0) == once


def test_a_selection_costs_more_than_a_run_and_less_than_all_runs() -> None:
    run = {GaussianDpEvent(2.0): 1}
    one = epsilon(run, 1e-5, ADD).or_infinity
    selected = epsilon({Selection.of_spends([run], 20.0, 1.0): 1}, 1e-5, ADD).or_infinity
    all_runs = epsilon({GaussianDpEvent(2.0): 20}, 1e-5, ADD).or_infinity
    assert one < selected < all_runs


def test_groups_scale_the_events_of_each_run() -> None:
    spend = {GaussianDpEvent(4.0): 2, PoissonSampledDpEvent(0.1, GaussianDpEvent(5.0)): 3}
    event = Selection.of_spends([spend], 5.0, 1.0)
    group = group_event(event, 2)
    [runs] = group.alternatives
    assert dict(runs) == {
        GaussianDpEvent(2.0): 2,
        PoissonSampledGroup(0.1, 2, GaussianDpEvent(5.0)): 3,
    }
    listed = group_epsilons([{event: 1}], 1e-5, ADD)
    assert listed is not None
    values = list(listed.values())
    assert None not in values and values == sorted(values)
    assert group_epsilons([{event: 1}], 1e-5, REPLACE) is None
    # as if a group was in all samples
    always = {GaussianDpEvent(2.0): 2, GaussianDpEvent(2.5): 3}
    assert epsilon({group: 1}, 1e-5, ADD) == epsilon(
        {Selection.of_spends([always], 5.0, 1.0): 1}, 1e-5, ADD
    )


def test_sampled_subsets_and_revealed_samples_are_accounted() -> None:
    subset = {SampledWithoutReplacementDpEvent(50, 5, GaussianDpEvent(3.0)): 4}
    chosen = epsilon({Selection.of_spends([subset], 5.0, 1.0): 1}, 1e-5, REPLACE).or_infinity
    always = epsilon(
        {Selection.of_spends([{GaussianDpEvent(3.0): 4}], 5.0, 1.0): 1}, 1e-5, REPLACE
    ).or_infinity
    assert chosen < always
    seen = {RevealedSampling(0.1, GaussianDpEvent(3.0)): 4}
    revealed = epsilon({Selection.of_spends([seen], 5.0, 1.0): 1}, 1e-5, REPLACE).or_infinity
    assert revealed == pytest.approx(always, rel=1e-3)
    with pytest.raises(ValueError, match="no neighbours"):
        epsilon({Selection.of_spends([subset], 5.0, 1.0): 1}, 1e-5, ADD)


@kills(
    "fedgen/privacy/privacy_profiles.py",
    "tuple(sorted(REAL_ORDERS)) if pure else ORDERS",
    "tuple(sorted(REAL_ORDERS))",
)
@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize("shape", [0.0, 1.0])
def test_the_stand_alone_verifier_agrees(relation: Relation, shape: float) -> None:
    """For Poisson samples too, which have other divergences if a record is replaced."""
    poisson = {PoissonSampledDpEvent(0.05, GaussianDpEvent(1.5)): 60, GaussianDpEvent(9.0): 1}
    revealed = {RevealedSampling(0.1, GaussianDpEvent(6.0)): 4}
    cases = [[{GaussianDpEvent(2.0): 1}], [poisson], [poisson, revealed, {GaussianDpEvent(3.0): 2}]]
    for spends in cases:
        event = Selection.of_spends(spends, 5.0, shape)
        read = verify.read_bound([[to_json(event), 1]], 1.0)
        assert isinstance(read, verify.Selection)
        profile = verify.selection_profile(read, relation.value)
        ours = epsilon({event: 1}, 1e-6, relation).or_infinity
        assert verify.epsilon_at(profile, 1e-6) == pytest.approx(ours, rel=2e-3)


def test_a_run_contains_no_selection() -> None:
    event = Selection.of_spends([{GaussianDpEvent(2.0): 1}], 5.0, 1.0)
    with pytest.raises(ValueError, match="contains a selection"):
        Selection.of_spends([{event: 1}], 5.0, 1.0)
    nested = to_json(event) | {"alternatives": [[[to_json(event), 1]]]}
    with pytest.raises(ValueError, match="contains a selection"):
        from_json(nested)


def test_the_page_states_the_epsilon_of_a_run() -> None:
    """The table of docs/tuning.md, rounded to its two decimals."""
    page = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text()
    rows = re.findall(
        r"^\| (1|3|10) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.M
    )
    assert len(rows) == 3
    distributions = (3.0, 1.0), (5.0, 1.0), (10.0, 1.0), (10.0, 0.0)

    def run_epsilon(target: float, mean: float, shape: float) -> float:
        def excess(mu: float) -> float:
            event = Selection.of_spends([{GaussianDpEvent(1 / mu): 1}], mean, shape)
            return epsilon({event: 1}, 1e-5, ADD).or_infinity - target

        return gaussian_epsilon(brentq(excess, 1e-3, 5), 1e-5)

    for target, *stated in rows:
        computed = [run_epsilon(float(target), *parameters) for parameters in distributions]
        assert stated == [f"{value:.2f}" for value in computed]


def test_a_selection_has_a_trade_off_curve() -> None:
    event = Selection.of_spends([{GaussianDpEvent(2.0): 1}], 5.0, 1.0)
    curve = guarantee({event: 1}, 1e-5, ADD)
    one = guarantee({GaussianDpEvent(2.0): 1}, 1e-5, ADD)
    assert curve is not None and one is not None and curve.mu is None
    assert one.tpr(0.01) < curve.tpr(0.01) < 1
    assert epsilons([{event: 1}], 1e-5, ADD)[0] == epsilon({event: 1}, 1e-5, ADD)


def test_a_selection_without_noise_has_no_bound() -> None:
    for leaf in (NonPrivateDpEvent(), Contribution()):
        event = Selection.of_spends([{GaussianDpEvent(2.0): 1}, {leaf: 1}], 5.0, 1.0)
        assert canonical(event) == {NonPrivateDpEvent(): 1}


def test_selections_do_not_compose() -> None:
    event = Selection.of_spends([{GaussianDpEvent(2.0): 1}], 5.0, 1.0)
    for spend in ({event: 2}, {event: 1, GaussianDpEvent(3.0): 1}):
        with pytest.raises(ValueError, match="composes"):
            epsilon(spend, 1e-5, ADD)


def test_json_keeps_a_selection() -> None:
    spends = [
        {GaussianDpEvent(4.0): 2, PoissonSampledDpEvent(0.1, GaussianDpEvent(5.0)): 3},
        {GaussianDpEvent(3.0): 1},
        {GaussianDpEvent(5.0): 1},
    ]
    event = Selection.of_spends(spends, 5.0, 0.5)
    assert from_json(to_json(event)) == event
    assert canonical(event) == {event: 1} == with_sampling_revealed({event: 1})
    assert "the number is secret" in describe({event: 1})
    assert "one of 1 other set" in describe({event: 1})
    for change in ({"mean": 1.0}, {"shape": -1.0}, {"alternatives": []}, {"mean": "5"}):
        with pytest.raises(ValueError, match="not a privacy event"):
            from_json(to_json(event) | change)
