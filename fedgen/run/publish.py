"""Write the published folder and the results of a run, except utility metrics."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from omegaconf import OmegaConf

from fedgen.config.registry import extension_types
from fedgen.data.catalogue import data_label
from fedgen.federation.rounds import RoundFacts, RunState
from fedgen.methods.api import Tensors
from fedgen.reporting.figures import epsilon_against_rounds, sample_grid
from fedgen.reporting.model_card import card
from fedgen.reporting.privacy_statement import statement
from fedgen.reporting.registry_entry import facts
from fedgen.run.generator import describe, draw_samples
from fedgen.run.preflight import data_warnings
from fedgen.run.setup import Setup, published_names
from fedgen.storage.io import share, write_atomic
from fedgen.storage.run_dir import RunDir
from fedgen.version import VERSION


@dataclass
class Clock:
    """Seconds spent, including before a resume."""

    rounds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, facts: RoundFacts) -> None:
        """Count a round."""
        self.rounds += sum(facts.seconds.values())
        for name, seconds in facts.seconds.items():
            self.parts[name] = self.parts.get(name, 0.0) + seconds


def samples_per_label(ready: Setup, generator: Tensors) -> NDArray[np.uint8]:
    """Return ten samples per label, always from the same streams."""
    labels = torch.arange(ready.dataset.classes).repeat_interleave(10)
    return draw_samples(ready.method, generator, labels, ready.streams.at("samples", "grid"))


def publish(
    ready: Setup, run_dir: RunDir, generator: Tensors, record: dict[str, Any], words: str
) -> tuple[str, NDArray[np.uint8]]:
    """Write the folder ``public/``.

    Args:
        record: privacy record.
        words: text that describes how ε was computed.

    Returns:
        The digest of the file of the generator; ten samples per label.
    """
    grid, public = samples_per_label(ready, generator), run_dir.public
    sample_grid(grid, 10, public / "samples.png")
    for path in (public, public / "samples.png"):
        share(path)
    data = safetensors.torch.save({name: value.cpu() for name, value in generator.items()})
    write_atomic(public / "generator.safetensors", data, shared=True)
    sha256 = hashlib.sha256(data).hexdigest()
    write_atomic(public / "generator.json", describe(ready, sha256, record).encode(), shared=True)
    outside = extension_types(OmegaConf.to_container(ready.config, resolve=True))
    privacy_text = statement(
        record,
        words,
        picked=ready.config.group is not None,
        unselected=is_unselected(ready, record),
        outside=outside,
    )
    write_atomic(public / "PRIVACY.md", privacy_text.encode(), shared=True)
    shape, classes = ready.dataset.shape, ready.dataset.classes
    names = ready.config.names
    begun = [] if ready.config.warm_up.method is None else [str(names.warm_up)]
    methods = [str(names.method), *begun]
    readme = card(record, methods, shape, classes, published_names(ready))
    write_atomic(public / "README.md", readme.encode(), shared=True)
    return sha256, grid


def is_unselected(ready: Setup, record: Mapping[str, Any]) -> bool:
    """Return whether this is a run of ``fedgen tune`` that was not selected, or not yet: its ε does
    not cover a selection, so it has no signed account and cannot be released."""
    return ready.config.get("score") is not None and "selection" not in record


def registry_facts(
    ready: Setup, run_dir: RunDir, record: dict[str, Any], words: str
) -> dict[str, Any] | None:
    """Return the facts of the run by the keys of the registry; None without a bound.

    Args:
        words: text that describes how ε was computed.
    """
    if record["views"]["release"]["epsilon"] is None or record["noise"] == "none":
        return None
    dataset = ready.dataset
    generator = {
        "shape": dataset.shape,
        "classes": dataset.classes,
        "labels": published_names(ready),
        "method": {"type": ready.config.method.type},
    }
    environment = run_dir.identity().get("environment", {"fedgen": VERSION})
    return facts(record, generator, words, environment)


def epsilon_figure(run_dir: RunDir, delta: float) -> None:
    """Draw ε by rounds, proven and claimed, from the metrics."""
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


def build_results(
    ready: Setup,
    run_dir: RunDir,
    state: RunState,
    record: dict[str, Any],
    clock: Clock,
    peak: int,
    stopped: str | None,
) -> dict[str, Any]:
    """Return the results of a run and its cost.

    Args:
        record: privacy record.
        peak: peak memory in bytes.
        stopped: reason if it ended early.
    """
    clients, rounds = len(ready.shards), max(state.rounds, 1)
    up, down = sum(state.received.values()), sum(state.sent.values())
    return {
        "schema": 1,
        "method": ready.config.names.method,
        "data": data_label(ready.config),
        "labels": published_names(ready),
        "clients": clients,
        "rounds": state.rounds,
        "seed": ready.config.seed,
        "stopped": stopped,
        "epsilon": {name: view["epsilon"] for name, view in record["views"].items()},
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
        "data_warnings": data_warnings(ready),
        "sha256": run_dir.digests(),
    }
