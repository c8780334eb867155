"""Ctrl-C: once to end a run with a checkpoint, twice to end it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """Takes SIGINT and SIGTERM while it lasts. ``asked``: whether one came; the next one raises
    KeyboardInterrupt. Outside of a program's main thread it does nothing: Python allows no more."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = False
        self._say = say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            for each in self._before:  # what is being put away must not be interrupted once more
                signal.signal(each, signal.SIG_IGN)
            raise KeyboardInterrupt
        self.asked = True
        self._say("interrupted: ends after this round with a checkpoint; once more to end at once")
