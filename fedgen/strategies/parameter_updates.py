"""Flower strategy for updates of parameters: the server sends weights, each client of the cohort
answers with one vector (where its private steps came to, how far they went, a sum of gradients),
and the server takes the mean. It moves arrays and knows no method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from torch import Tensor

from fedgen.federation import messages
from fedgen.federation.messages import Answer
from fedgen.method import Query
from fedgen.strategies.cohort import CohortStrategy


class ParameterUpdates(CohortStrategy):
    """Who answers, and how the answers become one. A round has one exchange: nobody trains without
    being asked. All of the cohort answer all of a question.
    """

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """See the class."""
        return []

    def configure_query(self, server_round: int, query: Query) -> list[Message]:
        """The same weights to the whole cohort."""
        content = messages.pack_query(server_round, query)
        cohort = self.route(server_round, query.count)
        return [self.message(content, messages.ASK, client) for client in cohort]

    def aggregate_query(
        self, server_round: int, answers: Mapping[int, Answer], rows: int
    ) -> Tensor | None:
        """The mean over the cohort, (1, entries); see ``CohortStrategy.mean``."""
        return self.mean(server_round, answers, rows)
