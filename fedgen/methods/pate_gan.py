"""PATE-GAN (Jordon, Yoon, van der Schaar, ICLR 2019).

Teachers are those of DataLens (``datalens.py``). For a generated image, a teacher votes real or
fake. A student, a discriminator that sees only generated images, learns from the noisy count of
votes, and the generator learns from the student. In a round (algorithm 1):

    teacher_step      n_T times: descend -log D(x, y) - log(1 - D(G(z, y), y)), each on its own
                      subset
    query             images = G(latents, labels)
    teachers          count = sum over K of 1[D(image) > 1/2] + N(0, sigma^2)
    student_step      descend the cross entropy of S(image) with 1[count > K / 2]
    generator_step    after n_S rounds: descend -log S(G(z, y), y)

One record moves the vote of one teacher: the count by 1, against the server too.

Differences from the paper: noise is Gaussian, which composes better than Laplace noise, and the
cost of a count does not depend on the votes. The ε of the paper does, and is not a bound
(``pate_gan`` in ``configs/published.yaml``). Networks are convolutional and conditional on labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedgen.config.constraints import Betas
from fedgen.losses.bce import generator_loss
from fedgen.methods.api import Method, PublicFacts, Query
from fedgen.methods.datalens import teacher_step
from fedgen.methods.families.critic_ensemble import (
    CriticOutput,
    Networks,
    Settings,
    critic_adam,
    networks,
)
from fedgen.methods.families.ensemble_privacy import EnsemblePrivacy, build_critics, build_method
from fedgen.methods.families.ensemble_server import EnsembleServer
from fedgen.models.factories import ImageNetworkFactory
from fedgen.models.functional import (
    Adam,
    Tensors,
    adam_start,
    adam_step,
    concat_parts,
    descend_generator,
    init_weights,
    meta_module,
    part,
    power_iteration,
    trainable,
    weight_gradients,
)
from fedgen.privacy.bounds import Bit
from fedgen.randomness import RandomStreams

Targets = Literal["hard", "soft"]


def logits(nets: Networks) -> CriticOutput:
    """Return the logits of a stack of teachers (k, samples, 1); positive: a vote for real."""

    def output(critics: Tensors, query: Query) -> Tensor:
        images, labels = (query.samples[name].to(nets.device) for name in ("images", "labels"))
        size = len(critics["score.weight"])
        inputs = images.expand(size, *images.shape), labels.expand(size, -1)
        with torch.no_grad():
            return nets.score(critics)(*inputs)[..., None]

    return output


@dataclass(frozen=True)
class Student:
    """The student next to the generator of ``server``.

    network: its network.
    adam: learning rate and betas.
    targets: "hard": the majority; "soft": the share of votes.
    generator_every: n_S, rounds between two generator steps.
    """

    server: EnsembleServer
    network: nn.Module
    adam: Adam
    targets: Targets
    generator_every: int

    def init(self, streams: RandomStreams) -> Tensors:
        """Return initial weights of generator and student."""
        fresh = init_weights(self.network, streams.public("student"))
        student = {name: value.to(self.server.nets.device) for name, value in fresh.items()}
        return {
            **self.server.init(streams),
            **concat_parts(student=student, descent=adam_start(student)),
        }

    def update(
        self, state: Mapping[str, Tensor], votes: Tensor, round_: int, streams: RandomStreams
    ) -> Tensors:
        """Take a student step, and after ``generator_every`` rounds a generator step. ``votes``:
        noisy share of the teachers that vote for real (samples, 1)."""
        state = self.student_step(state, votes, round_, streams)
        if (round_ + 1) % self.generator_every:
            return state
        return self.generator_step(state, round_, streams)

    def student_step(
        self, state: Mapping[str, Tensor], votes: Tensor, round_: int, streams: RandomStreams
    ) -> Tensors:
        """Descend the cross entropy of the student with the votes on the images of a query."""
        query = self.server.query(state, round_, streams)
        student, moments = (
            {name: value.clone() for name, value in part(state, of).items()}
            for of in ("student", "descent")
        )
        real = votes[:, 0].to(self.server.nets.device)
        real = (real > 0.5).to(real) if self.targets == "hard" else real.clamp(0, 1)
        leaves = trainable(student)
        logits = self._logits(leaves, query.samples["images"], query.samples["labels"])
        loss = F.binary_cross_entropy_with_logits(logits, real)
        adam_step(student, weight_gradients(loss, leaves), moments, *self.adam)
        student.update(power_iteration(student, stacked=False))
        return {**state, **concat_parts(student=student, descent=moments)}

    def generator_step(
        self, state: Mapping[str, Tensor], round_: int, streams: RandomStreams
    ) -> Tensors:
        """Descend -log S(G(z, y), y)."""
        server, student = self.server, part(state, "student")
        latents, labels = server.nets.inputs((server.batch,), streams.at("step", round_))
        weights = trainable(part(state, "generator"))
        images = server.nets.generate(weights, latents, labels)
        loss = generator_loss(lambda *inputs: self._logits(student, *inputs), images, labels)
        gradients = weight_gradients(loss / server.batch, weights)
        return {**state, **descend_generator(state, gradients, server.adam, server.ema)}

    def _logits(self, student: Tensors, images: Tensor, labels: Tensor) -> Tensor:
        logits: Tensor = functional_call(self.network, student, (images, labels))
        return logits


def pate_gan(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    student: ImageNetworkFactory,
    student_learning_rate: float,
    student_betas: Betas,
    student_steps: int,
    targets: Targets,
    **settings: Unpack[Settings],
) -> Method:
    """Build PATE-GAN from public parameters.

    Args:
        noise_multiplier: noise standard deviation in votes; None: no noise.
        student: network of the student.
        student_learning_rate, student_betas: parameters of its Adam.
        student_steps: n_S, rounds between two generator steps.
        targets: targets of the student: "hard": the noisy majority, as in the paper; "soft": the
            noisy share, at the same cost.
        settings: see ``Settings``; teachers are critics.

    Raises:
        FedgenError: for contradicting parameters.
    """
    privacy = EnsemblePrivacy(facts, Bit(), settings["critics"])
    nets = networks(facts, settings)
    step = partial(teacher_step, nets, critic_adam(settings))
    client = build_critics(
        privacy,
        noise_multiplier,
        nets,
        step,
        logits(nets),
        generator_loss,
        settings["batch"],
        (1,),
        settings,
    )
    server = EnsembleServer.from_settings(nets, settings)
    network = meta_module(student(classes=facts.classes, shape=facts.shape))
    adam = student_learning_rate, student_betas
    learner = Student(server, network, adam, targets, student_steps)
    program = server.program(learner.update, init=learner.init)
    return build_method(privacy, client, program, settings, None)
