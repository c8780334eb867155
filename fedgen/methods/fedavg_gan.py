"""FedAvg-GAN: a GAN over decentralized data by DP-FedAvg (Augenstein et al., "Generative Models for
Effective ML on Private, Decentralized Datasets", ICLR 2020, algorithm 1).

    server    U = Poisson sample of clients at rate q = cohort_size / N
    client    D_k = D;  n_D times:  descend the critic loss on a batch of its records and fakes of G
              delta_k = clip(D_k - D; C)
    server    D = D + eta (sum over U of delta_k + N(0, (C sigma)^2)) / (q N)
              n_G times:  descend -D(G(z))

As published, clients trust the server with their deltas: the server adds the noise, and there is no
bound against it. Against the release adversary, a round is one sampled Gaussian over clients
(neighbours add or remove one). Where clients decide secretly whether they belong to U
(``sampled_by=clients``) and send noise only otherwise, a secure sum over all of them is the same
Gaussian against the server too.

All deltas have equal weight: weighted by its number of records, a client could move the mean by
more than the noise covers. The loss is that of WGAN-GP, conditional on labels; the paper has no
labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from torch import Tensor

from fedgen.config.constraints import Betas, ClipNorm, Decay, NonNegative
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.losses.wgan_gp import critic_loss
from fedgen.methods.api import (
    ClientProgram,
    Method,
    PublicFacts,
    Query,
    ServerProgram,
    State,
    WorstCase,
)
from fedgen.methods.families.gan import Networks, confident_discriminator, networks
from fedgen.methods.plan import Claim, Plan
from fedgen.models.factories import GeneratorFactory, ImageNetworkFactory
from fedgen.models.functional import (
    Adam,
    Tensors,
    concat_parts,
    descend_generator,
    flat,
    generator_start,
    init_weights,
    part,
    trainable,
    unflat,
    weight_gradients,
)
from fedgen.privacy.aggregation import Secure, Sent, Trusted
from fedgen.privacy.batch_sampling import Participation
from fedgen.privacy.events import Relation, Unit, repeat
from fedgen.privacy.mechanisms import ClientGaussian, aggregator
from fedgen.privacy.routing import Routing
from fedgen.randomness import RandomStreams

RELATION = Relation.ADD_OR_REMOVE_ONE


@dataclass(frozen=True)
class Client:
    """Client without state between rounds."""

    nets: Networks
    mechanism: ClientGaussian
    steps: int
    batch: int
    learning_rate: float
    gradient_penalty: float

    def respond(
        self, state: State, query: Query, shard: Shard, round_: int, streams: RandomStreams
    ) -> Sent:
        """Return the change of the discriminator on the client's records; zero without records."""
        del state
        shared = {name: value.to(self.nets.device) for name, value in query.shared.items()}
        generator, start = part(shared, "generator"), part(shared, "discriminator")

        def delta() -> Tensor:
            discriminator = start
            for step in range(self.steps if len(shard) else 0):
                step_streams = streams.at("round", round_, "step", step)
                discriminator = self._local_training(discriminator, generator, shard, step_streams)
            return flat(discriminator) - flat(start)

        return self.mechanism.release(self.nets.size(), delta, streams.at_round("delta", round_))

    def _local_training(
        self, discriminator: Tensors, generator: Tensors, shard: Shard, streams: RandomStreams
    ) -> Tensors:
        order = torch.randperm(len(shard), generator=streams.public("rows"))
        rows = order[torch.arange(self.batch) % len(shard)]  # repeated if there are too few
        images, labels = (tensor.to(self.nets.device) for tensor in shard.rows(rows))
        latents, _ = self.nets.inputs(self.batch, streams)
        with torch.no_grad():
            fakes = self.nets.generate(generator, latents, labels)
        leaves = trainable(discriminator)
        loss = critic_loss(
            lambda images, labels: self.nets.discriminate(leaves, images, labels),
            images,
            fakes,
            labels,
            torch.rand(self.batch, generator=streams.public("mix")).to(self.nets.device),
            gradient_penalty=self.gradient_penalty,
            drift_penalty=0.0,
        )
        gradients = weight_gradients(loss, leaves)
        return {
            name: value - self.learning_rate * gradients[name]
            for name, value in discriminator.items()
        }


@dataclass(frozen=True)
class Server:
    """Generator, discriminator and the generator's optimizer; post-processing of the noisy
    means."""

    nets: Networks
    learning_rate: float
    generator_steps: int
    generator_batch: int
    adam: Adam
    ema: float

    def init(self, streams: RandomStreams) -> Tensors:
        """Return initial weights."""
        generator = init_weights(self.nets.generator, streams.public("generator"))
        discriminator = init_weights(self.nets.discriminator, streams.public("discriminator"))
        state = generator_start(generator) | concat_parts(discriminator=discriminator)
        return {name: value.to(self.nets.device) for name, value in state.items()}

    def query(self, state: Mapping[str, Tensor], round_: int, streams: RandomStreams) -> Query:
        """Send both networks."""
        del streams
        networks = {name: part(state, name) for name in ("generator", "discriminator")}
        return Query({"round": torch.tensor([round_])}, concat_parts(**networks))

    def update(
        self, state: Mapping[str, Tensor], mean: Tensor, round_: int, streams: RandomStreams
    ) -> Tensors:
        """Move the discriminator by the mean delta, then train the generator against it."""
        discriminator_before = part(state, "discriminator")
        weights = flat(discriminator_before) + self.learning_rate * mean[0].to(self.nets.device)
        discriminator = unflat(weights, discriminator_before)
        updated = {**state, **concat_parts(discriminator=discriminator)}
        for step in range(self.generator_steps):
            step_streams = streams.at("generator", round_, step)
            latents, labels = self.nets.inputs(self.generator_batch, step_streams)

            leaves = trainable(part(updated, "generator"))
            images = self.nets.generate(leaves, latents, labels)
            loss = -self.nets.discriminate(discriminator, images, labels).mean()
            updated |= descend_generator(
                updated, weight_gradients(loss, leaves), self.adam, self.ema
            )
        return updated

    def sample(
        self, weights: Mapping[str, Tensor], labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Return one image per label."""
        latents, _ = self.nets.inputs(len(labels), streams)
        with torch.no_grad():
            return self.nets.generate(weights, latents, labels.to(self.nets.device)).cpu()

    def membership_scores(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Score images by the discriminator of the server."""
        del streams
        with torch.no_grad():
            inputs = images.to(self.nets.device), labels.to(self.nets.device)
            return self.nets.discriminate(part(state, "discriminator"), *inputs).cpu()


def fedavg_gan(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    generator: GeneratorFactory,
    discriminator: ImageNetworkFactory,
    latent: int,
    cohort_size: int,
    sampled_by: Literal["server", "clients"],
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
    """Build FedAvg-GAN from public parameters.

    Args:
        noise_multiplier: noise standard deviation of the sum over the clip norm C; None: no
            clipping, no noise.
        cohort_size: q N, the expected number of clients in a round.
        sampled_by: who samples the cohort: the server, which queries only these, or each client
            secretly.
        discriminator_steps: n_D, gradient steps of a client, each on ``batch`` of its records.
        gradient_penalty: lambda.
        clip: C, for a client's delta.
        server_learning_rate: eta.
        generator_steps: n_G, steps of Adam per round, each on ``generator_batch`` images.
        ema: decay of the moving average of the published generator; 0: the last one.

    Raises:
        FedgenError: for a single client, or a cohort larger than the number of clients.
    """
    if facts.clients == 1:
        raise FedgenError(
            "partition",
            "fedavg_gan protects one client among several, and there is only one",
            "use partition=iid or by_writer",
        )
    if cohort_size > facts.clients:
        raise FedgenError(
            "method.cohort_size",
            f"cannot sample {cohort_size} of {facts.clients} clients",
            "lower it",
        )
    if facts.unit not in (None, Unit.CLIENT):
        problem = f"cannot be {facts.record_unit.value}: a client's delta is clipped"
        raise FedgenError("privacy.unit", problem, "set it to client")
    nets = networks(facts, generator, discriminator, latent, device)
    rate, all_clients = cohort_size / facts.clients, Routing("mean", facts.clients)
    by_server = sampled_by == "server" and rate < 1
    cohort = (
        Routing("per_step", facts.clients, cohort_size, "poisson") if by_server else all_clients
    )
    aggregation = facts.aggregation(facts.clients, clip, "trusted")
    if isinstance(aggregation, Secure) and by_server:
        raise FedgenError(
            "privacy.aggregation",
            "secure needs a fixed number of shares, and a cohort sampled by the server varies",
            "set method.sampled_by=clients",
        )
    participation = Participation(1.0 if by_server else rate, facts.cohorts_hidden)
    mechanism = ClientGaussian(math.inf, 0.0, RELATION, participation)
    if noise_multiplier is not None:
        clipped_aggregation = (
            replace(aggregation, clip=clip / participation.rate)
            if isinstance(aggregation, Trusted)
            else aggregation
        )
        mechanism = ClientGaussian(
            clip, noise_multiplier, RELATION, participation, clipped_aggregation
        )
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
        ClientProgram(client.respond),
        ServerProgram(
            init=server.init,
            query=server.query,
            update=server.update,
            generator=lambda state: part(state, "average"),
            sample=server.sample,
            membership_scores=server.membership_scores,
        ),
        _plan(mechanism, nets.size(), rate, by_server, facts),
        cohort,
        0,
        lambda: [_worst_case(nets, facts.shape)],
        aggregator(mechanism),
    )


def _plan(
    mechanism: ClientGaussian,
    size: int,
    rate: float,
    by_server: bool,
    facts: PublicFacts,
) -> Plan:
    """Return the plan. Against an adversary who sees the noisy sum of a round but not the cohort, a
    round is one Poisson-sampled Gaussian (DP-FedAvg, McMahan et al. 2018, theorem 1). A trusted
    aggregator sees contributions; a server that samples the cohort knows it.

    Neighbours: a client with its records, or without any. The rate depends on the public number of
    clients, so that a client without records is counted and sampled as well.

    In a run that continues after dropouts, these may depend on the cohort: its sampling does not
    amplify.
    """
    is_sampled, hidden, trusted = rate < 1, facts.cohorts_hidden, mechanism.aggregation.is_trusted
    gaussian = GaussianDpEvent(mechanism.noise_multiplier)
    # where each client adds noise, missing noise reveals the size of the cohort
    sampled_event = Participation(rate, hidden and trusted).event(gaussian)
    reason = None
    if not is_sampled:
        reason = "every cohort contains all clients: no subsampling"
    elif not hidden:
        reason = "a dropout reveals the sampled cohort"
    elif by_server and not trusted:
        reason = "the server knows the cohort, and missing noise reveals who is outside it"
    plan = Plan.from_mechanism(
        mechanism,
        lambda responses: repeat(mechanism.event(), responses),
        lambda *_: (1, size),
        sampler=f"Poisson sampling of clients at rate {rate:.4g}" if is_sampled else "none",
        amplified_by=None if reason else f"secret Poisson sampling of clients at rate {rate:.4g}",
        not_amplified_because=reason,
        claim=Claim.by_rdp(
            lambda rounds: repeat(PoissonSampledDpEvent(rate, gaussian), rounds),
            RELATION,
            "RDP of the sampled Gaussian, one cohort per round",
            "DP-FedAvg (McMahan et al. 2018), as in Augenstein et al. 2020",
        ),
    )
    if not mechanism.is_private or not (trusted or by_server):
        return plan
    return replace(
        plan,
        release_event=lambda rounds: repeat(sampled_event, rounds),
        event_if_sampling_revealed=lambda visits: repeat(gaussian, visits),
    )


def _worst_case(nets: Networks, shape: tuple[int, int, int]) -> WorstCase:
    """Return a client with a white image and one without records, with a discriminator so steep
    that the delta exceeds any clip norm. All fakes are grey, so that the delta is the same in each
    trial."""
    public = RandomStreams.from_seed(0, "seeded").public
    grey = {
        name: torch.zeros_like(value)
        for name, value in init_weights(nets.generator, public("g")).items()
    }
    one = Shard(torch.full((1, *shape), 255, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    # a steeper one would overflow in the next step
    networks = concat_parts(generator=grey, discriminator=confident_discriminator(nets, 1e-2))
    return WorstCase(
        Query({"round": torch.tensor([0])}, networks),
        ({}, one),
        ({}, Shard(one.images[:0], one.labels[:0])),
    )
