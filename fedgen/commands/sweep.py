"""Train and compare many runs: missing runs are trained, interrupted runs resume; one table and one
figure."""

from __future__ import annotations

import csv
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from fedgen.config.schema import TARGETS
from fedgen.errors import FedgenError
from fedgen.evaluation import metrics
from fedgen.reporting.figures import curves_over_rounds, privacy_against_utility
from fedgen.reporting.summary import summary
from fedgen.run.resume import flat_settings
from fedgen.run.worker_pool import complete
from fedgen.storage.io import check_no_links
from fedgen.storage.run_dir import RunDir


@dataclass(frozen=True)
class Run:
    """A run of a sweep. settings: those in which the runs differ."""

    config: DictConfig
    settings: dict[str, Any]
    label: str

    @property
    def place(self) -> Path:
        """Its run directory."""
        return Path(self.config.run_dir)


def run(configs: list[DictConfig], jobs: object) -> str:
    """Train the missing runs of a sweep, resume interrupted ones, and compare all; return their
    results as text.

    Args:
        configs: settings of each run, with its ``run_dir``.
        jobs: runs in parallel; None: as many as the cores allow.

    Raises:
        FedgenError: for a mistake of the user, before training; or after all others, if a run
            failed.
        Interrupted: if it was asked to end; the runs keep their checkpoints.
    """
    place = Path(configs[0].run_dir).parent
    check_no_links(place, "run_dir")
    failed = complete({Path(c.run_dir).name: c for c in configs}, place, jobs, "runs")
    settings = varied_settings(configs)
    runs = [Run(*run) for run in zip(configs, settings, labels(settings), strict=True)]
    finished = [run for run in runs if RunDir(run.place).finished]
    parts = [f"{run.place.name}: {run.label}\n{summary(run.place)}" for run in finished]
    parts += map(str, _table(finished, place) if finished else ())
    words = "\n".join(parts)
    if failed:
        print(words)
        problem = f"{len(failed)} of {len(configs)} runs failed"
        raise FedgenError("train", problem, f"see {failed[0]}")
    return words


def varied_settings(configs: list[DictConfig]) -> list[dict[str, Any]]:
    """Return the settings of each run in which the runs differ."""
    flat = [flat_settings(OmegaConf.to_container(config, resolve=True)) for config in configs]
    every = dict.fromkeys(itertools.chain(*flat))
    keys = [key for key in every if len({str(run_settings.get(key)) for run_settings in flat}) > 1]
    return [
        {key: run_settings.get(key) for key in keys if key != "run_dir"} for run_settings in flat
    ]


def labels(settings: list[dict[str, Any]]) -> list[str]:
    """Return ``key=value ...`` of each run; and the number of the run if that is ambiguous."""
    words = ambiguous_labels(settings)
    unique = [bool(label) and words.count(label) == 1 for label in words]
    return [
        label if is_unique else f"run {number} {label}".strip()
        for number, (label, is_unique) in enumerate(zip(words, unique, strict=True))
    ]


def ambiguous_labels(settings: list[dict[str, Any]]) -> list[str]:
    """Return ``key=value ...`` of each run, with the last parts of keys; for groups, only their
    names."""
    groups = {
        key.partition(".")[2]
        for run_settings in settings
        for key in run_settings
        if key.startswith("names.")
    }
    return [
        " ".join(
            f"{key.rpartition('.')[2]}={value}"
            for key, value in run_settings.items()
            if key.startswith("names.") or key.partition(".")[0] not in groups
        )
        for run_settings in settings
    ]


def _table(runs: list[Run], place: Path) -> list[Path]:
    """Write ``sweep.csv``, and ``sweep.png`` if runs were evaluated: the settings in which the runs
    differ, ε, and metrics."""
    lines, curves, accuracies = [], {}, []
    for run in runs:
        results = RunDir(run.place).results("run_dir")
        scores = {f"gen2real.{name}": s["mean"] for name, s in results["gen2real"].items()}
        spent = {f"epsilon.{view}": epsilon for view, epsilon in results["epsilon"].items()}
        done = {"run": run.place.name, **run.settings, "rounds run": results["rounds"]}
        lines.append({**done, **spent, **scores, **metrics.columns(results)})
        accuracies.append({name: s["mean"] for name, s in results["gen2real"].items()})
        curves[run.label] = RunDir(run.place).accuracies("run_dir")
    out = place / "sweep.csv"
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(itertools.chain(*lines))))
        writer.writeheader()
        writer.writerows(lines)
    if not any(curves.values()):
        return [out]
    figure = out.with_suffix(".png")
    settings = [run.settings for run in runs]
    if (setting := swept_setting(settings)) is None:
        curves_over_rounds(curves, "gen2real accuracy", figure)
    else:
        panels = accuracy_by_setting(settings, accuracies, setting)
        privacy_against_utility(panels, setting, "gen2real accuracy", figure)
    return [out, figure]


def swept_setting(settings: list[dict[str, Any]]) -> str | None:
    """Return the x axis of a sweep: the target of its runs, or else the only number other than
    the seed in which they differ; None: no such setting."""
    numbers = [
        key
        for key in settings[0]
        if key != "seed" and all(_is_number(run_settings.get(key)) for run_settings in settings)
    ]
    targets = [key for key in numbers if key.removeprefix("privacy.") in TARGETS]
    return next(iter(targets or numbers), None) if targets or len(numbers) == 1 else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def accuracy_by_setting(
    settings: list[dict[str, Any]], accuracies: list[dict[str, float]], setting: str
) -> dict[str, dict[str, list[list[tuple[float, float, float]]]]]:
    """Return classifier -> other settings -> lists of one point each: value of the setting, mean
    and standard deviation of the accuracy over seeds.

    Args:
        accuracies: of each run, by classifier.
    """
    others = ambiguous_labels(
        [
            {key: value for key, value in run_settings.items() if key not in ("seed", setting)}
            for run_settings in settings
        ]
    )
    panels: dict[str, dict[str, list[list[tuple[float, float, float]]]]] = {}
    scores: dict[tuple[str, str, float], list[float]] = {}
    for run_settings, other, accuracy in zip(settings, others, accuracies, strict=True):
        for classifier, score in accuracy.items():
            point = classifier, other, float(run_settings[setting])
            scores.setdefault(point, []).append(score)
    for (classifier, other, value), means in sorted(scores.items()):
        points = panels.setdefault(classifier, {}).setdefault(other, [])
        points.append([(value, float(np.mean(means)), float(np.std(means)))])
    return panels
