"""A Ray cluster of several machines (nodes): one leaves, one joins, the head dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import Train, tiny

from fedgen.federation.runtimes.ray_cluster import silence_ray

pytestmark = pytest.mark.skipif(
    "FEDGEN_RAY_NODES" not in os.environ, reason="takes minutes and several nodes: by hand"
)

SETTINGS = ["method=gs_wgan_small", "partition=iid", "partition.clients=6", "rounds=150"]
SETTINGS += ["log_every=1", "sample_every=150", "runtime.checkpoint_every=5"]
STORE = 200 * 2**20


@pytest.fixture
def nodes(nothing_left: None) -> Iterator[tuple[Any, list[Any]]]:
    """Start a cluster: a head without cores, and three nodes of one core."""
    silence_ray()
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    result = [cluster.add_node(num_cpus=1, object_store_memory=STORE) for _ in range(3)]
    cluster.wait_for_nodes()
    yield cluster, result
    cluster.shutdown()


def started(place: Path, address: str, *more: str) -> subprocess.Popen[bytes]:
    words = [*tiny("gs_wgan_small"), *SETTINGS, "runtime=ray", f"runtime.address={address}"]
    command = [sys.executable, "-m", "fedgen.cli", "train", *words, *more, f"run_dir={place}"]
    out = place.with_suffix(".txt").open("wb")
    return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ))


def wait_for_round(run: subprocess.Popen[bytes], place: Path, number: int) -> None:
    end = time.monotonic() + 120
    while run.poll() is None and time.monotonic() < end:
        try:
            if len((place / "metrics.jsonl").read_text().splitlines()) >= number:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError(place.with_suffix(".txt").read_text())


@pytest.mark.slow
def test_one_node_leaves_and_one_joins(
    nodes: tuple[Any, list[Any]], train: Train, tmp_path: Path
) -> None:
    """The generator is that of an in-process run."""
    cluster, result = nodes
    place = tmp_path / "on-ray"
    run = started(place, cluster.address)
    wait_for_round(run, place, 5)
    cluster.remove_node(result[1], allow_graceful=False)
    time.sleep(5)
    cluster.add_node(num_cpus=1, object_store_memory=STORE)
    assert run.wait(240) == 0, place.with_suffix(".txt").read_text()
    here = train(*SETTINGS, name="here")
    digests = {
        json.loads((each / "results.json").read_text())["generator_sha256"]
        for each in (place, here)
    }
    assert len(digests) == 1


@pytest.mark.slow
def test_clients_of_a_lost_node_move_to_other_nodes(
    nodes: tuple[Any, list[Any]], tmp_path: Path
) -> None:
    cluster, result = nodes
    place = tmp_path / "on-ray"
    run = started(place, cluster.address)
    wait_for_round(run, place, 5)
    for node in result[1:]:
        cluster.remove_node(node, allow_graceful=False)
    assert run.wait(240) == 0, place.with_suffix(".txt").read_text()


@pytest.mark.slow
def test_a_lost_cluster_ends_the_run_with_one_line(
    nodes: tuple[Any, list[Any]], tmp_path: Path
) -> None:
    cluster, _ = nodes
    place = tmp_path / "on-ray"
    run = started(place, cluster.address, "rounds=5000", "sample_every=5000")
    wait_for_round(run, place, 10)
    cluster.remove_node(cluster.head_node, allow_graceful=False)
    status = run.wait(150)
    result = place.with_suffix(".txt").read_text()
    assert status == 2, result
    assert (
        "runtime: the head node" in result.splitlines()[-1] and "resume=" in result.splitlines()[-1]
    )
    assert (place / "checkpoints" / "checkpoint.json").exists()
