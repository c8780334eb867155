"""``fedgen debug`` with two groups of clients, from end to end."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import Command, until
from omegaconf import OmegaConf
from PIL import Image
from tiny import tiny

from fedgen import cli
from fedgen.commands.debug_groups import _reserved, part_config
from fedgen.config.compose import check_restored, compose
from fedgen.run.setup import setup
from fedgen.storage.io import TEMPORARY

SMALL = [
    "method=mixture_small",
    "method.shares={histogram:0.4,means:0.3,second_moments:0.1,clusters:0.15,covariances:0.05}",
    "privacy.unit=client",
    "privacy.aggregation=secure",
    "privacy.threshold=all",
    "partition=iid",
    "partition.clients=250",
    "runtime=in_process",
    "runtime.threads=1",
    "evaluation=none",
    "debug.reserved_clients=100",
    "debug.quantiles=true",
    "debug.suspect=0.4",
    "debug.normal=0.6",
    "debug.samples=200",
]


def results(place: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((place / "results.json").read_text())
    return result


@pytest.fixture(scope="module")
def bugged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("debug") / "run"
    assert cli.run(["debug", *SMALL, "corruption.fraction=0.5", f"run_dir={place}"]) == 0
    return place


def test_a_planted_bug_is_found(bugged: Path) -> None:
    result = results(bugged)
    assert result["verdict"]["bug"] is True
    assert result["verdict"]["p_value"] < 0.01
    assert result["verdict"]["effect"] > 0.3
    groups = result["groups"]
    assert groups["suspect"]["bugged"] >= 0.9 * groups["suspect"]["clients"]
    assert groups["normal"]["bugged"] == 0
    assert 0 < result["epsilon"]["server"] <= 10.001


def test_reserved_clients_can_be_named() -> None:
    config = compose("debug", [*SMALL, "debug.reserved_clients=[7,2]"])
    assert _reserved(config, 10).tolist() == [2, 7]


def test_the_picture_shows_both_groups(bugged: Path) -> None:
    pixels = np.asarray(Image.open(bugged / "samples.png"))
    middle = pixels.shape[1] // 2
    left, right = pixels[:, : middle - 20].mean(), pixels[:, middle + 20 :].mean()
    assert left > right + 5, "negatives on dark ground are brighter"


def test_groups_share_no_client(bugged: Path) -> None:
    parts = [OmegaConf.load(path).group for path in bugged.glob("*-*/config.yaml")]
    assert len(parts) == 10
    assert len({len(part) for part in parts}) == 1  # and all are under the same noise
    everyone = [client for part in parts for client in part]
    assert len(everyone) == len(set(everyone))


def test_two_generators_share_no_noise(bugged: Path) -> None:
    """Groups of the same size have the same noise multiplier, and different initial weights."""
    hashes = {
        json.loads((path / "results.json").read_text())["generator_sha256"]
        for path in bugged.glob("*-*")
    }
    assert len(hashes) == 10
    first, second = (
        setup(OmegaConf.load(bugged / name / "config.yaml")).streams.noise_bits(3, "x").tolist()
        for name in ("suspect-0", "normal-0")
    )
    assert first != second


def test_the_publication_states_that_clients_were_selected(bugged: Path) -> None:
    assert "a selected group" in (bugged / "suspect-0" / "public" / "PRIVACY.md").read_text()


def test_a_repeated_command_resumes(
    bugged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = results(bugged)
    (bugged / "results.json").unlink()
    words = [*SMALL, "corruption.fraction=0.5", f"run_dir={bugged}"]
    assert cli.run(["debug", *words]) == 0
    assert results(bugged) == before
    for other in (
        "privacy.target_epsilon=9",
        "method.clusters=1",
        "debug.suspect=0.3",
        "seed=1",
    ):
        assert cli.run(["debug", *words, other]) == 2
        assert "run_dir" in capsys.readouterr().err
    assert results(bugged) == before


@pytest.mark.slow
@pytest.mark.parametrize("sign", ["results.json", "clients/0/ledger.jsonl"])
def test_an_interrupted_experiment_prints_how_to_resume(sign: str, tmp_path: Path) -> None:
    """Between two generators, or in the only round of one; no other generator is started."""
    place = tmp_path / "run"
    process = Command(["debug", *SMALL, "jobs=1", f"run_dir={place}"])
    until(process, place / "suspect-0" / sign)
    begun = len(list(place.glob("*-*/config.yaml")))
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130
    result = process.errors.partition("continue with: fedgen ")[2]
    assert shlex.split(result) == ["debug", *SMALL, "jobs=1", f"run_dir={place}"]
    assert len(list(place.glob("*-*/config.yaml"))) <= begun + 1


def test_a_foreign_folder_is_left_unchanged(
    bugged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    for place in (bugged / "suspect-0", file):
        assert cli.run(["debug", *SMALL, f"run_dir={place}"]) == 2
        assert "contains other files" in capsys.readouterr().err


def test_a_run_does_not_resume_with_other_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["partition=iid", "partition.clients=6", "runtime=in_process", "rounds=2"]
    settings = [*tiny("gs_wgan_small"), *words, "group=[0,1,2]", f"run_dir={run}"]
    assert cli.run(["train", *settings]) == 0
    assert json.loads((run / "privacy.json").read_text())["clients"].keys() == {"0", "1", "2"}
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("- 2\n", "- 5\n"))
    assert cli.run(["train", f"resume={run}"]) == 2
    assert "resume" in capsys.readouterr().err


@pytest.mark.slow
def test_no_bug_is_reported_without_one(tmp_path: Path) -> None:
    (tmp_path / f"{TEMPORARY}1.json").touch()  # one before it was killed as it began
    assert cli.run(["debug", *SMALL, f"run_dir={tmp_path}"]) == 0
    assert results(tmp_path)["verdict"]["bug"] is False


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("debug.reserved_clients=250", "debug.reserved_clients"),
        ("debug.reserved_clients=240", "debug.reserved_clients"),
        ("debug.reserved_clients=[3,3]", "debug.reserved_clients"),
        ("debug.reserved_clients=[250]", "debug.reserved_clients"),
        ("debug.samples=20000000", "debug.samples"),
        ("debug.generators=4", "debug.generators"),
        ("privacy.noise=secure", "privacy.noise"),
        ("debug.suspect=1.5", "debug.suspect"),
        ("debug.suspect=0.7", "debug.suspect"),
        ("debug.quantiles=false", "debug."),
        ("method=dpgan_small", "method"),
        ("corruption.fraction=2", "corruption.fraction"),
        ("group=[1,2]", "group"),
        ("resume=x", "resume"),
    ],
)
def test_invalid_settings_are_refused(
    word: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_method = ("method", "privacy") if word.startswith("method=") else ("no such",)
    words = [w for w in SMALL if not w.startswith(of_method)]
    place = tmp_path / "run"
    assert cli.run(["debug", *words, word, f"run_dir={place}"]) == 2
    assert key in capsys.readouterr().err
    assert not place.exists()


@pytest.mark.parametrize("group", ["[]", "[1,1]", "[0,99]", "[-1]", "x.txt", "[a]"])
def test_an_unknown_group_is_refused(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["partition=iid", "partition.clients=4", "runtime=in_process", f"group={group}"]
    assert cli.run(["account", *words]) == 2
    assert "group" in capsys.readouterr().err


@pytest.mark.parametrize("experiment", ["femnist_debug_small", "femnist_debug_sums"])
def test_generators_of_an_experiment_can_be_loaded(experiment: str, tmp_path: Path) -> None:
    config = compose("debug", [f"experiment={experiment}"])
    check_restored(part_config(config, np.arange(3), tmp_path))


def test_train_refuses_settings_of_debug(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["experiment=femnist_debug_small", f"run_dir={tmp_path / 'run'}"]
    assert cli.run(["train", *words]) == 2
    assert "fedgen debug" in capsys.readouterr().err


@pytest.mark.slow
def test_a_recipe_on_real_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the digits of a tenth of the recipe's writers, at a larger ε, with a classifier trained
    for a third of the time."""
    monkeypatch.setattr("fedgen.evaluation.judge._EPOCHS", 5)
    if not (Path(os.environ.get("FEDGEN_DATA", "")) / "femnist.npz").exists():
        pytest.skip("there is no femnist.npz in FEDGEN_DATA")
    fewer = ["partition.clients=130", "debug.reserved_clients=30", "privacy.target_epsilon=8"]
    fewer += ["data.classes=10"]
    words = ["experiment=femnist_debug_sums", *fewer, f"run_dir={tmp_path}"]
    assert cli.run(["debug", *words, "runtime=in_process"]) == 0
    verdict = results(tmp_path)["verdict"]
    assert verdict["bug"] is True and verdict["p_value"] < 0.01
