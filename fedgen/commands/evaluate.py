"""Run ``fedgen evaluate``: one evaluation for all samples, of a run or from elsewhere.

Metrics access private images outside a mechanism (gen2real only those of the test split): all
results stay on the server.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig

from fedgen.config import validation
from fedgen.data.datasets import Dataset
from fedgen.errors import FedgenError
from fedgen.randomness import RandomStreams
from fedgen.reporting import summary as words
from fedgen.reporting.progress import RunProgress
from fedgen.run import setup as settings
from fedgen.run.evaluation import JUDGED, LabelledImages, evaluate_run, suite
from fedgen.run.generator import load_generator
from fedgen.run.resume import open_run
from fedgen.run.snapshot import is_unfinished, load_snapshot
from fedgen.storage.io import (
    check_no_links,
    read_arrays,
    write_atomic,
)
from fedgen.storage.run_dir import SERVER_SIDE

_MARGIN = 1e-3  # tolerance for values outside [0, 1]


def evaluate(config: DictConfig) -> str:
    """Evaluate a finished run again and update its results, or evaluate the last checkpoint of a
    run, or ``config.samples``; return the results as text.

    Raises:
        FedgenError: for a mistake of the user.
    """
    validation.check_evaluation(config)
    RandomStreams.from_seed(config.seed, "seeded")  # refuses an invalid seed even if it is not used
    if (config.run is None) == (config.samples is None):
        raise FedgenError(
            "run",
            "run and samples exclude each other, and one is needed",
            "give run=DIR or samples=FILE.npz",
        )
    return _evaluate_run(config) if config.samples is None else _evaluate_samples(config)


def _evaluate_run(config: DictConfig) -> str:
    if config.names.get("data") is not None:
        raise FedgenError("data", "is that of the run", "leave it out")
    if is_unfinished(Path(config.run)):
        return _evaluate_snapshot(config)
    run_dir, trained, identity = open_run(Path(config.run), "run")
    if trained.privacy.noise == "secure" and config.evaluation.samples:
        problem = f"{run_dir.path} has secret noise, and its results stay free of private images"
        remedy = f"evaluate its samples: fedgen sample run={run_dir.path} n=10000 out=FILE.npz, "
        remedy += "then fedgen evaluate samples=FILE.npz data=..."
        raise FedgenError("run", problem, remedy)
    trained.evaluation = config.evaluation
    ready = settings.setup(trained)
    if identity["data"] != ready.dataset.digest:
        raise FedgenError(
            "run", f"{run_dir.path} was trained on different data", "restore the original data set"
        )
    run_dir.check_digests("run")
    generator = load_generator(Path(config.run), config.device).weights
    with run_dir.locked("run"), RunProgress() as progress:
        kept = {name: value for name, value in run_dir.results().items() if name not in JUDGED}
        results = evaluate_run(ready, generator, progress, run_dir)
        run_dir.write("results", {**kept, **results})
    return words.summary(run_dir.path)


def _evaluate_snapshot(config: DictConfig) -> str:
    """Evaluate the last checkpoint of a run that has no results yet."""
    snapshot = load_snapshot(Path(config.run), config.evaluation)
    with RunProgress() as progress:
        results = evaluate_run(snapshot.setup, snapshot.generator, progress, snapshot.run_dir)
    place = snapshot.run_dir.path / "unfinished.json"
    record = {"rounds": snapshot.rounds, "of": snapshot.total_rounds, **results}
    write_atomic(place, (json.dumps(record, indent=2) + "\n").encode())
    return "\n".join([snapshot.note, *words.quality(results), str(place)])


def _evaluate_samples(config: DictConfig) -> str:
    results, out = judge_samples(config)
    lines = [*words.quality(results), str(out / "evaluation.json")]
    judged, total = results["judged"], results["of"]
    if judged < total:
        lines.insert(0, f"{judged:,} of {total:,} samples, chosen at random (evaluation.samples)")
    return "\n".join(lines)


def judge_samples(config: DictConfig) -> tuple[dict[str, Any], Path]:
    """Evaluate the samples of a file; return the results and the folder next to the file with
    ``evaluation.json`` and pictures.

    Raises:
        FedgenError: for a mistake of the user.
    """
    path = Path(config.samples)
    if config.names.get("data") is None:
        raise FedgenError("data", "the training data are unknown", "e.g. data=mnist")
    if (path.parent / "PRIVACY.md").exists():
        problem = (
            f"{path.parent} may be published, and results on private images must not be part of it"
        )
        raise FedgenError("samples", problem, "copy the file elsewhere")
    if not path.is_file():
        raise FedgenError("samples", f"there is no file {path}", "give one of images and labels")
    streams = RandomStreams.from_seed(config.seed, "seeded")
    data = settings.dataset(config)
    samples = read_samples(path, data)
    least = validation.min_samples(config.evaluation)
    if len(samples[1]) < least:
        problem = f"{len(samples[1])} are too few for this evaluation"
        raise FedgenError("samples", problem, f"give {least} or more")
    most, total = config.evaluation.samples, len(samples[1])
    if not most:
        raise FedgenError("evaluation.samples", "0 samples cannot be evaluated", "take more")
    order = torch.randperm(total, generator=streams.public("order")).numpy()[:most]
    samples = samples[0][order], samples[1][order]  # files may be sorted by label
    out = path.with_name(f"{path.stem}_evaluation")
    if out.is_symlink():
        raise FedgenError("samples", f"{out} is a link", "remove it")
    check_no_links(out, "samples")
    streams = streams.at("evaluation")
    with RunProgress() as progress:
        results = suite(config.evaluation, data, data.images, samples, streams, progress, out)
    record = {"samples": str(path), "data": data.name, "judged": len(order), "of": total, **results}
    write_atomic(out / "SERVER_SIDE.md", SERVER_SIDE.encode())
    write_atomic(out / "evaluation.json", (json.dumps(record, indent=2) + "\n").encode())
    return record, out


def read_samples(path: Path, data: Dataset) -> LabelledImages:
    """Read ``images`` (n, channels, height, width), (n, height, width) or (n, height, width, 3)
    uint8 and ``labels`` (n,) of an .npz, or DPImageBench's ``x`` in [0, 1] and ``y``, and check
    them against a data set.

    Raises:
        FedgenError: for other content.
    """
    try:
        with path.open("rb") as opened:
            with zipfile.ZipFile(opened) as archive:
                stored = set(archive.namelist())
            is_xy = {"x.npy", "y.npy"} <= stored and "images.npy" not in stored
            opened.seek(0)
            names = ("x", "y") if is_xy else ("images", "labels")
            arrays = read_arrays(opened, names)
            images, labels = (arrays[name] for name in names)
    except (OSError, EOFError, ValueError, KeyError, MemoryError, zipfile.BadZipFile) as error:
        problem = f"{path} has no arrays images and labels, or x and y"
        raise FedgenError("samples", problem, "write them by numpy.savez") from error
    if is_xy:
        images = _to_uint8(path, images)
    actual = f"{images.dtype} {tuple(images.shape)}"
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[1:] != data.shape:
        images = images.transpose(0, 3, 1, 2)
    if images.dtype != np.uint8 or images.shape[1:] != data.shape or len(images) < 1:
        wanted = f"uint8 (n, {', '.join(map(str, data.shape))})"
        raise FedgenError("samples", f"{path} has images {actual}", f"give {wanted}")
    fits = labels.shape == images.shape[:1] and np.issubdtype(labels.dtype, np.integer)
    if not fits or labels.min() < 0 or labels.max() >= data.classes:
        problem = f"{path} has no label from 0 to {data.classes - 1} for each image"
        raise FedgenError("samples", problem, "fix the labels")
    return np.ascontiguousarray(images), labels.astype(np.int64)


def _to_uint8(path: Path, images: NDArray[Any]) -> NDArray[np.uint8]:
    """Return images in [0, 1] as uint8."""
    inside = images.dtype.kind == "f" and (images >= -_MARGIN) & (images <= 1 + _MARGIN)
    if not np.all(inside):
        problem = f"{path}: x ({images.dtype}) has values outside [0, 1]"
        raise FedgenError("samples", problem, "scale them, or name the arrays images and labels")
    pixels: NDArray[np.uint8] = np.rint(images.clip(0, 1) * 255).astype(np.uint8)
    return pixels
