"""A run that starts with the weights of another, and evaluation of a discriminator on held-out
images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mutation import kills
from tiny import PROGRAMS, Train, fingerprint, rounds_override, tiny

from fedgen import cli
from fedgen.federation import checkpoint

NO_TARGET = ["privacy.target_epsilon=null", "privacy.noise_multiplier=1"]


def server(run: Path) -> dict[str, torch.Tensor]:
    result = checkpoint.load(run / "checkpoints")
    assert result is not None
    return dict(result[0].server)


@kills(
    "fedgen/run/setup.py",
    ("    if config.start is None:\n        return method"),
    ("    if True:\n        return method"),
)
def test_a_run_from_weights_without_privacy_has_no_epsilon(train: Train) -> None:
    first = train("method=dpgan_small", "privacy=none", "rounds=4", name="first")
    begun = ["method=dpgan_small", *NO_TARGET, f"start={first}", "rounds=2"]
    second = train(*begun, name="second")
    steps = [float(server(run)["discriminator/adam/step"]) for run in (first, second)]
    assert steps == [4, 6]
    assert [float(server(run)["adam/step"]) for run in (first, second)] == [2, 3]
    privacy = json.loads((second / "privacy.json").read_text())
    for view in privacy["views"].values():
        assert view["epsilon"] is None
        assert "the weights of another run" in view["reason"]
    assert privacy["claimed"] is None
    assert "no bound" in (second / "public" / "PRIVACY.md").read_text()
    assert fingerprint(train(*begun, name="again")) == fingerprint(second)


WITHOUT_A_GENERATOR = ["central_images_small", "client_statistics", "mixture_small", "psg_small"]


def test_also_from_a_warm_start(train: Train) -> None:
    warm = ["warm_up=central_images", "warm_up.method.images=1", "warm_up.rounds=1", "rounds=4"]
    first = train("method=dpgan_small", "privacy=none", *warm, name="first")
    train("method=dpgan_small", *NO_TARGET, f"start={first}", "rounds=2", name="second")
    steps = [
        float(server(first)["then/adam/step"]),
        float(server(first.parent / "second")["adam/step"]),
    ]
    assert steps[1] == steps[0] + 1


@pytest.mark.parametrize("method", WITHOUT_A_GENERATOR)
def test_methods_that_cannot_use_the_weights_are_refused(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    first = train(f"method={method}", "privacy=none", *rounds_override(method, 2), name="first")
    words = [
        f"method={method}",
        *tiny(method),
        *NO_TARGET,
        f"start={first}",
        *rounds_override(method, 2),
    ]
    capsys.readouterr()
    assert cli.run(["train", *words, f"run_dir={tmp_path / 'second'}"]) == 2
    assert "fedgen: start: the method has no generator that learns" in capsys.readouterr().err
    assert not (tmp_path / "second").exists()


@kills(
    "fedgen/run/privacy_record.py",
    ("            if self.method.plan.prior_event is not None:\n                spends"),
    ("            if False:\n                spends"),
    case="dp_merf_small",
)
@pytest.mark.parametrize("method", [each for each in PROGRAMS if each not in WITHOUT_A_GENERATOR])
def test_no_method_has_an_epsilon_after_weights_without_one(train: Train, method: str) -> None:
    """Even without queries: its initial weights have no bound."""
    first = train(f"method={method}", "privacy=none", "rounds=2", name="first")
    run = train(f"method={method}", *NO_TARGET, f"start={first}", "rounds=2", name="second")
    privacy = json.loads((run / "privacy.json").read_text())
    assert [view["epsilon"] for view in privacy["views"].values()] == [None, None]
    assert privacy["clients"]["0"]["server"] is None
    assert "no bound" in (run / "public" / "PRIVACY.md").read_text()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["epsilon"]["server"] is None for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["start=nowhere", *NO_TARGET], "no checkpoint"),
        (["start=nowhere"], "privacy.target_epsilon=null"),
        (["start=nowhere", *NO_TARGET, "privacy.noise=secure"], "requires"),
    ],
)
def test_invalid_settings_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["train", *tiny("dpgan_small"), "method=dpgan_small", *words]) == 2
    line = capsys.readouterr().err
    assert line.startswith("fedgen: start: ")
    assert message in line


def test_weights_of_other_networks_are_refused(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train("method=dpgan_small", "privacy=none", "rounds=2", name="first")
    words = [*tiny("dpgan_small"), "method=dpgan_small", *NO_TARGET, f"start={first}"]
    place = tmp_path / "other"
    assert cli.run(["train", *words, "method.latent=5", f"run_dir={place}"]) == 2
    assert "other networks" in capsys.readouterr().err
    assert not place.exists()


def test_evaluating_on_held_out_images_changes_nothing(train: Train) -> None:
    """A discriminator without privacy distinguishes its training images from held-out ones."""
    words = ["method=dpgan_small", "privacy=none", "rounds=60", "held_out=300"]
    words += ["method.discriminator_steps=30", "method.discriminator.width=8"]
    words += ["method.discriminator_learning_rate=0.01"]
    often = train(*words, "log_every=1", name="often")
    lines = [json.loads(line) for line in (often / "metrics.jsonl").read_text().splitlines()]
    shares = [line["accuracy_on_held_out"] for line in lines]
    assert shares[-1] > 0.8
    seldom = train(*words, "log_every=100", name="seldom")
    assert fingerprint(often)["generator"] == fingerprint(seldom)["generator"]
