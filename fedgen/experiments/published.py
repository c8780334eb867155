"""Published recipes (``configs/published``): what was claimed, what their formula gives, what is
proven, and the noise that would make the claim true."""

from __future__ import annotations

import json
import math
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import resources
from typing import Any

from dp_accounting import ComposedDpEvent, DpEvent
from omegaconf import DictConfig, OmegaConf

from fedgen.errors import FedgenError
from fedgen.privacy.accounting import (
    Accountant,
    Epsilon,
    claimed_by_rdp,
    epsilon,
    rough_epsilon,
)
from fedgen.privacy.calibration import least_noise
from fedgen.privacy.events import Relation, canonical, from_json
from fedgen.reporting.progress import RunProgress, epsilon_in_words
from fedgen.reporting.run_dir import or_null


@dataclass(frozen=True)
class Recipe:
    """One row of a paper. Its events are written down as functions of the noise multiplier."""

    config: DictConfig

    @classmethod
    def of(cls, name: str) -> Recipe:
        """A recipe by the name of its file.

        Raises:
            FedgenError: if there is none.
        """
        if name not in names():
            raise FedgenError(
                "published", f"there is no {name!r}", f"choose all, {', '.join(names())}"
            )
        config = OmegaConf.create((_FOLDER / f"{name}.yaml").read_text())
        assert isinstance(config, DictConfig)
        config.gaussian = {"event": "gaussian", "noise_multiplier": "${noise_multiplier}"}
        return cls(config)

    def event(self, part: str, noise: float) -> DpEvent:
        """``formula``, ``server`` or ``release`` at a noise multiplier: an event as ledgers have
        it, or several of them, ``composed``."""
        config = self.config.copy()
        config.noise_multiplier = noise
        written = OmegaConf.to_container(config, resolve=True)
        assert isinstance(written, dict)
        if written[part]["event"] == "composed":
            return ComposedDpEvent([from_json(each) for each in written[part]["of"]])
        return from_json(written[part])

    def proven(self, noise: float, by: Accountant = epsilon) -> dict[str, Epsilon]:
        """epsilon by adversary."""
        relation = Relation(self.config.relation)
        return {
            view: by(canonical(self.event(view, noise)), self.config.delta, relation)
            for view in ("server", "release")
        }

    def noise_for(self, target: float) -> float:
        """The noise multiplier that proves ``target`` against every adversary with a bound."""

        def largest(noise: float, by: Accountant) -> float:
            return max(found.value or 0.0 for found in self.proven(noise, by).values())

        return least_noise(
            lambda noise: largest(noise, epsilon),
            target,
            lambda noise: largest(noise, rough_epsilon),
        )


_FOLDER = resources.files("fedgen.configs") / "published"


def names() -> list[str]:
    """All recipes."""
    files = [each.name for each in _FOLDER.iterdir() if each.name.endswith(".yaml")]
    return sorted(name.removesuffix(".yaml") for name in files)


def account(config: DictConfig) -> str:
    """The recipe (or ``all``) that ``config.published`` names, as a table or as a JSON list.

    Raises:
        FedgenError: if there is none of that name.
    """
    rows = table(config.published)
    return json.dumps(rows) if config.output == "json" else in_words(rows)


def table(which: str) -> list[dict[str, Any]]:
    """One row for a recipe, or one for each if it is ``all``."""
    if which != "all":
        return [row(which)]
    longest_first = sorted(names(), key=lambda name: -(Recipe.of(name).config.steps or 0))
    rows: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor() as pool, RunProgress(stderr=True) as progress:
        for done in as_completed([pool.submit(row, name) for name in longest_first]):
            found = done.result()
            rows[found["name"]] = found
            progress.show("recipes", len(rows), len(longest_first), found["name"], end=False)
    return [rows[name] for name in names()]


def row(name: str) -> dict[str, Any]:
    """All that there is to say of a recipe."""
    recipe = Recipe.of(name)
    config = recipe.config
    told = ("recipe", "data", "unit", "relation", "delta", "claimed_epsilon", "noise_multiplier")
    facts = {"name": name, **{key: config[key] for key in (*told, "steps", "source", "note")}}
    if config.formula is None:
        return {**facts, **dict.fromkeys(_COUNTED)}
    found = recipe.proven(config.noise_multiplier)
    event = recipe.event("formula", config.noise_multiplier)
    relation = Relation(config.get("formula_relation", config.relation))
    goal = config.claimed_epsilon or config.target_epsilon
    bound = "release" if found["server"].value is None else "server"
    counted = (
        or_null(claimed_by_rdp(event, config.delta, relation)),
        or_null(found["server"].value),
        or_null(found["release"].value),
        found[bound].accountant,
        or_null(_by_rdp(found[bound])),
        recipe.noise_for(goal),
        goal,
    )
    return {**facts, **dict(zip(_COUNTED, counted, strict=True))}


_COUNTED = (
    "formula_epsilon",
    "server_epsilon",
    "release_epsilon",
    "accountant",
    "rdp_epsilon",
    "noise_multiplier_for_claim",
    "target_epsilon",
)
"""What a row has of a recipe that can be counted."""


def _by_rdp(found: Epsilon) -> float | None:
    return found.value if found.accountant.startswith("RDP") else found.second_opinion


def in_words(rows: list[dict[str, Any]]) -> str:
    """The rows as a table that is also Markdown."""
    head = [
        "recipe",
        "data",
        "unit",
        "δ",
        "claimed ε",
        "its formula",
        "proven, server",
        "proven, release",
        "noise multiplier",
        "noise multiplier for the claim",
        "steps",
    ]
    lines = [head] + [
        [
            each["recipe"],
            each["data"],
            each["unit"],
            f"{each['delta']:.0e}".replace("e-0", "e-"),
            "none" if each["claimed_epsilon"] is None else f"{each['claimed_epsilon']:g}",
            *_counted(each),
        ]
        for each in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )


def _counted(found: dict[str, Any]) -> list[str]:
    if found["accountant"] is None:
        return ["none"] * 6
    aim = "" if found["claimed_epsilon"] else f" (ε = {found['target_epsilon']:g})"
    return [
        *(_short(found[f"{part}_epsilon"]) for part in ("formula", "server", "release")),
        f"{found['noise_multiplier']:g}",
        f"{found['noise_multiplier_for_claim']:.3g}{aim}",
        f"{found['steps']:,}",
    ]


def _short(value: float | None) -> str:
    if value is not None and value >= 1e6:
        return f"{value:.1e}".replace("e+0", "e")
    return epsilon_in_words(value if value is None or math.isfinite(value) else None)
