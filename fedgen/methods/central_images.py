"""Central images: noised means of each label's images, the first stage of DP-FETA (Li, Gong et al.,
"From Easy to Hard", S&P 2025).

    client    in each of a few rounds, S = rows drawn one by one with probability q:
              (sum over S of half(x) in the block of its label + N(0, (C sigma)^2)) / rows
    server    over q / labels, a mean image of each label: at full size again, median, sharpened

A sample is one of its label's central images, turned, shifted and tinted at random (RandAugment).
It is a poor generator that costs little: what others begin with (``warm_up=central_images``).

half(x), at half the size, has norm C = sqrt(numbers in it) at most, whatever it shows. ``rows``, of
which each label is taken to have an equal share, is a public number: the released code divides by
private counts, which no bound covers. It takes every other pixel; here each is the mean of four, as
long at most, and with less chance in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.method import Method, PublicFacts, Query, ServerProgram, WorstCase
from fedgen.models.functional import Tensors
from fedgen.privacy.batches import PoissonBatches
from fedgen.privacy.events import Unit
from fedgen.privacy.per_example import ClippedSum, of_rows
from fedgen.sequence import Asked, Sums, SumSequence

_OPERATIONS = 2  # of RandAugment, on each sample


@dataclass(frozen=True)
class Server:
    """The central images, and samples of them: post-processing.

    scale: from a label's part of a mean answer to its mean image. magnitude: of RandAugment.
    """

    shape: tuple[int, int, int]
    classes: int
    half: tuple[int, int, int]
    scale: float
    magnitude: int
    sequence: SumSequence

    def init(self, coins: Coins) -> Tensors:
        """Grey."""
        del coins
        return {"images": torch.full((self.sequence.rounds, self.classes, *self.shape), 0.5)}

    def query(self, state: Mapping[str, Tensor], round_: int, coins: Coins) -> Query | None:
        """The next of each label's images."""
        del state, coins
        return None if round_ >= self.sequence.rounds else self.sequence.question(round_, {})

    def update(
        self, state: Mapping[str, Tensor], answers: Tensor, round_: int, coins: Coins
    ) -> Tensors:
        """One central image more of each label."""
        del coins
        means = (answers.cpu().view(self.classes, *self.half) * self.scale).clamp(0, 1)
        images = state["images"].clone()
        images[round_] = _enlarged(means, self.shape[1:])
        return {**state, "images": images}

    def sample(self, weights: Mapping[str, Tensor], labels: Tensor, coins: Coins) -> Tensor:
        """Of each label a central image, changed at random."""
        from torchvision.transforms import RandAugment  # slow: it imports torch's compiler

        source = coins.public("samples")
        images = weights["images"].cpu()
        which = torch.randint(0, len(images), (len(labels),), generator=source)
        drawn = (images[which, labels] * 255).round().to(torch.uint8)
        augment = RandAugment(_OPERATIONS, self.magnitude)
        with torch.random.fork_rng(devices=[]):  # torchvision draws from torch's own source
            torch.manual_seed(int(torch.randint(0, 2**62, (), generator=source)))
            changed = [augment(image) for image in drawn]
        return torch.stack(changed).float() / 255 if changed else drawn.float()

    def recognize(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, coins: Coins
    ) -> Tensor:
        """By how much an image is like its label's."""
        del coins
        near = state["images"].cpu().mean(0)[labels.cpu()]
        return -(images.cpu() - near).square().flatten(1).sum(1)


def _enlarged(means: Tensor, side: tuple[int, int]) -> Tensor:
    """Means (n, c, h / 2, w / 2) at their full size, without single pixels that stand out, and
    sharpened."""
    from torchvision.transforms.functional import adjust_sharpness

    images = F.interpolate(means, side, mode="bilinear")
    around = F.unfold(F.pad(images.flatten(0, 1)[:, None], (1, 1, 1, 1), mode="replicate"), 3)
    median: Tensor = around.median(1).values
    sharp: Tensor = adjust_sharpness(median.view_as(images), 2.0)
    return sharp.clamp(0, 1)


def central_images(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    rows: int,
    images: int,
    sampling_rate: float,
    magnitude: int,
    device: str,
) -> Method:
    """Central images for these public parameters.

    Args:
        noise_multiplier: of all of them together, as of one Gaussian without draws; each has
            sqrt(images) times as much. None: no noise.
        rows: a public number near that of all clients' rows.
        images: of each label, one a round. sampling_rate: q, of each row for each of them.
        magnitude: of RandAugment's changes, of 30.

    Raises:
        FedgenError: for a sampling rate that is none, or images that cannot be halved.
    """
    if sampling_rate > 1:
        problem = f"is a share, got {sampling_rate:g}"
        raise FedgenError("method.sampling_rate", problem, "take at most 1")
    if magnitude > 30:
        raise FedgenError("method.magnitude", f"{magnitude} is above 30", "e.g. 3")
    channels, *sides = facts.shape
    if any(side % 2 for side in sides):
        problem = f"images of {sides[0]} x {sides[1]} pixels cannot be halved"
        raise FedgenError("data", problem, "take another method than central_images")
    half = (channels, sides[0] // 2, sides[1] // 2)
    clip = math.sqrt(math.prod(half))

    def halved(shared: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> ClippedSum:
        del shared
        small = F.avg_pool2d(images, 2).flatten(1)
        return of_rows(small, clip, labels, facts.classes)

    batches = PoissonBatches(sampling_rate)
    mechanism = Sums(facts, noise_multiplier, rows).mechanism(
        repeats=images, clip=clip, batches=batches, peak=1 / clip
    )
    size = facts.classes * math.prod(half)
    sequence = SumSequence((Asked("central", size, mechanism, halved, images),), device)
    # at client level a client's part is the mean over all of its rows
    drawn = 1.0 if facts.unit is Unit.CLIENT else sampling_rate
    server = Server(facts.shape, facts.classes, half, facts.classes / drawn, magnitude, sequence)
    by = f"secret Poisson draw of rows at rate {sampling_rate:.4g}" if drawn < 1 else None
    return sequence.method(
        ServerProgram(
            init=server.init,
            query=server.query,
            update=server.update,
            generator=lambda state: {"images": state["images"]},
            sample=server.sample,
            recognize=server.recognize,
        ),
        sequence.plan(
            "none" if by is None else f"Poisson draw of rows at rate {sampling_rate:.4g}",
            by,
            ("RDP of the sampled Gaussian", "DP-FETA (Li, Gong et al. 2025)"),
            sequence.rounds,
        ),
        facts.clients,
        lambda: [_worst_case(sequence, facts.shape)],
    )


def _worst_case(sequence: SumSequence, shape: tuple[int, int, int]) -> WorstCase:
    """A white image against none."""
    row = Shard(torch.full((1, *shape), 255, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    none = Shard(row.images[:0], row.labels[:0])
    return sequence.worst_case("central", {}, ({}, row), ({}, none))
