"""Noise domain of a run: two runs whose seeded noise must differ have different domains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedgen.config.device import resolve_device
from fedgen.config.extensions import is_extension
from fedgen.config.schema import TARGETS
from fedgen.data.datasets import Dataset
from fedgen.data.partition import Index
from fedgen.errors import FedgenError
from fedgen.privacy.events import Unit
from fedgen.storage.io import digest, read_json

_YOUNGER_SETTINGS = ("pixel_share",)
"""Settings of methods that are younger than seeds that people use: null leaves their noise."""


def noise_domain(
    config: DictConfig, held: Dataset, shards: list[Index], noise_multiplier: float | None
) -> str:
    """Return the domain that separates the streams of a run from those of other runs with the same
    seed. It depends on everything that messages depend on: settings, records, and the calibrated
    noise, which may differ between versions. Two runs that share noise at different scales or on
    different records would reveal them to a reader of both.

    Empty in mode ``secure``: secret streams belong to the process, and public streams must not
    depend on private records.
    """
    if config.privacy.noise == "secure":
        return ""
    settings: Any = OmegaConf.to_container(config, resolve=True)
    settings["privacy"].pop("budget_epsilon", None)  # only decides whether a run is refused
    if settings["privacy"].get("target_tpr") is None:
        settings["privacy"].pop("at_fpr", None)
    for name in TARGETS[1:]:  # younger as well
        if settings["privacy"].get(name) is None:
            settings["privacy"].pop(name, None)
    for method in (settings["method"], settings["warm_up"]["method"] or {}):
        for name in _YOUNGER_SETTINGS:
            if method.get(name) is None:
                method.pop(name, None)
    domain_inputs = [
        settings.get(key) for key in ("method", "privacy", "partition", "rounds", "start")
    ]
    domain_inputs += [settings["runtime"][key] for key in ("threads", "min_success")]
    audit = dict(settings.get("audit") or {})
    audit.pop("repetition", None)  # see RandomStreams.for_repetition
    domain_inputs += [
        audit or None,
        resolve_device(config.device),
        sorted(settings["group"] or []),
    ]
    domain_inputs.append(rounded_noise(noise_multiplier))
    if config.privacy.unit == Unit.PERSON.value:
        domain_inputs.append(config.data.get("public_persons"))  # sums are divided by it
    if settings.get("score") is not None:
        domain_inputs.append(settings["score"])
    if settings["warm_up"]["method"] is not None:
        domain_inputs.append(settings["warm_up"])
    if held.classes != held.labels.max(initial=-1) + 1:
        domain_inputs.append(held.classes)  # the digest of records does not cover unused labels
    facts = json.dumps(domain_inputs, sort_keys=True).encode(), held.digest.encode()
    if is_extension(config.partition.type):  # its code is not in the settings
        return digest(*facts, *(shard.tobytes() for shard in shards))
    return digest(*facts)


def rehearsed_domain(config: DictConfig, noise_multiplier: float | None) -> str | None:
    """Return the noise domain of the run that a deployment rehearses, to reproduce its bits.

    Raises:
        FedgenError: if there is no such run, it has other noise, or noise is not seeded.
    """
    place = config.runtime.get("rehearses")
    if place is None:
        return None
    key = "runtime.rehearses"
    if config.privacy.noise != "seeded":
        raise FedgenError(key, "is for seeded noise", "take privacy.noise=seeded, or null")
    try:
        identity = read_json(Path(place) / "run.json")
        branch, noise = str(identity["branch"]), identity["noise_multiplier"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedgenError(
            key, f"{place} is no run directory", "give the directory of a finished run"
        ) from error
    if noise != rounded_noise(noise_multiplier):  # two scales of one stream reveal records
        problem = (
            f"{place} has noise multiplier {noise}, and this {rounded_noise(noise_multiplier)}"
        )
        raise FedgenError(key, problem, "rehearse the same settings")
    return branch


def rounded_noise(noise_multiplier: float | None) -> str | None:
    """Return the noise multiplier with six digits: differences between machines are below that, and
    noise that differs by less is equal on its grid."""
    return None if noise_multiplier is None else f"{noise_multiplier:.6g}"
