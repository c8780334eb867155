"""``fedgen attack`` detects canaries in a run without noise, and gates a release."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from mutation import kills
from omegaconf import DictConfig
from tiny import Train

from fedgen import cli
from fedgen.commands.attack import LIKELIHOOD_RATIOS, Attack, _repetition, check_bound
from fedgen.config.compose import compose
from fedgen.data.canaries import presence_in_repetition
from fedgen.errors import FedgenError
from fedgen.privacy.guarantee import Guarantee
from fedgen.randomness import RandomStreams
from fedgen.run import train as training
from fedgen.run.generator import load_generator
from fedgen.run.resume import open_run
from fedgen.run.setup import canary_streams, setup
from fedgen.storage.run_dir import RunDir

MIXTURE = ["method=mixture_small", "runtime.threads=1"]


def record(run: Path) -> dict:
    return json.loads((run / "attack.json").read_text())


@pytest.mark.slow
@kills("fedgen/commands/attack.py", '"repetition": number,', '"repetition": 0,')
def test_an_attack_succeeds_on_a_run_without_noise(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["method.dct_size=4", "method.components=4", "method.clusters=2"]
    run = train(*MIXTURE, *sizes, "privacy=none")
    assert cli.run(["attack", f"run={run}", "repetitions=20", "samples=1000"]) == 0
    results = record(run)
    [of_weights], [of_samples] = (results["attacks"][name] for name in LIKELIHOOD_RATIOS)
    assert of_weights["fpr"] == of_samples["fpr"] == 0.01  # 100 non-members: no rate of 0.1 %
    assert of_weights["tpr"] > 0.5 and of_samples["high"] <= 1
    assert results["proven"] is None and results["canaries"] == 10
    assert "no proven bound: an attack may detect every member" in capsys.readouterr().out
    assert (run / "attack.png").stat().st_size > 10_000
    page = run.parent / "report.html"
    assert cli.run(["report", f"runs={run}", f"out={page}"]) == 0
    assert "likelihood ratio (weights): detects" in page.read_text()
    capsys.readouterr()
    # the repetitions are not trained again
    place = run / "attack" / "seed0_canaries10"
    before = (place / "0" / "results.json").stat().st_mtime_ns
    assert cli.run(["attack", f"run={run}", "repetitions=20", "samples=200"]) == 0
    assert (place / "0" / "results.json").stat().st_mtime_ns == before
    assert cli.run(["release", f"run={place / '0'}", "out=a.zip"]) == 2
    assert "has no noise" in capsys.readouterr().err
    assert cli.run(["attack", f"run={place / '0'}"]) == 2
    assert "was an audit" in capsys.readouterr().err


def test_the_rate_of_an_attack_gates_a_release(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(*MIXTURE, "privacy.target_epsilon=3")
    words = ["release", f"run={run}", f"out={tmp_path / 'out.zip'}", "audit=false"]
    words += ["registry=false", f"run_dir={tmp_path / 'released'}"]
    assert cli.run([*words, "max_attack_tpr=0.3"]) == 2
    assert (
        f"has no attack results for its generator; run fedgen attack run={run}"
        in capsys.readouterr().err
    )
    assert cli.run(["attack", f"run={run}", "repetitions=0"]) == 0
    text = capsys.readouterr().out
    assert "proven bound: no attack detects more than 0.887 % at 0.1 % false positives" in text
    assert "nearest sample: detects" in text
    assert record(run)["repetitions"] == 0 and len(record(run)["attacks"]) == 3
    assert cli.run([*words, "max_attack_tpr=0.9"]) == 2
    assert "was attacked without likelihood ratio (weights)" in capsys.readouterr().err
    results = record(run)
    strong = dict.fromkeys(LIKELIHOOD_RATIOS, results["attacks"]["sample density"])
    results["attacks"] |= strong  # in place of minutes of repetitions
    (run / "attack.json").write_text(json.dumps(results))
    assert cli.run([*words, "max_attack_tpr=0.001"]) == 2
    assert "may be" in capsys.readouterr().err
    assert not (tmp_path / "released").exists()
    assert cli.run([*words, "max_attack_tpr=0.9"]) == 0
    # the attack was on the rehearsal's generator, not on this one
    assert RunDir(tmp_path / "released").attack_results("run") is None
    (run / "attack.json").write_text("{}")
    capsys.readouterr()
    assert (
        cli.run([*words[:2], f"out={tmp_path / 'b.zip'}", "registry=false", "max_attack_tpr=0.9"])
        == 2
    )
    assert "attack.json was altered" in capsys.readouterr().err


@kills("fedgen/commands/attack.py", "point.low > proven.tpr", "point.tpr > proven.tpr")
@kills("fedgen/commands/attack.py", "attack_.name in LIKELIHOOD_RATIOS", "False")
def test_an_attack_above_the_bound_is_an_error() -> None:
    """On the Gaussian mechanism, with the best test: no error at its own bound; an error at that of
    half of its μ."""
    streams, generator = RandomStreams.from_seed(0, "seeded"), np.random.default_rng(0)
    members = np.stack([presence_in_repetition(10, n, streams) for n in range(200)])
    scores = generator.normal(size=members.shape) + 2.0 * members

    def attacked(name: str, mu: float) -> None:
        check_bound([Attack(name, scores, members)], _gaussian(mu), streams)

    attacked(LIKELIHOOD_RATIOS[0], 2.0)
    attacked("sample density", 1.0)  # not on the protected unit
    with pytest.raises(FedgenError, match="exceeds the proven bound"):
        attacked(LIKELIHOOD_RATIOS[0], 1.0)
    check_bound([Attack(LIKELIHOOD_RATIOS[0], scores, members)], None, streams)


def _gaussian(mu: float) -> Guarantee:
    return Guarantee(np.zeros(1), np.ones(1), mu)


@pytest.mark.parametrize("words, message", [
    (["repetitions=7"], "repetitions: 7 is odd"),
    (["canaries=2000"], "canaries: 2000 exceeds the number of records (1437)"),
    (["repetitions=2"], "repetitions: must be"),
    (["repetitions=18"], "too few to measure a false positive rate of 1 %; take 20 or more"),
])  # fmt: skip
def test_invalid_settings_of_an_attack_are_refused(
    words: list[str], message: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(*MIXTURE, "privacy.target_epsilon=3")
    assert cli.run(["attack", f"run={run}", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (run / "attack.json").exists() and not (run / "attack" / "0").exists()


@kills("fedgen/randomness.py", 'part = b"repetition" + index', 'part = b"repetition" + 0 * index')
@kills("fedgen/run/noise_domain.py", 'audit.pop("repetition", None)', "pass")
def test_repetitions_differ_only_in_canaries_and_secret_streams(train: Train) -> None:
    run = train(*MIXTURE, "privacy.target_epsilon=3")
    first, second, complement = (setup(repetition(run, n, 10)) for n in (2, 5, 3))
    public = [each.streams.public("initial").initial_seed() for each in (first, second)]
    noise = [each.streams.noise_bits(4, "noise").tolist() for each in (first, second)]
    secret = [each.streams.secret("batch").random() for each in (first, second)]
    assert public[0] == public[1] and noise[0] != noise[1] and secret[0] != secret[1]
    assert first.noise == second.noise
    assert first.canaries and second.canaries and complement.canaries
    for one, other in zip(first.canaries.included, second.canaries.included, strict=True):
        assert one.images.equal(other.images) and one.labels.equal(other.labels)
    labels = [int(shard.labels[0]) for shard in first.canaries.included]
    assert sorted(labels) == list(range(10)), "one per label"
    assert not np.array_equal(first.canaries.present, second.canaries.present)
    assert np.array_equal(first.canaries.present, ~complement.canaries.present)
    streams = canary_streams(first.config)
    assert np.array_equal(first.canaries.present, presence_in_repetition(10, 2, streams))


@kills("fedgen/federation/client/context.py", "if setup.repetition is not None:", "if False:")
def test_clients_add_other_noise_in_each_repetition(train: Train) -> None:
    """Of equal records: the first query is the same, and seeded noise depends on it."""
    run = train(*MIXTURE, "privacy.target_epsilon=3")
    streams = canary_streams(repetition(run, 0, 1))
    included = [n for n in range(10) if presence_in_repetition(1, n, streams)[0]][:2]
    runs = [training.train(repetition(run, n, 1)) for n in included]
    histograms = [load_generator(each, "cpu").weights["meant"] for each in runs]
    assert not histograms[0].equal(histograms[1])


def repetition(run: Path, number: int, canaries: int) -> DictConfig:
    """Return the settings of a repetition of a run."""
    attack = compose("attack", [f"run={run}", f"canaries={canaries}"])
    _, trained, _ = open_run(run, "run")
    return _repetition(trained, attack, number, run / "attack" / f"{number}")
