"""Compose a configuration from command-line overrides; every mistake is one line.

Imports neither torch nor other slow modules: a mistyped override is reported immediately.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Collection, Sequence
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fedgen.config import registry
from fedgen.config.extensions import config_folders, is_extension
from fedgen.config.overrides import (
    check_groups,
    config_name,
    group_folders,
    one_line_error,
    override_key,
    parse_overrides,
    set_values,
)
from fedgen.config.parameters import check_functions
from fedgen.config.schema import (
    RUNTIME_INVARIANT,
    SCHEMAS,
    TARGETS,
    Run,
    check_resolved,
    check_settings,
)
from fedgen.data.catalogue import public_rows_of
from fedgen.errors import FedgenError

_NO_GROUPS = {"benchmark": ("matrix", "data")}
"""Settings of a command that Hydra would take for its groups: folders have these names."""

_NO_KEY = object()
_ABOUT = ("report", "release")  # commands that take statements of a publisher


def compose(name: str, overrides: list[str]) -> DictConfig:
    """Return the configuration ``name`` with overrides, and the options of the chosen groups in
    ``names``.

    Raises:
        FedgenError: for an invalid override.
    """
    for word in overrides:
        if "=" not in word.lstrip("="):
            raise FedgenError(word, "has no value", "write key=value, see fedgen --help")
    plain = [word for word in overrides if override_key(word) in _NO_GROUPS.get(name, ())]
    texts = [word for word in overrides if name in _ABOUT and word.startswith("about.")]
    apart = {*plain, *texts}
    overrides = parse_overrides(
        [*_extension_folders(), *(word for word in overrides if word not in apart)]
    )
    try:
        check_groups(overrides)
        default, config, groups = _composed_config(name, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        list_keys = functools.partial(_known_keys, name, overrides)
        raise one_line_error(error, list_keys) from error
    if "names" in config:
        raise FedgenError("names", "is not a setting", "leave it out")
    for place in _BUILT:
        type_name, group = type_at(config, place), place.partition(".")[0]
        is_other = isinstance(type_name, str) and type_name != type_at(default, place)
        if is_other and place != "warm_up.method" and type_name in registry.words(place):
            problem = f"is determined by {group}={groups.get(group)}"
            raise FedgenError(f"{place}.type", problem, f"choose {group}={type_name}")
    if "privacy.target_epsilon" not in map(override_key, overrides):
        _replace_default_target(config, default)
    with open_dict(config):
        for word in plain:
            config.merge_with_dotlist([word])
        check_resolved(config)
        config.names = {k: v for k, v in groups.items() if "/" not in k and isinstance(v, str)}
        if type_at(config, "data") is not None:
            rows = public_rows_of(config.data.type, config.data.get("name"))
            if rows is not None and config.data.public_rows is None:
                config.data.public_rows = rows
        if OmegaConf.select(config, "runtime.threads") == "auto":
            # the same on every runtime: streams and bits depend on it
            config.runtime.threads = 1 if _has_several_clients(config) else _threads()
        if OmegaConf.select(config, "runtime.masks") == "auto":
            # sums of a simulation are ideal; between sites only masks hide the terms
            sums = config.privacy.aggregation == "secure"
            config.runtime.masks = sums and groups.get("runtime") == "deployed"
    for word in texts:  # verbatim, including quotes and commas
        key, _, text = word.partition("=")
        if OmegaConf.select(config, key, default=_NO_KEY) is _NO_KEY:
            problem = f"there is no {key!r}"
            raise FedgenError(key, problem, f"choose {', '.join(config.about)} under about")
        OmegaConf.update(config, key, text.replace("${", "\\${"))
    if OmegaConf.select(config, "resume") is not None:
        allowed_keys = ("resume", "rounds", "logger", "hydra.searchpath")
        words = [w for w in overrides if w != "runtime=auto"]
        others = [
            w for w in words if override_key(w) not in allowed_keys and not w.startswith("logger.")
        ]
        _check_resume(config, others)  # auto: unchanged
    check_settings(config, SCHEMAS[name])
    if OmegaConf.select(config, "resume") is not None and "rounds" not in map(
        override_key, overrides
    ):
        config.rounds = None  # unchanged
    return config


def _replace_default_target(config: DictConfig, default: DictConfig) -> None:
    """Remove the default target for ε if an override sets another target."""
    now, before = (OmegaConf.select(settings, "privacy") for settings in (config, default))
    if now is None or "target_epsilon" not in now:
        return
    changed = [name for name in TARGETS[1:] if now.get(name) != before.get(name)]
    if any(now[name] is not None for name in changed):
        now.target_epsilon = None


def defaults(name: str) -> tuple[DictConfig, list[str]]:
    """Return the default settings of ``name``, with required ones, and the names of its groups."""
    config, groups = _compose(name, tuple(_extension_folders()), _extensions_mtime())
    return config, [key for key in groups if "/" not in key]


def _composed_config(name: str, words: list[str]) -> tuple[DictConfig, DictConfig, dict[str, Any]]:
    """Return the settings of the chosen groups, the same with all overrides, and the options of the
    groups. Many clients run on Ray unless the experiment or an override names a runtime."""
    folders = group_folders()
    parsed = OverridesParser.create().parse_overrides(words)
    values = [override for override in parsed if _is_value(override, folders)]
    lines = {override.input_line for override in values}
    choices = tuple(word for word in words if word not in lines)
    default, groups = _compose(name, choices, _extensions_mtime())
    default, groups = default.copy(), dict(groups)
    config = default.copy()
    of_runtime = [override for override in values if _group_of(override.key_or_group) == "runtime"]
    set_values(config, [override for override in values if override not in of_runtime])
    if groups.get("runtime") == "auto":
        on_ray = _has_many_clients(config) or any(map(_is_ray_setting, of_runtime))
        groups["runtime"] = "ray" if on_ray else "in_process"
        runtime_defaults = OmegaConf.load(config_name("runtime", groups["runtime"]))
        for settings in (default, config):
            with open_dict(settings):
                settings.runtime = OmegaConf.merge(runtime_defaults, settings.runtime)
    set_values(config, of_runtime)
    return default, config, groups


@functools.cache
def _compose(
    name: str, choices: tuple[str, ...], edited: float
) -> tuple[DictConfig, dict[str, Any]]:
    """Return the settings of the options of groups, and these options, cached per process:
    composing is the slowest step. Callers do not modify the result.

    Args:
        edited: modification time of the settings of extensions, which may change while a notebook
            is open.
    """
    del edited
    with initialize_config_module("fedgen.configs", version_base="1.3"):
        config = hydra_compose(name, list(choices), return_hydra_config=True)
    groups = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config.hydra
    return config, groups


def _extensions_mtime() -> float:
    """Return the latest modification time of the settings files of extensions."""
    files = (file for place in config_folders()[1:] for file in place.rglob("*.yaml"))
    return max((file.stat().st_mtime for file in files), default=0.0)


def _is_value(word: Override, groups: Collection[str]) -> bool:
    """Return whether an override sets a value rather than choosing an option of a group."""
    key = word.key_or_group
    if word.is_sweep_override() or word.package or "/" in key or _group_of(key) == "hydra":
        return False
    return key not in groups or isinstance(word.value(), dict)


def _group_of(key: str) -> str:
    return key.partition(".")[0]


_BUILT = ("data", "partition", "method", "warm_up.method", "runtime")
"""Places whose type is determined by the option of their group."""


def type_at(config: DictConfig, place: str) -> object:
    """Return the type at a place of the settings; None if there is none."""
    settings = OmegaConf.select(config, place)
    return settings.get("type") if isinstance(settings, DictConfig) else None


def check_restored(config: DictConfig) -> None:
    """Check the settings in a run directory against the known ones: they may have been edited or
    corrupted.

    Raises:
        FedgenError: for the first one that is missing or of another type.
    """
    try:
        choices = {str(group): choice for group, choice in config.names.items()}
        for name, choice in choices.items():  # Hydra's own keywords would import and read files
            group, _, inside = name.partition("@")
            is_group = group in group_folders() and re.fullmatch(r"[\w.]*", inside)
            if not is_group or not isinstance(choice, str) or not re.fullmatch(r"[\w-]+", choice):
                raise FedgenError(f"names.{name}", f"cannot be {choice!r}", "restore it")
        groups = (
            *_extension_folders(),
            *(f"{group}={choice}" for group, choice in choices.items()),
        )
        default = _compose("config", groups, _extensions_mtime())[0]
        for place in _BUILT:
            type_name = type_at(config, place)
            if type_name != type_at(default, place) and not is_extension(type_name):
                group = place.partition(".")[0]
                problem = f"{type_name} differs from {group}={choices.get(group)}"
                raise FedgenError(f"{place}.type", problem, "restore it")
        check_resolved(config)
        check_settings(config, Run, extra="ignore")
        check_functions(config)
    except (HydraException, OmegaConfBaseException, AttributeError) as error:
        remedy = "set FEDGEN_EXTENSIONS=PACKAGE, if the run needs one"
        raise FedgenError("names", "do not fit the rest", remedy) from error


def _check_resume(config: DictConfig, others: list[str]) -> None:
    """Check that a resumed run keeps its settings: only rounds, logger and runtime may change,
    except for settings of the runtime on which privacy or reproducibility depends. Without a new
    runtime, ``names.runtime`` is null."""
    if not others:
        config.names.runtime = None
    fixed = tuple(f"runtime.{name}" for name in RUNTIME_INVARIANT)
    kept = [
        w
        for w in others
        if not override_key(w).startswith("runtime") or override_key(w).startswith(fixed)
    ]
    kept += [w for w in others if w.startswith("runtime={")]  # all of the above in one override
    if kept:
        raise FedgenError(
            "resume",
            f"a resumed run keeps its settings, got {' '.join(kept)}",
            "give resume=DIR alone, with more rounds, another runtime or logger",
        )
    if others and "runtime" not in map(override_key, others):
        raise FedgenError("resume", f"{others[0]} requires a runtime", "add runtime=...")


def _threads() -> int:
    """Return the number of threads in the environment, or one per core."""
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(threads) if threads.isdecimal() and int(threads) else os.cpu_count() or 1


def _has_several_clients(config: DictConfig) -> bool:
    return bool(OmegaConf.select(config, "partition.clients", default=1) != 1)


def _has_many_clients(config: DictConfig) -> bool:
    """Return whether the run has more than 20 clients, or one per writer."""
    clients = OmegaConf.select(config, "partition.clients", default=1)
    if clients is None:  # as many as writers, or as folders
        return bool(OmegaConf.select(config, "partition.type") != "by_folder")
    return not isinstance(clients, int) or clients > _MAX_IN_PROCESS_CLIENTS


_MAX_IN_PROCESS_CLIENTS = 20  # clients


def _is_ray_setting(override: Override) -> bool:
    """Return whether an override is a setting of Ray alone."""
    key = override.key_or_group.partition("runtime.")[2]
    settings = [OmegaConf.load(config_name("runtime", name)) for name in ("ray", "in_process")]
    return key in settings[0] and key not in settings[1]


def _extension_folders() -> list[str]:
    """Return the override that adds the folders of extensions to Hydra's search path; empty without
    any."""
    urls = [f"file://{place}" for place in config_folders()[1:]]
    return [f"hydra.searchpath=[{','.join(map(repr, urls))}]"] if urls else []


def _known_keys(name: str, overrides: Sequence[str]) -> list[str]:
    """Return the keys of the chosen groups."""
    kept = {*group_folders(), "hydra.searchpath"}
    choices = [
        w for w in overrides if override_key(w) in kept and not w.partition("=")[2].startswith("{")
    ]
    try:
        config, _ = _compose(name, tuple(choices), _extensions_mtime())
    except HydraException:  # the command lacks this group
        return []

    def walk(part: DictConfig, prefix: str) -> list[str]:
        keys = []
        for key in part:
            keys.append(f"{prefix}{key!s}")
            if not OmegaConf.is_missing(part, key) and isinstance(part[key], DictConfig):
                keys += walk(part[key], f"{prefix}{key!s}.")
        return keys

    return walk(config, "")
