"""Context of the clients of a process: records, streams, state, ledger and limits."""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.clientapp.typing import Mod

from fedgen.config.extensions import extension_of
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.federation.client.state_store import ClientStore
from fedgen.federation.secagg.masking import (
    Masker,
)
from fedgen.federation.secagg.signing import (
    Signer,
)
from fedgen.federation.signed_accounts import AccountTerms
from fedgen.methods.api import ClientProgram
from fedgen.privacy.aggregation import LOCAL, Aggregation
from fedgen.privacy.events import Spend
from fedgen.privacy.ledger import Ledger, SpendStore, died_while_responding
from fedgen.randomness import Mode, RandomStreams
from fedgen.storage.io import stored_key

LEDGER, ERRORS, SAMPLING_KEY = "ledger.jsonl", "errors.jsonl", "sampling.key"


_TAIL = 2**20  # bytes read from the end of an error log


@dataclass(frozen=True)
class RunTerms:
    """Limits that each client of a run enforces for any query.

    samples: its budget of query samples.
    run: name of the run.
    limits: maximum count of each event of the plan; None: ``samples`` is sufficient.
    aggregation: who adds the noise of responses.
    stores_response: whether a response is stored before it is charged, and sent again by a resumed
        run (``Plan.resends_responses``).
    masked_sums: whether responses are masked (``masking.py``); a simulation may sum without masks.
    signer: signs keys and lists (``signing.py``); None: no signatures.
    accepted_request: text of the request that all signing clients must have accepted.
    rehearsal: non-private records. A query is tried on them first, so that an invalid query fails
        before it reaches private records; None: not tried.
    account: terms of the signed account of a client; None: clients sign no account.
    reserves: whether a client reserves the spend of a missing response before it computes one: a
        missing or late response may reveal which records the client sampled.
    """

    samples: int
    run: str = ""
    limits: Spend | None = None
    aggregation: Aggregation = LOCAL
    stores_response: bool = False
    masked_sums: bool = False
    signer: Signer | None = None
    accepted_request: bytes = b""
    rehearsal: Shard | None = None
    reserves: bool = False
    account: AccountTerms | None = None


@dataclass(frozen=True)
class ClientSetup:
    """Configuration of a process that hosts clients; can be pickled.

    program: returns the client program.
    shard: client -> its records.
    seed, noise: seed and mode of the random streams; in mode ``secure`` each client has its own
        secret streams, and each response its own noise.
    domain: distinguishes the streams of runs with the same seed; repetition: index of the
        repetition of a run (``RandomStreams.for_repetition``), if any.
    folder: folder of the clients' files, on a file system that all processes share.
    terms: limits of all clients.
    in_memory, cache_bytes: see ``ClientStore``.
    threads: threads of torch.
    spend_db: record of spend outside the run (``SpendDb``); None: none.
    mods: Flower mods around the app.
    """

    program: Callable[[], ClientProgram]
    shard: Callable[[int], Shard]
    seed: int
    domain: str
    noise: Mode
    folder: Path
    terms: RunTerms
    in_memory: bool
    cache_bytes: float
    threads: int
    spend_db: SpendStore | None = None
    mods: tuple[Mod, ...] = ()
    repetition: int | None = None


@dataclass
class ClientContext:
    """Context of one client.

    responded_round: last round that this process responded to.
    masker: mask secrets of round ``keys_round``, of this process only.
    agreed: last round whose lists were signed, and their text.
    rehearsed: kinds of queries that were tried successfully.
    """

    index: int
    program: ClientProgram
    shard: Shard
    streams: RandomStreams
    store: ClientStore
    ledger: Ledger
    terms: RunTerms
    responded_round: int = -1
    masker: Masker | None = None
    keys_round: int = -1
    agreed: tuple[int, bytes] = (-1, b"")
    rehearsed: set[str] = field(default_factory=set)


class ClientContexts:
    """Contexts of the clients of this process, built on first use."""

    def __init__(self, setup: ClientSetup) -> None:
        torch.set_num_threads(setup.threads)
        self._setup, self._program = setup, setup.program()
        self._streams = RandomStreams.from_seed(setup.seed, setup.noise)
        if setup.domain:
            self._streams = self._streams.at("branch", setup.domain)
        if setup.repetition is not None:
            self._streams = self._streams.for_repetition(setup.repetition)
        self._store = ClientStore(setup.folder, setup.in_memory, setup.cache_bytes)
        self._contexts: dict[int, ClientContext] = {}
        self._lock = threading.Lock()

    def __call__(self, context: Context) -> ClientContext:
        """Return the context of the client that a message is addressed to."""
        return self.get(partition_of(context))

    def get(self, client: int) -> ClientContext:
        """Return the context of a client."""
        with self._lock:  # one context per client: it may store the last response
            if client not in self._contexts:
                try:
                    self._contexts[client] = self._build(client)
                except Exception as error:
                    write_error(self._store.folder(client), "setup", error)
                    raise
            return self._contexts[client]

    def _build(self, client: int) -> ClientContext:
        setup, folder = self._setup, self._store.folder(client)
        secure, streams = setup.noise == "secure", self._streams.at("client", client)
        ledger = Ledger(folder / LEDGER, setup.terms.run, client, not secure, setup.spend_db)
        if secure:
            with ledger.locked():
                streams = streams.with_secret_key(_sampling_key(folder))
        shard = setup.shard(client)
        return ClientContext(
            client, self._program, shard, streams, self._store, ledger, setup.terms
        )


def _sampling_key(folder: Path) -> bytes:
    """Return the secret key of a client's samples. It is stored before the first response, so that
    the death of a process cannot lead to other samples.

    Raises:
        FedgenError: if the key of a response that died is missing.
    """
    path = folder / SAMPLING_KEY
    if not path.exists() and died_while_responding(folder):
        problem = "is missing, and a process died during a response with samples of this key"
        raise FedgenError(str(path), problem, "restore it from a backup, or start a new run")
    return stored_key(path)


def partition_of(context: Context) -> int:
    """Return the index of the client that a message is addressed to."""
    return int(str(context.node_config["partition-id"]))


def write_error(folder: Path, kind: str, error: Exception) -> None:
    """Append an error to the client's log."""
    trace = traceback.format_exception(error)
    line = {"kind": kind, "error": type(error).__name__, "problem": str(error), "trace": trace}
    if (origin := extension_of(error)) is not None:
        line["at"] = origin
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ERRORS).open("a") as file:
        file.write(json.dumps(line) + "\n")


def last_error(file: Path) -> dict[str, Any] | None:
    """Return the last entry of an error log; None if it is incomplete because its writer died."""
    try:
        with file.open("rb") as handle:
            handle.seek(max(0, file.stat().st_size - _TAIL))
            line = json.loads(handle.read().decode(errors="replace").splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return None
    complete = isinstance(line, dict) and {"error", "problem", "trace"} <= line.keys()
    return line if complete else None
