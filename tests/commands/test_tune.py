"""``fedgen tune``: the published run is the best of a secret number, and ε covers the choice."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from forked import Command, until
from mutation import kills
from omegaconf import OmegaConf

from fedgen import cli
from fedgen.commands.tune import tune
from fedgen.config.compose import compose
from fedgen.errors import FedgenError
from fedgen.federation import checkpoint
from fedgen.methods.families.scoring import SCORE
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import Relation, Selection, total
from fedgen.privacy.ledger import spend_from_json
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
    """Return a command of seconds, which draws four runs, three of them with one setting."""
    (tmp_path / "grid.yaml").write_text(GRID)
    return [
        "tune",
        f"grid={tmp_path / 'grid.yaml'}",
        f"run_dir={tmp_path / 'tuned'}",
        *("runs=4", "seed=9", "privacy.target_epsilon=8", "score_samples=1000"),
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
@kills("fedgen/commands/tune.py", "run.score.run = number", "run.score.run = 0")
@kills("fedgen/run/privacy_record.py", "return dict(self.selected.spends)", "pass")
def test_the_best_of_several_runs_is_published(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*words, "evaluation=quick", "evaluation.samples=500"]) == 0
    said = capsys.readouterr().out
    assert "selected from a grid of 3 settings: method=mixture_small" in said
    assert "gen2real cnn" in said
    place, selected = tmp_path / "tuned", tmp_path / "tuned" / "selected"
    drawn = content(place / "tuning.json")["drawn"]
    others = sorted((place / "runs").iterdir())
    assert len(drawn) == len(others) + 1 > 2
    assert score_of(selected) == max(map(score_of, [selected, *others]))
    assert len({score_of(run) for run in [selected, *others]}) == len(drawn)  # noise of their own
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
    assert record["selection"] == {"settings": 3, "mean": 4.0, "shape": 1.0}
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
    """What would publish other runs, or claim the ε of a single one."""
    out = f"out={selected.parent / 'release.zip'}"
    for command, told in (
        (["release", f"run={other}", out], "is one of the runs of fedgen tune"),
        (["release", f"run={selected}", out, "registry=false"], "privacy.noise=secure"),
        (["attack", f"run={selected}"], "was selected among several runs"),
        (["train", f"resume={selected}", "rounds=900"], "are fixed in a run of fedgen tune"),
    ):
        assert cli.run(command) == 2
        assert told in capsys.readouterr().err
    for audience in ("server", "public"):
        page = selected.parent / f"{audience}.html"
        run = selected if audience == "server" else selected / "public"
        assert cli.run(["report", f"runs={run}", f"out={page}", f"audience={audience}"]) == 0
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
def test_an_interrupted_selection_continues_and_can_be_verified(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With secret noise: the draw is kept, and what leaves tells nothing about the other runs."""
    words = [*words, "privacy.noise=secure", "jobs=1"]
    place, selected = tmp_path / "tuned", tmp_path / "tuned" / "selected"
    begun = Command(words)
    until(begun, place / "tuning.json")
    begun.send_signal(signal.SIGINT)
    begun.wait()
    drawn = content(place / "tuning.json")["drawn"]
    assert cli.run(words) == 0, capsys.readouterr().err
    assert content(place / "tuning.json")["drawn"] == drawn
    package = place / "release.zip"
    quiet = ["audit=false", "registry=false"]
    assert cli.run(["release", f"run={selected}", f"out={package}", *quiet]) == 0
    rows = verify(str(package))
    assert rows[0][1].startswith("ε = 7.9") or rows[0][1].startswith("ε = 8.0")
    assert any("number of runs" in text for kind, text in rows if kind == "assumed")
    account = content(selected / "public" / "account.json")
    [entry] = account["accounts"]
    signed = json.loads(entry["text"])
    [bound] = signed["bounds"]
    [[event, count]] = bound["events"]
    assert event["event"] == "select" and count == 1 and len(event["among"]) >= 1
    # the number of a run would be a lower limit on the number of runs
    settings = OmegaConf.load(selected / "config.yaml")
    assert settings.score.run is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("privacy.adversary=server", "privacy.adversary: cannot be server"),
        ("privacy.noise_multiplier=1", "privacy.noise_multiplier: cannot be combined"),
        ("privacy.target_mu=1", "privacy.target_mu: cannot be combined"),
        ("privacy=none", "none has no target"),
        ("start=somewhere", "start: is not supported"),
        ("runs=1", "runs: "),
        ("privacy.target_epsilon=0.000001", "is too small to choose"),
        ("grid=nowhere.yaml", "nowhere.yaml cannot be read"),
        ("grid=nowhere", "there is no 'nowhere'"),
    ],
)
def test_mistakes_are_reported_in_one_line(
    change: str, told: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*words, change]) == 2
    said = capsys.readouterr().err
    assert told in said and len(said.splitlines()) == 1
    assert not (tmp_path / "tuned" / "runs").exists()


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        ("axes: [[method=mixture_small]]", "contains one setting"),
        ("axes: [[held_out=1, held_out=2]]", "sets held_out"),
        ("axes: [[seed=1, seed=2]]", "contains equal settings"),
        ("base: [runtime=ray]\naxes: [[rounds=5, rounds=6]]", "sets runtime"),
        ("axes: [[hydra.run.dir=x, rounds=2]]", "is not a setting"),
        ("axes: [['method.x=${oc.env:HOME}', rounds=2]]", "cannot be read"),
        ("axes: [[method=gs_wgan_small, method=mixture_small]]", "clients respond with noisy sums"),
        ("axes: x", "cannot be read"),
        ("{}", "cannot be read"),
    ],
)
def test_a_grid_is_data(
    grid: str, told: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "grid.yaml").write_text(grid)
    assert cli.run(words) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "tuned" / "runs").exists()


@pytest.mark.slow
@kills("fedgen/commands/tune.py", 'content["plan"] == described', "True")
def test_another_plan_needs_another_place(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "tuned"
    place.mkdir()
    plan = {"event": {}, "grid": [], "noise": "seeded", "seed": 9}
    (place / "tuning.json").write_text(json.dumps({"schema": 1, "plan": plan, "drawn": [0, 1]}))
    assert cli.run(words) == 2
    assert "was started with other settings" in capsys.readouterr().err
    (place / "tuning.json").write_text("{}")
    assert cli.run(words) == 2
    assert "was altered" in capsys.readouterr().err


def test_the_event_of_a_selection_is_in_the_target(words: list[str], tmp_path: Path) -> None:
    """The total is that of the theorem for the planned events of a run."""
    assert cli.run([*words, "runs=1.5", "privacy.target_epsilon=2"]) == 0
    event = content(tmp_path / "tuned" / "selected" / "selection.json")["event"]
    [(selection, _)] = spend_from_json([[event, 1]]).items()
    assert isinstance(selection, Selection)
    assert 1.99 < epsilon({selection: 1}, 1e-5, ADD).or_infinity <= 2
    config = compose("tune", words[1:])
    with pytest.raises(FedgenError, match="one setting"):
        tune(config, [compose("config", ["method=mixture_small"])])
