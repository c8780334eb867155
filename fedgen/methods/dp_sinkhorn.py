"""DP-Sinkhorn: a generator that descends an optimal transport loss against private records, along
sanitized gradients (Cao, Bie, Vahdat, Fidler, Kreis, "Don't Generate Me: Training Differentially
Private Generative Models with Sinkhorn Divergence", NeurIPS 2021, algorithm 1).

    server    X = G(z, l): n + n' images with uniform labels, n' = floor(n p)
    client    Y = Poisson sample of records at rate q
              S = 2 W(X[:n], Y) - W(X[:n], X[n':])
              release clip(grad S with respect to X[:n]; C) + N(0, (2 C sigma)^2)
    server    the mean gradient of the clients for X[:n], and for X[n:] its own gradient, which does
              not depend on Y: descend the generator along both

All n gradients come from one batch, so one record may change all of them. They are clipped and
noised as one matrix, as in the authors' code. The text of the paper clips each separately and
accounts for each as if it had its own batch; ``clipping=images`` does so with the noise that this
requires, sqrt(n) times as much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le
from dp_accounting import DpEvent
from torch import Tensor, nn
from torch.func import functional_call

from fedgen.config.constraints import Betas, ClipNorm, Decay, Fraction, NonNegative, SamplingRate
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.losses.sinkhorn import Transport, semi_debiased
from fedgen.methods.api import (
    ClientProgram,
    Method,
    PublicFacts,
    Query,
    ServerProgram,
    State,
    WorstCase,
)
from fedgen.methods.plan import Claim, Plan
from fedgen.models.factories import GeneratorFactory
from fedgen.models.functional import (
    Tensors,
    concat_parts,
    descend_generator,
    generator_start,
    init_weights,
    meta_module,
    nearest_similarity,
    part,
    unflat,
)
from fedgen.privacy.aggregation import Sent
from fedgen.privacy.batch_sampling import PoissonSampling
from fedgen.privacy.clipping import clip_rows
from fedgen.privacy.events import Relation, Unit, repeat
from fedgen.privacy.mechanisms import JointGaussian, aggregator
from fedgen.privacy.routing import Routing
from fedgen.randomness import RandomStreams

RELATION = Relation.ADD_OR_REMOVE_ONE
Clipping = Literal["joint", "images"]
Released = Literal["images", "weights"]


@dataclass(frozen=True)
class Generator:
    """The generator as a function of its weights."""

    module: nn.Module
    latent: int
    classes: int
    device: str

    def inputs(self, count: int, streams: RandomStreams) -> tuple[Tensor, Tensor]:
        """Return latents (count, latent) and uniform labels (count,)."""
        latents = torch.randn(count, self.latent, generator=streams.public("latents"))
        labels = torch.randint(0, self.classes, (count,), generator=streams.public("labels"))
        return latents.to(self.device), labels.to(self.device)

    def __call__(self, weights: Mapping[str, Tensor], latents: Tensor, labels: Tensor) -> Tensor:
        """Return images (n, ...) in [0, 1]."""
        images: Tensor = functional_call(self.module, dict(weights), (latents, labels))
        return images


@dataclass(frozen=True)
class Client:
    """Respond with the sanitized gradient of S."""

    generator: Generator
    transport: Transport
    mechanism: JointGaussian
    count: int
    clip_images: float

    def respond(
        self, state: State, query: Query, shard: Shard, round_: int, streams: RandomStreams
    ) -> Sent:
        """Return the gradient for the images of the query (n, ...), or for the weights that
        generate them (1, w)."""
        del state
        gradient_streams = streams.at_round("gradient", round_)
        batch = torch.from_numpy(self.mechanism.sample_batch(len(shard), gradient_streams))
        images, labels = (tensor.to(self.generator.device) for tensor in shard.rows(batch))
        records = (images, labels) if len(batch) else None
        shared = {name: value.to(self.generator.device) for name, value in query.shared.items()}
        if "latents" in shared:
            weights = {
                name: value.requires_grad_() for name, value in part(shared, "generator").items()
            }
            generated = self.generator(weights, shared["latents"], shared["labels"])
            loss = semi_debiased(self.transport, (generated, shared["labels"]), records, self.count)
            weight_gradients = torch.autograd.grad(loss, [weights[n] for n in sorted(weights)])
            return self.mechanism.release(
                torch.cat([gradient.flatten() for gradient in weight_gradients])[None],
                gradient_streams,
            )
        matched = query.samples["images"].to(self.generator.device).requires_grad_()
        all_images = torch.cat([matched, shared["images"]]), shared["labels"]
        loss = semi_debiased(self.transport, all_images, records, self.count)
        (gradients,) = torch.autograd.grad(loss, matched)
        if math.isfinite(self.clip_images):
            gradients = clip_rows(gradients, self.clip_images)
        return self.mechanism.release(gradients, gradient_streams)


@dataclass(frozen=True)
class Server:
    """The generator; all of it is post-processing."""

    generator: Generator
    transport: Transport
    count: int
    extra: int
    released: Released
    clip: float
    adam: tuple[float, tuple[float, float]]
    weight_decay: float
    ema: float

    def init(self, streams: RandomStreams) -> Tensors:
        """Return initial weights."""
        fresh = init_weights(self.generator.module, streams.public("generator"))
        weights = {name: value.to(self.generator.device) for name, value in fresh.items()}
        return generator_start(weights)

    def query(self, state: Mapping[str, Tensor], round_: int, streams: RandomStreams) -> Query:
        """Return images and labels, or the weights and inputs that generate them."""
        latents, labels = self.generator.inputs(
            self.count + self.extra, streams.at("fakes", round_)
        )
        weights = part(state, "generator")
        if self.released == "weights":
            shared = {"latents": latents, "labels": labels} | concat_parts(generator=weights)
            return Query({"weights": torch.zeros(1)}, shared)
        with torch.no_grad():
            images = self.generator(weights, latents, labels)
        matched, others = images[: self.count], images[self.count :]
        return Query({"images": matched}, {"images": others, "labels": labels})

    def update(
        self, state: Mapping[str, Tensor], responses: Tensor, round_: int, streams: RandomStreams
    ) -> Tensors:
        """Take a step of the generator along the mean gradient of the clients."""
        weights = part(state, "generator")
        responses = responses.to(self.generator.device)
        if self.released == "weights":
            gradients = unflat(responses[0], weights)
        else:
            gradients = self._weight_gradients(weights, responses, round_, streams)
        for name, value in weights.items():
            gradients[name] = gradients[name] + self.weight_decay * value
        return descend_generator(state, gradients, self.adam, self.ema)

    def _weight_gradients(
        self, weights: Tensors, responses: Tensor, round_: int, streams: RandomStreams
    ) -> Tensors:
        """Convert gradients of images to gradients of weights."""
        latents, labels = self.generator.inputs(
            self.count + self.extra, streams.at("fakes", round_)
        )
        tracked = {name: value.detach().requires_grad_() for name, value in weights.items()}
        images = self.generator(tracked, latents, labels)
        image_gradients = responses
        if self.extra:
            all_images = images.detach().requires_grad_()
            loss = semi_debiased(self.transport, (all_images, labels), None, self.count)
            (gradient,) = torch.autograd.grad(loss, all_images)
            # on the scale of the clients' gradients
            image_gradients = torch.cat(
                [responses, clip_rows(gradient[None, self.count :], self.clip)[0]]
            )
        names = sorted(tracked)
        gradients = torch.autograd.grad(images, [tracked[name] for name in names], image_gradients)
        return dict(zip(names, gradients, strict=True))

    def sample(
        self, weights: Mapping[str, Tensor], labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Return one image per label."""
        latents, _ = self.generator.inputs(len(labels), streams)
        with torch.no_grad():
            return self.generator(weights, latents, labels.to(latents.device)).cpu()

    def membership_scores(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Score images by their nearest neighbour among 100 samples of each label."""
        sample_labels = torch.arange(self.generator.classes).repeat_interleave(100)
        return nearest_similarity(
            images,
            labels,
            self.sample(part(state, "average"), sample_labels, streams),
            sample_labels,
        )


def dp_sinkhorn(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    generator: GeneratorFactory,
    latent: int,
    images: int,
    debiased: Fraction,
    sampling_rate: SamplingRate,
    l1: NonNegative,
    l2: NonNegative,
    label_weight: Annotated[float, Ge(0), Le(1e4)],  # above, the cost ignores images
    blur: float,
    clip: ClipNorm,
    clipping: Clipping,
    released: Released,
    learning_rate: float,
    betas: Betas,
    weight_decay: NonNegative,
    ema: Decay,
    device: str,
) -> Method:
    """Build DP-Sinkhorn from public parameters.

    Args:
        noise_multiplier: noise standard deviation over the sensitivity 2 C; None: no clipping, no
            noise.
        images: n, images generated per step, a public number.
        debiased: p, the fraction of them that the second term of the loss replaces by fresh ones.
        sampling_rate: q, the probability of each record in a step; one public number for all
            clients.
        l1, l2, label_weight, blur: parameters of the cost, see ``Transport``.
        clip: C, for the matrix of gradients.
        clipping: ``images`` bounds the gradient of each image by C, hence the matrix by C sqrt(n).
        released: gradients of the ``images``, or of the ``weights`` of the generator (the variant
            in table 2).
        learning_rate, betas, weight_decay: parameters of Adam.
        ema: decay of the moving average of the published generator; 0: the last one.

    Raises:
        FedgenError: for a zero cost, or clipping of images where weights are released.
    """
    if not l1 and not l2:
        raise FedgenError("method.l2", "the cost is zero without l1 and l2", "raise one of them")
    if clipping == "images" and released == "weights":
        raise FedgenError("method.clipping", "weights are released, not images", "set it to joint")
    network = Generator(
        meta_module(generator(latent=latent, classes=facts.classes, shape=facts.shape)),
        latent,
        facts.classes,
        device,
    )
    transport = Transport(l1, l2, label_weight, blur, facts.classes)
    sampling = PoissonSampling(sampling_rate)
    clips_images = clipping == "images" and noise_multiplier is not None
    matrix_clip = clip * math.sqrt(images) if clipping == "images" else clip
    if facts.record_unit is not Unit.RECORD:
        raise FedgenError(
            "privacy.unit",
            f"cannot be {facts.record_unit.value}: a matrix depends on a batch of records",
            "set it to record, or use dp_merf, gs_wgan or fedavg_gan",
        )
    aggregation = facts.aggregation(facts.clients, matrix_clip)
    mechanism = JointGaussian(math.inf, 0.0, sampling, RELATION, Unit.RECORD)
    if noise_multiplier is not None:
        mechanism = JointGaussian(
            matrix_clip, noise_multiplier, sampling, RELATION, Unit.RECORD, aggregation
        )
    client = Client(network, transport, mechanism, images, clip if clips_images else math.inf)
    server = Server(
        network,
        transport,
        images,
        int(images * debiased),
        released,
        matrix_clip if noise_multiplier is not None else math.inf,
        (learning_rate, betas),
        weight_decay,
        ema,
    )
    size = sum(weights.numel() for weights in network.module.parameters())
    shape = (1, size) if released == "weights" else (images, *facts.shape)
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
        _plan(mechanism, shape, sampling_rate),
        Routing("mean", facts.clients),
        0,
        lambda: [_worst_case(server, facts.shape)],
        aggregator(mechanism),
    )


def _worst_case(server: Server, shape: tuple[int, int, int]) -> WorstCase:
    """Return grey images that white ones repel and a white record attracts twice as strongly:
    without the record, the gradient has the same norm and the opposite direction. Where weights are
    released, any generator and a white record."""
    grey, white = torch.full((server.count, *shape), 0.5), torch.ones(server.extra, *shape)
    labels = torch.zeros(server.count + server.extra, dtype=torch.long)
    one = Shard(torch.full((1, *shape), 255, dtype=torch.uint8), labels[:1])
    none = Shard(one.images[:0], one.labels[:0])
    query = Query({"images": grey}, {"images": white, "labels": labels})
    if server.released == "weights":
        streams = RandomStreams.from_seed(0, "seeded")
        query = server.query(server.init(streams), 0, streams)
    return WorstCase(query, ({}, one), ({}, none))


def _plan(
    mechanism: JointGaussian,
    shape: tuple[int, ...],
    sampling_rate: float,
) -> Plan:
    """Return the plan: a step is one sampled Gaussian against everyone, because clients sample
    their batches secretly; with a trusted aggregator, against all others."""
    is_sampled = sampling_rate < 1

    def event(rows: int) -> DpEvent:
        return repeat(mechanism.event(), -(-rows // shape[0]))

    return Plan.from_mechanism(
        mechanism,
        event,
        lambda rows, _: (rows, *shape[1:]),
        samples_per_round=shape[0],
        sampler=f"Poisson sampling at rate {sampling_rate:.4g}" if is_sampled else "none",
        amplified_by=f"secret Poisson sampling at rate {sampling_rate:.4g}" if is_sampled else None,
        not_amplified_because="every batch contains all records: no subsampling",
        claim=Claim.by_rdp(
            lambda rounds: event(rounds * shape[0]),
            RELATION,
            "RDP of the sampled Gaussian, one sample per step",
            "DP-Sinkhorn (2021), appendix D.4 and released code",
        ),
    )
