"""Images from a mixture of Gaussians over their lowest cosines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgen.models.functional import Tensors
from fedgen.models.warps import Warps

PLACES = 1024
"""Of a table of grey levels."""


def lowest_cosines(side: tuple[int, int], count: int) -> Tensor:
    """The ``count`` lowest cosines along each side, orthonormal (h * w, count^2)."""
    lines = []
    for length in side:
        place = (torch.arange(length, dtype=torch.float64) + 0.5) * math.pi / length
        wave = torch.cos(place[:, None] * torch.arange(count, dtype=torch.float64))
        lines.append(F.normalize(wave, dim=0))
    return torch.einsum("hi,wj->hwij", *lines).reshape(-1, count**2).float()


@dataclass(frozen=True)
class CosineMixture:
    """Images (n, c, h, w) by labels (n,), from these weights:

    shares, centres: of each label's clusters (labels, k) and (labels, k, d).
    roots: of each label's covariance around them (labels, d, d).
    basis, means: from coordinates to cosines (c * m^2, d), and each label's mean (labels, c * m^2).
    drawn, meant: the grey levels of pixels as they are drawn and as they ought to be, at the same
        ranks (c, PLACES), see ``tables``.

    shape: of images (c, h, w). cosines: (h * w, m^2). warps: of samples; None: as they are.
    """

    shape: tuple[int, int, int]
    cosines: Tensor
    warps: Warps | None

    def draw(
        self,
        weights: Mapping[str, Tensor],
        labels: Tensor,
        source: torch.Generator,
        warped: bool = True,
    ) -> Tensor:
        """Images in [0, 1], at their grey levels."""
        raw = self._raw(weights, labels, source)
        tables = zip(weights["drawn"], weights["meant"], strict=True)
        channels = [_interpolated(raw[:, channel], *both) for channel, both in enumerate(tables)]
        found = torch.stack(channels, 1)
        return self.warps(found, source) if warped and self.warps else found

    def tables(
        self, weights: Mapping[str, Tensor], labels: Tensor, source: torch.Generator
    ) -> Tensors:
        """From the values of pixels as they are drawn to the grey levels of the same rank, by a
        histogram ``levels`` (c, levels) beside the weights. labels: of what is drawn for it."""
        raw = self._raw(weights, labels, source).transpose(0, 1).flatten(1)
        ranks = (torch.arange(PLACES) + 0.5) / PLACES
        inside = raw.sort(1).values
        drawn = inside[:, (ranks * inside.shape[1]).long()]
        meant = []
        for shares in weights["levels"]:
            reached = shares.cumsum(0) / shares.sum()
            at = torch.searchsorted(reached, ranks).clamp(max=len(shares) - 1)
            before = torch.cat([reached.new_zeros(1), reached])[at]
            within = ((ranks - before) / (reached[at] - before).clamp(min=1e-9)).clamp(0, 1)
            meant.append(torch.where(at == 0, 0.0, (at + within) / len(shares)))
        return {"drawn": drawn, "meant": torch.stack(meant)}

    def _raw(
        self, weights: Mapping[str, Tensor], labels: Tensor, source: torch.Generator
    ) -> Tensor:
        """Pixels (n, c, h, w) as the mixture has them, in any range."""
        which = torch.multinomial(weights["shares"][labels], 1, generator=source).flatten()
        noise = torch.randn(len(labels), weights["basis"].shape[1], generator=source)
        place = weights["centres"][labels, which]
        for label, root in enumerate(weights["roots"]):  # one an image would be a hundred times all
            mine = labels == label
            place[mine] += noise[mine] @ root.T
        waves = weights["means"][labels] + place @ weights["basis"].T
        channels, *_ = self.shape
        pixels = waves.view(len(labels), channels, -1) @ self.cosines.T
        return pixels.view(len(labels), *self.shape)


def _interpolated(values: Tensor, given: Tensor, meant: Tensor) -> Tensor:
    """The piecewise linear function with these values (``given`` ascends)."""
    at = torch.searchsorted(given, values.contiguous()).clamp(1, len(given) - 1)
    low, high = given[at - 1], given[at]
    share = ((values - low) / (high - low).clamp(min=1e-9)).clamp(0, 1)
    return meant[at - 1] + share * (meant[at] - meant[at - 1])
