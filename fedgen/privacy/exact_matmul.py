"""Exact matrix products: the result for a record is the same to the last bit, whatever the other
records are.

The summation order of a library's matrix product depends on the number of rows, so adding a record
may flip a decision for another record that lies between two cases (the nearest of several centres).
Sensitivity assumes that records do not influence each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = 53  # of a double: integers up to 2^53, and their sums, are exact


def product(rows: Tensor, matrix: Tensor, max_entries: tuple[float, float]) -> Tensor:
    """Return ``rows @ matrix`` (n, a) x (a, b) in double precision, with both rounded to grids so
    coarse that each sum of products is exact in any order.

    Both are multiples of powers of two, at most 2^l and 2^r of them, with l + r + log2(a) <= 53:
    all partial sums are integer multiples of the product of the grids, up to 2^53.

    Args:
        max_entries: public bounds on the entries of both; larger entries are clamped, NaN becomes
            0.
    """
    return RightFactor.of(matrix, max_entries[1]).multiplied_from_left(rows, max_entries[0])


@dataclass(frozen=True)
class RightFactor:
    """The right factor of several products, rounded once.

    integers: the matrix in units of ``grid``.
    left_bits: bits of the left factor (l in ``product``).
    """

    integers: Tensor
    grid: float
    left_bits: int

    @classmethod
    def of(cls, matrix: Tensor, max_entry: float) -> RightFactor:
        """Round a matrix with entries of at most ``max_entry``."""
        bits = _BITS - math.ceil(math.log2(max(matrix.shape[0], 2)))
        return cls(*_to_grid(matrix, max_entry, bits // 2), bits - bits // 2)

    def multiplied_from_left(self, rows: Tensor, max_entry: float) -> Tensor:
        """Return ``rows @ matrix``, as ``product`` does."""
        left, left_grid = _to_grid(rows, max_entry, self.left_bits)
        return (left @ self.integers) * (left_grid * self.grid)


def _to_grid(values: Tensor, max_entry: float, bits: int) -> tuple[Tensor, float]:
    """Round values to integer multiples of a power of two, at most 2^bits; return them and that
    power."""
    limit = 2.0 ** math.ceil(math.log2(max_entry))
    grid = limit / 2.0**bits
    clamped = values.double().nan_to_num(0.0, limit, -limit).clamp(-limit, limit)
    return torch.round(clamped / grid), grid
