"""What a configuration may have called, by name: what fedgen's own configurations name, and what is
in a package that the environment declares.

Hydra calls whatever ``_target_`` names. Files that somebody hands over, run directories, published
generators, matrices, are data: nothing in them may name what is called but out of this list, and
each name where a setting of its group stands: a method's settings name no runtime. It is checked
before anything is imported. The user's own packages are added by the environment: by the variable
``FEDGEN_EXTENSIONS`` (names with commas in between; they may lie in the working directory), or by
being installed with an entry point in the group ``fedgen.extensions``. No file can. What such a
package has in ``configs/`` is found as fedgen's own settings are.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from fedgen.errors import FedgenError

CONFIGS = Path(__file__).parent / "configs"
_NAMED = re.compile(r"^\s*(?:_target_|model): *([\w.]+) *$", re.MULTILINE)
_PARTS, _CALLS = re.compile(r"[.\[\]]+"), ("_target_", "_partial_")
_OF_PARTS = ("method", "evaluation")
"""Groups whose settings have settings inside that are built, too."""


def own() -> frozenset[str]:
    """The full names of all that fedgen's own configurations have called."""
    return frozenset().union(*_by_group().values())


@functools.cache
def _by_group() -> dict[str, frozenset[str]]:
    found = {}
    for folder in CONFIGS.iterdir():
        files = folder.rglob("*.yaml")
        found[folder.name] = frozenset(
            n for file in files for n in _NAMED.findall(file.read_text())
        )
    return found


def extensions() -> tuple[str, ...]:
    """The packages that the environment declares; importable from here on, and in processes that
    this one starts.

    Raises:
        FedgenError: if there is no such package.
    """
    return _found(os.environ.get("FEDGEN_EXTENSIONS", ""))


@functools.cache
def _found(declared: str) -> tuple[str, ...]:
    named = [name.strip() for name in declared.split(",") if name.strip()]
    here = str(Path.cwd())
    for name in named:
        if importlib.util.find_spec(name) is None and Path(here, name).is_dir():
            sys.path.append(here)
            paths = [os.environ.get("PYTHONPATH", ""), here]
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if importlib.util.find_spec(name) is None:
            problem = f"there is no package {name!r}"
            raise FedgenError("FEDGEN_EXTENSIONS", problem, "go where it lies, or install it")
    installed = (point.value for point in entry_points(group="fedgen.extensions"))
    return tuple(dict.fromkeys([*named, *installed]))


def places() -> list[Path]:
    """Folders of settings: fedgen's own, and those of extensions."""
    found = [CONFIGS]
    for name in extensions():
        spec = importlib.util.find_spec(name)
        inside = list(spec.submodule_search_locations or []) if spec else []
        found += [Path(each, "configs") for each in inside if Path(each, "configs").is_dir()]
    return found


def may_call(name: object, place: str) -> bool:
    """Whether a configuration may name this at a place, e.g. ``method.loss._target_``."""
    group, *inside = place.split(".")
    group = "method" if group == "warm_up" else group  # which has methods, too
    known = _by_group().get(group, frozenset()) if len(inside) == 1 or group in _OF_PARTS else ()
    return isinstance(name, str) and (name in known or is_outside(name))


def is_outside(name: object) -> bool:
    """Whether this is of an extension."""
    return isinstance(name, str) and name.partition(".")[0] in extensions()


def outside(settings: object) -> list[str]:
    """What of extensions is to be called, however deep inside of ``settings``."""
    return sorted({str(name) for _, name in _named(settings, "") if is_outside(name)})


def raised_in(error: Exception) -> str | None:
    """The last of an extension's lines that an error came through; None if it came through none."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_outside(frame.f_globals.get("__name__")):
            code = frame.f_code
            found = f"{Path(code.co_filename).name}, line {line}, in {code.co_name}"
    return found


def check(settings: object, key: str) -> None:
    """Holds all that is to be called, however deep inside of ``settings``, against the list.

    Hydra resolves what it calls once more: text that has ``${`` could become a name after it was
    looked at, and so is refused.

    Args:
        settings: plain dictionaries and lists, resolved.
        key: their place in the configuration; empty for a whole one.

    Raises:
        FedgenError: for a name that is not on it, or not at that place; for ``${``; for a key that
            tells Hydra how to call.
    """
    for place, name in _named(settings, key):
        if may_call(name, place):
            continue
        if isinstance(name, str) and name in own():
            raise FedgenError(place, f"{name!r} does not belong there", "leave it out")
        if f"fedgen.{name}" in own():
            problem = f"{name!r} was renamed to 'fedgen.{name}'"
            raise FedgenError(place, problem, "use the new name in settings of your own")
        raise FedgenError(
            place,
            f"{name!r} is not fedgen's",
            "if it is yours, declare its package: FEDGEN_EXTENSIONS=PACKAGE fedgen ...",
        )
    for place, value in _leaves(settings, key):
        if isinstance(value, str) and "${" in value:
            raise FedgenError(place, "has ${ in it", "leave it out")
        if any(part.startswith("_") and part not in _CALLS for part in _PARTS.split(place)):
            raise FedgenError(place, "is not a setting", "leave it out")


def _leaves(settings: object, key: str) -> Iterator[tuple[str, object]]:
    if isinstance(settings, dict) and settings:
        for name, each in settings.items():
            yield from _leaves(each, f"{key}.{name}" if key else str(name))
    elif isinstance(settings, list) and settings:
        for number, each in enumerate(settings):
            yield from _leaves(each, f"{key}[{number}]")
    else:
        yield key, settings


def _named(settings: object, key: str) -> Iterator[tuple[str, object]]:
    if isinstance(settings, dict):
        inside = f"{key}." if key else ""
        if "_target_" in settings:
            yield f"{inside}_target_", settings["_target_"]
        for name, each in settings.items():
            yield from _named(each, f"{inside}{name}")
    elif isinstance(settings, list):
        for number, each in enumerate(settings):
            yield from _named(each, f"{key}[{number}]")
