"""gen2real: classifiers trained on generated rows, tested on the real test split. real2gen: the
other way round.

Each classifier is a function (images, labels, classes, seed) -> predict, and predict one of images
-> labels; images are (n, channels, height, width) uint8. What they stop by is held out from the
rows that they learn from; nothing is chosen on what they are tested on.
"""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import get_class
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.adam import adam

from fedgen import factories
from fedgen.errors import FedgenError
from fedgen.files import write_shared
from fedgen.models.classifiers import small_cnn

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Predict = Callable[[Images], Labels]
Classifier = Callable[[Images, Labels, int, int], Predict]

_HELD_OUT, _PATIENCE, LEAST_BATCHES = 0.1, 3, 60
_ADAM: dict[str, Any] = {  # torch.optim.Adam's
    **{"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    **{"amsgrad": False, "maximize": False},
}
_AT_ONCE = 64  # images through a network: what lies between two layers fits in a CPU's caches


def cnn(images: Images, labels: Labels, classes: int, seed: int, *, epochs: int) -> Predict:
    """GS-WGAN's CNN (32 and 64 kernels, dropout), trained for at most so many epochs."""
    net = trained(lambda: small_cnn(images.shape[1:], classes), images, labels, seed, epochs)

    def predict(images: Images) -> Labels:
        said: Labels = outputs(net, images).argmax(1)
        return said

    return predict


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
    """A classifier ``model`` of scikit-learn's interface, by its full name, on pixels in [0, 1]:
    with its defaults but for ``settings``, and at most so many rows.

    Raises:
        FedgenError: for a model that may not be called (``fedgen.factories``).
    """
    from sklearn.exceptions import ConvergenceWarning

    factories.check({"_target_": model}, "evaluation.classifiers")

    del classes
    made = get_class(model)(**settings)
    if "random_state" in made.get_params():
        made.set_params(random_state=seed)
    images, labels = images[:most_rows], labels[:most_rows]
    known, numbers = np.unique(labels, return_inverse=True)  # XGBoost wants all from 0 on
    with warnings.catch_warnings():  # some defaults stop early, converged or not
        warnings.simplefilter("ignore", ConvergenceWarning)
        made.fit(_flat(images), numbers)
    return lambda images: known[np.asarray(made.predict(_flat(images)), np.int64)]


def trained(
    make: Callable[[], nn.Module], images: Images, labels: Labels, seed: int, epochs: int
) -> nn.Module:
    """A network from images to logits: Adam 1e-3, batches of 128. A tenth of the rows is held out:
    the epoch that knows most of them is kept, and three that know no more of them end it. An epoch
    passes over the rows as often as makes 60 batches: a few hundred rows are learnt, too."""
    with torch.random.fork_rng(devices=[]):  # dropout and torch's initializers know no other coins
        torch.manual_seed(seed)
        net = make()
        leaves = list(net.parameters())
        weights = [each.data for each in leaves]
        means, squares = ([torch.zeros_like(each) for each in weights] for _ in range(2))
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


def outputs(net: Callable[[Tensor], Tensor], images: Images) -> NDArray[np.float32]:
    """What a network, or a part of it, says of images: (n, ...). It is put into evaluation mode."""
    if isinstance(net, nn.Module):
        net.eval()
    with torch.no_grad():
        pieces = np.array_split(images, -(-len(images) // _AT_ONCE) or 1)
        parts = [net(_floats(piece)) for piece in pieces]
    found: NDArray[np.float32] = torch.cat(parts).numpy()
    return found


def _floats(images: Images) -> Tensor:
    return torch.from_numpy(images.astype(np.float32)) / 255  # a copy: workers may only read theirs


def _flat(images: Images) -> NDArray[np.float32]:
    return images.reshape(len(images), -1).astype(np.float32) / np.float32(255)


Scores = list[float | None]
"""An accuracy, and that on each label alone; None for a label without rows."""


@dataclass(frozen=True)
class Fit:
    """A classifier, by name, to be trained on ``rows`` (images, labels) with a seed, and tested on
    others. ``known``: a file to find its scores in, or to leave them in."""

    name: str
    classifier: Classifier
    rows: tuple[Images, Labels]
    tests: Mapping[str, tuple[Images, Labels]]
    classes: int
    seed: int
    known: Path | None = None

    def scores(self) -> dict[str, Scores]:
        """For each test, by name."""
        if self.known is not None and self.known.exists():
            kept: dict[str, Scores] = json.loads(self.known.read_text())
            return kept
        try:
            predict = self.classifier(*self.rows, self.classes, self.seed)
        except ValueError as error:  # of a library's, for too few rows
            problem = f"cannot learn from {len(self.rows[1])} rows: {str(error).splitlines()[0]}"
            key = f"evaluation.classifiers.{self.name}"
            raise FedgenError(key, problem, "give more samples, or other classifiers") from error
        found: dict[str, Scores] = {}
        for test, (images, truth) in self.tests.items():
            right = predict(images) == truth
            parts = [right, *(right[truth == label] for label in range(self.classes))]
            found[test] = [float(part.mean()) if len(part) else None for part in parts]
        if self.known is not None:
            write_shared(self.known, json.dumps(found).encode())
        return found


def all_scores(fits: Sequence[Fit], jobs: int) -> Iterator[tuple[int, dict[str, Scores]]]:
    """(number, scores) of each as they come: one after the other in this process, or ``jobs`` at a
    time in processes of their own."""
    if jobs == 1:
        yield from map(_numbered, range(len(fits)), fits)
        return
    import joblib

    with warnings.catch_warnings(), joblib.parallel_config("loky", inner_max_num_threads=1):
        # a process that a classifier has blown up is replaced between two of them
        warnings.filterwarnings("ignore", "A worker stopped", UserWarning)
        at_once = joblib.Parallel(jobs, return_as="generator_unordered", batch_size=1)
        yield from at_once(joblib.delayed(_numbered)(*each) for each in enumerate(fits))


def _numbered(number: int, fit: Fit) -> tuple[int, dict[str, Scores]]:
    return number, fit.scores()


def summary(scores: Sequence[Scores], rows: int, tested: int) -> dict[str, Any]:
    """Mean and standard deviation over the seeds, ``per_class`` the mean for each label, with the
    number n of rows to learn from; a mean of None where there was nothing to learn. ``interval``:
    at 95 % (Wilson's), from as many test rows as there are, for the seeds that there are."""
    whole = [found[0] for found in scores if found[0] is not None]
    by_label = [
        None if None in values else float(np.mean(values))
        for values in list(zip(*scores, strict=True))[1:]
    ]
    return {
        "mean": float(np.mean(whole)) if whole else None,
        "std": float(np.std(whole, ddof=1)) if len(whole) > 1 else None,
        "n": rows,
        "seeds": len(whole),
        "per_class": by_label,
        "tested": tested,
        "interval": _interval(float(np.mean(whole)), tested) if whole else None,
    }


def _interval(accuracy: float, tested: int) -> list[float]:
    from scipy.stats import binomtest

    found = binomtest(round(accuracy * tested), tested).proportion_ci(0.95, "wilson")
    return [float(found.low), float(found.high)]
