"""DPGAN: a GAN whose discriminator is trained by DP-SGD (Bie, Kamath, Zhang, "Private GANs,
revisited", TMLR 2023, algorithm 1).

A round is a discriminator step. What touches private rows is a sum of clipped gradients over a
Poisson batch, plus noise; all else is post-processing, and happens at the server:

    client          S = rows drawn one by one with probability q
                    g = sum over S of clip(grad -log D(x, y); C) + N(0, (C sigma)^2)
    discriminator   descend (g + sum over B fakes of clip(grad -log(1 - D(x, y)); C)) / 2B
    generator       every n_D rounds: descend -log D(G(z, y), y)

Of several clients each answers every round, with noise of its own; their answers are averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

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
    initial,
    join,
    part,
    template,
)
from fedgen.privacy.accounting import claimed_by_rdp
from fedgen.privacy.batches import PoissonBatches
from fedgen.privacy.events import Relation, Unit, repeat
from fedgen.privacy.mechanisms import PlainSum, Release, SumGaussian
from fedgen.privacy.per_example import ClippedSum, clipped_sum
from fedgen.privacy.routing import Routing

Adam = tuple[float, tuple[float, float]]
"""Learning rate and betas."""


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

    def generate(self, generator: Tensors, count: int, coins: Coins) -> tuple[Tensor, Tensor]:
        """Images (count, ...) in [0, 1] and their labels, uniform: neither depends on the data."""
        latents = torch.randn(count, self.latent, generator=coins.public("latents"))
        labels = torch.randint(0, self.classes, (count,), generator=coins.public("labels"))
        latents, labels = latents.to(self.device), labels.to(self.device)
        return functional_call(self.generator, generator, (latents, labels)), labels

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

    def weights_of(self, flat: Tensor, discriminator: Mapping[str, Tensor]) -> Tensors:
        """The inverse of the order in ``gradients``."""
        names = sorted(discriminator)
        pieces = torch.split(flat, [discriminator[name].numel() for name in names])
        shaped = zip(names, pieces, strict=True)
        return {name: piece.view_as(discriminator[name]) for name, piece in shaped}


@dataclass(frozen=True)
class Client:
    """Lines 4 to 7 of algorithm 1, for the real rows."""

    nets: Networks
    mechanism: SumGaussian | PlainSum
    clip: float

    def answer(
        self, state: State, query: Query, shard: Shard, round_: int, coins: Coins
    ) -> Release:
        """The noised sum of a Poisson batch's clipped gradients, over the expected batch."""
        del state  # what a client keeps would be one more thing to account for
        here = coins.at("answer", round_)
        batch = torch.from_numpy(self.mechanism.draw(len(shard), here))
        weights = {name: value.to(self.nets.device) for name, value in query.shared.items()}

        def sums() -> Iterator[ClippedSum]:
            images, labels = (rows.to(self.nets.device) for rows in shard.rows(batch))
            yield self.nets.gradients(weights, images, labels, True, self.clip)

        return self.mechanism.release((self.nets.size(),), sums(), here)

    def worst_case(self, shape: tuple[int, int, int]) -> WorstCase:
        """A white image against no row at all, judged by a discriminator that is so sure of being
        wrong that the gradient is longer than any clip norm."""
        weights = initial(self.nets.discriminator, Coins.of(0, "seeded").public("discriminator"))
        weights["logit.weight"] = torch.full_like(weights["logit.weight"], -1e3)
        weights["logit.bias"] = torch.full_like(weights["logit.bias"], -1e3)
        row = Shard(
            torch.full((1, *shape), 255, dtype=torch.uint8), torch.zeros(1, dtype=torch.long)
        )
        query = Query({"step": torch.tensor([0])}, weights)
        return WorstCase(query, ({}, row), ({}, Shard(row.images[:0], row.labels[:0])))


@dataclass(frozen=True)
class Server:
    """The rest of algorithm 1: post-processing. ``steps``: n_D. ``clip``: C, infinity for none."""

    nets: Networks
    batch: int
    steps: int
    clip: float
    adam: Adam

    def init(self, coins: Coins) -> Tensors:
        """Fresh weights."""
        generator = initial(self.nets.generator, coins.public("generator"))
        discriminator = initial(self.nets.discriminator, coins.public("discriminator"))
        state = join(
            generator=generator,
            generator_adam=adam_start(generator),
            discriminator=discriminator,
            discriminator_adam=adam_start(discriminator),
        )
        return {name: value.to(self.nets.device) for name, value in state.items()}

    def query(self, state: Mapping[str, Tensor], round_: int, coins: Coins) -> Query:
        """The discriminator, to be judged by private rows."""
        del coins
        return Query({"step": torch.tensor([round_])}, part(state, "discriminator"))

    def update(
        self, state: Mapping[str, Tensor], answers: Tensor, round_: int, coins: Coins
    ) -> Tensors:
        """A step of the discriminator, and every ``steps`` rounds one of the generator."""
        own = {name: value.clone() for name, value in state.items()}
        generator, discriminator = part(own, "generator"), part(own, "discriminator")
        moments, discriminator_moments = (
            part(own, "generator_adam"),
            part(own, "discriminator_adam"),
        )
        with torch.no_grad():
            images, labels = self.nets.generate(generator, self.batch, coins.at("fakes", round_))
        fakes = self.nets.gradients(discriminator, images, labels, False, self.clip).flat()
        mean = (answers[0].to(self.nets.device) + fakes / self.batch) / 2
        gradients = self.nets.weights_of(mean, discriminator)
        adam_step(discriminator, gradients, discriminator_moments, *self.adam)
        if (round_ + 1) % self.steps == 0:
            here = coins.at("generator", round_)

            def loss(weights: Tensors) -> Tensor:
                images, labels = self.nets.generate(weights, self.batch, here)
                return F.softplus(-self.nets.judge(discriminator, images, labels)).mean()

            adam_step(generator, grad(loss)(generator), moments, *self.adam)
        return join(
            generator=generator,
            generator_adam=moments,
            discriminator=discriminator,
            discriminator_adam=discriminator_moments,
        )

    def recognize(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, coins: Coins
    ) -> Tensor:
        """By the discriminator, which the server has."""
        del coins
        with torch.no_grad():
            inputs = images.to(self.nets.device), labels.to(self.nets.device)
            return self.nets.judge(part(state, "discriminator"), *inputs).cpu()

    def sample(self, weights: Mapping[str, Tensor], labels: Tensor, coins: Coins) -> Tensor:
        """Images, one per label."""
        latents = torch.randn(len(labels), self.nets.latent, generator=coins.public("latents"))
        inputs = latents.to(self.nets.device), labels.to(self.nets.device)
        with torch.no_grad():
            images: Tensor = functional_call(self.nets.generator, dict(weights), inputs)
        return images.cpu()


def dpgan(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    generator: Callable[..., nn.Module],
    discriminator: Callable[..., nn.Module],
    latent: int,
    batch: int,
    sampling_rate: float,
    discriminator_steps: int,
    learning_rate: float,
    betas: tuple[float, float],
    clip: float,
    device: str,
) -> Method:
    """DPGAN for these public parameters.

    Args:
        noise_multiplier: noise std over the clip norm C; None neither clips nor noises.
        batch: B, the fakes of a step and the expected number of real rows that sums are divided by:
            a public number.
        sampling_rate: q, the probability that a step takes a row; one public number for all
            clients, since a batch size over a private number of rows would reveal that number.
        discriminator_steps: n_D, rounds for each step of the generator.
        learning_rate, betas: of both Adams.
        clip: C, of each example's gradient.

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
    client = Client(nets, mechanism, clip)
    server = Server(nets, batch, discriminator_steps, clip, (learning_rate, betas))
    return Method(
        ClientProgram(0, lambda *_: {}, lambda *_: {}, client.answer),
        ServerProgram(
            server.init,
            lambda *_: {},
            server.query,
            server.update,
            lambda state: part(state, "generator"),
            server.sample,
            server.recognize,
        ),
        _plan(mechanism, nets.size(), sampling_rate, relation),
        Routing("mean", facts.clients),
        0,
        lambda: client.worst_case(facts.shape),
    )


def _plan(mechanism: SumGaussian | PlainSum, weights: int, rate: float, relation: Relation) -> Plan:
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
        answer=(weights,),
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
