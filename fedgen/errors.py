"""Errors that a user can fix. The command line prints each as one line, without a traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

INTERRUPTED = 130  # exit status after Ctrl-C
MACHINE_FAILED = 3

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO}
"""Errors of the machine that another file or folder would not avoid."""

_MACHINE_ERRORS = {
    *_EXHAUSTED,
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
}

_MEMORY_ERRORS = (
    *("allocate memory", "out of memory"),
    *("size calculation overflowed", "failed to map segment"),
    *("can't start new thread", "Resource temporarily unavailable"),
)


class FedgenError(Exception):
    """A mistake of the user.

    Args:
        key: configuration key or file, e.g. ``privacy.delta``.
        problem: what is wrong, with the value given.
        remedy: what to do.
    """

    def __init__(self, key: str, problem: str, remedy: str) -> None:
        self.key, self.problem, self.remedy = key, problem, remedy
        line = " ".join(f"{key}: {problem}; {remedy}".split())
        # the line may quote a file from a third party, and terminals execute control codes
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in line))

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows in place of a traceback."""
        return [f"fedgen: {self}"]

    def __reduce__(self) -> tuple[type[FedgenError], tuple[str, str, str]]:
        return type(self), (self.key, self.problem, self.remedy)


def check_system() -> None:
    """Raise FedgenError on a system without POSIX file locks, where spend could be lost."""
    if os.name == "nt":
        problem = "does not support the file locks that privacy ledgers require"
        raise FedgenError("Windows", problem, "run fedgen in WSL 2, or on Linux or macOS")


class Interrupted(Exception):  # noqa: N818 (not an error)
    """A run that was stopped before it finished.

    Attributes:
        place: run directory in which the same command resumes; None if the text says how.
    """

    def __init__(self, text: str, place: Path | None = None) -> None:
        self.place = place
        super().__init__(text)


_interruptions: list[BaseException] = []
"""Interruptions with everything that their frames reference: Ray terminates a process with status 1
if it drops a reference to an object after Ray has shut down."""


def run_and_report(work: Callable[[], None]) -> int:
    """Call ``work`` and return the exit status: 2 for a mistake of the user, 3 for a missing
    resource of the machine, 130 for an interruption. Each prints one line."""
    try:
        work()
    except FedgenError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in _EXHAUSTED:
            print(f"fedgen: {missing_resource(cause)}; existing files are kept", file=sys.stderr)
            return MACHINE_FAILED
        print(f"fedgen: {error}", file=sys.stderr)
        return 2
    except (Interrupted, KeyboardInterrupt) as error:
        _interruptions.append(error)
        print(f"fedgen: {str(error) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        lacking = missing_resource(error)
        if lacking is not None:
            print(f"fedgen: {lacking}; existing files are kept", file=sys.stderr)
            return MACHINE_FAILED
        if isinstance(error, OSError) and error.filename:  # e.g. a folder in place of a file
            print(f"fedgen: {error.filename}: {error.strerror}; correct it", file=sys.stderr)
            return 2
        raise
    return 0


def missing_resource(error: Exception) -> str | None:
    """Describe the resource that the machine lacks or denies; None for any other error."""
    if isinstance(error, OSError):
        if error.errno not in _MACHINE_ERRORS:
            return None
        return f"{error.filename or 'this machine'}: {error.strerror}"
    text = str(error)
    if isinstance(error, MemoryError) or any(sign in text for sign in _MEMORY_ERRORS):
        return f"out of memory ({text.splitlines()[0][:200] if text else 'no details'})"
    return None
