"""The server: a generator that follows what critics answer about its images. All of it is
post-processing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from fedgen.coins import Coins
from fedgen.ensemble.critics import Networks, Settings
from fedgen.method import Query, ServerProgram
from fedgen.models.functional import (
    Adam,
    Tensors,
    generator_start,
    generator_step,
    gradients_of,
    initial,
    likeness,
    part,
    trainable,
)


@dataclass(frozen=True)
class Generator:
    """The generator, its Adam moments, and the average that is published.

    batch: images of a question. fakes_per_label: images of each label that critics train on.
    read: (mean answers, the question) -> the gradient with respect to each image.
    asks: (rows, coins) -> what a question holds beside images and labels.
    """

    nets: Networks
    batch: int
    fakes_per_label: int
    adam: Adam
    ema: float
    read: Callable[[Tensor, Query], Tensor] = lambda answers, _: answers
    asks: Callable[[int, Coins], Tensors] = lambda rows, coins: {}

    @classmethod
    def of(cls, nets: Networks, settings: Settings, **more: Any) -> Self:
        """By the settings that all have; ``more``: what a class has beside them."""
        return cls(
            nets,
            settings["batch"],
            settings["fakes_per_label"],
            (settings["generator_learning_rate"], settings["generator_betas"]),
            settings["ema"],
            **more,
        )

    def init(self, coins: Coins) -> Tensors:
        """Fresh weights."""
        weights = initial(self.nets.generator, coins.public("generator"))
        state = generator_start(weights)
        return {name: value.to(self.nets.device) for name, value in state.items()}

    def broadcast(self, state: Mapping[str, Tensor], round_: int, coins: Coins) -> Tensors:
        """Fresh fakes for the critics to train on, (classes, fakes per label, ...): a byte a pixel,
        as real images have."""
        labels = torch.arange(self.nets.classes).repeat_interleave(self.fakes_per_label)
        latents, _ = self.nets.inputs((len(labels),), coins.at("broadcast", round_))
        with torch.no_grad():
            images = self.nets.generate(
                part(state, "generator"), latents, labels.to(self.nets.device)
            )
        pixels = (images * 255).round().to(torch.uint8)
        return {"images": pixels.view(self.nets.classes, -1, *images.shape[1:])}

    def query(self, state: Mapping[str, Tensor], round_: int, coins: Coins) -> Query:
        """A batch of images and labels to be judged."""
        here = coins.at("query", round_)
        latents, labels = self.nets.inputs((self.batch,), here)
        with torch.no_grad():
            images = self.nets.generate(part(state, "generator"), latents, labels)
        return self._query(images, labels, here)

    def _query(self, images: Tensor, labels: Tensor, here: Coins) -> Query:
        return Query({"images": images, "labels": labels, **self.asks(self.batch, here)})

    def gradient(
        self, state: Mapping[str, Tensor], answers: Tensor, round_: int, coins: Coins
    ) -> Tensors:
        """The generator's, from the answers: the product of images' gradients and its Jacobian."""
        here = coins.at("query", round_)
        latents, labels = self.nets.inputs((self.batch,), here)
        leaves = trainable(part(state, "generator"))
        images = self.nets.generate(leaves, latents, labels)
        asked = self._query(images.detach(), labels, here)
        rows = self.read(answers, asked).to(self.nets.device)
        return gradients_of(images * (rows / self.batch), leaves)

    def update(
        self, state: Mapping[str, Tensor], answers: Tensor, round_: int, coins: Coins
    ) -> Tensors:
        """One step of Adam, and the average."""
        gradients = self.gradient(state, answers, round_, coins)
        return generator_step(state, gradients, self.adam, self.ema)

    def sample(self, weights: Mapping[str, Tensor], labels: Tensor, coins: Coins) -> Tensor:
        """Images of the published average, one per label."""
        latents, _ = self.nets.inputs((len(labels),), coins)
        with torch.no_grad():
            return self.nets.generate(weights, latents, labels.to(self.nets.device)).cpu()

    def recognize(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, coins: Coins
    ) -> Tensor:
        """By the nearest of 100 samples of each label: critics stay with the clients."""
        made = torch.arange(self.nets.classes).repeat_interleave(100)
        return likeness(images, labels, self.sample(part(state, "average"), made, coins), made)

    def program(self) -> ServerProgram:
        """For the contract."""
        return ServerProgram(
            init=self.init,
            broadcast=self.broadcast,
            query=self.query,
            update=self.update,
            generator=lambda state: part(state, "average"),
            sample=self.sample,
            recognize=self.recognize,
        )
