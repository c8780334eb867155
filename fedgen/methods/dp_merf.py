"""DP-MERF: one noisy mean embedding of the private records, and a generator whose samples match it
(Harder, Adamczewski, Park, "DP-MERF: Differentially Private Mean Embeddings with Random Features
for Practical Privacy-Preserving Data Generation", AISTATS 2021).

    server    random frequencies w ~ N(0, 1 / bandwidth^2), public
    client    phi(x) = [cos(w x), sin(w x)] / sqrt(features / 2), so that |phi(x)| = 1
              once:  (sum over records of phi(x) in the block of its label + N(0, sigma^2)) / rows
    server    the mean embedding mu of the clients, then in each round: descend
              |mu - (1 / B) sum over B samples of phi(G(z, y)) in the block of y|^2

Only the first round queries clients; all others are server rounds and cost nothing. ``rows`` is a
public number of which every client divides by an equal share: dividing by its own number of
records, or by those of its labels, would reveal them. In the paper, neighbours replace a record,
which moves the sum by at most 2; here, as for all sums, they add or remove one, which moves it by
1.

At client level (``privacy.unit=client``), a client contributes the mean embedding of its records,
whose norm is at most 1 for any records: all clients have equal weight, and ``rows`` is not used.
Adding or removing a client moves the sum by at most 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, Protocol

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.func import functional_call

from fedgen.config.constraints import Betas, Decay
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.methods.api import Method, PublicFacts, Query, ServerProgram, WorstCase
from fedgen.methods.families.noisy_sums import SumMechanisms, SumQuery, SumSequence
from fedgen.models.factories import GeneratorFactory
from fedgen.models.functional import (
    Tensors,
    descend_generator,
    generator_start,
    init_weights,
    meta_module,
    part,
    trainable,
    weight_gradients,
)
from fedgen.privacy.clipping import ClippedSum, sum_of_rows
from fedgen.privacy.exact_matmul import RightFactor
from fedgen.randomness import RandomStreams

Bandwidth = Annotated[float, Ge(1e-6), Le(1e6)]
_MAX_FREQUENCY = 8.0  # at bandwidth 1: single precision normal deviates do not exceed it


class FeatureMap(Protocol):
    """Features of images whose mean is the embedding; the norm of an image's features is at most 1.

    sample_parameters: seed -> public random parameters. Called with these and images (n, ...), the
        map returns features (n, ``count``).
    sum_by_label: the same for consecutive groups of images of equal size, summed per group (groups,
        count).
    max_entry: maximum value of a feature.
    weights: weights of the features in the distance that the generator descends, (count,) or 1.
    """

    @property
    def count(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def max_entry(self) -> float: ...

    @property
    def weights(self) -> Tensor | float: ...

    def sample_parameters(self, seed: Tensor) -> Any: ...

    def __call__(self, parameters: Any, images: Tensor, /) -> Tensor: ...

    def sum_by_label(self, parameters: Any, images: Tensor, groups: int, /) -> Tensor: ...


@dataclass(frozen=True)
class Frequencies:
    """Frequencies of Fourier features (pixels, count / 2), in single precision, sampled for a
    bandwidth."""

    single: Tensor
    bandwidth: float

    @cached_property
    def exact(self) -> RightFactor:
        """The frequencies, rounded for exact products."""
        return RightFactor.of(self.single, _MAX_FREQUENCY / self.bandwidth)


@lru_cache(maxsize=1)
def _frequencies(seed: int, pixels: int, number: int, bandwidth: float, device: str) -> Frequencies:
    """Sample frequencies. They are cached for all clients and rounds of a process."""
    normals = torch.randn(pixels, number, generator=torch.Generator().manual_seed(seed))
    return Frequencies((normals / bandwidth).to(device), bandwidth)


@dataclass(frozen=True)
class FourierFeatures:
    """Random Fourier features of images with ``pixels`` values (Rahimi, Recht 2008): their products
    approximate exp(-|x - x'|^2 / (2 bandwidth^2))."""

    count: int
    bandwidth: float
    pixels: int
    device: str
    weights = 1.0

    @property
    def max_entry(self) -> float:
        """Maximum of a scaled cosine or sine."""
        return math.sqrt(2 / self.count)

    def sample_parameters(self, seed: Tensor) -> Frequencies:
        """Return frequencies w."""
        return _frequencies(int(seed), self.pixels, self.count // 2, self.bandwidth, self.device)

    def __call__(self, frequencies: Frequencies, images: Tensor) -> Tensor:
        """Return phi of images (n, ...) with values from -1 to 1: (n, count), in double precision.
        Angles are exact: at a small bandwidth their last bits matter, and bits that depend on other
        records would move the features of all."""
        return self._of(frequencies.exact.multiplied_from_left(images.flatten(1), 1.0))

    def sum_by_label(self, frequencies: Frequencies, images: Tensor, groups: int) -> Tensor:
        """Return phi of non-private images, summed for each consecutive group: (groups, count)."""
        features = self._of(images.flatten(1) @ frequencies.single)
        return features.view(groups, -1, self.count).sum(1)

    def _of(self, angles: Tensor) -> Tensor:
        return torch.cat([angles.cos(), angles.sin()], 1) / math.sqrt(self.count / 2)


def check_features(features: int) -> None:
    """Raise FedgenError for an odd number of ``FourierFeatures``."""
    if features % 2:
        problem = f"must be even (cosines and sines), got {features}"
        raise FedgenError("method.features", problem, "use an even number")


def embedding(
    sums: SumMechanisms,
    features: FeatureMap,
    classes: int,
    inputs: Callable[[Mapping[str, Tensor], Tensor], Tensor],
    at_once: int = 2048,
) -> SumQuery:
    """Return the query of the features of all records, summed by label.

    inputs: (shared arrays of the query, images (n, ...)) -> input of the features.
    """

    def contribution(shared: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> ClippedSum:
        values = features(features.sample_parameters(shared["seed"]), inputs(shared, images))
        return sum_of_rows(values, 1.0, labels, classes)

    mechanism = sums.mechanism(max_entry=features.max_entry)
    size = classes * features.count
    return SumQuery("embedding", size, mechanism, contribution, at_once=at_once)


@dataclass(frozen=True)
class Server:
    """Generator and embedding; post-processing except for one query."""

    generator: nn.Module
    features: FeatureMap
    latent: int
    classes: int
    fakes_per_label: int
    adam: tuple[float, tuple[float, float]]
    ema: float

    @property
    def program(self) -> ServerProgram:
        """The server program."""
        return ServerProgram(
            init=self.init,
            query=self.query,
            update=self.update,
            generator=lambda state: part(state, "average"),
            sample=self.sample,
            membership_scores=self.membership_scores,
            metrics=self.metrics,
            server_step=self.server_step,
        )

    def init(self, streams: RandomStreams) -> Tensors:
        """Return initial weights, the seed of the feature parameters, and no embedding."""
        generator = init_weights(self.generator, streams.public("generator"))
        weights = {name: value.to(self.features.device) for name, value in generator.items()}
        seed = torch.randint(0, 2**62, (), generator=streams.public("frequencies"))
        return generator_start(weights) | {
            "seed": seed,
            "embedding": torch.zeros(self.classes, self.features.count),
            "known": torch.zeros(()),
            "distance": torch.zeros(()),
        }

    def query(
        self, state: Mapping[str, Tensor], round_: int, streams: RandomStreams
    ) -> Query | None:
        """Query the embedding until it is known."""
        del round_, streams
        if state["known"]:
            return None
        return Query({"embedding": torch.zeros(1)}, {"seed": state["seed"]})

    def update(
        self, state: Mapping[str, Tensor], responses: Tensor, round_: int, streams: RandomStreams
    ) -> Tensors:
        """Store the embedding, then run ``server_step``."""
        updates = {"embedding": responses.view(self.classes, -1), "known": torch.ones(())}
        return self.server_step({**state, **updates}, round_, streams)

    def server_step(
        self, state: Mapping[str, Tensor], round_: int, streams: RandomStreams
    ) -> Tensors:
        """Take one step of the generator."""
        embedding = state["embedding"].to(self.features.device)
        frequencies = self.features.sample_parameters(state["seed"])
        step_streams = streams.at("generator", round_)
        labels = torch.arange(self.classes).repeat_interleave(self.fakes_per_label)
        latents = torch.randn(len(labels), self.latent, generator=step_streams.public("latents"))
        inputs = latents.to(self.features.device), labels.to(self.features.device)

        leaves = trainable(part(state, "generator"))
        samples = self._generate(leaves, *inputs)
        mean = self.features.sum_by_label(frequencies, samples, self.classes) / len(labels)
        distance = ((embedding - mean) * self.features.weights).square().sum()
        generator_state = descend_generator(
            state, weight_gradients(distance, leaves), self.adam, self.ema
        )
        return {**state, **generator_state, "distance": distance.detach().cpu()}

    def metrics(
        self, state: Mapping[str, Tensor], held_out: Shard | None, streams: RandomStreams
    ) -> dict[str, float]:
        """Return the squared distance of the embeddings."""
        del held_out, streams
        return {"distance": float(state["distance"])}

    def sample(
        self, weights: Mapping[str, Tensor], labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Return one image per label."""
        latents = torch.randn(len(labels), self.latent, generator=streams.public("latents"))
        inputs = latents.to(self.features.device), labels.to(self.features.device)
        with torch.no_grad():
            return self._generate(weights, *inputs).cpu()

    def membership_scores(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Score images by the product of their features with the embedding."""
        del streams
        features = self.features(
            self.features.sample_parameters(state["seed"]), images.to(self.features.device)
        )
        return (features.cpu() * state["embedding"][labels]).sum(1)

    def _generate(self, weights: Mapping[str, Tensor], latents: Tensor, labels: Tensor) -> Tensor:
        images: Tensor = functional_call(self.generator, dict(weights), (latents, labels))
        return images


def dp_merf(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    generator: GeneratorFactory,
    latent: int,
    features: int,
    bandwidth: Bandwidth,
    rows: int,
    fakes_per_label: int,
    learning_rate: float,
    betas: Betas,
    ema: Decay,
    device: str,
) -> Method:
    """Build DP-MERF from public parameters.

    Args:
        noise_multiplier: noise standard deviation over the norm 1 of a record's features; None: no
            noise.
        features: number of entries of phi, even.
        bandwidth: bandwidth of the Gaussian kernel for pixels in [0, 1]; a public number, never
            derived from private records.
        rows: public number near the number of records of all clients; each divides by its equal
            share.
        fakes_per_label: samples of each label in a step; B is this times the number of labels.
        learning_rate, betas: parameters of Adam.
        ema: decay of the moving average of the published generator; 0: the last one.

    Raises:
        FedgenError: for an odd number of features.
    """
    check_features(features)
    net = meta_module(generator(latent=latent, classes=facts.classes, shape=facts.shape))
    embed = FourierFeatures(features, bandwidth, math.prod(facts.shape), device)
    sums = SumMechanisms(facts, noise_multiplier, rows)
    sequence = SumSequence((embedding(sums, embed, facts.classes, lambda _, x: x),), device)
    server = Server(net, embed, latent, facts.classes, fakes_per_label, (learning_rate, betas), ema)
    return sequence.build(
        server.program,
        sequence.plan("none", None, ("RDP of one Gaussian", "DP-MERF (2021)")),
        facts.clients,
        lambda: [_worst_case(sequence, facts.shape)],
    )


def _worst_case(sequence: SumSequence, shape: tuple[int, int, int]) -> WorstCase:
    """Return a black image and no image: its norm lies in its cosines, each 1 before scaling."""
    one = Shard(torch.zeros(1, *shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    none = Shard(one.images[:0], one.labels[:0])
    return sequence.worst_case("embedding", {"seed": torch.tensor(0)}, ({}, one), ({}, none))
