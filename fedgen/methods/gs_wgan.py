"""GS-WGAN: gradient-sanitized Wasserstein GAN (Chen, Orekondy, Fritz, NeurIPS 2020).

Critics train on disjoint subsets of the private data, without noise, and never leave the client.
For generated images, a critic responds with the gradient of its score with respect to them, clipped
and noised (equations 8 to 11); the Jacobian of the generator is public. One step of algorithm 1:

    critics in a public rotation    n times: descend the WGAN-GP loss (equations 12, 13)
    generator                       images = G(latents, labels)
    critics, as routed              gradients = clip(-dD/dimages, C) + N(0, (2 C sigma)^2)
    generator                       descend gradients * dimages/dweights

A single client holds K critics over K subsets of its records (record level); each of several
clients holds one critic (client level). Differences from the published code: all critics of a
client respond to every query sample, because one record moves their mean by only 2C / K, or query
samples are routed individually; and critics train on a public rotation instead of when they are
sampled. Without these changes, no argument for amplification by the sampling of critics holds;
``routing`` and ``critic_schedule`` restore the published variant, at its true cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, Unpack

import torch
from dp_accounting import DpEvent, GaussianDpEvent, SampledWithoutReplacementDpEvent
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedgen.config.constraints import ClipNorm, NonNegative
from fedgen.errors import FedgenError
from fedgen.losses.wgan_gp import critic_loss, generator_loss
from fedgen.methods.api import Method, PublicFacts, Query
from fedgen.methods.families.critic_ensemble import (
    CompanionFactory,
    CriticOutput,
    Losses,
    Networks,
    Settings,
    image_gradients,
    networks,
)
from fedgen.methods.families.ensemble_privacy import (
    EnsemblePrivacy,
    build_critics,
    build_method,
    rdp_claim,
)
from fedgen.methods.families.ensemble_server import EnsembleServer
from fedgen.methods.plan import Claim
from fedgen.models.functional import Tensors, part, split, unflat
from fedgen.privacy.bounds import Ball
from fedgen.privacy.routing import Mode, Sampling
from fedgen.randomness import RandomStreams


def parameter_gradients(nets: Networks) -> CriticOutput:
    """Return the gradient of each critic's generator loss with respect to the weights of the
    generator, as one row (k, 1, weights): the ablation of the paper."""

    def row(critic: Tensors, query: Query) -> Tensor:
        latents, labels = (query.samples[name][0].to(nets.device) for name in ("latents", "labels"))
        weights, spectral = split(
            {name: value.to(nets.device) for name, value in query.shared.items()}
        )

        def loss(trained: Tensors) -> Tensor:
            images = nets.generate({**trained, **spectral}, latents, labels)
            scores: Tensor = functional_call(nets.critic, critic, (images, labels))
            return -scores.mean()

        gradients = grad(loss)(weights)
        return torch.cat([gradients[name].flatten() for name in sorted(weights)])[None]

    return lambda critics, query: vmap(lambda critic: row(critic, query))(critics)


@dataclass(frozen=True)
class GeneratorByWeights(EnsembleServer):
    """The server of that ablation, which sends its weights and the inputs of the images."""

    def query(self, state: Mapping[str, Tensor], round_: int, streams: RandomStreams) -> Query:
        """Return one query sample: latents and labels of a batch."""
        latents, labels = self.nets.inputs((self.batch,), streams.at("query", round_))
        return Query({"latents": latents[None], "labels": labels[None]}, part(state, "generator"))

    def gradient(
        self, state: Mapping[str, Tensor], responses: Tensor, round_: int, streams: RandomStreams
    ) -> Tensors:
        """Return the response, which is the gradient."""
        weights, _ = split(part(state, "generator"))
        return unflat(responses[0].to(self.nets.device), weights)


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
    responders: int,
    cohort_sampling: Sampling,
    sampled_by: Literal["server", "clients"],
    companion: CompanionFactory | None,
    **settings: Unpack[Settings],
) -> Method:
    """Build GS-WGAN from public parameters.

    Args:
        noise_multiplier: noise standard deviation over the sensitivity 2C of the response to a
            query sample; None: no clipping, no noise.
        critic_schedule: "public": critics train in a rotation; "on_query": the sampled critics
            train.
        clip: C.
        sanitize: "samples": clip the gradient with respect to each image; "parameters": clip the
            gradient with respect to the weights of the generator (the ablation of the paper).
        routing, responders, cohort_sampling: see ``Routing``; over critics for one client, over
            clients for several.
        sampled_by: who samples clients: the server, which queries only these, or each client, by a
            secret decision per round (per_step); a client that is not sampled sends noise only.
        companion: companion network of each critic (DP-GAN-DPAC), or None.
        settings: see ``Settings``.

    Raises:
        FedgenError: for contradicting parameters.
    """
    by_weights, on_query = sanitize == "parameters", critic_schedule == "on_query"
    if by_weights and companion is not None:
        raise FedgenError(
            "method.sanitize", "parameters does not support companions", "set it to samples"
        )
    if by_weights and routing == "per_sample":
        raise FedgenError(
            "method.routing",
            "the gradient of the generator's weights is one vector, not one per sample",
            "set method.routing=per_step or mean",
        )
    if on_query and facts.clients == 1 and settings["critics_per_step"] != 1:
        raise FedgenError(
            "method.critics_per_step",
            "critics that train when sampled train individually",
            "set method.critics_per_step=1",
        )
    privacy = EnsemblePrivacy(
        facts,
        Ball(math.inf if noise_multiplier is None else clip),
        settings["critics"],
        routing,
        responders,
        cohort_sampling,
        sampled_by == "clients",
        on_query,
    )
    nets, batch = networks(facts, settings), settings["batch"]
    losses = Losses(
        partial(critic_loss, gradient_penalty=gradient_penalty, drift_penalty=drift_penalty),
        generator_loss,
    )
    server = (GeneratorByWeights if by_weights else EnsembleServer).from_settings(nets, settings)
    output, samples, response_shape = image_gradients(nets), batch, tuple[int, ...](facts.shape)
    if by_weights:
        output, samples, response_shape = parameter_gradients(nets), 1, (nets.generator_weights,)
    companion_network = None
    if companion is not None:
        companion_network = companion(
            classes=facts.classes, shape=facts.shape, device=settings["device"]
        )
    client = build_critics(
        privacy,
        noise_multiplier,
        nets,
        losses,
        output,
        samples,
        response_shape,
        settings,
        companion_network,
    )
    claim = _claim(privacy, noise_multiplier, samples)
    return build_method(privacy, client, server.program(), settings, claim)


def _claim(privacy: EnsemblePrivacy, noise_multiplier: float | None, samples: int) -> Claim | None:
    """Return the claim of theorem 4.1, by which each row has its own secret sample of a critic."""
    routing = privacy.cohort if privacy.is_federated else privacy.inner_routing
    if noise_multiplier is None or routing.mode == "mean":
        return None
    gate: DpEvent = GaussianDpEvent(noise_multiplier)
    if routing.population > 1:
        gate = SampledWithoutReplacementDpEvent(routing.population, 1, gate)
    formula = f"RDP of subsampling without replacement at rate 1/{routing.population}, one for each"
    source = "GS-WGAN (Chen et al. 2020), theorem 4.1 and appendix A"
    return rdp_claim(gate, samples, f"{formula} row", source)
