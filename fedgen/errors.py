"""Mistakes that a user can fix. The command line prints them as one line, without a traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended
MACHINE_FAILED = 3

_OF_THE_MACHINE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO),
}

_OF_MEMORY = (
    *("allocate memory", "out of memory"),
    *("size calculation overflowed", "failed to map segment"),
    *("can't start new thread", "Resource temporarily unavailable"),
)


class FedgenError(Exception):
    """A user's mistake: the configuration key, what is wrong, and what to do.

    Args:
        key: the configuration key or file at fault, e.g. ``privacy.delta``.
        problem: what is wrong with it, with the value that was given.
        remedy: what to do about it.
    """

    def __init__(self, key: str, problem: str, remedy: str) -> None:
        self.key, self.problem, self.remedy = key, problem, remedy
        line = " ".join(f"{key}: {problem}; {remedy}".split())
        # a file that somebody handed over may be quoted in it, and a terminal obeys control codes
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in line))

    def __reduce__(self) -> tuple[type[FedgenError], tuple[str, str, str]]:
        return type(self), (self.key, self.problem, self.remedy)


def check_system() -> None:
    """Raises FedgenError where ledgers cannot be locked: spend could be forgotten."""
    if os.name == "nt":
        problem = "has no file locks of the kind that ledgers of privacy rest on"
        raise FedgenError("Windows", problem, "run fedgen in WSL 2, or on Linux or macOS")


class Interrupted(Exception):  # noqa: N818 (it is no error)
    """A run that was asked to end before it was done. ``place``: where the same command, with this
    ``run_dir``, goes on; None where the text says how."""

    def __init__(self, text: str, place: Path | None = None) -> None:
        self.place = place
        super().__init__(text)


_held: list[BaseException] = []
"""Interruptions, with all that their frames refer to: Ray ends a process, with a status of 1, that
drops a reference to one of its objects after it was shut down."""


def status_of(work: Callable[[], None]) -> int:
    """Works; the exit status that it comes to. A user's mistake (2), what the machine has not got
    (3) and an interruption (130) are told in one line each."""
    try:
        work()
    except FedgenError as error:
        print(f"fedgen: {error}", file=sys.stderr)
        return 2
    except (Interrupted, KeyboardInterrupt) as error:
        _held.append(error)
        print(f"fedgen: {str(error) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read what is printed has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        lacking = lacks(error)
        if lacking is not None:
            print(f"fedgen: {lacking}; what was there stays", file=sys.stderr)
            return MACHINE_FAILED
        if isinstance(error, OSError) and error.filename:  # a folder in a file's place
            print(f"fedgen: {error.filename}: {error.strerror}; mend it", file=sys.stderr)
            return 2
        raise
    return 0


def lacks(error: Exception) -> str | None:
    """What the machine has too little of, or does not allow; None for another error."""
    if isinstance(error, OSError):
        if error.errno not in _OF_THE_MACHINE:
            return None
        return f"{error.filename or 'this machine'}: {error.strerror}"
    text = str(error)
    if isinstance(error, MemoryError) or any(sign in text for sign in _OF_MEMORY):
        return f"too little memory ({text.splitlines()[0][:200] if text else 'none is left'})"
    return None
