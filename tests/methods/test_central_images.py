"""Central images: the mean image of each label, and its cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mutation import kills
from tiny import STREAMS

from fedgen import cli
from fedgen.data.digits import digits
from fedgen.methods.api import PublicFacts
from fedgen.methods.central_images import central_images
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import canonical

DIGITS = digits(STREAMS).shard(np.arange(1437))


def method(noise: float | None, rate: float = 1.0, images: int = 1, clients: int = 1):  # type: ignore[no-untyped-def]
    facts = PublicFacts(clients, 1437 if clients == 1 else None, 10, (1, 8, 8))
    settings = {"rows": 1437, "images": images, "sampling_rate": rate, "magnitude": 3}
    return central_images(facts, noise, device="cpu", **settings)


def test_the_cost_of_five_images_is_the_known_one() -> None:
    """First stage of SunnierLee, 0.188 by RDP: sampling rate 1/10, noise multiplier 5, five
    queries."""
    plan = method(5 / 5**0.5, 0.1, 5).plan
    result = epsilon(canonical(plan.server_event(5)), 1e-5, plan.relation)
    assert result.value == pytest.approx(0.165, abs=1e-3)
    assert result.second_opinion == pytest.approx(0.188, abs=1e-3)


def test_without_noise_they_are_the_means_of_labels() -> None:
    """At half the size and back, smoothed, a mean digit is still recognisable."""
    made = method(None)
    question = made.server.query(made.server.init(STREAMS), 0, STREAMS)
    assert question is not None
    sent = made.client.respond({}, question, DIGITS, 0, STREAMS)
    mean = made.aggregate([sent.arrays["answer"]], 0, STREAMS).float()
    state = made.server.update(made.server.init(STREAMS), mean, 0, STREAMS)
    images, labels = DIGITS.rows(torch.arange(len(DIGITS)))
    for label in range(10):
        own = images[labels == label].mean(0)
        near = [float((own - other).square().mean()) for other in state["images"][0]]
        assert near.index(min(near)) == label


@kills(
    "fedgen/methods/central_images.py",
    "return sum_of_rows(small, clip, labels, facts.classes)",
    "return sum_of_rows(small / max(1, len(labels)), clip, labels, facts.classes)",
)
def test_no_division_by_private_counts() -> None:
    """An image of half of the records is half as bright: nothing reveals the number of records of a
    label."""
    made = method(None)
    question = made.server.query(made.server.init(STREAMS), 0, STREAMS)
    assert question is not None
    whole, half = (
        torch.from_numpy(made.client.respond({}, question, shard, 0, STREAMS).arrays["answer"])
        for shard in (DIGITS, digits(STREAMS).shard(np.arange(718)))
    )
    assert float(half.sum() / whole.sum()) == pytest.approx(0.5, abs=0.02)


def test_images_of_odd_size_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception, match="cannot be halved"):
        central_images(
            PublicFacts(1, 9, 2, (1, 7, 8)),
            1.0,
            rows=9,
            images=1,
            sampling_rate=1.0,
            magnitude=3,
            device="cpu",
        )
    assert cli.run(["train", "method=central_images_small", "method.sampling_rate=2"]) == 2
    assert "method.sampling_rate: must be at most 1, got 2" in capsys.readouterr().err
