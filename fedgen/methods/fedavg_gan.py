"""FedAvg-GAN: a GAN over decentralized data by DP-FedAvg (Augenstein et al., "Generative Models for
Effective ML on Private, Decentralized Datasets", ICLR 2020, algorithm 1).

    server    U = clients drawn one by one with probability q = cohort / N
    client    D_k = D;  n_D times:  descend the critic's loss on a batch of its rows and fakes of G
              delta_k = clip(D_k - D; C)
    server    D = D + eta (sum over U of delta_k + N(0, (C sigma)^2)) / (q N)
              n_G times:  descend -D(G(z))

As published, clients trust the server with their deltas: it adds the noise, and there is no bound
against it. For whoever gets the generator, a round is one sampled Gaussian over clients (neighbours
add or remove one). Where clients flip the coins of U themselves (``draws`` of ``clients``) and send
noise alone otherwise, a secure sum of all of them is that same Gaussian against the server too.

All deltas weigh the same: by its number of rows a client would move the mean by more than the noise
was made for. The loss is WGAN-GP's, conditional on labels; the paper's has no labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from torch import Tensor, nn

from fedgen.adversarial import Networks, networks, sure_discriminator
from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.losses.wgan_gp import critic_loss
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
    Adam,
    Tensors,
    flat,
    generator_start,
    generator_step,
    gradients_of,
    initial,
    join,
    part,
    trainable,
    unflat,
)
from fedgen.parameters import Betas, ClipNorm, Decay, NonNegative
from fedgen.privacy.accounting import claimed_by_rdp
from fedgen.privacy.batches import OwnDraw
from fedgen.privacy.events import Contribution, Relation, Unit, repeat
from fedgen.privacy.mechanisms import ClientGaussian, PlainClient, total
from fedgen.privacy.releases import Local, Secure, Sent, Trusted
from fedgen.privacy.routing import Routing

RELATION = Relation.ADD_OR_REMOVE_ONE


@dataclass(frozen=True)
class Client:
    """A client's part of a round. It keeps nothing from one to the next."""

    nets: Networks
    mechanism: ClientGaussian | PlainClient
    steps: int
    batch: int
    learning_rate: float
    gradient_penalty: float

    def answer(self, state: State, query: Query, shard: Shard, round_: int, coins: Coins) -> Sent:
        """How far its rows move the discriminator; no rows do not."""
        del state
        given = {name: value.to(self.nets.device) for name, value in query.shared.items()}
        generator, start = part(given, "generator"), part(given, "discriminator")

        def delta() -> Tensor:
            discriminator = start
            for step in range(self.steps if len(shard) else 0):
                here = coins.at("round", round_, "step", step)
                discriminator = self._descended(discriminator, generator, shard, here)
            return flat(discriminator) - flat(start)

        return self.mechanism.release(self.nets.size(), delta, coins.at("delta", round_))

    def _descended(
        self, discriminator: Tensors, generator: Tensors, shard: Shard, coins: Coins
    ) -> Tensors:
        order = torch.randperm(len(shard), generator=coins.public("rows"))
        rows = order[torch.arange(self.batch) % len(shard)]  # again, where they are too few
        images, labels = (each.to(self.nets.device) for each in shard.rows(rows))
        latents, _ = self.nets.inputs(self.batch, coins)
        with torch.no_grad():
            fakes = self.nets.generate(generator, latents, labels)
        leaves = trainable(discriminator)
        loss = critic_loss(
            lambda images, labels: self.nets.judge(leaves, images, labels),
            images,
            fakes,
            labels,
            torch.rand(self.batch, generator=coins.public("mix")).to(self.nets.device),
            gradient_penalty=self.gradient_penalty,
            drift_penalty=0.0,
        )
        slopes = gradients_of(loss, leaves)
        return {n: value - self.learning_rate * slopes[n] for n, value in discriminator.items()}


@dataclass(frozen=True)
class Server:
    """Generator, discriminator and the generator's Adam: post-processing of the noised means."""

    nets: Networks
    learning_rate: float
    generator_steps: int
    generator_batch: int
    adam: Adam
    ema: float

    def init(self, coins: Coins) -> Tensors:
        """Fresh weights."""
        generator = initial(self.nets.generator, coins.public("generator"))
        discriminator = initial(self.nets.discriminator, coins.public("discriminator"))
        state = generator_start(generator) | join(discriminator=discriminator)
        return {name: value.to(self.nets.device) for name, value in state.items()}

    def query(self, state: Mapping[str, Tensor], round_: int, coins: Coins) -> Query:
        """Both networks."""
        del coins
        networks = {name: part(state, name) for name in ("generator", "discriminator")}
        return Query({"round": torch.tensor([round_])}, join(**networks))

    def update(
        self, state: Mapping[str, Tensor], mean: Tensor, round_: int, coins: Coins
    ) -> Tensors:
        """The discriminator follows the clients, the generator the discriminator."""
        old = part(state, "discriminator")
        moved = flat(old) + self.learning_rate * mean[0].to(self.nets.device)
        discriminator = unflat(moved, old)
        after = {**state, **join(discriminator=discriminator)}
        for step in range(self.generator_steps):
            here = coins.at("generator", round_, step)
            latents, labels = self.nets.inputs(self.generator_batch, here)

            leaves = trainable(part(after, "generator"))
            images = self.nets.generate(leaves, latents, labels)
            loss = -self.nets.judge(discriminator, images, labels).mean()
            after |= generator_step(after, gradients_of(loss, leaves), self.adam, self.ema)
        return after

    def sample(self, weights: Mapping[str, Tensor], labels: Tensor, coins: Coins) -> Tensor:
        """Images, one per label."""
        latents, _ = self.nets.inputs(len(labels), coins)
        with torch.no_grad():
            return self.nets.generate(weights, latents, labels.to(self.nets.device)).cpu()

    def recognize(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, coins: Coins
    ) -> Tensor:
        """By the discriminator, which the server has."""
        del coins
        with torch.no_grad():
            inputs = images.to(self.nets.device), labels.to(self.nets.device)
            return self.nets.judge(part(state, "discriminator"), *inputs).cpu()


def fedavg_gan(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    generator: Callable[..., nn.Module],
    discriminator: Callable[..., nn.Module],
    latent: int,
    cohort: int,
    draws: Literal["server", "clients"],
    discriminator_steps: int,
    discriminator_learning_rate: float,
    batch: int,
    gradient_penalty: NonNegative,
    clip: ClipNorm,
    server_learning_rate: float,
    generator_steps: int,
    generator_batch: int,
    generator_learning_rate: float,
    generator_betas: Betas,
    ema: Decay,
    device: str,
) -> Method:
    """FedAvg-GAN for these public parameters.

    Args:
        noise_multiplier: noise std of the sum over the clip norm C; None neither clips nor noises.
        cohort: q N, the expected number of clients in a round.
        draws: who draws it: the server, which asks those alone; or each client, by a secret coin.
        discriminator_steps: n_D, of a client, by gradient descent on ``batch`` of its rows each.
        gradient_penalty: lambda.
        clip: C, of a client's delta.
        server_learning_rate: eta.
        generator_steps: n_G, in a round, by Adam, on ``generator_batch`` images each.
        ema: decay of the average of the generator that is published; 0 publishes the last one.

    Raises:
        FedgenError: for a single client, or a cohort larger than there are clients.
    """
    if facts.clients == 1:
        raise FedgenError(
            "partition",
            "fedavg_gan protects one client among several, and there is one",
            "take partition=iid or by_writer",
        )
    if cohort > facts.clients:
        raise FedgenError(
            "method.cohort", f"{cohort} of {facts.clients} clients cannot be drawn", "lower it"
        )
    if facts.unit not in (None, Unit.CLIENT):
        problem = f"cannot be {facts.of_rows.value}: a client's delta is clipped"
        raise FedgenError("privacy.unit", problem, "set it to client")
    nets = networks(facts, generator, discriminator, latent, device)
    rate, everybody = cohort / facts.clients, Routing("mean", facts.clients)
    by_server = draws == "server" and rate < 1
    asked = Routing("per_step", facts.clients, cohort, "poisson") if by_server else everybody
    meeting = facts.aggregation(facts.clients, clip, "trusted")
    if isinstance(meeting, Secure) and by_server:
        raise FedgenError(
            "privacy.aggregation",
            "secure counts on a number of shares, and a cohort of the server's has any",
            "set method.draws=clients",
        )
    own = OwnDraw(1.0 if by_server else rate, facts.draws_are_hidden)
    mechanism: ClientGaussian | PlainClient = PlainClient(own)
    if noise_multiplier is not None:
        clips = replace(meeting, clip=clip / own.rate) if isinstance(meeting, Trusted) else meeting
        mechanism = ClientGaussian(clip, noise_multiplier, RELATION, own, clips)
    client = Client(
        nets,
        mechanism,
        discriminator_steps,
        batch,
        discriminator_learning_rate,
        gradient_penalty,
    )
    server = Server(
        nets,
        server_learning_rate,
        generator_steps,
        generator_batch,
        (generator_learning_rate, generator_betas),
        ema,
    )
    return Method(
        ClientProgram(client.answer),
        ServerProgram(
            init=server.init,
            query=server.query,
            update=server.update,
            generator=lambda state: part(state, "average"),
            sample=server.sample,
            recognize=server.recognize,
        ),
        _plan(mechanism, nets.size(), rate, by_server, facts),
        asked,
        0,
        lambda: [_worst_case(nets, facts.shape)],
        total(mechanism),
    )


def _plan(
    mechanism: ClientGaussian | PlainClient,
    size: int,
    rate: float,
    by_server: bool,
    facts: PublicFacts,
) -> Plan:
    """What a run promises. For whoever sees the noised sum of a round and not the cohort, it is one
    release that the draw of the cohort gates: a Poisson draw of one Gaussian (DP-FedAvg, McMahan et
    al. 2018, theorem 1). An aggregator that is trusted sees contributions; a server that draws the
    cohort knows it.

    Neighbours: a client with its rows, or without any. The rate follows from the number of clients,
    which is public, so that one who has none is still counted and drawn.

    A run that goes on without clients that fail may have met failures that depend on who was drawn:
    its draws amplify nothing.
    """
    noise = mechanism.noise_multiplier if isinstance(mechanism, ClientGaussian) else None
    private, drawn, hidden = noise is not None, rate < 1, facts.draws_are_hidden
    trusted = isinstance(mechanism.aggregation, Trusted)
    gate = GaussianDpEvent(noise or math.inf)
    published = trusted or (private and by_server)
    # where each noises by itself, noise that is missing shows how many were drawn
    gated = OwnDraw(rate, hidden and trusted).event(gate)

    def server(answered: int) -> DpEvent:
        return repeat(Contribution() if trusted else mechanism.event(), answered)

    by: str | None = f"secret Poisson draw of clients at rate {rate:.4g}"
    reason = None
    if not private:
        reason = "nothing is clipped and nothing is noised"
    elif not drawn:
        reason = "every client is in every cohort: there is no draw"
    elif not hidden:
        reason = "a client that fails shows by the gap whom a draw chose"
    elif by_server and not trusted:
        reason = "the server knows whom it asks, and noise that is missing shows who was not"
    by = None if reason else by
    return Plan(
        unit=Unit.CLIENT,
        relation=RELATION,
        sampler=f"Poisson draw of clients at rate {rate:.4g}" if drawn else "none",
        rows_per_round=1,
        answer=lambda *_: (1, size),
        longest=mechanism.longest(size)
        if isinstance(mechanism, ClientGaussian) and isinstance(mechanism.aggregation, Local)
        else math.inf,
        server=server,
        release=(lambda rounds: repeat(gated, rounds)) if published else None,
        seen=(lambda visits: repeat(gate, visits)) if published else None,
        amplified_by={"server": None if trusted else by, "release": by},
        reasons={"server": TRUSTING if trusted else reason, "release": reason},
        claim=Claim(
            lambda rounds, delta: claimed_by_rdp(
                repeat(PoissonSampledDpEvent(rate, gate), rounds), delta, RELATION
            ),
            "RDP of the sampled Gaussian, one draw of a cohort a round",
            "DP-FedAvg (McMahan et al. 2018), as in Augenstein et al. 2020",
        )
        if private
        else None,
        aggregation=mechanism.aggregation,
        extents=(mechanism.extent,) if isinstance(mechanism, ClientGaussian) else (),
    )


def _worst_case(nets: Networks, shape: tuple[int, int, int]) -> WorstCase:
    """A client with a white image against none, and a discriminator so steep that the delta is
    longer than any clip norm. All fakes are grey, so that it is the same in each trial."""
    public = Coins.of(0, "seeded").public
    grey = {n: torch.zeros_like(v) for n, v in initial(nets.generator, public("g")).items()}
    row = Shard(torch.full((1, *shape), 255, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    # a steeper one would throw the next step out of floating point's range
    networks = join(generator=grey, discriminator=sure_discriminator(nets, 1e-2))
    return WorstCase(
        Query({"round": torch.tensor([0])}, networks),
        ({}, row),
        ({}, Shard(row.images[:0], row.labels[:0])),
    )
