"""What a coordinator asks of its nodes: settings, as data, and the name of a run.

A node composes the run's settings itself, of its own configurations. Of a request it takes what a
run may differ in, and of what it names nothing is called but the parts of methods.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedgen.errors import FedgenError
from fedgen.experiments.configuration import check_restored, compose, target
from fedgen.experiments.validation import check as check_settings
from fedgen.files import as_json
from fedgen.version import VERSION

_GROUPS = ("method", "warm_up", "privacy")
_ALONE = ("rounds", "seed")
_INSIDE = {
    "data": ("classes", "labels", "shape", "public_rows"),
    "partition": ("clients",),
    "runtime": ("threads", "min_success", "masks"),
}
_MOST_TEXT = 2**18
_DEEPEST = 12  # levels of settings
_NAME = re.compile(r"[0-9a-f]{8,64}")
_WORD = re.compile(r"[a-z][a-z0-9_]{0,63}")


@dataclass(frozen=True)
class Request:
    """A run as its nodes are asked for it.

    run: its name. names: of its method, warm-up and privacy. settings: resolved, as plain data.
    branch: of a seeded run's coins. noise_multiplier: what the coordinator solved for, in short.
    version: of fedgen there.
    """

    run: str
    names: dict[str, str]
    settings: dict[str, Any]
    branch: str
    noise_multiplier: str | None
    version: str

    @classmethod
    def of(cls, config: DictConfig, run: str, branch: str, noise: str | None) -> Request:
        """The request for a run with these settings."""
        whole: Any = OmegaConf.to_container(config, resolve=True)
        chosen = {name: whole[name] for name in (*_GROUPS, *_ALONE)}
        for group, inside in _INSIDE.items():
            chosen[group] = {name: whole[group][name] for name in inside}
        names = {group: whole["names"][group] for group in _GROUPS}
        return cls(run, names, chosen, branch, noise, VERSION)

    def text(self) -> str:
        """The request on its way."""
        return json.dumps(vars(self), sort_keys=True)

    def config(self) -> DictConfig:
        """The run's settings: this node's own, with what is asked in them.

        Raises:
            FedgenError: for the first that is none.
        """
        asked = self.settings
        own = compose(
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
            here, there = (target(OmegaConf.create(each), place) for each in (own, asked))
            if here != there:
                problem = f"{there} is not what {self.names[place.partition('.')[0]]} is"
                raise FedgenError(f"{place}._target_", problem, "it is no run of fedgen")
        try:
            for name in (*_GROUPS, *_ALONE):
                own[name] = asked[name]
            for group, inside in _INSIDE.items():
                for name in inside:
                    own[group][name] = asked[group][name]
            check_restored(own)
            check_settings(own)
        except OmegaConfBaseException as error:
            problem = str(error).splitlines()[0]
            raise FedgenError("request", problem, "it is no run of fedgen") from error
        return own


def read(text: str) -> Request:
    """A request that arrived.

    Raises:
        ValueError: if it is none.
    """
    if len(text) > _MOST_TEXT or not text.isascii():
        raise ValueError("not a request")
    found = as_json(text)
    kinds = {"run": str, "names": dict, "settings": dict, "branch": str, "version": str}
    if not isinstance(found, dict) or set(found) != {*kinds, "noise_multiplier"}:
        raise ValueError("not a request")
    if not all(isinstance(found[name], kind) for name, kind in kinds.items()):
        raise ValueError("not a request")
    if found["noise_multiplier"] is not None and not isinstance(found["noise_multiplier"], str):
        raise ValueError("not a request")
    names, settings = found["names"], found["settings"]
    if set(names) != set(_GROUPS) or set(settings) != {*_GROUPS, *_ALONE, *_INSIDE}:
        raise ValueError("not a request")
    if not all(isinstance(name, str) and _WORD.fullmatch(name) for name in names.values()):
        raise ValueError("not a request")
    for group, inside in _INSIDE.items():
        if not isinstance(settings[group], dict) or set(settings[group]) != set(inside):
            raise ValueError("not a request")
    if not all(isinstance(settings[group], dict) for group in _GROUPS):
        raise ValueError("not a request")
    if not _NAME.fullmatch(found["run"]) or not _plain(settings, _DEEPEST):
        raise ValueError("not a request")
    return Request(**found)


def _plain(settings: Any, levels: int) -> bool:
    """Whether it is not nested deep, and nothing would be looked up here, in an environment that is
    not the sender's."""
    if isinstance(settings, dict | list):
        inside = (
            [each for pair in settings.items() for each in pair]
            if isinstance(settings, dict)
            else settings
        )
        return levels > 0 and all(_plain(each, levels - 1) for each in inside)
    return not (isinstance(settings, str) and "${" in settings)
