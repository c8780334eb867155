"""Command-line overrides to a resolved Hydra configuration; every mistake in one line.

Imports neither torch nor anything else that is slow to load: a mistyped override answers at once.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Collection, Sequence
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fedgen import factories
from fedgen.errors import FedgenError
from fedgen.experiments.kinds import (
    SAME_ON_EVERY_RUNTIME,
    check_kinds,
    check_known,
    check_whole,
)
from fedgen.experiments.overrides import (
    check_groups,
    group_folders,
    in_one_line,
    key_of,
    named,
    readable,
)

_NO_GROUPS = {"account": ("published",), "benchmark": ("matrix", "data")}
"""Settings of a command that Hydra would take for its groups: folders have these names."""

_NO_KEY = object()

_override = ConfigLoaderImpl._apply_overrides_to_config
"""Hydra's own way to set values; in what was composed before, which Hydra has no other way to."""


def compose(name: str, overrides: list[str]) -> DictConfig:
    """The configuration ``name`` with overrides, and the chosen groups' options under ``names``.

    Raises:
        FedgenError: for an override that does not fit.
    """
    for word in overrides:
        if "=" not in word.lstrip("="):
            raise FedgenError(word, "has no value", "write key=value, see fedgen --help")
    plain = [word for word in overrides if key_of(word) in _NO_GROUPS.get(name, ())]
    texts = [word for word in overrides if name == "report" and word.startswith("about.")]
    apart = {*plain, *texts}
    overrides = readable([*_of_extensions(), *(word for word in overrides if word not in apart)])
    try:
        check_groups(overrides)
        default, config, groups = _settled(name, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        known = functools.partial(_known_keys, name, overrides)
        raise in_one_line(error, known) from error
    check_known(config, default)
    with open_dict(config):
        for word in plain:
            config.merge_with_dotlist([word])
        check_whole(config)
        config.names = {k: v for k, v in groups.items() if "/" not in k and isinstance(v, str)}
        if OmegaConf.select(config, "runtime.threads") == "auto":
            # the same wherever several clients run: bits, and coins, depend on it
            config.runtime.threads = 1 if _several(config) else _threads()
        if OmegaConf.select(config, "runtime.masks") == "auto":
            # a simulation's sums are ideal; between sites nothing else hides what is added
            sums = config.privacy.aggregation == "secure"
            config.runtime.masks = sums and groups.get("runtime") == "deployed"
    for word in texts:  # as they are, quotes and commas too
        key, _, text = word.partition("=")
        if OmegaConf.select(config, key, default=_NO_KEY) is _NO_KEY:
            problem = f"there is no {key!r}"
            raise FedgenError(key, problem, f"choose {', '.join(config.about)} under about")
        OmegaConf.update(config, key, text.replace("${", "\\${"))
    if OmegaConf.select(config, "resume") is not None:
        own = ("resume", "rounds", "logger", "hydra.searchpath")
        words = [w for w in overrides if w != "runtime=auto"]
        asked = [w for w in words if key_of(w) not in own and not w.startswith("logger.")]
        _check_resume(config, asked)  # auto: as it was
    check_kinds(config, default)
    if OmegaConf.select(config, "resume") is not None and "rounds" not in map(key_of, overrides):
        config.rounds = None  # as it was
    return config


def defaults(name: str) -> tuple[DictConfig, list[str]]:
    """The settings ``name`` by default, with what has to be given, and the names of its groups."""
    config, groups = _composed(name, tuple(_of_extensions()), _edited())
    return config, [key for key in groups if "/" not in key]


def _settled(name: str, words: list[str]) -> tuple[DictConfig, DictConfig, dict[str, Any]]:
    """The settings of the chosen groups, these with all overrides, and the groups' options. Where
    neither the experiment nor anybody else names a runtime, several clients run on Ray."""
    folders = group_folders()
    parsed = OverridesParser.create().parse_overrides(words)
    values = [each for each in parsed if _is_value(each, folders)]
    lines = {each.input_line for each in values}
    choices = tuple(word for word in words if word not in lines)
    default, groups = _composed(name, choices, _edited())
    default, groups = default.copy(), dict(groups)
    config = default.copy()
    of_runtime = [each for each in values if _of(each.key_or_group) == "runtime"]
    _override([each for each in values if each not in of_runtime], config)
    if groups.get("runtime") == "auto":
        groups["runtime"] = "ray" if _several(config) else "in_process"
        own = OmegaConf.load(named("runtime", groups["runtime"]))
        for each in (default, config):
            with open_dict(each):
                each.runtime = OmegaConf.merge(own, each.runtime)
    _override(of_runtime, config)
    return default, config, groups


@functools.cache
def _composed(
    name: str, choices: tuple[str, ...], edited: float
) -> tuple[DictConfig, dict[str, Any]]:
    """The settings of groups' options, and these options, once in a process: composing takes longer
    than all else that is done to settings. Nobody changes what is returned.

    Args:
        edited: when the settings of extensions were, as they may be while a notebook is open.
    """
    del edited
    with initialize_config_module("fedgen.configs", version_base="1.3"):
        config = hydra_compose(name, list(choices), return_hydra_config=True)
    groups = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config.hydra
    return config, groups


def _edited() -> float:
    """When a settings file of an extension was changed last."""
    files = (file for place in factories.places()[1:] for file in place.rglob("*.yaml"))
    return max((file.stat().st_mtime for file in files), default=0.0)


def _is_value(word: Override, groups: Collection[str]) -> bool:
    """Whether it sets a value in what is composed, and so has no part in composing it."""
    key = word.key_or_group
    if word.is_sweep_override() or word.package or "/" in key or _of(key) == "hydra":
        return False
    return key not in groups or isinstance(word.value(), dict)


def _of(key: str) -> str:
    return key.partition(".")[0]


_OF_DEBUGGING = ("debug", "jobs")  # of an experiment: its generators' runs have none
_BUILT = ("data", "partition", "method", "warm_up.method", "runtime")
"""What groups have called for them; what is called inside of it may be another's."""


def target(config: DictConfig, place: str) -> object:
    """What is called at a place of the settings; None if nothing is."""
    found = OmegaConf.select(config, place)
    return found.get("_target_") if isinstance(found, DictConfig) else None


def check_restored(config: DictConfig) -> None:
    """Holds the settings that a run was made with against those that there are: what an editor, or
    a bad disk, made of them is no mistake of a program's.

    Raises:
        FedgenError: for the first that is missing, or of another kind.
    """
    try:
        chosen = {str(group): choice for group, choice in config.names.items()}
        for name, choice in chosen.items():  # Hydra's own words would have it import and read
            group, _, inside = name.partition("@")
            known = group in group_folders() and re.fullmatch(r"[\w.]*", inside)
            if not known or not isinstance(choice, str) or not re.fullmatch(r"[\w-]+", choice):
                raise FedgenError(f"names.{name}", f"cannot be {choice!r}", "restore it")
        groups = (*_of_extensions(), *(f"{group}={choice}" for group, choice in chosen.items()))
        default = _composed("config", groups, _edited())[0].copy()
        with open_dict(default):
            for key in _OF_DEBUGGING:
                default.pop(key, None)
        for place in _BUILT:
            found = target(config, place)
            if found != target(default, place) and not factories.is_outside(found):
                group = place.partition(".")[0]
                problem = f"{found} is not what {group}={chosen.get(group)} is"
                raise FedgenError(f"{place}._target_", problem, "restore it")
        check_kinds(config, default)
        check_whole(config)
    except (HydraException, OmegaConfBaseException, AttributeError) as error:
        remedy = "set FEDGEN_EXTENSIONS=PACKAGE, if the run needs one"
        raise FedgenError("names", "do not fit the rest", remedy) from error


def _check_resume(config: DictConfig, others: list[str]) -> None:
    """A run goes on as it was; where it runs may change, but for what its privacy and its bits
    depend on. Without a new runtime, ``names.runtime`` is null."""
    if not others:
        config.names.runtime = None
    fixed = tuple(f"runtime.{name}" for name in SAME_ON_EVERY_RUNTIME)
    kept = [w for w in others if not key_of(w).startswith("runtime") or key_of(w).startswith(fixed)]
    kept += [w for w in others if w.startswith("runtime={")]  # all of the above in one word
    if kept:
        raise FedgenError(
            "resume",
            f"a resumed run keeps its settings, got {' '.join(kept)}",
            "give resume=DIR alone, with more rounds, another runtime or logger",
        )
    if others and "runtime" not in map(key_of, others):
        raise FedgenError("resume", f"{others[0]} of which runtime?", "add runtime=...")


def _threads() -> int:
    """As many as the environment says, as for other programs, or one for each core."""
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(told) if told.isdecimal() and int(told) else os.cpu_count() or 1


def _several(config: DictConfig) -> bool:
    return bool(OmegaConf.select(config, "partition.clients", default=1) != 1)


def _of_extensions() -> list[str]:
    """Where Hydra looks beside fedgen's own settings."""
    found = [f"file://{place}" for place in factories.places()[1:]]
    return [f"hydra.searchpath=[{','.join(map(repr, found))}]"] if found else []


def _known_keys(name: str, overrides: Sequence[str]) -> list[str]:
    """Of the groups that are chosen."""
    kept = {*group_folders(), "hydra.searchpath"}
    chosen = [w for w in overrides if key_of(w) in kept and not w.partition("=")[2].startswith("{")]
    try:
        config, _ = _composed(name, tuple(chosen), _edited())
    except HydraException:  # a group that the command has not
        return []

    def walk(part: DictConfig, prefix: str) -> list[str]:
        keys = []
        for key in part:
            keys.append(f"{prefix}{key!s}")
            if not OmegaConf.is_missing(part, key) and isinstance(part[key], DictConfig):
                keys += walk(part[key], f"{prefix}{key!s}.")
        return keys

    return walk(config, "")
