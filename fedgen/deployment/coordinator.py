"""Run the rounds of a deployment over a SuperLink, with nodes that hold the images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flwr.serverapp import ServerApp

from fedgen.deployment.flower_coordinator import serve_request
from fedgen.deployment.flower_link import initialize, parse_address
from fedgen.deployment.request import Request
from fedgen.federation.client.context import ClientSetup
from fedgen.federation.runtimes.server_app import start
from fedgen.run.clients import RunClientSetup
from fedgen.run.resume import open_run
from fedgen.version import VERSION


def run(
    server: ServerApp,
    setup: ClientSetup,
    clients: int,
    rebuild: Callable[[], ClientSetup],
    *,
    timeout: float | None,
    superlink: str,
    ca: str,
    rehearses: str | None,
) -> None:
    """Run a ServerApp against the nodes of a SuperLink. Each node receives the request of the run
    and decides by its own policy.

    Args:
        superlink: HOST:PORT of ``fedgen link`` on this machine: its Control and Runtime APIs answer
            only local callers.
        ca: certificate of the link.

    Raises:
        FedgenError: if the link is not there.
    """
    del clients, timeout, rehearses  # by nodes; Flower's messages have a time to live; by the setup
    assert isinstance(rebuild, RunClientSetup)
    _, config, identity = open_run(Path(rebuild.path), "run_dir")
    request = Request.from_config(
        config, setup.terms.run, setup.domain, identity["noise_multiplier"]
    )
    link = parse_address(superlink, ca)
    initialize()
    with serve_request(link, VERSION, request.text()) as grid:
        start(server, grid)
