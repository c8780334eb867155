"""Private classifier of the mixture: wavelet features, projected to a space fitted to samples.

    z    features of a record (``scattering.py``), minus the mean of the samples, projected to the
         leading directions of the samples and scaled to norm 1, plus a constant entry
    t    its label, one-hot, minus 1 / classes

    ridge      one query: (sum z z^T, sum z t^T); the weights shrink towards those fitted to samples
    descent    ``steps`` queries: clipped gradients of softmax regression over all records; gradient
        descent with momentum from the weights fitted to samples, averaged over the second half

Space and initial weights depend only on published values and cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgen.methods.families.noisy_sums import Preparation, SumMechanisms, SumQuery, mean_std
from fedgen.models.functional import Tensors
from fedgen.models.scattering import Scattering
from fedgen.privacy.clipping import (
    ClippedSum,
    clip_rows,
    sum_of_outer_products,
    sum_of_second_moments,
    symmetric_from_triangle,
)
from fedgen.privacy.exact_matmul import RightFactor

_AT_ONCE = 2000  # images
_PROJECTED = 250  # images projected at a time, in double precision
_CONSTANT = 0.3  # constant entry next to z of norm 1
_POWER = 0.4  # directions are divided by this power of their eigenvalues
# descent: scale of scores, clip norm, learning rate, momentum
_SCALE, _CLIP, _RATE, _MOMENTUM = 15.0, 0.7, 8.0, 0.9
_MAX_NORM = 1e3  # norm of weights that a client accepts
_MAX_DIFFERENCE = 0.5  # maximum difference of a feature and a mean feature: both are in [0, 0.5]
_PER_CLIENT = 0.5  # clip norm of a client's mean contribution, over that of a record


@dataclass(frozen=True)
class FeatureSpace:
    """A space of ``size`` directions, fitted to ``samples`` samples."""

    scattering: Scattering
    classes: int
    size: int
    samples: int

    def project(self, shared: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Project images (n, ...) to z (n, size + 1)."""
        return projection(shared, self.scattering(images))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the results of ``fit``."""
        weights = (self.size + 1, self.classes)
        directions = {"mean": (self.scattering.count,)}
        return {
            **directions,
            "directions": (self.scattering.count, self.size),
            **dict.fromkeys(("weights", "velocity", "average"), weights),
        }

    def fit(self, images: Tensor, labels: Tensor, source: torch.Generator) -> Tensors:
        """Fit to samples: the leading directions of their features, and the weights of ridge
        regression on their labels."""
        features, count = self.scattering(images), len(images)
        mean = features.mean(0)
        centred = features - mean
        basis = torch.randn(centred.shape[1], self.size + 20, generator=source).to(centred)
        for _ in range(3):  # subspace iteration (Halko, Martinsson, Tropp 2011, algorithm 4.4)
            basis = torch.linalg.qr(centred.T @ (centred @ basis)).Q
        projected = centred @ basis
        values, vectors = torch.linalg.eigh(projected.T @ projected / count)
        values, vectors = values.flip(0)[: self.size], vectors.flip(1)[:, : self.size]
        scaled = vectors * (values.clamp(min=1e-9) / values[0]).pow(-_POWER)
        space = {"mean": mean.cpu(), "directions": (basis @ scaled).cpu()}
        on_device = {name: value.to(features) for name, value in space.items()}
        points, targets = projection(on_device, features).cpu(), one_hot(labels, self.classes)
        gram, cross = points.T @ points / count, points.T @ targets / count
        projected = 1e-4 * torch.eye(len(gram), dtype=torch.float64)
        weights = torch.linalg.solve(gram + projected, cross).float()
        zeros = torch.zeros_like(weights)
        return {**space, "weights": weights, "velocity": zeros, "average": zeros.clone()}


@dataclass(frozen=True)
class PrivateClassifier:
    """A private classifier: its query and its training.

    requires: state entries that the query shares with clients.
    learn: (state, response) -> changed entries.
    """

    space: FeatureSpace
    query: SumQuery
    requires: tuple[str, ...]
    learn: Callable[[Mapping[str, Tensor], Tensor], Tensors]
    device: str

    def predict(self, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Return predicted labels (n,)."""
        on_device = {name: value.to(self.device) for name, value in weights.items()}
        scores = [
            self.space.project(on_device, chunk) @ on_device["weights"].double()
            for chunk in torch.split(images, _AT_ONCE)
        ]
        return torch.cat(scores).argmax(1).cpu()


def ridge(sums: SumMechanisms, space: FeatureSpace, share: float, device: str) -> PrivateClassifier:
    """Return the classifier with one query."""
    classes, side, clip = space.classes, space.size + 1, ridge_norm(space.classes)
    mechanism = sums.mechanism(share, clip=clip, client_clip=_PER_CLIENT)
    floor = 0.5 * mean_std(mechanism, sums.facts.clients) * math.sqrt(2 * side) + 1e-9
    half = side * (side + 1) // 2

    def contribution(shared: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> ClippedSum:
        points = space.project(shared, images)
        return sum_of_second_moments(points, clip, targets=one_hot(labels, classes))

    def learn(state: Mapping[str, Tensor], response: Tensor) -> Tensors:
        """Solve for the weights; where noise dominates, they shrink to those fitted to samples."""
        values, vectors = torch.linalg.eigh(symmetric_from_triangle(response[:half], side))
        right_hand_side = response[half:].view(side, classes) + floor * state["weights"].double()
        regularized = (values + floor).clamp(min=floor)
        return {"weights": vectors @ ((vectors.T @ right_hand_side) / regularized[:, None])}

    query = SumQuery("ridge", half + side * classes, mechanism, contribution)
    return PrivateClassifier(space, query, ("mean", "directions"), learn, device)


def descent(
    sums: SumMechanisms, space: FeatureSpace, share: float, steps: int, device: str
) -> PrivateClassifier:
    """Return the classifier with ``steps`` queries."""
    classes, side = space.classes, space.size + 1
    mechanism = sums.mechanism(share, steps, clip=_CLIP, client_clip=_PER_CLIENT)

    def contribution(shared: Mapping[str, Tensor], points: Tensor, labels: Tensor) -> ClippedSum:
        # bounded weights: rounding errors of scores must not matter for any server
        weights = clip_rows(shared["weights"][None], _MAX_NORM)[0].double()
        errors = (_SCALE * (points @ weights)).softmax(1) - F.one_hot(labels, classes)
        return sum_of_outer_products(errors, points, _CLIP)

    def learn(state: Mapping[str, Tensor], response: Tensor) -> Tensors:
        """Take one step; the last step returns the mean over the second half."""
        velocity = _MOMENTUM * state["velocity"].double() + response.view(classes, side).T
        weights = state["weights"].double() - _RATE * velocity
        average, half, step = state["average"].double(), steps // 2, int(state["step"]) + 1
        if step > half:
            average = average + weights / (steps - half)
        changed = {"velocity": velocity, "average": average, "step": torch.tensor(float(step))}
        return {**changed, "weights": average if step == steps else weights}

    preparation = Preparation(("mean", "directions"), space.project)
    query = SumQuery(
        "descent", side * classes, mechanism, contribution, steps, preparation=preparation
    )
    return PrivateClassifier(space, query, ("mean", "directions", "weights"), learn, device)


def projection(space: Mapping[str, Tensor], features: Tensor) -> Tensor:
    """Project features (n, f) to z (n, s + 1), of norm 1 plus a constant entry."""
    mean, directions = space["mean"].double(), space["directions"].double()
    factor = RightFactor.of(directions, max(float(directions.abs().max()), 1e-30))
    # exact products: directions may cancel everything except rounding errors, which normalization
    # would amplify
    parts = [
        F.normalize(factor.multiplied_from_left(chunk.double() - mean, _MAX_DIFFERENCE), dim=1)
        for chunk in torch.split(features, _PROJECTED)  # 16,000 features for a photograph
    ]
    points = torch.cat(parts)
    return torch.cat([points, torch.full_like(points[:, :1], _CONSTANT)], 1)


def ridge_norm(classes: int) -> float:
    """Return the maximum norm of (z z^T, z t^T)."""
    length = 1 + _CONSTANT**2
    return math.sqrt(length**2 + length * (1 - 1 / classes))


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Return t (n, classes)."""
    return F.one_hot(labels, classes).double() - 1 / classes
