"""``fedgen tune``: the published run is the best of a secret number, and ε covers the choice."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Command, until
from mutation import kills
from omegaconf import OmegaConf

from fedgen import cli
from fedgen.commands import tune as tuning
from fedgen.federation import checkpoint
from fedgen.methods.families.scoring import SCORE
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import Relation, Selection, total
from fedgen.privacy.ledger import spend_from_json
from fedgen.storage.folders import locked_folder
from fedgen.storage.run_dir import RunDir
from fedgen.verify import verify

ADD = Relation.ADD_OR_REMOVE_ONE
GRID = """
base: [method=mixture_small, method.dct_size=4]
axes:
  -
    - method.components=2 method.clusters=1
    - method.components=6 method.clusters=1
    - method.components=6 method.clusters=2
"""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Return a command that takes seconds and samples four runs, three of them at one point."""
    (tmp_path / "grid.yaml").write_text(GRID)
    return [
        "tune",
        f"grid={tmp_path / 'grid.yaml'}",
        f"run_dir={tmp_path / 'tuned'}",
        *("mean_runs=4", "seed=9", "privacy.target_epsilon=8", "score_samples=1000"),
        *("runtime.threads=1", "evaluation=none", "logger=none"),
    ]


def content(path: Path) -> Any:
    return json.loads(path.read_text())


def score_of(run: Path) -> float:
    saved = checkpoint.load(RunDir(run).checkpoints)
    assert saved is not None
    return float(saved[0].server[SCORE])


@pytest.mark.slow
@kills("fedgen/commands/tune.py", "scores.index(max(scores))", "scores.index(min(scores))")
@kills("fedgen/commands/tune.py", "run.score.run_index = index", "run.score.run_index = 0")
@kills("fedgen/run/privacy_record.py", "return dict(self.selected.client_spends)", "pass")
def test_the_best_of_several_runs_is_published(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*words, "evaluation=quick", "evaluation.samples=500"]) == 0
    said = capsys.readouterr().out
    assert "selected from a grid of 3 points: method=mixture_small" in said
    assert "gen2real cnn" in said
    place, selected = tmp_path / "tuned", tmp_path / "tuned" / "selected"
    sampled = content(place / "tuning.json")["sampled_points"]
    others = sorted((place / "runs").iterdir())
    assert len(sampled) == len(others) + 1 > 2
    assert score_of(selected) == max(map(score_of, [selected, *others]))
    assert len({score_of(run) for run in [selected, *others]}) == len(sampled)  # noise of their own
    # the release costs the target, the operator's view all runs together
    record = content(selected / "privacy.json")
    views = record["views"]
    assert 7.95 < views["release"]["epsilon"] <= 8
    spends = [
        spend_from_json(content(run / "privacy.json")["clients"]["0"]["events"]) for run in others
    ]
    ours = spend_from_json(record["clients"]["0"]["events"])
    rest = total(spends)
    of_one = {event: count - rest.get(event, 0) for event, count in ours.items()}
    assert sum(of_one.values()) >= 5 and min(of_one.values()) >= 0
    server = epsilon(ours, 1e-5, ADD).or_infinity
    assert views["server"]["epsilon"] == pytest.approx(server)
    assert record["selection"] == {"grid_points": 3, "mean_runs": 4.0, "shape": 1.0}
    text = (selected / "public" / "PRIVACY.md").read_text()
    assert "Selected from a grid of 3 settings" in text
    assert "The selection is inside ε" in text and "number is secret" in text
    assert "choice of the best of several runs" not in text
    assert not (selected / "epsilon.png").exists()
    check_that_nothing_is_trained_again([*words, "evaluation=none"], selected)
    check_refusals(words, selected, others[0], capsys)


def check_that_nothing_is_trained_again(words: list[str], selected: Path) -> None:
    before = (selected / "checkpoints" / checkpoint.NAME).stat().st_mtime_ns
    sha256 = content(selected / "results.json")["generator_sha256"]
    assert cli.run(words) == 0
    assert content(selected / "results.json")["generator_sha256"] == sha256
    assert (selected / "checkpoints" / checkpoint.NAME).stat().st_mtime_ns >= before
    assert content(selected / "privacy.json")["views"]["release"]["epsilon"] > 7.95


def check_refusals(
    words: list[str], selected: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refuse commands that would publish unselected runs, or state the ε of one run."""
    out = f"out={selected.parent / 'release.zip'}"
    for command, message in (
        (["release", f"run={other}", out], "is an unselected run of fedgen tune"),
        (["release", f"run={selected}", out, "registry=false"], "privacy.noise=secure"),
        (["attack", f"run={selected}"], "repetitions do not select"),
        (["train", f"resume={selected}", "rounds=900"], "are fixed in a run of fedgen tune"),
    ):
        assert cli.run(command) == 2
        assert message in capsys.readouterr().err
    for audience in ("server", "public"):
        page = selected.parent / f"{audience}.html"
        run = selected if audience == "server" else selected / "public"
        assert cli.run(["report", f"runs={run}", f"out={page}", f"audience={audience}"]) == 0
        assert "Selection among runs by private data is not covered" not in page.read_text()
    (selected / "selection.json").write_text("{}")
    assert cli.run(["train", f"resume={selected}"]) == 2
    assert "altered" in capsys.readouterr().err


@pytest.mark.slow
@kills(
    "fedgen/federation/signed_accounts.py",
    "return self._text(clients, [_bound(spend, 0.0, assumes)])",
    "return self._text(clients, [_bound({}, 0.0, []), _bound(spend, 0.0, assumes)])",
)
@kills("fedgen/commands/tune.py", 'if config.privacy.noise == "seeded":', "if True:")
@kills("fedgen/commands/release.py", '"selection" not in privacy', "False")
@kills("fedgen/run/publish.py", '"selection" not in record', "False")
def test_an_interrupted_selection_continues_and_can_be_verified(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With secure noise: runs are sampled once; the release does not reveal their number."""
    words = [*words, "privacy.noise=secure", "jobs=1"]
    place, selected = tmp_path / "tuned", tmp_path / "tuned" / "selected"
    begun = Command(words)
    until(begun, place / "tuning.json")
    begun.send_signal(signal.SIGINT)
    begun.wait()
    sampled = content(place / "tuning.json")["sampled_points"]
    package = place / "release.zip"
    quiet = ["audit=false", "registry=false"]
    with monkeypatch.context() as killed:  # after the selection, before its release
        killed.setattr(tuning, "_publish", lambda *_: "")
        assert cli.run(words) == 0, capsys.readouterr().err
    text = (selected / "public" / "PRIVACY.md").read_text()
    assert "not for release" in text
    assert not (selected / "public" / "account.json").exists()
    capsys.readouterr()
    assert cli.run(["release", f"run={selected}", f"out={package}", *quiet]) == 2
    assert "after fedgen tune has finished" in capsys.readouterr().err
    assert cli.run(words) == 0, capsys.readouterr().err
    assert "not for release" not in (selected / "public" / "PRIVACY.md").read_text()
    assert content(place / "tuning.json")["sampled_points"] == sampled
    assert cli.run(["release", f"run={selected}", f"out={package}", *quiet]) == 0
    rows = verify(str(package))
    assert rows[0][1].startswith("ε = 7.9") or rows[0][1].startswith("ε = 8.0")
    assert any("number of runs" in text for kind, text in rows if kind == "assumed")
    account = content(selected / "public" / "account.json")
    [entry] = account["accounts"]
    signed = json.loads(entry["text"])
    [bound] = signed["bounds"]
    [[event, count]] = bound["events"]
    assert event["event"] == "select" and count == 1 and len(event["alternatives"]) >= 1
    # the number of a run would be a lower limit on the number of runs
    settings = OmegaConf.load(selected / "config.yaml")
    assert settings.score.run_index is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("privacy.adversary=server", "privacy.adversary: must be release"),
        ("privacy.noise_multiplier=1", "privacy.noise_multiplier: cannot be combined"),
        ("privacy.target_mu=1", "privacy.target_mu: cannot be combined"),
        ("privacy=none", "none has no target"),
        ("privacy.budget_epsilon=9", "privacy.budget_epsilon: cannot be combined"),
        ("start=somewhere", "start: is not supported"),
        ("mean_runs=1", "mean_runs: "),
        ("privacy.target_epsilon=0.000001", "is too small for a selection"),
        ("grid=nowhere.yaml", "nowhere.yaml cannot be read"),
        ("grid=nowhere", "grid: there is no 'nowhere'"),
    ],
)
def test_mistakes_are_reported_in_one_line(
    change: str, message: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*words, change]) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1
    assert not (tmp_path / "tuned" / "runs").exists()


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("axes: [[method=mixture_small]]", "contains one point"),
        ("axes: [[held_out=1, held_out=2]]", "sets held_out"),
        ("axes: [[seed=1, seed=2]]", "contains equal points"),
        ("base: [runtime=ray]\naxes: [[rounds=5, rounds=6]]", "sets runtime"),
        ("axes: [[hydra.run.dir=x, rounds=2]]", "is not a setting"),
        ("axes: [['method.x=${oc.env:HOME}', rounds=2]]", "cannot be read"),
        (
            "axes: [[method=gs_wgan_small, method=mixture_small]]",
            "requires noisy sums of all clients",
        ),
        ("axes: x", "cannot be read"),
        ("{}", "cannot be read"),
    ],
)
def test_invalid_grids_are_refused(
    grid: str, message: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "grid.yaml").write_text(grid)
    assert cli.run(words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "tuned" / "runs").exists()


@pytest.mark.slow
@kills("fedgen/commands/tune.py", 'content["plan"] != described', "False")
@kills("fedgen/commands/tune.py", "if any(tune_dir.iterdir()):", "if False:")
def test_a_run_dir_of_another_plan_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "tuned"
    place.mkdir()
    plan = {"event": {}, "grid": [], "noise": "seeded", "seed": 9}
    (place / "tuning.json").write_text(
        json.dumps({"schema": 1, "plan": plan, "sampled_points": [0, 1]})
    )
    assert cli.run(words) == 2
    assert "was started with other settings" in capsys.readouterr().err
    (place / "tuning.json").write_text("{}")
    assert cli.run(words) == 2
    assert "was altered" in capsys.readouterr().err
    (place / "tuning.json").rename(place / "other.json")  # a new sample could be repeated at will
    assert cli.run(words) == 2
    assert "is not empty and has no tuning.json" in capsys.readouterr().err


@pytest.mark.slow
@kills("fedgen/run/privacy_record.py", "own_alone and self.selected is None", "own_alone")
def test_a_selection_among_federated_runs(words: list[str], tmp_path: Path) -> None:
    """With secure sums, nothing public depends on the spend in all runs."""
    several = ["partition=iid", "partition.clients=3", "privacy.aggregation=secure"]
    several += ["runtime=in_process", "mean_runs=1.5"]
    assert cli.run([*words, *several]) == 0
    selected = tmp_path / "tuned" / "selected"
    record = content(selected / "privacy.json")
    assert record["aggregation"]["kind"] == "secure"
    assert record["aggregation"]["if_more_collude"] == []
    assert len(record["clients"]) == 3
    assert "doing so, ε against them" not in (selected / "public" / "PRIVACY.md").read_text()
    public = (selected / "public" / "generator.json").read_text()
    assert f"{record['views']['server']['epsilon']:.6g}"[:6] not in public


@pytest.mark.slow
@kills("fedgen/commands/tune.py", "not math.isfinite(scores[-1])", "False", case="NaN")
@kills("fedgen/commands/tune.py", 'if privacy["stopped"] or', "if", case="stopped")
@pytest.mark.parametrize("kind", ["NaN", "stopped"])
def test_a_run_without_a_score_is_not_selected(
    kind: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If the process of a secure run of DP-SGD dies, repeated responses exhaust the budget before
    the score."""
    load, privacy = checkpoint.load, RunDir.privacy

    def without_score(path: Path) -> Any:
        state, metadata = load(path)
        state.server = {**state.server, SCORE: torch.full((1,), math.nan)}
        return state, metadata

    if kind == "NaN":
        monkeypatch.setattr("fedgen.commands.tune.checkpoint.load", without_score)
    else:
        monkeypatch.setattr(RunDir, "privacy", lambda *at: privacy(*at) | {"stopped": "early"})
    assert cli.run([*words, "mean_runs=1.5"]) == 2
    assert "ended without a score" in capsys.readouterr().err
    assert not (tmp_path / "tuned" / "selected").exists()


def test_a_folder_is_used_by_one_command(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tuned").mkdir()
    with locked_folder(tmp_path / "tuned", "run_dir"):
        assert cli.run(words) == 2
    assert "is in use by another process" in capsys.readouterr().err


def test_the_release_meets_the_target(words: list[str], tmp_path: Path) -> None:
    """Its ε, by the stated event, is within 0.5 % of the target."""
    assert cli.run([*words, "mean_runs=1.5", "privacy.target_epsilon=2"]) == 0
    event = content(tmp_path / "tuned" / "selected" / "selection.json")["event"]
    [(selection, _)] = spend_from_json([[event, 1]]).items()
    assert isinstance(selection, Selection)
    assert 1.99 < epsilon({selection: 1}, 1e-5, ADD).or_infinity <= 2
