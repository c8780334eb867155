"""Canaries: flipping one coin makes a neighbour, and nothing else moves."""

from __future__ import annotations

import numpy as np
import pytest

from fedgen.coins import Coins
from fedgen.data.canaries import plant
from fedgen.data.datasets import digits
from fedgen.errors import FedgenError
from fedgen.privacy.events import Relation, Unit

COINS = Coins.of(3, "seeded")
DIGITS = digits(COINS)
SHARDS = [np.arange(0, 100), np.arange(100, 300), np.arange(300, 420)]


@pytest.mark.parametrize(
    ("unit", "relation", "count"),
    [
        (Unit.RECORD, Relation.REPLACE_ONE, 50),
        (Unit.RECORD, Relation.ADD_OR_REMOVE_ONE, 50),
        (Unit.CLIENT, Relation.REPLACE_ONE, 3),
    ],
)
def test_what_is_there_follows_from_the_coins(unit: Unit, relation: Relation, count: int) -> None:
    planted, shards, canaries = plant(DIGITS, SHARDS, unit, relation, count, COINS)
    assert len(canaries.present) == len(canaries.inside) == count
    changed = (planted.images != DIGITS.images).any(axis=(1, 2, 3)).sum()
    units_in = sum(
        len(c) for c, there in zip(canaries.inside, canaries.present, strict=True) if there
    )
    assert changed == units_in
    removed = sum(map(len, SHARDS)) - sum(map(len, shards))
    assert removed == (0 if canaries.outside is not None else (~canaries.present).sum())
    for look in canaries.inside:
        assert not (look.images.numpy() == DIGITS.images[:1]).all()


def test_coins_are_fair_and_repeat() -> None:
    """400 coins within the binomial interval of level 1e-6."""
    first, again = (
        plant(DIGITS, SHARDS, Unit.RECORD, Relation.REPLACE_ONE, 400, COINS)[2].present
        for _ in range(2)
    )
    assert (first == again).all()
    assert 151 < first.sum() < 249


def test_too_many_are_refused() -> None:
    with pytest.raises(FedgenError, match=r"audit\.canaries"):
        plant(DIGITS, SHARDS, Unit.CLIENT, Relation.REPLACE_ONE, 4, COINS)


def test_a_client_without_its_canary_has_no_rows() -> None:
    _, shards, found = plant(DIGITS, SHARDS, Unit.CLIENT, Relation.ADD_OR_REMOVE_ONE, 3, COINS)
    assert sum(len(shard) > 0 for shard in shards) == found.present.sum()
    assert found.outside is None
