"""G-PATE: scalable private generation via private aggregation of teacher discriminators (Long,
Wang, Yang, Kailkhura, Zhang, Gunter, Li, NeurIPS 2021).

Teachers are those of DataLens (``datalens.py``). For a generated image, a teacher projects the
gradient of its loss to d public random directions, and votes for one of b bins in each. In a round:

    teacher_step      n times: descend -log D(x, y) - log(1 - D(G(z, y), y)), each on its own subset
    query             images = G(latents, labels), and for each a fresh projection R (pixels, d),
                      sent as its seed
    binned            histogram = sum over K of onehot(bin(gradient R)) + N(0, (sqrt(2 d) sigma)^2)
    generator_step    value = centre of the fullest bin, 0 if it has fewer than beta K votes
                      descend R value for each image

One record moves the votes of one teacher, from one bin to another in each of d directions: sqrt(2
d) per image, against the server too. Threshold and fullest bin are functions of the same noisy
histogram.

Differences from the paper: gradients are those of the logit, of which the gradients of -log D are
multiples. In the paper, the threshold is tested on a count with separate noise, at a cost, and
votes are accounted by a data-dependent ε that also controls the number of rounds, which is not a
bound. In the released code, teachers share optimizers (``g_pate_mnist_50`` in
``configs/published.yaml``). Here, teachers have no batch statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Annotated, Literal, Unpack

import torch
from annotated_types import Ge
from torch import Tensor

from fedgen.config.constraints import Fraction
from fedgen.losses.bce import generator_loss
from fedgen.methods import gs_wgan
from fedgen.methods.api import Method, PublicFacts, Query
from fedgen.methods.datalens import teacher_step
from fedgen.methods.families.critic_ensemble import CriticOutput, Settings, critic_adam, networks
from fedgen.methods.families.ensemble_privacy import (
    EnsemblePrivacy,
    build_critics,
    build_method,
    votes_claim,
)
from fedgen.methods.families.ensemble_server import EnsembleServer
from fedgen.models.functional import Tensors
from fedgen.privacy.bounds import OneHot
from fedgen.randomness import RandomStreams

Readout = Literal["fullest", "mean"]


def query(
    server: EnsembleServer, state: Mapping[str, Tensor], round_: int, streams: RandomStreams
) -> Query:
    """Return images, labels, and a fresh seed for the projection of each image, sent in place of
    pixels times d numbers."""
    images = server.query(state, round_, streams)
    projections = streams.at("query", round_).public("projections")
    seeds = torch.randint(2**62, (server.batch,), generator=projections)
    return Query({**images.samples, "seeds": seeds})


def projections(query: Query, directions: int) -> Tensor:
    """Return a Gaussian random projection for each query sample (samples, pixels, d), entries N(0,
    1 / d)."""
    pixels = query.samples["images"][0].numel()
    return _projections(tuple(query.samples["seeds"].tolist()), pixels, directions)


@lru_cache(maxsize=1)  # shared by the stacks of teachers of a query
def _projections(seeds: tuple[int, ...], pixels: int, directions: int) -> Tensor:
    matrices = torch.empty(len(seeds), pixels, directions)
    for matrix, seed in zip(matrices, seeds, strict=True):
        matrix.normal_(generator=torch.Generator().manual_seed(seed))
    return matrices / math.sqrt(directions)


def binned(
    gradients: CriticOutput, directions: int, bins: int, max_projection: float
) -> CriticOutput:
    """Vote for one of ``bins`` equal bins of [-max_projection, max_projection] in each direction,
    one-hot (k, samples, directions, bins); values beyond count for the outer bin on their side."""

    def output(critics: Tensors, query: Query) -> Tensor:
        raw = gradients(critics, query).flatten(2).cpu()
        values = torch.einsum("krp,rpd->krd", raw, projections(query, directions))
        # values that are not finite have no bin
        position = ((values.nan_to_num() / max_projection).clamp(-1, 1) + 1) * bins / 2
        votes = torch.nn.functional.one_hot(position.long().clamp(max=bins - 1), bins).to(values)
        return torch.where(values.isfinite()[..., None], votes, torch.nan)

    return output


def direction(
    histogram: Tensor,
    query: Query,
    bins: int,
    max_projection: float,
    threshold: float,
    readout: Readout,
) -> Tensor:
    """Return the direction (samples, *image) indicated by noisy shares of votes (samples,
    directions, bins)."""
    centres = (2 * torch.arange(bins).to(histogram) + 1 - bins) * max_projection / bins
    values = histogram @ centres
    if readout == "fullest":
        share, fullest = histogram.max(-1)
        values = torch.where(share >= threshold, centres[fullest], 0.0)
    matrices = projections(query, values.shape[1]).to(values)
    return torch.einsum("rpd,rd->rp", matrices, values).view_as(query.samples["images"])


def generator_step(
    server: EnsembleServer,
    read: Callable[[Tensor, Query], Tensor],
    state: Mapping[str, Tensor],
    histogram: Tensor,
    round_: int,
    streams: RandomStreams,
) -> Tensors:
    """Descend the direction that ``read`` finds in the histogram of the round's query."""
    gradients = read(histogram, query(server, state, round_, streams))
    return gs_wgan.generator_step(server, state, gradients, round_, streams)


def g_pate(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    directions: int,
    bins: Annotated[int, Ge(2)],
    max_projection: float,
    threshold: Fraction,
    readout: Readout,
    **settings: Unpack[Settings],
) -> Method:
    """Build G-PATE from public parameters.

    Args:
        noise_multiplier: noise standard deviation over the sensitivity sqrt(2 d) of the sum of
            votes on an image (sqrt(2 d) / K for their mean); None: no noise.
        directions: d, the dimension of projected gradients.
        bins: b, bins per direction.
        max_projection: end of the outer bins.
        threshold: beta, the share of votes that the fullest bin needs.
        readout: "fullest": centre of the fullest bin, as in the paper; "mean": mean of all bins by
            their noisy shares, at the same cost.
        settings: see ``Settings``; teachers are critics.

    Raises:
        FedgenError: for contradicting parameters.
    """
    privacy = EnsemblePrivacy(facts, OneHot(directions), settings["critics"])
    nets, batch = networks(facts, settings), settings["batch"]
    step = partial(teacher_step, nets, critic_adam(settings))
    output = binned(gs_wgan.image_gradients(nets), directions, bins, max_projection)
    client = build_critics(
        privacy,
        noise_multiplier,
        nets,
        step,
        output,
        generator_loss,
        batch,
        (directions, bins),
        settings,
    )
    server = EnsembleServer.from_settings(nets, settings)
    read = partial(
        direction,
        bins=bins,
        max_projection=max_projection,
        threshold=threshold,
        readout=readout,
    )
    program = server.program(partial(generator_step, server, read), query=partial(query, server))
    formula = "RDP of a Gaussian of sensitivity sqrt(2 d) for each image"
    source = "G-PATE (Long et al. 2021), without data-dependent accounting"
    claim = votes_claim(noise_multiplier, batch, formula, source)
    return build_method(privacy, client, program, settings, claim)
