"""A matrix of runs ends with the same table, however often it is interrupted."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from tiny import rounds_override, tiny

import configs
from fedgen import cli
from fedgen.commands.matrix import expand, read_matrix
from fedgen.config.validation import check
from fedgen.storage.run_dir import RunDir

MATRICES = sorted(p.stem for p in (Path(configs.__path__[0]) / "matrix").glob("*.yaml"))
MATRIX: dict[str, Any] = {
    "data": ["digits"],
    "epsilons": [10],
    "seeds": [0, 1],
    "settings": [
        "runtime.threads=1",
        "rounds=4",
        "runtime.checkpoint_every=1",
        "evaluate_every=2",
        "log_every=2",
        "evaluation.samples=100",
        "evaluation.classifiers.cnn.epochs=1",
    ],
    "methods": {
        "DP-MERF": {
            "settings": ["method=dp_merf_small"],
            "on_digits": ["method.ema=0.5"],
            "paper": {"digits": {"10": 0.82}},
        },
        "DP-Sinkhorn": {"settings": ["method=dp_sinkhorn_small", "method.images=5"]},
    },
}
OF_THE_CLOCK = ("training_seconds", "peak_rss_bytes")


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(MATRIX))
    return path


def table(place: Path) -> list[dict[str, str]]:
    with (place / "benchmark.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if k not in OF_THE_CLOCK} for row in rows]


def test_output_folders_may_have_any_name(tmp_path: Path) -> None:
    place = tmp_path / "of mine (1), {2}"
    point = next(expand(read_matrix("digits"), place))
    assert point.config.run_dir == str(place / point.name)


@pytest.mark.parametrize("name", MATRICES)
def test_every_matrix_composes(name: str, tmp_path: Path) -> None:
    matrix = read_matrix(name)
    matrix.seeds = matrix.seeds[:1]  # others differ in nothing else
    result = list(expand(matrix, tmp_path))
    assert len({point.name for point in result}) == len(result)
    for point in result:
        check(point.config)
        assert point.config.privacy.target_epsilon == point.epsilon


@pytest.mark.slow
def test_a_killed_benchmark_resumes_to_the_same_table(matrix: Path, tmp_path: Path) -> None:
    # the second takes longer than the process that waits for the first
    slow = {"settings": [*MATRIX["methods"]["DP-Sinkhorn"]["settings"], "rounds=60"]}
    slow["settings"] += ["evaluate_every=30"]
    methods = {**MATRIX["methods"], "DP-Sinkhorn": slow}
    matrix.write_text(yaml.safe_dump({**MATRIX, "methods": methods}))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = ["benchmark", f"matrix={matrix}", "seeds=[0]", "jobs=1"]
    assert cli.run([*words, f"run_dir={whole}"]) == 0
    process = psutil.Popen([sys.executable, "-m", "fedgen.cli", *words, f"run_dir={cut}"])
    until = time.monotonic() + 300
    while not any(RunDir(path).finished for path in cut.glob("D*")):
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.05)
    everyone = [process, *process.children(recursive=True)]
    for each in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):  # may have exited already
            each.kill()
    psutil.wait_procs(everyone)
    assert sum(RunDir(path).finished for path in cut.glob("D*")) < 2
    assert not (cut / "benchmark.csv").exists()
    assert cli.run([*words, f"run_dir={cut}"]) == 0
    assert table(cut) == table(whole)
    rows = table(cut)
    assert [(row["method"], row["target_epsilon"], row["seeds"]) for row in rows] == [
        ("DP-MERF", "10", "1"),
        ("DP-Sinkhorn", "10", "1"),
    ]
    assert [row["paper_gen2real_cnn"] for row in rows] == ["0.82", ""]
    for row in rows:
        assert 0 < float(row["server_epsilon"]) <= float(row["target_epsilon"])
        assert 0 <= float(row["gen2real_cnn"]) <= 1
        assert row["gen2real_average"]
    assert (cut / "benchmark.png").stat().st_size > 0
    assert len(json.loads((cut / "benchmark.json").read_text())) == 2
    text = (cut / "benchmark.md").read_text()
    assert text.count("\n| ") == 3
    assert "DP-MERF" in text


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("value", [signal.SIGTERM, signal.SIGKILL])
def test_runs_of_a_stopped_benchmark_stop_with_a_checkpoint(
    value: signal.Signals, matrix: Path, tmp_path: Path
) -> None:
    """Signals reach only the benchmark's process; its runs notice that it is gone, also after
    SIGKILL."""
    longer = {"settings": ["runtime.threads=1", "rounds=100000"], "seeds": [0]}
    matrix.write_text(yaml.safe_dump(MATRIX | longer))
    words = ["-m", "fedgen.cli", "benchmark", f"matrix={matrix}", "jobs=2", f"run_dir={tmp_path}/b"]
    with (tmp_path / "output").open("w") as result:
        process = subprocess.Popen([sys.executable, *words], stderr=result)
        until = time.monotonic() + 300
        while not any((path / "metrics.jsonl").exists() for path in tmp_path.glob("b/D*")):
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(value)
        assert process.wait(300) == (-9 if value == signal.SIGKILL else 130)
    result = (tmp_path / "output").read_text().partition("continue with: ")[2]
    assert shlex.split(result) == ([] if value == signal.SIGKILL else ["fedgen", *words[2:]])
    until = time.monotonic() + 300
    while not any((path / "checkpoints").exists() for path in tmp_path.glob("b/D*")):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_runs_use_the_same_code_from_any_working_directory(matrix: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "numpy.py").write_text("raise SystemExit('not this one')")
    words = ["benchmark", f"matrix={matrix}", "seeds=[0]", "methods=[DP-MERF]", "run_dir=out"]
    command = [sys.executable, "-P", "-m", "fedgen.cli", *words]
    subprocess.run(command, cwd=there, env=os.environ | {"PYTHONPATH": str(Path.cwd())}, check=True)
    assert table(there / "out")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settles"), [("dp_sinkhorn_small", False), ("mixture_small", True)]
)
def test_progress_of_runs_is_shown_with_their_epsilon(
    method: str,
    settles: bool,
    matrix: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedgen.reporting.progress._QUIET_SECONDS", 0.0)
    longer = [word for word in MATRIX["settings"] if not word.startswith("rounds=")]
    longer += [*rounds_override(method, 60), "evaluate_every=0"]
    methods = {"its": {"settings": [f"method={method}"]}}
    matrix.write_text(yaml.safe_dump(MATRIX | {"settings": longer, "methods": methods}))
    words = [f"matrix={matrix}", "seeds=[0]", f"run_dir={tmp_path}/b"]
    assert cli.run(["benchmark", *words]) == 0
    seen = re.findall(r"runs 0/1  its-digits-10-0 (\d+)/(\d+) ε ([\d.]+)", capsys.readouterr().out)
    assert seen and all(float(epsilon) <= 10 for *_, epsilon in seen)
    assert float(seen[0][2]) <= float(seen[-1][2])
    planned = {int(rounds) for _, rounds, _ in seen}
    assert planned == {RunDir(tmp_path / "b" / "its-digits-10-0").results()["rounds"]}
    assert (planned != {60}) == settles


@pytest.mark.slow
def test_a_failed_run_fails_the_benchmark_and_no_other_run(
    matrix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "out"
    words = ["benchmark", f"matrix={matrix}", "seeds=[0]", f"run_dir={place}"]
    broken = {**MATRIX, "methods": dict(MATRIX["methods"])}
    # a share of rows that leaves none is found when the data are read
    broken["methods"]["DP-Sinkhorn"] = {"settings": ["method=dp_sinkhorn_small", "held_out=5000"]}
    matrix.write_text(yaml.safe_dump(broken))
    assert cli.run(words) == 2
    assert "1 of 2 runs failed" in capsys.readouterr().err
    assert "held_out" in (place / "logs" / "DP-Sinkhorn-digits-10-0.log").read_text()
    assert [row["method"] for row in table(place)] == ["DP-MERF"]
    result = (place / "benchmark.md").read_text()
    assert "DP-Sinkhorn-digits-10-0: not finished" in result
    assert "DP-MERF-digits-10-1" not in result, "not requested"
    # a run that is evaluated in another way is not taken for one of the others
    words.append("methods=[DP-MERF]")
    assert cli.run(words) == 0
    run = place / "DP-MERF-digits-10-0"
    assert cli.run(["evaluate", f"run={run}", "evaluation.samples=50"]) == 0
    capsys.readouterr()
    assert cli.run(words) == 2
    assert "evaluated again with other" in capsys.readouterr().err
    # nor one of other settings, even where it is not what the command asks for
    broken["methods"]["DP-MERF"] = {"settings": ["method=dp_merf_small", "privacy.delta=1e-3"]}
    broken["methods"]["DP-Sinkhorn"] = MATRIX["methods"]["DP-Sinkhorn"]
    matrix.write_text(yaml.safe_dump(broken))
    assert cli.run([*words[:-1], "methods=[DP-Sinkhorn]"]) == 2
    assert "has a different" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "key", "problem"),
    [
        ([], "matrix", "choose digits, femnist, hour, mnist, or a FILE.yaml"),
        (["matrix=digts"], "matrix", "did you mean digits"),
        (["matrix=no.yaml"], "matrix", "cannot be read"),
        (["methods=[dp_murf]"], "methods", "there is no"),
        (["seeds=3"], "seeds", "must be a list"),
        (["seeds=[]"], "seeds", "must be a list"),
        (["seeds=[1,1]"], "seeds", "different values"),
        (["jobs=0"], "jobs", "at least 1"),
        (["epsilons=[-1]"], "privacy.target_epsilon", "at least 1e-09"),
        (["data=[mnits]"], "data", "did you mean mnist"),
    ],
)
def test_invalid_settings_are_refused(
    words: list[str], key: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if words and not words[0].startswith("matrix="):
        words = ["matrix=digits", *words]
    assert cli.run(["benchmark", *words, f"run_dir={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fedgen: {key}: ")
    assert problem in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_another_matrix_in_the_same_folder_is_refused(
    matrix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "out"
    words = ["benchmark", f"matrix={matrix}", "seeds=[0]", f"run_dir={place}"]
    assert cli.run([*words, "methods=[DP-MERF]"]) == 0
    matrix.write_text(matrix.read_text().replace("method.ema=0.5", "method.ema=0.6"))
    capsys.readouterr()
    assert cli.run(words) == 2
    assert "method.ema" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"seeds": [0, 0]}, "matrix.seeds"),
        ({"epsilons": [10, 10.0]}, "matrix.epsilons"),
        ({"epsilons": ["ten"]}, "matrix.epsilons.0"),
        ({"data": "digits"}, "matrix.data"),
        ({"settings": "rounds=4"}, "matrix.settings"),
        ({"epsilon": [1]}, "matrix"),
        ({"methods": {}}, "matrix.methods"),
        ({"methods": {"a/b": {"settings": []}}}, "matrix.methods"),
        ({"methods": {"a": None}}, "matrix.methods.a"),
        ({"methods": {"a": {"settings": [], "papr": {}}}}, "matrix.methods.a"),
    ],
)
def test_an_invalid_matrix_is_refused(
    change: dict[str, Any], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump({**MATRIX, **change}))
    assert cli.run(["benchmark", f"matrix={path}", f"run_dir={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fedgen: {key}: ")
    assert error.count("\n") == 1


def test_the_table_has_a_reference_without_privacy(tmp_path: Path) -> None:
    path = tmp_path / "reference.yaml"
    path.write_text(yaml.safe_dump({**MATRIX, "epsilons": [None, 0.1234567]}))
    names = [point.name for point in expand(read_matrix(str(path)), tmp_path)]
    assert "DP-MERF-digits-inf-0" in names
    assert "DP-MERF-digits-0.1234567-1" in names
    for point in expand(read_matrix(str(path)), tmp_path):
        check(point.config)


@pytest.mark.slow
def test_the_table_has_columns_for_several_clients(matrix: Path, tmp_path: Path) -> None:
    words = ["method=fedavg_gan", *tiny("fedavg_gan")]
    methods = {"FedAvg-GAN": {"settings": words}}
    matrix.write_text(yaml.safe_dump({**MATRIX, "seeds": [0], "settings": [], "methods": methods}))
    place = tmp_path / "out"
    assert cli.run(["benchmark", f"matrix={matrix}", f"run_dir={place}"]) == 0
    row = json.loads((place / "benchmark.json").read_text())[0]
    results = RunDir(place / "FedAvg-GAN-digits-10-0").results()
    assert row["clients"] == results["clients"] > 1
    assert row["server_epsilon"] is None is row["median_client_epsilon"]
    moved = results["bytes"]["up"] + results["bytes"]["down"]
    assert row["bytes_per_round"] == moved / results["rounds"]
    text = (place / "benchmark.md").read_text()
    assert "median ε (server) of queried clients" in text
    assert "| 4 | ∞ |" in text
