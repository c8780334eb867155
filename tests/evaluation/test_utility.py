"""Classifiers that judge samples: they learn from real rows, and repeat bit for bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tiny import COINS

from fedgen.data.datasets import digits
from fedgen.evaluation.utility import Predict, accuracies, cnn, logistic_regression

DATA = digits(COINS)
REAL = (DATA.images, DATA.labels)


def right(predict: Predict) -> float:
    return float((predict(DATA.test_images) == DATA.test_labels).mean())


def test_the_cnn_learns_real_digits() -> None:
    assert right(cnn(*REAL, 10, 0, epochs=10)) > 0.9


def test_logistic_regression_learns_real_digits() -> None:
    assert right(logistic_regression(*REAL, 10, 0)) > 0.93


def test_shuffled_labels_teach_nothing() -> None:
    order = torch.randperm(len(DATA.labels), generator=COINS.public("shuffle")).numpy()
    assert right(cnn(DATA.images, DATA.labels[order], 10, 0, epochs=2)) < 0.4


def test_a_seed_repeats_and_leaves_torchs_own_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, again = (cnn(DATA.images[:200], DATA.labels[:200], 10, 1, epochs=1) for _ in range(2))
    assert (first(DATA.test_images) == again(DATA.test_images)).all()
    assert torch.equal(before, torch.random.get_rng_state())


def test_figures_carry_n_and_std() -> None:
    seen: list[str] = []
    found = accuracies(
        {"cnn": partial(cnn, epochs=1)},
        DATA.images[:200],
        DATA.labels[:200],
        {"test": (DATA.test_images, DATA.test_labels), "train": REAL},
        10,
        3,
        seen.append,
    )["test"]
    assert seen == ["cnn"]
    assert found["cnn"]["n"] == 200
    assert found["cnn"]["seeds"] == 3
    assert found["cnn"]["std"] == pytest.approx(found["cnn"]["std"], nan_ok=False)
