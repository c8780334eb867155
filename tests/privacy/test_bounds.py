"""Bounded responses: any input gives a response in the set, and no two members are further apart
than accounted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutation import kills
from torch import Tensor

from fedgen.privacy.accounting import epsilon
from fedgen.privacy.bounds import Ball, Bit, Bound, OneHot, Signs
from fedgen.privacy.events import Relation, Unit, canonical
from fedgen.privacy.gaussian_dp import gaussian_epsilon
from fedgen.privacy.mechanisms import RowGaussian
from fedgen.privacy.routing import Routing

BOUNDS: list[tuple[Bound, tuple[int, ...]]] = [
    (Ball(0.7), (12,)),
    (Signs(5), (3, 4)),
    (Signs(20), (3, 4)),
    (OneHot(3), (3, 4)),
    (Bit(), (1,)),
]
ODD = [0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, math.nan, math.inf, -math.inf]


@st.composite
def handed_over(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    """Return two raw rows with invalid values among them."""
    size = 2 * math.prod(shape)
    number = st.one_of(st.sampled_from(ODD), st.floats(-2, 2, width=32))
    flat = draw(st.lists(number, min_size=size, max_size=size))
    return torch.tensor(flat, dtype=torch.float32).view(2, *shape)


@kills(
    "fedgen/privacy/bounds.py",
    "flat.abs().topk(min(self.kept, flat.shape[1]), 1)",
    "flat.abs().topk(min(self.kept + 1, flat.shape[1]), 1)",
)
@kills(
    "fedgen/privacy/bounds.py",
    "return (_zero_if_not_finite(rows) > 0).to(rows)",
    "return _zero_if_not_finite(rows)",
)
@kills(
    "fedgen/privacy/bounds.py",
    "return torch.where(finite.view(-1, *[1] * (rows.dim() - 1)), rows, 0.0)",
    "return rows.nan_to_num()",
)
@pytest.mark.parametrize(("bound", "shape"), BOUNDS)
@given(data=st.data())
def test_any_input_gives_a_member_of_the_set(
    bound: Bound, shape: tuple[int, ...], data: st.DataObject
) -> None:
    raw = data.draw(handed_over(shape))
    made = bound.enforce(raw)
    assert made.shape == raw.shape
    assert bool(made.isfinite().all())
    flat = made.double().flatten(1)
    assert float(flat.norm(dim=1).max()) <= bound.radius * (1 + 1e-6)
    assert float((flat[0] - flat[1]).norm()) <= bound.diameter * (1 + 1e-6)
    assert float(flat.abs().max()) <= bound.max_entry * (1 + 1e-6)
    assert torch.allclose(bound.enforce(made), made)
    bad = ~raw.flatten(1).isfinite().all(1)
    assert not bool(made[bad].any()), "what is not finite is no answer"
    if isinstance(bound, Ball):
        return
    assert set(made.unique().tolist()) <= {-1.0, 0.0, 1.0}


@kills("fedgen/privacy/bounds.py", "return math.sqrt(self.blocks)", "return 1.0")
@pytest.mark.parametrize(
    ("bound", "first"),
    [
        (Ball(0.7), torch.full((1, 12), 5.0)),
        (Signs(5), torch.arange(1.0, 13)[None]),
        (Bit(), torch.ones(1, 1)),
        (OneHot(3), torch.tensor([[[1.0, 0, 0, 0]] * 3])),
    ],
)
def test_diameters_and_radii_are_attained(bound: Bound, first: Tensor) -> None:
    opposite = first.flip(-1) if isinstance(bound, OneHot) else -first
    one, other = bound.enforce(first).double(), bound.enforce(opposite).double()
    assert float((one - other).norm()) == pytest.approx(bound.diameter, rel=2e-5)
    assert float(one.norm()) == pytest.approx(bound.radius, rel=2e-5)


def test_signs_are_those_of_the_largest_entries() -> None:
    row = torch.tensor([[0.1, -3.0, 0.0, 2.0, -0.5]])
    assert Signs(2).enforce(row).tolist() == [[0.0, -1.0, 0.0, 1.0, 0.0]]
    assert Signs(9).enforce(row).tolist() == [[1.0, -1.0, 0.0, 1.0, -1.0]], "no sign of a zero"


def test_a_block_without_a_largest_bin_has_no_vote() -> None:
    row = torch.tensor([[[1.0, 2.0, 2.0], [3.0, 3.0, 3.0]]])
    assert OneHot(2).enforce(row).tolist() == [[[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]]


def test_votes_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="3 blocks"):
        OneHot(3).enforce(torch.zeros(2, 4, 5))
    with pytest.raises(ValueError, match="one number"):
        Bit().enforce(torch.zeros(2, 3))


@kills(
    "fedgen/privacy/bounds.py", "return 2 * math.sqrt(self.kept)", "return math.sqrt(2 * self.kept)"
)
@kills(
    "fedgen/privacy/bounds.py", "return math.sqrt(2 * self.blocks)", "return math.sqrt(self.blocks)"
)
@pytest.mark.parametrize(
    ("bound", "rows", "std", "expected"),
    [
        # DataLens, released code: 109 steps of 15 images; 146; 86 (noise 800, 1,000, 5,000)
        (Signs(300), 1_635, 800.0, 8.4963),
        (Signs(350), 2_190, 1_000.0, 8.4969),
        (Signs(200), 1_290, 5_000.0, 0.7381),
        # G-PATE, released code, the fullest bin alone: 50 steps of 30 images, noise 100
        (OneHot(10), 1_500, 100.0, 8.386),
        # PATE-GAN: 6,400 counts of noise 40
        (Bit(), 6_400, 40.0, 9.997256),
    ],
)
def test_golden_costs(bound: Bound, rows: int, std: float, expected: float) -> None:
    """Of a sum over all teachers with noise of ``std``, by the library's accountant and by the
    closed form of a Gaussian (Balle and Wang 2018)."""
    multiplier = std / bound.diameter
    mechanism = RowGaussian(bound, multiplier, Routing("mean", 1), True, Unit.RECORD)
    assert mechanism.std == pytest.approx(std)
    spend = canonical(mechanism.event(rows))
    result = epsilon(spend, 1e-5, Relation.REPLACE_ONE).or_infinity
    assert result == pytest.approx(expected, rel=1e-4)
    assert gaussian_epsilon(rows**0.5 * bound.diameter / std, 1e-5) == pytest.approx(
        expected, rel=1e-4
    )


def test_a_removed_client_contributes_zero() -> None:
    whole = RowGaussian(
        Signs(9), 2.0, Routing("mean", 1), True, Unit.CLIENT, Relation.ADD_OR_REMOVE_ONE
    )
    assert whole.std == 2.0 * 3.0
    record = RowGaussian(Signs(9), 2.0, Routing("mean", 10), True, Unit.RECORD)
    assert record.std == pytest.approx(2.0 * 6.0 / 10)
