"""Declare the range of a parameter in its type.

A number of a method is positive and finite unless its type says otherwise::

    def tilted(*, rate: float, penalty: NonNegative, ema: Decay, betas: Betas) -> Method: ...

``fedgen/config/parameters.py`` checks settings against these types before anything is built.
"""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from fedgen.errors import FedgenError

NonNegative = Annotated[float, Ge(0)]
NonNegativeInt = Annotated[int, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
PositiveFraction = Annotated[float, Gt(0), Le(1)]
SamplingRate = PositiveFraction
"""Probability of each record in a round."""
Decay = Annotated[float, Ge(0), Lt(1)]
Betas = tuple[Decay, Decay]
Steps = Annotated[int, Gt(0), Le(10_000)]
"""Iterations per sample; bounded because untrusted files may set them."""
Depth = Annotated[int, Gt(0), Le(64)]
"""Number of layers; bounded because untrusted files may set it."""
ClipNorm = Annotated[float, Ge(1e-9)]
"""Of gradients in single precision: below, squares vanish."""


def missing_count(key: Literal["public_rows", "public_persons"], reason: str) -> FedgenError:
    """Return the error for a missing public number of records or persons."""
    remedy = "set it to a round number near the true one, which becomes public; fedgen data check "
    remedy += "proposes one"
    return FedgenError(f"data.{key}", f"is not set, but {reason}", remedy)
