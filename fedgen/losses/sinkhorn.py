"""Entropic optimal transport between labelled images, and the semi-debiased Sinkhorn loss of
"DP-Sinkhorn" (Cao, Bie, Vahdat, Fidler, Kreis 2021, definition 4.3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Labelled = tuple[Tensor, Tensor]
"""Images (n, ...) with pixels in [0, 1], and their labels (n,)."""


@dataclass(frozen=True)
class Transport:
    """W(X, Y): the cost of transporting the images X, with their labels, to Y.

    The cost of a pair is l2 |x - y|_2^2 + l1 |x - y|_1, where x are pixels in [-1, 1] and a one-hot
    label times ``label_weight`` (section 4.4 and appendix D.3).

    blur: square root of the weight of the entropy. The paper uses the defaults of geomloss: its
        entropy regularization is interpreted as this parameter.
    """

    l1: float
    l2: float
    label_weight: float
    blur: float
    classes: int

    def cost(self, x: Tensor, y: Tensor) -> Tensor:
        """Return costs (..., n, m) of all pairs of points (..., n, d) and (..., m, d)."""
        costs = x.new_zeros(())
        if self.l2:
            squares = x.square().sum(-1)[..., :, None] + y.square().sum(-1)[..., None, :]
            costs = costs + self.l2 * (squares - 2 * x @ y.transpose(-1, -2)).clamp(min=0)
        if self.l1:
            costs = costs + self.l1 * torch.cdist(x, y, p=1)
        return costs

    def points(self, rows: Labelled) -> Tensor:
        """Return images and labels as points (n, d)."""
        images, labels = rows
        one_hot = labels[:, None] == torch.arange(self.classes, device=labels.device)
        return torch.cat([2 * images.flatten(1) - 1, self.label_weight * one_hot.to(images)], 1)

    def __call__(self, first: Labelled, second: Labelled) -> Tensor:
        """Return W of two nonempty sets of images."""
        from geomloss import SamplesLoss  # takes seconds to import

        x, y = self.points(first), self.points(second)
        # of all possible points: the number of steps must not depend on private records
        diameter = math.sqrt(4 * (x.shape[1] - self.classes) + 2 * self.label_weight**2)
        loss: Callable[[Tensor, Tensor], Tensor] = SamplesLoss(
            "sinkhorn",
            p=2,
            blur=self.blur,
            diameter=diameter,
            debias=False,
            cost=self.cost,
            backend="tensorized",
        )
        return loss(x, y)


def semi_debiased(
    transport: Transport, generated: Labelled, rows: Labelled | None, count: int
) -> Tensor:
    """Return 2 W(X[:n], Y) - W(X[:n], X[n':]), equation 6.

    Args:
        generated: X, n + n' generated images: the biased loss for n' = 0, the unbiased one for
            n' = n, up to a constant.
        rows: Y; None: no images, and no term.
        count: n.
    """
    images, labels = generated
    more = len(labels) - count
    cross = images[:count], labels[:count]
    loss = -transport(cross, (images[more:], labels[more:]))
    return loss if rows is None else loss + 2 * transport(cross, rows)
