"""Flower strategy for model deltas: the server sends weights, clients answer with how far their own
training would move them, clipped, and an aggregator that they trust adds the noise. It moves arrays
and knows no method."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from fedgen.coins import Coins
from fedgen.federation.messages import Answer
from fedgen.method import Method
from strategies.parameter_updates import ParameterUpdates


class ModelDeltas(ParameterUpdates):
    """The same exchange, with the mechanism where the answers meet: what they come to is noised
    before anything else sees it.

    Args:
        method: one with an aggregate.
        coins: the strategy's own.
    """

    def __init__(self, method: Method, coins: Coins) -> None:
        super().__init__(method, coins)
        assert method.aggregate is not None
        self._aggregate = method.aggregate

    def aggregate_query(
        self, server_round: int, answers: Mapping[int, Answer], rows: int
    ) -> Tensor:
        """The noised mean over the expected cohort, (1, entries), also of nobody: an empty cohort
        does not show. Whoever did not answer counts as zero."""
        cohort = [torch.from_numpy(answers[client].arrays["answer"]) for client in sorted(answers)]
        # a round that is done again may bring other answers, which must not share the noise
        told = hashlib.sha256(b"".join(each.numpy().tobytes() for each in cohort)).hexdigest()
        coins = self._coins.at("aggregate", server_round).salted(told)
        return torch.from_numpy(self._aggregate.release(cohort, coins).arrays["answer"])
