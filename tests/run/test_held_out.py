"""Choosing settings: held-out images, and evaluations during training."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny import STREAMS, Train

from fedgen import cli
from fedgen.data.digits import digits


def test_no_client_trains_on_held_out_images() -> None:
    whole = digits(STREAMS)
    held = whole.hold_out(300, STREAMS)
    assert len(held.test_labels) == 300
    rows = [each.tobytes() for each in (*held.images, *held.test_images)]
    assert sorted(rows) == sorted(each.tobytes() for each in whole.images)
    assert held.hold_out(0, STREAMS) is held
    again = whole.hold_out(300, STREAMS)
    assert np.array_equal(again.test_images, held.test_images)


def test_a_run_is_evaluated_during_training(train: Train) -> None:
    words = ["held_out=200", "evaluate_every=1", "evaluation=quick", "evaluation.samples=50"]
    run = train("method=dpgan_small", "rounds=2", *words, "evaluation.classifiers.cnn.epochs=1")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    judged = [line for line in lines if "gen2real" in line]
    assert [line["round"] for line in judged] == [2]  # two steps a message
    assert judged[0]["gen2real"] == json.loads((run / "results.json").read_text())["gen2real"]
    assert json.loads((run / "results.json").read_text())["real2real"]


@pytest.mark.parametrize(
    ("word", "key"), [("held_out=1437", "held_out"), ("evaluate_every=1", "evaluate_every")]
)
def test_invalid_settings_are_refused(
    word: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["train", "evaluation=none", word]) == 2
    assert key in capsys.readouterr().err
