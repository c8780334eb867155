"""JSON schemas of the files that fedgen writes."""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
from typing import Any

import jsonschema


def schema(name: str) -> dict[str, Any]:
    """Return a JSON schema: of ``privacy``, ``results`` and ``audit`` in the run directory, of a
    ``matrix``, or of the results of ``debug``."""
    text = importlib.resources.files("fedgen.reporting") / "schemas" / f"{name}.json"
    content: dict[str, Any] = json.loads(text.read_text())
    return content


@functools.cache
def validator(name: str) -> Any:
    """Return the validator of a schema."""
    return jsonschema.validators.validator_for(schema(name))(schema(name))


def or_null(value: float | None) -> float | None:
    """Return None for infinity, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None
