"""Run ``fedgen debug``: find clients with faulty images or labels by comparing one noisy sum per
client, without access to the images.

With ``method=client_statistics``, the default, clients are compared one by one. With a method that
trains a generator, ``fedgen.commands.debug_groups`` compares two groups of clients as in the paper
of GS-WGAN.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from fedgen.commands import debug_groups
from fedgen.commands.debug_groups import check_place, part_config, write_start
from fedgen.config import validation
from fedgen.errors import FedgenError, Interrupted
from fedgen.evaluation.client_comparison import FEWEST, Comparison, Explanation, compare
from fedgen.models.client_statistics import NOISE, StatisticsSpace, mean_images
from fedgen.privacy.events import Unit
from fedgen.reporting.figures import contact_sheet
from fedgen.reporting.progress import format_epsilon
from fedgen.run import setup
from fedgen.run.generator import PublishedGenerator, load_generator
from fedgen.run.worker_pool import complete
from fedgen.storage.io import check_no_links
from fedgen.storage.run_dir import RunDir

_METHOD = "client_statistics"
_RUN = "statistics"  # folder of the run
_SHEET_CLIENTS, _SHEET_LABELS = 24, 12
_MAX_LISTED = 20  # clients in the output
# the mean number of images per client must exceed this many standard deviations of its noise
_MIN_COUNT = 2.0


def debug(config: DictConfig) -> str:
    """Release the statistics of each client, and return which clients differ and why, as text.
    With the same ``run_dir``, it resumes.

    Raises:
        FedgenError: for an invalid setting, or too few clients or images.
        Interrupted: if it was asked to end; the run keeps its checkpoint.
    """
    if config.method.type != _METHOD:
        return debug_groups.debug(config)
    place = Path(config.run_dir or time.strftime("runs/debug-%Y%m%d-%H%M%S"))
    check_no_links(place, "run_dir")
    check_place(config, place)
    run = part_config(config, None, place / _RUN)
    run.group = config.group
    _check(run)
    write_start(config, place)
    failed = complete({_RUN: run}, place, 1, _RUN)
    if failed:
        raise FedgenError("debug", "computing the statistics failed", f"see {failed[0]}")
    try:
        return _compare(config, place)
    except KeyboardInterrupt:
        raise Interrupted("interrupted", place) from None


def _check(run: DictConfig) -> None:
    """Raise FedgenError for settings with which clients cannot be compared."""
    if run.resume is not None:
        raise FedgenError("resume", "fedgen debug resumes on its own", "give its run_dir")
    if run.privacy.aggregation in ("secure", "trusted"):
        problem = f"{run.privacy.aggregation} sums hide those of single clients, which are compared"
        raise FedgenError("privacy.aggregation", problem, "set it to local")
    validation.check(run)
    ready = setup.setup(run)
    clients = len(ready.shards)
    if ready.noise is None:
        problem = "adds no noise, relative to which clients are compared"
        raise FedgenError("privacy", problem, "use privacy=dp, with a large ε if need be")
    if run.method.sums not in (None, clients):
        problem = f"is {run.method.sums}, and there are {clients} clients"
        raise FedgenError("method.sums", problem, "leave it out")
    if clients < FEWEST:
        problem = f"{clients} client(s) are too few to compare"
        remedy = f"use {FEWEST} or more, or look at samples of method=mixture"
        raise FedgenError("partition" if run.group is None else "group", problem, remedy)
    is_client = ready.method.plan.unit is Unit.CLIENT
    everyone = clients if run.group is None else len(setup.partitioned_data(run)[1])
    images = 1.0 if is_client else float(run.method.rows) / everyone
    noise = ready.noise * float(NOISE.total)
    if images < _MIN_COUNT * noise:
        problem = "the noise is too large to distinguish single clients"
        remedy = "allow a larger ε, or set privacy.unit=record"
        if not is_client:
            problem = f"the noise in the number of a client's images, {noise:.0f}, is too large "
            problem += f"for clients of about {images:.0f} images"
            remedy = "allow a larger ε, or use a partition with fewer clients"
        raise FedgenError("privacy", problem, remedy)


def _compare(config: DictConfig, place: Path) -> str:
    """Compare the clients; write the contact sheet and ``results.json``."""
    published = load_generator(place / _RUN, "cpu")
    space = StatisticsSpace(published.shape, published.classes)
    sums, std = published.weights["sums"].double(), float(published.weights["std"])
    comparison = compare(space, [space.split(row) for row in sums], std)
    numbers = range(len(sums)) if config.group is None else sorted(config.group)
    rows = comparison.ranking[:_SHEET_CLIENTS]
    largest = np.argsort(-space.split(sums.sum(0)).counts.numpy())
    labels = np.sort(largest[:_SHEET_LABELS])
    means = mean_images(space, sums, std)
    images = [space.to_pixels(means[client, labels]).numpy() for client in rows]
    contact_sheet(
        (np.stack(images) * 255).round().astype(np.uint8),
        [_row_title(numbers[client], client, comparison) for client in rows],
        [_name(published, label) for label in labels],
        place / "clients.png",
    )
    results = _results(config, place, comparison, numbers)
    RunDir(place).write("results", results, "debug_clients")
    return _describe(results, comparison, numbers, place)


def _name(published: PublishedGenerator, label: int) -> str:
    return str(label) if published.labels is None else published.labels[label]


def _row_title(number: int, client: int, comparison: Comparison) -> str:
    if not comparison.differs[client]:
        return f"client {number}"
    explanation = comparison.explanations[client]
    cause = "different, cause unknown" if explanation is None else explanation.fault
    return f"client {number}: {cause}"


def _results(
    config: DictConfig, place: Path, comparison: Comparison, numbers: Any
) -> dict[str, Any]:
    run = RunDir(place / _RUN).results()
    return {
        "schema": 1,
        "data": config.names.data,
        "seed": config.seed,
        "epsilon": {view: run["epsilon"][view] for view in ("server", "release")},
        "clients": [
            {
                "client": int(numbers[client]),
                "p_value": float(comparison.p_values[client]),
                "differs": bool(comparison.differs[client]),
                "explanation": _facts(comparison.explanations.get(client)),
            }
            for client in comparison.ranking
        ],
    }


def _facts(explanation: Explanation | None) -> dict[str, Any] | None:
    return None if explanation is None else vars(explanation)


def _describe(results: dict[str, Any], comparison: Comparison, numbers: Any, place: Path) -> str:
    different = [client for client in comparison.ranking if comparison.differs[client]]
    everyone = len(comparison.p_values)
    if different:
        lines = [
            f"{len(different)} of {everyone} clients differ from the others (at a false discovery "
            "rate of 1 %):"
        ]
    else:
        lines = [f"none of {everyone} clients differs from the others (lowest p = "]
        lines[0] += f"{comparison.p_values.min():.2g}); noise hides smaller differences"
    for client in different[:_MAX_LISTED]:
        p_value = comparison.p_values[client]
        explanation = comparison.explanations[client]
        cause = "cause unknown" if explanation is None else _explained(explanation)
        lines.append(f"  client {numbers[client]}: p = {p_value:.2g}; {cause}")
    if len(different) > _MAX_LISTED:
        lines.append(f"  and {len(different) - _MAX_LISTED} more in results.json")
    eps = {name: format_epsilon(value) for name, value in results["epsilon"].items()}
    run = RunDir(place / _RUN)
    unit, noise = run.privacy()["unit"], run.privacy()["noise"]
    lines += [
        f"proven ε {eps['server']} (server), {eps['release']} (release) per {unit}; released "
        f"statistics: {run.path / 'public'}",
    ]
    if noise == "seeded":
        lines.append("noise follows from the seed: an experiment, not for release")
    lines += [str(place / "clients.png"), str(place / "results.json")]
    return "\n".join(lines)


def _explained(explanation: Explanation) -> str:
    share = min(max(explanation.share, 0.0), 1.0)
    error = max(explanation.error, 0.01)
    text = explanation.fault
    if explanation.p_value is not None:  # repeated images have no share
        text += f", {100 * share:.0f} ± {100 * error:.0f} % of its images"
        text += f" (fit: p = {explanation.p_value:.2g})"
    if explanation.others:
        text += f"; or {', '.join(explanation.others[:3])}"
    return text
