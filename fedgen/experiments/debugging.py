"""``fedgen debug``: are the images of some clients inverted? Found without looking at any of them,
from the samples of private generators ("GS-WGAN", sections 5.4 and C.2).

Clients whom a classifier recognizes badly are *suspect*, those whom it recognizes well *normal*.
Each group is dealt out to several generators, so that a difference between the groups can be told
from what noise makes of a single one. A client is in one part of one group: it answers for one
generator alone. All parts are of the same size, under the same noise; whom that leaves over in the
larger group takes no part.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from functools import partial
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf, open_dict

from fedgen.coins import Coins
from fedgen.data.corruption import plant_flip, with_the_bug
from fedgen.data.datasets import Dataset
from fedgen.data.partition import Index
from fedgen.errors import FedgenError, Interrupted
from fedgen.evaluation.judge import judge
from fedgen.evaluation.polarity import LEVEL, Samples, Verdict, typical, verdict
from fedgen.evaluation.utility import outputs
from fedgen.experiments import settings, validation
from fedgen.experiments.generation import draw_samples, load_generator
from fedgen.experiments.processes import jobs_at_a_time, train_beside
from fedgen.experiments.sweep import check_same
from fedgen.files import cache, check_no_links, is_temporary, write_whole
from fedgen.privacy.events import Unit
from fedgen.reporting.figures import sample_grid
from fedgen.reporting.progress import epsilon_in_words
from fedgen.reporting.run_dir import RunDir, make_folder
from fedgen.reporting.words import SERVER_SIDE

GROUPS = ("suspect", "normal")
_COLUMNS = 10  # of each group's samples, in the picture
_HELD = "debug.json"  # what a directory of fedgen debug was made with


@dataclass(frozen=True)
class Split:
    """Numbers of clients: those set apart, whose clean rows teach the classifier, and the groups,
    each in as many parts as there are generators, all parts of the same size: noise depends on it.
    bugged: (clients,) who has the bug, which nobody would know. accuracies: (clients,), of the
    classifier on each client's rows; NaN for those set apart."""

    apart: NDArray[np.int64]
    groups: dict[str, list[NDArray[np.int64]]]
    bugged: NDArray[np.bool_]
    accuracies: NDArray[np.float64]


def debug(config: DictConfig) -> str:
    """Splits the clients, trains what is missing of the generators, and compares their samples;
    what was found, in words. Called again with its ``run_dir``, it goes on.

    Raises:
        FedgenError: for a setting that does not work.
        Interrupted: if it was asked to end; the runs have kept what they had.
    """
    _check(config)
    place = Path(config.run_dir or time.strftime("runs/debug-%Y%m%d-%H%M%S"))
    check_no_links(place, "run_dir")
    _check_place(config, place)
    validation.check(_of_part(config, None, place))
    jobs = jobs_at_a_time(config.jobs, [config])
    held, clients = settings.shared_out(config)
    # no part is larger than this: what cannot be is said before minutes of work
    most = np.arange(max(2, (len(clients) - config.debug.apart) // (2 * config.debug.generators)))
    if len(clients) > 1:
        unit = settings.setup(_of_part(config, most, place)).method.plan.unit
        if unit is not Unit.CLIENT:
            problem = f"{config.names.method} protects single images, and a bug is a client's"
            raise FedgenError(
                "method", problem, "take gs_wgan or fedavg_gan, or privacy.unit=client"
            )
    split = split_clients(config, held, clients)
    runs = {
        f"{name}-{number}": _of_part(config, members, place / f"{name}-{number}")
        for name, parts in split.groups.items()
        for number, members in enumerate(parts)
    }
    for name, chosen in runs.items():
        validation.check(chosen)
        if (place / name / "config.yaml").exists():
            check_same(chosen, place / name)
    make_folder(place)
    write_whole(place / _HELD, _settings_of(config).encode())  # first: it says whose place this is
    write_whole(place / "SERVER_SIDE.md", SERVER_SIDE.encode())
    missing = [chosen for name, chosen in runs.items() if not RunDir(place / name).finished]
    # a lane trains several: to begin a process takes as long as a short run
    lanes = {f"lane-{number}": missing[number::jobs] for number in range(min(jobs, len(missing)))}
    failed = train_beside(lanes, place / "logs", jobs, "generators", place)
    if failed:
        raise FedgenError("debug", "a generator's run failed", f"see {failed[0]}")
    try:
        return _compare(config, split, held, clients, place)
    except KeyboardInterrupt:
        raise Interrupted("interrupted", place) from None


def _check(config: DictConfig) -> None:
    """Raises FedgenError for a debugging that cannot be."""
    chosen = config.debug
    for key in ("suspect", "normal", "margin"):
        if not 0 <= chosen[key] <= 1:
            raise FedgenError(f"debug.{key}", f"must be a share, got {chosen[key]:g}", "e.g. 0.5")
    if chosen.suspect > chosen.normal:
        problem = f"{chosen.suspect:g} is above debug.normal={chosen.normal:g}"
        raise FedgenError("debug.suspect", problem, "a client cannot be in both groups")
    for key, least in (("apart", 1), ("samples", 100), ("generators", 2)):
        if not least <= chosen[key] <= 10**6:
            problem = f"must lie in {least}..1,000,000, got {chosen[key]}"
            raise FedgenError(f"debug.{key}", problem, "correct it")
    if not LEVEL * comb(2 * chosen.generators, chosen.generators) > 1:
        problem = f"{chosen.generators} of each group cannot show a difference at level {LEVEL:g}"
        raise FedgenError("debug.generators", problem, "take 5 or more")
    if chosen.generators > _COLUMNS:
        raise FedgenError("debug.generators", f"must be at most {_COLUMNS}", "lower it")
    if config.resume is not None:
        raise FedgenError("resume", "fedgen debug goes on by itself", "give its run_dir")
    if config.group is not None:
        raise FedgenError("group", "is what fedgen debug finds", "leave it out")
    if config.privacy.noise == "secure":
        problem = "secure refuses what looks at private rows outside any mechanism, as the split"
        raise FedgenError("privacy.noise", problem, "take seeded: it is an experiment")


def _settings_of(config: DictConfig) -> str:
    chosen = OmegaConf.masked_copy(config, ["debug", "seed"])
    return json.dumps(OmegaConf.to_container(chosen, resolve=True), sort_keys=True) + "\n"


def _check_place(config: DictConfig, place: Path) -> None:
    """Raises FedgenError for a directory of something else, or of another debugging."""
    if not place.exists() or (place.is_dir() and all(map(is_temporary, place.iterdir()))):
        return
    if not (place / _HELD).is_file():
        raise FedgenError("run_dir", f"{place} holds something else", "choose another")
    if (place / _HELD).read_text() != _settings_of(config):
        problem = f"{place} was made with other settings of debug, or another seed"
        raise FedgenError("run_dir", problem, "choose another")


def split_clients(config: DictConfig, held: Dataset, clients: list[Index]) -> Split:
    """Who is suspect and who is normal, by the accuracy of a classifier on each client's rows. It
    learns from the rows of ``debug.apart`` clients, as they were before the bug, who take no part
    in anything else.

    Nothing here is private: no ε covers which group a client is in, how large the groups are, or
    the rows of those set apart.

    Raises:
        FedgenError: if there are too few clients in a group.
    """
    chosen = config.debug
    if chosen.apart >= len(clients):
        problem = f"{chosen.apart} of {len(clients)} client(s) leave none"
        raise FedgenError("debug.apart", problem, "lower it, or take a partition of more clients")
    coins = Coins.of(config.seed, "seeded").at("data")
    bugged = with_the_bug(len(clients), config.corruption.fraction, coins)
    order = torch.randperm(len(clients), generator=Coins.of(0, "seeded").public("apart")).numpy()
    apart, others = np.sort(order[: chosen.apart]), np.sort(order[chosen.apart :])
    lessons = np.concatenate([clients[client] for client in apart])
    print("the classifier that tells suspect clients: minutes, the first time", flush=True)
    net = judge(held.images[lessons], held.labels[lessons], held.classes, cache() / "judges")
    flipped = plant_flip(held, clients, bugged)
    accuracies = np.full(len(clients), np.nan)
    rows = np.concatenate([clients[client] for client in others])
    right = outputs(net, flipped.images[rows]).argmax(1) == flipped.labels[rows]
    ends = np.cumsum([len(clients[client]) for client in others])
    accuracies[others] = [part.mean() for part in np.split(right, ends[:-1])]
    by = accuracies[others]
    if chosen.quantiles:  # places from 0 to 1
        by = np.argsort(np.argsort(by, kind="stable")) / max(1, len(others) - 1)
    low, high = chosen.suspect, chosen.normal
    found = {"suspect": others[by <= low], "normal": others[(by >= high) & (by > low)]}
    groups = {}
    size = min(map(len, found.values())) // chosen.generators
    for name, members in found.items():
        if len(members) < 2 * chosen.generators:
            problem = f"{len(members)} of {len(others)} clients are {name}, two for each of "
            problem += f"{chosen.generators} generators are needed"
            remedy = "move it, or lower debug.generators or debug.apart; a hundred clients are few"
            raise FedgenError(f"debug.{name}", problem, remedy)
        dealt = torch.randperm(len(members), generator=coins.public("parts", name)).numpy()
        parts = np.split(dealt[: size * chosen.generators], chosen.generators)
        groups[name] = [np.sort(members[part]) for part in parts]
    return Split(apart, groups, bugged, accuracies)


def _of_part(config: DictConfig, members: NDArray[np.int64] | None, place: Path) -> DictConfig:
    """The configuration of one generator's run; without ``members`` of any of them."""
    there = config.copy()
    with open_dict(there):
        del there.debug, there.jobs
        there.run_dir = str(place)
        there.group = None if members is None else [int(each) for each in members]
    return there


def _compare(
    config: DictConfig, split: Split, held: Dataset, clients: list[Index], place: Path
) -> str:
    """The verdict, the picture and ``results.json``."""
    count, classes = config.debug.generators, held.classes
    samples: dict[str, list[Samples]] = {name: [] for name in GROUPS}
    columns: dict[str, list[NDArray[np.uint8]]] = {name: [] for name in GROUPS}
    each = _COLUMNS // count
    for name in GROUPS:
        for number in range(count):
            published = load_generator(place / f"{name}-{number}", config.device)
            draw = partial(draw_samples, published.method, published.weights)
            coins = Coins.of(config.seed, "seeded").at("debug", name, number)
            labels = torch.randint(
                0, classes, (config.debug.samples,), generator=coins.public("labels")
            )
            samples[name].append((draw(labels, coins), labels.numpy()))
            grid = torch.arange(classes).repeat_interleave(each)
            drawn = draw(grid, coins.at("grid"))
            columns[name].append(drawn.reshape(classes, each, *drawn.shape[1:]))
    lessons = np.concatenate([clients[client] for client in split.apart])
    like = typical(held.images[lessons], held.labels[lessons], classes)
    found = verdict(samples["suspect"], samples["normal"], like, config.debug.margin)
    blank = np.full((classes, 1, *held.shape), 64, dtype=np.uint8)
    together = np.concatenate([*columns["suspect"], blank, *columns["normal"]], axis=1)
    sheet = together.reshape(-1, *held.shape)
    sample_grid(sheet, together.shape[1], place / "samples.png")
    results = _results(config, split, place, found)
    RunDir(place).write("results", results, "debug")
    return _in_words(results, found, place)


def _results(config: DictConfig, split: Split, place: Path, found: Verdict) -> dict[str, Any]:
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
        "data": config.names.data,
        "seed": config.seed,
        "clients": len(split.bugged) - len(split.apart),
        "apart": len(split.apart),
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
        "verdict": asdict(found),
    }


def _in_words(results: dict[str, Any], found: Verdict, place: Path) -> str:
    said = {
        True: "bug",
        False: "no bug that most of the suspect group has",
        None: "cannot tell: too little learnt, or it may be luck",
    }
    eps = {name: epsilon_in_words(value) for name, value in results["epsilon"].items()}
    lines = [
        f"{name}: {group['clients']} clients, recognized {group['accuracy']:.1%}, "
        f"{group['bugged']} of them with the bug (which nobody would know); "
        f"{group['generators']} generators"
        for name, group in results["groups"].items()
    ]
    lines.append(
        f"verdict: {said[found.bug]} (p = {found.p_value:.2g}; inverted: {found.suspect:.1%} of "
        f"the suspect group's samples, {found.normal:.1%} of the normal group's)"
    )
    if found.classes:
        lines.append(f"labels affected: {', '.join(map(str, found.classes))}")
    lines += [
        f"proven ε {eps['server']} (server), {eps['release']} (release) per client of a group, "
        "given the groups; who is in them, how many, how well they are recognized, and the rows of "
        "those set apart are not covered",
        "noise follows from the seed: an experiment, not for release",
        str(place / "samples.png"),
        str(place / "results.json"),
    ]
    return "\n".join(lines)
