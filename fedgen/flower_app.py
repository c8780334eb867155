"""The apps that ``flwr run`` runs: those of every other runtime, on Flower's own federation.

Settings come as one string of Hydra overrides, ``flwr run -c 'overrides="method=... rounds=..."'``.
The federation needs as many SuperNodes as the partition has clients. The run directory, on a file
system that server and clients share, is ``runs/flwr-RUN_ID`` where the SuperLink was started, if
``run_dir`` names no other.
"""

from __future__ import annotations

import shlex
import sys
from functools import lru_cache
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from omegaconf import DictConfig

from fedgen.errors import FedgenError
from fedgen.experiments.configuration import compose
from fedgen.experiments.sites import SiteOf
from fedgen.experiments.training import train
from fedgen.federation.client_app import ClientHome, client_app
from fedgen.federation.flower_engine import HomesAgain


@lru_cache(maxsize=1)
def _config(overrides: str, run_id: int) -> DictConfig:
    config = compose("config", ["runtime=flower", *shlex.split(overrides)])
    if config.run_dir is None and config.resume is None:
        config.run_dir = str(Path("runs", f"flwr-{run_id}").absolute())
    return config


def _home(context: Context) -> ClientHome:
    config = _config(str(context.run_config["overrides"]), context.run_id)
    path = Path(config.resume or config.run_dir).absolute()
    return HomesAgain(SiteOf(str(path)))(context)


client = client_app(_home)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Trains on Flower's grid."""
    try:
        config = _config(str(context.run_config["overrides"]), context.run_id)
        print(f"fedgen: {train(config, lambda rounds: rounds(grid))}")
    except FedgenError as error:
        print(f"fedgen: {error}", file=sys.stderr)
        raise
