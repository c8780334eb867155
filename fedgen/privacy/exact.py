"""Products that are exact: what a row comes to is the same to the last bit, whatever is beside it.

A library's product of matrices adds up in an order that depends on how many rows there are, and a
row that lies between two cases (the nearest of some centres) may fall to the other side when a row
is added. A sensitivity assumes that rows do not influence each other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BITS = 53  # of a double: whole numbers up to 2^53, and their sums, are exact


def product(rows: Tensor, matrix: Tensor, largest: tuple[float, float]) -> Tensor:
    """``rows @ matrix`` (n, a) x (a, b) in double precision, of the two rounded to grids so coarse
    that each sum of products is exact, in whatever order it is taken.

    Both are multiples of powers of two, at most 2^l and 2^r of them, and l + r + log2(a) <= 53: all
    partial sums are whole numbers of the grids' product, up to 2^53.

    Args:
        largest: sizes that entries of either have at most: public numbers; what is larger is cut
            down to them, and what is no number counts as 0.
    """
    bits = _BITS - math.ceil(math.log2(max(matrix.shape[0], 2)))
    left, left_grid = _whole(rows, largest[0], bits - bits // 2)
    right, right_grid = _whole(matrix, largest[1], bits // 2)
    return (left @ right) * (left_grid * right_grid)


def _whole(values: Tensor, largest: float, bits: int) -> tuple[Tensor, float]:
    """Values as whole multiples of a power of two, at most 2^bits of them; that power."""
    most = 2.0 ** math.ceil(math.log2(largest))
    grid = most / 2.0**bits
    cut = values.double().nan_to_num(0.0, most, -most).clamp(-most, most)
    return torch.round(cut / grid), grid
