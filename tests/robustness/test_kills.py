"""A run of any method, killed at random moments, resumes with the same result and keeps its spend.

Moments depend on the clock: ``--fuzz N`` takes N // 4 runs with three kills each."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from forked import Command
from tiny import CASES, PARTITIONS, fingerprint, rounds_override, tiny

from fedgen import cli
from fedgen.config.compose import compose
from fedgen.federation.client.context import LEDGER
from fedgen.privacy.events import total
from fedgen.privacy.ledger import Ledger, spend_from_json
from fedgen.privacy.spend_db import SpendDb
from fedgen.run import train
from fedgen.storage.io import fedgen_home
from fedgen.storage.run_dir import RunDir

KILLS = 3
MODES = ["seeded", "seeded", "secure"]


def killed(words: list[str], run: Path, rng: random.Random) -> bool:
    """Kill a command within a few rounds of its start; return False if it ended before."""
    process = Command(words)
    begun = time.monotonic()
    aim = rng.choice([None, 1, 3, 6])  # rounds; None: at any moment from the start
    while aim is not None and process.poll() is None and rounds_of(run) < aim:
        assert time.monotonic() - begun < 120
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 1.0 if aim is None else 0.1))
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def rounds_of(run: Path) -> int:
    line = RunDir(run).last_spend()
    return 0 if line is None else int(line["round"])


def released(run: Path, name: str, clients: int, seeded: bool) -> dict[int, Any]:
    """Return the total of each client's ledger."""
    folder = run / "clients"
    return {
        client: Ledger(
            folder / str(client) / LEDGER, name, client, seeded, read_only=True
        ).account()
        for client in range(clients)
    }


@pytest.mark.slow
def test_runs_killed_at_any_moment_resume(fuzz: int, tmp_path: Path) -> None:
    for number in range(max(1, fuzz // 4)):
        rng = random.Random(f"kills {number}")
        method, clients = CASES[(7 * number) % len(CASES)]
        noise, run = MODES[number % len(MODES)], tmp_path / str(number)
        words = [f"method={method}", *tiny(method), *PARTITIONS[clients], f"privacy.noise={noise}"]
        words += [
            *rounds_override(method, 8),
            "log_every=1",
            "runtime.checkpoint_every=2",
            f"run_dir={run}",
        ]
        kills, command = 0, ["train", *words]
        for _ in range(KILLS):
            kills += killed(command, run, rng)
            if (run / "config.yaml").exists():
                command = ["train", f"resume={run}"]
        case = (number, method, clients, noise, kills)
        assert cli.run(command) in ((0,) if noise == "seeded" else (0, 2)), case
        if noise == "seeded":
            whole = [*words[:-1], f"run_dir={tmp_path}/whole-{number}"]
            assert fingerprint(run) == fingerprint(train.train(compose("config", whole))), case
            continue
        identity = json.loads((run / "run.json").read_text())
        [entry] = [
            e
            for e in SpendDb(fedgen_home() / "spent.sqlite").entries(identity["data"])
            if e.run == identity["run"]
        ]
        record = json.loads((run / "privacy.json").read_text())["clients"]
        for client, account in released(run, entry.run, len(record), False).items():
            assert entry.charged.get(client, {}) == account.spend, case
            counted = spend_from_json(record[str(client)]["events"])
            more = total([counted])
            assert all(more.get(event, 0) >= n for event, n in account.spend.items()), case
            assert all(entry.spend.get(event, 0) >= n for event, n in more.items()), case
