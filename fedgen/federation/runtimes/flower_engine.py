"""Flower's simulation engine with the same apps: behaves like a run on Flower's SuperLink, with an
overhead of at least a tenth of a second per round."""

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

from fedgen.config.constraints import NonNegative
from fedgen.errors import FedgenError
from fedgen.federation.client.app import client_app
from fedgen.federation.client.context import ClientContext, ClientContexts, ClientSetup
from fedgen.federation.runtimes.local_nodes import GridWrapper
from fedgen.federation.runtimes.ray_cluster import ray_folder, silence_ray


def run(
    server: ServerApp,
    setup: ClientSetup,
    clients: int,
    rebuild: Callable[[], ClientSetup],
    *,
    timeout: float | None,
    num_cpus: float,
    num_gpus: NonNegative,
) -> None:
    """Run a ServerApp against the ClientApp in Flower's simulation engine.

    Args:
        rebuild: returns the setup in a process of the engine, which pickles the ClientApp for every
            message; hashable.
        num_cpus, num_gpus: resources of this machine for each concurrent client.

    Raises:
        FedgenError: if this machine's resources do not suffice for one client.
    """
    del timeout  # Flower uses the time to live of messages
    available = {"num_cpus": os.cpu_count() or 1, "num_gpus": torch.cuda.device_count()}
    for key, needed in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
        if needed > available[key]:
            problem = f"a client needs {needed:g}, there are {available[key]}"
            raise FedgenError(f"runtime.{key}", problem, "lower it")
    silence_ray()
    from flwr.simulation import run_simulation

    finished = threading.Event()
    inner = ServerApp()

    @inner.main()
    def main(grid: Grid, context: Context) -> None:
        server(_StopWhenFinished(grid, finished), context)

    logger, path = logging.getLogger("flwr"), os.environ.get("PYTHONPATH")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with ray_folder() as folder:
        settings: dict[str, Any] = {
            "client_resources": {"num_cpus": num_cpus, "num_gpus": num_gpus},
            "init_args": {"_temp_dir": folder, "log_to_driver": False, "logging_level": "ERROR"},
        }
        try:
            app = client_app(RebuiltContexts(rebuild), setup.mods)
            run_simulation(inner, app, clients, backend_config=settings)
        except BaseException:
            finished.set()  # otherwise the thread of the ServerApp would wait forever
            raise
        finally:
            logger.setLevel(level)
            os.environ.pop("PYTHONPATH")  # Flower sets it
            if path is not None:
                os.environ["PYTHONPATH"] = path


@dataclass(frozen=True)
class RebuiltContexts:
    """Find the context of a client in any process."""

    rebuild: Callable[[], ClientSetup]

    def __call__(self, context: Context) -> ClientContext:
        """See the class."""
        return _contexts(self.rebuild)(context)


@lru_cache(maxsize=1)
def _contexts(rebuild: Callable[[], ClientSetup]) -> ClientContexts:
    # states on disk: the next message may reach another process
    return ClientContexts(replace(rebuild(), in_memory=False))


class _StopWhenFinished(GridWrapper):
    """A grid that raises when its engine has ended."""

    def __init__(self, inner: Grid, finished: threading.Event) -> None:
        super().__init__(inner)
        self._finished = finished

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See Grid."""
        if self._finished.is_set():
            raise RuntimeError("the engine has ended")
        return self._inner.pull_messages(message_ids)
