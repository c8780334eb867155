"""Partitions: complete, disjoint, of the stated distribution, and stable if a record is added,
removed or changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutation import kills

from fedgen.data import partition
from fedgen.errors import FedgenError
from fedgen.randomness import RandomStreams

STREAMS = RandomStreams.from_seed(0, "seeded")
ROWS = 400
labels = np.random.default_rng(0).integers(0, 10, ROWS)
writers = np.random.default_rng(1).integers(0, 12, ROWS)
images = np.random.default_rng(2).integers(0, 256, (ROWS, 1, 2, 2), dtype=np.uint8)
images[::7] = 0  # some are equal
KINDS = {
    "single": partition.single,
    "iid": partial(partition.iid, clients=7),
    "by_writer": partial(partition.by_writer, clients=None),
    "some writers": partial(partition.by_writer, clients=5),
    "dirichlet": partial(partition.dirichlet, clients=5, alpha=0.7),
    "shards": partial(partition.shards, clients=10, classes_per_client=2),
}


def owners(
    kind: str,
    given_labels: np.ndarray = labels,
    given_writers: np.ndarray = writers,
    given_images: np.ndarray = images,
) -> np.ndarray:
    rows = {"images": given_images, "labels": given_labels, "writers": given_writers}
    result = KINDS[kind](**rows, classes=10, streams=STREAMS)
    owner = np.full(len(given_labels), -1)
    for client, rows in enumerate(result):
        assert (owner[rows] == -1).all(), "a row with two owners"
        owner[rows] = client
    return owner


@pytest.mark.parametrize("kind", KINDS)
def test_every_record_belongs_to_one_client(kind: str) -> None:
    owner = owners(kind)
    assert (owner >= 0).all() or (kind == "some writers" and len(set(owner)) == 6)


@pytest.mark.parametrize("kind", KINDS)
@given(row=st.integers(0, ROWS - 1), label=st.integers(0, 9), writer=st.integers(0, 11))
def test_replacing_a_record_reassigns_no_other(
    kind: str, row: int, label: int, writer: int
) -> None:
    changed_labels, changed_writers = labels.copy(), writers.copy()
    changed_labels[row], changed_writers[row] = label, writer
    before, after = owners(kind), owners(kind, changed_labels, changed_writers)
    others = images.any((1, 2, 3)) & (np.arange(ROWS) != row)
    assert (before[others] == after[others]).all()


@kills(
    "fedgen/data/record_streams.py",
    "        digest = keyed_digest(key, content)",
    "        digest = keyed_digest(key, bytes(len(uniforms)))",
)
@pytest.mark.parametrize("kind", KINDS)
@given(row=st.integers(0, ROWS - 1))
def test_removing_a_record_reassigns_no_other(kind: str, row: int) -> None:
    """By the number of records of each kind per client: equal records are interchangeable."""
    rest = np.arange(ROWS) != row
    fewer = owners(kind, labels[rest], writers[rest], images[rest])
    whole = Counter(zip(owners(kind), labels, map(bytes, images), strict=True))
    without = Counter(zip(fewer, labels[rest], map(bytes, images[rest]), strict=True))
    assert (whole - without).total() == 1 and without <= whole


def test_iid_shards_have_similar_sizes() -> None:
    """Binomial with mean 57: outside of ± 36, 5 standard deviations, with probability below
    1e-6."""
    distinct = np.arange(ROWS, dtype=np.uint32).view(np.uint8).reshape(ROWS, 1, 2, 2)
    sizes = np.bincount(owners("iid", given_images=distinct), minlength=7)
    assert (abs(sizes - ROWS / 7) < 36).all()


def test_partition_by_writer_has_one_client_per_writer() -> None:
    owner = owners("by_writer", labels, writers)
    assert all(len(set(writers[owner == client])) == 1 for client in set(owner))
    some = partition.by_writer(labels, writers, 5, STREAMS)
    assert len(some) == 5


def test_shards_have_few_classes() -> None:
    owner = owners("shards", labels, writers)
    assert all(len(set(labels[owner == client])) <= 2 for client in set(owner))


def test_small_alpha_skews_more() -> None:
    def largest_share(alpha: float) -> float:
        many = np.tile(np.arange(10), 300)
        pixels = np.arange(len(many), dtype=np.uint32).view(np.uint8).reshape(-1, 1, 2, 2)
        result = partition.dirichlet(pixels, many, 10, 5, alpha, STREAMS)
        return float(np.mean([np.bincount(many[rows]).max() / len(rows) for rows in result]))

    assert largest_share(0.1) > largest_share(100.0) + 0.1


def checking(shards: object, clients: int | None = None) -> Callable[[], None]:
    return lambda: partition.check_shards(shards, clients, len(labels))


@kills(
    "fedgen/data/partition.py",
    "    if len(np.unique(positions)) < len(positions):",
    "    if False:",
)
@pytest.mark.parametrize(
    ("key", "run"),
    [
        ("partition.clients", lambda: partition.check_clients(500, 400)),
        ("partition", lambda: partition.by_writer(labels, None, None, STREAMS)),
        ("partition.clients", lambda: partition.by_writer(labels, writers, 13, STREAMS)),
        ("partition", checking(partition.dirichlet(images, labels, 10, 200, 0.01, STREAMS))),
        ("partition", checking([np.arange(3), np.arange(2, 5)])),
        ("partition", checking([np.array([0, 1, 1])])),
        ("partition", checking([np.array([-1, 1])])),
        ("partition", checking([np.array([1, len(labels)])])),
        ("partition", checking([np.array([0.5, 1])])),
        ("partition", checking([np.arange(3)], clients=2)),
        ("partition", checking([np.arange(4).reshape(2, 2)])),
        ("partition", checking([[0, 1], [2]])),
        ("partition", checking(None)),
        ("partition", checking(np.arange(4))),
        (
            "partition.classes_per_client",
            lambda: partition.shards(images, labels, 10, 5, 11, STREAMS),
        ),
        ("partition.clients", lambda: partition.shards(images, labels, 10, 2, 1, STREAMS)),
    ],
)
def test_impossible_partitions_are_refused(key: str, run: object) -> None:
    assert callable(run)
    with pytest.raises(FedgenError) as error:
        run()
    assert error.value.key == key
