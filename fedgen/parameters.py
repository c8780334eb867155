"""Which numbers a parameter may be, said where it is declared, by its type.

A number of a method is positive and finite unless its type says otherwise::

    def tilted(*, rate: float, penalty: NonNegative, ema: Decay, betas: Betas) -> Method: ...

``fedgen/experiments/building.py`` holds settings against these before anything is made of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Range:
    """Finite numbers from ``least`` on, without 0 where ``open``, and below ``below``."""

    least: float = 0.0
    open: bool = True
    below: float = math.inf


POSITIVE = Range()
_FROM_ZERO = Range(open=False)

NonNegative = Annotated[float, _FROM_ZERO]
NonNegativeInt = Annotated[int, _FROM_ZERO]
Decay = Annotated[float, Range(open=False, below=1.0)]
Betas = tuple[Decay, Decay]
Steps = Annotated[int, Range(below=10_001)]
"""Iterations per sample; bounded because untrusted files may set them."""
Depth = Annotated[int, Range(below=65)]
"""Number of layers; bounded because untrusted files may set it."""
ClipNorm = Annotated[float, Range(1e-9)]
"""Of gradients in single precision: below, squares vanish."""
