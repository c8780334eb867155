"""G-PATE: scalable private generation via private aggregation of teacher discriminators (Long,
Wang, Yang, Kailkhura, Zhang, Gunter, Li, NeurIPS 2021).

Teachers are DataLens' (``datalens.py``). Asked about a generated image, a teacher projects its
loss' gradient to d random directions that everybody knows, and votes in each for one of b bins. In
a round:

    teachers         n times: descend -log D(x, y) - log(1 - D(G(z, y), y)), each on its own part
    generator        images = G(latents, labels), and for each a fresh projection R (pixels, d),
                     of which its seed travels
    teachers         histogram = sum over K of onehot(bin(gradient R)) + N(0, (sqrt(2 d) sigma)^2)
    generator        value = middle of the fullest bin, 0 if fewer than beta K are in it
                     descends R value for each image

One record moves one teacher's votes, from one bin to another in each of d directions: sqrt(2 d) for
each image, against the server too. Threshold and fullest bin are read off the same noisy histogram.

Where this file leaves the paper: gradients are the logit's, which those of -log D are multiples
of. The threshold there is tested on a count with noise of its own, at a price, and votes are
counted by an epsilon that depends on them and steers the number of rounds, which is no bound. In
the released code teachers share optimizers (``configs/published/g_pate_mnist_50.yaml``). Teachers
have no batch statistics.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Literal, Unpack

import torch
from torch import Tensor

from fedgen.coins import Coins
from fedgen.ensemble.answering import Answering, claim_of_votes, critics_of, method_of
from fedgen.ensemble.critics import Ballot, Losses, Settings, image_gradients, networks
from fedgen.ensemble.server import Generator
from fedgen.errors import FedgenError
from fedgen.losses.bce import discriminator_loss, generator_loss
from fedgen.method import Method, PublicFacts, Query
from fedgen.models.functional import Tensors
from fedgen.parameters import NonNegative
from fedgen.privacy.bounds import OneHot

Reading = Literal["fullest", "mean"]


def seeds(rows: int, coins: Coins) -> Tensors:
    """For each row a fresh seed, which everybody makes its projection of: it travels in place of
    pixels times directions numbers."""
    return {"seeds": torch.randint(2**62, (rows,), generator=coins.public("projections"))}


def projections(query: Query, directions: int) -> Tensor:
    """For each row a Gaussian random projection (rows, pixels, directions), of entries
    N(0, 1 / directions)."""
    pixels = query.rows["images"][0].numel()
    return _projections(tuple(query.rows["seeds"].tolist()), pixels, directions)


@lru_cache(maxsize=1)  # stacks of teachers are asked one after the other
def _projections(seeds: tuple[int, ...], pixels: int, directions: int) -> Tensor:
    found = torch.empty(len(seeds), pixels, directions)
    for row, seed in zip(found, seeds, strict=True):
        row.normal_(generator=torch.Generator().manual_seed(seed))
    return found / math.sqrt(directions)


def binned(gradients: Ballot, directions: int, bins: int, reach: float) -> Ballot:
    """Votes for one of ``bins`` equal bins of [-reach, reach] in each direction, one-hot
    (k, rows, directions, bins); what lies beyond counts for the bin at the end."""

    def ballot(critics: Tensors, query: Query) -> Tensor:
        raw = gradients(critics, query).flatten(2).cpu()
        values = torch.einsum("krp,rpd->krd", raw, projections(query, directions))
        # through a finite range first: what is not finite has no bin
        at = ((values.nan_to_num() / reach).clamp(-1, 1) + 1) * bins / 2
        votes = torch.nn.functional.one_hot(at.long().clamp(max=bins - 1), bins).to(values)
        return torch.where(values.isfinite()[..., None], votes, torch.nan)

    return ballot


def read(
    histogram: Tensor, query: Query, bins: int, reach: float, threshold: float, reading: Reading
) -> Tensor:
    """The direction (rows, *image) that noisy shares of votes (rows, directions, bins) tell."""
    middles = (2 * torch.arange(bins).to(histogram) + 1 - bins) * reach / bins
    values = histogram @ middles
    if reading == "fullest":
        share, place = histogram.max(-1)
        values = torch.where(share >= threshold, middles[place], 0.0)
    along = projections(query, values.shape[1]).to(values)
    return torch.einsum("rpd,rd->rp", along, values).view_as(query.rows["images"])


def g_pate(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    directions: int,
    bins: int,
    reach: float,
    threshold: NonNegative,
    reading: Reading,
    **settings: Unpack[Settings],
) -> Method:
    """G-PATE for these public parameters.

    Args:
        noise_multiplier: noise std over the sensitivity sqrt(2 d) of the sum of all votes about an
            image (sqrt(2 d) / K of their mean); None does not noise.
        directions: d, that the gradient of an image is projected to.
        bins: b, of a direction. reach: where the last of them end.
        threshold: beta, the share of teachers that the fullest bin needs.
        reading: "fullest" takes the middle of the fullest bin (the paper's), "mean" that of all
            bins by their noisy shares, for the same price.
        settings: see ``Settings``; teachers are its critics.

    Raises:
        FedgenError: for parameters that contradict each other.
    """
    if bins < 2:
        raise FedgenError("method.bins", f"{bins} leave nothing to vote on", "take at least 2")
    if threshold > 1:
        problem = f"is a share of the teachers, got {threshold:g}"
        raise FedgenError("method.threshold", problem, "take one of at most 1, e.g. 0.5")
    answering = Answering(facts, OneHot(directions), settings["critics"])
    nets, batch = networks(facts, settings), settings["batch"]
    losses = Losses(discriminator_loss, generator_loss)
    ballot = binned(image_gradients(nets), directions, bins, reach)
    client = critics_of(
        answering, noise_multiplier, nets, losses, ballot, batch, (directions, bins), settings
    )
    server = Generator.of(
        nets,
        settings,
        read=partial(read, bins=bins, reach=reach, threshold=threshold, reading=reading),
        asks=seeds,
    )
    formula = "RDP of a Gaussian of sensitivity sqrt(2 d) for each image"
    source = "G-PATE (Long et al. 2021), without what depends on the votes"
    claim = claim_of_votes(noise_multiplier, batch, formula, source)
    return method_of(answering, client, server.program(), settings, claim)
