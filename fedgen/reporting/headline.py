"""The head of a report: its subject, how much the generator reveals about one image, and the
context for a data protection officer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedgen.errors import FedgenError
from fedgen.privacy.budget import delta_limit
from fedgen.privacy.guarantee import PRIORS, SHARE_FOUND
from fedgen.reporting.progress import format_epsilon
from fedgen.reporting.summary import guarantee_of, protected
from fedgen.storage.io import read_json

ABOUT = {
    "controller": "who determines the purposes and means of processing",
    "purpose": "purpose of the generator",
    "data": "which data, of whom, from which period",
    "persons": "whether one person may have several images, and how many",
}
"""Statements about the data, by setting under ``about``."""

_WEAK_ABOVE = math.log(90)
"""From this ε, a test with 1 % of false alarms may find nine in ten members."""

_MOST_DIGITS = 4


def tier(value: float | None, delta: float, protected: int | None) -> str:
    """Describe (ε, δ) in words: the tiers of Ponomareva et al. 2023, "How to DP-fy ML", section
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
        little = "; the guarantee alone excludes little" if value > _WEAK_ABOVE else ""
        return f"reasonable by convention (ε of at most 10){little}"
    return "weak: the guarantee alone excludes little (ε above 10)"


def beliefs(view: Mapping[str, Any], delta: float) -> list[str]:
    """Return the posterior probability of membership after each of ``PRIORS`` as text."""
    if view["epsilon"] is None or delta >= SHARE_FOUND:
        return ["no bound"] * len(PRIORS)
    curve = guarantee_of(view, delta)
    return [format_belief(curve.posterior(prior)) for prior in PRIORS]


_NOISE = {
    "secure": "From the operating system, not from a seed.",
    "seeded": "From a seed: anyone who knows it can remove the noise.",
    "none": "None.",
}


def headline(
    views: Mapping[str, Mapping[str, Any]], record: Mapping[str, Any], but_for: str
) -> dict[str, Any]:
    """Describe what an adversary can achieve, for each of ``views``.

    Args:
        views: adversary -> its ``epsilon`` and ``guarantee``.
        but_for: clients that these do not cover, as text.
    """
    names = {"server": "the operator of the training", "release": "a reader of the release"}
    return {
        "protected": None
        if all(view["epsilon"] is None for view in views.values())
        else protected(dict(record)) + but_for,
        "unit": record["unit"],
        "delta": record["delta"],
        "seeded": record["noise"] == "seeded",
        "noise": _NOISE[record["noise"]],
        "found": SHARE_FOUND,
        "priors": PRIORS,
        "rows": [
            {
                "who": names[name],
                "epsilon": view["epsilon"],
                "tier": tier(view["epsilon"], record["delta"], record.get("protected")),
                "beliefs": beliefs(view, record["delta"]),
            }
            for name, view in views.items()
        ],
    }


def format_belief(belief: float) -> str:
    """Format a belief in percent, rounded up, with enough digits to differ from certainty."""
    for digits in range(1, _MOST_DIGITS + 1):
        percent = math.ceil(belief * 10 ** (digits + 2)) / 10**digits
        if percent < 100:
            return f"≤ {percent:.{digits}f} %"
    return "< 100 %"


def context_rows(about: Mapping[str, Any]) -> list[tuple[str, str, str | None]]:
    """Return (subject, setting, value), None for missing values."""
    return [(what, f"about.{key}", about.get(key) or None) for key, what in ABOUT.items()]


def adversary_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return ε of the clients if there are several: minimum, median (of an even number, the upper
    one) and maximum."""
    rows = []
    for name in ("server", "release"):
        epsilons = sorted(
            math.inf if client[name] is None else client[name]
            for client in record["clients"].values()
        )
        if len(epsilons) > 1:
            quantiles = (epsilons[0], epsilons[len(epsilons) // 2], epsilons[-1])
            rows.append({"who": name, "some": [None if math.isinf(e) else e for e in quantiles]})
    return rows


def audit_rows(run: Path) -> list[str]:
    """Return the results of ``fedgen audit`` on this run as sentences; empty if there is none.

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
            f"After {point['releases']} {'rounds' if point['of'] == 'run' else 'releases'} an "
            f"attack on {'the run' if point['of'] == 'run' else point['of']} shows an ε of at "
            f"least {float(point['lower_bound']):.2f} ({confidence:.0%} confidence); proven: at "
            f"most {format_epsilon(point['proven'])}."
            for point in points
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedgenError("runs", f"{file} cannot be read", "restore it") from error
