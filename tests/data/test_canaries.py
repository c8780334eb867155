"""Canaries: each inclusion is a fair random bit, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from fedgen.data.canaries import add_canaries
from fedgen.data.digits import digits
from fedgen.errors import FedgenError
from fedgen.privacy.events import Relation, Unit
from fedgen.randomness import RandomStreams

STREAMS = RandomStreams.from_seed(3, "seeded")
DIGITS = digits(STREAMS)
SHARDS = [np.arange(0, 100), np.arange(100, 300), np.arange(300, 420)]


@pytest.mark.parametrize(
    ("unit", "relation", "count"),
    [
        (Unit.RECORD, Relation.REPLACE_ONE, 50),
        (Unit.RECORD, Relation.ADD_OR_REMOVE_ONE, 50),
        (Unit.CLIENT, Relation.REPLACE_ONE, 3),
    ],
)
def test_inclusions_follow_from_the_random_bits(unit: Unit, relation: Relation, count: int) -> None:
    planted, shards, canaries = add_canaries(DIGITS, SHARDS, unit, relation, count, STREAMS)
    assert len(canaries.present) == len(canaries.included) == count
    changed = (planted.images != DIGITS.images).any(axis=(1, 2, 3)).sum()
    units_in = sum(
        len(c) for c, there in zip(canaries.included, canaries.present, strict=True) if there
    )
    assert changed == units_in
    removed = sum(map(len, SHARDS)) - sum(map(len, shards))
    assert removed == (0 if canaries.excluded is not None else (~canaries.present).sum())
    for look in canaries.included:
        assert not (look.images.numpy() == DIGITS.images[:1]).all()


def test_inclusions_are_fair_and_repeat() -> None:
    """400 streams within the binomial interval of level 1e-6."""
    first, again = (
        add_canaries(DIGITS, SHARDS, Unit.RECORD, Relation.REPLACE_ONE, 400, STREAMS)[2].present
        for _ in range(2)
    )
    assert (first == again).all()
    assert 151 < first.sum() < 249


def test_too_many_canaries_are_refused() -> None:
    with pytest.raises(FedgenError, match=r"audit\.canaries"):
        add_canaries(DIGITS, SHARDS, Unit.CLIENT, Relation.REPLACE_ONE, 4, STREAMS)


def test_a_client_without_its_canary_has_no_records() -> None:
    _, shards, result = add_canaries(
        DIGITS, SHARDS, Unit.CLIENT, Relation.ADD_OR_REMOVE_ONE, 3, STREAMS
    )
    assert sum(len(shard) > 0 for shard in shards) == result.present.sum()
    assert result.excluded is None
