"""Milliseconds per round of the same app with fedgen's nodes and with Flower's SuperNodes, in one
run on this machine: TLS, keys, a database, one process per site.

    python scripts/bench_deployment.py [--nodes 1 10] [--rounds 20] [--stock-rounds 2]

A round is one exchange: DPGAN on digits, whose clients respond with noised gradient sums of 170 kB.
The coordinator measures both, from the query to the step of the generator.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from fedgen.config.compose import compose
from fedgen.deployment.flower_link import QUIET, Link
from fedgen.deployment.link import certificates
from fedgen.run import setup
from fedgen.storage.keys import load_or_create_key, read_public_key

ROOT, BIN = Path(__file__).resolve().parent.parent, Path(sys.executable).parent
METHOD = [
    "method=dpgan_small",
    "method.sampling_rate=0.0445",
    "privacy.noise_multiplier=1",
    "privacy.target_epsilon=null",
    "evaluation=none",
    "runtime.threads=1",
]


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Stop processes and their children at the end of the block."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        yield running
    finally:
        family = [psutil.Process(each.pid) for each in running if each.poll() is None]
        family += [child for each in family for child in each.children(recursive=True)]
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def started(
    command: list[str], place: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start a command in its own folder."""
    place.mkdir(parents=True, exist_ok=True)
    with (place / "out").open("w") as out:
        return subprocess.Popen(command, cwd=place, env=environment, stdout=out, stderr=out)


def until_up(port: int, ca: Path) -> None:
    """Wait for a SuperLink."""
    end = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError):
            context = ssl.create_default_context(cafile=str(ca))
            url = f"https://127.0.0.1:{port}/health"
            urllib.request.urlopen(url, timeout=1, context=context).close()
            return
        if time.monotonic() > end:
            sys.exit("the SuperLink did not start")
        time.sleep(0.1)


def per_round(run: Path) -> float:
    """Return milliseconds per round."""
    found = json.loads((run / "results.json").read_text())
    return 1000 * sum(found["seconds_per_round"].values())


def of_fedgen(nodes: int, rounds: int, place: Path, environment: dict[str, str]) -> float:
    """Measure fedgen's nodes."""
    words = ["data=digits", "partition=iid", f"partition.clients={nodes}"]
    rows, shards = setup.partitioned_data(compose("config", words))
    port, link, fedgen = free_port(), place / "link", str(BIN / "fedgen")
    place.mkdir()
    (place / "policy.yaml").write_text(
        "epsilon: 1.0e+6\ndelta: 1.0e-5\naggregations: [local]\nrehearsal: true\n"
    )
    with processes() as running:
        words = ["link", f"home={link}", f"port={port}", "host=127.0.0.1"]
        running.append(started([fedgen, *words], place / "l", environment))
        until_up(port, link / "ca.crt")
        here = Link(f"127.0.0.1:{port}", (link / "ca.crt").read_bytes())
        for node, shard in enumerate(shards):
            home = place / f"n{node}"
            load_or_create_key(home / "key")
            here.register(read_public_key(home / "key.pub"), f"n{node}")
            np.savez(
                home / "rows.npz",
                train_images=rows.images[shard][:, 0],
                train_labels=rows.labels[shard],
                test_images=rows.test_images[:, 0],
                test_labels=rows.test_labels,
            )
            words = [f"number={node}", f"superlink=127.0.0.1:{port}", f"ca={link / 'ca.crt'}"]
            words += [f"key={home / 'key'}", f"home={home}", f"policy={place / 'policy.yaml'}"]
            words += ["data=folder", f"data.path={home / 'rows.npz'}", "data.classes=10"]
            running.append(started([fedgen, "node", *words], home, environment))
        words = ["data=public_facts", "data.classes=10", "data.shape=[1,8,8]", "partition=nodes"]
        words += [f"partition.clients={nodes}", "runtime=deployed", f"rounds={rounds}"]
        words += [f"runtime.superlink=127.0.0.1:{port}", f"runtime.ca={link / 'ca.crt'}"]
        run = place / "run"
        done = started([fedgen, "train", *METHOD, *words, f"run_dir={run}"], place, environment)
        running.append(done)
        if done.wait() != 0:
            sys.exit((place / "out").read_text())
    return per_round(run)


def of_flower(nodes: int, rounds: int, place: Path, environment: dict[str, str]) -> float:
    """Measure Flower's SuperNodes, which start a process for each message."""
    port, link = free_port(), place / "link"
    certificates(link, ["localhost", "127.0.0.1"], 1)
    ca, run = link / "ca.crt", place / "run"
    home = place / "operator"
    home.mkdir(parents=True)
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "tls"\n\n[superlink.tls]\n'
        f'address = "127.0.0.1:{port}"\nroot-certificates = "{ca}"\n'
    )
    environment = {**environment, "FLWR_HOME": str(home)}
    with processes() as running:
        command = [str(BIN / "flower-superlink"), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--ssl-ca-certfile", str(ca), "--ssl-certfile", str(link / "server.crt")]
        command += ["--ssl-keyfile", str(link / "server.key"), "--enable-supernode-auth"]
        command += ["--database", str(place / "state.db")]
        running.append(started(command, place / "l", environment))
        until_up(port, ca)
        here = Link(f"127.0.0.1:{port}", ca.read_bytes())
        for node in range(nodes):
            load_or_create_key(place / f"n{node}" / "key")
            here.register(read_public_key(place / f"n{node}" / "key.pub"), f"n{node}")
            command = [str(BIN / "flower-supernode"), "--root-certificates", str(ca)]
            command += ["--superlink", f"127.0.0.1:{port}", "--host", "127.0.0.1"]
            command += ["--port", str(free_port()), "--auth-supernode-private-key"]
            command += [str(place / f"n{node}" / "key"), "--node-config"]
            command += [f"partition-id={node} num-partitions={nodes}"]
            running.append(started(command, place / f"n{node}", environment))
        words = [*METHOD, "data=digits", "partition=iid", f"partition.clients={nodes}"]
        words = [*words, f"rounds={rounds}", f"run_dir={run}"]
        flwr = [str(BIN / "flwr"), "run", str(ROOT), "tls", "--stream"]
        flwr += ["-c", f'overrides="{" ".join(words)}"']
        subprocess.run(flwr, env=environment, cwd=place, check=False, capture_output=True)
        end = time.monotonic() + 1200
        while not (run / "results.json").exists():
            if time.monotonic() > end:
                sys.exit(f"Flower's SuperNodes did not end {rounds} rounds in 20 minutes")
            time.sleep(0.5)
    return per_round(run)


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--nodes", type=int, nargs="+", default=[1, 10])
    arguments.add_argument("--rounds", type=int, default=20)
    arguments.add_argument(
        "--stock-rounds", type=int, default=2, help="of stock Flower; 0 skips it"
    )
    chosen = arguments.parse_args()
    path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, **QUIET, "PATH": path}
    print("| nodes | fedgen node | Flower's SuperNode | ratio |\n|---|---|---|---|", flush=True)
    for nodes in chosen.nodes:
        with tempfile.TemporaryDirectory() as place:
            environment["FEDGEN_HOME"] = place
            ours = of_fedgen(nodes, chosen.rounds, Path(place, "ours"), environment)
            theirs = math.nan
            if chosen.stock_rounds:
                theirs = of_flower(nodes, chosen.stock_rounds, Path(place, "theirs"), environment)
        print(f"| {nodes} | {ours:,.0f} ms | {theirs:,.0f} ms | {theirs / ours:.0f} |", flush=True)


if __name__ == "__main__":
    main()
