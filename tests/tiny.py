"""The smallest settings that still run everything, and the fingerprint that equal runs share."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
import yaml
from hydra import initialize_config_module
from omegaconf import DictConfig, OmegaConf

import configs
from fedgen.data.digits import digits
from fedgen.methods.api import Method, PublicFacts
from fedgen.methods.gs_wgan import gs_wgan
from fedgen.models import dcgan
from fedgen.privacy.gaussian_noise import rounded_gaussian
from fedgen.randomness import RandomStreams

Train = Callable[..., Path]

TINY = [
    "method.critics=4",
    "method.critics_per_step=2",
    "method.critic.width=2",
    "method.generator.width=4",
    "method.batch=8",
    "method.critic_batch=4",
    "method.fakes_per_label=2",
    "method.critic_steps=2",
    "method.warm_start=1",
    "rounds=3",
    "evaluation=none",
    "runtime=in_process",
    "runtime.threads=1",
    "logger=none",
]

_FOLDER = Path(configs.__path__[0]) / "method"
METHODS = sorted(p.stem for p in _FOLDER.glob("*.yaml"))


@cache
def _chosen(method: str) -> DictConfig:
    """Return the settings of a method, under ``method``: a tenth of the work of composing all
    settings."""
    with initialize_config_module("fedgen.configs", version_base="1.3"):
        return hydra.compose(f"method/{method}")


@cache
def _program(method: str) -> tuple[str, str | None]:
    """Return a method's function and its companion's, read without Hydra: for all methods, in each
    process."""
    own = yaml.load((_FOLDER / f"{method}.yaml").read_bytes(), yaml.CSafeLoader)
    above = [each for each in own.get("defaults", []) if f"{each}" in METHODS]
    target, companion = _program(above[0]) if above else ("", None)
    beside = own.get("companion") or {}
    return own.get("type", target), beside.get("type", companion)


PROGRAMS = list({_program(method): method for method in METHODS}.values())
"""One of the methods that share a program."""
PARTITIONS = {"one": ["partition=single"], "several": ["partition=iid", "partition.clients=4"]}


def trusting(method: str) -> bool:
    """Return whether clients trust the server: then there is no bound against it, and no run with
    one client."""
    return _program(method)[0] == "fedavg_gan"


CASES = [
    (method, clients)
    for method in PROGRAMS
    for clients in PARTITIONS
    if clients == "several" or not trusting(method)
]
"""Methods with the partitions that they run on."""


def adversary(method: str) -> str:
    """Return the adversary of a method's budget."""
    return "release" if trusting(method) else "server"


OTHER_METHODS = [
    "method.discriminator.width=2",
    "method.discriminator_steps=2",
    "method.latent=4",
    "method.autoencoder.width=2",
    "method.autoencoder_steps=1",
    "method.companion.start_step=1",
    "method.private_classifier=ridge",
    "method.classifier_steps=2",
    "method.classifier_features=8",
    "method.classifier_samples=40",
    "method.components=6",
    "method.clusters=2",
    "method.companion.classifier.width=2",
    "method.cohort_size=2",
    "method.student.width=2",
    "method.classifier.width=4",
    "method.per_label=2",
    "method.outer=1",
    "method.batch_loop=1",
    "method.inner=1",
    "method.matches=1",
    "method.network.width=4",
    "method.network.attention=[]",
    "method.sampler.steps=2",
    "method.top_k=6",
    "method.copies=2",
    "method.network.blocks=1",
    "method.fakes=8",
]
_TRUSTING = [*PARTITIONS["several"], "privacy.adversary=release"]


_NO = object()
RATES = {
    **dict.fromkeys(("dpdm_small", "psg_small", "dp_merf_ae_small"), 0.1),
    **dict.fromkeys(("dpgan_small", "dp_wgan_gp_small"), 0.0445),
    **dict.fromkeys(("dpgan", "dp_wgan_gp", "dp_cgan", "psg", "dpdm", "dp_merf_ae"), 0.01),
}
"""Sampling rates at which tiny batches are of more than a record or two."""
_FIXED_ROUNDS = ("mixture", "central_images", "client_statistics")


def tiny(method: str, *more: str) -> list[str]:
    """Return ``TINY`` and more for any method, without settings that it lacks."""
    config = _chosen(method)
    own = _TRUSTING if trusting(method) else []
    if method in RATES:
        own = [*own, f"method.sampling_rate={RATES[method]}"]
    return [
        word
        for word in [*own, *TINY, *OTHER_METHODS, *more]
        if not word.startswith(("method.", "rounds="))
        or word in rounds_override(method, word.removeprefix("rounds="))
        or OmegaConf.select(config, word.split("=")[0], default=_NO) is not _NO
    ]


def rounds_override(method: str, number: int | str) -> list[str]:
    """Return an override for the rounds; none for methods with a fixed number of rounds."""
    return [] if _program(method)[0] in _FIXED_ROUNDS else [f"rounds={number}"]


SETTINGS: dict[str, Any] = {
    "generator": partial(dcgan.Generator, width=4),
    "critic": partial(dcgan.Critic, width=3),
    "latent": 4,
    "batch": 6,
    "fakes_per_label": 3,
    "generator_learning_rate": 1e-2,
    "generator_betas": (0.5, 0.9),
    "ema": 0.9,
    "critics": 5,
    "critics_per_step": 2,
    "critic_schedule": "public",
    "critic_steps": 2,
    "critic_batch": 4,
    "critic_learning_rate": 1e-2,
    "critic_betas": (0.5, 0.9),
    "gradient_penalty": 10.0,
    "drift_penalty": 1e-3,
    "warm_start": 2,
    "clip": 1.0,
    "sanitize": "samples",
    "routing": "per_sample",
    "responders": 1,
    "cohort_sampling": "fixed",
    "sampled_by": "server",
    "companion": None,
    "device": "cpu",
}
STREAMS = RandomStreams.from_seed(7, "seeded")
SHARD = digits(STREAMS).shard(np.arange(60))


def make(
    clients: int = 1,
    noise: float | None = None,
    *,
    requires_all: bool = True,
    unanswered: bool = False,
    **changed: Any,
) -> Method:
    known = {"requires_all": requires_all, "had_dropout": unanswered}
    facts = PublicFacts(clients, 60 if clients == 1 else None, 10, (1, 8, 8), **known)
    return gs_wgan(facts, noise, **{**SETTINGS, **changed})


def noised(exact: torch.Tensor, std: float, streams: RandomStreams) -> torch.Tensor:
    """Add noise as a mechanism does."""
    grid = 2.0 ** (math.floor(math.log2(std)) - 10)
    return (rounded_gaussian(exact.double() / grid, std / grid, streams, "release") * grid).float()


def fingerprint(run: Path) -> dict[str, Any]:
    """Return what two equal runs must share: weights, spend, metrics."""
    ledgers = {
        p.parent.name: [line.split(', "seal"')[0] for line in p.read_text().splitlines()[1:]]
        for p in sorted(run.glob("clients/*/ledger.jsonl"))  # names of runs are in head and seals
    }
    privacy = json.loads((run / "privacy.json").read_text())
    return {
        "generator": json.loads((run / "results.json").read_text())["generator_sha256"],
        "ledgers": ledgers,
        "privacy": privacy,
        "metrics": (run / "metrics.jsonl").read_text(),
    }
