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
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.method import Method, PublicFacts, Query, ServerProgram, State, WorstCase
from fedgen.methods.dp_merf import Features, check_features, embedding
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
from fedgen.parameters import Betas, ClipNorm, Decay
from fedgen.privacy.batches import PoissonBatches
from fedgen.privacy.events import Unit
from fedgen.privacy.per_example import ClippedSum, clipped_sum, examples_at_once
from fedgen.sequence import Asked, Sums, SumSequence


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
            return Query({"autoencoder": torch.zeros(1)}, weights)
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
    clip: ClipNorm,
    autoencoder_learning_rate: float,
    autoencoder_betas: Betas,
    embedding_noise: float,
    generator: Callable[..., nn.Module],
    latent: int,
    features: int,
    bandwidth: float,
    rows: int,
    fakes_per_label: int,
    learning_rate: float,
    betas: Betas,
    ema: Decay,
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
        FedgenError: for an odd number of features, a sampling rate that is none, or a bandwidth or
            noise of the embedding that are out of all proportion.
    """
    if sampling_rate > 1:
        problem = f"is a share, got {sampling_rate:g}"
        raise FedgenError("method.sampling_rate", problem, "take at most 1")
    if not 1e-3 <= embedding_noise <= 1e3:
        problem = f"must lie between 0.001 and 1000, got {embedding_noise:g}"
        raise FedgenError("method.embedding_noise", problem, "e.g. 5")
    check_features(features, bandwidth)
    if facts.unit is Unit.CLIENT:
        raise FedgenError(
            "privacy.unit",
            "cannot be client: the autoencoder's steps clip each row's gradient",
            "set it to record, or take dp_merf",
        )
    coder = Coder(template(autoencoder(code=code, shape=facts.shape)), device)
    embed = Features(features, bandwidth, code, device)
    louder = None if noise_multiplier is None else noise_multiplier * embedding_noise
    batches = PoissonBatches(sampling_rate)
    norm = clip if noise_multiplier is not None else math.inf

    def gradients(shared: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> ClippedSum:
        del labels
        return clipped_sum(coder.network, part(shared, "coder"), (images,), lambda far: far, norm)

    def codes_of(shared: Mapping[str, Tensor], images: Tensor) -> Tensor:
        return coder.encode(part(shared, "coder"), images)

    sequence = SumSequence(
        (
            Asked(
                "autoencoder",
                coder.size,
                Sums(facts, noise_multiplier, batch).mechanism(clip=clip, batches=batches),
                gradients,
                autoencoder_steps,
                examples_at_once(device),
            ),
            embedding(Sums(facts, louder, rows), embed, facts.classes, codes_of),
        ),
        device,
    )
    net = template(generator(latent=latent, classes=facts.classes, code=code))
    codes = EmbeddingServer(
        net, embed, latent, facts.classes, fakes_per_label, (learning_rate, betas), ema
    )
    server = Server(coder, codes, autoencoder_steps, (autoencoder_learning_rate, autoencoder_betas))
    return sequence.method(
        ServerProgram(
            init=server.init,
            query=server.query,
            update=server.update,
            generator=server.generator,
            sample=server.sample,
            recognize=server.recognize,
            shown=codes.shown,
            alone=codes.alone,
        ),
        sequence.plan(
            f"Poisson draw of rows at rate {sampling_rate:.4g}; then none",
            "secret Poisson batches of the autoencoder's steps",
            ("RDP of Poisson subsampling, and of one Gaussian", "DP-MERF (2021)"),
        ),
        facts.clients,
        lambda: _worst_cases(coder, sequence, facts.shape),
    )


def _worst_cases(
    coder: Coder, sequence: SumSequence, shape: tuple[int, int, int]
) -> list[WorstCase]:
    """A black row against none. By an autoencoder that says grey whatever it is given, only the
    biases of its last layer move, by more than any clip norm; the embedding is of one code."""
    fresh = initial(coder.network, Coins.of(0, "seeded").public("autoencoder"))
    weights = {name: torch.zeros_like(value) for name, value in fresh.items()}
    channels = weights["image.bias"].numel()
    before = sum(weights[name].numel() for name in sorted(weights) if name < "image.bias")
    row = Shard(torch.zeros(1, *shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    first: tuple[State, Shard] = {}, row
    second: tuple[State, Shard] = {}, Shard(row.images[:0], row.labels[:0])
    coded = {**join(coder=weights), "seed": torch.tensor(0)}
    return [
        sequence.worst_case(
            "autoencoder",
            join(coder=weights),
            first,
            second,
            lambda answer: answer[:, before : before + channels],
        ),
        sequence.worst_case("embedding", coded, first, second),
    ]
