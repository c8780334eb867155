"""The transport loss against closed forms and in its two limits."""

from __future__ import annotations

import math

import pytest
import torch
from geomloss import SamplesLoss
from torch import Tensor

from fedgen.losses.sinkhorn import Transport, semi_debiased

SQUARES = {"l1": 0.0, "l2": 1.0, "label_weight": 0.0, "classes": 1}


def line(points: Tensor) -> tuple[Tensor, Tensor]:
    """Return points on a line as images of one pixel with one label."""
    return (points[:, None] + 1) / 2, torch.zeros(len(points), dtype=torch.long)


@pytest.mark.parametrize(
    ("shift", "spread", "blur"), [(0.0, 1.0, 1.0), (1.5, 0.5, 1.0), (2.0, 2.0, 1.5)]
)
def test_entropic_transport_of_gaussians(shift: float, spread: float, blur: float) -> None:
    """The closed form of Janati, Muzellec, Peyre, Cuturi 2020, theorem 1, with twice its sigma^2
    for the weight of the entropy. 3,000 samples: the error of the means is below 0.06 * 4 with
    probability above 0.9999 for the largest of these."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3000, generator=generator)
    y = shift + spread * torch.randn(3000, generator=generator)
    a, b, s = 1.0, spread**2, blur**2 / 2
    d = math.sqrt(4 * a * b + s**2)
    bures = a + b - d + s * (1 - math.log(2 * s)) + s * math.log(d + s)
    result = Transport(**SQUARES, blur=blur)(line(x), line(y))
    assert float(result) == pytest.approx(shift**2 + bures, abs=0.3)


def test_the_cost_is_that_of_the_paper() -> None:
    """Against explicit differences."""
    transport = Transport(2.0, 0.5, 15.0, 0.05, 3)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(4, 1, 3, 3, generator=generator), torch.rand(5, 1, 3, 3, generator=generator)
    labels = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 0, 1, 2, 2])
    result = transport.cost(transport.points((x, labels[0])), transport.points((y, labels[1])))
    apart = 2 * (x.flatten(1)[:, None] - y.flatten(1)[None])
    other = (labels[0][:, None] != labels[1][None]).float()
    expected = 2.0 * (apart.abs().sum(2) + 2 * 15 * other)
    expected += 0.5 * (apart.square().sum(2) + 2 * 15**2 * other)
    assert torch.allclose(result, expected, rtol=1e-4)


def test_semi_debiased_is_biased_at_0_and_unbiased_at_1() -> None:
    transport = Transport(1.0, 1.0, 15.0, 0.05, 10)
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(12, 1, 4, 4, generator=generator), torch.arange(12) % 10
    rows = torch.rand(5, 1, 4, 4, generator=generator), torch.arange(5)
    widest = math.sqrt(4 * 16 + 2 * 15**2)
    loss = SamplesLoss(
        "sinkhorn", p=2, blur=0.05, diameter=widest, debias=False, cost=transport.cost
    )

    def w(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
        return loss(transport.points(first), transport.points(second))

    x, fresh = (images[:6], labels[:6]), (images[6:], labels[6:])
    biased = semi_debiased(transport, x, rows, 6)
    assert torch.allclose(biased, 2 * w(x, rows) - w(x, x))
    unbiased = semi_debiased(transport, (images, labels), rows, 6)
    assert torch.allclose(unbiased, 2 * w(x, rows) - w(x, fresh))
    between = semi_debiased(transport, (images[:8], labels[:8]), rows, 6)
    assert torch.allclose(between, 2 * w(x, rows) - w(x, (images[2:8], labels[2:8])))
    alone = semi_debiased(transport, (images, labels), None, 6)
    assert torch.allclose(alone, -w(x, fresh))
