"""scikit-learn's handwritten digits, 8x8 pixels."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

from fedgen.data.datasets import Dataset, ExampleKeys, build_dataset
from fedgen.randomness import RandomStreams


def digits(streams: RandomStreams, **_: object) -> Dataset:
    """Return scikit-learn's 8x8 digits (UCI, 1,797 images): 1,437 for training and 360 for testing,
    by public streams."""
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None and spec.submodule_search_locations is not None  # a dependency
    # sklearn.datasets imports pandas, which takes half a second
    file = Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    rows = np.loadtxt(file, delimiter=",")
    images, labels = rows[:, :-1], rows[:, -1].astype(np.int64)
    scaled = np.rint(images * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    order = torch.randperm(len(labels), generator=streams.public("digits", "split")).numpy()
    train, test = order[:1437], order[1437:]
    return build_dataset(
        "digits",
        scaled[train],
        labels[train],
        scaled[test],
        labels[test],
        None,
        10,
        ExampleKeys("a position in scikit-learn's file", "a fixed permutation of row numbers"),
    )
