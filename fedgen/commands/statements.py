"""Statements of a publisher in a file, for releases and reports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fedgen.errors import FedgenError
from fedgen.storage.io import read_yaml


def merge_statements_file(about: Mapping[str, Any], ignored_keys: frozenset[str]) -> dict[str, Any]:
    """Return statements by key, completed by those in ``about["file"]``: those given as settings
    take precedence.

    Args:
        ignored_keys: keys that the file may contain for other commands.

    Raises:
        FedgenError: for a file that cannot be read, or contains unknown keys.
    """
    statements = {key: value for key, value in about.items() if key != "file"}
    if (file := about["file"]) is None:
        return statements
    try:
        of_file = yaml.safe_load(read_yaml(Path(file)))
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = f"{file} cannot be read ({str(error)[:100]})"
        raise FedgenError("about.file", problem, "give a YAML file of KEY: TEXT") from error
    if not isinstance(of_file, dict):
        raise FedgenError("about.file", f"{file} is not a mapping", "write KEY: TEXT in lines")
    if unknown := set(map(str, of_file)) - set(statements) - ignored_keys:
        problem = f"{file} contains unknown keys: {', '.join(sorted(unknown))[:200]}"
        raise FedgenError("about.file", problem, f"use only {', '.join(statements)}")
    return statements | {
        str(key): str(value)
        for key, value in of_file.items()
        if key in statements and statements[key] is None
    }
