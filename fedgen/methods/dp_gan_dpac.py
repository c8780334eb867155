"""DP-GAN-DPAC: private image generation with a dual-purpose auxiliary classifier (Chen, Liu, Ma,
Nepal, Xu, CVPR 2023).

GS-WGAN (``gs_wgan.py``), with a classifier beside each critic that tells the generator how well
labels carry over, from generated images to real ones and back. In a turn of its critic, by
Algorithm 1:

    classifier                      starts anew
    classifier, n_f times           descend -C(images that the generator made)
    classifier, n_r times           descend -C(rows of the critic's own subset)
    answer                          beta * -dD/dimages + (1 - beta) * -dC/dimages, from step t_c on,
                                    clipped and noised as one gradient (equation 9)

C(x, y) is the log-probability of label y. The critics' gradient penalty holds its slope near 1 as
well, so that beta weighs gradients of about one length. Privacy is GS-WGAN's: the classifier sees
its critic's subset and public coins alone, trains when its critic does, and what an answer is made
of is clipped as a whole. That holds for a classifier that goes on where it was, too: on the public
rotation it depends on the secret draws no more than the critic does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedgen.coins import Coins
from fedgen.errors import FedgenError
from fedgen.losses.wgan_gp import Score, slope_penalty
from fedgen.models.functional import (
    Tensors,
    adam_start,
    adam_step,
    applied,
    gradients_of,
    initial,
    join,
    part,
    stack,
    template,
    trainable,
)
from fedgen.parameters import Betas, NonNegative, NonNegativeInt


@dataclass(frozen=True)
class DualPurposeClassifier:
    """The classifiers of a stack of critics: a ``Companion`` of ``gs_wgan``.

    begins: t_c, the generator steps before it.
    critic_share: beta, the critic's share of an answer.
    fake_steps, real_steps: n_f and n_r; without one of them it has one purpose.
    sequential: fakes first, then real rows; otherwise both in each step, max(n_f, n_r) times.
    reset: whether it starts from fresh weights in each turn.
    adam: learning rate and betas.
    """

    classifier: nn.Module
    begins: int
    critic_share: float
    fake_steps: int
    real_steps: int
    sequential: bool
    reset: bool
    adam: tuple[float, tuple[float, float]]
    gradient_penalty: float
    classes: int
    device: str

    def score(self, classifiers: Tensors) -> Score:
        """C as a function of images (k, n, ...) and labels (k, n)."""

        def log_probability(images: Tensor, labels: Tensor) -> Tensor:
            logits = applied(self.classifier, classifiers, images)
            return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]

        return log_probability

    def train(
        self,
        state: Tensors | None,
        critics: range,
        batch: int,
        real: Callable[[Coins], tuple[Tensor, Tensor]],
        fake: Callable[[Tensor, Coins], Tensor],
        round_: int,
        coins: Coins,
    ) -> Tensors | None:
        """A turn: see the top of this file."""
        if round_ < self.begins:
            return None
        if state is None or self.reset:
            seeds = [coins.public("classifier", critic) for critic in critics]
            fresh = stack([initial(self.classifier, seed) for seed in seeds])
            weights = {name: value.to(self.device) for name, value in fresh.items()}
            moments = adam_start(weights)
        else:
            weights, moments = (
                {name: value.clone() for name, value in part(state, of).items()}
                for of in ("classifier", "adam")
            )

        def made(coins: Coins) -> tuple[Tensor, Tensor]:
            size = (len(critics), batch)
            labels = torch.randint(0, self.classes, size, generator=coins.public("labels"))
            return fake(labels.to(self.device), coins), labels.to(self.device)

        steps = [[made]] * self.fake_steps + [[real]] * self.real_steps
        if not self.sequential:
            steps = [[made, real]] * max(self.fake_steps, self.real_steps)
        for step, sources in enumerate(steps):
            here, leaves = coins.at("classifier", step), trainable(weights)
            losses = [self._loss(self.score(leaves), *source(here)) for source in sources]
            gradients = gradients_of(torch.stack(losses).mean(0), leaves)
            adam_step(weights, gradients, moments, *self.adam)
        return join(classifier=weights, adam=moments)

    def _loss(self, score: Score, images: Tensor, labels: Tensor) -> Tensor:
        penalty = slope_penalty(score, images, labels)
        return -score(images, labels).mean(-1) + self.gradient_penalty * penalty

    def joined(
        self, rows: Tensor, state: Tensors, images: Tensor, labels: Tensor, round_: int
    ) -> Tensor:
        """beta * -dD/dimages + (1 - beta) * -dC/dimages."""
        if round_ < self.begins:
            return rows
        at = images.detach().requires_grad_()
        loss = -self.score(part(state, "classifier"))(at, labels).sum()
        [own] = torch.autograd.grad(loss, at)
        return self.critic_share * rows + (1 - self.critic_share) * own


def dual_purpose_classifier(
    *,
    classifier: Callable[..., nn.Module],
    begins: NonNegativeInt,
    critic_share: float,
    fake_steps: NonNegativeInt,
    real_steps: NonNegativeInt,
    sequential: bool,
    reset: bool,
    learning_rate: float,
    betas: Betas,
    gradient_penalty: NonNegative,
    classes: int,
    shape: tuple[int, int, int],
    device: str,
) -> DualPurposeClassifier:
    """The companion for these public parameters; see ``DualPurposeClassifier``.

    Raises:
        FedgenError: for a share that is none, or a classifier that never trains.
    """
    if critic_share > 1:
        raise FedgenError(
            "method.companion.critic_share", f"is a share, got {critic_share:g}", "take at most 1"
        )
    if not fake_steps + real_steps:
        raise FedgenError(
            "method.companion.fake_steps", "no steps on fakes and none on real rows", "raise one"
        )
    return DualPurposeClassifier(
        template(classifier(classes=classes, shape=shape)),
        begins,
        critic_share,
        fake_steps,
        real_steps,
        sequential,
        reset,
        (learning_rate, (betas[0], betas[1])),
        gradient_penalty,
        classes,
        device,
    )
