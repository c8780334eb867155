"""Compute the cost of a run before it starts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf

from fedgen.config.overrides import config_name
from fedgen.data.catalogue import data_label
from fedgen.errors import FedgenError
from fedgen.methods.api import AggregationKind
from fedgen.methods.plan import Plan
from fedgen.privacy import guarantee
from fedgen.privacy.aggregation import Secure
from fedgen.privacy.budget import Bound
from fedgen.privacy.events import describe
from fedgen.reporting.progress import format_epsilon
from fedgen.run import setup
from fedgen.run.calibrate import UNLIMITED, bound_for, planned_bounds
from fedgen.run.preflight import delta_warnings, preset_warnings
from fedgen.run.privacy_record import amplification
from fedgen.run.setup import Setup
from fedgen.storage.schemas import or_null


def account(config: DictConfig) -> str:
    """Return the plan of a run and its ε by view, as text or as a JSON list of one row.

    Raises:
        FedgenError: for the first invalid setting.
    """
    if config.privacy.noise == "secure":  # as a secure run: nothing is evaluated
        config.evaluation = OmegaConf.load(config_name("evaluation", "none"))
    ready = setup.setup(config)
    views = planned_bounds(ready.method, ready.privacy)
    return json.dumps([_row(ready, views)]) if config.output == "json" else _describe(ready, views)


def _row(ready: Setup, views: dict[str, Bound]) -> dict[str, Any]:
    plan, privacy, claim = ready.method.plan, ready.privacy, ready.method.plan.claim
    formula = claim and or_null(claim.epsilon(privacy.budget.rounds, privacy.delta))
    return {
        "recipe": ready.config.names.method,
        "data": data_label(ready.config),
        "unit": plan.unit.value,
        "delta": privacy.delta,
        "claimed_epsilon": None,
        "formula_epsilon": formula,
        "server_epsilon": or_null(views["server"].epsilon.value),
        "release_epsilon": or_null(views["release"].epsilon.value),
        "accountant": views["server"].epsilon.accountant,
        "rdp_epsilon": or_null(views["server"].epsilon.second_opinion),
        "guarantee": {
            name: guarantee.to_json(bound.guarantee(privacy.delta, plan.relation))
            for name, bound in views.items()
        },
        "noise_multiplier": privacy.noise_multiplier,
        "noise_multiplier_for_claim": None,
        "steps": plan.queries_in(privacy.budget.rounds),
    }


def _describe(ready: Setup, views: dict[str, Bound]) -> str:
    plan, privacy, claim = ready.method.plan, ready.privacy, ready.method.plan.claim
    clients = len(ready.shards)
    noise = "none" if privacy.noise_multiplier is None else f"{privacy.noise_multiplier:.6g}"
    lines = [
        f"{ready.config.names.method} on {data_label(ready.config)}, "
        f"{clients} client{'s' if clients > 1 else ''}: at most {privacy.budget.rounds} rounds"
        f"{_describe_query_rounds(plan, privacy.budget.rounds)} of {plan.samples_per_round} "
        f"query sample{'s' if plan.samples_per_round > 1 else ''}; each client responds to "
        f"{_describe_client(privacy.budget.samples_per_client)}",
        f"protected: one {plan.unit.value}; neighbours: {plan.relation.value.replace('_', ' ')}; "
        f"δ = {privacy.delta:g}",
        f"sampling: {plan.sampler}; noise multiplier: {noise}",
    ]
    for name, bound in views.items():
        epsilon = bound.epsilon
        by, reason = amplification(plan, name, epsilon)
        second = ""
        if epsilon.second_opinion is not None:
            second = f", second opinion {format_epsilon(epsilon.second_opinion)}"
        lines += [
            f"{name}: proven ε = {format_epsilon(epsilon.value)} ({epsilon.accountant}{second})",
            f"  {f'amplified by the {by}' if by else f'not amplified: {reason}'}",
            f"  counted: {describe(bound.spend)}",
        ]
        if (curve := bound.guarantee(privacy.delta, plan.relation)) is not None:
            lines.append(f"  {curve.describe()}")
    if clients > 1 and privacy.noise_multiplier is not None:
        lines += _compare_aggregations(ready)
    lines += [*delta_warnings(ready), *preset_warnings(ready.config)]
    if claim is not None:
        formula = format_epsilon(or_null(claim.epsilon(privacy.budget.rounds, privacy.delta)))
        lines.append(f"its formula would claim ε = {formula} ({claim.source})")
    return "\n".join(lines)


def _compare_aggregations(ready: Setup) -> list[str]:
    """Compare the cost of the run at its noise multiplier for each kind of aggregation."""
    lines, budget, delta = [], ready.privacy.budget, ready.privacy.delta
    for kind in get_args(AggregationKind):
        try:
            method = ready.with_aggregation(kind)
        except FedgenError as error:
            lines.append(f"noise added {_NOISE_SOURCE[kind]}: not possible: {error.problem}")
            continue
        rows = min(
            budget.samples_per_client,
            method.plan.samples_per_round * method.plan.queries_in(budget.rounds),
        )
        capped_budget = replace(budget, samples_per_client=rows)
        server, release = (
            format_epsilon(
                bound_for(
                    method, capped_budget, budget.rounds, rows, delta, against_server
                ).epsilon.value
            )
            for against_server in (True, False)
        )
        sums = method.plan.aggregation
        shares = method.cohort.responses_per_sample if sums.is_local else 1.0
        if isinstance(sums, Secure):
            shares = sums.asked / sums.honest
        lines.append(
            f"noise added {_NOISE_SOURCE[kind]}: ε = {server} (server), {release} (release); noise "
            f"of the sum: {math.sqrt(shares):.3g} x noise multiplier x sensitivity"
        )
    return lines


_NOISE_SOURCE: dict[AggregationKind, str] = {
    "local": "by each client (local)",
    "secure": "by all clients together (secure)",
    "trusted": "by an aggregator (trusted)",
}


def _describe_client(rows: int) -> str:
    if rows >= UNLIMITED:
        return "any number of query samples"
    return "at most 1 query sample" if rows == 1 else f"at most {rows:,} query samples"


def _describe_query_rounds(plan: Plan, rounds: int) -> str:
    """Describe which rounds query clients, if not all do."""
    asking = plan.queries_in(rounds)
    verb = "queries" if asking == 1 else "query"
    return "" if asking == rounds else f" ({asking} {verb} clients)"
