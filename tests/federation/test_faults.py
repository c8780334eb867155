"""Runs in which clients, the network and the server fail."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from dp_accounting import NonPrivateDpEvent
from flwr.app import ConfigRecord, Error, Message, RecordDict
from forked import Command
from mutation import kills
from omegaconf import DictConfig
from tiny import STREAMS, TINY, Train, fingerprint, make, tiny

from fedgen import cli
from fedgen.config.compose import compose
from fedgen.errors import FedgenError, Interrupted
from fedgen.federation import messages
from fedgen.federation.failures import DEADLINE, Failure, FailureCauses, NoResponseError, too_few
from fedgen.federation.rounds import RunState, remote_timeout
from fedgen.federation.runtimes.local_nodes import GridWrapper
from fedgen.methods.families.critic_ensemble import Critics
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import canonical, with_sampling_revealed
from fedgen.privacy.ledger import Ledger
from fedgen.privacy.spend_db import SpendDb
from fedgen.randomness import RandomStreams
from fedgen.run import setup as settings
from fedgen.run import train as training
from fedgen.run.setup import Setup
from fedgen.run.snapshot import load_snapshot
from fedgen.storage.run_dir import RunDir
from fedgen.testing.fault_rates import FaultRates
from fedgen.testing.faults import FaultyGrid

FEDERATED = ["partition=iid", "method.routing=mean", "log_every=1", "method.warm_start=0"]
NOISE = ["privacy.target_epsilon=null", "privacy.noise_multiplier=1.0"]
KINDS = ("raises", "returns_error", "wrong_shape", "nan", "late", "twice", "vanishes")


@kills(
    "fedgen/federation/rounds.py", "if kind in messages.IN_A_ROUND else _DEFAULT_REPLY_SECONDS", ""
)
def test_messages_to_remote_nodes_have_deadlines() -> None:
    """A dead node never replies, whatever the type of the message."""
    names = [name for name in vars(messages) if name.isupper() and not name.startswith("_")]
    kinds = {getattr(messages, name) for name in names} - {messages.PREPARE}
    for kind in [kind for kind in kinds if isinstance(kind, str)]:
        assert remote_timeout(kind, 90.0) == 90
        assert (remote_timeout(kind, None) == math.inf) == (kind in messages.IN_A_ROUND)
    assert remote_timeout(messages.HELLO, 1.0) >= 60, "a greeting includes calibration"
    assert remote_timeout(messages.PREPARE, 90.0) == math.inf


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ledger(run: Path, client: int) -> list[int]:
    """Return the rounds that a client's ledger was charged for."""
    return [line["round"] for line in lines(run / f"clients/{client}/ledger.jsonl")[1:]]


def fault_of(faults: FaultRates, client: int, kind: str, server_round: int) -> str | None:
    return faults.sample(
        RandomStreams.from_seed(0, "seeded").at("faults"), client, kind, server_round
    )


@pytest.mark.parametrize("kind", KINDS)
def test_each_fault(train: Train, kind: str) -> None:
    """The injected faults are predicted from the random streams, and the charges and failure
    reports from the faults."""
    rate = 0.02 if kind == "vanishes" else 0.1
    faults, clients, rounds = FaultRates(**{kind: rate}), 6, 12
    run = train(
        *FEDERATED,
        *NOISE,
        f"partition.clients={clients}",
        f"rounds={rounds}",
        f"runtime.faults.{kind}={rate}",
        "runtime.min_success=0.3",
    )
    expected: Counter[tuple[int, str]] = Counter()
    for client in range(clients):
        charged = []
        gone = False
        for server_round in range(rounds):
            trained = client in {(2 * server_round + i) % clients for i in range(2)}
            for message in (messages.TRAIN, messages.ASK):
                fault = fault_of(faults, client, message, server_round)
                gone |= fault == "vanishes"
                before = fault in ("raises", "returns_error")
                if message == messages.ASK and not gone and not before:
                    charged.append(server_round)
                if not (fault or gone) or (message == messages.TRAIN and not trained):
                    continue
                if gone:
                    expected[client, "unavailable"] += 1
                elif fault in ("raises", "returns_error"):
                    expected[client, "raised" if fault == "raises" else "failed"] += 1
                elif fault in ("wrong_shape", "nan") and message == messages.ASK:
                    expected[client, "malformed" if fault == "wrong_shape" else "not finite"] += 1
                elif fault == "late":
                    expected[client, "deadline"] += 1
        assert ledger(run, client) == charged
    result = [f for f in lines(run / "failures.jsonl") if f["round"] <= rounds]
    reported = Counter((f["client"], f["kind"]) for f in result)
    echoes = {key for key in reported if key[1] in ("late", "repeated")}
    assert bool(echoes) == (kind in ("late", "twice"))
    assert {key: count for key, count in reported.items() if key not in echoes} == expected
    # counted as sent: the server's count holds whatever befell the replies
    privacy = json.loads((run / "privacy.json").read_text())
    for client in privacy["clients"].values():
        assert sum(count for _, count in client["events"]) == 8 * rounds
    assert not list(run.glob("clients/*/*.safetensors")), "critics saw private rows"
    results = json.loads((run / "results.json").read_text())
    assert sum(results["failures"].values()) == len(lines(run / "failures.jsonl"))


def test_a_hanging_client_is_not_waited_for(train: Train) -> None:
    run = train(
        *FEDERATED,
        *NOISE,
        "partition.clients=4",
        "rounds=4",
        "runtime.faults.hangs=0.2",
        "runtime.timeout=0.4",
        "runtime.min_success=0.2",
    )
    kinds = {failure["kind"] for failure in lines(run / "failures.jsonl")}
    assert kinds == {"deadline"}
    assert all(ledger(run, client) == [0, 1, 2, 3] for client in range(4)), "late, and charged"


def test_too_few_responses_end_the_run_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command = [*TINY, *FEDERATED, "partition.clients=4", "runtime.faults.returns_error=0.5"]
    assert cli.run(["train", *command, f"run_dir={run}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("fedgen: runtime.min_success: ")
    assert "clients did not respond to training" in line
    assert f"fedgen train resume={run}" in line
    match = re.search(r"\(failed: clients? ([\d, ]+)\)", line)
    assert match and set(match[1].split(", ")) <= {"0", "1", "2", "3"}, "who, and how"
    assert (run / "checkpoints" / "checkpoint.json").exists(), "nothing is lost"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            b'{"trace": [], "error": "KeyError", "problem": "a\\u001b[31m\\nb"}\n',
            "KeyError: a [31m b (see ",
        ),
        (b'{"trace": [], "error": "E", "problem": "' + b"x" * 10_000 + b'"}', "xx... (see "),
        (b"\xc3\xa9" * 2**19 + b'\n{"trace": [], "error": "E", "problem": "b"}\n', "E: b (see "),
        (b'{"error": "E", "prob', "; (see "),
        (b"[1]\n", "; (see "),
        (b"{}\n", "; (see "),
        (b"\xff\n", "; (see "),
        (b"", "; (see "),
    ],
)
def test_the_error_file_of_a_client_is_printed_as_one_line(
    written: bytes, expected: str, tmp_path: Path
) -> None:
    """Whatever it contains."""
    place = tmp_path / "a {run}" / "3"
    place.mkdir(parents=True)
    (place / "errors.jsonl").write_bytes(written)
    failures = [Failure("died", 4, 1), Failure("failed", 3, 0), Failure("failed", 3, 1)]
    result = str(too_few("in round 1", 9, failures, FailureCauses(place.parent, printed=True)))
    assert "3 of 9 clients did not respond in round 1 (died: client 4, failed: client 3)" in result
    assert expected in result
    assert result.isprintable()


@kills("fedgen/run/train.py", 'printed=self.ready.privacy.noise == "seeded"', "printed=True")
@pytest.mark.parametrize(
    ("noise", "expected"),
    [("seeded", "ValueError: row 0.81 (see "), ("secure", "ValueError (see ")],
)
def test_exception_texts_are_printed_only_in_experiments(
    noise: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They may contain records."""

    def fail(*_: object) -> None:
        raise ValueError("row 0.81")

    monkeypatch.setattr(Critics, "respond", fail)
    words = [*TINY, "runtime=in_process", f"privacy.noise={noise}", f"run_dir={tmp_path}/run"]
    assert cli.run(["train", *words]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert noise == "seeded" or "0.81" not in error


def test_only_the_cause_of_this_failure_is_printed(tmp_path: Path) -> None:
    """A process that died wrote no cause: the file describes an earlier failure."""
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "errors.jsonl").write_text('{"error": "E", "problem": "old", "trace": []}\n')
    causes = FailureCauses(tmp_path, printed=True)
    assert causes.describe([Failure("failed", 3, 0)]).startswith("E: old (see ")
    assert causes.describe([Failure("died", 3, 0), Failure("failed", 2, 0)]) == ""


def test_fault_injection_without_faults_changes_no_bit(train: Train) -> None:
    settings = [*FEDERATED, *NOISE, "partition.clients=4"]
    reference = fingerprint(train(*settings, name="reference"))
    assert fingerprint(train(*settings, "runtime.faults.nan=1e-12", name="never")) == reference


def test_a_run_that_continues_without_clients_has_no_amplification(train: Train) -> None:
    """Missing responses reveal the sampled cohort."""
    settings = ["partition=iid", "partition.clients=40", "method.routing=per_sample", *NOISE]
    views = {}
    for name, share in (("all", 1.0), ("most", 0.9)):
        run = train(*settings, "rounds=2", f"runtime.min_success={share}", name=name)
        views[name] = json.loads((run / "privacy.json").read_text())["views"]["release"]
    assert views["all"]["amplified_by"] is not None
    assert views["most"]["amplified_by"] is None
    assert "dropout" in views["most"]["reason"]
    assert views["most"]["epsilon"] > views["all"]["epsilon"]


@pytest.mark.parametrize("noise", ["secure", "seeded"])
def test_sampling_amplifies_nothing_after_a_client_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: str
) -> None:
    """Whether the run continues may depend on its samples: a client that fails may never be sampled
    again."""
    run = tmp_path / "run"
    command = [*TINY, *NOISE, "partition=iid", "partition.clients=4", "method.routing=per_step"]
    command += [f"privacy.noise={noise}", "runtime.faults.nan=1e-12", "rounds=6"]

    def fail_once(
        self: FaultRates, streams: RandomStreams, client: int, kind: str, place: int
    ) -> str | None:
        return "returns_error" if (kind, place) == (messages.ASK, 3) else None

    monkeypatch.setattr(FaultRates, "sample", fail_once)
    assert cli.run(["train", *command, f"run_dir={run}"]) == 2
    monkeypatch.setattr(FaultRates, "sample", lambda *_: None)
    assert cli.run(["train", f"resume={run}"]) == 0
    release = json.loads((run / "privacy.json").read_text())["views"]["release"]
    assert release["amplified_by"] is None
    [line] = lines(run / "failures.jsonl")
    assert line["kind"] == "failed"
    results = json.loads((run / "results.json").read_text())
    assert results["failures"] == {"failed": 1}, "also after the resume"


DRAWN = [
    *tiny("fedavg_gan"),
    *("method=fedavg_gan", "partition=iid", "partition.clients=10", "method.cohort_size=3"),
    *("method.sampled_by=clients", "privacy.aggregation=secure", "privacy.threshold=all"),
    *("privacy.adversary=server", "runtime.faults.nan=1e-12", "runtime.checkpoint_every=2"),
]


EIGHT = [*DRAWN, "privacy.noise=secure", "rounds=8", "sample_every=1"]


def interrupted(after: int, *words: str) -> None:
    """Run until it is interrupted after so many rounds."""

    def cut(ready: Setup, state: RunState, content: object) -> None:
        if state.rounds == after:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        training.train(compose("config", list(words)), watch=cut)


def fail_in(monkeypatch: pytest.MonkeyPatch, round_: int) -> None:
    def fail(
        self: FaultRates, streams: RandomStreams, client: int, kind: str, place: int
    ) -> str | None:
        return "returns_error" if (kind, place, client) == (messages.ASK, round_, 0) else None

    monkeypatch.setattr(FaultRates, "sample", fail)


def charged(capsys: pytest.CaptureFixture[str]) -> float:
    """Return what the only run on its data is accounted with."""
    capsys.readouterr()
    assert cli.run(["account", "spent", "output=json"]) == 0
    [output] = json.loads(capsys.readouterr().out)["runs"]
    return float(output["epsilon"])


@kills(
    "fedgen/run/data_budget.py",
    "        counted = ready.with_dropouts().plan\n",
    "        counted = ready.method.plan\n",
)
@kills("fedgen/run/snapshot.py", "            ready = ready.counting_dropouts(", "            id(")
def test_a_failure_counts_before_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the snapshot, and in the cost of the data."""
    entered = partial(charged, capsys)
    monkeypatch.setenv("FEDGEN_HOME", str(tmp_path / "home"))
    run = tmp_path / "run"
    fail_in(monkeypatch, 4)
    command = ["train", *DRAWN, "privacy.noise=secure", "rounds=8", f"run_dir={run}"]
    assert cli.run(command) == 2
    assert (run / "unanswered").exists()
    failed, so_far = entered(), load_snapshot(run).spent
    assert failed > 10
    ready = settings.setup(compose("config", command[1:]))
    shown = with_sampling_revealed(canonical(ready.method.plan.server_event(4)))
    seen = epsilon(shown, 1e-5, ready.method.plan.relation)
    for result in so_far.values():
        assert result.or_infinity >= seen.or_infinity > 0
    monkeypatch.setattr(FaultRates, "sample", lambda *_: None)
    assert cli.run(["train", f"resume={run}"]) == 0
    views = json.loads((run / "privacy.json").read_text())["views"]
    assert entered() == pytest.approx(views["server"]["epsilon"])
    assert failed <= views["server"]["epsilon"]
    assert views["server"]["epsilon"] > so_far["server"].or_infinity


@kills(
    "fedgen/run/data_budget.py",
    "run_dir.unanswered.exists() or set(run_dir.failures()) - set(NON_DROPOUTS)",
    "run_dir.unanswered.exists()",
)
def test_a_run_directory_records_a_failure_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No account is kept of experiments elsewhere."""
    run = tmp_path / "run"
    fail_in(monkeypatch, 2)
    assert cli.run(["train", *DRAWN, "rounds=4", f"run_dir={run}"]) == 2
    monkeypatch.setattr(FaultRates, "sample", lambda *_: None)
    assert cli.run(["train", f"resume={run}"]) == 0
    before = (run / "privacy.json").read_text()
    (run / "unanswered").unlink()
    assert cli.run(["train", f"resume={run}"]) == 0
    assert (run / "privacy.json").read_text() == before


@kills(
    "fedgen/run/data_budget.py",
    "(outside and SpendDb.default().has_dropout(name, reserved=not training))",
    "False",
)
@pytest.mark.parametrize("back", ["a copy from before", "without the mark", "over, without it"])
def test_a_run_directory_does_not_forget_a_failure(
    back: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entered = partial(charged, capsys)
    monkeypatch.setenv("FEDGEN_HOME", str(tmp_path / "home"))
    run, before = tmp_path / "run", tmp_path / "before"
    interrupted(4, *EIGHT, f"run_dir={run}")
    shutil.copytree(run, before)
    # the whole cohort, so that no client is charged: a ledger that is behind would be refused
    fail = {messages.ASK: "returns_error"}
    monkeypatch.setattr(FaultRates, "sample", lambda *args: fail.get(args[3]))
    assert cli.run(["train", f"resume={run}"]) == 2
    monkeypatch.setattr(FaultRates, "sample", lambda *_: None)
    failed = entered()
    assert failed > 10
    if back == "over, without it":
        assert cli.run(["train", f"resume={run}"]) == 0
    if back == "a copy from before":
        shutil.rmtree(run)
        before.rename(run)
        assert load_snapshot(run).spent["server"].or_infinity > 8
    else:
        (run / "unanswered").unlink()
    assert cli.run(["train", f"resume={run}"]) == 0
    views = json.loads((run / "privacy.json").read_text())["views"]
    assert views["server"]["epsilon"] == pytest.approx(entered())
    assert entered() == pytest.approx(failed)


@kills(
    "fedgen/run/data_budget.py",
    'return ready.privacy.noise == "secure" and not training and client_died(run_dir)',
    "return False",
)
@kills("fedgen/privacy/ledger.py", "        self._reserved.touch()", "        pass")
@kills("fedgen/run/snapshot.py", "training=not quiet", "training=True")
@kills("fedgen/run/snapshot.py", "training=not quiet", "training=False")
@kills(
    "fedgen/run/train.py",
    "            died = self._reserves and has_dropout(",
    "            died = False and has_dropout(",
)
@kills(
    "fedgen/federation/client/app.py",
    "            ctx.ledger.reserve()  # until the charge",
    "            pass",
)
def test_a_death_during_a_response_may_reveal_its_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Noticed after a round, if another process responds in its place, and by a resumed run; then
    counted like a failure."""
    monkeypatch.setenv("FEDGEN_HOME", str(tmp_path / "home"))
    run, other = tmp_path / "run", tmp_path / "other"
    command = [*DRAWN, "privacy.noise=secure", "rounds=8", "sample_every=1"]
    died: list[Ledger] = []

    def die(self: Ledger) -> None:
        """Mark that the process of client 4 died in round 3, before or now."""
        reserve(self)
        if (self._client, self.releases) == (4, 3):
            died.append(self)
            if run.exists() and not other.exists():
                reserve(self)
            else:
                raise KeyboardInterrupt

    reserve = Ledger.reserve
    monkeypatch.setattr(Ledger, "reserve", die)
    with pytest.raises(NoResponseError, match="died during a response"):
        training.train(compose("config", [*command, f"run_dir={run}"]))
    assert (run / "unanswered").exists()
    with pytest.raises(Interrupted, match="during a response, so that it resumes at a larger ε"):
        training.train(compose("config", [*command, f"run_dir={other}"]))
    assert len(died) == 2
    monkeypatch.setattr(Ledger, "reserve", reserve)
    assert not (other / "unanswered").exists()
    gone, there = load_snapshot(other).spent["server"], load_snapshot(run).spent["server"]
    assert gone.or_infinity == there.or_infinity, "on its page, too"
    with RunDir(other).locked("run"):  # as it trains on, an answer is on its way
        assert load_snapshot(other).spent["server"].or_infinity < gone.or_infinity
    epsilons = []
    for place, home in ((other, "another"), (run, "home")):  # one resumes on another machine
        monkeypatch.setenv("FEDGEN_HOME", str(tmp_path / home))
        assert cli.run(["train", f"resume={place}"]) == 0
        views = json.loads((place / "privacy.json").read_text())["views"]
        epsilons += [view["epsilon"] for view in views.values()]
    ready = settings.setup(compose("config", command))
    shown = with_sampling_revealed(canonical(ready.method.plan.server_event(8)))
    least = epsilon(shown, 1e-5, ready.method.plan.relation).or_infinity
    assert min(epsilons) >= least * (1 - 1e-9) > 10


@kills(
    "fedgen/privacy/spend_db.py",
    "if self.reserve is not None and self.has_dropout and not self.is_finished:",
    "if False:",
)
@kills(
    "fedgen/run/data_budget.py",
    "died = not known or (quiet and client_died(RunDir(folder)))",
    "died = not known",
)
@kills(
    "fedgen/run/data_budget.py",
    "check_budget(budget, delta, entry, list(map(_as_left, others)))",
    "check_budget(budget, delta, entry, others)",
)
@pytest.mark.parametrize("left", ["all", "a reservation", "a mark", "no folder"])
def test_a_death_is_charged_without_the_run_directory(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its account, also for a copy made before the death; or, for a client on a machine with
    another account, by its folder, whose absence counts as a death."""
    monkeypatch.setenv("FEDGEN_HOME", str(tmp_path / "home"))
    run, copy = tmp_path / "run", tmp_path / "copy"
    interrupted(2, *EIGHT, f"run_dir={run}")
    quiet = charged(capsys)
    shutil.copytree(run, copy)
    if left == "a reservation":
        SpendDb.default().reserve(json.loads((run / "run.json").read_text())["run"], 4)
    if left == "a mark":
        (run / "clients" / "4" / "answering").touch()
        with RunDir(run).locked("run"):  # as it trains on, a response is on its way
            assert charged(capsys) == quiet
    elif left != "all":
        shutil.rmtree(run)
    second = ["train", *EIGHT, f"run_dir={tmp_path / 'second'}"]
    admitted = cli.run([*second, f"privacy.budget_epsilon={1.8 * quiet}"]) == 0
    assert admitted == (left == "all")
    if admitted:
        return
    assert "privacy.budget_epsilon: other runs on these data (1) cost" in capsys.readouterr().err
    counted = charged(capsys)
    assert counted > 1.5 * quiet
    resumed = run if left == "a mark" else copy
    assert cli.run(["train", f"resume={resumed}"]) == 0
    views = json.loads((resumed / "privacy.json").read_text())["views"]
    assert views["server"]["epsilon"] == pytest.approx(charged(capsys))
    # of a folder that comes back with no mark nothing was known
    assert charged(capsys) == pytest.approx(quiet if left == "no folder" else counted)


def test_concurrent_readers_do_not_block_each_other(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    place = RunDir(tmp_path)
    with place.reading() as first, place.reading() as second:
        assert first and second
        with pytest.raises(FedgenError, match="in use"), place.locked("run"):
            pass
    with place.locked("run"), place.reading() as quiet:
        assert not quiet


def test_a_dropout_may_take_a_run_beyond_the_budget_of_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not resume, and what it spent without amplification stays spent."""
    monkeypatch.setenv("FEDGEN_HOME", str(tmp_path / "home"))
    run = tmp_path / "run"
    fail_in(monkeypatch, 4)
    command = ["train", *DRAWN, "privacy.noise=secure", "rounds=8", "privacy.budget_epsilon=11"]
    assert cli.run([*command, f"run_dir={run}"]) == 2
    monkeypatch.setattr(FaultRates, "sample", lambda *_: None)
    capsys.readouterr()
    assert cli.run(["train", f"resume={run}"]) == 2
    assert "fedgen: privacy.budget_epsilon: this run costs ε = " in capsys.readouterr().err
    assert not (run / "privacy.json").exists()


@kills(
    "fedgen/run/train.py",
    "        until = min(self._until or budget.rounds, budget.rounds)",
    "        until = self._until or budget.rounds",
)
@kills("fedgen/run/calibrate.py", "else replace(privacy, budget=budget)", "else privacy")
@pytest.mark.parametrize("value", [[], ["rounds=11"]], ids=["resumed", "shortened"])
def test_a_target_ends_a_run_whose_samples_were_revealed(
    value: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a noise multiplier, the target also limits a run whose amplification was lost, which may
    then stop before the requested rounds."""
    run = tmp_path / "run"
    fail_in(monkeypatch, 2)
    command = ["train", *DRAWN, "rounds=12", "privacy.target_epsilon=10", f"run_dir={run}"]
    assert cli.run([*command, "privacy.noise_multiplier=1.1"]) == 2
    monkeypatch.setattr(FaultRates, "sample", lambda *_: None)
    assert cli.run(["train", f"resume={run}", *value]) == 0
    record = json.loads((run / "privacy.json").read_text())
    assert 0 < record["rounds"] < 11
    assert all(view["epsilon"] <= 10 for view in record["views"].values())


@kills(
    "fedgen/run/calibrate.py",
    "return privacy if spent else replace",
    "return replace",
)
def test_a_death_after_more_rounds_than_the_target_allows_costs_all_planned_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the death may depend on the samples, so the ε of the rounds until then is not a
    bound: it could have come after the round with the most samples."""
    monkeypatch.setenv("FEDGEN_HOME", str(tmp_path / "home"))
    run = tmp_path / "run"
    words = [*DRAWN, "privacy.noise=secure", "rounds=12", "sample_every=1"]
    words += ["privacy.target_epsilon=10", "privacy.noise_multiplier=0.8"]
    interrupted(6, *words, f"run_dir={run}")
    SpendDb.default().reserve(json.loads((run / "run.json").read_text())["run"], 4)
    assert cli.run(["train", f"resume={run}"]) == 0
    record = json.loads((run / "privacy.json").read_text())
    ready = settings.setup(compose("config", [*words, f"run_dir={run}"]))
    plan, budget = ready.method.plan, ready.privacy.budget
    planned = canonical(plan.server_event(budget.samples_per_client))
    revealed = epsilon(with_sampling_revealed(planned), 1e-5, plan.relation)
    assert record["rounds"] > 6, "which costs no more"
    assert 10 < record["views"]["server"]["epsilon"] == pytest.approx(revealed.or_infinity)


def test_a_failed_client_is_marked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a process that dies at that moment leaves no trace of it."""
    run = tmp_path / "run"
    command = [*TINY, *NOISE, "partition=iid", "partition.clients=4", "privacy.noise=secure"]
    seen = []

    def die(self: RunDir, line: dict[str, object]) -> None:
        seen.append(self.unanswered.exists())
        raise KeyboardInterrupt

    monkeypatch.setattr(RunDir, "add_failure", die)
    cli.run(["train", *command, "runtime.faults.returns_error=0.5", f"run_dir={run}"])
    assert seen[0]


@kills("fedgen/federation/rounds.py", 'raise _UnusableError("unplanned")', "pass")
def test_responses_with_other_noise_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of clients of another version: the ε of the release depends on the noise of all."""
    whole = settings.setup

    def other(config: DictConfig) -> Setup:
        ready = whole(config)
        return replace(ready, program=lambda: ready.at_noise(0.01).client)

    monkeypatch.setattr(settings, "setup", other)
    run = tmp_path / "run"
    command = [*TINY, *FEDERATED, "partition.clients=4", f"run_dir={run}"]
    assert cli.run(["train", *command, "privacy.adversary=release"]) == 2
    assert "(unplanned: clients 0, 1, 2, 3)" in capsys.readouterr().err
    assert not list((run / "public").iterdir())


def test_a_run_resumes_with_its_initial_noise(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(*FEDERATED, "partition.clients=4")
    file = run / "run.json"
    identity = json.loads(file.read_text())
    file.write_text(json.dumps({**identity, "noise_multiplier": "0.5"}))
    capsys.readouterr()
    assert cli.run(["train", f"resume={run}"]) == 2
    assert "began with noise multiplier 0.5" in capsys.readouterr().err


def test_an_altered_configuration_is_refused(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in mode secure: min_success decides over amplification."""
    run = train(*FEDERATED, "partition.clients=4", "privacy.noise=secure")
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("min_success: 1.0", "min_success: 0.5"))
    capsys.readouterr()
    assert cli.run(["train", f"resume={run}"]) == 2
    assert "was altered" in capsys.readouterr().err


@kills(
    "fedgen/federation/rounds.py",
    "clients = len(self.strategy.nodes)\n        if",
    "clients = len(sent)\n        if",
)
def test_the_share_of_keep_messages_is_that_of_all_clients(train: Train) -> None:
    """Dead clients never keep their changed state, and soon are half of those with one."""
    cohorts = ["method.routing=per_step", "method.responders=10", "method.critics_per_step=2"]
    dying = ["runtime.faults.vanishes=0.006", "runtime.min_success=0.6", "seed=2"]
    words = ["method=gs_wgan_small", "partition=iid", "partition.clients=30", *cohorts, *dying]
    words += ["method.warm_start=0", "method.critic_steps=1", "runtime=in_process"]
    run = train(*words, "runtime.checkpoint_every=1", "rounds=20")
    failures = [json.loads(line) for line in (run / "failures.jsonl").read_text().splitlines()]
    assert len({failure["client"] for failure in failures}) > 5


def test_the_mean_is_over_the_responders() -> None:
    from fedgen.federation.messages import Response
    from fedgen.privacy.events import Unit
    from fedgen.strategies.sample_gradients import SampleGradients

    strategy = SampleGradients(make(3, routing="mean"), STREAMS)
    strategy.nodes = {client: client for client in range(3)}
    from fedgen.methods.api import Query

    strategy.configure_query(0, Query({"images": torch.zeros(2, 1)}))
    event = NonPrivateDpEvent()
    answers = {
        client: Response({"answer": torch.full((2, 1), value).numpy()}, event, Unit.CLIENT)
        for client, value in ((0, 3.0), (2, 5.0))
    }
    mean = strategy.aggregate_query(0, answers, 2)
    assert mean is not None
    assert mean.flatten().tolist() == [4.0, 4.0]


class Script(GridWrapper):
    """Replies from a list."""

    def __init__(self, replies: list[list[Message]]) -> None:
        self.replies = replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [m.metadata.message_id for m in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.replies.pop(0)


def message(name: str) -> Message:
    from fedgen.federation.flower_compat import identify_process, set_message_id

    identify_process(1)
    content = RecordDict({"facts": ConfigRecord({"place": 0})})
    made = Message(content, dst_node_id=2, message_type=messages.ASK)
    set_message_id(made, name)
    return made


def test_a_late_reply_is_an_error_until_a_later_call() -> None:
    asked = message("7")
    reply = Message(asked.content, reply_to=asked)
    grid = FaultyGrid(Script([[reply], [], []]), FaultRates(late=1.0), STREAMS)
    grid._clients[2] = 0
    grid.push_messages([asked])
    [error] = grid.pull_messages(["7"])
    assert error.error == Error(DEADLINE)
    assert error.metadata.reply_to_message_id == "7"
    assert list(grid.pull_messages(["8"])) == [reply]
    assert list(grid.pull_messages(["8"])) == []


ALL = [
    "runtime.faults.raises=0.02",
    "runtime.faults.returns_error=0.02",
    "runtime.faults.hangs=0.0015",
    "runtime.faults.wrong_shape=0.02",
    "runtime.faults.nan=0.02",
    "runtime.faults.dies=0.003",
    "runtime.faults.late=0.02",
    "runtime.faults.twice=0.02",
    "runtime.faults.vanishes=0.001",
    "runtime.timeout=2",
    "runtime.min_success=0.4",
]


@pytest.mark.slow
def test_all_faults_at_once(train: Train, tmp_path: Path) -> None:
    """60 rounds, 20 clients, all kinds of faults, and one death of the server: the run ends, and an
    independent count of the messages confirms the ledgers."""
    rounds, clients = 60, 20
    run = tmp_path / "run"
    settings = [*TINY, *FEDERATED, *NOISE, f"partition.clients={clients}", f"rounds={rounds}"]
    settings += ["method.batch=2", "runtime=ray", "runtime.num_cpus=0.5", "runtime.actors=2"]
    settings += ["runtime.checkpoint_every=15", "log_every=20", *ALL]
    settings += ["runtime.faults.server_dies=36"]
    assert Command(["train", *settings, f"run_dir={run}"]).wait() == -9
    assert not (run / "results.json").exists()
    assert cli.run(["train", f"resume={run}"]) == 0
    rates = (setting.removeprefix("runtime.faults.").split("=") for setting in ALL[:-2])
    faults = FaultRates(**{name: float(rate) for name, rate in rates})
    releases = {}
    for client in range(clients):
        charged, slept, gone = set(), set(), False
        for server_round in range(rounds):
            for kind in (messages.TRAIN, messages.ASK):
                fault = fault_of(faults, client, kind, server_round)
                gone |= fault == "vanishes"
            if not gone and fault not in ("raises", "returns_error"):
                (slept if fault == "hangs" else charged).add(server_round)
        result = ledger(run, client)
        assert len(set(result)) == len(result), "nothing is counted twice"
        # who slept past the deadline answers late, or not at all if the next round has begun
        assert charged <= set(result) <= charged | slept, client
        releases[str(client)] = rounds if gone else len(result)  # who is gone tells no ledger's sum
    privacy = json.loads((run / "privacy.json").read_text())
    assert {c: result["releases"] for c, result in privacy["clients"].items()} == releases
    for client in privacy["clients"].values():
        assert sum(count for _, count in client["events"]) == 2 * rounds
    kinds = {failure["kind"] for failure in lines(run / "failures.jsonl")}
    assert {"raised", "failed", "deadline", "malformed", "not finite", "unavailable"} <= kinds
    assert {"late", "repeated"} <= kinds
    assert len(list(run.glob("clients/*/died.*"))) >= 2
