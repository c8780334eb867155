"""Show the progress of a run."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_QUIET_SECONDS = 10.0
_SILENT_SECONDS = 60.0  # after which a long step prints a line


class RunProgress:
    """Progress bar on a terminal; otherwise a line every ten seconds, or every minute during a long
    step. ``stderr``: write there, next to output for other programs."""

    def __init__(self, stderr: bool = False) -> None:
        self._console = Console(stderr=stderr, highlight=False, soft_wrap=True)
        self._live = (sys.stderr if stderr else sys.stdout).isatty()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),  # shows progress during a step of minutes
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._live,
        )
        self._tasks: dict[str, TaskID] = {}
        self._spoke = time.monotonic()
        self._ended: tuple[str, int] | None = None  # a stage whose end was printed
        self._at, self._moved = "", time.monotonic()  # the last step, and its time
        self._over = threading.Event()

    def __enter__(self) -> RunProgress:
        self._progress.start()
        self._watch = threading.Thread(target=self._heartbeat, daemon=True)
        if not self._live:
            self._watch.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if not self._live:
            self._watch.join()  # nothing is printed after the end
        self._progress.stop()

    def _heartbeat(self) -> None:
        while not self._over.wait(_SILENT_SECONDS / 4):
            if self._at and time.monotonic() - self._spoke >= _SILENT_SECONDS:
                self._spoke = time.monotonic()
                minutes = (self._spoke - self._moved) / 60
                self.say(f"still at {self._at}, for {minutes:.0f} min")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(line, markup=False)

    def show(self, stage: str, done: int, of: int, facts: str, end: bool = True) -> None:
        """Move the bar of a stage.

        Args:
            end: whether the end of the stage is printed as a line.
        """
        if not self._live:
            now = time.monotonic()
            if self._at != (step := f"{stage} {done}/{of}"):
                self._at, self._moved = step if done < of else "", now
            ended = end and done == of and self._ended != (stage, of)
            if now - self._spoke >= _QUIET_SECONDS or ended:
                self._spoke = now
                self.say(f"{step}  {facts}")
            self._ended = (stage, of) if done == of else None
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=of, facts="", completed=done)
        self._progress.update(self._tasks[stage], completed=done, facts=facts)


def format_epsilon(value: float | None) -> str:
    """Format ε, rounded up: 9.9991 is printed as 10.00, never 9.99."""
    if value is None:
        return "∞"
    return f"{-(-value * 100 // 1) / 100:.2f}"


def format_pace(rounds: int, seconds: float) -> str:
    """Format the speed of a run: rounds per second, or seconds per round."""
    if rounds >= seconds:
        return f"{rounds / seconds:.3g} rounds/s"
    return f"{seconds / rounds:.3g} s a round"


def format_bytes(count: int) -> str:
    """Format a number of bytes."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
