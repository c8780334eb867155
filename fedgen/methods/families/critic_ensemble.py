"""Critic ensemble of a client: critics over disjoint subsets of its private records.

Critics train without noise and never leave the client. Their outputs for a query are bounded,
averaged and noised by the mechanism: gradients (GS-WGAN), or votes (DataLens, G-PATE, PATE-GAN).
Subsets are assigned by position in a public permutation, critics train on a public schedule, and
each has its own weights, optimizer state and streams: replacing one record changes one critic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol, TypedDict

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgen.config.constraints import Betas, Decay, NonNegativeInt
from fedgen.data.datasets import Shard
from fedgen.losses.wgan_gp import generator_loss
from fedgen.methods.api import PublicFacts, Query, State, WorstCase
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

    @property
    def generator_weights(self) -> int:
        """Number of trainable parameters of the generator."""
        return sum(p.numel() for p in self.generator.parameters())

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


@dataclass(frozen=True)
class Losses:
    """Loss of critics, (score, real, fake, labels, mix) -> (k,), with one uniform per pair in
    ``mix``; and loss of a generator, (score, images, labels) -> sum over images."""

    critic: Callable[[Score, Tensor, Tensor, Tensor, Tensor], Tensor]
    generator: Callable[[Score, Tensor, Tensor], Tensor]


def image_gradients(nets: Networks) -> CriticOutput:
    """Return -dD/dimages of each critic (k, samples, channels, height, width): the upstream factor
    of equation 11 of GS-WGAN. For a discriminator with loss -log D it is this times 1 - D."""

    def output(critics: Tensors, query: Query) -> Tensor:
        images, labels = (query.samples[name].to(nets.device) for name in ("images", "labels"))
        size = len(critics["score.weight"])
        points = images.detach().expand(size, *images.shape).requires_grad_()
        loss = generator_loss(nets.score(critics), points, labels.expand(size, -1))
        return torch.autograd.grad(loss, points)[0]

    return output


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
    """``count`` critics over disjoint subsets of a client's records. ``turn_size`` of them train in
    a round, in stacks of at most ``max_members``; groups of stacks with at most as many critics
    warm up and respond together. Parts of the state are named by the first critic of a stack:
    weights, optimizer state, companions.

    output: outputs of a stack for a query.
    response_shape: shape of the response to one query sample.
    routing: routing of query samples to critics.
    on_query: whether only the critics sampled for a query of ``samples_per_query`` query samples
        train.
    steps, batch, adam, losses: training of a critic's turn.
    warm_start: steps before the run.
    """

    nets: Networks
    mechanism: RowGaussian
    output: CriticOutput
    response_shape: tuple[int, ...]
    routing: Routing
    on_query: bool
    samples_per_query: int
    count: int
    turn_size: int
    max_members: int
    steps: int
    batch: int
    adam: Adam
    losses: Losses
    warm_start: int
    companion: Companion | None = None

    @cached_property
    def turns(self) -> list[list[range]]:
        """The public rotation: for each turn, its critics in stacks of about equal size."""
        turns = []
        for first in range(0, self.count, self.turn_size):
            last = min(first + self.turn_size, self.count)
            size = math.ceil((last - first) / math.ceil((last - first) / self.max_members))
            turns.append(
                [range(start, min(start + size, last)) for start in range(first, last, size)]
            )
        return turns

    @cached_property
    def stacks(self) -> list[range]:
        """All stacks."""
        return [stack for turn in self.turns for stack in turn]

    @cached_property
    def groups(self) -> list[list[range]]:
        """Stacks that warm up and respond together. Stacks with companions do not, because
        companions start with the first turn of their stack."""
        groups: list[list[range]] = []
        for members in self.stacks:
            if (
                groups
                and self.companion is None
                and members.stop - groups[-1][0].start <= self.max_members
            ):
                groups[-1].append(members)
            else:
                groups.append([members])
        return groups

    def subsets(
        self, members: range, shard: Shard, streams: RandomStreams
    ) -> tuple[Tensor, Tensor]:
        """Return the record indices of each critic in a stack (padded), and their number.
        Assignment is by position in a public permutation: for a fixed number of records, replacing
        one moves no other.
        """
        if self.count == 1:
            return torch.arange(len(shard))[None], torch.tensor([len(shard)])
        order = torch.randperm(len(shard), generator=streams.public("subsets"))
        subsets = [order[critic :: self.count] for critic in members]
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
        chosen = torch.gather(order, 1, torch.arange(self.batch) % sizes[:, None])
        images, labels = shard.rows(torch.gather(index, 1, chosen))
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

    def descend(
        self,
        critics: Tensors,
        moments: Tensors,
        real: Callable[[RandomStreams], tuple[Tensor, Tensor]],
        fake: Callable[[Tensor, RandomStreams], Tensor],
        streams: RandomStreams,
    ) -> None:
        """Take one training step for all critics of a stack, in place, each on records of its own
        subset.

        fake: (labels (k, batch), streams) -> images with these labels. Pairing a real image with a
            fake of another label would give the critic no information about either label.
        """
        images, labels = real(streams)
        mix = torch.rand(tuple(labels.shape), generator=streams.public("mix")).to(self.nets.device)
        leaves = trainable(critics)
        fakes = fake(labels, streams)
        losses = self.losses.critic(self.nets.score(leaves), images, fakes, labels, mix)
        adam_step(critics, weight_gradients(losses, leaves), moments, *self.adam)
        critics.update(power_iteration(critics, stacked=True))

    def prepare(self, number: int, shard: Shard, streams: RandomStreams) -> State:
        """Warm up a group: each critic trains against its own temporary generator, on its own
        records only (GS-WGAN, section 5.1). Without records there is nothing to learn."""
        if not len(shard):
            return {}
        group, nets = self.groups[number], self.nets
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
                self.descend(
                    critics,
                    moments,
                    lambda streams: self.records(subsets, shard, streams),
                    rival_fakes,
                    step_streams.at("critic", critic_step),
                )
            latents, labels = nets.inputs((len(members), self.batch), step_streams.at("rival"))
            leaves = trainable(rivals)
            images = functional_apply(nets.generator, leaves, latents, labels)
            loss = self.losses.generator(nets.score(critics), images, labels) / self.batch
            adam_step(rivals, weight_gradients(loss, leaves), rival_moments, *self.adam)
            rivals.update(power_iteration(rivals, stacked=True))
        state: dict[str, Tensors] = {}
        for members_ in group:
            positions = slice(members_.start - members.start, members_.stop - members.start)
            state[f"critics.{members_.start}"] = _select(critics, positions)
            state[f"adam.{members_.start}"] = _select(moments, positions)
        return state

    def assign(self, samples: int, round_: int, streams: RandomStreams) -> dict[int, list[int]]:
        """Return the secret routing of query samples to critics in a round. With ``on_query``,
        critics are sampled before the query is known, by the same sample as for their response."""
        routing_streams = streams.salted("") if self.on_query else streams
        return self.routing.assign(samples, routing_streams.secret("routing", round_))

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

        turn = self.turns[round_ % len(self.turns)]
        if self.on_query:
            turn = [
                self.stacks[critic]
                for critic in self.assign(self.samples_per_query, round_, streams)
            ]
        changed: dict[str, Tensors] = {}
        for members in turn:
            first, subsets = members.start, self.subsets(members, shard, streams)
            # copies: training is in place, and the input state must not change
            critics = self._to_device(self.weights(state, members, streams), copy=True)
            name = f"adam.{first}"
            moments = self._to_device(state[name], True) if name in state else adam_start(critics)
            real = partial(self.records, subsets, shard)
            stack_streams = streams.at("train", round_, "stack", first)
            for step in range(self.steps):
                self.descend(critics, moments, real, pool_fakes, stack_streams.at("step", step))
            changed |= {f"critics.{first}": critics, name: moments}
            if self.companion is not None:
                companions = self._companions(state, members)
                trained_companions = self.companion.train(
                    companions, members, self.batch, real, pool_fakes, round_, stack_streams
                )
                changed |= (
                    {}
                    if trained_companions is None
                    else {f"companions.{first}": trained_companions}
                )
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
                for group in self.groups:
                    critics = _concatenate(
                        [self.weights(state, members, streams) for members in group]
                    )
                    companions = self._companions(state, group[0])
                    outputs = self.outputs(critics, companions, query, round_)
                    yield torch.arange(query.count).repeat(len(outputs)), outputs.flatten(0, 1)
                return
            for members in self.stacks:
                routed = [critic for critic in members if critic in routing]
                critics = self.weights(state, members, streams) if routed else {}
                companions = self._companions(state, members) if routed else None
                for critic in routed:
                    position = slice(critic - members.start, critic - members.start + 1)
                    one_critic = _select(critics, position)
                    one_companion = None if companions is None else _select(companions, position)
                    subquery = query.take(routing[critic])
                    outputs = self.outputs(one_critic, one_companion, subquery, round_)[0]
                    yield torch.tensor(routing[critic]), outputs

        response_streams = streams.at("answer", round_)
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

    def worst_case(
        self, query: Query, shape: tuple[int, int, int], relation: Relation
    ) -> WorstCase:
        """Return neighbours whose first critics give extreme and opposite scores to any query: for
        label 1, whose embedding is far larger than the one that the norm of the table is estimated
        from, scores and gradients exceed any bound. Where a client is removed as a whole, the
        second has no records and contributes nothing."""
        streams = RandomStreams.from_seed(0, "seeded")
        empty = Shard(torch.zeros(0, *shape, dtype=torch.uint8), torch.zeros(0, dtype=torch.long))
        state = {
            f"critics.{members.start}": self.fresh(members, streams) for members in self.stacks
        }

        def taught(sign: float) -> State:
            critics = {name: value.clone() for name, value in state["critics.0"].items()}
            critics["label.weight"][0] = 1e3 * sign
            critics["label.weight"][0, 0] = 1e-3
            critics["label.u"][0] = torch.eye(self.nets.classes)[0]
            return {**state, "critics.0": critics}

        first, second = (taught(1.0), empty), (taught(-1.0), empty)
        if relation is Relation.ADD_OR_REMOVE_ONE:
            one = Shard(torch.zeros(1, *shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
            first = taught(1.0), one
        return WorstCase(query, first, second)


_WEIGHTS_AT_ONCE, _ON_A_GPU = 2**20, 2**25  # weights of a stack; see scripts/bench_critics.py


def critics_at_once(critic: nn.Module, device: str) -> int:
    """Return how many critics compute as one stack. On a CPU, grouped convolutions of a stack are
    faster than a loop for narrow critics, and slower for critics as wide as the paper's."""
    limit = _ON_A_GPU if device == "cuda" else _WEIGHTS_AT_ONCE
    return max(1, limit // sum(weight.numel() for weight in critic.parameters()))


def _select(networks: Tensors, members: slice) -> Tensors:
    """Select members of a stack; shared entries stay."""
    return {name: value[members] if value.dim() else value for name, value in networks.items()}


def _concatenate(stacks: list[Tensors]) -> Tensors:
    """Concatenate stacks; shared entries are those of the first."""
    [first, *others] = stacks
    if not others:
        return first
    return {
        name: torch.cat([stack_[name] for stack_ in stacks]) if value.dim() else value
        for name, value in first.items()
    }
