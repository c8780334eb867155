"""Exact matrix products, which therefore do not depend on other records."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mutation import kills

from fedgen.privacy.exact_matmul import product


@kills(
    "fedgen/privacy/exact_matmul.py", "torch.round(clamped / grid), grid", "clamped / grid, grid"
)
@kills("fedgen/privacy/exact_matmul.py", "_BITS = 53 ", "_BITS = 58 ")
@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 900), st.integers(1, 20))
@example(0, 30, 4, 20)
def test_the_order_of_summation_has_no_effect(seed: int, n: int, a: int, b: int) -> None:
    """Of entries up to the limit and of one sign, whose partial sums need all bits."""
    source = torch.Generator().manual_seed(seed)
    rows = 16 * torch.rand((n, a), generator=source)
    matrix = 8 * torch.rand((a, b), generator=source)
    result = product(rows, matrix, (10.0, 5.0))
    assert result.dtype == torch.float64
    order = torch.randperm(a, generator=source)
    assert torch.equal(result, product(rows[:, order], matrix[order], (10.0, 5.0)))
    some = torch.randperm(n, generator=source)[: n // 2 + 1]
    assert torch.equal(result[some], product(rows[some], matrix, (10.0, 5.0)))


def test_the_product_of_rounded_factors_is_exact() -> None:
    """Against fractions, at the largest admissible values."""
    source = torch.Generator().manual_seed(1)
    rows, matrix = (torch.randn(shape, generator=source) for shape in ((3, 784), (784, 2)))
    rows[0], matrix[:, 0] = 1.0, -1.0
    result = product(rows, matrix, (1.0, 1.0))
    for i in range(3):
        for j in range(2):
            exact = Fraction(0)
            for left, right in zip(rows[i].tolist(), matrix[:, j].tolist(), strict=True):
                cut = (min(max(left, -1.0), 1.0), min(max(right, -1.0), 1.0))
                exact += Fraction(round(cut[0] * 2**22)) * Fraction(round(cut[1] * 2**21))
            assert Fraction(result[i, j].item()) == exact / 2**43
    assert result[0, 0] == -784


def test_the_product_is_accurate_for_any_input() -> None:
    source = torch.Generator().manual_seed(2)
    rows, matrix = torch.rand((50, 576), generator=source), torch.randn((576, 9), generator=source)
    there = rows.double() @ matrix.double()
    assert (product(rows, matrix, (1.0, 8.0)) - there).abs().max() < 576 * 1e-5
    strange = torch.tensor([[math.nan, math.inf, -math.inf, 1e30]])
    assert product(strange, torch.ones(4, 1), (2.0, 1.0)).item() == pytest.approx(2.0)
    assert product(torch.zeros(0, 4), torch.ones(4, 3), (1.0, 1.0)).shape == (0, 3)
