"""Run ``fedgen data check``: describe a data set before training, with the warnings of a rehearsal.
For the holder of the images: counts are private, and stay here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from fedgen.config import validation
from fedgen.config.compose import compose
from fedgen.config.overrides import config_name, shell_quote, to_override_value
from fedgen.config.registry import to_plain
from fedgen.data.catalogue import CATALOGUE
from fedgen.data.datasets import Dataset
from fedgen.privacy.budget import delta_problem
from fedgen.run.preflight import (
    MIN_IMAGES,
    narrow_range,
    person_hints,
    rare_labels,
    unread_columns,
)
from fedgen.run.setup import partitioned_data


def check(config: DictConfig) -> str:
    """Read the data set of a configuration; describe it and suggest settings.

    Raises:
        FedgenError: for settings or data that training would refuse.
    """
    validation.check(config)
    dataset, shards = partitioned_data(config)
    channels, height, width = dataset.shape
    kind = "grey" if channels == 1 else "RGB"
    rows, test = len(dataset.labels), len(dataset.test_labels)
    counts = np.bincount(dataset.labels, minlength=dataset.classes)
    lines = [
        f"{dataset.name}: {rows:,} images to train on, {test:,} to test on, "
        f"{width}x{height} {kind}",
        f"{dataset.classes} label{'s' if dataset.classes > 1 else ''}, "
        f"with {_describe_counts(counts)}",
    ]
    if dataset.writers is not None:
        of = np.unique(dataset.writers, return_counts=True)[1]
        lines.append(f"{len(of):,} clients, with {_describe_counts(of)}")
    if len(shards) > 1:
        sizes = np.array([len(shard) for shard in shards])
        lines.append(
            f"partition={config.names.partition}: {len(shards):,} clients, "
            f"{_describe_counts(sizes)}"
        )
    if dataset.persons is not None and dataset.has_persons:
        of = np.unique(dataset.persons, return_counts=True)[1]
        persons = "1 person" if len(of) == 1 else f"{len(of):,} persons"
        lines.append(f"{persons}, with {_describe_counts(of)}")
    if dataset.names is not None:
        names = ", ".join(dataset.names[:_MAX_NAMES])
        lines.append(f"labels, published by name (data.names=false: by number): {names}")
    lines += [f"warning: {warning}" for warning in _warnings(dataset, counts, test)]
    units, unit = rows, "image"
    if dataset.persons is not None and dataset.has_persons:
        units, unit = len(np.unique(dataset.persons)), "person"
    if (wrong := delta_problem(config.privacy.delta, units, unit)) is not None:
        lines.append(f"warning: privacy.delta: {wrong[0]}; {wrong[1]}")
    epsilon = f"privacy.target_epsilon={_EPSILON:g}"
    defaults = OmegaConf.load(config_name("data", config.names.data))
    assert isinstance(defaults, DictConfig)  # checked when it was composed
    usual = to_plain(defaults)
    has_public_rows = usual.get("public_rows") is not None or config.data.type in CATALOGUE
    fitting = _suggested_overrides(dataset, has_public_rows)
    lines.append(
        "suggested: fedgen train "
        f"{shell_quote([*_data_overrides(config, usual), *fitting, epsilon])}"
    )
    lines.append(
        "(choose privacy.target_epsilon: 1 is a strong guarantee if δ is well below 1 / number of "
        f"{unit}s; the default is {compose('account', []).privacy.target_epsilon:g})"
    )
    if "privacy.aggregation=secure" in fitting:
        lines.append(
            "(privacy.colluders=1: ε also holds if one client reveals its noise to the server; the "
            "default 0 assumes that none does)"
        )
    lines.append(
        "(method.private_classifier=none: many times as fast, and better where images are few)"
    )
    lines.append("these numbers are private: do not publish them")
    return "\n".join(lines)


def _warnings(dataset: Dataset, counts: np.ndarray, test: int) -> list[str]:
    warnings = []
    if dataset.classes == 1:
        warnings.append("all images have one label: the utility of samples cannot be measured")
    warnings += narrow_range(dataset) + rare_labels(dataset, counts)
    if not test:
        warnings.append(
            "no test images: provide some (folder test/, column split, test*.tar), or train with "
            "evaluation=none"
        )
    elif test < MIN_IMAGES:
        warnings.append(
            f"{test} test images are few for an evaluation: consider the confidence intervals"
        )
    if dataset.example_keys.moves:
        warnings.append(
            f"{dataset.example_keys.moves}: methods with sums accept these images, and those that "
            "protect replaced records refuse them"
        )
    if dataset.has_persons and _persons_span_clients(dataset):
        warnings.append(
            "a person has images at several clients, and no client can protect them alone: with "
            "privacy.unit=person use partition=single"
        )
    warnings += unread_columns(dataset) + person_hints(dataset)
    if dataset.persons is None and not dataset.suggested_person:
        warnings.append(
            "ε protects single images: several images of one person are separate records"
        )
    return warnings


_MIN_UNITS_FOR_CLASSIFIER = 10_000  # with fewer, its labels are worse than those of samples
_MAX_NAMES = 20  # names per line
_EPSILON = 5  # suggested target


def _describe_counts(counts: np.ndarray) -> str:
    few, most = int(counts.min()), int(counts.max())
    return f"{most:,} images each" if few == most else f"{few:,} to {most:,} images each"


def _data_overrides(config: DictConfig, usual: Mapping[str, Any]) -> list[str]:
    """Return the overrides that say where the data are and how they are read, as far as they differ
    from the defaults."""
    words = [f"data={config.names.data}"]
    for key in config.data:
        value = OmegaConf.select(config.data, str(key))
        if value != usual.get(str(key)) and key != "public_rows":
            words.append(f"data.{key}={to_override_value(value)}")
    return words


def _suggested_overrides(dataset: Dataset, has_public_rows: bool) -> list[str]:
    """Return overrides that suit the data; numbers of images are rounded, because settings are
    public."""
    count = len(dataset.labels)
    by = "by_folder" if dataset.persons is None or dataset.has_persons else "by_writer"
    clients = (
        [f"partition={by}", "privacy.aggregation=secure"] if dataset.writers is not None else []
    )
    rows = [] if has_public_rows else [f"data.public_rows={_one_digit(count)}"]
    persons = []
    if dataset.persons is not None and dataset.has_persons:
        count = len(np.unique(dataset.persons))
        persons = ["privacy.unit=person", f"data.public_persons={_one_digit(count)}"]
        clients = [] if _persons_span_clients(dataset) else clients
    teacher = ["method.private_classifier=none"] if count < _MIN_UNITS_FOR_CLASSIFIER else []
    return ["method=mixture", *teacher, *rows, *clients, *persons]


def _one_digit(count: int) -> int:
    """Return a number rounded to its first digit: it becomes public."""
    return round(count, 1 - len(str(count)))


def _persons_span_clients(dataset: Dataset) -> bool:
    """Return whether a person has images at more than one client."""
    if dataset.writers is None or dataset.persons is None:
        return False
    pairs = np.unique(np.stack([dataset.persons, dataset.writers]), axis=1)
    return bool(pairs.shape[1] > len(np.unique(dataset.persons)))
