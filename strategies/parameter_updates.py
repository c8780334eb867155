"""Flower strategy for parameter updates: the server sends weights, each client of the cohort takes
private steps from them and sends back where it came to, and the server takes the mean. It moves
arrays and knows no method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedgen.coins import Coins
from fedgen.federation import messages
from fedgen.federation.messages import Answer
from fedgen.method import Query
from fedgen.privacy.routing import Routing


class ParameterUpdates(Strategy):
    """Who steps, and how their points become one. A round has one exchange: nobody trains without
    being asked.

    Args:
        cohort: the draw of the clients that take a round's steps, all of them each.
        trained_per_round: none.
        coins: the strategy's own.
    """

    def __init__(self, cohort: Routing, trained_per_round: int | None, coins: Coins) -> None:
        del trained_per_round
        self.cohort, self._coins = cohort, coins
        self.nodes: Mapping[int, int] = {}  # client -> node

    def route(self, server_round: int, rows: int) -> dict[int, list[int]]:
        """Client -> the steps that it takes in a round; a function of the round."""
        return self.cohort.draw(rows, self._coins.secret("cohort", server_round))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """See the class."""
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """See the class."""
        return None, None

    def configure_query(self, server_round: int, query: Query) -> list[Message]:
        """The same weights to the whole cohort."""
        content = messages.pack_query(server_round, query)
        return [
            Message(content, dst_node_id=self.nodes[client], message_type=messages.ASK)
            for client in self.route(server_round, query.count)
        ]

    def aggregate_query(
        self, server_round: int, answers: Mapping[int, Answer], rows: int
    ) -> Tensor | None:
        """The mean over the clients that answered, each alike whatever rows it has: (1, entries).
        None if nobody did."""
        if not answers:
            return None
        total = sum(
            torch.from_numpy(answers[client].arrays["answer"]) for client in sorted(answers)
        )
        return torch.as_tensor(total / len(answers))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing is evaluated on clients: it would touch private rows outside a mechanism."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """See ``configure_evaluate``."""
        return None

    def summary(self) -> None:
        """The settings are in the run's configuration."""
