"""DPGAN: a GAN with a discriminator trained by DP-SGD (Bie, Kamath, Zhang, "Private GANs,
revisited", TMLR 2023, algorithm 1).

In each discriminator step, private records enter one sum of clipped gradients over a Poisson batch,
plus noise. Everything else is post-processing. One round:

    n_D times:
        record_gradients      S = Poisson sample of records at rate q
                              g = sum over S of clip(grad -log D(x, y); C),
                              released as g + N(0, (C sigma)^2)
        discriminator_step    descend (g + sum over B fakes of clip(grad -log(1 - D(x, y)); C)) / 2B
    generator_step            descend -log D(G(z, y), y)

Batches, clipping and noise: ``SumGaussian`` in ``privacy/mechanisms.py``. With one client this is
algorithm 1. With several, each takes n_D steps with the full noise and the server averages their
discriminators, or they all respond with sums and the server takes the steps
(``privacy.aggregation``): algorithm 1 on all records. n_D is fixed or adaptive (section 6.2): it
increases through 1, 2, 5, 10, 20, 50, ... when too few fakes are recognized.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
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
from fedgen.losses.mode_seeking import mode_seeking_loss
from fedgen.methods.api import Method, PublicFacts
from fedgen.methods.families.dp_sgd import gradient_sum
from fedgen.methods.families.gan import (
    Networks,
    StepsPerGeneratorStep,
    build_method,
    discriminator_descent,
    networks,
)
from fedgen.models.factories import GeneratorFactory, ImageNetworkFactory
from fedgen.models.functional import (
    Adam,
    Tensors,
    descend_generator,
    part,
    trainable,
    weight_gradients,
)
from fedgen.privacy.clipping import ClippedSum, Precision, clipped_sum
from fedgen.privacy.mechanisms import GradientSum
from fedgen.randomness import RandomStreams


@dataclass(frozen=True)
class Gan:
    """Algorithm 1.

    fakes: number of fakes of each step (B).
    clip: clip norm (C); infinity disables clipping.
    precision: floating-point precision of the gradients of real records.
    mode_seeking: weight of the mode-seeking loss.
    ema: decay of the moving average of the generator.
    """

    nets: Networks
    mechanism: GradientSum
    loss: Loss
    fakes: int
    clip: float
    precision: Precision
    discriminator_adam: Adam
    generator_adam: Adam
    mode_seeking: float
    ema: float
    sums_need_generator: bool = False

    def record_gradients(
        self, discriminator: Tensors, generator: Tensors, shard: Shard, streams: RandomStreams
    ) -> Iterator[ClippedSum]:
        """Yield clipped sums over the parts of a batch of real records (lines 4 and 6)."""
        del generator
        private = shard.on(self.nets.device)
        for batch in self.mechanism.batch_parts(shard, streams, self.nets.at_once):
            images, labels = private.rows(torch.from_numpy(batch))
            yield self._clipped_sum(discriminator, images, labels, real=True)

    def discriminator_step(
        self, point: Tensors, generator: Tensors, noised: Tensor, streams: RandomStreams
    ) -> Tensors:
        """Take a step of Adam along the mean of the noisy gradient of real records and that of
        fakes (lines 5 to 8)."""
        latents, labels = self.nets.inputs(self.fakes, streams)
        at_once = self.nets.at_once
        pairs = zip(torch.split(latents, at_once), torch.split(labels, at_once), strict=True)
        with torch.no_grad():
            images = torch.cat([self.nets.generate(generator, *pair) for pair in pairs])
        fakes = self._clipped_sum(part(point, "weights"), images, labels, real=False).flat()
        gradient = (noised + (fakes / self.fakes).to(noised)) / 2
        return discriminator_descent(point, gradient, self.discriminator_adam)

    def generator_step(
        self, state: Mapping[str, Tensor], discriminator: Tensors, streams: RandomStreams
    ) -> tuple[Tensors, Tensor]:
        """Take a step of Adam on the loss of B fakes (lines 11 to 13); also return their logits."""
        latents, labels = self.nets.inputs(self.fakes, streams)
        if self.mode_seeking:
            labels = labels[: self.fakes // 2].repeat(2)
        leaves = trainable(part(state, "generator"))
        images = self.nets.generate(leaves, latents, labels)
        logits = self.nets.discriminate(discriminator, images, labels)
        loss = self.loss.generator(logits).mean()
        if self.mode_seeking:
            loss = loss + self.mode_seeking * mode_seeking_loss(images, latents)
        gradients = weight_gradients(loss, leaves)
        next_state = descend_generator(state, gradients, self.generator_adam, self.ema)
        return next_state, logits.detach()

    def _clipped_sum(
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
    gan = Gan(
        nets,
        mechanism,
        loss(),
        fakes,
        clip,
        precision,
        (discriminator_learning_rate, betas),
        (generator_learning_rate, betas),
        mode_seeking,
        ema,
    )
    pace = StepsPerGeneratorStep(discriminator_steps, accuracy_floor, accuracy_ema)
    source = "Private GANs, revisited (Bie, Kamath, Zhang 2023), section 4"
    return build_method(facts, gan, pace, source, is_logit=True)
