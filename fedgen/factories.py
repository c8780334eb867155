"""What a configuration may have called, by name: what fedgen's own configurations name, and what is
in a package that the environment declares.

Hydra calls whatever ``_target_`` names. Files that somebody hands over, run directories, published
generators, matrices, are data: nothing in them may name what is called but out of this list. It is
checked before anything is imported. ``FEDGEN_EXTENSIONS``, packages with commas in between, adds
the user's own; no file can.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import configs
from fedgen.errors import FedgenError

_NAMED = re.compile(r"^\s*(?:_target_|model): *([\w.]+) *$", re.MULTILINE)


@functools.cache
def own() -> frozenset[str]:
    """The full names of all that fedgen's own configurations have called."""
    files = Path(configs.__path__[0]).rglob("*.yaml")
    return frozenset(name for file in files for name in _NAMED.findall(file.read_text()))


def may_call(name: object) -> bool:
    """Whether a configuration may name this."""
    declared = os.environ.get("FEDGEN_EXTENSIONS", "").split(",")
    return name in own() or (isinstance(name, str) and name.partition(".")[0] in declared)


def check(settings: object, key: str) -> None:
    """Holds all that is to be called, however deep inside of ``settings``, against the list.

    Args:
        settings: plain dictionaries and lists.
        key: their place in the configuration, for the error.

    Raises:
        FedgenError: for a name that is not on it.
    """
    for place, name in _named(settings, key):
        if not may_call(name):
            raise FedgenError(
                place,
                f"{name!r} is not fedgen's",
                "if it is yours, declare its package: FEDGEN_EXTENSIONS=PACKAGE fedgen ...",
            )


def _named(settings: object, key: str) -> Iterator[tuple[str, object]]:
    if isinstance(settings, dict):
        if "_target_" in settings:
            yield f"{key}._target_", settings["_target_"]
        for name, each in settings.items():
            yield from _named(each, f"{key}.{name}")
    elif isinstance(settings, list):
        for number, each in enumerate(settings):
            yield from _named(each, f"{key}[{number}]")
