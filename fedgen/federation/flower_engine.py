"""Flower's own simulation engine, with the same apps: what a run on Flower's SuperLink would do, at
a tenth of a second a round and more."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fedgen.errors import FedgenError
from fedgen.federation.client_app import ClientHome, Homes, Site, client_app
from fedgen.federation.nodes import GridAround
from fedgen.federation.ray_cluster import be_quiet, ray_folder


def run(
    server: ServerApp,
    site: Site,
    clients: int,
    again: Callable[[], Site],
    *,
    timeout: float | None,
    num_cpus: float,
    num_gpus: float,
) -> None:
    """Runs a ServerApp against the ClientApp of a site, in Flower's simulation engine.

    Args:
        again: makes the site in a process of the engine, which pickles the ClientApp for every
            message; hashable.
        num_cpus, num_gpus: of this machine's, for each client that runs at a time.

    Raises:
        FedgenError: if this machine's resources are too small for one client.
    """
    del timeout  # Flower's is the messages' time to live
    here = {"num_cpus": os.cpu_count() or 1, "num_gpus": torch.cuda.device_count()}
    for key, needed in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
        if needed > here[key]:
            problem = f"a client needs {needed:g}, there are {here[key]}"
            raise FedgenError(f"runtime.{key}", problem, "lower it")
    be_quiet()
    from flwr.simulation import run_simulation

    over = threading.Event()
    inner = ServerApp()

    @inner.main()
    def main(grid: Grid, context: Context) -> None:
        server(_UntilOver(grid, over), context)

    logger, path = logging.getLogger("flwr"), os.environ.get("PYTHONPATH")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with ray_folder() as place:
        settings: dict[str, Any] = {
            "client_resources": {"num_cpus": num_cpus, "num_gpus": num_gpus},
            "init_args": {"_temp_dir": place, "log_to_driver": False, "logging_level": "ERROR"},
        }
        try:
            app = client_app(HomesAgain(again), site.mods)
            run_simulation(inner, app, clients, backend_config=settings)
        except BaseException:
            over.set()  # the ServerApp's thread would wait for replies that never come
            raise
        finally:
            logger.setLevel(level)
            os.environ.pop("PYTHONPATH")  # Flower leaves its own there
            if path is not None:
                os.environ["PYTHONPATH"] = path


@dataclass(frozen=True)
class HomesAgain:
    """Finds a client's home in whatever process a message arrives."""

    again: Callable[[], Site]

    def __call__(self, context: Context) -> ClientHome:
        """See the class."""
        return _homes(self.again)(context)


@lru_cache(maxsize=1)
def _homes(again: Callable[[], Site]) -> Homes:
    return Homes(replace(again(), in_memory=False))  # the next message may come to another process


class _UntilOver(GridAround):
    """A grid that says so when its engine has ended."""

    def __init__(self, inner: Grid, over: threading.Event) -> None:
        super().__init__(inner)
        self._over = over

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See Grid."""
        if self._over.is_set():
            raise RuntimeError("the engine has ended")
        return self._inner.pull_messages(message_ids)
