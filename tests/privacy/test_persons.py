"""Several records of one person: their cost by two accountants and by the mechanism."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given, settings
from hypothesis import strategies as st
from mutation import kills
from scipy.stats import binom, chisquare, kstest, norm
from tiny import Train, tiny

from fedgen import cli
from fedgen.config.compose import compose
from fedgen.data.datasets import Shard
from fedgen.data.partition import check_one_client_per_person
from fedgen.errors import FedgenError
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.batch_sampling import FullBatch, PoissonSampling
from fedgen.privacy.clipping import ClippedSum, sum_of_rows
from fedgen.privacy.events import (
    PoissonSampledGroup,
    Relation,
    Unit,
    canonical,
    from_json,
    group_event,
    repeat,
    scale_noise,
    to_json,
    with_sampling_revealed,
)
from fedgen.privacy.mechanisms import SumGaussian
from fedgen.randomness import RandomStreams
from fedgen.run import attacks
from fedgen.run.setup import Setup, setup

RELATION = Relation.ADD_OR_REMOVE_ONE
CASES = [(3, 0.01, 1.0, 300), (10, 0.05, 4.0, 200), (2, 0.2, 0.8, 10), (4, 0.5, 2.0, 1)]


def sampled(rate: float, sigma: float, size: int, count: int = 1) -> dict:
    event = group_event(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), size)
    return canonical(repeat(event, count))


@kills(
    "fedgen/privacy/events.py", ("    if size == 1:\n        return event\n"), "    return event\n"
)
@kills(
    "fedgen/privacy/privacy_profiles.py",
    "    weights = binom.pmf(counts, event.size, event.sampling_probability)",
    "    weights = binom.pmf(counts, 1, event.sampling_probability)",
)
@pytest.mark.parametrize(("size", "rate", "sigma", "count"), CASES)
def test_epsilon_agrees_with_a_second_accountant(
    size: int, rate: float, sigma: float, count: int
) -> None:
    """dp_accounting's own mixture of Gaussians, on its own grid."""
    result = epsilon(sampled(rate, sigma, size, count), 1e-5, RELATION).value
    counts = np.arange(size + 1)
    theirs = pld.from_mixture_gaussian_mechanism(
        sigma, counts.tolist(), binom.pmf(counts, size, rate).tolist(),
        value_discretization_interval=2e-3,
    ).self_compose(count)  # fmt: skip
    assert result == pytest.approx(theirs.get_epsilon_for_delta(1e-5), rel=2e-3)


@settings(max_examples=25)
@given(st.integers(2, 12), st.floats(0.001, 0.5), st.floats(0.5, 5), st.integers(1, 50))
@pytest.mark.slow
def test_epsilon_lies_between_one_record_and_all_at_once(
    size: int, rate: float, sigma: float, count: int
) -> None:
    spend = sampled(rate, sigma, size, count)
    result = epsilon(spend, 1e-5, RELATION).or_infinity
    one = epsilon(sampled(rate, sigma, 1, count), 1e-5, RELATION).or_infinity
    whole = epsilon(
        canonical(repeat(GaussianDpEvent(sigma / size), count)), 1e-5, RELATION
    ).or_infinity
    assert one <= result + 1e-3 and result <= whole + 1e-9
    assert result <= epsilon(with_sampling_revealed(spend), 1e-5, RELATION).or_infinity + 1e-9
    assert epsilon(scale_noise(spend, 2.0), 1e-5, RELATION).or_infinity <= result + 1e-3


@given(st.integers(1, 1000), st.floats(1e-4, 1), st.floats(0.1, 100))
def test_the_event_is_canonical_and_survives_json(size: int, rate: float, sigma: float) -> None:
    [(event, count)] = sampled(rate, sigma, size).items()
    assert count == 1
    assert canonical(event) == {event: 1}
    assert from_json(json.loads(json.dumps(to_json(event)))) == event


@pytest.mark.parametrize(("size", "sigma"), [(10, 0.25), (12, 0.3), (50, 1.5)])
def test_losses_beyond_floating_point_have_a_bound(size: int, sigma: float) -> None:
    whole = epsilon(canonical(GaussianDpEvent(sigma / size)), 1e-5, RELATION).or_infinity
    assert 0 < epsilon(sampled(0.01, sigma, size), 1e-5, RELATION).or_infinity <= whole + 1e-9


@pytest.mark.parametrize("size", [-1, 0, 10**400])
def test_impossible_group_sizes_are_refused(size: int) -> None:
    result = {
        "event": "poisson_group",
        "rate": 0.1,
        "size": size,
        "gates": to_json(GaussianDpEvent(1.0)),
    }
    with pytest.raises(ValueError, match="not a privacy event"):
        from_json(result)


def test_events_without_a_bound_for_groups() -> None:
    with pytest.raises(ValueError, match="no bound for a group"):
        group_event(PoissonSampledGroup(0.1, 2, GaussianDpEvent(1.0)), 2)
    with pytest.raises(ValueError, match="not replaced"):
        epsilon(sampled(0.1, 1.0, 2), 1e-5, Relation.REPLACE_ONE)


# --- mechanism ------------------------------------------------------------------------------------


def records(persons: np.ndarray) -> Shard:
    """Return records of these persons."""
    images = torch.zeros(len(persons), 1, 1, 1, dtype=torch.uint8)
    return Shard(images, torch.zeros(len(persons), dtype=torch.long), torch.from_numpy(persons))


def exact_sum(
    persons: np.ndarray, rows: np.ndarray, streams: RandomStreams, part_size: int, clip: float
) -> np.ndarray:
    """Return the sum without sampling, with hardly any noise, of contributions (n, d)."""
    mechanism = SumGaussian(1.0, 1e-9, FullBatch(), 1.0, RELATION, Unit.PERSON, person_clip=clip)
    assert mechanism.sensitivity(RELATION) == pytest.approx(clip)
    parts = mechanism.sums(
        records(persons),
        streams,
        part_size,
        lambda part: sum_of_rows(torch.from_numpy(rows[part]), 1.0),
    )
    return mechanism.noised(rows.shape[1], parts, streams).double().numpy()


@kills(
    "fedgen/privacy/clipping.py",
    "value / max(count, 1) for name",
    "value for name",
)
@kills("fedgen/privacy/clipping.py", "value * factor for name", "value for name")
@kills(
    "fedgen/privacy/mechanisms.py",
    "        if not self._averages_persons:\n            yield",
    "        if True:\n            yield",
)
@kills(
    "fedgen/privacy/mechanisms.py",
    "persons[counts[persons] == count]",
    "persons[counts[persons] <= count]",
)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 80),
    st.floats(0, 1e6),
    st.sampled_from([1.0, 0.6, 0.2]),
    st.integers(0, 2**32 - 1),
)
def test_a_person_moves_a_sum_by_at_most_the_clip_norm(
    counts: list[int], part_size: int, scale: float, clip: float, seed: int
) -> None:
    """The sum is the sum over persons of the clipped means of their clipped rows, for any number of
    records and any size of parts. All records of a person count as one, and those of others are
    unchanged without them."""
    streams, rng = RandomStreams.from_seed(3, "seeded"), np.random.default_rng(seed)
    persons = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    rows = rng.normal(size=(len(persons), 3)) * scale
    rows[persons == 0] = rows[persons == 0][0]  # all in one direction
    clipped = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1)
    means = np.array([clipped[persons == person].mean(0) for person in range(len(counts))])
    norms = np.linalg.norm(means, axis=1, keepdims=True)
    expected = (means * np.minimum(1, clip / np.maximum(norms, 1e-12))).sum(0)
    whole = exact_sum(persons, rows, streams, part_size, clip)
    assert whole == pytest.approx(expected, abs=2e-3 * len(counts))
    rest = persons > 0
    without = exact_sum(persons[rest] - 1, rows[rest], streams, part_size, clip)
    assert np.linalg.norm(whole - without) <= clip + 1e-6
    moved = exact_sum(persons, np.where(rest[:, None], rows, -rows), streams, part_size, clip)
    assert np.linalg.norm(moved - whole) <= 2 * clip + 1e-6


@kills(
    "fedgen/privacy/mechanisms.py",
    "yield from _pieces(np.sort(records[first : first + persons].ravel()), part_size)",
    "yield np.sort(records[first : first + persons].ravel())",
)
def test_a_person_with_many_records_is_summed_alone(streams: RandomStreams) -> None:
    """Memory stays bounded: by a part, for any number of records of each person."""
    mechanism = SumGaussian(1.0, 1.0, FullBatch(), 4.0, RELATION, Unit.PERSON)
    persons, seen = np.array([0] * 100 + [1] * 100 + [2, 2, 3, 3]), []

    def contribution(part: np.ndarray) -> ClippedSum:
        seen.append(part)
        return sum_of_rows(torch.ones(len(part), 1), 1.0)

    for _ in mechanism.sums(records(persons), streams, 64, contribution):
        pass
    assert sorted(map(len, seen)) == [4, 36, 36, 64, 64]
    assert all(len(set(persons[part])) == 1 for part in seen if len(part) > 4)
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(204))


@kills(
    "fedgen/privacy/mechanisms.py",
    "        if self.unit is not Unit.PERSON:\n            return _split_batch(",
    "        if True:\n            return _split_batch(",
)
@pytest.mark.parametrize(("size", "rate", "sigma"), [(5, 0.3, 0.5), (3, 0.05, 1.0)])
def test_a_sum_has_the_accounted_distribution(size: int, rate: float, sigma: float) -> None:
    """For a person whose records all have one direction: the test fails for one of a thousand
    honest mechanisms."""
    mechanism = SumGaussian(1.0, sigma, PoissonSampling(rate), 1.0, RELATION, Unit.PERSON)
    assert mechanism.event() == PoissonSampledDpEvent(rate, GaussianDpEvent(sigma))
    rows = torch.full((size, 1), 7.0)  # clipped to 1
    result = []
    for number in range(3000):
        here = RandomStreams.from_seed(number, "seeded")
        sums = mechanism.sums(
            records(np.zeros(size, np.int64)), here, 100, lambda part: sum_of_rows(rows[part], 1.0)
        )
        result.append(float(mechanism.noised(1, sums, here)))

    def law(x: np.ndarray) -> np.ndarray:
        present, absent = norm.cdf((np.asarray(x) - 1) / sigma), norm.cdf(np.asarray(x) / sigma)
        return rate * present + (1 - rate) * absent

    assert kstest(result, law).pvalue > 1e-3


@kills(
    "fedgen/privacy/mechanisms.py",
    "persons = max(1, part_size // records.shape[1])",
    "persons = len(records)",
)
@kills(
    "fedgen/data/datasets.py",
    'np.argsort(persons, kind="stable"), np',
    "np.arange(len(persons)), np",
)
def test_numbers_of_persons_may_have_gaps(streams: RandomStreams) -> None:
    """Persons 1, 7 and 900, with 40 records each, in parts of at most 100."""
    persons, seen = np.tile([900, 1, 7], 40), []
    mechanism = SumGaussian(1.0, 1.0, FullBatch(), 3.0, RELATION, Unit.PERSON)

    def contribution(part: np.ndarray) -> ClippedSum:
        seen.append(part)
        return sum_of_rows(torch.ones(len(part), 1), 1.0)

    total = sum(
        part.flat() for part in mechanism.sums(records(persons), streams, 100, contribution)
    )
    assert float(total) == pytest.approx(3, abs=0.01)
    assert sorted(map(len, seen)) == [40, 80]
    assert all(np.isin(persons, persons[part]).sum() == len(part) for part in seen)


@kills(
    "fedgen/privacy/mechanisms.py",
    'streams.secret_bits(len(counts), "record of person") % counts.astype(np.uint64)',
    "np.zeros(len(counts), np.uint64)",
)
def test_a_batch_has_one_record_of_each_sampled_person() -> None:
    """All records of a person are equally likely. The test fails for one of a million honest
    samplers."""
    persons = np.array([2, 0, 1, 0, 2, 2, 0, 2])
    mechanism = SumGaussian(1.0, 1.0, PoissonSampling(0.6), 3.0, RELATION, Unit.PERSON)
    seen, batches = np.zeros(8), 3000
    for number in range(batches):
        streams = RandomStreams.from_seed(number, "seeded")
        [batch] = mechanism.batch_parts(records(persons), streams, 64)
        assert len(set(persons[batch])) == len(batch) and (np.diff(batch) > 0).all()
        seen[batch] += 1
    expected = batches * 0.6 / np.bincount(persons)[persons]
    for person in range(3):
        own = persons == person
        assert abs(seen[own].sum() - batches * 0.6) < 5 * np.sqrt(batches * 0.24)
        assert own.sum() == 1 or chisquare(seen[own]).pvalue > 1e-7
    assert seen == pytest.approx(expected, rel=0.15)


def test_a_smaller_bound_holds_for_means_of_persons_alone() -> None:
    """A mechanism that averages nothing would not keep to it, and sums that were clipped to a
    larger norm are refused."""
    for sampling, unit in ((FullBatch(), Unit.RECORD), (PoissonSampling(0.1), Unit.PERSON)):
        with pytest.raises(ValueError, match="applies to means of persons"):
            SumGaussian(1.0, 1.0, sampling, 1.0, RELATION, unit, person_clip=0.5)
    mechanism = SumGaussian(1.0, 1.0, FullBatch(), 1.0, RELATION, Unit.PERSON, person_clip=0.5)
    streams = RandomStreams.from_seed(0, "seeded")
    with pytest.raises(ValueError, match="larger norm than the sensitivity assumes"):
        mechanism.noised(1, [sum_of_rows(torch.ones(2, 1), 1.0)], streams)


def test_a_mechanism_for_persons_requires_them(streams: RandomStreams) -> None:
    mechanism = SumGaussian(1.0, 1.0, FullBatch(), 1.0, RELATION, Unit.PERSON)
    shard = Shard(torch.zeros(2, 1, 1, 1, dtype=torch.uint8), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="needs the person in each record"):
        mechanism.batch_parts(shard, streams, 64)
    with pytest.raises(ValueError, match="needs the person in each record"):
        list(mechanism.sums(shard, streams, 64, lambda part: sum_of_rows(torch.ones(1, 1), 1.0)))


# --- partition ------------------------------------------------------------------------------------


@kills(
    "fedgen/data/partition.py",
    "    if len(np.unique(np.concatenate(by_client))) < sum(map(len, by_client)):",
    "    if not by_client:",
)
def test_a_person_belongs_to_one_client() -> None:
    persons = np.array([0, 0, 1, 1])
    check_one_client_per_person([np.array([0, 1]), np.array([2, 3])], persons)
    with pytest.raises(FedgenError, match="several clients images of one person"):
        check_one_client_per_person([np.array([0, 2]), np.array([1, 3])], persons)
    with pytest.raises(FedgenError, match="do not name the person"):
        check_one_client_per_person([np.arange(4)], None)


# --- runs -----------------------------------------------------------------------------------------

PERSONS = ["privacy.unit=person", "data.public_persons=20"]
SUMS = [
    "dpgan_small", "dp_wgan_gp_small", "psg_small", "dpdm_small", "dp_merf_small",
    "dp_merf_ae_small", "dp_hp_small", "mixture_small", "central_images_small",
]  # fmt: skip


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write 160 images of 20 persons, 8 of each, by two writers."""
    rng, file = np.random.default_rng(0), tmp_path_factory.mktemp("people") / "people.npz"
    persons = np.repeat(np.arange(20), 8)
    np.savez(
        file,
        train_images=rng.integers(0, 256, (160, 8, 8), dtype=np.uint8),
        train_labels=np.arange(160) % 10,
        train_writer=persons // 10,
        train_person=persons,
        test_images=rng.integers(0, 256, (40, 8, 8), dtype=np.uint8),
        test_labels=np.arange(40) % 10,
    )
    return f"data.path={file}"


def ready(method: str, people: str) -> Setup:
    words = tiny(method, "data=folder", people, "data.classes=10", "data.public_rows=160",
                 "method.sampling_rate=1.0")  # fmt: skip
    return setup(compose("audit", [f"method={method}", *words, *PERSONS,
                                   "audit.canaries=0"]))  # fmt: skip


@pytest.mark.parametrize("method", SUMS)
def test_a_person_moves_a_sum_by_the_proven_distance(method: str, people: str) -> None:
    """All persons in every batch: the release moves by one clip norm for a person with three
    images. A mechanism that summed them would move it three times as far."""
    made = ready(method, people)
    loud, quiet = made.at_noise(1.0), made.at_noise(1e-4)
    for kind in range(len(loud.worst_cases())):
        [(leaf, count)] = canonical(
            loud.worst_cases()[kind].event or loud.plan.server_event(1)
        ).items()
        assert isinstance(leaf, GaussianDpEvent)
        sides = []
        for side in ("first", "second"):
            worst = quiet.worst_cases()[kind]
            state, shard = getattr(worst, side)
            sides.append(
                attacks._play(
                    quiet, worst, state, shard, 0, RandomStreams.from_seed(5, "seeded")
                ).astype(float)
            )
        spread = []
        for trial in range(40):
            worst = loud.worst_cases()[kind]
            state, shard = worst.second
            both = [
                attacks._play(
                    each, worst, state, shard, trial, RandomStreams.from_seed(5, "seeded")
                ).astype(float)
                for each in (loud, quiet)
            ]
            spread.append(both[0] - both[1])
        apart = np.linalg.norm(sides[0] - sides[1]) / np.std(np.concatenate(spread))
        assert apart * leaf.noise_multiplier / count**0.5 == pytest.approx(1, abs=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpgan_small", "mixture_small"])
def test_a_run_protects_persons(method: str, people: str, train: Train) -> None:
    words = ["data=folder", people, "data.classes=10", "data.public_rows=160", *PERSONS]
    run = train(f"method={method}", *words, "partition=by_writer", "privacy.target_epsilon=4")
    record = json.loads((run / "privacy.json").read_text())
    assert (record["unit"], record["protected"]) == ("person", 20)
    assert record["claimed"] is None
    assert record["views"]["server"]["epsilon"] <= 4
    assert (
        "all images of one person at one client together"
        in (run / "public" / "PRIVACY.md").read_text()
    )
    before = (run / "privacy.json").read_bytes()
    assert cli.run(["train", f"resume={run}"]) == 0
    assert (run / "privacy.json").read_bytes() == before


@pytest.mark.slow
@kills(
    "fedgen/federation/runtimes/ray_actor.py",
    "torch.from_numpy(persons)",
    "torch.arange(9999)[: len(labels)]",
)
def test_actors_of_ray_know_the_persons(people: str, train: Train) -> None:
    words = ["data=folder", people, "data.classes=10", "data.public_rows=160", *PERSONS]
    digests = []
    for runtime in ("in_process", "ray"):
        run = train("method=mixture_small", *words, f"runtime={runtime}", name=runtime)
        digests.append(json.loads((run / "results.json").read_text())["generator_sha256"])
    assert digests[0] == digests[1]


@kills(
    "fedgen/run/noise_domain.py", 'domain_inputs.append(config.data.get("public_persons"))', "pass"
)
def test_runs_with_another_divisor_have_other_noise(people: str) -> None:
    """Noise at two scales on the same records would reveal them."""
    words = [
        "method=dp_merf_small",
        "data=folder",
        people,
        "data.classes=10",
        "data.public_rows=160",
        "privacy.unit=person",
        "privacy.target_epsilon=null",
        "privacy.noise_multiplier=1",
    ]
    domains = {
        setup(compose("config", [*words, f"data.public_persons={count}"])).domain
        for count in (20, 40)
    }
    assert len(domains) == 2


@kills("fedgen/data/datasets.py", "self.persons[rest]", "self.persons[: len(rest)]")
@kills("fedgen/run/setup.py", "streams, rows, by_person)", "streams, rows, False)")
@pytest.mark.parametrize("column", ["train_person", "train_writer"])
def test_held_out_persons_are_whole(column: str, tmp_path: Path) -> None:
    """Each image shows the number of its person, so that a shifted person is seen. Writers are
    persons if no others are given."""
    persons = np.random.default_rng(0).permutation(np.repeat(np.arange(40), 4))
    images = np.repeat(persons.astype(np.uint8), 64).reshape(160, 8, 8)
    images[:, 0, 0] = np.arange(160)
    np.savez(
        tmp_path / "p.npz",
        train_images=images,
        train_labels=np.arange(160) % 10,
        test_images=images[:20],
        test_labels=np.arange(20) % 10,
        **{column: persons},
    )
    words = [
        "method=dp_merf_small",
        "data=folder",
        f"data.path={tmp_path / 'p.npz'}",
        "held_out=40",
        "data.classes=10",
        "data.public_rows=160",
        *PERSONS,
    ]
    ready = setup(compose("config", words))
    shard = ready.dataset.shard(ready.shards[0])
    assert shard.persons is not None and torch.equal(shard.images[:, 0, 5, 5].long(), shard.persons)
    held_out = set(ready.dataset.test_images[:, 0, 5, 5].tolist())
    assert held_out and not held_out & set(shard.persons.tolist())


def test_a_run_of_the_former_unit_is_refused(
    people: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Version 0.1.0 counted a person up to N times: resuming would understate ε."""
    words = ["data=folder", people, "data.classes=10", "data.public_rows=160", *PERSONS]
    run = train("method=dp_merf_small", *words)
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        settings.replace("privacy:\n", "privacy:\n  images_per_person: 4\n")
    )
    capsys.readouterr()
    assert cli.run(["train", f"resume={run}"]) == 2
    assert "privacy.images_per_person of version 0.1.0" in capsys.readouterr().err


def test_an_audit_of_a_run_plants_persons(people: str, tmp_path: Path) -> None:
    words = tiny("dp_merf_small", "data=folder", people, "data.classes=10", *PERSONS)
    words += ["method=dp_merf_small", "data.public_rows=160", "audit.releases=0"]
    run = tmp_path / "run"
    assert cli.run(["audit", *words, "audit.canaries=12", f"run_dir={run}"]) == 0
    assert json.loads((run / "audit.json").read_text())["run"]["canaries"] == 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method=dp_merf_small", "privacy.unit=person"], "data.public_persons: is not set"),
        (["method=dpgan_small", "privacy.unit=person"], "data.public_persons: is not set"),
        (["method=dp_merf_small", "privacy.images_per_person=2"], "was removed"),
        (["method=dp_merf_small", "privacy.unit=person"], "the data do not name the person"),
        (["method=dpgan_small", *PERSONS, "method.batch=22"], "22 exceeds data.public_persons=20"),
        (["method=gs_wgan_small", "method.critics=9", *PERSONS], "cannot be person"),
        (["method=dp_sinkhorn_small", *PERSONS], "cannot be person"),
        (
            ["method=fedavg_gan", "partition=by_writer", "method.cohort_size=2", *PERSONS],
            "cannot be person",
        ),
        (["method=dp_merf_small", "partition=iid", "partition.clients=4", *PERSONS], "one person"),
    ],
)
def test_invalid_settings_are_refused(
    words: list[str], message: str, people: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with_persons = [] if "do not name" in message else ["data=folder", people, "data.classes=10",
                                                     "data.public_rows=160"]  # fmt: skip
    assert cli.run(["account", *with_persons, *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
