"""DP-MERF + AE: DP-MERF (``dp_merf.py``) on the codes of an autoencoder that is private itself
(Harder, Adamczewski, Park, "DP-MERF", AISTATS 2021, the variant for images).

    first ``autoencoder_steps`` rounds
        client    sum over a Poisson batch of clip(gradient of |decode(encode(x)) - x|^2) + noise
        server    Adam on encoder and decoder (DP-SGD)
    then one
        client    the noised mean embedding of its rows' codes, by label
    then, for free
        server    descends the distance of its generator's codes from that embedding

Samples are decoded codes. The noise multiplier is that of the autoencoder's steps; the embedding, a
single release, can do with ``embedding_noise`` times as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from dp_accounting import ComposedDpEvent, DpEvent
from torch import Tensor, nn
from torch.func import functional_call

from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
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
from fedgen.methods.dp_merf import RELATION, Features, embedding_sum, embedding_sums
from fedgen.methods.dp_merf import Server as EmbeddingServer
from fedgen.models.functional import (
    Tensors,
    adam_start,
    adam_step,
    initial,
    join,
    part,
    template,
    unflat,
)
from fedgen.privacy.accounting import claimed_by_rdp
from fedgen.privacy.batches import PoissonBatches
from fedgen.privacy.events import Contribution, Unit, repeat
from fedgen.privacy.mechanisms import Answers, PlainSum, SumGaussian, total
from fedgen.privacy.per_example import ClippedSum, clipped_sum, examples_at_once
from fedgen.privacy.releases import Sent, Trusted
from fedgen.privacy.routing import Routing

Sums = SumGaussian | PlainSum


@dataclass(frozen=True)
class Coder:
    """The autoencoder as functions of its weights."""

    network: nn.Module
    device: str

    @property
    def size(self) -> int:
        """Number of its weights."""
        return sum(weights.numel() for weights in self.network.parameters())

    def encode(self, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Images (n, ...) -> codes (n, code)."""
        codes: Tensor = functional_call(self.network, dict(weights), (images, "code"))
        return codes

    def decode(self, weights: Mapping[str, Tensor], codes: Tensor) -> Tensor:
        """Codes (n, code) -> images (n, ...) in [0, 1]."""
        images: Tensor = functional_call(self.network, dict(weights), (codes, "image"))
        return images


@dataclass(frozen=True)
class Client:
    """Steps of the autoencoder, then the embedding."""

    coder: Coder
    features: Features
    steps: Sums
    embedding: Sums
    rounds: int
    clip: float
    classes: int

    def answer(self, state: State, query: Query, shard: Shard, round_: int, coins: Coins) -> Sent:
        """The noised gradient (weights,), or the noised embedding (classes * features,)."""
        del state
        weights = {n: v.to(self.coder.device) for n, v in part(query.shared, "coder").items()}
        if "seed" in query.shared:
            here, size = coins.at("embedding", round_), self.classes * self.features.count
            frequencies = self.features.frequencies(query.shared["seed"])
            sums = embedding_sums(
                self.embedding,
                lambda images: self.features(frequencies, self.coder.encode(weights, images)),
                shard,
                self.classes,
                self.coder.device,
                here,
            )
            return self.embedding.release((size,), sums, here)
        here = coins.at("autoencoder", round_)

        def gradients() -> Iterator[ClippedSum]:
            private, about = shard.on(self.coder.device), examples_at_once(self.coder.device)
            for batch in self.steps.parts(len(shard), here, about):
                inputs = (private.rows(torch.from_numpy(batch))[0],)
                yield clipped_sum(self.coder.network, weights, inputs, lambda far: far, self.clip)

        return self.steps.release((self.coder.size,), gradients(), here)

    def total(self, answers: Answers, round_: int, coins: Coins) -> Tensor:
        """The sum of what clients answered, in double precision."""
        mechanism = self.steps if round_ < self.rounds else self.embedding
        return total(mechanism)(answers, round_, coins)


@dataclass(frozen=True)
class Server:
    """Autoencoder, embedding and a generator of codes: post-processing."""

    coder: Coder
    codes: EmbeddingServer
    steps: int
    adam: tuple[float, tuple[float, float]]

    def init(self, coins: Coins) -> Tensors:
        """Fresh weights."""
        fresh = initial(self.coder.network, coins.public("autoencoder"))
        weights = {name: value.to(self.coder.device) for name, value in fresh.items()}
        return self.codes.init(coins) | join(coder=weights, coder_adam=adam_start(weights))

    def query(self, state: Mapping[str, Tensor], round_: int, coins: Coins) -> Query | None:
        """The autoencoder, to take a step; at last with the embedding's seed."""
        weights = join(coder=part(state, "coder"))
        if round_ < self.steps:
            return Query({"step": torch.zeros(1)}, weights)
        asked = self.codes.query(state, round_, coins)
        return asked and Query(asked.rows, {**asked.shared, **weights})

    def update(
        self, state: Mapping[str, Tensor], answers: Tensor, round_: int, coins: Coins
    ) -> Tensors:
        """A step of the autoencoder, or the embedding."""
        if round_ >= self.steps:
            return self.codes.update(state, answers, round_, coins)
        weights, moments = (
            {name: value.clone() for name, value in part(state, of).items()}
            for of in ("coder", "coder_adam")
        )
        gradients = unflat(answers[0].to(self.coder.device), weights)
        adam_step(weights, gradients, moments, *self.adam)
        return {**state, **join(coder=weights, coder_adam=moments)}

    def generator(self, state: Mapping[str, Tensor]) -> Tensors:
        """Of codes, and the decoder."""
        return join(codes=part(state, "average"), coder=part(state, "coder"))

    def sample(self, weights: Mapping[str, Tensor], labels: Tensor, coins: Coins) -> Tensor:
        """Images, one per label."""
        codes = self.codes.sample(part(weights, "codes"), labels, coins)
        with torch.no_grad():
            return self.coder.decode(part(weights, "coder"), codes.to(self.coder.device)).cpu()

    def recognize(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, coins: Coins
    ) -> Tensor:
        """By what the embedding has of an image's code."""
        with torch.no_grad():
            codes = self.coder.encode(part(state, "coder"), images.to(self.coder.device))
        return self.codes.recognize(state, codes, labels, coins)


def dp_merf_ae(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    autoencoder: Callable[..., nn.Module],
    code: int,
    autoencoder_steps: int,
    batch: int,
    sampling_rate: float,
    clip: float,
    autoencoder_learning_rate: float,
    autoencoder_betas: tuple[float, float],
    embedding_noise: float,
    generator: Callable[..., nn.Module],
    latent: int,
    features: int,
    bandwidth: float,
    rows: int,
    fakes_per_label: int,
    learning_rate: float,
    betas: tuple[float, float],
    ema: float,
    device: str,
) -> Method:
    """DP-MERF + AE for these public parameters; what is not named here is ``dp_merf``'s.

    Args:
        noise_multiplier: of the autoencoder's steps, over the clip norm; None: no noise.
        code: numbers in a code.
        autoencoder_steps: rounds of DP-SGD, the first of the run.
        batch: expected rows of a step, of all clients.
        sampling_rate: of each row in each step; one public number for all clients.
        clip: norm of a row's gradient.
        embedding_noise: noise multiplier of the embedding over that of the steps.
        generator: of codes.

    Raises:
        FedgenError: for an odd number of features, a sampling rate that is none, or noise of the
            embedding that is out of all proportion.
    """
    if sampling_rate > 1:
        problem = f"is a share, got {sampling_rate:g}"
        raise FedgenError("method.sampling_rate", problem, "take at most 1")
    if not 1e-3 <= embedding_noise <= 1e3:
        problem = f"must lie between 0.001 and 1000, got {embedding_noise:g}"
        raise FedgenError("method.embedding_noise", problem, "e.g. 5")
    if features % 2:
        problem = f"are half cosines and half sines, got {features}"
        raise FedgenError("method.features", problem, "take an even number")
    if facts.unit is Unit.CLIENT:
        raise FedgenError(
            "privacy.unit",
            "cannot be client: the autoencoder's steps clip each row's gradient",
            "set it to record, or take dp_merf",
        )
    coder = Coder(template(autoencoder(code=code, shape=facts.shape)), device)
    embed = Features(features, bandwidth, code, device)
    each = batch / facts.clients
    batches, meeting = PoissonBatches(sampling_rate), facts.aggregation(facts.clients)
    steps: Sums = PlainSum(batches, each, Unit.RECORD)
    louder = None
    if noise_multiplier is not None:
        steps = SumGaussian(clip, noise_multiplier, batches, each, RELATION, Unit.RECORD, meeting)
        louder = noise_multiplier * embedding_noise
    embedding = embedding_sum(facts, louder, rows, features)
    net = template(generator(latent=latent, classes=facts.classes, code=code))
    codes = EmbeddingServer(
        net, embed, latent, facts.classes, fakes_per_label, (learning_rate, betas), ema
    )
    client = Client(
        coder,
        embed,
        steps,
        embedding,
        autoencoder_steps,
        clip if noise_multiplier is not None else math.inf,
        facts.classes,
    )
    server = Server(coder, codes, autoencoder_steps, (autoencoder_learning_rate, autoencoder_betas))
    return Method(
        ClientProgram(0, lambda *_: {}, lambda *_: {}, client.answer),
        ServerProgram(
            server.init,
            lambda *_: {},
            server.query,
            server.update,
            server.generator,
            server.sample,
            server.recognize,
            codes.shown,
            codes.alone,
        ),
        _plan(client, autoencoder_steps),
        Routing("mean", facts.clients),
        0,
        lambda: _worst_case(coder, facts.shape),
        client.total,
    )


def _worst_case(coder: Coder, shape: tuple[int, int, int]) -> WorstCase:
    """A black row against none, by an autoencoder that says grey whatever it is given: only the
    biases of its last layer move, by more than any clip norm."""
    fresh = initial(coder.network, Coins.of(0, "seeded").public("autoencoder"))
    weights = {name: torch.zeros_like(value) for name, value in fresh.items()}
    channels = weights["image.bias"].numel()
    before = sum(weights[name].numel() for name in sorted(weights) if name < "image.bias")
    row = Shard(torch.zeros(1, *shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    return WorstCase(
        Query({"step": torch.zeros(1)}, join(coder=weights)),
        ({}, row),
        ({}, Shard(row.images[:0], row.labels[:0])),
        lambda answer: answer[:, before : before + channels],
    )


def _plan(client: Client, steps: int) -> Plan:
    """Sampled Gaussians, then one without a draw, against everybody; where the aggregator makes the
    noise, against all others."""
    private = isinstance(client.steps, SumGaussian)
    trusted = isinstance(client.steps.aggregation, Trusted)

    def event(answered: int) -> DpEvent:
        # as if all were steps, and one the embedding too: a step that is done again after a resume
        # takes the place of the embedding in a client's rows
        taken = repeat(client.steps.event(), answered)
        if answered <= steps:
            return taken
        return ComposedDpEvent([taken, client.embedding.event()])

    reason = None if private else "nothing is clipped and nothing is noised"
    by = "secret Poisson batches of the autoencoder's steps" if private else None
    return Plan(
        unit=Unit.RECORD,
        relation=RELATION,
        sampler="poisson, then none",
        rows_per_round=1,
        answer=lambda _, round_: (
            1,
            client.coder.size if round_ < steps else client.classes * client.features.count,
        ),
        server=(lambda answered: repeat(Contribution(), answered)) if trusted else event,
        release=(lambda rounds: event(min(rounds, steps + 1))) if trusted else None,
        seen=event if trusted else None,
        amplified_by={"server": None if trusted else by, "release": by},
        reasons={"server": TRUSTING if trusted else reason, "release": reason},
        claim=Claim(
            lambda rounds, delta: claimed_by_rdp(event(min(rounds, steps + 1)), delta, RELATION),
            "RDP of Poisson subsampling, and of one Gaussian",
            "DP-MERF (2021)",
        )
        if private
        else None,
        asking_rounds=steps + 1,
        aggregation=client.steps.aggregation,
        extents=tuple(
            each.extent
            for each in (client.steps, client.embedding)
            if isinstance(each, SumGaussian)
        ),
    )
