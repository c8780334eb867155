"""The score of a run: one exact count of records, charged as one more release."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from mutation import kills
from omegaconf import DictConfig, open_dict
from scipy.stats import chi2
from tiny import PROGRAMS, tiny

from fedgen.config.compose import compose
from fedgen.data.datasets import Shard
from fedgen.data.digits import digits
from fedgen.errors import FedgenError
from fedgen.federation import checkpoint
from fedgen.federation.messages import response_frame, response_from
from fedgen.methods.families.scoring import SCORE, count_predicted, predict, train_classifier
from fedgen.privacy.aggregation import LOCAL
from fedgen.privacy.events import canonical
from fedgen.randomness import RandomStreams
from fedgen.run.setup import setup
from fedgen.run.train import train
from fedgen.storage.run_dir import RunDir

NOISE = 25.0
DATA = digits(RandomStreams.from_seed(0, "seeded").at("data"))
SUMS = ("mixture", "dp_merf", "dp_hp", "central_images", "dpgan", "dp_cgan", "dp_wgan_gp")
SUMS += ("psg", "dpdm", "client_statistics")


def scored_config(*words: str) -> DictConfig:
    config = compose("config", ["logger=none", *words])
    with open_dict(config):
        config.score = {"noise_multiplier": NOISE, "samples": 200, "run_index": 0}
    return config


def weights() -> dict[str, torch.Tensor]:
    images = torch.from_numpy(DATA.images[:1000]).float() / 255
    labels = torch.from_numpy(DATA.labels[:1000])
    return train_classifier(images, labels, 10, torch.Generator().manual_seed(1))


# --- sensitivity ----------------------------------------------------------------------------------


def test_the_classifier_learns() -> None:
    images = torch.from_numpy(DATA.test_images).float() / 255
    right = predict(weights(), images) == torch.from_numpy(DATA.test_labels)
    assert right.double().mean() > 0.8


@pytest.mark.parametrize("kind", ["trained", "ties", "huge", "not finite"])
@kills(
    "fedgen/methods/families/scoring.py",
    'logits = product(hidden, finite["output"], (max_hidden, max_entry["output"]))',
    'logits = (hidden.float() @ finite["output"].float()).double()',
    case="ties",
)
def test_a_prediction_depends_on_no_other_record(kind: str) -> None:
    """Whatever weights the server sends: the count moves by one record at most."""
    source = torch.Generator().manual_seed(0)
    sent = weights()
    images = torch.rand(64, 1, 8, 8, generator=source)
    if kind == "ties":  # equal sums in different orders: rounding errors would decide
        sent["hidden"], sent["hidden_bias"] = torch.zeros(64, 256), torch.full((256,), 0.371)
        column = torch.rand(256, generator=source)
        columns = [column[torch.randperm(256, generator=source)] for _ in range(100)]
        sent["output"], sent["output_bias"] = torch.stack(columns, 1), torch.zeros(100)
    if kind == "huge":
        sent = {name: value * 1e30 for name, value in sent.items()}
    if kind == "not finite":
        sent["hidden"][0], sent["output"][3] = math.nan, math.inf
    alone = torch.cat([predict(sent, image[None]) for image in images])
    for count in (2, 3, 5, 17, 64):
        assert torch.equal(predict(sent, images[:count]), alone[:count])
    reversed_ = predict(sent, images.flip(0)).flip(0)
    assert torch.equal(reversed_, alone)


def test_the_count_equals_the_correct_predictions() -> None:
    sent = weights()
    images = torch.from_numpy(DATA.images[1000:1400]).float() / 255
    labels = torch.from_numpy(DATA.labels[1000:1400])
    total = count_predicted(sent, images, labels)
    assert total.clip == 1 and float(total.norms.max()) == 1
    expected = (predict(sent, images) == labels).sum().double()
    assert float(total.flat()) == pytest.approx(float(expected), rel=1e-5)
    nothing = count_predicted(sent, images[:0], labels[:0])
    assert float(nothing.flat()) == 0


@pytest.mark.parametrize("unit", ["record", "client"])
@kills(
    "fedgen/methods/families/scoring.py",
    "sums = SumMechanisms(facts, noise_multiplier, rows)",
    "sums = SumMechanisms(facts, noise_multiplier and noise_multiplier / 2, rows)",
    case="record",
)
@kills(
    "fedgen/methods/families/scoring.py",
    "return sum_of_rows(correct[:, None].double(), 1.0)",
    "return sum_of_rows(2 * correct[:, None].double(), 2.0)",
)
def test_the_released_score_has_the_accounted_noise(unit: str) -> None:
    """A chi-squared test of the standard deviation, over the distance of the two neighbours of the
    worst case. A correct program fails with probability 1e-6."""
    words = ["method=mixture_small", f"privacy.unit={unit}"]
    if unit == "client":
        words += ["partition=iid", "partition.clients=3"]
    method = setup(scored_config(*words)).method
    case = method.worst_cases()[-1]
    assert case.event == GaussianDpEvent(NOISE)

    def released(side: int, number: int) -> float:
        state, shard = (case.first, case.second)[side]
        streams = RandomStreams.from_seed(number, "seeded")
        sent = method.client.respond(state, case.query, shard, case.round, streams)
        return float(response_frame(response_from(sent, LOCAL))[1].item())

    count = 1000
    values = np.array([[released(side, n) for n in range(count)] for side in (0, 1)])
    # equal streams have equal noise: the difference is that of the neighbours
    distance = float(np.mean(values[0] - values[1]))
    statistic = float(np.sum((values[1] / distance) ** 2)) / NOISE**2
    low, high = chi2.ppf([5e-7, 1 - 5e-7], count)
    assert low < statistic < high


# --- the plan -------------------------------------------------------------------------------------


@kills(
    "fedgen/methods/families/scoring.py",
    "return ComposedDpEvent([event(limit), score_event(count - limit)])",
    "return event(limit)",
)
@pytest.mark.parametrize("clients", [1, 3])
def test_the_score_is_one_more_release(clients: int) -> None:
    several = ["partition=iid", f"partition.clients={clients}", "privacy.aggregation=secure"]
    several = several if clients > 1 else []
    gradients = [*tiny("dpgan_small"), "method=dpgan_small", *several, "rounds=8"]
    plan = setup(scored_config(*gradients)).method.plan
    counts = dict(canonical(plan.server_event(8)))
    score = GaussianDpEvent(NOISE)
    assert counts.pop(score) == 1
    [(event, count)] = counts.items()
    assert isinstance(event, PoissonSampledDpEvent) and count == 7
    assert score not in canonical(plan.server_event(7))
    merf = setup(scored_config("method=dp_merf_small", "rounds=40", *several)).method.plan
    assert merf.queries_in(40) == 2 and merf.queries_in(39) == 1
    assert len(canonical(merf.server_event(2))) == 2


def test_a_method_with_its_own_rounds_has_one_more() -> None:
    plain = setup(compose("config", ["method=mixture_small"])).method.plan
    plan = setup(scored_config("method=mixture_small")).method.plan
    assert plain.fixed_rounds and plan.fixed_rounds == plain.fixed_rounds + 1 == plan.query_rounds
    assert plan.response_shape(1, plain.fixed_rounds) == (1, 1)
    assert plan.response_shape(1, 0) == plain.response_shape(1, 0)


def test_a_trusted_aggregator_adds_the_noise_of_the_score() -> None:
    words = ["method=mixture_small", "partition=iid", "partition.clients=3"]
    words += ["privacy.aggregation=trusted", "privacy.adversary=release"]
    ready = setup(scored_config(*words))
    plan = ready.method.plan
    assert plan.release_event is not None and plan.fixed_rounds
    assert GaussianDpEvent(NOISE) in canonical(plan.release_event(plan.fixed_rounds))
    assert GaussianDpEvent(NOISE) not in canonical(plan.release_event(plan.fixed_rounds - 1))


@pytest.mark.parametrize("method", [m for m in PROGRAMS if not m.startswith(SUMS)])
def test_other_methods_are_refused_in_one_line(method: str) -> None:
    with pytest.raises(FedgenError) as refused:
        setup(scored_config(f"method={method}", *tiny(method)))
    assert refused.value.key == "method"


# --- whole runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [m for m in PROGRAMS if m.startswith(SUMS)])
def test_every_sum_method_can_be_scored(method: str, tmp_path: Path) -> None:
    config = scored_config(f"method={method}", *tiny(method), f"run_dir={tmp_path / 'run'}")
    run = train(config)
    saved = checkpoint.load(RunDir(run).checkpoints)
    assert saved is not None
    score = float(saved[0].server[SCORE])
    assert math.isfinite(score) and score != 0
    events = json.loads((run / "privacy.json").read_text())["clients"]["0"]["events"]
    assert [{"event": "gaussian", "noise_multiplier": NOISE}, 1] in events
    assert b'"score' not in (run / "public" / "generator.safetensors").read_bytes()


def test_a_score_estimates_the_accuracy(tmp_path: Path) -> None:
    words = ["method=mixture_small", "evaluation=none", "runtime.threads=1"]
    words += ["privacy.target_epsilon=10", f"run_dir={tmp_path / 'run'}"]
    config = scored_config(*words)
    config.score.samples = 4000
    ready = setup(config.copy())
    run = train(config)
    saved = checkpoint.load(RunDir(run).checkpoints)
    assert saved is not None
    score, rows = float(saved[0].server[SCORE]), len(ready.shards[0])
    streams = ready.streams.at("server")
    query = ready.method.server.query(saved[0].server, saved[0].rounds - 1, streams)
    assert query is not None
    shard: Shard = ready.dataset.shard(ready.shards[0])
    images, labels = shard.rows(torch.arange(rows))
    accuracy = float((predict(query.shared, images) == labels).double().mean())
    assert accuracy > 0.85
    public = ready.config.data.public_rows
    # five standard deviations
    assert score * public / rows == pytest.approx(accuracy, abs=5 * NOISE / rows)
