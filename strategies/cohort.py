"""What fedgen's Flower strategies share: a cohort that is drawn in secret, and no evaluation on
clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedgen.coins import Coins
from fedgen.method import Method


class CohortStrategy(Strategy):
    """A strategy that asks a cohort.

    Args:
        method: of which it reads the public facts of the exchange, as ``cohort``, the draw of
            clients for the rows of a question.
        coins: the strategy's own.
    """

    def __init__(self, method: Method, coins: Coins) -> None:
        self.cohort, self._coins = method.cohort, coins
        self.nodes: Mapping[int, int] = {}  # client -> node

    def route(self, server_round: int, rows: int) -> dict[int, list[int]]:
        """Client -> the rows that it is asked in a round; a function of the round."""
        return self.cohort.draw(rows, self._coins.secret("cohort", server_round))

    def message(self, content: RecordDict, kind: str, client: int) -> Message:
        """To a client."""
        return Message(content, dst_node_id=self.nodes[client], message_type=kind)

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
