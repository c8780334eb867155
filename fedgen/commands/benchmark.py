"""Train the runs of a matrix and tabulate them.

Each run is a separate process. Finished runs are kept and interrupted runs resume: a benchmark that
is called again with its ``run_dir`` continues to the same result.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedgen.commands.matrix import (
    GridPoint,
    check_runnable,
    expand,
    read_matrix,
    select,
    target_name,
)
from fedgen.errors import FedgenError
from fedgen.evaluation import metrics
from fedgen.reporting.figures import privacy_against_utility
from fedgen.reporting.progress import format_bytes, format_epsilon
from fedgen.reporting.summary import averages
from fedgen.run.resume import check_same_settings
from fedgen.run.worker_pool import complete
from fedgen.storage.io import check_no_links, write_atomic
from fedgen.storage.run_dir import RunDir

_NOTES = (
    "Accuracies in percent: mean ± standard deviation over n seeds. ε is the largest of any run; "
    "the ε of several runs on the same data add up. Noise is seeded: these are experiments."
)
_Row = dict[str, Any]


def benchmark(config: DictConfig) -> str:
    """Train the missing runs and write ``benchmark.{csv,md,json,png}``; return the table as text.

    Raises:
        FedgenError: for a mistake of the user, before training; or after all others, if a run
            failed.
        Interrupted: if it was asked to end; the runs keep their checkpoints.
    """
    full_matrix = read_matrix(config.matrix)
    matrix = select(full_matrix, config)
    place = Path(config.run_dir or time.strftime("runs/benchmark-%Y%m%d-%H%M%S"))
    check_no_links(place, "run_dir")
    points = list(expand(matrix, place))
    points_by_name = {point.name: point for point in [*expand(full_matrix, place), *points]}
    for point in points:
        check_runnable(point)
    for point in points_by_name.values():  # the table may include runs not requested now
        if (place / point.name / "config.yaml").exists():
            check_same_settings(point.config, place / point.name)
            _check_same_evaluation(point, place)
    failed = complete({point.name: point.config for point in points}, place, config.jobs, "runs")
    done = [point for point in points_by_name.values() if RunDir(place / point.name).finished]
    requested_names = {point.name for point in points}
    begun = [name for name in points_by_name if name in requested_names or (place / name).exists()]
    left = [f"{name}: not finished" for name in begun if name not in {p.name for p in done}]
    words = write_table(full_matrix, done, left, place) if done else ""
    if failed:
        print(words, end="")
        raise FedgenError(
            "matrix", f"{len(failed)} of {len(points)} runs failed", f"see {failed[0]}"
        )
    return words


def _check_same_evaluation(point: GridPoint, place: Path) -> None:
    """Raise FedgenError for a run that was evaluated again with different settings."""
    run = place / point.name
    if not RunDir(run).finished:
        return
    evaluation_settings = OmegaConf.to_container(point.config.evaluation, resolve=True)
    if RunDir(run).results().get("judged_by") != evaluation_settings:
        problem = f"{run} was evaluated again with other settings"
        raise FedgenError(
            "run_dir", problem, "evaluate it with the matrix's settings, or delete it"
        )


def write_table(
    matrix: DictConfig, points: Sequence[GridPoint], left: Sequence[str], place: Path
) -> str:
    """Write the table of finished runs as CSV, Markdown and JSON, and the curves; return the
    Markdown.

    Args:
        left: notes on runs that are not in the table.
    """
    cells: dict[tuple[str, str, float | None], list[GridPoint]] = {}
    for point in sorted(points, key=lambda p: (p.data, -(p.epsilon or math.inf))):
        cells.setdefault((point.data, point.method, point.epsilon), []).append(point)
    rows = [_row(matrix, cell, place) for cell in cells.values()]
    columns = list(dict.fromkeys(itertools.chain(*rows)))
    file = io.StringIO()
    writer = csv.DictWriter(file, columns)
    writer.writeheader()
    writer.writerows(rows)
    for point in points:
        stopped = RunDir(place / point.name).results()["stopped"]
        left = [*left, f"{point.name}: stopped early, {stopped}"] if stopped else left
    text = "\n".join([_markdown(rows), *(f"- {note}" for note in left), *([""] if left else [])])
    for suffix, written in (
        ("csv", file.getvalue()),
        ("md", text),
        ("json", json.dumps(rows, indent=2) + "\n"),
    ):
        write_atomic(place / f"benchmark.{suffix}", written.encode())
    panels: dict[str, dict[str, list[list[tuple[float, float, float]]]]] = {}
    for (data, method, _), cell in cells.items():
        panels.setdefault(data, {}).setdefault(method, []).append(_curve(cell, place))
    judges = list(RunDir(place / points[0].name).results()["gen2real"])
    accuracy = f"gen2real accuracy, {judges[0]}" if judges else "gen2real accuracy"
    privacy_against_utility(panels, "proven ε (server)", accuracy, place / "benchmark.png")
    return text


def _row(matrix: DictConfig, cell: Sequence[GridPoint], place: Path) -> _Row:
    """Return a row of the table: the runs of a cell, which differ by their seeds."""
    first, results, records = cell[0], [], []
    for point in cell:
        results.append(RunDir(place / point.name).results())
        records.append(RunDir(place / point.name).privacy())
    claimed = [record["claimed"] and record["claimed"]["epsilon"] for record in records]
    paper = OmegaConf.select(
        matrix.methods[first.method], f"paper.{first.data}", default=DictConfig({})
    )
    row: _Row = {
        "method": first.method,
        "data": first.data,
        "target_epsilon": first.epsilon,
        "seeds": len(cell),
        "delta": records[0]["delta"],
        "unit": records[0]["unit"],
        "server_epsilon": _max_or_none([r["epsilon"]["server"] for r in results]),
        "release_epsilon": _max_or_none([r["epsilon"]["release"] for r in results]),
        "formula_epsilon": _max_or_none(claimed),
        "clients": results[0]["clients"],
        "median_client_epsilon": _max_or_none(
            [_median_client_epsilon(record) for record in records]
        ),
    }
    scores: dict[str, list[float | None]] = {}
    for result in results:
        for kind in ("gen2real", "real2gen"):
            for name, score in result[kind].items():
                scores.setdefault(f"{kind}_{name}", []).append(score["mean"])
        for name, accuracy in zip(("average", "calibrated"), averages(result), strict=True):
            scores.setdefault(f"gen2real_{name}", []).append(accuracy)
        for name, metric_value in metrics.columns(result).items():
            scores.setdefault(name, []).append(metric_value)
    for name, values in scores.items():
        measured = [value for value in values if value is not None]
        all_measured = len(measured) == len(cell)  # a mean requires all runs
        row[name] = mean(measured) if all_measured else None
        row[f"{name}_std"] = stdev(measured) if all_measured and len(measured) > 1 else None
    row["paper_gen2real_cnn"] = paper.get(target_name(first.epsilon))
    row["training_seconds"] = mean(r["seconds"] for r in results)
    row["peak_rss_bytes"] = max(r["peak_rss_bytes"] for r in results)
    row["bytes_up"] = mean(r["bytes"]["up"] for r in results)
    row["bytes_down"] = mean(r["bytes"]["down"] for r in results)
    row["bytes_per_round"] = mean(r["bytes"]["per_round"] for r in results)
    row["bytes_per_round_and_client"] = mean(r["bytes"]["per_round_and_client"] for r in results)
    return row


def _median_client_epsilon(record: dict[str, Any]) -> float | None:
    """Return the median ε against the server over responding clients; None (no bound) counts as the
    largest."""
    epsilons = [
        client["server"] for client in record["clients"].values() if client["releases"]
    ] or [0.0]
    middle = sorted(math.inf if value is None else value for value in epsilons)[len(epsilons) // 2]
    return None if math.isinf(middle) else middle


def _max_or_none(values: Sequence[float | None]) -> float | None:
    """Return the maximum; None (no bound) if any is None."""
    bounded = [value for value in values if value is not None]
    return max(bounded) if len(bounded) == len(values) else None


def _markdown(rows: Sequence[_Row]) -> str:
    """Return the table as Markdown: percent, mean ± standard deviation over seeds."""
    accuracy_columns = [
        name
        for name in dict.fromkeys(itertools.chain(*rows))
        if name.startswith("gen2real_") and not name.endswith("_std")
    ]
    others = [
        name for name in metrics.column_names() if any(row.get(name) is not None for row in rows)
    ]
    head = ["data", "method", "proven ε (server / release) at δ", "formula", "n"]
    head += [name.removeprefix("gen2real_").replace("_", " ") for name in accuracy_columns]
    head += [name.replace("_", " ") for name in others]
    head += ["paper's CNN", "training", "memory", "bytes up"]
    federated = any(row["clients"] > 1 for row in rows)
    head += (
        ["clients", "median ε (server) of queried clients", "bytes a round"] if federated else []
    )
    head += ["for each client"] if federated else []
    lines = [head, ["---"] * len(head)]
    for row in rows:
        formula = row["formula_epsilon"]
        lines.append(
            [
                row["data"],
                row["method"],
                f"{format_epsilon(row['server_epsilon'])} / "
                f"{format_epsilon(row['release_epsilon'])} per {row['unit']} at {row['delta']:g}",
                "" if formula is None else f"{formula:.4g}",
                str(row["seeds"]),
                *(_mean_and_std(row, name, 100, 1) for name in accuracy_columns),
                *(_mean_and_std(row, name, 1, 2) for name in others),
                ""
                if row["paper_gen2real_cnn"] is None
                else f"{100 * row['paper_gen2real_cnn']:.0f}",
                f"{row['training_seconds']:.{int(row['training_seconds'] < 10)}f} s",
                format_bytes(row["peak_rss_bytes"]),
                format_bytes(round(row["bytes_up"])),
            ]
        )
        if federated:
            lines[-1] += [
                f"{row['clients']:,}",
                format_epsilon(row["median_client_epsilon"]),
                format_bytes(round(row["bytes_per_round"])),
                format_bytes(round(row["bytes_per_round_and_client"])),
            ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n{_NOTES}\n"


def _mean_and_std(row: _Row, name: str, scale: float, digits: int) -> str:
    value, spread = row.get(name), row.get(f"{name}_std")
    if value is None:
        return ""
    text = f"{scale * value:.{digits}f}"
    return text if spread is None else f"{text} ± {scale * spread:.{digits}f}"


def _curve(cell: Sequence[GridPoint], place: Path) -> list[tuple[float, float, float]]:
    """Return (ε spent, gen2real of the first classifier, its standard deviation) during training,
    over seeds."""
    along: dict[int, list[tuple[float, float]]] = {}
    for point in cell:
        run_dir = RunDir(place / point.name)
        lines, results = run_dir.metrics(), run_dir.results()
        spent = {line["round"]: line["epsilon"]["server"] for line in lines if "epsilon" in line}
        judged = {line["round"]: line["gen2real"] for line in lines if line.get("gen2real")}
        for round_, accuracies in (judged | {results["rounds"]: results["gen2real"]}).items():
            score = next(iter(accuracies.values()), {"mean": None})["mean"]
            by = [value for at, value in spent.items() if at >= round_]  # from a later line
            if score is not None and by and by[0] is not None:
                along.setdefault(round_, []).append((by[0], score))
    curve = []
    for _, points in sorted(along.items()):
        costs, scores = zip(*points, strict=True)
        curve.append((mean(costs), mean(scores), stdev(scores) if len(scores) > 1 else 0.0))
    return curve
