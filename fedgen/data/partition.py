"""Partitions of records over clients: pure functions of images, labels or writers, the number of
clients and public streams.

Partitions are stable: the client of a record depends only on its own label or writer, on streams
keyed by the record, and on the set of writers. Adding, removing or replacing a record of an
existing writer moves no other.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fedgen.data.record_streams import example_key, example_uniforms, keyed_digest
from fedgen.errors import FedgenError
from fedgen.randomness import RandomStreams

Index = NDArray[np.int64]
Images = NDArray[np.uint8]


def single(labels: Index, clients: int = 1, **_: object) -> list[Index]:
    """Assign everything to one client: the centralized case.

    Raises:
        FedgenError: for several clients.
    """
    if clients != 1:
        problem = f"{clients}, and partition=single is one client with all images"
        raise FedgenError("partition.clients", problem, "take partition=iid, or another")
    return [np.arange(len(labels))]


def iid(
    images: Images, labels: Index, clients: int, streams: RandomStreams, **_: object
) -> list[Index]:
    """Assign each record to a client independently at random: shards of about equal size. With
    exactly equal sizes, adding a record would move a record of every client."""
    place = example_uniforms(images, labels, streams, "partition", "iid")
    return _group_by_owner((place * clients).astype(np.int64), clients)


def by_writer(
    labels: Index, writers: Index | None, clients: int | None, streams: RandomStreams, **_: object
) -> list[Index]:
    """Assign one client per writer: all, or ``clients`` of them by public streams keyed by the
    writer. The set of clients is public."""
    if writers is None:
        raise FedgenError(
            "partition",
            "by_writer needs a data set with writers",
            "take data=femnist, an .npz with train_writer, or another partition",
        )
    names = np.unique(writers)
    if clients is not None:
        if clients > len(names):
            raise FedgenError(
                "partition.clients",
                f"{clients} clients are more than {len(names)} writers",
                "lower it, or leave it out for one client per writer",
            )
        key = example_key(streams, "partition", "by_writer")
        names = np.sort(
            sorted(names, key=lambda name: keyed_digest(key, int(name).to_bytes(8, "little")))[
                :clients
            ]
        )
    order_by_writer = np.argsort(writers, kind="stable")
    starts = np.searchsorted(writers[order_by_writer], names, side="left")
    ends = np.searchsorted(writers[order_by_writer], names, side="right")
    return [order_by_writer[a:b] for a, b in zip(starts, ends, strict=True)]


def by_folder(
    labels: Index, writers: Index | None, clients: int | None, streams: RandomStreams, **_: object
) -> list[Index]:
    """Assign one client per client folder, or per path."""
    if writers is None:
        raise FedgenError(
            "partition",
            "by_folder needs clients' folders, or a table with a column client",
            "put images into CLIENT/LABEL/, or give several folders: data.path=[a,b]",
        )
    return by_writer(labels, writers, clients, streams)


def nodes(clients: int, **_: object) -> list[Index]:
    """Assign one client per node of a deployment, without records here."""
    return [np.empty(0, np.int64) for _ in range(clients)]


def dirichlet(
    images: Images,
    labels: Index,
    classes: int,
    clients: int,
    alpha: float,
    streams: RandomStreams,
    **_: object,
) -> list[Index]:
    """Label skew (Hsu et al. 2019): each class is distributed over clients by Dirichlet(alpha)
    proportions, and each record is assigned independently by the proportions of its class."""
    seed = int(torch.randint(2**62, (), generator=streams.public("partition", "dirichlet")))
    shares = np.random.default_rng(seed).dirichlet(np.full(clients, alpha), size=classes)
    place = example_uniforms(images, labels, streams, "partition", "dirichlet", "rows")
    owner = np.empty(len(labels), np.int64)
    for label, edges in enumerate(np.cumsum(shares, axis=1)):
        in_class = labels == label
        owner[in_class] = np.minimum(np.searchsorted(edges, place[in_class]), clients - 1)
    return _group_by_owner(owner, clients)


def _group_by_owner(owner: Index, clients: int) -> list[Index]:
    """Return the records of each client, in order."""
    edges = np.cumsum(np.bincount(owner, minlength=clients))[:-1]
    return np.split(np.argsort(owner, kind="stable"), edges)


def shards(
    images: Images,
    labels: Index,
    classes: int,
    clients: int,
    classes_per_client: int,
    streams: RandomStreams,
    **_: object,
) -> list[Index]:
    """Pathological label skew (after McMahan et al. 2017): each client has few classes, assigned in
    turn in a public order; each record is assigned independently to one of the clients of its
    class."""
    if classes_per_client > classes:
        problem = f"must be at most {classes}, got {classes_per_client}"
        raise FedgenError("partition.classes_per_client", problem, "e.g. 2")
    order = torch.randperm(classes, generator=streams.public("partition", "shards")).numpy()
    clients_of: list[list[int]] = [[] for _ in range(classes)]
    for deal in range(clients * classes_per_client):
        clients_of[order[deal % classes]].append(deal // classes_per_client)
    empty = [c for c in range(classes) if not clients_of[c]]
    if empty:
        raise FedgenError(
            "partition.clients",
            f"{clients} clients of {classes_per_client} classes leave "
            f"{len(empty)} classes without a client",
            "raise it, or partition.classes_per_client",
        )
    place = example_uniforms(images, labels, streams, "partition", "shards", "rows")
    owner = np.array(
        [
            clients_of[label][int(uniform * len(clients_of[label]))]
            for label, uniform in zip(labels, place, strict=True)
        ]
    )
    return _group_by_owner(owner, clients)


def check_one_client_per_person(shards: list[Index], persons: Index | None) -> None:
    """Raise FedgenError if persons are unknown, or a person has records at several clients."""
    if persons is None:
        raise FedgenError(
            "privacy.unit",
            "cannot be person: the data do not name the person in each image",
            "set data.person (see docs/your-images.md), or add train_person to an .npz",
        )
    by_client = [np.unique(persons[shard]) for shard in shards]
    if len(np.unique(np.concatenate(by_client))) < sum(map(len, by_client)):
        raise FedgenError(
            "partition",
            "gives several clients images of one person, whom no client could protect alone",
            "take partition=single; if these are different persons, give them different names",
        )


def check_clients(clients: int | None, rows: int) -> None:
    """Raise FedgenError for more clients than records."""
    if clients is not None and clients > rows:
        raise FedgenError(
            "partition.clients", f"{clients} clients are more than {rows} rows", "lower it"
        )


def check_shards(shards: object, clients: int | None, rows: int) -> None:
    """Raise FedgenError for invalid shards, such as a record that belongs to two clients, or to one
    client twice: it would contribute twice, and ε would cover only one of the two."""
    if not isinstance(shards, list) or not all(
        isinstance(shard, np.ndarray) and shard.ndim == 1 for shard in shards
    ):
        problem = "does not return a list of arrays"
        raise FedgenError("partition", problem, "return one array of positions per client")
    if clients is not None and len(shards) != clients:
        problem = f"made {len(shards)} shards for {clients} clients"
        raise FedgenError("partition", problem, "return one for each")
    empty = [client for client, shard in enumerate(shards) if len(shard) == 0]
    if empty:
        raise FedgenError(
            "partition",
            f"{len(empty)} of {len(shards)} clients have none of the {rows} images, the first "
            f"is client {empty[0]}",
            "lower partition.clients, or take another partition or seed",
        )
    positions = np.concatenate(shards)
    if (
        not np.issubdtype(positions.dtype, np.integer)
        or not 0 <= positions.min() <= positions.max() < rows
    ):
        problem = f"contains positions outside 0 to {rows - 1}"
        raise FedgenError("partition", problem, "return arrays of positions")
    if len(np.unique(positions)) < len(positions):
        problem = "assigns a record twice, and ε would cover only one of its uses"
        raise FedgenError("partition", problem, "return disjoint shards")
