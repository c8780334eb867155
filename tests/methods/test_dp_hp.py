"""DP-HP: its features are those of the kernel with norm at most 1, and one release is its whole
cost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgen import cli
from fedgen.methods.dp_hp import Hermite, hermite
from fedgen.privacy.gaussian_dp import gaussian_epsilon


def features(pairs: int = 3) -> Hermite:
    return Hermite(20, 5, pairs, 0.05, 0.94, 20.0, 64, "cpu")


@pytest.mark.parametrize("length", [0.05, 0.15, 1.0])
def test_products_of_polynomials_are_the_gaussian_kernel(length: float) -> None:
    """Mehler's formula, for all pairs of byte values."""
    table = hermite(400, length)
    x = torch.arange(256, dtype=torch.float64) / 255
    kernel = (-(x[:, None] - x).square() / (2 * length)).exp()
    assert torch.allclose(table @ table.T, kernel, atol=1e-9)


@pytest.mark.parametrize(
    ("order", "length", "squared"),
    [(100, 0.005, 0.82843**2), (20, 0.005, 0.35717), (100, 0.15, 1.0), (20, 0.15, 0.98879)],
)
def test_the_norms_are_the_known_values(order: int, length: float, squared: float) -> None:
    longest = float(hermite(order, length).square().sum(1).max())
    assert longest == pytest.approx(squared, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.booleans())
def test_features_have_norm_at_most_one(seed: int, pairs: int, grey: bool) -> None:
    """For any pixels, also between byte values."""
    of = features(pairs)
    source = torch.Generator().manual_seed(seed)
    one = torch.rand(20, 1, 1, 1, generator=source).expand(20, 1, 8, 8)
    images = one if grey else torch.rand(20, 1, 8, 8, generator=source)
    assert float(of(of.sample_parameters(torch.tensor(seed)), images).norm(dim=1).max()) <= 1 + 1e-6


def test_weighted_distances_are_those_of_the_kernels() -> None:
    """gamma times the mean over pixels of the first kernel, and the mean over pairs."""
    of = features()
    images = torch.randint(0, 256, (2, 1, 8, 8), generator=torch.Generator().manual_seed(1)) / 255
    drawn = of.sample_parameters(torch.tensor(5))
    first, second = (of(drawn, images) * of.weights).double()
    a, b = (hermite(20, 0.05)[(image.flatten() * 255).round().long()] for image in images)
    expected = 20 * (a - b).square().sum(1).mean()
    pair = hermite(5, 0.05)
    levels = (images.flatten(1) * 255).round().long()
    apart = [
        torch.outer(pair[levels[0, i]], pair[levels[0, j]])
        - torch.outer(pair[levels[1, i]], pair[levels[1, j]])
        for i, j in drawn.tolist()
    ]
    expected = expected + torch.stack([each.square().sum() for each in apart]).mean()
    assert float((first - second).square().sum()) == pytest.approx(float(expected), rel=1e-4)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 5))
def test_sums_of_groups_are_sums_of_images(seed: int, groups: int, size: int) -> None:
    """By histograms or one by one, and their gradients too, with black and white pixels among
    them."""
    of = features()
    source = torch.Generator().manual_seed(seed)
    images = (torch.randn(groups * size, 1, 8, 8, generator=source) / 2 + 0.5).clamp(0, 1)
    images.requires_grad_()
    drawn = of.sample_parameters(torch.tensor(seed))
    quick = of.sum_by_label(drawn, images, groups)
    slow = of(drawn, images).view(groups, size, -1).sum(1)
    assert torch.allclose(quick, slow, atol=1e-5)
    aim = torch.randn(quick.shape, generator=source)
    (first,), (second,) = (
        torch.autograd.grad((made * aim).sum(), images) for made in (quick, slow)
    )
    assert torch.allclose(first, second, atol=1e-3)


def test_gradients_reach_the_pixels() -> None:
    of = features()
    images = torch.rand(3, 1, 8, 8, requires_grad=True)
    result = of(of.sample_parameters(torch.tensor(0)), images).square().sum()
    torch.autograd.backward(result)
    assert images.grad is not None and float(images.grad.abs().min()) >= 0
    assert float(images.grad.abs().max()) > 0


def test_its_cost_is_that_of_one_gaussian() -> None:
    """At the paper's settings 0.58555 for replacing a record and 0.27511 for adding one; ε = 1 and
    10 take noise multipliers of 3.7306 and 0.49989 at a norm of 1."""
    assert gaussian_epsilon(1 / 6.08398, 1e-5) == pytest.approx(0.58555, abs=2e-5)
    assert gaussian_epsilon(0.5 / 6.08398, 1e-5) == pytest.approx(0.27511, abs=2e-5)
    for target, noise in ((1.0, 3.7306), (10.0, 0.49989)):
        assert gaussian_epsilon(1 / noise, 1e-5) == pytest.approx(target, rel=1e-4)


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("sum_share=0", "must be positive"),
        *(
            (f"sum_share={share}", "leaves no weight for one of the kernels")
            for share in (1e-300, 1, 2)
        ),
        ("kernel_length=1e-20", "must be at least 1e-06"),
        ("kernel_length=1e200", "must be below 1e+06"),
        ("sum_weight=1e300", "must be below 1e+12"),
        ("order=100000", "must be below 1001"),
    ],
)
def test_settings_beyond_floating_point_are_refused(
    word: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["account", "method=dp_hp_small", f"method.{word}"]) == 2
    assert f"method.{word.split('=')[0]}: " in (error := capsys.readouterr().err)
    assert problem in error
