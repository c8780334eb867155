"""Flower strategy for methods that query statistics instead of training in rounds: every client
releases sums over its records, and the server takes their mean, whatever the method."""

from __future__ import annotations

from fedgen.strategies.parameter_updates import ParameterUpdates


class OneShot(ParameterUpdates):
    """The exchange of ``ParameterUpdates``, with a statistic in place of weights."""
