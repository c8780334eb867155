"""Flower strategy for parameter updates: the server sends weights, each client of the cohort takes
private steps from them and sends back where it came to, and the server takes the mean. It moves
arrays and knows no method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from torch import Tensor

from fedgen.federation import messages
from fedgen.federation.messages import Answer
from fedgen.method import Query
from strategies.cohort import CohortStrategy


class ParameterUpdates(CohortStrategy):
    """Who steps, and how their points become one. A round has one exchange: nobody trains without
    being asked. The cohort takes all of a round's steps, each of its clients.
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
        """The mean over the clients that answered, each alike whatever rows it has: (1, entries).
        None if nobody did."""
        if not answers:
            return None
        [first, *others] = (torch.from_numpy(answers[c].arrays["answer"]) for c in sorted(answers))
        total = first.double()
        for each in others:
            total += each
        return (total / len(answers)).float()
