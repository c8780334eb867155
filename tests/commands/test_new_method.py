"""A user's method outside of the package: created, trained, attacked, and named as external."""

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
    """Create a folder with the package ``blur``."""
    assert cli.run(["new", "method", "name=blur", f"out={tmp_path}"]) == 0
    return tmp_path


@pytest.fixture
def networks(tmp_path: Path) -> Path:
    """Create a folder with the package ``vae``, whose networks train on noised gradients."""
    assert cli.run(["new", "method", "name=vae", "kind=dp_sgd", f"out={tmp_path}"]) == 0
    return tmp_path


def fedgen(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FEDGEN_EXTENSIONS": "blur"}
    return subprocess.run(
        [*FEDGEN, *words], cwd=place, env=environment, capture_output=True, text=True, check=False
    )


def test_the_help_lists_own_methods(own: Path) -> None:
    """Next to fedgen's own, without another edit."""
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
    """Create a package with a data set and a partition, and return the words that select them."""
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


def test_own_data_partitions_and_classifiers(own: Path) -> None:
    words = parts(own, "blur", PARTS)
    nearest = "+evaluation.classifiers.nearest={type:blur.parts.nearest}"
    done = fedgen(own, "train", *words, nearest, "rounds=30", "run_dir=run")
    assert done.returncode == 0, done.stderr
    assert "2 clients" in done.stdout and "gen2real nearest: " in done.stdout


@pytest.mark.parametrize(
    ("package", "result", "other", "message"),
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
def test_extensions_that_would_invalidate_epsilon_are_refused(
    package: str, result: str, other: str, message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("FEDGEN_EXTENSIONS", f"own_{package}")
    monkeypatch.syspath_prepend(tmp_path)
    words = parts(tmp_path, f"own_{package}", PARTS.replace(result, other))
    assert cli.run(["train", *words, f"run_dir={tmp_path}/run"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_changed_records_cannot_resume_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDGEN_EXTENSIONS", "own_rows")
    monkeypatch.syspath_prepend(tmp_path)
    words = [*parts(tmp_path, "own_rows", PARTS), "rounds=2", "evaluation=none"]
    words.remove("evaluation.samples=200")
    assert cli.run(["train", *words, f"run_dir={tmp_path}/run"]) == 0
    module = importlib.import_module("own_rows.parts")
    whole = module.halves

    def fewer(**settings: Any) -> list[Any]:
        return [rows[1:] for rows in whole(**settings)]

    fewer.__module__ = module.__name__
    monkeypatch.setattr(module, "halves", fewer)
    assert cli.run(["train", *words, f"run_dir={tmp_path}/less"]) == 0
    runs = [json.loads((tmp_path / run / "run.json").read_text()) for run in ("run", "less")]
    assert runs[0]["branch"] != runs[1]["branch"]
    assert cli.run(["train", f"resume={tmp_path}/run"]) == 2
    assert "used a different partition of the data" in capsys.readouterr().err


def test_an_error_in_an_extension_is_printed(own: Path) -> None:
    """Also outside of the client's own error file."""
    file = own / "blur" / "blur.py"
    text = file.read_text()
    [line] = [each for each in text.splitlines() if "return sum_of_rows(" in each]
    file.write_text(text.replace(line, f"{line.partition('return')[0]}raise KeyError('nowhere')"))
    done = fedgen(own, "train", "method=blur", "evaluation=none", "run_dir=run")
    assert done.returncode == 2
    number = text.splitlines().index(line) + 1
    place = f"blur.py, line {number}, in contribution"
    assert f"{place}: KeyError: 'nowhere' (see run/clients/0/errors.jsonl); fix it" in done.stderr
    assert "min_success=" not in done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("def (", "SyntaxError: invalid syntax (blur.py, line 1)"),
        ("import torchh", "ModuleNotFoundError: No module named 'torchh' ("),
    ],
)
def test_an_import_error_of_an_extension_is_one_line(line: str, message: str, own: Path) -> None:
    (own / "blur" / "blur.py").write_text(f"{line}\n")
    done = fedgen(own, "train", "method=blur", "run_dir=run")
    assert done.returncode == 2
    assert done.stderr.startswith("fedgen: method.type: blur.blur.blur cannot be imported: ")
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_generated_tests_pass(own: Path) -> None:
    environment = {**os.environ, "FEDGEN_EXTENSIONS": "blur"}
    command = [sys.executable, "-m", "pytest", "-q", "-k", "not 10.0", str(own)]
    done = subprocess.run(command, cwd=own, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode()


@pytest.mark.slow
def test_a_network_learns_the_digits_and_passes_all_checks(
    networks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with several clients under secure sums."""
    monkeypatch.chdir(networks)
    monkeypatch.setenv("FEDGEN_EXTENSIONS", "vae")
    shared = ["partition=iid", "partition.clients=3", "privacy.aggregation=secure"]
    words = ["method=vae", *shared, "runtime=in_process", "evaluation=none", "logger=none"]
    train = Command(["train", *words, "run_dir=shared"])
    assert train.wait() == 0, train.errors
    judged = Command(["evaluate", "run=shared", "evaluation.classifiers.cnn.epochs=1"])
    assert judged.wait() == 0, judged.errors
    record = json.loads((networks / "shared" / "results.json").read_text())
    assert record["gen2real"]["logistic_regression"]["mean"] > 0.7, "0.88 of one client"
    assert "its paper" not in train.output
    check = Command(["check", "method=vae", "rounds=4", "audit.releases=400"])
    assert check.wait() == 0, check.output + check.errors


@pytest.mark.slow
def test_an_extension_runs_on_ray_and_is_named_as_external(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own)
    monkeypatch.setenv("FEDGEN_EXTENSIONS", "blur")
    words = ["method=blur", "partition=iid", "partition.clients=2", "privacy.aggregation=secure"]
    train = Command(["train", *words, "runtime=ray", "evaluation=none", "run_dir=run"])
    assert train.wait() == 0, train.errors
    result = (own / "run" / "public" / "PRIVACY.md").read_text()
    assert "With code from outside fedgen** (blur.blur.blur)" in result
    sample = Command(["sample", "run=run/public", "n=5", "out=samples.npz"])
    assert sample.wait() == 0, sample.errors
    # a file that the environment does not declare
    monkeypatch.delenv("FEDGEN_EXTENSIONS")
    sample = Command(["sample", "run=run/public", "n=5", "out=again.npz"])
    assert sample.wait() == 2
    assert "declare its package" in sample.errors


def test_edited_settings_of_an_extension_are_read_again(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process caches the composed settings of an extension until a file changes."""
    monkeypatch.syspath_prepend(own)
    monkeypatch.setenv("FEDGEN_EXTENSIONS", "blur")
    before = compose("config", ["method=blur"]).method.pixel_std
    [file] = (own / "blur").rglob("blur.yaml")
    file.write_text(file.read_text().replace(f"pixel_std: {before}", "pixel_std: 0.125"))
    os.utime(file, (time.time() + 5,) * 2)
    assert compose("config", ["method=blur"]).method.pixel_std == 0.125 != before


def test_invalid_settings_are_one_line(own: Path) -> None:
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
def test_an_invalid_name_is_one_line(
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


def test_a_missing_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDGEN_EXTENSIONS", "nowhere")
    assert cli.run(["train", "--cfg"]) == 2
    assert "there is no package 'nowhere'" in capsys.readouterr().err
