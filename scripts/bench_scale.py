"""Cost of a round by number of clients, on Ray, on this machine.

    python scripts/bench_scale.py [--clients 100 400 1600 3400] [--rounds 50] [KEY=VALUE ...]

``fedgen train experiment=scale_3400`` for each number of clients: GS-WGAN, where every client has a
critic and an optimizer, and 32 query samples a round go to as many clients (fewer if some are
sampled twice), which train before they respond. The cost of a round must not grow with the clients
outside of it. Start-up is everything except rounds: cluster, data, ε, results. Memory is that of
all processes. Print a table, and a line of JSON.
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

_EVERY_SECONDS = 3.0


def bytes_under(place: Path) -> int:
    """Return the size of all files in a folder."""
    found = 0
    for file in place.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found += file.stat().st_size if file.is_file() else 0
    return found


def measured(clients: int, rounds: int, settings: list[str]) -> dict[str, Any]:
    """Run one experiment in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "run")
        words = ["experiment=scale_3400", f"partition.clients={clients}", f"rounds={rounds}"]
        words += [*settings, f"run_dir={place}"]
        begin = time.perf_counter()
        command = [sys.executable, "-P", "-m", "fedgen.cli", "train", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with Path(folder, "log").open("w+") as log:
            run = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            disk = 0
            while run.poll() is None:  # critics are gone when it ends
                disk = max(disk, bytes_under(place))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(_EVERY_SECONDS)
            whole = time.perf_counter() - begin
            if run.returncode:
                log.seek(0)
                sys.exit(f"{clients} clients: {log.read().strip()}")
        results = json.loads((place / "results.json").read_text())
    return {
        "clients": clients,
        "rounds_per_second": results["rounds_per_second"],
        "ms_per_round": 1000 / results["rounds_per_second"],
        "bytes_per_round": results["bytes"]["per_round"],
        "start_up_s": whole - results["seconds"],
        "memory_gb": results["peak_rss_bytes"] / 1e9,
        "disk_gb": disk / 1e9,
        "epsilon": results["epsilon"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What a round costs as clients grow in number.")
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 400, 1600, 3400])
    parser.add_argument("--rounds", type=int, default=50)
    options, settings = parser.parse_known_args()
    print("| clients | rounds/s | ms a round | start-up, s | memory, GB | disk, GB |")
    print("|---|---|---|---|---|---|")
    found = []
    for clients in options.clients:
        found.append(measured(clients, options.rounds, settings))
        print(
            "| {clients} | {rounds_per_second:.2f} | {ms_per_round:.0f} | {start_up_s:.0f} "
            "| {memory_gb:.2f} | {disk_gb:.2f} |".format(**found[-1]),
            flush=True,
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
