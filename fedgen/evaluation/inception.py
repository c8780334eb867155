"""FID's features: pytorch-fid's InceptionV3, on images as pytorch-fid reads them from files."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedgen.errors import FedgenError
from fedgen.evaluation.utility import Images

WEIGHTS = "pt_inception-2015-12-05-6726825d.pth"
_DIGEST = "6726825d"  # how the sha256 of the file begins
_BATCH = 50


def check_weights(path: Path) -> None:
    """Raises FedgenError unless a file has the weights that make it FID."""
    key = "evaluation.inception_weights"
    if path.exists() and not path.is_file():  # a device has no end
        raise FedgenError(key, f"{path} is no file", f"give the file {WEIGHTS}, or null")
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror})"
        raise FedgenError(key, problem, f"give the file {WEIGHTS}, or null") from error
    if not found.startswith(_DIGEST):
        raise FedgenError(
            key,
            f"{path} has other weights (sha256 {found[:8]}...)",
            f"give pytorch-fid's {WEIGHTS}: with any other the distance is not FID",
        )


def inception(weights: str | None) -> nn.Module | None:
    """The network to 2,048 features: with the weights of this file, else with those of torch's
    cache or its download; None where there are neither.

    Raises:
        FedgenError: if they are others than pytorch-fid's.
    """
    cached = Path(torch.hub.get_dir(), "checkpoints", WEIGHTS)
    if weights is not None or cached.exists():
        check_weights(cached if weights is None else Path(weights))
    return network(weights)


def network(weights: str | None) -> nn.Module | None:
    """The same, whatever the weights are."""
    from pytorch_fid.inception import InceptionV3

    before = torch.hub.get_dir()
    try:
        with tempfile.TemporaryDirectory() as folder:
            if weights is not None:  # pytorch-fid asks torch's cache for a file of this name
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
    """Features (n, 2048); grey images are repeated to three channels, the network enlarges them to
    299 x 299. ``done``: told how many images there are so far."""
    found = []
    for part in np.array_split(images, -(-len(images) // _BATCH)):
        batch = torch.from_numpy(part).to(torch.float32) / 255
        with torch.no_grad():
            found.append(net(batch.expand(-1, 3, -1, -1))[0].flatten(1))
        done(sum(map(len, found)))
    return torch.cat(found).numpy()
