"""The classifier of a data set: for inception scores on MNIST (as in "GS-WGAN" and "Differentially
Private Generation of Small Images"), and for the features of FCD, precision and recall.

It is trained on real training images, outside any mechanism.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray

from fedgen.evaluation.frechet import frechet_distance, statistics
from fedgen.evaluation.inception_score import inception_score
from fedgen.evaluation.manifold import precision_and_recall
from fedgen.evaluation.metrics import Judged, Metric, Results
from fedgen.evaluation.utility import LEAST_BATCHES, Images, Labels, outputs, train_classifier
from fedgen.models.classifiers import EvaluationNet
from fedgen.storage.io import cache, digest, write_shared
from fedgen.version import VERSION

_EPOCHS = 15


def evaluation_net(images: Images, labels: Labels, classes: int, folder: Path) -> EvaluationNet:
    """Return the classifier of these images, trained once and cached in ``folder`` by their
    digest."""
    rule = f"{_EPOCHS} {LEAST_BATCHES}"
    facts = f"{classes} {images.shape} {rule} {VERSION}"
    name = digest(images.tobytes(), labels.tobytes(), facts.encode())
    path = folder / f"judge-{name[:16]}.safetensors"
    net = EvaluationNet(images.shape[1:], classes)
    if path.exists():
        net.load_state_dict(safetensors.torch.load(path.read_bytes()))
        return net.eval()
    classifier = train_classifier(
        lambda: EvaluationNet(images.shape[1:], classes), images, labels, 0, _EPOCHS
    )
    weights = {name: value.contiguous() for name, value in classifier.state_dict().items()}
    write_shared(path, safetensors.torch.save(weights))
    net.load_state_dict(classifier.state_dict())
    return net.eval()


def features_and_probabilities(
    net: EvaluationNet, images: Images
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Return features (n, 128) of images, and probabilities (n, classes)."""
    features = outputs(net.features, images)
    with torch.no_grad():
        odds = net.head(torch.from_numpy(features)).double().softmax(1)
    return features, odds.numpy()


def _compute(judged: Judged) -> dict[str, Any]:
    """Return inception score, FCD, precision and recall by the classifier of the data set, with
    those of real splits. The FCD of the training split is the reference."""
    if not judged.settings.judge or judged.is_set:
        return {}
    data, streams = judged.data, judged.streams
    judged.progress.say("the data set's classifier: minutes, the first time")
    net = evaluation_net(data.images, data.labels, data.classes, cache() / "judges")
    features, scores = {}, {}
    splits = {"generated": judged.images, "train": data.images, "test": data.test_images}
    for name, images in splits.items():
        order = torch.randperm(len(images), generator=streams.public("order", name)).numpy()
        images = images[order]  # an inception score is computed over parts
        features[name], probabilities = features_and_probabilities(net, images)
        mean, std = inception_score(probabilities)
        scores[name] = {"mean": mean, "std": std, "n": len(images)}
        if name == "test":
            right = float((probabilities.argmax(1) == data.test_labels[order]).mean())
    test = statistics(features["test"])
    distances = {
        name: frechet_distance(statistics(features[name]), test) for name in ("generated", "train")
    }
    real, generated = (judged.random_subset(features[name], name) for name in ("test", "generated"))
    precision, recall = precision_and_recall(real, generated)
    return {
        "inception_score": {**scores, "judge_accuracy": right},
        "fcd": distances,
        "precision": precision,
        "recall": recall,
    }


def _describe(results: Results) -> list[tuple[str, str]]:
    scores, distances = results["inception_score"], results["fcd"]
    return [
        (
            "inception score",
            f"{scores['generated']['mean']:.2f} of {scores['generated']['n']:,} (real test "
            f"split: {scores['test']['mean']:.2f}; classifier of {scores['judge_accuracy']:.1%})",
        ),
        ("FCD", f"{distances['generated']:.3g} (real training split: {distances['train']:.3g})"),
        ("precision", f"{results['precision']:.1%}"),
        ("recall", f"{results['recall']:.1%}"),
    ]


METRIC = Metric(
    ("inception_score", "fcd", "precision", "recall"),
    _compute,
    _describe,
    {
        "inception_score": lambda results: results["inception_score"]["generated"]["mean"],
        "fcd": lambda results: results["fcd"]["generated"],
        "precision": lambda results: results["precision"],
        "recall": lambda results: results["recall"],
    },
)
