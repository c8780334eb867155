"""The client: critics over disjoint parts of private rows.

They train without noise and never leave. What they answer to a question, a *ballot* of each critic,
is bounded, averaged and noised by the mechanism: a gradient (GS-WGAN), or a vote (DataLens, G-PATE,
PATE-GAN). Parts are by position in a public permutation, critics train on a public schedule, and
each has weights, Adam's moments and coins of its own: replacing one record changes one critic.
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

from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.losses.wgan_gp import generator_loss
from fedgen.method import PublicFacts, Query, State, WorstCase
from fedgen.models.functional import (
    Adam,
    Tensors,
    adam_start,
    adam_step,
    applied,
    gradients_of,
    initial,
    power_iteration,
    settled,
    stack,
    template,
    trainable,
)
from fedgen.parameters import Betas, Decay, NonNegativeInt
from fedgen.privacy.events import Relation
from fedgen.privacy.mechanisms import Mechanism
from fedgen.privacy.releases import Sent
from fedgen.privacy.routing import Routing

Score = Callable[[Tensor, Tensor], Tensor]
"""Images (k, n, ...) and labels (k, n) -> scores (k, n)."""

Ballot = Callable[[Tensors, Query], Tensor]
"""A stack of k critics and a question -> each one's raw answer to each row, (k, rows, ...)."""


@dataclass(frozen=True)
class Networks:
    """Generator and critic as functions of their weights."""

    generator: nn.Module
    critic: nn.Module
    latent: int
    classes: int
    device: str

    def score(self, critics: Tensors) -> Score:
        """D of a stack as a function of images (k, n, ...) and labels (k, n)."""
        ready = settled(critics)
        return lambda images, labels: applied(self.critic, ready, images, labels)

    def generate(self, generator: Mapping[str, Tensor], latents: Tensor, labels: Tensor) -> Tensor:
        """G(latents, labels), in [0, 1]."""
        images: Tensor = functional_call(self.generator, dict(generator), (latents, labels))
        return images

    @property
    def generator_weights(self) -> int:
        """Numbers that the generator trains."""
        return sum(p.numel() for p in self.generator.parameters())

    def inputs(self, shape: tuple[int, ...], coins: Coins) -> tuple[Tensor, Tensor]:
        """Latents (*shape, latent), Bernoulli(0.5), and labels (*shape), uniform and as balanced
        as their number allows along the last dimension: neither depends on the data."""
        size = (*shape, self.latent)
        latents = torch.randint(0, 2, size, generator=coins.public("latents")).float()
        first = torch.randint(0, self.classes, (*shape[:-1], 1), generator=coins.public("labels"))
        labels = (first + torch.arange(shape[-1])) % self.classes
        return latents.to(self.device), labels.to(self.device)


class Settings(TypedDict):
    """What all methods of an ensemble take.

    generator, critic: the networks. latent: dimensions of the generator's input.
    batch: images of a question. fakes_per_label: images of each label that a round's critics train
        on.
    ema: decay of the average of the generator that is published.
    critics: K, in the keeping of a single client; each of several clients holds one.
    critics_per_step: width of the public rotation: the critics of one client, or the clients, that
        train in a step.
    critic_steps: of a critic's turn. critic_batch: real (and fake) images of such a step.
    warm_start: generator steps of each critic's own throw-away GAN before the run.
    """

    generator: Callable[..., nn.Module]
    critic: Callable[..., nn.Module]
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
    """The networks for these images and labels."""
    latent, classes = settings["latent"], facts.classes
    return Networks(
        template(settings["generator"](latent=latent, classes=classes, shape=facts.shape)),
        template(settings["critic"](classes=classes, shape=facts.shape)),
        latent,
        classes,
        settings["device"],
    )


@dataclass(frozen=True)
class Losses:
    """What critics descend: (score, real, fake, labels, mix) -> (k,), mix being uniforms, one for
    each pair; and what a generator descends: (score, images, labels) -> a sum over images."""

    critic: Callable[[Score, Tensor, Tensor, Tensor, Tensor], Tensor]
    generator: Callable[[Score, Tensor, Tensor], Tensor]


def image_gradients(nets: Networks) -> Ballot:
    """-dD/dimages of each critic, (k, rows, channels, height, width): the upstream factor of
    GS-WGAN's equation 11. That of a discriminator's -log D is this times 1 - D."""

    def ballot(critics: Tensors, query: Query) -> Tensor:
        images, labels = (query.rows[name].to(nets.device) for name in ("images", "labels"))
        size = len(critics["score.weight"])
        at = images.detach().expand(size, *images.shape).requires_grad_()
        loss = generator_loss(nets.score(critics), at, labels.expand(size, -1))
        return torch.autograd.grad(loss, at)[0]

    return ballot


class Companion(Protocol):
    """A network beside each critic: it trains when the critic does, on rows of the same subset, and
    has a share in what the critic answers. Like the critic's, its state is a function of these rows
    and of public coins alone."""

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
        """A stack's state after its turn, None before its first. ``real``: coins -> rows of each
        critic's subset (k, batch, ...) and their labels; ``fake``: labels -> images."""

    def joined(
        self, rows: Tensor, state: Tensors, images: Tensor, labels: Tensor, round_: int
    ) -> Tensor:
        """The critics' gradients with respect to images (k, n, ...), and the companions' own."""


@dataclass(frozen=True)
class Critics:
    """``count`` critics over as many parts of a client's rows. ``turn`` of them train in a round,
    in stacks of at most ``most``; as many warm up and answer together. A part of the state is named
    by its stack's first critic: weights, Adam's moments, companions.

    ballot: of a stack; answer: the shape of one row of it.
    routing: the draw of critics that answer a row; on_query: who is drawn trains, and nobody else,
        for rows_per_query rows.
    steps, batch, adam, losses: of a critic's turn. warm_start: steps before the run.
    """

    nets: Networks
    mechanism: Mechanism
    ballot: Ballot
    answer: tuple[int, ...]
    routing: Routing
    on_query: bool
    rows_per_query: int
    count: int
    turn: int
    most: int
    steps: int
    batch: int
    adam: Adam
    losses: Losses
    warm_start: int
    companion: Companion | None = None

    @cached_property
    def turns(self) -> list[list[range]]:
        """The public rotation: whose turn it is, in stacks of about equal size."""
        turns = []
        for first in range(0, self.count, self.turn):
            last = min(first + self.turn, self.count)
            size = math.ceil((last - first) / math.ceil((last - first) / self.most))
            turns.append([range(at, min(at + size, last)) for at in range(first, last, size)])
        return turns

    @cached_property
    def stacks(self) -> list[range]:
        """All stacks."""
        return [stack for turn in self.turns for stack in turn]

    @cached_property
    def groups(self) -> list[list[range]]:
        """Stacks that warm up and answer together. Those with companions do not: these come with
        a stack's first turn."""
        found: list[list[range]] = []
        for each in self.stacks:
            if found and self.companion is None and each.stop - found[-1][0].start <= self.most:
                found[-1].append(each)
            else:
                found.append([each])
        return found

    def subsets(self, members: range, shard: Shard, coins: Coins) -> tuple[Tensor, Tensor]:
        """The rows of each critic in a stack (padded), and how many. By position in a public
        permutation: of a fixed number of rows, replacing one moves no other."""
        if self.count == 1:
            return torch.arange(len(shard))[None], torch.tensor([len(shard)])
        order = torch.randperm(len(shard), generator=coins.public("subsets"))
        parts = [order[critic :: self.count] for critic in members]
        return nn.utils.rnn.pad_sequence(parts, True), torch.tensor([len(p) for p in parts])

    def rows(
        self, subsets: tuple[Tensor, Tensor], shard: Shard, coins: Coins
    ) -> tuple[Tensor, Tensor]:
        """A batch of each critic's own rows (k, batch, ...), and their labels (k, batch)."""
        index, sizes = subsets
        flips = torch.rand(index.shape, generator=coins.public("rows"))
        padding = torch.arange(index.shape[1]) >= sizes[:, None]
        order = torch.argsort(flips.masked_fill(padding, 2.0))
        # rows in random order, from the start again where a subset is smaller than a batch
        picks = torch.gather(order, 1, torch.arange(self.batch) % sizes[:, None])
        images, labels = shard.rows(torch.gather(index, 1, picks))
        return images.to(self.nets.device), labels.to(self.nets.device)

    def fresh(self, members: range, coins: Coins) -> Tensors:
        """Initial weights of a stack, each critic's by coins of its own."""
        generators = [coins.public("critic", critic, "init") for critic in members]
        return self._here(stack([initial(self.nets.critic, each) for each in generators]))

    def weights(self, state: State, members: range, coins: Coins) -> Tensors:
        """A stack's weights; those that never trained are made anew from their coins."""
        name = f"critics.{members.start}"
        return self._here(state[name]) if name in state else self.fresh(members, coins)

    def _here(self, tensors: Mapping[str, Tensor], copy: bool = False) -> Tensors:
        return {name: value.to(self.nets.device, copy=copy) for name, value in tensors.items()}

    def descend(
        self,
        critics: Tensors,
        moments: Tensors,
        real: Callable[[Coins], tuple[Tensor, Tensor]],
        fake: Callable[[Tensor, Coins], Tensor],
        coins: Coins,
    ) -> None:
        """One step for all critics of a stack, in place, each on rows of its own subset.

        ``fake``: labels (k, batch) -> images with these labels. A fake that is paired with a real
        image of another label teaches a critic nothing about either label.
        """
        images, labels = real(coins)
        mix = torch.rand(tuple(labels.shape), generator=coins.public("mix")).to(self.nets.device)
        leaves = trainable(critics)
        fakes = fake(labels, coins)
        losses = self.losses.critic(self.nets.score(leaves), images, fakes, labels, mix)
        adam_step(critics, gradients_of(losses, leaves), moments, *self.adam)
        critics.update(power_iteration(critics, stacked=True))

    def prepare(self, number: int, shard: Shard, coins: Coins) -> State:
        """Warm start of a group: each critic against a throw-away generator of its own, fed by its
        own rows alone (GS-WGAN, section 5.1). Without rows there is nothing to learn."""
        if not len(shard):
            return {}
        group, nets = self.groups[number], self.nets
        members = range(group[0].start, group[-1].stop)
        critics, subsets = self.fresh(members, coins), self.subsets(members, shard, coins)
        moments = adam_start(critics)
        generators = [coins.public("critic", critic, "rival") for critic in members]
        rivals = self._here(stack([initial(nets.generator, each) for each in generators]))
        rival_moments = adam_start(rivals)

        def rival_fakes(labels: Tensor, coins: Coins) -> Tensor:
            latents = nets.inputs(tuple(labels.shape), coins)[0]
            with torch.no_grad():
                return applied(nets.generator, rivals, latents, labels)

        for step in range(self.warm_start):
            here = coins.at("warm_start", members.start, step)
            for inner in range(self.steps):
                self.descend(
                    critics,
                    moments,
                    lambda coins: self.rows(subsets, shard, coins),
                    rival_fakes,
                    here.at("critic", inner),
                )
            latents, labels = nets.inputs((len(members), self.batch), here.at("rival"))
            leaves = trainable(rivals)
            images = applied(nets.generator, leaves, latents, labels)
            loss = self.losses.generator(nets.score(critics), images, labels) / self.batch
            adam_step(rivals, gradients_of(loss, leaves), rival_moments, *self.adam)
            rivals.update(power_iteration(rivals, stacked=True))
        state: dict[str, Tensors] = {}
        for each in group:
            some = slice(each.start - members.start, each.stop - members.start)
            state[f"critics.{each.start}"] = _members(critics, some)
            state[f"adam.{each.start}"] = _members(moments, some)
        return state

    def draw(self, rows: int, round_: int, coins: Coins) -> dict[int, list[int]]:
        """A round's secret routing of rows to critics. Critics that train on query draw before
        there is a question, the same as for their answer."""
        unasked = coins.salted("") if self.on_query else coins
        return self.routing.draw(rows, unasked.secret("routing", round_))

    def train(
        self, state: State, broadcast: Mapping[str, Tensor], shard: Shard, round_: int, coins: Coins
    ) -> State:
        """The critics whose turn it is (or that the round draws) descend; without rows, none."""
        if not len(shard):
            return {}
        pool = broadcast["images"].to(self.nets.device) / 255  # (classes, fakes per label, ...)

        def pool_fakes(labels: Tensor, coins: Coins) -> Tensor:
            which = torch.randint(
                pool.shape[1], tuple(labels.shape), generator=coins.public("fakes")
            )
            return pool[labels, which.to(pool.device)]

        turn = self.turns[round_ % len(self.turns)]
        if self.on_query:
            turn = [self.stacks[critic] for critic in self.draw(self.rows_per_query, round_, coins)]
        changed: dict[str, Tensors] = {}
        for members in turn:
            first, subsets = members.start, self.subsets(members, shard, coins)
            # copies: training is in place, and a state that went in must stay as it was
            critics = self._here(self.weights(state, members, coins), copy=True)
            name = f"adam.{first}"
            moments = self._here(state[name], True) if name in state else adam_start(critics)
            real = partial(self.rows, subsets, shard)
            here = coins.at("train", round_, "stack", first)
            for step in range(self.steps):
                self.descend(critics, moments, real, pool_fakes, here.at("step", step))
            changed |= {f"critics.{first}": critics, name: moments}
            if self.companion is not None:
                old = self._companions(state, members)
                new = self.companion.train(old, members, self.batch, real, pool_fakes, round_, here)
                changed |= {} if new is None else {f"companions.{first}": new}
        return changed

    def _companions(self, state: State, members: range) -> Tensors | None:
        name = f"companions.{members.start}"
        return self._here(state[name]) if name in state else None

    def release(self, state: State, query: Query, shard: Shard, round_: int, coins: Coins) -> Sent:
        """The routed critics' ballots, sanitized: a function of the critics alone, but that a
        client that may be removed as a whole contributes nothing without rows."""
        removed = not len(shard) and self.mechanism.relation is Relation.ADD_OR_REMOVE_ONE
        draw = self.draw(query.count, round_, coins)

        def answers() -> Iterator[tuple[Tensor, Tensor]]:
            if self.routing.mode == "mean":
                for group in self.groups:
                    critics = _side_by_side([self.weights(state, each, coins) for each in group])
                    companions = self._companions(state, group[0])
                    rows = self.ballots(critics, companions, query, round_)
                    yield torch.arange(query.count).repeat(len(rows)), rows.flatten(0, 1)
                return
            for members in self.stacks:
                asked = [critic for critic in members if critic in draw]
                critics = self.weights(state, members, coins) if asked else {}
                companions = self._companions(state, members) if asked else None
                for critic in asked:
                    some = slice(critic - members.start, critic - members.start + 1)
                    one = _members(critics, some)
                    with_it = None if companions is None else _members(companions, some)
                    asking = query.take(draw[critic])
                    rows = self.ballots(one, with_it, asking, round_)[0]
                    yield torch.tensor(draw[critic]), rows

        here = coins.at("answer", round_)
        shape = (query.count, *self.answer)
        return self.mechanism.release(shape, answers(), here, contributes=not removed)

    def ballots(
        self, critics: Tensors, companions: Tensors | None, query: Query, round_: int
    ) -> Tensor:
        """What each critic of a stack answers to each row, (k, rows, ...), unbounded."""
        rows, count = self.ballot(critics, query), query.count
        if self.companion is None or companions is None:
            return rows
        images, labels = (
            query.rows[name].to(self.nets.device).expand(len(rows), count, *rest)
            for name, rest in (("images", rows.shape[2:]), ("labels", ()))
        )
        return self.companion.joined(rows, companions, images, labels, round_)

    def worst_case(
        self, query: Query, shape: tuple[int, int, int], relation: Relation
    ) -> WorstCase:
        """Neighbours whose first critics give extreme, opposite scores to whatever they are asked:
        label 1, which has an embedding out of all proportion to the one that the table's norm is
        estimated by, so that scores and gradients are beyond any bound, and opposite. Where a
        client is removed as a whole, the second has no rows, and so contributes nothing."""
        coins = Coins.of(0, "seeded")
        empty = Shard(torch.zeros(0, *shape, dtype=torch.uint8), torch.zeros(0, dtype=torch.long))
        state = {f"critics.{each.start}": self.fresh(each, coins) for each in self.stacks}

        def taught(feeling: float) -> State:
            critics = {name: value.clone() for name, value in state["critics.0"].items()}
            critics["label.weight"][0] = 1e3 * feeling
            critics["label.weight"][0, 0] = 1e-3
            critics["label.u"][0] = torch.eye(self.nets.classes)[0]
            return {**state, "critics.0": critics}

        first, second = (taught(1.0), empty), (taught(-1.0), empty)
        if relation is Relation.ADD_OR_REMOVE_ONE:
            row = Shard(torch.zeros(1, *shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
            first = taught(1.0), row
        return WorstCase(query, first, second)


_WEIGHTS_AT_ONCE, _ON_A_GPU = 2**20, 2**25  # of all critics; scripts/bench_critics.py


def at_once(critic: nn.Module, device: str) -> int:
    """How many critics compute as one stack. On a CPU a stack's grouped convolutions beat a loop
    where critics are narrow, and lose where they are as wide as the paper's."""
    most = _ON_A_GPU if device == "cuda" else _WEIGHTS_AT_ONCE
    return max(1, most // sum(p.numel() for p in critic.parameters()))


def _members(networks: Tensors, some: slice) -> Tensors:
    """A part of a stack; what all have in common stays."""
    return {n: value[some] if value.dim() else value for n, value in networks.items()}


def _side_by_side(stacks: list[Tensors]) -> Tensors:
    """Stacks as one; what all have in common is taken of the first."""
    [first, *others] = stacks
    if not others:
        return first
    return {
        n: torch.cat([each[n] for each in stacks]) if value.dim() else value
        for n, value in first.items()
    }
