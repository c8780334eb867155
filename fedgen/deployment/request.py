"""What a coordinator asks of its nodes: settings, as data, and the name of a run."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedgen import factories
from fedgen.errors import FedgenError
from fedgen.experiments.configuration import check_restored
from fedgen.experiments.settings import check as check_settings
from fedgen.files import as_json

_OF_THE_COORDINATOR = ("run_dir", "resume", "start")
_MOST_TEXT = 2**20
_NAME = re.compile(r"[0-9a-f]{8,64}")


@dataclass(frozen=True)
class Request:
    """A run as its nodes are asked for it.

    run: its name. settings: resolved, as plain data. branch: of a seeded run's coins.
    noise_multiplier: what the coordinator solved for, in short. version: of fedgen there.
    """

    run: str
    settings: dict[str, Any]
    branch: str
    noise_multiplier: str | None
    version: str

    @classmethod
    def of(cls, config: DictConfig, run: str, branch: str, noise: str | None) -> Request:
        """The request for a run with these settings."""
        whole: Any = OmegaConf.to_container(config, resolve=True)
        whole |= dict.fromkeys(_OF_THE_COORDINATOR)
        whole["runtime"] |= {"superlink": "", "ca": "", "rehearses": None}
        return cls(run, whole, branch, noise, metadata.version("fedgen"))

    def text(self) -> str:
        """The request on its way."""
        return json.dumps(vars(self), sort_keys=True)

    def config(self) -> DictConfig:
        """Its settings, held against those that there are.

        Raises:
            FedgenError: for the first that is none.
        """
        try:
            config = OmegaConf.create(self.settings)
            factories.check(self.settings, "config")
            check_restored(config)
            check_settings(config)
        except OmegaConfBaseException as error:
            raise FedgenError("request", str(error).splitlines()[0], "it is no run") from error
        return config


def read(text: str) -> Request:
    """A request that arrived.

    Raises:
        ValueError: if it is none.
    """
    if len(text) > _MOST_TEXT:
        raise ValueError("too long")
    found = as_json(text)
    kinds = {"run": str, "settings": dict, "branch": str, "version": str}
    if not isinstance(found, dict) or set(found) != {*kinds, "noise_multiplier"}:
        raise ValueError("not a request")
    if not all(isinstance(found[name], kind) for name, kind in kinds.items()):
        raise ValueError("not a request")
    if found["noise_multiplier"] is not None and not isinstance(found["noise_multiplier"], str):
        raise ValueError("not a request")
    if not _NAME.fullmatch(found["run"]) or _interpolates(found["settings"]):
        raise ValueError("not a request")
    return Request(**found)


def _interpolates(settings: Any) -> bool:
    """Whether something would be looked up here, in an environment that is not the sender's."""
    if isinstance(settings, dict):
        return any(_interpolates(each) for pair in settings.items() for each in pair)
    if isinstance(settings, list):
        return any(map(_interpolates, settings))
    return isinstance(settings, str) and "${" in settings
