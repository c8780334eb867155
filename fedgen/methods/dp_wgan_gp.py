"""DP-WGAN-GP: a Wasserstein GAN with gradient penalty whose critic is trained by DP-SGD
(Schwabedal, Michel, Riontino, "Differentially Private Generation of Small Images", 2020, algorithm
2, after Zhang, Ji, Wang 2018).

    client    n_critic times:  S = Poisson sample of records at rate q
                               for each x in S: a fake G(z) and rho of its own
                               L = D(G(z)) - D(x) + lambda (|grad D(rho x + (1 - rho) G(z))| - 1)^2
                               descend (sum over S of clip(grad L; C) + N(0, (C sigma)^2)) / B
    server    average the critics of the clients, then descend -D(G(z))

B is the expected size of S: dividing by the realized size, as in the paper, would reveal it. Fakes
have the label of the record that they are paired with; the paper has no labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad

from fedgen.config.constraints import Betas, ClipNorm, Decay, NonNegative, SamplingRate
from fedgen.data.datasets import Shard
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
from fedgen.privacy.clipping import ClippedSum, by_vmap
from fedgen.privacy.mechanisms import GradientSum
from fedgen.randomness import RandomStreams


@dataclass(frozen=True)
class Critic:
    """Lines 2 to 12 of algorithm 2."""

    nets: Networks
    mechanism: GradientSum
    penalty: float
    clip: float

    def record_gradients(
        self, critic: Tensors, generator: Tensors, shard: Shard, streams: RandomStreams
    ) -> Iterator[ClippedSum]:
        """Yield clipped sums over the parts of a batch."""
        private, latent = shard.on(self.nets.device), self.nets.latent
        for number, batch in enumerate(self.mechanism.batch_parts(len(shard), streams, 64)):
            images, labels = private.rows(torch.from_numpy(batch))
            # secret streams: with public ones, removing a record would change the pairs after it
            uniforms = streams.secret_uniforms(len(batch) * (latent + 1), "pairs", number)
            random_numbers = torch.from_numpy(uniforms).add_(2.0**-54).view(len(batch), latent + 1)
            latents = torch.special.ndtri(random_numbers[:, 1:]).to(images)
            with torch.no_grad():
                fakes = self.nets.generate(generator, latents, labels)
            inputs = images, labels, fakes, random_numbers[:, 0].to(images)
            yield by_vmap(self._loss, critic, inputs, self.clip)

    def gradient(
        self, critic: Tensors, generator: Tensors, noised: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Return the noisy sum unchanged."""
        del critic, generator, streams
        return noised

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
    steps = Critic(nets, mechanism, gradient_penalty, clip)
    descent = Descent((learning_rate, betas), steps.gradient, needs_generator=True)
    server = Server(
        nets,
        batch,
        StepsPerGeneratorStep(critic_steps, 0.0, 0.0),
        (learning_rate, betas),
        ema,
        lambda scores: -scores,
        False,
    )
    source = "Differentially Private Generation of Small Images (2020), section 2.3"
    return build_method(facts, server, mechanism, steps.record_gradients, descent, source)
