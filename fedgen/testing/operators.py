"""Count the operators that torch dispatches, an upper bound on those that launch kernels, and the
ones that synchronize with the device. Copies between host and device are not counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_SYNCHRONIZING = (
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "masked_select",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
    "bincount",
    "repeat_interleave",
    "equal",
)
_INDEXING = ("index", "index_put", "index_put_")


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        indices = [item for item in args[1] if item is not None] if name in _INDEXING else []
        if any(str(index.dtype) in ("torch.bool", "torch.uint8") for index in indices):
            name = "nonzero"  # boolean indexing calls nonzero
        self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def operators(run: Callable[[], object]) -> Counter[str]:
    """Return the number of calls of each operator."""
    counting = _Counting()
    with counting:
        run()
    return counting.calls


def synchronizing(calls: Counter[str]) -> dict[str, int]:
    """Return the number of calls of each operator that synchronizes."""
    return {name: count for name, count in calls.items() if name in _SYNCHRONIZING}
