"""A resolved configuration, checked and turned into objects. Nothing here writes anything."""

from __future__ import annotations

import inspect
import json
import math
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from dp_accounting import NonPrivateDpEvent
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedgen import factories
from fedgen.coins import Coins
from fedgen.data.canaries import Canaries, plant
from fedgen.data.corruption import plant_flip, with_the_bug
from fedgen.data.datasets import Dataset, Shard
from fedgen.data.partition import Index, check_clients, of_persons
from fedgen.errors import FedgenError
from fedgen.evaluation.inception import check_weights
from fedgen.federation.fault_rates import Faults
from fedgen.files import digest, read_json
from fedgen.method import ClientProgram, Kind, Method, Plan, PublicFacts
from fedgen.privacy.accounting import Accountant, Epsilon, epsilon, rough_epsilon
from fedgen.privacy.budget import TAIL, Budget, check_delta, release_epsilon, smaller
from fedgen.privacy.calibration import least_noise, most_repetitions
from fedgen.privacy.events import Relation, Unit, canonical
from fedgen.privacy.releases import Secure
from fedgen.warm_up import not_sums, warm_up

CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "privacy.adversary": ("server", "release"),
    "privacy.aggregation": ("local", "secure", "trusted"),
    "privacy.unit": ("record", "client", "person"),
    "privacy.noise": ("seeded", "secure"),
    "runtime.store": ("memory", "disk"),
    "runtime.transport": ("float32", "float16"),
}
_MAY_BE_ZERO = (
    "warm_start",
    "penalty",
    "mode_seeking",
    "debiased",
    "l1",
    "l2",
    "label_weight",
    "weight_decay",
    "begins",
    "fake_steps",
    "real_steps",
    "label_dropout",
    "churn",
    "churn_from",
    "guidance",
    "momentum",
    "threshold",
)
_LEAST_CLIP = 1e-9  # of gradients in single precision
MOST = 1e9  # of an epsilon, of a noise multiplier
_MOST_OF_A_PERSON = 50  # more take minutes to account
UNLIMITED = 10**12  # rows of a client, where a bound does not depend on them
LEAST_JUDGED = 256  # images for an inception score, and a covariance of 128 features
# not every runtime has a store; a method was published with an aggregation and a unit
OPTIONAL = ("runtime.store", "privacy.aggregation", "privacy.unit")


@dataclass(frozen=True)
class Privacy:
    """The privacy of a run, decided before it starts."""

    delta: float
    noise: Literal["seeded", "secure"]
    noise_multiplier: float | None
    budget: Budget


@dataclass(frozen=True)
class Decided:
    """What of a run follows from its settings and from what everybody knows of its clients.
    ``at_noise`` makes the method at another noise multiplier, ``program`` the client program in
    another process, ``with_gaps`` the method as it is accounted if a missing answer may have shown
    a draw, ``aggregated`` with another maker of the noise; ``left_open``: settings that the method
    settled, as they were before."""

    method: Method
    privacy: Privacy
    at_noise: Callable[[float | None], Method]
    program: Callable[[], ClientProgram]
    with_gaps: Callable[[], Method]
    aggregated: Callable[[Kind], Method]
    left_open: Mapping[str, int | None]

    @property
    def noise(self) -> float | None:
        """The noise multiplier."""
        return self.privacy.noise_multiplier


@dataclass(frozen=True)
class Setup(Decided):
    """All that a run is made of. ``branch``: see ``branch_of``. ``canaries``: of an audited run."""

    config: DictConfig
    branch: str
    coins: Coins
    dataset: Dataset
    shards: list[Index]
    faults: Faults
    canaries: Canaries | None

    def held_out(self, count: int) -> Shard | None:
        """The first ``count`` rows that nobody trains on, if there are any."""
        if not self.config.held_out:
            return None
        images, labels = self.dataset.test_images[:count], self.dataset.test_labels[:count]
        return Shard(torch.from_numpy(images), torch.from_numpy(labels))


def setup(config: DictConfig) -> Setup:
    """Checks a configuration and builds the run's objects.

    Raises:
        FedgenError: for the first setting that does not work.
    """
    check(config)
    torch.set_num_threads(config.runtime.threads)
    coins = Coins.of(config.seed, config.privacy.noise)
    held, shards = shared_out(config)
    bugged = with_the_bug(len(shards), config.corruption.fraction, coins.at("data"))
    held = plant_flip(held, shards, bugged)
    if config.group is not None:
        shards = [shards[client] for client in _members(config.group, len(shards))]
    rows = None if held.elsewhere or len(shards) > 1 else len(shards[0])
    found = decided(config, len(shards), rows, held.classes, held.shape)
    check_places(config, held, found.method.plan)
    branch = _rehearsed(config) or branch_of(config, held, found.noise)
    coins = coins.at("branch", branch)
    canaries = None
    if OmegaConf.select(config, "audit.canaries"):
        plan = found.method.plan
        here = Coins.of(config.seed, "seeded").at("audit")  # the same in every process of a run
        held, shards, canaries = plant(
            held, shards, plan.unit, plan.relation, config.audit.canaries, here
        )
    return Setup(
        **vars(found),
        config=config,
        branch=branch,
        coins=coins,
        dataset=held,
        shards=shards,
        faults=faults(config),
        canaries=canaries,
    )


def decided(
    config: DictConfig,
    clients: int,
    rows: int | None,
    classes: int,
    shape: tuple[int, int, int],
) -> Decided:
    """The method, its noise and its budget, and what these settle of the settings that were open,
    which is written into ``config``. Whoever knows the same comes to the same.

    Args:
        rows: of the one client; None of several.
        classes, shape: of the images: labels, and (channels, height, width).

    Raises:
        FedgenError: for the first setting that does not work.
    """
    half = config.runtime.transport == "float16"
    asked_for = config.privacy
    facts = PublicFacts(
        clients,
        rows,
        classes,
        shape,
        all_answer=config.runtime.min_success >= 1,
        half=half,
        aggregating=asked_for.aggregation,
        least=asked_for.least,
        colluders=asked_for.colluders,
        unit=Unit(asked_for.unit) if asked_for.unit else None,
        images_per_person=asked_for.images_per_person or 1,
    )
    made = build(config.method, "method", without=("strategy",))
    make = partial(_method, made, facts, config)
    open_: dict[str, int | None] = {}
    if (length := make(None).plan.length) not in (None, config.rounds):
        open_["rounds"], config.rounds = config.rounds, length
    if half and make(None).plan.exact:
        problem = f"float16 would spoil the optimizer's state that {config.names.method} answers"
        raise FedgenError("runtime.transport", problem, "set it to float32")
    privacy = decide(config, make)
    noise = privacy.noise_multiplier
    if settled := make(noise).settled:
        open_ |= {f"method.{key}": None for key in settled if config.method[key] is None}
        config.method.update(settled)
        made = build(config.method, "method", without=("strategy",))
        make = partial(_method, made, facts, config)
        if (length := make(noise).plan.length) not in (None, config.rounds):
            open_.setdefault("rounds", config.rounds)
            config.rounds = length
            privacy = decide(config, make)
            noise = privacy.noise_multiplier
    method = make(noise)
    _check_meeting(config, method.plan)
    return Decided(
        method,
        privacy,
        at_noise=make,
        program=partial(_program, make, noise),
        with_gaps=partial(_method, made, replace(facts, unanswered=True), config, noise),
        aggregated=lambda kind: _method(made, replace(facts, aggregating=kind), config, noise),
        left_open=open_,
    )


def check_places(config: DictConfig, held: Dataset, plan: Plan) -> None:
    """Raises FedgenError where a record that is replaced by one of another label moves others."""
    by_place = plan.relation is Relation.REPLACE_ONE and plan.unit is Unit.RECORD
    if held.labels_in_names and by_place:
        raise FedgenError(
            "data.path",
            "has file names that occur under several labels, and "
            f"{config.names.method} protects records by their place among all names",
            "rename the files, or take a method of sums, e.g. mixture, dp_merf or dpgan",
        )


def _check_meeting(config: DictConfig, plan: Plan) -> None:
    """Raises FedgenError for answers that their aggregation cannot take in."""
    aggregation = plan.aggregation
    # what a client sends as a whole is clipped again; of a sum over rows, one row would move what
    # is rounded by more than the noise was made for
    if plan.trusted and plan.unit is not Unit.CLIENT and config.runtime.transport == "float16":
        raise FedgenError(
            "runtime.transport", "float16 would round a sum before its noise", "set it to float32"
        )
    if not isinstance(aggregation, Secure):
        if config.runtime.masks:
            raise FedgenError(
                "runtime.masks",
                "hide the terms of a secure sum, and there is none",
                "set it to false, or take privacy.aggregation=secure",
            )
        return
    for std, largest in plan.extents:
        aggregation.check_range(std, aggregation.asked * largest)
    if config.runtime.transport == "float16":
        raise FedgenError(
            "runtime.transport",
            "float16 would spoil the whole numbers of a secure sum",
            "set it to float32",
        )
    answers = config.runtime.min_success * aggregation.asked
    if answers < aggregation.least:
        raise FedgenError(
            "runtime.min_success",
            f"lets {answers:g} of {aggregation.asked} answers do, and the noise counts on "
            f"{aggregation.least}",
            "raise it, or lower privacy.least",
        )


def shared_out(config: DictConfig) -> tuple[Dataset, list[Index]]:
    """The data set without the rows held out, and all clients' rows of it."""
    coins = Coins.of(config.seed, config.privacy.noise).at("data")
    held = dataset(config).holding_out(config.held_out, coins)
    if not held.elsewhere:
        check_clients(config.partition.clients, len(held.labels))
    shards: list[Index] = build(config.partition, "partition")(
        labels=held.labels, classes=held.classes, writers=held.writers, coins=coins
    )
    if config.privacy.unit == Unit.PERSON.value:
        if held.elsewhere:
            problem = "cannot be person here: nodes do not count images of a person"
            raise FedgenError("privacy.unit", problem, "set it to record or client")
        most, whole = config.privacy.images_per_person, (held.images, held.labels)
        shards = of_persons(shards, held.persons, most, *whole, coins)
    return held, shards


def _members(group: object, clients: int) -> list[int]:
    """The clients of a group. Raises FedgenError unless it lists some, each once."""
    members = list(group) if isinstance(group, ListConfig) else []
    numbers = [each for each in members if isinstance(each, int) and 0 <= each < clients]
    if not numbers or len(set(numbers)) < len(members):
        problem = f"must list clients from 0 to {clients - 1}, each once"
        raise FedgenError("group", problem, "e.g. group=[0,3,7]")
    return sorted(numbers)


def branch_of(config: DictConfig, held: Dataset, noise_multiplier: float | None) -> str:
    """What sets a run's coins apart from those of other runs under the same seed: all that its
    messages follow from, settings, rows, and the noise that was solved for (another version may
    solve another). Two runs that shared their noise at different scales, or about different rows,
    would show them bare to whoever has both.

    Empty in mode ``secure``: what is secret is the process' own, and public coins must not follow
    from private rows.
    """
    if config.privacy.noise == "secure":
        return ""
    whole: Any = OmegaConf.to_container(config, resolve=True)
    whole["privacy"].pop("budget_epsilon", None)  # refuses a run, and changes none
    if whole["privacy"]["images_per_person"] is None:
        whole["privacy"].pop("images_per_person")
    chosen = [whole.get(key) for key in ("method", "privacy", "partition", "rounds", "start")]
    chosen += [whole["runtime"][key] for key in ("threads", "min_success", "transport")]
    chosen += [whole.get("audit"), device(config.device), sorted(whole["group"] or [])]
    chosen.append(in_short(noise_multiplier))
    if whole["warm_up"]["method"] is not None:
        chosen.append(whole["warm_up"])
    return digest(json.dumps(chosen, sort_keys=True).encode(), held.digest.encode())


def _rehearsed(config: DictConfig) -> str | None:
    """The branch of the run whose coins a deployment uses again, to come to the same bits.

    Raises:
        FedgenError: if there is no such run, or noise is not seeded.
    """
    place = config.runtime.get("rehearses")
    if place is None:
        return None
    key = "runtime.rehearses"
    if config.privacy.noise != "seeded":
        raise FedgenError(key, "is for seeded noise", "take privacy.noise=seeded, or null")
    try:
        return str(read_json(Path(place) / "run.json")["branch"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedgenError(key, f"{place} is no run directory", "name a finished run") from error


def in_short(noise_multiplier: float | None) -> str | None:
    """Six digits: what solving on another machine may change is below them, and noise that differs
    by less is the same on its grid."""
    return None if noise_multiplier is None else f"{noise_multiplier:.6g}"


def dataset(config: DictConfig) -> Dataset:
    """The data set. Where its test split is drawn, all seeds draw the same: runs of several seeds
    are judged on the same rows, and none on another's training rows."""
    found: Dataset = build(config.data, "data")(coins=Coins.of(0, "seeded").at("data"))
    return found


def _method(
    make: Callable[..., Method],
    facts: PublicFacts,
    config: DictConfig,
    noise_multiplier: float | None,
) -> Method:
    here = device(config.device)
    method = make(facts=facts, noise_multiplier=noise_multiplier, device=here)
    if config.warm_up.method is not None:
        method = _warmed_up(method, facts, config, noise_multiplier is not None, here)
    if config.start is None:
        return method
    reason = "it began with another run's weights, and what these cost is not counted here"
    plan = replace(
        method.plan,
        before=NonPrivateDpEvent(),
        amplified_by=dict.fromkeys(method.plan.amplified_by),
        reasons=dict.fromkeys(method.plan.reasons, reason),
        claim=None,
    )
    return replace(method, plan=plan)


def _warmed_up(
    method: Method, facts: PublicFacts, config: DictConfig, private: bool, device: str
) -> Method:
    """The method after ``warm_up``'s."""
    chosen = config.warm_up
    noise = chosen.noise_multiplier if private else None
    try:
        start = build(chosen.method, "method", without=("strategy",))
        first = start(facts=facts, noise_multiplier=noise, device=device)
    except FedgenError as error:
        key = f"warm_up.{error.key}" if error.key.startswith("method") else error.key
        raise FedgenError(key, error.problem, error.remedy) from error
    if not {"batch", "sampling_rate"} <= set(config.method):
        raise not_sums()
    on_samples = {**_plain(config.method), "batch": chosen.batch, "sampling_rate": 1.0}
    plain = build(on_samples, "method", without=("strategy",))
    alone = PublicFacts(1, None, facts.classes, facts.shape)
    return warm_up(
        first,
        method,
        lambda: plain(facts=alone, noise_multiplier=None, device=device),
        facts.classes,
        chosen.rounds,
        chosen.batch,
    )


def _program(make: Callable[[float | None], Method], noise: float | None) -> ClientProgram:
    return make(noise).client


def faults(config: DictConfig) -> Faults:
    """The faults that a run is put through."""
    kinds = OmegaConf.to_container(config.runtime.faults, resolve=True)
    assert isinstance(kinds, dict)
    return Faults(**{str(k): float(v) for k, v in kinds.items() if k != "server_dies"})


def _plain(config: DictConfig) -> dict[str, Any]:
    found: Any = OmegaConf.to_container(config, resolve=True)
    return {str(name): value for name, value in found.items()}


def build(
    config: DictConfig | dict[str, Any], key: str, without: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """The ``_target_`` of a group with its settings filled in, to be called with the rest.

    Raises:
        FedgenError: for one that may not be called (``fedgen.factories``), named by ``key``.
    """
    whole = _plain(config) if isinstance(config, DictConfig) else config
    settings = {name: value for name, value in whole.items() if name not in without}
    factories.check(settings, key)
    _check_names(settings, key)
    target: Callable[..., Any] = instantiate(settings, _partial_=True, _convert_="all")
    return target


def _check_names(settings: dict[str, Any], key: str) -> None:
    """Raises FedgenError for a setting that its factory, or one inside, does not take."""
    for name, value in settings.items():
        if isinstance(value, dict):
            _check_names(value, f"{key}.{name}")
    if "_target_" in settings:
        target = get_object(settings["_target_"])
        taken = list(inspect.signature(target).parameters.values())
        names = [each.name for each in taken if each.kind is not each.VAR_KEYWORD]
        unpacked = _unpacked(target)
        if len(names) < len(taken) and not unpacked:
            return  # takes whatever there is
        names += unpacked
        for name in settings:
            if name not in names and name not in ("_target_", "_partial_"):
                remedy = f"choose of: {', '.join(names)}"
                raise FedgenError(f"{key}.{name}", "is no setting", remedy)


def _unpacked(target: Any) -> dict[str, Any]:
    """The types of what a function takes as ``**name: Unpack[...]``."""
    hints = typing.get_type_hints(target) if inspect.isfunction(target) else {}
    packed = [hint for hint in hints.values() if typing.get_origin(hint) is typing.Unpack]
    found: dict[str, Any] = {}
    for hint in packed:
        found |= typing.get_type_hints(typing.get_args(hint)[0])
    return found


def device(name: str) -> str:
    """``auto`` is CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise FedgenError("device", "cuda is not available here", "set device=cpu")
        _repeatable()
    return name


def _repeatable() -> None:
    """Kernels of CUDA that sum in the same order each time: a seeded run repeats bit for bit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (no stubs)


def check(config: DictConfig) -> None:
    """Raises FedgenError for the first setting that cannot be."""
    try:
        whole = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        key, problem = error.full_key or "config", str(error).splitlines()[0]
        raise FedgenError(key, problem, "mend it") from error
    factories.check(whole, "config")
    for key, allowed in CHOICES.items():
        value = OmegaConf.select(config, key)
        if value not in allowed and (value is not None or key not in OPTIONAL):
            raise FedgenError(key, f"cannot be {value!r}", f"choose {' or '.join(allowed)}")
    for key in ("rounds", "sample_every", "log_every", "runtime.checkpoint_every"):
        _whole(config, key, 1, 10**9)
    _whole(config, "privacy.colluders", 0, 10**9)
    if config.privacy.least not in (None, "all"):
        _whole(config, "privacy.least", 1, 10**9)
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
    check_seed(config)
    check_evaluation(config)
    _check_release(config)
    check_delta(config.privacy.delta)
    for key in (
        "privacy.target_epsilon",
        "privacy.noise_multiplier",
        "privacy.budget_epsilon",
    ):
        value = OmegaConf.select(config, key)
        if value is not None and not 0 < value <= MOST:
            raise FedgenError(
                key, f"must be positive and at most {MOST:g}, got {value:g}", "e.g. 10, or null"
            )
    if config.start is not None and config.privacy.target_epsilon is not None:
        raise FedgenError(
            "start",
            "a run that begins with another's weights has no ε of its own",
            "set privacy.target_epsilon=null and privacy.noise_multiplier, or take privacy=none",
        )
    _check_parameters("method", config.method)
    _check_warm_up(config)


def _check_warm_up(config: DictConfig) -> None:
    """Raises FedgenError for a warm-up that cannot be."""
    chosen = config.warm_up
    if chosen.method is None:
        return
    if not isinstance(chosen.method, DictConfig):
        raise FedgenError("warm_up.method", f"cannot be {chosen.method!r}", "see configs/warm_up")
    if config.start is not None:
        problem = "cannot go before networks that another run trained"
        raise FedgenError("warm_up", problem, "take warm_up=none, or start=null")
    for name in ("rounds", "batch"):
        _whole(config, f"warm_up.{name}", 1, 10**9)
    noise = chosen.noise_multiplier
    if not 0 < noise <= MOST:
        problem = f"must be positive and at most {MOST:g}, got {noise:g}"
        raise FedgenError("warm_up.noise_multiplier", problem, "e.g. 2")
    _check_parameters("warm_up.method", chosen.method)


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
            problem = "is no setting"
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


def check_seed(config: DictConfig) -> None:
    """Raises FedgenError for a seed that coins cannot follow from."""
    _whole(config, "seed", -(2**63), 2**63 - 1)


def check_evaluation(config: DictConfig) -> None:
    """Raises FedgenError unless there is something to judge by, or no judge."""
    chosen = config.evaluation
    _whole(config, "evaluation.samples", least_samples(chosen), 10**7)
    _whole(config, "evaluation.seeds", 1 if chosen.classifiers else 0, 1000)
    if chosen.jobs is not None:
        _whole(config, "evaluation.jobs", 1, 1024)
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
        return LEAST_JUDGED
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


def _whole(config: DictConfig, key: str, least: int, most: int) -> None:
    value = OmegaConf.select(config, key)
    if not isinstance(value, int) or not least <= value <= most:
        raise FedgenError(
            key, f"must be a whole number from {least} to {most}, got {value!r}", "mend it"
        )


def _check_parameters(key: str, settings: DictConfig) -> None:
    """Holds settings, and those inside of them, against the types of what they are for."""
    if "rows" in settings and settings.rows is None:
        raise FedgenError(
            "data.public_rows",
            f"is not set, and {key}.rows divides by a public number of rows",
            "give one near yours, e.g. data.public_rows=14000: it is no secret then",
        )
    target = settings.get("_target_")
    made = get_object(target) if target is not None else None
    found = {**_hints(made), **_unpacked(made)}
    for name, value in settings.items():
        if not str(name).startswith("_"):
            _check_parameter(f"{key}.{name!s}", value, found.get(str(name)))


def _hints(made: Any) -> dict[str, Any]:
    """The types of a function's parameters, or of what a class is made of."""
    try:
        return typing.get_type_hints(made.__init__ if inspect.isclass(made) else made)
    except (AttributeError, NameError, TypeError):  # of one that declares none
        return {}


def _check_parameter(key: str, value: Any, hint: Any) -> None:
    """Holds a method's parameter against its type: one of its words, a finite number that is not
    below zero, decays and betas below one."""
    literals = [h for h in (hint, *typing.get_args(hint)) if typing.get_origin(h) is Literal]
    words = [str(word) for literal in literals for word in typing.get_args(literal)]
    if words and value not in words and (hint in literals or isinstance(value, str)):
        others = [] if hint in literals else ["a number"]
        raise FedgenError(key, f"cannot be {value!r}", f"choose {' or '.join(others + words)}")
    kinds = {hint, *typing.get_args(hint)}
    if isinstance(value, str) and not words and kinds & {int, float}:
        raise FedgenError(key, f"must be a number, got {value!r}", "mend it")
    if isinstance(value, DictConfig):
        _check_parameters(key, value)
    elif Callable in (typing.get_origin(h) for h in (hint, *typing.get_args(hint))):
        if value is not None:
            raise FedgenError(key, f"cannot be {value!r}", "it is a group of settings")
    elif isinstance(value, ListConfig):
        if len(value) != 2 and typing.get_origin(hint) is not Sequence:
            raise FedgenError(key, f"must be two numbers, got {list(value)}", "e.g. [0.5, 0.9]")
        whole = int in typing.get_args(hint)
        for inner in value:
            good = isinstance(inner, int if whole else int | float)
            if not good or isinstance(inner, bool):
                kind = "whole numbers" if whole else "numbers"
                raise FedgenError(key, f"must be {kind}, got {inner!r}", "mend it")
            _check_parameter(key, inner, None)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        decay = key.endswith(("betas", "ema"))
        may_be_zero = decay or key.endswith(_MAY_BE_ZERO)
        if key == "method.clip" and 0 < value < _LEAST_CLIP:
            raise FedgenError(
                key, f"must be at least {_LEAST_CLIP:g}, got {value:g}", "squares vanish below"
            )
        if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
            raise FedgenError(key, f"must be positive, got {value:g}", "raise it")
        if int in kinds and float not in kinds and value != int(value):
            raise FedgenError(key, f"must be a whole number, got {value:g}", "round it")
        if decay and value >= 1:
            raise FedgenError(key, f"must be below 1, got {value:g}", "lower it")


def decide(config: DictConfig, method: Callable[[float | None], Method]) -> Privacy:
    """The noise and the budget: a target solves for the noise; noise and target end the run in
    time; noise alone runs all rounds.

    Raises:
        FedgenError: if the target cannot be reached, or neither is given.
    """
    target, noise = config.privacy.target_epsilon, config.privacy.noise_multiplier
    delta, rounds = config.privacy.delta, config.rounds
    plan = method(None).plan
    trusted = method(1.0).plan.trusted  # without noise, nobody is trusted with it
    all_rows = plan.rows_per_round * plan.asked(rounds)
    if trusted:
        all_rows = UNLIMITED  # in mode secure rounds done again count too, and need not end a run
    unlimited = Budget(rounds, all_rows, 0.0)
    mode = config.privacy.noise
    if rounds < plan.least:
        problem = f"{rounds} end before the {plan.least} that anything comes of"
        raise FedgenError("rounds", problem, "raise it: those after train the generator")
    if config.names.privacy == "none":
        if target is not None or noise is not None:
            raise FedgenError("privacy", "none has no target and no noise", "take privacy=dp")
        return Privacy(delta, mode, None, unlimited)
    if target is None and noise is None:
        raise FedgenError(
            "privacy",
            "neither privacy.target_epsilon nor privacy.noise_multiplier is given",
            "give one, or take privacy=none",
        )
    if target is None:
        return Privacy(delta, mode, noise, unlimited)
    server = config.privacy.adversary == "server"
    if server and trusted:
        problem = "cannot be server: clients trust it, and there is no bound against it"
        raise FedgenError("privacy.adversary", problem, "set it to release")
    if noise is None:
        noise = least_noise(
            lambda sigma: planned(method(sigma), config, server, epsilon),
            target,
            lambda sigma: planned(method(sigma), config, server, rough_epsilon),
        )
        return Privacy(delta, mode, noise, calibrated(method(noise), rounds))
    budget = affordable(method(noise), config, server, target)
    if budget.rounds < plan.least:
        raise FedgenError(
            "privacy.target_epsilon",
            f"is spent after {budget.rounds} of the {plan.least} rounds that anything comes of",
            "raise it, or privacy.noise_multiplier",
        )
    return Privacy(delta, mode, noise, budget)


def calibrated(method: Method, rounds: int) -> Budget:
    """The budget that the noise was solved for: rows of the busiest client but for a tail. Where
    clients trust the server, how often it asks one costs nothing."""
    asked = method.plan.asked(rounds)
    if method.plan.trusted:
        return Budget(rounds, UNLIMITED, 0.0)
    rows = method.cohort.busiest(method.plan.rows_per_round, asked, TAIL)
    stop = method.cohort.stop_probability(method.plan.rows_per_round, asked, rows)
    return Budget(rounds, rows, stop)


def planned(method: Method, config: DictConfig, server: bool, by: Accountant) -> float:
    """epsilon promised for the whole run to one adversary."""
    budget = calibrated(method, config.rounds)
    found = view(method, budget, config.rounds, budget.rows, config.privacy.delta, server, by)
    return found.or_infinity


def view(
    method: Method,
    budget: Budget,
    rounds: int,
    rows: int,
    delta: float,
    server: bool,
    by: Accountant = epsilon,
) -> Epsilon:
    """epsilon to one adversary after ``rounds`` rounds, for a client that answered ``rows``."""
    if method.plan.before is not None:
        return by(canonical(method.plan.before), delta, method.plan.relation)
    against_server = by(canonical(method.plan.server(rows)), delta, method.plan.relation)
    if server or method.plan.release is None:
        return against_server
    event, relation = method.plan.release(rounds), method.plan.relation
    found = release_epsilon(event, delta, relation, budget.stop_probability, by)
    return smaller(found, against_server)


def affordable(method: Method, config: DictConfig, server: bool, target: float) -> Budget:
    """How far given noise may go: rows of a client (against the server), or rounds."""
    per_round, delta = method.plan.rows_per_round, config.privacy.delta
    relation = method.plan.relation
    asked = method.plan.asked(config.rounds)
    all_rows = per_round * asked
    if server or method.plan.release is None:

        def spent(rows: int) -> float:
            return epsilon(
                canonical(method.plan.server(rows)), delta, method.plan.relation
            ).or_infinity

        # where everybody answers everything, whole rounds are spent
        everybody = not method.cohort.drawn
        unit = per_round if everybody else 1
        rows = unit * most_repetitions(lambda count: spent(unit * count), target, all_rows // unit)
        stop = method.cohort.stop_probability(per_round, asked, rows)
        enough = rows == all_rows or not everybody
        rounds = config.rounds if enough else method.plan.rounds(rows // per_round)
        stop = 0.0 if everybody else stop
        if rows == 0:
            raise _impossible(target)
        return Budget(rounds, rows, stop)
    release = method.plan.release
    rounds = most_repetitions(
        lambda count: epsilon(canonical(release(count)), delta, relation).or_infinity,
        target,
        config.rounds,
    )
    if rounds == 0:
        raise _impossible(target)
    return Budget(rounds, UNLIMITED if method.plan.trusted else all_rows, 0.0)


def _impossible(target: float) -> FedgenError:
    return FedgenError(
        "privacy.target_epsilon",
        f"{target:g} is spent by the first round at this noise",
        "raise privacy.noise_multiplier, or leave it out to solve for it",
    )
