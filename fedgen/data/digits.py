"""scikit-learn's handwritten digits, 8x8 pixels."""

from __future__ import annotations

import numpy as np
import torch

from fedgen.data.datasets import Dataset, ExampleKeys, build_dataset
from fedgen.randomness import RandomStreams


def digits(streams: RandomStreams, **_: object) -> Dataset:
    """Return scikit-learn's 8x8 digits (UCI, 1,797 images): 1,437 for training and 360 for testing,
    by public streams."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
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
