"""GANs whose clients train the discriminator by DP-SGD: networks, server, and plan. The use of
private records is defined by each method.

A round is a discriminator step. Where each client adds the full noise, it takes n_D steps between
two messages, and the server averages the discriminators of the clients. Where clients share the
noise of a sum (``privacy.aggregation``), clients respond with gradient sums and the server takes
the steps: later gradients depend on the client's own steps, so only the sum of one step can have
shared noise. After n_D steps, the server takes a generator step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgen.data.datasets import Shard
from fedgen.methods.api import (
    Method,
    PublicFacts,
    Query,
    ServerProgram,
    State,
    WorstCase,
)
from fedgen.methods.families.dp_sgd import build_method as of_sums
from fedgen.models.factories import GeneratorFactory, ImageNetworkFactory
from fedgen.models.functional import (
    Adam,
    Tensors,
    adam_start,
    adam_step,
    concat_parts,
    flat,
    generator_start,
    init_weights,
    meta_module,
    part,
    unflat,
)
from fedgen.privacy.aggregation import Local, Release, Sent
from fedgen.privacy.clipping import ClippedSum, examples_at_once
from fedgen.privacy.mechanisms import GradientSum, descent
from fedgen.randomness import RandomStreams

_METRIC_DECAY = 0.95  # of the logged accuracy (figure 4 of "Private GANs, revisited")


@dataclass(frozen=True)
class Networks:
    """Generator and discriminator as functions of their weights."""

    generator: nn.Module
    discriminator: nn.Module
    latent: int
    classes: int
    device: str

    @property
    def at_once(self) -> int:
        """Number of records whose gradients are summed together."""
        return examples_at_once(self.device)

    def size(self) -> int:
        """Return the number of weights of the discriminator."""
        return sum(weights.numel() for weights in self.discriminator.parameters())

    def inputs(self, count: int, streams: RandomStreams) -> tuple[Tensor, Tensor]:
        """Return latents (count, latent) and uniform labels (count,), independent of private
        records."""
        latents = torch.randn(count, self.latent, generator=streams.public("latents"))
        labels = torch.randint(0, self.classes, (count,), generator=streams.public("labels"))
        return latents.to(self.device), labels.to(self.device)

    def generate(self, generator: Mapping[str, Tensor], latents: Tensor, labels: Tensor) -> Tensor:
        """Return images (n, ...) in [0, 1]."""
        images: Tensor = functional_call(self.generator, dict(generator), (latents, labels))
        return images

    def discriminate(self, discriminator: Tensors, images: Tensor, labels: Tensor) -> Tensor:
        """Return logits (n,); D is their sigmoid."""
        logits: Tensor = functional_call(self.discriminator, discriminator, (images, labels))
        return logits


@dataclass(frozen=True)
class StepsPerGeneratorStep:
    """n_D, the number of discriminator steps per generator step; see ``dpgan``."""

    steps: int | Literal["adaptive"]
    floor: float
    decay: float

    def start(self) -> Tensors:
        """Return the initial state: no accuracy, the first rung of the ladder."""
        return {name: torch.zeros(()) for name in ("accuracy", "shown", "rung", "since", "seen")}

    def now(self, pace: Mapping[str, Tensor]) -> int:
        """Return n_D."""
        if self.steps != "adaptive":
            return self.steps
        tens, step = divmod(int(pace["rung"]), 3)
        return int((1, 2, 5)[step] * 10**tens)

    def after(self, pace: Mapping[str, Tensor], accuracy: Tensor) -> Tensors:
        """Update the state before a generator step: average the share of recognized fakes, and
        increase n_D if the average is below the floor and 2 / (1 - decay) generator steps have
        passed on this rung.
        """
        since, seen = pace["since"] + 1, pace["seen"]

        def average(name: str, decay: float) -> Tensor:
            old = torch.where(seen == 0, accuracy, pace[name])
            return decay * old + (1 - decay) * accuracy

        average_now = average("accuracy", self.decay)
        climbs = (average_now < self.floor) & (since >= round(2 / (1 - self.decay)))
        return {
            "accuracy": average_now,
            "shown": average("shown", _METRIC_DECAY),
            "rung": pace["rung"] + climbs,
            "since": torch.where(climbs, 0.0, since),
            "seen": seen + 1,
        }


class Steps(Protocol):
    """The steps of a GAN, in the order in which they are taken.

    mechanism: mechanism of the sums of gradients of real records.
    sums_need_generator: whether these sums depend on the generator.
    """

    @property
    def nets(self) -> Networks: ...

    @property
    def mechanism(self) -> GradientSum: ...

    @property
    def sums_need_generator(self) -> bool: ...

    def record_gradients(
        self, discriminator: Tensors, generator: Tensors, shard: Shard, streams: RandomStreams
    ) -> Iterable[ClippedSum]:
        """Return clipped sums over the parts of a batch: the only access to private records."""

    def discriminator_step(
        self, point: Tensors, generator: Tensors, noised: Tensor, streams: RandomStreams
    ) -> Tensors:
        """Return the next discriminator and state of Adam (``weights``, ``adam``); may change
        ``point``.

        Args:
            noised: noisy sum of gradients over the expected batch size.
        """

    def generator_step(
        self, state: Mapping[str, Tensor], discriminator: Tensors, streams: RandomStreams
    ) -> tuple[Tensors, Tensor]:
        """Return the next generator, average and state of Adam, and the logits of the fakes of this
        step (n,)."""


@dataclass(frozen=True)
class Server:
    """Generator, discriminator and their optimizers; all of it is post-processing.

    pace: discriminator steps per generator step.
    is_logit: whether the sign of the discriminator's output separates real images from fakes.
    takes_steps: whether the server takes discriminator steps, along sums of the clients' gradients;
        otherwise clients take them.
    """

    steps: Steps
    pace: StepsPerGeneratorStep
    is_logit: bool
    takes_steps: bool

    @property
    def nets(self) -> Networks:
        """Networks."""
        return self.steps.nets

    def init(self, streams: RandomStreams) -> Tensors:
        """Return initial weights."""
        generator = init_weights(self.nets.generator, streams.public("generator"))
        discriminator = init_weights(self.nets.discriminator, streams.public("discriminator"))
        state = generator_start(generator) | concat_parts(
            discriminator=concat_parts(weights=discriminator, adam=adam_start(discriminator))
        )
        on_device = {name: value.to(self.nets.device) for name, value in state.items()}
        return on_device | concat_parts(pace=self.pace.start() | {"steps": torch.zeros(())})

    def query(self, state: Mapping[str, Tensor], round_: int, streams: RandomStreams) -> Query:
        """Query n_D steps from this discriminator against this generator, or the sum of one
        step."""
        del streams
        if self.takes_steps:
            shared = concat_parts(discriminator=concat_parts(weights=self._weights(state)))
            if self.steps.sums_need_generator:
                shared |= concat_parts(generator=part(state, "generator"))
            return Query({"step": torch.tensor([round_])}, shared)
        shared = {
            name: value
            for name, value in state.items()
            if name.startswith(("discriminator/", "generator/"))
        }
        return Query({"step": round_ + torch.arange(self.pace.now(part(state, "pace")))}, shared)

    def _weights(self, state: Mapping[str, Tensor]) -> Tensors:
        return part(part(state, "discriminator"), "weights")

    def update(
        self, state: Mapping[str, Tensor], responses: Tensor, round_: int, streams: RandomStreams
    ) -> Tensors:
        """Take the mean discriminator of the clients, or a step along the sum of their gradients;
        after n_D steps, take a generator step."""
        before, response = part(state, "discriminator"), responses[0].to(self.nets.device)
        if self.takes_steps:
            point = {name: value.clone() for name, value in before.items()}
            discriminator = self.steps.discriminator_step(
                point, part(state, "generator"), response, streams.at("discriminator", round_)
            )
        else:
            discriminator = unflat(response, before)
        steps_taken = discriminator["adam/step"] - before["adam/step"].to(
            discriminator["adam/step"]
        )
        steps = state["pace/steps"] + steps_taken.round().cpu()
        updated = {**state, **concat_parts(discriminator=discriminator), "pace/steps": steps}
        if float(steps) < self.pace.now(part(state, "pace")):
            return updated  # a step along sums, or the run ended in between
        generator_state, logits = self.steps.generator_step(
            updated, part(discriminator, "weights"), streams.at("generator", round_)
        )
        pace = self.pace.after(part(state, "pace"), (logits < 0).float().mean().cpu())
        updated["pace/steps"] = torch.zeros(())
        return {**updated, **generator_state, **concat_parts(pace=pace)}

    def metrics(
        self, state: Mapping[str, Tensor], held_out: Shard | None, streams: RandomStreams
    ) -> dict[str, float]:
        """Return n_D and the average share of recognized fakes; with ``held_out`` records, also the
        share of these and of as many fresh fakes that are classified correctly ("Private GANs,
        revisited", figures 4 and 5)."""
        pace = part(state, "pace")
        metrics: dict[str, float] = {"discriminator_steps": self.pace.now(pace)}
        if self.is_logit and pace["seen"]:
            metrics["accuracy_on_fakes"] = float(pace["shown"])
        if self.is_logit and held_out is not None:
            images, labels = held_out.rows(torch.arange(len(held_out)))
            fakes = self.sample(part(state, "generator"), labels, streams)
            reals_recognized = (
                (self.membership_scores(state, images, labels, streams) > 0).float().mean()
            )
            fakes_recognized = (
                (self.membership_scores(state, fakes, labels, streams) < 0).float().mean()
            )
            metrics["accuracy_on_held_out"] = float((reals_recognized + fakes_recognized) / 2)
        return metrics

    def membership_scores(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Score images by the discriminator of the server."""
        del streams
        discriminator = part(part(state, "discriminator"), "weights")
        with torch.no_grad():
            inputs = images.to(self.nets.device), labels.to(self.nets.device)
            return self.nets.discriminate(discriminator, *inputs).cpu()

    def sample(
        self, weights: Mapping[str, Tensor], labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Return one image per label."""
        latents, _ = self.nets.inputs(len(labels), streams)
        with torch.no_grad():
            return self.nets.generate(weights, latents, labels.to(self.nets.device)).cpu()


def networks(
    facts: PublicFacts,
    generator: GeneratorFactory,
    discriminator: ImageNetworkFactory,
    latent: int,
    device: str,
) -> Networks:
    """Return the networks for these images and labels."""
    return Networks(
        meta_module(generator(latent=latent, classes=facts.classes, shape=facts.shape)),
        meta_module(discriminator(classes=facts.classes, shape=facts.shape)),
        latent,
        facts.classes,
        device,
    )


@dataclass(frozen=True)
class Client:
    """Respond with the result of several discriminator steps, or with the contribution to the sum
    of one step. The client keeps no state: the moments of Adam are sent with the discriminator."""

    steps: Steps
    takes_steps: bool

    @property
    def nets(self) -> Networks:
        """Networks."""
        return self.steps.nets

    def respond(
        self, state: State, query: Query, shard: Shard, round_: int, streams: RandomStreams
    ) -> Sent:
        """See the class."""
        del state
        shared = {name: value.to(self.nets.device) for name, value in query.shared.items()}
        start = {name: value.clone() for name, value in part(shared, "discriminator").items()}
        generator = part(shared, "generator")
        if self.takes_steps:
            return self._descend(start, generator, query.count, shard, round_, streams)
        # the union of Poisson batches at one rate is a Poisson batch of all records
        streams = streams.at_round("sum", round_)
        sums = self.steps.record_gradients(part(start, "weights"), generator, shard, streams)
        return self.steps.mechanism.release((self.nets.size(),), sums, streams)

    def _descend(
        self,
        start: Tensors,
        generator: Tensors,
        count: int,
        shard: Shard,
        round_: int,
        streams: RandomStreams,
    ) -> Release:
        """Return discriminator and state of Adam after ``count`` steps. Streams depend on the
        message and the step, so that queries with overlapping rounds share none."""

        def sums(point: Mapping[str, Tensor], streams: RandomStreams) -> Iterable[ClippedSum]:
            return self.steps.record_gradients(part(point, "weights"), generator, shard, streams)

        def move(point: Mapping[str, Tensor], noised: Tensor, streams: RandomStreams) -> Tensors:
            noised = noised.to(self.nets.device)
            return self.steps.discriminator_step(dict(point), generator, noised, streams)

        steps = [streams.at_round("steps", round_).at("step", number) for number in range(count)]
        return descent(self.steps.mechanism, start, self.nets.size(), sums, move, steps)


def build_method(
    facts: PublicFacts, steps: Steps, pace: StepsPerGeneratorStep, source: str, *, is_logit: bool
) -> Method:
    """Return the method whose discriminator descends along sums over records, by steps of the
    clients, or, for sums over clients, by steps of the server.

    Args:
        source: source of the published ε.
        is_logit: see ``Server``.
    """
    nets, by_clients = steps.nets, isinstance(facts.aggregation(facts.clients), Local)
    server = Server(steps, pace, is_logit, takes_steps=not by_clients)
    size = 3 * nets.size() + 1 if by_clients else nets.size()
    program = ServerProgram(
        init=server.init,
        query=server.query,
        update=server.update,
        generator=lambda state: part(state, "average"),
        sample=server.sample,
        membership_scores=server.membership_scores,
        metrics=server.metrics,
    )
    return of_sums(
        facts,
        steps.mechanism,
        Client(steps, takes_steps=by_clients).respond,
        size,
        program,
        lambda: worst_case(nets, facts.shape, by_clients),
        source,
    )


def discriminator_descent(point: Tensors, gradient: Tensor, adam: Adam) -> Tensors:
    """Return discriminator and state of Adam after a step along ``gradient``, a vector; changes
    ``point``."""
    weights, moments = part(point, "weights"), part(point, "adam")
    adam_step(weights, unflat(gradient, weights), moments, *adam)
    return concat_parts(weights=weights, adam=moments)


def confident_discriminator(nets: Networks, logit: float) -> Tensors:
    """Return weights that classify every image as a fake, with a confidence that grows with
    ``logit``; all features are positive."""
    weights = init_weights(
        nets.discriminator, RandomStreams.from_seed(0, "seeded").public("discriminator")
    )
    for name, value in weights.items():
        if name.startswith("logit."):
            weights[name] = torch.full_like(value, -logit)
        elif name.startswith("convolutions."):
            weights[name] = value.abs() + (10.0 if name.endswith("bias") else 0.0)
    return weights


def worst_case(nets: Networks, shape: tuple[int, int, int], steps: bool) -> WorstCase:
    """Return a white image and no image as neighbours, with a discriminator so confident and wrong
    that the gradient exceeds any clip norm. All its features are positive and all fakes are grey,
    so that the gradient is the same in each trial. Where clients take ``steps``, the first moment
    of Adam is the scaled first gradient."""
    public = RandomStreams.from_seed(0, "seeded").public
    weights = confident_discriminator(nets, 1e3)
    grey = {n: torch.zeros_like(v) for n, v in init_weights(nets.generator, public("g")).items()}
    one = Shard(torch.full((1, *shape), 255, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    start = concat_parts(weights=weights, adam=adam_start(weights))
    shared = concat_parts(discriminator=start, generator=grey)

    def first_moment(response: Tensor) -> Tensor:
        moments = part(unflat(response[0], start), "adam")
        return flat({name: value for name, value in moments.items() if name[0] == "m"})[None]

    return WorstCase(
        Query({"step": torch.tensor([0])}, shared),
        ({}, one),
        ({}, Shard(one.images[:0], one.labels[:0])),
        first_moment if steps else lambda response: response,
    )
