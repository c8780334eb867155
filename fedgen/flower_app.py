"""Apps for ``flwr run``: those of every other runtime, on a federation of Flower.

Settings are one string of Hydra overrides, ``flwr run -c 'overrides="method=... rounds=..."'``. The
federation needs one SuperNode per client of the partition. The run directory, on a file system
shared by server and clients, is ``runs/flwr-RUN_ID`` in the working directory of the SuperLink,
unless ``run_dir`` is set.
"""

from __future__ import annotations

import shlex
import sys
from functools import lru_cache
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from omegaconf import DictConfig

from fedgen.config.compose import compose
from fedgen.errors import FedgenError
from fedgen.federation.client.app import client_app
from fedgen.federation.client.context import ClientContext
from fedgen.federation.runtimes.flower_engine import RebuiltContexts
from fedgen.run.clients import RunClientSetup
from fedgen.run.train import train


@lru_cache(maxsize=1)
def _config(overrides: str, run_id: int) -> DictConfig:
    config = compose("config", ["runtime=flower", *shlex.split(overrides)])
    if config.run_dir is None and config.resume is None:
        config.run_dir = str(Path("runs", f"flwr-{run_id}").absolute())
    return config


def _home(context: Context) -> ClientContext:
    config = _config(str(context.run_config["overrides"]), context.run_id)
    path = Path(config.resume or config.run_dir).absolute()
    return RebuiltContexts(RunClientSetup(str(path)))(context)


client = client_app(_home)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train on the grid of Flower."""
    try:
        config = _config(str(context.run_config["overrides"]), context.run_id)
        print(f"fedgen: {train(config, lambda rounds: rounds(grid))}")
    except FedgenError as error:
        print(f"fedgen: {error}", file=sys.stderr)
        raise
