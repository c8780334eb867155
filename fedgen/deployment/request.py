"""Requests of a coordinator to its nodes: settings as data, and the name of a run.

A node composes the settings of a run from its own configurations. It accepts from a request only
settings that runs may vary, and builds only registered parts of methods.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedgen.config.compose import check_restored, compose, type_at
from fedgen.config.validation import check as check_settings
from fedgen.errors import FedgenError
from fedgen.storage.io import parse_json
from fedgen.version import VERSION

_GROUPS = ("method", "warm_up", "privacy")
_SINGLE_KEYS = ("rounds", "seed")
_NESTED_KEYS = {
    "data": ("classes", "labels", "shape", "public_rows", "public_persons"),
    "partition": ("clients",),
    "runtime": ("threads", "min_success", "masks"),
}
_MAX_TEXT = 2**18
_MAX_DEPTH = 12  # nesting of settings
_NAME = re.compile(r"[0-9a-f]{8,64}")
_WORD = re.compile(r"[a-z][a-z0-9_]{0,63}")


@dataclass(frozen=True)
class Request:
    """A run as requested from nodes.

    run: its name.
    names: names of its method, warm-up and privacy group.
    settings: resolved, as plain data.
    domain: noise domain of a seeded run.
    noise_multiplier: the calibrated value, rounded.
    version: version of fedgen at the coordinator.
    """

    run: str
    names: dict[str, str]
    settings: dict[str, Any]
    domain: str
    noise_multiplier: str | None
    version: str

    @classmethod
    def from_config(cls, config: DictConfig, run: str, branch: str, noise: str | None) -> Request:
        """Return the request for a run with these settings."""
        all_settings: Any = OmegaConf.to_container(config, resolve=True)
        settings = {name: all_settings[name] for name in (*_GROUPS, *_SINGLE_KEYS)}
        for group, inside in _NESTED_KEYS.items():
            settings[group] = {name: all_settings[group][name] for name in inside}
        names = {group: all_settings["names"][group] for group in _GROUPS}
        return cls(run, names, settings, branch, noise, VERSION)

    def text(self) -> str:
        """Return the request as JSON."""
        return json.dumps(vars(self), sort_keys=True)

    def config(self) -> DictConfig:
        """Return the settings of the run: those of this node, updated by the request.

        Raises:
            FedgenError: for the first invalid setting.
        """
        settings = self.settings
        config = compose(
            "config",
            [
                *(f"{group}={self.names[group]}" for group in _GROUPS),
                "data=public_facts",
                "data.classes=1",
                "data.shape=[1,8,8]",
                "partition=nodes",
                "partition.clients=1",
                "evaluation=none",
                "runtime=deployed",
            ],
        )
        for place in ("method", "warm_up.method"):
            local_type, requested_type = (
                type_at(OmegaConf.create(values), place) for values in (config, settings)
            )
            if local_type != requested_type:
                problem = f"{requested_type} differs from {self.names[place.partition('.')[0]]}"
                raise FedgenError(f"{place}.type", problem, "the request is not a fedgen run")
        try:
            for name in (*_GROUPS, *_SINGLE_KEYS):
                config[name] = settings[name]
            for group, inside in _NESTED_KEYS.items():
                for name in inside:
                    config[group][name] = settings[group][name]
            check_restored(config)
            check_settings(config)
        except OmegaConfBaseException as error:
            problem = str(error).splitlines()[0]
            raise FedgenError("request", problem, "the request is not a fedgen run") from error
        return config


def read(text: str) -> Request:
    """Parse an untrusted request.

    Raises:
        ValueError: if it is invalid.
    """
    if len(text) > _MAX_TEXT or not text.isascii():
        raise ValueError("not a request")
    fields = parse_json(text)
    kinds = {"run": str, "names": dict, "settings": dict, "domain": str, "version": str}
    if not isinstance(fields, dict) or set(fields) != {*kinds, "noise_multiplier"}:
        raise ValueError("not a request")
    if not all(isinstance(fields[name], kind) for name, kind in kinds.items()):
        raise ValueError("not a request")
    if fields["noise_multiplier"] is not None and not isinstance(fields["noise_multiplier"], str):
        raise ValueError("not a request")
    names, settings = fields["names"], fields["settings"]
    if set(names) != set(_GROUPS) or set(settings) != {*_GROUPS, *_SINGLE_KEYS, *_NESTED_KEYS}:
        raise ValueError("not a request")
    if not all(isinstance(name, str) and _WORD.fullmatch(name) for name in names.values()):
        raise ValueError("not a request")
    for group, inside in _NESTED_KEYS.items():
        if not isinstance(settings[group], dict) or set(settings[group]) != set(inside):
            raise ValueError("not a request")
    if not all(isinstance(settings[group], dict) for group in _GROUPS):
        raise ValueError("not a request")
    if not _NAME.fullmatch(fields["run"]) or not _plain(settings, _MAX_DEPTH):
        raise ValueError("not a request")
    return Request(**fields)


def _plain(settings: Any, levels: int) -> bool:
    """Return whether the settings have limited depth and no interpolation, which would read the
    environment of this node."""
    if isinstance(settings, dict | list):
        inside = (
            [item for pair in settings.items() for item in pair]
            if isinstance(settings, dict)
            else settings
        )
        return levels > 0 and all(_plain(item, levels - 1) for item in inside)
    return not (isinstance(settings, str) and "${" in settings)
