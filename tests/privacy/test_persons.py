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
from scipy.stats import binom, kstest, norm
from tiny import Train, tiny

from fedgen import cli
from fedgen.config.compose import compose
from fedgen.data.partition import limit_per_person
from fedgen.errors import FedgenError
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.batch_sampling import PoissonSampling
from fedgen.privacy.clipping import sum_of_rows
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


@kills(
    "fedgen/privacy/mechanisms.py",
    (
        "        return group_event(\n"
        "            self.sampling.event(GaussianDpEvent(self.noise_multiplier)), "
        "self.max_records\n"
        "        )"
    ),
    "        return self.sampling.event(GaussianDpEvent(self.noise_multiplier))",
)
@pytest.mark.parametrize(("size", "rate", "sigma"), [(5, 0.3, 0.5), (3, 0.05, 1.0)])
def test_a_sum_has_the_accounted_distribution(size: int, rate: float, sigma: float) -> None:
    """For a person whose records all have one direction: the test fails for one of a thousand
    honest mechanisms."""
    mechanism = SumGaussian(
        1.0, sigma, PoissonSampling(rate), 1.0, RELATION, Unit.PERSON, max_records=size
    )
    assert mechanism.event() == group_event(
        PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), size
    )
    rows = torch.full((size, 1), 7.0)  # clipped to 1
    result = []
    for number in range(3000):
        here = RandomStreams.from_seed(number, "seeded")
        sums = (
            sum_of_rows(
                rows[torch.from_numpy(part)], 1.0, torch.zeros(len(part), dtype=torch.long), 1
            )
            for part in mechanism.batch_parts(size, here, 100)
        )
        result.append(float(mechanism.noised(1, sums, here)))

    def law(x: np.ndarray) -> np.ndarray:
        counts = np.arange(size + 1)
        shifted = norm.cdf((np.asarray(x)[:, None] - counts) / sigma)
        return shifted @ binom.pmf(counts, size, rate)

    assert kstest(result, law).pvalue > 1e-3


# --- rows -----------------------------------------------------------------------------------------


@kills(
    "fedgen/data/partition.py",
    "kept.append(np.sort(order[place < most]))",
    "kept.append(np.sort(order[place <= most]))",
)
@kills(
    "fedgen/data/partition.py",
    "keyed_digest(key, example_content(images[row], int(labels[row]))) for row in shard\n",
    "keyed_digest(key, example_content(images[0], int(row))) for row in shard\n",
)
@given(st.integers(0, 11), st.integers(1, 4))
def test_removing_a_person_leaves_the_records_of_others(person: int, most: int) -> None:
    """Other records then have other positions; some person may have the same image twice."""
    rng, streams = np.random.default_rng(0), RandomStreams.from_seed(3, "seeded")
    persons = np.sort(rng.integers(0, 12, 150))
    images = rng.integers(0, 4, (150, 1, 1, 2), dtype=np.uint8)
    labels = rng.integers(0, 2, 150)

    def kept(there: np.ndarray, named: np.ndarray) -> list[tuple[int, ...]]:
        own = (named, most, images[there], labels[there], streams)
        [rows] = limit_per_person([np.arange(len(there))], *own)
        assert (np.diff(rows) > 0).all()
        assert np.bincount(persons[there][rows]).max() == most
        return sorted(
            (
                int(persons[there][row]),
                int(labels[there][row]),
                *images[there][row].ravel().tolist(),
            )
            for row in rows
        )

    whole = kept(np.arange(150), persons)
    rest = np.flatnonzero(persons != person)
    others = kept(rest, np.unique(persons[rest], return_inverse=True)[1])
    assert others == [each for each in whole if each[0] != person]


@kills(
    "fedgen/data/partition.py",
    "    if len(np.unique(np.concatenate(homes))) < sum(map(len, homes)):",
    "    if not homes:",
)
def test_a_person_belongs_to_one_client(streams: RandomStreams) -> None:
    persons = np.array([0, 0, 1, 1])
    rows = np.zeros((4, 1, 8, 8), np.uint8), np.zeros(4, np.int64)
    with pytest.raises(FedgenError, match="several clients images of one person"):
        limit_per_person([np.array([0, 2]), np.array([1, 3])], persons, 1, *rows, streams)
    with pytest.raises(FedgenError, match="do not name the person"):
        limit_per_person([np.arange(4)], None, 1, *rows, streams)


# --- runs -----------------------------------------------------------------------------------------

PERSONS = ["privacy.unit=person", "privacy.images_per_person=3"]
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
    """All records in every batch: the release moves by three clip norms, and no less is accounted.
    A mechanism that counted single records would be three times too far."""
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
    assert (record["unit"], record["images_per_person"]) == ("person", 3)
    assert record["claimed"] is None
    assert record["views"]["server"]["epsilon"] <= 4
    assert (
        "all images of one person at one client together, of which at most 3 count"
        in (run / "public" / "PRIVACY.md").read_text()
    )
    before = (run / "privacy.json").read_bytes()
    assert cli.run(["train", f"resume={run}"]) == 0
    assert (run / "privacy.json").read_bytes() == before


def test_an_audit_of_a_run_plants_persons(people: str, tmp_path: Path) -> None:
    words = tiny("dp_merf_small", "data=folder", people, "data.classes=10", *PERSONS)
    words += ["method=dp_merf_small", "data.public_rows=160", "audit.releases=0"]
    run = tmp_path / "run"
    assert cli.run(["audit", *words, "audit.canaries=12", f"run_dir={run}"]) == 0
    assert json.loads((run / "audit.json").read_text())["run"]["canaries"] == 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method=dp_merf_small", "privacy.unit=person"], "privacy.images_per_person: is not set"),
        (
            ["method=dp_merf_small", "privacy.images_per_person=2"],
            "applies only to",
        ),
        (["method=dp_merf_small", *PERSONS], "the data do not name the person"),
        (["privacy.unit=person", "privacy.images_per_person=0"], "at least 1"),
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
