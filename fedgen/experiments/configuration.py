"""Command-line overrides to a resolved Hydra configuration; every mistake in one line.

Imports neither torch nor anything else that is slow to load: a mistyped override answers at once.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fedgen import factories
from fedgen.errors import FedgenError

_NUMBER_OR_WORD = ("method.discriminator_steps",)
_SWITCH_OR_AUTO = ("runtime.masks",)
_NUMBER_OR_NULL = (
    "privacy.target_epsilon",
    "privacy.noise_multiplier",
    "privacy.budget_epsilon",
    "runtime.timeout",
    "audit.noise_multiplier",
)


_NO_GROUPS = {"account": ("published",), "benchmark": ("matrix", "data")}
"""Settings of a command that Hydra would take for its groups: folders have these names."""

SAME_ON_EVERY_RUNTIME = ("threads", "min_success", "transport", "masks", "faults")
"""Settings of the runtime group that a run's bits and its privacy depend on."""


_NO_KEY = object()
_PLAIN = re.compile(r"(?!(null|true|false|nan|inf)$)[a-z_/][a-z0-9_./-]*", re.ASCII | re.IGNORECASE)

_override = ConfigLoaderImpl._apply_overrides_to_config
"""Hydra's own way to set values; in what was composed before, which Hydra has no other way to."""


def compose(name: str, overrides: list[str]) -> DictConfig:
    """The configuration ``name`` with overrides, and the chosen groups' options under ``names``.

    Raises:
        FedgenError: for an override that does not fit.
    """
    for word in overrides:
        if "=" not in word:
            raise FedgenError(word, "is no setting", "write key=value, see fedgen --help")
    plain = [word for word in overrides if _key(word) in _NO_GROUPS.get(name, ())]
    texts = [word for word in overrides if name == "report" and word.startswith("about.")]
    apart = {*plain, *texts}
    overrides = [*_of_extensions(), *(word for word in overrides if word not in apart)]
    try:
        _check_groups(overrides)
        default, config, groups = _settled(name, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise _in_one_line(error, name, overrides) from error
    with open_dict(config):
        for word in plain:
            config.merge_with_dotlist([word])
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
        asked = [w for w in words if _key(w) not in own and not w.startswith("logger.")]
        _check_resume(config, asked)  # auto: as it was
    try:
        OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        problem = str(error).splitlines()[0]
        raise FedgenError(error.full_key or "override", problem, "correct it") from error
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise FedgenError(missing[0], "is not given", f"add {missing[0]}=...")
    _check_types(config, default, "")
    if OmegaConf.select(config, "resume") is not None and "rounds" not in map(_key, overrides):
        config.rounds = None  # as it was
    return config


def defaults(name: str) -> tuple[DictConfig, list[str]]:
    """The settings ``name`` by default, with what has to be given, and the names of its groups."""
    config, groups = _composed(name, tuple(_of_extensions()), _edited())
    return config, [key for key in groups if "/" not in key]


def _settled(name: str, words: list[str]) -> tuple[DictConfig, DictConfig, dict[str, Any]]:
    """The settings of the chosen groups, these with all overrides, and the groups' options. Where
    neither the experiment nor anybody else names a runtime, several clients run on Ray."""
    folders = _groups()
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
    with initialize_config_module("configs", version_base="1.3"):
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


def check_restored(config: DictConfig) -> None:
    """Holds the settings that a run was made with against those that there are: what an editor, or
    a bad disk, made of them is no mistake of a program's.

    Raises:
        FedgenError: for the first that is missing, or of another kind.
    """
    try:
        groups = tuple(f"{group!s}={choice}" for group, choice in config.names.items() if choice)
        groups = (*_of_extensions(), *groups)
        _check_types(config, _composed("config", groups, _edited())[0], "")
    except (HydraException, OmegaConfBaseException, AttributeError) as error:
        raise FedgenError("names", "do not fit the rest", "restore them") from error


def check_output(output: str) -> None:
    """Raises FedgenError unless an account can be said in this way."""
    if output not in ("words", "json"):
        raise FedgenError("output", f"cannot be {output!r}", "choose words or json")


def _check_resume(config: DictConfig, others: list[str]) -> None:
    """A run goes on as it was; where it runs may change, but for what its privacy and its bits
    depend on. Without a new runtime, ``names.runtime`` is null."""
    if not others:
        config.names.runtime = None
    fixed = tuple(f"runtime.{name}" for name in SAME_ON_EVERY_RUNTIME)
    kept = [w for w in others if not _key(w).startswith("runtime") or _key(w).startswith(fixed)]
    kept += [w for w in others if w.startswith("runtime={")]  # all of the above in one word
    if kept:
        raise FedgenError(
            "resume",
            f"a resumed run keeps its settings, got {' '.join(kept)}",
            "give resume=DIR alone, with more rounds, another runtime or logger",
        )
    if others and "runtime" not in map(_key, others):
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


def _groups() -> dict[str, Path]:
    """The folder of each group: of fedgen's, or of an extension's own."""
    places = [place for place in reversed(factories.places()) if place.is_dir()]
    return {path.name: path for place in places for path in place.iterdir() if path.is_dir()}


def _check_groups(overrides: list[str]) -> None:
    """Raises FedgenError for an option of a group that is no word."""
    folders = _groups()
    parsed = OverridesParser.create().parse_overrides(overrides)
    for word, each in zip(overrides, parsed, strict=True):
        group = folders.get(each.key_or_group)
        value = each.value()
        left_out = each.is_delete() and value is None
        if group and not left_out and not isinstance(value, str | QuotedString | dict):
            known = sorted(path.stem for path in group.glob("*.yaml"))
            problem = f"cannot be {word.partition('=')[2]}"
            raise FedgenError(each.key_or_group, problem, f"choose {', '.join(known)}")


def in_grammar(value: Any) -> str:
    """A value in Hydra's grammar."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)  # 1.0 is 1: the same run as by the command line
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{in_grammar(each)}" for key, each in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(in_grammar(each) for each in value) + "]"
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    quoted = re.sub(r"(\\+)(?='|$)", r"\1\1", text).replace("'", r"\'")
    return f"'{quoted}'"


def combinations(overrides: list[str]) -> list[list[str]]:
    """Every combination of comma-separated values, as Hydra's own sweeps write them, and of the
    axes of ``sweep=NAME``."""
    sweeps = [word.partition("=")[2] for word in overrides if _key(word) == "sweep"]
    base, axes = _axes(sweeps[-1]) if sweeps else ([], [])
    overrides = [word for word in overrides if _key(word) != "sweep"]
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
        options = [
            [f"{each.get_key_element()}={value}" for value in each.sweep_string_iterator()]
            if each.is_sweep_override()
            else [word]
            for each, word in zip(parsed, overrides, strict=True)
        ]
    except HydraException as error:
        raise _in_one_line(error, "config") from error
    return [
        [*base, *itertools.chain(*(words.split() for words in point)), *batch]
        for point in itertools.product(*axes)
        for batch in itertools.product(*options)
    ]


def _axes(name: str) -> tuple[list[str], list[list[str]]]:
    """A sweep's words for all of its runs, and its axes: alternatives, of one or more words."""
    found = OmegaConf.to_container(OmegaConf.load(named("sweep", name)))
    assert isinstance(found, dict)
    return found["base"], found["axes"]


def named(folder: str, name: str) -> Path:
    """The file of a sweep or a matrix.

    Raises:
        FedgenError: if there is none of this name.
    """
    there = [place / folder for place in factories.places()]
    files = {path.stem: path for place in there for path in place.glob("*.yaml")}
    if name not in files:
        near = difflib.get_close_matches(name, files, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise FedgenError(
            folder, f"there is no {name!r}", f"{hint}choose {', '.join(sorted(files))}"
        )
    return files[name]


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _check_types(config: DictConfig, default: DictConfig, prefix: str) -> None:
    """Holds each value against its default: numbers stay numbers."""
    for key in default:
        taken_over = (OmegaConf.is_interpolation(each, str(key)) for each in (default, config))
        if OmegaConf.is_missing(default, key) or all(taken_over):
            continue  # what is taken over from elsewhere is held there
        new, old, name = config.get(key), default[key], f"{prefix}{key!s}"
        if isinstance(old, DictConfig) and isinstance(new, DictConfig):
            if new.get("_target_") != old.get("_target_"):
                continue  # another option, with settings of its own
            _check_types(new, old, f"{name}.")
        elif isinstance(old, DictConfig):
            raise FedgenError(name, f"cannot be {new!r}", "override the settings inside of it")
        elif isinstance(new, int) and abs(new) >= 2**63 and name != "seed":
            raise FedgenError(name, f"cannot be {new}", "lower it")
        elif name in _NUMBER_OR_NULL:
            if new is not None and not _is_number(new):
                raise FedgenError(name, f"must be a number or null, got {new!r}", "e.g. 10")
        elif isinstance(old, ListConfig) and not isinstance(new, ListConfig):
            raise FedgenError(name, f"must be a list, got {new!r}", f"e.g. {list(old)}")
        elif name in _NUMBER_OR_WORD and isinstance(new, int | str) and not isinstance(new, bool):
            continue  # the method says which words
        elif name in _SWITCH_OR_AUTO:
            if not isinstance(new, bool):
                raise FedgenError(name, f"cannot be {new!r}", "choose true, false or auto")
        elif isinstance(old, bool) != isinstance(new, bool):
            raise FedgenError(name, f"cannot be {new!r}", f"the default is {old!r}")
        elif isinstance(old, int) and not isinstance(new, int):
            raise FedgenError(name, f"must be a whole number, got {new!r}", f"default {old}")
        elif isinstance(old, float) and not _is_number(new):
            raise FedgenError(name, f"must be a number, got {new!r}", f"default {old}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _in_one_line(error: Exception, name: str, overrides: Sequence[str] = ()) -> FedgenError:
    """Hydra's error as key, problem, remedy."""
    text = str(error)
    option = re.search(r"Could not find '([\w/]+)/([^'/]+)'", text)
    if option:
        known = re.findall(r"^\t(\S+)$", text, re.MULTILINE)
        near = difflib.get_close_matches(option[2], known, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        remedy = f"{hint}choose {', '.join(known)}; yours: FEDGEN_EXTENSIONS=PACKAGE"
        return FedgenError(option[1], f"there is no {option[2]!r}", remedy)
    key = re.search(r"Could not override '([^']+)'|Key '([^']+)' is not in struct", text)
    if key:
        wrong = key[1] or key[2]
        known = [each for each in _known_keys(name, overrides) if each != wrong]
        near = difflib.get_close_matches(wrong, known, 1)
        remedy = f"did you mean {near[0]}?" if near else "see fedgen --help, or --cfg for all"
        return FedgenError(wrong, "is no setting", remedy)
    return FedgenError("override", text.splitlines()[0], "see fedgen --help")


def _known_keys(name: str, overrides: Sequence[str]) -> list[str]:
    """Of the groups that are chosen."""
    kept = {*_groups(), "hydra.searchpath"}
    chosen = [w for w in overrides if _key(w) in kept and not w.partition("=")[2].startswith("{")]
    config, _ = _composed(name, tuple(chosen), _edited())

    def walk(part: DictConfig, prefix: str) -> list[str]:
        keys = []
        for key in part:
            keys.append(f"{prefix}{key!s}")
            if not OmegaConf.is_missing(part, key) and isinstance(part[key], DictConfig):
                keys += walk(part[key], f"{prefix}{key!s}.")
        return keys

    return walk(config, "")
