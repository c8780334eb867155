"""Facts of a run, and the entry of a release, for the Differential Privacy Deployments Registry
(OpenDP and NIST), in the schema of github.com/opendp/deployments-registry-data. The facts are
recorded by the run; an entry adds statements of its publisher."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

import yaml

from fedgen.reporting.privacy_statement import (
    exceptions,
    guarantee_of,
    protected,
    strength,
    sums,
)
from fedgen.reporting.progress import format_epsilon

MANDATORY = {
    "name": "name of the generator",
    "controller": "publishing organisation",
    "controller_type": "Government, Industry or Nonprofit",
    "description": "description of the generated images",
    "purpose": "intended use",
    "region": "region of the persons in the data, or jurisdiction",
    "data": "training data: persons, source, period",
    "justification": "rationale for ε, δ and unit",
    "author": "author of this entry",
}
"""Required statements, by setting under ``about``."""

CONTROLLER_TYPES = ("Government", "Industry", "Nonprofit")
SECTORS = ("Technology", "Healthcare", "Education", "Government", "Energy", "Finance")
"""Values of ``about.controller_type`` and ``about.sector`` that the registry knows."""

_UNITS = {"record": "Record-level", "person": "Person-level", "client": "Client-level"}


_LIBRARIES = {"fedgen": "fedgen", "torch": "PyTorch", "numpy": "NumPy", "python": "Python"}
"""Versions that the facts state, by key of the environment."""

_UNCOVERED_TUNING = (
    "Settings may have been chosen by seeded rehearsals on the same data; ε does not cover this "
    "choice."
)

_NOISE_SOURCE = {
    "one": "The holder of the images adds noise to everything that is computed from them.",
    "several": "Participants hold their own images and add noise before anything leaves them.",
    "trusted": "Participants trust the operator of an aggregator, which adds the noise.",
}


def missing_statements(about: Mapping[str, Any]) -> list[str]:
    """Return the required statements that are missing, as ``about.KEY (meaning)``."""
    return [f"about.{key} ({what})" for key, what in MANDATORY.items() if not about.get(key)]


def facts(
    record: dict[str, Any],
    generator: Mapping[str, Any],
    events: str,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Return the facts of a run with a bound, under the sections and keys of the registry.

    Args:
        record: privacy record of the run.
        generator: content of ``generator.json``.
        events: the accounted events in words.
        environment: versions that the run was trained with.
    """
    return {
        "dp_variant": {
            "variant_name": "Approximate DP",
            "data_domain": _images(generator),
            "unprotected_quantities": _unprotected(record, generator),
        },
        "privacy_loss": _privacy_loss(record),
        "deployment_model": _deployment_model(record),
        "implementation": _implementation(record, generator, events, environment),
    }


def entry(about: Mapping[str, Any], known: Mapping[str, Any], run: str) -> str:
    """Return the entry as YAML.

    Args:
        about: statements of the publisher.
        known: facts of the run.
        run: name of the run.
    """
    variant, implementation = dict(known["dp_variant"]), dict(known["implementation"])
    variant["data_domain"] = f"{_sentence(about['data'])} {variant['data_domain']}"
    if about.get("unprotected"):
        variant["unprotected_quantities"] += f"; {about['unprotected']}"
    if about.get("tuning"):
        key = "preprocessing_and_hyperparameter_tuning"
        selected = implementation[key] if implementation[key] != _UNCOVERED_TUNING else ""
        implementation[key] = f"{about['tuning']} {selected}".strip()
    implementation["justification"] = about["justification"]
    for key, name in (("contact", "Contact"), ("expires", "Expires")):
        if about.get(key):
            implementation["additional_information"] += f" {name}: {_sentence(about[key])}"
    content = {
        "url_slug": f"fedgen-{run}",
        "deployment": {
            "basic": _basic(about),
            "dp_variant": variant,
            "privacy_loss": known["privacy_loss"],
            "deployment_model": known["deployment_model"],
            "implementation": implementation,
            "administrative": {
                "status": "Draft",
                "registry_authors": [about["author"]],
                "tier": 3,
            },
        },
    }
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)


def _basic(about: Mapping[str, Any]) -> dict[str, Any]:
    sector = {"data_product_sector": about["sector"]} if about.get("sector") else {}
    return {
        "name": about["name"],
        "data_curators": [
            {
                "data_curator_name": about["controller"],
                "data_curator_type": about["controller_type"],
            }
        ],
        "description": about["description"],
        "intended_use": about["purpose"],
        "data_product_type": "Machine learning model",
        "data_product_region": about["region"],
        **sector,
        "publication_date": date.today().isoformat(),
    }


def _sentence(text: str) -> str:
    return text.rstrip(". ") + "."


def _images(generator: Mapping[str, Any]) -> str:
    channels, height, width = generator["shape"]
    kind = "grey" if channels == 1 else "colour"
    return f"Labelled {kind} images of {width} x {height} pixels, {generator['classes']} labels."


def _unprotected(record: Mapping[str, Any], generator: Mapping[str, Any]) -> str:
    names = ", ".join(generator["labels"] or [])
    named = f" and their names ({names})" if names else ""
    count = record.get("protected")
    parts = [
        f"number of labels{named}",
        "image size",
        "settings of the method, including sampling rates and counts",
        f"number of participants ({len(record['clients']):,}), and which sites take part",
    ]
    if count:
        parts.append(f"approximate number of protected units ({count:,})")
    return "; ".join(parts)


def _privacy_loss(record: dict[str, Any]) -> dict[str, Any]:
    release, delta = record["views"]["release"], record["delta"]
    curve = guarantee_of(release, delta)
    parameters = {"epsilon": release["epsilon"], "delta": delta}
    details = [strength(release, delta), f"Trade-off curve: {curve.describe()}."]
    if groups := release.get("group_epsilon"):
        listed = ", ".join(f"{k}: {format_epsilon(value)}" for k, value in groups.items())
        details.append(f"ε by the number of images of one person at one client: {listed}.")
    count = record.get("protected")
    return {
        "privacy_unit": _UNITS[record["unit"]],
        "privacy_unit_details": f"Neighbours: {record['relation'].replace('_', ' ')}. "
        f"{protected(record)}{exceptions(record)} Test splits and held-out images were not used in "
        "training.",
        **({"number_of_privacy_units": count} if count else {}),
        "privacy_parameters": parameters,
        "privacy_parameters_details": " ".join(details),
    }


def _deployment_model(record: dict[str, Any]) -> dict[str, Any]:
    several, trusted = len(record["clients"]) > 1, record["aggregation"]["kind"] == "trusted"
    trust = [
        "Readers of the release may have any background knowledge, but no other access to the run.",
        _NOISE_SOURCE["trusted" if trusted else "several" if several else "one"],
    ]
    trust.append("The coordinator sees all messages; ε against it is not part of the release.")
    if "selection" in record:
        trust.append("The number of runs, and all runs that were not selected, stay secret.")
    trust += [" ".join(part.split("\n\n", 1)[1].split()) for part in sums(record)]
    return {
        "model_name": "Federated" if several else "Central",
        "trust_assumptions": " ".join(trust),
        "release_type": "One release",
        "release_type_details": "Releases of the same data compose: their ε add up.",
        "data_source_type": "Static",
        "access_type": "Non-interactive",
    }


def _implementation(
    record: dict[str, Any],
    generator: Mapping[str, Any],
    events: str,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    release = record["views"]["release"]
    method = generator["method"]["type"]
    tuning, selection = _UNCOVERED_TUNING, ""
    if "selection" in record:
        count = record["selection"]["grid_points"]
        tuning = f"Private selection from a grid of {count} settings, covered by ε."
        selection = " Private selection among runs (Papernot, Steinke 2022)."
    key_source = "the random number generator of the operating system"
    if record["noise"] == "seeded":
        key_source = "the seed of the run, an experiment that is not for release"
    amplified = release["amplified_by"]
    secret = f" Sampling is secret: {amplified}." if amplified else ""
    versions = ", ".join(
        f"{name} {environment[library]}"
        for library, name in _LIBRARIES.items()
        if library in environment
    )
    return {
        "preprocessing_and_hyperparameter_tuning": tuning,
        "mechanisms": f"Gaussian noise: {events}. Method {method}, implemented by {versions}. "
        "Noise is sampled exactly on a grid, with AES-256 in counter mode keyed from "
        f"{key_source}; ε includes rounding of sums in floating point. Timing is not protected.",
        "composition": "Adaptive sequential composition of all messages of the client that holds "
        f"the record, in one run.{selection} Accountant: {release['accountant']}.{secret} "
        f"Sampling: {record['sampler']}.",
        "post_processing": "The generator is computed from the noisy releases; samples are "
        "computed from the generator.",
        "additional_information": "Training used no public data. If noise is secure, verify.py "
        "recomputes ε from the signed accounts.",
    }
