"""Bytes that reach an adversary: what private records change besides the noised numbers.

With noise so large that one record changes no released integer, neighbours release the same
numbers. All that is sent and published must then be the same to the byte: signs of zeros, types,
shapes, texts, names of arrays and their order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from flwr.common.serde import recorddict_to_proto
from mutation import kills
from sklearn.datasets import load_digits
from tiny import CASES, PARTITIONS, PROGRAMS, rounds_override, tiny, trusting

from fedgen import cli
from fedgen.config.compose import compose
from fedgen.federation import messages
from fedgen.federation.runtimes.in_process import InProcessGrid
from fedgen.privacy import aggregation as releases
from fedgen.privacy.aggregation import Local
from fedgen.randomness import RandomStreams
from fedgen.run import setup as settings
from fedgen.run.setup import Setup, setup

HIGH_NOISE = 1e9
"""The largest noise multiplier. One record changes a released integer of d with probability below
2 sqrt(d) / HIGH_NOISE (the seed is fixed): 3e-7 for the largest release here."""

TRIALS = 6

SECURE = [
    *("partition=iid", "partition.clients=4", "privacy.adversary=server"),
    *("privacy.aggregation=secure", "privacy.threshold=4", "privacy.colluders=1"),
    *("method.cohort_size=4", "method.sampled_by=clients"),
]


@pytest.fixture(autouse=True)
def _same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give neighbours the same noise: otherwise it depends on the data of a run, and that of a
    trusted aggregator on the responses."""
    monkeypatch.setattr(releases, "_GRID_BITS", 0)  # many zeros, whose sign would tell
    monkeypatch.setattr(RandomStreams, "salted", lambda streams, salt: streams)
    monkeypatch.setattr(settings, "noise_domain", lambda *_: "")


def to_bytes(content: RecordDict) -> bytes:
    return recorddict_to_proto(content).SerializeToString(deterministic=True)


def at_high_noise(method: str, words: list[str]) -> Setup:
    own = [] if method == "fedavg_gan" else ["method.sampled_by=server"]
    words = tiny(method, *words, *(own if words else []), *rounds_override(method, 4))
    return setup(compose("audit", [f"method={method}", *words, "audit.canaries=0"]))


def replies(ready: Setup) -> Iterator[tuple[bytes, bytes]]:
    """Return the responses of two neighbours, or the sum of an aggregator that clients trust."""
    method = ready.at_noise(HIGH_NOISE)
    for worst in method.worst_cases():
        for trial in range(TRIALS):
            both = []
            for state, shard in (worst.first, worst.second):
                streams = RandomStreams.from_seed(trial, "seeded")
                sent = method.client.respond(state, worst.query, shard, worst.round, streams)
                aggregation = (worst.plan or method.plan).aggregation
                if isinstance(aggregation, Local | releases.Secure):
                    answer = messages.response_from(sent, aggregation)
                    both.append(to_bytes(messages.pack_response(answer)))
                else:
                    total = method.aggregate([sent.arrays["answer"]], worst.round, streams)
                    both.append(total.numpy().tobytes())
            yield both[0], both[1]


@kills(
    "fedgen/privacy/aggregation.py",
    "    return rounded.mul_(grid).to(torch.float32)",
    (
        "    signs = exact.to(torch.float64)\n"
        "    return torch.copysign(rounded.abs() * grid, torch.where(rounded == 0, "
        "signs, rounded)).to(torch.float32)"
    ),
    case="gs_wgan_small-own",
)
@pytest.mark.parametrize("aggregation", ["own", "secure"])
@pytest.mark.parametrize("method", PROGRAMS)
def test_neighbours_send_the_same_bytes(method: str, aggregation: str) -> None:
    pairs = list(replies(at_high_noise(method, SECURE if aggregation == "secure" else [])))
    assert len(pairs) >= TRIALS
    assert sum(first != second for first, second in pairs) == 0


@pytest.mark.parametrize("method", ["dpgan_small", "psg_small", "mixture_small"])
def test_whole_clients_send_the_same_bytes(method: str) -> None:
    pairs = list(replies(at_high_noise(method, [*SECURE[:2], "privacy.unit=client"])))
    assert sum(first != second for first, second in pairs) == 0


@pytest.fixture
def neighbours(tmp_path: Path) -> list[Path]:
    """Write two folders with a ``digits.npz`` each, which differ in one image and its label."""
    images, labels = load_digits(return_X_y=True)
    images = (images[:60].reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
    labels = labels[:60].astype(np.uint8)
    folders = []
    for name in ("a", "b"):
        if name == "b":
            images[7], labels[7] = 255 - images[7], (labels[7] + 5) % 10
        folder = tmp_path / name
        folder.mkdir()
        rows = {"train_images": images, "train_labels": labels}
        test = {"test_images": images[:10], "test_labels": np.arange(10, dtype=np.uint8)}
        np.savez(folder / "digits.npz", **rows, **test)
        folders.append(folder)
    return folders


@pytest.mark.parametrize(("method", "clients"), CASES)
def test_a_run_sends_and_publishes_the_same_bytes(
    neighbours: list[Path], method: str, clients: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    handle = InProcessGrid._handle

    def recorded(grid: InProcessGrid, message: Message) -> Message:
        reply = handle(grid, message)
        sent.append(b"error" if reply.has_error() else to_bytes(reply.content))
        return reply

    monkeypatch.setattr(InProcessGrid, "_handle", recorded)
    seen = []
    for folder in neighbours:
        monkeypatch.chdir(folder)
        sent.clear()
        words = [*tiny(method), *PARTITIONS[clients], *rounds_override(method, 2), "data=folder"]
        data = ["data.path=digits.npz", "data.classes=10", "data.public_rows=60"]
        noise = ["privacy.target_epsilon=null", f"privacy.noise_multiplier={HIGH_NOISE:g}"]
        own = ["privacy.adversary=release"] if trusting(method) else []
        run = folder / "run"
        line = ["train", f"method={method}", *words, *data, *noise, *own, f"run_dir={run}"]
        assert cli.run(line) == 0
        public = {file.name: file.read_bytes() for file in (run / "public").iterdir()}
        seen.append((list(sent), public))
    (first, published), (second, other) = seen
    assert len(first) == len(second) >= 2
    if not trusting(method):  # against whom there is no bound
        assert first == second
    assert published == other
