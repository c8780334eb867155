"""The planted bug: of as many clients as was asked, and of nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiny import STREAMS

from fedgen.data.corruption import invert_images, sample_bugged_clients
from fedgen.data.digits import digits


@given(st.integers(1, 300), st.floats(0, 1))
def test_as_many_clients_as_asked(clients: int, fraction: float) -> None:
    assert sample_bugged_clients(clients, fraction, STREAMS).sum() == round(fraction * clients)


def test_who_has_it_is_public_and_depends_on_the_seed() -> None:
    assert np.array_equal(
        sample_bugged_clients(50, 0.5, STREAMS), sample_bugged_clients(50, 0.5, STREAMS)
    )
    assert not np.array_equal(
        sample_bugged_clients(50, 0.5, STREAMS), sample_bugged_clients(50, 0.5, STREAMS.at("b"))
    )


def test_it_inverts_the_rows_of_those_alone() -> None:
    clean = digits(STREAMS)
    shards = np.array_split(np.arange(len(clean.labels)), 7)
    bugged = np.array([True, False, False, True, False, False, False])
    found = invert_images(clean, shards, bugged)
    for shard, bug in zip(shards, bugged, strict=True):
        expected = 255 - clean.images[shard] if bug else clean.images[shard]
        assert np.array_equal(found.images[shard], expected)
    assert np.array_equal(found.test_images, clean.test_images)
    assert np.array_equal(found.labels, clean.labels)
    assert invert_images(clean, shards, ~np.ones(7, dtype=bool)) is clean
