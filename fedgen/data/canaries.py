"""Canaries: units of a data set that are in, or not, by a coin of their own, for audits of a run.

A canary is easy to tell: its images have inverted intensities and a label of another class.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedgen.coins import Coins
from fedgen.data.datasets import Dataset, Shard
from fedgen.errors import FedgenError
from fedgen.privacy.events import Relation, Unit

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Canaries:
    """present: (m,) whether each is in. inside: its rows if it is; outside: what is there in its
    place otherwise (None: nothing)."""

    present: NDArray[np.bool_]
    inside: list[Shard]
    outside: list[Shard] | None


def plant(
    dataset: Dataset, shards: list[Index], unit: Unit, relation: Relation, count: int, coins: Coins
) -> tuple[Dataset, list[Index], Canaries]:
    """The data set and the shards with canaries, each there by a fair coin: rows, or all rows of a
    client or a person. Without its canary a place keeps its own rows (replace one) or loses them
    (add or remove one; a client without rows is none): flipping one coin makes a neighbour.

    Raises:
        FedgenError: if there are fewer units than canaries.
    """
    rows = np.concatenate(shards)
    units = list(shards) if unit is Unit.CLIENT else _single(rows)
    if unit is Unit.PERSON:
        assert dataset.persons is not None
        units = [rows[dataset.persons[rows] == who] for who in np.unique(dataset.persons[rows])]
    if count > len(units):
        raise FedgenError(
            "audit.canaries", f"{count} are more than there are {unit.value}s", "lower it"
        )
    rng = coins.secret("canaries")
    chosen = [units[place] for place in rng.sample(range(len(units)), count)]
    present = np.array([rng.random() < 0.5 for _ in chosen], dtype=bool)
    remove = relation is Relation.ADD_OR_REMOVE_ONE
    images, labels = dataset.images.copy(), dataset.labels.copy()
    inside = []
    for rows, there in zip(chosen, present, strict=True):
        looks = 255 - dataset.images[rows]
        other = (dataset.labels[rows] + max(1, dataset.classes // 2)) % dataset.classes
        inside.append(Shard(torch.from_numpy(looks), torch.from_numpy(other)))
        if there:
            images[rows], labels[rows] = looks, other
        elif remove:
            shards = [each[~np.isin(each, rows)] for each in shards]
    outside = None if remove else [dataset.shard(rows) for rows in chosen]
    planted = replace(dataset, images=images, labels=labels)
    return planted, shards, Canaries(present, inside, outside)


def _single(rows: Index) -> list[Index]:
    return [rows[place : place + 1] for place in range(len(rows))]
