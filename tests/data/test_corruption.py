"""The planted bug: in the requested number of clients, and in nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiny import STREAMS

from fedgen.data.corruption import invert_images, sample_bugged_clients
from fedgen.data.digits import digits


@given(st.integers(1, 300), st.floats(0, 1))
def test_the_requested_number_of_clients_is_corrupted(clients: int, fraction: float) -> None:
    assert sample_bugged_clients(clients, fraction, STREAMS).sum() == round(fraction * clients)


def test_the_corrupted_clients_are_public_and_depend_on_the_seed() -> None:
    assert np.array_equal(
        sample_bugged_clients(50, 0.5, STREAMS), sample_bugged_clients(50, 0.5, STREAMS)
    )
    assert not np.array_equal(
        sample_bugged_clients(50, 0.5, STREAMS), sample_bugged_clients(50, 0.5, STREAMS.at("b"))
    )


def test_only_images_of_corrupted_clients_are_inverted() -> None:
    clean = digits(STREAMS)
    shards = np.array_split(np.arange(len(clean.labels)), 7)
    bugged = np.array([True, False, False, True, False, False, False])
    result = invert_images(clean, shards, bugged)
    for shard, bug in zip(shards, bugged, strict=True):
        expected = 255 - clean.images[shard] if bug else clean.images[shard]
        assert np.array_equal(result.images[shard], expected)
    assert np.array_equal(result.test_images, clean.test_images)
    assert np.array_equal(result.labels, clean.labels)
    assert invert_images(clean, shards, ~np.ones(7, dtype=bool)) is clean
