"""A run extended by more rounds: at its initial noise, each round charged."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from forked import Command
from hostile import content, copied
from mutation import kills
from tiny import Train, fingerprint, tiny

from fedgen import cli
from fedgen.config.compose import compose
from fedgen.errors import Interrupted
from fedgen.federation.rounds import RunState
from fedgen.privacy.spend_db import SpendDb
from fedgen.run import train as training
from fedgen.run.setup import Setup

BY_NOISE = ["privacy.target_epsilon=null", "privacy.noise_multiplier=2.0"]
BOTH = ["method=dpgan_small", "privacy.target_epsilon=0.3", "privacy.noise_multiplier=2"]
SEVERAL = ["partition=iid", "partition.clients=4", "privacy.aggregation=secure"]


def longer(run: Path, rounds: int, *more: str) -> int:
    return cli.run(["train", f"resume={run}", f"rounds={rounds}", *more])


def asked(run: Path) -> list[int]:
    """Return the number of queries that each client was charged for."""
    record = json.loads((run / "privacy.json").read_text())
    return [sum(count for _, count in each["events"]) for each in record["clients"].values()]


@pytest.mark.parametrize("clients", [[], SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_additional_rounds_are_charged(clients: list[str], noise: str, train: Train) -> None:
    words = [
        "method=dpgan_small",
        *BY_NOISE,
        *clients,
        f"privacy.noise={noise}",
        *(["privacy.threshold=all"] if clients else []),
    ]
    run = train(*words, "rounds=4")
    whole = train(*words, "rounds=9", name="whole")
    first = json.loads((run / "privacy.json").read_text())["views"]["server"]["epsilon"]
    metrics = (run / "metrics.jsonl").read_text()
    assert longer(run, 9) == 0
    assert (run / "metrics.jsonl").read_text().startswith(metrics)
    assert json.loads((run / "results.json").read_text())["rounds"] == 9
    views = [json.loads((place / "privacy.json").read_text())["views"] for place in (run, whole)]
    assert views[0] == views[1], "what a run of so many costs"
    assert views[0]["server"]["epsilon"] > first
    assert asked(run) == asked(whole) == [9] * (4 if clients else 1)
    before = content(run / "public")
    assert cli.run(["train", f"resume={run}"]) == 0  # it is over, of nine rounds
    assert content(run / "public") == before


def test_server_rounds_without_queries_are_free(train: Train) -> None:
    """Within the budget of the single query: the noise does not depend on the number of rounds."""
    run = train("method=dp_merf_small", "rounds=3")
    spent, drawn = asked(run), (run / "public" / "samples.png").read_bytes()
    epsilon = json.loads((run / "privacy.json").read_text())["views"]["server"]["epsilon"]
    assert longer(run, 8) == 0
    assert asked(run) == spent == [1]
    assert json.loads((run / "privacy.json").read_text())["views"]["server"]["epsilon"] == epsilon
    assert (run / "public" / "samples.png").read_bytes() != drawn


@pytest.mark.slow
def test_extensions_interruptions_and_runtimes_give_the_same_bits(
    train: Train, tmp_path: Path
) -> None:
    """The bits of one run of the same length in one process."""
    words = ["method=dpgan_small", *BY_NOISE, *SEVERAL, "rounds=3", "sample_every=1"]
    run = train(*words)
    here = copied(run, tmp_path / "copy")
    assert longer(run, 8) == 0

    def stop(ready: Setup, state: RunState, record: object) -> None:
        if state.rounds == 5:
            signal.raise_signal(signal.SIGINT)

    words = [f"resume={here}", "rounds=6"]
    with pytest.raises(Interrupted):
        training.train(compose("config", words), watch=stop)
    assert longer(here, 8, "runtime=ray", "runtime.actors=2") == 0
    assert fingerprint(here)["generator"] == fingerprint(run)["generator"]
    assert fingerprint(here)["ledgers"] == fingerprint(run)["ledgers"]
    assert fingerprint(here)["privacy"] == fingerprint(run)["privacy"]


def test_client_states_last_as_long_as_the_run(
    tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Critics are deleted at its end; until then it can be extended."""
    words = [*tiny("gs_wgan_small"), "method=gs_wgan_small", *BY_NOISE, "sample_every=1"]

    def stop(ready: Setup, state: RunState, record: object) -> None:
        if state.rounds == 2:
            signal.raise_signal(signal.SIGINT)

    run = tmp_path / "cut"
    with pytest.raises(Interrupted):
        training.train(compose("config", [*words, f"run_dir={run}"]), watch=stop)
    assert longer(run, 5) == 0
    assert json.loads((run / "results.json").read_text())["rounds"] == 5
    before = content(run)
    assert longer(run, 6) == 2
    assert "the states of its clients were deleted" in capsys.readouterr().err
    assert content(run) == before


def test_an_extended_run_is_unfinished_until_it_ends(train: Train, tmp_path: Path) -> None:
    """Its earlier results are set aside: neither their ε nor their generator is valid."""
    run = train("method=dpgan_small", *BY_NOISE, "sample_every=1", "rounds=4")
    left = content(run / "public")

    def stop(ready: Setup, state: RunState, record: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        training.train(compose("config", [f"resume={run}", "rounds=8"]), watch=stop)
    assert not (run / "privacy.json").exists() and not list((run / "public").iterdir())
    assert content(run / "ended_after_4" / "public") == left
    assert cli.run(["release", f"run={run}", f"out={tmp_path}/x.zip"]) == 2
    assert (
        cli.run(["sample", f"run={run}/ended_after_4/public", "n=5", f"out={tmp_path}/x.npz"]) == 0
    )
    assert cli.run(["train", f"resume={run}"]) == 0
    assert json.loads((run / "results.json").read_text())["rounds"] == 8


def test_an_extended_run_is_locked(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train("method=dpgan_small", *BY_NOISE)
    result = []

    def beside(ready: Setup, state: RunState, epsilon: object) -> None:
        result.append(cli.run(["train", f"resume={run}"]))

    training.train(compose("config", [f"resume={run}", "rounds=5"]), watch=beside)
    assert result and set(result) == {2}
    assert "is in use by another process" in capsys.readouterr().err


def test_a_killed_run_must_finish_before_an_extension(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last query was shorter than that of a longer run."""
    words = [*tiny("dpgan_small"), "method=dpgan_small", *BY_NOISE, "rounds=7"]
    words += ["method.discriminator_steps=5", "runtime.checkpoint_every=1000"]
    run = tmp_path / "run"
    killed = Command(["train", *words, "runtime.faults.server_dies=7", f"run_dir={run}"])
    assert killed.wait() != 0
    assert longer(run, 12) == 2
    assert "since its last checkpoint" in capsys.readouterr().err
    assert cli.run(["train", f"resume={run}"]) == 0
    assert longer(run, 12) == 0
    assert asked(run) == [12]


def cut_at(done: int, run: Path, *words: str) -> None:
    def stop(ready: Setup, state: RunState, record: object) -> None:
        if state.rounds == done:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        training.train(compose("config", [*words, f"run_dir={run}"]), watch=stop)


@kills(
    "fedgen/run/train.py",
    (
        "            state.samples = Counter(dict.fromkeys(range(self.clients), "
        "budget.samples_per_client))"
    ),
    "            pass",
    case="dpgan_small-seeded",
)
@pytest.mark.parametrize("noise", ["seeded", "secure"])
@pytest.mark.parametrize("method", ["dpgan_small", "gs_wgan_small", "fedavg_gan"])
def test_an_early_stop_costs_all_planned_rounds(
    method: str, noise: str, tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stopping time may depend on what was observed, which the ε of the rounds until then does
    not cover."""
    words = [*tiny(method), f"method={method}", "sample_every=1", f"privacy.noise={noise}"]
    words += ["privacy.target_epsilon=null", "privacy.noise_multiplier=2", "log_every=1"]
    if method == "fedavg_gan":
        words += [*SEVERAL, "method.sampled_by=clients", "method.cohort_size=2"]
    run = tmp_path / "cut"
    cut_at(2, run, *words, "rounds=9")
    capsys.readouterr()
    assert longer(run, 1) == 2
    assert "cannot be 1: 2 are done; give 2 or more" in capsys.readouterr().err
    assert longer(run, 4) == 0
    assert "stopped after round 4: it was ended by request" in capsys.readouterr().out
    whole = train(*words, "rounds=9", name="whole")
    records = [json.loads((each / "privacy.json").read_text()) for each in (run, whole)]
    assert records[0]["views"] == records[1]["views"]
    assert records[0]["claimed"] == records[1]["claimed"]
    assert records[0]["rounds"] == 4
    spends = [SpendDb.default().charged(_name(each), 0) for each in (run, whole)]
    if noise == "secure":
        entries = {each.run: each for each in SpendDb.default().runs_on_same_data(_name(run))}
        assert entries[_name(run)].spend == entries[_name(whole)].spend
        assert spends[0] != spends[1]
    before, record = content(run / "public"), (run / "privacy.json").read_text()
    assert cli.run(["train", f"resume={run}"]) == 0
    assert (content(run / "public"), (run / "privacy.json").read_text()) == (before, record)
    for rounds, result in (
        (12, "was ended by request"),
        (5, "was ended by request after 4 of 9"),
    ):
        assert longer(run, rounds) == 2
        assert result in capsys.readouterr().err
    if noise == "seeded":  # what it did is what the whole run did until then
        [first, second] = (each / "samples" / "round_000004.png" for each in (run, whole))
        assert first.read_bytes() == second.read_bytes()


def _name(run: Path) -> str:
    return str(json.loads((run / "run.json").read_text())["run"])


@pytest.mark.parametrize(
    "words, rounds, why",
    [
        (["method=dpgan_small"], 9, "to meet privacy.target_epsilon=10"),
        (["method=dpgan_small", *BY_NOISE], 3, "is over, after 3"),
        (["method=dpgan_small", *BY_NOISE], 0, "at least 1"),
        (["method=mixture_small"], 90, "rounds with these settings"),
        ([*BOTH, "rounds=50"], 60, "privacy.target_epsilon ends it after"),
    ],
)
def test_invalid_extensions_are_one_line_and_change_nothing(
    words: list[str], rounds: int, why: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(*words)
    before = content(run)
    assert longer(run, rounds) == 2
    error = capsys.readouterr().err
    assert error.startswith("fedgen: rounds: ") and why in error and len(error.splitlines()) == 1
    assert content(run) == before


@kills("fedgen/run/train.py", "register_run(ready, run_dir, name)  # it may cost more now", "pass")
def test_an_extension_respects_the_budget_of_the_data(
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Over all secure runs on the data: a refused extension changes nothing."""
    monkeypatch.setenv("FEDGEN_HOME", str(tmp_path / "home"))
    words = ["method=dpgan_small", *BY_NOISE, "privacy.noise=secure", "privacy.budget_epsilon=0.4"]
    run = train(*words)
    before = content(run)
    assert longer(run, 40) == 2
    assert "privacy.budget_epsilon" in capsys.readouterr().err
    assert content(run) == before
    assert longer(run, 5) == 0
