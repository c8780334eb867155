"""Error rates of ``fedgen debug`` by ε.

    python scripts/debug_power.py [--experiment femnist_debug_small] [--repetitions 20]
                                  [--epsilons 10 5 2] [KEY=VALUE ...]

Run an experiment (with other settings) with the bug and without it, with a new seed each time:
other clients have the bug, groups have other clients, and all random streams differ; the classifier
is the same. Print a line for each ε: misses (the bug, and another verdict than "bug"), false alarms
(no bug, and the verdict "bug"), the number of "inconclusive" verdicts, the seconds of one run, and
the largest ε against both adversaries. ``--epsilons`` are those against ``privacy.adversary``.
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
from pathlib import Path
from typing import Any

from fedgen.commands.debug import debug
from fedgen.config.compose import compose


@dataclass(frozen=True)
class Found:
    """Result of one call. ``verdict``: True for a bug, None for "inconclusive"."""

    verdict: bool | None
    epsilon: dict[str, float | None]
    seconds: float


def once(experiment: str, settings: list[str], fraction: float, seed: int) -> Found:
    """Run ``fedgen debug`` in its own folder."""
    words = [*([f"experiment={experiment}"] if experiment else []), *settings]
    words.append(f"corruption.fraction={fraction:g}")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        begin = time.perf_counter()
        with contextlib.redirect_stderr(io.StringIO()):
            debug(compose("debug", [*words, f"seed={seed}", f"run_dir={folder}/run"]))
        seconds = time.perf_counter() - begin
        results: dict[str, Any] = json.loads(Path(folder, "run", "results.json").read_text())
    return Found(results["verdict"]["bug"], results["epsilon"], seconds)


def largest(found: list[Found], view: str) -> str:
    """Return the largest ε of some calls as text."""
    values = [each.epsilon[view] for each in found]
    known = [value for value in values if value is not None]
    return f"{max(known):.2f}" if len(known) == len(values) else "no bound"


def main() -> None:
    parser = argparse.ArgumentParser(description="How often fedgen debug is right.")
    parser.add_argument("--experiment", default="femnist_debug_small", help="'': the settings only")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[10.0])
    parser.add_argument("--fraction", type=float, default=0.5, help="of clients, with the bug")
    options, settings = parser.parse_known_args()
    print("| ε asked | server | release | misses | false alarms | inconclusive | s each |")
    print("|---|---|---|---|---|---|---|")
    for epsilon in options.epsilons:
        here = [*settings, f"privacy.target_epsilon={epsilon:g}"]
        seeds = range(options.repetitions)
        name = options.experiment
        bug = [once(name, here, options.fraction, seed) for seed in seeds]
        none = [once(name, here, 0.0, seed) for seed in seeds]
        both, of = [*bug, *none], f"of {options.repetitions}"
        untold = [sum(each.verdict is None for each in some) for some in (bug, none)]
        print(
            f"| {epsilon:g} | {largest(both, 'server')} | {largest(both, 'release')} "
            f"| {sum(each.verdict is not True for each in bug)} {of} "
            f"| {sum(each.verdict is True for each in none)} {of} "
            f"| {untold[0]} with the bug, {untold[1]} without "
            f"| {statistics.median(each.seconds for each in both):.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
