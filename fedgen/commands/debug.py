"""Run ``fedgen debug``: find clients with faulty images or labels by comparing noisy sums, without
access to the images.

With ``method=client_statistics``, the default, clients are compared one by one. With secure sums,
random sets of clients are compared; those that differ are halved and queried again. With a method
that trains a generator, ``fedgen.commands.debug_groups`` compares two groups of clients as in the
paper of GS-WGAN.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dp_accounting import DpEvent
from numpy.typing import NDArray
from omegaconf import DictConfig
from torch import Tensor

from fedgen.commands import debug_groups
from fedgen.commands.debug_groups import check_place, part_config, write_start
from fedgen.config import validation
from fedgen.data.catalogue import data_label
from fedgen.errors import FedgenError, Interrupted
from fedgen.evaluation.client_comparison import FEWEST, Comparison, Explanation, compare
from fedgen.models.client_statistics import NOISE, StatisticsSpace, mean_images
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import Relation, Unit, total
from fedgen.privacy.ledger import spend_from_json
from fedgen.randomness import RandomStreams
from fedgen.reporting.figures import contact_sheet
from fedgen.reporting.progress import format_epsilon
from fedgen.run import setup
from fedgen.run.generator import PublishedGenerator, load_generator
from fedgen.run.setup import Setup
from fedgen.run.worker_pool import complete
from fedgen.storage.io import check_no_links
from fedgen.storage.run_dir import RunDir
from fedgen.storage.schemas import or_null

_METHOD = "client_statistics"
_RUN = "statistics"  # folder of the run with a sum per client
_SHEET_CLIENTS, _SHEET_LABELS = 24, 12
_MAX_LISTED = 20  # clients in the output
_MIN_SET_SIZE = 2  # clients of a secure sum
_DEFAULT_SETS = 12
# the mean number of images of a sum must exceed this many standard deviations of its noise
_MIN_COUNT = 2.0

Sets = Mapping[str, tuple[int, ...]]
"""Name -> clients of a sum. The halves of set 3 are 3.0 and 3.1."""


@dataclass(frozen=True)
class ReleasedSums:
    """Noisy sums.

    sets: their clients; ``by_client``: one per sum.
    sums: (sets, entries), with noise of standard deviation ``std``.
    source: a published generator of one of the runs.
    """

    sets: Sets
    by_client: bool
    sums: Tensor
    std: float
    source: PublishedGenerator

    @property
    def space(self) -> StatisticsSpace:
        """Layout of the sums."""
        return StatisticsSpace(self.source.shape, self.source.classes)

    def compare(self) -> Comparison:
        """Compare the sums with each other."""
        return compare(self.space, [self.space.split(row) for row in self.sums], self.std)

    @property
    def max_contributions(self) -> int:
        """Number of sums that a client contributed to, at most."""
        return max(name.count(".") + 1 for name in self.sets)

    def title(self, position: int) -> str:
        """Return the name of a client or set."""
        name = list(self.sets)[position]
        return f"client {self.sets[name][0]}" if self.by_client else f"set {name}"


def debug(config: DictConfig) -> str:
    """Release statistics, and return which clients differ and why, as text. With the same
    ``run_dir``, it resumes.

    Raises:
        FedgenError: for an invalid setting, or too few clients or images.
        Interrupted: if it was asked to end; the run keeps its checkpoint.
    """
    if config.method.type != _METHOD:
        return debug_groups.debug(config)
    place = Path(config.run_dir or time.strftime("runs/debug-%Y%m%d-%H%M%S"))
    check_no_links(place, "run_dir")
    check_place(config, place)
    run = part_config(config, None, place / _RUN)
    run.group = config.group
    sets = None if run.privacy.aggregation != "secure" else _random_sets(config, run)
    if sets is not None:
        run.group = sorted(next(iter(sets.values())))
    ready = _check(run, sets)
    write_start(config, place)
    try:
        if sets is None:
            released = _by_client(config, run, place)
            return _show(config, place, ready, released, released.compare())
        released = _by_set(config, place, sets)
        comparison = released.compare()
        while (halves := _halved(released.sets, comparison, config.debug.halvings)) is not None:
            released = _by_set(config, place, halves)
            comparison = released.compare()
        return _show(config, place, ready, released, comparison)
    except KeyboardInterrupt:
        raise Interrupted("interrupted", place) from None


# --- sums -----------------------------------------------------------------------------------------


def _random_sets(config: DictConfig, run: DictConfig) -> Sets:
    """Return random sets of about ``debug.set_size`` clients, of which each is in one."""
    validation.check(run)
    everyone = len(setup.partitioned_data(run)[1])
    clients = torch.tensor(list(range(everyone)) if config.group is None else sorted(config.group))
    size = config.debug.set_size or max(_MIN_SET_SIZE, len(clients) // _DEFAULT_SETS)
    number = len(clients) // size
    if size < _MIN_SET_SIZE or number < FEWEST:
        problem = f"{len(clients)} clients give {number} sets of {size}"
        remedy = f"use sets of {_MIN_SET_SIZE} or more, and {FEWEST} sets or more"
        raise FedgenError("debug.set_size", problem, remedy)
    rng = RandomStreams.from_seed(config.seed, "seeded").at("debug").public("sets")
    order = clients[torch.randperm(len(clients), generator=rng)].numpy()
    parts = np.array_split(order, number)
    return {str(n): tuple(int(client) for client in part) for n, part in enumerate(parts)}


def _halved(sets: Sets, comparison: Comparison, halvings: int) -> Sets | None:
    """Return the sets with those that differ in two halves, as far as they are large enough and
    were halved fewer than ``halvings`` times; None: there are none."""
    halved: dict[str, tuple[int, ...]] = {}
    for (name, clients), differs in zip(sets.items(), comparison.differs, strict=True):
        middle = len(clients) // 2
        if differs and middle >= _MIN_SET_SIZE and name.count(".") < halvings:
            halved |= {f"{name}.0": clients[:middle], f"{name}.1": clients[middle:]}
        else:
            halved[name] = clients
    return None if len(halved) == len(sets) else halved


def _complete(config: DictConfig, runs: Mapping[str, DictConfig], place: Path) -> None:
    """Train the missing runs. Raises FedgenError if one failed."""
    if failed := complete(dict(runs), place, config.jobs, _RUN):
        raise FedgenError("debug", "computing the statistics failed", f"see {failed[0]}")


def _by_client(config: DictConfig, run: DictConfig, place: Path) -> ReleasedSums:
    """Return a sum of each client, by one run."""
    _complete(config, {_RUN: run}, place)
    source = load_generator(place / _RUN, "cpu")
    sums = source.weights["sums"].double()
    numbers = range(len(sums)) if config.group is None else sorted(config.group)
    sets = {str(number): (int(number),) for number in numbers}
    return ReleasedSums(sets, True, sums, float(source.weights["std"]), source)


def _by_set(config: DictConfig, place: Path, sets: Sets) -> ReleasedSums:
    """Return one secure sum per set, by a run each. Noise is added up to the largest standard
    deviation, so that sets of different sizes are comparable."""
    folders = {name: _folder(name) for name in sets}
    runs = {
        folders[name]: part_config(config, sorted(clients), place / folders[name])
        for name, clients in sets.items()
    }
    _complete(config, runs, place)
    sources = [load_generator(place / folder, "cpu") for folder in folders.values()]
    stds = [float(source.weights["std"]) for source in sources]
    sums, streams = [], RandomStreams.from_seed(config.seed, "seeded").at("debug")
    for name, source, std in zip(sets, sources, stds, strict=True):
        row, rng = source.weights["sums"][0].double(), streams.public("noise", name)
        noise = torch.randn(row.shape, generator=rng, dtype=row.dtype)
        sums.append(row + noise * (max(stds) ** 2 - std**2) ** 0.5)
    return ReleasedSums(sets, False, torch.stack(sums), max(stds), sources[0])


def _folder(name: str) -> str:
    """Return the folder of the run of a set."""
    return f"set-{name}"


def _largest_epsilon(place: Path, sets: Sets) -> float:
    """Return the largest ε of a client over all sums that it contributed to, by what their runs
    charged: those of its set and of the sets that it was halved from."""
    largest, known = 0.0, dict[frozenset[tuple[DpEvent, int]], float]()
    for name in sets:
        parts = name.split(".")
        ancestors = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
        records = [RunDir(place / _folder(ancestor)).privacy() for ancestor in ancestors]
        if any(record["without_bound"] for record in records):
            return math.inf
        members = [_members(sets, ancestor) for ancestor in ancestors]
        delta, relation = records[0]["delta"], Relation(records[0]["relation"])
        for client in sets[name]:
            spend = total(
                [
                    spend_from_json(record["clients"][str(clients.index(client))]["events"])
                    for record, clients in zip(records, members, strict=True)
                ]
            )
            key = frozenset(spend.items())
            if key not in known:
                known[key] = epsilon(spend, delta, relation).or_infinity
            largest = max(largest, known[key])
    return largest


def _members(sets: Sets, ancestor: str) -> list[int]:
    """Return the clients of a set, of which halves may remain, in the order of its run."""
    within = [
        clients
        for name, clients in sets.items()
        if name == ancestor or name.startswith(f"{ancestor}.")
    ]
    return sorted(itertools.chain(*within))


def _check(run: DictConfig, sets: Sets | None) -> Setup:
    """Return the setup of a run, or raise FedgenError for settings with which its clients, or sets
    of them, cannot be compared."""
    if run.resume is not None:
        raise FedgenError("resume", "fedgen debug resumes on its own", "give its run_dir")
    if run.privacy.aggregation == "trusted":
        problem = "trusted sums hide those of single clients, which are compared"
        raise FedgenError("privacy.aggregation", problem, "set it to local, or to secure")
    validation.check(run)
    ready = setup.setup(run)
    clients = len(ready.shards)
    if ready.noise is None:
        problem = "adds no noise, relative to which clients are compared"
        raise FedgenError("privacy", problem, "use privacy=dp, with a large ε if need be")
    if run.method.sums not in (None, clients if sets is None else 1):
        expected = f"there are {clients} clients" if sets is None else "a secure sum is one"
        problem = f"is {run.method.sums}, and {expected}"
        raise FedgenError("method.sums", problem, "leave it out")
    if sets is None and clients < FEWEST:
        problem = f"{clients} client(s) are too few to compare"
        remedy = f"use {FEWEST} or more, or look at samples of method=mixture"
        raise FedgenError("partition" if run.group is None else "group", problem, remedy)
    is_client = ready.method.plan.unit is Unit.CLIENT
    everyone = clients if run.group is None else len(setup.partitioned_data(run)[1])
    clients_per_sum, subject = (1, "a client") if sets is None else (clients, "a set")
    images = clients_per_sum * (1.0 if is_client else float(run.method.rows) / everyone)
    noise = ready.noise * float(NOISE.total)
    if images < _MIN_COUNT * noise:
        problem = f"the noise is too large to distinguish {'clients' if sets is None else 'sets'}"
        remedy = "allow a larger ε, or set privacy.unit=record"
        if not is_client:
            problem = f"the noise in the number of images of {subject}, {noise:.0f}, is too large "
            problem += f"for about {images:.0f} images"
            more = "a partition with fewer clients" if sets is None else "a larger debug.set_size"
            remedy = f"allow a larger ε, or use {more}"
        raise FedgenError("privacy", problem, remedy)
    return ready


# --- output ---------------------------------------------------------------------------------------


def _show(
    config: DictConfig, place: Path, ready: Setup, released: ReleasedSums, comparison: Comparison
) -> str:
    """Write the contact sheet and ``results.json``; return the results as text."""
    space, rows = released.space, comparison.ranking[:_SHEET_CLIENTS]
    largest = np.argsort(-space.split(released.sums.sum(0)).counts.numpy())
    labels = np.sort(largest[:_SHEET_LABELS])
    means = mean_images(space, released.sums, released.std)
    contact_sheet(
        _sheet(space, means, rows, labels),
        [_row_title(released, row, comparison) for row in rows],
        [_name(released.source, label) for label in labels],
        place / "clients.png",
    )
    results = _results(config, place, released, comparison)
    RunDir(place).write("results", results, "debug_clients")
    return _describe(results, ready, released, comparison, place)


def _sheet(
    space: StatisticsSpace, means: Tensor, rows: list[int], labels: NDArray[np.int64]
) -> NDArray[np.uint8]:
    images = [space.to_pixels(means[row, labels]).numpy() for row in rows]
    return (np.stack(images) * 255).round().astype(np.uint8)


def _name(published: PublishedGenerator, label: int) -> str:
    return str(label) if published.labels is None else published.labels[label]


def _row_title(released: ReleasedSums, position: int, comparison: Comparison) -> str:
    title = released.title(position)
    if not comparison.differs[position]:
        return title
    explanation = comparison.explanations[position]
    cause = "different, cause unknown" if explanation is None else explanation.fault
    return f"{title}: {cause}"


def _results(
    config: DictConfig, place: Path, released: ReleasedSums, comparison: Comparison
) -> dict[str, Any]:
    sets = list(released.sets.values())
    if released.by_client:
        epsilons = RunDir(place / _RUN).results()["epsilon"]
    else:  # the bound against the server holds against readers of the release, too
        bound = or_null(_largest_epsilon(place, released.sets))
        epsilons = {"server": bound, "release": bound}
    return {
        "schema": 1,
        "data": data_label(config),
        "seed": config.seed,
        "epsilon": {view: epsilons[view] for view in ("server", "release")},
        "clients": [
            {
                **(
                    {"client": sets[position][0]}
                    if released.by_client
                    else {"clients": sorted(sets[position])}
                ),
                "p_value": float(comparison.p_values[position]),
                "differs": bool(comparison.differs[position]),
                "explanation": _facts(comparison.explanations.get(position)),
            }
            for position in comparison.ranking
        ],
    }


def _facts(explanation: Explanation | None) -> dict[str, Any] | None:
    return None if explanation is None else vars(explanation)


def _describe(
    results: dict[str, Any],
    ready: Setup,
    released: ReleasedSums,
    comparison: Comparison,
    place: Path,
) -> str:
    different = [row for row in comparison.ranking if comparison.differs[row]]
    everyone, what = len(comparison.p_values), "clients" if released.by_client else "sets"
    if different:
        lines = [
            f"{len(different)} of {everyone} {what} differ from the others (at a false discovery "
            "rate of 1 %):"
        ]
    else:
        lines = [f"none of {everyone} {what} differs from the others (lowest p = "]
        lines[0] += f"{comparison.p_values.min():.2g}); noise hides smaller differences"
    sets = list(released.sets.values())
    for row in different[:_MAX_LISTED]:
        explanation, members = comparison.explanations[row], ""
        if not released.by_client:
            members = f" (clients {', '.join(map(str, sorted(sets[row])))})"
        cause = "cause unknown" if explanation is None else _explained(explanation)
        lines.append(
            f"  {released.title(row)}{members}: p = {comparison.p_values[row]:.2g}; {cause}"
        )
    if len(different) > _MAX_LISTED:
        lines.append(f"  and {len(different) - _MAX_LISTED} more in results.json")
    eps = {name: format_epsilon(value) for name, value in results["epsilon"].items()}
    unit, sums = ready.method.plan.unit.value, released.max_contributions
    of_sums = "" if sums == 1 else f" for the clients of {sums} sums"
    published = place / _RUN if released.by_client else place / "set-*"
    lines += [
        f"proven ε {eps['server']} (server), {eps['release']} (release) per {unit}{of_sums}; "
        f"released statistics: {published / 'public'}",
    ]
    if ready.privacy.noise == "seeded":
        lines.append("noise follows from the seed: an experiment, not for release")
    lines += [str(place / "clients.png"), str(place / "results.json")]
    return "\n".join(lines)


def _explained(explanation: Explanation) -> str:
    share = min(max(explanation.share, 0.0), 1.0)
    error = max(explanation.error, 0.01)
    text = explanation.fault
    if explanation.p_value is not None:  # repeated images have no share
        text += f", {100 * share:.0f} ± {100 * error:.0f} % of its images"
        text += f" (fit: p = {explanation.p_value:.2g})"
    if explanation.others:
        text += f"; or {', '.join(explanation.others[:3])}"
    return text
