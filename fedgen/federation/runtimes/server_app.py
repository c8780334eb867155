"""The Flower ServerApp of every method and runtime."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Context, RecordDict
from flwr.serverapp import Grid, ServerApp


def server_app(run: Callable[[Grid], None]) -> ServerApp:
    """Return an app whose main function is ``run``, called with the grid of the runtime."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run(grid)

    return app


def start(app: ServerApp, grid: Grid) -> None:
    """Run a ServerApp on a grid in this process."""
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    app(grid, context)
