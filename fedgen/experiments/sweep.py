"""Many runs, compared: those that are missing run, those that were cut off go on, and all of them
come to one table and one figure."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedgen.errors import FedgenError
from fedgen.experiments.configuration import compose
from fedgen.experiments.identity import left_open
from fedgen.experiments.training import train
from fedgen.reporting.figures import along_rounds
from fedgen.reporting.run_dir import RunDir
from fedgen.reporting.words import summary


def run(config: DictConfig) -> str:
    """Trains, goes on, or finds a run that is finished; what it came to, in words."""
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


def varied(configs: list[DictConfig]) -> list[dict[str, Any]]:
    """Of each run the settings in which they differ."""
    flat = [_flat(OmegaConf.to_container(config, resolve=True)) for config in configs]
    every = dict.fromkeys(itertools.chain(*flat))
    keys = [key for key in every if len({str(each.get(key)) for each in flat}) > 1]
    return [{key: each.get(key) for key in keys if key != "run_dir"} for each in flat]


def labels(settings: list[dict[str, Any]]) -> list[str]:
    """Of each run ``key=value ...``, by the last parts of keys: of groups that differ their names
    alone, and the run's number where that does not tell."""
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
    """Writes ``sweep.csv``, and where runs were judged ``sweep.png``, beside the runs: the
    ``settings`` in which they differ, epsilon, and how good they are."""
    lines, lanes = [], {}
    for config, own, label in zip(configs, settings, labels(settings), strict=True):
        place = Path(config.run_dir)
        results = RunDir(place).results("run_dir")
        scores = {f"gen2real.{name}": s["mean"] for name, s in results["gen2real"].items()}
        spent = {f"epsilon.{view}": found for view, found in results["epsilon"].items()}
        done = {"run": place.name, **own, "rounds run": results["rounds"]}
        if "inception_score" in results:
            scores["inception_score"] = results["inception_score"]["generated"]["mean"]
            scores["fcd"] = results["fcd"]["generated"]
        lines.append({**done, **spent, **scores})
        lanes[label] = RunDir(place).accuracies("run_dir")
    out = Path(configs[0].run_dir).parent / "sweep.csv"
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(itertools.chain(*lines))))
        writer.writeheader()
        writer.writerows(lines)
    if not any(lanes.values()):
        return [out]
    along_rounds(lanes, "gen2real accuracy", out.with_suffix(".png"))
    return [out, out.with_suffix(".png")]


def check_same(config: DictConfig, place: Path) -> None:
    """Raises FedgenError if a run was made with other settings than these, or was altered."""
    _, made, identity = RunDir.open(place, "run_dir")
    try:
        was = _flat(OmegaConf.to_container(made, resolve=True))
        was |= left_open(place, made, identity, "run_dir")
    except (OmegaConfBaseException, AttributeError, TypeError) as error:
        raise FedgenError("run_dir", f"{place}/config.yaml was altered", "restore it") from error
    now = _flat(OmegaConf.to_container(config, resolve=True))
    other = [key for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)]
    other = [key for key in other if key not in ("run_dir", "resume")]
    if other:
        raise FedgenError(
            "run_dir", f"{place} was made with another {other[0]}", "take another run_dir"
        )


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A tree's leaves by their dotted names."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found
