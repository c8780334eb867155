"""Interrupted runs, and clients that are silent, late or failing: the published ε covers what each
client contributed."""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import Message, RecordDict
from mutation import kills
from tiny import TINY

from fedgen import cli
from fedgen.federation import messages
from fedgen.federation.client import app
from fedgen.federation.client.context import ClientContext
from fedgen.federation.messages import Response
from fedgen.privacy.gaussian_dp import gaussian_epsilon
from fedgen.privacy.routing import Routing
from fedgen.strategies.sample_gradients import SampleGradients

ROUNDS, BATCH, NOISE = 10, 2, 4.0
RUN = [
    *TINY,
    "partition=iid",
    "method.routing=per_step",
    "method.warm_start=0",
    f"method.batch={BATCH}",
    f"rounds={ROUNDS}",
    "privacy.target_epsilon=null",
    f"privacy.noise_multiplier={NOISE}",
    "privacy.noise=secure",
    "runtime.checkpoint_every=3",
]
Fate = Callable[[int, int], str]
"""(client, round) -> what befalls its answer: "answers", "silent", "fails" or "late"."""


class Seen:
    """The cohorts that the server's strategy sampled, and the responses that it used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)
        self.used: dict[int, Counter[int]] = {}
        self.fate: Fate = lambda client, round_: "answers"
        whole, ask = SampleGradients.aggregate_query, app._respond

        def aggregate(
            own: SampleGradients, round_: int, answers: dict[int, Response], rows: int
        ) -> object:
            routes = own.route(round_, rows)
            self.used[round_] = Counter({client: len(routes[client]) for client in answers})
            return whole(own, round_, answers, rows)

        def answered(home: ClientContext, message: Message) -> RecordDict:
            fate = self.fate(home.index, messages.read_round(message))
            if fate == "silent":  # and the operator interrupts
                raise KeyboardInterrupt
            if fate == "fails":
                raise RuntimeError
            if fate == "late":
                time.sleep(0.25)
            return ask(home, message)

        draw = Routing.assign

        def drawn(own: Routing, rows: int, rng: random.Random) -> dict[int, list[int]]:
            result = draw(own, rows, rng)
            where = getattr(rng, "_where", ())
            if "cohort" in where:
                self.asked[int(where[where.index("cohort") + 1])].add(tuple(result))
            return result

        monkeypatch.setattr(SampleGradients, "aggregate_query", aggregate)
        monkeypatch.setattr(Routing, "assign", drawn)
        monkeypatch.setitem(app._HANDLERS, messages.ASK, answered)

    def busiest(self) -> int:
        """Return the query samples of one client in the published rounds."""
        return max(sum(self.used.values(), Counter()).values())


def release_of(run: Path) -> dict:
    return json.loads((run / "privacy.json").read_text())["views"]["release"]


@pytest.mark.slow
@kills(
    "fedgen/run/train.py",
    "ready = replace(ready, streams=ready.streams.with_secret_key(stored_key(path)))",
    "pass",
)
def test_a_silent_client_is_sampled_again_after_each_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two clients never responds, and the operator presses Ctrl-C and resumes: the run does
    not end through samples that omit the client, as it would after some eight attempts per
    round."""
    seen, run = Seen(monkeypatch), tmp_path / "run"
    seen.fate = lambda client, round_: "silent" if client == 1 else "answers"
    # kept each round: no query to the responder is repeated, and its budget lasts
    command = [*RUN, "partition.clients=2", "runtime.checkpoint_every=1", f"run_dir={run}"]
    assert cli.run(["train", *command]) == 130
    for _ in range(8):
        assert cli.run(["train", f"resume={run}"]) == 130
    stuck = max(seen.asked)
    assert seen.asked[stuck] == {(1,)}
    seen.fate = lambda client, round_: "answers"
    assert cli.run(["train", f"resume={run}"]) == 0
    assert all(len(cohorts) == 1 for cohorts in seen.asked.values())
    assert sum(map(len, seen.used.values())) == ROUNDS
    assert not (run / "unanswered").exists()


@kills("fedgen/run/train.py", "if not path.exists() and run_dir.started_rounds():", "if False:")
def test_without_the_sampling_key_nothing_amplifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run samples its cohorts again, and could do so until only responding clients are
    sampled: ε has no amplification."""
    seen, run = Seen(monkeypatch), tmp_path / "run"
    seen.fate = lambda client, round_: "silent" if round_ == 5 else "answers"
    assert cli.run(["train", *RUN, "partition.clients=2", f"run_dir={run}"]) == 130
    key = run / "checkpoints" / "draws.key"
    assert key.stat().st_mode & 0o077 == 0
    key.unlink()
    seen.fate = lambda client, round_: "answers"
    assert cli.run(["train", f"resume={run}"]) == 0
    release = release_of(run)
    assert (run / "unanswered").exists()
    assert release["amplified_by"] is None
    assert release["epsilon"] >= gaussian_epsilon(math.sqrt(seen.busiest()) / NOISE, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_the_published_epsilon_covers_all_contributions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Six runs of two to four clients, some of which are silent, fail or are late, permanently or
    temporarily; each is resumed until it ends, or six times. If a failure was recorded, ε is at
    least the exact one of the most sampled client in the release; otherwise no round was sampled
    twice."""
    rng, published, incidents = random.Random(share), 0, 0
    for number in range(6):
        seen, run = Seen(monkeypatch), tmp_path / str(number)
        clients = rng.choice([2, 3, 4])
        kind, whom = rng.choice(["silent", "fails", "late"]), rng.randrange(clients)
        begins, ends = rng.randrange(ROUNDS), rng.choice([1, 2, 6])

        def out_of_order(client: int, round_: int, attempt: int) -> str:
            if client == whom and round_ >= begins and attempt < ends:  # noqa: B023
                return kind  # noqa: B023
            return "answers"

        words = [f"partition.clients={clients}", "runtime.timeout=0.2", f"run_dir={run}"]
        command = [*RUN, *words, f"runtime.min_success={share}"]
        for attempt in range(6):
            seen.fate = lambda client, round_: out_of_order(client, round_, attempt)  # noqa: B023
            status = cli.run(["train", *command])
            command = [f"resume={run}"]
            if status == 0:
                break
        monkeypatch.undo()
        if status:
            assert not list((run / "public").iterdir())
            continue
        published += 1
        failed = run / "failures.jsonl"
        results = json.loads((run / "results.json").read_text())
        lines = failed.read_text().splitlines() if failed.exists() else []
        assert sum(results["failures"].values()) == len(lines), "failures are never cut"
        release = release_of(run)
        if lines:
            incidents += 1
            exact = gaussian_epsilon(math.sqrt(seen.busiest()) / NOISE, 1e-5)
            assert release["epsilon"] >= exact
            assert release["amplified_by"] is None
        assert all(len(cohorts) == 1 for cohorts in seen.asked.values())
    assert published >= 2
    assert incidents >= 1
