"""The planted bug: of as many clients as was asked, and of nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiny import COINS

from fedgen.data.corruption import plant_flip, with_the_bug
from fedgen.data.datasets import digits


@given(st.integers(1, 300), st.floats(0, 1))
def test_as_many_clients_as_asked(clients: int, fraction: float) -> None:
    assert with_the_bug(clients, fraction, COINS).sum() == round(fraction * clients)


def test_who_has_it_is_public_and_depends_on_the_seed() -> None:
    assert np.array_equal(with_the_bug(50, 0.5, COINS), with_the_bug(50, 0.5, COINS))
    assert not np.array_equal(with_the_bug(50, 0.5, COINS), with_the_bug(50, 0.5, COINS.at("b")))


def test_it_inverts_the_rows_of_those_alone() -> None:
    clean = digits(COINS)
    shards = np.array_split(np.arange(len(clean.labels)), 7)
    bugged = np.array([True, False, False, True, False, False, False])
    found = plant_flip(clean, shards, bugged)
    for shard, bug in zip(shards, bugged, strict=True):
        expected = 255 - clean.images[shard] if bug else clean.images[shard]
        assert np.array_equal(found.images[shard], expected)
    assert np.array_equal(found.test_images, clean.test_images)
    assert np.array_equal(found.labels, clean.labels)
    assert plant_flip(clean, shards, ~np.ones(7, dtype=bool)) is clean
