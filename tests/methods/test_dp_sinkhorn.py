"""DP-Sinkhorn against autograd through geomloss, and the properties that its privacy relies on."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from geomloss import SamplesLoss
from hypothesis import given, settings
from hypothesis import strategies as st
from mutation import kills
from tiny import SHARD, STREAMS
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.methods.api import Method, PublicFacts, Query
from fedgen.methods.dp_sinkhorn import dp_sinkhorn
from fedgen.models import dcgan
from fedgen.models.functional import adam_step, part
from fedgen.privacy.batch_sampling import PoissonSampling
from fedgen.privacy.events import canonical

COUNT, RATE, CLIP = 10, 0.3, 0.5
BLUR = 1.0  # with less, single precision leaves little of the entropy
EMPTY = Shard(SHARD.images[:0], SHARD.labels[:0])


def make(noise: float | None, **changed: object) -> Method:
    chosen = {
        "generator": partial(dcgan.Generator, width=4),
        "latent": 4,
        "images": COUNT,
        "debiased": 0.4,
        "sampling_rate": RATE,
        "l1": 1.0,
        "l2": 1.0,
        "label_weight": 15.0,
        "blur": BLUR,
        "clip": CLIP,
        "clipping": "joint",
        "released": "images",
        "learning_rate": 1e-2,
        "betas": (0.9, 0.999),
        "weight_decay": 0.0,
        "ema": 0.0,
        "device": "cpu",
    }
    return dp_sinkhorn(PublicFacts(1, None, 10, (1, 8, 8)), noise, **{**chosen, **changed})  # type: ignore[arg-type]


def asked(method: Method) -> Query:
    query = method.server.query(method.server.init(STREAMS), 0, STREAMS)
    assert query is not None
    return query


def released(method: Method, shard: Shard, round_: int = 0) -> Tensor:
    release = method.client.respond({}, asked(method), shard, round_, STREAMS)
    return torch.from_numpy(release.arrays["answer"])


def points(images: Tensor, labels: Tensor) -> Tensor:
    return torch.cat([2 * images.flatten(1) - 1, 15.0 * F.one_hot(labels, 10)], 1)


def cost(x: Tensor, y: Tensor) -> Tensor:
    apart = x[..., :, None, :] - y[..., None, :, :]
    return apart.square().sum(-1) + apart.abs().sum(-1)


WIDEST = math.sqrt(4 * 64 + 2 * 15**2)
W = SamplesLoss("sinkhorn", p=2, blur=BLUR, diameter=WIDEST, debias=False, cost=cost)


def drawn(round_: int = 0) -> tuple[Tensor, Tensor]:
    """Return the batch that the client samples in a round."""
    batch = PoissonSampling(RATE).sample(len(SHARD), STREAMS.at("gradient", round_))
    return SHARD.rows(torch.from_numpy(batch))


def test_without_noise_the_response_is_the_gradient_through_geomloss() -> None:
    method = make(None)
    query = asked(method)
    x, labels = query.samples["images"].clone().requires_grad_(), query.shared["labels"]
    every = torch.cat([x, query.shared["images"]])
    loss = 2 * W(points(x, labels[:COUNT]), points(*drawn()))
    loss = loss - W(points(x, labels[:COUNT]), points(every[4:], labels[4:]))
    (expected,) = torch.autograd.grad(loss, x)
    assert float((released(method, SHARD) - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("way", ["images", "weights"])
def test_a_step_of_the_generator_descends_the_whole_loss(way: str) -> None:
    """Gradients of images that clients receive, of those that they do not, and of the generator."""
    method = make(None, released=way)
    state = method.server.init(STREAMS)
    after = method.server.update(state, released(method, SHARD), 0, STREAMS)
    template = dcgan.Generator(4, 10, (1, 8, 8), 4)
    here = STREAMS.at("fakes", 0)
    latents = torch.randn(14, 4, generator=here.public("latents"))
    labels = torch.randint(0, 10, (14,), generator=here.public("labels"))
    weights = {n: w.clone().requires_grad_() for n, w in part(state, "generator").items()}
    made = points(functional_call(template, weights, (latents, labels)), labels)
    loss = 2 * W(made[:COUNT], points(*drawn())) - W(made[:COUNT], made[4:])
    result = torch.autograd.grad(loss, list(weights.values()))
    expected = {n: w.detach().clone() for n, w in weights.items()}
    moments = {n: v.clone() for n, v in part(state, "adam").items()}
    adam_step(expected, dict(zip(weights, result, strict=True)), moments, 1e-2, (0.9, 0.999))
    for name, value in part(after, "adam").items():
        scale = float(moments[name].abs().max())
        assert torch.allclose(value, moments[name], atol=1e-4 * scale, rtol=1e-3), name


@settings(max_examples=15)
@given(st.integers(0, 59), st.sampled_from(["images", "weights"]), st.integers(0, 5))
def test_one_record_moves_the_response_by_at_most_the_sensitivity(
    row: int, way: str, round_: int
) -> None:
    """The same noise on both sides cancels."""
    method = make(1e-6, released=way, sampling_rate=1.0)
    rest = [each for each in range(60) if each != row]
    without = Shard(SHARD.images[rest], SHARD.labels[rest])
    apart = released(method, SHARD, round_) - released(method, without, round_)
    assert float(apart.norm()) <= 2 * CLIP + 1e-4
    assert float((released(method, SHARD) - released(method, EMPTY)).norm()) <= 2 * CLIP + 1e-4


@kills(
    "fedgen/methods/dp_sinkhorn.py",
    'streams.at_round("gradient", round_)',
    "streams",
    case="joint-1.0",
)
@pytest.mark.parametrize(("clipping", "times"), [("joint", 1.0), ("images", math.sqrt(COUNT))])
def test_images_clipped_one_by_one_take_more_noise(clipping: str, times: float) -> None:
    """6,400 values of std 2 * 2 C: their variance is outside of 10 % with probability below
    1e-7."""
    method = make(2.0, clipping=clipping)
    answers = torch.stack([released(method, EMPTY, round_) for round_ in range(10)])
    noise = answers - answers.mean(0)
    assert float(noise.square().mean()) == pytest.approx(0.9 * (4 * CLIP * times) ** 2, rel=0.1)
    event = PoissonSampledDpEvent(RATE, GaussianDpEvent(2.0))
    assert canonical(method.plan.server_event(3 * COUNT)) == {event: 3}, (
        "one event a step, both ways"
    )


def test_the_size_of_a_query_does_not_depend_on_the_batch() -> None:
    for round_ in range(3):
        query = make(1.0).server.query(make(1.0).server.init(STREAMS), round_, STREAMS)
        assert query is not None and query.count == COUNT
    assert released(make(1.0), EMPTY).shape == released(make(1.0), SHARD).shape


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"l1": 0.0, "l2": 0.0}, "method.l2"),
        ({"clipping": "images", "released": "weights"}, "method.clipping"),
    ],
)
def test_invalid_settings_are_refused(changed: dict[str, object], key: str) -> None:
    with pytest.raises(FedgenError, match=key):
        make(1.0, **changed)
