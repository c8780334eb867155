"""GS-WGAN: gradient-sanitized Wasserstein GAN (Chen, Orekondy, Fritz, NeurIPS 2020).

Critics train on disjoint parts of the private data, without noise, and never leave. A critic that
is asked about generated images answers with the gradient of its score with respect to them, clipped
and noised (equations 8 to 11); the generator's own Jacobian is public. Algorithm 1, in one step:

    critics in a public rotation    n times: descend the WGAN-GP loss (equations 12, 13)
    generator                       images = G(latents, labels)
    critics, as routed              gradients = clip(-dD/dimages, C) + N(0, (2 C sigma)^2)
    generator                       descend gradients * dimages/dweights

One client holds K critics over K parts of its rows (record level); of many clients each holds one
critic (user level). Where this file leaves the published code: all critics of a client answer every
sample, since one record moves their mean by 2C / K alone, or samples are routed one by one; and
critics train on a public rotation instead of when they are drawn. Without these, no argument for
amplification by the draw of a critic holds; ``routing`` and ``critic_schedule`` bring the published
variant back, at its true cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, Unpack

import torch
from dp_accounting import DpEvent, GaussianDpEvent, SampledWithoutReplacementDpEvent
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedgen.coins import Coins
from fedgen.ensemble.answering import Answering, claimed, critics_of, method_of
from fedgen.ensemble.critics import (
    Ballot,
    Companion,
    Losses,
    Networks,
    Settings,
    image_gradients,
    networks,
)
from fedgen.ensemble.server import Generator
from fedgen.errors import FedgenError
from fedgen.losses.wgan_gp import critic_loss, generator_loss
from fedgen.method import Claim, Method, PublicFacts, Query
from fedgen.models.functional import Tensors, part, split, unflat
from fedgen.parameters import ClipNorm, NonNegative
from fedgen.privacy.bounds import Ball
from fedgen.privacy.routing import Mode, Sampling


def parameter_gradients(nets: Networks) -> Ballot:
    """The paper's ablation: the gradient of each critic's generator loss with respect to the
    generator's weights, one row of all of them, (k, 1, weights)."""

    def row(critic: Tensors, query: Query) -> Tensor:
        latents, labels = (query.rows[n][0].to(nets.device) for n in ("latents", "labels"))
        weights, spectral = split({n: v.to(nets.device) for n, v in query.shared.items()})

        def loss(given: Tensors) -> Tensor:
            images = nets.generate({**given, **spectral}, latents, labels)
            scores: Tensor = functional_call(nets.critic, critic, (images, labels))
            return -scores.mean()

        gradients = grad(loss)(weights)
        return torch.cat([gradients[name].flatten() for name in sorted(weights)])[None]

    return lambda critics, query: vmap(lambda critic: row(critic, query))(critics)


@dataclass(frozen=True)
class GeneratorByWeights(Generator):
    """The server of that ablation: it sends its weights, and what makes the images."""

    def query(self, state: Mapping[str, Tensor], round_: int, coins: Coins) -> Query:
        """One row: latents and labels of a batch."""
        latents, labels = self.nets.inputs((self.batch,), coins.at("query", round_))
        return Query({"latents": latents[None], "labels": labels[None]}, part(state, "generator"))

    def gradient(
        self, state: Mapping[str, Tensor], answers: Tensor, round_: int, coins: Coins
    ) -> Tensors:
        """The answer is the gradient."""
        weights, _ = split(part(state, "generator"))
        return unflat(answers[0].to(self.nets.device), weights)


def gs_wgan(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    critic_schedule: Literal["public", "on_query"],
    gradient_penalty: NonNegative,
    drift_penalty: NonNegative,
    clip: ClipNorm,
    sanitize: Literal["samples", "parameters"],
    routing: Mode,
    answerers: int,
    cohort_sampling: Sampling,
    draws: Literal["server", "clients"],
    companion: Callable[..., Companion] | None,
    **settings: Unpack[Settings],
) -> Method:
    """GS-WGAN for these public parameters.

    Args:
        noise_multiplier: noise std over the sensitivity 2C of an answered row; None neither clips
            nor noises.
        critic_schedule: "public" trains a rotation, "on_query" whoever the step's draw chose.
        clip: C. sanitize: "samples" clips the gradient with respect to each image, "parameters"
            the gradient with respect to the generator's weights (the paper's ablation).
        routing, answerers, cohort_sampling: see ``Routing``; over critics for one client, over
            clients for several.
        draws: who draws clients: the server, which asks those alone; or each client, by a secret
            coin for each round (per_step), and those not drawn answer noise alone.
        companion: of each critic (DP-GAN-DPAC), or None.
        settings: see ``Settings``.

    Raises:
        FedgenError: for parameters that contradict each other.
    """
    by_weights, on_query = sanitize == "parameters", critic_schedule == "on_query"
    if by_weights and companion is not None:
        raise FedgenError(
            "method.sanitize", "parameters have no companion's share", "set it to samples"
        )
    if by_weights and routing == "per_sample":
        raise FedgenError(
            "method.routing",
            "a gradient of the generator's weights is one row, not one per sample",
            "set method.routing=per_step or mean",
        )
    if on_query and facts.clients == 1 and settings["critics_per_step"] != 1:
        raise FedgenError(
            "method.critics_per_step",
            "critics that train when they are drawn train one by one",
            "set method.critics_per_step=1",
        )
    answering = Answering(
        facts,
        Ball(math.inf if noise_multiplier is None else clip),
        settings["critics"],
        routing,
        answerers,
        cohort_sampling,
        draws == "clients",
        on_query,
    )
    nets, batch = networks(facts, settings), settings["batch"]
    losses = Losses(
        partial(critic_loss, gradient_penalty=gradient_penalty, drift_penalty=drift_penalty),
        generator_loss,
    )
    server = (GeneratorByWeights if by_weights else Generator).of(nets, settings)
    ballot, rows, answer = image_gradients(nets), batch, tuple[int, ...](facts.shape)
    if by_weights:
        ballot, rows, answer = parameter_gradients(nets), 1, (nets.generator_weights,)
    beside = None
    if companion is not None:
        beside = companion(classes=facts.classes, shape=facts.shape, device=settings["device"])
    client = critics_of(
        answering, noise_multiplier, nets, losses, ballot, rows, answer, settings, beside
    )
    claim = _claim(answering, noise_multiplier, rows)
    return method_of(answering, client, server.program(), settings, claim)


def _claim(answering: Answering, noise_multiplier: float | None, rows: int) -> Claim | None:
    """Theorem 4.1: each row costs as if its critic were drawn anew, in secret."""
    draw = answering.cohort if answering.federated else answering.inside
    if noise_multiplier is None or draw.mode == "mean":
        return None
    gate: DpEvent = GaussianDpEvent(noise_multiplier)
    if draw.population > 1:
        gate = SampledWithoutReplacementDpEvent(draw.population, 1, gate)
    formula = f"RDP of subsampling without replacement at rate 1/{draw.population}, a draw for each"
    source = "GS-WGAN (Chen et al. 2020), theorem 4.1 and appendix A"
    return claimed(gate, rows, f"{formula} answered row", source)
