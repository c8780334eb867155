"""A run killed at any moment resumes and produces the same result."""

from __future__ import annotations

import json
import random
import re
import signal
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from flwr.app import RecordDict
from forked import Command, until
from hostile import lying
from mutation import kills
from tiny import TINY, Train, fingerprint, rounds_override, tiny

from fedgen import cli
from fedgen.config.compose import compose
from fedgen.errors import Interrupted
from fedgen.federation import checkpoint, messages
from fedgen.federation.client.state_store import ClientStore
from fedgen.federation.rounds import RunState
from fedgen.run import train as training

LONG = [
    "partition=iid",
    "partition.clients=5",
    "method.routing=per_sample",
    "rounds=40",
    "runtime.checkpoint_every=7",
    "log_every=3",
    "sample_every=20",
    "privacy.target_epsilon=null",
    "privacy.noise_multiplier=1.0",
]


def start(arguments: list[str]) -> Command:
    return Command(["train", *arguments])


@cache
def whole(*settings: str) -> dict[str, Any]:
    """Train without interruption."""
    with tempfile.TemporaryDirectory() as place:
        words = [*TINY, *settings, f"run_dir={place}/run"]
        return fingerprint(training.train(compose("config", words)))


def rounds_written(run: Path) -> int:
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return int(json.loads(lines[-1])["round"])
    except (OSError, IndexError, ValueError):
        return 0


def kill_at(run: Path, arguments: list[str], moment: float, at_round: int) -> bool:
    """Kill the process ``moment`` seconds after a round; return False if it ended before."""
    process = start(arguments)
    while process.poll() is None and rounds_written(run) < at_round:
        time.sleep(0.005)
    time.sleep(moment)
    if process.poll() is not None:
        return False
    process.send_signal(signal.SIGKILL)
    process.wait()
    return True


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "disk"])
def test_kill_and_resume_to_the_same_bit(tmp_path: Path, store: str) -> None:
    """Three kills at random moments, the first before any round."""
    run = tmp_path / "killed"
    rng = random.Random(store)
    arguments = [*TINY, *LONG, f"runtime.store={store}", f"run_dir={run}"]
    kills = 0
    for at_round in (1, 9, 22):
        kills += kill_at(run, arguments, rng.uniform(0, 0.15), at_round)
        assert not (run / "results.json").exists()
        arguments = [f"resume={run}"]
    assert kills == 3
    assert cli.run(["train", f"resume={run}"]) == 0
    assert fingerprint(run) == whole(*LONG)


@pytest.mark.slow
def test_several_steps_per_message_resume_to_the_same_bit(train: Train, tmp_path: Path) -> None:
    """With adaptive steps: the server dies after a message that no checkpoint has."""
    words = ["method=dpgan_small", "method.discriminator_steps=adaptive", "method.ema=0.5"]
    # the accuracy is below this floor, and the grace is of two steps
    words += ["method.accuracy_floor=1.0", "method.accuracy_ema=1e-9", "rounds=30"]
    words += ["log_every=1", "runtime.checkpoint_every=5"]
    words += ["method.generator.pixel_norm=false", "method.mode_seeking=0"]
    words += ["privacy.target_epsilon=null", "privacy.noise_multiplier=1"]
    reference = train(*words, name="whole")
    steps = [json.loads(line) for line in (reference / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in steps] == [1, 2, 4, 6, 11, 16, 26, 30]
    run = tmp_path / "died"
    small = [word for word in tiny("dpgan_small") if not word.startswith("rounds")]
    process = start([*small, *words, "runtime.faults.server_dies=24", f"run_dir={run}"])
    assert process.wait() == -signal.SIGKILL
    assert cli.run(["train", f"resume={run}"]) == 0
    assert fingerprint(run) == fingerprint(reference)


@pytest.mark.slow
def test_a_secure_run_that_died_with_its_budget_spent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No round can be repeated: the spend stays, the error says so, and an untrained generator is
    not published."""
    run = tmp_path / "died"
    small = [word for word in tiny("dpgan_small") if not word.startswith("rounds")]
    words = ["method=dpgan_small", "rounds=8", "privacy.noise=secure"]
    words += ["privacy.target_epsilon=null", "privacy.noise_multiplier=1"]
    words += ["runtime.faults.server_dies=8", f"run_dir={run}"]
    assert start([*small, *words]).wait() == -signal.SIGKILL
    assert cli.run(["train", f"resume={run}"]) == 2
    assert "the generator was not trained" in capsys.readouterr().err
    privacy = json.loads((run / "privacy.json").read_text())
    assert privacy["clients"]["0"]["events"][0][1] == 8
    assert privacy["views"]["release"]["epsilon"] == privacy["views"]["server"]["epsilon"] > 0
    assert not (run / "public" / "generator.safetensors").exists()


@pytest.mark.parametrize("method", ["mixture_small", "dp_merf_small"])
@pytest.mark.parametrize("clients", [[], ["partition=iid", "partition.clients=3"]])
def test_a_sequence_resumes_between_charge_and_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, clients: list[str]
) -> None:
    """Also in mode secure: a charged response is sent again, and nothing is charged twice."""
    run, saved = tmp_path / "died", []
    asked = {"mixture_small": 6, "dp_merf_small": 1}[method]

    def full(*given: Any) -> None:
        saved.append(given)
        if len(saved) > asked // 2:  # one comes before any round
            raise OSError(28, "No space left on device")
        save(*given)

    save = checkpoint.save
    words = [f"method={method}", "privacy.noise=secure", "evaluation=none", *clients]
    words += rounds_override(method, 7)
    with monkeypatch.context() as disk:
        disk.setattr(checkpoint, "save", full)
        assert cli.run(["train", *words, "runtime=in_process", f"run_dir={run}"]) == 3
    charged = [len(p.read_text().splitlines()) for p in run.glob("clients/*/ledger.jsonl")]
    assert min(charged) - 1 > asked // 2 - 1, "the last release is in no checkpoint"
    assert cli.run(["train", f"resume={run}"]) == 0
    assert not list(run.glob("clients/*/answer.held")), "the run is over"
    privacy = json.loads((run / "privacy.json").read_text())
    for client, path in enumerate(sorted(run.glob("clients/*/ledger.jsonl"))):
        assert len(path.read_text().splitlines()) - 1 == asked
        assert privacy["clients"][str(client)]["releases"] == asked
    assert privacy["views"]["server"]["epsilon"] <= 10.001


def test_a_run_with_a_derived_number_of_rounds_resumes(tmp_path: Path) -> None:
    """At ε = 1 a label has one cluster, which needs one step: derived from the noise."""
    words = ["method=mixture_small", "privacy.target_epsilon=1", "evaluation=none"]
    words += ["runtime=in_process"]
    assert cli.run(["train", *words, f"run_dir={tmp_path}/whole"]) == 0
    died = [*words, "runtime.faults.server_dies=3", f"run_dir={tmp_path}/died"]
    assert start(died).wait() == -signal.SIGKILL
    assert cli.run(["train", f"resume={tmp_path}/died"]) == 0
    assert fingerprint(tmp_path / "died") == fingerprint(tmp_path / "whole")
    results = json.loads((tmp_path / "died" / "results.json").read_text())
    assert results["rounds"] == 5


def test_a_sum_that_was_charged_and_lost_ends_a_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shares of one sum must not be combined with others: a resume says so, and changes nothing."""
    run = tmp_path / "died"
    words = ["method=dp_merf_small", "privacy.noise=secure", "evaluation=none"]
    words += ["partition=iid", "partition.clients=3", "privacy.aggregation=secure"]

    def full(folder: Path, state: RunState, beside: checkpoint.Metadata) -> None:
        if state.rounds:
            raise OSError(28, "No space left on device")
        save(folder, state, beside)

    save = checkpoint.save
    with monkeypatch.context() as disk:
        disk.setattr(checkpoint, "save", full)
        assert cli.run(["train", *words, "runtime=in_process", f"run_dir={run}"]) == 3
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert cli.run(["train", f"resume={run}"]) == 2
    assert "charged for a response to round 1 that was lost" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_killed_in_warm_start(tmp_path: Path) -> None:
    slow_start = [
        "partition=iid",
        "partition.clients=5",
        "method.warm_start=30",
        "privacy.target_epsilon=null",
        "privacy.noise_multiplier=1.0",
    ]
    run = tmp_path / "killed"
    process = start([*TINY, *slow_start, f"run_dir={run}"])
    until(process, run / "config.yaml")
    time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert cli.run(["train", f"resume={run}"]) == 0
    assert fingerprint(run) == whole(*slow_start)


@pytest.mark.slow
def test_a_run_moves_from_runtime_to_runtime(tmp_path: Path) -> None:
    settings = [*LONG, "rounds=25"]
    run = tmp_path / "moved"
    assert kill_at(run, [*TINY, *settings, f"run_dir={run}"], 0.05, 8)
    assert kill_at(run, [f"resume={run}", "runtime=flower"], 0.05, 16)
    assert cli.run(["train", f"resume={run}", "runtime=ray", "runtime.actors=1"]) == 0
    assert fingerprint(run) == whole(*settings)


@kills(
    "fedgen/federation/rounds.py",
    "self._changed_clients -= acknowledged.keys()",
    "pass",
)
def test_clients_keep_new_states_only(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """DP-MERF queries its clients once; checkpoints after later rounds send no keep messages."""
    kept, keep = [], ClientStore.keep

    def record_keep(store: ClientStore, client: int, tag: int, confirmed: int) -> None:
        kept.append(client)
        keep(store, client, tag, confirmed)

    monkeypatch.setattr(ClientStore, "keep", record_keep)
    clients = ["partition=iid", "partition.clients=3"]
    train("method=dp_merf_small", *clients, "rounds=4", "runtime.checkpoint_every=1")
    assert sorted(kept) == [0, 1, 2]


@kills("fedgen/federation/client/state_store.py", "if int(existing_tag) == confirmed", "if False")
def test_a_client_with_lost_replies_can_be_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the state that the server knows of, however many replies are lost later."""
    kept = []

    def lose(reply: RecordDict) -> None:
        kept.append(reply)
        if len(kept) > 1:
            raise OSError("no network")

    def stop(ready: object, state: RunState, epsilon: object) -> None:
        if state.rounds == 4:
            raise KeyboardInterrupt

    lying(monkeypatch, messages.KEEP, lose)
    losing = ["partition=iid", "partition.clients=4", "runtime.min_success=0.5"]
    words = [*TINY, *losing, "rounds=5", "sample_every=1", "runtime.checkpoint_every=1"]
    words += [f"run_dir={tmp_path}/run"]
    with pytest.raises(Interrupted):
        training.train(compose("config", words), watch=stop)
    assert len(kept) > 2
    assert cli.run(["train", f"resume={tmp_path}/run"]) == 0


def test_resuming_a_finished_run_ends_the_same(train: Train) -> None:
    run = train()
    before = fingerprint(run)
    assert cli.run(["train", f"resume={run}"]) == 0
    assert fingerprint(run) == before


@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_resuming_a_run_that_its_budget_stopped_adds_nothing(train: Train, noise: str) -> None:
    settings = ["privacy.noise_multiplier=8", "privacy.target_epsilon=2", "rounds=40"]
    run = train(*settings, "partition=iid", "partition.clients=4", f"privacy.noise={noise}")
    before = fingerprint(run)
    assert before["privacy"]["rounds"] < 40
    assert cli.run(["train", f"resume={run}"]) == 0
    assert fingerprint(run) == before


@pytest.mark.slow
def test_secure_mode_charges_repeated_rounds(tmp_path: Path) -> None:
    """A repeated round releases new noise, and is charged again."""
    run = tmp_path / "secure"
    settings = [*LONG, "privacy.noise=secure", "runtime.checkpoint_every=1000"]
    assert kill_at(run, [*TINY, *settings, f"run_dir={run}"], 0.0, 20)
    spent = sum(len(p.read_text().splitlines()) - 1 for p in run.glob("clients/*/ledger.jsonl"))
    assert spent > 0
    assert cli.run(["train", f"resume={run}"]) == 0
    privacy = json.loads((run / "privacy.json").read_text())
    releases = sum(client["releases"] for client in privacy["clients"].values())
    rows = sum(count for c in privacy["clients"].values() for _, count in c["events"])
    assert releases > spent
    assert rows > 40 * 8, "more rows than an uninterrupted run of 40 rounds answers"


@pytest.mark.slow
def test_the_server_is_killed_with_many_clients_on_ray(tmp_path: Path, nothing_left: None) -> None:
    """80 clients with states on disk; the processes of Ray end with the server."""
    settings = [
        "partition=iid",
        "partition.clients=80",
        "method.routing=per_sample",
        "method.critics_per_step=8",
        "method.warm_start=0",
        "rounds=18",
        "runtime.checkpoint_every=8",
        "log_every=5",
        "privacy.target_epsilon=null",
        "privacy.noise_multiplier=1.0",
    ]
    run = tmp_path / "killed"
    on_ray = ["runtime=ray", "runtime.num_cpus=0.5", "runtime.actors=2"]
    assert kill_at(run, [*TINY, *settings, *on_ray, f"run_dir={run}"], 0.1, 10)
    assert not (run / "results.json").exists()
    assert cli.run(["train", f"resume={run}"]) == 0
    assert fingerprint(run) == whole(*settings)


def interrupted(arguments: list[str], run: Path, at_round: int, times: int) -> tuple[int, str]:
    """Interrupt after a round, once or twice; return the exit status and the last line."""
    process = start(arguments)
    while process.poll() is None and rounds_written(run) < at_round:
        time.sleep(0.005)
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    status = process.wait(60)
    return status, process.errors.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["in_process", "ray", "flower"])
def test_ctrl_c_keeps_finished_rounds(tmp_path: Path, runtime: str, nothing_left: None) -> None:
    settings = [*LONG, "rounds=25", "runtime.checkpoint_every=1000"]
    run = tmp_path / "cut"
    command = [*TINY, *settings, f"runtime={runtime}", f"run_dir={run}"]
    status, line = interrupted(command, run, 5, times=1)
    assert status == 130
    match = re.fullmatch(
        rf"fedgen: interrupted after round (\d+); continue with: fedgen train resume={run}", line
    )
    assert match, line
    assert 5 <= int(match[1]) < 25
    assert cli.run(["train", f"resume={run}", "runtime=in_process"]) == 0
    assert fingerprint(run) == whole(*LONG, "rounds=25")


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["in_process", "ray"])
def test_a_second_ctrl_c_exits_at_once(tmp_path: Path, runtime: str, nothing_left: None) -> None:
    """Also while a client hangs."""
    run = tmp_path / "cut"
    settings = [*LONG, f"runtime={runtime}", "runtime.faults.hangs=0.05", "runtime.timeout=1000"]
    begin = time.monotonic()
    status, line = interrupted([*TINY, *settings, f"run_dir={run}"], run, 1, times=2)
    assert status == 130
    assert "continue with: fedgen train resume=" in line
    assert time.monotonic() - begin < 300


def test_long_rounds_are_checkpointed_by_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that dies in its third round, long before ``runtime.checkpoint_every``."""
    monkeypatch.setattr(training, "_CHECKPOINT_SECONDS", 0.0)

    def stop(ready: object, state: RunState, epsilon: object) -> None:
        if state.rounds == 3:
            raise KeyboardInterrupt

    run = tmp_path / "run"
    words = [*TINY, "rounds=6", "sample_every=1", f"run_dir={run}"]
    with pytest.raises(Interrupted):
        training.train(compose("config", words), watch=stop)
    assert {path.name for path in (run / "checkpoints").iterdir()} >= {"server_000002.safetensors"}
