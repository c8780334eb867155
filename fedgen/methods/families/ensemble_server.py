"""Server of a critic ensemble: a generator that learns from the responses to its images. All of it
is post-processing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgen.methods.api import Query, ServerProgram
from fedgen.methods.families.critic_ensemble import Networks, Settings
from fedgen.models.functional import (
    Adam,
    Tensors,
    generator_start,
    init_weights,
    nearest_similarity,
    part,
)
from fedgen.randomness import RandomStreams

GeneratorStep = Callable[[Mapping[str, Tensor], Tensor, int, RandomStreams], Tensors]
"""(state, mean responses, round, streams) -> state after a step of the generator."""


@dataclass(frozen=True)
class EnsembleServer:
    """Generator, its optimizer, and the published moving average.

    batch: images of a query.
    fakes_per_label: images of each label that critics train on.
    adam, ema: learning rate and betas; decay of the moving average.
    """

    nets: Networks
    batch: int
    fakes_per_label: int
    adam: Adam
    ema: float

    @classmethod
    def from_settings(cls, nets: Networks, settings: Settings) -> EnsembleServer:
        """Build the server from the common settings."""
        return cls(
            nets,
            settings["batch"],
            settings["fakes_per_label"],
            (settings["generator_learning_rate"], settings["generator_betas"]),
            settings["ema"],
        )

    def init(self, streams: RandomStreams) -> Tensors:
        """Return initial weights."""
        weights = init_weights(self.nets.generator, streams.public("generator"))
        state = generator_start(weights)
        return {name: value.to(self.nets.device) for name, value in state.items()}

    def broadcast(
        self, state: Mapping[str, Tensor], round_: int, streams: RandomStreams
    ) -> Tensors:
        """Return fresh fakes that critics train on (classes, fakes per label, ...), as uint8 like
        the real images."""
        labels = torch.arange(self.nets.classes).repeat_interleave(self.fakes_per_label)
        latents, _ = self.nets.inputs((len(labels),), streams.at("broadcast", round_))
        with torch.no_grad():
            images = self.nets.generate(
                part(state, "generator"), latents, labels.to(self.nets.device)
            )
        pixels = (images * 255).round().to(torch.uint8)
        return {"images": pixels.view(self.nets.classes, -1, *images.shape[1:])}

    def images(
        self, generator: Tensors, round_: int, streams: RandomStreams
    ) -> tuple[Tensor, Tensor]:
        """Return the images of a round's query and their labels: the same latents for each call."""
        latents, labels = self.nets.inputs((self.batch,), streams.at("query", round_))
        return self.nets.generate(generator, latents, labels), labels

    def query(self, state: Mapping[str, Tensor], round_: int, streams: RandomStreams) -> Query:
        """Return a batch of images and labels for the critics."""
        with torch.no_grad():
            images, labels = self.images(part(state, "generator"), round_, streams)
        return Query({"images": images, "labels": labels})

    def sample(
        self, weights: Mapping[str, Tensor], labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Return one image per label from the published average."""
        latents, _ = self.nets.inputs((len(labels),), streams)
        with torch.no_grad():
            return self.nets.generate(weights, latents, labels.to(self.nets.device)).cpu()

    def membership_scores(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Score images by their nearest neighbour among 100 samples of each label, because the
        critics stay at the clients."""
        sample_labels = torch.arange(self.nets.classes).repeat_interleave(100)
        return nearest_similarity(
            images,
            labels,
            self.sample(part(state, "average"), sample_labels, streams),
            sample_labels,
        )

    def program(
        self,
        generator_step: GeneratorStep,
        *,
        init: Callable[[RandomStreams], Tensors] | None = None,
        query: Callable[[Mapping[str, Tensor], int, RandomStreams], Query] | None = None,
    ) -> ServerProgram:
        """Return the server program of a method; ``init`` and ``query`` None: those of this
        class."""
        return ServerProgram(
            init=init or self.init,
            broadcast=self.broadcast,
            query=query or self.query,
            update=generator_step,
            generator=lambda state: part(state, "average"),
            sample=self.sample,
            membership_scores=self.membership_scores,
        )
