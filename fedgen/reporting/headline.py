"""The head of a report: its subject, how much the generator reveals about one image, and the
context for a data protection officer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scipy.special import ndtr, ndtri

from fedgen.errors import FedgenError
from fedgen.privacy.budget import delta_limit
from fedgen.privacy.guarantee import (
    FALSE_POSITIVE_RATES,
    MIN_TPR,
    PRIORS,
    Guarantee,
    percent,
    round_up,
)
from fedgen.reporting.privacy_statement import guarantee_of, protected, several_records
from fedgen.reporting.progress import format_epsilon
from fedgen.storage.io import read_json
from fedgen.verify import ACCOUNT, MALFORMED, VerificationError, read_signed

ABOUT = {
    "controller": "who determines the purposes and means of processing",
    "purpose": "purpose of the generator",
    "data": "which data, of whom, from which period",
    "persons": "whether one person may have several images, and how many",
}
"""Statements about the data, by setting under ``about``."""

_MOST_DIGITS = 4
_MOST_KEYS = 4

_TIERS = (("strong", 1, 0.26806), ("reasonable by convention", 10, 2.00048))
"""Word, ε, and μ of the Gaussian mechanism with this ε at δ = 1e-5, rounded up."""


def tier(view: Mapping[str, Any], delta: float, protected: int | None) -> str:
    """Describe the bounds of a view in words, with the advantage and the true positive rate of an
    attack at 1 % false positives.

    The words are the tiers of Ponomareva et al. 2023, "How to DP-fy ML", section 5.2: ε of at most
    1 and 10. An attack must also be no stronger, by both figures, than on a Gaussian mechanism with
    this ε at δ = 1e-5. The figures alone do not suffice: they are small if a rare event reveals a
    record completely.

    Args:
        view: ``epsilon`` and ``guarantee``.
        protected: public number of protected records, clients or persons; None: unknown.
    """
    curve = _curve(view, delta)
    if curve is None:
        return "none: there is no bound"
    if delta > delta_limit(protected):
        return f"none: δ = {delta:g} is too large for a guarantee"
    fpr = FALSE_POSITIVE_RATES[-1]
    advantage, power = curve.advantage, curve.tpr(fpr)
    word = "weak"
    for name, epsilon, mu in reversed(_TIERS):
        is_weaker = advantage <= 2 * ndtr(mu / 2) - 1 and power <= ndtr(ndtri(fpr) + mu)
        if view["epsilon"] <= epsilon and is_weaker:
            word = name
    return (
        f"{word}: an attack has an advantage of at most {round_up(100 * advantage)} %, and finds "
        f"at most {round_up(100 * power)} % of the members at {100 * fpr:g} % false positives"
    )


def posteriors(view: Mapping[str, Any], delta: float) -> list[str]:
    """Return the posterior probability of membership after each of ``PRIORS`` as text."""
    curve = _curve(view, delta)
    if curve is None or delta >= MIN_TPR:
        return ["no bound"] * len(PRIORS)
    return [format_posterior(curve.posterior(prior)) for prior in PRIORS]


def _curve(view: Mapping[str, Any], delta: float) -> Guarantee | None:
    return None if view["epsilon"] is None else guarantee_of(view, delta)


_NOISE = {
    "secure": "The random number generator of the operating system: it cannot be reproduced.",
    "seeded": "A seed: anyone who knows it can remove the noise.",
    "none": "None.",
}


def headline(
    views: Mapping[str, Mapping[str, Any]], record: Mapping[str, Any], exceptions: str
) -> dict[str, Any]:
    """Describe what an adversary can achieve, for each of ``views``.

    Args:
        views: adversary -> its ``epsilon`` and ``guarantee``.
        exceptions: clients that these do not cover, as text.
    """
    names = {"server": "the operator of the training", "release": "a reader of the release"}
    return {
        "protected": None
        if all(view["epsilon"] is None for view in views.values())
        else protected(dict(record)) + exceptions,
        "unit": record["unit"],
        "delta": record["delta"],
        "seeded": record["noise"] == "seeded",
        "noise": _NOISE[record["noise"]],
        "several": several_records(views["release"]),
        "found": MIN_TPR,
        "priors": PRIORS,
        "rows": [
            {
                "who": names[name],
                "epsilon": view["epsilon"],
                "tier": tier(view, record["delta"], record.get("protected")),
                "posteriors": posteriors(view, record["delta"]),
            }
            for name, view in views.items()
        ],
    }


def format_posterior(posterior: float) -> str:
    """Format a posterior in percent, rounded up, with enough digits that it is not 100 %."""
    for digits in range(1, _MOST_DIGITS + 1):
        percent = math.ceil(posterior * 10 ** (digits + 2)) / 10**digits
        if percent < 100:
            return f"≤ {percent:.{digits}f} %"
    return "< 100 %"


def context_rows(about: Mapping[str, Any]) -> list[tuple[str, str, str | None]]:
    """Return (subject, setting, value), None for missing values."""
    return [(what, f"about.{key}", about.get(key) or None) for key, what in ABOUT.items()]


def vouching(public: Path) -> str:
    """Describe who signed the accounts of a run (``fedgen.verify``), from its published folder.

    Raises:
        FedgenError: for a file that is not valid.
    """
    file = public / "account.json"
    if not file.exists():
        return "No participant: there are no signed accounts."
    try:
        content = read_json(file)
        signed = [read_signed(entry, ACCOUNT, ()) for entry in content["accounts"]]
        ranges = [pair for text, _ in signed for pair in text["clients"]]
        covered, clients = sum(last - first + 1 for first, last in ranges), int(content["clients"])
    except (OSError, VerificationError, *MALFORMED) as error:
        raise FedgenError("runs", f"{file} is not valid", "restore it") from error
    keys = sorted({key for _, key in signed})
    names = ", ".join(keys[:_MOST_KEYS]) + (", ..." if len(keys) > _MOST_KEYS else "")
    plural = "s" if len(keys) > 1 else ""
    who = (
        "The only participant signed its own figures"
        if clients == covered == 1
        else f"{covered:,} of {clients:,} participants signed their own figures"
    )
    return (
        f"{who}, by {len(keys)} key{plural} ({names}): compare with the fingerprint{plural} that "
        f"{'they publish' if clients > 1 else 'it publishes'}. Anyone with the package of the "
        "release can recompute ε from these figures by fedgen verify. That does not check whether "
        "the noise was added, or what the data were."
    )


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
            f"Audit of {'the run' if point['of'] == 'run' else point['of']}, {point['releases']} "
            f"{'rounds' if point['of'] == 'run' else 'releases'}: ε ≥ "
            f"{float(point['lower_bound']):.2f} ({confidence:.0%} confidence); proven: ε ≤ "
            f"{format_epsilon(point['proven'])}."
            for point in points
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedgenError("runs", f"{file} cannot be read", "restore it") from error


def describe_attacks(record: Mapping[str, Any]) -> list[str]:
    """Return the content of ``attack.json`` as sentences: shares of members that are detected."""
    proven = {point["fpr"]: point["tpr"] for point in record["proven"] or ()}
    lines, interval = [], f"{100 * record['confidence']:g} % confidence interval"
    for name, points in record["attacks"].items():
        rates = [
            f"{100 * point['tpr']:.1f} % ({interval} {100 * point['low']:.1f} to "
            f"{100 * point['high']:.1f} %) at {100 * point['fpr']:g} % false positives"
            for point in points
        ]
        too_few = "too few non-members to measure these false positive rates"
        lines.append(f"{name}: detects {'; '.join(rates)}" if rates else f"{name}: {too_few}")
    bounds = [f"{percent(tpr)} at {100 * fpr:g} % false positives" for fpr, tpr in proven.items()]
    lines.append(
        f"proven bound: no attack detects more than {', '.join(bounds)} (unit: {record['unit']})"
        if bounds
        else "no proven bound: an attack may detect every member"
    )
    return lines
