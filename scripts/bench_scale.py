"""Cost of a run by number of clients, on this machine.

    python scripts/bench_scale.py [--clients 100 400 1600 3400] [--rounds N] [KEY=VALUE ...]
    python scripts/bench_scale.py --experiment scale_sums --records 18 --clients 1000 10000 100000

``fedgen train experiment=scale_3400`` for each number of clients: GS-WGAN, where every client has a
critic and an optimizer, and 32 query samples a round go to as many clients (fewer if some are
sampled twice), which train before they respond. The cost of a round must not grow with the clients
outside of it. Start-up is everything except rounds: cluster, data, ε, results. Memory is that of
all processes. Print a table, and a line of JSON.

``experiment=scale_sums``: one secure sum of DP-MERF over random images (``--records`` per client),
all clients in one process. CPU time includes child processes that the run has waited for, so not
those of Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

_EVERY_SECONDS = 3.0


def bytes_under(run_dir: Path) -> int:
    """Return the size of all files in a folder."""
    size = 0
    for file in run_dir.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size += file.stat().st_size if file.is_file() else 0
    return size


def random_images(path: Path, count: int) -> list[str]:
    """Write a data set of random images; return its settings."""
    images = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8)
    labels = np.arange(count) % 10
    test = {"test_images": images[:100], "test_labels": labels[:100]}
    np.savez(path, train_images=images, train_labels=labels, **test)
    return ["data=folder", f"data.path={path}", "data.classes=10", f"data.public_rows={count}"]


def measure(
    experiment: str, clients: int, rounds: int | None, records: int | None, settings: list[str]
) -> dict[str, Any]:
    """Run one experiment in its own process. ``records``: number of random images of each
    client."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        overrides = [f"experiment={experiment}", f"partition.clients={clients}"]
        overrides += [f"rounds={rounds}"] if rounds else []
        overrides += random_images(Path(folder, "data.npz"), clients * records) if records else []
        overrides += [*settings, f"run_dir={run_dir}"]
        begin, cpu_before = time.perf_counter(), os.times()
        command = [sys.executable, "-P", "-m", "fedgen.cli", "train", *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with Path(folder, "log").open("w+") as log:
            run = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            disk = 0
            while run.poll() is None:  # critics are gone when it ends
                scan_start = time.perf_counter()
                disk = max(disk, bytes_under(run_dir))
                # scan the folder at most 5 % of the time
                pause = max(_EVERY_SECONDS, 20 * (time.perf_counter() - scan_start))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(pause)
            elapsed, cpu = time.perf_counter() - begin, os.times()
            if run.returncode:
                log.seek(0)
                sys.exit(f"{clients} clients: {log.read().strip()}")
        results = json.loads((run_dir / "results.json").read_text())
    return {
        "clients": clients,
        "rounds_per_second": results["rounds_per_second"],
        "ms_per_round": 1000 / results["rounds_per_second"],
        "bytes_per_round": results["bytes"]["per_round"],
        "start_up_s": elapsed - results["seconds"],
        "cpu_s": sum(cpu[2:4]) - sum(cpu_before[2:4]),
        "memory_gb": results["peak_rss_bytes"] / 1e9,
        "disk_gb": disk / 1e9,
        "epsilon": results["epsilon"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 400, 1600, 3400])
    parser.add_argument("--experiment", choices=("scale_3400", "scale_sums"), default="scale_3400")
    parser.add_argument("--records", type=int, help="random images of each client")
    parser.add_argument("--rounds", type=int, help="of the run (default: the experiment's)")
    options, settings = parser.parse_known_args()
    print("| clients | rounds/s | ms a round | start-up, s | CPU, s | memory, GB | disk, GB |")
    print("|---|---|---|---|---|---|---|")
    results = []
    for clients in options.clients:
        arguments = options.experiment, clients, options.rounds, options.records, settings
        results.append(measure(*arguments))
        print(
            "| {clients} | {rounds_per_second:.2f} | {ms_per_round:.0f} | {start_up_s:.0f} "
            "| {cpu_s:.0f} | {memory_gb:.2f} | {disk_gb:.2f} |".format(**results[-1]),
            flush=True,
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
