"""Account for published recipes (``configs/published.yaml``): the claimed ε, the result of the
paper's formula, the proven ε, and the noise at which the claim holds."""

from __future__ import annotations

import difflib
import functools
import json
import math
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import yaml
from dp_accounting import ComposedDpEvent, DpEvent
from omegaconf import DictConfig
from threadpoolctl import threadpool_limits

from fedgen.config.extensions import CONFIGS
from fedgen.errors import FedgenError
from fedgen.privacy.accounting import (
    Accountant,
    Epsilon,
    claimed_by_rdp,
    epsilon,
    rough_epsilon,
)
from fedgen.privacy.calibration import min_noise_multiplier
from fedgen.privacy.events import Relation, canonical, from_json
from fedgen.reporting.progress import RunProgress, format_epsilon
from fedgen.storage.schemas import or_null


@dataclass(frozen=True)
class Recipe:
    """A published recipe. Its events are functions of the noise multiplier."""

    facts: Mapping[str, Any]

    @classmethod
    def load(cls, name: str) -> Recipe:
        """Load a recipe by name.

        Raises:
            FedgenError: if there is none.
        """
        if name not in names():
            near = difflib.get_close_matches(name, names(), 1)
            hint = f"did you mean {near[0]}? " if near else ""
            remedy = f"{hint}choose all, {', '.join(names())}"
            raise FedgenError("published", f"there is no {name!r}", remedy)
        return cls(_recipes()[name])

    def event(self, part: str, noise: float) -> DpEvent:
        """Return the event of ``formula``, ``server`` or ``release`` at a noise multiplier. A part
        may name another part; several events are ``composed``."""
        written = self.facts[part]
        if written in ("formula", "server"):
            return self.event(written, noise)
        written = _with_noise(written, noise)
        if written["event"] == "composed":
            return ComposedDpEvent([from_json(event) for event in written["of"]])
        return from_json(written)

    def proven(self, noise: float, by: Accountant = epsilon) -> dict[str, Epsilon]:
        """Return ε by adversary."""
        relation = Relation(self.facts["relation"])
        return {
            view: by(canonical(self.event(view, noise)), self.facts["delta"], relation)
            for view in ("server", "release")
        }

    def noise_for_claim(self, target: float) -> float:
        """Return the noise multiplier at which ``target`` holds against every adversary that has a
        bound."""

        def largest(noise: float, by: Accountant) -> float:
            return max(bound.value or 0.0 for bound in self.proven(noise, by).values())

        return min_noise_multiplier(
            lambda noise: largest(noise, epsilon),
            target,
            lambda noise: largest(noise, rough_epsilon),
        )


def _with_noise(written: Any, noise: float) -> Any:
    """Replace the placeholder ``gaussian`` by the event at this noise multiplier, at any depth."""
    if written == "gaussian":
        return {"event": "gaussian", "noise_multiplier": noise}
    if isinstance(written, dict):
        # the kind of an event may be "gaussian", too
        others = {
            key: _with_noise(value, noise) for key, value in written.items() if key != "event"
        }
        return {"event": written["event"], **others}
    if isinstance(written, list):
        return [_with_noise(item, noise) for item in written]
    return written


@functools.cache
def _recipes() -> dict[str, dict[str, Any]]:
    recipes: dict[str, dict[str, Any]] = yaml.safe_load((CONFIGS / "published.yaml").read_text())
    return recipes


def names() -> list[str]:
    """Return the names of all recipes."""
    return list(_recipes())


def account(config: DictConfig) -> str:
    """Return the recipe named by ``config.published``, or ``all``, as a table or a JSON list.

    Raises:
        FedgenError: if there is none with this name.
    """
    rows = table(config.published)
    return json.dumps(rows) if config.output == "json" else describe(rows)


def table(which: str) -> list[dict[str, Any]]:
    """Return the row of a recipe, or of every recipe for ``all``."""
    if which != "all":
        return [row(which)]
    longest_first = sorted(names(), key=lambda name: -(Recipe.load(name).facts["steps"] or 0))
    rows: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor() as pool, RunProgress(stderr=True) as progress:
        for done in as_completed([pool.submit(_row_by_one_thread, name) for name in longest_first]):
            recipe_row = done.result()
            rows[recipe_row["name"]] = recipe_row
            progress.show("recipes", len(rows), len(longest_first), recipe_row["name"], end=False)
    return [rows[name] for name in names()]


def _row_by_one_thread(name: str) -> dict[str, Any]:
    with threadpool_limits(1):
        return row(name)


def row(name: str) -> dict[str, Any]:
    """Return all figures of a recipe."""
    recipe = Recipe.load(name)
    facts = recipe.facts
    copied = ("recipe", "data", "unit", "relation", "delta", "claimed_epsilon", "noise_multiplier")
    published_figures = {
        "name": name,
        **{key: facts[key] for key in (*copied, "steps", "source", "note")},
    }
    if facts["formula"] is None:
        return {**published_figures, **dict.fromkeys(_COUNTING)}
    proven = recipe.proven(facts["noise_multiplier"])
    event = recipe.event("formula", facts["noise_multiplier"])
    relation = Relation(facts.get("formula_relation", facts["relation"]))
    goal = facts["claimed_epsilon"] or facts["target_epsilon"]
    bound = "release" if proven["server"].value is None else "server"
    counted = (
        or_null(claimed_by_rdp(event, facts["delta"], relation)),
        or_null(proven["server"].value),
        or_null(proven["release"].value),
        proven[bound].accountant,
        or_null(_by_rdp(proven[bound])),
        recipe.noise_for_claim(goal),
        goal,
    )
    return {**published_figures, **dict(zip(_COUNTING, counted, strict=True))}


_COUNTING = (
    "formula_epsilon",
    "server_epsilon",
    "release_epsilon",
    "accountant",
    "rdp_epsilon",
    "noise_multiplier_for_claim",
    "target_epsilon",
)
"""Computed columns; None for a recipe that cannot be accounted."""


def _by_rdp(bound: Epsilon) -> float | None:
    return bound.value if bound.accountant.startswith("RDP") else bound.second_opinion


def describe(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table that is also Markdown."""
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
            recipe_row["recipe"],
            recipe_row["data"],
            recipe_row["unit"],
            f"{recipe_row['delta']:.0e}".replace("e-0", "e-"),
            "none"
            if recipe_row["claimed_epsilon"] is None
            else f"{recipe_row['claimed_epsilon']:g}",
            *_describe_counting(recipe_row),
        ]
        for recipe_row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )


def _describe_counting(recipe_row: dict[str, Any]) -> list[str]:
    if recipe_row["accountant"] is None:
        return ["none"] * 6
    aim = "" if recipe_row["claimed_epsilon"] else f" (ε = {recipe_row['target_epsilon']:g})"
    return [
        *(_short(recipe_row[f"{part}_epsilon"]) for part in ("formula", "server", "release")),
        f"{recipe_row['noise_multiplier']:g}",
        f"{recipe_row['noise_multiplier_for_claim']:.3g}{aim}",
        f"{recipe_row['steps']:,}",
    ]


def _short(value: float | None) -> str:
    if value is not None and value >= 1e6:
        return f"{value:.1e}".replace("e+0", "e")
    return format_epsilon(value if value is None or math.isfinite(value) else None)
