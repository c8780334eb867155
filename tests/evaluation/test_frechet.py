"""Fréchet distances: closed forms, pytorch-fid, torchmetrics."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from test_inception_score import Handed

from fedgen.errors import FedgenError
from fedgen.evaluation import inception as inception_
from fedgen.evaluation.frechet import frechet_distance, statistics
from fedgen.evaluation.inception import (
    WEIGHTS,
    check_weights,
    inception,
    inception_features,
    network,
)


def normal(seed: int, rows: int, size: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((rows, size)) @ rng.standard_normal((size, size))
    return (mixed + rng.standard_normal(size)).astype(np.float32)


@given(st.integers(0, 10_000), st.integers(2, 40), st.integers(1, 12))
def test_the_distance_to_itself_is_zero(seed: int, rows: int, size: int) -> None:
    """Also with fewer images than features."""
    same = statistics(normal(seed, rows, size))
    assert frechet_distance(same, same) <= 1e-5 * (1 + np.trace(same[1]))


def test_closed_form() -> None:
    """Diagonal covariances: the distance of means and of standard deviations."""
    first = np.array([1.0, 2.0]), np.diag([4.0, 9.0])
    second = np.array([0.0, 4.0]), np.diag([1.0, 25.0])
    assert frechet_distance(first, second) == pytest.approx(1 + 4 + (2 - 1) ** 2 + (3 - 5) ** 2)


@given(st.integers(0, 10_000))
def test_pytorch_fid_agrees(seed: int) -> None:
    from pytorch_fid.fid_score import calculate_frechet_distance

    first, second = statistics(normal(seed, 200, 8)), statistics(normal(seed + 1, 300, 8))
    with warnings.catch_warnings():  # of SciPy's
        warnings.simplefilter("ignore")
        theirs = calculate_frechet_distance(*first, *second)
    assert frechet_distance(first, second) == pytest.approx(theirs, rel=1e-6)


def test_torchmetrics_agrees() -> None:
    from torchmetrics.image.fid import FrechetInceptionDistance

    real, made = normal(0, 400, 12), normal(1, 500, 12)
    theirs = FrechetInceptionDistance(Handed(), input_img_size=(12, 1, 1))
    theirs.set_dtype(torch.float64)
    for rows, is_real in ((real, True), (made, False)):
        theirs.update(torch.from_numpy(rows).double(), real=is_real)
    result = frechet_distance(statistics(made), statistics(real))
    assert result == pytest.approx(float(theirs.compute()), rel=1e-4)


def test_one_image_has_no_covariance() -> None:
    with pytest.raises(ValueError, match="two"):
        statistics(np.zeros((1, 3), np.float32))


@pytest.fixture(scope="module")
def random_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write random Inception weights in the real architecture."""
    from torchvision.models import inception_v3

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = inception_v3(num_classes=1008, aux_logits=False, init_weights=False)
    path: Path = tmp_path_factory.mktemp("inception") / "random.pth"
    torch.save(net.state_dict(), path)
    return path


@pytest.mark.slow
def test_pytorch_fid_agrees_on_files_and_arrays(random_weights: Path, tmp_path: Path) -> None:
    from pytorch_fid.fid_score import calculate_activation_statistics
    from pytorch_fid.inception import InceptionV3

    images = np.random.default_rng(0).integers(0, 256, (8, 1, 28, 28), dtype=np.uint8)
    files = [tmp_path / f"{number}.png" for number in range(len(images))]
    for image, file in zip(images, files, strict=True):
        Image.fromarray(image[0]).save(file)
    net = network(str(random_weights))
    assert isinstance(net, InceptionV3)
    theirs = calculate_activation_statistics(files, net, 7, 2048, "cpu", 0)
    result: list[int] = []
    ours = statistics(inception_features(net, images, result.append))
    assert result == [8]
    assert np.allclose(ours[0], theirs[0], rtol=1e-4)
    assert np.allclose(ours[1], theirs[1], rtol=1e-3, atol=1e-6 * np.abs(theirs[1]).max())


def test_other_weights_are_refused(random_weights: Path, tmp_path: Path) -> None:
    for path, problem in ((random_weights, "other weights"), (tmp_path / "no", "cannot be read")):
        with pytest.raises(FedgenError, match=problem):
            check_weights(path)


def test_fid_without_network_access_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Torch's cache is empty, and the proxy for its download does not respond."""
    before = torch.hub.get_dir()
    torch.hub.set_dir(str(tmp_path))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    try:
        assert inception(None) is None
    finally:
        torch.hub.set_dir(before)
    assert inception_.WEIGHTS == WEIGHTS
