"""Clients and networks that fail on purpose, to see what a run makes of it.

A client's own faults are a Flower mod around its app; those of the network a Grid around the grid.
Which fault befalls which client in which round follows from public coins: nobody's rows decide it.
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

from fedgen.coins import Coins
from fedgen.federation.client_app import FAILED, partition_of
from fedgen.federation.failures import DEADLINE
from fedgen.federation.fault_rates import Faults
from fedgen.federation.flower_compat import NODE_UNAVAILABLE, set_message_id
from fedgen.federation.messages import (
    ASK,
    HELLO,
    IN_A_ROUND,
    REVEAL,
    TRAIN,
    pack_arrays,
    read_partition,
    read_place,
    unpack_arrays,
)
from fedgen.federation.nodes import GridAround


@dataclass(frozen=True)
class FaultyClients:
    """A Flower mod: clients that fail. ``folder``: where clients keep their files."""

    faults: Faults
    coins: Coins
    timeout: float | None
    folder: Path

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """The client's reply, or what the fault makes of it."""
        kind = message.metadata.message_type
        if kind not in IN_A_ROUND:
            return call_next(message, context)
        client, server_round = partition_of(context), read_place(message)
        fault = self.faults.of(self.coins, client, kind, server_round)
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
            bad = unpack_arrays(reply.content.array_records["arrays"])["answer"].float().numpy()
            bad = bad[..., :-1] if fault == "wrong_shape" else np.full_like(bad, np.nan)
            records = RecordDict({**reply.content})
            records["arrays"] = pack_arrays({"answer": bad})
            reply = Message(records, reply_to=message)
        return reply

    def _die(self, client: int, kind: str, server_round: int) -> None:
        """Kills this process, unless that was done for this message before."""
        mark = self.folder / str(client) / f"died.{kind}.{server_round}"
        if not mark.exists():
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class FaultyGrid(GridAround):
    """A network that fails, around another grid."""

    def __init__(self, inner: Grid, faults: Faults, coins: Coins) -> None:
        super().__init__(inner)
        self._faults, self._coins = faults, coins
        self._clients: dict[int, int] = {}  # node -> client, as they introduce themselves
        self._fates: dict[str, tuple[str, Message]] = {}  # message -> late | twice
        self._gone: set[int] = set()
        self._seen: dict[int, int] = {}  # client -> half rounds that were looked at
        self._lost: dict[str, Message] = {}
        self._losses = 0
        self._held: list[tuple[set[str], Message]] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Passes messages on, but for those to clients that are gone."""
        names = []
        for message in messages:
            if self._is_lost(message):
                self._losses += 1
                name = f"lost {self._losses}"
                set_message_id(message, name)
                self._lost[name] = Message(Error(NODE_UNAVAILABLE), reply_to=message)
            else:
                [name] = self._inner.push_messages([message])
                fate = self._fault(message)
                if fate in ("late", "twice"):
                    self._fates[name] = fate, message
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies; a late one is an error first, and comes when the server asks for others."""
        asked = list(message_ids)  # in this order: a client prepares one part after the other
        found = [self._lost.pop(name) for name in asked if name in self._lost]
        found += [reply for then, reply in self._held if not then.intersection(asked)]
        self._held = [(then, reply) for then, reply in self._held if then.intersection(asked)]
        if found:
            return found
        for reply in self._inner.pull_messages(asked):
            if reply.has_error():
                found.append(reply)
                continue
            if reply.metadata.message_type == HELLO:
                self._clients[reply.metadata.src_node_id] = read_partition(reply)
            fate, message = self._fates.pop(reply.metadata.reply_to_message_id, ("", reply))
            if fate:
                self._held.append((set(asked), reply))
            late = fate == "late"
            found.append(Message(Error(DEADLINE), reply_to=message) if late else reply)
        return found

    def _fault(self, message: Message) -> str | None:
        kind = message.metadata.message_type
        if kind not in IN_A_ROUND:
            return None
        client = self._clients[message.metadata.dst_node_id]
        return self._faults.of(self._coins, client, kind, read_place(message))

    def _is_lost(self, message: Message) -> bool:
        """Whether the message goes to a client that is gone since this round or before."""
        client = self._clients.get(message.metadata.dst_node_id)
        kind = message.metadata.message_type
        if client is None or kind not in IN_A_ROUND:
            return client in self._gone
        round_ = read_place(message)
        now = 2 * round_ + (kind in (ASK, REVEAL))
        since = range(self._seen.get(client, 0), now + 1)
        messages = [((TRAIN, ASK)[past % 2], past // 2) for past in since]
        if kind not in (TRAIN, ASK):
            messages.append((kind, round_))
        for each in messages:
            if self._faults.of(self._coins, client, *each) == "vanishes":
                self._gone.add(client)
        self._seen[client] = now + 1
        return client in self._gone
