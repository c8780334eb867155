"""DataLens: private generation by gradient compression and aggregation (Wang, Wu, Long, Rimanic,
Zhang, Li, CCS 2021).

Teachers, discriminators on disjoint parts of the private data, train without noise and never leave.
A teacher that is asked about a generated image votes by the signs of the k largest numbers of its
loss' gradient with respect to the image (TopAgg; the logit's gradient has the same). In a round:

    teachers         n times: descend -log D(x, y) - log(1 - D(G(z, y), y)), each on its own part
    generator        images = G(latents, labels)
    teachers         votes = sum over K of sign(top_k(gradient)) + N(0, (2 sqrt(k) sigma)^2)
    generator        descends +1 for each pixel where votes > beta K, -1 where votes < -beta K

One record moves one teacher's vote, at most to its opposite: 2 sqrt(k) for each image, against the
server too. One client holds K teachers (record level); of many clients each holds one (user level).

Where this file leaves the released code: rows are split by position in a public permutation, and
each teacher has an optimizer of its own. There, one label moves the parts of all teachers, and 80
teachers share an optimizer: no epsilon holds for it (``configs/published/datalens_mnist.yaml``).
Teachers have no batch statistics. Signs drawn at random and the votes' data-dependent epsilon are
left out.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Unpack

from torch import Tensor

from fedgen.ensemble.answering import Answering, claim_of_votes, critics_of, method_of
from fedgen.ensemble.critics import Losses, Settings, image_gradients, networks
from fedgen.ensemble.server import Generator
from fedgen.errors import FedgenError
from fedgen.losses.bce import discriminator_loss, generator_loss
from fedgen.method import Method, PublicFacts, Query
from fedgen.parameters import NonNegative
from fedgen.privacy.bounds import Signs


def agreed(votes: Tensor, query: Query, threshold: float) -> Tensor:
    """The direction that more than ``threshold`` of the teachers agree on in each pixel: +1, -1 or
    none. ``votes``: their noisy mean."""
    del query
    return (votes > threshold).to(votes) - (votes < -threshold).to(votes)


def datalens(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    largest: int,
    threshold: NonNegative,
    **settings: Unpack[Settings],
) -> Method:
    """DataLens for these public parameters.

    Args:
        noise_multiplier: noise std over the sensitivity 2 sqrt(k) of the sum of all votes about an
            image (2 sqrt(k) / K of their mean); None does not noise.
        largest: k, numbers of an image's gradient that a teacher votes by.
        threshold: beta, the share of teachers that has to agree.
        settings: see ``Settings``; teachers are its critics.

    Raises:
        FedgenError: for parameters that contradict each other.
    """
    pixels = math.prod(facts.shape)
    if largest > pixels:
        problem = f"{largest} signs of {pixels} numbers"
        raise FedgenError("method.largest", problem, f"take at most {pixels}")
    if threshold >= 1:
        problem = f"is a share of the teachers, got {threshold:g}"
        raise FedgenError("method.threshold", problem, "take one below 1, e.g. 0.2")
    answering = Answering(facts, Signs(largest), settings["critics"])
    nets, batch = networks(facts, settings), settings["batch"]
    losses = Losses(discriminator_loss, generator_loss)
    ballot = image_gradients(nets)
    client = critics_of(
        answering, noise_multiplier, nets, losses, ballot, batch, facts.shape, settings
    )
    server = Generator.of(nets, settings, read=partial(agreed, threshold=threshold))
    formula = "RDP of a Gaussian of sensitivity 2 sqrt(k) for each image"
    source = "DataLens (Wang et al. 2021), without what depends on the votes"
    claim = claim_of_votes(noise_multiplier, batch, formula, source)
    return method_of(answering, client, server.program(), settings, claim)
