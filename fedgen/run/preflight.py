"""Warn of settings and data that void the δ of a run or make its samples useless."""

from __future__ import annotations

import numpy as np
from omegaconf import DictConfig, OmegaConf

from fedgen.config.extensions import is_extension
from fedgen.config.overrides import shell_quote, to_override_value
from fedgen.data.datasets import Dataset
from fedgen.privacy.events import Unit
from fedgen.run.setup import ResolvedMethod, Setup, delta_problem_of, public_persons

MIN_IMAGES = 50


_MAX_DARK = 31  # of 255: a maximum below this suggests a wrong scale


def rare_labels(dataset: Dataset, counts: np.ndarray) -> list[str]:
    """Warn of labels with few images.

    Args:
        counts: images per label.
    """
    rare = np.flatnonzero(counts < MIN_IMAGES).tolist()
    names = dataset.names or [f"{label} (counted from 0)" for label in range(dataset.classes)]
    few = ", ".join(names[label] for label in rare)
    warning = f"fewer than {MIN_IMAGES} images of label {few}: mostly noise at a small ε"
    return [warning] if few else []


def narrow_range(dataset: Dataset) -> list[str]:
    """Warn of pixels that use a small part of 0..255."""
    least, most = (int(value) for value in (dataset.images.min(), dataset.images.max()))
    if least == most:
        return [f"all pixels are {most}: the images are blank"]
    if most > _MAX_DARK:
        return []
    cause = "masks of 0 and 1" if most == 1 else "12-bit values in wider integers, or dark images"
    remedy = f"scale them to 0..255, e.g. times {255 // most}"
    return [f"no pixel is above {most} of 255 ({cause}), and samples will be black: {remedy}"]


def unread_columns(dataset: Dataset) -> list[str]:
    """Warn of columns that may identify persons under an unusual name."""
    names = ", ".join(repr(column) for column in dataset.unread_columns)
    return [f"columns that are not read: {names} (see client, person, split)"] if names else []


def person_hints(dataset: Dataset) -> list[str]:
    """Warn if images may share a person and persons are not given, or if they look implausible."""
    if not dataset.suggested_person:
        return list(dataset.data_warnings)
    setting = f"data.person={to_override_value(dataset.suggested_person)}"
    return [
        "several images may show one person, and ε of single images protects such a person less: "
        f"set {shell_quote([setting])} or another"
    ]


def delta_warnings(ready: ResolvedMethod) -> list[str]:
    """Warn of a δ that a release refuses."""
    if ready.privacy.noise_multiplier is None:
        return []
    wrong = delta_problem_of(ready.privacy, ready.method.plan)
    return [] if wrong is None else [f"warning: privacy.delta: {wrong[0]}; {wrong[1]}"]


def preset_warnings(config: DictConfig) -> list[str]:
    """Warn of a method with the settings for 8x8 images that is used for other images."""
    name, is_builtin = str(config.names.method), not is_extension(config.method.type)
    if not is_builtin or not name.endswith("_small") or config.names.data == "digits":
        return []
    return [f"{name} has the digits' settings: for other images try method=mixture"]


def data_warnings(ready: Setup) -> list[str]:
    """Return warnings of data that make a generator useless at any noise. They depend on private
    images and are for rehearsals by their holder: a run for release accesses images for training
    only."""
    config, plan = ready.config, ready.method.plan
    if ready.privacy.noise == "secure" or ready.dataset.is_remote or config.group is not None:
        return []
    rows, dataset = np.concatenate(ready.shards), ready.dataset
    is_record, is_person = plan.unit is Unit.RECORD, plan.unit is Unit.PERSON
    warnings = unread_columns(dataset) + person_hints(dataset)
    if dataset.has_persons and is_record:
        warnings.append(
            "ε protects single images, but the data name the person in each: set "
            "privacy.unit=person and data.public_persons=N"
        )
    assumed = OmegaConf.select(config, "method.rows")
    by = "method.rows" if assumed != config.data.get("public_rows") else "data.public_rows"
    if assumed and is_record and not 0.5 <= assumed / len(rows) <= 2:
        warnings.append(_far_from_actual("images", f"method.rows = {assumed:,}", by))
    persons = public_persons(config)
    if persons and is_person and dataset.persons is not None:
        actual, name = len(np.unique(dataset.persons[rows])), "data.public_persons"
        if not 0.5 <= persons / actual <= 2:
            warnings.append(_far_from_actual("persons", f"{name} = {persons:,}", name))
    counts = np.bincount(dataset.labels[rows], minlength=dataset.classes)
    return warnings + narrow_range(dataset) + rare_labels(dataset, counts)


def _far_from_actual(units: str, assumed: str, key: str) -> str:
    return (
        f"{assumed} is far from the actual number of {units}, and samples will be of little use: "
        f"set a public number near it as {key}"
    )
