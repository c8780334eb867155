"""gen2real: classifiers trained on generated rows, tested on the real test split.

Each classifier is a function (images, labels, test images, test labels, classes, seed) -> accuracy
in [0, 1]; images are (n, channels, height, width) uint8. Nothing is chosen on the test split.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fedgen.models.classifiers import small_cnn

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Classifier = Callable[[Images, Labels, Images, Labels, int, int], float]


def cnn(
    images: Images,
    labels: Labels,
    test_images: Images,
    test_labels: Labels,
    classes: int,
    seed: int,
    *,
    epochs: int,
) -> float:
    """The accuracy of ``trained_cnn``."""
    net = trained_cnn(images, labels, classes, seed, epochs)
    return _accuracy(net, torch.from_numpy(test_images), torch.from_numpy(test_labels))


def trained_cnn(images: Images, labels: Labels, classes: int, seed: int, epochs: int) -> nn.Module:
    """The paper's CNN (32 and 64 kernels, dropout), Adam 1e-3, batches of 128."""
    with torch.random.fork_rng(devices=[]):  # dropout and torch's initializers know no other coins
        torch.manual_seed(seed)
        net = small_cnn(images.shape[1:], classes)
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        rows, targets = torch.from_numpy(images), torch.from_numpy(labels)
        for _ in range(epochs):
            for batch in torch.split(torch.randperm(len(rows)), 128):
                if len(batch) > 1 or len(rows) == 1:
                    loss = F.cross_entropy(net(_floats(rows[batch])), targets[batch])
                    optimizer.zero_grad()
                    torch.autograd.backward(loss)
                    optimizer.step()
    return net.eval()


def _floats(images: Tensor) -> Tensor:
    return images.to(torch.float32) / 255


def _accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    net.eval()
    with torch.no_grad():
        hits = [
            (net(_floats(images[rows])).argmax(1) == labels[rows]).sum()
            for rows in torch.split(torch.arange(len(images)), 512)
        ]
    return float(torch.stack(hits).sum()) / len(images)


def logistic_regression(
    images: Images,
    labels: Labels,
    test_images: Images,
    test_labels: Labels,
    classes: int,
    seed: int,
) -> float:
    """scikit-learn's logistic regression with its defaults, on pixels in [0, 1]."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    del classes
    model = LogisticRegression(random_state=seed)
    with warnings.catch_warnings():  # the default stops after 100 iterations, converged or not
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(images.reshape(len(images), -1) / np.float32(255), labels)
    flat = test_images.reshape(len(test_images), -1) / np.float32(255)
    return float(model.score(flat, test_labels))


def accuracies(
    classifiers: Mapping[str, Classifier],
    images: Images,
    labels: Labels,
    test_images: Images,
    test_labels: Labels,
    classes: int,
    seeds: int,
    done: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Mean and standard deviation over seeds, by classifier, with the number of rows n; a mean of
    None where all rows have one label, which teaches nothing."""
    found: dict[str, dict[str, Any]] = {}
    for name, classifier in classifiers.items():
        if len(np.unique(labels)) < 2:
            found[name] = {"mean": None, "std": None, "n": len(labels), "seeds": 0}
            done(name)
            continue
        scores = [
            classifier(images, labels, test_images, test_labels, classes, seed)
            for seed in range(seeds)
        ]
        std = float(np.std(scores, ddof=1)) if seeds > 1 else None
        found[name] = {"mean": float(np.mean(scores)), "std": std, "n": len(labels), "seeds": seeds}
        done(name)
    return found
