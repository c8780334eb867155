"""The page of a run that is not over, as it stood at its last checkpoint."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf

from fedgen.errors import FedgenError
from fedgen.files import read_json
from fedgen.reporting.figures import sample_grid
from fedgen.reporting.pages import (
    as_address,
    epsilon_lanes,
    figure_along,
    lane_of,
    own_figures,
    picture_of,
    template,
)
from fedgen.reporting.run_dir import RunDir
from fedgen.reporting.words import quality

_MOST_GRIDS = 24


@dataclass(frozen=True)
class SoFar:
    """A run that is not over, at its last checkpoint. note: which rounds these are. images: of its
    generator (n, channels, height, width), a row of ``columns`` for each label. but_for: of
    which clients ``spent`` says nothing."""

    run_dir: RunDir
    config: DictConfig
    note: str
    unit: str
    delta: float
    spent: dict[str, float | None]
    but_for: str
    images: NDArray[np.uint8]
    columns: int


def so_far(run: SoFar) -> str:
    """The page of a run that is not over."""
    spent = [line for line in run.run_dir.metrics() if "epsilon" in line]
    lanes = {"ε": figure_along(epsilon_lanes(spent), f"ε at δ = {run.delta:g}")}
    lanes |= {name: figure_along({"": lane_of(spent, name)}, name) for name in own_figures(spent)}
    sheet = io.BytesIO()
    sample_grid(run.images, run.columns, sheet)
    files = sorted(run.run_dir.samples.glob("round_*.png"))[-_MOST_GRIDS:]
    return template("so_far.html").render(
        title=f"{run.config.names.method} on {run.config.names.data}",
        note=run.note,
        picture=as_address(sheet.getvalue()),
        spent=run.spent,
        but_for=run.but_for,
        unit=run.unit,
        delta=run.delta,
        judged=_judged_so_far(run.run_dir.path / "unfinished.json"),
        curves=[(name, source) for name, source in lanes.items() if source],
        grids=[
            (f"round {int(file.stem.rpartition('_')[2]):,}", picture_of(file)) for file in files
        ],
        configuration=OmegaConf.to_yaml(run.config),
    )


def _judged_so_far(file: Path) -> list[str]:
    """What ``fedgen evaluate`` last found, if it was asked."""
    if not file.exists():
        return []
    try:
        found = read_json(file)
        return [f"after {found['rounds']:,} rounds: {line}" for line in quality(found)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FedgenError("runs", f"{file} was altered", "fedgen evaluate run=...") from error
