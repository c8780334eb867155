"""Central images: noisy mean images of each label, the first stage of DP-FETA (Li, Gong et al.,
"From Easy to Hard", S&P 2025).

    client    in each of a few rounds, S = Poisson sample of records at rate q:
              (sum over S of half(x) in the block of its label + N(0, (C sigma)^2)) / rows
    server    over q / labels, a mean image of each label: enlarged, median filtered, sharpened

A sample is a central image of its label, rotated, shifted and tinted at random (RandAugment). This
is a poor but inexpensive generator for pre-training other methods (``warm_up=central_images``).

half(x), at half the size, has norm at most C = sqrt(number of values) for any image. ``rows``, of
which each label is assumed to have an equal share, is a public number: the released code divides by
private counts, which no bound covers. It subsamples pixels; here each is the mean of four, which
has at most the same norm and less variance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor
from torch.nn import functional as F

from fedgen.config.constraints import SamplingRate
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.methods.api import Method, PublicFacts, Query, ServerProgram, WorstCase
from fedgen.methods.families.noisy_sums import SumMechanisms, SumQuery, SumSequence
from fedgen.models.functional import Tensors
from fedgen.privacy.batch_sampling import PoissonSampling
from fedgen.privacy.clipping import ClippedSum, sum_of_rows
from fedgen.privacy.events import Unit
from fedgen.randomness import RandomStreams

_OPERATIONS = 2  # operations of RandAugment per sample


@dataclass(frozen=True)
class Server:
    """The central images and samples of them; all of it is post-processing.

    flip: shape of a halved image.
    scale: factor from the block of a label in a mean response to its mean image.
    magnitude: magnitude of RandAugment.
    """

    shape: tuple[int, int, int]
    classes: int
    flip: tuple[int, int, int]
    scale: float
    magnitude: int
    sequence: SumSequence

    def init(self, streams: RandomStreams) -> Tensors:
        """Return grey images."""
        del streams
        return {"images": torch.full((self.sequence.rounds, self.classes, *self.shape), 0.5)}

    def query(
        self, state: Mapping[str, Tensor], round_: int, streams: RandomStreams
    ) -> Query | None:
        """Query the next image of each label."""
        del state, streams
        return None if round_ >= self.sequence.rounds else self.sequence.make_query(round_, {})

    def update(
        self, state: Mapping[str, Tensor], responses: Tensor, round_: int, streams: RandomStreams
    ) -> Tensors:
        """Store another central image of each label."""
        del streams
        means = (responses.cpu().view(self.classes, *self.flip) * self.scale).clamp(0, 1)
        images = state["images"].clone()
        images[round_] = _enlarged(means, self.shape[1:])
        return {**state, "images": images}

    def sample(
        self, weights: Mapping[str, Tensor], labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Return a randomly augmented central image of each label."""
        from torchvision.transforms import RandAugment  # slow to import

        source = streams.public("samples")
        images = weights["images"].cpu()
        choice = torch.randint(0, len(images), (len(labels),), generator=source)
        selected_images = (images[choice, labels] * 255).round().to(torch.uint8)
        augment = RandAugment(_OPERATIONS, self.magnitude)
        with torch.random.fork_rng(devices=[]):  # torchvision uses torch's global generator
            torch.manual_seed(int(torch.randint(0, 2**62, (), generator=source)))
            augmented = [augment(image) for image in selected_images]
        return torch.stack(augmented).float() / 255 if augmented else selected_images.float()

    def membership_scores(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Score images by their distance to the mean central image of their label."""
        del streams
        means = state["images"].cpu().mean(0)[labels.cpu()]
        return -(images.cpu() - means).square().flatten(1).sum(1)


def _enlarged(means: Tensor, side: tuple[int, int]) -> Tensor:
    """Enlarge means (n, c, h / 2, w / 2), remove outlier pixels, and sharpen."""
    from torchvision.transforms.functional import adjust_sharpness

    images = F.interpolate(means, side, mode="bilinear")
    neighbourhoods = F.unfold(
        F.pad(images.flatten(0, 1)[:, None], (1, 1, 1, 1), mode="replicate"), 3
    )
    median: Tensor = neighbourhoods.median(1).values
    sharp: Tensor = adjust_sharpness(median.view_as(images), 2.0)
    return sharp.clamp(0, 1)


def central_images(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    rows: int,
    images: int,
    sampling_rate: SamplingRate,
    magnitude: Annotated[int, Ge(1), Le(30)],
    device: str,
) -> Method:
    """Build central images from public parameters.

    Args:
        noise_multiplier: noise multiplier of all of them together, as one Gaussian without
            subsampling; each has sqrt(images) times as much. None: no noise.
        rows: public number near the number of records of all clients.
        images: images of each label, one per round.
        sampling_rate: q, the probability of each record for each image.
        magnitude: magnitude of RandAugment, at most 30.

    Raises:
        FedgenError: for images with an odd side.
    """
    channels, *sides = facts.shape
    if any(side % 2 for side in sides):
        problem = f"images of {sides[0]} x {sides[1]} pixels cannot be halved"
        raise FedgenError("data", problem, "use a method other than central_images")
    half = (channels, sides[0] // 2, sides[1] // 2)
    clip = math.sqrt(math.prod(half))

    def halved(shared: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> ClippedSum:
        del shared
        small = F.avg_pool2d(images, 2).flatten(1)
        return sum_of_rows(small, clip, labels, facts.classes)

    sampling = PoissonSampling(sampling_rate)
    mechanism = SumMechanisms(facts, noise_multiplier, rows).mechanism(
        repeats=images, clip=clip, sampling=sampling, max_entry=1 / clip
    )
    size = facts.classes * math.prod(half)
    sequence = SumSequence((SumQuery("central", size, mechanism, halved, images),), device)
    # at client level, a client contributes the mean over all of its records
    rate = 1.0 if facts.unit is Unit.CLIENT else sampling_rate
    server = Server(facts.shape, facts.classes, half, facts.classes / rate, magnitude, sequence)
    amplified_by = f"secret Poisson sampling at rate {sampling_rate:.4g}" if rate < 1 else None
    return sequence.build(
        ServerProgram(
            init=server.init,
            query=server.query,
            update=server.update,
            generator=lambda state: {"images": state["images"]},
            sample=server.sample,
            membership_scores=server.membership_scores,
        ),
        sequence.plan(
            "none" if amplified_by is None else f"Poisson sampling at rate {sampling_rate:.4g}",
            amplified_by,
            ("RDP of the sampled Gaussian", "DP-FETA (Li, Gong et al. 2025)"),
            sequence.rounds,
        ),
        facts.clients,
        lambda: [_worst_case(sequence, facts.shape)],
    )


def _worst_case(sequence: SumSequence, shape: tuple[int, int, int]) -> WorstCase:
    """Return a white image and no image."""
    one = Shard(torch.full((1, *shape), 255, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    none = Shard(one.images[:0], one.labels[:0])
    return sequence.worst_case("central", {}, ({}, one), ({}, none))
