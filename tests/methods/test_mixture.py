"""The private mixture: the bound of each sum, their total cost, and their results."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from dp_accounting import ComposedDpEvent, GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from mutation import kills
from tiny import tiny
from torch import Tensor
from torch.nn import functional as F

from fedgen import cli
from fedgen.config.compose import compose
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.methods.api import Method, PublicFacts
from fedgen.methods.families.scattering_classifier import projection
from fedgen.methods.mixture import mixture
from fedgen.models.augmentation import Augmentation
from fedgen.models.scattering import Scattering
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.aggregation import Clipped, Release
from fedgen.privacy.clipping import sum_of_second_moments, symmetric_from_triangle
from fedgen.privacy.events import Relation, Unit, canonical
from fedgen.randomness import RandomStreams
from fedgen.run import train
from fedgen.run.setup import setup

SHARES = {
    "histogram": 0.02,
    "means": 0.15,
    "second_moments": 0.15,
    "clusters": 0.48,
    "covariances": 0.2,
}
SETTINGS: dict[str, Any] = {
    "rows": 200,
    "shares": SHARES,
    "steps": 2,
    "dct_size": 4,
    "components": 5,
    "clusters": 2,
    "private_classifier": "ridge",
    "classifier_share": 0.5,
    "classifier_steps": 3,
    "classifier_features": 6,
    "classifier_samples": 40,
    "augmentation": "none",
    "device": "cpu",
}
SHAPE = 1, 8, 8
STREAMS = RandomStreams.from_seed(3, "seeded")


def make(
    noise: float | None = None,
    clients: int = 1,
    unit: Unit | None = None,
    shape: tuple[int, int, int] = SHAPE,
    classes: int = 2,
    **changed: Any,
) -> Method:
    facts = PublicFacts(clients, None, classes, shape, unit=unit)
    return mixture(facts, noise, **{**SETTINGS, **changed})


def shard(rows: int, shape: tuple[int, int, int] = SHAPE, classes: int = 2, seed: int = 0) -> Shard:
    """Return images of a gradient for each label, with noise."""
    source = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % classes
    slope = torch.linspace(0, 1, shape[2])
    kinds = torch.stack([slope.roll(3 * label) for label in range(classes)])
    bright = 120 * kinds[labels][:, None, None] + 60
    noise = 20 * torch.randn(rows, *shape, generator=source)
    return Shard((bright + noise).clamp(0, 255).to(torch.uint8), labels)


def run(method: Method, shards: list[Shard], streams: RandomStreams = STREAMS) -> dict[str, Tensor]:
    """Run all rounds in this process."""
    state = dict(method.server.init(streams))
    for round_ in range(method.plan.fixed_rounds or 0):
        query = method.server.query(state, round_, streams)
        assert query is not None
        sent = [
            method.client.respond({}, query, each, round_, streams.at("client", number))
            for number, each in enumerate(shards)
        ]
        assert all(isinstance(each, Release | Clipped) for each in sent)
        total = method.aggregate([each.arrays["answer"] for each in sent], round_, streams)
        mean = (total / len(shards)).float()
        state = dict(method.server.update(state, mean, round_, streams))
    assert method.server.query(state, method.plan.fixed_rounds or 0, streams) is None
    return state


# --- what it costs --------------------------------------------------------------------------------


@kills(
    "fedgen/methods/families/noisy_sums.py",
    "max(0, min(query.repeats, releases - start))",
    "max(0, min(1, releases - start))",
)
@kills("fedgen/methods/families/noisy_sums.py", "(repeats / share) ** 0.5", "(1 / share) ** 0.5")
@kills(
    "fedgen/methods/mixture.py",
    "mixture_share * shares[name],",
    "shares[name],",
)
@pytest.mark.parametrize("pixel_share", [None, 0.1])
@pytest.mark.parametrize("teacher", ["none", "ridge", "descent"])
def test_all_sums_together_cost_one_gaussian(teacher: str, pixel_share: float | None) -> None:
    """Squared ratios of sensitivity to noise add up to that of the whole, against dp_accounting."""
    plan = make(0.5, private_classifier=teacher, pixel_share=pixel_share).plan
    rounds = {"none": 6, "ridge": 7, "descent": 9}[teacher] + bool(pixel_share)
    assert plan.query_rounds == plan.fixed_rounds == rounds
    spend = canonical(plan.server_event(rounds))
    leaves = [leaf for leaf, count in spend.items() for _ in range(count)]
    assert all(isinstance(leaf, GaussianDpEvent) for leaf in leaves)
    assert len(leaves) == rounds
    assert sum(1 / leaf.noise_multiplier**2 for leaf in leaves) == pytest.approx(4, rel=1e-9)
    result = epsilon(spend, 1e-5, Relation.ADD_OR_REMOVE_ONE).or_infinity
    alone = epsilon({GaussianDpEvent(0.5): 1}, 1e-5, Relation.ADD_OR_REMOVE_ONE).or_infinity
    assert result == pytest.approx(alone, rel=1e-6)
    by_pld = PLDAccountant().compose(ComposedDpEvent(leaves)).get_epsilon(1e-5)
    assert result == pytest.approx(by_pld, rel=2e-3)
    assert canonical(plan.server_event(3)).items() <= spend.items()


def test_the_noise_is_that_of_one_gaussian_at_the_target() -> None:
    """mu(10) = 2.0004 and mu(1) = 0.26805 at delta 1e-5 (Balle, Wang 2018). At ε = 1 a label has
    one cluster, and one step."""
    for target, mu, rounds in ((10, 2.0004, 6), (1, 0.26805, 5)):
        words = ["method=mixture_small", f"privacy.target_epsilon={target}"]
        ready = setup(compose("config", words))
        assert 1 / (ready.privacy.noise_multiplier or 0) == pytest.approx(mu, rel=1e-3)
        assert ready.config.rounds == ready.privacy.budget.rounds == rounds


# --- what a row contributes -----------------------------------------------------------------------


@kills(
    "fedgen/privacy/clipping.py",
    "weight = torch.where(down == right, 1.0, math.sqrt(2)).double()",
    "weight = torch.where(down == right, 1.0, 2.0).double()",
)
@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from([1e-3, 1.0, 30.0]), st.booleans())
def test_one_record_moves_every_sum_by_at_most_its_clip_norm(
    seed: int, size: float, white: bool
) -> None:
    """For any query and any record, exactly in double precision."""
    source = torch.Generator().manual_seed(seed)
    method = make(1.0, private_classifier="ridge", pixel_share=0.1)
    rows = shard(6, seed=seed)
    images = torch.full_like(rows.images, 255) if white else rows.images
    for worst in [
        *method.worst_cases(),
        *make(1.0, private_classifier="descent").worst_cases()[-1:],
    ]:
        named = next(iter(worst.query.samples))
        classifier = "descent" if named == "descent" else "ridge"
        program = make(1.0, private_classifier=classifier, pixel_share=0.1)
        shared = {
            name: size * torch.randn(value.shape, generator=source)
            for name, value in worst.query.shared.items()
        } | {"bound": torch.tensor(size)}
        asked = next(a for a in sequence_of(program) if a.name == named)
        given_rows = images.float() / 255, rows.labels
        if asked.preparation is not None:
            given_rows = asked.preparation.compute(shared, given_rows[0]), rows.labels
        whole = asked.contribution(shared, *given_rows).flat()
        fewer = asked.contribution(shared, given_rows[0][1:], given_rows[1][1:]).flat()
        assert whole.shape == (asked.size,)
        assert float((whole - fewer).norm()) <= getattr(asked.mechanism, "clip")  # noqa: B009


@kills(
    "fedgen/methods/mixture.py",
    ("products = product(points[selected], label_centres.T, (self.max_norms, self.max_norms))"),
    (
        "products = product(points[selected], label_centres.T, (self.max_norms, "
        "self.max_norms)) * (1 + 1e-5 * (-1) ** len(points))"
    ),
)
@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.integers(2, 40))
def test_a_record_between_two_clusters_is_assigned_consistently(seed: int, copies: int) -> None:
    """Copies of a record at equal distances of two centres, and one record more."""
    source = torch.Generator().manual_seed(seed)
    server = make(1.0).server.init.__self__  # type: ignore[attr-defined]
    asks, sizes = server.contributions, server.sizes
    one = torch.rand((1, *server.shape), generator=source)
    coefficients = asks.dct(one).shape[1]
    shared = {
        "means": torch.randn((server.classes, coefficients), generator=source),
        "basis": torch.linalg.qr(torch.randn((coefficients, sizes.components), generator=source)).Q,
    }
    labels = torch.zeros(copies + 1, dtype=torch.long)
    place = asks.principal_components(shared, one, labels[:1])
    aside = torch.randn((1, 1, sizes.components), generator=source).double()
    shared["centres"] = torch.cat([place + aside, place - aside], 1).repeat(server.classes, 1, 1)
    more = torch.cat([one.repeat(copies, 1, 1, 1), torch.rand(one.shape, generator=source)])
    alone = asks.nearest_cluster(place, shared["centres"], labels[:1])
    for rows in (more[:-1], more):
        there = asks.principal_components(shared, rows, labels[: len(rows)])
        assert torch.equal(there[:copies], place.repeat(copies, 1))
        result = asks.nearest_cluster(there, shared["centres"], labels[: len(rows)])
        assert (result[:copies] == alone).all()


def sequence_of(method: Method) -> Any:
    """Return the sums of a client program."""
    return method.client.respond.__self__.queries  # type: ignore[attr-defined]


@kills(
    "fedgen/privacy/clipping.py",
    "norms = lengths * (lengths.square() + row_norms(other).square()).sqrt()",
    "norms = lengths.square()",
)
def test_moments_are_those_of_the_images() -> None:
    torch.manual_seed(0)
    rows, beside = torch.randn(50, 7), torch.randn(50, 3)
    result = sum_of_second_moments(rows, math.inf, torch.arange(50) % 2, 2, beside).gradients[
        "rows"
    ]
    for block in (0, 1):
        mine, right = rows[block::2].double(), beside[block::2].double()
        assert torch.allclose(symmetric_from_triangle(result[block, :28], 7), mine.T @ mine)
        assert torch.allclose(result[block, 28:].view(7, 3), mine.T @ right)
    one = sum_of_second_moments(rows[:1], math.inf).flat()
    assert float(one.norm()) == pytest.approx(float(rows[0].double().square().sum()))
    clipped = sum_of_second_moments(rows[:1], 0.5, targets=beside[:1]).flat()  # both together
    assert 0.499 < float(clipped.norm()) <= 0.5


def test_non_finite_images_contribute_zero_to_moments() -> None:
    rows = torch.randn(4, 3)
    rows[1], rows[2, 0] = math.nan, math.inf
    result = sum_of_second_moments(rows, 1.0).flat()
    assert torch.equal(result, sum_of_second_moments(rows[[0, 3]], 1.0).flat())


# --- what it learns -------------------------------------------------------------------------------


def drawn(method: Method, state: dict[str, Tensor], count: int = 400) -> tuple[Tensor, Tensor]:
    labels = torch.arange(count) % 2
    return method.server.sample(method.server.generator(state), labels, STREAMS), labels


@kills("fedgen/methods/mixture.py", "shares / records, noise)", "1 - shares / records, noise)")
@pytest.mark.parametrize("classifier", ["none", "ridge"])
def test_pixels_have_the_distribution_of_their_position(classifier: str) -> None:
    """Images are black or white at each pixel, with probabilities that differ between pixels."""
    source = torch.Generator().manual_seed(0)
    probabilities = torch.rand(SHAPE, generator=source)
    white = torch.rand((400, *SHAPE), generator=source) < probabilities
    images = Shard(255 * white.to(torch.uint8), torch.arange(400) % 2)
    distances = []
    for share in (None, 0.1):
        method = make(rows=400, pixel_share=share, private_classifier=classifier)
        samples, _ = drawn(method, run(method, [images]))
        distances.append(
            float(((samples > 0.5).float().mean(0) - white.float().mean(0)).abs().mean())
        )
    assert distances[1] < 0.5 * distances[0]


@kills("fedgen/methods/mixture.py", "(*self.shape, PIXEL_QUANTILES)", "(*self.shape, 1)")
@kills("fedgen/methods/mixture.py", "if self.has_pixels:\n", "if False:\n")
def test_a_published_generator_with_pixels_is_loaded(tmp_path: Path) -> None:
    words = ["method=mixture_small", *tiny("mixture_small"), "method.pixel_share=0.05"]
    path = train.train(compose("config", [*words, "evaluation=none", f"run_dir={tmp_path}/run"]))
    assert cli.run(["sample", f"run={path}/public", "n=20", f"out={tmp_path}/s.npz"]) == 0
    with np.load(tmp_path / "s.npz") as arrays:
        assert arrays["images"].std() > 10


def test_samples_of_an_interrupted_run_have_the_histogram_of_all_pixels() -> None:
    method = make(pixel_share=0.1, private_classifier="none")
    state = run(method, [shard(200)])
    state |= {name: torch.zeros_like(state[name]) for name in ("pixel_drawn", "pixel_meant")}
    plain = make(private_classifier="none")
    assert torch.equal(drawn(method, state)[0], drawn(plain, run(plain, [shard(200)]))[0])


def test_samples_resemble_the_images() -> None:
    """Means and covariances of pixels by label, and grey levels, without noise."""
    rows = shard(400)
    method = make(dct_size=8, components=20, private_classifier="none")
    state = run(method, [rows])
    images, labels = drawn(method, state, 2000)
    real = rows.images.float() / 255
    assert 0 <= float(images.min()) <= float(images.max()) <= 1
    for label in (0, 1):
        mine, theirs = images[labels == label], real[rows.labels == label]
        assert float((mine.mean(0) - theirs.mean(0)).abs().max()) < 0.06
        assert float(mine.var(0).sum() / theirs.var(0).sum()) == pytest.approx(1, abs=0.5)
    share = [float(np.quantile(each.numpy(), 0.5)) for each in (images, real)]
    assert share[0] == pytest.approx(share[1], abs=0.03)


def test_clients_together_are_one_client() -> None:
    """Without noise, means over n clients are those of all images."""
    rows = shard(200)
    parts = [Shard(rows.images[n::4], rows.labels[n::4]) for n in range(4)]
    one, four = run(make(), [rows]), run(make(clients=4), parts)
    for name in ("histogram", "means", "variances", "bound", "counts"):
        assert torch.allclose(one[name], four[name], rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize("teacher", ["ridge", "descent"])
def test_the_private_classifier_labels_samples(teacher: str) -> None:
    rows = shard(200, seed=1)
    method = make(private_classifier=teacher, classifier_steps=20)
    state = run(method, [rows])
    weights = method.server.generator(state)
    assert method.server.classify is not None
    given_labels = method.server.classify(weights, rows.images.float() / 255)
    assert float((given_labels == rows.labels).float().mean()) > 0.95
    images, labels = drawn(method, state)
    assert float((method.server.classify(weights, images) == labels).float().mean()) > 0.95


def test_one_label_needs_no_private_classifier() -> None:
    """The whole budget is spent on the mixture."""
    taught, without = make(2.0, classes=1), make(2.0, classes=1, private_classifier="none")
    assert taught.server.classify is None
    assert canonical(taught.plan.server_event(100)) == canonical(without.plan.server_event(100))


def test_descent_is_softmax_regression() -> None:
    """Steps with momentum along the gradient of the mean cross entropy, clipped per image; the mean
    of the second half."""
    rows = shard(40)
    method = make(private_classifier="descent", classifier_steps=4, rows=40)
    state = dict(method.server.init(STREAMS))
    for round_ in range(6):
        query = method.server.query(state, round_, STREAMS)
        assert query is not None
        answer = method.client.respond({}, query, rows, round_, STREAMS)
        mean = method.aggregate([answer.arrays["answer"]], round_, STREAMS).float()
        state = dict(method.server.update(state, mean, round_, STREAMS))
    features = Scattering(SHAPE, "cpu")(rows.images.float() / 255)
    places = projection(state, features).double()
    weights, velocity, kept = state["weights"].double(), torch.zeros_like(state["weights"]), []
    for _ in range(4):
        slopes = torch.softmax(15 * places @ weights, 1) - F.one_hot(rows.labels, 2)
        norms = slopes.norm(dim=1) * places.norm(dim=1)
        slopes = slopes * (0.7 / norms).clamp(max=1)[:, None]
        velocity = 0.9 * velocity + places.T @ slopes / 40
        weights = weights - 8 * velocity
        kept.append(weights)
    state = run(method, [rows])
    expected = (kept[2] + kept[3]) / 2
    assert torch.allclose(state["weights"].double(), expected, rtol=0.02, atol=0.02)


def test_weights_of_a_malicious_server_do_not_change_other_contributions() -> None:
    """Scores that cancel exactly, times 2^30: in single precision one record changed the
    contributions of others by 25 clip norms in total."""
    torch.manual_seed(0)
    method = make(1.0, private_classifier="descent", classes=3, classifier_features=12, rows=2000)
    asked = sequence_of(method)[-1]
    places = F.normalize(torch.randn(1001, 6), dim=1).repeat(1, 2) / math.sqrt(2)
    places = torch.cat([places, torch.full((1001, 1), 0.3)], 1).double()
    half = torch.randn(6, 3) * 2.0**30
    shared = {"weights": torch.cat([half, -half, torch.zeros(1, 3)])}
    labels = torch.arange(1001) % 3
    whole = asked.contribution(shared, places, labels).flat()
    fewer = asked.contribution(shared, places[1:], labels[1:]).flat()
    assert float((whole - fewer).norm()) <= 0.7


@kills(
    "fedgen/methods/families/scattering_classifier.py",
    "factor.multiplied_from_left(chunk.double() - mean, _MAX_DIFFERENCE)",
    "(chunk.double() - mean) @ directions + 1e-9 * (-1) ** len(chunk)",
)
@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.integers(1, 130), st.sampled_from([0.0, 1e14]))
def test_directions_of_a_malicious_server_do_not_change_other_contributions(
    seed: int, rows: int, mean: float
) -> None:
    """They leave only rounding of an image, scaled to the norm. By ordinary matrix products one
    record moved the contributions of others by half a clip norm in total."""
    source = torch.Generator().manual_seed(seed)
    features = F.normalize(torch.rand((rows + 1, 100), generator=source), dim=1).repeat(1, 2) / 2
    half = torch.randn((100, 30), generator=source)
    hostile = {"mean": torch.full((200,), mean), "directions": torch.cat([half, -half])}
    whole, fewer = projection(hostile, features)[:rows], projection(hostile, features[:rows])
    assert torch.allclose(whole, fewer, rtol=0, atol=1e-12)
    assert (whole.norm(dim=1) <= math.sqrt(1.09) + 1e-9).all()


@kills(
    "fedgen/methods/mixture.py",
    "(noise / counts[label]).square() * diagonal_factor",
    "0 * diagonal_factor",
)
def test_covariances_of_noise_are_shrunk() -> None:
    """Of a hundred images at ε = 1, covariances keep only eigenvalues beyond the noise."""
    state = run(make(3.7, rows=100), [shard(100)])
    assert all(bool(value.isfinite().all()) for value in state.values())
    spread = state["roots"].square().sum((1, 2))
    assert float(spread.max()) <= 0.45 * float(state["variances"].sum())  # 0.55 if noise stayed
    images, _ = drawn(make(3.7, rows=100), state, 50)
    assert bool(images.isfinite().all())


@pytest.mark.parametrize(
    ("shape", "classes", "rows"),
    [
        ((3, 16, 16), 5, 60),
        ((1, 9, 13), 36, 40),
        ((1, 8, 8), 2, 1),
        ((3, 64, 64), 2, 6),
        ((1, 2, 2), 2, 30),
        ((1, 8, 8), 1, 30),
    ],
)
def test_images_of_any_shape(shape: tuple[int, int, int], classes: int, rows: int) -> None:
    """Colour, rectangles, labels without images, one image, four pixels, one label."""
    changed: dict[str, Any] = {"dct_size": None, "components": None, "classifier_samples": 80}
    method = make(1.0, shape=shape, classes=classes, rows=rows, **changed)
    state = run(method, [shard(rows, shape, classes)])
    assert len({value.data_ptr() for value in state.values()}) == len(state)  # each is saved
    labels = torch.zeros(10, dtype=torch.long)
    images = method.server.sample(method.server.generator(state), labels, STREAMS)
    assert images.shape == (10, *shape)
    assert bool(images.isfinite().all())


def test_at_client_level_a_client_counts_once() -> None:
    """Its contribution is the mean over its images, clipped as a whole."""
    method = make(1.0, clients=3, unit=Unit.CLIENT)
    state = run(method, [shard(n) for n in (0, 1, 40)])
    assert method.plan.unit is Unit.CLIENT
    assert all(
        bool(value.isfinite().all()) for value in state.values() if value.is_floating_point()
    )


def of_persons(rows: Shard, images: int) -> Shard:
    """Return the records, as those of persons with so many images each."""
    return Shard(rows.images, rows.labels, torch.arange(len(rows)) // images)


def test_persons_with_one_image_are_records() -> None:
    """Without noise, the estimates are the same, although their moments are counted separately."""
    facts = PublicFacts(1, None, 2, SHAPE, unit=Unit.PERSON, persons=200)
    rows = shard(200)
    by_record = run(make(), [rows])
    by_person = run(mixture(facts, None, **SETTINGS), [of_persons(rows, 1)])
    for name in ("power", "counts", "means", "variances", "shares"):  # others up to signs
        assert torch.allclose(by_record[name], by_person[name], rtol=1e-4, atol=1e-5), name


@kills(
    "fedgen/methods/mixture.py",
    "counts = counts * (moment_counts.sum() / counts.sum()).clamp(0.1, 10)",
    "pass",
)
@kills(
    "fedgen/methods/mixture.py",
    "if counts is None else counts.clamp(min=0.1)",
    "",
)
def test_clipped_means_of_persons_keep_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hardly any noise, persons with equal images have the covariances of single records,
    although their means are clipped to about half: moments are divided by their own counts."""
    monkeypatch.setattr("fedgen.methods.mixture._SIMILARITY", dict.fromkeys(SHARES, 0.0))
    persons, images, rows = 400, 10, shard(400)
    copies = Shard(
        rows.images.repeat_interleave(images, 0),
        rows.labels.repeat_interleave(images),
        torch.arange(persons).repeat_interleave(images),
    )
    changed = {**SETTINGS, "private_classifier": "none"}
    facts = PublicFacts(1, None, 2, SHAPE, unit=Unit.PERSON, persons=persons)
    method = mixture(facts, 1e-4, **{**changed, "rows": persons * images})
    assert {query.mechanism.person_clip for query in sequence_of(method)} == {0.1**0.5}
    by_person, by_record = (
        run(method, [copies]),
        run(make(1e-4, private_classifier="none", rows=400), [rows]),
    )
    for name in ("variances", "roots"):
        ratio = by_person[name].square().sum() / by_record[name].square().sum()
        assert 0.7 < float(ratio) < 1.1, name  # large deviations are clipped more


def test_augmentation_keeps_the_shape_of_images() -> None:
    source = torch.Generator().manual_seed(0)
    images = shard(100).images.float() / 255
    still = Augmentation(1.0, 0, 0, 0, 0, 0)(images, source)
    assert torch.allclose(still, images, atol=1e-5)
    half = Augmentation(0.5, 20, 0.2, 0.1, 0.1, 0.05)(images, source)
    moved = (half - images).abs().flatten(1).amax(1) > 1e-3
    assert 30 <= int(moved.sum()) <= 70  # fails once in 10^4
    assert half.shape == images.shape


def test_features_have_norm_one_and_do_not_depend_on_contrast() -> None:
    images = shard(10).images.float() / 255
    features = Scattering(SHAPE, "cpu")
    result = features(images)
    assert result.shape == (10, features.count)
    assert torch.allclose(result.norm(dim=1), torch.ones(10), atol=1e-5)
    assert torch.allclose(features(images / 2), result, atol=0.02)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["method.shares.means=0.5"], "method.shares"),
        (["method.dct_size=9"], "method.dct_size"),
        (["method.dct_size=4", "method.components=17"], "method.components"),
        (["method.private_classifier=oracle"], "method.private_classifier"),
        (["method.augmentation=faces"], "method.augmentation"),
        (["method.classifier_share=1.5"], "method.classifier_share"),
        (["method.steps=0"], "method.steps"),
        (["method.shares.means=-1"], "method.shares"),
        (["method.pixel_share=1"], "method.pixel_share"),
        (["+method.shares.foo=0.1", "method.shares.means=0.05"], "method.shares"),
        (["method.clusters=1.5"], "method.clusters"),
        (["method.clusters=foo"], "method.clusters"),
        (["method.classifier_samples=1"], "method.classifier_samples"),
    ],
)
def test_impossible_settings_are_refused(
    words: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["account", "method=mixture_small", *words]) == 2
    assert f"fedgen: {key}" in capsys.readouterr().err


def test_shares_are_checked_for_every_caller() -> None:
    with pytest.raises(FedgenError, match=r"sum to 1\.15"):
        make(shares={**SHARES, "means": 0.3})


def test_the_evaluated_classifier_is_the_published_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory layout of weights affects the rounding of products, and with it labels."""
    judged = {}

    def look(ready: Any, generator: dict[str, torch.Tensor], *rest: Any) -> dict[str, Any]:
        judged.update(generator)
        return judge(ready, generator, *rest)

    judge = train.evaluate_run
    monkeypatch.setattr(train, "evaluate_run", look)
    words = ["method=mixture_small", *tiny("mixture_small"), "method.private_classifier=descent"]
    run = train.train(compose("config", [*words, f"run_dir={tmp_path / 'run'}"]))
    saved = safetensors.torch.load_file(run / "public" / "generator.safetensors")
    assert judged.keys() == saved.keys()
    for name, value in saved.items():
        assert judged[name].stride() == value.stride() and torch.equal(judged[name], value)


@kills(
    "fedgen/methods/families/noisy_sums.py",
    "max_norm=math.inf,",
    "max_norm=mechanism.max_norm(self.queries[0].size),",
)
def test_contributions_of_clients_stay_within_the_norm_of_each_sum() -> None:
    """At client level, each sum has its own."""
    shares = {**SHARES, "histogram": 0.168, "second_moments": 0.002}
    method = make(1.0, clients=100, unit=Unit.CLIENT, shares=shares)
    for case in method.worst_cases():
        state, rows = case.first
        sent = method.client.respond(state, case.query, rows, case.round, STREAMS)
        assert np.linalg.norm(sent.arrays["answer"]) <= method.plan.max_norm
