"""Data sets that torchvision reads and downloads: MNIST and Fashion-MNIST."""

from __future__ import annotations

from typing import Literal

from fedgen.data.datasets import Dataset, ExampleKeys, build_dataset, data_root
from fedgen.data.npz import from_npz
from fedgen.errors import FedgenError
from fedgen.storage.io import user_umask


def torchvision_set(
    name: Literal["mnist", "fashion_mnist"],
    root: str | None,
    kind: Literal["MNIST", "FashionMNIST"],
    **_: object,
) -> Dataset:
    """Return MNIST or Fashion-MNIST from ``NAME.npz``, else torchvision's files, else its download.

    Args:
        name: ``mnist`` or ``fashion_mnist``.
        kind: class in torchvision, ``MNIST`` or ``FashionMNIST``.
    """
    folder = data_root(root)
    if (folder / f"{name}.npz").exists():
        return from_npz(name, folder / f"{name}.npz", 10)
    import torchvision

    load = getattr(torchvision.datasets, kind)
    try:
        with user_umask():
            train, test = (load(str(folder), train=part, download=True) for part in (True, False))
    except (RuntimeError, OSError) as error:
        raise FedgenError(
            "data.root",
            f"{name} is neither in {folder} nor could it be downloaded",
            f"put {name}.npz or torchvision's files there, or connect to a network",
        ) from error
    return build_dataset(
        name,
        train.data.numpy()[:, None],
        train.targets.numpy(),
        test.data.numpy()[:, None],
        test.targets.numpy(),
        None,
        10,
        ExampleKeys("a position in torchvision's file", "its number"),
    )
