"""Handle Ctrl-C: the first one ends a run with a checkpoint, the second one ends it immediately."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """Handle SIGINT and SIGTERM while active. ``asked``: whether one arrived; the next one raises
    KeyboardInterrupt. No effect outside the main thread, where Python allows no handlers."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = False
        self._say = say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            for signal_number in self._before:  # the cleanup must not be interrupted again
                signal.signal(signal_number, signal.SIG_IGN)
            raise KeyboardInterrupt
        self.asked = True
        self._say(
            "interrupted: stopping after this round with a checkpoint; press Ctrl-C again to stop "
            "at once"
        )
