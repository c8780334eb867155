"""Settings that cannot be, each in one line."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedgen import factories
from fedgen.errors import FedgenError
from fedgen.evaluation.inception import check_weights
from fedgen.experiments.building import check_parameters
from fedgen.federation.fault_rates import Faults
from fedgen.privacy.budget import check_delta
from fedgen.privacy.events import Unit

LEAST, MOST = 1e-9, 1e9  # of an epsilon, of a noise multiplier
_MOST_OF_A_PERSON = 50  # more take minutes to account
_MIN_SAMPLES = 256  # for the inception score and the covariance of 128 features


def faults(config: DictConfig) -> Faults:
    """The faults that a run is put through."""
    kinds = OmegaConf.to_container(config.runtime.faults, resolve=True)
    assert isinstance(kinds, dict)
    return Faults(**{str(k): float(v) for k, v in kinds.items() if k != "server_dies"})


def check(config: DictConfig) -> None:
    """Raises FedgenError for the first setting that cannot be."""
    try:
        whole = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        key, problem = error.full_key or "config", str(error).splitlines()[0]
        raise FedgenError(key, problem, "correct it") from error
    factories.check(whole, "")
    for key in ("rounds", "sample_every", "log_every", "runtime.checkpoint_every"):
        _whole(config, key, 1, 10**9)
    _whole(config, "privacy.colluders", 0, 10**9)
    if config.privacy.colluders and config.privacy.aggregation != "secure":
        problem = "counts those who answer to a secure sum, and there is none"
        raise FedgenError("privacy.colluders", problem, "set privacy.aggregation=secure, or 0")
    _whole(config, "seed", -(2**63), 2**63 - 1)
    if OmegaConf.select(config, "data.public_rows") is not None:
        _whole(config, "data.public_rows", 1, 10**9)
    if config.privacy.threshold not in (None, "all"):
        _whole(config, "privacy.threshold", 1, 10**9)
    _check_persons(config)
    for key in ("held_out", "evaluate_every"):
        _whole(config, key, 0, 10**9)
    if config.evaluate_every and not config.evaluation.classifiers:
        raise FedgenError("evaluate_every", "there is nothing to judge by", "set it to 0")
    if OmegaConf.select(config, "debug") is not None:
        problem = "is one of fedgen debug, which trains several generators"
        raise FedgenError("experiment", problem, "run fedgen debug instead")
    if not 0 <= config.corruption.fraction <= 1:
        problem = f"must be a share, got {config.corruption.fraction:g}"
        raise FedgenError("corruption.fraction", problem, "e.g. 0.5")
    _whole(config, "runtime.threads", 1, 1024)
    _check_runtime(config)
    check_evaluation(config)
    _check_release(config)
    check_delta(config.privacy.delta)
    for key in (
        "privacy.target_epsilon",
        "privacy.noise_multiplier",
        "privacy.budget_epsilon",
    ):
        value = OmegaConf.select(config, key)
        if value is not None and not LEAST <= value <= MOST:
            problem = f"must lie in {LEAST:g}..{MOST:g}, got {value:g}"
            raise FedgenError(key, problem, "e.g. 10, or null")
    if config.start is not None and config.privacy.target_epsilon is not None:
        raise FedgenError(
            "start",
            "a run that begins with another's weights has no ε of its own",
            "set privacy.target_epsilon=null and privacy.noise_multiplier, or take privacy=none",
        )
    if OmegaConf.select(config, "audit.canaries") is not None:
        _whole(config, "audit.canaries", 0, 10**9)
    check_parameters("method", config.method)
    _check_warm_up(config)


def _check_warm_up(config: DictConfig) -> None:
    """Raises FedgenError for a warm-up that cannot be."""
    chosen = config.warm_up
    if chosen.method is None:
        return
    if not isinstance(chosen.method, DictConfig) or "_target_" not in chosen.method:
        raise FedgenError("warm_up.method", f"cannot be {chosen.method!r}", "see configs/warm_up")
    if config.start is not None:
        problem = "cannot go before networks that another run trained"
        raise FedgenError("warm_up", problem, "take warm_up=none, or start=null")
    for name in ("rounds", "batch"):
        _whole(config, f"warm_up.{name}", 1, 10**9)
    noise = chosen.noise_multiplier
    if not LEAST <= noise <= MOST:
        problem = f"must lie in {LEAST:g}..{MOST:g}, got {noise:g}"
        raise FedgenError("warm_up.noise_multiplier", problem, "e.g. 2")
    check_parameters("warm_up.method", chosen.method)


def _check_runtime(config: DictConfig) -> None:
    """Raises FedgenError for a runtime that cannot be."""
    runtime = config.runtime
    for name in ("timeout", "num_cpus", "cache_gb"):
        value = runtime.get(name)
        if value is not None and not 0 < value < math.inf:
            raise FedgenError(f"runtime.{name}", f"must be positive, got {value:g}", "raise it")
    for key in ("num_cpus", "num_gpus"):
        value = runtime.get(key, 0.0)
        if not 0 <= value < math.inf or round(value, 3) != value:
            problem = f"cannot be {value:g}"
            raise FedgenError(f"runtime.{key}", problem, "take thousandths or more, e.g. 0.5")
    if runtime.get("actors") is not None:
        _whole(config, "runtime.actors", 1, 10**6)
    if not 0 < runtime.min_success <= 1:
        raise FedgenError(
            "runtime.min_success",
            f"must lie above 0 and be at most 1, got {runtime.min_success:g}",
            "it is a share of the clients that are asked, e.g. 0.8",
        )
    if not isinstance(runtime.faults, DictConfig):
        raise FedgenError("runtime.faults", f"cannot be {runtime.faults!r}", "name its faults")
    _whole(config, "runtime.faults.server_dies", 0, 10**9)
    known = [each.name for each in fields(Faults)]
    for fault, rate in runtime.faults.items():
        if fault == "server_dies":
            continue
        if fault not in known:
            problem = "is not a setting"
            raise FedgenError(
                f"runtime.faults.{fault!s}", problem, f"choose of: {', '.join(known)}"
            )
        if not isinstance(rate, int | float) or not 0 <= rate <= 1:
            raise FedgenError(
                f"runtime.faults.{fault!s}", f"must be a probability, got {rate}", "e.g. 0.01"
            )
    if faults(config).total > 1:
        raise FedgenError("runtime.faults", "the probabilities exceed 1 in all", "lower them")
    if runtime.faults.hangs and runtime.timeout is None:
        raise FedgenError("runtime.faults.hangs", "nobody is waited for", "set runtime.timeout")
    if runtime.faults.dies and config.names.runtime != "ray":
        raise FedgenError(
            "runtime.faults.dies", "clients have no process of their own here", "take runtime=ray"
        )


def _check_release(config: DictConfig) -> None:
    """Raises FedgenError for what a run that is meant for release must not do."""
    if config.privacy.noise != "secure":
        if config.privacy.get("budget_epsilon") is not None:
            raise FedgenError(
                "privacy.budget_epsilon",
                "counts what is meant for release, and a seeded run is an experiment",
                "take privacy.noise=secure, or set it to null",
            )
        return
    if config.evaluation.samples:
        raise FedgenError(
            "evaluation",
            "looks at private rows outside any mechanism, which privacy.noise=secure refuses",
            "set evaluation=none",
        )
    if config.start is not None:
        raise FedgenError(
            "start", "leaves no ε, which privacy.noise=secure refuses", "set it to null"
        )
    if config.corruption.fraction:
        raise FedgenError(
            "corruption.fraction",
            "a bug that is planted is an experiment, which privacy.noise=secure refuses",
            "set it to 0",
        )
    if config.held_out:
        raise FedgenError(
            "held_out", "there is nothing to judge under privacy.noise=secure", "set it to 0"
        )
    if OmegaConf.select(config, "audit.canaries"):
        raise FedgenError(
            "audit.canaries",
            "a run with canaries is no run for release",
            "take privacy.noise=seeded, or set it to 0",
        )


def check_evaluation(config: DictConfig) -> None:
    """Raises FedgenError unless there is something to judge by, or no judge."""
    chosen = config.evaluation
    without = "to have none judged take evaluation=none"
    _whole(config, "evaluation.samples", least_samples(chosen), 10**7, without)
    _whole(config, "evaluation.seeds", 1 if chosen.classifiers else 0, 1000)
    if chosen.jobs is not None:
        _whole(config, "evaluation.jobs", 1, 1024)
    for name, each in chosen.classifiers.items():
        key = f"evaluation.classifiers.{name}"
        if "epochs" in each:
            _whole(config, f"{key}.epochs", 1, 10**6)
        if "model" in each and not factories.may_call(each.model, f"{key}.model"):
            problem = f"{each.model!r} is none of the models that fedgen's settings name"
            remedy = "declare its package, e.g. FEDGEN_EXTENSIONS=sklearn fedgen ..."
            raise FedgenError(f"{key}.model", problem, remedy)
    unknown = [name for name in chosen.real2gen if name not in chosen.classifiers]
    if unknown:
        names = ", ".join(map(str, chosen.classifiers)) or "none"
        raise FedgenError(
            "evaluation.real2gen", f"{unknown[0]} is no classifier here", f"choose of: {names}"
        )
    if chosen.fid and chosen.inception_weights is not None:
        check_weights(Path(chosen.inception_weights))


def least_samples(chosen: DictConfig) -> int:
    """How many samples an evaluation takes."""
    if chosen.judge:
        return _MIN_SAMPLES
    return 2 if chosen.fid else 1 if chosen.classifiers or chosen.leakage else 0


def _check_persons(config: DictConfig) -> None:
    """Raises FedgenError unless a number of images goes with persons, and with them alone."""
    key = "privacy.images_per_person"
    if config.privacy.unit == Unit.PERSON.value:
        if config.privacy.images_per_person is None:
            problem = "is not set, and privacy.unit=person rests on it"
            raise FedgenError(key, problem, "give how many images of a person count, at most")
        _whole(config, key, 1, _MOST_OF_A_PERSON)
    elif config.privacy.images_per_person is not None:
        raise FedgenError(key, "is of privacy.unit=person alone", "leave it out")


def _whole(config: DictConfig, key: str, least: int, most: int, remedy: str = "correct it") -> None:
    value = OmegaConf.select(config, key)
    if not isinstance(value, int) or not least <= value <= most:
        raise FedgenError(
            key, f"must be a whole number from {least} to {most}, got {value!r}", remedy
        )
