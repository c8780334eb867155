"""Planted faults: in the requested number of clients, and in nothing else."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import STREAMS

from fedgen.config.schema import PlantedFault
from fedgen.data.corruption import FAULTS, corrupt, sample_bugged_clients
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


@pytest.mark.parametrize("fault", get_args(PlantedFault))
def test_only_corrupted_clients_are_changed(fault: PlantedFault) -> None:
    clean = digits(STREAMS)
    shards = np.array_split(np.arange(len(clean.labels)), 7)
    bugged = np.array([True, False, False, True, False, False, False])
    result = corrupt(clean, shards, bugged, fault)
    for shard, bug in zip(shards, bugged, strict=True):
        same_images = np.array_equal(result.images[shard], clean.images[shard])
        same_labels = np.array_equal(result.labels[shard], clean.labels[shard])
        assert (same_images and same_labels) is not bug
    assert np.array_equal(result.test_images, clean.test_images)
    assert np.array_equal(result.test_labels, clean.test_labels)
    assert corrupt(clean, shards, ~np.ones(7, dtype=bool), fault) is clean


def test_faults_are_what_their_names_say() -> None:
    images = np.array([[[[0, 16], [160, 255]]], [[[8, 8], [8, 8]]]], dtype=np.uint8)
    labels = np.array([1, 1])
    changed = {name: FAULTS[name](images, labels, 2) for name in get_args(PlantedFault)}
    assert changed["inverted"][0][0].tolist() == [[[255, 239], [95, 0]]]
    assert changed["rotated"][0][0].tolist() == [[[16, 255], [0, 160]]]
    assert changed["mirrored"][0][0].tolist() == [[[16, 0], [255, 160]]]
    assert changed["darker"][0][0].tolist() == [[[0, 1], [10, 15]]]
    assert changed["blurred"][0][0].tolist() == [[[67, 81], [129, 152]]]
    assert changed["repeated"][0][1].tolist() == images[0].tolist()
    assert changed["labels_shifted"][1].tolist() == [0, 0]
    assert changed["one_label"][1].tolist() == [0, 0]
    assert not changed["black"][0].any()
    assert set(FAULTS) == set(get_args(PlantedFault))
