"""Check a resolved configuration and build the objects of a run. Nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from dp_accounting import NonPrivateDpEvent
from omegaconf import DictConfig, ListConfig, OmegaConf

from fedgen.config.build import build
from fedgen.config.device import resolve_device
from fedgen.config.extensions import is_extension
from fedgen.config.registry import to_plain
from fedgen.config.validation import check, faults
from fedgen.data.canaries import Canaries, add_canaries
from fedgen.data.corruption import corrupt, sample_bugged_clients
from fedgen.data.datasets import Dataset, Shard, build_dataset
from fedgen.data.labels import validate_names
from fedgen.data.partition import Index, check_clients, check_one_client_per_person, check_shards
from fedgen.errors import FedgenError
from fedgen.methods.api import AggregationKind, ClientProgram, Method, PublicFacts
from fedgen.methods.families.pretraining import requires_sums, warm_up
from fedgen.methods.families.scoring import with_score
from fedgen.methods.plan import Plan
from fedgen.privacy.aggregation import Secure
from fedgen.privacy.budget import delta_problem
from fedgen.privacy.events import Relation, Unit, canonical
from fedgen.randomness import RandomStreams
from fedgen.run.calibrate import Privacy, Progress, calibrate, calibrate_after_dropout
from fedgen.run.noise_domain import noise_domain, rehearsed_domain
from fedgen.storage.io import digest
from fedgen.testing.fault_rates import FaultRates

_DEFAULT_ROUNDS = 400


def default_rounds(config: DictConfig) -> int:
    """Return the rounds of a run with ``rounds=null``, if its method has no fixed number."""
    return _DEFAULT_ROUNDS + (config.get("score") is not None)


@dataclass(frozen=True)
class ResolvedMethod:
    """The parts of a run that depend only on its settings and on public facts about its clients.

    at_noise: builds the method at another noise multiplier.
    program: builds the client program in another process.
    with_dropouts: builds the method as accounted if a missing response may have revealed a cohort.
    with_aggregation: builds the method with another aggregation.
    derived_settings: names of settings that were null and were derived by the method.
    """

    method: Method
    privacy: Privacy
    at_noise: Callable[[float | None], Method]
    program: Callable[[], ClientProgram]
    with_dropouts: Callable[[], Method]
    with_aggregation: Callable[[AggregationKind], Method]
    derived_settings: frozenset[str]

    @property
    def noise(self) -> float | None:
        """Return the noise multiplier."""
        return self.privacy.noise_multiplier

    @property
    def dropouts_reveal_cohorts(self) -> bool:
        """Return whether a missing response may reveal a client's sample that is accounted as
        secret. (A cohort that the server samples does not depend on the process of a client.)"""
        budget, plan, counted = self.privacy.budget, self.method.plan, self.with_dropouts().plan
        rows = budget.samples_per_client
        if canonical(plan.server_event(rows)) != canonical(counted.server_event(rows)):
            return True
        if plan.release_event is None or self.method.cohort.is_sampled:
            return False
        assert counted.release_event is not None
        first, other = plan.release_event(budget.rounds), counted.release_event(budget.rounds)
        return canonical(first) != canonical(other)


@dataclass(frozen=True)
class Setup(ResolvedMethod):
    """All parts of a run. ``domain``: see ``noise_domain``; ``canaries``: of an audited run;
    ``repetition``: its index among those of ``fedgen attack``."""

    config: DictConfig
    domain: str
    streams: RandomStreams
    dataset: Dataset
    shards: list[Index]
    faults: FaultRates
    canaries: Canaries | None
    repetition: int | None

    @property
    def partition_digest(self) -> str:
        """Return a digest of the assignment of records to clients, by position."""
        return digest(*(shard.tobytes() for shard in self.shards))

    @property
    def owners(self) -> str:
        """Return a digest of the groups of images that the unit protects as a whole, in any order:
        spends add up over runs with the same groups. Empty if the unit is a record."""
        unit, persons = self.method.plan.unit, self.dataset.persons
        if unit is Unit.CLIENT:
            return self.dataset.digest_of(self.shards)
        if unit is Unit.PERSON:
            assert persons is not None
            return self.dataset.digest_of(
                np.flatnonzero(persons == person) for person in np.unique(persons)
            )
        return ""

    def counting_dropouts(self, progress: Progress) -> Setup:
        """Return the setup as accounted after a dropout: no sampling amplifies, and with a target
        and a noise multiplier the run ends earlier (``calibrate_after_dropout``).

        Raises:
            FedgenError: if no rounds remain.
        """
        method = self.with_dropouts()
        privacy = calibrate_after_dropout(self.config, method, self.privacy, progress)
        return replace(self, method=method, privacy=privacy)

    def held_out(self, count: int) -> Shard | None:
        """Return the first ``count`` held-out images, if there are any."""
        if not self.config.held_out:
            return None
        images, labels = self.dataset.test_images[:count], self.dataset.test_labels[:count]
        return Shard(torch.from_numpy(images), torch.from_numpy(labels))


def setup(config: DictConfig, branch: str | None = None) -> Setup:
    """Check a configuration and build the objects of the run.

    Args:
        branch: noise domain of a resumed run; None: see ``noise_domain``.

    Raises:
        FedgenError: for the first invalid setting.
    """
    check(config)
    torch.set_num_threads(config.runtime.threads)
    streams = RandomStreams.from_seed(config.seed, config.privacy.noise)
    held, shards = partitioned_data(config)
    corrupted_clients = sample_bugged_clients(
        len(shards), config.corruption.fraction, streams.at("data")
    )
    held = corrupt(held, shards, corrupted_clients, config.corruption.fault)
    all_clients = len(shards)
    if config.group is not None:
        shards = [shards[client] for client in _members(config.group, len(shards))]
    rows = None if held.is_remote or len(shards) > 1 else len(shards[0])
    resolved = resolve_method(config, len(shards), rows, held.classes, held.shape, all_clients)
    check_shards_fit(config, held, resolved.method.plan)
    wrong = (
        None if resolved.noise is None else delta_problem_of(resolved.privacy, resolved.method.plan)
    )
    if wrong is not None and resolved.privacy.noise == "secure" and branch is None:
        raise FedgenError("privacy.delta", *wrong)  # a resumed run has stated its δ
    if branch is None:
        branch = rehearsed_domain(config, resolved.noise) or noise_domain(
            config, held, shards, resolved.noise
        )
    streams = streams.at("branch", branch)
    canaries, repetition = None, OmegaConf.select(config, "audit.repetition")
    if repetition is not None:
        streams = streams.for_repetition(repetition)
    if OmegaConf.select(config, "audit.canaries"):
        plan = resolved.method.plan
        # equal in all processes of a run
        audit_streams = canary_streams(config)
        held, shards, canaries = add_canaries(
            held, shards, plan.unit, plan.relation, config.audit.canaries, audit_streams, repetition
        )
    return Setup(
        **vars(resolved),
        config=config,
        domain=branch,
        streams=streams,
        dataset=held,
        shards=shards,
        faults=faults(config),
        canaries=canaries,
        repetition=repetition,
    )


def canary_streams(config: DictConfig) -> RandomStreams:
    """Return the streams that choose the canaries of an audited run or of the repetitions of a
    run."""
    seed = config.audit.get("seed")
    return RandomStreams.from_seed(config.seed if seed is None else seed, "seeded").at("audit")


def resolve_method(
    config: DictConfig,
    clients: int,
    rows: int | None,
    classes: int,
    shape: tuple[int, int, int],
    all_clients: int | None = None,
) -> ResolvedMethod:
    """Return the method, its noise and its budget, and write the derived settings into ``config``.
    The result is the same in every process with the same arguments.

    Args:
        rows: number of records of a single client; None for several clients.
        classes, shape: number of labels, and (channels, height, width) of images.
        all_clients: number of clients, if ``clients`` are a group of them.

    Raises:
        FedgenError: for the first invalid setting.
    """
    asked_for = config.privacy
    facts = PublicFacts(
        clients,
        rows,
        classes,
        shape,
        requires_all=config.runtime.min_success >= 1,
        aggregation_kind=asked_for.aggregation,
        threshold=asked_for.threshold,
        colluders=asked_for.colluders,
        unit=Unit(asked_for.unit) if asked_for.unit else None,
        persons=public_persons(config),
        all_clients=all_clients,
    )
    factory = build(config.method, "method")
    make = partial(_method, factory, facts, config)
    given_rounds = config.rounds
    config.rounds = given_rounds or default_rounds(config)
    fixed = make(None).plan.fixed_rounds
    derived = {"rounds"} if given_rounds is None and fixed is not None else set[str]()
    config.rounds = fixed or config.rounds
    privacy = calibrate(config, make)
    noise = privacy.noise_multiplier
    if settled := make(noise).derived_settings:
        derived |= {f"method.{key}" for key in settled if config.method[key] is None}
        config.method.update(settled)
        factory = build(config.method, "method")
        make = partial(_method, factory, facts, config)
        if (length := make(noise).plan.fixed_rounds) not in (None, config.rounds):
            config.rounds = length
            privacy = calibrate(config, make)
            noise = privacy.noise_multiplier
    _check_rounds(config, given_rounds)
    method = make(noise)
    if not _sums_fit(method.plan):
        facts = replace(facts, ring_bits=64)
        make = partial(_method, factory, facts, config)
        method = make(noise)
    privacy = replace(privacy, protected=_protected(config, method.plan, clients, rows))
    _check_aggregation(config, method.plan)
    return ResolvedMethod(
        method,
        privacy,
        at_noise=make,
        program=partial(_program, make, noise),
        with_dropouts=partial(_method, factory, replace(facts, had_dropout=True), config, noise),
        with_aggregation=lambda kind: _method(factory, facts.with_aggregation(kind), config, noise),
        derived_settings=frozenset(derived),
    )


def _check_rounds(config: DictConfig, given: int | None) -> None:
    """Raise FedgenError if the method has another number of rounds than the given one."""
    if given not in (None, config.rounds):
        scores = int(config.get("score") is not None)
        problem = f"cannot be {given - scores}: {config.names.method} has "
        problem += f"{config.rounds - scores} rounds with these settings"
        raise FedgenError("rounds", problem, "leave it out, or set it to null")


def _protected(config: DictConfig, plan: Plan, clients: int, rows: int | None) -> int | None:
    """Return the public number of protected units; None if it is not public."""
    if plan.unit is Unit.CLIENT:
        return clients
    if plan.unit is Unit.PERSON:
        return public_persons(config)
    public = public_rows(config)
    if public is None and plan.relation is Relation.REPLACE_ONE:
        return rows  # single client: replacing a record keeps the number of records
    return public


def public_rows(config: DictConfig) -> int | None:
    """Return the public number of records of all clients; None if it is not given."""
    rows = OmegaConf.select(config, "data.public_rows") or OmegaConf.select(config, "method.rows")
    return None if rows is None else int(rows)


def public_persons(config: DictConfig) -> int | None:
    """Return the public number of persons of all clients; None if it is not given."""
    persons: int | None = config.data.get("public_persons")
    return persons


def delta_problem_of(privacy: Privacy, plan: Plan) -> tuple[str, str] | None:
    """Return the problem with δ for a release, and the remedy; see ``budget.delta_problem``."""
    return delta_problem(privacy.delta, privacy.protected, plan.unit.value)


def check_shards_fit(config: DictConfig, held: Dataset, plan: Plan) -> None:
    """Raise FedgenError if replacing a record would move other records."""
    by_place = plan.relation is Relation.REPLACE_ONE and plan.unit is Unit.RECORD
    if held.example_keys.moves and by_place:
        raise FedgenError(
            "data",
            f"{held.example_keys.moves}, and {config.names.method} protects records by their place",
            "use a method of sums, e.g. mixture, dp_merf or dpgan",
        )


def _sums_fit(plan: Plan) -> bool:
    """Return whether the integers of a secure sum can represent it."""
    sums = plan.aggregation
    if not isinstance(sums, Secure):
        return True
    return all(sums.fits(std, sums.asked * largest) for std, largest in plan.value_ranges)


def _check_aggregation(config: DictConfig, plan: Plan) -> None:
    """Raise FedgenError for responses that their aggregation does not support."""
    aggregation = plan.aggregation
    if not isinstance(aggregation, Secure):
        if config.runtime.masks:
            raise FedgenError(
                "runtime.masks",
                "hide the terms of a secure sum, and there is none",
                "set it to false, or take privacy.aggregation=secure",
            )
        return
    for std, largest in plan.value_ranges:
        aggregation.check_range(std, aggregation.asked * largest)
    answers = config.runtime.min_success * aggregation.asked
    if answers < aggregation.threshold:
        raise FedgenError(
            "runtime.min_success",
            f"accepts {answers:g} of {aggregation.asked} responses, but the noise needs "
            f"{aggregation.threshold}",
            "raise it, or lower privacy.threshold",
        )


def partitioned_data(config: DictConfig) -> tuple[Dataset, list[Index]]:
    """Return the data set without held-out images, and the records of all clients."""
    streams = RandomStreams.from_seed(config.seed, config.privacy.noise).at("data")
    rows, by_person = config.data.get("public_rows"), config.privacy.unit == Unit.PERSON.value
    held = dataset(config).hold_out(config.held_out, streams, rows, by_person)
    if not held.is_remote:
        check_clients(config.partition.get("clients"), len(held.labels))
    shards = build(config.partition, "partition")(
        images=held.images,
        labels=held.labels,
        classes=held.classes,
        writers=held.writers,
        streams=streams,
    )
    if not held.is_remote:  # each site checks its own persons
        check_shards(shards, config.partition.get("clients"), len(held.labels))
        check_persons(config, held, shards)
    return held, shards


def check_persons(config: DictConfig, held: Dataset, shards: list[Index]) -> None:
    """Raise FedgenError if a run protects persons that are unknown, or have records at several of
    these clients."""
    if config.privacy.unit == Unit.PERSON.value:
        check_one_client_per_person(shards, held.persons)


def _members(group: object, clients: int) -> list[int]:
    """Return the clients of a group.

    Raises:
        FedgenError: unless it is a list of distinct clients.
    """
    members = list(group) if isinstance(group, ListConfig) else []
    numbers = [member for member in members if isinstance(member, int) and 0 <= member < clients]
    if not numbers or len(set(numbers)) < len(members):
        problem = f"must list clients from 0 to {clients - 1}, each once"
        raise FedgenError("group", problem, "e.g. group=[0,3,7]")
    return sorted(numbers)


def dataset(config: DictConfig) -> Dataset:
    """Return the data set. A random test split is the same for all seeds: runs with several seeds
    are evaluated on the same images, which none of them trains on."""
    data: object = build(config.data, "data")(
        root=config.data.get("root"),
        public_rows=config.data.get("public_rows"),
        streams=RandomStreams.from_seed(0, "seeded").at("data"),
    )
    if not isinstance(data, Dataset):
        problem = f"returns a {type(data).__name__}, not a Dataset"
        raise FedgenError("data", problem, "see fedgen.data.datasets")
    if not is_extension(config.data.type):
        return data
    if {data.images.dtype, data.test_images.dtype} != {np.dtype(np.uint8)}:
        problem = f"has images of {data.images.dtype}"
        raise FedgenError("data", problem, "convert them to uint8, from 0 to 255")
    return build_dataset(*(getattr(data, field.name) for field in fields(data)))


def published_names(ready: Setup) -> list[str] | None:
    """Return the published names of labels: those set by ``data.labels``, or those of the data set
    (folder names, unless ``data.names=false``)."""
    names = ready.dataset.names
    return label_names(ready.config) or (None if names is None else list(names))


def label_names(config: DictConfig) -> list[str] | None:
    """Return the names of labels given by a setting, which are public."""
    names = OmegaConf.select(config, "data.labels")
    plain: Any = OmegaConf.to_container(names) if isinstance(names, ListConfig) else names
    return None if plain is None else validate_names(plain)


def _method(
    make: Callable[..., Method],
    facts: PublicFacts,
    config: DictConfig,
    noise_multiplier: float | None,
) -> Method:
    device = resolve_device(config.device)
    method: object = make(facts=facts, noise_multiplier=noise_multiplier, device=device)
    if not isinstance(method, Method):
        problem = f"returns a {type(method).__name__}, not a Method"
        raise FedgenError("method.type", problem, "see docs/own-method.md")
    if config.warm_up.method is not None:
        method = _with_warm_up(method, facts, config, noise_multiplier is not None, device)
    if (score := config.get("score")) is not None:
        method = with_score(
            method,
            facts,
            None if noise_multiplier is None else score.noise_multiplier,
            config.rounds,
            public_rows(config) or facts.records or 1,  # a factor of all scores
            score.samples,
            device,
        )
    if config.start is None:
        return method
    reason = "it started from the weights of another run, whose cost is not counted"
    plan = replace(
        method.plan,
        prior_event=NonPrivateDpEvent(),
        amplified_by=dict.fromkeys(method.plan.amplified_by),
        not_amplified_because=dict.fromkeys(method.plan.not_amplified_because, reason),
        claim=None,
    )
    return replace(method, plan=plan)


def _with_warm_up(
    method: Method, facts: PublicFacts, config: DictConfig, private: bool, device: str
) -> Method:
    """Return the method preceded by that of ``warm_up``."""
    settings = config.warm_up
    noise = settings.noise_multiplier if private else None
    try:
        start = build(settings.method, "method")
        first = start(facts=facts, noise_multiplier=noise, device=device)
    except FedgenError as error:
        key = f"warm_up.{error.key}" if error.key.startswith("method") else error.key
        raise FedgenError(key, error.problem, error.remedy) from error
    if not {"batch", "sampling_rate"} <= set(config.method):
        raise requires_sums()
    on_samples = {**to_plain(config.method), "batch": settings.batch, "sampling_rate": 1.0}
    factory = build(on_samples, "method")
    alone = PublicFacts(1, None, facts.classes, facts.shape)
    return warm_up(
        first,
        method,
        lambda: factory(facts=alone, noise_multiplier=None, device=device),
        facts.classes,
        settings.rounds,
        settings.batch,
    )


def _program(make: Callable[[float | None], Method], noise: float | None) -> ClientProgram:
    return make(noise).client
