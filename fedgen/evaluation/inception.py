"""Features of FID: pytorch-fid's InceptionV3, on images as pytorch-fid reads them from files."""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedgen.errors import FedgenError
from fedgen.evaluation.frechet import Statistics, frechet_distance, statistics
from fedgen.evaluation.metrics import Judged, Metric, data_digest
from fedgen.evaluation.utility import Images
from fedgen.storage.io import cache, write_shared

WEIGHTS = "pt_inception-2015-12-05-6726825d.pth"
_DIGEST = "6726825d"  # first digits of the sha256 of the file
_BATCH = 50


def check_weights(path: Path) -> None:
    """Raise FedgenError unless a file has the weights of FID."""
    key = "evaluation.inception_weights"
    if path.exists() and not path.is_file():  # a device is endless
        raise FedgenError(key, f"{path} is not a file", f"give the file {WEIGHTS}, or null")
    try:
        with path.open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror})"
        raise FedgenError(key, problem, f"give the file {WEIGHTS}, or null") from error
    if not checksum.startswith(_DIGEST):
        raise FedgenError(
            key,
            f"{path} has other weights (sha256 {checksum[:8]}...)",
            f"give pytorch-fid's {WEIGHTS}: with any other the distance is not FID",
        )


def inception(weights: str | None) -> nn.Module | None:
    """Return the network to 2,048 features: with the weights of this file, else those of torch's
    cache or its download; None if there are none.

    Raises:
        FedgenError: for weights other than pytorch-fid's.
    """
    cached = Path(torch.hub.get_dir(), "checkpoints", WEIGHTS)
    if weights is not None or cached.exists():
        check_weights(cached if weights is None else Path(weights))
    return network(weights)


def network(weights: str | None) -> nn.Module | None:
    """Return the network of ``inception`` without checking its weights; None if they are
    unavailable."""
    from pytorch_fid.inception import InceptionV3

    before = torch.hub.get_dir()
    try:
        with tempfile.TemporaryDirectory() as folder:
            if weights is not None:  # pytorch-fid loads this name from torch's cache
                kept = Path(folder, "checkpoints", WEIGHTS)
                kept.parent.mkdir()
                kept.symlink_to(Path(weights).absolute())
                torch.hub.set_dir(folder)
            net: nn.Module = InceptionV3([InceptionV3.BLOCK_INDEX_BY_DIM[2048]])
    except (URLError, OSError):
        return None
    finally:
        torch.hub.set_dir(before)
    return net.eval()


def inception_features(
    net: nn.Module, images: Images, done: Callable[[int], None]
) -> NDArray[np.float32]:
    """Return features (n, 2048); grey images are repeated to three channels, and the network
    enlarges images to 299 x 299.

    Args:
        done: called with the number of images so far.
    """
    features = []
    for part in np.array_split(images, -(-len(images) // _BATCH)):
        batch = torch.from_numpy(part).to(torch.float32) / 255
        with torch.no_grad():
            features.append(net(batch.expand(-1, 3, -1, -1))[0].flatten(1))
        done(sum(map(len, features)))
    return torch.cat(features).numpy()


def _compute(judged: Judged) -> dict[str, Any]:
    """Return the FID against the test split, if Inception's weights are available."""
    if not judged.settings.fid or judged.is_set:
        return {}
    net = inception(judged.settings.inception_weights)
    if net is None:
        judged.progress.say(
            "FID is not computed: Inception's weights cannot be downloaded, and "
            "evaluation.inception_weights is not set"
        )
        return {}

    def fitted(what: str, rows: Images) -> Statistics:
        def done(count: int) -> None:
            judged.progress.show(f"Inception, {what}", count, len(rows), "")

        return statistics(inception_features(net, rows, done))

    test_images = judged.data.test_images
    cache_file = cache() / "inception" / f"{data_digest(test_images)}.npz"
    if not cache_file.exists():
        mean, covariance = fitted("test split", test_images)
        file = io.BytesIO()
        np.savez(file, mean=mean, covariance=covariance)
        write_shared(cache_file, file.getvalue())
    with np.load(cache_file) as kept:
        test = kept["mean"], kept["covariance"]
    return {"fid": frechet_distance(fitted("samples", judged.images), test)}


METRIC = Metric(
    ("fid",),
    _compute,
    lambda results: [("FID", f"{results['fid']:.2f}")],
    {"fid": lambda results: results["fid"]},
)
