"""GS-WGAN against autograd, and the separations that its privacy relies on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, SampledWithoutReplacementDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from mutation import kills
from tiny import SHARD, STREAMS, Train, make, noised
from torch.func import functional_call, grad

from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.federation.messages import Response
from fedgen.losses.wgan_gp import critic_loss, generator_loss
from fedgen.methods import gs_wgan
from fedgen.methods.api import Method
from fedgen.methods.families.critic_ensemble import Pairs
from fedgen.methods.families.critic_rotation import Rotation
from fedgen.models import dcgan, resnet
from fedgen.models.functional import adam_start, meta_module, part, split
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import RevealedSampling, Unit, canonical
from fedgen.privacy.gaussian_dp import gaussian_delta
from fedgen.randomness import RandomStreams
from fedgen.strategies.sample_gradients import SampleGradients


def prepared(method: Method, shard: Shard = SHARD) -> dict:
    state: dict = {}
    for number in range(method.client.prepare_steps):
        state |= method.client.prepare(number, shard, STREAMS)
    return state


def trained(method: Method, state: dict, rounds: range, shard: Shard = SHARD) -> dict:
    server = method.server.init(STREAMS)
    for round_ in rounds:
        broadcast = method.server.broadcast(server, round_, STREAMS)
        state = {**state, **method.client.train(state, broadcast, shard, round_, STREAMS)}
    return state


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name][key])
        for name, tensors in first.items()
        for key, value in tensors.items()
    )


def critic_of(state: dict, number: int, width: int = 2) -> dict:
    """Return one critic of a state, as a stack of one."""
    first = number - number % width
    return {
        key: value[number - first : number - first + 1]
        for key, value in state[f"critics.{first}"].items()
    }


def critic(width: int) -> torch.nn.Module:
    return meta_module(dcgan.Critic(10, (1, 8, 8), width))


# The gradient


def descended(method: Method, state: dict, responses: torch.Tensor) -> dict:
    """Return the gradient that a generator step descends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gs_wgan, "descend_generator", lambda state, gradients, *_: gradients)
        return method.server.update(state, responses, 0, STREAMS)


@pytest.mark.parametrize("generator", [dcgan.Generator, resnet.Generator])
@pytest.mark.parametrize("routing", ["per_sample", "per_step", "mean"])
def test_without_noise_the_gradient_is_that_of_autograd(generator: type, routing: str) -> None:
    method = make(generator=partial(generator, width=4), routing=routing)
    client, server = method.client, method.server
    state, weights = prepared(method), server.init(STREAMS)
    query = server.query(weights, 0, STREAMS)
    answers = torch.from_numpy(client.respond(state, query, SHARD, 0, STREAMS).arrays["answer"])
    ours = descended(method, weights, answers)

    critics = client.train.__self__
    draw = critics.assign(6, 0, STREAMS)
    trainable, spectral = split(part(weights, "generator"))
    latents, labels = critics.nets.inputs((6,), STREAMS.at("query", 0))

    def whole(given: dict) -> torch.Tensor:
        images = functional_call(critics.nets.generator, {**given, **spectral}, (latents, labels))
        losses = [
            generator_loss(
                critics.nets.score(critic_of(state, k)), images[rows][None], labels[rows][None]
            )
            for k, rows in draw.items()
        ]
        return torch.stack(losses).sum() / 6 / critics.routing.responses_per_sample

    expected = grad(whole)(trainable)
    for name, value in expected.items():
        assert torch.allclose(ours[name], value, atol=1e-6), name
    assert max(float(value.abs().max()) for value in expected.values()) > 1e-5


def test_gradient_of_parameters_is_the_same_gradient() -> None:
    by_sample, by_weights = make(routing="mean"), make(routing="mean", sanitize="parameters")
    state, weights = prepared(by_sample), by_sample.server.init(STREAMS)
    result = []
    for method in (by_sample, by_weights):
        query = method.server.query(weights, 0, STREAMS)
        release = method.client.respond(state, query, SHARD, 0, STREAMS)
        answers = torch.from_numpy(release.arrays["answer"])
        result.append(descended(method, weights, answers))
    for name, value in result[0].items():
        assert torch.allclose(value, result[1][name], atol=1e-6)


def test_the_loss_of_a_critic_is_equation_12() -> None:
    """By plain autograd, with a critic that is not a network."""
    matrix = torch.randn(10, 64, generator=STREAMS.public("matrix"))

    def score(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (images.flatten(1).square() * matrix[labels]).sum(1)

    real, fake = torch.rand(4, 1, 8, 8), torch.rand(4, 1, 8, 8)
    labels, mix = torch.tensor([1, 2, 3, 4]), torch.rand(4)
    ours = critic_loss(score, real, fake, labels, mix, gradient_penalty=10.0, drift_penalty=0.1)
    between = mix[:, None, None, None] * real + (1 - mix[:, None, None, None]) * fake
    between.requires_grad_()
    [slope] = torch.autograd.grad(score(between, labels).sum(), between)
    expected = (
        score(fake, labels).mean()
        - score(real, labels).mean()
        + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()
        + 0.1 * score(real, labels).square().mean()
    )
    assert float(ours.detach()) == pytest.approx(float(expected), rel=1e-5)


# The separations


@kills(
    "fedgen/methods/families/critic_ensemble.py",
    "first, subsets = members.start, self.subsets(members, shard, streams)",
    "first, subsets = members.start, self.subsets(range(len(members)), shard, streams)",
)
@kills(
    "fedgen/methods/families/critic_ensemble.py",
    'order = torch.randperm(len(shard), generator=streams.public("subsets"))',
    "order = torch.argsort(shard.images.flatten(1).float().sum(1), stable=True)",
)
@pytest.mark.parametrize("whose", range(5))
def test_replacing_a_record_changes_one_critic(whose: int) -> None:
    """After warm-up and training, K - 1 critics are bit-identical."""
    method = make()
    row = method.client.train.__self__.subsets(range(whose, whose + 1), SHARD, STREAMS)[0][0, 0]
    images, labels = SHARD.images.clone(), SHARD.labels.clone()
    images[row], labels[row] = 255 - images[row], (labels[row] + 1) % 10
    changed = Shard(images, labels)
    before = trained(method, prepared(method), range(6))
    after = trained(method, prepared(method, changed), range(6), changed)
    different = [
        k
        for k in range(5)
        if any(not torch.equal(v, critic_of(after, k)[n]) for n, v in critic_of(before, k).items())
    ]
    assert different in ([], [whose])


def test_every_record_belongs_to_a_critic() -> None:
    critics = make().client.train.__self__
    rows = []
    for members in critics.rotation.stacks:
        index, sizes = critics.subsets(members, SHARD, STREAMS)
        rows += [int(i) for part_, n in zip(index, sizes, strict=True) for i in part_[:n]]
    assert sorted(rows) == list(range(60))


@kills(
    "fedgen/methods/families/critic_ensemble.py",
    "critics = self.weights(state, members, streams) if routed else {}\n",
    (
        "critics = self.weights(state, members, streams) if routed else {}\n"
        "                for name, value in power_iteration(critics, "
        "stacked=True).items():\n"
        "                    critics[name].copy_(value)\n"
    ),
)
@pytest.mark.parametrize("routing", ["per_sample", "per_step", "mean"])
def test_responding_changes_no_later_training(routing: str) -> None:
    method = make(noise=1.0, routing=routing)
    quiet, asked = prepared(method), prepared(method)
    server = method.server.init(STREAMS)
    for round_ in range(4):
        quiet = trained(method, quiet, range(round_, round_ + 1))
        asked = trained(method, asked, range(round_, round_ + 1))
        method.client.respond(
            asked, method.server.query(server, round_, STREAMS), SHARD, round_, STREAMS
        )
    assert same(quiet, asked)


def test_training_does_not_modify_its_input_state() -> None:
    """A round that fails or is repeated starts from the same state."""
    method = make()
    state = prepared(method)
    before = {p: {n: v.clone() for n, v in tensors.items()} for p, tensors in state.items()}
    first, again = (trained(method, state, range(1)) for _ in range(2))
    assert same(state, before)
    assert same(first, again)
    assert not same(first, state)


@kills(
    "fedgen/methods/families/critic_ensemble.py",
    'uniforms = torch.rand(index.shape, generator=streams.public("rows"))',
    (
        "uniforms = torch.rand(index.shape, generator=torch.Generator().manual_seed(\n"
        '            streams.secret("routing").getrandbits(60)))'
    ),
)
def test_rotation_does_not_depend_on_the_sample() -> None:
    """Other secret streams give the same critics; with ``on_query``, other critics."""
    other = RandomStreams(STREAMS.public_key, b"another secret key", STREAMS.noise_key, "seeded")
    for changed, expected in (
        ({}, True),
        ({"critic_schedule": "on_query", "routing": "per_step", "critics_per_step": 1}, False),
    ):
        method = make(**changed)
        server, states = method.server.init(STREAMS), []
        for streams in (STREAMS, other):
            state: dict = {}
            for round_ in range(3):
                broadcast = method.server.broadcast(server, round_, STREAMS)
                state = {**state, **method.client.train(state, broadcast, SHARD, round_, streams)}
            states.append(state)
        assert same(*states) == expected


@pytest.mark.parametrize("width", [2, 6])
def test_stacked_critics_train_as_single_ones(width: int) -> None:
    """Stacking only affects speed: with the same batches, gradients agree."""
    critics = make(critics_per_step=5).client.train.__self__
    critics = replace(critics, nets=replace(critics.nets, critic=critic(width)))
    members, subsets = range(5), critics.subsets(range(5), SHARD, STREAMS)
    images, labels = critics.records(subsets, SHARD, STREAMS)
    fakes = torch.rand(images.shape, generator=torch.Generator().manual_seed(0))

    def step(weights: dict, take: slice) -> dict:
        moments = adam_start(weights)
        mix = torch.full(labels[take].shape, 0.3)
        step_of = partial(gs_wgan.critic_step, critics.nets, critics.adam, 10.0, 1e-3)
        step_of(weights, moments, Pairs(images[take], fakes[take], labels[take], mix))
        return {**weights, **moments}

    together = step(critics.fresh(members, STREAMS), slice(0, 5))
    for k in members:
        alone = step(critics.fresh(range(k, k + 1), STREAMS), slice(k, k + 1))
        for name in (n for n in alone if n.startswith("m.") or n.endswith(".u")):
            assert torch.allclose(together[name][k], alone[name][0], atol=1e-5), name


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12))
def test_the_rotation_trains_every_critic(count: int, turn: int, at_once: int) -> None:
    turn = min(turn, count)
    rotation = Rotation(count, turn, at_once)
    assert [critic for members in rotation.stacks for critic in members] == list(range(count))
    assert all(len(members) <= at_once for members in rotation.stacks)
    sizes = [sum(map(len, each)) for each in rotation.turns]
    assert sizes == [turn] * (count // turn) + [count % turn] * (count % turn > 0)


@kills(
    "fedgen/methods/families/critic_ensemble.py",
    (
        "concatenate(\n"
        "                        [self.weights(state, members, streams) for members in "
        "group]\n"
        "                    )"
    ),
    "self.weights(state, group[0], streams)",
)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 12))
@settings(max_examples=10)
def test_groups_of_critics_give_the_results_of_single_ones(
    count: int, turn: int, most: int
) -> None:
    """Grouping only affects speed: as many critics at once as a stack may have."""
    method = make(routing="mean", sanitize="samples", critics=count, critics_per_step=turn)
    whole = method.client.train.__self__
    rotation = replace(whole.rotation, max_members=most)
    whole = replace(whole, rotation=rotation)
    assert [each for group in rotation.groups for each in group] == rotation.stacks
    assert all(group[-1].stop - group[0].start <= most for group in rotation.groups)
    state = {
        name: tensors
        for number in range(len(rotation.groups))
        for name, tensors in whole.prepare(number, SHARD, STREAMS).items()
    }
    assert len(state) == 2 * len(rotation.stacks)
    for stack in rotation.stacks:
        assert len(state[f"critics.{stack.start}"]["score.weight"]) == len(stack)
    query = method.server.query(method.server.init(STREAMS), 0, STREAMS)
    answer = whole.respond(state, query, SHARD, 0, STREAMS).arrays["answer"]
    alone = [
        whole.outputs(state[f"critics.{each.start}"], None, query, 0) for each in rotation.stacks
    ]
    np.testing.assert_allclose(answer, torch.cat(alone).mean(0), rtol=1e-4, atol=1e-6)


def test_non_finite_critics_release_noise_alone() -> None:
    method = make(noise=1.0)
    state = {
        name: {k: torch.full_like(v, torch.nan) for k, v in tensors.items()}
        for name, tensors in prepared(method).items()
    }
    query = method.server.query(method.server.init(STREAMS), 0, STREAMS)
    release = method.client.respond(state, query, SHARD, 0, STREAMS)
    assert np.isfinite(release.arrays["answer"]).all()


# What it costs


def eps(method: Method, rounds: int, rows: int | None = None) -> tuple[float, float]:
    plan = method.plan
    server = epsilon(
        canonical(plan.server_event(rows or rounds * 6)), 1e-5, plan.relation
    ).or_infinity
    if plan.release_event is None:
        return server, server
    return server, epsilon(canonical(plan.release_event(rounds)), 1e-5, plan.relation).or_infinity


def test_centralized_sampling_amplifies_against_the_server_too() -> None:
    drawn, mean = make(noise=1.0), make(noise=1.0, routing="mean")
    assert eps(drawn, 100)[0] < eps(mean, 100)[0] / 2
    assert drawn.plan.unit.value == "record"
    assert "5 critics" in str(drawn.plan.amplified_by["server"])


def test_the_published_variant_is_not_amplified() -> None:
    published = make(noise=1.0, routing="per_step", critic_schedule="on_query", critics_per_step=1)
    provable = make(noise=1.0, routing="per_step")
    assert eps(published, 100)[0] > eps(provable, 100)[0]
    assert published.plan.amplified_by["server"] is None
    assert published.plan.release_event is None
    assert "past samples" in str(published.plan.not_amplified_because["server"])


@kills(
    "fedgen/methods/families/ensemble_privacy.py",
    "hidden = not trains_on_query and (facts.cohorts_hidden or not federated)",
    "hidden = facts.cohorts_hidden or not federated",
)
def test_the_published_variant_is_not_amplified_with_clients_either() -> None:
    """Sampled critics train: the release view loses the amplification by sampling clients."""
    published = make(clients=50, noise=1.0, critic_schedule="on_query", routing="per_step")
    provable = make(clients=50, noise=1.0, routing="per_step")
    assert eps(published, 100, rows=30)[1] > 1.5 * eps(provable, 100, rows=30)[1]
    assert published.plan.amplified_by["release"] is None
    assert "past samples" in str(published.plan.not_amplified_because["release"])


def test_federated_sampling_amplifies_only_in_the_release_view() -> None:
    method = make(clients=50, noise=1.0)
    server, release = eps(method, 100, rows=30)
    assert method.plan.unit.value == "client"
    assert release < server
    assert method.plan.amplified_by["server"] is None
    busiest = epsilon(
        canonical(method.plan.server_event(600)), 1e-5, method.plan.relation
    ).or_infinity
    assert release < busiest


def test_noise_adds_up_in_the_release_view() -> None:
    """Of all clients: one Gaussian whose mu is known in closed form. Of a few sampled ones: as if
    one of them had the noise of all."""
    all_clients = make(clients=49, noise=2.0, routing="mean")
    _, release = eps(all_clients, 100)
    assert gaussian_delta(600**0.5 / (7 * 2.0), release) == pytest.approx(1e-5, rel=1e-3)
    assert "adds up" in str(all_clients.plan.not_amplified_because["release"])
    some = make(clients=49, noise=0.5, responders=4)
    draw = SampledWithoutReplacementDpEvent(49, 4, GaussianDpEvent(1.0))
    assert canonical(some.plan.release_event(10)) == {draw: 60}
    assert "adds up" in str(some.plan.amplified_by["release"])
    assert canonical(some.plan.server_event(10)) == {GaussianDpEvent(0.5): 10}


@kills(
    "fedgen/methods/families/ensemble_privacy.py",
    "and facts.requires_all and routing.has_fixed_size",
    "and routing.has_fixed_size",
)
@pytest.mark.parametrize(
    "changed",
    [{"requires_all": False}, {"cohort_sampling": "poisson"}, {"clients": 1}],
)
def test_noise_that_may_be_missing_does_not_add_up(changed: dict) -> None:
    method = make(**{"clients": 5, "noise": 0.5, "responders": 4, **changed})
    event = (method.plan.release_event or method.plan.server_event)(6)
    assert {gate.event.noise_multiplier for gate in canonical(event)} == {0.5}
    assert "adds up" not in str(method.plan.amplified_by) + str(method.plan.not_amplified_because)


def test_the_noise_of_sums_is_kept_if_samples_are_revealed() -> None:
    """After a client failed and the run continued with other samples, and if sampled critics train:
    sampling amplifies nothing then, and the noise of all responders is there all the same."""
    for changed in ({"unanswered": True}, {"critic_schedule": "on_query"}):
        method = make(clients=5, noise=0.5, responders=4, **changed)
        [(event, count)] = canonical(method.plan.release_event(6)).items()
        assert (event, count) == (RevealedSampling(4 / 5, GaussianDpEvent(1.0)), 36)
        assert method.plan.amplified_by["release"] is None
        assert "adds up" in str(method.plan.not_amplified_because["release"])
    all_clients = make(clients=4, noise=0.5, routing="mean", unanswered=True)
    assert canonical(all_clients.plan.release_event(6)) == {GaussianDpEvent(1.0): 36}


@kills(
    "fedgen/strategies/sample_gradients.py",
    'torch.from_numpy(responses[client].arrays["answer"]).double()',
    'torch.from_numpy(responses[client].arrays["answer"]).half().double()',
)
def test_the_generator_depends_only_on_the_sum() -> None:
    """To the last bit: what follows from single responses would not have the noise of the sum."""
    strategy = SampleGradients(make(clients=4, noise=1.0, routing="mean"), STREAMS)
    answers = noised(torch.zeros(4, 6, 1, 8, 8), 1.0, STREAMS)
    result = {
        client: Response({"answer": each.numpy()}, GaussianDpEvent(1.0), Unit.CLIENT)
        for client, each in enumerate(answers)
    }
    mean = strategy.aggregate_query(0, result, 6)
    assert torch.equal(mean, (answers.double().sum(0) / 4).float())


@kills("fedgen/federation/client/context.py", 'self._streams.at("client", client)', "self._streams")
def test_clients_add_independent_noise(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same query, four clients respond with independent noise: that of their sum is twice
    that of one."""
    answers = []

    def seen(self: SampleGradients, round_: int, content: dict, rows: int) -> torch.Tensor | None:
        answers.append(
            torch.stack([torch.from_numpy(a.arrays["answer"]) for a in content.values()])
        )
        return aggregate(self, round_, content, rows)

    aggregate = SampleGradients.aggregate_query
    monkeypatch.setattr(SampleGradients, "aggregate_query", seen)
    target = ["privacy.target_epsilon=null", "privacy.noise_multiplier=50"]
    four = ["partition=iid", "partition.clients=4", "method.routing=mean", "method.batch=64"]
    train("method=gs_wgan", *target, *four, "rounds=1")
    [each] = answers
    assert each.shape == (4, 64, 1, 8, 8)
    assert float(each.std()) == pytest.approx(2 * 50, rel=0.05)
    assert float(each.sum(0).std()) == pytest.approx(2 * 2 * 50, rel=0.05)
    assert float(torch.corrcoef(each.flatten(1)).fill_diagonal_(0).abs().max()) < 0.1


def test_without_a_mechanism_there_is_no_bound() -> None:
    method = make(noise=None)
    assert eps(method, 1)[0] == float("inf")
    assert method.plan.claim is None


@pytest.mark.parametrize(
    ("key", "changed", "clients"),
    [
        ("method.responders", {"responders": 6}, 1),
        ("method.cohort_sampling", {"cohort_sampling": "poisson"}, 1),
        ("method.critics_per_step", {"critic_schedule": "on_query", "critics_per_step": 2}, 1),
        (
            "method.critic_schedule",
            {"critic_schedule": "on_query", "routing": "mean", "critics_per_step": 1},
            1,
        ),
        ("method.routing", {"sanitize": "parameters"}, 1),
        ("method.responders", {"responders": 51}, 50),
    ],
)
def test_contradictory_settings_are_refused(key: str, changed: dict, clients: int) -> None:
    with pytest.raises(FedgenError) as error:
        make(clients, 1.0, **changed)
    assert error.value.key == key


def test_more_critics_than_records_are_refused() -> None:
    with pytest.raises(FedgenError, match=r"method\.critics"):
        make(critics=61)
