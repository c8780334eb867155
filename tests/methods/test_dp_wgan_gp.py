"""DP-WGAN-GP against Algorithm 2 by plain autograd, and a finding of the paper."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from scipy.special import ndtri
from tiny import SHARD, STREAMS, noised
from torch import Tensor
from torch.func import functional_call

from fedgen.data.datasets import Shard
from fedgen.methods.api import Method, PublicFacts
from fedgen.methods.dp_wgan_gp import dp_wgan_gp
from fedgen.models import cdcgan
from fedgen.models.functional import part
from fedgen.privacy.batch_sampling import PoissonSampling
from fedgen.privacy.events import canonical

BATCH, RATE, CLIP = 6, 0.1, 0.3


def make(noise: float | None, **changed: object) -> Method:
    settings = {
        "generator": partial(cdcgan.Generator, width=4, kernel=5),
        "critic": partial(cdcgan.Discriminator, width=3, kernel=5),
        "latent": 4,
        "batch": BATCH,
        "sampling_rate": RATE,
        "rows": None,
        "critic_steps": 1,
        "gradient_penalty": 10.0,
        "learning_rate": 1e-3,
        "betas": (0.5, 0.9),
        "clip": CLIP,
        "ema": 0.0,
        "device": "cpu",
    }
    return dp_wgan_gp(PublicFacts(1, None, 10, (1, 8, 8)), noise, **{**settings, **changed})  # type: ignore[arg-type]


def answered(method: Method, shard: Shard, round_: int = 0) -> Tensor:
    query = method.server.query(method.server.init(STREAMS), round_, STREAMS)
    release = method.client.respond({}, query, shard, round_, STREAMS)
    return torch.from_numpy(release.arrays["answer"])


@pytest.mark.parametrize("noise", [1e-300, 1.5])
def test_a_step_is_algorithm_2(noise: float) -> None:
    """One record at a time, by plain autograd."""
    method = make(noise)
    client = method.client.respond.__self__  # type: ignore[attr-defined]
    start, here = method.server.init(STREAMS), STREAMS.at("steps", 0, "step", 0)
    generator = part(start, "generator")
    batch = torch.from_numpy(PoissonSampling(RATE).sample(len(SHARD), here))
    uniforms = here.secret_uniforms(len(batch) * 5, "pairs", 0).reshape(-1, 5) + 2.0**-54
    latents, rhos = torch.from_numpy(ndtri(uniforms[:, 1:])).float(), uniforms[:, 0]
    total = noised(torch.zeros(client.nets.size()), noise * CLIP, here)
    critic = part(part(start, "discriminator"), "weights")
    for x, y, z, rho in zip(*SHARD.rows(batch), latents, rhos, strict=True):
        own = {name: value.clone().requires_grad_() for name, value in critic.items()}

        def score(image: Tensor, own: dict = own, y: Tensor = y) -> Tensor:
            return functional_call(client.nets.discriminator, own, (image[None], y[None]))[0]

        fake = functional_call(client.nets.generator, generator, (z[None], y[None]))[0].detach()
        between = (float(rho) * x + (1 - float(rho)) * fake).requires_grad_()
        [slope] = torch.autograd.grad(score(between), between, create_graph=True)
        loss = score(fake) - score(x) + 10 * (slope.norm() - 1) ** 2
        result = torch.autograd.grad(loss, [own[name] for name in sorted(own)], allow_unused=True)
        flat = torch.cat(
            [
                torch.zeros_like(own[n]).flatten() if each is None else each.flatten()
                for n, each in zip(sorted(own), result, strict=True)
            ]
        )
        total = total + flat * min(1.0, CLIP * (1 - 2**-10) / float(flat.norm()))
    found_moment = method.worst_cases()[0].read(answered(method, SHARD))[0]
    assert len(batch) > 1
    assert torch.allclose(
        found_moment, 0.5 * total / BATCH, atol=1e-6 + noise * CLIP / BATCH / 1000
    )


def test_the_cost_of_a_run() -> None:
    plan = make(1.5).plan
    assert canonical(plan.server_event(7)) == {PoissonSampledDpEvent(RATE, GaussianDpEvent(1.5)): 7}
    assert plan.claim is not None


def test_small_clip_norms_are_equivalent_under_adam() -> None:
    """Section 3.2.1: below the norms of all gradients C cancels, above them it does not."""

    def moved(clip: float) -> Tensor:
        method = make(1e-2, clip=clip, critic_steps=5)
        start, here = method.server.init(STREAMS), part
        after = answered(method, SHARD)[0]
        weights = here(here(start, "discriminator"), "weights")
        count = sum(value.numel() for value in weights.values())
        before = torch.cat([weights[name].flatten() for name in sorted(weights)])
        return after[-count:] - before

    small, smaller, large = moved(1e-1), moved(1e-2), moved(1e3)
    assert torch.nn.functional.cosine_similarity(small, smaller, 0) > 0.999
    assert torch.nn.functional.cosine_similarity(small, large, 0) < 0.9


def test_generator_steps_lower_the_loss_of_the_critic() -> None:
    method = make(None, sampling_rate=1.0, batch=60)
    state = method.server.init(STREAMS)
    for round_ in range(3):
        query = method.server.query(state, round_, STREAMS)
        answer = method.client.respond({}, query, SHARD, round_, STREAMS).arrays["answer"]
        before = state
        state = method.server.update(state, torch.from_numpy(answer), round_, STREAMS)
    nets = method.client.respond.__self__.nets  # type: ignore[attr-defined]
    latents, labels = nets.inputs(200, STREAMS)
    critic = part(part(state, "discriminator"), "weights")

    def score(of: dict) -> float:
        with torch.no_grad():
            images = nets.generate(part(of, "generator"), latents, labels)
            return float(nets.discriminate(critic, images, labels).mean())

    assert score(state) > score(before)
