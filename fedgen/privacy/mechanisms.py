"""Clip and noise: the only room where privacy noise is drawn, and the only maker of a Release."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from dp_accounting import DpEvent, NonPrivateDpEvent
from torch import Tensor

from fedgen.coins import Coins
from fedgen.privacy.events import Relation, Unit, repeat
from fedgen.privacy.routing import Routing

_SEAL = object()
# float32 rounding may leave a clipped norm a little above the bound: clip a little below it
_ROUNDING = 1 - 1e-6


@dataclass(frozen=True)
class Release:
    """Sanitized arrays and the privacy event that they cost. Made by this module alone."""

    arrays: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]
    event: DpEvent
    unit: Unit
    _seal: object = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self._seal is not _SEAL:
            raise TypeError("a Release is made by a mechanism, nothing else")


def clip_rows(rows: Tensor, bound: float) -> Tensor:
    """Scales each row (all but the first dimension) to L2 norm at most ``bound``.

    A row with a NaN or an infinity, or whose norm overflows, becomes zero.
    """
    flat = rows.flatten(1)
    norms = torch.linalg.vector_norm(flat, dim=1)
    scale = (bound * _ROUNDING / norms).clamp(max=1.0)
    usable = torch.isfinite(norms)
    scale = torch.where(usable, scale, 0.0)
    return (torch.where(usable[:, None], flat, 0.0) * scale[:, None]).view_as(rows)


@dataclass(frozen=True)
class RowGaussian:
    """Clipped rows, averaged over those who answer them, plus Gaussian noise: GS-WGAN's sanitizer
    (paper, equations 8 to 11) for any routing of rows to critics.

    Answer r is (1 / m) * sum over its m answerers of clip(row, C) + N(0, (sigma * S)^2 I), with
    S = 2 C / m: one answerer's contribution is an arbitrary function of its data within a ball of
    radius C, so exchanging, adding or removing its data moves the mean by at most S.

    routing: the draw of answerers inside the client; one critic is ``Routing("mean", 1)``.
    hidden: that draw is secret and leaves no trace in any state (see ``Routing.event``).
    """

    clip: float
    noise_multiplier: float
    routing: Routing
    hidden: bool
    unit: Unit

    def sensitivity(self, relation: Relation) -> float:
        """L2 sensitivity of one answered row; the same under both relations."""
        del relation  # a removed record may turn a gradient row into any other one: 2C under both
        return 2 * self.clip / self.routing.answers_per_row

    def event(self, rows: int) -> DpEvent:
        """What a release of ``rows`` rows costs."""
        return self.routing.event(rows, self.noise_multiplier, self.hidden)

    def release(
        self, shape: tuple[int, ...], answers: Iterable[tuple[Tensor, Tensor]], coins: Coins
    ) -> Release:
        """Sanitizes raw answers to ``shape[0]`` rows.

        Args:
            shape: the shape of the release, rows first.
            answers: pairs of row indices (n,) and raw answers (n, *shape[1:]), unclipped.
            coins: of this client and round; the noise is drawn here.

        Raises:
            ValueError: if a row is not answered as often as the sensitivity assumes.
        """
        total, counts = _clipped_sum(shape, answers, self.clip)
        if not torch.equal(counts, torch.full_like(counts, self.routing.answers_per_row)):
            raise ValueError("every row needs the number of answers that its sensitivity assumes")
        std = self.noise_multiplier * self.sensitivity(Relation.REPLACE_ONE)
        noisy = total / self.routing.answers_per_row + std * coins.noise(shape, "release")
        return Release({"gradients": noisy.numpy()}, self.event(shape[0]), self.unit, _SEAL)


@dataclass(frozen=True)
class NoMechanism:
    """Nothing is clipped, nothing is noised: the non-private reference. Its event has no bound."""

    routing: Routing
    unit: Unit

    def event(self, rows: int) -> DpEvent:
        """No bound."""
        return repeat(NonPrivateDpEvent(), rows)

    def release(
        self, shape: tuple[int, ...], answers: Iterable[tuple[Tensor, Tensor]], coins: Coins
    ) -> Release:
        """The mean of the raw answers to each row; see ``RowGaussian.release``."""
        del coins
        total, _ = _clipped_sum(shape, answers, math.inf)
        mean = total / self.routing.answers_per_row
        return Release({"gradients": mean.numpy()}, self.event(shape[0]), self.unit, _SEAL)


def _clipped_sum(
    shape: tuple[int, ...], answers: Iterable[tuple[Tensor, Tensor]], clip: float
) -> tuple[Tensor, Tensor]:
    """Sum of clipped answers per row, and how many answers each row had."""
    total, counts = torch.zeros(shape), torch.zeros(shape[0], dtype=torch.long)
    for index, rows in answers:
        rows = rows.detach().to("cpu", torch.float32)
        total.index_add_(0, index, rows if math.isinf(clip) else clip_rows(rows, clip))
        counts.index_add_(0, index, torch.ones_like(index))
    return total, counts


Mechanism = RowGaussian | NoMechanism
