"""Settings to what they are settings of, and whether they fit the types that it declares."""

from __future__ import annotations

import inspect
import logging
import math
import os
import traceback
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import torch
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from fedgen import factories
from fedgen.errors import FedgenError
from fedgen.parameters import POSITIVE, Range

logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # what it says comes as an error too


def plain(config: DictConfig) -> dict[str, Any]:
    """Settings as plain values."""
    found: Any = OmegaConf.to_container(config, resolve=True)
    return {str(name): value for name, value in found.items()}


def build(
    config: DictConfig | dict[str, Any], key: str, without: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """The ``_target_`` of a group with its settings filled in, to be called with the rest.

    Raises:
        FedgenError: for one that may not be called (``fedgen.factories``), named by ``key``.
    """
    whole = plain(config) if isinstance(config, DictConfig) else config
    settings = {name: value for name, value in whole.items() if name not in without}
    factories.check(settings, key)
    _check_names(settings, key)
    target: Callable[..., Any] = instantiate(settings, _partial_=True, _convert_="all")
    return target


def _check_names(settings: dict[str, Any], key: str) -> None:
    """Raises FedgenError for a setting that its factory, or one inside, does not take."""
    for name, value in settings.items():
        if isinstance(value, dict):
            _check_names(value, f"{key}.{name}")
    if "_target_" in settings:
        target = _loaded(settings["_target_"], key)
        taken = list(inspect.signature(target).parameters.values())
        names = [each.name for each in taken if each.kind is not each.VAR_KEYWORD]
        unpacked = _unpacked(target)
        if len(names) < len(taken) and not unpacked:
            return  # takes whatever there is
        names += unpacked
        for name in settings:
            if name not in names and name not in ("_target_", "_partial_"):
                remedy = f"choose of: {', '.join(names)}"
                raise FedgenError(f"{key}.{name}", "is not a setting", remedy)


def _loaded(name: str, key: str) -> Any:
    """What ``name`` stands for.

    Raises:
        FedgenError: if there is nothing of this name, or its module cannot be imported.
    """
    try:
        return get_object(name)
    except ImportError as error:
        cause = error.__cause__ or error
        place = traceback.extract_tb(cause.__traceback__)[-1]
        at = f" ({place.filename}, line {place.lineno})"
        at = "" if isinstance(cause, SyntaxError) else at  # it says so itself
        problem = f"{name} cannot be imported: {type(cause).__name__}: {cause}{at}"
        raise FedgenError(f"{key}._target_", problem, "mend it") from error


def _unpacked(target: Any) -> dict[str, Any]:
    """The types of what a function takes as ``**name: Unpack[...]``."""
    hints = typing.get_type_hints(target) if inspect.isfunction(target) else {}
    packed = [hint for hint in hints.values() if typing.get_origin(hint) is typing.Unpack]
    found: dict[str, Any] = {}
    for hint in packed:
        found |= typing.get_type_hints(typing.get_args(hint)[0], include_extras=True)
    return found


def device(name: str) -> str:
    """``auto`` is CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise FedgenError("device", "cuda is not available here", "set device=cpu")
        _repeatable()
    return name


def _repeatable() -> None:
    """Kernels of CUDA that sum in the same order each time: a seeded run repeats bit for bit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (no stubs)


def check_parameters(key: str, settings: DictConfig) -> None:
    """Holds settings, and those inside of them, against the types of what they are for."""
    if "rows" in settings and settings.rows is None:
        raise FedgenError(
            "data.public_rows",
            f"is not set, and {key}.rows divides by a public number of rows",
            "give a round one near yours, as fedgen data check proposes: it is no secret then",
        )
    target = settings.get("_target_")
    made = _loaded(target, key) if target is not None else None
    found = {**_hints(made), **_unpacked(made)}
    for name, value in settings.items():
        if not str(name).startswith("_"):
            _check_parameter(f"{key}.{name!s}", value, found.get(str(name)))


def _hints(made: Any) -> dict[str, Any]:
    """The types of a function's parameters, or of what a class is made of."""
    try:
        declared = made.__init__ if inspect.isclass(made) else made
        return typing.get_type_hints(declared, include_extras=True)
    except (AttributeError, NameError, TypeError):  # of one that declares none
        return {}


def _check_parameter(key: str, value: Any, hint: Any) -> None:
    """Holds a method's parameter against its type: one of its words, a number of its range, or a
    list of such."""
    kinds = _kinds(hint)
    literals = [each for each in kinds if typing.get_origin(each) is Literal]
    words = [str(word) for literal in literals for word in typing.get_args(literal)]
    if words and value not in words and (kinds == literals or isinstance(value, str)):
        others = [] if kinds == literals else ["a number"]
        raise FedgenError(key, f"cannot be {value!r}", f"choose {' or '.join(others + words)}")
    if isinstance(value, str) and not words and {int, float} & set(kinds):
        raise FedgenError(key, f"must be a number, got {value!r}", "correct it")
    if isinstance(value, DictConfig):
        check_parameters(key, value)
    elif any(typing.get_origin(each) is Callable for each in kinds):
        if value is not None:
            raise FedgenError(key, f"cannot be {value!r}", "it is a group of settings")
    elif isinstance(value, ListConfig):
        _check_list(key, list(value), hint)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if int in kinds and float not in kinds and value != int(value):
            raise FedgenError(key, f"must be a whole number, got {value:g}", "round it")
        _check_range(key, value, hint)


def _kinds(hint: Any) -> list[Any]:
    """What a value of a type may be: itself, or each of a union, without what is said of it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [kind for each in typing.get_args(hint) for kind in _kinds(each)]
    return [hint.__origin__ if typing.get_origin(hint) is Annotated else hint]


def _range(hint: Any) -> Range:
    """What a type, or one of a union, says of its numbers."""
    inside = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inside = tuple(_range(each) for each in inside if typing.get_origin(each) is Annotated)
    return next((each for each in inside if isinstance(each, Range)), POSITIVE)


def _check_list(key: str, values: list[Any], hint: Any) -> None:
    """Two numbers, or as many as there are where the type is a sequence."""
    if len(values) != 2 and typing.get_origin(hint) is not Sequence:
        raise FedgenError(key, f"must be two numbers, got {values}", "e.g. [0.5, 0.9]")
    inside = next(iter(typing.get_args(hint)), None)
    whole = int in _kinds(inside)
    for each in values:
        if not isinstance(each, int if whole else int | float) or isinstance(each, bool):
            kind = "whole numbers" if whole else "numbers"
            raise FedgenError(key, f"must be {kind}, got {each!r}", "correct it")
        _check_range(key, each, inside)


def _check_range(key: str, value: float, hint: Any) -> None:
    allowed = _range(hint)
    if not math.isfinite(value):
        raise FedgenError(key, f"must be finite, got {value:g}", "take a number")
    if value < 0 or (value == 0 and allowed.open):
        least = "positive" if allowed.open else "0 or more"
        raise FedgenError(key, f"must be {least}, got {value:g}", "raise it")
    if value < allowed.least:
        raise FedgenError(key, f"must be at least {allowed.least:g}, got {value:g}", "raise it")
    if value >= allowed.below:
        raise FedgenError(key, f"must be below {allowed.below:g}, got {value:g}", "lower it")
