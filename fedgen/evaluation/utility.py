"""gen2real: classifiers trained on generated rows, tested on the real test split. real2gen: the
other way round.

Each classifier is a function (images, labels, classes, seed) -> predict, and predict one of images
-> labels; images are (n, channels, height, width) uint8. Nothing is chosen on what they are tested
on.
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
Predict = Callable[[Images], Labels]
Classifier = Callable[[Images, Labels, int, int], Predict]


def cnn(images: Images, labels: Labels, classes: int, seed: int, *, epochs: int) -> Predict:
    """What ``trained_cnn`` says."""
    net = trained_cnn(images, labels, classes, seed, epochs)

    def predict(images: Images) -> Labels:
        with torch.no_grad():
            batches = torch.split(torch.from_numpy(images), 512)
            said: Labels = torch.cat([net(_floats(rows)).argmax(1) for rows in batches]).numpy()
        return said

    return predict


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


def logistic_regression(images: Images, labels: Labels, classes: int, seed: int) -> Predict:
    """scikit-learn's logistic regression with its defaults, on pixels in [0, 1]."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    del classes
    model = LogisticRegression(random_state=seed)
    with warnings.catch_warnings():  # the default stops after 100 iterations, converged or not
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(_flat(images), labels)
    return lambda images: np.asarray(model.predict(_flat(images)), np.int64)


def _flat(images: Images) -> NDArray[np.float32]:
    return images.reshape(len(images), -1).astype(np.float32) / np.float32(255)


def accuracies(
    classifiers: Mapping[str, Classifier],
    images: Images,
    labels: Labels,
    tests: Mapping[str, tuple[Images, Labels]],
    classes: int,
    seeds: int,
    done: Callable[[str], None],
) -> dict[str, dict[str, dict[str, Any]]]:
    """For each test, by name: mean and standard deviation over seeds, by classifier, with the
    number n of rows to learn from; a mean of None where they have one label, which teaches
    nothing."""
    found: dict[str, dict[str, dict[str, Any]]] = {test: {} for test in tests}
    for name, classifier in classifiers.items():
        learnt = seeds if len(np.unique(labels)) > 1 else 0
        fits = [classifier(images, labels, classes, seed) for seed in range(learnt)]
        for test, (rows, truth) in tests.items():
            scores = [float((predict(rows) == truth).mean()) for predict in fits]
            mean = float(np.mean(scores)) if scores else None
            std = float(np.std(scores, ddof=1)) if len(scores) > 1 else None
            found[test][name] = {"mean": mean, "std": std, "n": len(labels), "seeds": learnt}
        done(name)
    return found
