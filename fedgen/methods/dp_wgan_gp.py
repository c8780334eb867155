"""DP-WGAN-GP: a Wasserstein GAN with gradient penalty whose critic is trained by DP-SGD
(Schwabedal, Michel, Riontino, "Differentially Private Generation of Small Images", 2020, algorithm
2, after Zhang, Ji, Wang 2018).

    n_critic times:
        record_gradients      S = Poisson sample of records at rate q
                              for each x in S: a fake G(z) and rho of its own
                              L = D(G(z)) - D(x) + lambda (|grad D(rho x + (1 - rho) G(z))| - 1)^2
                              g = sum over S of clip(grad L; C),
                              released as g + N(0, (C sigma)^2)
        discriminator_step    descend g / B
    generator_step            descend -D(G(z))

Several clients: see ``dpgan.py``. B is the expected size of S: dividing by the realized size, as in
the paper, would reveal it. Fakes have the label of the record that they are paired with; the paper
has no labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad

from fedgen.config.constraints import Betas, ClipNorm, Decay, NonNegative, SamplingRate
from fedgen.data.datasets import Shard
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
from fedgen.privacy.clipping import ClippedSum, by_vmap
from fedgen.privacy.mechanisms import GradientSum
from fedgen.randomness import RandomStreams


@dataclass(frozen=True)
class Gan:
    """Algorithm 2.

    penalty: lambda.
    clip: C; infinity: none.
    batch: fakes of a generator step.
    adam: learning rate and betas of both networks.
    ema: decay of the moving average of the generator.
    """

    nets: Networks
    mechanism: GradientSum
    penalty: float
    clip: float
    batch: int
    adam: Adam
    ema: float
    sums_need_generator: bool = True

    def record_gradients(
        self, critic: Tensors, generator: Tensors, shard: Shard, streams: RandomStreams
    ) -> Iterator[ClippedSum]:
        """Yield clipped sums over the parts of a batch (lines 4 to 10)."""
        private, latent = shard.on(self.nets.device), self.nets.latent
        for number, batch in enumerate(self.mechanism.batch_parts(shard, streams, 64)):
            images, labels = private.rows(torch.from_numpy(batch))
            # secret streams: with public ones, removing a record would change the pairs after it
            uniforms = streams.secret_uniforms(len(batch) * (latent + 1), "pairs", number)
            random_numbers = torch.from_numpy(uniforms).add_(2.0**-54).view(len(batch), latent + 1)
            latents = torch.special.ndtri(random_numbers[:, 1:]).to(images)
            with torch.no_grad():
                fakes = self.nets.generate(generator, latents, labels)
            inputs = images, labels, fakes, random_numbers[:, 0].to(images)
            yield by_vmap(self._loss, critic, inputs, self.clip)

    def discriminator_step(
        self, point: Tensors, generator: Tensors, noised: Tensor, streams: RandomStreams
    ) -> Tensors:
        """Descend the noisy gradient (lines 11 and 12)."""
        del generator, streams
        return discriminator_descent(point, noised, self.adam)

    def generator_step(
        self, state: Mapping[str, Tensor], discriminator: Tensors, streams: RandomStreams
    ) -> tuple[Tensors, Tensor]:
        """Descend the negative scores of B fakes (lines 14 to 16); also return these scores."""
        latents, labels = self.nets.inputs(self.batch, streams)
        leaves = trainable(part(state, "generator"))
        images = self.nets.generate(leaves, latents, labels)
        scores = self.nets.discriminate(discriminator, images, labels)
        gradients = weight_gradients(-scores.mean(), leaves)
        return descend_generator(state, gradients, self.adam, self.ema), scores.detach()

    def _loss(
        self, critic: Tensors, image: Tensor, label: Tensor, fake: Tensor, rho: Tensor
    ) -> Tensor:
        """Return L of one record: image and fake (channels, height, width), label and rho ()."""

        def score(image: Tensor) -> Tensor:
            return self.nets.discriminate(critic, image[None], label[None])[0]

        slope: Tensor = grad(score)(rho * image + (1 - rho) * fake)
        penalty = (slope.square().sum().clamp(min=1e-12).sqrt() - 1).square()
        return score(fake) - score(image) + self.penalty * penalty


def dp_wgan_gp(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    generator: GeneratorFactory,
    critic: ImageNetworkFactory,
    latent: int,
    batch: int,
    sampling_rate: SamplingRate | None,
    rows: int | None = None,
    critic_steps: int,
    gradient_penalty: NonNegative,
    learning_rate: float,
    betas: Betas,
    clip: ClipNorm,
    ema: Decay,
    device: str,
) -> Method:
    """Build DP-WGAN-GP from public parameters.

    Args:
        noise_multiplier: noise standard deviation over the clip norm C; None: no clipping, no
            noise.
        batch: B, a public number: expected records in a step, of each client, or of all clients for
            sums; and images of a generator step.
        sampling_rate: q; None: derived from ``batch`` and ``rows``, see ``gradient_sum``.
        rows: public estimate of the number of records of all clients.
        critic_steps: n_critic, per generator step.
        gradient_penalty: lambda.
        learning_rate, betas: parameters of both Adam optimizers.
        clip: C, for the gradient of each record's L; Adam makes small values irrelevant (section
            3.2.1 of the paper).
        ema: decay of the moving average of the published generator; 0: the last one.

    Raises:
        FedgenError: for an invalid sampling rate.
    """
    nets = networks(facts, generator, critic, latent, device)
    mechanism = gradient_sum(facts, noise_multiplier, clip, batch, sampling_rate, rows)
    clip = clip if noise_multiplier is not None else math.inf
    gan = Gan(nets, mechanism, gradient_penalty, clip, batch, (learning_rate, betas), ema)
    pace = StepsPerGeneratorStep(critic_steps, 0.0, 0.0)
    source = "Differentially Private Generation of Small Images (2020), section 2.3"
    return build_method(facts, gan, pace, source, is_logit=False)
