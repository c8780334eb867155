"""What the rows of a data set have cost so far, and whether one more run is within their budget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from fedgen.errors import FedgenError
from fedgen.experiments import settings, validation
from fedgen.experiments.accounts import ended_over_an_answer
from fedgen.experiments.settings import Setup
from fedgen.federation.failures import DROPPED
from fedgen.files import read_json
from fedgen.privacy.budget import delta_problem
from fedgen.privacy.events import Relation, Spend, Unit, canonical
from fedgen.privacy.ledger import larger, with_told
from fedgen.privacy.spent import Entry, SpentFile, spent_together
from fedgen.reporting.progress import epsilon_in_words
from fedgen.reporting.run_dir import RunDir, or_null


def enter(
    ready: Setup, run_dir: RunDir, name: str, anew: bool = False, over: bool = False
) -> SpentFile | None:
    """Enters a secure run before it asks anybody; None for a seeded one, an experiment. ``anew``:
    it was entered, and may cost more now. ``over``: it asks nobody any more.

    Raises:
        FedgenError: if the budget of its data does not allow it.
    """
    if ready.privacy.noise != "secure" or ready.dataset.elsewhere:  # each site enters its own
        return None
    plan, file = ready.method.plan, SpentFile.at_home()
    most = canonical(plan.server(ready.privacy.budget.rows))
    folder, kinds = str(run_dir.path.absolute()), (plan.unit, plan.relation)
    gaps = _with_gaps(ready) if ready.gaps_show else None
    rows = ready.dataset
    own, whole = (rows.account, ready.owners, folder), rows.account_of_all
    if over:
        file.moved(name, folder)
        return file
    entry = Entry(name, *own, *kinds, most, gaps=gaps, whole=whole)
    budget, delta = ready.config.privacy.get("budget_epsilon"), ready.privacy.delta
    _count_deaths(file, file.entries(entry.data, entry.whole), entry)
    file.enter(entry, partial(check_budget, budget, delta), anew)
    return file


def show(file: SpentFile | None, ready: Setup, name: str) -> None:
    """Notes that nothing hides a run's draws any longer: a missing answer may have shown one."""
    if file is not None:
        file.show(name, _with_gaps(ready))


def showed_draws(ready: Setup, run_dir: RunDir, name: str) -> bool:
    """Whether draws of a run count as seen: by its directory, which tells twice, or where that is a
    copy from before, by what its data have cost."""
    outside = ready.privacy.noise == "secure" and not ready.dataset.elsewhere
    told = run_dir.unanswered.exists() or set(run_dir.failures()) - set(DROPPED)
    return bool(told) or (outside and SpentFile.at_home().showed(name))


def _with_gaps(ready: Setup) -> Spend:
    return canonical(ready.with_gaps().plan.server(ready.privacy.budget.rows))


def _count_deaths(file: SpentFile, entries: Sequence[Entry], own: Entry | None = None) -> None:
    """Counts the draws of runs as seen that ended over a client's answer, or whose folders are not
    there to tell: whether they go on or not. ``own``: the run that begins, or goes on, now. Its
    folder tells by itself; where it went on in another one before, that may have been moved."""
    for entry in entries:
        if entry.gaps is None or entry.over or with_told(entry.gaps, [entry.most]) == entry.most:
            continue  # there is nothing to count, or it counts
        died = _died(Path(entry.folder), entry.run)
        if own is not None and own.run == entry.run:
            died = bool(died) and own.folder != entry.folder
        if died:
            file.show(entry.run, entry.gaps)
        elif died is None:
            file.widen(entry.run, entry.gaps)


def _died(folder: Path, run: str) -> bool | None:
    """Whether a run ended over a client's answer; None where its folder does not tell."""
    try:
        if read_json(folder / "run.json")["run"] != run:
            return None
        return ended_over_an_answer(RunDir(folder))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def close(file: SpentFile | None, name: str, planned: Sequence[Spend]) -> None:
    """Notes that a run is over, with what each client was asked for, by the plan: its own charges
    are there, and its word to the server is no more than that."""
    if file is not None:
        nothing: Spend = {}
        file.close(name, reduce(larger, planned, nothing))


def in_all(path: Path) -> list[str]:
    """What a finished run and all others on its rows have cost together, and how many others no ε
    counts; nothing where it is alone, or an experiment."""
    run_dir, config, identity = RunDir.open(path, "run")
    if config.privacy.noise != "secure" or not (file := SpentFile.at_home()).path.exists():
        return []
    _count_deaths(file, file.beside(identity["run"]))
    entries = file.beside(identity["run"])
    kinds = {each.kind for each in entries if each.run == identity["run"]}
    alike, lines = [each for each in entries if each.kind in kinds], []
    if len(alike) > 1:
        cost = epsilon_in_words(spent_together(alike, run_dir.privacy()["delta"]).value)
        lines += [
            f"together with other secure runs on these rows ({len(alike)} in all): ε = {cost}"
        ]
    if others := len(entries) - len(alike):
        lines += [
            f"no ε counts {others} more, which protect other neighbours, or others' rows "
            "(fedgen account spent)"
        ]
    return lines


def check_budget(budget: float | None, delta: float, entry: Entry, others: Sequence[Entry]) -> None:
    """Raises FedgenError if a run would take what all runs on its rows cost above a budget."""
    key = "privacy.budget_epsilon"
    if budget is None:
        return
    if any(each.kind != entry.kind for each in others):
        problem = "other runs on these data protect others than this, and no ε counts both"
        raise FedgenError(key, problem, "see fedgen account spent; set it to null")
    with_it = spent_together([*others, entry], delta)
    if with_it.or_infinity > budget:
        before = "this run comes to ε = "
        if others:
            so_far = epsilon_in_words(spent_together(others, delta).value)
            before = f"other runs on these data ({len(others)}) come to ε = {so_far}, with this to "
        problem = f"{before}{epsilon_in_words(with_it.value)}, above {budget:g}"
        remedy = "lower privacy.target_epsilon, or raise the budget"
        raise FedgenError(key, problem, remedy)


def spent(config: DictConfig) -> str:
    """What secure runs on a data set have cost, in words or as JSON.

    Raises:
        FedgenError: for a setting that does not work.
    """
    validation.check(config)
    file, rows = SpentFile.at_home(), settings.dataset(config)
    names, delta = (rows.account, rows.account_of_all), config.privacy.delta
    _count_deaths(file, file.entries(*names))
    entries = file.entries(*names)
    kinds = dict.fromkeys(entry.kind for entry in entries)
    record: dict[str, Any] = {
        "data": config.names.data,
        "digest": rows.account,
        "delta": delta,
        "runs": [_row(entry, delta) for entry in entries],
        "together": [_together([e for e in entries if e.kind == k], *k[:2], delta) for k in kinds],
        "on_other_data": file.elsewhere(entries),
    }
    return json.dumps(record) if config.output == "json" else _words(record, file)


def _row(entry: Entry, delta: float) -> dict[str, Any]:
    return {
        "run": entry.run,
        "folder": entry.folder,
        "over": entry.over,
        "epsilon": or_null(spent_together([entry], delta).value),
        "unit": entry.unit.value,
        "relation": entry.relation.value,
    }


def _together(
    entries: Sequence[Entry], unit: Unit, relation: Relation, delta: float
) -> dict[str, Any]:
    found = spent_together(entries, delta)
    return {
        "unit": unit.value,
        "relation": relation.value,
        "epsilon": or_null(found.value),
        "accountant": found.accountant,
    }


def _words(record: dict[str, Any], file: SpentFile) -> str:
    lines = [f"{record['data']}: secure runs: {len(record['runs'])}, in {file.path}"]
    for row in record["runs"]:
        how = "cost" if row["over"] else "not over, may cost"
        lines.append(f"  {row['folder']}: {how} ε = {epsilon_in_words(row['epsilon'])}")
    lines += [
        f"together: proven ε = {epsilon_in_words(each['epsilon'])} per {each['unit']}, neighbours: "
        f"{each['relation'].replace('_', ' ')}, at δ = {record['delta']:g}, against whoever sees "
        f"what clients send ({each['accountant']})"
        for each in record["together"]
    ]
    if (wrong := delta_problem(record["delta"], None, "record")) is not None:
        lines.append(f"warning: privacy.delta: {wrong[0]}; {wrong[1]}")
    if len(record["together"]) > 1:
        lines.append(
            "runs have no ε together that protect other neighbours, or clients of other rows"
        )
    if record["on_other_data"]:
        lines.append(f"secure runs on other data: {', '.join(record['on_other_data'])}")
    return "\n".join(lines)
