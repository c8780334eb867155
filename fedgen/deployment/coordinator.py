"""The runtime of a deployment: rounds over a SuperLink, with nodes that have rows of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flwr.serverapp import ServerApp

from fedgen.deployment.flower_coordinator import serving
from fedgen.deployment.flower_link import link_at, settle
from fedgen.deployment.request import Request
from fedgen.experiments.identity import opened
from fedgen.experiments.sites import SiteOf
from fedgen.federation.client_app import Site
from fedgen.federation.server_app import start
from fedgen.version import VERSION


def run(
    server: ServerApp,
    site: Site,
    clients: int,
    again: Callable[[], Site],
    *,
    timeout: float | None,
    superlink: str,
    ca: str,
    rehearses: str | None,
) -> None:
    """Runs a ServerApp against the nodes of a SuperLink. Each is told what the run directory says
    of the run, and makes up its own mind.

    Args:
        superlink: HOST:PORT of ``fedgen link`` on this machine: its Control and Runtime APIs answer
            nobody else.
        ca: the certificate that it is known by.

    Raises:
        FedgenError: if it is not there.
    """
    del clients, timeout, rehearses  # by nodes; Flower's messages have a time to live; by the setup
    assert isinstance(again, SiteOf)
    _, config, identity = opened(Path(again.path), "run_dir")
    request = Request.of(config, site.terms.run, site.branch, identity["noise_multiplier"])
    link = link_at(superlink, ca)
    settle()
    with serving(link, VERSION, request.text()) as grid:
        start(server, grid)
