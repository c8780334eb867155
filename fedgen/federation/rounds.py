"""The round loop: messages over a Grid, counts, and a stop before the budget is overspent."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from dp_accounting import DpEvent
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from torch import Tensor

from fedgen.coins import Coins
from fedgen.federation import messages
from fedgen.federation.messages import Answer
from fedgen.method import Method, Query, Tensors
from fedgen.privacy.budget import Budget
from fedgen.privacy.events import Spend, canonical


class ClientFailedError(Exception):
    """A client answered with an error code."""


class Strategy(Protocol):
    """What the loop needs of a strategy for sample gradients."""

    nodes: dict[int, int]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]: ...

    def configure_query(self, server_round: int, query: Query) -> list[Message]: ...

    def route(self, server_round: int, rows: int) -> dict[int, list[int]]: ...

    def aggregate_query(
        self, server_round: int, answers: dict[int, Answer], rows: int
    ) -> Tensor | None: ...


@dataclass
class RunState:
    """All that the server knows between rounds.

    rounds: rounds completed. server: the server program's state. spends: what each client released,
    as the server saw it. rows: rows that each client was asked. sent, received: bytes to and from
    each client, all messages counted.
    """

    server: Tensors
    rounds: int = 0
    prepared: bool = False
    spends: dict[int, Spend] = field(default_factory=dict)
    rows: Counter[int] = field(default_factory=Counter)
    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class RoundFacts:
    """What a round showed to the server: everything here follows from releases.

    answer_norm: mean L2 norm of the mean answers (None if nobody was asked); mostly noise.
    seconds: by part: critics, routing (answers), generator.
    """

    clients: int
    answer_norm: float | None
    seconds: dict[str, float]


class Rounds:
    """One run's exchange with its clients."""

    def __init__(self, grid: Grid, strategy: Strategy, method: Method, state: RunState) -> None:
        self.grid, self.strategy, self.method, self.state = grid, strategy, method, state
        self._clients: dict[int, int] = {}  # node -> client
        self._canonical: dict[DpEvent, Spend] = {}

    def hello(self) -> None:
        """Learns which node is which client: node ids are random, and in no order."""
        nodes = sorted(self.grid.get_node_ids())
        asked = [
            Message(messages.pack_hello(), dst_node_id=node, message_type=messages.HELLO)
            for node in nodes
        ]
        self._clients = dict.fromkeys(nodes, -1)
        for node, reply in self._exchange(asked, count=False):
            self._clients[node] = messages.read_partition(reply)
        self.strategy.nodes = {client: node for node, client in self._clients.items()}

    def prepare(self, prepared: Callable[[int, int], None]) -> None:
        """Has every client make its state, part by part. ``prepared``: (done, of) after each."""
        if self.state.prepared:
            return
        wanted = [
            (client, number)
            for client in sorted(self.strategy.nodes)
            for number in range(self.method.client.preparations)
        ]
        asked = (
            Message(
                messages.pack_prepare(number),
                dst_node_id=self.strategy.nodes[client],
                message_type=messages.PREPARE,
            )
            for client, number in wanted
        )
        for done, _ in enumerate(self._exchange(asked), start=1):
            prepared(done, len(wanted))
        self.state.prepared = True

    def run(
        self, coins: Coins, budget: Budget, finished: Callable[[RunState, RoundFacts], None]
    ) -> str | None:
        """Rounds until ``budget`` ends them; returns why it stopped early, or None."""
        while self.state.rounds < budget.rounds:
            server_round = self.state.rounds
            query = self.method.server.query(self.state.server, server_round, coins)
            asked = self.strategy.route(server_round, query.count)
            over = [c for c, rows in asked.items() if self.state.rows[c] + len(rows) > budget.rows]
            if over:
                return (
                    f"round {server_round + 1} would ask client {over[0]} for more than its "
                    f"{budget.rows} rows"
                )
            finished(self.state, self._round(server_round, query, coins))
        return None

    def _round(self, server_round: int, query: Query, coins: Coins) -> RoundFacts:
        state, server = self.state, self.method.server
        start = time.perf_counter()
        broadcast = messages.pack_arrays(server.broadcast(state.server, server_round, coins))
        config = ConfigRecord({"rows": query.count})
        for _ in self._exchange(
            self.strategy.configure_train(server_round, broadcast, config, self.grid)
        ):
            pass
        trained = time.perf_counter()
        answers = {}
        questions = self.strategy.configure_query(server_round, query)
        for client, rows in self.strategy.route(server_round, query.count).items():
            state.rows[client] += len(rows)
        for node, reply in self._exchange(questions):
            answer = messages.read_answer(reply)
            answers[self._clients[node]] = answer
            self._note(self._clients[node], answer.event)
        mean = self.strategy.aggregate_query(server_round, answers, query.count)
        answered = time.perf_counter()
        norm = None
        if mean is not None:
            norm = float(torch.linalg.vector_norm(mean.flatten(1), dim=1).mean())
            state.server = server.update(state.server, mean, server_round, coins)
        state.rounds += 1
        seconds = {
            "critics": trained - start,
            "routing": answered - trained,
            "generator": time.perf_counter() - answered,
        }
        return RoundFacts(len(answers), norm, seconds)

    def _note(self, client: int, event: DpEvent) -> None:
        if event not in self._canonical:
            self._canonical[event] = canonical(event)
        spend = dict(self.state.spends.get(client, {}))
        for leaf, count in self._canonical[event].items():
            spend[leaf] = spend.get(leaf, 0) + count
        self.state.spends[client] = spend

    def _exchange(
        self, asked: Iterable[Message], count: bool = True
    ) -> Iterator[tuple[int, Message]]:
        """Sends messages and yields (node, reply) as replies come. Bytes are counted from the
        messages themselves."""
        sizes: dict[int, int] = {}
        waiting: dict[str, int] = {}
        for message in asked:
            node = message.metadata.dst_node_id
            [message_id] = self.grid.push_messages([message])
            waiting[message_id] = node
            if count:
                key = id(message.content)
                if key not in sizes:
                    sizes[key] = messages.count_bytes(message)
                self.state.sent[self._clients[node]] += sizes[key]
        while waiting:
            replies = list(self.grid.pull_messages(list(waiting)))
            if not replies:
                time.sleep(0.001)
            for reply in replies:
                node = waiting.pop(reply.metadata.reply_to_message_id)
                if reply.has_error():
                    raise ClientFailedError(
                        f"client {self._clients[node]} failed with code {reply.error.code}"
                    )
                if count:
                    self.state.received[self._clients[node]] += messages.count_bytes(reply)
                yield node, reply
