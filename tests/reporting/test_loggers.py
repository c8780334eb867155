"""Loggers have the entries of ``metrics.jsonl``; a run from elsewhere sends nothing."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hostile import content
from mlflow import MlflowClient
from mutation import kills
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import Train, fingerprint, tiny

from fedgen import cli
from fedgen.reporting import loggers
from fedgen.run.resume import _settings_digest

WORDS = ["method=dpgan_small", "log_every=1", "sample_every=2", "rounds=4"]
WORDS += ["privacy.target_epsilon=null", "privacy.noise_multiplier=2"]


def epsilons(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["round"], line["epsilon"]["server"]) for line in lines]


def on_the_board(run: Path) -> list[tuple[int, float]]:
    result = EventAccumulator(str(run)).Reload()
    assert result.Images("samples")
    return sorted((each.step, each.value) for each in result.Scalars("epsilon/server"))


def in_mlflow(run: Path) -> list[tuple[int, float]]:
    assert list((run / "mlflow").rglob("*.png"))
    with sqlite3.connect(run / "mlflow.db") as file:
        asked = "SELECT step, value FROM metrics WHERE key = 'epsilon/server' ORDER BY step"
        assert file.execute("SELECT count(*) FROM runs").fetchone() == (1,)
        return [(int(step), value) for step, value in file.execute(asked)]


@pytest.mark.slow
def test_all_loggers_have_the_entries_of_the_run(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """An extended run continues its log."""
    first = train(*WORDS, name="none")
    for name, read in (("tensorboard", on_the_board), ("mlflow", in_mlflow)):
        run = train(*WORDS, f"logger={name}", name=name)
        assert fingerprint(run) == fingerprint(first), "no bit depends on it"
        for rounds in (4, 6):
            if rounds > 4:
                again = ["train", f"resume={run}", f"rounds={rounds}", f"logger={name}"]
                assert cli.run(again) == 0
            assert np.allclose(read(run), epsilons(run)), name
            assert len(epsilons(run)) > 1
    run = train(*WORDS, "logger=wandb", name="wandb")
    assert fingerprint(run) == fingerprint(first)
    [log] = Path(f"{run}.wandb").rglob("*.wandb")
    until = time.monotonic() + 60  # W&B's own process writes it, and may have yet to
    while log.stat().st_size < 1000 and time.monotonic() < until:
        time.sleep(0.1)
    assert log.stat().st_size > 1000 and list(log.parent.rglob("media/images/*.png"))
    assert cli.run(["train", f"resume={run}", "rounds=6", "logger=wandb"]) == 0
    assert cli.run(["evaluate", f"run={run}", "evaluation=none"]) == 0


@kills("fedgen/reporting/loggers.py", "rounds + 1 if resumed else None", "rounds + 1")
@pytest.mark.parametrize("behind", [False, True])
def test_a_resumed_run_is_complete_in_tensorboard(behind: bool, tmp_path: Path) -> None:
    """Also if the clock of the second process is behind that of the first; entries after the last
    checkpoint of the first then remain."""
    for finished, steps in ((0, (2, 4, 5)), (4, (6,))):
        log = loggers.tensorboard(tmp_path, "run", finished)
        for step in steps:
            log.scalar("loss", float(step), step)
        log.close()
        if finished == 0:
            [first] = tmp_path.glob("events.out.tfevents.*")
            first.rename(tmp_path / f"events.out.tfevents.{'9' if behind else '0'}")
    result = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert sorted(each.step for each in result) == [2, 4] + [5] * behind + [6]


def test_without_a_logger_no_files_are_written(train: Train) -> None:
    run = train(*WORDS, "logger=none")
    assert not list(run.glob("events*")) and not (run / "mlflow.db").exists()


@kills(
    "fedgen/run/resume.py",
    "    resumed.logger, resumed.names.logger = requested.logger, requested.names.logger\n",
    "",
)
@pytest.mark.parametrize("command", ["train", "release"])
def test_a_foreign_run_logs_where_its_operator_says(
    command: str, train: Train, tmp_path: Path
) -> None:
    """Its directory names a server that would learn from private records: it is not contacted."""
    run = train(*WORDS)
    config = OmegaConf.load(run / "config.yaml")
    elsewhere = {"type": "mlflow", "uri": "http://127.0.0.1:9", "project": "x"}
    config.logger, config.names.logger = elsewhere, "mlflow"
    (run / "config.yaml").write_text(OmegaConf.to_yaml(config))
    identity = json.loads((run / "run.json").read_text())
    assert identity["settings"] == _settings_digest(config), "it looks as it was"
    if command == "release":
        to = [f"out={tmp_path}/x.zip", f"run_dir={tmp_path}/secret"]
        assert cli.run(["release", f"run={run}", *to, "audit=false", "registry=false"]) == 0
        return
    assert cli.run(["train", f"resume={run}", "rounds=6"]) == 0
    assert list(run.glob("events*")) and not (run / "mlflow.db").exists()


def test_pictures_are_not_written_where_a_foreign_file_says(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(*WORDS)
    client = MlflowClient(f"sqlite:///{run}/mlflow.db")
    client.create_experiment("fedgen", (tmp_path / "elsewhere").as_uri())
    assert cli.run(["train", f"resume={run}", "rounds=6", "logger=mlflow"]) == 2
    assert "would put pictures elsewhere" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlflow", "wandb", "tensorboard"])
def test_telemetry_is_disabled(name: str, tmp_path: Path) -> None:
    """No request reaches a proxy that all requests would use."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(1.0)
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        proxies = {f"{kind}_PROXY": address for kind in ("HTTP", "HTTPS", "ALL")}
        quiet = ("CI", "DO_NOT_TRACK", "NO_PROXY", "no_proxy")
        environment = {k: v for k, v in os.environ.items() if k not in quiet} | proxies
        environment |= {key.lower(): value for key, value in proxies.items()}
        words = [*tiny("dpgan_small"), *WORDS, f"logger={name}", f"run_dir={tmp_path}/run"]
        command = [sys.executable, "-m", "fedgen.cli", "train", *words]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        with pytest.raises(TimeoutError):
            proxy.accept()


@kills(
    "fedgen/config/registry.py",
    "return REGISTRY.get(group_of(place), {})",
    "return {word: name for each in REGISTRY.values() for word, name in each.items()}",
)
def test_no_part_of_a_method_sends_anything(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(*WORDS)
    config = OmegaConf.load(run / "config.yaml")
    config.method.generator = {"type": "mlflow"}
    (run / "config.yaml").write_text(OmegaConf.to_yaml(config))
    identity = json.loads((run / "run.json").read_text())
    identity["settings"] = _settings_digest(config)
    (run / "run.json").write_text(json.dumps(identity))
    before = content(run)
    assert cli.run(["train", f"resume={run}", "rounds=6"]) == 2
    assert "cannot be 'mlflow'" in capsys.readouterr().err
    assert content(run) == before


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_package_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    words = [*WORDS, f"logger={name}", "evaluation=none", f"run_dir={tmp_path}/run"]
    assert cli.run(["train", *words]) == 2
    assert capsys.readouterr().err.startswith(f"fedgen: logger: needs {name}; pip install")
    assert not (tmp_path / "run").exists()


def test_an_unreachable_server_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    words = [*WORDS, "logger=mlflow", "logger.uri=http://127.0.0.1:9", f"run_dir={tmp_path}/run"]
    assert cli.run(["train", *words]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("fedgen: logger.uri: http://127.0.0.1:9 cannot")
    assert not (tmp_path / "run").exists()
