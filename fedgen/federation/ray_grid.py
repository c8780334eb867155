"""A Flower Grid straight on Ray actors: a pool of processes, each home to its share of the clients.

Client c lives in actor c modulo their number, which keeps its rows and its state at hand; states
are written through to the disk before a reply counts. An actor that dies is started again by Ray,
and its messages are done again: their (round, client) makes that harmless. Messages travel pickled
and in batches, a bounded number at a time.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedgen.allocator import keep_freed_memory
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.federation.client_app import Homes, Site, client_app
from fedgen.federation.failures import DEADLINE, DIED, UnansweredError
from fedgen.federation.flower_compat import identify_process
from fedgen.federation.messages import added_up
from fedgen.federation.nodes import Nodes, OwnGrid, client_of, seconds_for
from fedgen.federation.ray_cluster import cluster
from fedgen.federation.server_app import start

_AT_ONCE = 64  # messages in the hands of an actor
_SLICE_SECONDS = 0.25  # an actor hands out its replies at least this often
_WAIT_SECONDS = 0.2  # of a pull, for the first reply
_PATIENCE_SECONDS = 60.0  # for actors to start, between two lines that say so
_MOST_GIVEN_UP = 32  # messages of an actor that took too long
_PAUSE_SECONDS = 0.5  # before an actor that is being started again is called again
_MOST_UNSETTLED = 240  # such pauses in a row
_LOST_SECONDS = 60.0  # for Ray to restart an actor; then its clients move to others
_ALONE_SECONDS = 240.0  # the same, where no other actor is left
_PROBE_EVERY_SECONDS = 10.0  # between two requests to the head node
_PROBE_SECONDS = 25.0  # for its response: Ray exits a process that gets none for a minute
_LIVES = 3  # deaths of its actor until a message is given up


def run(
    server: ServerApp,
    site: Site,
    clients: int,
    again: Callable[[], Site],
    *,
    timeout: float | None,
    num_cpus: float,
    num_gpus: float,
    actors: int | None,
    address: str | None,
) -> None:
    """Runs a ServerApp against the ClientApp of a site, in Ray actors.

    Args:
        timeout: seconds that a client may take for a message of a round, from when its turn comes.
        num_cpus, num_gpus: of the cluster's, for each client that runs at a time; may be fractions.
        actors: at most so many run at a time; None: as many as the resources allow.
        address: of a running cluster; None starts one on this machine, and ends it.

    Raises:
        FedgenError: if there is no such cluster, or its resources are too small for one client.
    """
    del again  # the site itself can be sent
    if address is None:  # said before anything starts
        here = {"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}
        _pool(here, num_cpus, num_gpus, clients)
    with cluster(address):
        import ray

        shards = [ray.put(_plain(site.shard(client))) for client in range(clients)]
        app = partial(_app, replace(site, shard=_Fetched(shards)))
        most = min(actors or clients, clients)
        sums = site.terms.aggregation.adds_up and not site.terms.masks
        settings = (app, clients, timeout, site.threads, num_cpus, num_gpus, most, sums)
        start(server, RayGrid.of(*settings, moves=not site.terms.masks))


def _app(site: Site) -> ClientApp:
    return client_app(Homes(site), site.mods)


def _pool(resources: dict[str, float], num_cpus: float, num_gpus: float, most: int) -> int:
    """How many actors the resources allow."""
    for key, name, each in (("num_cpus", "CPU", num_cpus), ("num_gpus", "GPU", num_gpus)):
        if each > 0:
            there = resources.get(name, 0.0)
            most = min(most, math.floor(there / each + 1e-9))
            if most == 0:
                raise FedgenError(
                    f"runtime.{key}", f"a client needs {each:g}, Ray has {there:g}", "lower it"
                )
    return most


def _plain(shard: Shard) -> tuple[Any, Any]:
    return shard.images.numpy(), shard.labels.numpy()


@dataclass(frozen=True)
class _Fetched:
    """Shards in Ray's object store: each machine holds one copy, which its actors read in place."""

    places: list[Any]

    def __call__(self, client: int) -> Shard:
        import ray

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable")  # nobody writes to rows
            return Shard(*(torch.from_numpy(rows) for rows in ray.get(self.places[client])))


@dataclass(frozen=True)
class _Tenancy:
    """What an actor is told once in its life. ``app`` makes the ClientApp there; ``sums``: whether
    it adds up what its clients answer before anything travels."""

    app: Callable[[], ClientApp]
    clients: int
    timeout: float | None
    threads: int
    sums: bool


class _Host:
    """The actor. A thread handles one message after the other; one that takes too long is answered
    by an error and left to itself, and another thread goes on with the rest."""

    def __init__(self) -> None:
        keep_freed_memory()
        os.umask(0o077)  # as in ``private_umask``: this process writes clients' states
        identify_process(run_id=1)
        self._todo: SimpleQueue[Message] = SimpleQueue()
        self._done: SimpleQueue[Message] = SimpleQueue()
        self._waiting = self._given_up = 0
        self._tenancy: _Tenancy | None = None
        self._held: list[Message] = []

    def settle(self, tenancy: _Tenancy) -> None:
        """Tells an actor, new or started again, whose home it is; once is enough."""
        if self._tenancy is not None:
            return
        self._nodes = Nodes(tenancy.app(), tenancy.clients)
        self._tenancy = tenancy
        self._start_thread()

    def work(self, new: list[Message]) -> list[Message] | None:
        """Takes messages in; returns the replies that are there when all are, or time is up; None
        from an actor that was started again and is not settled. What is to be added up waits for
        all: if the actor dies before, all of it is done again."""
        if self._tenancy is None:
            return None
        for message in new:
            self._todo.put(message)
        self._waiting += len(new)
        end = time.monotonic() + _SLICE_SECONDS
        replies: list[Message] = []
        while self._waiting:
            try:
                replies.append(self._done.get(timeout=max(0.0, end - time.monotonic())))
            except Empty:
                late = self._worker.give_up(self._tenancy.timeout)
                if late is not None:
                    replies.append(Message(Error(DEADLINE), reply_to=late))
                    self._given_up += 1
                    if self._given_up > _MOST_GIVEN_UP:
                        os._exit(1)  # Ray starts another one, without the threads that hang
                    self._start_thread()
                    self._waiting -= 1
                break
            self._waiting -= 1
        if not self._tenancy.sums:
            return replies
        self._held += replies
        if self._waiting:
            return []
        held, self._held = self._held, []
        return added_up([(client_of(each.metadata.src_node_id), each) for each in held])

    def _start_thread(self) -> None:
        assert self._tenancy is not None
        self._worker = _Worker(self._nodes, self._todo, self._done, self._tenancy.threads)
        self._worker.start()


class _Worker(threading.Thread):
    """Handles messages until it is given up."""

    def __init__(
        self, nodes: Nodes, todo: SimpleQueue[Message], done: SimpleQueue[Message], threads: int
    ) -> None:
        super().__init__(daemon=True)
        self._nodes, self._todo, self._done, self._threads = nodes, todo, done, threads
        self._lock = threading.Lock()
        self._current: tuple[Message, float] | None = None
        self._over = False

    def run(self) -> None:
        """See the class."""
        torch.set_num_threads(self._threads)
        while True:
            message = self._todo.get()
            self._current = message, time.monotonic()
            reply = self._nodes.handle(message)
            with self._lock:
                if self._over:  # too late: it was answered by an error
                    return
                self._current = None
                self._done.put(reply)

    def give_up(self, timeout: float | None) -> Message | None:
        """The message that takes longer than ``timeout``, whose reply will not be used."""
        with self._lock:
            if self._current is None:
                return None
            message, begin = self._current
            if time.monotonic() - begin <= seconds_for(message, timeout):
                return None
            self._over = True
            return message


@dataclass
class _Seat:
    """One actor as the driver sees it. ``out``: messages in its hands, by name. ``suspects``: those
    that were when it died, handed out again one by one: one of them may kill it each time.
    ``settling``: the call under way tells it, new or started again, whose home it is."""

    actor: Any
    queue: deque[Message] = field(default_factory=deque)
    out: dict[str, Message] = field(default_factory=dict)
    suspects: deque[Message] = field(default_factory=deque)
    call: Any = None
    settling: bool = False
    since: float = 0.0  # start of settling
    unsettled: int = 0  # times in a row that it could not be told


class RayGrid(OwnGrid):
    """Grid over Ray actors, each of which serves some of the clients.

    An actor that Ray does not restart within ``_LOST_SECONDS``, because its node has left the
    cluster, is removed, and the remaining actors load its clients' states. When the cluster has
    room again, a new actor takes over a part of the clients.

    Args:
        start: creates an actor.
        room: function from the number of actors wanted to the number that the cluster can run.
        moves: whether clients may move to a new actor between messages. False for secure sums with
            masks, because an actor keeps mask secrets in memory during a round.
    """

    def __init__(
        self,
        actors: list[Any],
        tenancy: Any,
        clients: int,
        start: Callable[[], Any],
        room: Callable[[int], int],
        moves: bool,
    ) -> None:
        super().__init__(clients)
        self._moves, self._free = moves, 0
        self._tenancy, self._start, self._room = tenancy, start, room
        self._seats = [_Seat(actor) for actor in actors]
        self._assigned = list(self._seats)  # client modulo length -> seat
        self._replacement: _Seat | None = None
        self._probed = time.monotonic()
        self._probe: threading.Thread | None = None
        self._deaths: dict[str, int] = {}

    @classmethod
    def of(
        cls,
        app: Callable[[], ClientApp],
        clients: int,
        timeout: float | None,
        threads: int,
        num_cpus: float,
        num_gpus: float,
        most: int,
        sums: bool = False,
        moves: bool = True,
    ) -> RayGrid:
        """A grid over at most ``most`` new actors of the cluster that this process has joined;
        waits until they are there. See ``run`` for the rest.

        Raises:
            FedgenError: if the cluster's resources are too small for one client.
        """
        import ray

        there: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        host: Any = ray.remote(_Host).options(
            num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=-1, max_concurrency=1
        )
        actors = [host.remote() for _ in range(_pool(there, num_cpus, num_gpus, most))]

        def room(wanted: int) -> int:
            left: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
            try:
                return _pool(left, num_cpus, num_gpus, wanted)
            except FedgenError:
                return 0

        tenancy = ray.put(_Tenancy(app, clients, timeout, threads, sums))
        waiting = [actor.settle.remote(tenancy) for actor in actors]
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_PATIENCE_SECONDS)
            if waiting:
                print(f"waiting for Ray to find room for {len(waiting)} of {len(actors)} actors")
            try:
                ray.get(ready)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayActorError as error:
                raise FedgenError(
                    "runtime.address",
                    f"Ray's actors do not start: {str(error).strip().splitlines()[-1]}",
                    "install the same fedgen on every machine of the cluster",
                ) from error
        return cls(actors, tenancy, clients, host.remote, room, moves)

    def _send(self, name: str, message: Message) -> None:
        self._rebalance()
        client = client_of(message.metadata.dst_node_id)
        self._assigned[client % len(self._assigned)].queue.append(message)

    def _pull(self, asked: list[str]) -> list[Message]:
        import ray

        self._drop_lost()
        self._add_replacement()
        for seat in self._seats:
            self._call(seat)
        calls = {seat.call: seat for seat in self._seats if seat.call is not None}
        if not calls:
            return []
        ready, _ = ray.wait(list(calls), num_returns=1, timeout=_WAIT_SECONDS)
        self._check_cluster()
        replies: list[Message] = []
        for call in ready:
            seat = calls[call]
            seat.call = None
            try:
                found = ray.get(call)
            except ray.exceptions.RayError:  # it died, or nobody knows
                if seat.settling:  # it is not back yet
                    self._wait_for(seat)
                else:
                    replies += self._bury(seat)
                self._settle(seat)
                continue
            if seat.settling:
                seat.settling, seat.unsettled = False, 0
            elif found is None:  # it was started again behind our back
                seat.suspects.extendleft(reversed(seat.out.values()))
                seat.out.clear()
                self._settle(seat)
            else:
                for reply in found:
                    name = reply.metadata.reply_to_message_id
                    if seat.out.pop(name, None) is not None:  # else it was done twice
                        self._deaths.pop(name, None)
                        replies.append(reply)
        for seat in self._seats:  # their next work, while the server reads these replies
            self._call(seat)
        return replies

    def _wait_for(self, seat: _Seat) -> None:
        """Raises UnansweredError if an actor does not come back at all."""
        seat.unsettled += 1
        if seat.unsettled > _MOST_UNSETTLED:
            raise UnansweredError(
                "runtime", "one of Ray's actors cannot be started again", "go on with resume="
            )
        time.sleep(_PAUSE_SECONDS)

    def _settle(self, seat: _Seat) -> None:
        if not seat.settling:
            seat.since = time.monotonic()
        seat.settling, seat.call = True, seat.actor.settle.remote(self._tenancy)

    def _drop_lost(self) -> None:
        """Move the clients of actors that Ray does not restart to the remaining ones.

        Raises:
            UnansweredError: if no actor remains.
        """
        import ray

        now = time.monotonic()
        for seat in [s for s in self._seats if s.settling and now - s.since > _LOST_SECONDS]:
            left = [each for each in self._seats if not each.settling]
            if not left and now - seat.since <= _ALONE_SECONDS:
                continue  # it may just take long to start
            if not left:
                raise UnansweredError(
                    "runtime",
                    f"Ray did not restart any actor within {_ALONE_SECONDS:g} s",
                    "add a machine to the cluster, then resume=",
                )
            ray.kill(seat.actor, no_restart=True)  # so that it writes no client's files any more
            self._seats.remove(seat)
            if seat is self._replacement:
                self._replacement = None
            for number, assigned in enumerate(self._assigned):
                if assigned is seat:
                    self._assigned[number] = left[number % len(left)]
            for message in (*seat.out.values(), *seat.suspects, *seat.queue):
                self._send(message.metadata.message_id, message)

    def _add_replacement(self) -> None:
        """Start an actor in place of a lost one when the cluster has room."""
        missing = len(self._assigned) - len(self._seats)
        if not missing or self._replacement is not None or not self._moves:
            return
        if self._free:
            self._free = 0
            seat = _Seat(self._start())
            self._seats.append(seat)
            self._replacement = seat
            self._settle(seat)

    def _rebalance(self) -> None:
        """Assign half of the busiest actor's clients to a new one, while no message is pending: two
        actors must never serve one client at a time."""
        if self._replacement is None or self._replacement.settling:
            return
        if any(seat.queue or seat.out or seat.suspects for seat in self._seats):
            return
        counts = Counter(map(id, self._assigned))
        most = max(self._assigned, key=lambda each: counts[id(each)])
        theirs = [number for number, each in enumerate(self._assigned) if each is most]
        for number in theirs[: len(theirs) // 2]:
            self._assigned[number] = self._replacement
        self._replacement = None

    def _ask(self) -> None:
        """Ask the head node for free resources; in a thread, as it may never answer."""
        with contextlib.suppress(Exception):  # an error is an answer, too
            self._free = self._room(1)

    def _check_cluster(self) -> None:
        """Raises UnansweredError if the head node does not answer, even if actors do: Ray would
        exit this process after a minute."""
        now = time.monotonic()
        if self._probe is None or not self._probe.is_alive():
            if now - self._probed > _PROBE_EVERY_SECONDS:
                self._probed, self._probe = now, threading.Thread(target=self._ask, daemon=True)
                self._probe.start()
        elif now - self._probed > _PROBE_SECONDS:
            raise UnansweredError(
                "runtime",
                f"the head node of the Ray cluster has not answered for {_PROBE_SECONDS:g} s",
                "start it again, then resume=",
            )

    def _call(self, seat: _Seat) -> None:
        """Hands an idle actor what waits for it."""
        if seat.call is not None:
            return
        new: list[Message] = []
        if seat.suspects:
            if not seat.out:
                new = [seat.suspects.popleft()]
        else:
            while seat.queue and len(seat.out) + len(new) < _AT_ONCE:
                new.append(seat.queue.popleft())
        for message in new:
            seat.out[message.metadata.message_id] = message
        if seat.out:
            seat.call = seat.actor.work.remote(new)

    def _bury(self, seat: _Seat) -> list[Message]:
        """An actor died: its messages are done again, but for one that outlived too many."""
        replies = []
        lost = list(seat.out.values())
        seat.out.clear()
        for message in reversed(lost):
            name = message.metadata.message_id
            if len(lost) == 1:
                self._deaths[name] = self._deaths.get(name, 0) + 1
            if self._deaths.get(name, 0) >= _LIVES:
                del self._deaths[name]
                replies.append(Message(Error(DIED), reply_to=message))
            else:
                seat.suspects.appendleft(message)
        return replies
