"""Canaries: units that are included in a data set independently at random, for audits.

A canary is easy to detect: its images have inverted intensities and the label of another class.
"""

from __future__ import annotations

import random
from collections import Counter
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
    repetition: int | None = None,
) -> tuple[Dataset, list[Index], Canaries]:
    """Return the data set and the shards with canaries, each included with probability 1/2: a
    record, or all records of a client or a person. Without its canary, a place keeps its own
    records (replace-one) or loses them (add-or-remove-one; a client without records does not
    exist): changing one choice gives a neighbour.

    Args:
        repetition: number of the repetition of a run: all have the same canaries; see ``presence``.

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
    if repetition is None:
        canary_units = [units[place] for place in rng.sample(range(len(units)), count)]
    else:
        shuffled = [units[place] for place in rng.sample(range(len(units)), len(units))]
        canary_units = _labels_in_turn(shuffled, dataset.labels)[:count]
    present = drawn(count, rng) if repetition is None else presence(count, repetition, streams)
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


def drawn(count: int, rng: random.Random) -> NDArray[np.bool_]:
    """Return whether each canary is included, independently with probability 1/2, (count,)."""
    return np.array([rng.random() < 0.5 for _ in range(count)], dtype=bool)


def presence(count: int, repetition: int, streams: RandomStreams) -> NDArray[np.bool_]:
    """Return whether each canary is included in a repetition of a run, (count,). Repetitions 2 i
    and 2 i + 1 are complements, so that each canary is in half of all."""
    first = drawn(count, streams.secret("repetition", repetition // 2))
    return ~first if repetition % 2 else first


def _labels_in_turn(units: list[Index], labels: Index) -> list[Index]:
    """Return units in an order in which the labels of their first records take turns: canaries of
    one label hide each other."""
    seen = Counter[int]()
    turns = []
    for unit in units:
        label = int(labels[unit[0]])
        turns.append(seen[label])
        seen[label] += 1
    return [units[place] for place in np.argsort(turns, kind="stable")]


def _single(rows: Index) -> list[Index]:
    return [rows[place : place + 1] for place in range(len(rows))]
