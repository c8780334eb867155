"""What pages are made of: templates, pictures that a page holds, figures along a run."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from fedgen.reporting.figures import along_rounds
from fedgen.reporting.progress import bytes_in_words, epsilon_in_words


def template(name: str) -> jinja2.Template:
    engine = jinja2.Environment(
        loader=jinja2.PackageLoader("fedgen.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    engine.filters |= {"epsilon": epsilon_in_words, "bytes": bytes_in_words, "percent": _percent}
    return engine.get_template(name)


def epsilon_lanes(spent: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    lanes = {
        "server (proven)": [(line["round"], line["epsilon"]["server"]) for line in spent],
        "release (proven)": [(line["round"], line["epsilon"]["release"]) for line in spent],
        "the paper's formula": [(line["round"], line["claimed_epsilon"]) for line in spent],
    }
    return {
        name: [(at, value) for at, value in lane if value is not None]
        for name, lane in lanes.items()
    }


def own_figures(spent: Sequence[dict[str, Any]]) -> list[str]:
    """The method's own figures along a run."""
    own = [name for line in spent for name, value in line.items() if isinstance(value, float)]
    return [name for name in dict.fromkeys(own) if name != "claimed_epsilon"]


def lane_of(spent: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(line["round"], line[name]) for line in spent if line.get(name) is not None]


def picture_of(path: Path) -> str:
    """A picture as an address that holds it."""
    return as_address(path.read_bytes())


def as_address(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def figure_along(lanes: dict[str, list[tuple[float, float]]], y: str) -> str | None:
    """A figure of what there is along a run; None for nothing but its end."""
    if max(map(len, lanes.values())) < 2:
        return None
    return svg(lambda path: along_rounds(lanes, y, path))


def svg(draw: Callable[[Path], None]) -> str:
    """A figure as an address that holds it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figure.svg")
        draw(path)
        return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
