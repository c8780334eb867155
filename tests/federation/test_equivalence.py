"""Results do not depend on storage, serialization and runtime, to the last bit."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from flwr.app import Message
from mutation import kills
from tiny import Train, fingerprint

from fedgen.federation import messages

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


STEPS = [
    "method=dpgan_small",
    "partition=iid",
    "partition.clients=3",
    "method.discriminator.width=2",
    "method.generator.width=4",
    "rounds=5",
    "log_every=1",
]
TWO_ACTORS = ["runtime=ray", "runtime.num_cpus=0.5", "runtime.actors=2"]
DELTAS = ["method=fedavg_gan", "rounds=4", "log_every=1"]


@pytest.mark.parametrize(
    "kind",
    [FEDERATED, CENTRAL, STEPS, DELTAS],
    ids=["federated", "central", "parameter updates", "model deltas"],
)
def test_results_with_stores_and_serialization_are_bit_identical(
    train: Train, kind: list[str]
) -> None:
    reference = fingerprint(train(*kind, name="reference"))
    for name, overrides in {
        "disk": ["runtime.store=disk"],
        "wire": ["runtime.serialize=true"],
        "both": ["runtime.store=disk", "runtime.serialize=true"],
    }.items():
        assert fingerprint(train(*kind, *overrides, name=name)) == reference


def test_another_seed_is_another_run(train: Train) -> None:
    first, second = (fingerprint(train("seed=0", name="0")), fingerprint(train("seed=1", name="1")))
    assert first["generator"] != second["generator"]


@pytest.mark.slow
def test_results_of_all_runtimes_are_bit_identical(train: Train, nothing_left: None) -> None:
    """In process, on Ray with one or two actors, in Flower's engine; no process is left."""
    reference = fingerprint(train(*FEDERATED, name="reference"))
    steps = fingerprint(train(*STEPS, name="steps"))
    assert fingerprint(train(*STEPS, "runtime=ray", "runtime.actors=1", name="on Ray")) == steps
    deltas = fingerprint(train(*DELTAS, name="deltas"))
    assert fingerprint(train(*DELTAS, "runtime=ray", "runtime.actors=2", name="Ray")) == deltas
    for name, overrides in {
        "two actors without a cache": [*TWO_ACTORS, "runtime.cache_gb=1e-6"],
        "flower": ["runtime=flower"],
    }.items():
        assert fingerprint(train(*FEDERATED, *overrides, name=name)) == reference, name


@pytest.mark.slow
def test_the_death_of_an_actor_changes_no_bit(train: Train) -> None:
    """Actors are killed during training and responses, and their messages repeated. Fault injection
    without faults changes nothing either."""
    settings = [*FEDERATED, "rounds=8"]
    reference = fingerprint(train(*settings, name="reference"))
    run = train(*settings, *TWO_ACTORS, "runtime.faults.dies=0.08", name="deaths")
    assert len(list(run.glob("clients/*/died.*"))) >= 2
    assert fingerprint(run) == reference
    assert not (run / "failures.jsonl").exists()


@pytest.mark.slow
def test_a_cluster_of_two_machines_is_joined(train: Train, nothing_left: None) -> None:
    """And continues to run after the run."""
    import ray
    from ray.cluster_utils import Cluster

    settings = ["partition=iid", "partition.clients=6", "rounds=6"]
    reference = fingerprint(train(*settings, name="reference"))
    machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        machines.add_node(num_cpus=1)
        joined = [*settings, "runtime=ray", f"runtime.address={machines.address}"]
        joined.append("runtime.num_cpus=0.5")
        assert fingerprint(train(*joined, name="joined")) == reference
        machines.connect()
        assert sum(node["Alive"] for node in ray.nodes()) == 2, "it runs on"
    finally:
        ray.shutdown()
        machines.shutdown()


SUMS = ["partition=iid", "partition.clients=6", "privacy.aggregation=secure", "rounds=4"]
OF_SUMS = {
    "gradients": ["method=dpgan_small", "method.discriminator.width=2", *SUMS],
    "matrices": ["method=dp_sinkhorn_small", *SUMS],
    "streams": [
        "method.routing=per_step",
        "method.responders=2",
        "method.sampled_by=clients",
        *SUMS,
    ],
}


@kills(
    "fedgen/federation/client/app.py",
    ("    if ctx.terms.masked_sums:\n        words"),
    ("    if not ctx.terms.masked_sums:\n        words"),
)
@pytest.mark.parametrize("kind", OF_SUMS.values(), ids=OF_SUMS)
def test_masked_sums_are_bit_identical_to_the_ideal_sum(train: Train, kind: list[str]) -> None:
    """The real protocol, and the ideal sum of a simulation."""
    reference = fingerprint(train(*kind, "log_every=1", name="ideal"))
    masked = fingerprint(train(*kind, "log_every=1", "runtime.masks=true", name="masked"))
    for run in (reference, masked):  # bytes differ: masks cost some
        del run["privacy"]["aggregation"]["masks"]
        trust = run["privacy"]["registry"]["deployment_model"].pop("trust_assumptions")
        assert ("sent under masks" in trust) == (run is masked)
        run["metrics"] = [
            {k: v for k, v in json.loads(line).items() if k != "bytes"}
            for line in run["metrics"].splitlines()
        ]
    assert masked == reference


@pytest.mark.slow
def test_sums_of_all_runtimes_are_bit_identical(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether responses are added in one process or in actors that may die, masked between actors,
    or sent separately by Flower's engine. Byte counts are those of separate messages."""
    kind, sent, arrived, count = OF_SUMS["gradients"], {}, Counter[str](), messages.count_bytes

    def counting(message: Message) -> int:
        arrived[name] += count(message) if message.metadata.reply_to_message_id else 0
        return count(message)

    monkeypatch.setattr(messages, "count_bytes", counting)
    name = "reference"
    reference = fingerprint(train(*kind, name="reference"))
    for name, overrides in {
        "alone": [],
        "two actors": [*TWO_ACTORS, "runtime.faults.dies=0.1"],
        "masks": [*TWO_ACTORS, "runtime.masks=true"],
        "flower": ["runtime=flower"],
    }.items():
        run = train(*kind, *overrides, name=name)
        sent[name] = json.loads((run / "results.json").read_text())["bytes"]["up"]
        assert name != "two actors" or list(run.glob("clients/*/died.*"))
        result = fingerprint(run)
        assert result["generator"] == reference["generator"], name
        assert result["ledgers"] == reference["ledgers"], name
    assert arrived["alone"] < arrived["flower"] / 4  # one sum of six responses
    assert arrived["two actors"] < arrived["flower"] / 2  # two sums of three
    assert sent["two actors"] == sent["alone"] == sent["flower"]
