"""Attacks on the client program of each method: none beats its proof, and each detects too little
noise."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from mutation import kills
from numpy.typing import NDArray
from tiny import PARTITIONS, PROGRAMS, Train, tiny

from fedgen import cli
from fedgen.commands import audit
from fedgen.config.compose import compose
from fedgen.methods.api import Method
from fedgen.privacy import aggregation as releases
from fedgen.privacy.events import Unit, canonical
from fedgen.privacy.gaussian_noise import grid_spacing, rounded_gaussian
from fedgen.randomness import RandomStreams
from fedgen.run import attacks
from fedgen.run.attacks import LowerBound, adversaries, attack
from fedgen.run.setup import Setup, setup

# one critic for all query samples, every record in every batch: nothing amplifies
WITHOUT_DRAWS = [
    "method.critics=1",
    "method.critics_per_step=1",
    "method.routing=mean",
    "method.sampling_rate=1.0",
    "method.batch=2",
    "method.autoencoder_steps=8",
    "method.cohort_size=4",
    "method.dct_size=5",
    "rounds=9",
]


def prepared(method: str, words: list[str]) -> Setup:
    settings = tiny(method, *WITHOUT_DRAWS, *words)
    return setup(compose("audit", [f"method={method}", *settings, "audit.canaries=0"]))


def questions(method: str) -> range:
    """Return the range of the kinds of query of a method."""
    return range(len(prepared(method, []).at_noise(1.0).worst_cases()))


def attacked(
    method: str,
    words: list[str],
    noise: float,
    really: float,
    releases: int,
    sight: int = 0,
    kind: int = 0,
) -> list[LowerBound]:
    """Audit a program that claims ``noise`` and uses ``really``, at 99 % confidence. ``sight``:
    index of the adversary; ``kind``: that of the query."""
    ready = prepared(method, words)
    event = ready.at_noise(1.0).worst_cases()[kind].event
    if event is not None:  # each of a sequence has noise of its own
        [leaf] = canonical(event)
        own = getattr(leaf, "event", leaf).noise_multiplier
        noise, really = noise / own, really / own
    claimed = ready.at_noise(noise)
    return attack(
        ready.at_noise(really),
        claimed.plan,
        claimed.worst_cases()[kind],
        adversaries(claimed)[sight],
        releases=releases,
        confidence=0.99,
        delta=1e-5,
        streams=RandomStreams.from_seed(5, "seeded"),
    )


def distance(method: str, words: list[str], kind: int) -> float:
    """Return the distance between the releases of two neighbours in noise standard deviations, over
    the proven one: measured with almost no noise under equal streams, and scaled by the noise that
    is added at noise multiplier 1."""
    ready = prepared(method, words)
    loud, quiet = ready.at_noise(1.0), ready.at_noise(1e-4)
    spend = attacks._cost(loud.plan, loud.worst_cases()[kind], adversaries(loud)[0], 1)
    [(leaf, count)] = spend.items()
    proven = count**0.5 / getattr(leaf, "event", leaf).noise_multiplier

    def released(made: Method, side: int, trial: int = 0) -> NDArray[np.float64]:
        worst, sight = made.worst_cases()[kind], adversaries(made)[0]
        state, shard = (worst.first, worst.second)[side]
        streams = RandomStreams.from_seed(5, "seeded")
        if sight.sees_sum == 1:
            return attacks._play(made, worst, state, shard, trial, streams).astype(float)
        return attacks._play_sum(made, worst, sight, state, shard, trial, streams)

    apart = np.linalg.norm(released(quiet, 0) - released(quiet, 1))
    noise, trial = np.zeros(0), 0
    while noise.size < 500 and trial < 500:
        more = released(loud, 1, trial) - released(quiet, 1, trial)
        noise, trial = np.append(noise, more[more != 0]), trial + 1
    return float(apart / noise.std() / proven)


@pytest.mark.parametrize("aggregation", ["own", "secure"])
@pytest.mark.parametrize("method", ["dpgan_small", "dp_wgan_gp_small", "psg_small", "dpdm_small"])
def test_the_distance_of_whole_clients_is_the_proven_one(method: str, aggregation: str) -> None:
    """With all of their records or none, also where steps sample records."""
    words = [*(shares(method) if aggregation == "secure" else SHARES[:3]), "privacy.unit=client"]
    assert distance(method, words, 0) == pytest.approx(1, abs=0.1)


@kills(
    "fedgen/privacy/aggregation.py",
    "return std / math.sqrt(self.honest)",
    "return std / math.sqrt(4 * self.asked)",
    case="secure-gs_wgan_small",
)
@kills(
    "fedgen/privacy/mechanisms.py",
    "self.aggregation.sent(exact, self.std, event, self.unit, streams)",
    "self.aggregation.sent(exact, self.std / 2, event, self.unit, streams)",
    case="own-gs_wgan_small",
)
@pytest.mark.parametrize("method", PROGRAMS)
@pytest.mark.parametrize("aggregation", ["own", "secure"])
def test_the_distance_of_neighbours_is_the_proven_one(method: str, aggregation: str) -> None:
    """To a tenth, by hundreds of noise values; for secure sums, with the counted shares. Half of
    the noise would double the distance."""
    words = shares(method) if aggregation == "secure" else []
    for kind in questions(method):
        assert distance(method, words, kind) == pytest.approx(1, abs=0.1)


WITH_NOISE_OF_THEIR_OWN = ["gs_wgan_small", "dpgan_small", "fedavg_gan", "mixture_small"]
"""A method of each kind of mechanism: of rows, of steps, of clients, of sums."""


@pytest.mark.parametrize("method", WITH_NOISE_OF_THEIR_OWN)
def test_attacks_come_close_to_the_proof_and_not_above(method: str) -> None:
    for kind in questions(method):
        points = attacked(method, [], 1.0, 1.0, 400, kind=kind)
        assert [point.releases for point in points] == [1, 2, 4]
        assert not any(point.broken for point in points)
        assert max(point.lower_bound / (point.proven or 0) for point in points) >= 0.3


@pytest.mark.parametrize("method", WITH_NOISE_OF_THEIR_OWN)
def test_half_of_the_noise_is_detected(method: str) -> None:
    for kind in questions(method):
        assert any(point.broken for point in attacked(method, [], 1.0, 0.5, 400, kind=kind))


def test_bytes_of_responses_are_attacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a value that rounds to zero keeps its sign, the attack on bytes detects it."""
    ready = prepared("dp_hp_small", [])
    honest = attacks.attack_bytes(ready, 600, 0.99, 1e-5)
    assert not honest.broken and honest.lower_bound == 0.0

    def signed(exact: torch.Tensor, std: float, streams: RandomStreams) -> torch.Tensor:
        grid = grid_spacing(std, 10)
        drawn = rounded_gaussian(exact.double() / grid, std / grid, streams, "release")
        noisy = (drawn * grid).float()
        return torch.where(noisy == 0, torch.copysign(noisy, exact.float()), noisy)

    monkeypatch.setattr(releases, "noised", signed)
    assert attacks.attack_bytes(ready, 600, 0.99, 1e-5).broken


SUMS = ["partition=iid", "partition.clients=6", "method.routing=per_step", "method.responders=3"]
SUM, DRAWN_SUM = 1, 2  # of what there is to attack


def test_sums_of_clients_are_attacked() -> None:
    """The release depends on the sum of three clients of six: the attack comes close to the proof,
    with and without secret sampling, and detects noise that is counted more than once."""
    for sight, noise, really in ((SUM, 0.4, 0.4 / 3**0.5), (DRAWN_SUM, 1.6, 0.1)):
        points = attacked("gs_wgan_small", SUMS, noise, noise, 200, sight)
        assert points[0].of.startswith("sum of 3 clients")
        assert not any(point.broken for point in points)
        if sight == SUM:
            assert max(point.lower_bound / (point.proven or 0) for point in points) >= 0.3
        less = attacked("gs_wgan_small", SUMS, noise, really, 200, sight)
        assert any(point.broken for point in less)


@kills(
    "fedgen/privacy/routing.py",
    "math.sqrt(self.responses_per_sample) * noise_multiplier, hidden",
    "10 * self.responses_per_sample * noise_multiplier, hidden",
)
def test_an_attack_on_sums_detects_noise_counted_twice() -> None:
    """The claim for the sum of three is that of three noises, with or without sampling; the attack
    would detect a stronger claim."""
    points = attacked("gs_wgan_small", SUMS, 0.4, 0.4, 200, SUM)
    assert not any(point.broken for point in points)


SHARES = [
    *("partition=iid", "partition.clients=4", "privacy.adversary=server"),
    *("privacy.aggregation=secure", "privacy.threshold=4", "privacy.colluders=1"),
    *("method.cohort_size=4", "method.sampled_by=clients"),
]


def shares(method: str) -> list[str]:
    """Return words for secure sums of four clients, one of which may collude."""
    return [*SHARES, *([] if method == "fedavg_gan" else ["method.sampled_by=server"])]


@pytest.mark.parametrize("method", ["gs_wgan_small", "dp_merf_small"])
def test_secure_sums_without_the_colluders_shares_are_attacked(method: str) -> None:
    """Three honest shares of four: close to the proof and not above; above with half of the noise.
    Clients of GS-WGAN respond with one critic each, all of them."""
    words = shares(method)
    for kind in questions(method):
        points = attacked(method, words, 1.0, 1.0, 400, kind=kind)
        assert points[0].of == "secure sum of 3 honest shares"
        assert not any(point.broken for point in points)
        assert max(point.lower_bound / (point.proven or 0) for point in points) >= 0.3
        assert any(point.broken for point in attacked(method, words, 1.0, 0.5, 400, kind=kind))


def test_an_audit_of_several_clients_compares_with_the_published_epsilon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["method=gs_wgan_small", *tiny("gs_wgan_small"), *SUMS, "privacy.adversary=release"]
    own = ["audit.releases=200", "audit.canaries=4", "sample_every=1", f"run_dir={run}"]
    assert cli.run(["audit", *words, *own]) == 0
    output = capsys.readouterr().out
    assert "sum of 3 clients, 200 releases" in output
    assert "sum of 3 clients, secretly sampled, 200 releases" in output
    points = json.loads((run / "audit.json").read_text())["run"]["points"]
    release = json.loads((run / "privacy.json").read_text())["views"]["release"]["epsilon"]
    assert points[-1]["proven"] == release


WITH_DRAWS_OF_THEIR_OWN = ["gs_wgan_small", "dpgan_small", "dp_sinkhorn_small", "fedavg_gan"]
"""A method of each kind of draw: of critics, of rows of a sum, of a matrix, of clients."""


@pytest.mark.slow
@pytest.mark.parametrize("method", WITH_DRAWS_OF_THEIR_OWN)
def test_secret_sampling_only_helps(method: str) -> None:
    """With secret sampling, attacks stay below the proof."""
    drawn = ["method.sampling_rate=0.3", "method.routing=per_sample", "method.critics=4"]
    drawn += ["method.cohort_size=2"]
    for point in attacked(method, drawn, 1.0, 1.0, 200):
        assert not point.broken


@pytest.mark.slow
@kills(
    "fedgen/methods/families/pretraining.py",
    "round=case.round + first_round, plan=plan)",
    "round=case.round + first_round)",
    case="psg_small-release",
)
@pytest.mark.parametrize(
    ("method", "whom"),
    [("psg_small", "server"), ("dpdm_small", "server"), ("psg_small", "release")],
)
def test_both_phases_of_a_warm_start_are_attacked(method: str, whom: str) -> None:
    """The first at its own noise, whatever the noise of the run; each with the round it belongs
    to."""
    warm = ["warm_up=central_images", "warm_up.method.images=1", "warm_up.method.sampling_rate=1"]
    warm += ["warm_up.noise_multiplier=0.8", "warm_up.rounds=2", "method.sampling_rate=1.0"]
    noise = ["privacy.target_epsilon=null", "privacy.noise_multiplier=1"]
    own = ["method.batch=2", "rounds=9", "audit.releases=400", "audit.canaries=0"]
    if whom == "release":
        own += ["privacy.aggregation=trusted", "privacy.adversary=release"]
    words = [f"method={method}", *tiny(method), *warm, *noise, *own]
    result = audit.audit(compose("audit", words))
    assert "central, 400 releases of each of two neighbours at the warm-up's noise" in result.text
    first, *_, last = result.text.splitlines()
    assert "one release costs ε = 4" in first and last == "no attack refutes the proven ε"
    for phase in ("client program, central", "client program, step"):
        points = [point for point in result.program if point.of == phase]
        assert [point.releases for point in points] == [1, 2, 4]
        assert not any(point.broken for point in points)
        assert max(point.lower_bound / (point.proven or 0) for point in points) >= 0.3


@pytest.mark.slow
@pytest.mark.parametrize("method", PROGRAMS)
def test_an_audit_of_a_run(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    words = [f"method={method}", *tiny(method), *PARTITIONS["several"], "sample_every=1"]
    words += ["privacy.target_epsilon=null", "privacy.noise_multiplier=20"]
    protects_clients = setup(compose("config", words)).method.plan.unit is Unit.CLIENT
    canaries = 4 if protects_clients else 20
    # above, all programs are attacked
    releases = 200 if method == "gs_wgan_small" else 0
    own = ["runtime=in_process", f"audit.releases={releases}", f"audit.canaries={canaries}"]
    assert cli.run(["audit", *words, *own, f"run_dir={run}"]) == 0
    output = capsys.readouterr().out
    assert "with confidence 0.95, proven ε" in output
    record = json.loads((run / "audit.json").read_text())
    after = [point["releases"] for point in record["run"]["points"]]
    rounds = json.loads((run / "privacy.json").read_text())["rounds"]
    # a method may take two rounds at once, or have a number of its own
    assert after in ([*range(1, rounds + 1)], [2, 3])
    for point in record["run"]["points"]:
        assert 0 <= point["lower_bound"] <= point["proven"] <= 10
    assert (run / "audit.png").stat().st_size > 0
    assert (run / "public" / "PRIVACY.md").exists()


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("audit.releases=7", "audit.releases"),
        ("audit.canaries=5000", "audit.canaries"),
        ("audit.confidence=1.5", "audit.confidence"),
        ("audit.noise_multiplier=-1", "audit.noise_multiplier"),
        ("audit.noise_multiplier=1e200", "audit.noise_multiplier"),
    ],
)
def test_invalid_settings_are_refused(
    word: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert cli.run(["audit", *tiny("gs_wgan_small"), word, f"run_dir={run}"]) == 2
    assert key in capsys.readouterr().err
    assert not run.exists()


def test_an_audit_cannot_be_resumed(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    run = train("rounds=1")
    assert cli.run(["audit", f"resume={run}"]) == 2
    assert "cannot be resumed" in capsys.readouterr().err
