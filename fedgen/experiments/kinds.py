"""What kind of value a setting takes: its default's; or, where that does not tell all, its type as
it is declared here.

What a method's own settings may be is declared by its function, and ``building.py`` holds them
against it: here a word may stand for a number of a method's.
"""

from __future__ import annotations

import typing
from types import NoneType
from typing import Any, Literal, TypedDict

from omegaconf import DictConfig, ListConfig, OmegaConf

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
    transport: Literal["float32", "float16"]
    timeout: float | None
    masks: bool | Literal["auto"]


class Audit(TypedDict):
    """Of ``configs/audit.yaml``."""

    noise_multiplier: float | None


class ByFunction:
    """Settings whose types the functions declare that they are for."""


class Settings(TypedDict):
    """Of all commands."""

    device: Literal["auto", "cpu", "cuda"]
    method: ByFunction
    warm_up: ByFunction
    privacy: Privacy
    runtime: Runtime
    audit: Audit
    output: Literal["words", "json"]
    audience: Literal["server", "public"]


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
        if OmegaConf.is_missing(default, key) or all(taken_over):
            continue  # what is taken over from elsewhere is held there
        new, old, name = config.get(key), default[key], f"{prefix}{key!s}"
        if isinstance(old, DictConfig) and isinstance(new, DictConfig):
            if new.get("_target_") == old.get("_target_"):  # else with settings of its own
                inside = declared if by_function else types.get(str(key))
                check_kinds(new, old, inside, f"{name}.")
        elif isinstance(old, DictConfig):
            raise FedgenError(name, f"cannot be {new!r}", "override the settings inside of it")
        elif isinstance(new, int) and abs(new) >= 2**63 and name != "seed":
            raise FedgenError(name, f"cannot be {new}", "lower it")
        elif key in types:
            _check_declared(name, new, types[str(key)])
        elif by_function and _is_number(old) and isinstance(new, str):
            continue  # the function says which words
        else:
            _check_like(name, new, old)


def _check_declared(name: str, value: Any, declared: Any) -> None:
    """A type is one of words, or a union of such, numbers, switches and None."""
    kinds = typing.get_args(declared) if typing.get_origin(declared) is not Literal else (declared,)
    words = [word for each in kinds for word in typing.get_args(each)]
    if bool in kinds:
        words = ["true", "false", *words]
    fits = (
        (isinstance(value, str) and value in words)
        or (isinstance(value, bool) and bool in kinds)
        or (value is None and NoneType in kinds)
        or (_is_number(value) and float in kinds)
    )
    if fits:
        return
    if words:
        raise FedgenError(name, f"cannot be {value!r}", f"choose {' or '.join(words)}")
    raise FedgenError(name, f"must be a number or null, got {value!r}", "e.g. 10")


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
