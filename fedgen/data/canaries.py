"""Canaries: units that are included in a data set independently at random, for audits.

A canary is easy to detect: its images have inverted intensities and the label of another class.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedgen.data.datasets import Dataset, Shard
from fedgen.errors import FedgenError
from fedgen.privacy.events import Relation, Unit
from fedgen.randomness import RandomStreams

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Canaries:
    """present: (m,), whether each canary is included.
    included: its records if included.
    excluded: the records in its place otherwise (None: none).
    """

    present: NDArray[np.bool_]
    included: list[Shard]
    excluded: list[Shard] | None


def add_canaries(
    dataset: Dataset,
    shards: list[Index],
    unit: Unit,
    relation: Relation,
    count: int,
    streams: RandomStreams,
) -> tuple[Dataset, list[Index], Canaries]:
    """Return the data set and the shards with canaries, each included with probability 1/2: a
    record, or all records of a client or a person. Without its canary, a place keeps its own
    records (replace-one) or loses them (add-or-remove-one; a client without records does not
    exist): changing one choice gives a neighbour.

    Raises:
        FedgenError: if there are fewer units than canaries.
    """
    rows = np.concatenate(shards)
    units = list(shards) if unit is Unit.CLIENT else _single(rows)
    if unit is Unit.PERSON:
        assert dataset.persons is not None
        units = [
            rows[dataset.persons[rows] == person] for person in np.unique(dataset.persons[rows])
        ]
    if count > len(units):
        raise FedgenError(
            "audit.canaries", f"{count} are more than there are {unit.value}s", "lower it"
        )
    rng = streams.secret("canaries")
    canary_units = [units[place] for place in rng.sample(range(len(units)), count)]
    present = np.array([rng.random() < 0.5 for _ in canary_units], dtype=bool)
    remove = relation is Relation.ADD_OR_REMOVE_ONE
    images, labels = dataset.images.copy(), dataset.labels.copy()
    inside = []
    for rows, is_present in zip(canary_units, present, strict=True):
        looks = 255 - dataset.images[rows]
        other = (dataset.labels[rows] + max(1, dataset.classes // 2)) % dataset.classes
        inside.append(Shard(torch.from_numpy(looks), torch.from_numpy(other)))
        if is_present:
            images[rows], labels[rows] = looks, other
        elif remove:
            shards = [shard[~np.isin(shard, rows)] for shard in shards]
    outside = None if remove else [dataset.shard(rows) for rows in canary_units]
    planted = replace(dataset, images=images, labels=labels)
    return planted, shards, Canaries(present, inside, outside)


def _single(rows: Index) -> list[Index]:
    return [rows[place : place + 1] for place in range(len(rows))]
