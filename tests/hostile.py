"""What the tests of files and messages from strangers share."""

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
    """Every file of a folder."""
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def lying(monkeypatch: pytest.MonkeyPatch, kind: str, lie: Lie, liar: int = 0) -> None:
    """A client's replies of a kind, after its lie."""
    honest = app._HANDLERS[kind]

    def answered(home: ClientContext, message: Message) -> RecordDict:
        told = honest(home, message)
        if home.index == liar:
            told = RecordDict(dict(told))
            lie(told)
        return told

    monkeypatch.setitem(app._HANDLERS, kind, answered)


class Hang(BaseException):
    """Something took too long."""


@contextmanager
def no_longer_than(seconds: float) -> Iterator[None]:
    """Raises Hang after so many seconds."""

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
    """A copy in the place of the one before."""
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(place, to))
