"""DP-WGAN-GP: a Wasserstein GAN with gradient penalty whose critic is trained by DP-SGD
(Schwabedal, Michel, Riontino, "Differentially Private Generation of Small Images", 2020, algorithm
2, after Zhang, Ji, Wang 2018).

    client    n_critic times:  S = rows drawn one by one with probability q
                               for each x in S: a fake G(z) and rho of its own
                               L = D(G(z)) - D(x) + lambda (|grad D(rho x + (1 - rho) G(z))| - 1)^2
                               descend (sum over S of clip(grad L; C) + N(0, (C sigma)^2)) / B
    server    the mean of the clients' critics, then: descend -D(G(z))

B is the expected size of S: dividing by the realized size, as the paper writes it, would tell it.
Images are drawn for the label of the row that they are paired with; the paper has no labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import grad

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
from fedgen.gradient_sums import gradient_sum
from fedgen.method import Method, PublicFacts
from fedgen.models.functional import Tensors
from fedgen.parameters import Betas, ClipNorm, Decay, NonNegative
from fedgen.privacy.mechanisms import GradientSum
from fedgen.privacy.per_example import ClippedSum, by_vmap


@dataclass(frozen=True)
class Critic:
    """Lines 2 to 12 of algorithm 2."""

    nets: Networks
    mechanism: GradientSum
    penalty: float
    clip: float

    def of_rows(
        self, critic: Tensors, generator: Tensors, shard: Shard, coins: Coins
    ) -> Iterator[ClippedSum]:
        """Over the parts of a step's batch."""
        private, latent = shard.on(self.nets.device), self.nets.latent
        for number, batch in enumerate(self.mechanism.parts(len(shard), coins, 64)):
            images, labels = private.rows(torch.from_numpy(batch))
            # secret coins: with public ones, a row less would pair those after it with others
            uniforms = coins.secret_uniforms(len(batch) * (latent + 1), "pairs", number)
            drawn = torch.from_numpy(uniforms).add_(2.0**-54).view(len(batch), latent + 1)
            latents = torch.special.ndtri(drawn[:, 1:]).to(images)
            with torch.no_grad():
                fakes = self.nets.generate(generator, latents, labels)
            inputs = images, labels, fakes, drawn[:, 0].to(images)
            yield by_vmap(self._loss, critic, inputs, self.clip)

    def gradient(self, critic: Tensors, generator: Tensors, noised: Tensor, coins: Coins) -> Tensor:
        """The sum is all."""
        del critic, generator, coins
        return noised

    def _loss(
        self, critic: Tensors, image: Tensor, label: Tensor, fake: Tensor, rho: Tensor
    ) -> Tensor:
        """L of one row: image and fake (channels, height, width), label and rho ()."""

        def score(given: Tensor) -> Tensor:
            return self.nets.judge(critic, given[None], label[None])[0]

        slope: Tensor = grad(score)(rho * image + (1 - rho) * fake)
        penalty = (slope.square().sum().clamp(min=1e-12).sqrt() - 1).square()
        return score(fake) - score(image) + self.penalty * penalty


def dp_wgan_gp(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    generator: Callable[..., nn.Module],
    critic: Callable[..., nn.Module],
    latent: int,
    batch: int,
    sampling_rate: float,
    critic_steps: int,
    gradient_penalty: NonNegative,
    learning_rate: float,
    betas: Betas,
    clip: ClipNorm,
    ema: Decay,
    device: str,
) -> Method:
    """DP-WGAN-GP for these public parameters.

    Args:
        noise_multiplier: noise std over the clip norm C; None neither clips nor noises.
        batch: B, the expected number of rows in a step, of each client, or of all where they answer
            sums; and the images of a generator step: a public number.
        sampling_rate: q, the probability that a step takes a row; one public number for all
            clients.
        critic_steps: n_critic, for each step of the generator.
        gradient_penalty: lambda.
        learning_rate, betas: of both Adams.
        clip: C, of the gradient of each row's L; if small, Adam makes it irrelevant (the paper's
            section 3.2.1).
        ema: decay of the average of the generator that is published; 0 publishes the last one.

    Raises:
        FedgenError: for a sampling rate that is none.
    """
    nets = networks(facts, generator, critic, latent, device)
    mechanism = gradient_sum(facts, noise_multiplier, clip, batch, sampling_rate)
    clip = clip if noise_multiplier is not None else math.inf
    steps = Critic(nets, mechanism, gradient_penalty, clip)
    descent = Descent((learning_rate, betas), steps.gradient, generator=True)
    server = Server(
        nets,
        batch,
        Pace(critic_steps, 0.0, 0.0),
        (learning_rate, betas),
        ema,
        lambda scores: -scores,
        False,
    )
    source = "Differentially Private Generation of Small Images (2020), section 2.3"
    return method_of(facts, server, mechanism, steps.of_rows, descent, sampling_rate, source)
