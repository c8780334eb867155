"""DataLens, G-PATE and PATE-GAN: each step by plain code, and the properties that their privacy
relies on."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent
from mutation import kills
from tiny import SETTINGS, SHARD, STREAMS, Train
from torch.func import functional_call
from torch.nn import functional as F

from fedgen import cli
from fedgen.data.datasets import Shard
from fedgen.losses.bce import discriminator_loss, generator_loss
from fedgen.methods.api import Method, PublicFacts, Query
from fedgen.methods.datalens import agreed_direction, datalens
from fedgen.methods.families import ensemble_privacy
from fedgen.methods.g_pate import direction, g_pate, projections
from fedgen.methods.pate_gan import pate_gan
from fedgen.models import dcgan
from fedgen.models.functional import part
from fedgen.privacy.events import canonical

OWN = {
    datalens: {"top_k": 9, "threshold": 0.2},
    g_pate: {
        "directions": 3,
        "bins": 4,
        "max_projection": 0.1,
        "threshold": 0.3,
        "readout": "fullest",
    },
    pate_gan: {
        "student": partial(dcgan.Critic, width=3),
        "student_learning_rate": 1e-2,
        "student_betas": (0.5, 0.9),
        "student_steps": 2,
        "targets": "hard",
    },
}
SHARED = [
    *("generator", "critic", "latent", "batch", "fakes_per_label", "generator_learning_rate"),
    *("generator_betas", "ema", "critics", "critics_per_step", "critic_steps", "critic_batch"),
    *("critic_learning_rate", "critic_betas", "warm_start", "device"),
]
METHODS = list(OWN)


def make(build: object, noise: float | None = None, clients: int = 1, **changed: object) -> Method:
    facts = PublicFacts(clients, 60 if clients == 1 else None, 10, (1, 8, 8))
    shared = {name: SETTINGS[name] for name in SHARED}
    return build(facts, noise, **{**shared, **OWN[build], **changed})  # type: ignore[operator,index]


def trained(method: Method, rounds: int, shard: Shard = SHARD) -> dict:
    server, state = method.server.init(STREAMS), {}
    for number in range(method.client.prepare_steps):
        state |= method.client.prepare(number, shard, STREAMS)
    for round_ in range(rounds):
        broadcast = method.server.broadcast(server, round_, STREAMS)
        state |= method.client.train(state, broadcast, shard, round_, STREAMS)
    return state


def query(method: Method) -> Query:
    result = method.server.query(method.server.init(STREAMS), 0, STREAMS)
    assert result is not None
    return result


def answer(method: Method, state: dict, shard: Shard = SHARD) -> torch.Tensor:
    sent = method.client.respond(state, query(method), shard, 0, STREAMS)
    return torch.from_numpy(sent.arrays["answer"])


# What privacy rests on


@kills(
    "fedgen/methods/families/critic_ensemble.py",
    ("            moments = self._to_device(state[name], True) if name in state else "),
    '            moments = changed.get(f"adam.{first - 1}") or ',
)
@kills(
    "fedgen/methods/families/critic_ensemble.py",
    'order = torch.randperm(len(shard), generator=streams.public("subsets"))',
    "order = torch.argsort(shard.labels, stable=True)",
)
@kills(
    "fedgen/methods/families/critic_ensemble.py",
    "first, subsets = members.start, self.subsets(members, shard, streams)",
    ("first, subsets = members.start, self.subsets(members, shard, streams.at(round_))"),
)
@kills(
    "fedgen/methods/datalens.py",
    "adam_step(teachers, weight_gradients(losses, leaves), moments, *adam)",
    "adam_step(teachers, weight_gradients(losses * losses.sum(), leaves), moments, *adam)",
)
@pytest.mark.parametrize("build", METHODS)
@pytest.mark.parametrize("row", [0, 17])
@pytest.mark.parametrize("stacks", [1, 3, 5])
def test_one_record_changes_one_teacher_and_its_optimizer(
    build: object, row: int, stacks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its label: released code that splits records by label changes all teachers, and so does
    an optimizer that continues from one stack of teachers to the next."""
    monkeypatch.setattr(ensemble_privacy, "critics_at_once", lambda *_: math.ceil(5 / stacks))
    method = make(build, critics_per_step=5)
    assert len(method.client.train.__self__.rotation.turns[0]) == stacks
    images, labels = SHARD.images.clone(), SHARD.labels.clone()
    images[row], labels[row] = 255 - images[row], (labels[row] + 3) % 10
    before, after = trained(method, 3), trained(method, 3, Shard(images, labels))
    assert before.keys() == after.keys()
    different = {
        int(name.split(".")[1]) + teacher
        for name, tensors in before.items()
        for key, value in tensors.items()
        if value.dim()
        for teacher in range(len(value))
        if not torch.equal(value[teacher], after[name][key][teacher])
    }
    assert {name.split(".")[0] for name in before} == {"critics", "adam"}
    assert len(before) == 2 * stacks
    assert len(different) == 1
    raw = [answer(method, state).double() * 5 for state in (before, after)]
    bound = method.client.train.__self__.mechanism.bound
    assert float((raw[0] - raw[1]).flatten(1).norm(dim=1).max()) <= bound.diameter + 1e-6


@kills(
    "fedgen/methods/families/ensemble_privacy.py",
    "        return repeat(mechanism.event(samples), responses // samples)",
    "        return repeat(mechanism.event(1), responses // samples)",
)
@pytest.mark.parametrize("build", METHODS)
def test_each_image_is_an_event(build: object) -> None:
    """A record may have changed the votes on all images of a round."""
    plan = make(build, noise=1.5).plan
    assert plan.samples_per_round > 1
    voted = 3 * plan.samples_per_round
    assert canonical(plan.server_event(voted)) == {GaussianDpEvent(noise_multiplier=1.5): voted}


@pytest.mark.parametrize("build", METHODS)
def test_noise_has_the_accounted_scale(build: object) -> None:
    """Standard deviation of 400 or more values at four standard errors, which honest noise exceeds
    once in 16,000 times."""
    state = trained(make(build, batch=400), 1)
    exact = answer(make(build, batch=400), state)
    noisy = answer(make(build, noise=1.5, batch=400), state)
    diameter = make(build).client.train.__self__.mechanism.bound.diameter
    expected, count = 1.5 * diameter / 5, exact.numel()
    assert float((noisy - exact).std()) == pytest.approx(expected, rel=4 / math.sqrt(2 * count))


@pytest.mark.parametrize("build", METHODS)
def test_a_repeated_query_does_not_change_the_state(build: object) -> None:
    method = make(build)
    state = trained(method, 2)
    kept = {n: {k: v.clone() for k, v in tensors.items()} for n, tensors in state.items()}
    first, second = answer(method, state), answer(method, state)
    assert torch.equal(first, second)
    assert all(
        torch.equal(v, kept[n][k]) for n, tensors in state.items() for k, v in tensors.items()
    )


@pytest.mark.parametrize("build", METHODS)
def test_each_of_several_clients_is_a_teacher(build: object) -> None:
    method = make(build, noise=1.0, clients=4)
    assert method.plan.unit.value == "client"
    assert method.client.train.__self__.rotation.count == 1
    assert method.plan.claim is None or method.plan.claim.epsilon(1, 1e-5) > 0


@kills(
    "fedgen/run/metrics_log.py",
    "        if is_due(state, facts, self._config.sample_every) or last:",
    "        if (facts.response_norm or 0) % 1 > 0.5 or last:",
)
@pytest.mark.parametrize("method", ["datalens_small", "g_pate_small", "pate_gan_small"])
def test_votes_affect_neither_rounds_nor_files(method: str, train: Train, tmp_path: Path) -> None:
    """Neighbours with different votes leave the same files, the same numbers of lines and the same
    spend."""

    def left(run: Path) -> tuple[list[str], int, str, str]:
        names = [p.relative_to(run).as_posix() for p in run.rglob("*")]
        lines = (run / "metrics.jsonl").read_text().splitlines()
        result = ((run / name).read_text() for name in ("privacy.json", "public/PRIVACY.md"))
        return sorted(names), len(lines), *result

    images, labels = SHARD.images.numpy().copy(), SHARD.labels.numpy().copy()
    runs = []
    for name in ("one", "neighbour"):
        test = {"test_images": images[1:], "test_labels": labels[1:]}
        np.savez(tmp_path / f"{name}.npz", train_images=images, train_labels=labels, **test)
        words = ["data=folder", f"data.path={tmp_path}/{name}.npz", "data.classes=10"]
        runs.append(train(f"method={method}", *words, "rounds=4", name=name))
        images[0], labels[0] = 255 - images[0], (labels[0] + 3) % 10
    assert left(runs[0]) == left(runs[1])
    result = [(run / "public" / "generator.safetensors").read_bytes() for run in runs]
    assert result[0] != result[1] and len(result[0]) == len(result[1])


# The papers' steps


def test_discriminators_learn_by_cross_entropy() -> None:
    logits = torch.randn(7, generator=STREAMS.public("logits"))

    def score(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        del labels
        return images.flatten(1).sum(1)

    images = (logits / 64)[:, None, None, None].expand(7, 1, 8, 8)
    real, fake, labels = images[:3], images[3:6], torch.zeros(3, dtype=torch.long)
    expected = F.binary_cross_entropy_with_logits(logits[:3], torch.ones(3))
    expected = expected + F.binary_cross_entropy_with_logits(logits[3:6], torch.zeros(3))
    result = discriminator_loss(score, real, fake, labels)
    assert float(result) == pytest.approx(float(expected), rel=1e-5)
    expected = F.binary_cross_entropy_with_logits(logits[3:6], torch.ones(3), reduction="sum")
    assert float(generator_loss(score, fake, labels)) == pytest.approx(float(expected), rel=1e-5)


def gradients(method: Method, state: dict, asked: Query) -> torch.Tensor:
    """Return the gradients of each of five teachers by plain autograd: (5, rows, 64)."""
    critics, rows = method.client.train.__self__, []
    weights = [state[f"critics.{each.start}"] for each in critics.rotation.stacks]
    for stack in weights:
        for teacher in range(len(stack["score.weight"])):
            one = {name: value[teacher] for name, value in stack.items()}
            at = asked.samples["images"].clone().requires_grad_()
            shown = (at, asked.samples["labels"])
            functional_call(critics.nets.critic, one, shown).sum().backward()
            assert at.grad is not None
            rows.append(-at.grad.flatten(1))
    return torch.stack(rows)


def test_datalens_votes_are_signs_of_the_largest_entries() -> None:
    method = make(datalens)
    state, asked = trained(method, 2), query(method)
    result = answer(method, state).flatten(1)
    expected = torch.zeros(6, 64)
    for teacher in gradients(method, state, asked):
        for row, gradient in enumerate(teacher.tolist()):
            largest = sorted(range(64), key=lambda pixel: -abs(gradient[pixel]))[:9]
            for pixel in largest:
                expected[row, pixel] += math.copysign(1, gradient[pixel]) / 5
    assert torch.allclose(result, expected)


def test_datalens_moves_entries_on_which_enough_teachers_agree() -> None:
    votes = torch.tensor([[0.3, 0.2, 0.1, -0.2, -0.21, 0.0]])
    assert agreed_direction(votes, 0.2).tolist() == [[1.0, 0.0, 0.0, 0.0, -1.0, 0.0]]


def test_g_pate_votes_are_bins_of_projections() -> None:
    method = make(g_pate)
    state, asked = trained(method, 2), query(method)
    result = answer(method, state)
    expected = torch.zeros(6, 3, 4)
    for teacher in gradients(method, state, asked):
        for row in range(6):
            values = teacher[row] @ projections(asked, 3)[row]
            for axis, value in enumerate(values.tolist()):
                place = min(max(math.floor((value + 0.1) / 0.05), 0), 3)
                expected[row, axis, place] += 1 / 5
    assert torch.allclose(result, expected)
    assert float(result.sum()) == pytest.approx(18)


def test_g_pate_projections_are_fresh_and_normalised() -> None:
    """Squared norms of projected unit vectors are 1 on average: 600, at five standard errors."""
    method = make(g_pate, batch=600)
    drawn = projections(query(method), 3)
    squares = drawn[:, 0].square().sum(1)
    assert float(squares.mean()) == pytest.approx(1, abs=5 * math.sqrt(2 / 3 / 600))
    again = method.server.query(method.server.init(STREAMS), 1, STREAMS)
    assert again is not None
    assert not torch.equal(projections(again, 3), drawn)
    seeds = query(method).samples["seeds"]
    assert len(set(seeds.tolist())) == 600
    assert seeds.nbytes == 600 * 8, "all that travels of them"


def test_g_pate_uses_one_noisy_histogram() -> None:
    """For the threshold and for the fullest bin: the votes are not queried twice."""
    asked = Query({"images": torch.zeros(2, 1, 8, 8), "seeds": torch.tensor([5, -7])})
    along = projections(asked, 2)
    histogram = torch.tensor(
        [
            [[0.1, 0.2, 0.6, 0.1], [0.4, 0.2, 0.2, 0.2]],
            [[-0.2, 0.9, 0.1, 0.2], [0.0, 0.1, 0.1, 0.8]],
        ]
    )
    middles = torch.tensor([-0.75, -0.25, 0.25, 0.75])
    values = torch.tensor([[0.25, 0.0], [-0.25, 0.75]])
    result = direction(histogram, asked, 4, 1.0, 0.5, "fullest")
    expected = torch.stack([along[row] @ values[row] for row in range(2)])
    assert torch.allclose(result.flatten(1), expected, atol=1e-6)
    result = direction(histogram, asked, 4, 1.0, 0.5, "mean")
    expected = torch.stack([along[row] @ (histogram[row] @ middles) for row in range(2)])
    assert torch.allclose(result.flatten(1), expected, atol=1e-6)


def test_pate_gan_counts_votes_for_real() -> None:
    method = make(pate_gan)
    state, asked = trained(method, 2), query(method)
    critics = method.client.train.__self__
    logits = torch.cat(
        [
            critics.nets.score(state[f"critics.{each.start}"])(
                asked.samples["images"].expand(len(each), 6, 1, 8, 8),
                asked.samples["labels"].expand(len(each), 6),
            )
            for each in critics.rotation.stacks
        ]
    )
    assert torch.allclose(answer(method, state), (logits > 0).float().mean(0)[:, None])


@pytest.mark.parametrize("targets", ["hard", "soft"])
def test_the_student_of_pate_gan_learns_from_the_noisy_majority(targets: str) -> None:
    """Its step by torch's own Adam; that of the generator after two rounds, not before."""
    method = make(pate_gan, targets=targets)
    state, server = method.server.init(STREAMS), method.server
    net = dcgan.Critic(10, (1, 8, 8), 3)
    net.load_state_dict(part(state, "student"))
    adam = torch.optim.Adam(net.parameters(), 1e-2, (0.5, 0.9))
    counts = torch.tensor([0.9, 0.4, 0.51, -0.3, 1.2, 0.5])[:, None]
    truth = torch.tensor([1.0, 0, 1, 0, 1, 0])
    truth = truth if targets == "hard" else counts[:, 0].clamp(0, 1)
    asked = query(method)
    result = net(asked.samples["images"], asked.samples["labels"])
    F.binary_cross_entropy_with_logits(result, truth).backward()
    adam.step()
    once = server.update(state, counts, 0, STREAMS)
    for name, value in net.named_parameters():
        assert torch.allclose(part(once, "student")[name], value, atol=1e-6), name
    same = [torch.equal(v, part(once, "generator")[n]) for n, v in part(state, "generator").items()]
    assert all(same)
    twice = server.update(once, counts, 1, STREAMS)
    assert not torch.equal(
        part(twice, "generator")["project.weight"], part(once, "generator")["project.weight"]
    )


# Mistakes


@pytest.mark.parametrize(
    ("method", "word", "key"),
    [
        ("datalens_small", "method.top_k=65", "method.top_k"),
        ("datalens_small", "method.threshold=1", "method.threshold"),
        ("datalens_small", "method.critics=99999", "method.critics"),
        ("datalens_small", "method.clip=1", "method.clip"),
        ("datalens_small", "method.critics=3.5", "method.critics"),
        ("g_pate_small", "method.bins=1", "method.bins"),
        ("g_pate_small", "method.threshold=1.5", "method.threshold"),
        ("g_pate_small", "method.readout=median", "method.readout"),
        ("g_pate_small", "privacy.unit=client", "privacy.unit"),
        ("pate_gan_small", "method.targets=warm", "method.targets"),
        ("pate_gan_small", "method.student=2", "method.student"),
    ],
)
def test_invalid_settings_are_one_line(
    method: str, word: str, key: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert cli.run(["train", f"method={method}", word, f"run_dir={run}"]) == 2
    error = capsys.readouterr().err
    assert key in error
    assert len(error.strip().splitlines()) == 1
    assert not run.exists()
