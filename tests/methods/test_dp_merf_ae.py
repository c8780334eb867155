"""DP-MERF + AE: the gradients and the embedding of its two kinds of rounds, and the cost of
both."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from forked import Command
from mutation import kills
from tiny import SHARD, STREAMS, tiny

from fedgen import cli
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.methods.api import Method, PublicFacts, Query
from fedgen.methods.dp_merf import FourierFeatures
from fedgen.methods.dp_merf_ae import dp_merf_ae
from fedgen.models.autoencoder import Autoencoder, CodeGenerator
from fedgen.models.functional import flat, part
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import Relation, canonical

STEPS, FEATURES, CODE, CLIP = 3, 30, 5, 0.7
EMPTY = Shard(SHARD.images[:0], SHARD.labels[:0])


def make(noise: float | None, clients: int = 1, **changed: object) -> Method:
    chosen = {
        "autoencoder": partial(Autoencoder, width=2),
        "code": CODE,
        "autoencoder_steps": STEPS,
        "batch": 60,
        "sampling_rate": 1.0,
        "clip": CLIP,
        "autoencoder_learning_rate": 1e-2,
        "autoencoder_betas": (0.9, 0.999),
        "embedding_noise": 4.0,
        "generator": partial(CodeGenerator, width=8),
        "latent": 4,
        "features": FEATURES,
        "bandwidth": 0.5,
        "rows": 60,
        "fakes_per_label": 2,
        "learning_rate": 1e-2,
        "betas": (0.9, 0.999),
        "ema": 0.0,
        "device": "cpu",
    }
    return dp_merf_ae(PublicFacts(clients, None, 10, (1, 8, 8)), noise, **{**chosen, **changed})  # type: ignore[arg-type]


def asked(method: Method, round_: int) -> Query:
    query = method.server.query(method.server.init(STREAMS), round_, STREAMS)
    assert query is not None
    return query


def answer(method: Method, round_: int, shard: Shard = SHARD) -> torch.Tensor:
    query = asked(method, round_)
    release = method.client.respond({}, query, shard, round_, STREAMS)
    result = torch.from_numpy(release.arrays["answer"])
    assert tuple(result.shape) == method.plan.response_shape(1, round_)
    assert release.event == method.plan.server_event(1) or round_ >= STEPS
    return result[0]


def autoencoder(method: Method) -> Autoencoder:
    network = Autoencoder(CODE, (1, 8, 8), 2)
    network.load_state_dict(part(method.server.init(STREAMS), "coder"))
    return network


def test_a_step_is_the_gradient_of_the_reconstruction_error() -> None:
    method = make(None)
    network, images = autoencoder(method), SHARD.rows(torch.arange(60))[0]
    loss = (network.decode(network.encode(images)) - images).square().sum() / 60
    loss.backward()
    expected = flat({name: p.grad for name, p in network.named_parameters() if p.grad is not None})
    assert torch.allclose(answer(method, 0), expected, atol=1e-4)


def test_the_embedding_is_that_of_codes() -> None:
    method = make(None)
    images, labels = SHARD.rows(torch.arange(60))
    codes = autoencoder(method).encode(images).detach()
    features = FourierFeatures(FEATURES, 0.5, CODE, "cpu")
    each = features(features.sample_parameters(method.server.init(STREAMS)["seed"]), codes)
    expected = torch.stack([each[labels == c].sum(0) for c in range(10)]) / 60
    assert torch.allclose(answer(method, STEPS).view(10, -1), expected.float(), atol=1e-5)


def test_rounds_train_the_autoencoder_and_then_the_generator() -> None:
    method = make(None)
    state = method.server.init(STREAMS)
    for round_ in range(STEPS + 40):
        query = method.server.query(state, round_, STREAMS)
        assert (query is None) == (round_ > STEPS)
        before = state
        if query is None:
            state = method.server.server_step(state, round_, STREAMS)
        else:
            arrays = method.client.respond({}, query, SHARD, round_, STREAMS).arrays
            given = torch.from_numpy(arrays["answer"])
            state = method.server.update(state, given, round_, STREAMS)
        same = all(
            torch.equal(v, part(before, "coder")[n]) for n, v in part(state, "coder").items()
        )
        assert same == (round_ >= STEPS)
        if round_ == STEPS:
            first = float(state["distance"])
    assert float(state["distance"]) < first
    images = method.server.sample(method.server.generator(state), torch.arange(10), STREAMS)
    assert images.shape == (10, 1, 8, 8)
    assert 0 <= float(images.min()) <= float(images.max()) <= 1


@pytest.mark.parametrize(("round_", "bound"), [(0, CLIP / 60), (STEPS, 1 / 60)])
@pytest.mark.parametrize("row", [0, 31])
def test_one_record_moves_a_release_by_its_sensitivity(round_: int, bound: float, row: int) -> None:
    method = make(1e-9)
    rest = [each for each in range(60) if each != row]
    without = Shard(SHARD.images[rest], SHARD.labels[rest])
    moved = (answer(method, round_) - answer(method, round_, without)).double().norm()
    assert bound * 0.99 <= float(moved) <= bound * 1.001


@pytest.mark.parametrize(("round_", "std"), [(0, 2 * CLIP / 60), (STEPS, 8 / 60)])
def test_noise_has_the_stated_scale(round_: int, std: float) -> None:
    """Of an empty shard: at least 300 values, whose variance is within 40 % of the true one except
    with probability below 1e-5."""
    result = answer(make(2.0), round_, EMPTY)
    assert len(result) >= 300
    assert float(result.var()) == pytest.approx(std**2, rel=0.4)


def test_an_odd_number_of_features_is_refused() -> None:
    with pytest.raises(FedgenError) as error:
        make(1.0, features=31)
    assert error.value.key == "method.features"


@kills(
    "fedgen/run/train.py",
    ("            due |= state.rounds < once and self.method.plan.is_short and secret\n"),
    "",
)
@pytest.mark.slow
@pytest.mark.parametrize("died", [1, 2])
def test_a_charged_step_is_not_repeated(died: int, tmp_path: Path) -> None:
    """A short sequence is stored after each query: in mode secure too, a run resumes between any
    two, at its target."""
    run = tmp_path / "run"
    words = ["method=dp_merf_ae_small", "rounds=4", "method.sampling_rate=1"]
    words += ["method.embedding_noise=1000", "privacy.noise=secure", f"run_dir={run}"]
    words += [w for w in tiny("dp_merf_ae_small") if not w.startswith(("rounds", "method.auto"))]
    words += ["method.autoencoder_steps=2", f"runtime.faults.server_dies={died}"]
    assert Command(["train", *words]).wait() == -9
    assert cli.run(["train", f"resume={run}"]) == 0
    privacy = json.loads((run / "privacy.json").read_text())
    assert 9 < privacy["views"]["server"]["epsilon"] <= 10
    assert [page["releases"] for page in privacy["clients"].values()] == [3]


def test_a_run_that_stops_before_the_embedding(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["method=dp_merf_ae_small", "method.autoencoder_steps=10"]
    enough = ["privacy.noise_multiplier=0.5", "privacy.target_epsilon=8", "rounds=16"]
    for words, key in ((["rounds=10"], "rounds"), (enough, "privacy.target_epsilon")):
        assert cli.run(["account", *few, *words]) == 2
        assert f"fedgen: {key}: " in capsys.readouterr().err


@kills(
    "fedgen/methods/families/noisy_sums.py",
    "return events[0] if len(events) == 1 else ComposedDpEvent(events)",
    "return events[0]",
)
def test_both_kinds_of_rounds_are_charged() -> None:
    """Against dp_accounting's own accountants; a run that stops early is charged for its
    queries."""
    plan = make(0.8, sampling_rate=0.01, autoencoder_steps=500).plan
    assert plan.queries_in(10_000) == 501
    sampled = PoissonSampledDpEvent(0.01, GaussianDpEvent(0.8))
    whole = ComposedDpEvent([SelfComposedDpEvent(sampled, 500), GaussianDpEvent(3.2)])
    assert canonical(plan.server_event(501)) == {sampled: 500, GaussianDpEvent(3.2): 1}
    assert canonical(plan.server_event(503)) == {sampled: 502, GaussianDpEvent(3.2): 3}
    assert canonical(plan.server_event(20)) == {sampled: 20}
    result = epsilon(
        canonical(plan.server_event(501)), 1e-5, Relation.ADD_OR_REMOVE_ONE
    ).or_infinity
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    by_pld = PLDAccountant(relation).compose(whole).get_epsilon(1e-5)
    by_rdp = RdpAccountant(neighboring_relation=relation).compose(whole).get_epsilon(1e-5)
    assert result == pytest.approx(by_pld, rel=2e-3)
    assert result < by_rdp
    alone = epsilon(canonical(plan.server_event(500)), 1e-5, Relation.ADD_OR_REMOVE_ONE).or_infinity
    assert alone < result - 0.05
