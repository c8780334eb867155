"""DP-Sinkhorn: a generator that descends an optimal transport loss against private rows, along
sanitized gradients of it (Cao, Bie, Vahdat, Fidler, Kreis, "Don't Generate Me: Training
Differentially Private Generative Models with Sinkhorn Divergence", NeurIPS 2021, algorithm 1).

    server    X = G(z, l): n + n' images with uniform labels, n' = floor(n p)
    client    Y = rows drawn one by one with probability q
              S = 2 W(X[:n], Y) - W(X[:n], X[n':])
              release clip(grad S with respect to X[:n]; C) + N(0, (2 C sigma)^2)
    server    the mean of the clients' gradients, and beside it the gradient with respect to X[n:],
              on which Y has no part: descend the generator along them

All n gradients come from one batch: a row may change them all. They are clipped and noised as one
matrix, as the authors' code has it. The paper's text clips each by itself, and counts
each as if from a batch of its own: ``clipping`` of ``images`` does so, and has the noise that it
takes, sqrt(n) times as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from dp_accounting import DpEvent
from torch import Tensor, nn
from torch.func import functional_call

from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.losses.sinkhorn import Transport, semi_debiased
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
    Tensors,
    generator_start,
    generator_step,
    initial,
    join,
    likeness,
    part,
    template,
    unflat,
)
from fedgen.parameters import Betas, ClipNorm, Decay, NonNegative
from fedgen.privacy.accounting import claimed_by_rdp
from fedgen.privacy.batches import PoissonBatches
from fedgen.privacy.events import Contribution, Relation, Unit, repeat
from fedgen.privacy.mechanisms import JointGaussian, PlainMatrix, total
from fedgen.privacy.per_example import clip_rows
from fedgen.privacy.releases import Local, Sent, Trusted
from fedgen.privacy.routing import Routing

RELATION = Relation.ADD_OR_REMOVE_ONE
_MOST_LABEL_WEIGHT = 1e4
Clipping = Literal["joint", "images"]
Released = Literal["images", "weights"]


@dataclass(frozen=True)
class Generator:
    """The generator as a function of its weights."""

    module: nn.Module
    latent: int
    classes: int
    device: str

    def inputs(self, count: int, coins: Coins) -> tuple[Tensor, Tensor]:
        """Latents (count, latent) and uniform labels (count,)."""
        latents = torch.randn(count, self.latent, generator=coins.public("latents"))
        labels = torch.randint(0, self.classes, (count,), generator=coins.public("labels"))
        return latents.to(self.device), labels.to(self.device)

    def __call__(self, weights: Mapping[str, Tensor], latents: Tensor, labels: Tensor) -> Tensor:
        """Images (n, ...) in [0, 1]."""
        images: Tensor = functional_call(self.module, dict(weights), (latents, labels))
        return images


@dataclass(frozen=True)
class Client:
    """The gradient of S, sanitized."""

    generator: Generator
    transport: Transport
    mechanism: JointGaussian | PlainMatrix
    count: int
    clip_images: float

    def answer(self, state: State, query: Query, shard: Shard, round_: int, coins: Coins) -> Sent:
        """With respect to the query's images (n, ...), or to the weights that made them, (1, w)."""
        del state
        here = coins.at("gradient", round_)
        batch = torch.from_numpy(self.mechanism.draw(len(shard), here))
        images, labels = (each.to(self.generator.device) for each in shard.rows(batch))
        rows = (images, labels) if len(batch) else None
        given = {name: value.to(self.generator.device) for name, value in query.shared.items()}
        if "latents" in given:
            weights = {n: w.requires_grad_() for n, w in part(given, "generator").items()}
            made = self.generator(weights, given["latents"], given["labels"])
            loss = semi_debiased(self.transport, (made, given["labels"]), rows, self.count)
            found = torch.autograd.grad(loss, [weights[name] for name in sorted(weights)])
            return self.mechanism.release(torch.cat([f.flatten() for f in found])[None], here)
        cross = query.rows["images"].to(self.generator.device).requires_grad_()
        every = torch.cat([cross, given["images"]]), given["labels"]
        loss = semi_debiased(self.transport, every, rows, self.count)
        (gradients,) = torch.autograd.grad(loss, cross)
        if math.isfinite(self.clip_images):
            gradients = clip_rows(gradients, self.clip_images)
        return self.mechanism.release(gradients, here)


@dataclass(frozen=True)
class Server:
    """The generator: post-processing."""

    generator: Generator
    transport: Transport
    count: int
    more: int
    released: Released
    clip: float
    adam: tuple[float, tuple[float, float]]
    weight_decay: float
    ema: float

    def init(self, coins: Coins) -> Tensors:
        """Fresh weights."""
        fresh = initial(self.generator.module, coins.public("generator"))
        weights = {name: value.to(self.generator.device) for name, value in fresh.items()}
        return generator_start(weights)

    def query(self, state: Mapping[str, Tensor], round_: int, coins: Coins) -> Query:
        """Images and labels; or what makes them."""
        latents, labels = self.generator.inputs(self.count + self.more, coins.at("fakes", round_))
        weights = part(state, "generator")
        if self.released == "weights":
            shared = {"latents": latents, "labels": labels} | join(generator=weights)
            return Query({"weights": torch.zeros(1)}, shared)
        with torch.no_grad():
            images = self.generator(weights, latents, labels)
        cross, others = images[: self.count], images[self.count :]
        return Query({"images": cross}, {"images": others, "labels": labels})

    def update(
        self, state: Mapping[str, Tensor], answers: Tensor, round_: int, coins: Coins
    ) -> Tensors:
        """A step of the generator along the clients' mean gradients."""
        weights = part(state, "generator")
        answers = answers.to(self.generator.device)
        if self.released == "weights":
            gradients = unflat(answers[0], weights)
        else:
            gradients = self._through(weights, answers, round_, coins)
        for name, value in weights.items():
            gradients[name] = gradients[name] + self.weight_decay * value
        return generator_step(state, gradients, self.adam, self.ema)

    def _through(self, weights: Tensors, answers: Tensor, round_: int, coins: Coins) -> Tensors:
        """Gradients of images to gradients of weights."""
        latents, labels = self.generator.inputs(self.count + self.more, coins.at("fakes", round_))
        tracked = {name: value.detach().requires_grad_() for name, value in weights.items()}
        images = self.generator(tracked, latents, labels)
        back = answers
        if self.more:
            every = images.detach().requires_grad_()
            alone = semi_debiased(self.transport, (every, labels), None, self.count)
            (own,) = torch.autograd.grad(alone, every)
            # to the scale of the clients' gradients
            back = torch.cat([answers, clip_rows(own[None, self.count :], self.clip)[0]])
        names = sorted(tracked)
        found = torch.autograd.grad(images, [tracked[name] for name in names], back)
        return dict(zip(names, found, strict=True))

    def sample(self, weights: Mapping[str, Tensor], labels: Tensor, coins: Coins) -> Tensor:
        """Images, one per label."""
        latents, _ = self.generator.inputs(len(labels), coins)
        with torch.no_grad():
            return self.generator(weights, latents, labels.to(latents.device)).cpu()

    def recognize(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, coins: Coins
    ) -> Tensor:
        """By the nearest of 100 samples of each label."""
        made = torch.arange(self.generator.classes).repeat_interleave(100)
        return likeness(images, labels, self.sample(part(state, "average"), made, coins), made)


def dp_sinkhorn(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    generator: Callable[..., nn.Module],
    latent: int,
    images: int,
    debiased: NonNegative,
    sampling_rate: float,
    l1: NonNegative,
    l2: NonNegative,
    label_weight: NonNegative,
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
    """DP-Sinkhorn for these public parameters.

    Args:
        noise_multiplier: noise std over the sensitivity, which is 2 C; None neither clips nor
            noises.
        images: n, generated for a step and moved onto private rows; a public number.
        debiased: p, the share of them that the loss replaces by fresh ones in its second term.
        sampling_rate: q, the probability that a step takes a row; one public number for all
            clients.
        l1, l2, label_weight, blur: of the cost, see ``Transport``.
        clip: C, of the matrix of gradients. clipping: ``images`` bounds each image's gradient by C,
            and so the matrix by C sqrt(n).
        released: gradients of the ``images``, or of the generator's ``weights`` (the variant in
            table 2).
        learning_rate, betas, weight_decay: of Adam.
        ema: decay of the average of the generator that is published; 0 publishes the last one.

    Raises:
        FedgenError: for a share or a sampling rate that is none, a cost of nothing, or images
            clipped where weights are released.
    """
    for key, share in {"sampling_rate": sampling_rate, "debiased": debiased}.items():
        if share > 1:
            raise FedgenError(f"method.{key}", f"is a share, got {share:g}", "take at most 1")
    if label_weight > _MOST_LABEL_WEIGHT:
        problem = f"must be at most {_MOST_LABEL_WEIGHT:g}, got {label_weight:g}"
        raise FedgenError("method.label_weight", problem, "images have to count as well")
    if not l1 and not l2:
        raise FedgenError("method.l2", "without l1 and l2 nothing costs", "raise one of them")
    if clipping == "images" and released == "weights":
        raise FedgenError("method.clipping", "there are no images to clip", "set it to joint")
    make = Generator(
        template(generator(latent=latent, classes=facts.classes, shape=facts.shape)),
        latent,
        facts.classes,
        device,
    )
    transport = Transport(l1, l2, label_weight, blur, facts.classes)
    batches = PoissonBatches(sampling_rate)
    alone = clipping == "images" and noise_multiplier is not None
    whole = clip * math.sqrt(images) if clipping == "images" else clip
    if facts.of_rows is not Unit.RECORD:
        raise FedgenError(
            "privacy.unit",
            f"cannot be {facts.of_rows.value}: a client's matrix follows from a batch of its rows",
            "set it to record, or take dp_merf, gs_wgan or fedavg_gan",
        )
    meeting = facts.aggregation(facts.clients, whole)
    mechanism: JointGaussian | PlainMatrix = PlainMatrix(batches, Unit.RECORD)
    if noise_multiplier is not None:
        mechanism = JointGaussian(whole, noise_multiplier, batches, RELATION, Unit.RECORD, meeting)
    client = Client(make, transport, mechanism, images, clip if alone else math.inf)
    server = Server(
        make,
        transport,
        images,
        int(images * debiased),
        released,
        whole if noise_multiplier is not None else math.inf,
        (learning_rate, betas),
        weight_decay,
        ema,
    )
    size = sum(weights.numel() for weights in make.module.parameters())
    shape = (1, size) if released == "weights" else (images, *facts.shape)
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
        _plan(mechanism, shape, sampling_rate),
        Routing("mean", facts.clients),
        0,
        lambda: [_worst_case(server, facts.shape)],
        total(mechanism),
    )


def _worst_case(server: Server, shape: tuple[int, int, int]) -> WorstCase:
    """Grey images that white ones repel and a white row attracts, twice as strongly: without the
    row the gradient is as long as with it, and points the other way. Where weights are released,
    any generator and a white row."""
    grey, white = torch.full((server.count, *shape), 0.5), torch.ones(server.more, *shape)
    labels = torch.zeros(server.count + server.more, dtype=torch.long)
    row = Shard(torch.full((1, *shape), 255, dtype=torch.uint8), labels[:1])
    none = Shard(row.images[:0], row.labels[:0])
    query = Query({"images": grey}, {"images": white, "labels": labels})
    if server.released == "weights":
        coins = Coins.of(0, "seeded")
        query = server.query(server.init(coins), 0, coins)
    return WorstCase(query, ({}, row), ({}, none))


def _plan(
    mechanism: JointGaussian | PlainMatrix,
    shape: tuple[int, ...],
    sampling_rate: float,
) -> Plan:
    """A step is one sampled Gaussian, against everybody: clients draw their batches in secret.
    Where the aggregator makes the noise, against all others."""
    private, drawn = isinstance(mechanism, JointGaussian), sampling_rate < 1
    trusted = isinstance(mechanism.aggregation, Trusted)

    def event(answered: int) -> DpEvent:
        return repeat(mechanism.event(), -(-answered // shape[0]))

    by = f"secret Poisson draw of rows at rate {sampling_rate:.4g}" if private and drawn else None
    reason = None if by else "every row is in every batch: there is no draw"
    if not private:
        reason = "nothing is clipped and nothing is noised"
    return Plan(
        unit=Unit.RECORD,
        relation=RELATION,
        sampler=f"Poisson draw of rows at rate {sampling_rate:.4g}" if drawn else "none",
        rows_per_round=shape[0],
        answer=lambda rows, _: (rows, *shape[1:]),
        longest=mechanism.longest(math.prod(shape[1:]))
        if isinstance(mechanism, JointGaussian) and isinstance(mechanism.aggregation, Local)
        else math.inf,
        server=(lambda answered: repeat(Contribution(), -(-answered // shape[0])))
        if trusted
        else event,
        release=(lambda rounds: event(rounds * shape[0])) if trusted else None,
        seen=event if trusted else None,
        amplified_by={"server": None if trusted else by, "release": by},
        reasons={"server": TRUSTING if trusted else reason, "release": reason},
        claim=Claim(
            lambda rounds, delta: claimed_by_rdp(event(rounds * shape[0]), delta, RELATION),
            "RDP of the sampled Gaussian, one draw a step",
            "DP-Sinkhorn (2021), appendix D.4 and released code",
        )
        if private
        else None,
        aggregation=mechanism.aggregation,
        extents=(mechanism.extent,) if isinstance(mechanism, JointGaussian) else (),
    )
