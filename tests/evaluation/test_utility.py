"""Classifiers that judge samples: they learn from real rows, and repeat bit for bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tiny import COINS

from fedgen.data.datasets import digits
from fedgen.evaluation.utility import accuracies, cnn, logistic_regression

DATA = digits(COINS)
REAL = (DATA.images, DATA.labels, DATA.test_images, DATA.test_labels, 10)


def test_the_cnn_learns_real_digits() -> None:
    assert cnn(*REAL, 0, epochs=10) > 0.9


def test_logistic_regression_learns_real_digits() -> None:
    assert logistic_regression(*REAL, 0) > 0.93


def test_shuffled_labels_teach_nothing() -> None:
    order = torch.randperm(len(DATA.labels), generator=COINS.public("shuffle")).numpy()
    assert cnn(DATA.images, DATA.labels[order], *REAL[2:], 0, epochs=2) < 0.4


def test_a_seed_repeats_and_leaves_torchs_own_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    small = (DATA.images[:200], DATA.labels[:200], *REAL[2:])
    assert cnn(*small, 1, epochs=1) == cnn(*small, 1, epochs=1)
    assert torch.equal(before, torch.random.get_rng_state())


def test_figures_carry_n_and_std() -> None:
    seen: list[str] = []
    found = accuracies(
        {"cnn": partial(cnn, epochs=1)},
        DATA.images[:200],
        DATA.labels[:200],
        DATA.test_images,
        DATA.test_labels,
        10,
        3,
        seen.append,
    )
    assert seen == ["cnn"]
    assert found["cnn"]["n"] == 200
    assert found["cnn"]["seeds"] == 3
    assert found["cnn"]["std"] == pytest.approx(found["cnn"]["std"], nan_ok=False)
