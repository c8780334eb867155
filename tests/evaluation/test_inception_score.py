"""Inception score: known values, and its judge."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny import COINS, Train

from fedgen.data.datasets import digits
from fedgen.evaluation.inception_score import inception_score, judge, probabilities
from fedgen.experiments import generation


@pytest.mark.parametrize("classes", [2, 10])
def test_sure_of_all_classes_alike_scores_their_number(classes: int) -> None:
    mean, std = inception_score(np.eye(classes)[np.arange(100 * classes) % classes])
    assert mean == pytest.approx(classes)
    assert std == pytest.approx(0, abs=1e-9)


def test_unsure_or_of_one_class_scores_one() -> None:
    assert inception_score(np.full((50, 10), 0.1))[0] == pytest.approx(1)
    assert inception_score(np.eye(10)[np.full(50, 3)])[0] == pytest.approx(1)


def test_a_closed_form() -> None:
    """Two classes, each told with 0.9: log 2 minus the entropy of 0.9."""
    rows = np.array([[0.9, 0.1], [0.1, 0.9]] * 50)
    entropy = -(0.9 * np.log(0.9) + 0.1 * np.log(0.1))
    assert inception_score(rows)[0] == pytest.approx(np.exp(np.log(2) - entropy))


def test_too_few_images() -> None:
    with pytest.raises(ValueError, match="at least 10"):
        inception_score(np.full((9, 2), 0.5))


def test_the_judge_is_trained_once(tmp_path: Path) -> None:
    data = digits(COINS)
    net = judge(data.images, data.labels, 10, tmp_path)
    [kept] = tmp_path.iterdir()
    before = kept.stat().st_mtime_ns
    again = judge(data.images, data.labels, 10, tmp_path)
    assert kept.stat().st_mtime_ns == before
    said = probabilities(net, data.test_images)
    assert np.allclose(said, probabilities(again, data.test_images), atol=1e-5)
    assert (said.argmax(1) == data.test_labels).mean() > 0.9
    assert inception_score(said)[0] > 3
    judge(data.images[1:], data.labels[1:], 10, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_run_has_its_score(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "CACHE", tmp_path)
    words = ["evaluation=quick", "evaluation.samples=40", "evaluation.classifiers.cnn.epochs=1"]
    run = train("rounds=1", *words, "evaluation.inception_score=true")
    found = json.loads((run / "results.json").read_text())["inception_score"]
    assert found["test"]["mean"] > 3 > found["generated"]["mean"] >= 1
    assert found["judge_accuracy"] > 0.9
