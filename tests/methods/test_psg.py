"""PSG: each step by plain torch, and a set in place of a generator."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from mutation import kills
from tiny import SHARD, STREAMS, Train
from torch.nn import functional as F

from fedgen import cli
from fedgen.errors import FedgenError
from fedgen.methods.api import Method, PublicFacts
from fedgen.methods.psg import psg
from fedgen.models.convnet import ConvNet
from fedgen.models.functional import flat, part
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import canonical

SETTINGS = {
    "classifier": partial(ConvNet, width=4),
    "per_label": 3,
    "initial_std": 1.0,
    "outer": 2,
    "batch_loop": 2,
    "inner": 2,
    "learning_rate": 0.3,
    "momentum": 0.5,
    "matches": 1,
    "classifier_learning_rate": 0.05,
    "classifier_batch": 16,
    "batch": 20,
    "sampling_rate": 0.4,
    "rows": None,
    "clip": 0.1,
    "device": "cpu",
}


def make(noise: float | None = None, clients: int = 1, **changed: object) -> Method:
    facts = PublicFacts(clients, 60 if clients == 1 else None, 10, (1, 8, 8))
    return psg(facts, noise, **{**SETTINGS, **changed})  # type: ignore[arg-type]


def net_of(state: dict) -> ConvNet:
    net = ConvNet(10, (1, 8, 8), 4)
    net.load_state_dict(part(state, "classifier"))
    return net


def test_the_network_has_the_size_of_the_paper() -> None:
    assert sum(p.numel() for p in ConvNet(10, (1, 28, 28), 128).parameters()) == 317_706


@pytest.mark.parametrize(("channels", "least"), [(1, 4), (3, 8)])
def test_images_that_cannot_be_pooled_three_times_are_refused(channels: int, least: int) -> None:
    """At a client it would be a failure over private records, which has no bound."""
    images, label = torch.zeros(1, channels, least, least), torch.zeros(1, dtype=torch.long)
    assert ConvNet(10, (channels, least, least), 4)(images, label).isfinite().all()
    for shape in ((channels, least - 1, least), (channels, least, least - 1), (channels, 1, 1)):
        with pytest.raises(FedgenError, match="too small for three poolings"):
            ConvNet(10, shape, 4)


def test_a_classifier_is_initialised_like_torch() -> None:
    """Weights within torch's bounds, identity normalisation."""
    weights = part(make().server.init(STREAMS), "classifier")
    for name, parameter in ConvNet(10, (1, 8, 8), 4).named_parameters():
        if name.startswith("norms."):
            assert bool((weights[name] == float(name.endswith("weight"))).all())
        elif parameter.dim() > 1:
            limit = parameter[0].numel() ** -0.5
            assert float(weights[name].abs().max()) == pytest.approx(limit, rel=0.2)


def test_a_response_is_the_gradient_of_the_loss() -> None:
    """All records, without clipping and noise: their mean gradient by autograd."""
    method = make(sampling_rate=1.0, batch=60)
    state = method.server.init(STREAMS)
    sent = method.client.respond({}, method.server.query(state, 0, STREAMS), SHARD, 0, STREAMS)
    net = net_of(state)
    images, labels = SHARD.rows(torch.arange(60))
    net(images * 2 - 1, labels).mean().backward()
    expected = flat({name: p.grad for name, p in net.named_parameters()})
    assert np.allclose(sent.arrays["answer"][0], expected, atol=1e-5)


def test_the_set_descends_the_distance_of_gradients() -> None:
    """By a loop over units, and torch's SGD."""
    method = make(matches=3)
    state = method.server.init(STREAMS)
    images = state["set/images"].clone().requires_grad_()
    labels = torch.arange(10).repeat_interleave(3)
    answer = torch.randn(1, sum(p.numel() for p in net_of(state).parameters()))
    net, descent = net_of(state), torch.optim.SGD([images], 0.3, 0.5)
    named = dict(sorted(net.named_parameters()))
    sizes = [p.numel() for p in named.values()]
    target = dict(zip(named, torch.split(answer[0], sizes), strict=True))
    for _ in range(3):
        loss = F.cross_entropy(_logits(net, images), labels)
        result = torch.autograd.grad(loss, list(named.values()), create_graph=True)
        apart = torch.zeros(())
        for (name, weight), slope in zip(named.items(), result, strict=True):
            if weight.dim() > 1:
                for own, other in zip(slope, target[name].view_as(weight), strict=True):
                    cosine = (own * other).sum() / (own.norm() * other.norm())
                    apart = apart + 1 - cosine
        descent.zero_grad()
        apart.backward()
        descent.step()
    after = method.server.update(state, answer, 0, STREAMS)
    assert torch.allclose(after["set/images"], images.detach(), atol=1e-4)
    assert float((after["set/images"] - state["set/images"]).abs().max()) > 1e-4


def _logits(net: ConvNet, images: torch.Tensor) -> torch.Tensor:
    losses = [net(images, torch.full((len(images),), label)) for label in range(10)]
    return -torch.stack(losses, 1)


def test_a_set_starts_with_noise_around_grey() -> None:
    """4,000 pixels: their standard deviation is within 6 % of the stated one, at five sigma."""
    images = make(initial_std=0.1, per_label=7).server.init(STREAMS)["set/images"]
    assert float(images.std()) == pytest.approx(0.1, rel=0.06)
    assert abs(float(images.mean())) < 0.01


def test_a_classifier_trains_on_the_set_and_is_replaced() -> None:
    """After two rounds it has trained; after four it is another."""
    method = make()
    state = method.server.init(STREAMS)
    answer = torch.ones(1, sum(p.numel() for p in net_of(state).parameters()))
    seen = [part(state, "classifier")["logits.weight"]]
    for round_ in range(4):
        state = method.server.update(state, answer, round_, STREAMS)
        seen.append(part(state, "classifier")["logits.weight"])
    assert torch.equal(seen[0], seen[1])
    assert 0 < float((seen[1] - seen[2]).abs().max()) < 0.1, "some steps of 0.05"
    assert torch.equal(seen[2], seen[3])
    assert float((seen[4] - seen[3]).abs().max()) > 0.1
    assert not torch.equal(seen[4], seen[0])


def test_more_matching_steps_are_free() -> None:
    once, often = (make(noise=0.7, matches=m).plan.server_event(30) for m in (1, 9))
    assert canonical(once) == canonical(often)
    plan = make(noise=0.7).plan
    assert epsilon(canonical(once), 1e-5, plan.relation).or_infinity < 100


def test_samples_repeat_only_beyond_the_size_of_the_set() -> None:
    method = make()
    weights = method.server.generator(method.server.init(STREAMS))
    labels = torch.arange(10).repeat(3)
    drawn = method.server.sample(weights, labels, STREAMS)
    assert len(drawn.unique(dim=0)) == 30
    for label in range(10):
        mine = {tuple(image.flatten().tolist()) for image in drawn[labels == label]}
        own = weights["images"][3 * label : 3 * label + 3]
        assert mine == {tuple(image.flatten().tolist()) for image in own}
    again = method.server.sample(weights, labels.repeat(2), STREAMS)
    assert len(again.unique(dim=0)) == 30


@kills(
    "fedgen/evaluation/judge.py",
    "if not judged.settings.judge or judged.is_set:",
    "if not judged.settings.judge:",
)
def test_a_run_prints_the_size_of_the_set(
    train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = train("method=psg_small", "rounds=2", "evaluation=quick", "evaluation.samples=300",
                "evaluation.seeds=1", "evaluation.judge=true", "evaluation.leakage=true",
                "evaluation.real2gen=[]")  # fmt: skip
    assert "not computed: only 20 distinct images" in capsys.readouterr().out
    results = json.loads((run / "results.json").read_text())
    assert results["distinct"] == 20
    assert "fcd" not in results
    assert results["memorization"]["n"] == 20
    out = tmp_path / "all.npz"
    assert cli.run(["sample", f"run={run}", "n=20", f"out={out}"]) == 0
    with np.load(out) as result:
        assert len(np.unique(result["images"].reshape(20, -1), axis=0)) == 20
        assert np.bincount(result["labels"]).tolist() == [2] * 10
    capsys.readouterr()
    assert cli.run(["sample", f"run={run}", "n=21", f"out={out}"]) == 2
    error = capsys.readouterr().err.strip()
    assert error == "fedgen: n: 21 of a set of 20 images; take at most 20: that is all of them"


@pytest.mark.parametrize(
    ("word", "key"),
    [("method.momentum=1", "method.momentum"), ("method.sampling_rate=2", "method.sampling_rate")],
)
def test_invalid_settings_are_one_line(
    word: str, key: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert cli.run(["train", "method=psg_small", word, f"run_dir={run}"]) == 2
    error = capsys.readouterr().err
    assert key in error
    assert len(error.strip().splitlines()) == 1
