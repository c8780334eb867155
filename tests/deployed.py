"""A deployment on this machine: a link, and nodes with their own images, keys and folders, each a
process."""

from __future__ import annotations

import json
import socket
import ssl
import time
import urllib.request
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from forked import Command

from fedgen import cli
from fedgen.config.compose import compose
from fedgen.run import setup

POLICY = {
    "epsilon": 5.01,
    "delta": 1e-5,
    "aggregations": ["local", "secure"],
    "rehearsal": True,
    "budget_epsilon": None,
}


class Deployment:
    """A link and its nodes."""

    def __init__(self, place: Path, nodes: int) -> None:
        self.place, self.count = place, nodes
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.link: Command | None = None
        self.nodes: list[Command | None] = [None] * nodes
        self.ca = place / "link" / "ca.crt"
        self.doors = dict.fromkeys(range(nodes), (self.port, self.ca))  # where each knocks
        config = compose("config", ["data=digits", "partition=iid", f"partition.clients={nodes}"])
        rows, shards = setup.partitioned_data(config)
        for node, shard in enumerate(shards):
            np.savez(
                place / f"rows{node}.npz",
                train_images=rows.images[shard][:, 0],
                train_labels=rows.labels[shard],
                test_images=rows.test_images[:, 0],
                test_labels=rows.test_labels,
            )

    def start_link(self, *more: str) -> None:
        """Start the link, and wait until it responds."""
        words = [f"home={self.place / 'link'}", f"port={self.port}", "host=0.0.0.0", *more]
        self.link = Command(["link", *words])
        end = time.monotonic() + 180
        while True:
            with suppress(OSError):
                context = ssl.create_default_context(cafile=str(self.ca))
                url = f"https://127.0.0.1:{self.port}/health"
                urllib.request.urlopen(url, timeout=1, context=context).close()
                return
            assert self.link.poll() is None and time.monotonic() < end, self.link.errors
            time.sleep(0.05)

    def words(self, node: int) -> list[str]:
        """Return the settings with which a node is started."""
        port, ca = self.doors[node]
        return [
            f"number={node}",
            f"superlink=127.0.0.1:{port}",
            f"ca={ca}",
            f"key={self.key(node)}",
            f"home={self.home(node)}",
            f"policy={self.place / f'policy{node}.yaml'}",
            "data=folder",
            f"data.path={self.place / f'rows{node}.npz'}",
            "data.classes=10",
        ]

    def key(self, node: int) -> Path:
        """Return the private key file of a node."""
        return self.place / f"node{node}.key"

    def home(self, node: int) -> Path:
        """Return the folder of a node."""
        return self.place / f"home{node}"

    def allow(self, node: int, **policy: Any) -> None:
        """Write the policy of a node."""
        (self.place / f"policy{node}.yaml").write_text(yaml.safe_dump({**POLICY, **policy}))

    def start_node(self, node: int) -> None:
        """Start a node, which connects when it can."""
        self.nodes[node] = Command(["node", *self.words(node)])

    def accept(self, node: int) -> None:
        """Create the key of a node, and accept it at the link."""
        assert cli.run(["node", f"key={self.key(node)}", f"home={self.home(node)}"]) == 0
        here = f"home={self.place / 'link'}", f"port={self.port}"
        assert cli.run(["link", *here, f"accept={self.key(node)}.pub"]) == 0

    def asked(self, *words: str) -> list[str]:
        """Run a command of the coordinator."""
        return [
            "train",
            "data=public_facts",
            "data.classes=10",
            "data.shape=[1,8,8]",
            "data.public_rows=1437",
            "partition=nodes",
            f"partition.clients={self.count}",
            "evaluation=none",
            "runtime=deployed",
            f"runtime.superlink=127.0.0.1:{self.port}",
            f"runtime.ca={self.ca}",
            *(word for word in words if word != "runtime=in_process"),
        ]

    def log(self, node: int) -> list[dict[str, Any]]:
        """Return the log of a node."""
        return [json.loads(each) for each in (self.home(node) / "log.jsonl").open()]

    def end(self) -> None:
        """Stop all processes."""
        for process in (*self.nodes, self.link):
            if process is not None:
                process.send_signal(9)
                process.wait(30)


@contextmanager
def deployment(
    place: Path,
    nodes: int,
    policies: Sequence[dict[str, Any]] = (),
    later: Collection[int] = (),
    link: Collection[str] = (),
) -> Iterator[Deployment]:
    """Run a deployment for the duration of the block. ``later``: nodes that are not started yet;
    ``link``: settings of the link."""
    here = Deployment(place, nodes)
    try:
        here.start_link(*link)
        for node in range(nodes):
            here.allow(node, **(policies[node] if policies else {}))
            here.accept(node)
            if node not in later:
                here.start_node(node)
        yield here
    finally:
        here.end()
