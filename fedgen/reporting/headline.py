"""The head of a report: what it is, how much it tells about one image, and what a data protection
officer asks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dp_accounting import DpEvent, NonPrivateDpEvent

from fedgen.errors import FedgenError
from fedgen.files import read_json
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.budget import delta_limit
from fedgen.privacy.events import Relation, canonical, from_json, of_group
from fedgen.reporting.progress import epsilon_in_words
from fedgen.reporting.words import protected

PRIORS = (0.01, 0.1, 0.5)
FOUND = 0.01
"""The least share of those who were there that an attacker finds, for what follows to hold."""

ASKED = {
    "controller": "who decides why and how the data are used",
    "purpose": "what the generator is for",
    "data": "which data, of whom, from when",
    "persons": "whether one person may have several images, and how many",
}
"""What only people know, by the setting under ``about``."""

_RULES_OUT = math.log(90)
"""From here on a test with 1 % of false alarms may find nine in ten of those who were there."""

_GROUPS = (2, 5, 10)  # images of one person
_MOST_IN_WORDS = 300
_MOST_DIGITS = 4


def tier(value: float | None, delta: float, protected: int | None) -> str:
    """(epsilon, delta) in words: the tiers of Ponomareva et al. 2023, "How to DP-fy ML", section
    5.2, which assume a δ below 1/n.

    Args:
        protected: public number of protected records, clients or persons; None: unknown.
    """
    if value is None:
        return "none: there is no bound"
    if delta > delta_limit(protected):
        return f"none: δ = {delta:g} is too large for a guarantee"
    if value <= 1:
        return "strong (ε of at most 1)"
    if value <= 10:
        little = "; the guarantee alone rules little out" if value > _RULES_OUT else ""
        return f"reasonable by convention (ε of at most 10){little}"
    return "weak: the guarantee alone rules little out (ε above 10)"


def beliefs(value: float | None, delta: float) -> list[tuple[float, float]]:
    """(prior, posterior): how often an attacker is right at most who says of an image that it was
    there, and says so of at least a share ``FOUND`` of those that were.

    Proof. Of those that were there the attacker accuses a share t, of others f >= e^-eps (t -
    delta). Right among the accused are p t / (p t + (1 - p) f) for a prior p, which falls with f,
    and at the least f with t: at most p o / (p o + 1 - p), o = e^eps / (1 - delta / FOUND).
    """
    if value is None or delta >= FOUND:
        return [(prior, 1.0) for prior in PRIORS]
    odds = math.exp(min(value, _MOST_IN_WORDS)) / (1 - delta / FOUND)
    return [(prior, prior * odds / (prior * odds + 1 - prior)) for prior in PRIORS]


_NOISE = {
    "secure": "From the operating system: it follows from no seed.",
    "seeded": "From a seed: whoever knows it can remove the noise.",
    "none": "None.",
}


def headline(
    views: Mapping[str, float | None], record: Mapping[str, Any], but_for: str
) -> dict[str, Any]:
    """What an adversary can come to, of each of some ``views``. ``but_for``: whom these are not
    about, in words."""
    names = {"server": "whoever runs the training", "release": "whoever has what is published"}
    return {
        "protected": None
        if all(value is None for value in views.values())
        else protected(dict(record)) + but_for,
        "unit": record["unit"],
        "delta": record["delta"],
        "seeded": record["noise"] == "seeded",
        "noise": _NOISE[record["noise"]],
        "found": FOUND,
        "priors": PRIORS,
        "rows": [
            {
                "who": names[name],
                "epsilon": value,
                "tier": tier(value, record["delta"], record.get("protected")),
                "beliefs": [
                    at_most(after, value is not None and record["delta"] < FOUND)
                    for _, after in beliefs(value, record["delta"])
                ],
            }
            for name, value in views.items()
        ],
    }


def at_most(belief: float, bounded: bool) -> str:
    """A belief in percent, never rounded down, with as many digits as tell it from certainty."""
    if not bounded:
        return "no bound"
    for digits in range(1, _MOST_DIGITS + 1):
        percent = math.ceil(belief * 10 ** (digits + 2)) / 10**digits
        if percent < 100:
            return f"≤ {percent:.{digits}f} %"
    return "< 100 %"


def told(about: Mapping[str, Any]) -> list[tuple[str, str, str | None]]:
    """(what, which setting says it, what it says), None where nobody said it."""
    return [(what, f"about.{key}", about.get(key) or None) for key, what in ASKED.items()]


def by_adversary(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """epsilon of the clients, where there are several: the least, the median and the most."""
    rows = []
    for name in ("server", "release"):
        found = sorted(
            math.inf if each[name] is None else each[name] for each in record["clients"].values()
        )
        if len(found) > 1:
            some = (found[0], found[len(found) // 2], found[-1])
            rows.append({"who": name, "some": [None if math.isinf(e) else e for e in some]})
    return rows


def of_persons(record: Mapping[str, Any]) -> list[tuple[int, float | None]]:
    """(images of one person at a client, epsilon against the server of all of them together), of
    the client that spent most; empty where epsilon is about more than images already, or where no
    bound for several is known."""
    if record["unit"] != "record" or record["relation"] != Relation.ADD_OR_REMOVE_ONE.value:
        return []
    bounded = [c for c in record["clients"].values() if c["server"] is not None]
    if not bounded:
        return []
    most = max(bounded, key=lambda client: float(client["server"]))
    found = []
    for images in _GROUPS:
        spend: dict[DpEvent, int] = {}
        try:
            for event, count in most["events"]:
                for leaf, times in canonical(of_group(from_json(event), images), count).items():
                    spend[leaf] = spend.get(leaf, 0) + times
            bound = epsilon(spend, record["delta"], Relation.ADD_OR_REMOVE_ONE).value
        except ValueError:
            return []
        found.append((images, None if NonPrivateDpEvent() in spend else bound))
    return found


def audited(run: Path) -> list[str]:
    """What ``fedgen audit`` found in this run, in sentences; empty if it was no audit.

    Raises:
        FedgenError: for a record that cannot be read.
    """
    file = run / "audit.json"
    if not file.exists():
        return []
    try:
        record = read_json(file)
        part, confidence = record["run"], float(record["confidence"])
        points = [*record["program"]["points"], *part["points"]]
        return [
            f"After {each['after']} {'rounds' if each['of'] == 'run' else 'releases'} an attack on "
            f"{'the run' if each['of'] == 'run' else each['of']} shows an ε of at least "
            f"{float(each['lower_bound']):.2f} ({confidence:.0%} confidence); proven: at most "
            f"{epsilon_in_words(each['proven'])}."
            for each in points
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedgenError("runs", f"{file} cannot be read", "restore it") from error
