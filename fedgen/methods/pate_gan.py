"""PATE-GAN (Jordon, Yoon, van der Schaar, ICLR 2019).

Teachers are DataLens' (``datalens.py``). Asked about a generated image, a teacher says whether it
takes it for real. A student, a discriminator that sees generated images alone, learns from their
noisy count, and the generator learns from the student. In a round (algorithm 1):

    teachers         n_T times: descend -log D(x, y) - log(1 - D(G(z, y), y)), each on its own part
    generator        images = G(latents, labels)
    teachers         count = sum over K of 1[D(image) > 1/2] + N(0, sigma^2)
    student          descends the cross-entropy of S(image) with 1[count > K / 2]
    generator        after n_S rounds: descends -log S(G(z, y), y)

One record moves one teacher's vote: the count by 1, against the server too.

Where this file leaves the paper: noise is Gaussian, which composes better than Laplace's, and what
the count costs does not depend on the votes. The paper's epsilon does, and is no bound
(``configs/published/pate_gan.yaml``). Networks are convolutional and conditional on labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedgen.coins import Coins
from fedgen.ensemble.answering import Answering, critics_of, method_of
from fedgen.ensemble.critics import Ballot, Losses, Networks, Settings, networks
from fedgen.ensemble.server import Generator
from fedgen.losses.bce import discriminator_loss, generator_loss
from fedgen.method import Method, PublicFacts, Query
from fedgen.models.functional import (
    Adam,
    Tensors,
    adam_start,
    adam_step,
    generator_step,
    gradients_of,
    initial,
    join,
    part,
    power_iteration,
    template,
    trainable,
)
from fedgen.parameters import Betas
from fedgen.privacy.bounds import Bit

Targets = Literal["hard", "soft"]


def logits(nets: Networks) -> Ballot:
    """Of a stack of teachers, (k, rows, 1): above zero is a vote for real."""

    def ballot(critics: Tensors, query: Query) -> Tensor:
        images, labels = (query.rows[name].to(nets.device) for name in ("images", "labels"))
        size = len(critics["score.weight"])
        shown = images.expand(size, *images.shape), labels.expand(size, -1)
        with torch.no_grad():
            return nets.score(critics)(*shown)[..., None]

    return ballot


@dataclass(frozen=True, kw_only=True)
class Student(Generator):
    """The server: a student beside the generator.

    student: its template. descent: of its Adam. targets: "hard" takes the majority for true,
        "soft" its share. every: n_S, rounds between two steps of the generator.
    """

    student: nn.Module
    descent: Adam
    targets: Targets
    every: int

    def init(self, coins: Coins) -> Tensors:
        """Fresh weights of both."""
        fresh = initial(self.student, coins.public("student"))
        student = {name: value.to(self.nets.device) for name, value in fresh.items()}
        return {**super().init(coins), **join(student=student, descent=adam_start(student))}

    def update(
        self, state: Mapping[str, Tensor], answers: Tensor, round_: int, coins: Coins
    ) -> Tensors:
        """A step of the student, and after ``every`` rounds one of the generator."""
        query = self.query(state, round_, coins)
        student, moments = (
            {name: value.clone() for name, value in part(state, of).items()}
            for of in ("student", "descent")
        )
        real = answers[:, 0].to(self.nets.device)
        real = (real > 0.5).to(real) if self.targets == "hard" else real.clamp(0, 1)
        leaves = trainable(student)
        said = self._said(leaves, query.rows["images"], query.rows["labels"])
        loss = F.binary_cross_entropy_with_logits(said, real)
        adam_step(student, gradients_of(loss, leaves), moments, *self.descent)
        student.update(power_iteration(student, stacked=False))
        generator = {n: v for n, v in state.items() if n.split("/")[0] not in _OF_THE_STUDENT}
        if (round_ + 1) % self.every == 0:
            latents, labels = self.nets.inputs((self.batch,), coins.at("step", round_))
            weights = trainable(part(state, "generator"))
            images = self.nets.generate(weights, latents, labels)
            lost = generator_loss(lambda *shown: self._said(student, *shown), images, labels)
            gradients = gradients_of(lost / self.batch, weights)
            generator = generator_step(state, gradients, self.adam, self.ema)
        return {**generator, **join(student=student, descent=moments)}

    def _said(self, student: Tensors, images: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = functional_call(self.student, student, (images, labels))
        return found


_OF_THE_STUDENT = ("student", "descent")


def pate_gan(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    student: Callable[..., nn.Module],
    student_learning_rate: float,
    student_betas: Betas,
    student_steps: int,
    targets: Targets,
    **settings: Unpack[Settings],
) -> Method:
    """PATE-GAN for these public parameters.

    Args:
        noise_multiplier: noise std in votes; None does not noise.
        student: its network. student_learning_rate, student_betas: of its Adam.
        student_steps: n_S, rounds between two steps of the generator.
        targets: what the student takes for true: "hard", the noisy majority (the paper's), or
            "soft", the noisy share, for the same price.
        settings: see ``Settings``; teachers are its critics.

    Raises:
        FedgenError: for parameters that contradict each other.
    """
    answering = Answering(facts, Bit(), settings["critics"])
    nets = networks(facts, settings)
    losses = Losses(discriminator_loss, generator_loss)
    client = critics_of(
        answering, noise_multiplier, nets, losses, logits(nets), settings["batch"], (1,), settings
    )
    server = Student.of(
        nets,
        settings,
        student=template(student(classes=facts.classes, shape=facts.shape)),
        descent=(student_learning_rate, student_betas),
        targets=targets,
        every=student_steps,
    )
    return method_of(answering, client, server.program(), settings, None)
