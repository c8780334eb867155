"""Precision and recall: values by hand, and what each detects."""

from __future__ import annotations

import numpy as np
import pytest

from fedgen.evaluation.manifold import precision_and_recall

RNG = np.random.default_rng(0)


def test_by_hand() -> None:
    """On a line, with one neighbour: 0, 1 and 4 have radii 1, 1 and 3."""
    real = np.array([[0.0], [1.0], [4.0]], np.float32)
    made = np.array([[-0.9], [0.05], [0.2], [6.9], [7.5]], np.float32)
    precision, recall = precision_and_recall(real, made, neighbours=1)
    assert precision == pytest.approx(4 / 5)  # all but 7.5
    assert recall == pytest.approx(1 / 3)  # they reach 0.95, 0.15, 0.15, 0.6 and 0.6: 0 alone


def test_a_missing_mode_lowers_recall_alone() -> None:
    def normal(rows: int, at: float) -> np.ndarray:  # type: ignore[type-arg]
        return (RNG.standard_normal((rows, 4)) + at).astype(np.float32)

    real = np.concatenate([normal(500, 0), normal(500, 20)])
    same = precision_and_recall(real, np.concatenate([normal(500, 0), normal(500, 20)]))
    one_mode = precision_and_recall(real, normal(1000, 0))
    elsewhere = precision_and_recall(real, normal(1000, 90))
    assert min(same) > 0.8
    assert one_mode[0] > 0.8
    assert 0.35 < one_mode[1] < 0.55
    assert elsewhere == (0, 0)


def test_too_few_images_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 3"):
        precision_and_recall(np.zeros((3, 2), np.float32), np.zeros((9, 2), np.float32))
