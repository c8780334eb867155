"""Functions shared by the tests of untrusted files and messages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import ITIMER_REAL, SIGALRM, setitimer, signal
from types import FrameType

import pytest
from flwr.app import Message, RecordDict

from fedgen.federation.client import app
from fedgen.federation.client.context import ClientContext

Lie = Callable[[RecordDict], None]


def content(place: Path) -> dict[str, bytes]:
    """Return every file of a folder."""
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def lying(monkeypatch: pytest.MonkeyPatch, kind: str, lie: Lie, liar: int = 0) -> None:
    """Change a client's replies of one kind."""
    honest = app._HANDLERS[kind]

    def answered(home: ClientContext, message: Message) -> RecordDict:
        result = honest(home, message)
        if home.index == liar:
            result = RecordDict(dict(result))
            lie(result)
        return result

    monkeypatch.setitem(app._HANDLERS, kind, answered)


class Hang(BaseException):
    """Raised when a call takes too long."""


@contextmanager
def no_longer_than(seconds: float) -> Iterator[None]:
    """Raise Hang after so many seconds."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal(SIGALRM, end)
    setitimer(ITIMER_REAL, seconds)
    try:
        yield
    finally:
        setitimer(ITIMER_REAL, 0)
        signal(SIGALRM, before)


def copied(place: Path, to: Path) -> Path:
    """Replace the copy of before by a new one."""
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(place, to))
