"""Memorization and membership inference by distances between pixels. Both access private images
outside any mechanism and are unrelated to ε: they can find a leak, but not prove its absence."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgen.evaluation.metrics import Judged, Metric, Results
from fedgen.evaluation.utility import Images
from fedgen.reporting.figures import histograms, sample_grid

Distances = NDArray[np.float64]
_FALSE_ALARMS = 0.01
_PICTURED = 20
PICTURES = ("nearest.png", "distances.png")
"""What this metric writes into a run's folder ``evaluation``."""


def nearest(queries: Images, base: Images, count: int = 1) -> tuple[Distances, NDArray[np.int64]]:
    """Return root mean squared pixel differences, in [0, 1], of each query to its nearest images in
    ``base``, (n, count), and their indices, (n, count)."""
    from sklearn.neighbors import NearestNeighbors

    rows, base_rows = (
        images.reshape(len(images), -1).astype(np.float32) / 255 for images in (queries, base)
    )
    index = NearestNeighbors(n_neighbors=count, algorithm="brute").fit(base_rows)
    distances, which = index.kneighbors(rows)
    return distances.astype(np.float64) / np.sqrt(rows.shape[1]), which


def memorization(samples: Images, train: Images, test: Images) -> dict[str, Any]:
    """Count the samples that copy an image: their distance to it is less than half that to every
    other image.

    copied: share that copies an image of ``train``.
    by_chance: share that copies an image of ``test``, which no generator has seen.
    p_value: probability of at least as many distinct training images among those copied, if
        membership made no difference (hypergeometric: images are then exchangeable, whatever the
        samples are).
    """
    from scipy.stats import hypergeom

    rows = np.concatenate([train, test])
    distances, which = nearest(samples, rows, 2)
    copies = which[distances[:, 0] < distances[:, 1] / 2, 0]
    different = np.unique(copies)
    from_train = int((different < len(train)).sum())
    chance = hypergeom(len(rows), len(train), len(different)).sf(from_train - 1)
    return {
        "copied": float((copies < len(train)).sum() / len(samples)),
        "by_chance": float((copies >= len(train)).sum() / len(samples)),
        "p_value": float(chance) if len(different) else 1.0,
        "n": len(samples),
        "train": len(train),
        "test": len(test),
    }


def membership_inference(samples: Images, train: Images, test: Images) -> dict[str, Any]:
    """Run the black-box attack of "GAN-Leaks" (Chen, Yu, Zhang, Fritz 2020): an image near a sample
    is predicted to be a member. ``auc`` over members (``train``) and others (``test``), 0.5 by
    chance, and the true positive rate at 1 % false alarms, 0.01 by chance."""
    from sklearn.metrics import roc_auc_score, roc_curve

    members, others = (nearest(rows, samples)[0][:, 0] for rows in (train, test))
    truth = np.repeat([1, 0], [len(members), len(others)])
    score = -np.concatenate([members, others])
    alarms, true_positive_rates, _ = roc_curve(truth, score)
    return {
        "auc": float(roc_auc_score(truth, score)),
        "tpr_at_1_percent_fpr": float(true_positive_rates[alarms <= _FALSE_ALARMS].max()),
        "members": len(members),
        "others": len(others),
        "samples": len(samples),
    }


def _compute(judged: Judged) -> dict[str, Any]:
    """Return memorization and membership inference; draw ``nearest.png``, the samples nearest to a
    training image, each next to it, and ``distances.png``, the distribution of distances."""
    if not judged.settings.leakage:
        return {}
    judged.progress.say("memorization and membership inference: distances of all pairs")
    data, training_images = judged.data, judged.training_images
    test = judged.random_subset(data.test_images, "test")
    train = judged.random_subset(training_images, "train", len(test))
    samples = judged.random_subset(judged.images, "generated")
    distances, which = nearest(samples, training_images)
    others, _ = nearest(test, training_images)
    closest = np.argsort(distances[:, 0])[:_PICTURED]
    judged.pictures.mkdir(parents=True, exist_ok=True)
    pairs = np.stack([samples[closest], training_images[which[closest, 0]]], 1)
    pictures = pairs.reshape(-1, *data.shape)
    sample_grid(pictures, 10, judged.pictures / PICTURES[0], synthetic=False)  # half are real
    histograms(
        {"samples": distances[:, 0], "test split": others[:, 0]},
        "distance to the nearest training image, root mean square over pixels",
        judged.pictures / PICTURES[1],
    )
    return {
        "memorization": memorization(samples, training_images, data.test_images),
        "membership": membership_inference(judged.images, train, test),
    }


def _describe(results: Results) -> list[tuple[str, str]]:
    copies, attack = results["memorization"], results["membership"]
    return [
        (
            "copies of training images",
            f"{copies['copied']:.2%} of {copies['n']:,} samples copy one of "
            f"{copies['train']:,} training images; {copies['by_chance']:.2%} copy one of "
            f"{copies['test']:,} images that were not trained on (p = {copies['p_value']:.2g})",
        ),
        (
            "membership inference",
            f"AUC {attack['auc']:.3f}, {attack['tpr_at_1_percent_fpr']:.1%} of "
            f"{attack['members']:,} members found at 1 % false alarms, from "
            f"{attack['samples']:,} samples",
        ),
    ]


METRIC = Metric(("memorization", "membership"), _compute, _describe)
