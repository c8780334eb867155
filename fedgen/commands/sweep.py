"""Train and compare many runs: missing runs are trained, interrupted runs resume; one table and one
figure."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedgen.config.compose import compose
from fedgen.errors import FedgenError
from fedgen.evaluation import metrics
from fedgen.reporting.figures import curves_over_rounds
from fedgen.reporting.summary import summary
from fedgen.run.resume import settings_before_derivation
from fedgen.run.train import train
from fedgen.storage.run_dir import RunDir


def run(config: DictConfig) -> str:
    """Train, resume, or find a finished run; return its results as text."""
    place = Path(config.run_dir)
    if (place / "config.yaml").exists():
        check_same(config, place)
    if RunDir(place).finished:
        return f"{place} is finished"
    if (place / "config.yaml").exists():
        again = compose("config", [f"resume={place}"])
        for group in ("logger", "runtime"):
            again[group], again.names[group] = config[group], config.names[group]
        return summary(train(again))
    return summary(train(config))


def varied_settings(configs: list[DictConfig]) -> list[dict[str, Any]]:
    """Return the settings of each run in which the runs differ."""
    flat = [_flat(OmegaConf.to_container(config, resolve=True)) for config in configs]
    every = dict.fromkeys(itertools.chain(*flat))
    keys = [key for key in every if len({str(each.get(key)) for each in flat}) > 1]
    return [{key: each.get(key) for key in keys if key != "run_dir"} for each in flat]


def labels(settings: list[dict[str, Any]]) -> list[str]:
    """Return ``key=value ...`` of each run, with the last parts of keys; for groups, only their
    names; and the number of the run if that is ambiguous."""
    groups = {
        key.partition(".")[2] for each in settings for key in each if key.startswith("names.")
    }
    words = [
        " ".join(
            f"{key.rpartition('.')[2]}={value}"
            for key, value in each.items()
            if key.startswith("names.") or key.partition(".")[0] not in groups
        )
        for each in settings
    ]
    alone = [bool(each) and words.count(each) == 1 for each in words]
    return [
        each if tells else f"run {number} {each}".strip()
        for number, (each, tells) in enumerate(zip(words, alone, strict=True))
    ]


def table(configs: list[DictConfig], settings: list[dict[str, Any]]) -> list[Path]:
    """Write ``sweep.csv``, and ``sweep.png`` if runs were evaluated, next to the runs: the
    ``settings`` in which they differ, ε, and metrics."""
    lines, lanes = [], {}
    for config, own, label in zip(configs, settings, labels(settings), strict=True):
        place = Path(config.run_dir)
        results = RunDir(place).results("run_dir")
        scores = {f"gen2real.{name}": s["mean"] for name, s in results["gen2real"].items()}
        spent = {f"epsilon.{view}": found for view, found in results["epsilon"].items()}
        done = {"run": place.name, **own, "rounds run": results["rounds"]}
        lines.append({**done, **spent, **scores, **metrics.columns(results)})
        lanes[label] = RunDir(place).accuracies("run_dir")
    out = Path(configs[0].run_dir).parent / "sweep.csv"
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(itertools.chain(*lines))))
        writer.writeheader()
        writer.writerows(lines)
    if not any(lanes.values()):
        return [out]
    curves_over_rounds(lanes, "gen2real accuracy", out.with_suffix(".png"))
    return [out, out.with_suffix(".png")]


def check_same(config: DictConfig, place: Path) -> None:
    """Raise FedgenError if a run was trained with other settings, or was altered."""
    _, made, identity = RunDir.open(place, "run_dir")
    try:
        was = _flat(OmegaConf.to_container(made, resolve=True))
        was |= settings_before_derivation(place, made, identity, "run_dir")
    except (OmegaConfBaseException, AttributeError, TypeError) as error:
        raise FedgenError("run_dir", f"{place}/config.yaml was altered", "restore it") from error
    now = _flat(OmegaConf.to_container(config, resolve=True))
    other = [key for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)]
    other = [key for key in other if key not in ("run_dir", "resume")]
    if other:
        raise FedgenError("run_dir", f"{place} has a different {other[0]}", "take another run_dir")


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a tree by dotted name."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found
