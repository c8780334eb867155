"""Runs under one seed: different runs share no noise, equal runs share all streams."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from mutation import kills
from omegaconf import open_dict
from tiny import tiny

from fedgen import cli
from fedgen.config.compose import compose
from fedgen.errors import FedgenError
from fedgen.federation import checkpoint
from fedgen.run import setup as settings
from fedgen.run.clients import RunClientSetup
from fedgen.run.noise_domain import noise_domain
from fedgen.run.setup import Setup, setup
from fedgen.storage.io import read_json
from fedgen.storage.run_dir import RunDir

WORDS = ["method=dp_merf_small", *tiny("dp_merf_small")]


def ready(*more: str) -> Setup:
    return setup(compose("config", [*WORDS, *more]))


def streams_of(result: Setup) -> tuple[list[float], list[float], str]:
    """Return noise, secret and public streams of the server, and the domain of the clients."""
    place = result.streams.at("place")
    uniforms = [*place.secret_uniforms(2), torch.rand(1, generator=place.public()).item()]
    return place.noise_bits(2).tolist(), uniforms, result.domain


@pytest.mark.parametrize(
    "other",
    [
        "privacy.target_epsilon=3",
        "privacy.delta=1e-6",
        "rounds=4",
        "method.ema=0.5",
        "partition=iid",
        "held_out=100",  # other rows
        "corruption.fraction=1",
        "runtime.min_success=0.5",
        "seed=1",
    ],
)
def test_different_runs_share_no_streams(other: str) -> None:
    first, second = streams_of(ready()), streams_of(ready("runtime=in_process", other))
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert first[2] != second[2] or other == "seed=1"  # all streams follow from the seed as well


@kills(
    "fedgen/run/noise_domain.py", "domain_inputs.append(rounded_noise(noise_multiplier))", "pass"
)
def test_another_noise_multiplier_has_other_streams() -> None:
    """It is solved for, and may differ in another version."""
    config, held = ready().config, ready().dataset
    result = [noise_domain(config, held, [], noise) for noise in (1.0, 1.00001, 1.0 + 1e-12)]
    assert result[0] != result[1]
    assert result[0] == result[2], "what another machine's rounding does to it is none"


@kills(
    "fedgen/run/noise_domain.py",
    "    if is_extension(config.partition.type):",
    "    if False:",
)
def test_a_different_own_partition_has_other_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings do not describe it."""
    config, held = ready().config, ready().dataset
    monkeypatch.setenv("FEDGEN_EXTENSIONS", "json")  # which is there
    config.partition.type = "json.own"
    result = {noise_domain(config, held, [np.arange(rows)], 1.0) for rows in (3, 4)}
    assert len(result) == 2


@kills(
    "fedgen/run/noise_domain.py",
    "    if noise != rounded_noise(noise_multiplier):",
    "    if False:",
)
def test_a_deployment_shares_no_noise_at_another_scale(tmp_path: Path) -> None:
    """With a rehearsal at another noise multiplier, both would reveal the records."""
    run = tmp_path / "run"
    assert cli.run(["train", *WORDS, "rounds=1", f"run_dir={run}"]) == 0
    again = compose("config", [*WORDS, "rounds=1"])
    with open_dict(again):
        del again.runtime.serialize
        own = {"type": "deployed", "superlink": "a:1", "ca": "x", "rehearses": str(run)}
        again.runtime.update(own)
    assert setup(again).domain == read_json(run / "run.json")["branch"]
    again.privacy.target_epsilon = 3
    with pytest.raises(FedgenError, match=r"runtime.rehearses: .* has noise multiplier"):
        setup(again)


@kills(
    "fedgen/run/clients.py",
    '        check_same_data(ready, run_dir, identity, "run_dir")',
    "        pass",
)
@pytest.mark.parametrize(
    ("what", "message"),
    [("data", "trained on different data"), ("shards", "used a different partition")],
)
def test_other_processes_have_the_same_records(what: str, message: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*WORDS, "partition=iid", "partition.clients=3", "rounds=1", "runtime=in_process"]
    assert cli.run(["train", *words, f"run_dir={run}"]) == 0
    assert RunClientSetup(str(run))().shard(0)
    file = run / "run.json"
    file.write_text(json.dumps({**read_json(file), what: "of others"}))
    with pytest.raises(FedgenError, match=message):
        RunClientSetup(str(run))()


@kills("fedgen/run/noise_domain.py", "domain_inputs.append(held.classes)", "pass")
def test_another_number_of_labels_has_other_streams() -> None:
    """At client level the noise may depend on it, and records do not reveal a label without
    images."""
    config, held = ready().config, ready().dataset
    result = {
        noise_domain(config, replace(held, classes=classes), [], 1.0) for classes in (10, 11, 12)
    }
    assert len(result) == 3


@pytest.mark.parametrize(
    "other",
    ["log_every=1", "runtime.checkpoint_every=3", "evaluation=quick", "runtime=flower"],
)
def test_runs_with_the_same_messages_share_all_streams(other: str) -> None:
    assert streams_of(ready()) == streams_of(ready(other))


def test_public_streams_do_not_depend_on_records_if_noise_is_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secure = ["privacy.noise=secure", "evaluation=none"]
    first = ready(*secure)
    inverted = replace(first.dataset, images=255 - first.dataset.images)
    monkeypatch.setattr(settings, "dataset", lambda config: inverted)
    second = ready(*secure)
    assert not np.array_equal(first.dataset.images, second.dataset.images)
    assert first.domain == "" == second.domain
    assert streams_of(first)[1][-1] == streams_of(second)[1][-1]
    assert streams_of(first)[0] != streams_of(second)[0]


@kills(
    "fedgen/run/setup.py",
    ("noise_domain(\n            config, held, shards, resolved.noise\n        )"),
    '""',
)
def test_no_two_scales_of_one_noise(tmp_path: Path) -> None:
    """The sum without noise is not on the line through the releases of two runs at different ε."""

    def embedding(*words: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        place = tmp_path / "-".join(words).replace("=", "-")
        assert cli.run(["train", *WORDS, *words, "rounds=1", f"run_dir={place}"]) == 0
        result = checkpoint.load(RunDir(place).checkpoints)
        assert result is not None
        return result[0].server["embedding"].double().numpy().ravel()

    bare = embedding("privacy=none")
    one, ten = (embedding(f"privacy.target_epsilon={each}") for each in (1, 10))
    along = ten - one
    on_the_line = ten + along * ((bare - ten) @ along / (along @ along))
    assert np.linalg.norm(on_the_line - bare) > 0.5 * np.linalg.norm(ten - bare)
