"""Rows to clients, as pure functions of images, labels or writers, the number of clients and public
coins.

Stable: whose row a row is depends on its own label or writer, on coins keyed by the row itself, and
on who the writers are. One row more or less, or another in its place, of a writer that is there,
moves no other.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fedgen.coins import Coins
from fedgen.data.rows import content_of, key_of, keyed, row_coins
from fedgen.errors import FedgenError

Index = NDArray[np.int64]
Images = NDArray[np.uint8]


def single(labels: Index, clients: int = 1, **_: object) -> list[Index]:
    """One client holds everything: the centralized case.

    Raises:
        FedgenError: for several clients.
    """
    if clients != 1:
        problem = f"{clients}, and partition=single is one client with all rows"
        raise FedgenError("partition.clients", problem, "take partition=iid, or another")
    return [np.arange(len(labels))]


def iid(images: Images, labels: Index, clients: int, coins: Coins, **_: object) -> list[Index]:
    """Each row goes to a client by a coin of its own: shards of about one size. Equal ones would
    move a row of every client for each row more."""
    place = row_coins(images, labels, coins, "partition", "iid")
    return _by_owner((place * clients).astype(np.int64), clients)


def by_writer(
    labels: Index, writers: Index | None, clients: int | None, coins: Coins, **_: object
) -> list[Index]:
    """Natural users: one client per writer; of these, ``clients`` by public coins that are keyed
    by the writer, or all. Who takes part is public."""
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
        key = key_of(coins, "partition", "by_writer")
        names = np.sort(
            sorted(names, key=lambda name: keyed(key, int(name).to_bytes(8, "little")))[:clients]
        )
    order_by_writer = np.argsort(writers, kind="stable")
    starts = np.searchsorted(writers[order_by_writer], names, side="left")
    ends = np.searchsorted(writers[order_by_writer], names, side="right")
    return [order_by_writer[a:b] for a, b in zip(starts, ends, strict=True)]


def by_folder(
    labels: Index, writers: Index | None, clients: int | None, coins: Coins, **_: object
) -> list[Index]:
    """Clients as folders: one for each folder of a client, or for each of several paths."""
    if writers is None:
        raise FedgenError(
            "partition",
            "by_folder needs clients' folders, or a table with a column client",
            "put images into CLIENT/LABEL/, or give several folders: data.path=[a,b]",
        )
    return by_writer(labels, writers, clients, coins)


def nodes(clients: int, **_: object) -> list[Index]:
    """One client for each node of a deployment: none of their rows is here."""
    if clients < 1:
        problem = f"must be at least 1, got {clients}"
        raise FedgenError("partition.clients", problem, "give the number of nodes")
    return [np.empty(0, np.int64) for _ in range(clients)]


def dirichlet(
    images: Images,
    labels: Index,
    classes: int,
    clients: int,
    alpha: float,
    coins: Coins,
    **_: object,
) -> list[Index]:
    """Label skew (Hsu et al. 2019): each class is spread over the clients by Dirichlet(alpha)
    proportions, and each row takes its place in its class's proportions by a coin of its own."""
    if not alpha > 0:
        raise FedgenError("partition.alpha", f"must be positive, got {alpha}", "e.g. 0.5")
    seed = int(torch.randint(2**62, (), generator=coins.public("partition", "dirichlet")))
    shares = np.random.default_rng(seed).dirichlet(np.full(clients, alpha), size=classes)
    place = row_coins(images, labels, coins, "partition", "dirichlet", "rows")
    owner = np.empty(len(labels), np.int64)
    for label, edges in enumerate(np.cumsum(shares, axis=1)):
        mine = labels == label
        owner[mine] = np.minimum(np.searchsorted(edges, place[mine]), clients - 1)
    return _by_owner(owner, clients)


def _by_owner(owner: Index, clients: int) -> list[Index]:
    """The rows of each client, in order."""
    edges = np.cumsum(np.bincount(owner, minlength=clients))[:-1]
    return np.split(np.argsort(owner, kind="stable"), edges)


def shards(
    images: Images,
    labels: Index,
    classes: int,
    clients: int,
    classes_per_client: int,
    coins: Coins,
    **_: object,
) -> list[Index]:
    """Pathological label skew (after McMahan et al. 2017): each client holds few classes, dealt in
    turn from a public order; each row goes to one of the holders of its class by its own coin."""
    if not 1 <= classes_per_client <= classes:
        raise FedgenError(
            "partition.classes_per_client",
            f"must lie in 1..{classes}, got {classes_per_client}",
            "e.g. 2",
        )
    order = torch.randperm(classes, generator=coins.public("partition", "shards")).numpy()
    clients_of: list[list[int]] = [[] for _ in range(classes)]
    for deal in range(clients * classes_per_client):
        clients_of[order[deal % classes]].append(deal // classes_per_client)
    empty = [c for c in range(classes) if not clients_of[c]]
    if empty:
        raise FedgenError(
            "partition.clients",
            f"{clients} clients of {classes_per_client} classes leave "
            f"{len(empty)} classes to nobody",
            "raise it, or partition.classes_per_client",
        )
    place = row_coins(images, labels, coins, "partition", "shards", "rows")
    owner = np.array(
        [
            clients_of[label][int(coin * len(clients_of[label]))]
            for label, coin in zip(labels, place, strict=True)
        ]
    )
    return _by_owner(owner, clients)


def of_persons(
    shards: list[Index],
    persons: Index | None,
    most: int,
    images: Images,
    labels: Index,
    coins: Coins,
) -> list[Index]:
    """The shards with at most ``most`` rows of each person. Which, follows from a public key and
    from the person's own rows alone: those of the least keyed digests, wherever they lie. Without
    somebody's rows everybody else's are the same ones.

    Raises:
        FedgenError: where nobody knows whom rows show, or somebody has rows at several clients.
    """
    if persons is None:
        raise FedgenError(
            "privacy.unit",
            "cannot be person: the data do not tell whom an image shows",
            "give a table with a column person (data.path=FILE.csv), or an .npz with train_person",
        )
    homes = [np.unique(persons[shard]) for shard in shards]
    if len(np.unique(np.concatenate(homes))) < sum(map(len, homes)):
        raise FedgenError(
            "partition",
            "gives several clients images of one person, whom no client could protect alone",
            "take single, by_writer or by_folder",
        )
    key, kept = key_of(coins, "persons"), []
    for shard in shards:
        told = [keyed(key, content_of(images[row], int(labels[row]))) for row in shard]
        order = shard[sorted(range(len(shard)), key=lambda at: (persons[shard[at]], told[at]))]
        _, starts = np.unique(persons[order], return_index=True)
        place = np.arange(len(order)) - np.repeat(starts, np.diff([*starts, len(order)]))
        kept.append(np.sort(order[place < most]))
    return kept


def check_clients(clients: int | None, rows: int) -> None:
    """Raises FedgenError for a number of clients that no partition can serve."""
    if clients is not None and clients < 1:
        raise FedgenError("partition.clients", f"must be at least 1, got {clients}", "raise it")
    if clients is not None and clients > rows:
        raise FedgenError(
            "partition.clients", f"{clients} clients are more than {rows} rows", "lower it"
        )


def check_shards(shards: object, clients: int | None, rows: int) -> None:
    """Raises FedgenError for shards that are none: a row that two clients have, or one twice, would
    be answered for as two."""
    if not isinstance(shards, list) or not all(
        isinstance(shard, np.ndarray) and shard.ndim == 1 for shard in shards
    ):
        problem = "makes something else than a list of arrays"
        raise FedgenError("partition", problem, "return one of positions for each client")
    if clients is not None and len(shards) != clients:
        problem = f"made {len(shards)} shards for {clients} clients"
        raise FedgenError("partition", problem, "return one for each")
    empty = [client for client, shard in enumerate(shards) if len(shard) == 0]
    if empty:
        raise FedgenError(
            "partition",
            f"{len(empty)} of {len(shards)} clients have no row of {rows}, the first "
            f"is client {empty[0]}",
            "lower partition.clients, or take another partition or seed",
        )
    whole = np.concatenate(shards)
    if not np.issubdtype(whole.dtype, np.integer) or not 0 <= whole.min() <= whole.max() < rows:
        problem = f"names other rows than 0 to {rows - 1}"
        raise FedgenError("partition", problem, "return arrays of positions")
    if len(np.unique(whole)) < len(whole):
        problem = "gives a row away twice, and ε would be about one of the two"
        raise FedgenError("partition", problem, "return shards that share no row")
