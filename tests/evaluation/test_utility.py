"""Classifiers that judge samples: they learn from real rows, and repeat bit for bit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import STREAMS, Train

from fedgen.config.build import build
from fedgen.config.compose import compose
from fedgen.data.digits import digits
from fedgen.evaluation.utility import Fit, Predict, all_scores, cnn, scikit, summary

DATA = digits(STREAMS)
REAL = (DATA.images, DATA.labels)
TEST = (DATA.test_images, DATA.test_labels)
FULL = compose("evaluate", ["evaluation=full"]).evaluation.classifiers
LEAST = {"adaboost": 0.2, "decision_tree": 0.75, "gaussian_nb": 0.75, "bernoulli_nb": 0.75}


def right(predict: Predict) -> float:
    return float((predict(DATA.test_images) == DATA.test_labels).mean())


def test_the_cnn_learns_real_digits() -> None:
    assert right(cnn(*REAL, 10, 0, epochs=10)) > 0.9


def test_shuffled_labels_teach_nothing() -> None:
    order = torch.randperm(len(DATA.labels), generator=STREAMS.public("shuffle")).numpy()
    assert right(cnn(DATA.images, DATA.labels[order], 10, 0, epochs=2)) < 0.4


@pytest.mark.parametrize("name", sorted(FULL))
@pytest.mark.slow
def test_every_classifier_learns_real_digits_and_repeats(name: str) -> None:
    if name == "xgboost":
        pytest.importorskip("xgboost")
    classifier = build(FULL[name], f"evaluation.classifiers.{name}")
    assert right(classifier(*REAL, 10, 3)) > LEAST.get(name, 0.85)
    few = DATA.images[:150], DATA.labels[:150]
    first, again = (classifier(*few, 10, 3)(DATA.test_images) for _ in range(2))
    assert (first == again).all()


@pytest.mark.parametrize("seed", range(3))
def test_a_few_hundred_rows_are_learnt(seed: int) -> None:
    """What samples teach is held against what as many real rows teach: 92 to 97 % here by 500;
    ten passes alone come to 37 to 89 %."""
    assert right(cnn(DATA.images[:500], DATA.labels[:500], 10, seed, epochs=10)) > 0.85


def test_labels_that_are_missing_are_never_said() -> None:
    some = DATA.labels % 3 != 0
    predict = scikit(
        DATA.images[some], DATA.labels[some], 10, 0, model="sklearn.naive_bayes.GaussianNB"
    )
    assert set(predict(DATA.test_images)) <= {1, 2, 4, 5, 7, 8}


def test_a_seed_repeats_and_leaves_torchs_own_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, again = (cnn(DATA.images[:200], DATA.labels[:200], 10, 1, epochs=1) for _ in range(2))
    assert (first(DATA.test_images) == again(DATA.test_images)).all()
    assert torch.equal(before, torch.random.get_rng_state())


def fits(seeds: int) -> list[Fit]:
    rows = DATA.images[:200], DATA.labels[:200]
    tests = {"test": TEST, "train": REAL}
    return [Fit("cnn", partial(cnn, epochs=1), rows, tests, 10, seed) for seed in range(seeds)]


def test_figures_carry_n_std_and_each_class() -> None:
    scores = [found["test"] for _, found in all_scores(fits(3), jobs=1)]
    found = summary(scores, 200, len(TEST[1]))
    assert (found["n"], found["seeds"], found["tested"]) == (200, 3, len(TEST[1]))
    assert found["std"] == pytest.approx(np.std([each[0] for each in scores], ddof=1))
    shares = np.bincount(DATA.test_labels, minlength=10) / len(DATA.test_labels)
    assert found["mean"] == pytest.approx(float(shares @ found["per_class"]))
    nothing = summary([], 7, 9)
    assert nothing["interval"] is None
    assert (nothing["mean"], nothing["std"], nothing["n"], nothing["seeds"]) == (None, None, 7, 0)


@pytest.mark.parametrize("accuracy", [0.5, 0.9, 0.99])
def test_an_interval_holds_the_accuracy(accuracy: float) -> None:
    """95 % do, of 4,000 test splits of 300 rows, but for what whole numbers of rows allow."""
    right = np.random.default_rng(5).binomial(300, accuracy, 4000) / 300
    found = [summary([[float(each)]], 10, 300)["interval"] for each in right]
    held = float(np.mean([low <= accuracy <= high for low, high in found]))
    assert 0.92 < held < 0.98
    assert max(high - low for low, high in found) < 0.12


def test_a_label_without_rows_has_no_accuracy() -> None:
    some = DATA.test_labels != 4
    rows = DATA.images[:200], DATA.labels[:200]
    tests = {"test": (DATA.test_images[some], DATA.test_labels[some])}
    [(_, found)] = all_scores([Fit("cnn", partial(cnn, epochs=1), rows, tests, 10, 0)], 1)
    assert summary([found["test"]], 200, 9)["per_class"][4] is None


@pytest.mark.slow
def test_processes_find_what_this_one_finds() -> None:
    alone, apart = (dict(all_scores(fits(3), jobs)) for jobs in (1, 2))
    assert alone == apart


def test_real_rows_are_learnt_once(tmp_path: Path) -> None:
    known = tmp_path / "known.json"
    rows = DATA.images[:200], DATA.labels[:200]
    fit = Fit("cnn", partial(cnn, epochs=1), rows, {"real2real": TEST}, 10, 0, known)
    found = fit.scores()
    assert json.loads(known.read_text()) == found
    known.write_text(json.dumps({"real2real": [0.25]}))
    assert fit.scores() == {"real2real": [0.25]}


def test_a_run_learns_real_rows_once(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those classifiers that are tested on its samples as well."""
    monkeypatch.setenv("FEDGEN_CACHE", str(tmp_path / "cache"))
    words = ["rounds=1", "evaluation=quick", "evaluation.samples=60", "evaluation.real2gen=[cnn]"]
    words.append("evaluation.classifiers.cnn.epochs=1")
    runs = [train(*words, name=name) for name in ("a", "b")]
    found, again = (json.loads((run / "results.json").read_text()) for run in runs)
    assert set(found["gen2real"]) == set(found["real2real"]) == {"cnn", "logistic_regression"}
    assert set(found["real2gen"]) == {"cnn"}
    assert found["real2real"]["logistic_regression"]["mean"] > 0.5
    assert again["real2real"] == found["real2real"]
    assert len(list((tmp_path / "cache" / "real2real").iterdir())) == 1
