"""FedAvg-GAN against Algorithm 1 by plain autograd, and the clipping of its aggregator."""

from __future__ import annotations

import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from forked import Command
from mutation import kills
from tiny import SHARD, STREAMS, Train, fingerprint, tiny
from torch import Tensor
from torch.func import functional_call

from fedgen import cli
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.federation.messages import Response
from fedgen.methods.api import Method, PublicFacts
from fedgen.methods.fedavg_gan import fedavg_gan
from fedgen.models import cdcgan
from fedgen.models.functional import flat, part
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import Contribution, Relation, RevealedSampling, Unit, canonical
from fedgen.strategies.parameter_updates import ParameterUpdates

CLIENTS, COHORT, CLIP, RATE = 20, 5, 0.1, 0.05


FACTS = PublicFacts(CLIENTS, None, 10, (1, 8, 8))


def make(noise: float | None, clients: int = CLIENTS, **changed: object) -> Method:
    requires_all = bool(changed.pop("requires_all", True))
    settings = {
        "generator": partial(cdcgan.Generator, width=4),
        "discriminator": partial(cdcgan.Discriminator, width=3),
        "latent": 4,
        "cohort_size": COHORT,
        "sampled_by": "server",
        "discriminator_steps": 2,
        "discriminator_learning_rate": RATE,
        "batch": 6,
        "gradient_penalty": 10.0,
        "clip": CLIP,
        "server_learning_rate": 0.7,
        "generator_steps": 2,
        "generator_batch": 5,
        "generator_learning_rate": 1e-2,
        "generator_betas": (0.5, 0.9),
        "ema": 0.9,
        "device": "cpu",
    }
    facts = replace(changed.pop("facts", FACTS), clients=clients, requires_all=requires_all)  # type: ignore[type-var]
    return fedavg_gan(facts, noise, **{**settings, **changed})  # type: ignore[arg-type]


def shard(rows: int) -> Shard:
    return Shard(SHARD.images[:rows], SHARD.labels[:rows])


def delta(method: Method, rows: Shard, round_: int = 0, client: int = 0) -> Tensor:
    query = method.server.query(method.server.init(STREAMS), round_, STREAMS)
    assert query is not None
    answer = method.client.respond({}, query, rows, round_, STREAMS.at("client", client))
    return torch.from_numpy(answer.arrays["answer"])


def aggregated(method: Method, answers: dict[int, Tensor], round_: int = 0) -> Tensor:
    strategy = ParameterUpdates(method, STREAMS.at("strategy"))
    arrived = {
        client: Response({"answer": value.numpy()}, Contribution(), Unit.CLIENT)
        for client, value in answers.items()
    }
    result = strategy.aggregate_query(round_, arrived, 1)
    assert result is not None
    return result


def test_the_steps_of_a_client_are_algorithm_1() -> None:
    """Two steps of the critic's loss by plain autograd; without privacy nothing is clipped."""
    method, rows, here = make(None), shard(40), STREAMS.at("client", 0)
    nets = method.client.respond.__self__.nets  # type: ignore[attr-defined]
    state = method.server.init(STREAMS)
    start, generator = part(state, "discriminator"), part(state, "generator")
    weights = {name: value.clone().requires_grad_() for name, value in start.items()}
    for step in range(2):
        at = here.at("round", 0, "step", step)
        images, labels = rows.rows(torch.randperm(40, generator=at.public("rows"))[:6])
        latents, _ = nets.inputs(6, at)
        fakes = functional_call(nets.generator, generator, (latents, labels)).detach()
        rho = torch.rand(6, generator=at.public("mix"))[:, None, None, None]

        def score(given: Tensor, labels: Tensor = labels) -> Tensor:
            return functional_call(nets.discriminator, weights, (given, labels))

        mixed = (rho * images + (1 - rho) * fakes).requires_grad_()
        [slope] = torch.autograd.grad(score(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        loss = score(fakes).mean() - score(images).mean() + 10 * penalty
        loss.backward()
        with torch.no_grad():
            for value in weights.values():
                value -= RATE * value.grad
                value.grad = None
    moved = flat({name: value.detach() for name, value in weights.items()}) - flat(start)
    assert torch.allclose(delta(method, rows)[0], moved, atol=1e-5)


def test_the_server_takes_the_mean_over_the_expected_cohort() -> None:
    method = make(1e-300)
    deltas = {client: delta(method, shard(30), client=client) for client in range(3)}
    mean = aggregated(method, deltas)
    assert torch.allclose(mean, sum(deltas.values()) / COHORT, atol=1e-7)
    state = method.server.init(STREAMS)
    after = method.server.update(state, mean, 0, STREAMS)
    moved = flat(part(after, "discriminator")) - flat(part(state, "discriminator"))
    assert torch.allclose(moved, 0.7 * mean[0], atol=1e-6)
    assert int(after["adam/step"]) == 2


def test_clients_have_equal_weights() -> None:
    method = make(1.0)
    norms = [delta(method, shard(rows)).norm() for rows in (1, 60)]
    assert all(norm == pytest.approx(CLIP, rel=1e-3) for norm in norms)


def test_a_client_without_records_does_not_count() -> None:
    assert not delta(make(1.0), shard(0)).any()


@kills(
    "fedgen/strategies/cohort.py",
    "            divisor = self.cohort.responses_per_sample\n",
    "            divisor = max(1, len(responses))\n",
)
def test_an_empty_cohort_and_a_missing_client_are_not_revealed() -> None:
    """A missing client moves the mean by its own clipped delta over the expected cohort; an empty
    cohort gives noise."""
    quiet, method = make(1e-300), make(1.0)
    deltas = {client: delta(quiet, shard(30), client=client) for client in range(3)}
    whole, fewer = (
        aggregated(quiet, {c: deltas[c] for c in clients}) for clients in (range(3), range(2))
    )
    assert torch.allclose(whole - fewer, deltas[2] / COHORT, atol=1e-7)
    assert aggregated(method, {}).std() == pytest.approx(CLIP / COHORT, rel=0.1)


def test_noise_is_used_once() -> None:
    """Another round, or a repeated round with other responses, has other noise; the same responses
    have the same."""
    method = make(1.0)
    one, other = delta(method, shard(30)), delta(method, shard(20))
    noises = [
        aggregated(method, {0: one}) - one / COHORT,
        aggregated(method, {0: one}, 1) - one / COHORT,
        aggregated(method, {0: other}) - other / COHORT,
        aggregated(method, {}),
    ]
    for place, first in enumerate(noises):
        for second in noises[:place]:
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.2
    assert torch.equal(aggregated(method, {0: one}), aggregated(method, {0: one}))


@kills(
    "fedgen/strategies/cohort.py",
    'self._streams.secret("cohort", server_round)',
    'self._streams.secret("cohort")',
)
def test_cohorts_are_sampled_as_accounted() -> None:
    """Each client independently at the rate of the event: binomial counts, at level 1e-7."""
    from scipy.stats import binom

    strategy = ParameterUpdates(make(1.0), STREAMS.at("strategy"))
    counts = np.zeros(CLIENTS)
    for round_ in range(2000):
        counts[list(strategy.route(round_, 1))] += 1
    low, high = binom.interval(1 - 1e-7 / CLIENTS, 2000, COHORT / CLIENTS)
    assert ((low <= counts) & (counts <= high)).all()
    assert counts.std() > 1  # no rotation


def test_the_cost_of_a_run() -> None:
    """The published run, whose noise for ε = 10 is known from a second accountant."""
    method = make(0.423, clients=3400, cohort_size=10)
    plan = method.plan
    assert plan.unit is Unit.CLIENT and plan.relation is Relation.ADD_OR_REMOVE_ONE
    assert plan.release_event is not None
    spend = canonical(plan.release_event(1000))
    [(event, count)] = spend.items()
    assert isinstance(event, PoissonSampledDpEvent) and isinstance(event.event, GaussianDpEvent)
    assert (event.sampling_probability, count) == (10 / 3400, 1000)
    assert event.event.noise_multiplier == pytest.approx(0.423)
    assert epsilon(spend, 1e-5, plan.relation).value == pytest.approx(10, abs=0.1)
    assert epsilon(canonical(plan.server_event(3)), 1e-5, plan.relation).value is None


def test_a_run_that_continues_without_clients_is_not_amplified() -> None:
    plan = make(1.0, requires_all=False).plan
    assert plan.release_event is not None
    [event] = canonical(plan.release_event(10))
    assert isinstance(event, RevealedSampling)
    assert plan.amplified_by["release"] is None


def test_the_publication_does_not_reveal_how_often_a_client_was_sampled() -> None:
    """If each client adds noise, missing noise reveals the samples: they count as seen, equally for
    all clients, whatever the visits of the most sampled one."""
    facts = replace(FACTS, aggregation_kind="local")
    plan = make(2.0, facts=facts).plan
    assert plan.release_event is not None and plan.event_if_sampling_revealed is not None
    assert canonical(plan.release_event(9)) == {
        RevealedSampling(COHORT / CLIENTS, GaussianDpEvent(2.0)): 9
    }
    assert (
        canonical(plan.event_if_sampling_revealed(4))
        == canonical(plan.server_event(4))
        == {GaussianDpEvent(2.0): 4}
    )
    assert plan.amplified_by == {"server": None, "release": None}


def test_one_client_and_too_large_a_cohort_are_refused() -> None:
    with pytest.raises(FedgenError, match="one client among several"):
        make(1.0, clients=1)
    with pytest.raises(FedgenError, match="cannot sample 21 of 20"):
        make(1.0, cohort_size=21)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("privacy.adversary=server", "clients trust it"),
        ("method.weights=examples", "method.weights"),
    ],
)
def test_settings_without_a_bound_are_refused(
    word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["train", "method=fedavg_gan", *tiny("fedavg_gan"), word]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_resumed_run_has_the_same_result(train: Train, tmp_path: Path) -> None:
    words = ["method=fedavg_gan", "rounds=5", "runtime.checkpoint_every=2", "log_every=1"]
    whole, run = fingerprint(train(*words, name="whole")), tmp_path / "cut"
    settings = [*tiny("fedavg_gan"), *words, "runtime.faults.server_dies=3", f"run_dir={run}"]
    assert Command(["train", *settings]).wait() == -signal.SIGKILL
    assert cli.run(["train", f"resume={run}"]) == 0
    again = fingerprint(run)
    assert again == whole
