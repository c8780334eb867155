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
        repetition: index of the repetition; None for a single run. All repetitions have the same
            canaries; ``presence_in_repetition`` selects those included.

    Raises:
        FedgenError: if there are fewer units than canaries.
    """
    units = units_of(dataset, shards, unit)
    if count > len(units):
        raise FedgenError(
            "audit.canaries",
            f"{count} exceeds the number of {unit.value}s ({len(units)})",
            "lower it",
        )
    rng = streams.secret("canaries")
    if repetition is None:
        canary_units = [units[place] for place in rng.sample(range(len(units)), count)]
    else:
        shuffled = [units[place] for place in rng.sample(range(len(units)), len(units))]
        canary_units = _interleave_by_label(shuffled, dataset.labels)[:count]
    present = (
        _sample_presence(count, rng)
        if repetition is None
        else presence_in_repetition(count, repetition, streams)
    )
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


def _sample_presence(count: int, rng: random.Random) -> NDArray[np.bool_]:
    """Return whether each canary is included, independently with probability 1/2, (count,)."""
    return np.array([rng.random() < 0.5 for _ in range(count)], dtype=bool)


def presence_in_repetition(
    count: int, repetition: int, streams: RandomStreams
) -> NDArray[np.bool_]:
    """Return whether each canary is included in a repetition of a run, (count,). Repetitions 2 i
    and 2 i + 1 include complementary canaries, so that each canary is in exactly half of them."""
    first = _sample_presence(count, streams.secret("repetition", repetition // 2))
    return ~first if repetition % 2 else first


def _interleave_by_label(units: list[Index], labels: Index) -> list[Index]:
    """Order units so that the labels of their first records alternate: canaries with the same label
    mask each other's effect."""
    seen = Counter[int]()
    turns = []
    for unit in units:
        label = int(labels[unit[0]])
        turns.append(seen[label])
        seen[label] += 1
    return [units[place] for place in np.argsort(turns, kind="stable")]


def units_of(dataset: Dataset, shards: list[Index], unit: Unit) -> list[Index]:
    """Return the records of each protected unit: a record, a person or a client."""
    if unit is Unit.CLIENT:
        return list(shards)
    rows = np.concatenate(shards)
    if unit is Unit.RECORD:
        return [rows[place : place + 1] for place in range(len(rows))]
    assert dataset.persons is not None
    persons = dataset.persons[rows]
    return [rows[persons == person] for person in np.unique(persons)]
