"""What GANs share whose discriminator clients train by DP-SGD: the networks, the server's side, and
what it costs. What a client does with its rows is a method's own.

A round is a discriminator step. Where each client noises in full, it takes n_D of them between two
messages, and the server takes the mean of the clients' discriminators. Where the noise is that of a
sum (``privacy.aggregation``), clients answer gradient sums, and the server takes the steps: later
gradients depend on a client's own steps, so that only the sum for one step can have its noise made
by all together. After n_D steps the server takes one of the generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.gradient_sums import method_of as of_sums
from fedgen.losses.mode_seeking import mode_seeking_loss
from fedgen.method import (
    Method,
    PublicFacts,
    Query,
    ServerProgram,
    State,
    WorstCase,
)
from fedgen.models.functional import (
    Adam,
    Tensors,
    adam_start,
    adam_step,
    flat,
    generator_start,
    generator_step,
    gradients_of,
    initial,
    join,
    part,
    template,
    trainable,
    unflat,
)
from fedgen.privacy.mechanisms import GradientSum, descent
from fedgen.privacy.per_example import ClippedSum, examples_at_once
from fedgen.privacy.releases import Local, Release, Sent

_SHOWN_DECAY = 0.95  # of the accuracy that is logged: figure 4 of "Private GANs, revisited"


@dataclass(frozen=True)
class Networks:
    """Generator and discriminator as functions of their weights."""

    generator: nn.Module
    discriminator: nn.Module
    latent: int
    classes: int
    device: str

    @property
    def at_once(self) -> int:
        """Rows whose gradients are summed together."""
        return examples_at_once(self.device)

    def size(self) -> int:
        """Number of the discriminator's weights."""
        return sum(weights.numel() for weights in self.discriminator.parameters())

    def inputs(self, count: int, coins: Coins) -> tuple[Tensor, Tensor]:
        """Latents (count, latent) and uniform labels (count,): no fake depends on private rows."""
        latents = torch.randn(count, self.latent, generator=coins.public("latents"))
        labels = torch.randint(0, self.classes, (count,), generator=coins.public("labels"))
        return latents.to(self.device), labels.to(self.device)

    def generate(self, generator: Mapping[str, Tensor], latents: Tensor, labels: Tensor) -> Tensor:
        """Images (n, ...) in [0, 1]."""
        images: Tensor = functional_call(self.generator, dict(generator), (latents, labels))
        return images

    def judge(self, discriminator: Tensors, images: Tensor, labels: Tensor) -> Tensor:
        """Logits (n,): D is their sigmoid."""
        logits: Tensor = functional_call(self.discriminator, discriminator, (images, labels))
        return logits


@dataclass(frozen=True)
class Pace:
    """n_D, the discriminator steps for each of the generator; see ``dpgan``."""

    steps: int | Literal["adaptive"]
    floor: float
    decay: float

    def start(self) -> Tensors:
        """No accuracy is known, the ladder's first rung, no steps on it."""
        return {name: torch.zeros(()) for name in ("accuracy", "shown", "rung", "since", "seen")}

    def now(self, pace: Mapping[str, Tensor]) -> int:
        """n_D."""
        if self.steps != "adaptive":
            return self.steps
        tens, step = divmod(int(pace["rung"]), 3)
        return int((1, 2, 5)[step] * 10**tens)

    def after(self, pace: Mapping[str, Tensor], accuracy: Tensor) -> Tensors:
        """Before a step of the generator: the share of fakes that the discriminator tells counts,
        and n_D climbs if its average is below the floor and the grace of 2 / (1 - decay) steps of
        the generator on this rung is over."""
        since, seen = pace["since"] + 1, pace["seen"]

        def average(name: str, decay: float) -> Tensor:
            old = torch.where(seen == 0, accuracy, pace[name])
            return decay * old + (1 - decay) * accuracy

        average_now = average("accuracy", self.decay)
        climbs = (average_now < self.floor) & (since >= round(2 / (1 - self.decay)))
        return {
            "accuracy": average_now,
            "shown": average("shown", _SHOWN_DECAY),
            "rung": pace["rung"] + climbs,
            "since": torch.where(climbs, 0.0, since),
            "seen": seen + 1,
        }


OfRows = Callable[[Tensors, Tensors, Shard, Coins], Iterable[ClippedSum]]
"""(discriminator, generator, rows, coins) -> the clipped sums over the parts of a batch. Alone in
seeing rows."""
Gradient = Callable[[Tensors, Tensors, Tensor, Coins], Tensor]
"""(discriminator, generator, noised sum over the batch's expected size, coins) -> what Adam
descends."""


@dataclass(frozen=True)
class Descent:
    """Steps of the discriminator along noised sums of gradients (lines 4 to 9 of algorithm 1 of
    "Private GANs, revisited"). ``generator``: whether the sums need it."""

    adam: Adam
    gradient: Gradient
    generator: bool

    def step(self, point: Tensors, generator: Tensors, noised: Tensor, coins: Coins) -> Tensors:
        """The next discriminator and Adam's state; changes ``point``."""
        weights, moments = part(point, "weights"), part(point, "adam")
        descended = self.gradient(weights, generator, noised, coins)
        adam_step(weights, unflat(descended, weights), moments, *self.adam)
        return join(weights=weights, adam=moments)


@dataclass(frozen=True)
class Server:
    """Generator, discriminator and their Adams: post-processing. ``loss``: of the generator, from
    what the discriminator says of its images (n,); beside it ``mode_seeking`` of that loss.
    ``logit``: whether the discriminator's sign tells real rows from fakes. ``descent``: of the
    discriminator along sums of clients' gradients; None: clients take its steps."""

    nets: Networks
    fakes: int
    pace: Pace
    adam: Adam
    ema: float
    loss: Callable[[Tensor], Tensor]
    logit: bool
    mode_seeking: float = 0.0
    descent: Descent | None = None

    def init(self, coins: Coins) -> Tensors:
        """Fresh weights."""
        generator = initial(self.nets.generator, coins.public("generator"))
        discriminator = initial(self.nets.discriminator, coins.public("discriminator"))
        state = generator_start(generator) | join(
            discriminator=join(weights=discriminator, adam=adam_start(discriminator))
        )
        here = {name: value.to(self.nets.device) for name, value in state.items()}
        return here | join(pace=self.pace.start() | {"steps": torch.zeros(())})

    def query(self, state: Mapping[str, Tensor], round_: int, coins: Coins) -> Query:
        """n_D steps, from this discriminator, against this generator; or the sum for one."""
        del coins
        if self.descent is not None:
            shared = join(discriminator=join(weights=self._weights(state)))
            if self.descent.generator:
                shared |= join(generator=part(state, "generator"))
            return Query({"step": torch.tensor([round_])}, shared)
        shared = {
            name: value
            for name, value in state.items()
            if name.startswith(("discriminator/", "generator/"))
        }
        return Query({"step": round_ + torch.arange(self.pace.now(part(state, "pace")))}, shared)

    def _weights(self, state: Mapping[str, Tensor]) -> Tensors:
        return part(part(state, "discriminator"), "weights")

    def update(
        self, state: Mapping[str, Tensor], answers: Tensor, round_: int, coins: Coins
    ) -> Tensors:
        """The clients' mean discriminator, or a step of it along the sum of their gradients; after
        n_D steps, one of the generator."""
        before = part(state, "discriminator")
        if self.descent is None:
            found: Tensors = unflat(answers[0].to(self.nets.device), before)
        else:
            point = {name: value.clone() for name, value in before.items()}
            noised = answers[0].to(self.nets.device)
            found = self.descent.step(
                point, part(state, "generator"), noised, coins.at("discriminator", round_)
            )
        taken = found["adam/step"] - before["adam/step"].to(found["adam/step"])
        steps = state["pace/steps"] + taken.round().cpu()
        after = {**state, **join(discriminator=found), "pace/steps": steps}
        if float(steps) < self.pace.now(part(state, "pace")):
            return after  # of sums; or the run ended in between
        after["pace/steps"] = torch.zeros(())
        here, discriminator = coins.at("generator", round_), part(found, "weights")

        latents, labels = self.nets.inputs(self.fakes, here)
        if self.mode_seeking:
            labels = labels[: self.fakes // 2].repeat(2)
        leaves = trainable(part(state, "generator"))
        images = self.nets.generate(leaves, latents, labels)
        logits = self.nets.judge(discriminator, images, labels)
        loss = self.loss(logits).mean()
        if self.mode_seeking:
            loss = loss + self.mode_seeking * mode_seeking_loss(images, latents)
        pace = self.pace.after(part(state, "pace"), (logits.detach() < 0).float().mean().cpu())
        stepped = generator_step(state, gradients_of(loss, leaves), self.adam, self.ema)
        return {**after, **stepped, **join(pace=pace)}

    def shown(
        self, state: Mapping[str, Tensor], held_out: Shard | None, coins: Coins
    ) -> dict[str, float]:
        """n_D; the average share of fakes that are told from real rows; with ``held_out`` rows, the
        share of these and of as many fresh fakes that are told apart now (figures 4 and 5 of
        "Private GANs, revisited")."""
        pace = part(state, "pace")
        found: dict[str, float] = {"discriminator_steps": self.pace.now(pace)}
        if self.logit and pace["seen"]:
            found["accuracy_on_fakes"] = float(pace["shown"])
        if self.logit and held_out is not None:
            images, labels = held_out.rows(torch.arange(len(held_out)))
            fakes = self.sample(part(state, "generator"), labels, coins)
            reals = (self.recognize(state, images, labels, coins) > 0).float().mean()
            caught = (self.recognize(state, fakes, labels, coins) < 0).float().mean()
            found["accuracy_on_held_out"] = float((reals + caught) / 2)
        return found

    def recognize(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, coins: Coins
    ) -> Tensor:
        """By the discriminator, which the server has."""
        del coins
        discriminator = part(part(state, "discriminator"), "weights")
        with torch.no_grad():
            inputs = images.to(self.nets.device), labels.to(self.nets.device)
            return self.nets.judge(discriminator, *inputs).cpu()

    def sample(self, weights: Mapping[str, Tensor], labels: Tensor, coins: Coins) -> Tensor:
        """Images, one per label."""
        latents, _ = self.nets.inputs(len(labels), coins)
        with torch.no_grad():
            return self.nets.generate(weights, latents, labels.to(self.nets.device)).cpu()


def networks(
    facts: PublicFacts,
    generator: Callable[..., nn.Module],
    discriminator: Callable[..., nn.Module],
    latent: int,
    device: str,
) -> Networks:
    """The networks for these images and labels."""
    return Networks(
        template(generator(latent=latent, classes=facts.classes, shape=facts.shape)),
        template(discriminator(classes=facts.classes, shape=facts.shape)),
        latent,
        facts.classes,
        device,
    )


@dataclass(frozen=True)
class Client:
    """What a client answers: where its own steps lead, or its part of the sum for one of the
    server's. It keeps nothing from one answer to the next: Adam's moments come and go with the
    discriminator."""

    nets: Networks
    mechanism: GradientSum
    descent: Descent
    of_rows: OfRows
    steps: bool

    def answer(self, state: State, query: Query, shard: Shard, round_: int, coins: Coins) -> Sent:
        """As the class says."""
        del state
        given = {name: value.to(self.nets.device) for name, value in query.shared.items()}
        start = {name: value.clone() for name, value in part(given, "discriminator").items()}
        generator = part(given, "generator")
        if self.steps:
            return self._taken(start, generator, query.count, shard, round_, coins)
        # the union of Poisson batches at one rate is a Poisson batch of all rows together
        here = coins.at("sum", round_)
        sums = self.of_rows(part(start, "weights"), generator, shard, here)
        return self.mechanism.release((self.nets.size(),), sums, here)

    def _taken(
        self,
        start: Tensors,
        generator: Tensors,
        count: int,
        shard: Shard,
        round_: int,
        coins: Coins,
    ) -> Release:
        """Discriminator and Adam's state after so many steps. Coins are of the message and the
        step, so that questions about overlapping rounds share none."""

        def sums(point: Mapping[str, Tensor], here: Coins) -> Iterable[ClippedSum]:
            return self.of_rows(part(point, "weights"), generator, shard, here)

        def move(point: Mapping[str, Tensor], noised: Tensor, here: Coins) -> Tensors:
            return self.descent.step(dict(point), generator, noised.to(self.nets.device), here)

        steps = [coins.at("steps", round_, "step", number) for number in range(count)]
        return descent(self.mechanism, start, self.nets.size(), sums, move, steps)


def method_of(
    facts: PublicFacts,
    server: Server,
    mechanism: GradientSum,
    of_rows: OfRows,
    descent_: Descent,
    sampling_rate: float,
    source: str,
) -> Method:
    """The method whose discriminator descends along sums over rows: by clients' own steps, or, of
    several clients together, by the server's. ``source``: of the epsilon that is claimed."""
    nets, local = server.nets, isinstance(facts.aggregation(facts.clients), Local)

    client = Client(nets, mechanism, descent_, of_rows, steps=local)
    server = server if local else replace(server, descent=descent_)
    size = 3 * nets.size() + 1 if local else nets.size()
    program = ServerProgram(
        init=server.init,
        query=server.query,
        update=server.update,
        generator=lambda state: part(state, "average"),
        sample=server.sample,
        recognize=server.recognize,
        shown=server.shown,
    )
    return of_sums(
        facts,
        mechanism,
        client.answer,
        size,
        program,
        lambda: worst_case(nets, facts.shape, local),
        sampling_rate,
        source,
    )


def sure_discriminator(nets: Networks, logit: float) -> Tensors:
    """Weights that take every image for a fake, the surer the larger ``logit``; all features are
    positive."""
    weights = initial(nets.discriminator, Coins.of(0, "seeded").public("discriminator"))
    for name, value in weights.items():
        if name.startswith("logit."):
            weights[name] = torch.full_like(value, -logit)
        elif name.startswith("convolutions."):
            weights[name] = value.abs() + (10.0 if name.endswith("bias") else 0.0)
    return weights


def worst_case(nets: Networks, shape: tuple[int, int, int], steps: bool) -> WorstCase:
    """A white image against no row at all, judged by a discriminator that is so sure of being wrong
    that the gradient is longer than any clip norm. All its features are positive and all fakes are
    grey, so that the gradient is the same in each trial. Where clients take ``steps``, what Adam
    remembers of the first gradient is that gradient, scaled."""
    public = Coins.of(0, "seeded").public
    weights = sure_discriminator(nets, 1e3)
    grey = {n: torch.zeros_like(v) for n, v in initial(nets.generator, public("g")).items()}
    row = Shard(torch.full((1, *shape), 255, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    start = join(weights=weights, adam=adam_start(weights))
    shared = join(discriminator=start, generator=grey)

    def first_moment(answer: Tensor) -> Tensor:
        moments = part(unflat(answer[0], start), "adam")
        return flat({name: value for name, value in moments.items() if name[0] == "m"})[None]

    return WorstCase(
        Query({"step": torch.tensor([0])}, shared),
        ({}, row),
        ({}, Shard(row.images[:0], row.labels[:0])),
        first_moment if steps else lambda answer: answer,
    )
