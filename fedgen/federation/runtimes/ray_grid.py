"""A Flower grid on Ray actors: a pool of processes, each serving some of the clients.

Client c is served by actor (c modulo the number of actors), which has its records and state at
hand; states are written to disk before a reply counts. Ray restarts an actor that dies, and its
messages are repeated, which their (round, client) makes harmless. Messages are pickled and sent in
batches of bounded size.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedgen.config.constraints import NonNegative
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.federation.client.app import client_app
from fedgen.federation.client.context import ClientContexts, ClientSetup
from fedgen.federation.failures import DIED, NoResponseError
from fedgen.federation.runtimes.local_nodes import (
    LocalGrid,
    node_client,
)
from fedgen.federation.runtimes.ray_actor import ActorSettings, ClientActor, FetchedShards
from fedgen.federation.runtimes.ray_cluster import cluster
from fedgen.federation.runtimes.server_app import start

_AT_ONCE = 64  # messages in flight per actor
_WAIT_SECONDS = 0.2  # maximum time that a pull waits for the first reply
_PATIENCE_SECONDS = 60.0  # between messages about actors that have not started
_PAUSE_SECONDS = 0.5  # before calling a restarting actor again
_MAX_FAILED_CONFIGURATIONS = 240  # consecutive pauses
_LOST_SECONDS = 60.0  # for Ray to restart an actor; then its clients move to others
_ALONE_SECONDS = 240.0  # the same if no other actor is left
_PROBE_EVERY_SECONDS = 10.0  # between requests to the head node
_PROBE_SECONDS = 25.0  # for its response: Ray exits a process that gets none for a minute
_MAX_CRASHES = 3  # deaths of an actor before its message is given up


def run(
    server: ServerApp,
    setup: ClientSetup,
    clients: int,
    rebuild: Callable[[], ClientSetup],
    *,
    timeout: float | None,
    num_cpus: float,
    num_gpus: NonNegative,
    actors: int | None,
    address: str | None,
) -> None:
    """Run a ServerApp against the ClientApp in Ray actors.

    Args:
        timeout: deadline of a client for a message of a round, in seconds from when the client
            starts it.
        num_cpus, num_gpus: resources of the cluster for each concurrent client; may be fractions.
        actors: maximum number of concurrent actors; None: as many as the resources allow.
        address: address of a running cluster; None: start one on this machine.

    Raises:
        FedgenError: if there is no such cluster, or its resources do not suffice for one client.
    """
    del rebuild  # the setup itself is sent
    if address is None:  # check before starting Ray
        available = {"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}
        _pool(available, num_cpus, num_gpus, clients)
    with cluster(address):
        import ray

        shards = [ray.put(_to_numpy(setup.shard(client))) for client in range(clients)]
        app = partial(_app, replace(setup, shard=FetchedShards(shards)))
        max_actors = min(actors or clients, clients)
        sums = setup.terms.aggregation.adds_up and not setup.terms.masked_sums
        settings = (app, clients, timeout, setup.threads, num_cpus, num_gpus, max_actors, sums)
        start(server, RayGrid.start(*settings, moves=not setup.terms.masked_sums))


def _app(setup: ClientSetup) -> ClientApp:
    return client_app(ClientContexts(setup), setup.mods)


def _pool(resources: dict[str, float], num_cpus: float, num_gpus: float, count: int) -> int:
    """Return how many actors the resources allow."""
    for key, name, needed in (("num_cpus", "CPU", num_cpus), ("num_gpus", "GPU", num_gpus)):
        if needed > 0:
            available = resources.get(name, 0.0)
            count = min(count, math.floor(available / needed + 1e-9))
            if count == 0:
                raise FedgenError(
                    f"runtime.{key}",
                    f"a client needs {needed:g}, Ray has {available:g}",
                    "lower it",
                )
    return count


def _to_numpy(shard: Shard) -> tuple[Any, Any, Any]:
    persons = None if shard.persons is None else shard.persons.numpy()
    return shard.images.numpy(), shard.labels.numpy(), persons


@dataclass
class _ActorHandle:
    """The driver's view of one actor.

    in_flight: messages sent to it, by id.
    suspects: messages in flight when it died, sent again one by one, because one of them may kill
        it each time.
    configuring: whether the current call configures the actor.
    """

    actor: Any
    queue: deque[Message] = field(default_factory=deque)
    in_flight: dict[str, Message] = field(default_factory=dict)
    suspects: deque[Message] = field(default_factory=deque)
    call: Any = None
    configuring: bool = False
    since: float = 0.0  # start of the configuration
    failed_configurations: int = 0  # consecutive failures


class RayGrid(LocalGrid):
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
        settings: Any,
        clients: int,
        start: Callable[[], Any],
        room: Callable[[int], int],
        moves: bool,
    ) -> None:
        super().__init__(clients)
        self._moves, self._free = moves, 0
        self._settings, self._start, self._room = settings, start, room
        self._handles = [_ActorHandle(actor) for actor in actors]
        self._assigned = list(self._handles)  # client modulo length -> actor
        self._replacement: _ActorHandle | None = None
        self._probed = time.monotonic()
        self._probe: threading.Thread | None = None
        self._deaths: dict[str, int] = {}

    @classmethod
    def start(
        cls,
        app: Callable[[], ClientApp],
        clients: int,
        timeout: float | None,
        threads: int,
        num_cpus: float,
        num_gpus: float,
        max_actors: int,
        sums: bool = False,
        moves: bool = True,
    ) -> RayGrid:
        """Start a grid over at most ``max_actors`` new actors of the joined cluster, and wait for
        them. See ``run`` for the other arguments.

        Raises:
            FedgenError: if the cluster's resources do not suffice for one client.
        """
        import ray

        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        actor_class: Any = ray.remote(ClientActor).options(
            num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=-1, max_concurrency=1
        )
        actors = [
            actor_class.remote() for _ in range(_pool(resources, num_cpus, num_gpus, max_actors))
        ]

        def room(wanted: int) -> int:
            available: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
            try:
                return _pool(available, num_cpus, num_gpus, wanted)
            except FedgenError:
                return 0

        settings = ray.put(ActorSettings(app, clients, timeout, threads, sums))
        waiting = [actor.configure.remote(settings) for actor in actors]
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_PATIENCE_SECONDS)
            if waiting:
                print(f"waiting for resources for {len(waiting)} of {len(actors)} Ray actors")
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
        return cls(actors, settings, clients, actor_class.remote, room, moves)

    def _send(self, name: str, message: Message) -> None:
        self._rebalance()
        client = node_client(message.metadata.dst_node_id)
        self._assigned[client % len(self._assigned)].queue.append(message)

    def _pull(self, ids: Iterable[str]) -> list[Message]:
        import ray

        self._drop_lost()
        self._add_replacement()
        for handle in self._handles:
            self._call(handle)
        calls = {handle.call: handle for handle in self._handles if handle.call is not None}
        if not calls:
            return []
        ready, _ = ray.wait(list(calls), num_returns=1, timeout=_WAIT_SECONDS)
        self._check_cluster()
        replies: list[Message] = []
        for call in ready:
            handle = calls[call]
            handle.call = None
            try:
                result = ray.get(call)
            except ray.exceptions.RayError:  # the actor died or is unreachable
                if handle.configuring:  # still restarting
                    self._wait_for(handle)
                else:
                    replies += self._requeue(handle)
                self._configure(handle)
                continue
            if handle.configuring:
                handle.configuring, handle.failed_configurations = False, 0
            elif result is None:  # restarted between two calls
                handle.suspects.extendleft(reversed(handle.in_flight.values()))
                handle.in_flight.clear()
                self._configure(handle)
            else:
                for reply in result:
                    name = reply.metadata.reply_to_message_id
                    if handle.in_flight.pop(name, None) is not None:  # otherwise a repeated reply
                        self._deaths.pop(name, None)
                        replies.append(reply)
        for handle in self._handles:  # send more while the server reads these replies
            self._call(handle)
        return replies

    def _wait_for(self, handle: _ActorHandle) -> None:
        """Raise NoResponseError if an actor does not restart."""
        handle.failed_configurations += 1
        if handle.failed_configurations > _MAX_FAILED_CONFIGURATIONS:
            raise NoResponseError(
                "runtime", "a Ray actor cannot be restarted", "continue with resume="
            )
        time.sleep(_PAUSE_SECONDS)

    def _configure(self, handle: _ActorHandle) -> None:
        if not handle.configuring:
            handle.since = time.monotonic()
        handle.configuring, handle.call = True, handle.actor.configure.remote(self._settings)

    def _drop_lost(self) -> None:
        """Move the clients of actors that Ray does not restart to the remaining ones.

        Raises:
            NoResponseError: if no actor remains.
        """
        import ray

        now = time.monotonic()
        for handle in [
            handle
            for handle in self._handles
            if handle.configuring and now - handle.since > _LOST_SECONDS
        ]:
            remaining = [other for other in self._handles if not other.configuring]
            if not remaining and now - handle.since <= _ALONE_SECONDS:
                continue  # starting may take long
            if not remaining:
                raise NoResponseError(
                    "runtime",
                    f"Ray did not restart any actor within {_ALONE_SECONDS:g} s",
                    "add a machine to the cluster, then resume=",
                )
            ray.kill(handle.actor, no_restart=True)  # so that it no longer writes files of clients
            self._handles.remove(handle)
            if handle is self._replacement:
                self._replacement = None
            for position, assigned in enumerate(self._assigned):
                if assigned is handle:
                    self._assigned[position] = remaining[position % len(remaining)]
            for message in (*handle.in_flight.values(), *handle.suspects, *handle.queue):
                self._send(message.metadata.message_id, message)

    def _add_replacement(self) -> None:
        """Start an actor in place of a lost one when the cluster has room."""
        missing = len(self._assigned) - len(self._handles)
        if not missing or self._replacement is not None or not self._moves:
            return
        if self._free:
            self._free = 0
            handle = _ActorHandle(self._start())
            self._handles.append(handle)
            self._replacement = handle
            self._configure(handle)

    def _rebalance(self) -> None:
        """Assign half of the busiest actor's clients to a new one, while no message is pending: two
        actors must never serve one client at a time."""
        if self._replacement is None or self._replacement.configuring:
            return
        if any(handle.queue or handle.in_flight or handle.suspects for handle in self._handles):
            return
        counts = Counter(map(id, self._assigned))
        busiest = max(self._assigned, key=lambda other: counts[id(other)])
        positions = [position for position, other in enumerate(self._assigned) if other is busiest]
        for position in positions[: len(positions) // 2]:
            self._assigned[position] = self._replacement
        self._replacement = None

    def _probe_resources(self) -> None:
        """Ask the head node for free resources; in a thread, because it may never respond."""
        with contextlib.suppress(Exception):  # an error is a response, too
            self._free = self._room(1)

    def _check_cluster(self) -> None:
        """Raise NoResponseError if the head node does not respond, even if actors do: Ray would
        exit this process after a minute."""
        now = time.monotonic()
        if self._probe is None or not self._probe.is_alive():
            if now - self._probed > _PROBE_EVERY_SECONDS:
                self._probed, self._probe = (
                    now,
                    threading.Thread(target=self._probe_resources, daemon=True),
                )
                self._probe.start()
        elif now - self._probed > _PROBE_SECONDS:
            raise NoResponseError(
                "runtime",
                f"the head node of the Ray cluster has not responded for {_PROBE_SECONDS:g} s",
                "restart it, then use resume=",
            )

    def _call(self, handle: _ActorHandle) -> None:
        """Send queued messages to an idle actor."""
        if handle.call is not None:
            return
        messages: list[Message] = []
        if handle.suspects:
            if not handle.in_flight:
                messages = [handle.suspects.popleft()]
        else:
            while handle.queue and len(handle.in_flight) + len(messages) < _AT_ONCE:
                messages.append(handle.queue.popleft())
        for message in messages:
            handle.in_flight[message.metadata.message_id] = message
        if handle.in_flight:
            handle.call = handle.actor.work.remote(messages)

    def _requeue(self, handle: _ActorHandle) -> list[Message]:
        """Requeue the messages of a dead actor, except a message that was alone in flight at too
        many deaths."""
        replies = []
        lost = list(handle.in_flight.values())
        handle.in_flight.clear()
        for message in reversed(lost):
            message_id = message.metadata.message_id
            if len(lost) == 1:
                self._deaths[message_id] = self._deaths.get(message_id, 0) + 1
            if self._deaths.get(message_id, 0) >= _MAX_CRASHES:
                del self._deaths[message_id]
                replies.append(Message(Error(DIED), reply_to=message))
            else:
                handle.suspects.appendleft(message)
        return replies
