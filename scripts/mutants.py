"""Apply each mutant to a copy of fedgen and run the test that should notice it.

    python scripts/mutants.py [--tests-passed] [--share N] [TEST ...]

A mutant is a small fault, of a kind that occurred in published code, declared next to its test
(``@kills`` in ``tests/mutation.py``). The test must fail with it, and pass without it; the latter
is skipped with ``--tests-passed``. ``TEST``: file or id of tests; default: all. With ``--share N``,
only every Nth mutant is applied; the commit determines the first one. Prints one line per mutant,
``killed FILE: CHANGE`` or ``survived FILE: CHANGE``; exits with 1 if any survived.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import multiprocessing
import multiprocessing.context
import multiprocessing.pool
import multiprocessing.queues
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from mutation import Mutant, mutants  # noqa: E402

LAZY = ("torch.utils.tensorboard", "matplotlib.backends.backend_agg", "sklearn.datasets", "ray")
OWN = ("fedgen", "conftest", "tiny")
PLAIN = ("-x", "-q", "--tb=native", "--assert=plain", "-p", "no:cacheprovider")
COPIED = ("fedgen", "scripts", "tests", "pyproject.toml")
TEMPORARY = os.environ.get("PYTEST_DEBUG_TEMPROOT")  # as for pytest; None: the default


def copy_package(folder: Path) -> Path:
    """Copy the package and its tests into a folder."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            # byte code stays valid: modification times are copied
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*-pytest-*"))
        else:
            shutil.copy2(source, folder / name)
    return folder


@contextlib.contextmanager
def mutated(folder: Path, mutant: Mutant | None) -> Iterator[None]:
    """Apply a mutant to a copy of the package, and undo it at the end."""
    if mutant is None:
        yield
        return
    path = folder / mutant.path
    before = path.stat()
    path.write_text(path.read_text().replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        shutil.copy2(ROOT / mutant.path, path)
        assert path.stat().st_mtime_ns == before.st_mtime_ns


class Failures:
    """pytest plugin that collects the ids of failed tests."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a failed phase of a test."""
        if report.failed:
            self.names.append(report.nodeid)


def failed(mutant: Mutant | None, tests: list[str]) -> list[str]:
    """Return the tests that fail on a copy, in this process.

    Raises:
        RuntimeError: if they cannot run.
    """
    if not tests:
        return []
    failures, output, folder = Failures(), io.StringIO(), _FOLDERS.get()
    sys.dont_write_bytecode = True  # of a mutated file it would outlive the mutant
    with tempfile.TemporaryDirectory(dir=TEMPORARY) as scratch:
        try:
            os.chdir(folder)
            sys.path.insert(0, str(folder))
            with mutated(folder, mutant), contextlib.redirect_stdout(output):
                status = pytest.main([*PLAIN, f"--basetemp={scratch}/tmp", *tests], [failures])
            os.chdir(ROOT)
        finally:
            _FOLDERS.put(folder)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"{' '.join(tests)} did not run:\n{output.getvalue()}")
    return failures.names


def failed_with(mutant: Mutant) -> list[str]:
    """Return the tests that fail with a mutant."""
    return failed(mutant, [mutant.test])


def commit_number() -> int:
    """Return the hash of the commit as a number; 0 without a repository."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        head = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return 0
    return int(head.stdout or "0", 16)


def _import_packages() -> None:
    """Import all third-party packages once: each mutant runs in a fork of this process, which
    imports fedgen and its tests from its own copy."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    for path in ROOT.glob("fedgen/**/*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        importlib.import_module(name.removesuffix(".__init__"))
    for name in ("conftest", *LAZY):
        importlib.import_module(name)
    for name in [each for each in sys.modules if each.split(".")[0] in OWN]:
        del sys.modules[name]
    del sys.path[:2]
    gc.freeze()  # exclude these objects from collections in forks


class _Worker(multiprocessing.context.ForkProcess):
    """Non-daemonic fork: tests may start processes."""

    def _get_daemon(self) -> bool:
        return False

    def _set_daemon(self, value: bool) -> None:
        del value

    daemon = property(_get_daemon, _set_daemon)  # type: ignore[assignment]


class _Context(multiprocessing.context.ForkContext):
    Process = _Worker


_FOLDERS: multiprocessing.queues.Queue[Path] = _Context().Queue()
"""Copies of the package, one per worker."""


def main() -> None:
    """Run the tests of the chosen mutants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", metavar="TEST")
    parser.add_argument(
        "--tests-passed", action="store_true", help="the tests pass without mutants"
    )
    parser.add_argument(
        "--share", type=int, default=1, metavar="N", help="apply only every Nth mutant"
    )
    asked = parser.parse_args()
    chosen = [m for m in mutants() if m.test.startswith(tuple(asked.tests or [""]))]
    if not chosen:
        sys.exit(f"mutants: none for {', '.join(asked.tests)}")
    for mutant in chosen:
        count = (ROOT / mutant.path).read_text().count(mutant.old)
        if count != 1:
            sys.exit(f"mutants: {mutant.test}: {mutant.path} contains {mutant.old!r} {count} times")
    if asked.share < 1:
        sys.exit(f"mutants: --share cannot be {asked.share}; give 1 or more")
    chosen = chosen[commit_number() % min(asked.share, len(chosen)) :: asked.share]
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["FEDGEN_TEST_WITHOUT"] = "shrink"  # a failure suffices; no minimal example needed
    _import_packages()
    survived, workers = 0, os.cpu_count() or 1
    with (
        tempfile.TemporaryDirectory(dir=TEMPORARY) as copies,
        multiprocessing.pool.Pool(workers, maxtasksperchild=1, context=_Context()) as pool,
    ):
        for number in range(workers):
            _FOLDERS.put(copy_package(Path(copies, str(number))))
        tests = sorted({mutant.test for mutant in chosen})
        without = pool.apply_async(failed, (None, [] if asked.tests_passed else tests))
        results = pool.imap(failed_with, chosen, chunksize=1)
        for mutant, failures in zip(chosen, results, strict=True):
            print("killed" if failures else "survived", mutant.title, flush=True)
            survived += not failures
        if broken := without.get():
            sys.exit(f"mutants: {broken[0]} fails without a mutant")
    sys.exit(f"mutants: {survived} survived" if survived else 0)


if __name__ == "__main__":
    main()
