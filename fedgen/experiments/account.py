"""What a run would cost, before anything runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, get_args

from omegaconf import DictConfig

from fedgen.errors import FedgenError
from fedgen.experiments import settings
from fedgen.experiments.accounts import amplification
from fedgen.experiments.data import of_delta, of_the_digits
from fedgen.experiments.planning import UNLIMITED, view
from fedgen.experiments.settings import Setup
from fedgen.method import Kind, Plan
from fedgen.privacy.accounting import Epsilon
from fedgen.privacy.events import canonical, in_words
from fedgen.privacy.releases import Local, Secure
from fedgen.reporting.progress import epsilon_in_words
from fedgen.reporting.run_dir import or_null


def account(config: DictConfig) -> str:
    """The plan of a run and its epsilon by view, in words or as a JSON list of one row.

    Raises:
        FedgenError: for the first setting that does not work.
    """
    ready = settings.setup(config)
    views = planned_views(ready)
    return json.dumps([_row(ready, views)]) if config.output == "json" else _words(ready, views)


def planned_views(ready: Setup) -> dict[str, Epsilon]:
    """epsilon by adversary, if the run goes as far as it may."""
    privacy = ready.privacy
    budget = privacy.budget
    return {
        name: view(
            ready.method, budget, budget.rounds, budget.rows, privacy.delta, name == "server"
        )
        for name in ("server", "release")
    }


def _row(ready: Setup, views: dict[str, Epsilon]) -> dict[str, Any]:
    plan, privacy, claim = ready.method.plan, ready.privacy, ready.method.plan.claim
    formula = claim and or_null(claim.epsilon(privacy.budget.rounds, privacy.delta))
    return {
        "recipe": ready.config.names.method,
        "data": ready.config.names.data,
        "unit": plan.unit.value,
        "delta": privacy.delta,
        "claimed_epsilon": None,
        "formula_epsilon": formula,
        "server_epsilon": or_null(views["server"].value),
        "release_epsilon": or_null(views["release"].value),
        "accountant": views["server"].accountant,
        "rdp_epsilon": or_null(views["server"].second_opinion),
        "noise_multiplier": privacy.noise_multiplier,
        "noise_multiplier_for_claim": None,
        "steps": plan.asked(privacy.budget.rounds),
    }


def _words(ready: Setup, views: dict[str, Epsilon]) -> str:
    plan, privacy, claim = ready.method.plan, ready.privacy, ready.method.plan.claim
    clients = len(ready.shards)
    noise = "none" if privacy.noise_multiplier is None else f"{privacy.noise_multiplier:.6g}"
    lines = [
        f"{ready.config.names.method} on {ready.config.names.data}, "
        f"{clients} client{'s' if clients > 1 else ''}: at most {privacy.budget.rounds} rounds"
        f"{_asking(plan, privacy.budget.rounds)} of {plan.rows_per_round} "
        f"question{'s' if plan.rows_per_round > 1 else ''}; each client answers "
        f"{_of_a_client(privacy.budget.rows)}",
        f"protected: one {plan.unit.value}; neighbours: {plan.relation.value.replace('_', ' ')}; "
        f"δ = {privacy.delta:g}",
        f"draws: {plan.sampler}; noise multiplier: {noise}",
    ]
    for name, found in views.items():
        by, reason = amplification(plan, name, found)
        rows = plan.rows_per_round * plan.asked(privacy.budget.rounds)
        event = plan.server(min(privacy.budget.rows, rows))
        if plan.release is not None and found != views["server"]:
            event = plan.release(privacy.budget.rounds)
        second = ""
        if found.second_opinion is not None:
            second = f", second opinion {epsilon_in_words(found.second_opinion)}"
        lines += [
            f"{name}: proven ε = {epsilon_in_words(found.value)} ({found.accountant}{second})",
            f"  {f'amplified by the {by}' if by else f'not amplified: {reason}'}",
            f"  counted: {in_words(canonical(event))}",
        ]
    if clients > 1 and privacy.noise_multiplier is not None:
        lines += _side_by_side(ready)
    lines += [*of_delta(ready), *of_the_digits(ready.config)]
    if claim is not None:
        formula = epsilon_in_words(or_null(claim.epsilon(privacy.budget.rounds, privacy.delta)))
        lines.append(f"its formula would claim ε = {formula} ({claim.source})")
    return "\n".join(lines)


def _side_by_side(ready: Setup) -> list[str]:
    """What the run would cost at its noise multiplier whoever made the noise of a sum."""
    lines, budget, delta = [], ready.privacy.budget, ready.privacy.delta
    for kind in get_args(Kind):
        try:
            method = ready.aggregated(kind)
        except FedgenError as error:
            lines.append(f"noise made {_MADE[kind]}: not here: {error.problem}")
            continue
        rows = min(budget.rows, method.plan.rows_per_round * method.plan.asked(budget.rounds))
        own = replace(budget, rows=rows)
        server, release = (
            epsilon_in_words(view(method, own, budget.rounds, rows, delta, who).value)
            for who in (True, False)
        )
        sums = method.plan.aggregation
        shares = method.cohort.answers_per_row if isinstance(sums, Local) else 1.0
        if isinstance(sums, Secure):
            shares = sums.asked / sums.honest
        lines.append(
            f"noise made {_MADE[kind]}: ε = {server} (server), {release} (release); noise of the "
            f"sum {math.sqrt(shares):.3g} times its multiplier"
        )
    return lines


_MADE: dict[Kind, str] = {
    "local": "by each client (local)",
    "secure": "by all clients together (secure)",
    "trusted": "by an aggregator (trusted)",
}


def _of_a_client(rows: int) -> str:
    if rows >= UNLIMITED:
        return "any number of times"
    return "once at most" if rows == 1 else f"{rows} times at most"


def _asking(plan: Plan, rounds: int) -> str:
    """Where not all rounds ask clients."""
    asking = plan.asked(rounds)
    return "" if asking == rounds else f" ({asking} ask clients)"
