"""DataLens: private generation by gradient compression and aggregation (Wang, Wu, Long, Rimanic,
Zhang, Li, CCS 2021).

Teachers, discriminators on disjoint subsets of the private data, train without noise and never
leave the client. For a generated image, a teacher votes by the signs of the k entries of largest
magnitude of the gradient of its loss with respect to the image (TopAgg; the gradient of the logit
has the same). In a round:

    teacher_step      n times: descend -log D(x, y) - log(1 - D(G(z, y), y)), each on its own subset
    query             images = G(latents, labels)
    teachers          votes = sum over K of sign(top_k(gradient)) + N(0, (2 sqrt(k) sigma)^2)
    generator_step    descend +1 for each pixel where votes > beta K, -1 where votes < -beta K

One record moves the vote of one teacher, at most to its opposite: 2 sqrt(k) per image, against the
server too. A single client holds K teachers (record level); each of several clients holds one
(client level).

Differences from the released code: records are assigned by position in a public permutation, and
each teacher has its own optimizer. In that code, one label moves the subsets of all teachers, and
80 teachers share an optimizer, so no ε holds for it (``datalens_mnist`` in
``configs/published.yaml``). Here, teachers have no batch statistics. Random signs and the
data-dependent ε of the votes are not implemented.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Unpack

from torch import Tensor

from fedgen.config.constraints import NonNegative
from fedgen.errors import FedgenError
from fedgen.losses.bce import discriminator_loss, generator_loss
from fedgen.methods import gs_wgan
from fedgen.methods.api import Method, PublicFacts
from fedgen.methods.families.critic_ensemble import (
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
    votes_claim,
)
from fedgen.methods.families.ensemble_server import EnsembleServer
from fedgen.models.functional import (
    Adam,
    Tensors,
    adam_step,
    power_iteration,
    trainable,
    weight_gradients,
)
from fedgen.privacy.bounds import Signs
from fedgen.randomness import RandomStreams


def teacher_step(
    nets: Networks, adam: Adam, teachers: Tensors, moments: Tensors, pairs: Pairs
) -> None:
    """Take one step of Adam along the discriminator loss for each teacher of a stack, in place."""
    leaves = trainable(teachers)
    losses = discriminator_loss(nets.score(leaves), pairs.real, pairs.fake, pairs.labels)
    adam_step(teachers, weight_gradients(losses, leaves), moments, *adam)
    teachers.update(power_iteration(teachers, stacked=True))


def agreed_direction(votes: Tensor, threshold: float) -> Tensor:
    """Return the direction that more than ``threshold`` of the teachers agree on for each pixel:
    +1, -1 or 0. ``votes``: their noisy mean."""
    return (votes > threshold).to(votes) - (votes < -threshold).to(votes)


def generator_step(
    server: EnsembleServer,
    threshold: float,
    state: Mapping[str, Tensor],
    votes: Tensor,
    round_: int,
    streams: RandomStreams,
) -> Tensors:
    """Descend the agreed direction of each image."""
    direction = agreed_direction(votes, threshold)
    return gs_wgan.generator_step(server, state, direction, round_, streams)


def datalens(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    top_k: int,
    threshold: NonNegative,
    **settings: Unpack[Settings],
) -> Method:
    """Build DataLens from public parameters.

    Args:
        noise_multiplier: noise standard deviation over the sensitivity 2 sqrt(k) of the sum of
            votes on an image (2 sqrt(k) / K for their mean); None: no noise.
        top_k: k, the number of entries of the gradient, those of largest magnitude, that a teacher
            votes by.
        threshold: beta, the share of teachers that must agree.
        settings: see ``Settings``; teachers are critics.

    Raises:
        FedgenError: for contradicting parameters.
    """
    pixels = math.prod(facts.shape)
    if top_k > pixels:
        problem = f"must be at most {pixels}, got {top_k}"
        raise FedgenError("method.top_k", problem, "lower it")
    if threshold >= 1:
        problem = f"must be below 1, got {threshold:g}"
        raise FedgenError("method.threshold", problem, "e.g. 0.2")
    privacy = EnsemblePrivacy(facts, Signs(top_k), settings["critics"])
    nets, batch = networks(facts, settings), settings["batch"]
    step, output = partial(teacher_step, nets, critic_adam(settings)), gs_wgan.image_gradients(nets)
    client = build_critics(
        privacy, noise_multiplier, nets, step, output, generator_loss, batch, facts.shape, settings
    )
    server = EnsembleServer.from_settings(nets, settings)
    program = server.program(partial(generator_step, server, threshold))
    formula = "RDP of a Gaussian of sensitivity 2 sqrt(k) for each image"
    source = "DataLens (Wang et al. 2021), without data-dependent accounting"
    claim = votes_claim(noise_multiplier, batch, formula, source)
    return build_method(privacy, client, program, settings, claim)
