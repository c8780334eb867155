"""A Ray actor that hosts clients."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch
from flwr.app import Error, Message
from flwr.clientapp import ClientApp

from fedgen.allocator import keep_freed_memory
from fedgen.data.datasets import Shard
from fedgen.federation.failures import DEADLINE
from fedgen.federation.flower_compat import identify_process
from fedgen.federation.messages import sum_responses
from fedgen.federation.runtimes.local_nodes import (
    LocalNodes,
    message_timeout,
    node_client,
)

_SLICE_SECONDS = 0.25  # maximum time between two batches of replies of an actor
_MAX_GIVEN_UP = 32  # messages of an actor that exceeded their deadline


@dataclass(frozen=True)
class FetchedShards:
    """Shards in Ray's object store: each machine holds one copy, which its actors read in place."""

    shards: list[Any]

    def __call__(self, client: int) -> Shard:
        import ray

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable")  # shards are read-only
            images, labels, persons = ray.get(self.shards[client])
            of_persons = None if persons is None else torch.from_numpy(persons)
            return Shard(torch.from_numpy(images), torch.from_numpy(labels), of_persons)


@dataclass(frozen=True)
class ActorSettings:
    """Settings of an actor, sent once. ``app``: creates the ClientApp in the actor; ``sums``:
    whether the actor sums its clients' responses."""

    app: Callable[[], ClientApp]
    clients: int
    timeout: float | None
    threads: int
    sums: bool


class ClientActor:
    """The actor. One thread handles messages in turn; a message that exceeds its deadline receives
    an error, and another thread continues."""

    def __init__(self) -> None:
        keep_freed_memory()
        os.umask(0o077)  # as in ``private_umask``: this process writes clients' states
        identify_process(run_id=1)
        self._todo: SimpleQueue[Message] = SimpleQueue()
        self._done: SimpleQueue[Message] = SimpleQueue()
        self._waiting = self._given_up = 0
        self._settings: ActorSettings | None = None
        self._unsummed: list[Message] = []

    def configure(self, settings: ActorSettings) -> None:
        """Configure an actor after its start or restart; repeated calls do nothing."""
        if self._settings is not None:
            return
        self._nodes = LocalNodes(settings.app(), settings.clients)
        self._settings = settings
        self._start_thread()

    def work(self, new: list[Message]) -> list[Message] | None:
        """Accept messages; return replies when all are available or the time slice ends; None from
        a restarted actor that is not configured. Responses to be summed wait for all; if the actor
        dies before, all are repeated.
        """
        if self._settings is None:
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
                late = self._worker.give_up(self._settings.timeout)
                if late is not None:
                    replies.append(Message(Error(DEADLINE), reply_to=late))
                    self._given_up += 1
                    if self._given_up > _MAX_GIVEN_UP:
                        os._exit(1)  # Ray restarts the actor without the hanging threads
                    self._start_thread()
                    self._waiting -= 1
                break
            self._waiting -= 1
        if not self._settings.sums:
            return replies
        self._unsummed += replies
        if self._waiting:
            return []
        summed, self._unsummed = self._unsummed, []
        return sum_responses([(node_client(reply.metadata.src_node_id), reply) for reply in summed])

    def _start_thread(self) -> None:
        assert self._settings is not None
        self._worker = _Worker(self._nodes, self._todo, self._done, self._settings.threads)
        self._worker.start()


class _Worker(threading.Thread):
    """Thread that handles messages until it is given up."""

    def __init__(
        self,
        nodes: LocalNodes,
        todo: SimpleQueue[Message],
        done: SimpleQueue[Message],
        threads: int,
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
                if self._over:  # too late: an error was sent
                    return
                self._current = None
                self._done.put(reply)

    def give_up(self, timeout: float | None) -> Message | None:
        """Return the message that exceeds ``timeout``, whose reply will be discarded."""
        with self._lock:
            if self._current is None:
                return None
            message, start = self._current
            if time.monotonic() - start <= message_timeout(message, timeout):
                return None
            self._over = True
            return message
