"""Malicious clients: any message counts as one failure of its client, without a cost for others."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hostile import lying
from mutation import kills
from tiny import TINY

import fedgen
from fedgen import cli
from fedgen.config.compose import compose
from fedgen.errors import Interrupted
from fedgen.federation import messages
from fedgen.federation.rounds import RunState
from fedgen.run import train
from fedgen.run.setup import Setup

CLIENTS = 4
RUN = [*TINY, "partition=iid", f"partition.clients={CLIENTS}", "method.routing=per_sample"]
RUN += ["method.warm_start=0", "runtime.min_success=0.5"]
Content = RecordDict


GAUSSIAN = {"event": "gaussian", "noise_multiplier": 1.0}


def array(dtype: str, shape: tuple[int, ...], data: bytes, kind: str = "fedgen.raw") -> Array:
    return Array(dtype=dtype, shape=shape, stype=kind, data=data)


def with_array(made: Callable[[Array], Array]) -> Callable[[Content], None]:
    def lie(content: Content) -> None:
        record = content.array_records["arrays"]
        content["arrays"] = ArrayRecord({"answer": made(record["answer"])})

    return lie


def filled(value: float) -> Callable[[Content], None]:
    return with_array(
        lambda a: array("float32", a.shape, np.full(a.shape, value, np.float32).tobytes())
    )


def with_facts(**facts: Any) -> Callable[[Content], None]:
    def lie(content: Content) -> None:
        known = dict(content.config_records["facts"])
        content["facts"] = ConfigRecord({**known, **facts})

    return lie


def with_event(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Content], None]:
    def lie(content: Content) -> None:
        event = json.loads(str(content.config_records["facts"]["event"]))
        with_facts(event=json.dumps(edit(event)))(content)

    return lie


def leaves(edit: Callable[[dict[str, Any]], None]) -> Callable[[Content], None]:
    """Edit the innermost event."""

    def change(event: dict[str, Any]) -> dict[str, Any]:
        inner = event
        while "noise_multiplier" not in inner:
            inner = inner["of"] if inner["event"] == "repeat" else inner["gates"]
        edit(inner)
        return event

    return with_event(change)


def poisson(rate: float) -> dict[str, Any]:
    return {"event": "poisson", "rate": rate, "gates": GAUSSIAN}


ANSWERS: dict[str, Callable[[Content], None]] = {
    "complex": with_array(lambda a: array("complex64", a.shape, a.data + a.data)),
    "whole numbers": with_array(lambda a: array("int64", a.shape, a.data + a.data)),
    "objects": with_array(lambda a: array("object", a.shape, a.data + a.data)),
    "no type": with_array(lambda a: array("x" * 1000, a.shape, a.data)),
    "pickled": with_array(lambda a: array("float32", a.shape, a.data, "numpy.ndarray")),
    "cut short": with_array(lambda a: array("float32", a.shape, a.data[:-3])),
    "a huge shape": with_array(lambda a: array("float32", (2**40, 2**40), a.data)),
    "a negative shape": with_array(lambda a: array("float32", (-1, -1), a.data)),
    "another shape": with_array(lambda a: array("float32", (len(a.data) // 4,), a.data)),
    "NaN": filled(math.nan),
    "infinity": filled(math.inf),
    "numbers of a million": filled(1e6),
    "no arrays": lambda content: content.__setitem__("arrays", ArrayRecord({})),
    "no record": lambda content: content.pop("arrays"),
    "an empty word": with_facts(unit=""),
    "no facts": lambda content: content.pop("facts"),
    "no unit": with_facts(unit="galaxy"),
    "no words": with_facts(event=7),
    "no json": with_facts(event="{"),
    "deep": with_facts(event='{"event":' * 100_000),
    "deep and short": with_facts(event="[" * 9_000),
    "unknown": with_event(lambda e: {"event": "trust me"}),
    "a list": with_event(lambda e: [e, e]),
    "no noise at all": with_event(lambda e: {"event": "non_private"}),
    "sigma 0": leaves(lambda e: e.update(noise_multiplier=0)),
    "sigma NaN": leaves(lambda e: e.update(noise_multiplier=math.nan)),
    "sigma of words": leaves(lambda e: e.update(noise_multiplier="a")),
    "less noise": leaves(lambda e: e.update(noise_multiplier=1e-3)),
    "a count": with_event(lambda e: {"event": "repeat", "count": 10**400, "of": e}),
    "a million": with_event(lambda e: {"event": "repeat", "count": 10**6, "of": e}),
    "a rate": with_event(lambda e: poisson(-2.0)),
    "another rate each time": with_event(lambda e: poisson(random.random())),
    "less than none": with_event(lambda e: {"event": "repeat", "count": -1, "of": e}),
}


@kills(
    "fedgen/federation/rounds.py",
    "not self._is_planned(spend) or not",
    "False and not",
    case="a million",
)
@kills(
    "fedgen/federation/rounds.py",
    "            self._record_spend(client, NonPrivateDpEvent())  # it left",
    "            pass  # it left",
    case="a million",
)
@kills(
    "fedgen/federation/rounds.py",
    "if (norms > self.method.plan.max_norm).any():",
    "if False:",
    case="numbers of a million",
)
@pytest.mark.parametrize("name", ANSWERS)
def test_a_false_reply_is_a_failure_of_one_client(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying(monkeypatch, messages.ASK, ANSWERS[name])
    run = tmp_path / "run"
    assert cli.run(["train", *RUN, f"run_dir={run}"]) == 0
    failures = [json.loads(line) for line in (run / "failures.jsonl").read_text().splitlines()]
    assert failures and {failure["client"] for failure in failures} == {0}
    assert {f["kind"] for f in failures} <= {"malformed", "unplanned", "not finite", "too long"}
    record = json.loads((run / "privacy.json").read_text())
    for client in range(1, CLIENTS):
        assert 0 < record["clients"][str(client)]["server"] <= 10
    # what left it at a cost of its own has no bound; what is no release costs what was asked
    unplanned = "unplanned" in {failure["kind"] for failure in failures}
    assert (record["clients"]["0"]["server"] is None) == unplanned
    assert record["without_bound"] == ([0] if unplanned else [])
    for view in record["views"].values():
        assert 0 < view["epsilon"] <= 10, "of all others"


@pytest.mark.parametrize("number", [1, CLIENTS, -1, 10**30, "x", "", 0.5, None])
def test_a_client_under_the_name_of_another_is_refused(
    number: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = ConfigRecord({} if number is None or number == 10**30 else {"partition": number})
    lying(monkeypatch, messages.HELLO, lambda content: content.__setitem__("facts", facts))
    assert cli.run(["train", *RUN, f"run_dir={tmp_path}/run"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


ACCOUNTS: dict[str, Callable[[Content], None]] = {
    "missing": lambda content: content.pop("facts"),
    "no spend": with_facts(spend="null"),
    "many": with_facts(spend='[[{"event": "non_private"}, 1' + "0" * 400 + "]]"),
    "less than none": with_facts(spend='[[{"event": "non_private"}, -5]]'),
    "a share": with_facts(spend='[[{"event": "non_private"}, 0.5]]'),
    "deep": with_facts(spend="[" * 100_000),
    "releases of words": with_facts(releases="many"),
}


@kills(
    "fedgen/federation/rounds.py",
    "if not self._is_planned(account.spend) or max_count > self._most_rows:",
    "if False:",
)
@pytest.mark.parametrize(
    "event", [{"event": "non_private"}, poisson(0.1), GAUSSIAN | {"noise_multiplier": math.nan}]
)
def test_a_false_spend_never_lowers_epsilon(
    event: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts like a failure over private records: only the client's ledger has the truth."""
    lying(monkeypatch, messages.ACCOUNT, with_facts(spend=json.dumps([[event, 1]])))
    run = tmp_path / "run"
    assert cli.run(["train", *RUN, f"run_dir={run}"]) == 0
    record = json.loads((run / "privacy.json").read_text())
    assert record["clients"]["0"]["server"] is None
    assert record["without_bound"] == [0]
    for file in ("PRIVACY.md", "README.md"):
        assert "For 1 of the 4 clients there is no" in (run / "public" / file).read_text()
    described = json.loads((run / "public" / "generator.json").read_text())["privacy"]
    assert described["without_bound"] == {"clients": 1, "of": 4}
    assert json.loads((run / "results.json").read_text())["without_bound"] == 1
    assert set(fedgen.load(run).epsilons.values()) == {math.inf}
    page = tmp_path / "page.html"
    for audience in ("server", "public"):
        words = [f"runs={run}", f"audience={audience}", f"out={page}"]
        assert cli.run(["report", *words]) == 0
        head = page.read_text().partition("<h2")[0]
        assert "For 1 of the 4 clients there is no" in head
    assert all(0 < record["clients"][str(other)]["server"] <= 10 for other in range(1, CLIENTS))


def test_a_spend_beyond_the_queries_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would have the largest ε of all."""

    def lie(content: Content) -> None:
        [[event, _]] = json.loads(str(content.config_records["facts"]["spend"]))
        with_facts(spend=json.dumps([[event, 10**6]]))(content)

    lying(monkeypatch, messages.ACCOUNT, lie)
    run = tmp_path / "run"
    assert cli.run(["train", *RUN, f"run_dir={run}"]) == 0
    record = json.loads((run / "privacy.json").read_text())
    assert record["without_bound"] == [0]
    assert 0 < record["views"]["server"]["epsilon"] <= 10


@kills(
    "fedgen/run/train.py",
    "elementwise_max(state.spends.get(client, {}), account.spend)",
    "account.spend",
)
@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_a_false_spend_survives_a_resume(
    noise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it came after the last checkpoint, or is in it, where no ledger has it."""
    for every in (1, 1000):
        run = tmp_path / str(every)

        def stop(ready: Setup, state: RunState, content: object) -> None:
            if state.rounds == 2:
                raise KeyboardInterrupt

        words = [*RUN, "sample_every=1", f"runtime.checkpoint_every={every}", f"run_dir={run}"]
        # of 100 samples: by secret streams, the liar goes unasked once in 10^12
        words += [f"privacy.noise={noise}", "method.batch=100"]
        with monkeypatch.context() as patch:
            lying(patch, messages.ASK, ANSWERS["less noise"])
            with pytest.raises(Interrupted):
                train.train(compose("config", words), watch=stop)
        assert cli.run(["train", f"resume={run}"]) == 0
        record = json.loads((run / "privacy.json").read_text())
        assert record["without_bound"] == [0]
        assert record["views"]["release"]["epsilon"] == record["views"]["server"]["epsilon"]


@pytest.mark.parametrize("name", ACCOUNTS)
def test_an_invalid_account_does_not_stop_a_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying(monkeypatch, messages.ACCOUNT, ACCOUNTS[name])
    run = tmp_path / "run"
    assert cli.run(["train", *RUN, f"run_dir={run}"]) == 0
    record = json.loads((run / "privacy.json").read_text())
    for view in record["views"].values():
        assert view["epsilon"] is not None and 0 < view["epsilon"] <= 10
