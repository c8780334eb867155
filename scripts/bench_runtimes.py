"""Cost of the runtimes, against plain calls and Flower's own simulation engine.

A round of trivial clients, which receive and return 100 KB: plain calls, clients in this process,
fedgen's Ray actors, and Flower's engine, for 1, 10 and 100 clients and for 10 of 3,400. Print a
table of medians, with start-up, shut-down, and the memory of all processes, and a line of JSON.

    python scripts/bench_runtimes.py [--rounds 20] [--clients N ...]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedgen.federation.messages import pack_arrays, unpack_arrays
from fedgen.federation.runtimes.in_process import InProcessGrid
from fedgen.federation.runtimes.ray_cluster import cluster
from fedgen.federation.runtimes.ray_grid import RayGrid
from fedgen.run.memory import memory_of_tree

CASES = ((1, 1), (10, 10), (100, 100), (10, 3400))  # clients of a round, of all
FLOATS = 25_000  # 100 KB

# --- trivial clients ------------------------------------------------------------------------------


def trivial(array: torch.Tensor) -> torch.Tensor:
    """Do the work of a client."""
    return array + 1


def trivial_app() -> ClientApp:
    """Create a client that reads 100 KB and responds with 100 KB."""
    app = ClientApp()

    @app.query("add")
    def add(message: Message, context: Context) -> Message:
        array = unpack_arrays(message.content.array_records["a"])["x"]
        return Message(RecordDict({"a": pack_arrays({"x": trivial(array)})}), reply_to=message)

    return app


def content() -> ArrayRecord:
    """Return 100 KB."""
    return pack_arrays({"x": np.zeros(FLOATS, np.float32)})


def grid_round(grid: Grid, nodes: list[int]) -> None:
    """Run one round over a grid, and read every reply."""
    sent = [
        Message(RecordDict({"a": content()}), dst_node_id=node, message_type="query.add")
        for node in nodes
    ]
    grid.push_messages(sent)
    waiting = {message.metadata.message_id for message in sent}
    while waiting:
        replies = list(grid.pull_messages(list(waiting)))
        if not replies:
            time.sleep(0.001)
        for reply in replies:
            if reply.has_error():
                sys.exit(
                    f"client error {reply.error.code}: {reply.error.reason or 'no reason given'}"
                )
            assert unpack_arrays(reply.content.array_records["a"])["x"][0] == 1
            waiting.remove(reply.metadata.reply_to_message_id)


def median_ms(work: Callable[[], None], rounds: int) -> float:
    """Return the median time of a round, after two for warm-up."""
    times = []
    for _ in range(rounds + 2):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[2:])


class Cost:
    """Figures of a runtime for one case."""

    def __init__(self) -> None:
        self.ms = self.up = self.down = 0.0
        self.memory = 0

    def measure(self, grid: Grid, clients: int, rounds: int, begin: float) -> None:
        """A start-up that began at ``begin`` ends with the first round; then some more."""
        while not (nodes := list(grid.get_node_ids())):
            time.sleep(0.001)
        grid_round(grid, nodes[:1])
        self.up = time.perf_counter() - begin
        nodes = list(grid.get_node_ids())
        step = len(nodes) // clients
        self.ms = median_ms(lambda: grid_round(grid, nodes[::step][:clients]), rounds)
        self.memory = memory_of_tree()


def on_ray(clients: int, of: int, rounds: int) -> Cost:
    """Measure fedgen's actors, one per core."""
    cost, begin = Cost(), time.perf_counter()
    with cluster(None):
        cost.measure(RayGrid.start(trivial_app, of, 60.0, 1, 1.0, 0.0, of), clients, rounds, begin)
        end = time.perf_counter()
    cost.down = time.perf_counter() - end
    return cost


def on_flower(clients: int, of: int, rounds: int) -> Cost:
    """Measure Flower's engine, one actor per core."""
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    cost, server, ended = Cost(), ServerApp(), [0.0]
    begin = time.perf_counter()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        while len(list(grid.get_node_ids())) < of:
            time.sleep(0.001)
        cost.measure(grid, clients, rounds, begin)
        ended[0] = time.perf_counter()

    init = {"log_to_driver": False, "logging_level": "ERROR"}
    settings = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": init}
    run_simulation(server, trivial_app(), of, backend_config=settings)
    cost.down = time.perf_counter() - ended[0]
    return cost


def compare_runtimes(rounds: int, cases: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Print the table; return its figures."""
    figures: dict[str, float] = {}
    print(f"trivial clients, 100 KB each way, median of {rounds} rounds")
    print(f"{'':14}{'':22}{'ms a round':>12}{'start s':>9}{'stop s':>8}{'memory':>10}")
    for clients, of in cases:
        name = str(clients) if clients == of else f"{clients}_of_{of}"
        arrays = [torch.zeros(FLOATS) for _ in range(clients)]
        bare = median_ms(lambda arrays=arrays: [trivial(a) for a in arrays] and None, rounds)
        here = InProcessGrid(trivial_app(), of, 60.0, serialize=False)
        nodes = list(here.get_node_ids())[:clients]
        inside = median_ms(lambda here=here, nodes=nodes: grid_round(here, nodes), rounds)
        ray, flower = on_ray(clients, of, rounds), on_flower(clients, of, rounds)
        print(f"{name.replace('_', ' '):14}{'bare calls':22}{bare:12.3f}")
        print(f"{'':14}{'in process':22}{inside:12.3f}")
        for title, cost in (("ray", ray), ("Flower's engine", flower)):
            print(
                f"{'':14}{title:22}{cost.ms:12.3f}{cost.up:9.1f}{cost.down:8.1f}"
                f"{cost.memory / 1e9:7.2f} GB"
            )
        figures[f"ray_over_flower_speedup_{name}"] = round(flower.ms / ray.ms, 2)
        figures[f"in_process_ms_{name}"] = round(inside, 4)
        figures[f"ray_ms_{name}"] = round(ray.ms, 3)
        figures[f"flower_ms_{name}"] = round(flower.ms, 3)
    return figures


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, nargs="*", help="of a round, in place of all cases")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = arguments.clients
    cases = CASES if chosen is None else [(clients, clients) for clients in chosen]
    print(json.dumps(compare_runtimes(arguments.rounds, cases)))


if __name__ == "__main__":
    main()
