"""A private classifier on fixed wavelet features, in a space that samples give: the teacher of the
mixture.

    z    a row's features (``scattering.py``), less the samples' mean, along the samples' leading
         directions, scaled to length 1, and a constant beside it
    t    its label, one-hot, less the mean label

    ridge      once: (sum z z^T, sum z t^T); weights towards those that samples give
    descent    ``steps`` times: the gradients of all rows' softmax regression, each clipped; descent
               with momentum from the weights that samples give, the mean of the second half

Space and first weights follow from what was published before, and cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgen.models.functional import Tensors
from fedgen.models.scattering import Scattering
from fedgen.privacy.exact import product
from fedgen.privacy.per_example import (
    ClippedSum,
    clip_rows,
    clipped_sum,
    from_moments,
    of_moments,
)
from fedgen.sequence import Asked, Prepared, Sums, std_of_mean

_AT_ONCE = 2000  # images
_PROJECTED = 250  # of them, in double precision
_CONSTANT = 0.3  # beside a row's place, of length 1
_POWER = 0.4  # of the eigenvalues that directions are divided by
# of descent: scale of scores, clip norm, learning rate, momentum
_SCALE, _CLIP, _RATE, _MOMENTUM = 15.0, 0.7, 8.0, 0.9
_LONGEST = 1e3  # of weights that a client takes in
_APART = 0.5  # of a feature and a mean of features, at most: both are in [0, 0.5]
_OF_CLIENT = 0.5  # what a client's mean contribution is clipped to, over a row's


@dataclass(frozen=True)
class Space:
    """Where labels are told apart: ``size`` directions of as many ``samples`` as it is made of."""

    scattering: Scattering
    classes: int
    size: int
    samples: int

    def of(self, shared: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Images (n, ...) -> their places and a constant (n, size + 1)."""
        return projected(shared, self.scattering(images))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all that ``made`` gives."""
        weights = (self.size + 1, self.classes)
        directions = {"mean": (self.scattering.count,)}
        return {
            **directions,
            "directions": (self.scattering.count, self.size),
            **dict.fromkeys(("weights", "velocity", "average"), weights),
        }

    def made(self, images: Tensor, labels: Tensor, source: torch.Generator) -> Tensors:
        """From samples: the leading directions of their features, and the weights of their labels'
        ridge regression."""
        features, count = self.scattering(images), len(images)
        mean = features.mean(0)
        apart = features - mean
        start = torch.randn(apart.shape[1], self.size + 20, generator=source).to(apart)
        for _ in range(3):  # subspace iteration (Halko, Martinsson, Tropp 2011, algorithm 4.4)
            start = torch.linalg.qr(apart.T @ (apart @ start)).Q
        small = apart @ start
        values, vectors = torch.linalg.eigh(small.T @ small / count)
        values, vectors = values.flip(0)[: self.size], vectors.flip(1)[:, : self.size]
        scaled = vectors * (values.clamp(min=1e-9) / values[0]).pow(-_POWER)
        space = {"mean": mean.cpu(), "directions": (start @ scaled).cpu()}
        there = {name: value.to(features) for name, value in space.items()}
        places, right = projected(there, features).cpu(), _right(labels, self.classes)
        square, rest = places.T @ places / count, places.T @ right / count
        small = 1e-4 * torch.eye(len(square), dtype=torch.float64)
        weights = torch.linalg.solve(square + small, rest).float()
        still = torch.zeros_like(weights)
        return {**space, "weights": weights, "velocity": still, "average": still.clone()}


@dataclass(frozen=True)
class Teacher:
    """What is asked for it, and what is made of the answers.

    learn: (state, answer) -> what changes.
    """

    space: Space
    asked: Asked
    needs: tuple[str, ...]
    learn: Callable[[Mapping[str, Tensor], Tensor], Tensors]
    device: str

    def labels(self, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """What it takes images for (n,)."""
        there = {name: value.to(self.device) for name, value in weights.items()}
        scores = [
            self.space.of(there, some) @ there["weights"].double()
            for some in torch.split(images, _AT_ONCE)
        ]
        return torch.cat(scores).argmax(1).cpu()


def ridge(sums: Sums, space: Space, share: float, device: str) -> Teacher:
    """Asked for once."""
    classes, side, clip = space.classes, space.size + 1, ridge_norm(space.classes)
    mechanism = sums.mechanism(share, clip=clip, of_client=_OF_CLIENT)
    floor = 0.5 * std_of_mean(mechanism, sums.facts.clients) * math.sqrt(2 * side) + 1e-9
    half = side * (side + 1) // 2

    def contribution(shared: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> ClippedSum:
        place = space.of(shared, images)
        return of_moments(place, clip, beside=_right(labels, classes))

    def learn(state: Mapping[str, Tensor], found: Tensor) -> Tensors:
        """Towards the weights that samples give, where noise is all that there is."""
        values, vectors = torch.linalg.eigh(from_moments(found[:half], side))
        wanted = found[half:].view(side, classes) + floor * state["weights"].double()
        kept = (values + floor).clamp(min=floor)
        return {"weights": vectors @ ((vectors.T @ wanted) / kept[:, None])}

    asked = Asked("ridge", half + side * classes, mechanism, contribution)
    return Teacher(space, asked, ("mean", "directions"), learn, device)


def descent(sums: Sums, space: Space, share: float, steps: int, device: str) -> Teacher:
    """Asked for ``steps`` times."""
    classes, side = space.classes, space.size + 1
    mechanism = sums.mechanism(share, steps, clip=_CLIP, of_client=_OF_CLIENT)
    module = _Softmax(side, classes).double()

    def contribution(shared: Mapping[str, Tensor], places: Tensor, labels: Tensor) -> ClippedSum:
        # a server's weights cannot be so long that what rounding leaves of scores counts
        weights = {"linear.weight": clip_rows(shared["weights"][None], _LONGEST)[0].T.double()}
        inputs, at_once = (places, labels), max(len(places), 1)
        return clipped_sum(module, weights, inputs, lambda losses: losses, _CLIP, at_once)

    def learn(state: Mapping[str, Tensor], found: Tensor) -> Tensors:
        """A step; in the end the mean of the second half of them."""
        velocity = _MOMENTUM * state["velocity"].double() + found.view(classes, side).T
        weights = state["weights"].double() - _RATE * velocity
        average, half, step = state["average"].double(), steps // 2, int(state["step"]) + 1
        if step > half:
            average = average + weights / (steps - half)
        told = {"velocity": velocity, "average": average, "step": torch.tensor(float(step))}
        return {**told, "weights": average if step == steps else weights}

    prepared = Prepared(("mean", "directions"), space.of)
    asked = Asked("descent", side * classes, mechanism, contribution, steps, prepared=prepared)
    return Teacher(space, asked, ("mean", "directions", "weights"), learn, device)


def projected(space: Mapping[str, Tensor], features: Tensor) -> Tensor:
    """Features (n, f) -> their places in the space, of length 1, and a constant (n, s + 1)."""
    mean, directions = space["mean"].double(), space["directions"].double()
    longest = max(float(directions.abs().max()), 1e-30)
    # exact, since directions may cancel all but what rounding leaves, which is then made one long
    parts = [
        F.normalize(product(some.double() - mean, directions, (_APART, longest)), dim=1)
        for some in torch.split(features, _PROJECTED)  # of a photograph 16,000 features
    ]
    place = torch.cat(parts)
    return torch.cat([place, torch.full_like(place[:, :1], _CONSTANT)], 1)


def ridge_norm(classes: int) -> float:
    """Of (z z^T, z t^T)."""
    length = 1 + _CONSTANT**2
    return math.sqrt(length**2 + length * (1 - 1 / classes))


def _right(labels: Tensor, classes: int) -> Tensor:
    """t, (n, classes)."""
    return F.one_hot(labels, classes).double() - 1 / classes


class _Softmax(nn.Module):
    """Places (n, s), labels (n,) -> the cross entropy of each label (n,), over ``_SCALE``."""

    def __init__(self, size: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, classes, bias=False)

    def forward(self, places: Tensor, labels: Tensor) -> Tensor:
        """See the class."""
        scores = _SCALE * self.linear(places)
        return F.cross_entropy(scores, labels, reduction="none") / _SCALE
