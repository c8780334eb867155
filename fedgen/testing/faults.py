"""Fault injection for clients and networks.

Faults of a client are a Flower mod around its app; those of the network are a grid around the grid.
Public streams determine which client has which fault in which round, independent of private
records.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid

from fedgen.federation.client.app import FAILED
from fedgen.federation.client.context import partition_of
from fedgen.federation.failures import DEADLINE
from fedgen.federation.flower_compat import NODE_UNAVAILABLE, set_message_id
from fedgen.federation.messages import (
    ASK,
    HELLO,
    IN_A_ROUND,
    REVEAL,
    TRAIN,
    pack_arrays,
    read_partition,
    read_round,
    unpack_arrays,
)
from fedgen.federation.runtimes.local_nodes import GridWrapper
from fedgen.randomness import RandomStreams
from fedgen.testing.fault_rates import FaultRates


@dataclass(frozen=True)
class FaultyClients:
    """A Flower mod that injects faults. ``folder``: folder of the clients' files."""

    faults: FaultRates
    streams: RandomStreams
    timeout: float | None
    folder: Path

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Return the client's reply, or the result of its fault."""
        kind = message.metadata.message_type
        if kind not in IN_A_ROUND:
            return call_next(message, context)
        client, server_round = partition_of(context), read_round(message)
        fault = self.faults.sample(self.streams, client, kind, server_round)
        if fault == "raises":
            raise RuntimeError("a client that raises")
        if fault == "returns_error":
            return Message(Error(FAILED), reply_to=message)
        if fault == "hangs":
            time.sleep(1.5 * (self.timeout or 0.0))
        if fault == "dies":
            self._die(client, kind, server_round)
        reply = call_next(message, context)
        if fault in ("wrong_shape", "nan") and kind == ASK and not reply.has_error():
            values = unpack_arrays(reply.content.array_records["arrays"])["answer"].float().numpy()
            values = values[..., :-1] if fault == "wrong_shape" else np.full_like(values, np.nan)
            records = RecordDict({**reply.content})
            records["arrays"] = pack_arrays({"answer": values})
            reply = Message(records, reply_to=message)
        return reply

    def _die(self, client: int, kind: str, server_round: int) -> None:
        """Kill this process, once per message."""
        marker = self.folder / str(client) / f"died.{kind}.{server_round}"
        if not marker.exists():
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class FaultyGrid(GridWrapper):
    """A grid with network faults around another grid."""

    def __init__(self, inner: Grid, faults: FaultRates, streams: RandomStreams) -> None:
        super().__init__(inner)
        self._faults, self._streams = faults, streams
        self._clients: dict[int, int] = {}  # node -> client, from their greetings
        self._planned: dict[str, tuple[str, Message]] = {}  # message -> late | twice
        self._vanished: set[int] = set()
        self._checked: dict[int, int] = {}  # client -> half rounds checked
        self._lost: dict[str, Message] = {}
        self._losses = 0
        self._delayed: list[tuple[set[str], Message]] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Forward messages, except those to vanished clients."""
        names = []
        for message in messages:
            if self._is_dropped(message):
                self._losses += 1
                name = f"lost {self._losses}"
                set_message_id(message, name)
                self._lost[name] = Message(Error(NODE_UNAVAILABLE), reply_to=message)
            else:
                [name] = self._inner.push_messages([message])
                fault = self._fault(message)
                if fault in ("late", "twice"):
                    self._planned[name] = fault, message
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return replies; a late reply is an error first, and arrives when the server waits for
        others."""
        ids = list(message_ids)  # in order: a client prepares its parts in sequence
        replies = [self._lost.pop(name) for name in ids if name in self._lost]
        replies += [
            message_ for exchange, message_ in self._delayed if not exchange.intersection(ids)
        ]
        self._delayed = [
            (exchange, message_)
            for exchange, message_ in self._delayed
            if exchange.intersection(ids)
        ]
        if replies:
            return replies
        for message_ in self._inner.pull_messages(ids):
            if message_.has_error():
                replies.append(message_)
                continue
            if message_.metadata.message_type == HELLO:
                self._clients[message_.metadata.src_node_id] = read_partition(message_)
            fault, message = self._planned.pop(
                message_.metadata.reply_to_message_id, ("", message_)
            )
            if fault:
                self._delayed.append((set(ids), message_))
            is_late = fault == "late"
            replies.append(Message(Error(DEADLINE), reply_to=message) if is_late else message_)
        return replies

    def _fault(self, message: Message) -> str | None:
        kind = message.metadata.message_type
        if kind not in IN_A_ROUND:
            return None
        client = self._clients[message.metadata.dst_node_id]
        return self._faults.sample(self._streams, client, kind, read_round(message))

    def _is_dropped(self, message: Message) -> bool:
        """Return whether the client of the message has vanished in this round or before."""
        client = self._clients.get(message.metadata.dst_node_id)
        kind = message.metadata.message_type
        if client is None or kind not in IN_A_ROUND:
            return client in self._vanished
        round_ = read_round(message)
        now = 2 * round_ + (kind in (ASK, REVEAL))
        half_rounds = range(self._checked.get(client, 0), now + 1)
        messages = [((TRAIN, ASK)[half_round % 2], half_round // 2) for half_round in half_rounds]
        if kind not in (TRAIN, ASK):
            messages.append((kind, round_))
        for message_key in messages:
            if self._faults.sample(self._streams, client, *message_key) == "vanishes":
                self._vanished.add(client)
        self._checked[client] = now + 1
        return client in self._vanished
