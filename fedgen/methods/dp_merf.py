"""DP-MERF: one noised mean embedding of the private rows, and a generator whose samples are to have
the same (Harder, Adamczewski, Park, "DP-MERF: Differentially Private Mean Embeddings with Random
Features for Practical Privacy-Preserving Data Generation", AISTATS 2021).

    server    random frequencies w ~ N(0, 1 / bandwidth^2), public
    client    phi(x) = [cos(w x), sin(w x)] / sqrt(features / 2), so that |phi(x)| = 1
              once:  (sum over rows of phi(x) in the block of its label + N(0, sigma^2)) / rows
    server    the mean of the clients' embeddings mu, then in each round: descend
              |mu - (1 / B) sum over B samples of phi(G(z, y)) in the block of y|^2

The first round asks; all others are the server's alone and cost nothing. ``rows`` is a public
number, of which every client divides by an equal share: to divide by its own number, or by those of
its labels, would tell them. The paper's neighbours replace a row, which moves the sum by at most 2;
here they add or remove one, as for all sums of fedgen, which moves it by 1.

At client level (``privacy.unit=client``) a client's contribution is the mean of its rows'
embeddings, whose norm is at most 1 whatever rows it has: it weighs as much as any other's, and
``rows`` is not used. A client more or less moves the sum by 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.method import Method, PublicFacts, Query, ServerProgram, WorstCase
from fedgen.models.functional import (
    Tensors,
    generator_start,
    generator_step,
    gradients_of,
    initial,
    part,
    template,
    trainable,
)
from fedgen.parameters import Betas, Decay
from fedgen.privacy.exact import product
from fedgen.privacy.per_example import ClippedSum, of_rows
from fedgen.sequence import Asked, Sums, SumSequence

_LONGEST = 8.0  # of a frequency of bandwidth 1: of single precision no normal deviate is longer


class Embedded(Protocol):
    """Features of images that a mean embedding is the mean of: each image's are 1 long at most.

    drawn: (seed) -> what is drawn for them in public. Called with that and images (n, ...): (n,
    ``count``). summed: the same of images in groups of one size behind each other, summed for each
    group: (groups, count). peak: the largest that one of them can be. weights: of the features in
    the distance that the generator descends, (count,) or 1.
    """

    @property
    def count(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def peak(self) -> float: ...

    @property
    def weights(self) -> Tensor | float: ...

    def drawn(self, seed: Tensor) -> Tensor: ...

    def __call__(self, drawn: Tensor, images: Tensor, /) -> Tensor: ...

    def summed(self, drawn: Tensor, images: Tensor, groups: int, /) -> Tensor: ...


@dataclass(frozen=True)
class Features:
    """Random Fourier features of images of ``pixels`` numbers (Rahimi, Recht 2008): their products
    are near exp(-|x - x'|^2 / (2 bandwidth^2))."""

    count: int
    bandwidth: float
    pixels: int
    device: str
    weights = 1.0

    @property
    def peak(self) -> float:
        """Of a cosine or a sine."""
        return math.sqrt(2 / self.count)

    def drawn(self, seed: Tensor) -> Tensor:
        """w, (pixels, count / 2)."""
        source = torch.Generator().manual_seed(int(seed))
        drawn = torch.randn(self.pixels, self.count // 2, generator=source)
        return (drawn / self.bandwidth).to(self.device)

    def __call__(self, frequencies: Tensor, images: Tensor) -> Tensor:
        """phi of images (n, ...), numbers from -1 to 1: (n, count), in double precision. Angles are
        exact: at a small bandwidth their last bits turn a row's features around, and bits that
        followed from the rows beside it would move all of them."""
        longest = _LONGEST / self.bandwidth
        return self._of(product(images.flatten(1), frequencies, (1.0, longest)))

    def summed(self, frequencies: Tensor, images: Tensor, groups: int) -> Tensor:
        """phi of images that are no private rows, summed for each of the groups that lie behind
        each other: (groups, count)."""
        found = self._of(images.flatten(1) @ frequencies)
        return found.view(groups, -1, self.count).sum(1)

    def _of(self, angles: Tensor) -> Tensor:
        return torch.cat([angles.cos(), angles.sin()], 1) / math.sqrt(self.count / 2)


def check_features(features: int, bandwidth: float) -> None:
    """Raises FedgenError for ``Features`` that cannot be."""
    if features % 2:
        problem = f"are half cosines and half sines, got {features}"
        raise FedgenError("method.features", problem, "take an even number")
    if not 1e-6 <= bandwidth <= 1e6:
        problem = f"must lie between 1e-6 and 1e6, got {bandwidth:g}"
        raise FedgenError("method.bandwidth", problem, "e.g. 5")


def embedding(
    sums: Sums,
    features: Embedded,
    classes: int,
    of: Callable[[Mapping[str, Tensor], Tensor], Tensor],
    at_once: int = 2048,
) -> Asked:
    """The features of all rows, summed in the blocks of their labels.

    ``of``: (what the question holds, images (n, ...)) -> what there are features of.
    """

    def contribution(shared: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> ClippedSum:
        found = features(features.drawn(shared["seed"]), of(shared, images))
        return of_rows(found, 1.0, labels, classes)

    mechanism = sums.mechanism(peak=features.peak)
    size = classes * features.count
    return Asked("embedding", size, mechanism, contribution, at_once=at_once)


@dataclass(frozen=True)
class Server:
    """Generator and embedding: post-processing, but for one question."""

    generator: nn.Module
    features: Embedded
    latent: int
    classes: int
    fakes_per_label: int
    adam: tuple[float, tuple[float, float]]
    ema: float

    @property
    def program(self) -> ServerProgram:
        """All of it."""
        return ServerProgram(
            init=self.init,
            query=self.query,
            update=self.update,
            generator=lambda state: part(state, "average"),
            sample=self.sample,
            recognize=self.recognize,
            shown=self.shown,
            alone=self.alone,
        )

    def init(self, coins: Coins) -> Tensors:
        """Fresh weights; the seed of what is drawn for the features; no embedding."""
        generator = initial(self.generator, coins.public("generator"))
        weights = {name: value.to(self.features.device) for name, value in generator.items()}
        seed = torch.randint(0, 2**62, (), generator=coins.public("frequencies"))
        return generator_start(weights) | {
            "seed": seed,
            "embedding": torch.zeros(self.classes, self.features.count),
            "known": torch.zeros(()),
            "distance": torch.zeros(()),
        }

    def query(self, state: Mapping[str, Tensor], round_: int, coins: Coins) -> Query | None:
        """The embedding, until it is known."""
        del round_, coins
        if state["known"]:
            return None
        return Query({"embedding": torch.zeros(1)}, {"seed": state["seed"]})

    def update(
        self, state: Mapping[str, Tensor], answers: Tensor, round_: int, coins: Coins
    ) -> Tensors:
        """The embedding is known; then as ``alone``."""
        known = {"embedding": answers.view(self.classes, -1), "known": torch.ones(())}
        return self.alone({**state, **known}, round_, coins)

    def alone(self, state: Mapping[str, Tensor], round_: int, coins: Coins) -> Tensors:
        """A step of the generator."""
        embedding = state["embedding"].to(self.features.device)
        frequencies = self.features.drawn(state["seed"])
        here = coins.at("generator", round_)
        labels = torch.arange(self.classes).repeat_interleave(self.fakes_per_label)
        latents = torch.randn(len(labels), self.latent, generator=here.public("latents"))
        inputs = latents.to(self.features.device), labels.to(self.features.device)

        leaves = trainable(part(state, "generator"))
        made = self._generate(leaves, *inputs)
        mean = self.features.summed(frequencies, made, self.classes) / len(labels)
        distance = ((embedding - mean) * self.features.weights).square().sum()
        stepped = generator_step(state, gradients_of(distance, leaves), self.adam, self.ema)
        return {**state, **stepped, "distance": distance.detach().cpu()}

    def shown(
        self, state: Mapping[str, Tensor], held_out: Shard | None, coins: Coins
    ) -> dict[str, float]:
        """The distance of the embeddings, squared."""
        del held_out, coins
        return {"distance": float(state["distance"])}

    def sample(self, weights: Mapping[str, Tensor], labels: Tensor, coins: Coins) -> Tensor:
        """Images, one per label."""
        latents = torch.randn(len(labels), self.latent, generator=coins.public("latents"))
        inputs = latents.to(self.features.device), labels.to(self.features.device)
        with torch.no_grad():
            return self._generate(weights, *inputs).cpu()

    def recognize(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, coins: Coins
    ) -> Tensor:
        """By what the embedding has of an image's own."""
        del coins
        found = self.features(self.features.drawn(state["seed"]), images.to(self.features.device))
        return (found.cpu() * state["embedding"][labels]).sum(1)

    def _generate(self, weights: Mapping[str, Tensor], latents: Tensor, labels: Tensor) -> Tensor:
        images: Tensor = functional_call(self.generator, dict(weights), (latents, labels))
        return images


def dp_merf(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    generator: Callable[..., nn.Module],
    latent: int,
    features: int,
    bandwidth: float,
    rows: int,
    fakes_per_label: int,
    learning_rate: float,
    betas: Betas,
    ema: Decay,
    device: str,
) -> Method:
    """DP-MERF for these public parameters.

    Args:
        noise_multiplier: noise std over the norm 1 of a row's features; None: no noise.
        features: entries of phi, an even number.
        bandwidth: of the Gaussian kernel, in the units of images with pixels in [0, 1]; a public
            number, never taken from private rows.
        rows: a public number near that of all clients' rows; each divides by its equal share.
        fakes_per_label: of each label in a step: B is as many times the number of labels.
        learning_rate, betas: of Adam.
        ema: decay of the average of the generator that is published; 0 publishes the last one.

    Raises:
        FedgenError: for an odd number of features, or a bandwidth out of all proportion.
    """
    check_features(features, bandwidth)
    net = template(generator(latent=latent, classes=facts.classes, shape=facts.shape))
    embed = Features(features, bandwidth, math.prod(facts.shape), device)
    sums = Sums(facts, noise_multiplier, rows)
    sequence = SumSequence((embedding(sums, embed, facts.classes, lambda _, x: x),), device)
    server = Server(net, embed, latent, facts.classes, fakes_per_label, (learning_rate, betas), ema)
    return sequence.method(
        server.program,
        sequence.plan("none", None, ("RDP of one Gaussian", "DP-MERF (2021)")),
        facts.clients,
        lambda: [_worst_case(sequence, facts.shape)],
    )


def _worst_case(sequence: SumSequence, shape: tuple[int, int, int]) -> WorstCase:
    """A black row against none: its features are all in the cosines, 1 each before scaling."""
    row = Shard(torch.zeros(1, *shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    none = Shard(row.images[:0], row.labels[:0])
    return sequence.worst_case("embedding", {"seed": torch.tensor(0)}, ({}, row), ({}, none))
