"""ε for several records of one person."""

from __future__ import annotations

import math

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SampledWithoutReplacementDpEvent
from mutation import kills

from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import PoissonSampledGroup, Relation, Spend
from fedgen.privacy.gaussian_dp import gaussian_epsilon
from fedgen.privacy.groups import SIZES, group_epsilons

ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE


@kills("fedgen/privacy/groups.py", "canonical(group_event(event, size), count)", "{event: count}")
@kills("fedgen/privacy/groups.py", "or_null(max(", "or_null(min(")
@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_records_of_gaussians_add_up(relation: Relation) -> None:
    """For the client that spent most."""
    spends: list[Spend] = [
        {GaussianDpEvent(5.0): 3, GaussianDpEvent(9.0): 1},
        {GaussianDpEvent(8.0): 1},
    ]
    result = group_epsilons(spends, 1e-5, relation)
    mu = math.sqrt(3 / 25 + 1 / 81)
    assert result == {
        f"{size}": pytest.approx(gaussian_epsilon(size * mu, 1e-5), rel=1e-6) for size in SIZES
    }


@kills("fedgen/privacy/groups.py", "if relation is Relation.REPLACE_ONE and not", "if not")
def test_sampled_records() -> None:
    """Ganesh's bound for added records; none is known for replaced ones."""
    spend: Spend = {PoissonSampledDpEvent(0.02, GaussianDpEvent(1.5)): 100}
    result = group_epsilons([spend], 1e-5, ADD)
    for size in SIZES:
        group: Spend = {PoissonSampledGroup(0.02, size, GaussianDpEvent(1.5)): 100}
        assert result is not None
        assert result[f"{size}"] == pytest.approx(epsilon(group, 1e-5, ADD).or_infinity)
    sampled: Spend = {SampledWithoutReplacementDpEvent(100, 2, GaussianDpEvent(1.5)): 10}
    assert group_epsilons([sampled], 1e-5, REPLACE) is None
    assert group_epsilons([spend], 1e-5, REPLACE) is None
    assert group_epsilons([], 1e-5, ADD) is None
