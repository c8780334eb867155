"""What a run leaves: what is published, and its results but for how useful samples are."""

from __future__ import annotations

import hashlib
import resource
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from omegaconf import OmegaConf

from fedgen import factories
from fedgen.experiments.generation import describe, draw_samples
from fedgen.experiments.settings import Setup, published_names
from fedgen.federation.rounds import RoundFacts, RunState
from fedgen.files import share, write_whole
from fedgen.method import Tensors
from fedgen.reporting.figures import epsilon_against_rounds, sample_grid
from fedgen.reporting.run_dir import RunDir
from fedgen.reporting.words import card, statement


@dataclass
class Clock:
    """Seconds spent, also before a resume."""

    rounds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, facts: RoundFacts) -> None:
        """Counts a round."""
        self.rounds += sum(facts.seconds.values())
        for name, seconds in facts.seconds.items():
            self.parts[name] = self.parts.get(name, 0.0) + seconds


def ten_of_each(ready: Setup, generator: Tensors) -> NDArray[np.uint8]:
    """Ten samples of each label, by the same coins each time."""
    labels = torch.arange(ready.dataset.classes).repeat_interleave(10)
    return draw_samples(ready.method, generator, labels, ready.coins.at("samples", "grid"))


def publish(
    ready: Setup, run_dir: RunDir, generator: Tensors, record: dict[str, Any], words: str
) -> tuple[str, NDArray[np.uint8]]:
    """Writes the folder ``public/``.

    Args:
        record: of privacy. words: how epsilon was counted.

    Returns:
        The digest of the generator's file; ten samples of each label.
    """
    grid, public = ten_of_each(ready, generator), run_dir.public
    sample_grid(grid, 10, public / "samples.png")
    for each in (public, public / "samples.png"):
        share(each)
    data = safetensors.torch.save({name: value.cpu() for name, value in generator.items()})
    write_whole(public / "generator.safetensors", data, shared=True)
    sha256 = hashlib.sha256(data).hexdigest()
    write_whole(public / "generator.json", describe(ready, sha256, record).encode(), shared=True)
    outside = factories.outside(OmegaConf.to_container(ready.config, resolve=True))
    said = statement(record, words, ready.config.group is not None, outside)
    write_whole(public / "PRIVACY.md", said.encode(), shared=True)
    shape, classes = ready.dataset.shape, ready.dataset.classes
    names = ready.config.names
    begun = [] if ready.config.warm_up.method is None else [str(names.warm_up)]
    methods = [str(names.method), *begun]
    told = card(record, methods, shape, classes, published_names(ready))
    write_whole(public / "README.md", told.encode(), shared=True)
    return sha256, grid


def epsilon_figure(run_dir: RunDir, delta: float) -> None:
    """Epsilon by rounds, proven and claimed, of the metrics."""
    lines = [line for line in run_dir.metrics() if "epsilon" in line]
    epsilon_against_rounds(
        [line["round"] for line in lines],
        {
            "server (proven)": [line["epsilon"]["server"] for line in lines],
            "release (proven)": [line["epsilon"]["release"] for line in lines],
            "claimed by the paper's formula": [line["claimed_epsilon"] for line in lines],
        },
        delta,
        run_dir.path / "epsilon.png",
    )


def results_of(
    ready: Setup,
    run_dir: RunDir,
    state: RunState,
    record: dict[str, Any],
    clock: Clock,
    peak: int,
    stopped: str | None,
) -> dict[str, Any]:
    """What a run came to, and cost.

    Args:
        record: of privacy. peak: bytes of memory that were seen in use. stopped: why before its
            last round.
    """
    clients, rounds = len(ready.shards), max(state.rounds, 1)
    up, down = sum(state.received.values()), sum(state.sent.values())
    return {
        "schema": 1,
        "method": ready.config.names.method,
        "data": ready.config.names.data,
        "labels": published_names(ready),
        "clients": clients,
        "rounds": state.rounds,
        "seed": ready.config.seed,
        "stopped": stopped,
        "epsilon": {name: found["epsilon"] for name, found in record["views"].items()},
        "without_bound": len(record["without_bound"]),
        "bytes": {
            "up": up,
            "down": down,
            "per_round": (up + down) / rounds,
            "per_round_and_client": (up + down) / rounds / clients,
            "per_client": {
                str(client): {"up": state.received[client], "down": state.sent[client]}
                for client in range(clients)
            },
        },
        "seconds": clock.rounds,
        "rounds_per_second": state.rounds / clock.rounds if clock.rounds else None,
        "seconds_per_round": {n: s / rounds for n, s in clock.parts.items()},
        "failures": dict(sorted(state.failures.items())),
        "peak_rss_bytes": max(peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        "sha256": run_dir.digests(),
    }
