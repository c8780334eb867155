"""DPGAN against an explicit Algorithm 1, and the properties that its privacy relies on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import (
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from mutation import kills
from tiny import SHARD, STREAMS, Train, noised
from torch import Tensor
from torch.func import functional_call, grad
from torch.nn import functional as F

from fedgen import cli
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.federation.messages import Response
from fedgen.losses.adversarial import hinge, logistic, wasserstein
from fedgen.methods.api import Method, PublicFacts
from fedgen.methods.dpgan import dpgan
from fedgen.methods.families.dp_sgd import gradient_sum
from fedgen.methods.families.gan import StepsPerGeneratorStep
from fedgen.models import cdcgan
from fedgen.models.functional import adam_start, adam_step, part
from fedgen.privacy.batch_sampling import PoissonSampling
from fedgen.privacy.clipping import Precision, clipped_sum
from fedgen.privacy.events import Unit, canonical
from fedgen.randomness import RandomStreams
from fedgen.strategies.parameter_updates import ParameterUpdates
from fedgen.testing.operators import operators, synchronizing

BATCH, RATE, CLIP, RATES = 5, 0.2, 0.3, (1e-2, (0.5, 0.999))
EMPTY = Shard(SHARD.images[:0], SHARD.labels[:0])


def make(noise: float | None, clients: int = 1, **changed: object) -> Method:
    settings = {
        "generator": partial(cdcgan.Generator, width=4),
        "discriminator": partial(cdcgan.Discriminator, width=3),
        "latent": 4,
        "batch": BATCH,
        "fakes": BATCH,
        "sampling_rate": RATE,
        "rows": None,
        "discriminator_steps": 2,
        "accuracy_floor": 0.6,
        "accuracy_ema": 0.99,
        "discriminator_learning_rate": RATES[0],
        "generator_learning_rate": RATES[0],
        "betas": RATES[1],
        "clip": CLIP,
        "ema": 0.0,
        "mode_seeking": 0.0,
        "precision": "float64",
        "device": "cpu",
    }
    return dpgan(PublicFacts(clients, None, 10, (1, 8, 8)), noise, **{**settings, **changed})  # type: ignore[arg-type]


def played(method: Method, rounds: int) -> dict:
    state, round_ = method.server.init(STREAMS), 0
    while round_ < rounds:
        query = method.server.query(state, round_, STREAMS)
        release = method.client.respond({}, query, SHARD, round_, STREAMS)
        answers = torch.from_numpy(release.arrays["answer"])
        state = method.server.update(state, answers, round_, STREAMS)
        round_ += query.count
    return state


def algorithm_1(method: Method, noise: float, rounds: int, steps: int) -> dict[str, dict]:
    """Algorithm 1 with the streams of the run, without federation, mechanisms or the method:
    networks, batches, clipped sums and Adam are tested elsewhere."""
    nets, start = method.client.respond.__self__.nets, method.server.init(STREAMS)  # type: ignore[attr-defined]
    theta = part(start, "generator")
    phi = part(part(start, "discriminator"), "weights")
    theta_adam, phi_adam = adam_start(theta), adam_start(phi)

    def generate(weights: dict, streams: RandomStreams) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, 10, (BATCH,), generator=streams.public("labels"))
        latents = torch.randn(BATCH, 4, generator=streams.public("latents"))
        return functional_call(nets.generator, weights, (latents, labels)), labels

    def clipped(images: Tensor, labels: Tensor, sign: float) -> Tensor:
        loss = lambda logits: F.softplus(sign * logits)  # noqa: E731
        kind: Precision = "float64" if sign < 0 else "float32"  # real rows alone need a bound
        inputs = images, labels
        result = clipped_sum(nets.discriminator, phi, inputs, loss, CLIP, precision=kind).gradients
        return torch.cat([result[name].flatten() for name in sorted(phi)])

    for t in range(rounds):
        here = STREAMS.at("steps", t - t % steps, "step", t % steps)
        batch = np.flatnonzero(here.secret_bits(len(SHARD), "batch") < int(RATE * 2**64))
        real = clipped(*SHARD.rows(torch.from_numpy(batch)), -1.0)
        with torch.no_grad():
            fakes = generate(theta, here)
        std = noise * (CLIP / BATCH)
        answer = noised(real / BATCH, std, here) if std else (real / BATCH).float()
        mean = (answer + (clipped(*fakes, 1.0) / BATCH).float()) / 2
        pieces = torch.split(mean, [phi[name].numel() for name in sorted(phi)])
        gradients = {n: p.view_as(phi[n]) for n, p in zip(sorted(phi), pieces, strict=True)}
        adam_step(phi, gradients, phi_adam, *RATES)
        if (t + 1) % steps == 0:
            streams = STREAMS.at("generator", t + 1 - steps)

            def generator_loss(own: dict, streams: RandomStreams = streams) -> Tensor:
                fakes = generate(own, streams)
                return F.softplus(-functional_call(nets.discriminator, phi, fakes)).mean()

            adam_step(theta, grad(generator_loss)(theta), theta_adam, *RATES)
    return {"generator": theta, "discriminator": phi}


@kills(
    "fedgen/methods/families/gan.py",
    'streams.at_round("steps", round_).at("step", number)',
    'streams.at_round("steps", round_)',
)
@pytest.mark.parametrize("noise", [0.0, 1.5])
def test_one_client_is_algorithm_1_bit_for_bit(noise: float) -> None:
    """8 generator steps, without noise: a multiplier of 1e-300 adds zero."""
    method = make(noise or 1e-300, discriminator_steps=3)
    ours, reference = played(method, 24), algorithm_1(method, noise, 24, 3)
    result = part(part(ours, "discriminator"), "weights")
    assert all(torch.equal(result[n], value) for n, value in reference["discriminator"].items())
    result = part(ours, "generator")
    assert all(torch.equal(result[n], value) for n, value in reference["generator"].items())
    moved = part(method.server.init(STREAMS), "generator")
    assert not any(torch.equal(result[n], moved[n]) for n in result if n.endswith("weight"))


LOSSES = {
    logistic: (lambda s: -torch.sigmoid(s).log(), lambda s: -torch.sigmoid(-s).log()),
    hinge: (lambda s: (1 - s).clamp(min=0), lambda s: (1 + s).clamp(min=0)),
    wasserstein: (lambda s: -s, lambda s: s),
}
"""Of real images and of fakes, as the papers have them."""


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_generator_step_uses_the_loss_of_the_discriminator(loss: Callable) -> None:
    """Its first step moves against what the discriminator, by this loss, assigns to fakes."""
    method = make(1e-300, discriminator_steps=1, loss=loss, generator_learning_rate=1e-3)
    nets, start = method.client.respond.__self__.nets, method.server.init(STREAMS)  # type: ignore[attr-defined]
    phi = part(part(played(method, 1), "discriminator"), "weights")
    before, after = part(start, "generator"), part(played(method, 1), "generator")
    inputs = nets.inputs(200, STREAMS.at("other"))
    scores = [nets.discriminate(phi, nets.generate(w, *inputs), inputs[1]) for w in (before, after)]
    as_real = [LOSSES[loss][0](each).mean() for each in scores]
    assert scores[1].mean() > scores[0].mean() and as_real[1] < as_real[0]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("noise", [1e-300, 1.5])
def test_a_step_clips_each_example_before_summing(noise: float, loss: Callable) -> None:
    """One step against plain autograd, one example at a time."""
    method = make(noise, discriminator_steps=1, loss=loss)
    nets, start = method.client.respond.__self__.nets, method.server.init(STREAMS)  # type: ignore[attr-defined]
    phi = part(part(start, "discriminator"), "weights")

    def clipped(image: Tensor, label: Tensor, real: bool) -> Tensor:
        own = {name: value.clone().requires_grad_() for name, value in phi.items()}
        logit = functional_call(nets.discriminator, own, (image[None], label[None]))[0]
        lost = LOSSES[loss][0 if real else 1](logit)
        result = torch.autograd.grad(lost, [own[name] for name in sorted(own)])
        flat = torch.cat([each.flatten() for each in result])
        return flat * min(1.0, CLIP * (1 - 2**-10) / float(flat.norm()))

    here = STREAMS.at("steps", 0, "step", 0)
    batch = torch.from_numpy(PoissonSampling(RATE).sample(len(SHARD), here))
    total = noised(torch.zeros(nets.size()), noise * CLIP, here)
    for image, label in zip(*SHARD.rows(batch), strict=True):
        total = total + clipped(image, label, True)
    latents, labels = nets.inputs(BATCH, here)
    fakes = nets.generate(part(start, "generator"), latents, labels).detach()
    for image, label in zip(fakes, labels, strict=True):
        total = total + clipped(image, label, False)
    query = method.server.query(start, 0, STREAMS)
    release = method.client.respond({}, query, SHARD, 0, STREAMS)
    result = method.worst_cases()[0].read(torch.from_numpy(release.arrays["answer"]))
    assert torch.allclose(
        result[0], (1 - RATES[1][0]) * total / (2 * BATCH), atol=1e-6 + noise * CLIP / BATCH / 1000
    )


@kills("fedgen/privacy/mechanisms.py", "repeat(mechanism.event(), len(steps))", "mechanism.event()")
@kills(
    "fedgen/methods/families/gan.py",
    'streams.at_round("steps", round_).at("step", number)',
    'streams.at_round("steps", round_ + number)',
)
def test_steps_are_charged_one_by_one_and_share_no_noise() -> None:
    """Six steps in a message, and queries that overlap them: each has its own random streams,
    otherwise two responses would reveal their difference."""
    method = make(1e6, discriminator_steps=6)
    start = method.server.init(STREAMS)
    query = method.server.query(start, 0, STREAMS)
    release = method.client.respond({}, query, SHARD, 0, STREAMS)
    assert release.event == SelfComposedDpEvent(canonical_event(1e6), 6)
    result = []
    for first in range(4):
        answer = method.client.respond({}, query.take([0]), SHARD, first, STREAMS).arrays["answer"]
        result.append(method.worst_cases()[0].read(torch.from_numpy(answer))[0])
    two = method.client.respond({}, query.take([0, 1]), SHARD, 0, STREAMS).arrays["answer"]
    m = method.worst_cases()[0].read(torch.from_numpy(two))[0]
    result.append(m - RATES[1][0] * result[0])  # what the second of the two steps added
    close = torch.corrcoef(torch.stack(result)).fill_diagonal_(0).abs()
    assert float(close.max()) < 0.1


def canonical_event(noise: float) -> PoissonSampledDpEvent:
    return PoissonSampledDpEvent(RATE, GaussianDpEvent(noise))


def test_adaptive_steps_increase_as_in_the_paper() -> None:
    """A scripted accuracy: 0.9, then 0.5 forever. The average falls below 0.6 after as many steps
    as 0.99^n takes from 0.4 to 0.1; the grace period of a rung is 200 generator steps."""
    pace, result, state, climbed = StepsPerGeneratorStep("adaptive", 0.6, 0.99), 0.9, None, []
    state = pace.start()
    average = result
    for step in range(1500):
        accuracy = 0.9 if step < 50 else 0.5
        average = accuracy if step == 0 else 0.99 * average + 0.01 * accuracy
        before = pace.now(state)
        state = pace.after(state, torch.tensor(accuracy))
        assert float(state["accuracy"]) == pytest.approx(average, abs=1e-5)
        if pace.now(state) != before:
            climbed.append((step, pace.now(state)))
    first = climbed[0][0]
    assert first == max(199, 50 + math.ceil(math.log(0.1 / 0.4) / math.log(0.99)) - 1)
    assert climbed == [(first + 200 * n, s) for n, s in enumerate([2, 5, 10, 20, 50, 100, 200])]
    assert float(state["shown"]) == pytest.approx(0.5, abs=1e-5)


def test_mode_seeking_diversifies_images_of_a_label() -> None:
    """Two runs that differ only in its weight."""

    def spread(weight: float) -> float:
        method = make(1.0, mode_seeking=weight, fakes=20, discriminator_steps=1)
        state = played(method, 15)
        labels = torch.arange(10).repeat(2)
        nets = method.client.respond.__self__.nets  # type: ignore[attr-defined]
        latents, _ = nets.inputs(20, STREAMS.at("test"))
        first, second = nets.generate(part(state, "generator"), latents, labels).chunk(2)
        return float((first - second).detach().abs().mean())

    assert spread(1.0) > 1.1 * spread(0.0)


def test_fakes_have_half_of_the_weight() -> None:
    """The gradient of a step is half of reals and half of fakes, whatever their numbers."""
    few, many = (
        first_moment(make(1e-300, fakes=fakes, sampling_rate=1e-9), EMPTY) for fakes in (40, 400)
    )
    assert torch.nn.functional.cosine_similarity(few[0], many[0], 0) > 0.9
    assert float(few.norm() / many.norm()) == pytest.approx(1, abs=0.15)


def test_a_rung_has_a_grace_period() -> None:
    """Accuracy is below the floor from the start: nothing happens before 200 steps."""
    pace = StepsPerGeneratorStep("adaptive", 0.6, 0.99)
    state = pace.start()
    for step in range(200):
        assert pace.now(state) == 1, step
        state = pace.after(state, torch.tensor(0.1))
    assert pace.now(state) == 2
    assert StepsPerGeneratorStep(7, 0.6, 0.99).now(state) == 7


def first_moment(method: Method, shard: Shard, round_: int = 0) -> Tensor:
    """Return what a response reveals of the noised sum of its first step."""
    query = method.server.query(method.server.init(STREAMS), round_, STREAMS).take([0])
    release = method.client.respond({}, query, shard, round_, STREAMS)
    return method.worst_cases()[0].read(torch.from_numpy(release.arrays["answer"]))


def test_an_empty_batch_is_released_and_charged() -> None:
    method = make(1.0)
    query = method.server.query(method.server.init(STREAMS), 0, STREAMS)
    release = method.client.respond({}, query, EMPTY, 0, STREAMS)
    assert release.event == SelfComposedDpEvent(canonical_event(1.0), 2)
    quiet = first_moment(make(1e-300), EMPTY)
    noise = (first_moment(method, EMPTY) - quiet) / (1 - RATES[1][0])
    assert noise.std() == pytest.approx(CLIP / (2 * BATCH), rel=0.1)


def test_each_round_samples_its_own_batch() -> None:
    """Without noise and with the same fakes, responses are sums over different records."""
    method = make(1e-300)

    def of_real_rows(round_: int) -> Tensor:
        return first_moment(method, SHARD, round_) - first_moment(method, EMPTY, round_)

    assert torch.equal(of_real_rows(0), of_real_rows(0))
    assert not torch.allclose(of_real_rows(0), of_real_rows(1), atol=1e-5)


def test_the_divisor_does_not_depend_on_the_records() -> None:
    """Half of the records, without noise: about half of the sum, not its mean."""
    method = make(1e-300, sampling_rate=1.0)
    half = Shard(SHARD.images[:30], SHARD.labels[:30])
    rest = Shard(SHARD.images[30:], SHARD.labels[30:])
    whole, *parts = (
        first_moment(method, shard) - first_moment(method, EMPTY) for shard in (SHARD, half, rest)
    )
    assert torch.allclose(whole, parts[0] + parts[1], atol=1e-5)


def test_the_server_takes_the_mean_of_the_discriminators() -> None:
    """Of three clients; the noise of one is divided by three."""
    strategy = ParameterUpdates(make(1.0, clients=3), STREAMS)
    answers = {
        c: Response({"answer": np.full((1, 2), v, np.float32)}, canonical_event(1.0), Unit.RECORD)
        for c, v in enumerate((1.0, 2.0, 6.0))
    }
    assert sorted(strategy.route(0, 4)) == [0, 1, 2]
    result = strategy.aggregate_query(0, answers, 4)
    assert result is not None
    assert result.tolist() == [[3.0, 3.0]]
    del answers[2]
    assert strategy.aggregate_query(0, answers, 4).tolist() == [[1.5, 1.5]]  # type: ignore[union-attr]
    assert strategy.aggregate_query(0, {}, 4) is None


def test_the_cost_of_a_run() -> None:
    plan = make(1.5, clients=3).plan
    assert canonical(plan.server_event(7)) == {PoissonSampledDpEvent(RATE, GaussianDpEvent(1.5)): 7}
    assert plan.release_event is None
    assert "Poisson" in str(plan.amplified_by["server"])
    all_clients = make(1.5, sampling_rate=1.0).plan
    assert canonical(all_clients.server_event(7)) == {GaussianDpEvent(1.5): 7}
    assert all_clients.sampler == "none"
    assert "no subsampling" in str(all_clients.not_amplified_because["server"])
    assert canonical(make(None).plan.server_event(7)) == {NonPrivateDpEvent(): 7}


@pytest.mark.parametrize("rate", [0.0, 1.2])
def test_an_invalid_rate_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="sampling rate"):
        make(1.0, sampling_rate=rate)


@kills(
    "fedgen/methods/families/dp_sgd.py",
    "(facts.clients if of_each else 1)",
    "1",
)
@pytest.mark.parametrize(
    ("clients", "kind", "rate"),
    [(1, "local", 0.05), (4, "local", 0.2), (4, "secure", 0.05), (40, "local", 1.0)],
)
def test_the_rate_follows_from_the_batch_and_the_public_count(
    clients: int, kind: str, rate: float
) -> None:
    """A sum has the batch by which it is divided: of one client, or of all clients together."""
    facts = PublicFacts(clients, None, 10, (1, 8, 8), aggregation_kind=kind)  # type: ignore[arg-type]
    assert gradient_sum(facts, 1.0, CLIP, 5, None, 100).sampling == PoissonSampling(rate)
    assert gradient_sum(facts, 1.0, CLIP, 5, 0.3, 100).sampling == PoissonSampling(0.3)
    group = replace(facts, all_clients=2 * clients)  # half of the clients, and of the records
    twice = PoissonSampling(min(1.0, 2 * rate))
    assert gradient_sum(group, 1.0, CLIP, 5, None, 100).sampling == twice
    with pytest.raises(FedgenError, match=r"^data\.public_rows: is not set"):
        gradient_sum(facts, 1.0, CLIP, 5, None, None)
    with pytest.raises(FedgenError, match=r"^method\.batch: 5 exceeds data\.public_rows=4"):
        gradient_sum(facts, 1.0, CLIP, 5, None, 4)


def test_a_loss_is_published_by_its_name(train: Train, tmp_path: Path) -> None:
    """A generator published before there were several losses is still valid."""
    run = train("method=dpgan_small", "method/loss=hinge")
    place = run / "public" / "generator.json"
    record = json.loads(place.read_text())
    assert record["method"]["loss"] == {"type": "hinge"}
    assert cli.run(["sample", f"run={run}/public", "n=5", f"out={tmp_path}/one.npz"]) == 0
    del record["method"]["loss"]
    place.write_text(json.dumps(record))
    assert cli.run(["sample", f"run={run}/public", "n=5", f"out={tmp_path}/two.npz"]) == 0
    one, two = (np.load(tmp_path / f"{name}.npz")["images"] for name in ("one", "two"))
    assert (one == two).all()


@kills(
    "fedgen/privacy/ghost_norms.py",
    "return factors.to(self.gradients) @ zero_nonfinite(self.gradients)",
    "return factors[factors != 0].to(self.gradients) @ self.gradients[factors != 0]",
)
def test_a_step_calls_few_operators() -> None:
    """At most 600 for a batch in one chunk. A step synchronizes once, to find the entries of the
    noise that double precision leaves undecided."""
    method = make(noise=1.0)
    state = method.server.init(STREAMS)

    def respond(steps: int) -> None:
        query = replace(
            method.server.query(state, 0, STREAMS), samples={"step": torch.arange(steps)}
        )
        method.client.respond({}, query, SHARD, 0, STREAMS)

    respond(1)  # warm-up: checks once that examples are independent
    calls = operators(lambda: respond(3))
    calls.subtract(operators(lambda: respond(2)))
    assert sum(calls.values()) <= 600
    assert synchronizing(calls) == {"nonzero": 1}
