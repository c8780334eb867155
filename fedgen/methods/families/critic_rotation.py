"""Public rotation of the critics of a client, in stacks that compute at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from fedgen.models.functional import Tensors

_WEIGHTS_AT_ONCE, _ON_A_GPU = 2**20, 2**25  # weights of a stack; see scripts/bench_critics.py


@dataclass(frozen=True)
class Rotation:
    """``count`` critics. ``turn_size`` of them train in a round, in stacks of at most
    ``max_members``.

    joins_stacks: whether stacks warm up and respond together in groups of at most ``max_members``
        critics.
    """

    count: int
    turn_size: int
    max_members: int
    joins_stacks: bool = True

    @cached_property
    def turns(self) -> list[list[range]]:
        """For each turn, its critics in stacks of about equal size."""
        turns = []
        for first in range(0, self.count, self.turn_size):
            last = min(first + self.turn_size, self.count)
            size = math.ceil((last - first) / math.ceil((last - first) / self.max_members))
            turns.append(
                [range(start, min(start + size, last)) for start in range(first, last, size)]
            )
        return turns

    @cached_property
    def stacks(self) -> list[range]:
        """All stacks."""
        return [stack for turn in self.turns for stack in turn]

    @cached_property
    def groups(self) -> list[list[range]]:
        """Stacks that warm up and respond together."""
        groups: list[list[range]] = []
        for members in self.stacks:
            if (
                groups
                and self.joins_stacks
                and members.stop - groups[-1][0].start <= self.max_members
            ):
                groups[-1].append(members)
            else:
                groups.append([members])
        return groups


def critics_at_once(critic: nn.Module, device: str) -> int:
    """Return how many critics compute as one stack. On a CPU, grouped convolutions of a stack are
    faster than a loop for narrow critics, and slower for critics as wide as the paper's."""
    limit = _ON_A_GPU if device == "cuda" else _WEIGHTS_AT_ONCE
    return max(1, limit // sum(weight.numel() for weight in critic.parameters()))


def select(networks: Tensors, members: slice) -> Tensors:
    """Select members of a stack; shared entries stay."""
    return {name: value[members] if value.dim() else value for name, value in networks.items()}


def concatenate(stacks: list[Tensors]) -> Tensors:
    """Concatenate stacks; shared entries are those of the first."""
    [first, *others] = stacks
    if not others:
        return first
    return {
        name: torch.cat([stack[name] for stack in stacks]) if value.dim() else value
        for name, value in first.items()
    }
