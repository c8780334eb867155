"""Critic ensemble of a client: critics over disjoint subsets of its private records.

Critics train without noise and never leave the client. Their outputs for a query are bounded,
averaged and noised by the mechanism: gradients (GS-WGAN), or votes (DataLens, G-PATE, PATE-GAN).
Subsets are assigned by position in a public permutation, critics train on a public schedule, and
each has its own weights, optimizer state and streams: replacing one record changes one critic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgen.config.constraints import Betas, Decay, NonNegativeInt
from fedgen.data.datasets import Shard
from fedgen.methods.api import PublicFacts, Query, State
from fedgen.methods.families.critic_rotation import Rotation, concatenate, select
from fedgen.models.factories import GeneratorFactory, ImageNetworkFactory, Shape
from fedgen.models.functional import (
    Adam,
    Tensors,
    adam_start,
    adam_step,
    functional_apply,
    init_weights,
    meta_module,
    power_iterate_all,
    power_iteration,
    stack,
    trainable,
    weight_gradients,
)
from fedgen.privacy.aggregation import Sent
from fedgen.privacy.events import Relation
from fedgen.privacy.mechanisms import RowGaussian
from fedgen.privacy.routing import Routing
from fedgen.randomness import RandomStreams

Score = Callable[[Tensor, Tensor], Tensor]
"""Images (k, n, ...) and labels (k, n) -> scores (k, n)."""


class Pairs(NamedTuple):
    """Real and fake images (k, batch, ...) of the same labels (k, batch), a batch of each critic,
    and one uniform for each pair (k, batch)."""

    real: Tensor
    fake: Tensor
    labels: Tensor
    mix: Tensor


CriticStep = Callable[[Tensors, Tensors, Pairs], None]
"""(stack of k critics, state of Adam, pairs): one training step of each critic, in place."""

CriticOutput = Callable[[Tensors, Query], Tensor]
"""(stack of k critics, query) -> raw output of each critic for each query sample (k, samples, ...).
"""


@dataclass(frozen=True)
class Networks:
    """Generator and critic as functions of their weights."""

    generator: nn.Module
    critic: nn.Module
    latent: int
    classes: int
    device: str

    def score(self, critics: Tensors) -> Score:
        """Return the function from images (k, n, ...) and labels (k, n) to the scores of a
        stack."""
        normalized = power_iterate_all(critics)
        return lambda images, labels: functional_apply(self.critic, normalized, images, labels)

    def generate(self, generator: Mapping[str, Tensor], latents: Tensor, labels: Tensor) -> Tensor:
        """Return images in [0, 1]."""
        images: Tensor = functional_call(self.generator, dict(generator), (latents, labels))
        return images

    def inputs(self, shape: tuple[int, ...], streams: RandomStreams) -> tuple[Tensor, Tensor]:
        """Return latents (*shape, latent), Bernoulli(0.5), and labels (*shape), uniform and as
        balanced as possible along the last dimension; both are independent of the data."""
        size = (*shape, self.latent)
        latents = torch.randint(0, 2, size, generator=streams.public("latents")).float()
        first = torch.randint(0, self.classes, (*shape[:-1], 1), generator=streams.public("labels"))
        labels = (first + torch.arange(shape[-1])) % self.classes
        return latents.to(self.device), labels.to(self.device)


class Settings(TypedDict):
    """Settings shared by all ensemble methods.

    generator, critic: networks.
    latent: dimension of the generator's input.
    batch: images of a query.
    fakes_per_label: images of each label that critics train on in a round.
    ema: decay of the moving average of the published generator.
    critics: K, for a single client; each of several clients holds one.
    critics_per_step: width of the public rotation: critics of a single client, or clients, that
        train in a step.
    critic_steps: training steps of a critic per turn.
    critic_batch: real (and fake) images per training step.
    warm_start: generator steps of each critic's own temporary GAN before the run.
    """

    generator: GeneratorFactory
    critic: ImageNetworkFactory
    latent: int
    batch: int
    fakes_per_label: int
    generator_learning_rate: float
    generator_betas: Betas
    ema: Decay
    critics: int
    critics_per_step: int
    critic_steps: int
    critic_batch: int
    critic_learning_rate: float
    critic_betas: Betas
    warm_start: NonNegativeInt
    device: str


def networks(facts: PublicFacts, settings: Settings) -> Networks:
    """Return the networks for these images and labels."""
    latent, classes = settings["latent"], facts.classes
    return Networks(
        meta_module(settings["generator"](latent=latent, classes=classes, shape=facts.shape)),
        meta_module(settings["critic"](classes=classes, shape=facts.shape)),
        latent,
        classes,
        settings["device"],
    )


def critic_adam(settings: Settings) -> Adam:
    """Return learning rate and betas of the critics."""
    return settings["critic_learning_rate"], settings["critic_betas"]


class CompanionFactory(Protocol):
    """Factory of the companion of each critic."""

    def __call__(self, *, classes: int, shape: Shape, device: str) -> Companion:
        """Return the companion."""


class Companion(Protocol):
    """A network next to each critic. It trains with the critic, on records of the same subset, and
    contributes to the critic's output. Like the critic's, its state depends only on these records
    and on public streams."""

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
        """Return the state of a stack after its turn; ``state`` is None before its first.

        Args:
            real: streams -> records of each critic's subset (k, batch, ...) and their labels.
            fake: (labels, streams) -> images.
        """

    def outputs(
        self, gradients: Tensor, state: Tensors, images: Tensor, labels: Tensor, round_: int
    ) -> Tensor:
        """Combine the critics' gradients with respect to images (k, n, ...) with the companions'
        own."""


@dataclass(frozen=True)
class Critics:
    """Critics over disjoint subsets of a client's records. Parts of the state are named by the
    first critic of a stack: weights, optimizer state, companions.

    step: one training step of a stack.
    output: outputs of a stack for a query.
    response_shape: shape of the response to one query sample.
    routing: routing of query samples to critics.
    on_query: whether only the critics sampled for a query of ``samples_per_query`` query samples
        train.
    rotation: turns and stacks.
    steps, batch: steps of a critic's turn, and real images of each.
    warm_start: steps before the run, of temporary generators with ``generator_loss`` (score,
        images, labels) -> sum over images, and ``adam``.
    """

    nets: Networks
    mechanism: RowGaussian
    step: CriticStep
    output: CriticOutput
    response_shape: tuple[int, ...]
    routing: Routing
    on_query: bool
    samples_per_query: int
    rotation: Rotation
    steps: int
    batch: int
    warm_start: int
    generator_loss: Callable[[Score, Tensor, Tensor], Tensor]
    adam: Adam
    companion: Companion | None = None

    def subsets(
        self, members: range, shard: Shard, streams: RandomStreams
    ) -> tuple[Tensor, Tensor]:
        """Return the record indices of each critic in a stack (padded), and their number.
        Assignment is by position in a public permutation: for a fixed number of records, replacing
        one moves no other.
        """
        if self.rotation.count == 1:
            return torch.arange(len(shard))[None], torch.tensor([len(shard)])
        order = torch.randperm(len(shard), generator=streams.public("subsets"))
        subsets = [order[critic :: self.rotation.count] for critic in members]
        return nn.utils.rnn.pad_sequence(subsets, True), torch.tensor(
            [len(subset) for subset in subsets]
        )

    def records(
        self, subsets: tuple[Tensor, Tensor], shard: Shard, streams: RandomStreams
    ) -> tuple[Tensor, Tensor]:
        """Return a batch of each critic's own records (k, batch, ...), and their labels (k,
        batch)."""
        index, sizes = subsets
        uniforms = torch.rand(index.shape, generator=streams.public("rows"))
        padding = torch.arange(index.shape[1]) >= sizes[:, None]
        order = torch.argsort(uniforms.masked_fill(padding, 2.0))
        # records in random order, repeated if a subset is smaller than a batch
        positions = torch.gather(order, 1, torch.arange(self.batch) % sizes[:, None])
        images, labels = shard.rows(torch.gather(index, 1, positions))
        return images.to(self.nets.device), labels.to(self.nets.device)

    def fresh(self, members: range, streams: RandomStreams) -> Tensors:
        """Return initial weights of a stack, each critic's from its own stream."""
        generators = [streams.public("critic", critic, "init") for critic in members]
        return self._to_device(
            stack([init_weights(self.nets.critic, generator) for generator in generators])
        )

    def weights(self, state: State, members: range, streams: RandomStreams) -> Tensors:
        """Return the weights of a stack, initialized if it has never trained."""
        name = f"critics.{members.start}"
        return self._to_device(state[name]) if name in state else self.fresh(members, streams)

    def _to_device(self, tensors: Mapping[str, Tensor], copy: bool = False) -> Tensors:
        return {name: value.to(self.nets.device, copy=copy) for name, value in tensors.items()}

    def train_step(
        self,
        critics: Tensors,
        moments: Tensors,
        subsets: tuple[Tensor, Tensor],
        shard: Shard,
        fake: Callable[[Tensor, RandomStreams], Tensor],
        streams: RandomStreams,
    ) -> None:
        """Take one training step for all critics of a stack, in place, each on records of its own
        subset.

        fake: (labels (k, batch), streams) -> images with these labels. Pairing a real image with a
            fake of another label would give the critic no information about either label.
        """
        real, labels = self.records(subsets, shard, streams)
        mix = torch.rand(tuple(labels.shape), generator=streams.public("mix")).to(self.nets.device)
        self.step(critics, moments, Pairs(real, fake(labels, streams), labels, mix))

    def prepare(self, number: int, shard: Shard, streams: RandomStreams) -> State:
        """Warm up a group: each critic trains against its own temporary generator, on its own
        records only (GS-WGAN, section 5.1). Without records there is nothing to learn."""
        if not len(shard):
            return {}
        group, nets = self.rotation.groups[number], self.nets
        members = range(group[0].start, group[-1].stop)
        critics, subsets = self.fresh(members, streams), self.subsets(members, shard, streams)
        moments = adam_start(critics)
        generators = [streams.public("critic", critic, "rival") for critic in members]
        rivals = self._to_device(stack([init_weights(nets.generator, seed) for seed in generators]))
        rival_moments = adam_start(rivals)

        def rival_fakes(labels: Tensor, streams: RandomStreams) -> Tensor:
            latents = nets.inputs(tuple(labels.shape), streams)[0]
            with torch.no_grad():
                return functional_apply(nets.generator, rivals, latents, labels)

        for step in range(self.warm_start):
            step_streams = streams.at("warm_start", members.start, step)
            for critic_step in range(self.steps):
                critic_streams = step_streams.at("critic", critic_step)
                self.train_step(critics, moments, subsets, shard, rival_fakes, critic_streams)
            latents, labels = nets.inputs((len(members), self.batch), step_streams.at("rival"))
            leaves = trainable(rivals)
            images = functional_apply(nets.generator, leaves, latents, labels)
            loss = self.generator_loss(nets.score(critics), images, labels) / self.batch
            adam_step(rivals, weight_gradients(loss, leaves), rival_moments, *self.adam)
            rivals.update(power_iteration(rivals, stacked=True))
        state: dict[str, Tensors] = {}
        for members_ in group:
            positions = slice(members_.start - members.start, members_.stop - members.start)
            state[f"critics.{members_.start}"] = select(critics, positions)
            state[f"adam.{members_.start}"] = select(moments, positions)
        return state

    def assign(self, samples: int, round_: int, streams: RandomStreams) -> dict[int, list[int]]:
        """Return the secret routing of query samples to critics in a round. With ``on_query``,
        critics are sampled before the query is known, by the same sample as for their response."""
        routing_streams = streams.salted("") if self.on_query else streams
        return self.routing.assign(samples, routing_streams.at_round("routing", round_).secret())

    def train(
        self,
        state: State,
        broadcast: Mapping[str, Tensor],
        shard: Shard,
        round_: int,
        streams: RandomStreams,
    ) -> State:
        """Train the critics of this turn (or the sampled ones); without records, none."""
        if not len(shard):
            return {}
        pool = broadcast["images"].to(self.nets.device) / 255  # (classes, fakes per label, ...)

        def pool_fakes(labels: Tensor, streams: RandomStreams) -> Tensor:
            choice = torch.randint(
                pool.shape[1], tuple(labels.shape), generator=streams.public("fakes")
            )
            return pool[labels, choice.to(pool.device)]

        turn = self.rotation.turns[round_ % len(self.rotation.turns)]
        if self.on_query:
            turn = [
                self.rotation.stacks[critic]
                for critic in self.assign(self.samples_per_query, round_, streams)
            ]
        changed: dict[str, Tensors] = {}
        for members in turn:
            first, subsets = members.start, self.subsets(members, shard, streams)
            # copies: training is in place, and the input state must not change
            critics = self._to_device(self.weights(state, members, streams), copy=True)
            name = f"adam.{first}"
            moments = self._to_device(state[name], True) if name in state else adam_start(critics)
            stack_streams = streams.at("train", round_, "stack", first)
            for step in range(self.steps):
                step_streams = stack_streams.at("step", step)
                self.train_step(critics, moments, subsets, shard, pool_fakes, step_streams)
            changed |= {f"critics.{first}": critics, name: moments}
            if self.companion is not None:
                companions = self._companions(state, members)
                real = partial(self.records, subsets, shard)
                trained_companions = self.companion.train(
                    companions, members, self.batch, real, pool_fakes, round_, stack_streams
                )
                if trained_companions is not None:
                    changed[f"companions.{first}"] = trained_companions
        return changed

    def _companions(self, state: State, members: range) -> Tensors | None:
        name = f"companions.{members.start}"
        return self._to_device(state[name]) if name in state else None

    def respond(
        self, state: State, query: Query, shard: Shard, round_: int, streams: RandomStreams
    ) -> Sent:
        """Return the sanitized outputs of the routed critics: a function of the critics only,
        except that a client that may be removed as a whole contributes nothing without records."""
        is_removed = not len(shard) and self.mechanism.relation is Relation.ADD_OR_REMOVE_ONE
        routing = self.assign(query.count, round_, streams)

        def outputs() -> Iterator[tuple[Tensor, Tensor]]:
            if self.routing.mode == "mean":
                for group in self.rotation.groups:
                    critics = concatenate(
                        [self.weights(state, members, streams) for members in group]
                    )
                    companions = self._companions(state, group[0])
                    outputs = self.outputs(critics, companions, query, round_)
                    yield torch.arange(query.count).repeat(len(outputs)), outputs.flatten(0, 1)
                return
            for members in self.rotation.stacks:
                routed = [critic for critic in members if critic in routing]
                critics = self.weights(state, members, streams) if routed else {}
                companions = self._companions(state, members) if routed else None
                for critic in routed:
                    position = slice(critic - members.start, critic - members.start + 1)
                    one_critic = select(critics, position)
                    one_companion = None if companions is None else select(companions, position)
                    subquery = query.take(routing[critic])
                    outputs = self.outputs(one_critic, one_companion, subquery, round_)[0]
                    yield torch.tensor(routing[critic]), outputs

        response_streams = streams.at_round("answer", round_)
        shape = (query.count, *self.response_shape)
        return self.mechanism.release(
            shape, outputs(), response_streams, contributes=not is_removed
        )

    def outputs(
        self, critics: Tensors, companions: Tensors | None, query: Query, round_: int
    ) -> Tensor:
        """Return the output of each critic of a stack for each query sample (k, samples, ...),
        unbounded."""
        outputs, count = self.output(critics, query), query.count
        if self.companion is None or companions is None:
            return outputs
        images, labels = (
            query.samples[name].to(self.nets.device).expand(len(outputs), count, *shape)
            for name, shape in (("images", outputs.shape[2:]), ("labels", ()))
        )
        return self.companion.outputs(outputs, companions, images, labels, round_)
