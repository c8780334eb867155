"""Detect inverted images at some clients from samples of private generators, without access to the
images ("GS-WGAN", sections 5.4 and C.2).

Clients with low accuracy of a classifier are *suspect*, those with high accuracy *normal*. Each
group trains several generators, so that differences between groups can be separated from noise. A
client belongs to one part of one group and responds to one generator only. All parts have the same
size and noise; clients left over in the larger group are excluded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf, open_dict

from fedgen.config import validation
from fedgen.data.catalogue import data_label
from fedgen.data.corruption import corrupt, sample_bugged_clients
from fedgen.data.datasets import Dataset
from fedgen.data.partition import Index
from fedgen.errors import FedgenError, Interrupted
from fedgen.evaluation.judge import evaluation_net
from fedgen.evaluation.polarity import LEVEL, Samples, Verdict, typical, verdict
from fedgen.evaluation.utility import outputs
from fedgen.privacy.events import Unit
from fedgen.randomness import RandomStreams
from fedgen.reporting.figures import sample_grid
from fedgen.reporting.progress import format_epsilon
from fedgen.run import setup
from fedgen.run.generator import draw_samples, load_generator
from fedgen.run.worker_pool import complete
from fedgen.storage.folders import make_folder
from fedgen.storage.io import cache, check_no_links, is_temporary, write_atomic
from fedgen.storage.run_dir import SERVER_SIDE, RunDir

GROUPS = ("suspect", "normal")
_COLUMNS = 10  # samples per group and row of the picture
_SETTINGS_FILE = "debug.json"  # settings of a directory of fedgen debug


@dataclass(frozen=True)
class Split:
    """Numbers of clients by role: reserved clients, which train the classifier, and the groups, in
    as many parts of equal size as there are generators, because the noise depends on the size.

    bugged: (clients,), true for clients with the bug, which would not be known in practice.
    accuracies: (clients,), accuracy of the classifier on the images of each client; NaN for
        reserved clients.
    """

    reserved: NDArray[np.int64]
    groups: dict[str, list[NDArray[np.int64]]]
    bugged: NDArray[np.bool_]
    accuracies: NDArray[np.float64]


def debug(config: DictConfig) -> str:
    """Split the clients, train the missing generators, and compare their samples; return the result
    as text. With the same ``run_dir``, it resumes.

    Raises:
        FedgenError: for an invalid setting.
        Interrupted: if it was asked to end; the runs keep their checkpoints.
    """
    _check(config)
    place = Path(config.run_dir or time.strftime("runs/debug-%Y%m%d-%H%M%S"))
    check_no_links(place, "run_dir")
    check_place(config, place)
    validation.check(part_config(config, None, place))
    held, clients = setup.partitioned_data(config)
    reserved = _reserved(config, len(clients))
    # no part is larger: refuse invalid settings before minutes of work
    most = np.arange(max(2, (len(clients) - len(reserved)) // (2 * config.debug.generators)))
    if len(clients) > 1:
        unit = setup.setup(part_config(config, most, place)).method.plan.unit
        if unit is not Unit.CLIENT:
            problem = (
                f"{config.names.method} protects single images, and a bug affects whole clients"
            )
            raise FedgenError(
                "method", problem, "take gs_wgan or fedavg_gan, or privacy.unit=client"
            )
    split = split_clients(config, held, clients)
    runs = {
        f"{name}-{number}": part_config(config, members, place / f"{name}-{number}")
        for name, parts in split.groups.items()
        for number, members in enumerate(parts)
    }
    write_start(config, place)
    failed = complete(runs, place, config.jobs, "generators")
    if failed:
        raise FedgenError("debug", "a generator's run failed", f"see {failed[0]}")
    try:
        return _compare(config, split, held, clients, place)
    except KeyboardInterrupt:
        raise Interrupted("interrupted", place) from None


def _check(config: DictConfig) -> None:
    """Raise FedgenError for invalid settings."""
    settings = config.debug
    if settings.suspect > settings.normal:
        problem = f"{settings.suspect:g} is above debug.normal={settings.normal:g}"
        raise FedgenError("debug.suspect", problem, "a client cannot be in both groups")
    if not LEVEL * comb(2 * settings.generators, settings.generators) > 1:
        problem = f"{settings.generators} of each group cannot show a difference at level {LEVEL:g}"
        raise FedgenError("debug.generators", problem, "take 5 or more")
    if settings.generators > _COLUMNS:
        raise FedgenError("debug.generators", f"must be at most {_COLUMNS}", "lower it")
    if config.resume is not None:
        raise FedgenError("resume", "fedgen debug resumes on its own", "give its run_dir")
    if config.group is not None:
        raise FedgenError("group", "is derived by fedgen debug", "leave it out")
    if config.privacy.noise == "secure":
        problem = "secure refuses non-private uses of the images, such as the split"
        raise FedgenError("privacy.noise", problem, "take seeded: it is an experiment")


def write_start(config: DictConfig, place: Path) -> None:
    """Create the directory, with the settings that identify it."""
    make_folder(place)
    write_atomic(place / _SETTINGS_FILE, _settings_text(config).encode())
    write_atomic(place / "SERVER_SIDE.md", SERVER_SIDE.encode())


def _settings_text(config: DictConfig) -> str:
    settings = OmegaConf.to_container(
        OmegaConf.masked_copy(config, ["debug", "seed"]), resolve=True
    )
    assert isinstance(settings, dict)
    return json.dumps({**settings, "method": config.method.type}, sort_keys=True) + "\n"


def check_place(config: DictConfig, place: Path) -> None:
    """Raise FedgenError for a directory with other content, or with different settings."""
    if not place.exists() or (place.is_dir() and all(map(is_temporary, place.iterdir()))):
        return
    if not (place / _SETTINGS_FILE).is_file():
        raise FedgenError("run_dir", f"{place} contains other files", "choose another")
    if (place / _SETTINGS_FILE).read_text() != _settings_text(config):
        problem = f"{place} has different debug settings, another method or another seed"
        raise FedgenError("run_dir", problem, "choose another")


def _reserved(config: DictConfig, clients: int) -> NDArray[np.int64]:
    """Return the clients that train the classifier: those named, or random ones.

    Raises:
        FedgenError: if no other clients remain, or a named one does not exist.
    """
    reserved, key = config.debug.reserved_clients, "debug.reserved_clients"
    if not isinstance(reserved, int):
        members = np.unique(np.array(reserved, dtype=np.int64))
        if not len(members) or len(members) < len(reserved) or members[-1] >= clients:
            problem = f"must be distinct numbers of clients, from 0 to {clients - 1}"
            raise FedgenError(key, problem, "correct it, e.g. [0,3]")
        reserved = len(members)
    else:
        streams = RandomStreams.from_seed(0, "seeded")
        order = torch.randperm(clients, generator=streams.public("apart")).numpy()
        members = np.sort(order[:reserved])
    if reserved >= clients:
        problem = f"{reserved} of {clients} client(s) are reserved, and none remain for the groups"
        raise FedgenError(key, problem, "lower it, or take a partition of more clients")
    return members


def split_clients(config: DictConfig, held: Dataset, clients: list[Index]) -> Split:
    """Return the suspect and the normal clients, by the accuracy of a classifier on the images of
    each client. It is trained on the images of reserved clients before the bug, which are excluded
    from everything else.

    Nothing here is private: no ε covers the group of a client, the sizes of groups, or the images
    of reserved clients.

    Raises:
        FedgenError: if a group has too few clients.
    """
    settings = config.debug
    reserved = _reserved(config, len(clients))
    others = np.setdiff1d(np.arange(len(clients)), reserved)
    streams = RandomStreams.from_seed(config.seed, "seeded").at("data")
    has_bug = sample_bugged_clients(len(clients), config.corruption.fraction, streams)
    reserved_records = np.concatenate([clients[client] for client in reserved])
    print(
        "training the classifier that selects suspect clients: takes minutes the first time",
        flush=True,
    )
    net = evaluation_net(
        held.images[reserved_records],
        held.labels[reserved_records],
        held.classes,
        cache() / "judges",
    )
    corrupted = corrupt(held, clients, has_bug, config.corruption.fault)
    accuracies = np.full(len(clients), np.nan)
    rows = np.concatenate([clients[client] for client in others])
    right = outputs(net, corrupted.images[rows]).argmax(1) == corrupted.labels[rows]
    ends = np.cumsum([len(clients[client]) for client in others])
    accuracies[others] = [part.mean() for part in np.split(right, ends[:-1])]
    by = accuracies[others]
    if settings.quantiles:  # quantiles from 0 to 1
        by = np.argsort(np.argsort(by, kind="stable")) / max(1, len(others) - 1)
    low, high = settings.suspect, settings.normal
    candidates = {"suspect": others[by <= low], "normal": others[(by >= high) & (by > low)]}
    groups = {}
    size = min(map(len, candidates.values())) // settings.generators
    for name, members in candidates.items():
        if len(members) < 2 * settings.generators:
            problem = f"{len(members)} of {len(others)} clients are {name}, two for each of "
            problem += f"{settings.generators} generators are needed"
            remedy = "move it, or lower debug.generators or debug.reserved_clients"
            raise FedgenError(f"debug.{name}", problem, remedy)
        dealt = torch.randperm(len(members), generator=streams.public("parts", name)).numpy()
        parts = np.split(dealt[: size * settings.generators], settings.generators)
        groups[name] = [np.sort(members[part]) for part in parts]
    return Split(reserved, groups, has_bug, accuracies)


def part_config(
    config: DictConfig, members: Sequence[int] | NDArray[np.int64] | None, place: Path
) -> DictConfig:
    """Return the configuration of the run of one generator; without ``members``, of any of them."""
    result = config.copy()
    with open_dict(result):
        del result.debug, result.jobs
        result.run_dir = str(place)
        result.group = None if members is None else [int(client) for client in members]
    return result


def _compare(
    config: DictConfig, split: Split, held: Dataset, clients: list[Index], place: Path
) -> str:
    """Return the verdict, and write the picture and ``results.json``."""
    count, classes = config.debug.generators, held.classes
    samples: dict[str, list[Samples]] = {name: [] for name in GROUPS}
    columns: dict[str, list[NDArray[np.uint8]]] = {name: [] for name in GROUPS}
    samples_per_label = _COLUMNS // count
    for name in GROUPS:
        for number in range(count):
            published = load_generator(place / f"{name}-{number}", config.device)
            draw = partial(draw_samples, published.method, published.weights)
            streams = RandomStreams.from_seed(config.seed, "seeded").at("debug", name, number)
            labels = torch.randint(
                0, classes, (config.debug.samples,), generator=streams.public("labels")
            )
            samples[name].append((draw(labels, streams), labels.numpy()))
            grid = torch.arange(classes).repeat_interleave(samples_per_label)
            drawn = draw(grid, streams.at("grid"))
            columns[name].append(drawn.reshape(classes, samples_per_label, *drawn.shape[1:]))
    reserved_records = np.concatenate([clients[client] for client in split.reserved])
    like = typical(held.images[reserved_records], held.labels[reserved_records], classes)
    decision = verdict(samples["suspect"], samples["normal"], like, config.debug.margin)
    blank = np.full((classes, 1, *held.shape), 64, dtype=np.uint8)
    together = np.concatenate([*columns["suspect"], blank, *columns["normal"]], axis=1)
    sheet = together.reshape(-1, *held.shape)
    sample_grid(sheet, together.shape[1], place / "samples.png")
    results = _results(config, split, place, decision)
    RunDir(place).write("results", results, "debug")
    return _describe(results, decision, place)


def _results(config: DictConfig, split: Split, place: Path, decision: Verdict) -> dict[str, Any]:
    of_runs = {
        name: [RunDir(place / f"{name}-{number}").results() for number in range(len(parts))]
        for name, parts in split.groups.items()
    }

    def largest(view: str) -> float | None:
        values = [results["epsilon"][view] for runs in of_runs.values() for results in runs]
        return None if None in values else max(values)

    return {
        "schema": 1,
        "method": config.names.method,
        "data": data_label(config),
        "seed": config.seed,
        "clients": len(split.bugged) - len(split.reserved),
        "reserved_clients": len(split.reserved),
        "epsilon": {view: largest(view) for view in ("server", "release")},
        "groups": {
            name: {
                "clients": sum(map(len, parts)),
                "bugged": int(split.bugged[np.concatenate(parts)].sum()),
                "accuracy": float(split.accuracies[np.concatenate(parts)].mean()),
                "generators": len(parts),
                "seconds": sum(results["seconds"] for results in of_runs[name]),
            }
            for name, parts in split.groups.items()
        },
        "verdict": asdict(decision),
    }


def _describe(results: dict[str, Any], decision: Verdict, place: Path) -> str:
    descriptions = {
        True: "bug",
        False: "no bug shared by most of the suspect group",
        None: "inconclusive: accuracy is too low, or the difference may be due to chance",
    }
    eps = {name: format_epsilon(value) for name, value in results["epsilon"].items()}
    planted = any(group["bugged"] for group in results["groups"].values())
    lines = [
        f"{name}: {group['clients']} clients, recognized {group['accuracy']:.1%}"
        + (f", {group['bugged']} of them with the planted fault" if planted else "")
        + f"; {group['generators']} generators"
        for name, group in results["groups"].items()
    ]
    lines.append(
        f"verdict: {descriptions[decision.bug]} (p = {decision.p_value:.2g}; inverted: "
        f"{decision.suspect:.1%} of the suspect group's samples, {decision.normal:.1%} of the "
        "normal group's)"
    )
    if decision.classes:
        lines.append(f"labels affected: {', '.join(map(str, decision.classes))}")
    lines += [
        f"proven ε {eps['server']} (server), {eps['release']} (release) per client of a group, "
        "given the groups; not covered: members, sizes and accuracy of the groups, and images "
        "of the reserved clients",
        "noise follows from the seed: an experiment, not for release",
        str(place / "samples.png"),
        str(place / "results.json"),
    ]
    return "\n".join(lines)
