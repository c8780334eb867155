"""Run ``fedgen verify``: recompute ε of a packed release from its signed accounts."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from fedgen import verify as standalone
from fedgen.errors import FedgenError


def verify(config: DictConfig) -> str:
    """Return the claims of a package, line by line.

    Raises:
        FedgenError: if it fails verification.
    """
    if not Path(config.package).is_file():
        problem = f"{config.package} is not a file"
        raise FedgenError("package", problem, "give the ZIP file that fedgen release wrote")
    try:
        rows = standalone.verify(str(config.package), list(config.signed_by))
    except standalone.VerificationError as error:
        problem = f"{config.package} fails verification ({error})"
        remedy = "do not rely on its ε; check signed_by, or ask its publisher for another package"
        raise FedgenError("package", problem, remedy) from error
    return standalone.format_rows(rows)


def check_packed(package: Path, run: Path) -> None:
    """Raise FedgenError if a package that was just written from a run fails verification."""
    try:
        standalone.verify(str(package))
    except standalone.VerificationError as error:
        problem = f"its package fails verification ({error})"
        remedy = f"run fedgen train resume={run} to sign accounts again, with all nodes connected"
        raise FedgenError("run", problem, remedy) from error
