"""How often clients and networks fail on purpose: settings, which need nothing of Flower."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from fedgen.coins import Coins


@dataclass(frozen=True)
class Faults:
    """How likely each fault is, for each message of a round. At most one befalls a message.

    raises: the client raises an exception. returns_error: it answers with an error code.
    hangs: it sleeps past the deadline, then works. wrong_shape, nan: its answer is unusable.
    dies: its process is killed, once. late: its reply comes after the deadline. twice: its reply
    comes twice. vanishes: from then on nothing is heard of it.
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
        """How likely a message meets any of them."""
        return sum(float(getattr(self, each.name)) for each in fields(self))

    def of(self, coins: Coins, client: int, kind: str, server_round: int) -> str | None:
        """The fault that befalls a message of a round."""
        generator = coins.public("fault", client, kind, server_round)
        place = float(torch.rand((), generator=generator, dtype=torch.float64))
        for each in fields(self):
            place -= getattr(self, each.name)
            if place < 0:
                return each.name
        return None
