"""DP-GAN-DPAC: private image generation with a dual-purpose auxiliary classifier (Chen, Liu, Ma,
Nepal, Xu, CVPR 2023).

GS-WGAN (``gs_wgan.py``) with a classifier next to each critic, whose loss tells the generator how
well labels transfer from generated images to real ones and back. In a turn of its critic, by
algorithm 1:

    classifier                      reset
    classifier, n_f times           descend -C(generated images)
    classifier, n_r times           descend -C(records of the critic's own subset)
    response                        beta * -dD/dimages + (1 - beta) * -dC/dimages, from step t_c on,
                                    clipped and noised as one gradient (equation 9)

C(x, y) is the log-probability of label y. The gradient penalty of the critics also keeps its slope
near 1, so that beta weighs gradients of similar norms. Privacy is that of GS-WGAN: the classifier
sees only its critic's subset and public streams, trains when its critic does, and the response, of
which it determines a part, is clipped as a whole. This also holds for a classifier that is not
reset: on the public rotation, it does not depend on secret samples any more than the critic does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedgen.config.constraints import Betas, NonNegative, NonNegativeInt, PositiveFraction
from fedgen.errors import FedgenError
from fedgen.losses.wgan_gp import Score, slope_penalty
from fedgen.models.factories import ImageNetworkFactory
from fedgen.models.functional import (
    Tensors,
    adam_start,
    adam_step,
    concat_parts,
    functional_apply,
    init_weights,
    meta_module,
    part,
    stack,
    trainable,
    weight_gradients,
)
from fedgen.randomness import RandomStreams


@dataclass(frozen=True)
class DualPurposeClassifier:
    """Classifiers of a stack of critics: a ``Companion`` of ``gs_wgan``.

    start_step: t_c, the generator steps before it.
    critic_share: beta, the share of the critic in a response.
    fake_steps, real_steps: n_f and n_r; if one is zero it has a single purpose.
    sequential: fakes first, then real records; otherwise both in each step, max(n_f, n_r) times.
    reset: whether it starts from new weights in each turn.
    adam: learning rate and betas.
    """

    classifier: nn.Module
    start_step: int
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
        """Return C as a function of images (k, n, ...) and labels (k, n)."""

        def log_probability(images: Tensor, labels: Tensor) -> Tensor:
            logits = functional_apply(self.classifier, classifiers, images)
            return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]

        return log_probability

    def train(
        self,
        state: Tensors | None,
        critics: range,
        batch: int,
        real: Callable[[RandomStreams], tuple[Tensor, Tensor]],
        fake: Callable[[Tensor, RandomStreams], Tensor],
        round_: int,
        streams: RandomStreams,
    ) -> Tensors | None:
        """Train for one turn; see the module."""
        if round_ < self.start_step:
            return None
        if state is None or self.reset:
            seeds = [streams.public("classifier", critic) for critic in critics]
            fresh = stack([init_weights(self.classifier, seed) for seed in seeds])
            weights = {name: value.to(self.device) for name, value in fresh.items()}
            moments = adam_start(weights)
        else:
            weights, moments = (
                {name: value.clone() for name, value in part(state, of).items()}
                for of in ("classifier", "adam")
            )

        def generated(streams: RandomStreams) -> tuple[Tensor, Tensor]:
            size = (len(critics), batch)
            labels = torch.randint(0, self.classes, size, generator=streams.public("labels"))
            return fake(labels.to(self.device), streams), labels.to(self.device)

        steps = [[generated]] * self.fake_steps + [[real]] * self.real_steps
        if not self.sequential:
            steps = [[generated, real]] * max(self.fake_steps, self.real_steps)
        for step, sources in enumerate(steps):
            step_streams, leaves = streams.at("classifier", step), trainable(weights)
            losses = [self._loss(self.score(leaves), *source(step_streams)) for source in sources]
            gradients = weight_gradients(torch.stack(losses).mean(0), leaves)
            adam_step(weights, gradients, moments, *self.adam)
        return concat_parts(classifier=weights, adam=moments)

    def _loss(self, score: Score, images: Tensor, labels: Tensor) -> Tensor:
        penalty = slope_penalty(score, images, labels)
        return -score(images, labels).mean(-1) + self.gradient_penalty * penalty

    def outputs(
        self, critic_gradients: Tensor, state: Tensors, images: Tensor, labels: Tensor, round_: int
    ) -> Tensor:
        """Return beta * -dD/dimages + (1 - beta) * -dC/dimages."""
        if round_ < self.start_step:
            return critic_gradients
        points = images.detach().requires_grad_()
        loss = -self.score(part(state, "classifier"))(points, labels).sum()
        [classifier_gradients] = torch.autograd.grad(loss, points)
        return self.critic_share * critic_gradients + (1 - self.critic_share) * classifier_gradients


def dual_purpose_classifier(
    *,
    classifier: ImageNetworkFactory,
    start_step: NonNegativeInt,
    critic_share: PositiveFraction,
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
    """Build the companion from public parameters; see ``DualPurposeClassifier``.

    Raises:
        FedgenError: for a classifier that never trains.
    """
    if not fake_steps + real_steps:
        raise FedgenError(
            "method.companion.fake_steps", "is 0, as is real_steps", "raise one of them"
        )
    return DualPurposeClassifier(
        meta_module(classifier(classes=classes, shape=shape)),
        start_step,
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
