"""A run's privacy and results in sentences."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgen.reporting.progress import bytes_in_words, epsilon_in_words, pace_in_words

NOT_IN_THE_FOLDER = (
    "Whoever runs the training, takes part or sees its messages: bounds of their own, not in this "
    "folder."
)
"""What the statement does not cover, and a page of the whole run does."""


def statement(
    record: dict[str, Any], words: str, picked: bool = False, outside: Sequence[str] = ()
) -> str:
    """The privacy statement that goes with what is published. ``picked``: whether the clients are a
    group that was picked, by whatever; ``outside``: code that the run used and that is not
    fedgen's."""
    release = record["views"]["release"]
    parts = ["# What this generator reveals about the private data"]
    if record["noise"] == "seeded":
        parts.append(
            "**An experiment, not for release.** The noise of this run follows from its seed: "
            "whoever knows the seed can remove it."
        )
    if outside:
        parts.append(
            f"**With code from outside of fedgen** ({', '.join(outside)}). Its bounds are its "
            "author's: no test of fedgen's holds them."
        )
    if release["epsilon"] is None:
        parts.append(f"There is no bound: {release['reason']}.")
    else:
        parts += [
            f"## What is protected\n\n{protected(record)}{but_for(record)}",
            "## Against whom\n\nAnybody who has this folder and nothing else of the run, whatever "
            "they know from elsewhere: even all of the other data, and how this program works.",
            f"## How strongly\n\n(ε, δ)-differential privacy with ε = "
            f"{epsilon_in_words(release['epsilon'])} and δ = {record['delta']:g} "
            f"({release['accountant']}). {strength(release['epsilon'], record['delta'])}",
        ]
    parts += [
        *sums(record),
        "## What is not covered\n\n"
        "- What the data say about people whether or not one of them takes part: a generator is "
        "meant to tell what is common.\n"
        "- Several generators from the same data: their ε add up.\n"
        "- Choices made by looking at private data, among runs or settings.\n"
        + (_PICKED if picked else "")
        + f"- {NOT_IN_THE_FOLDER}\n"
        "- The settings that `generator.json` lists: they count as public, including a number of "
        "rows that one of them names.\n"
        "- Timing. The noise is exact to the last bit if AES-256 in counter mode cannot be told "
        "from random bits. Rounding errors of sums before the noise are part of ε: by a proven "
        "bound for gradients of rows that are added in double precision, by measurement for all "
        "else.",
        f"## How it was counted\n\n- {words[0].upper()}{words[1:]}.\n- Neighbours: "
        f"{record['relation'].replace('_', ' ')}. Draws: {record['sampler']}; "
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
    """The model card of what is published, as hubs read it: metadata, and what to know before use.

    Args:
        methods: the method's name, and that of its warm-up if it had one. shape: of the images,
            (channels, height, width). classes: number of labels. labels: their names, if these are
            published.
    """
    named = f" ({', '.join(labels)})" if labels else ""
    release, (channels, height, width) = record["views"]["release"], shape
    kind = "grey" if channels == 1 else "colour"
    if release["epsilon"] is None:
        promise = f"There is no privacy bound: {release['reason']}."
    else:
        promise = (
            f"({epsilon_in_words(release['epsilon'])}, {record['delta']:g})-differential privacy "
            f"per {record['unit']}, against whoever has this folder: `PRIVACY.md` says what that "
            f"means and what it does not cover.{but_for(record)}"
        )
    tags = "".join(f"- {method}\n" for method in methods)
    warning = "**An experiment, not for release**: its noise follows from a seed.\n\n"
    return (
        "---\nlibrary_name: fedgen\npipeline_tag: unconditional-image-generation\n"
        f"tags:\n- differential-privacy\n- synthetic-data\n{tags}---\n\n"
        f"# A private generator of images ({' after '.join(methods)})\n\n"
        "![Samples](samples.png)\n\n"
        f"{warning if record['noise'] == 'seeded' else ''}"
        f"Draws {kind} images of {width} x {height} pixels with {classes} "
        f"label{'s' if classes > 1 else ''}{named}. {promise}\n\n## Use\n\n"
        "With fedgen (its README says how to install it): `fedgen sample run=FOLDER out=FILE.npz`, "
        "or in Python\n\n"
        "```python\nimport fedgen\n\nimages, labels = fedgen.load(FOLDER).samples(1000)\n```\n\n"
        "## Limits\n\n"
        "- Samples resemble the training data as a whole. Rare kinds of images, and differences "
        "within a label, are what noise hides first.\n"
        "- How useful samples are was not measured on anything in this folder. Judge them on data "
        "of your own before you rely on them.\n"
        "- What the training data say about groups, the generator may say too.\n"
    )


_PICKED = (
    "- Who took part, and how many: the clients are a group that was picked, perhaps by looking at "
    "their data. What a client's being in it tells about the client, and about others, comes "
    "without noise.\n"
)


def sums(record: dict[str, Any]) -> list[str]:
    """Where the noise of a sum is made by others than each client: by whom, and who has to be
    honest; a section, or none."""
    found = record["aggregation"]
    if found["kind"] == "trusted":
        return [
            "## Who made the noise\n\nAn aggregator that took in what clients sent without noise. "
            "Against whoever runs it there is no bound."
        ]
    if found["kind"] == "local":
        return []
    more = "; ".join(
        f"with {each['colluders']} of the {found['asked']} doing so, ε against them is "
        f"{epsilon_in_words(each['epsilon'])}"
        for each in found["if_more_collude"]
    )
    return [
        "## Who made the noise\n\n"
        f"The {found['asked']} clients together: each added a share, and at least "
        f"{found['threshold']} shares are in every sum. The server learned sums "
        "alone, who answered, and when.\n\n"
        f"- The bound holds if at most {found['colluders']} clients tell others what they added"
        + (f"; {more}" if more else "")
        + ". A client that reads what is published, knowing its own share, counts as one.\n"
        + (
            "- Answers travelled under masks, whose sum alone can be undone.\n"
            if found["masks"]
            else "- In this run the sum was made in a simulation, which had every client's part: "
            "that nobody else has them is what secure aggregation is for.\n"
        )
        + (
            "- Clients signed their keys and who answered. A server that forges these is noticed "
            "by those who were told the others' fingerprints.\n"
            if found.get("signed")
            else "- A server that follows the protocol is what the bound is about. One that forges "
            "keys, tells clients different lists, or runs clients of its own is not covered.\n"
        )
        + "- A client may send any number: the sum's use is not protected, and one that leaves its "
        "noise out counts as a colluder.\n"
        "- Who answers, who fails and how fast is seen, and not counted."
    ]


def protected(record: dict[str, Any]) -> str:
    """What epsilon is about."""
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


def but_for(record: Mapping[str, Any]) -> str:
    """Whom epsilon is not about, of a record of privacy."""
    return without_bound(len(record["without_bound"]), len(record["clients"]))


def without_bound(lost: int, clients: int) -> str:
    """That epsilon is not about ``lost`` of the clients."""
    if not lost:
        return ""
    return (
        f" For {lost:,} of the {clients:,} clients there is no bound: a computation over their "
        "rows failed, or what they sent was not what was planned."
    )


def strength(epsilon: float, delta: float) -> str:
    """What (epsilon, delta) means for a test with a rate a of false alarms: it finds at most
    min(e^eps a + delta, 1 - e^-eps (1 - delta - a)) (Kairouz, Oh, Viswanath 2015)."""
    alarms = 0.01
    upper = math.exp(min(epsilon, 50.0)) * alarms + delta
    found = min(1.0, upper, 1 - math.exp(-epsilon) * (1 - delta - alarms))
    most = math.ceil(1000 * found) / 10
    finds = f"finds at most {most:.1f} in 100 that were" if most < 100 else "may find all that were"
    rest = (
        ". The guarantee alone rules little out at this ε."
        if found > 0.9
        else "; by chance it would find 1."
    )
    return (
        "In other words: an attacker who wrongly accuses 1 in 100 of those that were not there "
        f"{finds}{rest}"
    )


def _amplification(view: dict[str, Any]) -> str:
    if view["amplified_by"]:
        return f"amplified by the {view['amplified_by']}"
    return f"no amplification: {view['reason']}" if view["reason"] else "no amplification"


SERVER_SIDE = """\
# Not for release

What is here belongs to whoever runs the training. `public/` alone may be handed out, and only that
of a run by secret noise: `fedgen release` makes one. Of an experiment, whose noise follows from its
seed, nothing may: `public/PRIVACY.md` says which it is.

Ledgers, bytes and failures tell who took part and when; checkpoints may tell more. An evaluation
looks at private rows outside any mechanism, and `nearest.png` shows some; `partition.png` counts
each client's labels.
"""


PARTS = {"critics": "clients train", "routing": "answer", "generator": "the server"}
"""Of a round, in words."""


_LITTLE = 0.5
"""Of what real rows teach a classifier: below, samples are of little use."""


def summary(path: Path) -> str:
    """What a run came to, for people."""
    results = json.loads((path / "results.json").read_text())
    record = json.loads((path / "privacy.json").read_text())
    eps = {name: epsilon_in_words(value) for name, value in results["epsilon"].items()}
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
        lines.append(but_for(record).strip())
    lines += [
        f"with colluders beside the server ({each['colluders']}): "
        f"ε {epsilon_in_words(each['epsilon'])}"
        for each in record["aggregation"].get("if_more_collude", [])
    ]
    if record["noise"] == "seeded":
        lines.append("noise follows from the seed: an experiment, not for release")
    if results["stopped"]:
        lines.append(f"stopped after round {results['rounds']}: {results['stopped']}")
    more = "take more rounds, a larger ε, more rows, or method=mixture"
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
            "learning rate, or take fewer rounds or method=mixture"
        )
    elif looks == "noise":
        lines.append(
            "the samples look like noise: neighbouring pixels hardly agree (correlation "
            f"{results['coherence']:.2f}, 0.3 to 0.9 for photographs and digits); {more}"
        )
    elif of_real is not None and of_real < _LITTLE:
        lines.append(f"the samples teach little of what real rows do; {more}")
    _, seen = averages(results, "real2gen")
    if "classifier" in results and seen is not None and seen < _LITTLE:
        lines.append(
            "the samples seldom look like the labels that the private classifier gave them: try "
            "method.teacher=none"
        )
    lines += quality(results)
    taken = results["seconds_per_round"]
    parts = ", ".join(f"{said} {taken[n]:.2g} s" for n, said in PARTS.items() if n in taken)
    if results["rounds_per_second"]:
        pace = pace_in_words(results["rounds"], results["seconds"])
        peak = bytes_in_words(results["peak_rss_bytes"])
        lines.append(f"{pace} ({parts} a round), peak memory {peak}")
    made = (
        "public/samples.png",
        "public/generator.safetensors",
        "privacy.json",
        "results.json",
        "epsilon.png",
    )
    lines.extend(str(path / name) for name in made)
    return "\n".join(lines)


def quality(results: dict[str, Any]) -> list[str]:
    """How good samples are, for people: a line for each classifier, and one for each other figure
    that was computed."""
    lines = []
    for name, found in results["gen2real"].items():
        if found["mean"] is None:
            lines.append(f"gen2real {name}: not computed, there is one label only")
            continue
        line = f"gen2real {name}: {found['mean']:.1%}"
        beside = []
        if found.get("interval") is not None:
            low, high = found["interval"]
            beside.append(f"95 %: {low:.1%} to {high:.1%}, of {found['tested']:,} test rows")
        real = results["real2real"].get(name, {}).get("mean")
        if real is not None:
            beside.append(f"trained on real rows: {real:.1%}")
        line += f" ({'; '.join(beside)})" if beside else ""
        back = results["real2gen"].get(name, {}).get("mean")
        if back is not None:
            line += f"; real2gen: {back:.1%}"
        lines.append(line)
    return lines + [f"{name}: {text}" for name, text in figures(results)]


def figures(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Those beside the classifiers', by name, with the units and what they are compared with."""
    rows = []
    scores: dict[str, Any] = next(
        (s for s in results["gen2real"].values() if s["mean"] is not None), {}
    )
    per_class = scores.get("per_class", [])
    names = results.get("labels") or [f"{n} (counted from 0)" for n in range(len(per_class))]
    if none := [names[n] for n, found in enumerate(per_class) if found is None]:
        said = f"{', '.join(none)}: nothing tells of what use their samples are"
        rows.append(("labels without test images", said))
    if "diversity" in results:
        told = results["diversity"]
        said = f"{told['samples']:.0f} of 255 (real rows: {told['real']:.0f})"
        rows.append(("diversity within labels", said))
    average, calibrated = averages(results)
    if average is not None:
        rows.append(
            ("gen2real average", f"{average:.1%}, {calibrated:.1%} of what real rows reach")
        )
    if "classifier" in results:
        told = results["classifier"]
        rows.append(
            ("the private classifier beside it", f"{told['mean']:.1%} of {told['n']:,} real rows")
        )
    if "inception_score" in results:
        scores, distances = results["inception_score"], results["fcd"]
        rows += [
            (
                "inception score",
                f"{scores['generated']['mean']:.2f} of {scores['generated']['n']:,} (real test "
                f"split: {scores['test']['mean']:.2f}; classifier of "
                f"{scores['judge_accuracy']:.1%})",
            ),
            (
                "FCD",
                f"{distances['generated']:.3g} (real training split: {distances['train']:.3g})",
            ),
            ("precision", f"{results['precision']:.1%}"),
            ("recall", f"{results['recall']:.1%}"),
        ]
    if "distinct" in results:
        rows.append(
            (
                "FID, FCD, inception score, precision and recall",
                f"not computed: {results['distinct']} images, which repeat",
            )
        )
    if "fid" in results:
        rows.append(("FID", f"{results['fid']:.2f}"))
    if "memorization" in results:
        copies, attack = results["memorization"], results["membership"]
        rows += [
            (
                "copies of training rows",
                f"{copies['copied']:.2%} of {copies['n']:,} samples copy one of "
                f"{copies['train']:,} training rows; {copies['by_chance']:.2%} copy one of "
                f"{copies['test']:,} rows that were not trained on (p = {copies['p_value']:.2g})",
            ),
            (
                "membership inference",
                f"AUC {attack['auc']:.3f}, {attack['tpr_at_1_percent_fpr']:.1%} of "
                f"{attack['members']:,} members found at 1 % false alarms, from "
                f"{attack['samples']:,} samples",
            ),
        ]
    return rows


def averages(results: dict[str, Any], kind: str = "gen2real") -> tuple[float | None, float | None]:
    """gen2real (or real2gen) averaged over the classifiers, and the average of each over what it
    has on real rows ("GS-WGAN", section 5.1, calibrated accuracy); None for fewer than two
    classifiers, or where one has no figure."""
    pairs = [
        (found["mean"], results["real2real"].get(name, {}).get("mean"))
        for name, found in results[kind].items()
    ]
    if len(pairs) < 2 or any(made is None or not real for made, real in pairs):
        return None, None
    count = len(pairs)
    return sum(made for made, _ in pairs) / count, sum(made / real for made, real in pairs) / count
