"""Flower strategy for sample gradients: the server sends images, clients respond with sanitized
gradients of their loss with respect to them. Independent of the method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from torch import Tensor

from fedgen.federation import messages
from fedgen.federation.messages import Response
from fedgen.methods.api import Method, Query
from fedgen.randomness import RandomStreams
from fedgen.strategies.cohort import CohortStrategy


class SampleGradients(CohortStrategy):
    """A round has two exchanges: a broadcast that clients train on, and a query whose samples are
    routed to clients by the secret sampling of ``cohort``. A public rotation, or the cohort of the
    round, trains; training returns nothing.

    Args:
        method: ``cohort`` samples clients for query samples, and ``trained_per_round`` of them
            train.
        streams: random streams of the strategy.
    """

    def __init__(self, method: Method, streams: RandomStreams) -> None:
        super().__init__(method, streams)
        self.trained_per_round = method.trained_per_round
        self._routes: dict[int, list[int]] = {}

    def trainees(self, server_round: int, samples: int) -> list[int]:
        """Return the clients that train in a round."""
        if self.trained_per_round is None:
            return sorted(self.route(server_round, samples))
        clients = self.cohort.population
        first = server_round * self.trained_per_round
        return sorted({(first + turn) % clients for turn in range(self.trained_per_round)})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the broadcast to each trainee. ``config["rows"]``: number of query samples."""
        content = messages.pack_broadcast(server_round, arrays)
        trainees = self.trainees(server_round, int(str(config["rows"])))
        return [self.message(content, messages.TRAIN, client) for client in trainees]

    def configure_query(self, server_round: int, query: Query) -> list[Message]:
        """Return the query, with the samples routed to each client."""
        self._routes = self.route(server_round, query.count)
        full_query = messages.pack_query(server_round, query)
        all_samples = list(range(query.count))
        return [
            self.message(
                full_query
                if samples == all_samples
                else messages.pack_query(server_round, query.take(samples)),
                messages.ASK,
                client,
            )
            for client, samples in self._routes.items()
        ]

    def aggregate_query(
        self, server_round: int, responses: Mapping[int, Response], samples: int
    ) -> Tensor | None:
        """Return the mean response to each query sample over its responders (for Poisson cohorts,
        their expected number); zero for a query sample without response, None without any response.

        Args:
            responses: client -> response, summed in the order of clients. A queried client without
                response failed; the others count for it.
            samples: number of query samples.
        """
        if not self._method.plan.aggregation.is_local:
            return self.mean(server_round, responses, samples)
        total: Tensor | None = None
        for client in sorted(responses):
            gradients = torch.from_numpy(responses[client].arrays["answer"]).double()
            if total is None:  # double precision: sums of multiples of a grid are exact
                total = torch.zeros((samples, *gradients.shape[1:]), dtype=torch.float64)
            if len(gradients) == samples:  # all samples, in ascending order
                total += gradients
            else:
                total.index_add_(0, torch.tensor(self._routes[client]), gradients)
        if total is None:
            return None
        mean = total / self.cohort.responses_per_sample
        if len(responses) < len(self._routes):
            mean *= self._inverse_response_rate(responses, samples).view(
                -1, *[1] * (mean.dim() - 1)
            )
        return mean.float()

    def _inverse_response_rate(self, responses: Mapping[int, Response], samples: int) -> Tensor:
        """Return queried over received responses for each query sample (samples,); zero without
        responses."""
        queried, responded = torch.zeros(samples), torch.zeros(samples)
        for client, routed in self._routes.items():
            queried[routed] += 1
            responded[routed] += client in responses
        return torch.where(responded > 0, queried / responded, 0.0)
