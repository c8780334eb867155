"""DPGAN: a GAN with a discriminator trained by DP-SGD (Bie, Kamath, Zhang, "Private GANs,
revisited", TMLR 2023, algorithm 1).

In each discriminator step, private records enter one sum of clipped gradients over a Poisson batch,
plus noise. Everything else is post-processing:

    client    n_D times:  S = Poisson sample of records at rate q
                          g = sum over S of clip(grad -log D(x, y); C) + N(0, (C sigma)^2)
                          descend (g + sum over B fakes of clip(grad -log(1 - D(x, y)); C)) / 2B
    server    average the discriminators of the clients, then descend -log D(G(z, y), y)

With one client this is algorithm 1. With several, each adds the full noise, or they all respond
with sums and the server takes the steps (``privacy.aggregation``): algorithm 1 on all records. n_D
is fixed or adaptive (section 6.2): it increases through 1, 2, 5, 10, 20, 50, ... when too few fakes
are recognized.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedgen.config.constraints import (
    Betas,
    ClipNorm,
    Decay,
    NonNegative,
    PositiveFraction,
    SamplingRate,
)
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.losses.adversarial import Loss, logistic
from fedgen.methods.api import Method, PublicFacts
from fedgen.methods.families.dp_sgd import gradient_sum
from fedgen.methods.families.gan import (
    Descent,
    Networks,
    Server,
    StepsPerGeneratorStep,
    build_method,
    networks,
)
from fedgen.models.factories import GeneratorFactory, ImageNetworkFactory
from fedgen.models.functional import Tensors
from fedgen.privacy.clipping import ClippedSum, Precision, clipped_sum
from fedgen.privacy.mechanisms import GradientSum
from fedgen.randomness import RandomStreams


@dataclass(frozen=True)
class Discriminator:
    """Lines 4 to 9 of algorithm 1."""

    nets: Networks
    mechanism: GradientSum
    loss: Loss
    fakes: int
    clip: float
    precision: Precision

    def record_gradients(
        self, discriminator: Tensors, generator: Tensors, shard: Shard, streams: RandomStreams
    ) -> Iterator[ClippedSum]:
        """Yield clipped sums over the parts of a batch of real records."""
        del generator
        private = shard.on(self.nets.device)
        for batch in self.mechanism.batch_parts(len(shard), streams, self.nets.at_once):
            images, labels = private.rows(torch.from_numpy(batch))
            yield self._gradients(discriminator, images, labels, real=True)

    def gradient(
        self, discriminator: Tensors, generator: Tensors, noised: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Return the mean of the noisy gradient of real records and that of fakes."""
        latents, labels = self.nets.inputs(self.fakes, streams)
        at_once = self.nets.at_once
        pairs = zip(torch.split(latents, at_once), torch.split(labels, at_once), strict=True)
        with torch.no_grad():
            images = torch.cat([self.nets.generate(generator, *pair) for pair in pairs])
        fakes = self._gradients(discriminator, images, labels, real=False).flat()
        return (noised + (fakes / self.fakes).to(noised)) / 2

    def _gradients(
        self, discriminator: Tensors, images: Tensor, labels: Tensor, real: bool
    ) -> ClippedSum:
        """Return the sum of the clipped gradients of each example's loss."""
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
    generator: GeneratorFactory,
    discriminator: ImageNetworkFactory,
    latent: int,
    batch: int,
    fakes: int,
    sampling_rate: SamplingRate | None,
    rows: int | None = None,
    discriminator_steps: int | Literal["adaptive"],
    accuracy_floor: PositiveFraction,
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
    """Build DPGAN from public parameters.

    Args:
        noise_multiplier: noise standard deviation over the clip norm C; None: no clipping, no
            noise.
        batch: B, the expected number of real records that their sum is divided by, a public number;
            of each client, or of all clients together if they respond with sums.
        fakes: fakes per step of either network; B in the paper.
        sampling_rate: q, the probability of each record in a step; one public number for all
            clients, because a batch size over a private number of records would reveal that number.
            None: derived from ``batch`` and ``rows``, see ``gradient_sum``.
        rows: public estimate of the number of records of all clients.
        discriminator_steps: n_D, or ``adaptive``.
        accuracy_floor: d, the threshold of adaptive n_D.
        accuracy_ema: beta, the decay of the average accuracy on fakes that is compared with it.
        discriminator_learning_rate, generator_learning_rate, betas: parameters of Adam.
        clip: C, for each example's gradient.
        ema: decay of the moving average of the published generator; 0: the last one.
        mode_seeking: weight of ``mode_seeking_loss``, which is not in the paper; 0: none.
        precision: precision of the gradients of real records (see ``clipped_sum``); noise is exact.
        loss: loss of both sides; ``logistic`` in the paper.

    Raises:
        FedgenError: for an invalid sampling rate or accuracy, or an odd number of paired fakes.
    """
    if mode_seeking and fakes % 2:
        problem = f"must be even if method.mode_seeking is not 0, got {fakes}"
        raise FedgenError("method.fakes", problem, "use an even number")
    nets = networks(facts, generator, discriminator, latent, device)
    mechanism = gradient_sum(facts, noise_multiplier, clip, batch, sampling_rate, rows)
    clip = clip if noise_multiplier is not None else math.inf
    steps = Discriminator(nets, mechanism, loss(), fakes, clip, precision)
    descent = Descent((discriminator_learning_rate, betas), steps.gradient, needs_generator=False)
    server = Server(
        nets,
        fakes,
        StepsPerGeneratorStep(discriminator_steps, accuracy_floor, accuracy_ema),
        (generator_learning_rate, betas),
        ema,
        loss().generator,
        True,
        mode_seeking,
    )
    source = "Private GANs, revisited (Bie, Kamath, Zhang 2023), section 4"
    return build_method(facts, server, mechanism, steps.record_gradients, descent, source)
