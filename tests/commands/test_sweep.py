"""Sweeps: axes from a file, resumption, and the table."""

from __future__ import annotations

import csv
import importlib
import itertools
import json
import shlex
import signal
from pathlib import Path

import numpy as np
import pytest
from forked import Command, until
from omegaconf import DictConfig
from tiny import rounds_override, tiny

import configs
from fedgen import cli
from fedgen.commands import sweep
from fedgen.config.build import build
from fedgen.config.compose import compose
from fedgen.config.overrides import combinations
from fedgen.methods.api import PublicFacts
from fedgen.storage.run_dir import RunDir

SWEEPS = sorted(p.stem for p in (Path(configs.__path__[0]) / "sweep").glob("*.yaml"))


def chosen(name: str) -> str:
    """Return the method or the recipe of a sweep's first run."""
    words = combinations([f"sweep={name}"])[0]
    return next(word for word in words if word.startswith(("method=", "experiment=")))


ONE_OF_EACH = list({chosen(name): name for name in SWEEPS}.values())
"""One of the sweeps whose runs are of one method."""


@pytest.mark.parametrize("name", SWEEPS)
def test_every_sweep_composes(name: str) -> None:
    points = combinations([f"sweep={name}", "rounds=2"])
    assert len(points) == len({tuple(point) for point in points}) > 1
    for point in (points[0], points[-1]):
        config = compose("config", point)
        assert config.rounds == 2
        facts = PublicFacts(config.partition.get("clients") or 1, None, 10, (1, 28, 28))
        make = build(config.method, "method")
        assert make(facts=facts, noise_multiplier=1.0, device="cpu").plan.samples_per_round > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_first_run_of_every_sweep_runs_two_rounds(
    name: str, tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDGEN_DATA", str(data_root))
    words = combinations([f"sweep={name}"])[0]
    words = ["data=mnist" if word == "data=fashion_mnist" else word for word in words]
    # of another sweep; more than there are rows here
    words = [word for word in words if not word.startswith(("start=", "method.critics="))]
    method = compose("config", words).names.method
    given = {word.split("=")[0] for word in words} - {"rounds", "evaluate_every"}
    small = [word for word in tiny(method) if word.split("=")[0] not in given]
    place = tmp_path / "run"
    last = [*rounds_override(method, 2), "evaluate_every=0", "held_out=0", f"run_dir={place}"]
    if "privacy=none" not in words:
        last += ["privacy.target_epsilon=null", "privacy.noise_multiplier=1.0"]
    assert cli.run(["train", *words, *small, *last]) == 0
    rounds = json.loads((place / "results.json").read_text())["rounds"]
    assert rounds == 2 or not rounds_override(method, 2)


@pytest.mark.slow
def test_a_sweep_resumes_and_compares_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "sweep"
    small = [w for w in tiny("dp_wgan_gp_small") if not w.startswith(("evaluation", "rounds"))]
    judge = ["evaluation.samples=260", "evaluation.classifiers.cnn.epochs=1"]
    command = ["train", "-m", "sweep=dp_wgan_gp_digits_clips", *small, *judge]
    command += ["rounds=2", "evaluate_every=2", f"run_dir={place}"]
    assert cli.run(command) == 0
    before = (place / "1" / "results.json").stat().st_mtime_ns
    (place / "0" / "results.json").unlink()
    capsys.readouterr()
    assert cli.run(command) == 0
    output = capsys.readouterr().out
    assert "1: clip=0.1\n" in output and f"{place}/sweep.csv" in output
    assert (place / "1" / "results.json").stat().st_mtime_ns == before
    with (place / "sweep.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["method.clip"] for line in lines] == ["0.01", "0.1", "1.0", "100.0"]
    assert all(float(line["epsilon.server"]) > 0 for line in lines)
    assert all(0 <= float(line["gen2real.cnn"]) <= 1 for line in lines)
    assert (place / "sweep.png").stat().st_size > 0
    assert cli.run([*command, "seed=7"]) == 2
    assert f"run_dir: {place}/0 has a different seed" in capsys.readouterr().err


def test_an_interrupted_sweep_prints_how_to_resume(tmp_path: Path) -> None:
    place = tmp_path / "sweep"
    command = ["train", "-m", *tiny("dp_merf_small"), "method=dp_merf_small", "seed=0,1", "jobs=1"]
    process = Command([*command, "rounds=100000", "runtime.threads=1", f"run_dir={place}"])
    until(process, place / "0" / "metrics.jsonl")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130
    again = shlex.split(process.errors.partition("continue with: ")[2])
    assert again == ["fedgen", *command, "rounds=100000", "runtime.threads=1", f"run_dir={place}"]
    assert not (place / "1").exists()


def test_rows_of_the_table_are_labelled_by_differing_settings() -> None:
    def configs(*words: str) -> list[DictConfig]:
        return [compose("config", batch) for batch in combinations(list(words))]

    result = sweep.varied_settings(configs("method=dp_merf_small,mixture_small", "seed=0,1"))
    assert sweep.labels(result)[1:3] == [
        "seed=1 method=dp_merf_small",
        "seed=0 method=mixture_small",
    ]
    assert sweep.labels(sweep.varied_settings(configs("method=dp_merf_small"))) == ["run 0"]


@pytest.mark.parametrize(
    ("words", "setting", "others"),
    [
        (["method=dp_merf_small,mixture_small", "privacy.target_epsilon=1,5"],
         "privacy.target_epsilon", {"method=dp_merf_small", "method=mixture_small"}),
        (["privacy.target_epsilon=1,5", "method.features=10,20"],
         "privacy.target_epsilon", {"features=10", "features=20"}),
        (["method.features=10,20"], "method.features", {""}),
        (["seed=0,1"], None, set()),
        (["method.features=10,20", "rounds=10,20"], None, set()),
    ],
)  # fmt: skip
def test_a_sweep_over_a_number_averages_seeds(
    words: list[str], setting: str | None, others: set[str]
) -> None:
    """For each classifier and each combination of the other settings: mean and standard deviation
    over seeds, at each value."""
    split = [word.split("=") for word in [*words, "seed=3,4,5"][:3]]
    grid = [[f"{key}={value}" for value in values.split(",")] for key, values in split]
    configs = [
        compose("config", ["method=dp_merf_small", *point]) for point in itertools.product(*grid)
    ]
    settings = sweep.varied_settings(configs)
    assert sweep.swept_setting(settings) == setting
    if setting is None:
        return
    accuracies = [{"cnn": number / 100, "knn": 0.5} for number in range(len(configs))]
    panels = sweep.accuracy_by_setting(settings, accuracies, setting)
    assert set(panels) == {"cnn", "knn"} and set(panels["cnn"]) == others
    values = sorted({float(of_run[setting]) for of_run in settings})
    for lines in panels["cnn"].values():
        assert [point[0][0] for point in lines] == values
    assert all(spread == 0 for lines in panels["knn"].values() for [(_, _, spread)] in lines)
    seeds = len({config.seed for config in configs})
    [first, *_] = panels["cnn"].values()
    assert first[0][0][2] == pytest.approx(np.std(np.arange(seeds) / 100))


@pytest.mark.slow
def test_runs_with_different_evaluations_share_one_table(tmp_path: Path) -> None:
    """Settings and figures that the first run lacks are columns as well."""
    small = [w for w in tiny("dp_merf_small") if not w.startswith("evaluation")]
    command = ["train", "-m", *small, "method=dp_merf_small", "evaluation=none,quick", "rounds=2"]
    command += [f"run_dir={tmp_path}/sweep"]
    assert cli.run(command) == 0
    lines = list(csv.DictReader((tmp_path / "sweep" / "sweep.csv").open()))
    assert [bool(line["gen2real.cnn"]) for line in lines] == [False, True]
    at_its_end = RunDir(tmp_path / "sweep" / "1").accuracies("run")
    assert at_its_end == [(2.0, float(lines[1]["gen2real.cnn"]))]
    assert [line["evaluation.classifiers.cnn.epochs"] for line in lines] == ["", "10"]


def test_gradient_norms_of_critics_and_discriminators(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By scripts/gradient_norms.py."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    observed = importlib.import_module("gradient_norms").observed
    for method in ("gs_wgan_small", "dpgan_small"):
        words = [f"method={method}", *tiny(method), "rounds=12", f"run_dir={tmp_path / method}"]
        _, norms, clip = observed(words)
        assert len(norms) >= 12 and clip == 1


def test_an_unknown_sweep_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "-m", "sweep=dpgan_figure_11"]) == 2
    assert "did you mean dpgan_figure_1" in capsys.readouterr().err
