"""Packages that extend fedgen with methods, data sets, partitions and classifiers.

Only the environment declares them: the variable ``FEDGEN_EXTENSIONS`` (names separated by commas;
they may be in the working directory), or an entry point in the group ``fedgen.extensions``. No file
can declare one. Settings in ``configs/`` of such a package are found like those of fedgen.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import traceback
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fedgen.errors import FedgenError

CONFIGS = Path(__file__).parent.parent / "configs"


def extensions() -> tuple[str, ...]:
    """Return the declared packages; they become importable here and in child processes.

    Raises:
        FedgenError: if there is no such package.
    """
    return _extensions(os.environ.get("FEDGEN_EXTENSIONS", ""))


@functools.cache
def _extensions(declared: str) -> tuple[str, ...]:
    named = [name.strip() for name in declared.split(",") if name.strip()]
    working_directory = str(Path.cwd())
    for name in named:
        if not name.isidentifier():
            problem = f"{name!r} is not the name of a package"
            raise FedgenError("FEDGEN_EXTENSIONS", problem, "give names without dots, e.g. tilted")
        if importlib.util.find_spec(name) is None and Path(working_directory, name).is_dir():
            sys.path.append(working_directory)
            paths = [os.environ.get("PYTHONPATH", ""), working_directory]
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if importlib.util.find_spec(name) is None:
            problem = f"there is no package {name!r}"
            raise FedgenError("FEDGEN_EXTENSIONS", problem, "go where it lies, or install it")
    installed = (point.value for point in entry_points(group="fedgen.extensions"))
    return tuple(dict.fromkeys([*named, *installed]))


def config_folders() -> list[Path]:
    """Return the folders of settings of fedgen and of extensions."""
    folders = [CONFIGS]
    for name in extensions():
        spec = importlib.util.find_spec(name)
        inside = list(spec.submodule_search_locations or []) if spec else []
        folders += [
            Path(location, "configs") for location in inside if Path(location, "configs").is_dir()
        ]
    return folders


def is_extension(name: object) -> bool:
    """Return whether a dotted name belongs to a declared package."""
    return isinstance(name, str) and "." in name and name.partition(".")[0] in extensions()


def load_named(name: str, place: str) -> Any:
    """Return the function or class with a dotted name, ``PACKAGE.MODULE.NAME``.

    Only what its own package defines: a module often imports others, e.g. ``subprocess``, and a
    file from elsewhere must not reach these by way of a declared package.

    Raises:
        FedgenError: if there is none, or its module cannot be imported.
    """
    module, _, attribute = name.rpartition(".")
    try:
        target = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # code of an extension may raise anything
        at = traceback.extract_tb(error.__traceback__)[-1]
        line = f" ({at.filename}, line {at.lineno})"
        line = "" if isinstance(error, SyntaxError | AttributeError) else line
        problem = f"{name} cannot be imported: {type(error).__name__}: {error}{line}"
        raise FedgenError(place, problem, "fix it") from error
    defined = str(getattr(target, "__module__", "")).partition(".")[0]
    if not callable(target) or defined != name.partition(".")[0]:
        problem = f"{name} is no function or class of its package"
        raise FedgenError(place, problem, "name one that the package defines")
    return target


def extension_of(error: Exception) -> str | None:
    """Return the last line of an extension that an error passed through; None if there is none."""
    location = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] in extensions():
            code = frame.f_code
            location = f"{Path(code.co_filename).name}, line {line}, in {code.co_name}"
    return location
