"""Base of fedgen's Flower strategies: a secretly sampled cohort, the sum of its responses, no
evaluation on clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedgen.federation.messages import Response
from fedgen.methods.api import Method
from fedgen.randomness import RandomStreams


class CohortStrategy(Strategy):
    """A strategy that queries a cohort.

    Args:
        method: its public parameters of the exchange are used, such as ``cohort``, the routing of
            query samples to clients.
        streams: random streams of the strategy.
    """

    def __init__(self, method: Method, streams: RandomStreams) -> None:
        self.cohort, self._method, self._streams = method.cohort, method, streams
        self.nodes: Mapping[int, int] = {}  # client -> node

    def route(self, server_round: int, samples: int) -> dict[int, list[int]]:
        """Return client -> query samples of a round; a function of the round."""
        return self.cohort.assign(samples, self._streams.secret("cohort", server_round))

    def message(self, content: RecordDict, kind: str, client: int) -> Message:
        """Return a message to a client."""
        return Message(content, dst_node_id=self.nodes[client], message_type=kind)

    def mean(
        self, server_round: int, responses: Mapping[int, Response], samples: int
    ) -> Tensor | None:
        """Return the sum of the cohort's responses, with equal weights, divided by their number:
        (samples, ...). None without responses, unless an aggregator adds the noise: then the result
        is noise only.

        Where the number of responses must stay hidden, or an aggregator adds the noise, divide by
        their expected number; a missing response counts as zero.
        """
        arrived = [responses[client].arrays for client in sorted(responses)]
        values = [
            response["answer"] for response in arrived if response
        ]  # some are summed into others
        plan, divisor = self._method.plan, float(len(responses))
        if plan.is_trusted or not self.cohort.has_fixed_size:
            divisor = self.cohort.responses_per_sample
            zeros = np.zeros(plan.response_shape(samples, server_round), np.float32)
            values = values or ([zeros] if plan.is_trusted else [])
        if not values:
            return None
        streams = self._streams.at("aggregate", server_round)
        return (self._method.aggregate(values, server_round, streams) / divisor).float()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Ignore acknowledgements."""
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Evaluate nothing on clients: it would access private records outside a mechanism."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """See ``configure_evaluate``."""
        return None

    def summary(self) -> None:
        """Print nothing: the settings are in the run's configuration."""
