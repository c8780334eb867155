"""Former names of settings: on the command line they answer with the present name, and descriptions
of published generators that use them are still read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedgen.config import registry

RENAMED = {
    "method.cosines": "method.dct_size",
    "method.coordinates": "method.components",
    "method.warps": "method.augmentation",
    "method.teacher": "method.private_classifier",
    "method.teacher_share": "method.classifier_share",
    "method.teacher_steps": "method.classifier_steps",
    "method.space": "method.classifier_features",
    "method.space_samples": "method.classifier_samples",
    "method.shares.levels": "method.shares.histogram",
    "method.shares.second": "method.shares.second_moments",
    "method.shares.spread": "method.shares.covariances",
    "method.answerers": "method.responders",
    "method.draws": "method.sampled_by",
    "method.cohort": "method.cohort_size",
    "method.reach": "method.max_projection",
    "method.reading": "method.readout",
    "method.largest": "method.top_k",
    "method.companion.begins": "method.companion.start_step",
    "method.sampler.lowest": "method.sampler.sigma_min",
    "method.sampler.highest": "method.sampler.sigma_max",
    "method.sampler.churn_from": "method.sampler.churn_min",
    "method.sampler.churn_to": "method.sampler.churn_max",
    "debug.apart": "debug.reserved_clients",
}
"""Name in 0.1.0 -> present name."""

REMOVED = {
    "privacy.images_per_person": "all images of a person count as one: set data.public_persons",
}
"""Name in 0.1.0 -> what to do instead."""


def with_present_names(settings: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the settings of a place, e.g. ``method``, with former names replaced, at any depth.
    In 0.1.0, a ``type`` was written ``name: MODULE.FUNCTION``."""
    renamed = {}
    for name, value in settings.items():
        key = f"{place}.{name}"
        if name == "name":
            renamed["type"] = _former_types(place).get(str(value), value)
        else:
            nested = with_present_names(value, key) if isinstance(value, Mapping) else value
            renamed[RENAMED.get(key, key).rpartition(".")[2]] = nested
    return renamed


def _former_types(place: str) -> dict[str, str]:
    """Return the words of a place by their names in 0.1.0, e.g. ``dcgan.Critic``."""
    targets = {word: target.rpartition(".")[2] for word, target in registry.words(place).items()}
    return {target.replace(":", "."): word for word, target in targets.items()}
