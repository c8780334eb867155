"""A Ray cluster with a limited lifetime, without leftovers."""

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

from fedgen.errors import FedgenError, missing_resource

_FOLDER, _OWNER = "fedgen-ray-", "fedgen-owner"
_END_SECONDS = 20.0  # to disconnect from a cluster
_CONNECT_SECONDS = 10.0  # to connect to a cluster


@contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """Join the Ray cluster at ``address``, or start one on this machine, for the duration of the
    context.

    Raises:
        FedgenError: if there is no cluster at ``address``.
    """
    silence_ray()
    import ray

    on_term = signal.getsignal(signal.SIGTERM)
    with ray_folder() as folder:
        local = {"address": "local", "include_dashboard": False, "_temp_dir": folder}
        target: dict[str, Any] = {"address": address} if address else local
        try:
            if address not in (None, "auto"):
                _check_reachable(str(address))
            ray.init(**target, logging_level=logging.ERROR, log_to_driver=False)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_term)  # Ray replaces the handler
        except Exception as error:  # Ray raises various exceptions if it does not start
            _leave()
            if missing_resource(error) is not None:
                raise
            if address is None:
                message = " ".join(str(error).split())[:200]
                problem = f"Ray did not start on this machine ({message})"
                remedy = "try again with less load, or use runtime=in_process"
                raise FedgenError("runtime", problem, remedy) from error
            raise FedgenError(
                "runtime.address",
                f"no Ray cluster responds at {address}",
                "give HOST:PORT of a machine where ray start --head ran, auto on that machine, or "
                "null to start a cluster on this machine",
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


def silence_ray() -> None:
    """Disable Ray's usage statistics, hints and prestarted task processes."""
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
    folder = tempfile.mkdtemp(prefix=_FOLDER, dir="/tmp")
    (Path(folder) / _OWNER).write_text(_process(os.getpid()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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


def _check_reachable(address: str) -> None:
    """Raise OSError or ValueError unless the address accepts connections: Ray itself would wait."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
