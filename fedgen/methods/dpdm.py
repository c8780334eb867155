"""DPDM: differentially private diffusion models (Dockhorn, Cao, Vahdat, Kreis, TMLR 2023).

A denoiser D(x, s, y) learns by DP-SGD and generates the samples. Each round is one step:

    client    S = Poisson sample of records at rate q; of each record (x, y) K copies,
              with noise n ~ N(0, s^2), log s ~ N(-1.2, 1.2^2), and y omitted for one record in ten
              l = mean over the copies of (s^2 + d^2) / (s d)^2 |D(x + n, s, y) - x|^2
              g = (sum over S of clip(grad l; C) + N(0, (C sigma)^2)) / B
    server    one step of Adam along g, and a moving average of the weights

The mean over copies is taken before clipping, so that K costs no privacy ("noise multiplicity").
Private records enter only the sum of DP-SGD, or with several clients the mean of their sums;
everything else is post-processing. The sampler is fixed in advance: the published figures use
settings that were chosen by private statistics, which no ε covers.

Noise levels, noise and omitted labels come from secret streams of the client. With public streams,
removing a record would change those of all records after it. B is the expected batch size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgen.config.constraints import Betas, ClipNorm, Decay, SamplingRate
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.losses import edm
from fedgen.methods.api import Method, PublicFacts, Query, ServerProgram, State, WorstCase
from fedgen.methods.families.dp_sgd import build_method, gradient_sum
from fedgen.models.factories import ImageNetworkFactory
from fedgen.models.functional import (
    Tensors,
    descend_generator,
    generator_start,
    init_weights,
    meta_module,
    part,
    unflat,
)
from fedgen.privacy.aggregation import Sent
from fedgen.privacy.clipping import ClippedSum, clipped_sum, examples_at_once
from fedgen.privacy.mechanisms import GradientSum
from fedgen.randomness import RandomStreams

_LEVELS = (-1.2, 1.2)  # mean and std of log s
_AUDIT_LEVELS = (0.1, 0.3, 1.0)  # noise levels of membership scores


@dataclass(frozen=True)
class Client:
    """Respond with a noisy gradient of the denoiser.

    copies: K.
    dropout: probability of omitting a label.
    none: label that stands for no label.
    """

    network: nn.Module
    mechanism: GradientSum
    clip: float
    copies: int
    dropout: float
    none: int
    device: str

    def respond(
        self, state: State, query: Query, shard: Shard, round_: int, streams: RandomStreams
    ) -> Sent:
        """Return the gradient of the mean loss over a Poisson batch (1, weights)."""
        del state
        weights = {name: value.to(self.device) for name, value in query.shared.items()}
        sum_streams = streams.at_round("sum", round_)
        size = sum(value.numel() for value in weights.values())
        return self.mechanism.release((size,), self._sums(weights, shard, sum_streams), sum_streams)

    def _sums(self, weights: Tensors, shard: Shard, streams: RandomStreams) -> Iterator[ClippedSum]:
        private = shard.on(self.device)
        part_size = max(1, examples_at_once(self.device) // self.copies)
        for number, rows in enumerate(self.mechanism.batch_parts(shard, streams, part_size)):
            images, labels = private.rows(torch.from_numpy(rows))
            clean = (images * 2 - 1).repeat_interleave(self.copies, 0)
            levels, noise, dropped = self._random_inputs(
                len(rows), clean, streams.at("copies", number)
            )
            noisy = clean + levels.view(-1, 1, 1, 1) * noise
            used_labels = torch.where(dropped, self.none, labels).repeat_interleave(self.copies)
            yield clipped_sum(
                self.network,
                weights,
                (*edm.inputs(noisy, levels), used_labels),
                partial(edm.loss, noisy=noisy, levels=levels, clean=clean),
                self.clip,
                at_once=max(1, len(rows)),
                copies=self.copies,
            )

    def _random_inputs(
        self, count: int, images: Tensor, streams: RandomStreams
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return noise levels (n,) and noise (n, ...) of the copies of ``count`` records, and
        whether the label of each record is omitted (count,)."""

        def uniforms(size: int, name: str) -> Tensor:
            numbers = torch.from_numpy(streams.secret_uniforms(size, name)).add_(2.0**-54)
            return numbers.to(images.device)

        centre, std = _LEVELS
        levels = (centre + std * torch.special.ndtri(uniforms(len(images), "levels"))).exp()
        noise = torch.special.ndtri(uniforms(images.numel(), "noise")).view_as(images)
        return levels.to(images), noise.to(images), uniforms(count, "labels") < self.dropout


@dataclass(frozen=True)
class Server:
    """Denoiser, its optimizer, and the moving average that generates samples; all of it is
    post-processing."""

    network: nn.Module
    classes: int
    shape: tuple[int, int, int]
    adam: tuple[float, tuple[float, float]]
    ema: float
    sampler: edm.Sampler
    device: str

    def init(self, streams: RandomStreams) -> Tensors:
        """Return initial weights."""
        start = generator_start(init_weights(self.network, streams.public("network")))
        return {name: value.to(self.device) for name, value in start.items()}

    def query(self, state: Mapping[str, Tensor], round_: int, streams: RandomStreams) -> Query:
        """Query the gradient at these weights."""
        del streams
        return Query({"step": torch.tensor([round_])}, part(state, "generator"))

    def update(
        self, state: Mapping[str, Tensor], responses: Tensor, round_: int, streams: RandomStreams
    ) -> Tensors:
        """Take one step of Adam."""
        del round_, streams
        gradients = unflat(responses[0].to(self.device), part(state, "generator"))
        return descend_generator(state, gradients, self.adam, self.ema)

    def _denoiser(self, weights: Mapping[str, Tensor]) -> edm.Denoiser:
        at_once = 4 * examples_at_once(self.device)  # larger chunks are slower on a CPU

        def network(*inputs: Tensor) -> Tensor:
            parts = zip(*(torch.split(tensor, at_once) for tensor in inputs), strict=True)
            return torch.cat(
                [functional_call(self.network, dict(weights), chunk) for chunk in parts]
            )

        return edm.denoiser(network)

    def sample(
        self, weights: Mapping[str, Tensor], labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Return one image per label from the published average."""
        rng = streams.public("noise")

        def noise() -> Tensor:
            return torch.randn(len(labels), *self.shape, generator=rng).to(self.device)

        with torch.no_grad():
            images = self.sampler.sample(
                self._denoiser(weights), labels.to(self.device), self.classes, noise
            )
        return ((images + 1) / 2).clamp(0, 1).cpu()

    def membership_scores(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Score images by the negative loss, at noise levels and with noise that are the same for
        all."""
        clean, labels_on_device = images.to(self.device) * 2 - 1, labels.to(self.device)
        network = partial(functional_call, self.network, part(state, "average"))
        losses = torch.zeros(len(images), device=self.device)
        for level in _AUDIT_LEVELS:
            noise = torch.randn(self.shape, generator=streams.public("level", str(level)))
            noisy = clean + level * noise.to(self.device)
            levels = torch.full_like(losses, level)
            with torch.no_grad():
                outputs = network((*edm.inputs(noisy, levels), labels_on_device))
            losses += edm.loss(outputs, noisy, levels, clean)
        return -losses.cpu()


def dpdm(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    network: ImageNetworkFactory,
    sampler: Callable[[], edm.Sampler],
    copies: int,
    label_dropout: Decay,
    learning_rate: float,
    betas: Betas,
    ema: Decay,
    batch: int,
    sampling_rate: SamplingRate | None,
    rows: int | None = None,
    clip: ClipNorm,
    device: str,
) -> Method:
    """Build DPDM from public parameters.

    Args:
        noise_multiplier: noise standard deviation over the clip norm C; None: no clipping, no
            noise.
        network: a ``UNet``.
        sampler: a ``Sampler``.
        copies: K, copies of each record in a step, each with its own noise.
        label_dropout: fraction of records whose label is omitted in a step.
        learning_rate, betas: parameters of Adam.
        ema: decay of the published moving average.
        batch: B, the expected batch size, a public number.
        sampling_rate: q; None: derived from ``batch`` and ``rows``, see ``gradient_sum``.
        rows: public estimate of the number of records of all clients.
        clip: C, for the gradient of each record.

    Raises:
        FedgenError: for an invalid fraction or sampling rate, or guidance of a denoiser that was
            never trained without labels.
    """
    built_sampler = sampler()
    if built_sampler.guidance and not label_dropout:
        raise FedgenError(
            "method.sampler.guidance",
            "requires a denoiser without labels, which method.label_dropout=0 does not train",
            "set it to 0, or method.label_dropout=0.1",
        )
    if built_sampler.sigma_min >= built_sampler.sigma_max:
        problem = f"{built_sampler.sigma_min:g} is not below {built_sampler.sigma_max:g}"
        raise FedgenError(
            "method.sampler.sigma_min", problem, "noise levels decrease from sigma_max to sigma_min"
        )
    try:
        decreasing = all(
            level > next_level
            for level, next_level in itertools.pairwise(built_sampler.noise_levels)
        )
    except OverflowError:
        decreasing = False
    if not decreasing:
        problem = f"{built_sampler.rho:g} does not give decreasing noise levels"
        raise FedgenError("method.sampler.rho", problem, "use a value near 7")
    mechanism = gradient_sum(facts, noise_multiplier, clip, batch, sampling_rate, rows)
    net = meta_module(network(classes=facts.classes, shape=facts.shape))
    clip = clip if noise_multiplier is not None else math.inf
    client = Client(net, mechanism, clip, copies, label_dropout, facts.classes, device)
    adam = (learning_rate, betas)
    server = Server(net, facts.classes, facts.shape, adam, ema, built_sampler, device)
    size = sum(weights.numel() for weights in net.parameters())
    source = "DPDM (Dockhorn, Cao, Vahdat, Kreis 2023)"
    program = ServerProgram(
        init=server.init,
        query=server.query,
        update=server.update,
        generator=lambda state: part(state, "average"),
        sample=server.sample,
        membership_scores=server.membership_scores,
    )
    return build_method(
        facts,
        mechanism,
        client.respond,
        size,
        program,
        lambda: worst_case(net, facts.shape),
        source,
    )


def worst_case(net: nn.Module, shape: tuple[int, int, int]) -> WorstCase:
    """Return a record and no record as neighbours, with a denoiser whose output is the same image
    of huge numbers for any input: its last bias alone has a gradient that exceeds any clip norm and
    does not depend on the streams."""
    weights = {name: torch.zeros(parameter.shape) for name, parameter in net.named_parameters()}
    weights["leave.bias"] += 1e6
    one = Shard(torch.zeros(1, *shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    none = Shard(one.images[:0], one.labels[:0])
    return WorstCase(Query({"step": torch.tensor([0])}, weights), ({}, one), ({}, none))
