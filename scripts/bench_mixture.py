"""Time the sums of a mixture per 1,000 records, next to scikit-learn's PCA and Gaussian mixture.

    python scripts/bench_mixture.py [--records 10000] [--repeats 3] [--threads 1] [KEY=VALUE ...]

``fedgen train method=mixture`` at the size of MNIST, on random images, one client: each query is
timed as its client computes it, clipped and with noise. scikit-learn fits, without privacy, a PCA
of 160 components and a Gaussian mixture with diagonal covariances of four components per label to
the same images. The two alternate; the ratio is the median over the repeats. Print a table and one
line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.mixture import GaussianMixture
from threadpoolctl import threadpool_limits

from fedgen.config.compose import compose
from fedgen.run.setup import Setup, setup

SIDE, LABELS = 28, 10
_SHOWN = 5  # queries, those that take longest


def random_setup(folder: Path, records: int, overrides: list[str]) -> Setup:
    """Return a run of the mixture on smooth random images."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (records, 7, 7), dtype=np.uint8)
    images = coarse.repeat(SIDE // 7, 1).repeat(SIDE // 7, 2)
    labels = np.arange(records) % LABELS
    test = {"test_images": images[:100], "test_labels": labels[:100]}
    np.savez(folder / "data.npz", train_images=images, train_labels=labels, **test)
    data = [f"data.path={folder / 'data.npz'}", f"data.classes={LABELS}"]
    data += [f"data.public_rows={records}"]
    return setup(compose("config", ["method=mixture", "data=folder", *data, *overrides]))


def client_seconds(ready: Setup) -> list[float]:
    """Return the seconds of the client for each query, in order."""
    method, streams, seconds = ready.method, ready.streams, []
    shard = ready.dataset.shard(ready.shards[0])
    state = method.server.init(streams)
    for round_ in range(ready.config.rounds):
        query = method.server.query(state, round_, streams)
        if query is None:
            state = method.server.server_step(state, round_, streams)
            continue
        start = time.perf_counter()
        response = method.client.respond({}, query, shard, round_, streams)
        seconds.append(time.perf_counter() - start)
        mean = method.aggregate([response.arrays["answer"]], round_, streams).float()
        state = method.server.update(state, mean, round_, streams)
    return seconds


def peer_seconds(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> float:
    """Return the seconds of scikit-learn."""
    start = time.perf_counter()
    rows = images.reshape(len(images), -1).astype(np.float32) / 255
    components = PCA(min(160, len(rows)), random_state=0).fit_transform(rows)
    for label in range(LABELS):
        mixture = GaussianMixture(4, covariance_type="diag", random_state=0, reg_covar=1e-3)
        mixture.fit(components[labels == label])
    return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of fedgen and of scikit-learn")
    options, overrides = parser.parse_known_args()
    overrides = [*overrides, f"runtime.threads={options.threads}"]
    with tempfile.TemporaryDirectory() as folder:
        ready = random_setup(Path(folder), options.records, overrides)
    dataset, turns, peers = ready.dataset, [], []
    for _ in range(options.repeats):
        turns.append(client_seconds(ready))
        with threadpool_limits(options.threads):
            peers.append(peer_seconds(dataset.images, dataset.labels))
    thousands = options.records / 1000
    queries = [statistics.median(turn) * 1e3 / thousands for turn in zip(*turns, strict=True)]
    total = statistics.median(sum(turn) for turn in turns) * 1e3 / thousands
    peer = statistics.median(peers) * 1e3 / thousands
    ratio = statistics.median(
        sum(turn) / reference for turn, reference in zip(turns, peers, strict=True)
    )
    for number in sorted(range(len(queries)), key=lambda number: -queries[number])[:_SHOWN]:
        print(f"query {number + 1:<10}{queries[number]:9.1f} ms per 1,000 records")
    print(f"all queries     {total:9.1f} ms per 1,000 records  {ratio:6.2f} x scikit-learn")
    print(f"scikit-learn    {peer:9.1f} ms per 1,000 records    1.00 x scikit-learn")
    summary = {"queries_ms": queries, "total_ms": total, "peer_ms": peer, "over_peer": ratio}
    print(json.dumps({**vars(options), **summary}))


if __name__ == "__main__":
    main()
