"""Server of a critic ensemble: a generator that follows the responses to its images. All of it is
post-processing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from fedgen.methods.api import Query, ServerProgram
from fedgen.methods.families.critic_ensemble import Networks, Settings
from fedgen.models.functional import (
    Adam,
    Tensors,
    generator_start,
    generator_step,
    init_weights,
    nearest_similarity,
    part,
    trainable,
    weight_gradients,
)
from fedgen.randomness import RandomStreams


@dataclass(frozen=True)
class EnsembleServer:
    """Generator, its optimizer, and the published moving average.

    batch: images of a query.
    fakes_per_label: images of each label that critics train on.
    postprocess: (mean responses, query) -> gradient with respect to each image.
    query_extras: (query samples, streams) -> further arrays of a query.
    """

    nets: Networks
    batch: int
    fakes_per_label: int
    adam: Adam
    ema: float
    postprocess: Callable[[Tensor, Query], Tensor] = lambda answers, _: answers
    query_extras: Callable[[int, RandomStreams], Tensors] = lambda rows, streams: {}

    @classmethod
    def from_settings(cls, nets: Networks, settings: Settings, **fields: Any) -> Self:
        """Build the server from the common settings; ``fields``: all other fields."""
        return cls(
            nets,
            settings["batch"],
            settings["fakes_per_label"],
            (settings["generator_learning_rate"], settings["generator_betas"]),
            settings["ema"],
            **fields,
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

    def query(self, state: Mapping[str, Tensor], round_: int, streams: RandomStreams) -> Query:
        """Return a batch of images and labels for the critics."""
        query_streams = streams.at("query", round_)
        latents, labels = self.nets.inputs((self.batch,), query_streams)
        with torch.no_grad():
            images = self.nets.generate(part(state, "generator"), latents, labels)
        return self._query(images, labels, query_streams)

    def _query(self, images: Tensor, labels: Tensor, query_streams: RandomStreams) -> Query:
        return Query(
            {"images": images, "labels": labels, **self.query_extras(self.batch, query_streams)}
        )

    def gradient(
        self, state: Mapping[str, Tensor], responses: Tensor, round_: int, streams: RandomStreams
    ) -> Tensors:
        """Return the gradient of the generator: the gradients of its images times its Jacobian."""
        query_streams = streams.at("query", round_)
        latents, labels = self.nets.inputs((self.batch,), query_streams)
        leaves = trainable(part(state, "generator"))
        images = self.nets.generate(leaves, latents, labels)
        query = self._query(images.detach(), labels, query_streams)
        image_gradients = self.postprocess(responses, query).to(self.nets.device)
        return weight_gradients(images * (image_gradients / self.batch), leaves)

    def update(
        self, state: Mapping[str, Tensor], responses: Tensor, round_: int, streams: RandomStreams
    ) -> Tensors:
        """Take one step of Adam and update the moving average."""
        gradients = self.gradient(state, responses, round_, streams)
        return generator_step(state, gradients, self.adam, self.ema)

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

    def program(self) -> ServerProgram:
        """Return the server program."""
        return ServerProgram(
            init=self.init,
            broadcast=self.broadcast,
            query=self.query,
            update=self.update,
            generator=lambda state: part(state, "average"),
            sample=self.sample,
            membership_scores=self.membership_scores,
        )
