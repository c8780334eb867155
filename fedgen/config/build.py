"""Bind settings to the functions that they select."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from omegaconf import DictConfig

from fedgen.config import registry
from fedgen.config.parameters import check_parameters


def build(config: DictConfig | dict[str, Any], place: str) -> Callable[..., Any]:
    """Return the function of a group with its settings bound, to be called with the arguments
    ``registry.CALL_ARGUMENTS``. Nested settings with a ``type`` are bound likewise.

    Raises:
        FedgenError: for a type that is not registered for its place, or an invalid setting.
    """
    settings = registry.to_plain(config) if isinstance(config, DictConfig) else config
    registry.check(settings, place)
    check_parameters(settings, place)
    not_bound = registry.NOT_BOUND.get(registry.group_of(place), ())
    function_settings = {name: value for name, value in settings.items() if name not in not_bound}
    function: Callable[..., Any] = _bind(function_settings, place)
    return function


def _bind(settings: Any, place: str) -> Any:
    if isinstance(settings, list):
        return [_bind(entry, f"{place}[{number}]") for number, entry in enumerate(settings)]
    if not isinstance(settings, dict):
        return settings
    bound = {name: _bind(value, f"{place}.{name}") for name, value in settings.items()}
    if "type" not in bound:
        return bound
    return partial(registry.load(bound.pop("type"), place), **bound)
