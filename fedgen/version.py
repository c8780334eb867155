"""Version of the installed package, or of the source tree if fedgen is not installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_OF_THIS_TREE = "0.1.0"  # as in pyproject.toml

try:
    VERSION = version("fedgen")
except PackageNotFoundError:
    VERSION = _OF_THIS_TREE
"""As "0.1.0"."""
