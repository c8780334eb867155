"""DPGAN: a GAN whose discriminator is trained by DP-SGD (Bie, Kamath, Zhang, "Private GANs,
revisited", TMLR 2023, algorithm 1).

What touches private rows is, in each discriminator step, a sum of clipped gradients over a Poisson
batch, plus noise. All else is post-processing:

    client    n_D times:  S = rows drawn one by one with probability q
                          g = sum over S of clip(grad -log D(x, y); C) + N(0, (C sigma)^2)
                          descend (g + sum over B fakes of clip(grad -log(1 - D(x, y)); C)) / 2B
    server    the mean of the clients' discriminators, then: descend -log D(G(z, y), y)

With one client that is algorithm 1. Of several, each noises in full. n_D is fixed or adaptive
(section 6.2): it climbs 1, 2, 5, 10, 20, 50, ... when too few fakes are told from real rows. A
round is a discriminator step; a client takes n_D of them between two messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from dp_accounting import DpEvent
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F

from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.method import (
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
    flat,
    initial,
    join,
    part,
    template,
    unflat,
)
from fedgen.privacy.accounting import claimed_by_rdp
from fedgen.privacy.batches import PoissonBatches
from fedgen.privacy.events import Relation, Unit, repeat
from fedgen.privacy.mechanisms import PlainSum, Release, SumGaussian, descent
from fedgen.privacy.per_example import ClippedSum, clipped_sum
from fedgen.privacy.routing import Routing

Adam = tuple[float, tuple[float, float]]
"""Learning rate and betas."""

_SHOWN_DECAY = 0.95  # of the accuracy that is logged: the paper's figure 4


@dataclass(frozen=True)
class Networks:
    """Generator and discriminator as functions of their weights."""

    generator: nn.Module
    discriminator: nn.Module
    latent: int
    classes: int
    device: str

    def size(self) -> int:
        """Number of the discriminator's weights."""
        return sum(weights.numel() for weights in self.discriminator.parameters())

    def generate(self, generator: Mapping[str, Tensor], labels: Tensor, coins: Coins) -> Tensor:
        """Images (n, ...) in [0, 1], one per label."""
        latents = torch.randn(len(labels), self.latent, generator=coins.public("latents"))
        inputs = latents.to(self.device), labels.to(self.device)
        images: Tensor = functional_call(self.generator, dict(generator), inputs)
        return images

    def fakes(
        self, generator: Mapping[str, Tensor], count: int, coins: Coins
    ) -> tuple[Tensor, Tensor]:
        """Images (count, ...) and their labels, uniform: no fake depends on the private rows."""
        labels = torch.randint(0, self.classes, (count,), generator=coins.public("labels"))
        return self.generate(generator, labels, coins), labels.to(self.device)

    def judge(self, discriminator: Tensors, images: Tensor, labels: Tensor) -> Tensor:
        """Logits (n,): D is their sigmoid."""
        logits: Tensor = functional_call(self.discriminator, discriminator, (images, labels))
        return logits

    def gradients(
        self, discriminator: Tensors, images: Tensor, labels: Tensor, real: bool, clip: float
    ) -> ClippedSum:
        """The sum of the clipped gradients of each example's own loss with respect to the
        discriminator's weights."""
        sign = -1.0 if real else 1.0  # -log D = softplus(-logit), -log(1 - D) = softplus(logit)
        return clipped_sum(
            self.discriminator,
            discriminator,
            (images, labels),
            lambda logits: F.softplus(sign * logits),
            clip,
        )


@dataclass(frozen=True)
class Client:
    """Lines 4 to 9 of algorithm 1. It keeps nothing from one answer to the next: Adam's moments
    come and go with the discriminator."""

    nets: Networks
    mechanism: SumGaussian | PlainSum
    batch: int
    clip: float
    adam: Adam

    def answer(
        self, state: State, query: Query, shard: Shard, round_: int, coins: Coins
    ) -> Release:
        """The discriminator and Adam's state after a step for each of the query's rows."""
        del state
        given = {name: value.to(self.nets.device) for name, value in query.shared.items()}
        generator = part(given, "generator")

        def sums(point: Mapping[str, Tensor], here: Coins) -> Iterator[ClippedSum]:
            batch = torch.from_numpy(self.mechanism.draw(len(shard), here))
            images, labels = (rows.to(self.nets.device) for rows in shard.rows(batch))
            yield self.nets.gradients(part(point, "weights"), images, labels, True, self.clip)

        def move(point: Mapping[str, Tensor], noised: Tensor, here: Coins) -> Tensors:
            weights, moments = part(point, "weights"), part(point, "adam")
            with torch.no_grad():
                images, labels = self.nets.fakes(generator, self.batch, here)
            fakes = self.nets.gradients(weights, images, labels, False, self.clip).flat()
            mean = (noised.to(self.nets.device) + fakes / self.batch) / 2
            adam_step(weights, unflat(mean, weights), moments, *self.adam)
            return join(weights=weights, adam=moments)

        start = {name: value.clone() for name, value in part(given, "discriminator").items()}
        steps = [coins.at("step", round_ + number) for number in range(query.count)]
        return descent(self.mechanism, start, self.nets.size(), sums, move, steps)

    def worst_case(self, shape: tuple[int, int, int]) -> WorstCase:
        """A white image against no row at all, judged by a discriminator that is so sure of being
        wrong that the gradient is longer than any clip norm. What Adam remembers of the first
        gradient is that gradient, scaled."""
        public = Coins.of(0, "seeded").public
        weights = initial(self.nets.discriminator, public("discriminator"))
        weights["logit.weight"] = torch.full_like(weights["logit.weight"], -1e3)
        weights["logit.bias"] = torch.full_like(weights["logit.bias"], -1e3)
        row = Shard(
            torch.full((1, *shape), 255, dtype=torch.uint8), torch.zeros(1, dtype=torch.long)
        )
        start = join(weights=weights, adam=adam_start(weights))
        shared = join(
            discriminator=start, generator=initial(self.nets.generator, public("generator"))
        )

        def first_moment(answer: Tensor) -> Tensor:
            moments = part(unflat(answer[0], start), "adam")
            return flat({name: value for name, value in moments.items() if name[0] == "m"})[None]

        return WorstCase(
            Query({"step": torch.tensor([0])}, shared),
            ({}, row),
            ({}, Shard(row.images[:0], row.labels[:0])),
            first_moment,
        )


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


@dataclass(frozen=True)
class Server:
    """Lines 10 to 14 of algorithm 1: post-processing."""

    nets: Networks
    batch: int
    pace: Pace
    adam: Adam
    ema: float

    def init(self, coins: Coins) -> Tensors:
        """Fresh weights."""
        generator = initial(self.nets.generator, coins.public("generator"))
        discriminator = initial(self.nets.discriminator, coins.public("discriminator"))
        state = join(
            generator=generator,
            average={name: value.clone() for name, value in generator.items()},
            adam=adam_start(generator),
            discriminator=join(weights=discriminator, adam=adam_start(discriminator)),
        )
        here = {name: value.to(self.nets.device) for name, value in state.items()}
        return here | join(pace=self.pace.start())

    def query(self, state: Mapping[str, Tensor], round_: int, coins: Coins) -> Query:
        """n_D steps, from this discriminator, against this generator."""
        del coins
        shared = {
            name: value
            for name, value in state.items()
            if name.startswith(("discriminator/", "generator/"))
        }
        return Query({"step": round_ + torch.arange(self.pace.now(part(state, "pace")))}, shared)

    def update(
        self, state: Mapping[str, Tensor], answers: Tensor, round_: int, coins: Coins
    ) -> Tensors:
        """The clients' mean discriminator; if it took all n_D steps, a step of the generator."""
        found = unflat(answers[0].to(self.nets.device), part(state, "discriminator"))
        after = {**state, **join(discriminator=found)}
        taken = found["adam/step"] - state["discriminator/adam/step"].to(found["adam/step"])
        if round(float(taken)) < self.pace.now(part(state, "pace")):
            return after  # the run ended in between
        generator, moments = (
            {name: value.clone() for name, value in part(state, of).items()}
            for of in ("generator", "adam")
        )
        here, discriminator = coins.at("generator", round_), part(found, "weights")

        def loss(weights: Tensors) -> tuple[Tensor, Tensor]:
            logits = self.nets.judge(discriminator, *self.nets.fakes(weights, self.batch, here))
            return F.softplus(-logits).mean(), (logits < 0).float().mean()

        gradients, accuracy = grad(loss, has_aux=True)(generator)
        adam_step(generator, gradients, moments, *self.adam)
        steps = float(moments["step"])
        keep = min(self.ema, (1 + steps) / (10 + steps))  # forgets the initial weights sooner
        old = part(state, "average")
        return after | join(
            generator=generator,
            average={name: torch.lerp(value, old[name], keep) for name, value in generator.items()},
            adam=moments,
            pace=self.pace.after(part(state, "pace"), accuracy.cpu()),
        )

    def shown(self, state: Mapping[str, Tensor]) -> dict[str, float]:
        """n_D, and the share of fakes that are told (the paper's figure 4, for fakes alone)."""
        pace = part(state, "pace")
        accuracy = {"accuracy_on_fakes": float(pace["shown"])} if pace["seen"] else {}
        return {"discriminator_steps": self.pace.now(pace), **accuracy}

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
        with torch.no_grad():
            return self.nets.generate(weights, labels, coins).cpu()


def dpgan(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    generator: Callable[..., nn.Module],
    discriminator: Callable[..., nn.Module],
    latent: int,
    batch: int,
    sampling_rate: float,
    discriminator_steps: int | Literal["adaptive"],
    accuracy_floor: float,
    accuracy_ema: float,
    discriminator_learning_rate: float,
    generator_learning_rate: float,
    betas: tuple[float, float],
    clip: float,
    ema: float,
    device: str,
) -> Method:
    """DPGAN for these public parameters.

    Args:
        noise_multiplier: noise std over the clip norm C; None neither clips nor noises.
        batch: B, the fakes of a step and the expected number of real rows that sums are divided by:
            a public number.
        sampling_rate: q, the probability that a step takes a row; one public number for all
            clients, since a batch size over a private number of rows would reveal that number.
        discriminator_steps: n_D, or ``adaptive``.
        accuracy_floor: d, of adaptive n_D. accuracy_ema: beta, the decay of the average accuracy on
            fakes that is held against it.
        discriminator_learning_rate, generator_learning_rate, betas: of Adam.
        clip: C, of each example's gradient.
        ema: decay of the average of the generator that is published; 0 publishes the last one.

    Raises:
        FedgenError: for a sampling rate that is none.
    """
    if not 0 < sampling_rate <= 1:
        raise FedgenError(
            "method.sampling_rate",
            f"must lie above 0 and be at most 1, got {sampling_rate:g}",
            "it is the expected batch over the number of rows",
        )
    nets = Networks(
        template(generator(latent=latent, classes=facts.classes, shape=facts.shape)),
        template(discriminator(classes=facts.classes, shape=facts.shape)),
        latent,
        facts.classes,
        device,
    )
    batches, relation = PoissonBatches(sampling_rate), Relation.ADD_OR_REMOVE_ONE
    mechanism: SumGaussian | PlainSum = PlainSum(batches, batch, Unit.RECORD)
    if noise_multiplier is not None:
        mechanism = SumGaussian(clip, noise_multiplier, batches, batch, relation, Unit.RECORD)
    else:
        clip = math.inf
    client = Client(nets, mechanism, batch, clip, (discriminator_learning_rate, betas))
    pace = Pace(discriminator_steps, accuracy_floor, accuracy_ema)
    server = Server(nets, batch, pace, (generator_learning_rate, betas), ema)
    return Method(
        ClientProgram(0, lambda *_: {}, lambda *_: {}, client.answer),
        ServerProgram(
            server.init,
            lambda *_: {},
            server.query,
            server.update,
            lambda state: part(state, "average"),
            server.sample,
            server.recognize,
            server.shown,
        ),
        _plan(mechanism, 3 * nets.size() + 1, sampling_rate, relation),
        Routing("mean", facts.clients),
        0,
        partial(client.worst_case, facts.shape),
    )


def _plan(mechanism: SumGaussian | PlainSum, answer: int, rate: float, relation: Relation) -> Plan:
    """A step is one sampled Gaussian, against everybody: the client draws its batch in secret."""
    private = isinstance(mechanism, SumGaussian)

    def server(answered: int) -> DpEvent:
        return repeat(mechanism.event(), answered)

    drawn = rate < 1
    by = f"secret Poisson draw of rows at rate {rate:.4g}" if private and drawn else None
    reason = None if by else "every row is in every batch: there is no draw"
    if not private:
        reason = "nothing is clipped and nothing is noised"
    return Plan(
        unit=Unit.RECORD,
        relation=relation,
        sampler=f"Poisson draw of rows at rate {rate:.4g}" if drawn else "none",
        rows_per_round=1,
        answer=lambda rows: (1, answer),
        server=server,
        release=None,
        amplified_by={"server": by, "release": by},
        reasons={"server": reason, "release": reason},
        claim=Claim(
            lambda rounds, delta: claimed_by_rdp(server(rounds), delta, relation),
            "RDP of the sampled Gaussian, one draw a discriminator step",
            "Private GANs, revisited (Bie, Kamath, Zhang 2023), section 4",
        )
        if private
        else None,
    )
