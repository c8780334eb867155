"""Write the page of an unfinished run at its last checkpoint."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf

from fedgen.data.catalogue import data_label
from fedgen.errors import FedgenError
from fedgen.reporting.figures import sample_grid
from fedgen.reporting.pages import (
    curve_of,
    data_url,
    embed_image,
    epsilon_lanes,
    figure_along,
    float_metric_names,
    template,
)
from fedgen.reporting.summary import quality
from fedgen.storage.io import read_json
from fedgen.storage.run_dir import RunDir

_MOST_GRIDS = 24


@dataclass(frozen=True)
class SnapshotReport:
    """An unfinished run at its last checkpoint.

    note: the rounds that it covers.
    images: samples of its generator (n, channels, height, width), a row of ``columns`` per label.
    but_for: clients that ``spent`` does not cover.
    """

    run_dir: RunDir
    config: DictConfig
    note: str
    unit: str
    delta: float
    spent: dict[str, float | None]
    but_for: str
    images: NDArray[np.uint8]
    columns: int


def render_snapshot_report(run: SnapshotReport) -> str:
    """Render the HTML page of an unfinished run."""
    spent = [line for line in run.run_dir.metrics() if "epsilon" in line]
    lanes = {"ε": figure_along(epsilon_lanes(spent), f"ε at δ = {run.delta:g}")}
    lanes |= {
        name: figure_along({"": curve_of(spent, name)}, name) for name in float_metric_names(spent)
    }
    sheet = io.BytesIO()
    sample_grid(run.images, run.columns, sheet)
    files = sorted(run.run_dir.samples.glob("round_*.png"))[-_MOST_GRIDS:]
    return template("so_far.html").render(
        title=f"{run.config.names.method} on {data_label(run.config)}",
        note=run.note,
        picture=data_url(sheet.getvalue()),
        spent=run.spent,
        but_for=run.but_for,
        unit=run.unit,
        delta=run.delta,
        judged=_evaluated_snapshot(run.run_dir.path / "unfinished.json"),
        curves=[(name, source) for name, source in lanes.items() if source],
        grids=[
            (f"round {int(file.stem.rpartition('_')[2]):,}", embed_image(file)) for file in files
        ],
        configuration=OmegaConf.to_yaml(run.config),
    )


def _evaluated_snapshot(file: Path) -> list[str]:
    """Return the last result of ``fedgen evaluate``, if there is one."""
    if not file.exists():
        return []
    try:
        results = read_json(file)
        return [f"after {results['rounds']:,} rounds: {line}" for line in quality(results)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FedgenError("runs", f"{file} was altered", "fedgen evaluate run=...") from error
