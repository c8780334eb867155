"""Summarize the results of a run for the console."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedgen.evaluation.metrics import described
from fedgen.reporting.privacy_statement import exceptions, guarantee_of
from fedgen.reporting.progress import format_bytes, format_epsilon, format_pace

PARTS = {"critics": "client training", "routing": "responses", "generator": "server"}
"""Display name of each part of a round."""


_LOW_ACCURACY = 0.5
"""Accuracy relative to training on real images below which samples are called of little use."""


def _bounds_on_attacks(record: Mapping[str, Any]) -> list[str]:
    views = record["views"]
    described = {
        name: guarantee_of(view, record["delta"]).describe()
        for name, view in views.items()
        if view["epsilon"] is not None
    }
    if len(set(described.values())) == 1 and len(described) == len(views):
        described = {"server and release": described["server"]}
    return [f"{name}: {text}" for name, text in described.items()]


def _warnings(results: dict[str, Any]) -> list[str]:
    """Return what is wrong with the samples, with remedies."""
    lines = []
    more = "try more rounds, a larger ε, more images, or method=mixture"
    _, of_real = averages(results)
    looks = results.get("looks")
    if looks == "diverged":
        lines.append(
            "training diverged: nearly all pixels of the samples are black or white; lower the "
            "learning rates"
        )
    elif looks == "collapsed":
        lines.append(
            "the generator collapsed: samples of a label are nearly equal; lower the generator's "
            "learning rate, or try fewer rounds or method=mixture"
        )
    elif looks == "noise":
        lines.append(
            "the samples look like noise: neighbouring pixels are hardly correlated "
            f"({results['coherence']:.2f}; photographs and digits: 0.3 to 0.9); {more}"
        )
    elif of_real is not None and of_real < _LOW_ACCURACY:
        lines.append(f"classifiers learn little from the samples compared with real images; {more}")
    _, seen = averages(results, "real2gen")
    if "classifier" in results and seen is not None and seen < _LOW_ACCURACY:
        lines.append(
            "samples seldom match the labels that the private classifier assigned to them; try "
            "method.private_classifier=none"
        )
    return lines


def summary(path: Path) -> str:
    """Summarize the results of a run."""
    results = json.loads((path / "results.json").read_text())
    record = json.loads((path / "privacy.json").read_text())
    eps = {name: format_epsilon(value) for name, value in results["epsilon"].items()}
    lines = [
        f"proven ε {eps['server']} (server), {eps['release']} (release) per {record['unit']} at "
        f"δ = {record['delta']:g}"
        + (
            f"; the formula of its paper would claim {record['claimed']['epsilon']:.4g}"
            if record["claimed"] and record["claimed"]["epsilon"] is not None
            else ""
        )
    ]
    if record["without_bound"]:
        lines.append(exceptions(record).strip())
    lines += _bounds_on_attacks(record)
    lines += [
        f"with {bound['colluders']} colluding client{'s' if bound['colluders'] > 1 else ''}: "
        f"ε {format_epsilon(bound['epsilon'])}"
        for bound in record["aggregation"].get("if_more_collude", [])
    ]
    if record["noise"] == "seeded":
        lines.append("noise is derived from the seed: an experiment, not for release")
        if results["gen2real"]:
            lines.append(
                f"other noise, other accuracy: estimate the range with fedgen repeat run={path}"
            )
    if results["stopped"]:
        lines.append(f"stopped after round {results['rounds']}: {results['stopped']}")
    lines += [*_warnings(results), *quality(results)]
    taken = results["seconds_per_round"]
    parts = ", ".join(f"{name} {taken[n]:.2g} s" for n, name in PARTS.items() if n in taken)
    if results["rounds_per_second"]:
        pace = format_pace(results["rounds"], results["seconds"])
        peak = format_bytes(results["peak_rss_bytes"])
        lines.append(f"{pace} ({parts} a round), peak memory {peak}")
    files = (
        "public/samples.png",
        "public/generator.safetensors",
        "privacy.json",
        "results.json",
        "epsilon.png",
    )
    lines.extend(str(path / name) for name in files if (path / name).exists())
    return "\n".join(lines)


def quality(results: dict[str, Any]) -> list[str]:
    """Describe sample quality: a line per classifier, and one per other metric that was
    computed."""
    lines = []
    for name, scores in results["gen2real"].items():
        if scores["mean"] is None:
            lines.append(f"gen2real {name}: not computed, there is one label only")
            continue
        line = f"gen2real {name}: {scores['mean']:.1%}"
        notes = []
        if scores.get("interval") is not None:
            low, high = scores["interval"]
            notes.append(f"95 %: {low:.1%} to {high:.1%}, of {scores['tested']:,} test images")
        real = results["real2real"].get(name, {}).get("mean")
        if real is not None:
            notes.append(f"trained on real images: {real:.1%}")
        line += f" ({'; '.join(notes)})" if notes else ""
        back = results["real2gen"].get(name, {}).get("mean")
        if back is not None:
            line += f"; real2gen: {back:.1%}"
        lines.append(line)
    return lines + [f"{name}: {text}" for name, text in figures(results)]


def figures(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the metrics other than classifiers by name, with units and references."""
    rows = []
    scores: dict[str, Any] = next(
        (s for s in results["gen2real"].values() if s["mean"] is not None), {}
    )
    per_class = scores.get("per_class", [])
    names = results.get("labels") or [f"{n} (counted from 0)" for n in range(len(per_class))]
    if none := [names[n] for n, accuracy in enumerate(per_class) if accuracy is None]:
        text = f"{', '.join(none)}: the utility of their samples is unknown"
        rows.append(("labels without test images", text))
    average, calibrated = averages(results)
    if average is not None:
        best = max(scores["mean"] for scores in results["gen2real"].values())
        text = f"{average:.1%}, best {best:.1%}"
        if calibrated is not None:
            text += f"; average of accuracies relative to training on real images: {calibrated:.1%}"
        rows.append(("gen2real average", text))
    if "classifier" in results:
        classifier = results["classifier"]
        rows.append(
            (
                "accuracy of the private classifier",
                f"{classifier['mean']:.1%} of {classifier['n']:,} real images",
            )
        )
    if "distinct" in results:
        rows.append(
            (
                "FID, FCD, inception score, precision and recall",
                f"not computed: only {results['distinct']} distinct images",
            )
        )
    return rows + described(results)


def averages(results: dict[str, Any], kind: str = "gen2real") -> tuple[float | None, float | None]:
    """Return gen2real (or real2gen) averaged over the classifiers, and the average of each relative
    to real images ("GS-WGAN", section 5.1, calibrated accuracy); None for fewer than two
    classifiers, or if one has no result; the second also unless all were trained on real images.
    """
    pairs = [
        (scores["mean"], results["real2real"].get(name, {}).get("mean"))
        for name, scores in results[kind].items()
    ]
    if len(pairs) < 2 or any(accuracy is None for accuracy, _ in pairs):
        return None, None
    count = len(pairs)
    average = sum(accuracy for accuracy, _ in pairs) / count
    if not all(real for _, real in pairs):
        return average, None
    return average, sum(accuracy / real for accuracy, real in pairs) / count
