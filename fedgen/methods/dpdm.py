"""DPDM: differentially private diffusion models (Dockhorn, Cao, Vahdat, Kreis, TMLR 2023).

A denoiser D(x, s, y) learns by DP-SGD; samples are drawn by it. A round is a step:

    client    S = rows drawn one by one with probability q; of each row (x, y) K copies,
              with noise n ~ N(0, s^2), log s ~ N(-1.2, 1.2^2), and y left out of one row in ten
              l = mean over the copies of (s^2 + d^2) / (s d)^2 |D(x + n, s, y) - x|^2
              g = (sum over S of clip(grad l; C) + N(0, (C sigma)^2)) / B
    server    Adam along g, and an average of the weights

The mean over copies is taken before the clip, so that K costs no privacy ("noise multiplicity").
What touches private rows is DP-SGD's sum, of several clients the mean of theirs; all else is
post-processing. How samples are drawn is settled beforehand: the published figures have settings
that were chosen by private statistics, which no epsilon covers.

Levels, noise and labels left out are a client's secret coins. By public ones a row less would pair
all that come after it with others. B is the expected size of a batch.
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

from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.gradient_sums import gradient_sum, method_of
from fedgen.losses import edm
from fedgen.method import Method, PublicFacts, Query, ServerProgram, State, WorstCase
from fedgen.models.functional import (
    Tensors,
    generator_start,
    generator_step,
    initial,
    part,
    template,
    unflat,
)
from fedgen.parameters import Betas, ClipNorm, Decay, NonNegative
from fedgen.privacy.mechanisms import GradientSum
from fedgen.privacy.per_example import ClippedSum, clipped_sum, examples_at_once
from fedgen.privacy.releases import Sent

_LEVELS = (-1.2, 1.2)  # mean and std of log s
_GUESSED_AT = (0.1, 0.3, 1.0)  # levels that an audit tells members by


@dataclass(frozen=True)
class Client:
    """A noised gradient of the denoiser that it is asked about.

    copies: K. dropout: of labels. none: the label that stands for none.
    """

    network: nn.Module
    mechanism: GradientSum
    clip: float
    copies: int
    dropout: float
    none: int
    device: str

    def answer(self, state: State, query: Query, shard: Shard, round_: int, coins: Coins) -> Sent:
        """Of the mean loss over a Poisson batch, (1, weights)."""
        del state
        weights = {name: value.to(self.device) for name, value in query.shared.items()}
        here = coins.at("sum", round_)
        size = sum(value.numel() for value in weights.values())
        return self.mechanism.release((size,), self._sums(weights, shard, here), here)

    def _sums(self, weights: Tensors, shard: Shard, coins: Coins) -> Iterator[ClippedSum]:
        private = shard.on(self.device)
        about = max(1, examples_at_once(self.device) // self.copies)
        for number, rows in enumerate(self.mechanism.parts(len(shard), coins, about)):
            images, labels = private.rows(torch.from_numpy(rows))
            clean = (images * 2 - 1).repeat_interleave(self.copies, 0)
            levels, noise, dropped = self._coins(len(rows), clean, coins.at("copies", number))
            noisy = clean + levels.view(-1, 1, 1, 1) * noise
            shown = torch.where(dropped, self.none, labels).repeat_interleave(self.copies)
            yield clipped_sum(
                self.network,
                weights,
                (*edm.inputs(noisy, levels), shown),
                partial(edm.loss, noisy=noisy, levels=levels, clean=clean),
                self.clip,
                at_once=max(1, len(rows)),
                copies=self.copies,
            )

    def _coins(self, count: int, like: Tensor, coins: Coins) -> tuple[Tensor, Tensor, Tensor]:
        """Of ``count`` rows' copies: levels (n,), noise (n, ...); and of each row whether its label
        is left out (count,)."""

        def uniforms(size: int, what: str) -> Tensor:
            drawn = torch.from_numpy(coins.secret_uniforms(size, what)).add_(2.0**-54)
            return drawn.to(like.device)

        centre, spread = _LEVELS
        levels = (centre + spread * torch.special.ndtri(uniforms(len(like), "levels"))).exp()
        noise = torch.special.ndtri(uniforms(like.numel(), "noise")).view_as(like)
        return levels.to(like), noise.to(like), uniforms(count, "labels") < self.dropout


@dataclass(frozen=True)
class Server:
    """The denoiser, its Adam, and the average that samples: post-processing."""

    network: nn.Module
    classes: int
    shape: tuple[int, int, int]
    adam: tuple[float, tuple[float, float]]
    ema: float
    sampler: edm.Sampler
    device: str

    def init(self, coins: Coins) -> Tensors:
        """Fresh weights."""
        start = generator_start(initial(self.network, coins.public("network")))
        return {name: value.to(self.device) for name, value in start.items()}

    def query(self, state: Mapping[str, Tensor], round_: int, coins: Coins) -> Query:
        """The gradient at these weights."""
        del coins
        return Query({"step": torch.tensor([round_])}, part(state, "generator"))

    def update(
        self, state: Mapping[str, Tensor], answers: Tensor, round_: int, coins: Coins
    ) -> Tensors:
        """A step of Adam."""
        del round_, coins
        gradients = unflat(answers[0].to(self.device), part(state, "generator"))
        return generator_step(state, gradients, self.adam, self.ema)

    def _denoiser(self, weights: Mapping[str, Tensor]) -> edm.Denoiser:
        at_once = 4 * examples_at_once(self.device)  # of 1,000, a CPU takes twice as long for each

        def network(*given: Tensor) -> Tensor:
            parts = zip(*(torch.split(each, at_once) for each in given), strict=True)
            return torch.cat([functional_call(self.network, dict(weights), p) for p in parts])

        return edm.denoiser(network)

    def sample(self, weights: Mapping[str, Tensor], labels: Tensor, coins: Coins) -> Tensor:
        """Images of the published average, one per label."""
        drawn = coins.public("noise")

        def noise() -> Tensor:
            return torch.randn(len(labels), *self.shape, generator=drawn).to(self.device)

        with torch.no_grad():
            images = self.sampler.draw(
                self._denoiser(weights), labels.to(self.device), self.classes, noise
            )
        return ((images + 1) / 2).clamp(0, 1).cpu()

    def recognize(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, coins: Coins
    ) -> Tensor:
        """By minus the loss, at levels and with noise that are the same for all."""
        clean, given = images.to(self.device) * 2 - 1, labels.to(self.device)
        network = partial(functional_call, self.network, part(state, "average"))
        losses = torch.zeros(len(images), device=self.device)
        for level in _GUESSED_AT:
            noise = torch.randn(self.shape, generator=coins.public("level", str(level)))
            noisy = clean + level * noise.to(self.device)
            levels = torch.full_like(losses, level)
            with torch.no_grad():
                found = network((*edm.inputs(noisy, levels), given))
            losses += edm.loss(found, noisy, levels, clean)
        return -losses.cpu()


def dpdm(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    network: Callable[..., nn.Module],
    sampler: Callable[..., edm.Sampler],
    copies: int,
    label_dropout: NonNegative,
    learning_rate: float,
    betas: Betas,
    ema: Decay,
    batch: int,
    sampling_rate: float,
    clip: ClipNorm,
    device: str,
) -> Method:
    """DPDM for these public parameters.

    Args:
        noise_multiplier: noise std over the clip norm C; None neither clips nor noises.
        network: a ``UNet``. sampler: a ``Sampler``.
        copies: K, of each row in a step, with noise of their own.
        label_dropout: the share of rows whose label is left out of a step.
        learning_rate, betas: of Adam. ema: decay of the average that is published.
        batch: B, the expected number of private rows in a batch: a public number. sampling_rate: q.
        clip: C, of each row's gradient.

    Raises:
        FedgenError: for shares or a sampling rate that are none, or guidance of a denoiser that
            never saw an image without its label.
    """
    drawn = sampler()
    if label_dropout >= 1:
        problem = f"is a share of the rows, got {label_dropout:g}"
        raise FedgenError("method.label_dropout", problem, "take one below 1, e.g. 0.1")
    if drawn.guidance and not label_dropout:
        raise FedgenError(
            "method.sampler.guidance",
            "compares with a denoiser without labels, and method.label_dropout=0 trains none",
            "set it to 0, or method.label_dropout=0.1",
        )
    if drawn.lowest >= drawn.highest:
        problem = f"{drawn.lowest:g} is not below {drawn.highest:g}"
        raise FedgenError("method.sampler.lowest", problem, "levels fall from highest to lowest")
    try:
        falling = all(now > then for now, then in itertools.pairwise(drawn.levels))
    except OverflowError:
        falling = False
    if not falling:
        problem = f"{drawn.rho:g} spaces no levels that fall"
        raise FedgenError("method.sampler.rho", problem, "take one near 7")
    mechanism = gradient_sum(facts, noise_multiplier, clip, batch, sampling_rate)
    net = template(network(classes=facts.classes, shape=facts.shape))
    clip = clip if noise_multiplier is not None else math.inf
    client = Client(net, mechanism, clip, copies, label_dropout, facts.classes, device)
    adam = (learning_rate, betas)
    server = Server(net, facts.classes, facts.shape, adam, ema, drawn, device)
    size = sum(weights.numel() for weights in net.parameters())
    source = "DPDM (Dockhorn, Cao, Vahdat, Kreis 2023)"
    program = ServerProgram(
        init=server.init,
        query=server.query,
        update=server.update,
        generator=lambda state: part(state, "average"),
        sample=server.sample,
        recognize=server.recognize,
    )
    return method_of(
        facts,
        mechanism,
        client.answer,
        size,
        program,
        lambda: worst_case(net, facts.shape),
        sampling_rate,
        source,
    )


def worst_case(net: nn.Module, shape: tuple[int, int, int]) -> WorstCase:
    """A row against none, under a denoiser that answers with the same image of huge numbers to
    everything: its last bias alone has a gradient, which is longer than any clip norm and the same
    whatever the coins."""
    weights = {n: torch.zeros(p.shape) for n, p in net.named_parameters()}
    weights["leave.bias"] += 1e6
    row = Shard(torch.zeros(1, *shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    none = Shard(row.images[:0], row.labels[:0])
    return WorstCase(Query({"step": torch.tensor([0])}, weights), ({}, row), ({}, none))
