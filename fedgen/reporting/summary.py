"""Describe the privacy and the results of a run in sentences."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgen.evaluation.metrics import described
from fedgen.privacy import guarantee
from fedgen.privacy.guarantee import Guarantee
from fedgen.reporting.progress import format_bytes, format_epsilon, format_pace

NOT_IN_THE_FOLDER = (
    "Operators and participants of the training, and observers of its messages: their bounds are "
    "not in this folder."
)
"""Sentence of the release's statement on the views that only the report of the run states."""


def statement(
    record: dict[str, Any], words: str, picked: bool = False, outside: Sequence[str] = ()
) -> str:
    """Return the privacy statement of a release.

    Args:
        picked: whether the clients are a selected group.
        outside: code of extensions that the run used.
    """
    release = record["views"]["release"]
    parts = ["# What this generator reveals about the private data"]
    if record["noise"] == "seeded":
        parts.append(
            "**An experiment, not for release.** The noise of this run is derived from its seed: "
            "anyone who knows the seed can remove it."
        )
    if outside:
        parts.append(
            f"**With code from outside fedgen** ({', '.join(outside)}). Its bounds are those of "
            "its author, and not tested by fedgen."
        )
    if release["epsilon"] is None:
        parts.append(f"There is no bound: {release['reason']}.")
    else:
        parts += [
            f"## What is protected\n\n{protected(record)}{exceptions(record)}",
            "## Against whom\n\nAny reader of this folder who has nothing else of the run, "
            "with any background knowledge, including all other data and the source code of this "
            "program.",
            f"## How strongly\n\n(ε, δ)-differential privacy with ε = "
            f"{format_epsilon(release['epsilon'])} and δ = {record['delta']:g} "
            f"({release['accountant']}). {strength(release, record['delta'])}"
            f"{_several_records(release)}",
        ]
    parts += [
        *sums(record),
        "## What is not covered\n\n"
        "- Facts about the population that do not depend on any single participant: a generator "
        "is meant to show what is common.\n"
        "- Several generators from the same data: their ε add up.\n"
        "- Selection among runs or settings by private data.\n"
        + (_SELECTED if picked else "")
        + f"- {NOT_IN_THE_FOLDER}\n"
        "- The settings in `generator.json`, which count as public, including numbers of images "
        "in them.\n"
        "- Timing. The noise is exact to the last bit, assuming that AES-256 in counter mode is "
        "indistinguishable from random bits. ε includes rounding errors of sums before the noise: "
        "by a proven bound for gradients of records that are summed in double precision, by "
        "measurement for all others.",
        f"## How it was counted\n\n- {words[0].upper()}{words[1:]}.\n- Neighbours: "
        f"{record['relation'].replace('_', ' ')}. Sampling: {record['sampler']}; "
        f"{_amplification(release)}.",
    ]
    return "\n\n".join(parts) + "\n"


def card(
    record: dict[str, Any],
    methods: Sequence[str],
    shape: Sequence[int],
    classes: int,
    labels: Sequence[str] | None,
) -> str:
    """Return the model card of a release in the format of model hubs: metadata, and limits of use.

    Args:
        methods: name of the method, and of its warm-up if any.
        shape: shape of images, (channels, height, width).
        classes: number of labels.
        labels: their names, if published.
    """
    named = f" ({', '.join(labels)})" if labels else ""
    release, (channels, height, width) = record["views"]["release"], shape
    kind = "grey" if channels == 1 else "colour"
    if release["epsilon"] is None:
        promise = f"There is no privacy bound: {release['reason']}."
    else:
        promise = (
            f"({format_epsilon(release['epsilon'])}, {record['delta']:g})-differential privacy "
            f"per {record['unit']}, against any reader of this folder: `PRIVACY.md` explains what "
            f"that means and what it does not cover.{exceptions(record)}"
        )
    tags = "".join(f"- {method}\n" for method in methods)
    warning = "**An experiment, not for release**: its noise is derived from a seed.\n\n"
    return (
        "---\nlibrary_name: fedgen\npipeline_tag: unconditional-image-generation\n"
        f"tags:\n- differential-privacy\n- synthetic-data\n{tags}---\n\n"
        f"# A private generator of images ({' after '.join(methods)})\n\n"
        "![Samples](samples.png)\n\n"
        f"{warning if record['noise'] == 'seeded' else ''}"
        f"Generates {kind} images of {width} x {height} pixels with {classes} "
        f"label{'s' if classes > 1 else ''}{named}. {promise}\n\n## Use\n\n"
        "With fedgen (see its README for installation): `fedgen sample run=FOLDER out=FILE.npz`, "
        "or in Python\n\n"
        "```python\nimport fedgen\n\nimages, labels = fedgen.load(FOLDER).samples(1000)\n```\n\n"
        "## Limits\n\n"
        "- Samples resemble the training data as a whole. Noise first hides rare kinds of images, "
        "and differences within a label.\n"
        "- This folder contains no measure of utility. Evaluate samples on your own data before "
        "you rely on them.\n"
        "- The generator may reproduce properties of groups in the training data.\n"
    )


_SELECTED = (
    "- The set of clients and its size: they are a selected group, possibly selected by their "
    "data. What membership reveals about a client, and about others, is not protected by noise.\n"
)


def sums(record: dict[str, Any]) -> list[str]:
    """Return the section on where the noise of a sum was added and who must be honest, unless each
    client adds its own."""
    aggregation = record["aggregation"]
    if aggregation["kind"] == "trusted":
        return [
            "## Who added the noise\n\nAn aggregator that received messages of clients without "
            "noise. There is no bound against its operator."
        ]
    if aggregation["kind"] == "local":
        return []
    more = "; ".join(
        f"with {bound['colluders']} of the {aggregation['asked']} doing so, ε against them is "
        f"{format_epsilon(bound['epsilon'])}"
        for bound in aggregation["if_more_collude"]
    )
    return [
        "## Who added the noise\n\n"
        f"The {aggregation['asked']} clients together: each added a share, and at least "
        f"{aggregation['threshold']} shares are in every sum. The server learned only the sums, "
        "the responders, and times.\n\n"
        f"- The bound holds if at most {aggregation['colluders']} clients reveal their terms to "
        "others"
        + (f"; {more}" if more else "")
        + ". A client that reads the release, knowing its own share, counts as one.\n"
        + (
            "- Responses were sent under masks, which can be removed only from their sum.\n"
            if aggregation["masks"]
            else "- In this run, a simulation with the terms of all clients computed the sum; "
            "secure aggregation between sites hides them.\n"
        )
        + (
            "- Clients signed their keys and the lists of responders. Clients that know the "
            "fingerprints of the others detect a server that forges these.\n"
            if aggregation.get("signed")
            else "- The bound assumes a server that follows the protocol. A server that forges "
            "keys, sends clients different lists, or operates clients is not covered.\n"
        )
        + "- A client may send any number: the utility of the sum is not protected, and a client "
        "that omits its noise counts as a colluder.\n"
        "- Responders, failures and response times are visible, and not covered."
    ]


def protected(record: dict[str, Any]) -> str:
    """Describe the unit that ε protects."""
    one = {
        "record": "one image with its label",
        "client": "all images of one client together",
        "person": "all images of one person at one client together, of which at most "
        f"{record.get('images_per_person', 1)} count,",
    }[record["unit"]]
    how = {
        ("record", "replace_one"): "was among the training data, or another in its place",
        ("client", "replace_one"): "were among the training data, or others in their place",
        ("record", "add_or_remove_one"): "was among the training data, or not",
        ("person", "add_or_remove_one"): "were among the training data, or not",
        ("client", "add_or_remove_one"): "were among the training data, or it had none: how many "
        "clients there are is public",
    }[record["unit"], record["relation"]]
    return f"Whether {one} {how}."


def exceptions(record: Mapping[str, Any]) -> str:
    """Describe the clients that ε does not cover, from a privacy record."""
    return unbounded_note(len(record["without_bound"]), len(record["clients"]))


def unbounded_note(lost: int, clients: int) -> str:
    """State that ε does not cover ``lost`` of the clients."""
    if not lost:
        return ""
    return (
        f" For {lost:,} of the {clients:,} clients there is no bound: a computation over their "
        "records failed, or they sent unplanned releases."
    )


def guarantee_of(view: Mapping[str, Any], delta: float) -> Guarantee:
    """Return the trade-off curve of a view; for a view of 0.1.0, which has none, what follows from
    its (ε, δ). Raises ValueError, KeyError or TypeError for an invalid one."""
    stored = view.get("guarantee")
    if stored and (stored["mu"] is not None or "profile" in stored):
        return guarantee.from_json(stored)
    return guarantee.of_pair(math.inf if view["epsilon"] is None else view["epsilon"], delta)


def strength(view: Mapping[str, Any], delta: float) -> str:
    """Describe a view with a bound by the power of the best test at 1 % of false positives."""
    power = guarantee_of(view, delta).tpr(0.01)
    most = guarantee.round_up(100 * power)
    finds = "may find all that were"
    if float(most) < 100:
        finds = f"finds at most {most} in 100 that were"
    rest = (
        ". The guarantee alone excludes little." if power > 0.9 else "; by chance, it would find 1."
    )
    return (
        "In other words: an attacker who wrongly accuses 1 in 100 of those that were not included "
        f"{finds}{rest}"
    )


def _several_records(view: Mapping[str, Any]) -> str:
    """State ε for several images of one person, if it is known."""
    if not (epsilons := view.get("group_epsilon")):
        return ""
    sizes = ", ".join(epsilons)
    values = ", ".join(format_epsilon(value) for value in epsilons.values())
    return f"\n\nFor {sizes} images of one person at one client together, ε is at most {values}."


def _amplification(view: dict[str, Any]) -> str:
    if view["amplified_by"]:
        return f"amplified by the {view['amplified_by']}"
    return f"no amplification: {view['reason']}" if view["reason"] else "no amplification"


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
    lines.extend(str(path / name) for name in files)
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
        rows.append(
            ("gen2real average", f"{average:.1%}, {calibrated:.1%} of training on real images")
        )
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
    classifiers, or if one has no result.
    """
    pairs = [
        (scores["mean"], results["real2real"].get(name, {}).get("mean"))
        for name, scores in results[kind].items()
    ]
    if len(pairs) < 2 or any(accuracy is None or not real for accuracy, real in pairs):
        return None, None
    count = len(pairs)
    return (
        sum(accuracy for accuracy, _ in pairs) / count,
        sum(accuracy / real for accuracy, real in pairs) / count,
    )
