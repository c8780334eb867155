"""Whether settings have values, and of which kind: the default's; or, where that does not tell all,
the type that is declared here.

What a method's own settings may be is declared by its function, and ``building.py`` holds them
against it: here a word may stand for a number of a method's.
"""

from __future__ import annotations

import typing
from types import UnionType
from typing import Any, Literal, TypedDict

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedgen.errors import FedgenError


class Privacy(TypedDict):
    """Of ``configs/privacy/``. None: as the method was published."""

    adversary: Literal["server", "release"]
    aggregation: Literal["local", "secure", "trusted"] | None
    unit: Literal["record", "client", "person"] | None
    noise: Literal["seeded", "secure"]
    target_epsilon: float | None
    noise_multiplier: float | None
    budget_epsilon: float | None


class Runtime(TypedDict):
    """Of ``configs/runtime/`` and ``configs/config.yaml``."""

    store: Literal["memory", "disk"]
    timeout: float | None
    masks: bool | Literal["auto"]


SAME_ON_EVERY_RUNTIME = ("threads", "min_success", "masks", "faults")
"""Settings of the runtime group that a run's bits and its privacy depend on."""


class Audit(TypedDict):
    """Of ``configs/audit.yaml``."""

    noise_multiplier: float | None


class Data(TypedDict):
    """Of ``configs/data/``."""

    root: str | None
    path: str | list[str] | None
    classes: int | None
    size: int | None
    channels: int | None
    public_rows: int | None


class Evaluation(TypedDict):
    """Of ``configs/evaluation/``."""

    inception_weights: str | None
    jobs: int | None


class ByFunction:
    """Settings whose types the functions declare that they are for."""


class WarmUp(TypedDict):
    """Of ``configs/warm_up/``."""

    method: ByFunction
    noise_multiplier: float


class Settings(TypedDict):
    """Of all commands."""

    device: Literal["auto", "cpu", "cuda"]
    method: ByFunction
    warm_up: WarmUp
    data: Data
    privacy: Privacy
    runtime: Runtime
    evaluation: Evaluation
    audit: Audit
    budget_epsilon: float | None
    run_dir: str | None
    resume: str | None
    start: str | None
    run: str | None
    runs: str | list[str]
    samples: str | None
    out: str
    home: str
    kind: Literal["sums", "dp_sgd"]
    superlink: str | None
    accept: str | None
    ca: str
    key: str
    policy: str
    host: str
    name: str | None
    output: Literal["words", "json"]
    audience: Literal["server", "public"]


_PLAIN = (bool, int, float, str)
_OPEN = ("method", "warm_up", "evaluation.classifiers")  # files of settings need not name all there


def check_whole(config: DictConfig) -> None:
    """Raises FedgenError where a value follows from another that there is not, or is not given."""
    try:
        OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        problem = str(error).splitlines()[0]
        raise FedgenError(error.full_key or "override", problem, "correct it") from error
    if missing := sorted(OmegaConf.missing_keys(config)):
        raise FedgenError(missing[0], "is not given", f"add {missing[0]}=...")


def check_known(config: DictConfig, default: DictConfig) -> None:
    """Raises FedgenError for a setting that there is none of: ``+key=value`` adds any. What a
    function takes is held against the function (``building.py``)."""

    def check(new: dict[str, Any], old: dict[str, Any], prefix: str) -> None:
        for key, value in new.items():
            name = f"{prefix}{key}"
            if key not in old:
                raise FedgenError(name, "is not a setting", "see fedgen --help, or --cfg for all")
            known = old[key]
            same = isinstance(value, dict) and isinstance(known, dict)
            if same and name not in _OPEN and value.get("_target_") == known.get("_target_"):
                check(value, known, f"{name}.")

    new, old = (OmegaConf.to_container(each) for each in (config, default))
    check(new, old, "")  # type: ignore[arg-type]


def check_kinds(
    config: DictConfig, default: DictConfig, declared: Any = Settings, prefix: str = ""
) -> None:
    """Holds each value against its declared type, or against its default: numbers stay numbers.

    Raises:
        FedgenError: for the first that is of another kind.
    """
    by_function = declared is ByFunction
    types = typing.get_type_hints(declared) if declared and not by_function else {}
    for key in default:
        taken_over = (OmegaConf.is_interpolation(each, str(key)) for each in (default, config))
        kind = types.get(str(key), ByFunction)
        is_told = not isinstance(kind, type) or kind in _PLAIN
        asked = OmegaConf.is_missing(default, key)
        if (asked and not is_told) or all(taken_over):
            continue  # what is taken over from elsewhere is held there
        name = f"{prefix}{key!s}"
        if key not in config or OmegaConf.is_missing(config, key):
            raise FedgenError(name, "is missing", "restore it")
        new, old = config[key], None if asked else default[key]
        if asked and new is None:
            raise FedgenError(name, "is not given", f"add {name}=...")
        if isinstance(new, str) and "\0" in new:
            raise FedgenError(name, "has a zero byte in it", "leave it out")
        if isinstance(old, DictConfig) and isinstance(new, DictConfig):
            if "_target_" in old and "_target_" not in new:
                raise FedgenError(f"{name}._target_", "is missing", "restore it")
            if new.get("_target_") == old.get("_target_"):  # else with settings of its own
                if new.get("_partial_") != old.get("_partial_"):
                    raise FedgenError(f"{name}._partial_", "is not the default", "restore it")
                inside = declared if by_function else types.get(str(key))
                check_kinds(new, old, inside, f"{name}.")
        elif isinstance(old, DictConfig):
            raise FedgenError(name, f"cannot be {new!r}", "override the settings inside of it")
        elif isinstance(new, int) and abs(new) >= 2**63 and name != "seed":
            raise FedgenError(name, f"cannot be {new}", "lower it")
        elif is_told:
            _check_declared(name, new, kind)
        elif by_function and _is_number(old) and isinstance(new, str):
            continue  # the function says which words
        else:
            _check_like(name, new, old)


def _check_declared(name: str, value: Any, declared: Any) -> None:
    """A type is one of words, or a union of such, numbers, switches, texts and None."""
    several = typing.get_origin(declared) in (typing.Union, UnionType)
    kinds = typing.get_args(declared) if several else (declared,)
    words = [word for each in kinds for word in typing.get_args(each) if isinstance(word, str)]
    if any(_is(value, each) for each in kinds):
        return
    if words:
        words = ["true", "false", *words] if bool in kinds else words
        raise FedgenError(name, f"cannot be {value!r}", f"choose {' or '.join(words)}")
    if str in kinds:
        remedy = f"""quote it: {name}="'{value}'" """.strip() if _is_number(value) else "e.g. name"
        raise FedgenError(name, f"must be text, got {value!r}", remedy)
    kind = "a number" if float in kinds else "a whole number"
    raise FedgenError(name, f"must be {kind} or null, got {value!r}", "e.g. 32")


def _is(value: Any, kind: Any) -> bool:
    """Whether a value of a configuration is of a kind."""
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if typing.get_origin(kind) is list:
        return isinstance(value, ListConfig) and all(isinstance(each, str) for each in value)
    if kind is float:
        return _is_number(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _check_like(name: str, new: Any, old: Any) -> None:
    """A value that overrides a default is of its kind; None tells nothing."""
    if isinstance(old, ListConfig) and not isinstance(new, ListConfig):
        raise FedgenError(name, f"must be a list, got {new!r}", f"e.g. {list(old)}")
    if isinstance(old, bool) != isinstance(new, bool):
        raise FedgenError(name, f"cannot be {new!r}", f"the default is {old!r}")
    if isinstance(old, int) and not isinstance(new, int):
        raise FedgenError(name, f"must be a whole number, got {new!r}", f"default {old}")
    if isinstance(old, float) and not _is_number(new):
        raise FedgenError(name, f"must be a number, got {new!r}", f"default {old}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
