"""Run ``fedgen verify``: recompute ε of a packed release from its signed accounts."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from fedgen import verify as standalone
from fedgen.errors import FedgenError


def verify(config: DictConfig) -> str:
    """Return what a bundle proves, line by line.

    Raises:
        FedgenError: if it does not hold.
    """
    if not Path(config.bundle).exists():
        problem = f"there is no {config.bundle}"
        raise FedgenError("bundle", problem, "give the FILE.zip of fedgen release")
    try:
        rows = standalone.verify(str(config.bundle), list(config.signed_by))
    except standalone.RefusedError as error:
        problem = f"{config.bundle} does not verify ({error})"
        raise FedgenError("bundle", problem, "request it again from its publisher") from error
    return standalone.table(rows)


def check(bundle: Path, run: Path) -> None:
    """Raise FedgenError if a bundle that was just written from a run does not verify."""
    try:
        standalone.verify(str(bundle))
    except standalone.RefusedError as error:
        problem = f"its release would not verify ({error})"
        remedy = f"connect all nodes, then fedgen train resume={run}, which signs accounts anew"
        raise FedgenError("run", problem, remedy) from error
