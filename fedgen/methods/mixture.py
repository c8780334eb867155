"""Private mixture of Gaussians, with an optional private classifier that labels its samples.

Everything is learned from sums over records of clipped contributions, queried once or a few times,
each with its own noise; each query depends on the previous responses:

    histogram        histogram of intensities, and mean square of pixels, which sets all clip norms
    means            count and mean of each label, in the m x m lowest DCT coefficients of a channel
    second_moments   second moment within labels; its d leading eigenvectors are the principal
                     components
    clusters         k-means within each label, ``steps`` times: count and sum of each cluster; with
                     one cluster, once: its mean again, with less noise in fewer components
    covariances      covariance of each label around the centres of its clusters
    pixels           histogram of coarse intensity levels at each pixel, of all labels together;
                     optional
    classifier       a private classifier on wavelet features (``scattering_classifier.py``),
                     optional

A sample is a centre plus Gaussian noise with the covariance of its label, mapped to the intensity
of the same rank in the published histogram of all pixels, or of its own, and optionally augmented
(a fixed prior, without data). Estimates are shrunk by the known noise, never by private counts.
With a classifier, an image is returned under the label that the classifier predicts.

The contribution to a release has norm at most 1, so that adding or removing a record moves it by at
most 1: for count and sum of a label or cluster jointly, for moments by their Frobenius norm. With
shares s_i of the budget and the joint noise multiplier sigma, release i has sigma / sqrt(s_i), and
with k repeats sqrt(k) times that: squared ratios of sensitivity to noise add up to 1 / sigma^2
(``fedgen.methods.families.noisy_sums.SumMechanisms``).

If the unit is a person, a person contributes the mean over their images. Means of second moments
and of clusters are clipped further, to the norm expected of as many images as a person has on
average. A person with a clipped mean counts less than one: sums of second moments contain these
counts, by which they are divided.

For any query, a record's contribution has norm at most 1 and does not depend on other records: DCT
coefficients, principal components, distances to clusters, wavelet features and their projections
are exact (``privacy/exact_matmul.py``, ``models/scattering.py``). The scores of ``descent`` are in
double precision; the margin of clipped sums covers their rounding, as weights are bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.methods.api import Method, PublicFacts, Query, ServerProgram, State, WorstCase
from fedgen.methods.families.noisy_sums import (
    SumMechanisms,
    SumQuery,
    SumSequence,
    mean_std,
)
from fedgen.methods.families.scattering_classifier import (
    FeatureSpace,
    PrivateClassifier,
    descent,
    ridge,
)
from fedgen.models.augmentation import Augmentation
from fedgen.models.dct import QUANTILES, DctMixture, ExactDct, dct_basis
from fedgen.models.functional import Tensors, concat_parts, part
from fedgen.models.pixel_maps import LEVELS
from fedgen.models.pixel_maps import QUANTILES as PIXEL_QUANTILES
from fedgen.models.scattering import Scattering
from fedgen.privacy.clipping import (
    ClippedSum,
    clip_rows,
    sum_of_rows,
    sum_of_second_moments,
    symmetric_from_triangle,
)
from fedgen.privacy.events import Unit
from fedgen.privacy.exact_matmul import product
from fedgen.privacy.mechanisms import ClientGaussian, SumGaussian
from fedgen.randomness import RandomStreams

Learn = Callable[[Mapping[str, Tensor], Tensor], Tensors]
"""(state, response) -> changed entries."""

_SUMS = ("histogram", "means", "second_moments", "clusters", "covariances")
INTENSITIES = 64  # bins of the histogram
_COUNT = 0.5  # contribution of a record to a count, next to a vector of norm 1
_JOINT = math.hypot(1, _COUNT)
_AT_ONCE = 2000  # images
_PIXEL_SAMPLES, _PIXEL_VALUES = 16_000, 2**24
"""Maximum number of samples, and of their pixels, that are compared with noisy histograms."""
_PIXEL_ENTRIES = 2**24  # entries of contributions in memory at a time
_SIMILARITY = {"second_moments": 0.3, "clusters": 0.5, "covariances": 0.3}
"""Assumed inner product of two contributions of one person (``SumMechanisms.person_clip``). The
others are not clipped further, because later sums are scaled by them."""
_PERSON_COUNT = 0.3  # contribution of an image to the count of a sum of second moments
_PIXEL_TABLES = ("pixel_drawn", "pixel_meant")
_NONE = 1e-9  # a negligible share of records


# --- contributions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contributions:
    """Contributions of records to each sum: functions of the shared arrays of a query, images (n,
    c, h, w) in [0, 1] and labels (n,).

    dct: lowest DCT coefficients of each channel.
    count: entry in front of deviations, so that their second moments count records as well; 0: no
        such entry.
    """

    shape: tuple[int, int, int]
    classes: int
    dct: ExactDct
    clusters: int
    count: float

    def histogram(self, shared: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> ClippedSum:
        """Fractions of pixels at each intensity, per channel, and the mean square; both have norm
        at most 1."""
        del shared, labels
        channels = self.shape[0]
        level = (images * (INTENSITIES - 1e-3)).long().flatten(2)
        level += torch.arange(channels, device=images.device)[:, None] * INTENSITIES
        shares = images.new_zeros(len(images), channels * INTENSITIES)
        ones = torch.ones_like(level, dtype=images.dtype).flatten(1)
        shares.scatter_add_(1, level.flatten(1), ones)
        square = images.double().square().flatten(1).mean(1, keepdim=True)
        joint = torch.cat([shares / images[0].numel(), square], 1) if len(images) else shares
        return sum_of_rows(_pad(joint, channels * INTENSITIES + 1) / math.sqrt(2), 1.0)

    def means(self, shared: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> ClippedSum:
        """DCT coefficients and a count, in the block of the label."""
        return _count_and_sum(self.dct(images), float(shared["bound"]), labels, self.classes)

    def second_moments(
        self, shared: Mapping[str, Tensor], images: Tensor, labels: Tensor
    ) -> ClippedSum:
        """Outer product of the deviation from the mean of the label."""
        deviation, bound = self.dct(images) - shared["means"][labels], float(shared["bound"])
        return sum_of_second_moments(self._with_count(deviation, bound), 1.0)

    def cluster_sums(
        self, shared: Mapping[str, Tensor], images: Tensor, labels: Tensor
    ) -> ClippedSum:
        """Principal components and a count, in the block of the nearest cluster of the label."""
        components = self.principal_components(shared, images, labels)
        # an index beyond `clusters` would address a nonexistent block
        centres = shared["centres"][:, : self.clusters]
        blocks = labels * self.clusters + self.nearest_cluster(components, centres, labels)
        return _count_and_sum(
            components, float(shared["bound"]), blocks, self.classes * self.clusters
        )

    def cluster_covariances(
        self, shared: Mapping[str, Tensor], images: Tensor, labels: Tensor
    ) -> ClippedSum:
        """Outer product of the deviation from the centre of the nearest cluster, in the block of
        the label."""
        components, bound = (
            self.principal_components(shared, images, labels),
            float(shared["bound"]),
        )
        nearest = self.nearest_cluster(components, shared["centres"], labels)
        deviation = components - shared["centres"][labels, nearest]
        rows = self._with_count(deviation, bound)
        return sum_of_second_moments(rows, 1.0, labels, self.classes)

    def pixels(self, shared: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> ClippedSum:
        """One-hot coarse level of each pixel, jointly of norm 1. Labels are pooled: from a
        histogram of each label, classifiers could learn the label by its noise."""
        del shared, labels
        size = math.prod(self.shape)
        level = (images * (LEVELS - 1e-3)).long().flatten(1)
        level += LEVELS * torch.arange(size, device=images.device)
        rows = images.new_zeros(len(images), size * LEVELS)
        return sum_of_rows(rows.scatter_(1, level, size**-0.5), 1.0)

    def _with_count(self, deviation: Tensor, bound: float) -> Tensor:
        """Return deviations (n, d), clipped to norm ``bound`` and divided by it, after ``count`` if
        it is not 0, jointly of norm at most 1."""
        rows = clip_rows(deviation, bound) / bound
        if not self.count:
            return rows
        counts = torch.full_like(rows[:, :1], self.count)
        return torch.cat([counts, rows], 1) / math.hypot(1, self.count)

    def moments(self, response: Tensor, side: int, bound: Tensor) -> tuple[Tensor, Tensor | None]:
        """Decode sums of second moments of deviations: matrices (..., side, side), and counts (...)
        if they contain them."""
        if not self.count:
            return symmetric_from_triangle(response, side) * bound.square(), None
        matrices = symmetric_from_triangle(response, side + 1) * (1 + self.count**2)
        counts = matrices[..., 0, 0] / self.count**2
        return matrices[..., 1:, 1:] * bound.square(), counts

    def triangle_size(self, side: int) -> int:
        """Return the number of entries of a sum of second moments."""
        side += bool(self.count)
        return side * (side + 1) // 2

    def principal_components(
        self, shared: Mapping[str, Tensor], images: Tensor, labels: Tensor
    ) -> Tensor:
        """Return the principal components around the mean of the label (n, d)."""
        deviation = self.dct(images) - shared["means"][labels]
        return product(deviation, shared["basis"], (self.max_norms, 1.0))

    def nearest_cluster(self, points: Tensor, centres: Tensor, labels: Tensor) -> Tensor:
        """Return the nearest centre of the label (labels, k, d) for each point (n, d)."""
        nearest = torch.zeros(len(points), dtype=torch.long, device=points.device)
        for label in set(labels.tolist()):
            selected, label_centres = labels == label, centres[label].double()
            products = product(points[selected], label_centres.T, (self.max_norms, self.max_norms))
            nearest[selected] = (label_centres.square().sum(1) - 2 * products).argmin(1)
        return nearest

    @property
    def max_norms(self) -> float:
        """Maximum norm of a deviation: twice the norm of a white image."""
        return 2 * math.sqrt(math.prod(self.shape))


def _count_and_sum(rows: Tensor, bound: float, blocks: Tensor, count: int) -> ClippedSum:
    """Sum rows (n, d) by block, each clipped to norm ``bound`` and divided by it, with a count in
    front, jointly of norm at most 1."""
    count_entry = torch.full_like(rows[:, :1], _COUNT)
    return sum_of_rows(
        torch.cat([count_entry, clip_rows(rows, bound) / bound], 1) / _JOINT, 1.0, blocks, count
    )


def _pad(rows: Tensor, width: int) -> Tensor:
    """Return rows unchanged; without rows, an empty tensor of this width."""
    return rows if len(rows) else rows.new_zeros(0, width)


# --- sizes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Sizes of the queries, derived from the noise before any query.

    dct_size: m, per side.
    components: d.
    clusters: k, per label.
    """

    dct_size: int
    components: int
    clusters: int


# --- the server -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """Estimates so far, and samples from them.

    stds: public standard deviation of the noise in each entry of the mean response, by sum.
    """

    shape: tuple[int, int, int]
    classes: int
    sizes: Sizes
    stds: Mapping[str, float]
    sequence: SumSequence
    contributions: Contributions
    images: DctMixture
    classifier: PrivateClassifier | None

    def init(self, streams: RandomStreams) -> Tensors:
        """Return empty estimates and the seeds of public randomness."""
        channels, labels = self.shape[0], self.classes
        coefficients, count = channels * self.sizes.dct_size**2, self.sizes.components
        clusters, tables = self.sizes.clusters, (channels, QUANTILES)
        shapes: dict[str, tuple[int, ...]] = {
            "histogram": (channels, INTENSITIES),
            "power": (),
            "bound": (),
            "step": (),
            "counts": (labels,),
            "means": (labels, coefficients),
            "basis": (coefficients, count),
            "variances": (count,),
            "centres": (labels, clusters, count),
            "shares": (labels, clusters),
            "roots": (labels, count, count),
            "drawn": tables,
            "meant": tables,
        }
        if self.has_pixels:
            shapes |= dict.fromkeys(_PIXEL_TABLES, (*self.shape, PIXEL_QUANTILES))
        if self.classifier is not None:
            shapes |= self.classifier.space.shapes()
        seeds = {
            name: torch.randint(0, 2**62, (), generator=streams.public(name))
            for name in ("centres.seed", "samples.seed")
        }
        return {name: torch.zeros(shape) for name, shape in shapes.items()} | seeds

    def query(
        self, state: Mapping[str, Tensor], round_: int, streams: RandomStreams
    ) -> Query | None:
        """Query the next sum with the estimates that it depends on."""
        del streams
        if round_ >= self.sequence.rounds:
            return None
        requires, _ = self._sums[self.sequence.query_at(round_).name]
        return self.sequence.make_query(round_, {name: state[name] for name in requires})

    def update(
        self, state: Mapping[str, Tensor], responses: Tensor, round_: int, streams: RandomStreams
    ) -> Tensors:
        """Update the estimates by a response."""
        del streams
        _, learn = self._sums[self.sequence.query_at(round_).name]
        changed = learn(state, responses.flatten().double())
        return {**state, **{name: value.float() for name, value in changed.items()}}

    @property
    def _sums(self) -> dict[str, tuple[tuple[str, ...], Learn]]:
        """For each sum: the entries that its query shares, and its update."""
        for_clusters = ("bound", "means", "basis", "centres")
        classifier = self.classifier
        return {
            "histogram": ((), self._update_histogram),
            "means": (("bound",), self._update_means),
            "second_moments": (("bound", "means"), self._update_components),
            "clusters": (for_clusters, self._update_clusters),
            "covariances": (for_clusters, self._update_covariances),
            "pixels": ((), self._update_pixels),
            **(
                {classifier.query.name: (classifier.requires, classifier.learn)}
                if classifier
                else {}
            ),
        }

    def _update_histogram(self, state: Mapping[str, Tensor], response: Tensor) -> Tensors:
        del state
        response = response * math.sqrt(2)
        shares = response[:-1].view(self.shape[0], INTENSITIES).clamp(min=0)
        shares = shares / shares.sum(1, keepdim=True).clamp(min=1e-12)
        power = response[-1].clamp(1e-3, 1.0) * math.prod(self.shape)
        return {"histogram": shares, "power": power, "bound": 1.1 * power.sqrt()}

    def _update_means(self, state: Mapping[str, Tensor], response: Tensor) -> Tensors:
        bound, noise = state["bound"].double(), self.stds["means"] * _JOINT
        counts, sums = _counts_and_sums(response.view(self.classes, -1), bound)
        positive_counts = counts.clamp(min=max(2 * noise / _COUNT, _NONE))
        overall_mean = sums.sum(0) / counts.sum().clamp(min=max(noise, _NONE))
        deviations = sums / positive_counts[:, None] - overall_mean
        noise_variance = ((noise * bound / positive_counts).square()).mean()
        variance = deviations.square().mean(0)
        deviations = deviations * (1 - noise_variance / variance.clamp(min=1e-12)).clamp(min=0)
        means = overall_mean + deviations
        shares = positive_counts / positive_counts.sum()
        between = (shares[:, None] * means.square()).sum()
        within = (state["power"].double() / counts.sum().clamp(min=0.1) - between).clamp(
            min=0.05 * state["power"].double()
        )
        return {"means": means, "counts": positive_counts, "bound": 1.25 * within.sqrt()}

    def _update_components(self, state: Mapping[str, Tensor], response: Tensor) -> Tensors:
        side, bound = state["means"].shape[1], state["bound"].double()
        moments, counts = self.contributions.moments(response, side, bound)
        records = state["counts"].double().sum() if counts is None else counts.clamp(min=0.1)
        values, vectors = torch.linalg.eigh(moments / records)
        count = self.sizes.components
        values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count]
        # largest eigenvalue of the noise (Wigner)
        noise_edge = self.stds["second_moments"] * bound.square() / records * math.sqrt(2 * side)
        floor = 0.1 * torch.maximum(values, 0.1 * noise_edge).clamp(min=_NONE)
        variances = torch.maximum(values - 0.7 * noise_edge, floor)
        source = torch.Generator().manual_seed(int(state["centres.seed"]))
        normals = torch.randn(
            self.classes, self.sizes.clusters, count, generator=source, dtype=torch.float64
        )
        return {
            "basis": vectors,
            "variances": variances,
            "centres": 0.7 * normals * variances.sqrt(),
            "shares": torch.full((self.classes, self.sizes.clusters), 1 / self.sizes.clusters),
            "bound": 1.3 * variances.sum().sqrt(),
            "step": torch.zeros(()),
        }

    def _update_clusters(self, state: Mapping[str, Tensor], response: Tensor) -> Tensors:
        bound, variances = state["bound"].double(), state["variances"].double()
        sizes, noise = (self.classes, self.sizes.clusters), self.stds["clusters"] * _JOINT
        counts, sums = _counts_and_sums(response.view(sizes[0] * sizes[1], -1), bound)
        counts, sums = counts.view(sizes), sums.view(*sizes, -1)
        positive_counts = counts.clamp(min=max(noise / _COUNT, _NONE))
        noise_variance = (noise * bound / positive_counts).square()[..., None]
        centres = sums / positive_counts[..., None] * (variances / (variances + 2 * noise_variance))
        significant = counts > 3 * noise / _COUNT
        significant |= counts == counts.max(1, keepdim=True).values
        shares = counts.clamp(min=1e-9) * significant
        shares = shares / shares.sum(1, keepdim=True)
        step = int(state["step"]) + 1
        changed = {"centres": centres, "shares": shares, "step": torch.tensor(float(step))}
        if step < self.sequence.repeats("clusters"):
            # restart insignificant clusters near significant ones
            source = torch.Generator().manual_seed(int(state["centres.seed"]) + step)
            for label, cluster in (~significant).nonzero().tolist():
                template = int(torch.multinomial(shares[label].float(), 1, generator=source))
                offset = torch.randn(len(variances), generator=source).double() * variances.sqrt()
                centres[label, cluster] = centres[label, template] + 0.3 * offset
            return changed
        weights = state["counts"].double() / state["counts"].double().sum()
        between = (weights[:, None] * shares * centres.square().sum(2)).sum()
        within = (variances.sum() - between).clamp(min=0.2 * variances.sum())
        centres[~significant] = 1e3 * bound  # never the nearest
        return {**changed, "bound": 1.3 * within.sqrt()}

    def _update_covariances(self, state: Mapping[str, Tensor], response: Tensor) -> Tensors:
        side, bound = len(state["variances"]), state["bound"].double()
        counts = state["counts"].double()
        sums, moment_counts = self.contributions.moments(
            response.view(self.classes, -1), side, bound
        )
        if moment_counts is not None:  # of all labels together: counts per label are too noisy
            counts = counts * (moment_counts.sum() / counts.sum()).clamp(0.1, 10)
        noise = self.stds["covariances"] * bound.square() / math.sqrt(2)  # off the diagonal
        pooled = sums.sum(0) / counts.sum()
        variances = pooled.diagonal().clamp(
            min=1e-3 * float(pooled.diagonal().max().clamp(min=1e-6))
        )
        # expected squared entries of a covariance: correlations near 0.3
        expected = 0.09 * torch.outer(variances, variances)
        shrinkage = expected / (expected + self.classes * (noise / counts.sum()).square())
        pooled = shrinkage * pooled
        pooled.diagonal().copy_(variances)
        roots = []
        for label in range(self.classes):
            estimate = sums[label] / counts[label]
            ratio = (estimate.trace() / variances.sum()).clamp(0.3, 3)
            diagonal_factor = 1 + torch.eye(side, dtype=torch.float64)
            weight = expected / (expected + (noise / counts[label]).square() * diagonal_factor)
            prior = pooled * ratio
            values, vectors = torch.linalg.eigh(prior + weight * (estimate - prior))
            roots.append(vectors * values.clamp(min=0).sqrt() @ vectors.T)
        changed = {"roots": torch.stack(roots).float(), "step": torch.zeros(())}
        labels = torch.arange(_AT_ONCE) % self.classes
        source = torch.Generator().manual_seed(int(state["samples.seed"]))
        changed |= self.images.tables({**state, **changed}, labels, source)
        return changed if self.has_pixels else changed | self._fit_classifier({**state, **changed})

    def _update_pixels(self, state: Mapping[str, Tensor], response: Tensor) -> Tensors:
        pixels = math.prod(self.shape)
        shares = response.view(*self.shape, LEVELS) * pixels**0.5
        records = (shares.sum() / pixels).clamp(min=0.1)  # relative to their public number
        labels = torch.multinomial(
            state["counts"],
            max(500, min(_PIXEL_SAMPLES, _PIXEL_VALUES // pixels)),
            replacement=True,
            generator=torch.Generator().manual_seed(int(state["samples.seed"]) + 2),
        )
        source = torch.Generator().manual_seed(int(state["samples.seed"]) + 3)
        noise = self.stds["pixels"] * pixels**0.5 / float(records)
        changed = self.images.pixel_tables(state, labels, source, shares / records, noise)
        return changed | self._fit_classifier({**state, **changed})

    def _fit_classifier(self, state: Mapping[str, Tensor]) -> Tensors:
        """Return the feature space of the classifier, fitted to samples; empty without one."""
        if self.classifier is None:
            return {}
        source = torch.Generator().manual_seed(int(state["samples.seed"]) + 1)
        labels = torch.arange(self.classifier.space.samples) % self.classes
        samples = self.images.sample(state, labels, source, warped=False)
        return self.classifier.space.fit(samples, labels, source)

    @property
    def has_pixels(self) -> bool:
        """Whether the sum ``pixels`` is queried."""
        return any(query.name == "pixels" for query in self.sequence.queries)

    # --- samples ----------------------------------------------------------------------------------

    def generator(self, state: Mapping[str, Tensor]) -> Tensors:
        """Return everything that samples depend on."""
        names = ["means", "basis", "centres", "shares", "roots", "drawn", "meant"]
        names += _PIXEL_TABLES if self.has_pixels else ()
        classifier_names = ("mean", "directions", "weights") if self.classifier else ()
        weights = {name: state[name] for name in names}
        return weights | concat_parts(teacher={name: state[name] for name in classifier_names})

    def sample(
        self, weights: Mapping[str, Tensor], labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Return one image per label."""
        if not weights["drawn"].any():  # estimates are incomplete
            return torch.full((len(labels), *self.shape), 0.5)
        weights = {name: value.cpu() for name, value in weights.items()}
        source = streams.public("samples")
        if self.classifier is None:
            parts = torch.split(labels, _AT_ONCE)
            return torch.cat([self.images.sample(weights, chunk, source) for chunk in parts])
        return self._relabel(self.classifier, weights, labels, source)

    def _relabel(
        self,
        classifier: PrivateClassifier,
        weights: Mapping[str, Tensor],
        labels: Tensor,
        source: torch.Generator,
    ) -> Tensor:
        """Return images by the labels that the classifier predicts. If images of a label are
        missing after four times as many samples, images sampled for that label are used."""
        images = torch.zeros(len(labels), *self.shape)
        positions = [(labels == label).nonzero().flatten() for label in range(self.classes)]
        classifier_weights, filled, sampled = part(weights, "teacher"), [0] * self.classes, 0
        while sampled < 4 * len(labels):
            missing = [
                len(label_positions) - count
                for label_positions, count in zip(positions, filled, strict=True)
            ]
            if not any(missing):
                break
            fraction = min(1.0, _AT_ONCE / sum(missing))
            sample_labels = torch.cat(
                [
                    torch.full((math.ceil(count_ * fraction),), label_)
                    for label_, count_ in enumerate(missing)
                ]
            )
            samples = self.images.sample(weights, sample_labels, source)
            predicted, sampled = (
                classifier.predict(classifier_weights, samples),
                sampled + len(sample_labels),
            )
            for label in range(self.classes):
                accepted = samples[predicted == label][: len(positions[label]) - filled[label]]
                images[positions[label][filled[label] : filled[label] + len(accepted)]] = accepted
                filled[label] += len(accepted)
        for label, (label_positions, count) in enumerate(zip(positions, filled, strict=True)):
            unfilled = label_positions[count:]
            if len(unfilled):
                images[unfilled] = self.images.sample(
                    weights, torch.full((len(unfilled),), label), source
                )
        return images

    def classify(self, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Return the labels that the classifier predicts (n,)."""
        assert self.classifier is not None
        return self.classifier.predict(part(weights, "teacher"), images)

    def membership_scores(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Score images by their distance to the nearest centre of their label."""
        del streams
        components = self.contributions.principal_components(state, images, labels)
        nearest = self.contributions.nearest_cluster(components, state["centres"], labels)
        centres = state["centres"][labels, nearest]
        return -(components - centres).square().sum(1)


def _counts_and_sums(response: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Decode sums of ``_count_and_sum``: (blocks, 1 + d) -> counts (blocks,), sums."""
    response = response * _JOINT
    return response[:, 0] / _COUNT, response[:, 1:] * bound


# --- the method -----------------------------------------------------------------------------------

AUGMENTATIONS: Mapping[str, Augmentation | None] = {
    "none": None,
    "digits": Augmentation(1.0, rotation=12, scale=0.12, shear=0.15, shift=0.054, elastic=0.043),
    "things": Augmentation(0.5, rotation=3, scale=0.06, shear=0.05, shift=0.025, elastic=0.0143),
}
"""Handwriting varies more in slant and shape than photographs of upright objects."""


def mixture(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    rows: int,
    shares: Mapping[str, float],
    pixel_share: float | None = None,
    steps: int,
    dct_size: int | None,
    components: int | None,
    clusters: int | None,
    private_classifier: Literal["none", "ridge", "descent"],
    classifier_share: float,
    classifier_steps: int,
    classifier_features: int,
    classifier_samples: int,
    augmentation: Literal["none", "digits", "things"],
    device: str,
) -> Method:
    """Build the mixture from public parameters.

    Args:
        noise_multiplier: noise multiplier of all releases together, as one Gaussian; None: no
            noise.
        rows: public number near the number of records of all clients; each divides by its equal
            share.
        shares: shares of the mixture's budget for histogram, means, second_moments, clusters and
            covariances.
        pixel_share: share of the mixture's budget for the sum ``pixels``, and the others have the
            rest; None: it is not queried.
        steps: steps of k-means; one if a label has a single cluster.
        dct_size, components, clusters: m, d and k; None: derived from the noise (``_sizes``).
        private_classifier: classifier that labels samples: none, ridge regression, or softmax
            regression by gradient descent; always none for a single label.
        classifier_share: share of the whole budget for the classifier, if there is one.
        classifier_steps: steps of gradient descent.
        classifier_features: dimension of the classifier's feature space.
        classifier_samples: samples that the feature space is fitted to.
        augmentation: augmentation of samples, a fixed prior without data.

    Raises:
        FedgenError: for shares that do not sum to one, sizes that exceed those of the images, or
            invalid parameters of the classifier.
    """
    if set(shares) != set(_SUMS) or abs(sum(shares.values()) - 1) > 1e-6:
        problem = f"{', '.join(shares)} sum to {sum(shares.values()):g}"
        raise FedgenError("method.shares", problem, f"give {', '.join(_SUMS)}, with sum 1")
    if classifier_samples < 2 * facts.classes:
        problem = f"{classifier_samples} are too few for {facts.classes} labels"
        raise FedgenError("method.classifier_samples", problem, f"use {2 * facts.classes} or more")
    if pixel_share is not None:
        if not 0 < pixel_share < 1:
            problem = f"must be between 0 and 1, got {pixel_share:g}"
            raise FedgenError("method.pixel_share", problem, "e.g. 0.01")
        shares = {name: share * (1 - pixel_share) for name, share in shares.items()}
        shares |= {"pixels": pixel_share}
    if not 0 < classifier_share < 1:
        problem = f"must be between 0 and 1, got {classifier_share:g}"
        raise FedgenError("method.classifier_share", problem, "e.g. 0.5")
    if facts.classes == 1:  # nothing to classify
        private_classifier = "none"
    mixture_share = 1.0 if private_classifier == "none" else 1 - classifier_share
    sums = SumMechanisms(facts, noise_multiplier, rows)
    # the records of a client lie in many blocks and directions, so their mean has a smaller norm
    blocks = min(1.0, 1.5 / math.sqrt(facts.classes))
    client_clips = {"histogram": 1.0, "means": blocks, "second_moments": 0.5, "clusters": blocks}
    client_clips |= {"covariances": 0.5 * blocks, "pixels": 1.0}
    repeats = dict.fromkeys(shares, 1) | {"clusters": steps}

    def mechanism(name: str) -> SumGaussian | ClientGaussian:
        return sums.mechanism(
            mixture_share * shares[name],
            repeats[name],
            client_clip=client_clips[name],
            person_clip=sums.person_clip(_SIMILARITY.get(name, 1.0)),
        )

    mechanisms = {name: mechanism(name) for name in shares}
    features = Scattering(facts.shape, device)
    size = min(classifier_features, features.count, classifier_samples)
    space = FeatureSpace(features, facts.classes, size, classifier_samples)
    classifiers: dict[str, Callable[[], PrivateClassifier]] = {
        "ridge": lambda: ridge(sums, space, classifier_share, device),
        "descent": lambda: descent(sums, space, classifier_share, classifier_steps, device),
    }
    classifier = classifiers[private_classifier]() if private_classifier in classifiers else None
    stds = {name: mean_std(mechanism_, facts.clients) for name, mechanism_ in mechanisms.items()}
    derived = _sizes(facts, stds)
    sizes = Sizes(
        dct_size or derived.dct_size,
        components or derived.components,
        clusters or derived.clusters,
    )
    _check(sizes, facts)
    if sizes.clusters == 1:  # further steps would repeat the mean of the label
        repeats["clusters"] = 1
        mechanisms["clusters"] = mechanism("clusters")
        stds["clusters"] = mean_std(mechanisms["clusters"], facts.clients)
    coefficients, count = facts.shape[0] * sizes.dct_size**2, sizes.components
    contributions = Contributions(
        facts.shape,
        facts.classes,
        ExactDct.of((facts.shape[1], facts.shape[2]), sizes.dct_size),
        sizes.clusters,
        _PERSON_COUNT if facts.unit is Unit.PERSON else 0.0,
    )
    queries = [
        SumQuery(
            "histogram",
            facts.shape[0] * INTENSITIES + 1,
            mechanisms["histogram"],
            contributions.histogram,
        ),
        SumQuery(
            "means", facts.classes * (1 + coefficients), mechanisms["means"], contributions.means
        ),
        SumQuery(
            "second_moments",
            contributions.triangle_size(coefficients),
            mechanisms["second_moments"],
            contributions.second_moments,
        ),
        SumQuery(
            "clusters",
            facts.classes * sizes.clusters * (1 + count),
            mechanisms["clusters"],
            contributions.cluster_sums,
            repeats["clusters"],
        ),
        SumQuery(
            "covariances",
            facts.classes * contributions.triangle_size(count),
            mechanisms["covariances"],
            contributions.cluster_covariances,
        ),
    ]
    if "pixels" in shares:
        entries = math.prod(facts.shape) * LEVELS
        at_once = max(1, min(2048, _PIXEL_ENTRIES // entries))
        queries.append(
            SumQuery("pixels", entries, mechanisms["pixels"], contributions.pixels, at_once=at_once)
        )
    sequence = SumSequence((*queries, *([classifier.query] if classifier else [])), device)
    server = Server(
        facts.shape,
        facts.classes,
        sizes,
        stds,
        sequence,
        contributions,
        DctMixture(
            facts.shape,
            dct_basis((facts.shape[1], facts.shape[2]), sizes.dct_size),
            AUGMENTATIONS[augmentation],
        ),
        classifier,
    )
    return sequence.build(
        ServerProgram(
            init=server.init,
            query=server.query,
            update=server.update,
            generator=server.generator,
            sample=server.sample,
            membership_scores=server.membership_scores,
            classify=server.classify if classifier else None,
        ),
        sequence.plan("none", None, None, sequence.rounds),
        facts.clients,
        lambda: _worst_cases(sequence, sizes, facts, space),
        asdict(sizes),
    )


def _check(sizes: Sizes, facts: PublicFacts) -> None:
    """Raise FedgenError for sizes that exceed those of the images."""
    if sizes.dct_size > min(facts.shape[1:]):
        problem = f"{sizes.dct_size} exceeds the {min(facts.shape[1:])} pixels of a side"
        raise FedgenError("method.dct_size", problem, "lower it, or set it to null")
    coefficients = facts.shape[0] * sizes.dct_size**2
    if sizes.components > coefficients:
        problem = f"{sizes.components} exceeds the {coefficients} DCT coefficients"
        raise FedgenError("method.components", problem, "lower it, or set it to null")


def _sizes(facts: PublicFacts, stds: Mapping[str, float]) -> Sizes:
    """Derive sizes from the noise, relative to all records: DCT coefficients so that the largest
    eigenvalue of the noise of their moments is below 0.75 % of the bound; components by the cube
    root of the noise, 160 for the 60,000 records of MNIST at ε = 10; clusters so that the average
    count is twelve times its noise.
    """
    channels, *sides = facts.shape
    smallest = 1e-12
    budget = (0.0075 / max(stds["second_moments"], smallest)) ** 2 / 2
    side = min(*sides, 24, max(8, int(math.sqrt(budget / channels))))
    coefficients = channels * side**2
    count = min(
        coefficients,
        160,
        max(8, round(160 * (2.95e-5 / max(stds["covariances"], smallest)) ** (1 / 3))),
    )
    noise = max(stds["clusters"], smallest) * _JOINT / _COUNT
    return Sizes(side, count, min(64, max(1, int(1 / (12 * facts.classes * noise)))))


def _worst_cases(
    sequence: SumSequence, sizes: Sizes, facts: PublicFacts, space: FeatureSpace
) -> list[WorstCase]:
    """Return a white image and no image, with queries for which its contribution has the full
    norm."""
    one = Shard(
        torch.full((1, *facts.shape), 255, dtype=torch.uint8), torch.zeros(1, dtype=torch.long)
    )
    first: tuple[State, Shard] = {}, one
    second: tuple[State, Shard] = {}, Shard(one.images[:0], one.labels[:0])
    coefficients = facts.shape[0] * sizes.dct_size**2
    shared = {
        "bound": torch.ones(()),
        "means": torch.zeros(facts.classes, coefficients),
        "basis": torch.eye(coefficients)[:, : sizes.components],
        "centres": torch.zeros(facts.classes, sizes.clusters, sizes.components),
        "mean": torch.zeros(space.scattering.count),
        "directions": torch.ones(space.scattering.count, space.size),
        "weights": torch.zeros(space.size + 1, facts.classes),
    }
    return [sequence.worst_case(query.name, shared, first, second) for query in sequence.queries]
