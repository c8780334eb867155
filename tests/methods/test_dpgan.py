"""DPGAN against algorithm 1 written out, and what its privacy rests on."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent, PoissonSampledDpEvent
from tiny import COINS, SHARD
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.method import Method, PublicFacts
from fedgen.methods.dpgan import dpgan
from fedgen.models import dcgan
from fedgen.models.functional import adam_start, adam_step, part
from fedgen.privacy.batches import PoissonBatches
from fedgen.privacy.events import canonical

BATCH, RATE, CLIP, RATES = 5, 0.2, 0.3, (1e-2, (0.5, 0.999))
EMPTY = Shard(SHARD.images[:0], SHARD.labels[:0])


def make(noise: float | None, clients: int = 1, **changed: object) -> Method:
    settings = {
        "generator": partial(dcgan.Generator, width=4),
        "discriminator": partial(dcgan.Discriminator, width=3),
        "latent": 4,
        "batch": BATCH,
        "sampling_rate": RATE,
        "discriminator_steps": 2,
        "learning_rate": RATES[0],
        "betas": RATES[1],
        "clip": CLIP,
        "device": "cpu",
    }
    return dpgan(PublicFacts(clients, None, 10, (1, 8, 8)), noise, **{**settings, **changed})  # type: ignore[arg-type]


def played(method: Method, rounds: int) -> dict:
    state = method.server.init(COINS)
    for round_ in range(rounds):
        query = method.server.query(state, round_, COINS)
        release = method.client.answer({}, query, SHARD, round_, COINS)
        answers = torch.from_numpy(release.arrays["gradients"])
        state = method.server.update(state, answers, round_, COINS)
    return state


def written_out(method: Method, noise: float, rounds: int) -> dict:
    """Algorithm 1 with the coins of the run, one example at a time, by plain autograd."""
    nets = method.client.answer.__self__.nets  # type: ignore[attr-defined]
    start = method.server.init(COINS)
    theta, phi = part(start, "generator"), part(start, "discriminator")
    theta_adam, phi_adam = adam_start(theta), adam_start(phi)
    names = sorted(phi)

    def clipped(image: Tensor, label: Tensor, sign: float) -> Tensor:
        own = {name: value.clone().requires_grad_() for name, value in phi.items()}
        logit = functional_call(nets.discriminator, own, (image[None], label[None]))[0]
        found = torch.autograd.grad(F.softplus(sign * logit), [own[name] for name in names])
        flat = torch.cat([each.flatten() for each in found])
        return flat * min(1.0, CLIP / float(flat.norm()))

    for step in range(rounds):
        here = COINS.at("answer", step)
        batch = PoissonBatches(RATE).draw(len(SHARD), here)
        images, labels = SHARD.rows(torch.from_numpy(batch))
        total = sum(
            (clipped(x, y, -1.0) for x, y in zip(images, labels, strict=True)), torch.zeros(())
        )
        fakes, given = nets.generate(theta, BATCH, COINS.at("fakes", step))
        total = total + sum(clipped(x, y, 1.0) for x, y in zip(fakes.detach(), given, strict=True))
        total = total + noise * CLIP * here.noise((nets.size(),), "release")
        pieces = torch.split(total / (2 * BATCH), [phi[name].numel() for name in names])
        gradients = {n: p.view_as(phi[n]) for n, p in zip(names, pieces, strict=True)}
        adam_step(phi, gradients, phi_adam, *RATES)
        if (step + 1) % 2 == 0:
            own = {name: value.clone().requires_grad_() for name, value in theta.items()}
            fakes, given = nets.generate(own, BATCH, COINS.at("generator", step))
            loss = F.softplus(-functional_call(nets.discriminator, phi, (fakes, given))).mean()
            slopes = torch.autograd.grad(loss, list(own.values()))
            adam_step(theta, dict(zip(own, slopes, strict=True)), theta_adam, *RATES)
    return {"generator": theta, "discriminator": phi}


@pytest.mark.parametrize("noise", [1e-9, 1.5])
def test_one_client_is_algorithm_1(noise: float) -> None:
    """To rounding: sums run in another order. The step is large, so that errors would grow."""
    ours, reference = played(make(noise), 6), written_out(make(noise), noise, 6)
    for network, weights in reference.items():
        for name, value in weights.items():
            assert torch.allclose(part(ours, network)[name], value, atol=2e-4), name


def test_an_empty_batch_is_released_and_charged() -> None:
    method = make(1.0)
    query = method.server.query(method.server.init(COINS), 0, COINS)
    release = method.client.answer({}, query, EMPTY, 0, COINS)
    assert release.event == PoissonSampledDpEvent(RATE, GaussianDpEvent(1.0))
    noise = release.arrays["gradients"]
    assert noise.std() == pytest.approx(CLIP / BATCH, rel=0.1)


def test_each_round_draws_a_batch_of_its_own() -> None:
    """Under tiny noise, answers of two rounds to one question are sums over other rows."""
    method = make(1e-9)
    query = method.server.query(method.server.init(COINS), 0, COINS)
    first, second, again = (
        method.client.answer({}, query, SHARD, round_, COINS).arrays["gradients"]
        for round_ in (0, 1, 0)
    )
    assert np.array_equal(first, again)
    assert not np.allclose(first, second, atol=1e-5)


def test_the_divisor_does_not_depend_on_the_rows() -> None:
    """Half of the rows, under tiny noise: about half of the sum, not its mean."""
    method = make(1e-9, sampling_rate=1.0)
    query = method.server.query(method.server.init(COINS), 0, COINS)
    half = Shard(SHARD.images[:30], SHARD.labels[:30])
    rest = Shard(SHARD.images[30:], SHARD.labels[30:])
    whole, *parts = (
        method.client.answer({}, query, shard, 0, COINS).arrays["gradients"]
        for shard in (SHARD, half, rest)
    )
    assert np.allclose(whole, parts[0] + parts[1], atol=1e-5)


def test_what_a_run_costs() -> None:
    plan = make(1.5, clients=3).plan
    assert canonical(plan.server(7)) == {PoissonSampledDpEvent(RATE, GaussianDpEvent(1.5)): 7}
    assert plan.release is None
    assert "Poisson" in str(plan.amplified_by["server"])
    everybody = make(1.5, sampling_rate=1.0).plan
    assert canonical(everybody.server(7)) == {GaussianDpEvent(1.5): 7}
    assert everybody.sampler == "none"
    assert "no draw" in str(everybody.reasons["server"])
    assert canonical(make(None).plan.server(7)) == {NonPrivateDpEvent(): 7}


@pytest.mark.parametrize("rate", [0.0, 1.2])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(FedgenError, match=r"method\.sampling_rate"):
        make(1.0, sampling_rate=rate)
