"""Error rates of ``fedgen debug``: how often faults of clients are found and explained.

    python scripts/debug_power.py [KEY=VALUE ...] [--clients 12 50 150] [--epsilons 1 5 10]
                                  [--faulty 1 10% 40%] [--faults rotated ...] [--repetitions 20]

Each repetition deals the images of a data set to clients at random (or uses the configured
partition), plants one fault at some of them (a number or a percentage), adds the noise of ε to the
statistics of each client, and compares them. Print a row for each number of clients, ε and fault.
For each value of ``--faulty``, a cell shows the share of faulty clients detected / detected with
the correct fault, and the total number of false alarms. For the fault "none", it shows the number
of repetitions with a false alarm.

    python scripts/debug_power.py [KEY=VALUE ...] --experiment femnist_debug_small
                                  [--repetitions 20] [--epsilons 10 5 2] [--fraction 0.5]

Run an experiment with two groups of clients, with inverted images and without, with a new seed each
time. Print a row for each ε: misses (inverted images, but a verdict other than "bug"), false alarms
(the verdict "bug" without inverted images), the number of "inconclusive" verdicts, the seconds of
one run, and the largest ε against both adversaries. ``--epsilons`` are those against
``privacy.adversary``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgen.commands.debug import debug
from fedgen.config.compose import compose
from fedgen.data.corruption import FAULTS
from fedgen.data.datasets import Dataset
from fedgen.evaluation.client_comparison import compare
from fedgen.models.client_statistics import StatisticsSpace
from fedgen.run import setup

NONE = "none"
EXPLANATIONS = {
    "inverted": "inverted",
    "rotated": "rotated by 90 degrees counterclockwise",
    "mirrored": "mirrored left to right",
    "labels_shifted": "labels shifted by +1",
    "one_label": "label 0 for all images",
    "black": "black images",
    "darker": "intensities times 1/16",
    "blurred": ("blurred", "resolution reduced"),
    "repeated": "repeated images",
}
"""Planted fault -> prefixes of the correct explanation."""


# --- comparison of clients --------------------------------------------------------------------


def sums(space: StatisticsSpace, data: Dataset, rows: Any, fault: str) -> Tensor:
    """Return the exact statistics of a client with a fault."""
    images, labels = data.images[rows], data.labels[rows]
    if fault != NONE:
        images, labels = FAULTS[fault](images, labels, data.classes)
    total = torch.zeros(space.size, dtype=torch.float64)
    for start in range(0, len(rows), 500):
        chunk = slice(start, start + 500)
        pixels = torch.from_numpy(images[chunk].copy()).float() / 255
        total += space.contribution(pixels, torch.from_numpy(labels[chunk].copy())).flat()
    return total


def number_of(faulty: str, clients: int) -> int:
    """Parse a number of clients: an integer or a percentage."""
    if faulty.endswith("%"):
        return max(1, round(float(faulty[:-1]) / 100 * clients))
    return int(faulty)


def compare_clients(options: argparse.Namespace, settings: list[str]) -> None:
    print(
        "| clients | ε | fault | " + " | ".join(f"{each} faulty" for each in options.faulty) + " |"
    )
    print("|---|---|---|" + "---|" * len(options.faulty))
    for clients in options.clients:
        words = ["method=client_statistics", "partition=iid"]
        words += [f"partition.clients={clients}", "evaluation=none", *settings]
        noise = {
            epsilon: setup.setup(
                compose("config", [*words, f"privacy.target_epsilon={epsilon:g}"])
            ).noise
            for epsilon in options.epsilons
        }
        counts: dict[tuple[float, str, str], list[int]] = {}
        for seed in range(options.repetitions):
            data, shards = setup.partitioned_data(compose("config", [*words, f"seed={seed}"]))
            space, rng = StatisticsSpace(data.shape, data.classes), np.random.default_rng(seed)
            of_client = partial(sums, space, data)
            clean = [of_client(rows, NONE) for rows in shards]
            order = rng.permutation(len(shards))
            for fault in options.faults:
                changed = dict[int, Tensor]()
                for faulty in [NONE] if fault == NONE else options.faulty:
                    planted = [] if fault == NONE else order[: number_of(faulty, len(shards))]
                    for client in planted:
                        if client not in changed:
                            changed[client] = of_client(shards[client], fault)
                    for epsilon, std in noise.items():
                        exact = [
                            changed[client] if client in planted else clean[client]
                            for client in range(len(shards))
                        ]
                        row = counts.setdefault((epsilon, fault, faulty), [0, 0, 0])
                        add(row, space, exact, std, set(planted), fault, rng)
        for epsilon in options.epsilons:
            for fault in options.faults:
                cells = [
                    cell(counts[epsilon, fault, faulty], clients, faulty, options.repetitions)
                    for faulty in ([NONE] if fault == NONE else options.faulty)
                ]
                print(f"| {clients} | {epsilon:g} | {fault} | {' | '.join(cells)} |", flush=True)


def add(
    row: list[int],
    space: StatisticsSpace,
    exact: list[Tensor],
    std: float,
    planted: set[int],
    fault: str,
    rng: np.random.Generator,
) -> None:
    """Compare clients once, and count those found, those explained, and false alarms."""
    noisy = [
        space.split(sum_ + std * torch.from_numpy(rng.normal(size=space.size))) for sum_ in exact
    ]
    result = compare(space, noisy, std)
    found = set(np.flatnonzero(result.differs).tolist())
    explained = [result.explanations[client] for client in found & planted]
    row[0] += len(found & planted)
    row[1] += sum(
        each is not None and each.fault.startswith(EXPLANATIONS[fault]) for each in explained
    )
    row[2] += bool(found) if fault == NONE else len(found - planted)


def cell(row: list[int], clients: int, faulty: str, repetitions: int) -> str:
    """Format a cell of the table."""
    found, explained, alarms = row
    if faulty == NONE:
        return f"a false alarm in {alarms} of {repetitions} repetitions"
    planted = number_of(faulty, clients) * repetitions
    return f"{found / planted:.0%} / {explained / planted:.0%}, {alarms} false"


# --- two groups of clients --------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """Result of one call. ``verdict``: True for inverted images, None for "inconclusive"."""

    verdict: bool | None
    epsilon: dict[str, float | None]
    seconds: float


def once(experiment: str, settings: list[str], fraction: float, seed: int) -> Result:
    """Run ``fedgen debug`` in its own folder."""
    words = [f"experiment={experiment}", *settings, f"corruption.fraction={fraction:g}"]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        start = time.perf_counter()
        with contextlib.redirect_stderr(io.StringIO()):
            debug(compose("debug", [*words, f"seed={seed}", f"run_dir={folder}/run"]))
        seconds = time.perf_counter() - start
        results: dict[str, Any] = json.loads(Path(folder, "run", "results.json").read_text())
    return Result(results["verdict"]["bug"], results["epsilon"], seconds)


def largest(results: list[Result], view: str) -> str:
    """Return the largest ε of some calls as text."""
    values = [result.epsilon[view] for result in results]
    bounds = [value for value in values if value is not None]
    return f"{max(bounds):.2f}" if len(bounds) == len(values) else "no bound"


def compare_groups(options: argparse.Namespace, settings: list[str]) -> None:
    print("| ε asked | server | release | misses | false alarms | inconclusive | s each |")
    print("|---|---|---|---|---|---|---|")
    for epsilon in options.epsilons:
        words = [*settings, f"privacy.target_epsilon={epsilon:g}"]
        seeds = range(options.repetitions)
        run = partial(once, options.experiment, words)
        bug, clean = (
            [run(fraction, seed) for seed in seeds] for fraction in (options.fraction, 0.0)
        )
        both, of = [*bug, *clean], f"of {options.repetitions}"
        undecided = [sum(result.verdict is None for result in some) for some in (bug, clean)]
        print(
            f"| {epsilon:g} | {largest(both, 'server')} | {largest(both, 'release')} "
            f"| {sum(result.verdict is not True for result in bug)} {of} "
            f"| {sum(result.verdict is True for result in clean)} {of} "
            f"| {undecided[0]} with the bug, {undecided[1]} without "
            f"| {statistics.median(result.seconds for result in both):.0f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure error rates of fedgen debug.")
    parser.add_argument("--experiment", help="an experiment with two groups of clients")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[10.0])
    parser.add_argument(
        "--fraction", type=float, default=0.5, help="of clients with inverted images"
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[12, 50, 150])
    parser.add_argument("--faulty", nargs="+", default=["1", "10%", "40%"])
    parser.add_argument("--faults", nargs="+", choices=[NONE, *FAULTS], default=[NONE, *FAULTS])
    options, settings = parser.parse_known_args()
    (compare_groups if options.experiment else compare_clients)(options, settings)


if __name__ == "__main__":
    main()
