"""One suite that judges all samples alike: of a run, and those that fedgen did not make.

What touches private rows outside a mechanism (all but gen2real) stays on the server's side.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf

from fedgen.coins import Coins
from fedgen.data.datasets import Dataset
from fedgen.errors import FedgenError
from fedgen.evaluation.coherence import diversity
from fedgen.evaluation.frechet import Statistics, frechet_distance, statistics
from fedgen.evaluation.inception import inception, inception_features
from fedgen.evaluation.inception_score import PARTS, inception_score
from fedgen.evaluation.judge import judge, seen
from fedgen.evaluation.leakage import membership_inference, memorization, nearest
from fedgen.evaluation.manifold import precision_and_recall
from fedgen.evaluation.utility import Fit, Images, Labels, Scores, all_scores, summary
from fedgen.experiments import settings, validation
from fedgen.experiments.building import build
from fedgen.experiments.generation import judged_samples, load_generator
from fedgen.experiments.identity import opened
from fedgen.experiments.settings import Setup
from fedgen.experiments.unfinished import is_unfinished, unfinished
from fedgen.files import (
    cache,
    check_no_links,
    digest,
    read_arrays,
    temporary_path,
    write_shared,
    write_whole,
)
from fedgen.method import Tensors
from fedgen.reporting import words
from fedgen.reporting.figures import histograms, sample_grid
from fedgen.reporting.progress import RunProgress
from fedgen.reporting.run_dir import RunDir, make_folder
from fedgen.version import VERSION

Rows = tuple[Images, Labels]
JUDGED = (
    *("gen2real", "real2real", "real2gen", "classifier", "judged", "judged_by"),
    *("inception_score", "fcd", "precision", "recall", "fid", "memorization", "membership"),
    *("distinct", "diversity"),
)
"""What of a run's results is its evaluation's."""
_MOST_COMPARED = 10_000  # rows of each side, where all pairs of them count
_PICTURED = 20


def evaluate(config: DictConfig) -> str:
    """Judges a finished run again and renews its results, or a run's last checkpoint, or
    ``config.samples``; what it came to, in words.

    Raises:
        FedgenError: for a mistake of the user's.
    """
    validation.check_evaluation(config)
    Coins.of(config.seed, "seeded")  # refuses what is no seed, also where none is drawn by
    if (config.run is None) == (config.samples is None):
        raise FedgenError("run", "what is to be judged?", "give run=DIR or samples=FILE.npz")
    return _evaluate_run(config) if config.samples is None else _evaluate_samples(config)


def _evaluate_run(config: DictConfig) -> str:
    if config.names.get("data") is not None:
        raise FedgenError("data", "a run is judged on its own", "leave it out")
    if is_unfinished(Path(config.run)):
        return _evaluate_unfinished(config)
    run_dir, trained, identity = opened(Path(config.run), "run")
    trained.evaluation = config.evaluation
    ready = settings.setup(trained)
    if identity["data"] != ready.dataset.digest:
        raise FedgenError("run", f"{run_dir.path} was trained on other data", "bring it back")
    run_dir.check_digests("run")
    generator = load_generator(Path(config.run), config.device).weights
    with run_dir.locked("run"), RunProgress() as progress:
        kept = {name: value for name, value in run_dir.results().items() if name not in JUDGED}
        found = judge_run(ready, generator, progress, run_dir)
        run_dir.write("results", {**kept, **found})
    return words.summary(run_dir.path)


def _evaluate_unfinished(config: DictConfig) -> str:
    """Of its last checkpoint; the run's own results are not there yet."""
    made = unfinished(Path(config.run), config.evaluation)
    with RunProgress() as progress:
        found = judge_run(made.ready, made.generator, progress, made.run_dir)
    place = made.run_dir.path / "unfinished.json"
    told = {"rounds": made.rounds, "of": made.of, **found}
    write_whole(place, (json.dumps(told, indent=2) + "\n").encode())
    return "\n".join([made.note, *words.quality(found), str(place)])


def _evaluate_samples(config: DictConfig) -> str:
    found, out = judge_samples(config)
    lines = [*words.quality(found), str(out / "evaluation.json")]
    judged, given = found["judged"], found["of"]
    if judged < given:
        lines.insert(0, f"{judged:,} of {given:,} samples, drawn at random (evaluation.samples)")
    return "\n".join(lines)


def judge_samples(config: DictConfig) -> tuple[dict[str, Any], Path]:
    """What the samples of a file come to; and the folder beside the file that it is written to,
    as ``evaluation.json`` and pictures.

    Raises:
        FedgenError: for a mistake of the user's.
    """
    path = Path(config.samples)
    if config.names.get("data") is None:
        raise FedgenError("data", "what were they trained on?", "e.g. data=mnist")
    if (path.parent / "PRIVACY.md").exists():
        problem = f"{path.parent} may be handed out, and what private rows tell is no part of it"
        raise FedgenError("samples", problem, "copy the file elsewhere")
    if not path.is_file():
        raise FedgenError("samples", f"there is no file {path}", "give one of images and labels")
    coins = Coins.of(config.seed, "seeded")
    data = settings.dataset(config)
    samples = read_samples(path, data)
    least = validation.least_samples(config.evaluation)
    if len(samples[1]) < least:
        problem = f"{len(samples[1])} are too few for what is asked of them"
        raise FedgenError("samples", problem, f"give {least} or more")
    most, given = config.evaluation.samples, len(samples[1])
    if not most:
        raise FedgenError("evaluation.samples", "0 samples tell nothing", "take more")
    order = torch.randperm(given, generator=coins.public("order")).numpy()[:most]
    samples = samples[0][order], samples[1][order]  # files may come sorted by label
    out = path.with_name(f"{path.stem}_evaluation")
    if out.is_symlink():
        raise FedgenError("samples", f"{out} is a link", "remove it")
    check_no_links(out, "samples")
    coins = coins.at("evaluation")
    with RunProgress() as progress:
        found = suite(config.evaluation, data, data.images, samples, coins, progress, out)
    told = {"samples": str(path), "data": data.name, "judged": len(order), "of": given, **found}
    write_whole(out / "SERVER_SIDE.md", words.SERVER_SIDE.encode())
    write_whole(out / "evaluation.json", (json.dumps(told, indent=2) + "\n").encode())
    return told, out


def read_samples(path: Path, data: Dataset) -> Rows:
    """``images`` (n, channels, height, width), (n, height, width) or (n, height, width, 3) uint8
    and ``labels`` (n,) of an .npz, held against a data set.

    Raises:
        FedgenError: if they are not that.
    """
    try:
        with path.open("rb") as opened:
            arrays = read_arrays(opened, ("images", "labels"))
            images, labels = arrays["images"], arrays["labels"]
    except (OSError, EOFError, ValueError, KeyError, MemoryError, zipfile.BadZipFile) as error:
        problem = f"{path} has no arrays images and labels"
        raise FedgenError("samples", problem, "write them by numpy.savez") from error
    given = f"{images.dtype} {tuple(images.shape)}"
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[1:] != data.shape:
        images = images.transpose(0, 3, 1, 2)
    if images.dtype != np.uint8 or images.shape[1:] != data.shape or len(images) < 1:
        wanted = f"uint8 (n, {', '.join(map(str, data.shape))})"
        raise FedgenError("samples", f"{path} has images {given}", f"give {wanted}")
    fits = labels.shape == images.shape[:1] and np.issubdtype(labels.dtype, np.integer)
    if not fits or labels.min() < 0 or labels.max() >= data.classes:
        problem = f"{path} has no label from 0 to {data.classes - 1} for each image"
        raise FedgenError("samples", problem, "mend labels")
    return np.ascontiguousarray(images), labels.astype(np.int64)


def judge_run(
    ready: Setup, generator: Tensors, progress: RunProgress, run_dir: RunDir
) -> dict[str, Any]:
    """What its configuration asks for, of a run's samples; all of it on the server's side."""
    chosen, pictures = ready.config.evaluation, run_dir.path / "evaluation"
    done = {"judged": True, "judged_by": OmegaConf.to_container(chosen, resolve=True)}
    found: dict[str, Any] = {"gen2real": {}, "real2real": {}, "real2gen": {}}
    with temporary_path(
        pictures, folder=True
    ) as fresh:  # a failed evaluation keeps the previous pictures
        found |= _judged_run(ready, generator, progress, fresh)
        for name in PICTURES:
            (pictures / name).unlink(missing_ok=True)
        if drawn := list(fresh.iterdir()):
            make_folder(pictures)
        elif pictures.is_dir() and not any(pictures.iterdir()):
            pictures.rmdir()
        for picture in drawn:
            picture.rename(pictures / picture.name)
    return {**found, **done}


def _judged_run(
    ready: Setup, generator: Tensors, progress: RunProgress, fresh: Path
) -> dict[str, Any]:
    """What ``judge_run`` finds. ``fresh``: a folder for its pictures."""
    chosen = ready.config.evaluation
    found: dict[str, Any] = {}
    if chosen.samples and validation.least_samples(chosen):
        samples = judged_samples(ready, generator, chosen.samples, progress)
        learnt = ready.dataset.images[np.unique(np.concatenate(ready.shards))]
        coins, distinct = ready.coins.at("evaluation"), ready.method.server.distinct
        found = suite(chosen, ready.dataset, learnt, samples, coins, progress, fresh, distinct)
        if (classify := ready.method.server.classify) is not None:
            images = torch.from_numpy(ready.dataset.test_images).float() / 255
            right = classify(generator, images).numpy() == ready.dataset.test_labels
            found["classifier"] = {"mean": float(right.mean()), "n": len(right)}
    return found


PICTURES = ("nearest.png", "distances.png")
"""What an evaluation writes into a run's folder ``evaluation``."""


def check_judged(chosen: DictConfig, data: Dataset) -> None:
    """Raises FedgenError for a test split that is too small for an inception score."""
    if chosen.judge and len(data.test_images) < PARTS:
        problem = f"needs at least {PARTS} test images, the data set has {len(data.test_images)}"
        raise FedgenError("evaluation.judge", problem, "set it to false")


def suite(
    chosen: DictConfig,
    data: Dataset,
    learnt: Images,
    samples: Rows,
    coins: Coins,
    progress: RunProgress,
    pictures: Path,
    distinct: int | None = None,
) -> dict[str, Any]:
    """All that ``chosen`` asks for.

    Args:
        learnt: the rows that the generator may have seen: all of the training split, or fewer.
        samples: images (n, channels, height, width) uint8, and labels (n,), in any order that does
            not tell of the labels.
        pictures: the folder for those of ``chosen.leakage``.
        distinct: images of a set that samples repeat: distances of distributions say nothing of so
            few, and each counts once for leakage.

    Raises:
        FedgenError: if the test split is too small for the judge.
    """
    if distinct is None:
        check_judged(chosen, data)
    images = samples[0] if distinct is None else np.unique(samples[0], axis=0)
    found = utilities(chosen, data, samples, coins, progress)
    if len(data.test_labels):
        real = diversity(data.test_images, data.test_labels)
        found["diversity"] = {"samples": diversity(*samples), "real": real}
    if distinct is not None:
        found["distinct"] = distinct
    if chosen.judge and distinct is None:
        found |= _judged(data, images, coins, progress)
    if chosen.fid and distinct is None:
        found |= _fid(chosen, data, images, progress)
    if chosen.leakage:
        found |= _leakage(data, learnt, images, coins, progress, pictures)
    return found


def utilities(
    chosen: DictConfig,
    data: Dataset,
    samples: Rows,
    coins: Coins,
    progress: RunProgress,
    real: bool = True,
) -> dict[str, Any]:
    """gen2real, and if ``real`` the same classifiers trained on as many real rows, tested on the
    test split and, those of ``chosen.real2gen``, on samples (``real2real``, ``real2gen``)."""
    classifiers = {
        str(name): each
        for name, each in chosen.classifiers.items()
        if _installed(str(name), each, progress)
    }
    order = torch.randperm(len(data.labels), generator=coins.public("real")).numpy()
    rows = data.images[order[: len(samples[1])]], data.labels[order[: len(samples[1])]]
    test = data.test_images, data.test_labels

    def fit(name: str, seed: int, learnt: Rows, **tests: Rows) -> Fit:
        known = None
        if list(tests) == ["real2real"]:  # the same whatever is judged
            settings = OmegaConf.to_container(classifiers[name], resolve=True)
            told = _told(settings, seed, data.classes, *learnt, *test)
            known = cache() / "real2real" / f"{told}.json"
        made = build(classifiers[name], f"evaluation.classifiers.{name}")
        return Fit(name, made, learnt, tests, data.classes, seed, known)

    fits = []
    for name, seed in itertools.product(classifiers, range(chosen.seeds)):
        fits.append(fit(name, seed, samples, gen2real=test))
        if real and name in chosen.real2gen:
            fits.append(fit(name, seed, rows, real2real=test, real2gen=samples))
        elif real:
            fits.append(fit(name, seed, rows, real2real=test))
    fits = [each for each in fits if len(np.unique(each.rows[1])) > 1]  # one label teaches nothing
    jobs = min(chosen.jobs or os.cpu_count() or 1, max(len(fits), 1))
    if fits:
        progress.show("evaluation", 0, len(fits), f"{fits[0].name}, of {len(samples[0]):,} samples")
    scores: dict[tuple[str, str], list[Scores]] = {}
    for done, (number, found) in enumerate(all_scores(fits, jobs), 1):
        for kind, values in found.items():
            scores.setdefault((kind, fits[number].name), []).append(values)
        progress.show("evaluation", done, len(fits), fits[number].name)
    learnt = {"gen2real": samples, "real2real": rows, "real2gen": rows}
    judged = {"gen2real": test, "real2real": test, "real2gen": samples}
    return {
        kind: {
            name: summary(scores.get((kind, name), []), len(learnt[kind][1]), len(judged[kind][1]))
            for name in classifiers
            if kind != "real2gen" or name in chosen.real2gen
        }
        for kind in (learnt if real else ["gen2real"])
    }


def _told(*facts: Any) -> str:
    """A digest of all that a result depends on: data, settings, and the libraries' versions."""
    arrays = [each for each in facts if isinstance(each, np.ndarray)]
    others = [each for each in facts if not isinstance(each, np.ndarray)]
    libraries = ["scikit-learn", "torch", *(["xgboost"] if find_spec("xgboost") else [])]
    versions = [VERSION, *(metadata.version(name) for name in libraries)]
    told = [*others, *versions, [[each.shape, str(each.dtype)] for each in arrays]]
    return digest(json.dumps(told).encode(), *(each.tobytes() for each in arrays))


def _installed(name: str, classifier: DictConfig, progress: RunProgress) -> bool:
    """Whether the library of a classifier is there; says so if it is not."""
    library = str(classifier.get("model", "sklearn")).partition(".")[0]
    if find_spec(library) is None:
        progress.say(f"{name} is left out: pip install {library}")
        return False
    return True


def _judged(data: Dataset, images: Images, coins: Coins, progress: RunProgress) -> dict[str, Any]:
    """Inception score, FCD, precision and recall by the data set's classifier; for real splits
    beside. The training split's FCD is what real rows have."""
    progress.say("the data set's classifier: minutes, the first time")
    net = judge(data.images, data.labels, data.classes, cache() / "judges")
    features, scores = {}, {}
    splits = {"generated": images, "train": data.images, "test": data.test_images}
    for name, each in splits.items():
        order = torch.randperm(len(each), generator=coins.public("order", name)).numpy()
        each = each[order]  # an inception score is of parts
        features[name], said = seen(net, each)
        mean, std = inception_score(said)
        scores[name] = {"mean": mean, "std": std, "n": len(each)}
        if name == "test":
            right = float((said.argmax(1) == data.test_labels[order]).mean())
    test = statistics(features["test"])
    distances = {
        name: frechet_distance(statistics(features[name]), test) for name in ("generated", "train")
    }
    some = [_some(len(features[name]), coins.at(name)) for name in ("test", "generated")]
    precision, recall = precision_and_recall(
        features["test"][some[0]], features["generated"][some[1]]
    )
    return {
        "inception_score": {**scores, "judge_accuracy": right},
        "fcd": distances,
        "precision": precision,
        "recall": recall,
    }


def _fid(
    chosen: DictConfig, data: Dataset, images: Images, progress: RunProgress
) -> dict[str, Any]:
    """FID against the test split, where Inception's weights can be had."""
    net = inception(chosen.inception_weights)
    if net is None:
        progress.say(
            "FID is not computed: Inception's weights cannot be downloaded here, and "
            "evaluation.inception_weights names no file of them"
        )
        return {}

    def fitted(what: str, rows: Images) -> Statistics:
        def done(count: int) -> None:
            progress.show(f"Inception, {what}", count, len(rows), "")

        return statistics(inception_features(net, rows, done))

    known = cache() / "inception" / f"{_told(data.test_images)}.npz"
    if not known.exists():
        mean, covariance = fitted("test split", data.test_images)
        file = io.BytesIO()
        np.savez(file, mean=mean, covariance=covariance)
        write_shared(known, file.getvalue())
    with np.load(known) as kept:
        test = kept["mean"], kept["covariance"]
    return {"fid": frechet_distance(fitted("samples", images), test)}


def _leakage(
    data: Dataset,
    learnt: Images,
    images: Images,
    coins: Coins,
    progress: RunProgress,
    pictures: Path,
) -> dict[str, Any]:
    """Memorization and membership inference; ``nearest.png``, the samples that are nearest to a
    training row, each beside it; ``distances.png``, the distances of all."""
    progress.say("memorization and membership inference: distances of all pairs")
    test = data.test_images[_some(len(data.test_images), coins.at("test"))]
    train = learnt[_some(len(learnt), coins.at("train"), len(test))]
    some = images[_some(len(images), coins.at("generated"))]
    distances, which = nearest(some, learnt)
    others, _ = nearest(test, learnt)
    closest = np.argsort(distances[:, 0])[:_PICTURED]
    pictures.mkdir(parents=True, exist_ok=True)
    pairs = np.stack([some[closest], learnt[which[closest, 0]]], 1)
    sample_grid(pairs.reshape(-1, *data.shape), 10, pictures / PICTURES[0])
    histograms(
        {"samples": distances[:, 0], "test split": others[:, 0]},
        "distance to the nearest training row, root mean square of pixels",
        pictures / PICTURES[1],
    )
    return {
        "memorization": memorization(some, learnt, data.test_images),
        "membership": membership_inference(images, train, test),
    }


def _some(count: int, coins: Coins, most: int = _MOST_COMPARED) -> NDArray[np.int64]:
    """At most so many of ``count`` rows."""
    return torch.randperm(count, generator=coins.public("compared"))[:most].numpy()
