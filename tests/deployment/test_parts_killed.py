"""Parts of a deployment are killed and restarted: runs complete, and the recorded spend covers
every response."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from deployed import Deployment, deployment
from forked import Command
from tiny import tiny

from fedgen.federation import messages

ROUNDS = 5
DPGAN = [
    *tiny("dpgan_small"),
    "method=dpgan_small",
    f"rounds={ROUNDS}",
    "privacy.noise=secure",
    "privacy.aggregation=secure",
    "privacy.target_epsilon=4",
    "runtime.checkpoint_every=1",
    "runtime.timeout=90",  # an answer may be lost with the part that had it: it is asked for again
]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployment(tmp_path_factory.mktemp("sites"), 3) as here:
        yield here


def answers(sites: Deployment, node: int, name: str) -> int:
    """Return the number of responses that left a node in a run."""
    log = sites.home(node) / "log.jsonl"
    lines = sites.log(node) if log.exists() else []
    left = [each for each in lines if each["run"] == name and each["what"] == "left"]
    return sum(each["kind"] == messages.ASK and "error" not in each for each in left)


def killed_and_ended(sites: Deployment, run: Path, victims: Sequence[str], seed: int) -> None:
    """Kill parts at random moments, one after the other, until the run ends."""
    draw = random.Random(seed)
    words = sites.asked(*DPGAN, f"seed={seed}", f"run_dir={run}")

    def again() -> Command:
        """Resume the run; one that ended before it was announced left nothing, and starts."""
        return Command(["train", f"resume={run}"] if (run / "run.json").exists() else words)

    coordinator = Command(words)
    end = time.monotonic() + 900
    while not (run / "run.json").exists():
        assert coordinator.poll() is None and time.monotonic() < end, coordinator.errors
        time.sleep(0.05)
    for victim in victims:
        time.sleep(draw.uniform(0.5, 10))
        process = {"coordinator": coordinator, "link": sites.link, "node": sites.nodes[1]}[victim]
        assert process is not None
        process.send_signal(9)
        process.wait(30)
        if victim == "link":
            sites.start_link()
        elif victim == "node":
            sites.start_node(1)
        else:
            coordinator = again()
    while not (run / "results.json").exists():
        status = coordinator.wait(end - time.monotonic())
        if status != 0:
            assert time.monotonic() < end, coordinator.errors
            coordinator = again()
    assert coordinator.wait(60) == 0, coordinator.errors
    name = json.loads((run / "run.json").read_text())["run"]
    record = json.loads((run / "privacy.json").read_text())
    assert record["rounds"] == ROUNDS or record["stopped"]
    for node in range(sites.count):
        spent = record["clients"][str(node)]["releases"]
        assert spent >= answers(sites, node, name) > 0


def test_a_run_survives_the_death_of_its_parts(
    sites: Deployment, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """All three in one run; with ``--kills N`` each in N more runs."""
    killed_and_ended(sites, tmp_path / "all", ["link", "coordinator", "node"], 0)
    for seed in range(1, pytestconfig.getoption("--kills") + 1):
        for victim in ("node", "coordinator", "link"):
            killed_and_ended(sites, tmp_path / f"{victim}{seed}", [victim], seed)
