"""Account for all runs on the same data, and check the budget of a further run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from fedgen.config import validation
from fedgen.data.catalogue import data_label
from fedgen.errors import FedgenError
from fedgen.federation import checkpoint
from fedgen.federation.failures import NON_DROPOUTS
from fedgen.privacy.budget import delta_problem
from fedgen.privacy.events import Relation, Spend, Unit, canonical
from fedgen.privacy.ledger import died_while_responding, elementwise_max
from fedgen.privacy.spend_db import Entry, SpendDb, composed_epsilon
from fedgen.reporting.progress import format_epsilon
from fedgen.run import setup
from fedgen.run.calibrate import Progress
from fedgen.run.privacy_record import open_ledgers
from fedgen.run.setup import Setup
from fedgen.storage.io import read_json
from fedgen.storage.run_dir import RunDir
from fedgen.storage.schemas import or_null


def register_run(ready: Setup, run_dir: RunDir, name: str, over: bool = False) -> SpendDb | None:
    """Register a secure run before it queries clients; return None for a seeded run, which is an
    experiment, and for a deployment, whose sites register their own.

    Args:
        over: whether it queries no more clients.

    Raises:
        FedgenError: if the budget of its data does not allow it.
    """
    if ready.privacy.noise != "secure" or ready.dataset.is_remote:  # each site registers its own
        return None
    plan, file = ready.method.plan, SpendDb.default()
    most = canonical(plan.server_event(ready.privacy.budget.samples_per_client))
    folder, kinds = str(run_dir.path.absolute()), (plan.unit, plan.relation)
    rows, reserve = ready.dataset, None
    if ready.dropouts_reveal_cohorts:
        counted = ready.with_dropouts().plan
        reserve = canonical(counted.server_event(ready.privacy.budget.samples_per_client))
    data_fields, full_data = (rows.images_digest, ready.owners, folder), rows.account_of_all
    if over:
        file.set_folder(name, folder)
        return file
    entry = Entry(name, *data_fields, *kinds, most, reserve=reserve, full_data=full_data)
    budget, delta = ready.config.privacy.get("budget_epsilon"), ready.privacy.delta

    def check(entry: Entry, others: Sequence[Entry]) -> None:
        check_budget(budget, delta, entry, list(map(_as_left, others)))

    file.register(entry, check)
    return file


def has_dropout(ready: Setup, run_dir: RunDir, name: str, training: bool = False) -> bool:
    """Return whether the cohorts of a run count as revealed: by its directory, which has two
    records of dropouts that the server observed, and the marks of clients; or by the account of its
    data, which does not depend on the directory.

    Args:
        training: whether the run is training in another process, so that a response may be under
            way.
    """
    outside = ready.privacy.noise == "secure" and not ready.dataset.is_remote
    recorded = run_dir.unanswered.exists() or set(run_dir.failures()) - set(NON_DROPOUTS)
    if recorded or (outside and SpendDb.default().has_dropout(name, reserved=not training)):
        return True
    return ready.privacy.noise == "secure" and not training and client_died(run_dir)


def client_died(run_dir: RunDir) -> bool:
    """Return whether a process died while it computed a response of a client; call only while no
    client responds. The accounts of other machines are not available; their marks are."""
    return any(map(died_while_responding, run_dir.clients.glob("*")))


def progress_of(ready: Setup, run_dir: RunDir, name: str) -> Progress:
    """Return how far a run went before it was interrupted. The rounds of a seeded run are those of
    its checkpoint: the others are repeated with the same responses."""
    started, seeded = run_dir.started_rounds(), ready.privacy.noise == "seeded"
    rounds = max(started, default=-1) + 1
    if seeded and (saved := checkpoint.load(run_dir.checkpoints)):
        rounds = saved[0].rounds
    if ready.dataset.is_remote:  # no client was queried more often than rounds were started
        return Progress(rounds, started.total() * ready.method.plan.samples_per_round)
    accounts = open_ledgers(run_dir, name, len(ready.shards), seeded).values()
    return Progress(rounds, max((account.samples for account in accounts), default=0))


def _as_left(entry: Entry) -> Entry:
    """Return an unfinished run with what its directory adds: a dropout if the directory is missing,
    or if the run is not training and has the mark of a client that died."""
    if entry.reserve is None or entry.is_finished or entry.has_dropout:
        return entry
    folder = Path(entry.folder)
    try:
        known = read_json(folder / "run.json")["run"] == entry.run
        with RunDir(folder).reading() as quiet:
            died = not known or (quiet and client_died(RunDir(folder)))
    except (OSError, ValueError, KeyError, TypeError):
        died = True
    return replace(entry, has_dropout=True) if died else entry


def finish_run(file: SpendDb | None, name: str, planned: Sequence[Spend]) -> None:
    """Record the end of a run with the query samples of each client, as planned: the charges of
    clients are registered separately, and their reports to the server do not exceed these."""
    if file is not None:
        nothing: Spend = {}
        file.finish(name, reduce(elementwise_max, planned, nothing))


def total_spend(path: Path) -> list[str]:
    """Return lines of text: the total ε of a finished run and all other secure runs on its data,
    and the number of runs that this ε does not cover; an empty list for a single run or an
    experiment."""
    record = RunDir(path).privacy()
    if record["noise"] != "secure" or not (file := SpendDb.default()).path.exists():
        return []
    _, _, identity = RunDir.open(path, "run")
    entries = list(map(_as_left, file.runs_on_same_data(identity["run"])))
    kinds = {entry.kind for entry in entries if entry.run == identity["run"]}
    alike, lines = [entry for entry in entries if entry.kind in kinds], []
    if len(alike) > 1:
        cost = format_epsilon(composed_epsilon(alike, record["delta"]).value)
        lines += [
            f"together with other secure runs on these images ({len(alike)} in all): ε = {cost} "
            "against an observer of all messages"
        ]
    if others := len(entries) - len(alike):
        lines += [
            f"not counted: {others} more runs with other units, neighbours or client partitions "
            "(fedgen account spent)"
        ]
    return lines


def check_budget(budget: float | None, delta: float, entry: Entry, others: Sequence[Entry]) -> None:
    """Raise FedgenError if a run would raise the total ε of its data above a budget."""
    key = "privacy.budget_epsilon"
    if budget is None:
        return
    if any(other.kind != entry.kind for other in others):
        problem = (
            "the ε of other runs on these data cannot be added to this one: their unit, "
            "neighbouring relation or partition differs"
        )
        raise FedgenError(key, problem, "see fedgen account spent; set it to null")
    with_it = composed_epsilon([*others, entry], delta)
    if with_it.or_infinity > budget:
        before = "this run costs ε = "
        if others:
            so_far = format_epsilon(composed_epsilon(others, delta).value)
            before = f"other runs on these data ({len(others)}) cost ε = {so_far}, with this run "
        problem = f"{before}{format_epsilon(with_it.value)}, above {budget:g}"
        remedy = "lower privacy.target_epsilon, or raise the budget"
        raise FedgenError(key, problem, remedy)


def account_spent(config: DictConfig) -> str:
    """Return the total spend of secure runs on a data set, as text or JSON.

    Raises:
        FedgenError: for an invalid setting.
    """
    validation.check(config)
    file, rows = SpendDb.default(), setup.dataset(config)
    names, delta = (rows.images_digest, rows.account_of_all), config.privacy.delta
    entries = list(map(_as_left, file.entries(*names)))
    kinds = dict.fromkeys(entry.kind for entry in entries)
    record: dict[str, Any] = {
        "data": data_label(config),
        "digest": rows.images_digest,
        "delta": delta,
        "runs": [_row(entry, delta) for entry in entries],
        "together": [_together([e for e in entries if e.kind == k], *k[:2], delta) for k in kinds],
        "on_other_data": file.other_folders(entries),
    }
    return json.dumps(record) if config.output == "json" else _words(record, file)


def _row(entry: Entry, delta: float) -> dict[str, Any]:
    return {
        "run": entry.run,
        "folder": entry.folder,
        "over": entry.is_finished,
        "epsilon": or_null(composed_epsilon([entry], delta).value),
        "unit": entry.unit.value,
        "relation": entry.relation.value,
    }


def _together(
    entries: Sequence[Entry], unit: Unit, relation: Relation, delta: float
) -> dict[str, Any]:
    total = composed_epsilon(entries, delta)
    return {
        "unit": unit.value,
        "relation": relation.value,
        "epsilon": or_null(total.value),
        "accountant": total.accountant,
    }


def _words(record: dict[str, Any], file: SpendDb) -> str:
    lines = [f"{record['data']}: secure runs: {len(record['runs'])}, in {file.path}"]
    for row in record["runs"]:
        how = "cost" if row["over"] else "unfinished, costs at most"
        lines.append(f"  {row['folder']}: {how} ε = {format_epsilon(row['epsilon'])}")
    lines += [
        f"together: proven ε = {format_epsilon(total['epsilon'])} per {total['unit']}, neighbours: "
        f"{total['relation'].replace('_', ' ')}, at δ = {record['delta']:g}, against an observer "
        f"of the clients' messages ({total['accountant']})"
        for total in record["together"]
    ]
    if (wrong := delta_problem(record["delta"], None, "record")) is not None:
        lines.append(f"warning: privacy.delta: {wrong[0]}; {wrong[1]}")
    if len(record["together"]) > 1:
        lines.append("runs with different units, neighbours or client partitions have no common ε")
    if record["on_other_data"]:
        lines.append(f"secure runs on other data: {', '.join(record['on_other_data'])}")
    return "\n".join(lines)
