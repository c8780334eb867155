"""Metrics of generated images, one file per metric.

Any file in ``fedgen/evaluation`` that defines ``METRIC`` adds a metric to ``results.json``, console
output, reports, and the tables of benchmarks and sweeps. Accuracies of classifiers (gen2real,
real2gen) are computed separately, by ``fedgen/run/evaluation.py``.

Metrics access private images outside any mechanism: their results are for holders of the images.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig

from fedgen.data.datasets import Dataset
from fedgen.evaluation.utility import Images, Labels
from fedgen.randomness import RandomStreams
from fedgen.reporting.progress import RunProgress
from fedgen.storage.io import digest
from fedgen.version import VERSION

Results = Mapping[str, Any]
Number = TypeVar("Number", bound=np.generic)

_MAX_COMPARED = 10_000  # images per side for metrics over all pairs


@dataclass(frozen=True)
class Judged:
    """Input of a metric.

    settings: the group ``evaluation``.
    training_images: images that the generator may have been trained on.
    samples: generated images (n, channels, height, width) and their labels (n,).
    images: the distinct ones among them if samples repeat a small set, otherwise all.
    is_set: whether samples repeat a small set of images, for which distances between distributions
        are not informative.
    pictures: folder for pictures.
    """

    settings: DictConfig
    data: Dataset
    training_images: Images
    samples: tuple[Images, Labels]
    images: Images
    is_set: bool
    streams: RandomStreams
    progress: RunProgress
    pictures: Path

    def random_subset(
        self, rows: NDArray[Number], name: str, most: int = _MAX_COMPARED
    ) -> NDArray[Number]:
        """Return a random subset of limited size."""
        generator = self.streams.at(name).public("compared")
        order = torch.randperm(len(rows), generator=generator)
        subset: NDArray[Number] = rows[order[:most].numpy()]
        return subset


@dataclass(frozen=True)
class Metric:
    """One or several figures that are computed together.

    keys: their names in ``results.json``.
    compute: images -> figures by name; empty if the settings do not ask for them.
    describe: results -> (name, text with units and references) of each figure.
    columns: name in a table -> (results -> figure), of results that have the first of ``keys``.
    """

    keys: tuple[str, ...]
    compute: Callable[[Judged], dict[str, Any]]
    describe: Callable[[Results], list[tuple[str, str]]]
    columns: Mapping[str, Callable[[Results], float]] = field(default_factory=dict)


@functools.cache
def metrics() -> tuple[Metric, ...]:
    """Return the metrics of all files, in the order of their names."""
    path = Path(__file__)
    names = sorted(file.stem for file in path.parent.glob("*.py") if file != path)
    files = [importlib.import_module(f"{__package__}.{name}") for name in names]
    return tuple(file.METRIC for file in files if hasattr(file, "METRIC"))


def described(results: Results) -> list[tuple[str, str]]:
    """Return descriptions of all metrics in results, as (name, text)."""
    present = [metric for metric in metrics() if metric.keys[0] in results]
    return [row for metric in present for row in metric.describe(results)]


def columns(results: Results) -> dict[str, float]:
    """Return the values of all metrics in results, by column of a table."""
    present = [metric for metric in metrics() if metric.keys[0] in results]
    return {name: read(results) for metric in present for name, read in metric.columns.items()}


def column_names() -> list[str]:
    """Return the columns of all metrics."""
    return [name for metric in metrics() for name in metric.columns]


def data_digest(*facts: Any) -> str:
    """Return a digest of everything that a result depends on: data, settings and versions of
    libraries."""
    arrays = [fact for fact in facts if isinstance(fact, np.ndarray)]
    others = [fact for fact in facts if not isinstance(fact, np.ndarray)]
    libraries = ["scikit-learn", "torch", *(["xgboost"] if find_spec("xgboost") else [])]
    versions = [VERSION, *(metadata.version(name) for name in libraries)]
    facts = (*others, *versions, [[array.shape, str(array.dtype)] for array in arrays])
    return digest(json.dumps(facts).encode(), *(array.tobytes() for array in arrays))
