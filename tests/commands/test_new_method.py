"""A method of one's own, outside of the package: written, run, attacked, and said to be one."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked import Command

from fedgen import cli
from fedgen.config.compose import compose

FEDGEN = [sys.executable, "-m", "fedgen.cli"]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a package ``blur`` in it."""
    assert cli.run(["new", "method", "name=blur", f"out={tmp_path}"]) == 0
    return tmp_path


@pytest.fixture
def networks(tmp_path: Path) -> Path:
    """A folder with a package ``vae`` in it, whose networks learn by noised gradients."""
    assert cli.run(["new", "method", "name=vae", "kind=dp_sgd", f"out={tmp_path}"]) == 0
    return tmp_path


def fedgen(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FEDGEN_EXTENSIONS": "blur"}
    return subprocess.run(
        [*FEDGEN, *words], cwd=place, env=environment, capture_output=True, text=True, check=False
    )


def test_the_help_lists_it(own: Path) -> None:
    """Beside fedgen's own, without another edit."""
    methods = fedgen(own, "--help").stdout.partition("\n  method=")[2].partition("[")[0]
    assert {"blur", "mixture"} <= set(methods.replace("\n", "").replace(" ", "").split("|"))


PARTS = """
import numpy as np
from fedgen.data.datasets import Dataset, ExampleKeys

def stripes(streams, **_):
    rows = np.zeros((90, 1, 8, 8), np.uint8)
    labels = np.arange(90) % 2
    rows[labels == 1, :, ::2] = 255
    return Dataset("stripes", rows[:60], labels[:60], rows[60:], labels[60:], None, 2,
                   ExampleKeys("a row", "its number"))

def halves(labels, clients, **_):
    rows = np.arange(len(labels))
    return [rows[: len(rows) // 2], rows[len(rows) // 2 :]]

def nearest(images, labels, classes, seed):
    rows = images.reshape(len(images), -1)
    centres = np.stack([rows[labels == label].mean(0) for label in range(classes)])
    return lambda each: ((each.reshape(len(each), 1, -1) - centres) ** 2).sum(-1).argmin(1)
"""


def parts(place: Path, package: str, text: str) -> list[str]:
    """Data and a partition of one's own in a package, and the words that choose them."""
    for group, name, settings in (
        ("data", "stripes", "root: null\npublic_rows: 60"),
        ("partition", "halves", "clients: 2"),
    ):
        folder = place / package / "configs" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text(f"type: {package}.parts.{name}\n{settings}\n")
    (place / package / "__init__.py").touch()
    (place / package / "parts.py").write_text(text)
    words = ["data=stripes", "partition=halves", "privacy.target_epsilon=50"]
    return ["method=dp_merf_small", *words, "runtime=in_process", "evaluation.samples=200"]


def test_data_clients_and_classifiers_of_ones_own(own: Path) -> None:
    words = parts(own, "blur", PARTS)
    nearest = "+evaluation.classifiers.nearest={type:blur.parts.nearest}"
    done = fedgen(own, "train", *words, nearest, "rounds=30", "run_dir=run")
    assert done.returncode == 0, done.stderr
    assert "2 clients" in done.stdout and "gen2real nearest: " in done.stdout


@pytest.mark.parametrize(
    ("package", "found", "other", "said"),
    [
        ("twice", "rows[: len(rows) // 2]", "rows[: len(rows) // 2 + 1]", "assigns a record twice"),
        ("no_list", "return [rows", "return rows\n    [rows", "return a list of arrays"),
        (
            "floats",
            "np.uint8",
            "np.float32",
            "images of float32; convert them to uint8, from 0 to 255",
        ),
        ("labels", "np.arange(90) % 2", "np.arange(90) % 3", "labels from 0 to 2, outside 0..1"),
    ],
)
def test_what_would_spoil_an_epsilon_or_be_something_else_is_refused(
    package: str, found: str, other: str, said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("FEDGEN_EXTENSIONS", f"own_{package}")
    monkeypatch.syspath_prepend(tmp_path)
    words = parts(tmp_path, f"own_{package}", PARTS.replace(found, other))
    assert cli.run(["train", *words, f"run_dir={tmp_path}/run"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_other_rows_are_another_run_and_no_way_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDGEN_EXTENSIONS", "own_rows")
    monkeypatch.syspath_prepend(tmp_path)
    words = [*parts(tmp_path, "own_rows", PARTS), "rounds=2", "evaluation=none"]
    words.remove("evaluation.samples=200")
    assert cli.run(["train", *words, f"run_dir={tmp_path}/run"]) == 0
    module = importlib.import_module("own_rows.parts")
    whole = module.halves

    def fewer(**told: Any) -> list[Any]:
        return [rows[1:] for rows in whole(**told)]

    fewer.__module__ = module.__name__
    monkeypatch.setattr(module, "halves", fewer)
    assert cli.run(["train", *words, f"run_dir={tmp_path}/less"]) == 0
    runs = [json.loads((tmp_path / run / "run.json").read_text()) for run in ("run", "less")]
    assert runs[0]["branch"] != runs[1]["branch"]
    assert cli.run(["train", f"resume={tmp_path}/run"]) == 2
    assert "used a different partition of the data" in capsys.readouterr().err


def test_a_mistake_in_it_is_told(own: Path) -> None:
    """And not only in the client's own file."""
    file = own / "blur" / "blur.py"
    text = file.read_text()
    [line] = [each for each in text.splitlines() if "return sum_of_rows(" in each]
    file.write_text(text.replace(line, f"{line.partition('return')[0]}raise KeyError('nowhere')"))
    done = fedgen(own, "train", "method=blur", "rounds=2", "evaluation=none", "run_dir=run")
    assert done.returncode == 2
    number = text.splitlines().index(line) + 1
    place = f"blur.py, line {number}, in contribution"
    assert f"{place}: KeyError: 'nowhere' (see run/clients/0/errors.jsonl); fix it" in done.stderr
    assert "min_success=" not in done.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("def (", "SyntaxError: invalid syntax (blur.py, line 1)"),
        ("import torchh", "ModuleNotFoundError: No module named 'torchh' ("),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_in_one_line(
    line: str, said: str, own: Path
) -> None:
    (own / "blur" / "blur.py").write_text(f"{line}\n")
    done = fedgen(own, "train", "method=blur", "rounds=2", "run_dir=run")
    assert done.returncode == 2
    assert done.stderr.startswith("fedgen: method.type: blur.blur.blur cannot be imported: ")
    assert said in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_its_own_tests_pass(own: Path) -> None:
    environment = {**os.environ, "FEDGEN_EXTENSIONS": "blur"}
    command = [sys.executable, "-m", "pytest", "-q", "-k", "not 10.0", str(own)]
    done = subprocess.run(command, cwd=own, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode()


@pytest.mark.slow
def test_a_network_learns_the_digits_and_keeps_what_it_promises(
    networks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from several clients, under secure sums."""
    monkeypatch.chdir(networks)
    monkeypatch.setenv("FEDGEN_EXTENSIONS", "vae")
    shared = ["partition=iid", "partition.clients=3", "privacy.aggregation=secure"]
    words = ["method=vae", *shared, "runtime=in_process", "evaluation=none", "logger=none"]
    train = Command(["train", *words, "run_dir=shared"])
    assert train.wait() == 0, train.errors
    judged = Command(["evaluate", "run=shared"])
    assert judged.wait() == 0, judged.errors
    found = json.loads((networks / "shared" / "results.json").read_text())
    assert found["gen2real"]["logistic_regression"]["mean"] > 0.7, "0.88 of one client"
    assert "its paper" not in train.output
    check = Command(["check", "method=vae", "rounds=4"])
    assert check.wait() == 0, check.output + check.errors


@pytest.mark.slow
def test_it_runs_on_ray_and_says_that_it_is_from_outside(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own)
    monkeypatch.setenv("FEDGEN_EXTENSIONS", "blur")
    words = ["method=blur", "partition=iid", "partition.clients=2", "privacy.aggregation=secure"]
    train = Command(["train", *words, "runtime=ray", "evaluation=none", "run_dir=run"])
    assert train.wait() == 0, train.errors
    said = (own / "run" / "public" / "PRIVACY.md").read_text()
    assert "With code from outside fedgen** (blur.blur.blur)" in said
    sample = Command(["sample", "run=run/public", "n=5", "out=samples.npz"])
    assert sample.wait() == 0, sample.errors
    # without the environment's word it is somebody's file
    monkeypatch.delenv("FEDGEN_EXTENSIONS")
    sample = Command(["sample", "run=run/public", "n=5", "out=again.npz"])
    assert sample.wait() == 2
    assert "declare its package" in sample.errors


def test_settings_that_are_edited_in_a_notebook_are_read_again(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process composes those of an extension once, until somebody edits them."""
    monkeypatch.syspath_prepend(own)
    monkeypatch.setenv("FEDGEN_EXTENSIONS", "blur")
    before = compose("config", ["method=blur"]).method.pixel_std
    [file] = (own / "blur").rglob("blur.yaml")
    file.write_text(file.read_text().replace(f"pixel_std: {before}", "pixel_std: 0.125"))
    os.utime(file, (time.time() + 5,) * 2)
    assert compose("config", ["method=blur"]).method.pixel_std == 0.125 != before


def test_mistakes_are_said_in_a_line(own: Path) -> None:
    for words, why in (
        (["train", "method=blur", "method.sprad=1"], "sprad"),
        (["train", "method=blurr"], "did you mean blur?"),
        (["train", "method=blur", "method.pixel_std=x"], "method.pixel_std: must be a number"),
    ):
        done = fedgen(own, *words)
        assert done.returncode == 2
        [line] = done.stderr.splitlines()
        assert why in line


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["new"], "write fedgen new method NAME"),
        (["new", "method"], "name"),
        (["new", "method", "name=dpgan"], "'dpgan' is taken"),
        (["new", "method", "name=fedgen"], "'fedgen' is taken"),
        (["new", "method", "name=My-Method"], "not a valid name for a Python package"),
        (["new", "method", "name=class"], "not a valid name for a Python package"),
        (["new", "method", "name=blur"], "exists"),
    ],
)
def test_a_name_that_cannot_be_is_one_line(
    own: Path,
    words: list[str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(own)
    capsys.readouterr()
    assert cli.run(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert why in line


def test_a_package_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDGEN_EXTENSIONS", "nowhere")
    assert cli.run(["train", "--cfg"]) == 2
    assert "there is no package 'nowhere'" in capsys.readouterr().err
