"""Client statistics: the server has the sums of each client, or of all if sums are secure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from mutation import kills
from tiny import STREAMS

from fedgen import cli
from fedgen.data.datasets import Shard
from fedgen.data.digits import digits
from fedgen.errors import FedgenError
from fedgen.methods.api import AggregationKind, PublicFacts
from fedgen.methods.client_statistics import client_statistics
from fedgen.models.client_statistics import StatisticsSpace
from fedgen.run.generator import load_generator

DATA = digits(STREAMS)
CLIENTS = 3


def weights(kind: AggregationKind | None) -> dict[str, torch.Tensor]:
    """Return what the server stores after the only round, with little noise."""
    facts = PublicFacts(CLIENTS, None, 10, (1, 8, 8), aggregation_kind=kind)
    facts = facts if kind is None else replace(facts, threshold="all")
    method = client_statistics(facts, 1e-3, rows=1797, sums=None, device="cpu")
    state = dict(method.server.init(STREAMS))
    query = method.server.query(state, 0, STREAMS)
    assert query is not None
    responses = [
        method.client.respond({}, query, shard, 0, STREAMS.at("client", client)).arrays["answer"]
        for client, shard in enumerate(shards())
    ]
    mean = method.aggregate(responses, 0, STREAMS) / len(responses)
    updated = method.server.update(state, mean.float(), 0, STREAMS)
    return dict(method.server.generator(updated))


def shards() -> list[Shard]:
    rows = np.array_split(np.arange(600), CLIENTS)
    return [
        Shard(torch.from_numpy(DATA.images[r].copy()), torch.from_numpy(DATA.labels[r]))
        for r in rows
    ]


def exact() -> torch.Tensor:
    space = StatisticsSpace((1, 8, 8), 10)
    return torch.stack(
        [space.contribution(s.images.float() / 255, s.labels).flat() for s in shards()]
    )


@kills("fedgen/methods/client_statistics.py", "stacked * len(responses)", "stacked")
def test_the_server_has_the_sums_of_each_client() -> None:
    result = weights(None)
    assert torch.allclose(result["sums"].double(), exact(), atol=0.05)
    assert float(result["std"]) == pytest.approx(1e-3)


@kills("fedgen/methods/client_statistics.py", "        scale *= facts.clients", "        pass")
def test_with_secure_sums_the_server_has_the_sum_of_all_clients() -> None:
    result = weights("secure")
    assert result["sums"].shape[0] == 1
    assert torch.allclose(result["sums"][0].double(), exact().sum(0), atol=0.1)


def test_the_noise_has_the_stated_deviation() -> None:
    facts = PublicFacts(1, None, 10, (1, 8, 8))
    method = client_statistics(facts, 2.0, rows=1797, sums=None, device="cpu")
    query = method.server.query(dict(method.server.init(STREAMS)), 0, STREAMS)
    assert query is not None
    none = Shard(torch.zeros(0, 1, 8, 8, dtype=torch.uint8), torch.zeros(0, dtype=torch.long))
    sent = method.client.respond({}, query, none, 0, STREAMS).arrays["answer"]
    state = method.server.update(
        dict(method.server.init(STREAMS)), torch.from_numpy(sent), 0, STREAMS
    )
    deviation = float(state["sums"].std())
    assert deviation == pytest.approx(2.0, rel=5 / (2 * state["sums"].numel()) ** 0.5)
    assert float(state["std"]) == pytest.approx(2.0)


def test_a_missing_client_is_an_error() -> None:
    facts = PublicFacts(CLIENTS, None, 10, (1, 8, 8))
    server = client_statistics(facts, 1.0, rows=9, sums=None, device="cpu").server
    size = StatisticsSpace((1, 8, 8), 10).size
    with pytest.raises(FedgenError, match="2 of 3 clients responded"):
        server.update(dict(server.init(STREAMS)), torch.zeros(2, size), 0, STREAMS)


def test_samples_are_mean_images_of_the_published_sums(tmp_path: Path) -> None:
    words = ["method=client_statistics", "partition=iid", "partition.clients=4", "evaluation=none"]
    assert cli.run(["train", *words, "logger=none", f"run_dir={tmp_path / 'run'}"]) == 0
    published = load_generator(tmp_path / "run", "cpu")
    assert published.weights["sums"].shape[0] == 4
    labels = torch.arange(10)
    samples = published.method.server.sample(published.weights, labels, STREAMS)
    means = np.stack([DATA.images[DATA.labels == label].mean(0) for label in range(10)]) / 255
    similarity = np.corrcoef(samples.flatten(1).numpy(), means.reshape(10, -1))[:10, 10:]
    assert (similarity.argmax(1) == np.arange(10)).mean() >= 0.8
