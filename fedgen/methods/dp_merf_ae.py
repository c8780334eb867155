"""DP-MERF + AE: DP-MERF (``dp_merf.py``) on the codes of a private autoencoder (Harder,
Adamczewski, Park, "DP-MERF", AISTATS 2021, the variant for images).

    first ``autoencoder_steps`` rounds
        client    sum over a Poisson batch of clip(gradient of |decode(encode(x)) - x|^2) + noise
        server    Adam on encoder and decoder (DP-SGD)
    then one round
        client    the noisy mean embedding of the codes of its records, by label
    then, at no cost
        server    descend the distance of the generator's codes to that embedding

Samples are decoded codes. The noise multiplier is that of the autoencoder's steps; the embedding is
a single release and can have ``embedding_noise`` times as much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.func import functional_call

from fedgen.config.constraints import Betas, ClipNorm, Decay, SamplingRate
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.methods.api import Method, PublicFacts, Query, ServerProgram, State, WorstCase
from fedgen.methods.dp_merf import Bandwidth, FourierFeatures, check_features, embedding
from fedgen.methods.dp_merf import Server as EmbeddingServer
from fedgen.methods.families.dp_sgd import rate_for_batch
from fedgen.methods.families.noisy_sums import SumMechanisms, SumQuery, SumSequence
from fedgen.models.factories import AutoencoderFactory, CodeGeneratorFactory
from fedgen.models.functional import (
    Tensors,
    adam_start,
    adam_step,
    concat_parts,
    init_weights,
    meta_module,
    part,
    unflat,
)
from fedgen.privacy.batch_sampling import PoissonSampling
from fedgen.privacy.clipping import ClippedSum, clipped_sum, examples_at_once
from fedgen.privacy.events import Unit
from fedgen.randomness import RandomStreams


@dataclass(frozen=True)
class Coder:
    """The autoencoder as functions of its weights."""

    network: nn.Module
    device: str

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(weights.numel() for weights in self.network.parameters())

    def encode(self, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Map images (n, ...) to codes (n, code)."""
        codes: Tensor = functional_call(self.network, dict(weights), (images, "code"))
        return codes

    def decode(self, weights: Mapping[str, Tensor], codes: Tensor) -> Tensor:
        """Map codes (n, code) to images (n, ...) in [0, 1]."""
        images: Tensor = functional_call(self.network, dict(weights), (codes, "image"))
        return images


@dataclass(frozen=True)
class Server:
    """Autoencoder, embedding and a generator of codes; all of it is post-processing."""

    coder: Coder
    codes: EmbeddingServer
    steps: int
    adam: tuple[float, tuple[float, float]]

    def init(self, streams: RandomStreams) -> Tensors:
        """Return initial weights."""
        fresh = init_weights(self.coder.network, streams.public("autoencoder"))
        weights = {name: value.to(self.coder.device) for name, value in fresh.items()}
        return self.codes.init(streams) | concat_parts(
            coder=weights, coder_adam=adam_start(weights)
        )

    def query(
        self, state: Mapping[str, Tensor], round_: int, streams: RandomStreams
    ) -> Query | None:
        """Query a step of the autoencoder; afterwards the embedding."""
        weights = concat_parts(coder=part(state, "coder"))
        if round_ < self.steps:
            return Query({"autoencoder": torch.zeros(1)}, weights)
        query = self.codes.query(state, round_, streams)
        return query and Query(query.samples, {**query.shared, **weights})

    def update(
        self, state: Mapping[str, Tensor], responses: Tensor, round_: int, streams: RandomStreams
    ) -> Tensors:
        """Take a step of the autoencoder, or store the embedding."""
        if round_ >= self.steps:
            return self.codes.update(state, responses, round_, streams)
        weights, moments = (
            {name: value.clone() for name, value in part(state, of).items()}
            for of in ("coder", "coder_adam")
        )
        gradients = unflat(responses[0].to(self.coder.device), weights)
        adam_step(weights, gradients, moments, *self.adam)
        return {**state, **concat_parts(coder=weights, coder_adam=moments)}

    def generator(self, state: Mapping[str, Tensor]) -> Tensors:
        """Return the generator of codes and the decoder."""
        return concat_parts(codes=part(state, "average"), coder=part(state, "coder"))

    def sample(
        self, weights: Mapping[str, Tensor], labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Return one image per label."""
        codes = self.codes.sample(part(weights, "codes"), labels, streams)
        with torch.no_grad():
            return self.coder.decode(part(weights, "coder"), codes.to(self.coder.device)).cpu()

    def membership_scores(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Score images by the product of their codes' features with the embedding."""
        with torch.no_grad():
            codes = self.coder.encode(part(state, "coder"), images.to(self.coder.device))
        return self.codes.membership_scores(state, codes, labels, streams)


def dp_merf_ae(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    autoencoder: AutoencoderFactory,
    code: int,
    autoencoder_steps: int,
    batch: int,
    sampling_rate: SamplingRate | None,
    clip: ClipNorm,
    autoencoder_learning_rate: float,
    autoencoder_betas: Betas,
    embedding_noise: Annotated[float, Ge(1e-3), Le(1e3)],
    generator: CodeGeneratorFactory,
    latent: int,
    features: int,
    bandwidth: Bandwidth,
    rows: int,
    fakes_per_label: int,
    learning_rate: float,
    betas: Betas,
    ema: Decay,
    device: str,
) -> Method:
    """Build DP-MERF + AE from public parameters; see ``dp_merf`` for those not listed.

    Args:
        noise_multiplier: noise multiplier of the autoencoder's steps, over the clip norm; None: no
            noise.
        code: dimension of a code.
        autoencoder_steps: number of DP-SGD rounds at the start of the run.
        batch: expected batch size of a step, over all clients.
        sampling_rate: probability of each record in a step; one public number for all clients.
            None: the rate at which the expected batch size is ``batch``.
        clip: clip norm of a record's gradient.
        embedding_noise: noise multiplier of the embedding over that of the steps.
        generator: generator of codes.

    Raises:
        FedgenError: for an odd number of features, or unit client.
    """
    check_features(features)
    if facts.unit is Unit.CLIENT:
        raise FedgenError(
            "privacy.unit",
            "cannot be client: steps of the autoencoder clip the gradient of each record",
            "set it to record, or use dp_merf",
        )
    coder = Coder(meta_module(autoencoder(code=code, shape=facts.shape)), device)
    embed = FourierFeatures(features, bandwidth, code, device)
    embedding_multiplier = None if noise_multiplier is None else noise_multiplier * embedding_noise
    rate = rate_for_batch(facts, batch, rows) if sampling_rate is None else sampling_rate
    sampling = PoissonSampling(rate)
    norm = clip if noise_multiplier is not None else math.inf

    def gradients(shared: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> ClippedSum:
        del labels
        return clipped_sum(
            coder.network, part(shared, "coder"), (images,), lambda losses: losses, norm
        )

    def codes_of(shared: Mapping[str, Tensor], images: Tensor) -> Tensor:
        return coder.encode(part(shared, "coder"), images)

    sequence = SumSequence(
        (
            SumQuery(
                "autoencoder",
                coder.parameters,
                SumMechanisms(facts, noise_multiplier, rows).mechanism(
                    clip=clip, sampling=sampling, batch=batch
                ),
                gradients,
                autoencoder_steps,
                examples_at_once(device),
            ),
            embedding(
                SumMechanisms(facts, embedding_multiplier, rows), embed, facts.classes, codes_of
            ),
        ),
        device,
    )
    net = meta_module(generator(latent=latent, classes=facts.classes, code=code))
    codes = EmbeddingServer(
        net, embed, latent, facts.classes, fakes_per_label, (learning_rate, betas), ema
    )
    server = Server(coder, codes, autoencoder_steps, (autoencoder_learning_rate, autoencoder_betas))
    return sequence.build(
        ServerProgram(
            init=server.init,
            query=server.query,
            update=server.update,
            generator=server.generator,
            sample=server.sample,
            membership_scores=server.membership_scores,
            metrics=codes.metrics,
            server_step=codes.server_step,
        ),
        sequence.plan(
            f"Poisson sampling at rate {rate:.4g}; then none",
            "secret Poisson sampling of the autoencoder's batches",
            ("RDP of Poisson subsampling, and of one Gaussian", "DP-MERF (2021)"),
        ),
        facts.clients,
        lambda: _worst_cases(coder, sequence, facts.shape),
    )


def _worst_cases(
    coder: Coder, sequence: SumSequence, shape: tuple[int, int, int]
) -> list[WorstCase]:
    """Return a black image and no image. For an autoencoder whose output is always grey, only the
    biases of its last layer have a gradient, which exceeds any clip norm; the embedding is that of
    one code."""
    fresh = init_weights(coder.network, RandomStreams.from_seed(0, "seeded").public("autoencoder"))
    weights = {name: torch.zeros_like(value) for name, value in fresh.items()}
    channels = weights["image.bias"].numel()
    offset = sum(weights[name].numel() for name in sorted(weights) if name < "image.bias")
    one = Shard(torch.zeros(1, *shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    first: tuple[State, Shard] = {}, one
    second: tuple[State, Shard] = {}, Shard(one.images[:0], one.labels[:0])
    shared = {**concat_parts(coder=weights), "seed": torch.tensor(0)}
    return [
        sequence.worst_case(
            "autoencoder",
            concat_parts(coder=weights),
            first,
            second,
            lambda response: response[:, offset : offset + channels],
        ),
        sequence.worst_case("embedding", shared, first, second),
    ]
