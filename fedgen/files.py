"""Files that are either whole or not there, and digests that tell."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_whole(path: Path, data: bytes, durable: bool = True, mode: int = 0o666) -> None:
    """Replaces a file in one step: readers see the old one or the new.

    durable: waits for the disk, so that the new one outlives a power cut as well.
    mode: who may read and write it, less what the process masks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    fresh.replace(path)


def digest(*parts: bytes) -> str:
    """A digest that no accident leaves unchanged."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def cache() -> Path:
    """Where fedgen keeps what it would have to make or load again, on this machine: the environment
    variable FEDGEN_CACHE, else ``~/.cache/fedgen``."""
    return Path(os.environ.get("FEDGEN_CACHE") or "~/.cache/fedgen").expanduser()


def write_shared(path: Path, data: bytes) -> None:
    """Replaces a file in one step, while other processes may be writing the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_bytes(data)
    fresh.replace(path)
