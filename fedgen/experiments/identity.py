"""Which run a run directory holds, and whether it goes on as the run that it was."""

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

from fedgen import factories
from fedgen.errors import FedgenError
from fedgen.experiments.building import device
from fedgen.experiments.configuration import check_restored
from fedgen.experiments.kinds import SAME_ON_EVERY_RUNTIME
from fedgen.experiments.settings import Setup, in_short
from fedgen.federation import checkpoint
from fedgen.federation.client_app import LEDGER
from fedgen.federation.client_store import ClientStore
from fedgen.files import digest
from fedgen.privacy.ledger import Ledger
from fedgen.privacy.spent import SpentFile
from fedgen.reporting.run_dir import RunDir, unused_folder
from fedgen.version import VERSION

ENDED = "it was told to end, and counts as if it had gone on"
"""Why a run stopped that ended before the rounds that it was to have."""

_NO_LOGGER = {"_target_": "fedgen.reporting.loggers.none", "_partial_": True}


def opened(path: Path, key: str) -> tuple[RunDir, DictConfig, dict[str, Any]]:
    """A run directory, with the settings and the identity that it was made with.

    Raises:
        FedgenError: if it is none, or they are not; it says which setting of which file.
    """
    run_dir, config, identity = RunDir.open(path, key)
    try:
        factories.check(OmegaConf.to_container(config, resolve=True), "")
        check_restored(config)
    except FedgenError as error:
        what = f"{error.key}: {error.problem}"
        problem = f"{path}/config.yaml was altered, or written by another version ({what})"
        remedy = f"restore it, or use that version; {error.remedy}"
        raise FedgenError(key, problem, remedy) from error
    except OmegaConfBaseException as error:
        raise FedgenError(key, f"{path}/config.yaml was altered", "restore it") from error
    check_unaltered(path, config, identity, key)
    rounds = identity.get("rounds", config.rounds)
    if type(rounds) is not int or rounds < config.rounds or type(identity["branch"]) is not str:
        raise FedgenError(key, f"{path}/run.json was altered", "restore it")
    if type(identity.get("environment", {})) is not dict:
        raise FedgenError(key, f"{path}/run.json was altered", "restore it")
    left_open(path, config, identity, key)
    if config.get("resume") is not None:  # it would have what follows go on with another run
        raise FedgenError(key, f"{path}/config.yaml was altered (resume)", "restore it")
    config.rounds = rounds
    # where a run logs to is no word of its directory's: somebody may have handed that over
    config.logger, config.names.logger = _NO_LOGGER, "none"
    return run_dir, config, identity


def left_open(
    path: Path, config: DictConfig, identity: dict[str, Any], key: str
) -> dict[str, int | None]:
    """What a method settled for itself, as it was before: its rounds, and settings of its own.

    Raises:
        FedgenError: if ``run.json`` has others there.
    """
    told = identity.get("left_open", {})
    own = {f"method.{n}" for n in config.method if not OmegaConf.is_config(config.method[n])}
    if not isinstance(told, dict) or not all(
        type(value) is int if name == "rounds" else name in own and value is None
        for name, value in told.items()
    ):
        raise FedgenError(key, f"{path}/run.json was altered", "restore it")
    return told


def check_unaltered(path: Path, config: DictConfig, identity: dict[str, Any], key: str) -> None:
    """Raises FedgenError if the settings there are not those that the run was made with."""
    try:
        same = identity["settings"] == _settings_digest(config)
    except OmegaConfBaseException:  # it lacks what settings have
        same = False
    if not same:
        raise FedgenError(key, f"{path}/config.yaml was altered", "restore it")


def going_on(config: DictConfig, asked: DictConfig) -> DictConfig:
    """A run's settings, with the rounds, if these are more, the logger and the runtime that it is
    asked to go on with.

    Raises:
        FedgenError: if none is named, and its own is a cluster elsewhere: whose machines see rows
            is no word of a directory's.
    """
    there = config.copy()
    there.logger, there.names.logger = asked.logger, asked.names.logger
    there.rounds = max(asked.rounds or 0, config.rounds)
    if asked.names.runtime is None:
        check_here(config, "add runtime=ray runtime.address={}; or runtime=ray, for this machine")
        return there
    kept = OmegaConf.masked_copy(config.runtime, list(SAME_ON_EVERY_RUNTIME))
    there.runtime = OmegaConf.merge(asked.runtime, kept)
    there.names.runtime = asked.names.runtime
    return there


def check_here(config: DictConfig, remedy: str) -> None:
    """Raises FedgenError if a run directory's own runtime is on another machine. ``remedy``: for a
    cluster."""
    if (address := config.runtime.get("address")) is not None:
        problem = f"the run was on the cluster at {address}, and whether to trust it is not said"
        raise FedgenError("runtime.address", problem, remedy.format(shlex.quote(str(address))))
    link = config.runtime.get("superlink")
    if link is not None and not _is_here(str(link).rpartition(":")[0].strip("[]")):
        problem = f"the run's link was at {link}, and whether to trust it is not said"
        words = shlex.join(["runtime=deployed", f"runtime.superlink={link}"])
        remedy = f"add {words} runtime.ca=FILE"
        raise FedgenError("runtime.superlink", problem, remedy)


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_run(ready: Setup) -> tuple[RunDir, str]:
    """A run directory, and the run's name: seeded runs with the same settings are the same run."""
    config = ready.config
    settings = _settings_digest(config)
    name = secrets.token_hex(8) if ready.privacy.noise == "secure" else settings
    stem = f"runs/{config.names.method}-{config.names.data}-{time.strftime('%Y%m%d-%H%M%S')}"
    place = Path(config.run_dir) if config.run_dir else unused_folder(stem)
    identity = {
        "run": name,
        "data": ready.dataset.digest,
        "shards": ready.shares,
        "settings": settings,
        "device": device(config.device),
        "branch": ready.branch,
        "noise_multiplier": in_short(ready.privacy.noise_multiplier),
        "left_open": dict(ready.left_open),
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
    alone.runtime = OmegaConf.masked_copy(config.runtime, list(SAME_ON_EVERY_RUNTIME))
    alone.names = OmegaConf.masked_copy(
        config.names, [str(k) for k in config.names if k not in ("runtime", "logger")]
    )
    return digest(OmegaConf.to_yaml(alone, resolve=True, sort_keys=True).encode())


def check_same_noise(ready: Setup, identity: dict[str, Any], key: str) -> None:
    """Raises FedgenError if the noise that is solved for here is not the run's: what it promised
    rests on that of all clients."""
    here = in_short(ready.privacy.noise_multiplier)
    began = identity.get("noise_multiplier", "that is not on record")
    if began != here:
        problem = f"the run began with noise multiplier {began}, and {here} is solved for here"
        version = identity.get("environment", {}).get("fedgen")
        raise FedgenError(key, problem, f"go on with fedgen {version} as it was then")


def check_same_rows(ready: Setup, run_dir: RunDir, identity: dict[str, Any], key: str) -> None:
    """Raises FedgenError if clients have other rows here than the run began with."""
    if identity["data"] != ready.dataset.digest:
        raise FedgenError(key, f"{run_dir.path} was trained on other data", "bring it back")
    if identity.get("shards", ready.shares) != ready.shares:
        problem = f"{run_dir.path} shared its data out otherwise"
        raise FedgenError(key, problem, "bring its partition back")


def check_shorter(run_dir: RunDir, ready: Setup, rounds: int) -> None:
    """Raises FedgenError if a run cannot end after so many rounds, before those that it was to
    have."""
    found = checkpoint.load(run_dir.checkpoints)
    if found is not None and found[1].stopped == ENDED:
        problem = f"the run was told to end after {found[0].rounds} of {found[1].of}"
        raise FedgenError("rounds", problem, "give resume=DIR alone, or start a new run")
    if found is not None and found[1].over:
        problem = f"the run is over, after {found[0].rounds}"
        raise FedgenError("rounds", problem, "give more, or resume=DIR alone")
    done = 0 if found is None else found[0].rounds
    least = max(done, ready.method.plan.least, 1)
    if rounds < least:
        why = "are done" if done == least else "are needed to learn anything"
        raise FedgenError("rounds", f"cannot be {rounds}: {least} {why}", f"give {least} or more")


def check_longer(run_dir: RunDir, ready: Setup, identity: dict[str, Any], rounds: int) -> None:
    """Raises FedgenError if a run cannot have so many rounds: at the noise that it began with, each
    costs what it costs, and what clients held of a run that is over is gone. (What a run of fewer
    rounds shows follows from what the longer one shows, so that the ε of all of them covers also
    a choice that was made in between.) What was asked after
    the last checkpoint has to be asked again as it was: the last question may be shorter."""
    if ready.config.rounds != rounds:
        problem = f"{ready.config.names.method} has {ready.config.rounds} by its other settings"
        raise FedgenError("rounds", problem, "leave it out")
    if in_short(ready.privacy.noise_multiplier) != identity.get("noise_multiplier"):
        target = ready.config.privacy.target_epsilon
        problem = f"{rounds} need more noise than the run began with, to stay within ε = {target:g}"
        remedy = "start a new run of so many, or one with privacy.noise_multiplier"
        raise FedgenError("rounds", problem, remedy)
    if ready.privacy.budget.rounds < rounds:
        problem = f"privacy.target_epsilon ends it after {ready.privacy.budget.rounds}"
        raise FedgenError("rounds", problem, "start a new run")
    if ready.dataset.elsewhere:
        raise FedgenError("rounds", "are what the nodes were told", "start a new run")
    found, seeded = checkpoint.load(run_dir.checkpoints), ready.privacy.noise == "seeded"
    if found is not None and found[1].stopped == ENDED:
        raise FedgenError("rounds", "the run is over, as it was told to end", "start a new run")
    kept = found[0].asks if found is not None else {}
    for client in _whose_files_are_here(ready) if seeded else ():
        path = run_dir.clients / str(client) / LEDGER
        if not path.exists():
            continue
        account = Ledger(path, identity["run"], client, seeded, looking=True).account()
        if account.releases > kept.get(client, 0):
            problem = "it was killed after its last checkpoint, which has less than was asked"
            remedy = f"fedgen train resume={run_dir.path}, and then with more rounds"
            raise FedgenError("rounds", problem, remedy)
    if found is not None and found[1].over and ready.method.client.keeps_state:
        problem = "the run is over, and what its clients had learnt is deleted"
        raise FedgenError("rounds", problem, "start a new run")


def check_same_run(run_dir: RunDir, ready: Setup, identity: dict[str, Any]) -> None:
    """Raises FedgenError if a run cannot go on as the run that it was: with other data or settings
    the same coins would sanitize something else."""
    check_same_rows(ready, run_dir, identity, "resume")
    here = device(ready.config.device)
    if identity["device"] != here:  # other bits, and states in other stacks
        raise FedgenError(
            "resume",
            f"{run_dir.path} began on {identity['device']}, this is {here}",
            f"go on where there is {identity['device']}",
        )
    check_same_noise(ready, identity, "resume")
    if (run_dir.checkpoints / checkpoint.NAME).exists():
        for client in _whose_files_are_here(ready):
            if not (run_dir.clients / str(client) / LEDGER).exists():
                raise FedgenError(
                    "resume",
                    f"the ledger of client {client} is missing from {run_dir.path}",
                    "restore it: spend is never forgotten",
                )
    elif (run_dir.path / "privacy.json").exists():
        raise FedgenError("resume", f"{run_dir.checkpoints} is missing", "restore it")


def _whose_files_are_here(ready: Setup) -> range:
    """Clients at sites of their own are asked for theirs."""
    return range(0 if ready.dataset.elsewhere else len(ready.shards))


def check_intact(run_dir: RunDir, ready: Setup, name: str) -> None:
    """Reads all that a run needs to go on, and writes nothing: a run directory that was harmed is
    refused as it is.

    Raises:
        FedgenError: for the first file that was altered, or is missing.
    """
    seeded = ready.privacy.noise == "seeded"
    outside = None if seeded else SpentFile.at_home()
    run_dir.failures()
    run_dir.sums()
    begun = run_dir.begun().total()
    found, spends, kept = checkpoint.load(run_dir.checkpoints), {}, {}
    if found is not None:
        state, beside = found
        run_dir.check_extent(*beside.metrics)
        if begun < beside.begun:
            raise FedgenError("resume", f"{run_dir.path}/rounds_begun.txt was cut", "restore it")
        spends, kept = state.spends, {} if beside.over else state.kept
    store = ClientStore(run_dir.clients, in_memory=True)
    for client in _whose_files_are_here(ready):
        path = run_dir.clients / str(client) / LEDGER
        account = Ledger(path, name, client, seeded, outside, looking=True).account()
        seen = dict(spends.get(client, {}))
        seen.pop(NonPrivateDpEvent(), None)  # the server's own note of what was not planned
        if any(account.spend.get(event, 0) < count for event, count in seen.items()):
            raise FedgenError(
                "resume",
                f"the ledger of client {client} lacks what the server has seen",
                "restore it: spend is never forgotten",
            )
        store.check(client, kept.get(client, 0))
