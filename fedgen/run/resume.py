"""Identify the run in a run directory, and check that it resumes as the same run. The rounds resume
in ``Training`` (``train.py``), from the checkpoint that it loads."""

from __future__ import annotations

import ipaddress
import os
import platform
import secrets
import shlex
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from dp_accounting import NonPrivateDpEvent
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedgen.config import registry
from fedgen.config.compose import check_restored
from fedgen.config.device import resolve_device
from fedgen.config.schema import DEFAULT_FPR, RUNTIME_INVARIANT, target_of
from fedgen.data.catalogue import data_label
from fedgen.errors import FedgenError
from fedgen.federation import checkpoint
from fedgen.federation.client.context import LEDGER
from fedgen.federation.client.state_store import ClientStore
from fedgen.privacy.ledger import Ledger
from fedgen.privacy.spend_db import SpendDb
from fedgen.run.noise_domain import rounded_noise
from fedgen.run.setup import Setup, default_rounds
from fedgen.storage.folders import unused_folder
from fedgen.storage.io import digest
from fedgen.storage.run_dir import RunDir
from fedgen.version import VERSION

ENDED = "it was ended by request, and is accounted as if it had continued"
"""Value of ``stopped`` for a run that was ended by request before its planned rounds."""

_NO_LOGGER = {"type": "none"}


def open_run(path: Path, key: str) -> tuple[RunDir, DictConfig, dict[str, Any]]:
    """Open a run directory with its original settings and identity.

    Raises:
        FedgenError: if it is not valid; the message names the setting and the file.
    """
    run_dir, config, identity = RunDir.open(path, key)
    try:
        registry.check(OmegaConf.to_container(config, resolve=True), "")
        check_restored(config)
    except FedgenError as error:
        what = f"{error.key}: {error.problem}"
        problem = f"{path}/config.yaml was altered, or written by another version ({what})"
        extension_remedy = f"; {error.remedy}" if "FEDGEN_EXTENSIONS" in error.remedy else ""
        remedy = f"restore it, or use that version{extension_remedy}"
        raise FedgenError(key, problem, remedy) from error
    except OmegaConfBaseException as error:
        raise FedgenError(key, f"{path}/config.yaml was altered", "restore it") from error
    if config.privacy.get("images_per_person") is not None:
        problem = f"{path} has privacy.images_per_person of version 0.1.0, which counted persons "
        problem += "differently"
        raise FedgenError(key, problem, "use that version, or start a new run")
    check_unaltered(path, config, identity, key)
    rounds = identity.get("rounds", config.rounds)
    if type(rounds) is not int or rounds < config.rounds or type(identity["branch"]) is not str:
        raise FedgenError(key, f"{path}/run.json was altered", "restore it")
    if type(identity.get("environment", {})) is not dict:
        raise FedgenError(key, f"{path}/run.json was altered", "restore it")
    settings_before_derivation(path, config, identity, key)
    if config.get("resume") is not None:  # it would resume another run
        raise FedgenError(key, f"{path}/config.yaml was altered (resume)", "restore it")
    config.rounds = rounds
    # an untrusted run directory must not choose where metrics are sent
    config.logger, config.names.logger = _NO_LOGGER, "none"
    return run_dir, config, identity


def settings_before_derivation(
    path: Path, config: DictConfig, identity: dict[str, Any], key: str
) -> dict[str, None]:
    """Return the settings that were null before they were derived: rounds, and settings of the
    method.

    Raises:
        FedgenError: if those in ``run.json`` are not valid.
    """
    derived = identity.get("left_open", {})
    method_settings = {
        f"method.{n}" for n in config.method if not OmegaConf.is_config(config.method[n])
    }
    method_settings -= {"method.type", "method.strategy"}
    if not isinstance(derived, dict) or not all(
        (name == "rounds" and type(value) in (int, type(None)))
        or (name in method_settings and value is None)
        for name, value in derived.items()
    ):
        raise FedgenError(key, f"{path}/run.json was altered", "restore it")
    return dict.fromkeys(derived)  # 0.1.0 stored the rounds that the method ignored


def check_unaltered(path: Path, config: DictConfig, identity: dict[str, Any], key: str) -> None:
    """Raise FedgenError if the settings differ from those of the original run."""
    try:
        same = identity["settings"] == _settings_digest(config)
    except (OmegaConfBaseException, TypeError, ValueError):  # a group is missing, or none
        same = False
    if not same:
        raise FedgenError(key, f"{path}/config.yaml was altered", "restore it")


def resumed_config(config: DictConfig, requested: DictConfig) -> DictConfig:
    """Return the settings of a run, with the rounds (if larger), the logger and the runtime
    requested for the resumed run.

    Raises:
        FedgenError: if no runtime is given and its own is a remote cluster: a run directory must
            not decide which machines access records; for other rounds in a run of fedgen tune.
    """
    if config.get("score") is not None and requested.rounds not in (None, config.rounds):
        raise FedgenError("rounds", "are fixed in a run of fedgen tune", "leave it out")
    resumed = config.copy()
    resumed.logger, resumed.names.logger = requested.logger, requested.names.logger
    resumed.rounds = max(requested.rounds or 0, config.rounds)
    if requested.names.runtime is None:
        check_runtime_is_local(
            config, "add runtime=ray runtime.address={}; or runtime=ray, for this machine"
        )
        return resumed
    kept = OmegaConf.masked_copy(config.runtime, list(RUNTIME_INVARIANT))
    resumed.runtime = OmegaConf.merge(requested.runtime, kept)
    resumed.names.runtime = requested.names.runtime
    return resumed


def check_runtime_is_local(config: DictConfig, remedy: str) -> None:
    """Raise FedgenError if the runtime in a run directory is on another machine.

    Args:
        remedy: remedy for a cluster.
    """
    if (address := config.runtime.get("address")) is not None:
        problem = f"the run used the Ray cluster at {address}; confirm that you trust it"
        raise FedgenError("runtime.address", problem, remedy.format(shlex.quote(str(address))))
    link = config.runtime.get("superlink")
    if link is not None and not _is_this_host(str(link).rpartition(":")[0].strip("[]")):
        problem = f"the run used the link at {link}; confirm that you trust it"
        words = shlex.join(["runtime=deployed", f"runtime.superlink={link}"])
        remedy = f"add {words} runtime.ca=FILE"
        raise FedgenError("runtime.superlink", problem, remedy)


def _is_this_host(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_identity(ready: Setup) -> tuple[RunDir, str]:
    """Create a run directory and the name of the run: seeded runs with the same settings have the
    same name."""
    config = ready.config
    settings = _settings_digest(config)
    name = secrets.token_hex(8) if ready.privacy.noise == "secure" else settings
    stem = f"runs/{config.names.method}-{data_label(config)}-{time.strftime('%Y%m%d-%H%M%S')}"
    place = Path(config.run_dir) if config.run_dir else unused_folder(stem)
    identity = {
        "run": name,
        "data": ready.dataset.digest,
        "shards": ready.partition_digest,
        "settings": settings,
        "device": resolve_device(config.device),
        "branch": ready.domain,
        "noise_multiplier": rounded_noise(ready.privacy.noise_multiplier),
        "left_open": dict.fromkeys(sorted(ready.derived_settings)),
        "environment": {
            "fedgen": VERSION,
            **{name: metadata.version(name) for name in ("flwr", "torch", "numpy")},
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        },
    }
    return RunDir.create(place, config, identity), name


def _settings_digest(config: DictConfig) -> str:
    kept = [str(key) for key in config if key not in ("run_dir", "logger")]
    alone = OmegaConf.masked_copy(config, kept)
    alone.runtime = OmegaConf.masked_copy(config.runtime, list(RUNTIME_INVARIANT))
    alone.names = OmegaConf.masked_copy(
        config.names, [str(k) for k in config.names if k not in ("runtime", "logger")]
    )
    return digest(OmegaConf.to_yaml(alone, resolve=True, sort_keys=True).encode())


def check_same_noise(ready: Setup, identity: dict[str, Any], key: str) -> None:
    """Raise FedgenError if the noise calibrated here differs from that of the run: its guarantee
    depends on the noise of all clients."""
    calibrated = rounded_noise(ready.privacy.noise_multiplier)
    began = identity.get("noise_multiplier", "that is not on record")
    if began != calibrated:
        problem = f"the run began with noise multiplier {began}, and {calibrated} is calibrated now"
        version = identity.get("environment", {}).get("fedgen")
        raise FedgenError(key, problem, f"use fedgen {version} to resume it")


def check_same_data(ready: Setup, run_dir: RunDir, identity: dict[str, Any], key: str) -> None:
    """Raise FedgenError if the records of clients differ from those at the start of the run."""
    if identity["data"] != ready.dataset.digest:
        raise FedgenError(
            key, f"{run_dir.path} was trained on different data", "restore the original data set"
        )
    if identity.get("shards", ready.partition_digest) != ready.partition_digest:
        problem = f"{run_dir.path} used a different partition of the data"
        raise FedgenError(key, problem, "restore the original partition settings")


def check_shorter(run_dir: RunDir, ready: Setup, rounds: int) -> None:
    """Raise FedgenError if a run cannot end after this many rounds, before its planned end."""
    saved = checkpoint.load(run_dir.checkpoints)
    if saved is not None and saved[1].stopped == ENDED:
        problem = f"the run was ended by request after {saved[0].rounds} of {saved[1].total_rounds}"
        raise FedgenError("rounds", problem, "give resume=DIR alone, or start a new run")
    if saved is not None and saved[1].finished:
        problem = f"the run is over, after {saved[0].rounds}"
        raise FedgenError("rounds", problem, "give more, or resume=DIR alone")
    done = 0 if saved is None else saved[0].rounds
    least = max(done, ready.method.plan.min_rounds, 1)
    if rounds < least:
        why = "are done" if done == least else "are needed to learn anything"
        raise FedgenError("rounds", f"cannot be {rounds}: {least} {why}", f"give {least} or more")


def check_longer(run_dir: RunDir, ready: Setup, identity: dict[str, Any], rounds: int) -> None:
    """Raise FedgenError if a run cannot be extended to this many rounds: each costs the same at the
    original noise, and the state of clients is deleted at the end of a run. (The release of a
    shorter run is a function of that of the longer one, so the ε of all rounds covers a choice made
    in between.) Queries after the last checkpoint must be repeated unchanged: the last one may have
    been shorter."""
    if rounded_noise(ready.privacy.noise_multiplier) != identity.get("noise_multiplier"):
        target = target_of(privacy := ready.config.privacy)
        target = "the target" if target is None else f"privacy.{target}={privacy[target]:g}"
        problem = f"{rounds} need more noise than the run began with, to meet {target}"
        remedy = "start a new run of so many, or one with privacy.noise_multiplier"
        raise FedgenError("rounds", problem, remedy)
    if ready.privacy.budget.rounds < rounds:
        problem = f"privacy.target_epsilon ends it after {ready.privacy.budget.rounds}"
        raise FedgenError("rounds", problem, "start a new run")
    if ready.dataset.is_remote:
        raise FedgenError(
            "rounds", "are fixed: nodes accepted the run with its settings", "start a new run"
        )
    saved, seeded = checkpoint.load(run_dir.checkpoints), ready.privacy.noise == "seeded"
    if saved is not None and saved[1].stopped == ENDED:
        raise FedgenError("rounds", "the run was ended by request", "start a new run")
    kept = saved[0].queries if saved is not None else {}
    for client in _local_clients(ready) if seeded else ():
        path = run_dir.clients / str(client) / LEDGER
        if not path.exists():
            continue
        account = Ledger(path, identity["run"], client, seeded, read_only=True).account()
        if account.releases > kept.get(client, 0):
            problem = "the run was killed, and clients have responded since its last checkpoint"
            remedy = f"fedgen train resume={run_dir.path}, and then with more rounds"
            raise FedgenError("rounds", problem, remedy)
    if saved is not None and saved[1].finished and ready.method.client.keeps_state:
        problem = "the run has ended, and the states of its clients were deleted"
        raise FedgenError("rounds", problem, "start a new run")


def check_same_run(run_dir: RunDir, ready: Setup, identity: dict[str, Any]) -> None:
    """Raise FedgenError if a run cannot resume as the same run: with other data or settings, the
    same noise would be added to other values."""
    check_same_data(ready, run_dir, identity, "resume")
    device = resolve_device(ready.config.device)
    if identity["device"] != device:  # other rounding, and states in other stacks
        raise FedgenError(
            "resume",
            f"{run_dir.path} began on {identity['device']}, this is {device}",
            f"resume on a machine with {identity['device']}",
        )
    check_same_noise(ready, identity, "resume")
    if (run_dir.checkpoints / checkpoint.NAME).exists():
        for client in _local_clients(ready):
            if not (run_dir.clients / str(client) / LEDGER).exists():
                raise FedgenError(
                    "resume",
                    f"the ledger of client {client} is missing from {run_dir.path}",
                    "restore it: spend is never forgotten",
                )
    elif (run_dir.path / "privacy.json").exists():
        raise FedgenError("resume", f"{run_dir.checkpoints} is missing", "restore it")


def check_same_settings(config: DictConfig, place: Path) -> None:
    """Raise FedgenError if a run was trained with other settings, or was altered."""
    _, original, identity = RunDir.open(place, "run_dir")
    try:
        was: dict[str, Any] = {"privacy.at_fpr": DEFAULT_FPR}
        was |= flat_settings(OmegaConf.to_container(original, resolve=True))
        derived = settings_before_derivation(place, original, identity, "run_dir")
        was |= derived | {"rounds": original.rounds}
    except (OmegaConfBaseException, AttributeError, TypeError) as error:
        raise FedgenError("run_dir", f"{place}/config.yaml was altered", "restore it") from error
    requested = config.copy()
    if requested.rounds is None:
        requested.rounds = original.rounds if "rounds" in derived else default_rounds(config)
    now = flat_settings(OmegaConf.to_container(requested, resolve=True))
    other = [key for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)]
    other = [key for key in other if key not in ("run_dir", "resume")]
    if other:
        raise FedgenError("run_dir", f"{place} has a different {other[0]}", "take another run_dir")


def flat_settings(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a tree by dotted name."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat_settings(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def _local_clients(ready: Setup) -> range:
    """Return the clients with a folder in the run directory; clients at sites have their own."""
    return range(0 if ready.dataset.is_remote else len(ready.shards))


def check_intact(run_dir: RunDir, ready: Setup, name: str) -> None:
    """Read everything that a run needs to resume, and write nothing: a damaged run directory is
    refused unchanged.

    Raises:
        FedgenError: for the first file that was altered or is missing.
    """
    seeded = ready.privacy.noise == "seeded"
    outside = None if seeded else SpendDb.default()
    run_dir.failures()
    run_dir.sums()
    begun = run_dir.started_rounds().total()
    saved, spends, kept = checkpoint.load(run_dir.checkpoints), {}, {}
    if saved is not None:
        state, checkpoint_metadata = saved
        run_dir.check_size(*checkpoint_metadata.metrics)
        if begun < checkpoint_metadata.started:
            raise FedgenError("resume", f"{run_dir.path}/rounds_begun.txt was cut", "restore it")
        spends, kept = state.spends, {} if checkpoint_metadata.finished else state.kept_tags
    store = ClientStore(run_dir.clients, in_memory=True)
    for client in _local_clients(ready):
        path = run_dir.clients / str(client) / LEDGER
        account = Ledger(path, name, client, seeded, outside, read_only=True).account()
        seen = dict(spends.get(client, {}))
        seen.pop(NonPrivateDpEvent(), None)  # the server's record of unplanned releases
        if any(account.spend.get(event, 0) < count for event, count in seen.items()):
            raise FedgenError(
                "resume",
                f"the ledger of client {client} lacks releases that the server received",
                "restore it: spend is never forgotten",
            )
        store.check(client, kept.get(client, 0))
