"""Where states live and how messages travel changes no bit of a run."""

from __future__ import annotations

import pytest
from tiny import Train, fingerprint

FEDERATED = [
    "partition=iid",
    "partition.clients=6",
    "method.routing=per_sample",
    "rounds=4",
    "log_every=1",
    "privacy.target_epsilon=null",
    "privacy.noise_multiplier=1.0",
]
CENTRAL = ["method.routing=per_sample", "rounds=4", "log_every=1"]


@pytest.mark.parametrize("kind", [FEDERATED, CENTRAL], ids=["federated", "central"])
def test_stores_and_serialization_are_equal_to_the_bit(train: Train, kind: list[str]) -> None:
    reference = fingerprint(train(*kind, name="reference"))
    for name, overrides in {
        "disk": ["runtime.store=disk"],
        "wire": ["runtime.grid.serialize=true"],
        "both": ["runtime.store=disk", "runtime.grid.serialize=true"],
    }.items():
        assert fingerprint(train(*kind, *overrides, name=name)) == reference


def test_another_seed_is_another_run(train: Train) -> None:
    first, second = (fingerprint(train("seed=0", name="0")), fingerprint(train("seed=1", name="1")))
    assert first["generator"] != second["generator"]
