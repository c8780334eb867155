"""Small settings and small data that the tests share."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
import uuid
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray's own choice, 15, lets actors starve next to other test processes, which do not yield
os.environ.setdefault("RAY_worker_niceness", "0")

import hypothesis
import numpy as np
import psutil
import pytest
import torch
from tiny import TINY, Train, tiny

from fedgen import cli
from fedgen.randomness import RandomStreams

torch.set_num_threads(1)
_PHASES = [each for each in hypothesis.Phase if each.name != os.environ.get("FEDGEN_TEST_WITHOUT")]
hypothesis.settings.register_profile(
    "fedgen",
    deadline=None,
    derandomize=True,
    phases=_PHASES,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # on a busy machine
)
hypothesis.settings.load_profile("fedgen")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--fuzz`` and ``--kills``: how many random cases to try."""
    parser.addoption("--fuzz", type=int, default=8, help="cases of each kind in test_fuzz.py")
    parser.addoption("--kills", type=int, default=0, help="more of each part, deployed")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Stop at a file that cannot be collected; xdist would run all other files first."""
    if report.failed:
        pytest.exit(f"{report.nodeid} cannot be collected", returncode=2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first, so that no worker waits for another's last test."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> int:
    """Return the number of random cases of each kind."""
    return int(request.config.getoption("--fuzz"))


@pytest.fixture
def streams() -> RandomStreams:
    return RandomStreams.from_seed(0, "seeded")


@pytest.fixture
def train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Train:
    """Train with tiny settings through the command line; return the run directory."""

    def run(*overrides: str, name: str = "run") -> Path:
        place = tmp_path / name
        methods = [word.partition("=")[2] for word in overrides if word.startswith("method=")]
        settings = tiny(methods[-1]) if methods else TINY
        status = cli.run(["train", *settings, *overrides, f"run_dir={place}"])
        assert status == 0, capsys.readouterr().err
        return place

    return run


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Use one torch thread: for small networks, synchronization costs more than it saves, most of
    all with parallel tests."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep caches of tests within the session."""
    os.environ["FEDGEN_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["FEDGEN_HOME"] = str(tmp_path_factory.mktemp("home"))


@pytest.fixture
def data_root(tmp_path: Path) -> Path:
    """Write mnist.npz, fashion_mnist.npz and femnist.npz in the layout of the real files: 60 images
    and 6 writers."""
    rng = np.random.default_rng(0)
    rows = 60
    images = rng.integers(0, 256, (rows, 28, 28), dtype=np.uint8)
    labels = np.arange(rows, dtype=np.uint8) % 10
    writers = (np.arange(rows) // 10).astype(np.int16)
    train = {"train_images": images, "train_labels": labels}
    test = {"test_images": images[:20], "test_labels": labels[:20]}
    np.savez_compressed(tmp_path / "mnist.npz", **train, **test, train_writer=writers)
    np.savez_compressed(tmp_path / "fashion_mnist.npz", **train, **test)
    np.savez_compressed(
        tmp_path / "femnist.npz", images=images, labels=np.arange(rows) % 62, writer=writers
    )
    return tmp_path


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves processes running. They are found by an inherited environment
    variable; the fork server starts before it is set."""
    importlib.import_module("forked")  # it says what the server imports
    forkserver.ensure_running()  # type: ignore[attr-defined]
    mark = uuid.uuid4().hex
    monkeypatch.setenv("FEDGEN_TEST", mark)
    yield
    until = time.monotonic() + 90  # a busy machine reaps slowly; what hangs stays for good
    while left := _marked(mark):
        assert time.monotonic() < until, left
        time.sleep(0.2)


def _marked(mark: str) -> list[str]:
    result = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("FEDGEN_TEST") == mark:
                result.append(" ".join(process.cmdline()))
    return result
