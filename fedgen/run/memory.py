"""Measure the memory of a process and its descendants."""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType

import psutil

_EVERY_SECONDS = 1.0


class PeakMemory:
    """Record the peak memory of this process and its descendants while active; shared pages are
    counted once. ``peak``: largest value seen, in bytes."""

    def __init__(self) -> None:
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # no file handle is left
                self.peak = max(self.peak, memory_of_tree())
            if self._over.wait(_EVERY_SECONDS):
                return


def memory_of_tree() -> int:
    """Return the memory of this process and its descendants in bytes; shared pages are counted
    once."""
    unshared, shared = 0, 0
    this_process = psutil.Process()
    for process in (this_process, *this_process.children(recursive=True)):
        try:
            memory = process.memory_info()
        except psutil.Error:  # the process has ended
            continue
        common = getattr(memory, "shared", 0)
        unshared += memory.rss - common
        shared = max(shared, common)
    return unshared + shared
