"""fedgen: private generative models of images, trained from the shards of clients.

The names of ``fedgen.api`` are available here and imported on first use: torch and Flower take
seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedgen.errors import FedgenError, check_system

if TYPE_CHECKING:
    from fedgen.api import (
        Generator,
        Run,
        Samples,
        account,
        audit,
        evaluate,
        load,
        release,
        report,
        results,
        train,
    )

__version__ = "0.1.0"
__all__ = [
    "FedgenError",
    "Generator",
    "Run",
    "Samples",
    "account",
    "audit",
    "evaluate",
    "load",
    "release",
    "report",
    "results",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_system()
    from fedgen import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
