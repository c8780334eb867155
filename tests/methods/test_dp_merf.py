"""DP-MERF against explicit kernels and means, and the properties that its privacy relies on."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent
from forked import Command
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mutation import kills
from tiny import SHARD, STREAMS, Train, tiny

from fedgen import cli
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.methods.api import Method, PublicFacts
from fedgen.methods.dp_merf import FourierFeatures, Frequencies, dp_merf
from fedgen.models import cdcgan
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.clipping import sum_of_rows
from fedgen.privacy.events import Relation, canonical

FEATURES = 50


def make(noise: float | None, clients: int = 1, **changed: object) -> Method:
    chosen = {
        "generator": partial(cdcgan.Generator, width=4),
        "latent": 4,
        "features": FEATURES,
        "bandwidth": 2.5,
        "rows": len(SHARD),
        "fakes_per_label": 2,
        "learning_rate": 1e-2,
        "betas": (0.9, 0.999),
        "ema": 0.0,
        "device": "cpu",
    }
    return dp_merf(PublicFacts(clients, None, 10, (1, 8, 8)), noise, **{**chosen, **changed})  # type: ignore[arg-type]


def embedding(method: Method, shard: Shard, round_: int = 0) -> torch.Tensor:
    query = method.server.query(method.server.init(STREAMS), 0, STREAMS)
    assert query is not None
    release = method.client.respond({}, query, shard, round_, STREAMS)
    return torch.from_numpy(release.arrays["answer"]).view(10, FEATURES)


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.floats(0.5, 20))
def test_products_of_features_are_a_gaussian_kernel(seed: int, bandwidth: float) -> None:
    """20,000 frequencies: the error of a mean of as many cosines is above 0.05 with probability
    below 2 exp(-20,000 * 0.05^2 / 2) = 3e-11 (Hoeffding)."""
    count = 40_000
    features = FourierFeatures(count, bandwidth, 12, "cpu")
    images = torch.rand(3, 1, 3, 4, generator=torch.Generator().manual_seed(seed))
    result = features(features.sample_parameters(torch.tensor(seed)), images)
    assert torch.allclose(result.norm(dim=1), torch.ones(3).double(), atol=1e-4)
    distances = torch.cdist(images.flatten(1), images.flatten(1)).square()
    kernel = (-distances / (2 * bandwidth**2)).exp()
    assert torch.allclose((result @ result.T).float(), kernel, atol=0.05)


def test_the_embedding_is_the_sum_of_features_by_label() -> None:
    """Up to the rounding that clipping to the norm of the features removes."""
    method = make(None)
    seed = method.server.init(STREAMS)["seed"]
    features = FourierFeatures(FEATURES, 2.5, 64, "cpu")
    images, labels = SHARD.rows(torch.arange(len(SHARD)))
    each = features(features.sample_parameters(seed), images)
    expected = torch.stack([each[labels == c].sum(0) for c in range(10)]) / len(SHARD)
    assert torch.allclose(embedding(method, SHARD), expected.float(), atol=1e-5)


def test_clients_together_release_the_embedding_of_one() -> None:
    """Shards of different sizes, each divided by the same public number."""
    whole = embedding(make(None), SHARD)
    parts = [slice(0, 7), slice(7, 40), slice(40, 60)]
    shards = [Shard(SHARD.images[p], SHARD.labels[p]) for p in parts]
    mean = sum(embedding(make(None, 3), shard) for shard in shards) / 3
    assert torch.allclose(torch.as_tensor(mean), whole, atol=1e-6)


@settings(max_examples=25)
@given(st.integers(0, 59), st.floats(0.5, 20))
def test_one_record_moves_the_embedding_by_at_most_one_over_rows(
    row: int, bandwidth: float
) -> None:
    method = make(None, bandwidth=bandwidth)
    rest = [each for each in range(60) if each != row]
    without = Shard(SHARD.images[rest], SHARD.labels[rest])
    moved = (embedding(method, SHARD) - embedding(method, without)).double().norm() * len(SHARD)
    assert 0.999 <= float(moved) <= 1 + 1e-4


@kills(
    "fedgen/methods/families/noisy_sums.py",
    ("round_streams, private = streams.at_round(sum_query.name, round_), shard.on(self.device)"),
    "round_streams, private = streams, shard.on(self.device)",
)
def test_noise_has_the_stated_scale_and_differs_by_round() -> None:
    """The embedding of an empty shard is noise alone: std 3 / 60, from 20 x 500 values; their
    sample variance is outside of 8 % around it with probability below 1e-7."""
    empty = Shard(SHARD.images[:0], SHARD.labels[:0])
    drawn = torch.stack([embedding(make(3.0), empty, round_) for round_ in range(20)])
    assert float(drawn.var()) == pytest.approx((3.0 / 60) ** 2, rel=0.08)
    assert len({float(each[0, 0]) for each in drawn}) == 20


@pytest.mark.parametrize("noise", [0.5, 5.0])
def test_the_cost_is_one_gaussian_for_any_number_of_rounds(noise: float) -> None:
    """By the exact condition of Balle and Wang (2018), evaluated here."""
    plan = make(noise).plan
    assert plan.queries_in(1) == plan.queries_in(10_000) == 1
    assert canonical(plan.server_event(1)) == {GaussianDpEvent(noise): 1}
    result = epsilon(canonical(plan.server_event(1)), 1e-5, Relation.ADD_OR_REMOVE_ONE).or_infinity

    def delta(eps: float) -> float:
        from scipy.stats import norm

        near, far = 1 / (2 * noise) - eps * noise, -1 / (2 * noise) - eps * noise
        return float(norm.cdf(near) - math.exp(eps) * norm.cdf(far))

    assert delta(result) == pytest.approx(1e-5, rel=1e-3)


def test_the_generator_descends_to_the_embedding() -> None:
    method = make(None)
    state, distances = method.server.init(STREAMS), []
    for round_ in range(60):
        query = method.server.query(state, round_, STREAMS)
        assert (query is None) == (round_ > 0)
        if query is None:
            state = method.server.server_step(state, round_, STREAMS)
        else:
            answers = method.client.respond({}, query, SHARD, round_, STREAMS).arrays["answer"]
            state = method.server.update(state, torch.from_numpy(answers), round_, STREAMS)
        distances.append(method.server.metrics(state, None, STREAMS)["distance"])
    assert np.mean(distances[-5:]) < np.mean(distances[:5]) / 2


@kills("fedgen/run/train.py", "            due |= state.rounds == once\n", "")
@pytest.mark.parametrize("kind", ["local", "trusted"])
def test_a_killed_run_for_release_is_not_queried_again(kind: str, tmp_path: Path) -> None:
    """Whether the response could be sent again (its noise is stored) or not (the aggregator would
    add new noise)."""
    run = tmp_path / "run"
    words = ["method=dp_merf_small", "rounds=30", "privacy.noise=secure"]
    words += ["partition=iid", "partition.clients=2", f"privacy.aggregation={kind}"]
    words += ["privacy.adversary=release", "runtime=in_process"]
    words += ["runtime.checkpoint_every=1000", "runtime.faults.server_dies=20", f"run_dir={run}"]
    assert Command(["train", *tiny("dp_merf_small"), *words]).wait() == -9
    assert cli.run(["train", f"resume={run}"]) == 0
    privacy = json.loads((run / "privacy.json").read_text())
    assert privacy["rounds"] == 30
    assert privacy["clients"]["0"]["releases"] == 1
    assert privacy["views"]["release"]["epsilon"] <= 10


def test_epsilon_does_not_grow_along_a_run(train: Train) -> None:
    run = train(
        "method=dp_merf_small", "rounds=5", "log_every=1", "partition=iid", "partition.clients=3"
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len({line["epsilon"]["server"] for line in lines}) == 1
    assert [line["clients"] for line in lines] == [3, 0, 0, 0, 0]
    assert len({line["bytes"]["up"] for line in lines}) == 1


def test_an_odd_number_of_features_is_refused() -> None:
    with pytest.raises(FedgenError, match="an even number"):
        make(1.0, features=51)


def test_one_record_among_many_moves_the_sum_no_further() -> None:
    """In single precision, a sum of thousands may move by more than the added term."""
    count = 2_000  # at which single precision rounds up
    features = FourierFeatures(FEATURES, 1.5, 64, "cpu")
    row = features(features.sample_parameters(torch.tensor(0)), torch.zeros(1, 64))
    rows, labels = row.expand(count + 1, -1), torch.zeros(count + 1, dtype=torch.long)
    more, less = (sum_of_rows(rows[:n], 1.0, labels[:n], 10).flat() for n in (count + 1, count))
    assert float((more - less).norm()) <= 1


@settings(max_examples=25)
@given(st.integers(1, 40), st.floats(1e-6, 1e-3))
@example(3, 1e-6)  # where a library's product takes another way
def test_features_do_not_depend_on_other_records(count: int, bandwidth: float) -> None:
    """At small bandwidths, the last bit of an angle changes all features."""
    features = FourierFeatures(FEATURES, bandwidth, 784, "cpu")
    rows = torch.rand(1, 784, generator=torch.Generator().manual_seed(0)).expand(count + 1, -1)
    drawn = features.sample_parameters(torch.tensor(1))
    more, less = (sum_of_rows(features(drawn, rows[:n]), 1.0).flat() for n in (count + 1, count))
    assert float((more - less).norm()) <= 1


@kills(
    "fedgen/methods/dp_merf.py",
    "self._of(frequencies.exact.multiplied_from_left(images.flatten(1), 1.0))",
    "self._of(images.flatten(1) @ frequencies.single)",
)
def test_angles_do_not_depend_on_the_order_of_summation() -> None:
    features, order = FourierFeatures(FEATURES, 1e-6, 784, "cpu"), torch.randperm(784)
    drawn = features.sample_parameters(torch.tensor(1))
    rows = torch.rand(5, 784, generator=torch.Generator().manual_seed(0))
    reordered = Frequencies(drawn.single[order], 1e-6)
    assert torch.equal(features(drawn, rows), features(reordered, rows[:, order]))


@pytest.mark.parametrize(
    ("aggregation", "message"), [("local", "did not respond"), ("secure", "that was lost")]
)
def test_a_run_without_a_clients_response_publishes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], aggregation: str, message: str
) -> None:
    """Some clients responded before another failed: their spend is counted once."""
    run = tmp_path / "run"
    words = ["method=dp_merf_small", "seed=1", "rounds=4", "privacy.noise=secure"]
    words += ["partition=iid", "partition.clients=3", "runtime.faults.returns_error=0.5"]
    words.append(f"privacy.aggregation={aggregation}")
    assert cli.run(["train", *tiny("dp_merf_small"), *words, f"run_dir={run}"]) == 2
    assert "did not respond" in capsys.readouterr().err
    assert cli.run(["train", f"resume={run}"]) == 2
    assert message in capsys.readouterr().err
    charged = [len(p.read_text().splitlines()) - 1 for p in run.glob("clients/*/ledger.jsonl")]
    assert sorted(charged) == [0, 1, 1]
    assert not (run / "public" / "generator.safetensors").exists()


def test_a_generator_that_diverges_is_not_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["method=dp_merf_small", "rounds=20", "method.learning_rate=1e30", f"run_dir={run}"]
    assert cli.run(["train", *tiny("dp_merf_small"), *words]) == 2
    assert "diverged" in capsys.readouterr().err
    assert "NaN" not in (run / "metrics.jsonl").read_text()
    assert not (run / "public" / "generator.safetensors").exists()
