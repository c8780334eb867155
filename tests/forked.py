"""Commands in their own processes that start at once: forks of a process that has imported all that
a run needs, and computed nothing."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fedgen import cli

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["fedgen.run.train", "matplotlib.figure", "sklearn"])


class Command:
    """``fedgen COMMAND ...``, as ``subprocess.Popen`` would run it; its output goes to files."""

    def __init__(self, words: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory()  # as long as this object
        result = [str(Path(self._folder.name) / name) for name in ("output", "errors")]
        for place in result:  # there before anybody looks
            Path(place).touch()
        given = tuple(words), result, dict(os.environ)
        self._process = _server.Process(target=_run, args=given, daemon=False)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float = 300) -> int:
        """Return the exit status, once it has ended."""
        self._process.join(seconds)
        status = self.poll()
        if status is None:
            self.send_signal(signal.SIGUSR1)
            time.sleep(1)  # let faulthandler write the stacks
            output = f"{self.output[-3000:]}\n{self.errors[-9000:]}"
            raise AssertionError(f"the command is still running after {seconds:g} s:\n{output}")
        return status

    @property
    def output(self) -> str:
        """Return its standard output."""
        return (Path(self._folder.name) / "output").read_text()

    @property
    def errors(self) -> str:
        """Return its standard error."""
        return (Path(self._folder.name) / "errors").read_text()


def _run(words: tuple[str, ...], message: list[str], environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    for number, place in enumerate(message, 1):
        with Path(place).open("wb") as file:
            os.dup2(file.fileno(), number)
    faulthandler.register(signal.SIGUSR1)
    sys.argv = ["fedgen", *words]
    cli.main()


def until(command: Command, path: Path, seconds: float = 300) -> None:
    """Wait for a file of a running command."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert command.poll() is None, command.errors
        assert time.monotonic() < end, f"there is no {path}"
        time.sleep(0.002)
