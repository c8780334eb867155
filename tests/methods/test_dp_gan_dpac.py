"""DP-GAN-DPAC: a turn is Algorithm 1 of the paper, and a classifier sees only the records of its
critic."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from mutation import kills
from tiny import SHARD, STREAMS, make
from torch.func import functional_call

from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.methods.api import Method
from fedgen.methods.dp_gan_dpac import dual_purpose_classifier
from fedgen.models import dcgan
from fedgen.models.functional import init_weights, part
from fedgen.randomness import RandomStreams

PURPOSES = {
    "classifier": partial(dcgan.Classifier, width=3),
    "start_step": 0,
    "critic_share": 0.8,
    "fake_steps": 2,
    "real_steps": 3,
    "sequential": True,
    "reset": True,
    "learning_rate": 1e-2,
    "betas": (0.5, 0.9),
    "gradient_penalty": 10.0,
}


def dpac(noise: float | None = None, changed: dict | None = None, **settings: object) -> Method:
    companion = partial(dual_purpose_classifier, **{**PURPOSES, **(changed or {})})
    return make(noise=noise, companion=companion, **settings)


def trained(
    method: Method, rounds: int, shard: Shard = SHARD, streams: RandomStreams = STREAMS
) -> dict:
    server, state = method.server.init(STREAMS), {}
    for round_ in range(rounds):
        broadcast = method.server.broadcast(server, round_, STREAMS)
        state |= method.client.train(state, broadcast, shard, round_, streams)
    return state


def classifier_of(state: dict, number: int) -> dict:
    first = number - number % 2
    weights = part(state[f"companions.{first}"], "classifier")
    return {name: value[number - first] for name, value in weights.items()}


def answer(method: Method, state: dict, round_: int = 0) -> torch.Tensor:
    query = method.server.query(method.server.init(STREAMS), 0, STREAMS)
    assert query is not None
    return torch.from_numpy(
        method.client.respond(state, query, SHARD, round_, STREAMS).arrays["answer"]
    )


def test_a_classifier_that_never_trains_is_refused() -> None:
    with pytest.raises(FedgenError) as error:
        dpac(changed={"fake_steps": 0, "real_steps": 0})
    assert error.value.key == "method.companion.fake_steps"


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_two_turns_are_algorithm_1(sequential: bool, reset: bool) -> None:
    """Against plain autograd and torch's Adam, for a single critic."""
    companion = dual_purpose_classifier(
        **{**PURPOSES, "sequential": sequential, "reset": reset},
        classes=10,
        shape=(1, 8, 8),
        device="cpu",
    )
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(1, 4, 1, 8, 8, generator=generator)
    labels = torch.tensor([[1, 2, 3, 4]])
    state = net = None
    for turn in range(2):
        here = STREAMS.at("turn", turn)

        def fake(labels: torch.Tensor, streams: RandomStreams) -> torch.Tensor:
            return labels[..., None, None, None] / 10 * torch.ones(1, 8, 8)

        state = companion.train(state, range(7, 8), 4, lambda _: (images, labels), fake, turn, here)
        if net is None or reset:
            net = dcgan.Classifier(10, (1, 8, 8), 3)
            net.load_state_dict(init_weights(net, here.public("classifier", 7)))
            adam = torch.optim.Adam(net.parameters(), 1e-2, (0.5, 0.9))

        def loss(net: torch.nn.Module, rows: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
            at = rows.clone().requires_grad_()
            result = net(at).log_softmax(1)[torch.arange(4), truth]
            [slope] = torch.autograd.grad(result.sum(), at, create_graph=True)
            return -result.mean() + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()

        for step in range(5 if sequential else 3):
            drawn = here.at("classifier", step).public("labels")
            made = torch.randint(0, 10, (1, 4), generator=drawn)
            losses = [loss(net, fake(made, STREAMS)[0], made[0]), loss(net, images[0], labels[0])]
            if sequential:
                losses = losses[:1] if step < 2 else losses[1:]
            adam.zero_grad()
            torch.stack(losses).mean().backward()
            adam.step()
    assert state is not None
    for name, value in net.named_parameters():
        assert torch.allclose(state[f"classifier/{name}"][0], value, atol=1e-4), name


def test_a_response_weights_critic_and_classifier() -> None:
    method, alone = dpac(routing="mean"), make(routing="mean")
    state = trained(method, 3)  # all five critics have had their turn
    query = method.server.query(method.server.init(STREAMS), 0, STREAMS)
    assert query is not None
    net, own = dcgan.Classifier(10, (1, 8, 8), 3).to("meta"), torch.zeros(6, 1, 8, 8)
    for critic in range(5):
        images = query.samples["images"].clone().requires_grad_()
        logits = functional_call(net, classifier_of(state, critic), (images,))
        loss = torch.nn.functional.cross_entropy(logits, query.samples["labels"], reduction="sum")
        own += torch.autograd.grad(loss, images)[0] / 5
    critics = {name: value for name, value in state.items() if name.startswith("critics")}
    expected = 0.8 * answer(alone, critics) + 0.2 * own
    assert torch.allclose(answer(method, state, 3), expected, atol=1e-6)
    assert float(own.abs().max()) > 1e-3


def test_routed_query_samples_use_the_classifier_of_their_critic() -> None:
    """Responses of single critics add up to the mean over all."""
    routed, mean = dpac(routing="per_sample"), dpac(routing="mean")
    state = trained(routed, 3)
    program = routed.client.train.__self__
    query = routed.server.query(routed.server.init(STREAMS), 0, STREAMS)
    assert query is not None
    asked = program.assign(query.count, 3, STREAMS)
    rows, every = answer(routed, state, 3), []
    for members in program.rotation.stacks:
        critics, companions = (state[f"{of}.{members.start}"] for of in ("critics", "companions"))
        every.append(program.outputs(critics, companions, query, 3))
    whole = torch.cat(every)
    assert torch.allclose(whole.mean(0), answer(mean, state, 3), atol=1e-6)
    for critic, routes in asked.items():
        assert torch.allclose(rows[routes], whole[critic][routes], atol=1e-6)


def test_before_the_classifiers_start_it_is_gs_wgan() -> None:
    late, never = dpac(changed={"start_step": 2}), make()
    assert trained(late, 2).keys() == trained(never, 2).keys()
    assert torch.equal(answer(late, trained(late, 2)), answer(never, trained(never, 2)))
    assert any(name.startswith("companions") for name in trained(late, 3))


@pytest.mark.parametrize("reset", [True, False])
def test_replacing_a_record_changes_one_classifier(reset: bool) -> None:
    method = dpac(changed={"reset": reset})
    row = method.client.train.__self__.subsets(range(1, 2), SHARD, STREAMS)[0][0, 0]
    images, labels = SHARD.images.clone(), SHARD.labels.clone()
    images[row], labels[row] = 255 - images[row], (labels[row] + 1) % 10
    before, after = trained(method, 6), trained(method, 6, Shard(images, labels))
    different = [
        k
        for k in range(5)
        if any(
            not torch.equal(value, classifier_of(after, k)[name])
            for name, value in classifier_of(before, k).items()
        )
    ]
    assert different == [1]


@kills(
    "fedgen/methods/dp_gan_dpac.py",
    'generator=streams.public("labels"))',
    (
        "generator=torch.Generator().manual_seed(\n"
        '                streams.secret("routing").getrandbits(60)))'
    ),
)
def test_classifiers_do_not_depend_on_the_sample() -> None:
    other = RandomStreams(STREAMS.public_key, b"another secret key", STREAMS.noise_key, "seeded")
    first, second = (trained(dpac(), 4, streams=streams) for streams in (STREAMS, other))
    assert all(
        torch.equal(value, second[name][key])
        for name, tensors in first.items()
        for key, value in tensors.items()
    )


@pytest.mark.parametrize("feeling", [1e3, -1e3])
def test_no_classifier_moves_a_response_beyond_the_clip_norm(feeling: float) -> None:
    """Its gradient is added to that of the critic before clipping."""
    method = dpac(noise=1e-9, routing="mean", critics=1, critics_per_step=1)
    state = trained(method, 1)
    loud = {
        name: value * feeling if name.startswith("classifier/") else value
        for name, value in state["companions.0"].items()
    }
    rows = answer(method, {**state, "companions.0": loud}, 1).flatten(1)
    assert float(rows.norm(dim=1).max()) <= 1 + 1e-6
    assert float(rows.norm(dim=1).max()) > 0.99
