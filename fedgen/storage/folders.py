"""Create the folders of commands."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedgen.errors import FedgenError


def make_folder(path: Path) -> None:
    """Create the folder of a command, and its parents.

    Raises:
        FedgenError: if that fails.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise not_writable(path, error) from error


@contextmanager
def locked_folder(path: Path, key: str) -> Iterator[None]:
    """Lock a folder against other commands.

    Args:
        key: setting that names it, for errors.

    Raises:
        FedgenError: if another process holds the lock.
    """
    folder = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        problem = f"{path} is in use by another process"
        raise FedgenError(key, problem, "wait for its end") from error
    finally:
        os.close(folder)


def not_writable(path: Path, error: OSError) -> FedgenError:
    """Return the error of a folder that cannot be written."""
    problem = f"{path} cannot be written ({error.strerror})"
    return FedgenError("run_dir", problem, "choose another place")


def unused_folder(stem: str) -> Path:
    """Create a new folder with this name, or numbered (``stem-2``): several runs may start in one
    second.

    Raises:
        FedgenError: if that fails.
    """
    path, number = Path(stem), 1
    make_folder(path.parent)
    while True:
        try:
            path.mkdir(0o700)
            return path
        except FileExistsError:
            number += 1
            path = Path(f"{stem}-{number}")
        except OSError as error:
            raise not_writable(path, error) from error
