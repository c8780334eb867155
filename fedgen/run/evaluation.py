"""Evaluate the samples of a run, or of a file, by all configured metrics.

All metrics except gen2real access private images outside any mechanism: their results and pictures
are only for holders of the images.
"""

from __future__ import annotations

import functools
import itertools
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from fedgen.config import validation
from fedgen.config.build import build
from fedgen.config.extensions import is_extension
from fedgen.data.datasets import Dataset
from fedgen.errors import FedgenError
from fedgen.evaluation import utility
from fedgen.evaluation.inception_score import PARTS
from fedgen.evaluation.leakage import PICTURES
from fedgen.evaluation.metrics import Judged, data_digest, metrics
from fedgen.evaluation.utility import (
    Fit,
    Images,
    Labels,
    Scores,
    all_scores,
    downsample,
    expected_seconds,
    summary,
)
from fedgen.methods.api import Tensors
from fedgen.models import classifiers as classifier_models
from fedgen.models import residual
from fedgen.randomness import RandomStreams
from fedgen.reporting.progress import RunProgress
from fedgen.run.generator import judged_samples
from fedgen.run.setup import Setup
from fedgen.storage.folders import make_folder
from fedgen.storage.io import cache, digest, temporary_path
from fedgen.storage.run_dir import RunDir

LabelledImages = tuple[Images, Labels]
_ANNOUNCE_AFTER_SECONDS = 60  # seconds of an evaluation that is announced


JUDGED = (
    *("gen2real", "real2real", "real2gen", "classifier", "judged", "judged_by", "distinct"),
    *(key for metric in metrics() for key in metric.keys),
)
"""Keys of ``results.json`` that the evaluation writes."""


def evaluate_run(
    ready: Setup, generator: Tensors, progress: RunProgress, run_dir: RunDir
) -> dict[str, Any]:
    """Return the results of all configured metrics for samples of a run. They stay on the server
    and are not part of the release."""
    evaluation, pictures = ready.config.evaluation, run_dir.path / "evaluation"
    done = {"judged": True, "judged_by": OmegaConf.to_container(evaluation, resolve=True)}
    results: dict[str, Any] = {"gen2real": {}, "real2real": {}, "real2gen": {}}
    with temporary_path(
        pictures, folder=True
    ) as fresh:  # a failed evaluation keeps the existing pictures
        results |= _evaluate_run(ready, generator, progress, fresh)
        for name in PICTURES:
            (pictures / name).unlink(missing_ok=True)
        if drawn := list(fresh.iterdir()):
            make_folder(pictures)
        elif pictures.is_dir() and not any(pictures.iterdir()):
            pictures.rmdir()
        for picture in drawn:
            picture.rename(pictures / picture.name)
    return {**results, **done}


def _evaluate_run(
    ready: Setup, generator: Tensors, progress: RunProgress, fresh: Path
) -> dict[str, Any]:
    """Return the results of ``evaluate_run``.

    Args:
        fresh: folder for pictures.
    """
    evaluation = ready.config.evaluation
    results: dict[str, Any] = {}
    if evaluation.samples and validation.min_samples(evaluation):
        samples = judged_samples(ready, generator, evaluation.samples, progress)
        training_images = ready.dataset.images[np.unique(np.concatenate(ready.shards))]
        streams, distinct = ready.streams.at("evaluation"), ready.method.server.distinct_images
        results = suite(
            evaluation, ready.dataset, training_images, samples, streams, progress, fresh, distinct
        )
        if (classify := ready.method.server.classify) is not None:
            images = torch.from_numpy(ready.dataset.test_images).float() / 255
            right = classify(generator, images).numpy() == ready.dataset.test_labels
            results["classifier"] = {"mean": float(right.mean()), "n": len(right)}
    return results


def check_test_split(evaluation: DictConfig, data: Dataset, distinct: int | None) -> None:
    """Raise FedgenError if the test split is empty, or too small for an inception score.

    Args:
        distinct: number of distinct images if samples repeat a fixed set, which is not judged.
    """
    if validation.min_samples(evaluation) and not len(data.test_images):
        problem = "needs test images, and the test split is empty"
        remedy = (
            "provide test images (folder test/, column split, test*.tar), or set evaluation=none"
        )
        raise FedgenError("evaluation", problem, remedy)
    if evaluation.judge and distinct is None and len(data.test_images) < PARTS:
        problem = f"needs at least {PARTS} test images, the data set has {len(data.test_images)}"
        raise FedgenError("evaluation.judge", problem, "set it to false")


def suite(
    evaluation: DictConfig,
    data: Dataset,
    training_images: Images,
    samples: LabelledImages,
    streams: RandomStreams,
    progress: RunProgress,
    pictures: Path,
    distinct: int | None = None,
) -> dict[str, Any]:
    """Return all metrics in ``evaluation``.

    Args:
        training_images: images that the generator may have been trained on: all or part of the
            training split.
        samples: images (n, channels, height, width) uint8 and labels (n,), in an order independent
            of labels.
        pictures: folder for the pictures of ``evaluation.leakage``.
        distinct: number of distinct images if samples repeat a set: distances between distributions
            are not informative for so few, and leakage counts each once.

    Raises:
        FedgenError: if the test split is empty, or too small for the judge.
    """
    check_test_split(evaluation, data, distinct)
    images = samples[0] if distinct is None else np.unique(samples[0], axis=0)
    real = evaluation.get("real2real", True)
    results: dict[str, Any] = {"real2real": {}, "real2gen": {}}
    results |= utilities(evaluation, data, samples, streams, progress, real)
    if distinct is not None:
        results["distinct"] = distinct
    judged = Judged(
        evaluation,
        data,
        training_images,
        samples,
        images,
        distinct is not None,
        streams,
        progress,
        pictures,
    )
    for metric in metrics():
        results |= metric.compute(judged)
    return results


def utilities(
    evaluation: DictConfig,
    data: Dataset,
    samples: LabelledImages,
    streams: RandomStreams,
    progress: RunProgress,
    real: bool = True,
) -> dict[str, Any]:
    """Return gen2real, and if ``real``, the accuracy of the same classifiers trained on as many
    real images, on the test split (``real2real``) and, for those in ``evaluation.real2gen``, on
    samples (``real2gen``). Images larger than ``evaluation.max_side`` are downsampled for all.
    Scores are cached, so that an interrupted evaluation resumes."""
    classifiers = {
        str(name): classifier
        for name, classifier in evaluation.classifiers.items()
        if _installed(str(name), classifier, progress)
    }
    side = evaluation.get("max_side")
    order = torch.randperm(len(data.labels), generator=streams.public("real")).numpy()
    chosen = order[: len(samples[1])]
    rows = downsample(data.images[chosen], side), data.labels[chosen]
    test = downsample(data.test_images, side), data.test_labels
    samples = downsample(samples[0], side), samples[1]

    def fit(name: str, seed: int, train: LabelledImages, **tests: LabelledImages) -> Fit:
        cache_file = None
        if not is_extension(classifiers[name].type):  # its code may change
            settings = OmegaConf.to_container(classifiers[name], resolve=True)
            tested = [array for judged in tests.values() for array in judged]
            inputs = settings, seed, data.classes, list(tests), _code_digest()
            name_of_result = data_digest(*inputs, *train, *tested)
            cache_file = cache() / "classifiers" / f"{name_of_result}.json"
        classifier = build(classifiers[name], f"evaluation.classifiers.{name}")
        return Fit(name, classifier, train, tests, data.classes, seed, cache_file)

    fits: list[Fit] = []
    for name, seed in itertools.product(classifiers, range(evaluation.seeds)):
        fits.append(fit(name, seed, samples, gen2real=test))
        if real and name in evaluation.real2gen:
            fits.append(fit(name, seed, rows, real2real=test, real2gen=samples))
        elif real:
            fits.append(fit(name, seed, rows, real2real=test))
    # a single label trains no classifier
    fits = [item for item in fits if len(np.unique(item.rows[1])) > 1]
    jobs = min(evaluation.jobs or os.cpu_count() or 1, max(len(fits), 1))
    if fits:
        if (seconds := expected_seconds(fits) / jobs) > _ANNOUNCE_AFTER_SECONDS:
            note = "; an interrupted evaluation keeps finished classifiers" if real else ""
            progress.say(
                f"evaluation of {len(samples[0]):,} samples by {', '.join(classifiers)}: about "
                f"{seconds / 60:.0f} minutes{note}"
            )
        progress.show("evaluation", 0, len(fits), f"{fits[0].name}, of {len(samples[0]):,} samples")
    scores: dict[tuple[str, str], list[Scores]] = {}
    for done, (number, test_scores) in enumerate(all_scores(fits, jobs), 1):
        for kind, values in test_scores.items():
            scores.setdefault((kind, fits[number].name), []).append(values)
        progress.show("evaluation", done, len(fits), fits[number].name)
    trained_on = {"gen2real": samples, "real2real": rows, "real2gen": rows}
    judged = {"gen2real": test, "real2real": test, "real2gen": samples}
    return {
        kind: {
            name: summary(
                scores.get((kind, name), []), len(trained_on[kind][1]), len(judged[kind][1])
            )
            for name in classifiers
            if kind != "real2gen" or name in evaluation.real2gen
        }
        for kind in (trained_on if real else ["gen2real"])
    }


@functools.cache
def _code_digest() -> str:
    """Return a digest of the code of the classifiers."""
    return digest(
        *(
            Path(str(module.__file__)).read_bytes()
            for module in (utility, classifier_models, residual)
        )
    )


def _installed(name: str, classifier: DictConfig, progress: RunProgress) -> bool:
    """Return whether the library of a classifier is installed; print a line otherwise."""
    library = str(classifier.get("model", "sklearn")).partition(".")[0]
    if find_spec(library) is None:
        progress.say(f"{name} is left out: pip install {library}")
        return False
    return True
