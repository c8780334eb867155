"""Test that features are exact, and so do not depend on other images."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutation import kills
from torch.nn import functional as F

from fedgen.models import scattering
from fedgen.models.dct import ExactDct, dct_basis
from fedgen.models.scattering import Scattering

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 13, 20)]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def images(count: int, shape: tuple[int, int, int], seed: int = 0) -> torch.Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))


@kills("fedgen/models/scattering.py", "nnpack.set_flags(False)", "nnpack.set_flags(True)")
@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_features_do_not_depend_on_other_images(
    shape: tuple[int, int, int], onednn: bool, threads: int
) -> None:
    """Features depend neither on the number of images nor on the position in the batch. Inexact
    convolutions with two threads would differ in the last bit."""
    space, batch = Scattering(shape, "cpu"), images(33, shape)
    together = space(batch)
    for count in (1, 2, 3, 7, 16, 17, 31, 32):
        assert torch.equal(space(batch[:count]), together[:count])
        assert torch.equal(space(batch[-count:]), together[-count:])
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(threads))
    with torch.backends.mkldnn.flags(enabled=onednn):
        assert torch.equal(space(batch[order]), together[order])
        assert torch.equal(space(batch[:1]), together[:1])


@kills(
    "fedgen/models/scattering.py",
    "_SINGLE_BITS, _DOUBLE_BITS = 24, 53",
    "_SINGLE_BITS, _DOUBLE_BITS = 29, 53",
)
@kills("fedgen/models/scattering.py", "/ magnitudes.max())).trunc()", "/ magnitudes.max()))")
@pytest.mark.parametrize("kind", ["random", "white", "of the signs of the filter"])
def test_wavelets_are_exact(kind: str) -> None:
    """The same integers in double precision give the same sums, also for the largest ones."""
    space = Scattering((1, 28, 28), "cpu")
    for filters, bits in ((space._fine, 8), (space._coarse, 12)):
        side, limit = filters.integers.shape[-1], 2**bits - (bits == 8)
        maps = {
            "random": (images(20, (1, 28, 28)) * limit).round(),
            "white": torch.full((1, 1, 28, 28), float(limit)),
            "of the signs of the filter": torch.where(filters.integers > 0, limit, 0.0),
        }[kind]
        single, double = (
            F.conv2d(maps.to(kind), filters.integers.to(kind), None, 1, side // 2)
            for kind in (torch.float32, torch.float64)
        )
        assert torch.equal(single.double(), double)
        assert float(filters.integers.double().abs().sum((1, 2, 3)).max()) * limit <= 2**24
        assert float(filters.modulus(maps, 1).max()) <= 2**18


@kills("fedgen/models/scattering.py", "_FILTER_BITS = 17", "_FILTER_BITS = 19")
@kills(
    "fedgen/models/scattering.py",
    "(gaussian / gaussian.sum() * 2**_FILTER_BITS).trunc()",
    "gaussian * 2**17",
)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 64, 64), (1, 200, 100)])
@pytest.mark.parametrize("scale", [1, 2])
def test_low_pass_matrix_stays_within_a_double(shape: tuple[int, int, int], scale: int) -> None:
    space = Scattering(shape, "cpu")
    vertical, horizontal = (space._low_pass_matrix(side, scale) for side in shape[1:])
    for matrix in (vertical, horizontal):
        assert torch.equal(matrix, matrix.round())
    assert 2**18 * float(vertical.sum(1).max()) * float(horizontal.sum(1).max()) <= 2**52
    positions = (-(-side // space.stride) for side in shape[1:])
    assert (len(vertical), len(horizontal)) == tuple(positions)


@kills(
    "fedgen/models/scattering.py",
    "** (bits - _DOUBLE_BITS + 1)).round()",
    "** (bits - _DOUBLE_BITS + 1))",
)
@settings(max_examples=30)
@given(st.integers(1, 5000), st.integers(0, 10**6))
def test_norms_are_exact(size: int, seed: int) -> None:
    values = (images(1, (1, 1, size), seed).view(1, size).double() * 2**52).round()
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    normal = scattering._normalize(values)
    assert torch.equal(scattering._normalize(values[:, order]), normal[:, order])
    assert float(normal.norm()) == pytest.approx(1, abs=1e-9)
    assert not scattering._normalize(torch.zeros(2, 5)).any()


def test_features_are_those_of_ordinary_scattering() -> None:
    """Compare with convolutions in double precision and the same Gaussian."""
    shape = (1, 28, 28)
    space, pixels = Scattering(shape, "cpu"), (images(4, shape) * 255).round().double() / 255
    fine, coarse = (
        scattering._morlets(size, sigma, frequency)
        for size, sigma, frequency in ((7, 0.8, 3 * torch.pi / 4), (11, 1.6, 3 * torch.pi / 8))
    )

    def modulus(maps: torch.Tensor, filters: torch.Tensor, stride: int) -> torch.Tensor:
        padding = filters.shape[-1] // 2
        convolved = F.conv2d(maps.flatten(0, 1)[:, None], filters, None, stride, padding)
        real, imaginary = convolved.view(len(maps), -1, 2, 8, *convolved.shape[2:]).unbind(2)
        return (real.square() + imaginary.square()).sqrt().flatten(1, 2)

    def smooth(maps: torch.Tensor, scale: int) -> torch.Tensor:
        vertical, horizontal = (space._low_pass_matrix(side, scale) for side in shape[1:])
        return F.normalize((vertical @ maps @ horizontal.T).flatten(1), dim=1) / 2

    first = modulus(pixels, fine, 1)
    second, both = modulus(pixels, coarse, 2), modulus(first, coarse, 2)
    maps = ((pixels, 1), (first, 1), (second, 2), (both, 2))
    expected = torch.cat([smooth(group, scale) for group, scale in maps], 1)
    assert space(pixels.float()).shape == (4, space.count)
    difference = space(pixels.float()).double() - expected
    assert float(difference.norm(dim=1).max()) < 0.01  # of 1


@kills("fedgen/models/dct.py", "bits = (_DOUBLE_BITS - _PIXEL_BITS - root) // 2", "bits = 26")
@kills("fedgen/models/dct.py", "* 2**bits).round()", "* 2**bits)")
@pytest.mark.parametrize("side", [(8, 8), (28, 28), (64, 48), (1024, 13)])
def test_dct_coefficients_are_exact(side: tuple[int, int]) -> None:
    """Compare with sums of 64-bit integers, and with the cosines."""
    count = min(*side, 24)
    dct, batch = ExactDct.of(side, count), (images(5, (3, *side)) * 255).round() / 255
    for pixels in (batch, torch.ones(1, 1, *side)):
        integers = (pixels * 255).round().long()
        sums = torch.einsum(
            "ih,nchw,wj->ncij", dct.vertical.long(), integers, dct.horizontal.long()
        )
        assert torch.equal(dct(pixels), sums.double().flatten(1) * dct.unit)
    largest = (
        255 * float(dct.vertical.abs().sum(1).max()) * float(dct.horizontal.abs().sum(0).max())
    )
    assert largest <= 2**53
    assert torch.equal(dct.vertical, dct.vertical.round()) and torch.equal(
        dct.horizontal, dct.horizontal.round()
    )
    expected = batch.flatten(2) @ dct_basis(side, count)
    assert torch.allclose(dct(batch).float(), expected.flatten(1), atol=1e-3)
