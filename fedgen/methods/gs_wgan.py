"""GS-WGAN: gradient-sanitized Wasserstein GAN (Chen, Orekondy, Fritz, NeurIPS 2020).

Critics train on disjoint parts of the private data, without noise, and never leave. A critic that
is asked about generated images answers with the gradient of its score with respect to them, clipped
and noised (equations 8 to 11); the generator's own Jacobian is public. Algorithm 1, in one step:

    critics in a public rotation    n times: descend the WGAN-GP loss (equations 12, 13)
    generator                       images = G(latents, labels)
    critics, as routed              gradients = clip(-dD/dimages, C) + N(0, (2 C sigma)^2)
    generator                       descend gradients * dimages/dweights

One client holds K critics over K parts of its rows (record level); of many clients each holds one
critic (user level). Where this file leaves the published code: all critics of a client answer every
sample, since one record moves their mean by 2C / K alone, or samples are routed one by one; and
critics train on a public rotation instead of when they are drawn. Without these, no argument for
amplification by the draw of a critic holds; ``routing`` and ``critic_schedule`` bring the published
variant back, at its true cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, Protocol

import torch
from dp_accounting import DpEvent, GaussianDpEvent, SampledWithoutReplacementDpEvent
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.losses.wgan_gp import critic_loss, generator_loss
from fedgen.method import (
    TRUSTING,
    Claim,
    ClientProgram,
    Method,
    Plan,
    PublicFacts,
    Query,
    ServerProgram,
    State,
    WorstCase,
)
from fedgen.models.functional import (
    Tensors,
    adam_start,
    adam_step,
    applied,
    generator_start,
    generator_step,
    gradients_of,
    initial,
    likeness,
    part,
    power_iteration,
    settled,
    split,
    stack,
    template,
    trainable,
)
from fedgen.privacy.accounting import claimed_by_rdp
from fedgen.privacy.batches import OwnDraw
from fedgen.privacy.events import Contribution, Relation, Unit, repeat
from fedgen.privacy.mechanisms import Mechanism, NoMechanism, RowGaussian, total
from fedgen.privacy.releases import Local, Secure, Sent, Trusted
from fedgen.privacy.routing import Mode, Routing, Sampling

Adam = tuple[float, tuple[float, float]]
"""Learning rate and betas."""


@dataclass(frozen=True)
class Networks:
    """Generator and critic as functions of their weights."""

    generator: nn.Module
    critic: nn.Module
    latent: int
    classes: int
    device: str

    def score(self, critics: Tensors) -> Callable[[Tensor, Tensor], Tensor]:
        """D of a stack as a function of images (k, n, ...) and labels (k, n)."""
        ready = settled(critics)
        return lambda images, labels: applied(self.critic, ready, images, labels)

    def generate(self, generator: Mapping[str, Tensor], latents: Tensor, labels: Tensor) -> Tensor:
        """G(latents, labels), in [0, 1]."""
        images: Tensor = functional_call(self.generator, dict(generator), (latents, labels))
        return images

    def inputs(self, shape: tuple[int, ...], coins: Coins) -> tuple[Tensor, Tensor]:
        """Latents (*shape, latent), Bernoulli(0.5), and labels (*shape), uniform and as balanced
        as their number allows along the last dimension: neither depends on the data."""
        size = (*shape, self.latent)
        latents = torch.randint(0, 2, size, generator=coins.public("latents")).float()
        first = torch.randint(0, self.classes, (*shape[:-1], 1), generator=coins.public("labels"))
        labels = (first + torch.arange(shape[-1])) % self.classes
        return latents.to(self.device), labels.to(self.device)


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
    """The client: ``count`` critics over as many parts of its rows. ``turn`` of them train in a
    round, in stacks of at most ``most``; as many warm up and answer together. A part of the state
    is named by its stack's first critic: weights, Adam's moments, companions."""

    nets: Networks
    mechanism: Mechanism
    routing: Routing
    on_query: bool
    rows_per_query: int
    sanitize: Literal["samples", "parameters"]
    count: int
    turn: int
    most: int
    steps: int
    batch: int
    adam: Adam
    gradient_penalty: float
    drift_penalty: float
    warm_start: int
    companion: Companion | None

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
        """One step of WGAN-GP for all critics of a stack, in place, each on rows of its own subset.

        ``fake``: labels (k, batch) -> images with these labels. A fake that is paired with a real
        image of another label teaches a critic nothing about either label.
        """
        images, labels = real(coins)
        mix = torch.rand(tuple(labels.shape), generator=coins.public("mix")).to(self.nets.device)
        leaves = trainable(critics)
        losses = critic_loss(
            self.nets.score(leaves),
            images,
            fake(labels, coins),
            labels,
            mix,
            gradient_penalty=self.gradient_penalty,
            drift_penalty=self.drift_penalty,
        )
        adam_step(critics, gradients_of(losses, leaves), moments, *self.adam)
        critics.update(power_iteration(critics, stacked=True))

    def prepare(self, number: int, shard: Shard, coins: Coins) -> State:
        """Warm start of a group: each critic against a throw-away generator of its own, fed by its
        own rows alone (paper, section 5.1). Without rows there is nothing to learn."""
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
            loss = generator_loss(nets.score(critics), images, labels) / self.batch
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

    def answer(self, state: State, query: Query, shard: Shard, round_: int, coins: Coins) -> Sent:
        """The routed critics' gradients, sanitized: a function of the critics alone, but that a
        client that may be removed as a whole contributes nothing without rows."""
        removed = not len(shard) and self.mechanism.relation is Relation.ADD_OR_REMOVE_ONE
        draw = self.draw(query.count, round_, coins)

        def answers() -> Iterator[tuple[Tensor, Tensor]]:
            if self.routing.mode == "mean":
                for group in self.groups:
                    critics = _side_by_side([self.weights(state, each, coins) for each in group])
                    companions = self._companions(state, group[0])
                    rows = self._gradients(critics, companions, query, round_)
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
                    rows = self._gradients(one, with_it, asking, round_)[0]
                    yield torch.tensor(draw[critic]), rows

        if self.sanitize == "samples":
            shape = tuple(query.rows["images"].shape)
        else:
            shape = (query.count, sum(p.numel() for p in self.nets.generator.parameters()))
        here = coins.at("answer", round_)
        return self.mechanism.release(shape, answers(), here, contributes=not removed)

    def worst_case(self, rows: int, shape: tuple[int, int, int], relation: Relation) -> WorstCase:
        """Neighbours whose first critic adores or abhors whatever it is asked about. Labels other
        than 0 have embeddings out of all proportion to the one that their norm is estimated by, so
        that gradients are longer than any clip norm, and opposite. Where a client is removed as a
        whole, the second has no rows, and so contributes nothing."""
        coins = Coins.of(0, "seeded")
        empty = Shard(torch.zeros(0, *shape, dtype=torch.uint8), torch.zeros(0, dtype=torch.long))
        state = {f"critics.{each.start}": self.fresh(each, coins) for each in self.stacks}

        def taught(feeling: float) -> State:
            critics = {name: value.clone() for name, value in state["critics.0"].items()}
            critics["label.weight"][0] = 1e3 * feeling
            critics["label.weight"][0, 0] = 1e-3
            critics["label.u"][0] = torch.eye(self.nets.classes)[0]
            return {**state, "critics.0": critics}

        labels = torch.ones(rows, dtype=torch.long)
        query = Query({"images": torch.full((rows, *shape), 0.5), "labels": labels})
        if self.sanitize == "parameters":
            weights = initial(self.nets.generator, coins.public("generator"))
            latents = self.nets.inputs((self.batch,), coins)[0][None]
            labels = torch.ones(1, self.batch, dtype=torch.long)
            query = Query({"latents": latents, "labels": labels}, weights)
        first, second = (taught(1.0), empty), (taught(-1.0), empty)
        if relation is Relation.ADD_OR_REMOVE_ONE:
            row = Shard(torch.zeros(1, *shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
            first = taught(1.0), row
        return WorstCase(query, first, second)

    def _gradients(
        self, critics: Tensors, companions: Tensors | None, query: Query, round_: int
    ) -> Tensor:
        """What each critic of a stack answers to each row, (k, rows, ...)."""
        if self.sanitize == "parameters":
            return vmap(lambda critic: self._parameter_row(critic, query))(critics)
        rows, count = self._sample_rows(critics, query), query.count
        if self.companion is None or companions is None:
            return rows
        images, labels = (
            query.rows[name].to(self.nets.device).expand(len(rows), count, *rest)
            for name, rest in (("images", rows.shape[2:]), ("labels", ()))
        )
        return self.companion.joined(rows, companions, images, labels, round_)

    def _sample_rows(self, critics: Tensors, query: Query) -> Tensor:
        """-dD/dimages of each critic: the upstream factor of equation 11."""
        images, labels = (query.rows[name].to(self.nets.device) for name in ("images", "labels"))
        size = len(critics["score.weight"])
        at = images.detach().expand(size, *images.shape).requires_grad_()
        loss = generator_loss(self.nets.score(critics), at, labels.expand(size, -1))
        return torch.autograd.grad(loss, at)[0]

    def _parameter_row(self, critic: Tensors, query: Query) -> Tensor:
        """The gradient of the generator's loss with respect to its weights: one row."""
        latents, labels = (query.rows[n][0].to(self.nets.device) for n in ("latents", "labels"))
        weights, spectral = split({n: v.to(self.nets.device) for n, v in query.shared.items()})

        def loss(given: Tensors) -> Tensor:
            images = self.nets.generate({**given, **spectral}, latents, labels)
            scores: Tensor = functional_call(self.nets.critic, critic, (images, labels))
            return -scores.mean()

        gradients = grad(loss)(weights)
        return torch.cat([gradients[name].flatten() for name in sorted(weights)])[None]


@dataclass(frozen=True)
class Generator:
    """The server: the generator, its Adam moments, and the average that is published. Everything
    here is post-processing."""

    nets: Networks
    sanitize: Literal["samples", "parameters"]
    batch: int
    fakes_per_label: int
    adam: Adam
    ema: float

    def init(self, coins: Coins) -> Tensors:
        """Fresh weights."""
        weights = initial(self.nets.generator, coins.public("generator"))
        state = generator_start(weights)
        return {name: value.to(self.nets.device) for name, value in state.items()}

    def broadcast(self, state: Mapping[str, Tensor], round_: int, coins: Coins) -> Tensors:
        """Fresh fakes for the critics to train on, (classes, fakes per label, ...): a byte a pixel,
        as real images have."""
        labels = torch.arange(self.nets.classes).repeat_interleave(self.fakes_per_label)
        latents, _ = self.nets.inputs((len(labels),), coins.at("broadcast", round_))
        with torch.no_grad():
            images = self.nets.generate(
                part(state, "generator"), latents, labels.to(self.nets.device)
            )
        pixels = (images * 255).round().to(torch.uint8)
        return {"images": pixels.view(self.nets.classes, -1, *images.shape[1:])}

    def query(self, state: Mapping[str, Tensor], round_: int, coins: Coins) -> Query:
        """A batch of images and labels, or what makes them, to be judged."""
        latents, labels = self.nets.inputs((self.batch,), coins.at("query", round_))
        weights = part(state, "generator")
        if self.sanitize == "parameters":
            return Query({"latents": latents[None], "labels": labels[None]}, weights)
        with torch.no_grad():
            return Query({"images": self.nets.generate(weights, latents, labels), "labels": labels})

    def gradient(
        self, state: Mapping[str, Tensor], answers: Tensor, round_: int, coins: Coins
    ) -> Tensors:
        """The generator's gradient from the answers: their product with its Jacobian."""
        generator, answers = part(state, "generator"), answers.to(self.nets.device)
        if self.sanitize == "parameters":
            weights, _ = split(generator)
            names = sorted(weights)
            pieces = torch.split(answers[0], [weights[name].numel() for name in names])
            return {n: p.view_as(weights[n]) for n, p in zip(names, pieces, strict=True)}
        latents, labels = self.nets.inputs((self.batch,), coins.at("query", round_))
        leaves = trainable(generator)
        images = self.nets.generate(leaves, latents, labels)
        return gradients_of(images * (answers / self.batch), leaves)

    def update(
        self, state: Mapping[str, Tensor], answers: Tensor, round_: int, coins: Coins
    ) -> Tensors:
        """One step of Adam, and the average."""
        gradients = self.gradient(state, answers, round_, coins)
        return generator_step(state, gradients, self.adam, self.ema)

    def sample(self, weights: Mapping[str, Tensor], labels: Tensor, coins: Coins) -> Tensor:
        """Images of the published average, one per label."""
        latents, _ = self.nets.inputs((len(labels),), coins)
        with torch.no_grad():
            return self.nets.generate(weights, latents, labels.to(self.nets.device)).cpu()

    def recognize(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, coins: Coins
    ) -> Tensor:
        """By the nearest of 100 samples of each label: critics stay with the clients."""
        made = torch.arange(self.nets.classes).repeat_interleave(100)
        return likeness(images, labels, self.sample(part(state, "average"), made, coins), made)


def gs_wgan(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    generator: Callable[..., nn.Module],
    critic: Callable[..., nn.Module],
    latent: int,
    batch: int,
    fakes_per_label: int,
    generator_learning_rate: float,
    generator_betas: tuple[float, float],
    ema: float,
    critics: int,
    critics_per_step: int,
    critic_schedule: Literal["public", "on_query"],
    critic_steps: int,
    critic_batch: int,
    critic_learning_rate: float,
    critic_betas: tuple[float, float],
    gradient_penalty: float,
    drift_penalty: float,
    warm_start: int,
    clip: float,
    sanitize: Literal["samples", "parameters"],
    routing: Mode,
    answerers: int,
    cohort_sampling: Sampling,
    draws: Literal["server", "clients"],
    companion: Callable[..., Companion] | None,
    device: str,
) -> Method:
    """GS-WGAN for these public parameters.

    Args:
        noise_multiplier: noise std over the sensitivity 2C of an answered row; None neither clips
            nor noises.
        batch: images per generator step. critic_batch: real (and fake) images per critic step.
        fakes_per_label: images of each label that a round's critics train on.
        ema: decay of the average of the generator that is published.
        critics: K, in the keeping of a single client; each of several clients holds one.
        critics_per_step: width of the public rotation: the critics of one client, or the clients,
            that train in a step.
        critic_schedule: "public" trains a rotation, "on_query" whoever the step's draw chose.
        warm_start: generator steps of each critic's own throw-away GAN before the run.
        clip: C. sanitize: "samples" clips the gradient with respect to each image, "parameters"
            the gradient with respect to the generator's weights (the paper's ablation).
        routing, answerers, cohort_sampling: see ``Routing``; over critics for one client, over
            clients for several.
        draws: who draws clients: the server, which asks those alone; or each client, by a secret
            coin for each round (per_step), and those not drawn answer noise alone.
        companion: of each critic (DP-GAN-DPAC), or None.

    Raises:
        FedgenError: for parameters that contradict each other.
    """
    federated = facts.clients > 1
    count = 1 if federated else critics
    on_query = critic_schedule == "on_query"
    _check(facts, count, critics_per_step, on_query, sanitize, routing, answerers, cohort_sampling)
    by_clients = draws == "clients"
    _check_draws(facts, by_clients, on_query, routing, cohort_sampling)
    if companion is not None and sanitize == "parameters":
        raise FedgenError(
            "method.sanitize", "parameters have no companion's share", "set it to samples"
        )
    # the draw that amplifies: of a client by the server, or of a critic by the one client
    among_clients = Routing(routing, facts.clients, answerers, cohort_sampling)
    among_critics = Routing(routing, count, answerers)
    nobody = Routing("mean", 1)
    own = OwnDraw()
    if by_clients:
        own = OwnDraw(answerers / facts.clients, facts.draws_are_hidden)
        among_clients = Routing("mean", facts.clients)
    inside, cohort = (nobody, among_clients) if federated else (among_critics, nobody)

    unit = Unit.CLIENT if federated else Unit.RECORD
    meeting = facts.aggregation(cohort.answers_per_row, clip / own.rate)
    relation = Relation.REPLACE_ONE
    if by_clients or (federated and not cohort.drawn and not isinstance(meeting, Local)):
        relation = Relation.ADD_OR_REMOVE_ONE
    mechanism: Mechanism = NoMechanism(inside, unit, own)
    if noise_multiplier is not None:
        mechanism = RowGaussian(
            clip, noise_multiplier, inside, not on_query, unit, relation, own, meeting
        )
    nets = Networks(
        template(generator(latent=latent, classes=facts.classes, shape=facts.shape)),
        template(critic(classes=facts.classes, shape=facts.shape)),
        latent,
        facts.classes,
        device,
    )
    rows, answer = batch, tuple[int, ...](facts.shape)
    if sanitize == "parameters":
        rows, answer = 1, (sum(p.numel() for p in nets.generator.parameters()),)
    client = Critics(
        nets,
        mechanism,
        inside,
        on_query and not federated,
        rows,
        sanitize,
        count,
        1 if federated else min(critics_per_step, count),
        at_once(nets.critic, device),
        critic_steps,
        critic_batch,
        (critic_learning_rate, critic_betas),
        gradient_penalty,
        drift_penalty,
        warm_start,
        companion(classes=facts.classes, shape=facts.shape, device=device) if companion else None,
    )
    server = Generator(
        nets,
        sanitize,
        batch,
        fakes_per_label,
        (generator_learning_rate, generator_betas),
        ema,
    )
    return Method(
        ClientProgram(
            len(client.groups) if warm_start else 0,
            client.prepare,
            client.train,
            client.answer,
            draws_anew=not client.on_query,
        ),
        ServerProgram(
            server.init,
            server.broadcast,
            server.query,
            server.update,
            lambda state: part(state, "average"),
            server.sample,
            server.recognize,
            lambda *_: {},
        ),
        _plan(mechanism, rows, answer, cohort if federated else inside, on_query, facts),
        cohort,
        None if federated and on_query else min(critics_per_step, facts.clients),
        lambda: [client.worst_case(rows, facts.shape, relation)],
        total(mechanism),
    )


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


def _plan(
    mechanism: Mechanism,
    rows: int,
    answer: tuple[int, ...],
    draw: Routing,
    on_query: bool,
    facts: PublicFacts,
) -> Plan:
    """What a run promises to spend at most. ``draw``: of clients, or of the one client's critics.

    Federated, the server knows whom it asked and sees each answer by itself: a client's cost is
    what it answered. In the release view alone the draw of clients is secret, and what is published
    follows from the sums of the answers, in which the noise of all who answer adds up (nobody who
    answers is this adversary: they know their own). One client draws its critic in secret: the draw
    amplifies against the server too, and so do coins that clients flip themselves.

    Where the noise is made for the sum of the answers, ``mechanism``'s is that of the sum.
    """
    federated = facts.clients > 1
    hidden = not on_query and (facts.draws_are_hidden or not federated)
    noise = mechanism.noise_multiplier if isinstance(mechanism, RowGaussian) else None
    meeting, own = mechanism.aggregation, mechanism.draw
    local, trusted = isinstance(meeting, Local), isinstance(meeting, Trusted)
    by_clients = own.rate < 1
    of_sums = federated and local and facts.sums_are_whole and draw.count_is_fixed
    of_sums = of_sums and not by_clients  # their own bound holds for everybody

    def server(answered: int) -> DpEvent:
        if trusted:
            return repeat(Contribution(), answered)
        if federated and not by_clients:
            return mechanism.event(answered)
        return repeat(mechanism.event(rows), answered // rows)

    def release(rounds: int) -> DpEvent:
        assert noise is not None
        if of_sums:
            return repeat(draw.event_of_sums(rows, noise, hidden), rounds)
        if by_clients:
            return repeat(mechanism.event(rows), rounds)
        return repeat(draw.event(rows, noise, hidden), rounds)

    def seen(answered: int) -> DpEvent:
        assert noise is not None
        everybody = Routing("mean", draw.answers_per_row if of_sums else 1)
        return everybody.event_of_sums(answered, noise, hidden=False)

    if noise is None:
        reason: str | None = "nothing is clipped and nothing is noised"
    elif by_clients:
        reason = None if own.hidden else "a client that fails shows by the gap whom a draw chose"
    elif not draw.drawn:
        reason = "everybody answers every sample: there is no draw"
    elif on_query:
        reason = "critics train when they are drawn, so their state tells of past draws"
    elif draw.sampling == "poisson":
        reason = "a Poisson cohort shows who is absent by a missing answer"
    elif not hidden:
        reason = "a client that fails shows by the gap whom a draw chose"
    else:
        reason = None
    who = "clients" if federated else "critics"
    as_published: DpEvent = GaussianDpEvent(noise or math.inf)
    if draw.population > 1:
        as_published = SampledWithoutReplacementDpEvent(draw.population, 1, as_published)
    by = f"secret draw of {draw.take} of {draw.population} {who}" if reason is None else None
    if by_clients:
        by = f"secret coins of clients at rate {own.rate:.4g}" if reason is None else None
    asked = federated and not by_clients
    server_reason = "the server knows whom it asks" if asked and by else reason
    published = trusted or (asked and not (isinstance(meeting, Secure) and not draw.drawn))
    if of_sums and noise is not None and draw.answers_per_row > 1:
        by = f"{by}, whose noise adds up" if by else None
        reason = reason and f"{reason}; the noise of those who answer adds up"
    return Plan(
        unit=Unit.CLIENT if federated else Unit.RECORD,
        relation=mechanism.relation,
        sampler=f"coin of each client at rate {own.rate:.4g}"
        if by_clients
        else f"{draw.sampling} draw of {draw.take} of {draw.population} {who}, "
        f"{draw.mode.replace('_', ' ')}"
        if draw.drawn
        else "none",
        rows_per_round=rows,
        answer=lambda rows, _: (rows, *answer),
        longest=mechanism.longest(math.prod(answer))
        if isinstance(mechanism, RowGaussian) and local
        else math.inf,
        server=server,
        release=release if published and noise is not None else None,
        seen=seen if published and noise is not None else None,
        amplified_by={"server": None if asked or trusted else by, "release": by},
        reasons={"server": TRUSTING if trusted else server_reason, "release": reason},
        claim=None
        if noise is None or draw.mode == "mean"
        else Claim(
            lambda rounds, delta: claimed_by_rdp(
                repeat(as_published, rounds * rows), delta, Relation.REPLACE_ONE
            ),
            f"RDP of subsampling without replacement at rate 1/{draw.population}, a draw for each "
            "answered row",
            "GS-WGAN (Chen et al. 2020), theorem 4.1 and appendix A",
        ),
        aggregation=meeting,
        extents=(mechanism.extent,) if isinstance(mechanism, RowGaussian) else (),
    )


def _check(
    facts: PublicFacts,
    count: int,
    critics_per_step: int,
    on_query: bool,
    sanitize: str,
    routing: str,
    answerers: int,
    cohort_sampling: str,
) -> None:
    """Raises FedgenError for parameters that contradict each other."""
    federated = facts.clients > 1
    population = facts.clients if federated else count
    if facts.rows is not None and count > facts.rows:
        raise FedgenError(
            "method.critics",
            f"{count} critics are more than {facts.rows} rows",
            "lower it: each critic needs rows of its own",
        )
    if not 1 <= answerers <= population:
        raise FedgenError(
            "method.answerers", f"{answerers} of {population} cannot be drawn", "lower it"
        )
    if cohort_sampling == "poisson" and not federated:
        raise FedgenError(
            "method.cohort_sampling",
            "one client draws a fixed number of critics",
            "set method.cohort_sampling=fixed, or take several clients",
        )
    if on_query and not federated and critics_per_step != 1:
        raise FedgenError(
            "method.critics_per_step",
            "critics that train when they are drawn train one by one",
            "set method.critics_per_step=1",
        )
    if on_query and routing == "mean":
        raise FedgenError(
            "method.critic_schedule",
            "on_query needs a draw, and routing=mean has none",
            "set method.critic_schedule=public",
        )
    if sanitize == "parameters" and routing == "per_sample":
        raise FedgenError(
            "method.routing",
            "a gradient of the generator's weights is one row, not one per sample",
            "set method.routing=per_step or mean",
        )


def _check_draws(
    facts: PublicFacts, by_clients: bool, on_query: bool, routing: str, cohort_sampling: str
) -> None:
    """Raises FedgenError for draws of clients, or sums of their answers, that cannot be."""
    federated, summed = facts.clients > 1, facts.aggregating in ("secure", "trusted")
    if facts.unit is not None and facts.unit is not (Unit.CLIENT if federated else Unit.RECORD):
        raise FedgenError(
            "privacy.unit",
            f"cannot be {facts.unit.value} with {facts.clients} client(s)",
            "several clients hold a critic each and are protected as a whole; one protects records",
        )
    if by_clients and (not federated or routing != "per_step" or on_query):
        raise FedgenError(
            "method.draws",
            "clients flip a coin a round: several clients, and all rows of a round alike",
            "take several clients, method.routing=per_step and method.critic_schedule=public, or "
            "method.draws=server",
        )
    if not summed or not federated:
        return
    if routing == "per_sample":
        raise FedgenError(
            "privacy.aggregation",
            f"{facts.aggregating} adds up answers of the same clients to every row",
            "set method.routing=mean or per_step, or privacy.aggregation=local",
        )
    if cohort_sampling == "poisson" and routing != "mean" and not by_clients:
        raise FedgenError(
            "privacy.aggregation",
            f"{facts.aggregating} counts on a number of answers, and a Poisson cohort has any",
            "set method.draws=clients, or method.cohort_sampling=fixed",
        )
