"""Rates of injected faults; independent of Flower."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from fedgen.randomness import RandomStreams


@dataclass(frozen=True)
class FaultRates:
    """Probability of each fault for each message of a round; at most one affects a message.

    raises: the client raises an exception.
    returns_error: it returns an error code.
    hangs: it sleeps past the deadline, then responds.
    wrong_shape, nan: its response is invalid.
    dies: its process is killed, once.
    late: its reply arrives after the deadline.
    twice: its reply arrives twice.
    vanishes: it never replies again.
    """

    raises: float = 0.0
    returns_error: float = 0.0
    hangs: float = 0.0
    wrong_shape: float = 0.0
    nan: float = 0.0
    dies: float = 0.0
    late: float = 0.0
    twice: float = 0.0
    vanishes: float = 0.0

    @property
    def total(self) -> float:
        """Probability that any fault affects a message."""
        return sum(float(getattr(self, rate.name)) for rate in fields(self))

    def sample(
        self, streams: RandomStreams, client: int, kind: str, server_round: int
    ) -> str | None:
        """Return the fault of a message of a round, or None."""
        generator = streams.public("fault", client, kind, server_round)
        position = float(torch.rand((), generator=generator, dtype=torch.float64))
        for rate in fields(self):
            position -= getattr(self, rate.name)
            if position < 0:
                return rate.name
        return None
