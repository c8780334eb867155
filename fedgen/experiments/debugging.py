"""``fedgen debug``: are the images of some clients inverted? Found without looking at any of them,
from the samples of two private generators ("GS-WGAN", sections 5.4 and C.2).

Clients whom a classifier recognizes badly are *suspect*, those whom it recognizes well *normal*.
One generator is trained on each group, with privacy of clients, and what the two draw is compared.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, open_dict

from fedgen.coins import Coins
from fedgen.data.corruption import plant_flip, with_the_bug
from fedgen.data.datasets import Dataset
from fedgen.data.partition import Index
from fedgen.errors import FedgenError
from fedgen.evaluation.judge import judge
from fedgen.evaluation.polarity import Verdict, verdict
from fedgen.evaluation.utility import outputs
from fedgen.experiments import settings
from fedgen.experiments.generation import draw_samples, load_generator
from fedgen.experiments.sweep import check_same
from fedgen.experiments.training import train
from fedgen.files import cache, write_whole
from fedgen.privacy.events import Unit
from fedgen.reporting.figures import sample_grid
from fedgen.reporting.progress import epsilon_in_words
from fedgen.reporting.run_dir import RunDir
from fedgen.reporting.words import SERVER_SIDE

GROUPS = ("suspect", "normal")
_COLUMNS = 10  # of each group's samples, in the picture


@dataclass(frozen=True)
class Split:
    """Numbers of clients: those set apart, whose clean rows teach the classifier, and the groups.
    bugged: (clients,) who has the bug, which nobody would know. accuracies: (clients,), of the
    classifier on each client's rows."""

    apart: NDArray[np.int64]
    groups: dict[str, NDArray[np.int64]]
    bugged: NDArray[np.bool_]
    accuracies: NDArray[np.float64]


def debug(config: DictConfig) -> str:
    """Splits the clients, trains what is missing of two generators, and compares their samples;
    what was found, in words. Called again with its ``run_dir``, it goes on.

    Raises:
        FedgenError: for a setting that does not work.
    """
    _check(config)
    place = Path(config.run_dir or time.strftime("runs/debug-%Y%m%d-%H%M%S"))
    held, clients = settings.shared_out(config)
    split = split_clients(config, held, clients)
    runs = {name: place / name for name in GROUPS}
    configs = {name: _of_group(config, split, place, name) for name in GROUPS}
    for name in GROUPS:  # nothing runs if one of them cannot
        ready = settings.setup(configs[name])
        if ready.method.plan.unit is not Unit.CLIENT:
            problem = f"{config.names.method} protects single images, and a bug is a client's"
            raise FedgenError("method", problem, "take gs_wgan_small, gs_wgan or fedavg_gan")
        if (runs[name] / "config.yaml").exists():
            check_same(configs[name], runs[name])
    for name in GROUPS:
        if RunDir(runs[name]).finished:
            continue
        if (runs[name] / "config.yaml").exists():
            configs[name].resume = str(runs[name])
        train(configs[name])
    return _compare(config, split, held, place, runs)


def _check(config: DictConfig) -> None:
    """Raises FedgenError for a debugging that cannot be."""
    chosen = config.debug
    for key in ("suspect", "normal", "margin"):
        if not 0 <= chosen[key] < 1:
            raise FedgenError(f"debug.{key}", f"must be a share, got {chosen[key]:g}", "e.g. 0.5")
    if chosen.suspect > chosen.normal:
        problem = f"{chosen.suspect:g} is above debug.normal={chosen.normal:g}"
        raise FedgenError("debug.suspect", problem, "a client cannot be in both groups")
    for key, least in (("apart", 1), ("samples", 100)):
        if not least <= chosen[key] <= 10**6:
            raise FedgenError(f"debug.{key}", f"must be at least {least}", "raise it")
    if config.resume is not None:
        raise FedgenError("resume", "fedgen debug goes on by itself", "give its run_dir")
    if config.group is not None:
        raise FedgenError("group", "is what fedgen debug finds", "leave it out")


def split_clients(config: DictConfig, held: Dataset, clients: list[Index]) -> Split:
    """Who is suspect and who is normal, by the accuracy of a classifier on each client's rows. It
    learns from the rows of ``debug.apart`` clients, as they were before the bug, who take no part
    in anything else.

    The group is one bit of a client's rows, told without noise. No ε covers it.

    Raises:
        FedgenError: if a group has fewer than two clients: there is nothing to compare.
    """
    chosen = config.debug
    if chosen.apart >= len(clients):
        problem = f"{chosen.apart} of {len(clients)} clients leave none"
        raise FedgenError("debug.apart", problem, "lower it")
    coins = Coins.of(config.seed, "seeded").at("data")
    bugged = with_the_bug(len(clients), config.corruption.fraction, coins)
    order = torch.randperm(len(clients), generator=Coins.of(0, "seeded").public("apart")).numpy()
    apart, others = np.sort(order[: chosen.apart]), np.sort(order[chosen.apart :])
    lessons = np.concatenate([clients[client] for client in apart])
    print("the classifier that tells suspect clients: minutes, the first time", flush=True)
    net = judge(held.images[lessons], held.labels[lessons], held.classes, cache() / "judges")
    flipped = plant_flip(held, clients, bugged)
    right = outputs(net, flipped.images).argmax(1) == flipped.labels
    accuracies = np.array([right[rows].mean() for rows in clients])
    by = accuracies[others]
    if chosen.quantiles:  # places from 0 to 1
        by = np.argsort(np.argsort(by, kind="stable")) / max(1, len(others) - 1)
    low, high = chosen.suspect, chosen.normal
    groups = {
        "suspect": others[by <= low],
        "normal": others[(by >= high) & (by > low)],
    }
    for name, members in groups.items():
        if len(members) < 2:
            problem = f"makes {len(members)} of {len(others)} clients {name}"
            raise FedgenError(f"debug.{name}", problem, "move it, or take debug.quantiles=true")
    return Split(apart, groups, bugged, accuracies)


def _of_group(config: DictConfig, split: Split, place: Path, name: str) -> DictConfig:
    """The configuration of a group's run, and the file that says who is in it."""
    members = place / f"{name}.txt"
    write_whole(members, "".join(f"{client}\n" for client in split.groups[name]).encode())
    there = config.copy()
    with open_dict(there):
        del there.debug
        there.group, there.run_dir = str(members.absolute()), str(place / name)
    return there


def _compare(
    config: DictConfig, split: Split, held: Dataset, place: Path, runs: dict[str, Path]
) -> str:
    """The verdict, the picture and ``results.json``."""
    samples: dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]] = {}
    grids: dict[str, NDArray[np.uint8]] = {}
    coins = Coins.of(config.seed, "seeded").at("debug")
    for name, run in runs.items():
        method, generator, classes = load_generator(run, config.device)
        here = coins.at(name)
        labels = torch.randint(0, classes, (config.debug.samples,), generator=here.public("labels"))
        samples[name] = draw_samples(method, generator, labels, here), labels.numpy()
        grid = torch.arange(classes).repeat_interleave(_COLUMNS)
        grids[name] = draw_samples(method, generator, grid, here.at("grid"))
    found = verdict(samples["suspect"], samples["normal"], held.classes, config.debug.margin)
    _side_by_side(grids["suspect"], grids["normal"], place / "samples.png")
    results = _results(config, split, runs, found)
    write_whole(place / "SERVER_SIDE.md", SERVER_SIDE.encode())
    RunDir(place).write("results", results, "debug")
    return _in_words(results, found, place)


def _side_by_side(suspect: NDArray[np.uint8], normal: NDArray[np.uint8], path: Path) -> None:
    """The suspect group's samples on the left, the normal group's on the right."""
    blank = np.full((len(suspect) // _COLUMNS, 1, *suspect.shape[1:]), 64, dtype=np.uint8)
    lines = [each.reshape(-1, _COLUMNS, *each.shape[1:]) for each in (suspect, normal)]
    together = np.concatenate([lines[0], blank, lines[1]], axis=1)
    sample_grid(together.reshape(-1, *suspect.shape[1:]), 2 * _COLUMNS + 1, path)


def _results(
    config: DictConfig, split: Split, runs: dict[str, Path], found: Verdict
) -> dict[str, Any]:
    of_runs = {name: RunDir(run).results() for name, run in runs.items()}

    def largest(view: str) -> float | None:
        values = [results["epsilon"][view] for results in of_runs.values()]
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
                "clients": len(members),
                "bugged": int(split.bugged[members].sum()),
                "accuracy": float(split.accuracies[members].mean()),
                "seconds": of_runs[name]["seconds"],
                "rounds": of_runs[name]["rounds"],
            }
            for name, members in split.groups.items()
        },
        "verdict": asdict(found),
    }


def _in_words(results: dict[str, Any], found: Verdict, place: Path) -> str:
    said = {True: "bug", False: "no bug", None: "cannot tell: the generators learnt too little"}
    eps = {name: epsilon_in_words(value) for name, value in results["epsilon"].items()}
    lines = [
        f"{name}: {group['clients']} clients, recognized {group['accuracy']:.1%}, "
        f"{group['bugged']} of them with the bug (which nobody would know)"
        for name, group in results["groups"].items()
    ]
    lines.append(
        f"verdict: {said[found.bug]} (p = {found.p_value:.2g}; inverted: {found.suspect:.1%} of "
        f"the suspect group's samples, {found.normal:.1%} of the normal group's)"
    )
    if found.classes:
        lines.append(f"labels affected: {', '.join(map(str, found.classes))}")
    lines += [
        f"proven ε {eps['server']} (server), {eps['release']} (release) per client, given the "
        "group: which one it is tells whether a classifier recognizes its images, without noise",
        str(place / "samples.png"),
        str(place / "results.json"),
    ]
    return "\n".join(lines)
