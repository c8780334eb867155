"""Parts of pages: templates, embedded pictures, figures over rounds."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from fedgen.reporting.figures import curves_over_rounds
from fedgen.reporting.progress import format_bytes, format_epsilon


def template(name: str) -> jinja2.Template:
    """Return a template of this package, with filters for numbers."""
    engine = jinja2.Environment(
        loader=jinja2.PackageLoader("fedgen.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    engine.filters |= {"epsilon": format_epsilon, "bytes": format_bytes, "percent": _percent}
    return engine.get_template(name)


def epsilon_lanes(spent: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return (round, ε) by adversary, and for the formula of the paper."""
    lanes = {
        "server (proven)": [(line["round"], line["epsilon"]["server"]) for line in spent],
        "release (proven)": [(line["round"], line["epsilon"]["release"]) for line in spent],
        "the paper's formula": [(line["round"], line["claimed_epsilon"]) for line in spent],
    }
    return {
        name: [(at, value) for at, value in lane if value is not None]
        for name, lane in lanes.items()
    }


def float_metric_names(spent: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of all float metrics in the log except the claimed ε."""
    names = [name for line in spent for name, value in line.items() if isinstance(value, float)]
    return [name for name in dict.fromkeys(names) if name != "claimed_epsilon"]


def curve_of(spent: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Return (round, value) of a metric."""
    return [(line["round"], line[name]) for line in spent if line.get(name) is not None]


def embed_image(path: Path) -> str:
    """Return a picture as a data URL."""
    return data_url(path.read_bytes())


def data_url(png: bytes) -> str:
    """Return the data URL of a PNG."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def figure_along(lanes: dict[str, list[tuple[float, float]]], y: str) -> str | None:
    """Return a figure of values over rounds; None if there is only the last value."""
    if max(map(len, lanes.values())) < 2:
        return None
    return svg(lambda path: curves_over_rounds(lanes, y, path))


def svg(draw: Callable[[Path], None]) -> str:
    """Return a figure as a data URL."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figure.svg")
        draw(path)
        return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
