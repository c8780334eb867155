"""Inception score: known values, and those of a second library."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedgen.evaluation.inception_score import inception_score


@pytest.mark.parametrize("classes", [2, 10])
def test_confident_uniform_predictions_score_the_number_of_classes(classes: int) -> None:
    mean, std = inception_score(np.eye(classes)[np.arange(100 * classes) % classes])
    assert mean == pytest.approx(classes)
    assert std == pytest.approx(0, abs=1e-9)


def test_uncertain_or_constant_predictions_score_one() -> None:
    assert inception_score(np.full((50, 10), 0.1))[0] == pytest.approx(1)
    assert inception_score(np.eye(10)[np.full(50, 3)])[0] == pytest.approx(1)


def test_a_closed_form() -> None:
    """Two classes, each predicted with 0.9: log 2 minus the entropy of 0.9."""
    rows = np.array([[0.9, 0.1], [0.1, 0.9]] * 50)
    entropy = -(0.9 * np.log(0.9) + 0.1 * np.log(0.1))
    assert inception_score(rows)[0] == pytest.approx(np.exp(np.log(2) - entropy))


def test_too_few_images() -> None:
    with pytest.raises(ValueError, match="at least 10"):
        inception_score(np.full((9, 2), 0.5))


class Handed(nn.Module):
    """Networks that return their input as features."""

    num_features = 12

    def forward(self, rows: Tensor) -> Tensor:
        return rows.flatten(1)[:, :12]


def test_torchmetrics_agrees() -> None:
    """torchmetrics shuffles images with torch's global generator before splitting them."""
    from torchmetrics.image.inception import InceptionScore

    logits = 3 * torch.randn(500, 12, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():  # that it keeps all features
        warnings.simplefilter("ignore")
        theirs = InceptionScore(Handed(), splits=10)
        theirs.update(logits)
        torch.manual_seed(3)
        mean, _ = theirs.compute()
    torch.manual_seed(3)
    shuffled = logits[torch.randperm(500)]
    result, _ = inception_score(shuffled.double().softmax(1).numpy())
    assert result == pytest.approx(float(mean), abs=1e-4)
