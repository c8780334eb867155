"""Flower strategy for sample gradients: the server sends images, clients answer with sanitized
gradients of their loss with respect to them. It moves arrays and knows no method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from torch import Tensor

from fedgen.coins import Coins
from fedgen.federation import messages
from fedgen.federation.messages import Answer
from fedgen.method import Method, Query
from fedgen.privacy.releases import Local
from fedgen.strategies.cohort import CohortStrategy


class SampleGradients(CohortStrategy):
    """Who trains, who is asked what, and how the answers become one.

    A round has two exchanges: a broadcast that clients train on, and a query whose rows are routed
    to clients by the secret draw of ``cohort``. Training goes by public rotation, or to the round's
    cohort; it carries nothing back.

    Args:
        method: its ``cohort`` draws clients for rows, and ``trained_per_round`` of them train.
        coins: the strategy's own.
    """

    def __init__(self, method: Method, coins: Coins) -> None:
        super().__init__(method, coins)
        self.trained_per_round = method.trained_per_round
        self._routes: dict[int, list[int]] = {}

    def trainees(self, server_round: int, rows: int) -> list[int]:
        """The clients that train in a round."""
        if self.trained_per_round is None:
            return sorted(self.route(server_round, rows))
        clients = self.cohort.population
        first = server_round * self.trained_per_round
        return sorted({(first + turn) % clients for turn in range(self.trained_per_round)})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The broadcast, to each trainee. ``config["rows"]``: rows of the round's query."""
        content = messages.pack_broadcast(server_round, arrays)
        trainees = self.trainees(server_round, int(str(config["rows"])))
        return [self.message(content, messages.TRAIN, client) for client in trainees]

    def configure_query(self, server_round: int, query: Query) -> list[Message]:
        """The query's rows, each to the clients that the draw gave it to."""
        self._routes = self.route(server_round, query.count)
        everyone = messages.pack_query(server_round, query)
        whole = list(range(query.count))
        return [
            self.message(
                everyone if rows == whole else messages.pack_query(server_round, query.take(rows)),
                messages.ASK,
                client,
            )
            for client, rows in self._routes.items()
        ]

    def aggregate_query(
        self, server_round: int, answers: Mapping[int, Answer], rows: int
    ) -> Tensor | None:
        """The mean answer to each row, over the clients that answered it (for Poisson cohorts: over
        their expected number); zero for a row that nobody answered, None if nobody was asked.

        Args:
            answers: client -> answer, summed in the order of clients. A client that was asked and
                is missing failed; the others count for it.
            rows: rows of the query.
        """
        if not isinstance(self._method.plan.aggregation, Local):
            return self.mean(server_round, answers, rows)
        total: Tensor | None = None
        for client in sorted(answers):
            gradients = torch.from_numpy(answers[client].arrays["answer"]).double()
            if total is None:  # in double precision sums of multiples of a grid are exact
                total = torch.zeros((rows, *gradients.shape[1:]), dtype=torch.float64)
            if len(gradients) == rows:  # rows are routed in ascending order: these are all
                total += gradients
            else:
                total.index_add_(0, torch.tensor(self._routes[client]), gradients)
        if total is None:
            return None
        mean = total / self.cohort.answers_per_row
        if len(answers) < len(self._routes):
            mean *= self._asked_over_answered(answers, rows).view(-1, *[1] * (mean.dim() - 1))
        return mean.float()

    def _asked_over_answered(self, answers: Mapping[int, Answer], rows: int) -> Tensor:
        """By how much the answers to each row must stand in for those that are missing (rows,);
        zero where all are."""
        asked, answered = torch.zeros(rows), torch.zeros(rows)
        for client, routed in self._routes.items():
            asked[routed] += 1
            answered[routed] += client in answers
        return torch.where(answered > 0, asked / answered, 0.0)
