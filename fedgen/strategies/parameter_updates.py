"""Flower strategy for updates of parameters: the server sends weights, each client of the cohort
responds with one vector (its weights after private steps, their change, or a sum of gradients), and
the server takes the mean. Independent of the method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from torch import Tensor

from fedgen.federation import messages
from fedgen.federation.messages import Response
from fedgen.methods.api import Query
from fedgen.strategies.cohort import CohortStrategy


class ParameterUpdates(CohortStrategy):
    """A round is one exchange without separate training. All clients of the cohort respond to the
    whole query."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages; see the class."""
        return []

    def configure_query(self, server_round: int, query: Query) -> list[Message]:
        """Send the same weights to the whole cohort."""
        content = messages.pack_query(server_round, query)
        cohort = self.route(server_round, query.count)
        return [self.message(content, messages.ASK, client) for client in cohort]

    def aggregate_query(
        self, server_round: int, responses: Mapping[int, Response], samples: int
    ) -> Tensor | None:
        """Return the mean over the cohort (1, entries); see ``CohortStrategy.mean``."""
        return self.mean(server_round, responses, samples)
