"""A run's privacy and results in sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedgen.reporting.progress import bytes_in_words, epsilon_in_words


def statement(record: dict[str, Any], words: str) -> str:
    """The privacy statement that goes with what is published."""
    unit = (
        "one record (one image and its label)"
        if record["unit"] == "record"
        else ("one client (all of its images)")
    )
    release = record["views"]["release"]
    head = ""
    if record["noise"] == "seeded":
        head = (
            "**An experiment, not for release.** The noise of this run follows from its seed: "
            "whoever knows the seed can remove it.\n\n"
        )
    if release["epsilon"] is None:
        bound = f"There is no bound: {release['reason']}."
    else:
        bound = (
            f"(ε, δ)-differential privacy with ε = {epsilon_in_words(release['epsilon'])} and "
            f"δ = {record['delta']:g} ({release['accountant']}), against anybody who sees this "
            "folder and nothing else of the run."
        )
    return (
        f"# What this generator tells about the private data\n\n{head}{bound}\n\n"
        f"- Protected is {unit}; neighbours: {record['relation'].replace('_', ' ')}.\n"
        f"- Draws: {record['sampler']}; {_amplification(release)}.\n"
        f"- Counted: {words}.\n"
        "- Not covered: timing, the finite precision of floating point, what is known from "
        "elsewhere, and choices among several runs.\n"
    )


def _amplification(view: dict[str, Any]) -> str:
    if view["amplified_by"]:
        return f"amplified by the {view['amplified_by']}"
    return f"no amplification: {view['reason']}" if view["reason"] else "no amplification"


def summary(path: Path) -> str:
    """What a run came to, for people."""
    results = json.loads((path / "results.json").read_text())
    record = json.loads((path / "privacy.json").read_text())
    eps = {name: epsilon_in_words(value) for name, value in results["epsilon"].items()}
    lines = [
        f"proven ε {eps['server']} (server), {eps['release']} (release) per {record['unit']} at "
        f"δ = {record['delta']:g}"
        + (
            f"; the paper's formula would claim {record['claimed']['epsilon']:.4g}"
            if record["claimed"] and record["claimed"]["epsilon"] is not None
            else ""
        )
    ]
    if record["noise"] == "seeded":
        lines.append("noise follows from the seed: an experiment, not for release")
    if results["stopped"]:
        lines.append(f"stopped after round {results['rounds']}: {results['stopped']}")
    for name, found in results["gen2real"].items():
        real = results["real2real"][name]["mean"]
        if found["mean"] is None or real is None:
            lines.append(f"gen2real {name}: not computed, there is one label only")
            continue
        lines.append(f"gen2real {name}: {found['mean']:.1%} (trained on real rows: {real:.1%})")
    parts = ", ".join(f"{n} {s:.3g} s" for n, s in results["seconds_per_round"].items())
    if results["rounds_per_second"]:
        lines.append(
            f"{results['rounds_per_second']:.3g} rounds/s ({parts} a round), peak memory "
            f"{bytes_in_words(results['peak_rss_bytes'])}"
        )
    made = (
        "public/samples.png",
        "public/generator.safetensors",
        "privacy.json",
        "results.json",
        "epsilon.png",
    )
    lines.extend(str(path / name) for name in made)
    return "\n".join(lines)
