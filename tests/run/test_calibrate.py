"""Noise for a target that is stated as the power of an attack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mutation import kills
from omegaconf import open_dict
from tiny import Train, tiny

from fedgen import account, cli
from fedgen.config.compose import compose
from fedgen.errors import FedgenError
from fedgen.run.calibrate import Progress, calibrate_after_dropout
from fedgen.run.noise_domain import noise_domain
from fedgen.run.resume import check_same_settings
from fedgen.run.setup import setup

METHODS = {
    "one sum": {"method": "dp_merf_small", "rounds": 3},
    "sampled batches": {"method": "dpgan_small", "rounds": 40, "data.public_rows": 1400},
    "secret cohorts": {
        "method": "gs_wgan_small",
        "partition": "iid",
        "partition.clients": 10,
        "runtime": "in_process",
        "privacy.adversary": "release",
        "rounds": 20,
    },
}
TARGETS = {
    "mu": {"privacy.target_mu": 0.8},
    "advantage": {"privacy.target_advantage": 0.25},
    "tpr": {"privacy.target_tpr": 0.05},
    "tpr at a rate": {"privacy.target_tpr": 0.02, "privacy.at_fpr": 0.001},
}


@kills("fedgen/run/calibrate.py", "lambda curve: curve.tpr(fpr)", "lambda curve: curve.tpr(0.5)")
@kills("fedgen/run/calibrate.py", "other.planned(method(sigma), config, server)", "1 / sigma")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("target", TARGETS)
def test_noise_meets_the_target_closely(method: str, target: str) -> None:
    """And the power that the run prints is below it."""
    words = {"data": "digits", **METHODS[method], **TARGETS[target]}
    row = account(words)
    [(key, value), *_] = TARGETS[target].items()
    view = words.get("privacy.adversary", "server")
    stated = row["guarantee"][view]
    if key == "privacy.target_advantage":
        reached = stated["advantage"]
    elif key == "privacy.target_tpr":
        reached = stated["tpr"][f"{words.get('privacy.at_fpr', 0.01):g}"]
    elif stated["mu"] is not None:
        reached = stated["mu"]
    else:  # the power of its Gaussian
        assert stated["tpr"]["0.01"] <= 0.0637  # Φ(Φ^-1(0.01) + 0.8)
        return
    assert 0.98 * value <= reached <= value * (1 + 1e-9)


def refused(*words: str) -> str:
    with pytest.raises(FedgenError) as error:
        setup(compose("config", ["method=dp_merf_small", "data=digits", *words]))
    return str(error.value)


@kills("fedgen/config/compose.py", "        now.target_epsilon = None", "        pass")
def test_one_target_at_a_time() -> None:
    """The default for ε gives way; two requested targets contradict each other."""
    config = compose("config", ["privacy.target_mu=1"])
    assert (config.privacy.target_epsilon, config.privacy.target_mu) == (None, 1)
    for words in (
        ["privacy.target_mu=null"],
        ["privacy.target_mu=NULL", "privacy.noise_multiplier=1"],
        ["privacy.target_epsilon=10", "privacy.target_mu=1"],
    ):
        assert compose("config", words).privacy.target_epsilon == 10
    for words in (
        ["privacy.target_mu=1", "privacy.target_tpr=null"],
        ["privacy={target_mu: 1}"],
    ):
        config = compose("config", words)
        assert (config.privacy.target_epsilon, config.privacy.target_mu) == (None, 1)
    both = ("privacy.target_mu=1", "privacy.target_epsilon=3")
    assert refused(*both).startswith("privacy.target_mu: cannot be combined with privacy.target_ep")
    two = ("privacy.target_mu=1", "privacy.target_tpr=0.1")
    assert refused(*two).startswith("privacy.target_tpr: cannot be combined with privacy.target_mu")
    noise = ("privacy.target_mu=1", "privacy.noise_multiplier=3")
    assert refused(*noise).startswith("privacy.noise_multiplier: cannot be combined with")
    assert "the rate by chance" in refused("privacy.target_tpr=0.01")
    assert "must be below 1" in refused("privacy.target_advantage=1")
    assert "none has no target" in refused("privacy=none", "privacy.target_mu=1")


@kills("fedgen/run/calibrate.py", "or progress.rounds > budget.rounds", "or False")
@kills("fedgen/run/calibrate.py", "progress.samples > budget.samples_per_client", "False")
@pytest.mark.parametrize("adversary", ["server", "release"])
def test_a_dropout_lowers_the_limit_unless_it_is_already_exceeded(adversary: str) -> None:
    """Whether rounds or query samples are limited."""
    aggregation = "secure" if adversary == "server" else "trusted"
    words = ["method=fedavg_gan", "data=digits", "partition=iid", "partition.clients=4"]
    words += ["method.cohort_size=2", "method.sampled_by=clients", "rounds=60"]
    words += ["privacy.target_epsilon=12", "privacy.noise_multiplier=1.5"]
    words += [f"privacy.adversary={adversary}", f"privacy.aggregation={aggregation}"]
    ready = setup(compose("config", words))
    after = ready.with_dropouts()

    def rounds(progress: Progress) -> int:
        return calibrate_after_dropout(ready.config, after, ready.privacy, progress).budget.rounds

    planned, fewer = ready.privacy.budget.rounds, rounds(Progress(1, 1))
    assert 1 < fewer < planned
    assert rounds(Progress(fewer, fewer)) == fewer
    further = Progress(1, fewer + 1) if adversary == "server" else Progress(fewer + 1, 1)
    assert rounds(further) == planned


@kills("fedgen/run/noise_domain.py", 'settings["privacy"].pop("at_fpr", None)', "pass")
@kills("fedgen/run/noise_domain.py", "for name in TARGETS[1:]:", "for name in ():")
def test_unused_targets_change_no_noise() -> None:
    """A seed gives the same run as before targets existed."""
    words = ["method=dp_merf_small", "data=digits", "privacy.at_fpr=0.02"]
    ready = setup(compose("config", words))
    config = ready.config.copy()
    with open_dict(config):
        for name in ("target_mu", "target_advantage", "target_tpr", "at_fpr"):
            config.privacy.pop(name)
    noise = ready.privacy.noise_multiplier
    assert noise_domain(config, ready.dataset, ready.shards, noise) == ready.domain
    other = setup(compose("config", [*words, "privacy.target_tpr=0.1"]))
    assert other.domain != ready.domain


@kills("fedgen/run/setup.py", "if given not in (None, config.rounds):", "if False:")
@kills("fedgen/run/setup.py", "    config.rounds = fixed or config.rounds\n", "")
@pytest.mark.parametrize(
    "words, rounds",
    [
        (["method=mixture_small"], 6),
        (["method=mixture_small", "rounds=null"], 6),
        (["method=mixture_small", "rounds=6"], 6),
        (["method=mixture_small", "rounds=100"], "mixture_small has 6 rounds with these settings"),
        (
            ["experiment=dp_merf_mnist", "method=mixture_small", "data=digits"],
            "mixture_small has .* rounds with these settings",
        ),
        (["method=central_images_small"], 5),
        (["method=dpgan_small"], 400),
        (["method=dpgan_small", "rounds=3"], 3),
    ],
)
def test_fixed_rounds_are_not_overridden(words: list[str], rounds: int | str) -> None:
    if isinstance(rounds, int):
        assert setup(compose("config", words)).config.rounds == rounds
        return
    with pytest.raises(
        FedgenError, match=f"rounds: cannot be .*: {rounds}.*; leave it out, or set"
    ):
        setup(compose("config", words))


@kills("fedgen/run/resume.py", 'original.rounds if "rounds" in derived else ', "")
@kills("fedgen/run/resume.py", 'was |= derived | {"rounds": original.rounds}', "was |= derived")
@pytest.mark.parametrize("method", ["dp_merf_small", "mixture_small"])
def test_a_run_without_given_rounds_is_recognized(method: str, train: Train) -> None:
    """Its directory has the number, that of the method or the default."""
    words = [f"method={method}", "rounds=null"]
    run = train(*words)
    settings = [word for word in tiny(method) if not word.startswith("rounds=")]
    check_same_settings(compose("config", [*settings, *words, f"run_dir={run}"]), run)
    rounds = json.loads((run / "results.json").read_text())["rounds"]
    check_same_settings(
        compose("config", [*settings, *words, f"rounds={rounds}", f"run_dir={run}"]), run
    )
    other = compose("config", [*settings, f"method={method}", "rounds=9", f"run_dir={run}"])
    with pytest.raises(FedgenError, match="has a different rounds"):
        check_same_settings(other, run)


@kills("fedgen/run/setup.py", "given_rounds is None and fixed is not None", "given_rounds is None")
def test_the_release_of_an_extended_run_has_all_rounds(train: Train, tmp_path: Path) -> None:
    run, released = train("method=dp_merf_small", "rounds=null"), tmp_path / "released"
    assert cli.run(["train", f"resume={run}", "rounds=402"]) == 0
    words = [f"run={run}", f"out={tmp_path / 'out.zip'}", f"run_dir={released}"]
    assert cli.run(["release", *words, "audit=false", "registry=false"]) == 0
    assert json.loads((released / "results.json").read_text())["rounds"] == 402
