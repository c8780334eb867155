"""DPDM: a step by plain torch, the source of each random stream, and a network without interaction
between records."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from mutation import kills
from tiny import SHARD, STREAMS
from torch.func import functional_call

from fedgen import cli
from fedgen.data.datasets import Shard
from fedgen.losses import edm
from fedgen.losses.edm import Sampler
from fedgen.methods.api import Method, PublicFacts
from fedgen.methods.dpdm import dpdm
from fedgen.models.functional import flat, init_weights, meta_module, part, unflat
from fedgen.models.unet import UNet
from fedgen.randomness import RandomStreams
from fedgen.testing.operators import operators, synchronizing

NETWORK = partial(UNet, width=4, multipliers=[1, 2], blocks=1, attention=[4])
SETTINGS = {
    "network": NETWORK,
    "sampler": partial(
        Sampler,
        steps=3,
        sigma_min=0.002,
        sigma_max=80.0,
        rho=7.0,
        second_order=False,
        churn=0.0,
        churn_min=0.05,
        churn_max=50.0,
        guidance=0.0,
    ),
    "copies": 3,
    "label_dropout": 0.5,
    "learning_rate": 1e-2,
    "betas": (0.9, 0.999),
    "ema": 0.9,
    "batch": 60,
    "sampling_rate": 1.0,
    "rows": None,
    "clip": 1.0,
    "device": "cpu",
}


def make(noise: float | None = None, **changed: object) -> Method:
    return dpdm(PublicFacts(1, 60, 10, (1, 8, 8)), noise, **{**SETTINGS, **changed})  # type: ignore[arg-type]


def answer(method: Method, shard: Shard, streams: RandomStreams = STREAMS) -> np.ndarray:
    state = method.server.init(STREAMS)
    query = method.server.query(state, 0, STREAMS)
    assert query is not None
    return method.client.respond({}, query, shard, 0, streams).arrays["answer"][0]


@pytest.mark.parametrize("size", [8, 28, 32])
@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("patch", [1, 2])
def test_the_network_processes_images_independently(size: int, attends: bool, patch: int) -> None:
    attention = [size // (2 * patch)] if attends else []
    net = meta_module(UNet(10, (1, size, size), 8, [1, 2], 2, attention, patch))
    weights = init_weights(net, STREAMS.public("network"))
    images = torch.randn(3, 1, size, size)
    levels, labels = torch.tensor([0.1, -0.2, 0.3]), torch.tensor([1, 10, 3])
    result = functional_call(net, weights, (images, levels, labels))
    assert result.shape == images.shape
    for row in range(3):
        alone = slice(row, row + 1)
        one = functional_call(net, weights, (images[alone], levels[alone], labels[alone]))
        assert torch.allclose(one[0], result[row], atol=1e-4)
    for changed in ((images, levels + 1, labels), (images, levels, labels - 1)):
        assert not torch.allclose(functional_call(net, weights, changed), result, atol=1e-4)


def test_a_response_is_the_gradient_of_the_mean_over_copies() -> None:
    """By plain autograd on the client's own streams: 60 records at K = 3, in parts of about 21."""
    method = make()
    client = method.client.respond.__self__
    state = method.server.init(STREAMS)
    weights = part(state, "generator")
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    here, whole = STREAMS.at("sum", 0), torch.zeros(())
    shown: list[int] = []
    for number, rows in enumerate(client.mechanism.batch_parts(SHARD, here, 64 // 3)):
        images, labels = SHARD.rows(torch.from_numpy(rows))
        clean = (images * 2 - 1).repeat_interleave(3, 0)
        levels, noise, dropped = client._random_inputs(len(rows), clean, here.at("copies", number))
        labels = torch.where(dropped, 10, labels)
        shown += labels.tolist()
        noisy = clean + levels.view(-1, 1, 1, 1) * noise
        given = (*edm.inputs(noisy, levels), labels.repeat_interleave(3))
        result = functional_call(client.network, leaves, given)
        whole = whole + edm.loss(result, noisy, levels, clean).sum() / 3
    whole.backward()
    expected = flat({name: value.grad for name, value in leaves.items()}) / 60
    result = torch.from_numpy(answer(method, SHARD))
    assert torch.allclose(result, expected, atol=2e-5, rtol=1e-3)
    assert 10 < shown.count(10) < 50, "half of the labels are left out"


def test_levels_and_noise_have_the_distribution_of_the_paper() -> None:
    """log s ~ N(-1.2, 1.2^2): 4,000 values at five standard errors."""
    client = make().client.respond.__self__
    levels, noise, dropped = client._random_inputs(2000, torch.zeros(4000, 1, 2, 2), STREAMS)
    assert float(levels.log().mean()) == pytest.approx(-1.2, abs=5 * 1.2 / 4000**0.5)
    assert float(levels.log().std()) == pytest.approx(1.2, rel=5 / 8000**0.5)
    assert float(noise.std()) == pytest.approx(1, rel=5 / 32000**0.5)
    assert float(dropped.float().mean()) == pytest.approx(0.5, abs=5 * 0.5 / 2000**0.5)


@kills(
    "fedgen/methods/dpdm.py",
    "numbers = torch.from_numpy(streams.secret_uniforms(size, name)).add_(2.0**-54)",
    ("numbers = torch.rand(size, generator=streams.public(name), dtype=torch.float64)"),
)
def test_copies_follow_from_secret_streams() -> None:
    """Other secret streams give another response, other public streams the same: which noise was
    added to which record stays secret."""
    method = make(sampling_rate=1.0)
    other_secret = RandomStreams(
        STREAMS.public_key, b"another secret key", STREAMS.noise_key, "seeded"
    )
    other_public = RandomStreams(
        b"another public key", STREAMS.secret_key, STREAMS.noise_key, "seeded"
    )
    usual = answer(method, SHARD)
    assert not np.allclose(usual, answer(method, SHARD, other_secret))
    assert np.array_equal(usual, answer(method, SHARD, other_public))


@pytest.mark.parametrize("copies", [1, 4])
def test_one_record_moves_the_sum_by_at_most_the_clip_norm(copies: int) -> None:
    """For any number of copies: each alone would be clipped to C as well."""
    method = make(noise=1e-6, copies=copies, clip=0.01, batch=1)
    row = Shard(SHARD.images[:1], SHARD.labels[:1])
    norm = float(np.linalg.norm(answer(method, row)))
    assert norm == pytest.approx(0.01, rel=0.02)
    assert norm <= 0.01 * 1.001


def test_the_server_takes_a_step_of_adam() -> None:
    method = make()
    state = method.server.init(STREAMS)
    gradient = torch.randn(flat(part(state, "generator")).numel())
    leaves = {n: v.clone().requires_grad_() for n, v in part(state, "generator").items()}
    adam = torch.optim.Adam(leaves.values(), 1e-2, (0.9, 0.999))
    for name, value in unflat(gradient, leaves).items():
        leaves[name].grad = value
    adam.step()
    after = method.server.update(state, gradient[None], 0, STREAMS)
    for name, value in leaves.items():
        assert torch.allclose(part(after, "generator")[name], value, atol=1e-5), name


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("method.copies=0", "method.copies"),
        ("method.label_dropout=1", "method.label_dropout"),
        ("method.network.width=2.5", "method.network.width"),
        ("method.network.multipliers=[1,2,2,2,2]", "method.network.multipliers"),
        ("method.sampler.steps=0", "method.sampler.steps"),
        ("method.network.multipliers=[]", "method.network.multipliers"),
        ("method.network.multipliers=[1.5,2]", "method.network.multipliers"),
        ("method.network.multipliers=[[1],2]", "method.network.multipliers"),
        ("method.network.attention=[a]", "method.network.attention"),
        ("method.network.attention=[7]", "method.network.attention"),
        ("method.network.patch=3", "method.network.patch"),
        ("method.network.patch=0", "method.network.patch"),
        ("method.betas=[a,0.9]", "method.betas"),
        ("method.sampler.rho=1e-9", "method.sampler.rho"),
        ("method.sampler.sigma_min=90", "method.sampler.sigma_min"),
        ("method.sampler.guidanse=1", "method.sampler.guidanse"),
    ],
)
def test_invalid_settings_are_one_line(
    word: str, key: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert cli.run(["train", "method=dpdm_small", word, f"run_dir={run}"]) == 2
    error = capsys.readouterr().err
    assert key in error
    assert len(error.strip().splitlines()) == 1


def test_guidance_needs_training_without_labels(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["method.sampler.guidance=0.3", "method.label_dropout=0"]
    assert cli.run(["train", "method=dpdm_small", *words, f"run_dir={tmp_path / 'run'}"]) == 2
    assert "method.sampler.guidance" in capsys.readouterr().err


def test_a_step_calls_few_operators() -> None:
    """At most 32 for each weight and chunk. A step synchronizes once, to find the entries of the
    noise that double precision leaves undecided."""
    method = make(1.0)
    answer(method, SHARD)  # warm-up: checks once that examples are independent
    calls = operators(lambda: answer(method, SHARD))
    weights = part(method.server.init(STREAMS), "generator")
    chunks = 3  # of 21 records with 3 copies
    assert sum(calls.values()) <= 32 * len(weights) * chunks
    assert synchronizing(calls) == {"nonzero": 1}
