"""PSG: private set generation with discriminative information (Chen, Kerkouche, Fritz, NeurIPS
2022).

Instead of a generator, PSG publishes a small set of labelled images, optimized so that a classifier
trained on the set takes the steps that it would take on private records. Each round is one noisy
gradient of a classifier with public weights:

    server    every ``outer`` times ``batch_loop`` rounds: a new classifier, w
    client    S = Poisson sample of records at rate q
              g = (sum over S of clip(grad loss(x, y; w); C) + N(0, (C sigma)^2)) / B
    server    descend, by the set, the sum over layers and their units of
              1 - cos(g, grad loss(set; w))
              after ``batch_loop`` rounds, w descends loss(set; w) for ``inner`` epochs

Private records enter only the sum of DP-SGD, or with several clients the mean of their sums;
everything else is post-processing. So more ``matches``, steps of the set per gradient (one in the
paper), cost nothing more.

Differences from the released code: it runs one iteration more than it counts (ε 10.006 for 10), and
divides by the realized batch size, which reveals it. Here images lie in [-1, 1] instead of being
standardized by private statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgen.config.constraints import ClipNorm, Decay, SamplingRate
from fedgen.data.datasets import Shard
from fedgen.methods.api import Method, PublicFacts, Query, ServerProgram, State, WorstCase
from fedgen.methods.families.dp_sgd import build_method, gradient_sum
from fedgen.models.factories import ImageNetworkFactory
from fedgen.models.functional import (
    Tensors,
    concat_parts,
    flat,
    init_weights,
    meta_module,
    nearest_similarity,
    part,
    unflat,
)
from fedgen.privacy.aggregation import Sent
from fedgen.privacy.clipping import clipped_sum, examples_at_once
from fedgen.privacy.mechanisms import GradientSum
from fedgen.randomness import RandomStreams


def to_symmetric_range(images: Tensor) -> Tensor:
    """Map [0, 1] to [-1, 1]."""
    return images * 2 - 1


@dataclass(frozen=True)
class Client:
    """Respond with a noisy gradient of the classifier."""

    classifier: nn.Module
    mechanism: GradientSum
    clip: float
    device: str

    def respond(
        self, state: State, query: Query, shard: Shard, round_: int, streams: RandomStreams
    ) -> Sent:
        """Return the gradient of the mean loss over a Poisson batch (1, weights)."""
        del state
        sum_streams, private = streams.at_round("sum", round_), shard.on(self.device)
        weights = {name: value.to(self.device) for name, value in query.shared.items()}

        def batch(rows: Tensor) -> tuple[Tensor, Tensor]:
            images, labels = private.rows(rows)
            return to_symmetric_range(images), labels

        sums = (
            clipped_sum(
                self.classifier,
                weights,
                batch(torch.from_numpy(rows)),
                lambda losses: losses,
                self.clip,
            )
            for rows in self.mechanism.batch_parts(
                shard, sum_streams, examples_at_once(self.device)
            )
        )
        return self.mechanism.release((flat(weights).numel(),), sums, sum_streams)


@dataclass(frozen=True)
class Server:
    """The set, its momentum, and the classifier; all of it is post-processing.

    per_label: images of each label.
    initial_std: standard deviation of the initial pixels around grey.
    outer, batch_loop, inner: see the module.
    learning_rate, momentum: parameters of SGD on the set.
    matches: steps of the set per gradient.
    classifier_learning_rate: learning rate of SGD on the classifier, in batches of ``batch``.
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
        """Labels of the set (n,), equally many of each."""
        return torch.arange(self.classes, device=self.device).repeat_interleave(self.per_label)

    def _loss(self, weights: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        losses: Tensor = functional_call(self.classifier, dict(weights), (images, labels))
        return losses.mean()

    def init(self, streams: RandomStreams) -> Tensors:
        """Initialize the set with noise."""
        size = (self.classes * self.per_label, *self.shape)
        images = self.initial_std * torch.randn(size, generator=streams.public("set"))
        start = concat_parts(
            set={"images": images, "momentum": torch.zeros(size)},
            classifier=self._init_classifier(0, streams),
        )
        return {name: value.to(self.device) for name, value in start.items()}

    def start_from(
        self, state: Mapping[str, Tensor], sample: Callable[[Tensor], Tensor]
    ) -> Tensors:
        """Initialize the set with samples of another method."""
        return {
            **state,
            "set/images": to_symmetric_range(sample(self.labels.cpu())).to(self.device),
        }

    def _init_classifier(self, iteration: int, streams: RandomStreams) -> Tensors:
        return init_weights(self.classifier, streams.public("classifier", iteration))

    def query(self, state: Mapping[str, Tensor], round_: int, streams: RandomStreams) -> Query:
        """Query the gradient at the weights of the classifier."""
        del streams
        return Query({"step": torch.tensor([round_])}, part(state, "classifier"))

    def update(
        self, state: Mapping[str, Tensor], responses: Tensor, round_: int, streams: RandomStreams
    ) -> Tensors:
        """Update the set, and after ``batch_loop`` rounds the classifier."""
        weights = part(state, "classifier")
        target = unflat(responses[0].to(self.device), weights)
        images, momentum = state["set/images"], state["set/momentum"]
        for _ in range(self.matches):
            gradient = self.matching_gradient(images, weights, target)
            momentum = self.momentum * momentum + gradient
            images = images - self.learning_rate * momentum
        loop, remainder = divmod(round_ + 1, self.batch_loop)
        if not remainder and loop % self.outer == 0:
            weights = self._init_classifier(loop // self.outer, streams)
            weights = {name: value.to(self.device) for name, value in weights.items()}
        elif not remainder:
            weights = self._train_classifier(weights, images, streams.at("inner", round_))
        return concat_parts(set={"images": images, "momentum": momentum}, classifier=weights)

    def matching_gradient(
        self, images: Tensor, weights: Mapping[str, Tensor], target: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the gradient, with respect to the set, of its distance to ``target``: one minus
        the cosine of the gradients of each output unit, over all weights except biases and
        normalization (Zhao, Mopuri, Bilen 2021)."""
        points = images.detach().requires_grad_()
        leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
        matched = [name for name, value in leaves.items() if value.dim() > 1]
        loss = self._loss(leaves, points, self.labels)
        gradients = torch.autograd.grad(loss, [leaves[name] for name in matched], create_graph=True)
        distance = torch.zeros((), device=self.device)
        for name, gradient in zip(matched, gradients, strict=True):
            cosine = nn.functional.cosine_similarity(
                gradient.flatten(1), target[name].flatten(1), 1
            )
            distance = distance + (1 - cosine).sum()
        return torch.autograd.grad(distance, points)[0]

    def _train_classifier(
        self, weights: Tensors, images: Tensor, streams: RandomStreams
    ) -> Tensors:
        """Train the classifier for ``inner`` epochs on the set."""
        labels = self.labels
        for epoch in range(self.inner):
            order = torch.randperm(len(images), generator=streams.public("epoch", epoch))
            for rows in torch.split(order.to(self.device), self.batch):
                leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
                loss = self._loss(leaves, images[rows], labels[rows])
                gradients = torch.autograd.grad(loss, list(leaves.values()))
                weights = {
                    name: value.detach() - self.classifier_learning_rate * gradient
                    for (name, value), gradient in zip(leaves.items(), gradients, strict=True)
                }
        return weights

    def sample(
        self, weights: Mapping[str, Tensor], labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Return images of the set, of each label in a random order, repeated if necessary."""
        indices = torch.zeros_like(labels)
        for label in range(self.classes):
            positions = (labels == label).nonzero()[:, 0]
            order = torch.randperm(self.per_label, generator=streams.public("order", label))
            turns = torch.arange(len(positions)) % self.per_label
            indices[positions] = label * self.per_label + order[turns].to(labels)
        return weights["images"][indices.to(weights["images"].device)].cpu()

    def membership_scores(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Score images by their nearest neighbour in the set."""
        del streams
        images_of_set = published_images(state)["images"].cpu()
        return nearest_similarity(images, labels, images_of_set, self.labels.cpu())


def published_images(state: Mapping[str, Tensor]) -> Tensors:
    """Return the images of the set in [0, 1]."""
    return {"images": ((state["set/images"] + 1) / 2).clamp(0, 1)}


def psg(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    classifier: ImageNetworkFactory,
    per_label: int,
    initial_std: float,
    outer: int,
    batch_loop: int,
    inner: int,
    learning_rate: float,
    momentum: Decay,
    matches: int,
    classifier_learning_rate: float,
    classifier_batch: int,
    batch: int,
    sampling_rate: SamplingRate | None,
    rows: int | None = None,
    clip: ClipNorm,
    device: str,
) -> Method:
    """Build PSG from public parameters.

    Args:
        noise_multiplier: noise standard deviation over the clip norm C; None: no clipping, no
            noise.
        classifier: a ``ConvNet``.
        per_label: images of each label in the set.
        initial_std: standard deviation of the initial pixels around grey; black to white is 2.
            After few steps much of it remains and hides what was learned.
        outer, batch_loop: each classifier is used for outer * batch_loop rounds.
        inner: its epochs on the set after every batch_loop rounds.
        learning_rate, momentum: parameters of SGD on the set.
        matches: steps of the set per gradient.
        classifier_learning_rate, classifier_batch: learning rate and batch size of SGD on the
            classifier.
        batch: B, the expected batch size, a public number.
        sampling_rate: q; None: derived from ``batch`` and ``rows``, see ``gradient_sum``.
        rows: public estimate of the number of records of all clients.
        clip: C, for the gradient of each record.

    Raises:
        FedgenError: for an invalid momentum or sampling rate.
    """
    mechanism = gradient_sum(facts, noise_multiplier, clip, batch, sampling_rate, rows)
    net = meta_module(classifier(classes=facts.classes, shape=facts.shape))
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
        generator=published_images,
        sample=server.sample,
        membership_scores=server.membership_scores,
        start_from=server.start_from,
        distinct_images=facts.classes * per_label,
    )
    return build_method(
        facts,
        mechanism,
        client.respond,
        size,
        program,
        lambda: worst_case(net, facts.shape),
        source,
    )


def worst_case(net: nn.Module, shape: tuple[int, int, int]) -> WorstCase:
    """Return a record and no record as neighbours, with a classifier that confidently predicts
    another label: the gradient exceeds any clip norm and is the same in each trial."""
    weights = init_weights(net, RandomStreams.from_seed(0, "seeded").public("classifier"))
    weights["logits.weight"] = 1e3 * weights["logits.weight"]
    weights["logits.bias"][0] = -1e6
    images = torch.zeros(1, *shape, dtype=torch.uint8)
    images[..., ::2, :] = 255
    one = Shard(images, torch.zeros(1, dtype=torch.long))
    none = Shard(one.images[:0], one.labels[:0])
    return WorstCase(Query({"step": torch.tensor([0])}, weights), ({}, one), ({}, none))
