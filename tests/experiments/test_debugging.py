"""``fedgen debug`` from end to end: the bug is found where it was planted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedgen import cli

SMALL = [
    "method=gs_wgan_small",
    "method.routing=per_sample",
    "method.batch=64",
    "method.critics_per_step=1000",
    "method.generator.width=8",
    "method.generator_learning_rate=1e-2",
    "method.ema=0.8",
    "privacy.adversary=release",
    "partition=iid",
    "partition.clients=60",
    "runtime=in_process",
    "runtime.threads=1",
    "evaluation=none",
    "rounds=30",
    "debug.apart=20",
    "debug.quantiles=true",
    "debug.suspect=0.4",
    "debug.normal=0.6",
    "debug.samples=1000",
]


def results(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def bugged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("debug") / "run"
    assert cli.run(["debug", *SMALL, "corruption.fraction=0.5", f"run_dir={place}"]) == 0
    return place


def test_a_planted_bug_is_found(bugged: Path) -> None:
    found = results(bugged)
    assert found["verdict"]["bug"] is True
    assert found["verdict"]["p_value"] < 0.01
    assert found["verdict"]["effect"] > 0.8
    groups = found["groups"]
    assert groups["suspect"]["bugged"] >= 0.9 * groups["suspect"]["clients"]
    assert groups["normal"]["bugged"] == 0
    assert 0 < found["epsilon"]["release"] <= 10
    assert found["epsilon"]["server"] > found["epsilon"]["release"]


def test_the_picture_shows_both_groups(bugged: Path) -> None:
    pixels = np.asarray(Image.open(bugged / "samples.png"))
    middle = pixels.shape[1] // 2
    assert pixels[:, : middle - 20].mean() > 128 > pixels[:, middle + 20 :].mean()


def test_groups_have_no_client_in_common(bugged: Path) -> None:
    suspect, normal = (
        {int(line) for line in (bugged / f"{name}.txt").read_text().split()}
        for name in ("suspect", "normal")
    )
    assert not suspect & normal
    assert len(suspect | normal) <= 40


def test_what_is_published_says_that_the_clients_were_picked(bugged: Path) -> None:
    assert "Who took part" in (bugged / "suspect" / "public" / "PRIVACY.md").read_text()


def test_called_again_it_goes_on(
    bugged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = results(bugged)
    (bugged / "results.json").unlink()
    words = [*SMALL, "corruption.fraction=0.5", f"run_dir={bugged}"]
    assert cli.run(["debug", *words]) == 0
    assert results(bugged) == before
    assert cli.run(["debug", *words, "rounds=31"]) == 2
    assert "rounds" in capsys.readouterr().err


def test_without_a_bug_there_is_none(tmp_path: Path) -> None:
    assert cli.run(["debug", *SMALL, f"run_dir={tmp_path}"]) == 0
    assert results(tmp_path)["verdict"]["bug"] is False


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("debug.apart=60", "debug.apart"),
        ("debug.suspect=1.5", "debug.suspect"),
        ("debug.suspect=0.7", "debug.suspect"),
        ("debug.quantiles=false", "debug."),
        ("method=dpgan_small", "method"),
        ("corruption.fraction=2", "corruption.fraction"),
        ("group=x.txt", "group"),
        ("resume=x", "resume"),
    ],
)
def test_mistakes_are_said(
    word: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [w for w in SMALL if not (word.startswith("method=") and w.startswith("method"))]
    place = tmp_path / "run"
    assert cli.run(["debug", *words, word, f"run_dir={place}"]) == 2
    assert key in capsys.readouterr().err
    assert not (place / "suspect").exists()


@pytest.mark.parametrize("text", ["", "1\n1\n", "0\n99\n", "one\n"])
def test_a_group_that_is_none_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group = tmp_path / "group.txt"
    group.write_text(text)
    words = ["partition=iid", "partition.clients=4", "runtime=in_process", f"group={group}"]
    assert cli.run(["account", *words]) == 2
    assert "group" in capsys.readouterr().err


@pytest.mark.slow
def test_the_small_recipe_on_real_writers(tmp_path: Path) -> None:
    if not (Path(os.environ.get("FEDGEN_DATA", "")) / "femnist.npz").exists():
        pytest.skip("there is no femnist.npz in FEDGEN_DATA")
    words = ["experiment=femnist_debug_small", "runtime=in_process", f"run_dir={tmp_path}"]
    assert cli.run(["debug", *words]) == 0
    verdict = results(tmp_path)["verdict"]
    assert verdict["bug"] is True and verdict["p_value"] < 0.01
