"""A Ray cluster for as long as it is needed, and nothing left of it afterwards."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from fedgen.errors import FedgenError, lacks

_FOLDER, _OWNER = "fedgen-ray-", "fedgen-owner"
_END_SECONDS = 20.0  # to leave a cluster
_KNOCK_SECONDS = 10.0  # for a cluster's address to answer


@contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """A Ray cluster: the one at ``address``, or one of this machine's for as long as this lasts.

    Raises:
        FedgenError: if there is none at ``address``.
    """
    be_quiet()
    import ray

    on_term = signal.getsignal(signal.SIGTERM)
    with ray_folder() as place:
        own = {"address": "local", "include_dashboard": False, "_temp_dir": place}
        where: dict[str, Any] = {"address": address} if address else own
        try:
            if address not in (None, "auto"):
                _knock(str(address))
            ray.init(**where, logging_level=logging.ERROR, log_to_driver=False)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_term)  # Ray has put its own there
        except Exception as error:  # what Ray raises if it does not start in time
            _leave()
            if lacks(error) is not None:
                raise
            if address is None:
                said = " ".join(str(error).split())[:200]
                problem = f"Ray did not start on this machine ({said})"
                remedy = "try again when less runs here, or take runtime=in_process"
                raise FedgenError("runtime", problem, remedy) from error
            raise FedgenError(
                "runtime.address",
                f"no Ray cluster answers at {address}",
                "give HOST:PORT of a machine where ray start --head ran, auto on that machine, or "
                "nothing for a cluster of this machine's own",
            ) from error
        try:
            yield
        finally:
            _leave()


def _leave() -> None:
    """Disconnect from a cluster, within ``_END_SECONDS`` even if its head node is gone."""
    import ray

    ending = threading.Thread(target=ray.shutdown, daemon=True)
    ending.start()
    ending.join(_END_SECONDS)


def be_quiet() -> None:
    """Has Ray send no statistics, give no advice, and start no processes for tasks, of which there
    are none."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")


@contextmanager
def ray_folder() -> Iterator[str]:
    """Create a folder for a Ray cluster of this process, and remove those of killed processes."""
    for path in Path("/tmp").glob(f"{_FOLDER}*"):  # Ray's sockets need a short path
        if _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
    place = tempfile.mkdtemp(prefix=_FOLDER, dir="/tmp")
    (Path(place) / _OWNER).write_text(_process(os.getpid()))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    """Return whether the owner recorded in this folder, of this user and host, has ended."""
    try:
        mark = (path / _OWNER).read_text()
        host, pid, _ = mark.split()
        if path.is_symlink() or path.lstat().st_uid != os.getuid() or host != socket.gethostname():
            return False
        return not psutil.pid_exists(int(pid)) or _process(int(pid)) != mark
    except psutil.NoSuchProcess:
        return True
    except (OSError, ValueError, psutil.Error):
        return False


def _process(pid: int) -> str:
    """Return host, PID and creation time: a PID may be reused."""
    return f"{socket.gethostname()} {pid} {psutil.Process(pid).create_time()}"


def _knock(address: str) -> None:
    """Raises OSError or ValueError unless something listens: Ray itself would wait for it."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS).close()
