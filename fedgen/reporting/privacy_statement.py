"""Text of ``PRIVACY.md``: what a release reveals about the private data, in sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedgen.privacy import guarantee
from fedgen.privacy.guarantee import Guarantee
from fedgen.reporting.progress import format_epsilon

NOT_IN_THE_FOLDER = (
    "Operators and participants of the training, and observers of its messages: their bounds are "
    "not in this folder."
)
"""Sentence of the release's statement on the views that only the report of the run states."""


def statement(
    record: dict[str, Any],
    words: str,
    *,
    picked: bool = False,
    unselected: bool = False,
    outside: Sequence[str] = (),
) -> str:
    """Return the privacy statement of a release.

    Args:
        picked: whether the clients are a selected group.
        unselected: whether this is a run of ``fedgen tune`` that was not selected.
        outside: code of extensions that the run used.
    """
    release = record["views"]["release"]
    parts = ["# What this generator reveals about the private data"]
    if record["noise"] == "seeded":
        parts.append(
            "**An experiment, not for release.** The noise of this run is derived from its seed: "
            "anyone who knows the seed can remove it."
        )
    if unselected:
        parts.append(
            "**A run of `fedgen tune`, not for release.** It must stay secret: the ε below does "
            "not cover a selection among several runs."
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
            f"{_paragraph(several_records(release))}",
        ]
    parts += [
        *sums(record),
        "## What is not covered\n\n"
        "- Facts about the population that do not depend on any single participant: a generator "
        "is meant to show what is common.\n"
        "- Several generators from the same data: their ε must be added.\n"
        f"- {_FURTHER_CHOICE if 'selection' in record else _UNCOVERED_CHOICE}\n"
        + (_SELECTED if picked else "")
        + f"- {NOT_IN_THE_FOLDER}\n"
        "- The settings in `generator.json`, which count as public, including numbers of images "
        "in them: they are not protected.\n"
        "- Timing. The noise is exact to the last bit, assuming that AES-256 in counter mode is "
        "indistinguishable from random bits. ε includes rounding errors of sums before the noise: "
        "by a proven bound for gradients of records that are summed in double precision, by "
        "measurement for all others.",
        f"## How it was counted\n\n{selection_item(record)}- {words[0].upper()}{words[1:]}.\n- "
        "Neighbours: "
        f"{record['relation'].replace('_', ' ')}. Sampling: {record['sampler']}; "
        f"{_amplification(release)}.",
    ]
    return "\n\n".join(parts) + "\n"


_UNCOVERED_CHOICE = "The choice of the best of several runs or settings by looking at private data."
_FURTHER_CHOICE = "A further choice among several generators by looking at private data."
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
        "person": "all images of one person at one client together",
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


def selection_item(record: Mapping[str, Any]) -> str:
    """State that the choice of settings is covered, as a list item; empty for other runs."""
    if "selection" not in record:
        return ""
    count = record["selection"]["grid_points"]
    return (
        f"- Selected from a grid of {count:,} settings by a noisy score on private data. The "
        "selection is inside ε, as long as the number of runs and all other runs stay secret.\n"
    )


def several_records(view: Mapping[str, Any]) -> str:
    """State ε for several images of one person; empty if it is not known."""
    epsilons = view.get("group_epsilon") or {}
    sizes = [f"{format_epsilon(value)} for {count}" for count, value in epsilons.items() if value]
    if not sizes:
        unbounded = (
            "ε protects single images, and no useful bound for several of one person is known."
        )
        return unbounded if epsilons else ""
    listed = f"{', '.join(sizes[:-1])} and {sizes[-1]}" if len(sizes) > 1 else sizes[0]
    return (
        "ε protects single images. A person with several images at one client is protected less: "
        f"ε is at most {listed} of them together, and grows further with their number."
    )


def _paragraph(text: str) -> str:
    return f"\n\n{text}" if text else ""


def _amplification(view: dict[str, Any]) -> str:
    if view["amplified_by"]:
        return f"amplified by the {view['amplified_by']}"
    return f"no amplification: {view['reason']}" if view["reason"] else "no amplification"
