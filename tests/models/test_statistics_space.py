"""Statistics of clients: every contribution is bounded, and the sums are those of the images."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutation import kills
from torch import Tensor

from fedgen.models.client_statistics import NOISE, Statistics, StatisticsSpace, mean_images

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 20, 50), (1, 1, 5)]


def random_images(shape: tuple[int, int, int], count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))


@kills("fedgen/models/client_statistics.py", "0.56, 0.39, 0.56, 0.28", "0.86, 0.39, 0.56, 0.28")
@pytest.mark.parametrize("shape", SHAPES)
@given(st.sampled_from(["random", "black", "white", "grey", "lines", "corner"]), st.integers(0, 9))
def test_a_contribution_has_norm_at_most_1(
    shape: tuple[int, int, int], kind: str, label: int
) -> None:
    image = {
        "random": random_images(shape, 1),
        "black": torch.zeros(1, *shape),
        "white": torch.ones(1, *shape),
        "grey": torch.full((1, *shape), 0.5),
        "lines": (torch.arange(shape[2]) % 2).float().expand(1, *shape),
        "corner": torch.zeros(1, *shape).index_fill(3, torch.tensor([0]), 1.0),
    }[kind]
    space = StatisticsSpace(shape, 10)
    result = space.contribution(image, torch.tensor([label]))
    assert result.clip <= 1
    assert float(result.norms) <= result.clip * (1 + 1e-5), "only rounding should be clipped"
    assert float(result.flat().norm()) <= 1


@pytest.mark.parametrize("shape", SHAPES)
def test_a_contribution_does_not_depend_on_other_records(shape: tuple[int, int, int]) -> None:
    space, images = StatisticsSpace(shape, 4), random_images(shape, 9)
    labels = torch.arange(9) % 4
    alone = [space.contribution(images[n : n + 1], labels[n : n + 1]).flat() for n in range(9)]
    reversed_order = space.contribution(images.flip(0), labels.flip(0)).flat()
    assert torch.equal(space.contribution(images[3:4], labels[3:4]).flat(), alone[3])
    assert torch.allclose(sum(alone, torch.zeros(space.size)), reversed_order, atol=1e-12)
    nothing = space.contribution(images[:0], labels[:0]).flat()
    assert nothing.shape == (space.size,) and not nothing.any()


def test_low_pass_images_turn_with_the_image() -> None:
    space, images, labels = StatisticsSpace((3, 28, 28), 2), random_images((3, 28, 28), 2), [0, 1]

    def low_pass(changed: Tensor) -> Tensor:
        return space.split(space.contribution(changed, torch.tensor(labels)).flat()).images

    assert torch.allclose(low_pass(images.flip(3)), low_pass(images).flip(3), atol=1e-9)
    turned = low_pass(images.rot90(1, (2, 3)))
    assert torch.allclose(turned, low_pass(images).rot90(1, (2, 3)), atol=1e-9)
    assert torch.allclose(low_pass(1 - images), -low_pass(images), atol=1e-6)
    smooth = space.to_pixels(low_pass(images))
    assert smooth.shape == images.shape and (smooth - images).abs().mean() < 0.25


@kills("fedgen/models/client_statistics.py", "of_label[:, -1] / _COUNT", "of_label[:, -1]")
def test_sums_are_split_into_counts_shares_and_energies() -> None:
    space, images = StatisticsSpace((1, 8, 8), 3), random_images((1, 8, 8), 5)
    sums = space.split(space.contribution(images, torch.tensor([0, 0, 2, 2, 2])).flat())
    assert sums.counts.tolist() == pytest.approx([2, 0, 3])
    assert float(sums.total) == pytest.approx(5)
    assert torch.allclose(sums.images.sum(0), sums.all_images)
    one = space.split(space.contribution(images[:1], torch.tensor([0])).flat())
    assert float(one.histogram.square().sum()) == pytest.approx(1)
    square = (2 * images[0].double() - 1).square().mean()
    assert float(one.amplitudes.square().sum()) == pytest.approx(float(square))


def test_noise_of_the_statistics_is_that_of_the_sums() -> None:
    space = StatisticsSpace((1, 8, 8), 40)
    rng = torch.Generator().manual_seed(0)
    noise = [space.split(torch.randn(space.size, generator=rng).double()) for _ in range(30)]
    for name, expected in vars(NOISE).items():
        values = torch.stack([getattr(each, name) for each in noise])
        tolerance = 5 / math.sqrt(2 * values.numel())  # five standard errors of a deviation
        assert float(values.square().mean().sqrt() / expected) == pytest.approx(1, abs=tolerance)


def test_clients_that_do_not_differ_have_the_mean_over_clients() -> None:
    """And a client that does has its own images; both closer to the truth than sums over counts."""
    space, labels = StatisticsSpace((1, 8, 8), 4), torch.arange(400) % 4
    patterns = random_images((1, 8, 8), 4)[labels]
    rng = torch.Generator().manual_seed(1)
    clean = space.contribution(patterns, labels).flat()
    other = space.contribution(1 - patterns, labels).flat()
    sums = torch.stack([*[clean] * 9, other])
    noisy = sums + 4 * torch.randn(sums.shape, generator=rng)
    truth = torch.stack([space.split(row).images / 100 for row in sums])
    estimate = mean_images(space, noisy, 4.0)
    raw = [space.split(row) for row in noisy.double()]
    plain = torch.stack([row.images / row.counts[:, None, None, None] for row in raw])
    for client in (0, 9):
        error = (estimate - truth)[client].square().sum()
        assert error < 0.8 * (plain - truth)[client].square().sum()
    assert (estimate[9] * truth[9]).sum() > 0.5 * truth[9].square().sum()


def test_statistics_add_up() -> None:
    space, images = StatisticsSpace((1, 8, 8), 3), random_images((1, 8, 8), 6)
    labels = torch.arange(6) % 3
    parts = [
        space.split(space.contribution(images[rows], labels[rows]).flat())
        for rows in (slice(0, 2), slice(2, 6))
    ]
    both = space.split(space.contribution(images, labels).flat())
    together: Statistics = parts[0] + parts[1]
    for name in vars(both):
        assert torch.allclose(getattr(together, name), getattr(both, name))
        assert torch.allclose(getattr(both - parts[1], name), getattr(parts[0], name))
