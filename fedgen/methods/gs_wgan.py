"""GS-WGAN: gradient-sanitized Wasserstein GAN (Chen, Orekondy, Fritz, NeurIPS 2020).

Critics train on disjoint subsets of the private data, without noise, and never leave the client.
For generated images, a critic responds with the gradient of its score with respect to them, clipped
and noised; the Jacobian of the generator is public. One round of algorithm 1:

    critic_step        n times, by the critics in a public rotation: descend the WGAN-GP loss
    query              images = G(latents, labels)
    image_gradients    by the critics that the images are routed to: -dD/dimages,
                       released as clip(-dD/dimages, C) + N(0, (2 C sigma)^2)
    generator_step     descend the mean of gradients * dimages/dweights

Routing, subsets and rotation: ``families/critic_ensemble.py``; clipping and noise: ``RowGaussian``
in ``privacy/mechanisms.py``.

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
    Networks,
    Pairs,
    Settings,
    critic_adam,
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
from fedgen.models.functional import (
    Adam,
    Tensors,
    adam_step,
    descend_generator,
    part,
    power_iteration,
    split,
    trainable,
    unflat,
    weight_gradients,
)
from fedgen.privacy.bounds import Ball
from fedgen.privacy.routing import Mode, Sampling
from fedgen.randomness import RandomStreams


def critic_step(
    nets: Networks,
    adam: Adam,
    gradient_penalty: float,
    drift_penalty: float,
    critics: Tensors,
    moments: Tensors,
    pairs: Pairs,
) -> None:
    """Take one step of Adam along the WGAN-GP loss (equations 12 and 13) for each critic of a
    stack, in place."""
    leaves = trainable(critics)
    losses = critic_loss(
        nets.score(leaves),
        *pairs,
        gradient_penalty=gradient_penalty,
        drift_penalty=drift_penalty,
    )
    adam_step(critics, weight_gradients(losses, leaves), moments, *adam)
    critics.update(power_iteration(critics, stacked=True))


def image_gradients(nets: Networks) -> CriticOutput:
    """Return -dD/dimages of each critic (k, samples, channels, height, width): the upstream factor
    of equation 11. For a discriminator with loss -log D it is this times 1 - D."""

    def output(critics: Tensors, query: Query) -> Tensor:
        images, labels = (query.samples[name].to(nets.device) for name in ("images", "labels"))
        size = len(critics["score.weight"])
        points = images.detach().expand(size, *images.shape).requires_grad_()
        loss = generator_loss(nets.score(critics), points, labels.expand(size, -1))
        return torch.autograd.grad(loss, points)[0]

    return output


def generator_step(
    server: EnsembleServer,
    state: Mapping[str, Tensor],
    gradients: Tensor,
    round_: int,
    streams: RandomStreams,
) -> Tensors:
    """Descend the sanitized gradients of the images (n, channels, height, width) times the Jacobian
    of the generator (equation 11)."""
    leaves = trainable(part(state, "generator"))
    images, _ = server.images(leaves, round_, streams)
    # the gradient of this sum is the mean of gradients * dimages/dweights
    loss = images * (gradients.to(images.device) / server.batch)
    return descend_generator(state, weight_gradients(loss, leaves), server.adam, server.ema)


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


def query_weights(
    server: EnsembleServer, state: Mapping[str, Tensor], round_: int, streams: RandomStreams
) -> Query:
    """Return the query of that ablation: the generator, and one query sample, the latents and
    labels of a batch."""
    latents, labels = server.nets.inputs((server.batch,), streams.at("query", round_))
    return Query({"latents": latents[None], "labels": labels[None]}, part(state, "generator"))


def weights_step(
    server: EnsembleServer,
    state: Mapping[str, Tensor],
    gradients: Tensor,
    round_: int,
    streams: RandomStreams,
) -> Tensors:
    """Descend the sanitized gradient of the generator's weights (1, weights)."""
    del round_, streams
    weights, _ = split(part(state, "generator"))
    gradient = unflat(gradients[0].to(server.nets.device), weights)
    return descend_generator(state, gradient, server.adam, server.ema)


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
    nets, samples = networks(facts, settings), settings["batch"]
    server = EnsembleServer.from_settings(nets, settings)
    output, response_shape = image_gradients(nets), tuple[int, ...](facts.shape)
    program = server.program(partial(generator_step, server))
    if by_weights:
        weights = sum(parameter.numel() for parameter in nets.generator.parameters())
        output, samples, response_shape = parameter_gradients(nets), 1, (weights,)
        program = server.program(
            partial(weights_step, server), query=partial(query_weights, server)
        )
    companion_network = None
    if companion is not None:
        companion_network = companion(
            classes=facts.classes, shape=facts.shape, device=settings["device"]
        )
    step = partial(critic_step, nets, critic_adam(settings), gradient_penalty, drift_penalty)
    client = build_critics(
        privacy,
        noise_multiplier,
        nets,
        step,
        output,
        generator_loss,
        samples,
        response_shape,
        settings,
        companion_network,
    )
    claim = _claim(privacy, noise_multiplier, samples)
    return build_method(privacy, client, program, settings, claim)


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
