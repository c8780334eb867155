"""Check settings against the parameters that their functions declare.

The settings of a function are its parameters, except the arguments of the call: for groups,
``registry.CALL_ARGUMENTS``; for functions in a method, e.g. networks, the parameters of the
protocol by which the method declares them (``fedgen/models/factories.py``).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from annotated_types import BaseMetadata, Gt, Lt
from omegaconf import DictConfig, OmegaConf
from pydantic import (
    AllowInfNan,
    BeforeValidator,
    Strict,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from fedgen.config import registry
from fedgen.config.constraints import missing_count
from fedgen.config.explain import explain
from fedgen.config.schema import Text
from fedgen.errors import FedgenError


def check_functions(config: DictConfig) -> None:
    """Check the settings of the functions that determine a run.

    Raises:
        FedgenError: see ``check_parameters``.
    """
    for place in ("method", "warm_up.method", "data", "partition"):
        settings = OmegaConf.select(config, place)
        if settings is not None:
            check_parameters(settings, place)


def check_parameters(settings: DictConfig | Mapping[str, Any], place: str) -> None:
    """Check the settings of a group, and those of functions in it, at any depth.

    Args:
        place: key of the group, e.g. ``method``.

    Raises:
        FedgenError: for a setting that is missing, unknown, or of another type or range; for a
            function that does not fit the arguments that it gets there.
    """
    plain: Mapping[str, Any] = settings
    if isinstance(settings, DictConfig):
        plain = registry.to_plain(settings)
    group = registry.group_of(place)
    apart = ("type", *registry.NOT_BOUND.get(group, ()))
    function_settings = {name: value for name, value in plain.items() if name not in apart}
    function = registry.load(plain["type"], place)
    declared = parameters(function)
    is_optional = type(None) in typing.get_args(declared.hints.get("rows"))
    if "rows" in function_settings and function_settings["rows"] is None and not is_optional:
        raise missing_count("public_rows", f"{place}.rows requires it")
    supplied = registry.CALL_ARGUMENTS.get(group)
    arguments: Set[str] | None = None
    if isinstance(supplied, int):  # by position, whatever their names
        arguments = declared.hints.keys() & [*inspect.signature(function).parameters][:supplied]
    elif supplied is not None:
        arguments = supplied
    check_function(function, plain["type"], function_settings, place, arguments)
    if group == "method" and isinstance(plain.get("strategy"), Mapping):
        check_parameters(plain["strategy"], f"{place}.strategy")


def check_function(
    function: Callable[..., Any],
    word: str,
    settings: Mapping[str, Any],
    place: str,
    arguments: Set[str] | None,
) -> None:
    """Check the settings of a function; see ``check_parameters``.

    Args:
        word: name of the function in settings.
        arguments: names of the other arguments of the call; None: unknown.
    """
    declared = parameters(function)
    not_accepted = sorted((arguments or set()) - declared.hints.keys())
    if not_accepted and not declared.accepts_any_argument:
        problem = f"{word} does not accept the argument {not_accepted[0]!r}, which it is passed"
        raise FedgenError(f"{place}.type", problem, "choose another type")
    missing = [name for name in declared.required if name not in {*settings, *(arguments or ())}]
    if missing and arguments is not None:
        key, problem = f"{place}.{missing[0]}", f"is missing but required by {word}"
        raise FedgenError(key, problem, f"add +{key}=VALUE, or choose another type")
    settable = {n: hint for n, hint in declared.hints.items() if n not in (arguments or ())}
    unknown = [name for name in settings if name in (arguments or ())]
    if not declared.accepts_any_setting:
        unknown += [name for name in settings if name not in settable]
    if unknown:
        remedy = f"choose one of {', '.join(settable)}" if settable else "leave it out"
        raise FedgenError(f"{place}.{unknown[0]}", f"is not a setting of {word}", remedy)
    try:
        _validator(function).validate_python(settings)
    except ValidationError as error:
        raise explain(error, settings, place) from None
    for name, value in settings.items():
        _check_nested(value, f"{place}.{name}", _arguments_of(settable.get(name)))


def _check_nested(value: Any, place: str, arguments: Set[str] | None) -> None:
    """Check the settings of functions in a value."""
    if isinstance(value, list):
        for number, entry in enumerate(value):
            _check_nested(entry, f"{place}[{number}]", arguments)
    elif isinstance(value, dict) and "type" in value:
        settings = {name: entry for name, entry in value.items() if name != "type"}
        check_function(
            registry.load(value["type"], place), value["type"], settings, place, arguments
        )
    elif isinstance(value, dict):
        for name, entry in value.items():
            _check_nested(entry, f"{place}.{name}", None)


@dataclass(frozen=True)
class Parameters:
    """Parameters of a function.

    hints: declared types by name; Any if there is none.
    required: names of those without a default.
    accepts_any_argument: whether it has ``**kwargs``.
    accepts_any_setting: likewise; but ``**_`` of fedgen's own functions ignores arguments that they
        do not need, and accepts no settings.
    """

    hints: Mapping[str, Any]
    required: tuple[str, ...]
    accepts_any_argument: bool
    accepts_any_setting: bool


@functools.cache
def parameters(function: Callable[..., Any]) -> Parameters:
    """Return the parameters of a function or class."""
    hints: dict[str, Any] = {}
    required: list[str] = []
    accepts_any_argument = accepts_any_setting = False
    declared = _hints(function)
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some classes in C
        return Parameters({}, (), accepts_any_argument=True, accepts_any_setting=True)
    for parameter in signature.parameters.values():
        hint = declared.get(parameter.name, Any)
        if parameter.kind is parameter.VAR_KEYWORD and typing.get_origin(hint) is typing.Unpack:
            packed = typing.get_args(hint)[0]
            hints |= typing.get_type_hints(packed, include_extras=True)
            required += sorted(packed.__required_keys__)
        elif parameter.kind is parameter.VAR_KEYWORD:
            accepts_any_argument = True
            is_own = function.__module__.startswith("fedgen.")
            accepts_any_setting = parameter.name != "_" or not is_own
        elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            hints[parameter.name] = hint
            if parameter.default is parameter.empty:
                required.append(parameter.name)
    return Parameters(hints, tuple(required), accepts_any_argument, accepts_any_setting)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations that can be resolved: one that names a type imported for type checkers
    only leaves its own parameter unchecked."""
    hints: dict[str, Any] = {}
    target = function.__init__ if inspect.isclass(function) else inspect.unwrap(function)
    scope = getattr(target, "__globals__", {})
    for name, annotation in getattr(target, "__annotations__", {}).items():
        single = types.SimpleNamespace(__annotations__={name: annotation})
        with contextlib.suppress(AttributeError, NameError, SyntaxError, TypeError):
            hints |= typing.get_type_hints(single, scope, include_extras=True)
    return hints


@functools.cache
def _validator(function: Callable[..., Any]) -> TypeAdapter[Any]:
    """Return the validator of the settings of a function."""
    hints = parameters(function).hints
    fields = {name: NotRequired[_type_of_setting(hint)] for name, hint in hints.items()}
    settings: Any = TypedDict("Settings", fields)  # type: ignore[misc]
    return TypeAdapter(settings)


def _type_of_setting(hint: Any) -> Any:
    """Return the strict pydantic type of a setting: floats are finite, and numbers without declared
    limits are positive. Types other than those of settings files are not checked."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_type_of_setting, inside))]  # noqa: UP007
    kind, *limits = inside if origin is Annotated else (hint,)
    limits = [limit for limit in limits if isinstance(limit, BaseMetadata)] or [Gt(0)]
    if kind is int:
        return Annotated[int, Strict(), Lt(2**63), *limits]
    if kind is float:
        return Annotated[float, Strict(), AllowInfNan(allow_inf_nan=False), *limits]
    if kind is str:
        return Annotated[Text, Strict()]
    if kind is bool:
        return Annotated[bool, Strict()]
    if origin is Annotated:
        return _type_of_setting(kind)
    if origin is tuple and Ellipsis in inside:
        return list[_type_of_setting(inside[0])]  # type: ignore[misc]
    if origin is tuple:
        return tuple[tuple(map(_type_of_setting, inside))]  # type: ignore[misc]
    if origin in (list, Sequence):
        return list[_type_of_setting(inside[0])]  # type: ignore[misc]
    if origin in (dict, Mapping):
        return dict[str, _type_of_setting(inside[1])]  # type: ignore[misc]
    if origin is Callable or _is_protocol(hint):
        return Annotated[Any, BeforeValidator(_require_group)]
    return hint if origin is Literal or hint is type(None) else Any


def _require_group(value: Any) -> Any:
    if not isinstance(value, dict) or "type" not in value:
        raise PydanticCustomError("group", "is not a group of settings")
    return value


def _is_protocol(hint: Any) -> bool:
    return bool(getattr(hint, "_is_protocol", False))


def _arguments_of(hint: Any) -> frozenset[str] | None:
    """Return the names of the arguments that a method passes to a function of its settings, by the
    type that it declares; None if that does not name them."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        member_arguments = [_arguments_of(member) for member in typing.get_args(hint)]
        return next((arguments for arguments in member_arguments if arguments is not None), None)
    if _is_protocol(hint):
        return frozenset(inspect.signature(hint.__call__).parameters) - {"self"}
    if typing.get_origin(hint) is Callable and typing.get_args(hint)[:1] == ([],):
        return frozenset()
    return None
