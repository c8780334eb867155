"""PSG: private set generation with discriminative information (Chen, Kerkouche, Fritz, NeurIPS
2022).

There is no generator: what is published is a small set of images with labels, made so that a
classifier that is trained on it takes the steps that it would take on private rows. A round is one
noised gradient of a classifier whose weights everybody knows:

    server    every ``outer`` times ``batch_loop`` rounds a fresh classifier, w
    client    S = rows drawn one by one with probability q
              g = (sum over S of clip(grad loss(x, y; w); C) + N(0, (C sigma)^2)) / B
    server    descends by the set: sum over layers and their units of 1 - cos(g, grad loss(set; w))
              after ``batch_loop`` rounds, w descends loss(set; w) for ``inner`` epochs

What touches private rows is DP-SGD's sum, of several clients the mean of theirs; all else is
post-processing. So ``matches`` steps of the set for each gradient (the paper takes one) cost
nothing more.

Where this file leaves the released code: that runs one iteration more than it counts (ε 10.006 for
10), and divides by the realized size of a batch, which tells it. Images lie in [-1, 1] instead of
being standardized by statistics of private rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.gradient_sums import gradient_sum, method_of
from fedgen.method import Method, PublicFacts, Query, ServerProgram, State, WorstCase
from fedgen.models.functional import Tensors, flat, initial, join, likeness, part, template, unflat
from fedgen.parameters import ClipNorm, NonNegative
from fedgen.privacy.mechanisms import GradientSum
from fedgen.privacy.per_example import clipped_sum, examples_at_once
from fedgen.privacy.releases import Sent


def scaled(images: Tensor) -> Tensor:
    """From [0, 1] to [-1, 1]."""
    return images * 2 - 1


@dataclass(frozen=True)
class Client:
    """A noised gradient of the classifier that it is asked about."""

    classifier: nn.Module
    mechanism: GradientSum
    clip: float
    device: str

    def answer(self, state: State, query: Query, shard: Shard, round_: int, coins: Coins) -> Sent:
        """Of the mean loss over a Poisson batch, (1, weights)."""
        del state
        here, private = coins.at("sum", round_), shard.on(self.device)
        weights = {name: value.to(self.device) for name, value in query.shared.items()}

        def of_part(rows: Tensor) -> tuple[Tensor, Tensor]:
            images, labels = private.rows(rows)
            return scaled(images), labels

        sums = (
            clipped_sum(
                self.classifier,
                weights,
                of_part(torch.from_numpy(rows)),
                lambda losses: losses,
                self.clip,
            )
            for rows in self.mechanism.parts(len(shard), here, examples_at_once(self.device))
        )
        return self.mechanism.release((flat(weights).numel(),), sums, here)


@dataclass(frozen=True)
class Server:
    """The set, its momentum, and the classifier: post-processing.

    per_label: images of each label. initial_std: of their pixels at first, around grey.
    outer, batch_loop, inner: see the file.
    learning_rate, momentum: of the set. matches: its steps for each gradient.
    classifier_learning_rate: of the classifier's epochs on the set, in batches of ``batch``.
    """

    classifier: nn.Module
    classes: int
    shape: tuple[int, int, int]
    per_label: int
    initial_std: float
    outer: int
    batch_loop: int
    inner: int
    learning_rate: float
    momentum: float
    matches: int
    classifier_learning_rate: float
    batch: int
    device: str

    @property
    def labels(self) -> Tensor:
        """Of the set (n,): as many of each."""
        return torch.arange(self.classes, device=self.device).repeat_interleave(self.per_label)

    def _loss(self, weights: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        losses: Tensor = functional_call(self.classifier, dict(weights), (images, labels))
        return losses.mean()

    def init(self, coins: Coins) -> Tensors:
        """Images of noise."""
        size = (self.classes * self.per_label, *self.shape)
        images = self.initial_std * torch.randn(size, generator=coins.public("set"))
        start = join(
            set={"images": images, "momentum": torch.zeros(size)},
            classifier=self._fresh(0, coins),
        )
        return {name: value.to(self.device) for name, value in start.items()}

    def begin(self, state: Mapping[str, Tensor], draw: Callable[[Tensor], Tensor]) -> Tensors:
        """Images that another method made, in place of noise."""
        return {**state, "set/images": scaled(draw(self.labels.cpu())).to(self.device)}

    def _fresh(self, iteration: int, coins: Coins) -> Tensors:
        return initial(self.classifier, coins.public("classifier", iteration))

    def query(self, state: Mapping[str, Tensor], round_: int, coins: Coins) -> Query:
        """The gradient at the classifier's weights."""
        del coins
        return Query({"step": torch.tensor([round_])}, part(state, "classifier"))

    def update(
        self, state: Mapping[str, Tensor], answers: Tensor, round_: int, coins: Coins
    ) -> Tensors:
        """The set moves; then, if its rounds are over, the classifier."""
        weights = part(state, "classifier")
        target = unflat(answers[0].to(self.device), weights)
        images, momentum = state["set/images"], state["set/momentum"]
        for _ in range(self.matches):
            slope = self.slope(images, weights, target)
            momentum = self.momentum * momentum + slope
            images = images - self.learning_rate * momentum
        loop, done = divmod(round_ + 1, self.batch_loop)
        if not done and loop % self.outer == 0:
            weights = self._fresh(loop // self.outer, coins)
            weights = {name: value.to(self.device) for name, value in weights.items()}
        elif not done:
            weights = self._trained(weights, images, coins.at("inner", round_))
        return join(set={"images": images, "momentum": momentum}, classifier=weights)

    def slope(
        self, images: Tensor, weights: Mapping[str, Tensor], target: Mapping[str, Tensor]
    ) -> Tensor:
        """The gradient by the set of its distance to ``target``: one minus the cosine of each
        output unit's gradients, over all weights but biases and normalization (after Zhao, Mopuri,
        Bilen 2021)."""
        at = images.detach().requires_grad_()
        leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
        used = [name for name, value in leaves.items() if value.dim() > 1]
        loss = self._loss(leaves, at, self.labels)
        found = torch.autograd.grad(loss, [leaves[name] for name in used], create_graph=True)
        apart = torch.zeros((), device=self.device)
        for name, own in zip(used, found, strict=True):
            cosine = nn.functional.cosine_similarity(own.flatten(1), target[name].flatten(1), 1)
            apart = apart + (1 - cosine).sum()
        return torch.autograd.grad(apart, at)[0]

    def _trained(self, weights: Tensors, images: Tensor, coins: Coins) -> Tensors:
        """The classifier after ``inner`` epochs on the set."""
        labels = self.labels
        for epoch in range(self.inner):
            order = torch.randperm(len(images), generator=coins.public("epoch", epoch))
            for rows in torch.split(order.to(self.device), self.batch):
                leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
                loss = self._loss(leaves, images[rows], labels[rows])
                found = torch.autograd.grad(loss, list(leaves.values()))
                weights = {
                    name: value.detach() - self.classifier_learning_rate * slope
                    for (name, value), slope in zip(leaves.items(), found, strict=True)
                }
        return weights

    def sample(self, weights: Mapping[str, Tensor], labels: Tensor, coins: Coins) -> Tensor:
        """Images of the set: each label's in an order of its own, from the start again where there
        are no more."""
        picks = torch.zeros_like(labels)
        for label in range(self.classes):
            mine = (labels == label).nonzero()[:, 0]
            order = torch.randperm(self.per_label, generator=coins.public("order", label))
            again = torch.arange(len(mine)) % self.per_label
            picks[mine] = label * self.per_label + order[again].to(labels)
        return weights["images"][picks.to(weights["images"].device)].cpu()

    def recognize(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, coins: Coins
    ) -> Tensor:
        """By the nearest of the set's images."""
        del coins
        made = published(state)["images"].cpu()
        return likeness(images, labels, made, self.labels.cpu())


def published(state: Mapping[str, Tensor]) -> Tensors:
    """The set's images in [0, 1]."""
    return {"images": ((state["set/images"] + 1) / 2).clamp(0, 1)}


def psg(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    classifier: Callable[..., nn.Module],
    per_label: int,
    initial_std: float,
    outer: int,
    batch_loop: int,
    inner: int,
    learning_rate: float,
    momentum: NonNegative,
    matches: int,
    classifier_learning_rate: float,
    classifier_batch: int,
    batch: int,
    sampling_rate: float,
    clip: ClipNorm,
    device: str,
) -> Method:
    """PSG for these public parameters.

    Args:
        noise_multiplier: noise std over the clip norm C; None neither clips nor noises.
        classifier: a ``ConvNet``.
        per_label: images of each label in the set.
        initial_std: of their pixels before the first step, around grey; black to white is 2. With
            few steps much of it stays, and hides what was learnt.
        outer, batch_loop: a classifier is used for outer * batch_loop rounds.
        inner: its epochs on the set after each batch_loop rounds.
        learning_rate, momentum: of the set's SGD. matches: its steps for each gradient.
        classifier_learning_rate, classifier_batch: of the classifier's.
        batch: B, the expected number of private rows in a batch: a public number. sampling_rate: q.
        clip: C, of each row's gradient.

    Raises:
        FedgenError: for a momentum or a sampling rate that is none.
    """
    if momentum >= 1:
        raise FedgenError("method.momentum", f"must be below 1, got {momentum:g}", "e.g. 0.5")
    mechanism = gradient_sum(facts, noise_multiplier, clip, batch, sampling_rate)
    net = template(classifier(classes=facts.classes, shape=facts.shape))
    clip = clip if noise_multiplier is not None else math.inf
    client = Client(net, mechanism, clip, device)
    server = Server(
        net,
        facts.classes,
        facts.shape,
        per_label,
        initial_std,
        outer,
        batch_loop,
        inner,
        learning_rate,
        momentum,
        matches,
        classifier_learning_rate,
        classifier_batch,
        device,
    )
    size = sum(weights.numel() for weights in net.parameters())
    source = "Private set generation (Chen, Kerkouche, Fritz 2022)"
    program = ServerProgram(
        init=server.init,
        query=server.query,
        update=server.update,
        generator=published,
        sample=server.sample,
        recognize=server.recognize,
        begin=server.begin,
        distinct=facts.classes * per_label,
    )
    return method_of(
        facts,
        mechanism,
        client.answer,
        size,
        program,
        lambda: worst_case(net, facts.shape),
        sampling_rate,
        source,
    )


def worst_case(net: nn.Module, shape: tuple[int, int, int]) -> WorstCase:
    """A row against none, under a classifier that is sure of another label: the gradient is longer
    than any clip norm, and the same in each trial."""
    weights = initial(net, Coins.of(0, "seeded").public("classifier"))
    weights["logits.weight"] = 1e3 * weights["logits.weight"]
    weights["logits.bias"][0] = -1e6
    images = torch.zeros(1, *shape, dtype=torch.uint8)
    images[..., ::2, :] = 255
    row = Shard(images, torch.zeros(1, dtype=torch.long))
    none = Shard(row.images[:0], row.labels[:0])
    return WorstCase(Query({"step": torch.tensor([0])}, weights), ({}, row), ({}, none))
