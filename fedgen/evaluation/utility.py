"""gen2real: classifiers trained on generated images, tested on the real test split. real2gen: vice
versa.

A classifier is a function (images, labels, classes, seed) -> predict, where predict maps images to
labels; images are (n, channels, height, width) uint8. Early stopping uses held-out training images;
nothing is chosen on test images.
"""

from __future__ import annotations

import itertools
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Lt
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.adam import adam

from fedgen.config.extensions import load_named
from fedgen.config.registry import check_model
from fedgen.errors import FedgenError
from fedgen.models.classifiers import small_cnn
from fedgen.models.residual import Architecture, residual_network
from fedgen.storage.io import write_shared

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Predict = Callable[[Images], Labels]
Classifier = Callable[[Images, Labels, int, int], Predict]

_BENCHMARK_HELD_OUT = 12  # one in twelve samples is held out: 5,000 of 60,000
_BENCHMARK_EMA = 0.9999
_HELD_OUT, _PATIENCE, LEAST_BATCHES = 0.1, 3, 60
_ADAM: dict[str, Any] = {  # torch.optim.Adam's
    **{"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    **{"amsgrad": False, "maximize": False},
}
_NETWORK_ARGUMENTS = ("architecture", "depth", "width", "groups", "dropout")
_LOGITS_AT_ONCE = 500  # images
_TIMED = 64  # batch size of the timed step
_CHUNK = 64  # images per pass: activations fit in CPU caches


def cnn(images: Images, labels: Labels, classes: int, seed: int, *, epochs: int) -> Predict:
    """Train GS-WGAN's CNN (32 and 64 kernels, dropout) for at most this many epochs."""
    net = train_classifier(
        lambda: small_cnn(images.shape[1:], classes), images, labels, seed, epochs
    )

    def predict(images: Images) -> Labels:
        predictions: Labels = outputs(net, images).argmax(1)
        return predictions

    return predict


def network(
    images: Images,
    labels: Labels,
    classes: int,
    seed: int,
    *,
    architecture: Architecture,
    depth: int,
    width: int = 1,
    groups: int = 1,
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0,
    epochs: int,
    batch: Annotated[int, Ge(2)],
    optimizer: Literal["adam", "sgd"],
    learning_rate: float,
    decay_every: int,
) -> Predict:
    """Train a residual network as DPImageBench does (Gong et al., CCS 2025), on a GPU if there is
    one: a twelfth of the images is held out, weights are averaged exponentially, and the epoch with
    the best accuracy of these averages on the held-out images is kept, the latest among ties.

    Args:
        architecture, depth, width, groups, dropout: see ``residual_network``.
        optimizer: Adam, or SGD with momentum 0.9 and weight decay 5e-4.
        decay_every: epochs after which the learning rate is divided by five.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        shape = images.shape[1:]
        net = residual_network(shape, classes, architecture, depth, width, groups, dropout)
        net = net.to(device)
        weights = list(net.parameters())
        averages = [weight.detach().clone() for weight in weights]
        if optimizer == "adam":
            steps: torch.optim.Optimizer = torch.optim.Adam(weights, learning_rate)
        else:
            steps = torch.optim.SGD(weights, learning_rate, momentum=0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.StepLR(steps, decay_every, 0.2)
        pixels, targets = torch.from_numpy(images.copy()).to(device), torch.from_numpy(labels)
        targets, order = targets.to(device), torch.randperm(len(labels))
        held, rows = order.tensor_split([len(order) // _BENCHMARK_HELD_OUT])
        best, count = -1.0, 0
        for _ in range(epochs):
            net.train()
            for part in torch.split(rows[torch.randperm(len(rows))], batch):
                if len(part) < 2:  # batch normalization needs two
                    continue
                steps.zero_grad()
                loss = F.cross_entropy(net(_scaled(pixels[part])), targets[part])
                loss.backward()  # type: ignore[no-untyped-call]
                steps.step()
                count += 1
                share = 1 - min(_BENCHMARK_EMA, (1 + count) / (10 + count))
                torch._foreach_lerp_(averages, [weight.detach() for weight in weights], share)
            schedule.step()
            current = [weight.detach().clone() for weight in weights]
            torch._foreach_copy_([weight.data for weight in weights], averages)
            right = float((_logits(net, pixels[held]).argmax(1) == targets[held]).float().mean())
            if not len(held) or right >= best:
                best = right
                kept = {name: value.clone() for name, value in net.state_dict().items()}
            torch._foreach_copy_([weight.data for weight in weights], current)
        net.load_state_dict(kept)

    def predict(images: Images) -> Labels:
        return _logits(net, torch.from_numpy(images.copy()).to(device)).argmax(1).cpu().numpy()

    return predict


def _logits(net: nn.Module, pixels: Tensor) -> Tensor:
    """Return the logits (n, classes) of images (n, channels, h, w) uint8, in evaluation mode."""
    net.eval()
    with torch.no_grad():
        return torch.cat([net(_scaled(part)) for part in torch.split(pixels, _LOGITS_AT_ONCE)])


def _scaled(pixels: Tensor) -> Tensor:
    """Return images scaled to [-1, 1]."""
    return pixels.float() / 127.5 - 1


def scikit(
    images: Images,
    labels: Labels,
    classes: int,
    seed: int,
    *,
    model: str,
    most_rows: int | None = None,
    **settings: Any,
) -> Predict:
    """Train a classifier with scikit-learn's interface, given by its full name, on pixels in [0,
    1]: with its defaults except ``settings``, and on a limited number of images.

    Raises:
        FedgenError: for a model that is not registered (``fedgen.config.registry``).
    """
    from sklearn.exceptions import ConvergenceWarning

    check_model(model, "model")
    del classes
    estimator_class = load_named(model, "model")
    if not isinstance(estimator_class, type) or not hasattr(estimator_class, "fit"):
        problem = f"{model} has not scikit-learn's interface"
        raise FedgenError("model", problem, "name a class with fit and predict")
    estimator = estimator_class(**settings)
    if "random_state" in estimator.get_params():
        estimator.set_params(random_state=seed)
    images, labels = images[:most_rows], labels[:most_rows]
    distinct_labels, numbers = np.unique(labels, return_inverse=True)  # XGBoost requires 0, 1, ...
    with warnings.catch_warnings():  # some defaults stop before convergence
        warnings.simplefilter("ignore", ConvergenceWarning)
        estimator.fit(_flat(images), numbers)
    return lambda images: distinct_labels[np.asarray(estimator.predict(_flat(images)), np.int64)]


def train_classifier(
    make: Callable[[], nn.Module], images: Images, labels: Labels, seed: int, epochs: int
) -> nn.Module:
    """Train a network from images to logits: Adam 1e-3, batches of 128. A tenth of the images is
    held out: the epoch with the best accuracy on them is kept, and three without improvement end
    training. An epoch passes over the images as often as needed for at least 60 batches, so that a
    few hundred images suffice."""
    with torch.random.fork_rng(devices=[]):  # for dropout and torch's initializers
        torch.manual_seed(seed)
        net = make()
        leaves = list(net.parameters())
        weights = [leaf.data for leaf in leaves]
        means, squares = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
        steps = [torch.zeros(()) for _ in weights]
        targets, order = torch.from_numpy(labels), torch.randperm(len(labels))
        held = int(_HELD_OUT * len(order))
        out, rows = order[:held].numpy(), order[held:]
        repeats = math.ceil(LEAST_BATCHES / math.ceil(len(rows) / 128))
        best, kept, since = -1.0, net.state_dict(), 0
        for _ in range(epochs):
            net.train()
            passes = [torch.split(rows[torch.randperm(len(rows))], 128) for _ in range(repeats)]
            for batch in itertools.chain(*passes):
                if len(batch) > 1 or len(rows) == 1:
                    loss = F.cross_entropy(net(_floats(images[batch.numpy()])), targets[batch])
                    gradients = list(torch.autograd.grad(loss, leaves))
                    # the function: torch.optim.Adam imports torch's compiler, which takes seconds
                    adam(weights, gradients, means, squares, [], steps, foreach=False, **_ADAM)
            right = (
                float((outputs(net, images[out]).argmax(1) == labels[out]).mean()) if held else 0
            )
            if held and right <= best:
                since += 1
            else:
                best, since = right, 0
                kept = {name: value.clone() for name, value in net.state_dict().items()}
            if since == _PATIENCE:
                break
        net.load_state_dict(kept)
    return net.eval()


def downsample(images: Images, side: int | None) -> Images:
    """Return images (n, channels, h, w) averaged to ``side`` x ``side`` pixels, if larger."""
    if side is None or max(images.shape[2:]) <= side:
        return images
    parts = np.array_split(images, -(-len(images) // _CHUNK) or 1)
    means = [F.interpolate(_floats(part) * 255, (side, side), mode="area") for part in parts]
    return torch.cat(means).round().to(torch.uint8).numpy()


def expected_seconds(fits: Sequence[Fit]) -> float:
    """Estimate the training time of the networks among classifiers in seconds, from the time of one
    step, if each trains for all of its epochs. Others count as 0."""
    missing = [fit for fit in fits if fit.settings and not fit.is_cached]
    seconds = dict.fromkeys({fit.name for fit in missing}, 0.0)
    for name in seconds:
        fit = next(fit for fit in missing if fit.name == name)
        images, labels = (torch.from_numpy(rows[:_TIMED].copy()) for rows in fit.rows)
        shape, device = tuple(images.shape[1:]), "cpu"
        if "architecture" in fit.settings:
            arguments = {k: v for k, v in fit.settings.items() if k in _NETWORK_ARGUMENTS}
            net = residual_network(shape, fit.classes, **arguments)
            device = "cuda" if torch.cuda.is_available() else "cpu"
        else:
            net = small_cnn(shape, fit.classes)
        net, images, labels = net.to(device), images.to(device), labels.to(device)
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            loss = F.cross_entropy(net(_scaled(images)), labels)
            float(torch.autograd.grad(loss, list(net.parameters()))[0].sum())  # synchronizes
            taken.append(time.perf_counter() - start)
        seconds[name] = min(taken) / len(labels)
    return sum(seconds[fit.name] * int(fit.settings["epochs"]) * _images(fit) for fit in missing)


def _images(fit: Fit) -> int:
    """Return the number of training images of an epoch."""
    least = 0 if "architecture" in fit.settings else 128 * LEAST_BATCHES
    return max(len(fit.rows[1]), least)


def outputs(net: Callable[[Tensor], Tensor], images: Images) -> NDArray[np.float32]:
    """Return the output of a network, or a part of it: (n, ...). It is set to evaluation mode."""
    if isinstance(net, nn.Module):
        net.eval()
    with torch.no_grad():
        pieces = np.array_split(images, -(-len(images) // _CHUNK) or 1)
        parts = [net(_floats(piece)) for piece in pieces]
    output: NDArray[np.float32] = torch.cat(parts).numpy()
    return output


def _floats(images: Images) -> Tensor:
    return torch.from_numpy(images.astype(np.float32)) / 255  # a copy of a read-only array


def _flat(images: Images) -> NDArray[np.float32]:
    return images.reshape(len(images), -1).astype(np.float32) / np.float32(255)


Scores = list[float | None]
"""An accuracy, and that on each label alone; None for a label without rows."""


@dataclass(frozen=True)
class Fit:
    """A named classifier, to be trained on ``rows`` (images, labels) with a seed and tested on
    others. ``cache_file``: file of its scores."""

    name: str
    classifier: Classifier
    rows: tuple[Images, Labels]
    tests: Mapping[str, tuple[Images, Labels]]
    classes: int
    seed: int
    cache_file: Path | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of ``cnn`` or ``network``; empty for other classifiers."""
        classifier: Any = self.classifier
        is_network = isinstance(classifier, partial) and classifier.func in (cnn, network)
        return classifier.keywords if is_network else {}

    @property
    def is_cached(self) -> bool:
        """Whether the scores are cached."""
        return self.cache_file is not None and self.cache_file.exists()

    def scores(self) -> dict[str, Scores]:
        """Return the score on each test, by name."""
        if self.cache_file is not None and self.is_cached:
            kept: dict[str, Scores] = json.loads(self.cache_file.read_text())
            return kept
        try:
            predict = self.classifier(*self.rows, self.classes, self.seed)
        except ValueError as error:  # raised by a library for too few images
            problem = f"cannot learn from {len(self.rows[1])} rows: {str(error).splitlines()[0]}"
            key = f"evaluation.classifiers.{self.name}"
            raise FedgenError(key, problem, "give more samples, or other classifiers") from error
        scores: dict[str, Scores] = {}
        for test, (images, truth) in self.tests.items():
            right = predict(images) == truth
            parts = [right, *(right[truth == label] for label in range(self.classes))]
            scores[test] = [float(part.mean()) if len(part) else None for part in parts]
        if self.cache_file is not None:
            write_shared(self.cache_file, json.dumps(scores).encode())
        return scores


def all_scores(fits: Sequence[Fit], jobs: int) -> Iterator[tuple[int, dict[str, Scores]]]:
    """Yield (number, scores) as they become available: sequentially in this process, or ``jobs`` in
    parallel processes."""
    if jobs == 1:
        yield from map(_numbered, range(len(fits)), fits)
        return
    import joblib

    with warnings.catch_warnings(), joblib.parallel_config("loky", inner_max_num_threads=1):
        # a process that a classifier has enlarged is replaced afterwards
        warnings.filterwarnings("ignore", "A worker stopped", UserWarning)
        at_once = joblib.Parallel(jobs, return_as="generator_unordered", batch_size=1)
        yield from at_once(
            joblib.delayed(_numbered)(*numbered_fit) for numbered_fit in enumerate(fits)
        )


def _numbered(number: int, fit: Fit) -> tuple[int, dict[str, Scores]]:
    return number, fit.scores()


def summary(scores: Sequence[Scores], rows: int, tested: int) -> dict[str, Any]:
    """Return mean and standard deviation over the seeds, ``per_class`` the mean per label, and the
    number n of training images; a mean of None if there was nothing to train on. ``interval``: 95 %
    (Wilson) for the number of test images, given these seeds; it does not cover the spread over
    seeds."""
    overall = [accuracies[0] for accuracies in scores if accuracies[0] is not None]
    by_label = [
        None if None in values else float(np.mean(values))
        for values in list(zip(*scores, strict=True))[1:]
    ]
    return {
        "mean": float(np.mean(overall)) if overall else None,
        "std": float(np.std(overall, ddof=1)) if len(overall) > 1 else None,
        "n": rows,
        "seeds": len(overall),
        "per_class": by_label,
        "tested": tested,
        "interval": _interval(float(np.mean(overall)), tested) if overall else None,
    }


def _interval(accuracy: float, tested: int) -> list[float]:
    from scipy.stats import binomtest

    interval = binomtest(round(accuracy * tested), tested).proportion_ci(0.95, "wilson")
    return [float(interval.low), float(interval.high)]
