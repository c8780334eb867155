"""Flower strategy for methods that ask once: every client releases one statistic of its rows, the
server takes the mean and has all that it needs. It moves arrays and knows no method."""

from __future__ import annotations

from fedgen.strategies.parameter_updates import ParameterUpdates


class OneShot(ParameterUpdates):
    """The same exchange, of a statistic in place of weights."""
