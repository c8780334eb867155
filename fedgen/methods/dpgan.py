"""DPGAN: a GAN whose discriminator is trained by DP-SGD (Bie, Kamath, Zhang, "Private GANs,
revisited", TMLR 2023, algorithm 1).

What touches private rows is, in each discriminator step, a sum of clipped gradients over a Poisson
batch, plus noise. All else is post-processing:

    client    n_D times:  S = rows drawn one by one with probability q
                          g = sum over S of clip(grad -log D(x, y); C) + N(0, (C sigma)^2)
                          descend (g + sum over B fakes of clip(grad -log(1 - D(x, y)); C)) / 2B
    server    the mean of the clients' discriminators, then: descend -log D(G(z, y), y)

With one client that is algorithm 1. Of several, each noises in full; or all of them answer sums,
and the server takes the steps (``privacy.aggregation``): algorithm 1 again, on all rows together.
n_D is fixed or adaptive (section 6.2): it climbs 1, 2, 5, 10, 20, 50, ... when too few fakes are
told from real rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedgen.adversarial import (
    Descent,
    Networks,
    Pace,
    Server,
    method_of,
    networks,
)
from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.gradient_sums import gradient_sum
from fedgen.losses.adversarial import Loss, logistic
from fedgen.method import Method, PublicFacts
from fedgen.models.functional import Tensors
from fedgen.parameters import Betas, ClipNorm, Decay, NonNegative
from fedgen.privacy.mechanisms import GradientSum
from fedgen.privacy.per_example import ClippedSum, Precision, clipped_sum


@dataclass(frozen=True)
class Discriminator:
    """Lines 4 to 9 of algorithm 1."""

    nets: Networks
    mechanism: GradientSum
    loss: Loss
    fakes: int
    clip: float
    precision: Precision

    def of_rows(
        self, discriminator: Tensors, generator: Tensors, shard: Shard, coins: Coins
    ) -> Iterator[ClippedSum]:
        """Over the parts of a step's batch of real rows."""
        del generator
        private = shard.on(self.nets.device)
        for batch in self.mechanism.parts(len(shard), coins, self.nets.at_once):
            images, labels = private.rows(torch.from_numpy(batch))
            yield self._gradients(discriminator, images, labels, real=True)

    def gradient(
        self, discriminator: Tensors, generator: Tensors, noised: Tensor, coins: Coins
    ) -> Tensor:
        """That of real rows, and as much of fakes."""
        latents, labels = self.nets.inputs(self.fakes, coins)
        about = self.nets.at_once
        pairs = zip(torch.split(latents, about), torch.split(labels, about), strict=True)
        with torch.no_grad():
            images = torch.cat([self.nets.generate(generator, *pair) for pair in pairs])
        fakes = self._gradients(discriminator, images, labels, real=False).flat()
        return (noised + (fakes / self.fakes).to(noised)) / 2

    def _gradients(
        self, discriminator: Tensors, images: Tensor, labels: Tensor, real: bool
    ) -> ClippedSum:
        """The sum of the clipped gradients of each example's own loss with respect to the
        discriminator's weights."""
        return clipped_sum(
            self.nets.discriminator,
            discriminator,
            (images, labels),
            self.loss.real if real else self.loss.fake,
            self.clip,
            precision=self.precision if real or self.precision != "float64" else "float32",
        )


def dpgan(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    generator: Callable[..., nn.Module],
    discriminator: Callable[..., nn.Module],
    latent: int,
    batch: int,
    fakes: int,
    sampling_rate: float,
    discriminator_steps: int | Literal["adaptive"],
    accuracy_floor: float,
    accuracy_ema: Decay,
    discriminator_learning_rate: float,
    generator_learning_rate: float,
    betas: Betas,
    clip: ClipNorm,
    ema: Decay,
    mode_seeking: NonNegative,
    precision: Precision,
    device: str,
    loss: Callable[[], Loss] = logistic,
) -> Method:
    """DPGAN for these public parameters.

    Args:
        noise_multiplier: noise std over the clip norm C; None neither clips nor noises.
        batch: B, the expected number of real rows that their sum is divided by: a public number;
            of each client, or of all where they answer sums.
        fakes: of a step of either network; B in the paper.
        sampling_rate: q, the probability that a step takes a row; one public number for all
            clients, since a batch size over a private number of rows would reveal that number.
        discriminator_steps: n_D, or ``adaptive``.
        accuracy_floor: d, of adaptive n_D. accuracy_ema: beta, the decay of the average accuracy on
            fakes that is held against it.
        discriminator_learning_rate, generator_learning_rate, betas: of Adam.
        clip: C, of each example's gradient.
        ema: decay of the average of the generator that is published; 0 publishes the last one.
        mode_seeking: weight of ``mode_seeking_loss``; not in the paper, 0 leaves it out.
        precision: of the discriminator's gradients of real rows (see ``clipped_sum``); noise is
            exact.
        loss: of both sides; ``logistic`` in the paper.

    Raises:
        FedgenError: for a sampling rate or an accuracy that is none, or fakes without pairs.
    """
    if accuracy_floor > 1:
        problem = f"is a share, got {accuracy_floor:g}"
        raise FedgenError("method.accuracy_floor", problem, "take one between 0 and 1, e.g. 0.6")
    if mode_seeking and fakes % 2:
        problem = f"come in pairs where method.mode_seeking is not 0, got {fakes}"
        raise FedgenError("method.fakes", problem, "take an even number")
    nets = networks(facts, generator, discriminator, latent, device)
    mechanism = gradient_sum(facts, noise_multiplier, clip, batch, sampling_rate)
    clip = clip if noise_multiplier is not None else math.inf
    steps = Discriminator(nets, mechanism, loss(), fakes, clip, precision)
    descent = Descent((discriminator_learning_rate, betas), steps.gradient, generator=False)
    server = Server(
        nets,
        fakes,
        Pace(discriminator_steps, accuracy_floor, accuracy_ema),
        (generator_learning_rate, betas),
        ema,
        loss().generator,
        True,
        mode_seeking,
    )
    source = "Private GANs, revisited (Bie, Kamath, Zhang 2023), section 4"
    return method_of(facts, server, mechanism, steps.of_rows, descent, sampling_rate, source)
