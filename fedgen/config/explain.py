"""Convert validation errors of pydantic to errors of one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fedgen.config.extensions import config_folders
from fedgen.errors import FedgenError

MAX_SHOWN = 200  # characters of a value shown in an error
_NUMBERS = ("int_type", "int_from_float", "float_type")
_FIXED = {
    "missing": ("is missing", "restore it, or add it with +KEY=VALUE"),
    "extra_forbidden": ("is not a setting", "see fedgen --help, or --cfg for all"),
    "string_pattern_mismatch": ("contains a zero byte", "remove it"),
}
_WRONG_TYPE = {
    "int_type": ("must be a whole number", "e.g. 32"),
    "int_from_float": ("must be a whole number", "round it"),
    "float_type": ("must be a number", "e.g. 0.5"),
    "finite_number": ("must be finite", "use a finite number"),
    "string_type": ("must be text", "e.g. name"),
    "list_type": ("must be a list", "e.g. [a,b]"),
    "tuple_type": ("must be a list", "e.g. [0.5,0.9]"),
}
_GROUPS = ("dict_type", "model_type", "group")
_LIMITS = {
    "greater_than": ("must be above {gt:g}", "raise it"),
    "greater_than_equal": ("must be at least {ge:g}", "raise it"),
    "less_than": ("must be below {lt:g}", "lower it"),
    "less_than_equal": ("must be at most {le:g}", "lower it"),
    "too_long": ("must have at most {max_length} entries", "give fewer"),
}
_REMEDIES = {
    "privacy.delta": "take one well below 1 / (number of records or clients), e.g. 1e-5",
    "runtime.min_success": "use a share of the queried clients, e.g. 0.8",
    "corruption.fraction": "give a share, e.g. 0.5",
}
"""What to do about a value out of range, where the range alone does not say it."""


def explain(error: ValidationError, settings: Any, place: str) -> FedgenError:
    """Return the first error as key, problem, remedy.

    Args:
        settings: the validated settings.
        place: their place in the configuration; empty for a whole one.
    """
    details = error.errors(include_url=False)
    first = _path(details[0], settings)
    # a union reports each of its members, and a list each of its entries
    same = [detail for detail in details if _path(detail, settings)[: len(first)] == first]
    key = ".".join(filter(None, (place, *(part for part in first if isinstance(part, str)))))
    problem, remedy = _problem(key, same)
    return FedgenError(key, problem, remedy)


def _path(error: ErrorDetails, settings: Any) -> tuple[str | int, ...]:
    """Return the location of an error without the names of types that pydantic adds."""
    path: list[str | int] = []
    for part in error["loc"]:
        inside = isinstance(settings, dict) and part in settings
        if isinstance(settings, list) and isinstance(part, int):
            inside = part < len(settings)
        if inside:
            settings = settings[part]
        elif error["type"] != "missing" or part != error["loc"][-1]:
            break
        path.append(part)
    return tuple(path)


def _problem(key: str, errors: Sequence[ErrorDetails]) -> tuple[str, str]:
    """Return the problem of a setting and its remedy."""
    words = [detail["ctx"]["expected"] for detail in errors if detail["type"] == "literal_error"]
    limits = [detail for detail in errors if detail["type"] in _LIMITS]
    others = [detail for detail in errors if detail["type"] != "literal_error"]
    error = max(limits or others or errors, key=lambda detail: len(detail["loc"]))
    kind, value = error["type"], error["input"]
    value_text = show_value(value)
    if words and not limits:
        numbers = ["a number"] if any(detail["type"] in _NUMBERS for detail in others) else []
        choices = " or ".join([*numbers, *words]).replace("'", "")
        choices = choices.replace("True", "true").replace("False", "false")
        return f"cannot be {value_text}", f"choose {choices}"
    if kind in _LIMITS:
        problem, remedy = _LIMITS[kind]
        context = error.get("ctx", {})
        of_zero = {"gt": "must be positive", "ge": "must be 0 or more"}
        problems = [
            of_zero[name] for name, limit in context.items() if name in of_zero and not limit
        ]
        problem = problems[0] if problems else problem.format(**context)
        return f"{problem}, got {value_text}", _REMEDIES.get(key, remedy)
    if kind == "string_type" and isinstance(value, int | float):
        is_list_entry = isinstance(error["loc"][-1], int)
        quoted = f"'{value}'" if is_list_entry else f"""{key}="'{value}'" """.strip()
        return f"must be text, got {value_text}", f"quote it: {quoted}"
    if kind == "missing" and isinstance(number := error["loc"][-1], int):
        return f"must have at least {number + 1} entries, got {value_text}", "give more"
    if kind in _FIXED:
        return _FIXED[kind]
    if kind in _WRONG_TYPE:
        problem, remedy = _WRONG_TYPE[kind]
        return f"{problem}, got {value_text}", remedy
    if kind == "bool_type":
        return f"cannot be {value_text}", "choose true or false"
    if kind in _GROUPS:
        option, folder = "", key.replace(".", "/")
        names = {path.stem for root in config_folders() for path in (root / folder).glob("*.yaml")}
        if names:
            option = f"choose {folder}={'|'.join(sorted(names))}, or "
        return f"cannot be {value_text}", f"it is a group of settings: {option}set {key}.NAME=VALUE"
    return f"cannot be {value_text}", error["msg"]


def show_value(value: Any) -> str:
    """Return a value as in a settings file, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)[:MAX_SHOWN]
