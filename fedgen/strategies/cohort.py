"""What fedgen's Flower strategies share: a cohort that is drawn in secret, the sum of what it
sends, and no evaluation on clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedgen.coins import Coins
from fedgen.federation.messages import Answer
from fedgen.method import Method


class CohortStrategy(Strategy):
    """A strategy that asks a cohort.

    Args:
        method: of which it reads the public facts of the exchange, as ``cohort``, the draw of
            clients for the rows of a question.
        coins: the strategy's own.
    """

    def __init__(self, method: Method, coins: Coins) -> None:
        self.cohort, self._method, self._coins = method.cohort, method, coins
        self.nodes: Mapping[int, int] = {}  # client -> node

    def route(self, server_round: int, rows: int) -> dict[int, list[int]]:
        """Client -> the rows that it is asked in a round; a function of the round."""
        return self.cohort.draw(rows, self._coins.secret("cohort", server_round))

    def message(self, content: RecordDict, kind: str, client: int) -> Message:
        """To a client."""
        return Message(content, dst_node_id=self.nodes[client], message_type=kind)

    def mean(self, server_round: int, answers: Mapping[int, Answer], rows: int) -> Tensor | None:
        """The sum of the cohort's answers, each alike whatever rows a client has, over their
        number: (rows, ...). None if nobody answered, unless an aggregator makes the noise: of
        nobody there is noise alone then.

        Where how many answer must not show, or an aggregator makes the noise, it is over their
        expected number: whoever did not answer counts as zero.
        """
        arrived = [answers[client].arrays for client in sorted(answers)]
        found = [each["answer"] for each in arrived if each]  # some come added up
        plan, over = self._method.plan, float(len(answers))
        if plan.trusted or not self.cohort.count_is_fixed:
            over = self.cohort.answers_per_row
            nothing = np.zeros(plan.answer(rows, server_round), np.float32)
            found = found or ([nothing] if plan.trusted else [])
        if not found:
            return None
        coins = self._coins.at("aggregate", server_round)
        return (self._method.total(found, server_round, coins) / over).float()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Acknowledgements carry nothing."""
        return None, None

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
