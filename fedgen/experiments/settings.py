"""A resolved configuration, checked and turned into objects. Nothing here writes anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dp_accounting import NonPrivateDpEvent
from omegaconf import DictConfig, ListConfig, OmegaConf

from fedgen import factories
from fedgen.coins import Coins
from fedgen.data.canaries import Canaries, plant
from fedgen.data.corruption import plant_flip, with_the_bug
from fedgen.data.datasets import Dataset, Shard, checked
from fedgen.data.labels import named
from fedgen.data.partition import Index, check_clients, check_shards, of_persons
from fedgen.errors import FedgenError
from fedgen.experiments.building import build, device, plain
from fedgen.experiments.planning import Privacy, decide, decide_again
from fedgen.experiments.validation import check, faults
from fedgen.federation.fault_rates import Faults
from fedgen.files import digest, read_json
from fedgen.method import ClientProgram, Kind, Method, Plan, PublicFacts
from fedgen.privacy.budget import delta_problem
from fedgen.privacy.events import Relation, Unit, canonical
from fedgen.privacy.releases import Secure
from fedgen.warm_up import not_sums, warm_up


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

    @property
    def gaps_show(self) -> bool:
        """Whether a missing answer may show a draw that is counted as secret."""
        rows = self.privacy.budget.rows
        counted = canonical(self.method.plan.server(rows))
        return counted != canonical(self.with_gaps().plan.server(rows))


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

    @property
    def shares(self) -> str:
        """A digest of who has which rows, by their places."""
        return digest(*(shard.tobytes() for shard in self.shards))

    @property
    def owners(self) -> str:
        """A digest of which images are one's whom the unit protects as a whole, in any order: what
        several images have cost together adds up over runs in which they are the same ones. Empty
        where the unit is an image."""
        unit, persons = self.method.plan.unit, self.dataset.persons
        if unit is Unit.CLIENT:
            return self.dataset.digest_of(self.shards)
        if unit is Unit.PERSON:
            assert persons is not None
            return self.dataset.digest_of(
                np.flatnonzero(persons == person) for person in np.unique(persons)
            )
        return ""

    def counting_gaps(self) -> Setup:
        """The same where a missing answer may have shown a draw: no draw amplifies, and a target
        beside a noise multiplier ends it sooner.

        Raises:
            FedgenError: if that leaves nothing to do.
        """
        method = self.with_gaps()
        return replace(self, method=method, privacy=decide_again(self.config, method, self.privacy))

    def held_out(self, count: int) -> Shard | None:
        """The first ``count`` rows that nobody trains on, if there are any."""
        if not self.config.held_out:
            return None
        images, labels = self.dataset.test_images[:count], self.dataset.test_labels[:count]
        return Shard(torch.from_numpy(images), torch.from_numpy(labels))


def setup(config: DictConfig, branch: str | None = None) -> Setup:
    """Checks a configuration and builds the run's objects.

    Args:
        branch: of a run that goes on; None: see ``branch_of``.

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
    wrong = None if found.noise is None else wrong_delta(found.privacy, found.method.plan)
    if wrong is not None and found.privacy.noise == "secure" and branch is None:
        raise FedgenError("privacy.delta", *wrong)  # a run that goes on has promised its own
    if branch is None:
        branch = _rehearsed(config, found.noise) or branch_of(config, held, shards, found.noise)
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
    asked_for = config.privacy
    facts = PublicFacts(
        clients,
        rows,
        classes,
        shape,
        all_answer=config.runtime.min_success >= 1,
        aggregating=asked_for.aggregation,
        threshold=asked_for.threshold,
        colluders=asked_for.colluders,
        unit=Unit(asked_for.unit) if asked_for.unit else None,
        images_per_person=asked_for.images_per_person or 1,
    )
    made = build(config.method, "method", without=("strategy",))
    make = partial(_method, made, facts, config)
    open_: dict[str, int | None] = {}
    if (length := make(None).plan.length) not in (None, config.rounds):
        open_["rounds"], config.rounds = config.rounds, length
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
    if not _has_room(method.plan):
        facts = replace(facts, ring_bits=64)
        make = partial(_method, made, facts, config)
        method = make(noise)
    privacy = replace(privacy, protected=_protected(config, method.plan, clients, rows))
    _check_meeting(config, method.plan)
    return Decided(
        method,
        privacy,
        at_noise=make,
        program=partial(_program, make, noise),
        with_gaps=partial(_method, made, replace(facts, unanswered=True), config, noise),
        aggregated=lambda kind: _method(made, facts.aggregated_by(kind), config, noise),
        left_open=open_,
    )


def _protected(config: DictConfig, plan: Plan, clients: int, rows: int | None) -> int | None:
    """The number of protected units that is public; None where none is."""
    if plan.unit is Unit.CLIENT:
        return clients
    public = OmegaConf.select(config, "data.public_rows") or OmegaConf.select(config, "method.rows")
    if public is None and plan.relation is Relation.REPLACE_ONE:
        public = rows  # of a single client: replacing a record keeps their number
    return None if public is None else max(int(public) // plan.images_per_person, 1)


def wrong_delta(privacy: Privacy, plan: Plan) -> tuple[str, str] | None:
    """What is wrong with δ for a release, and what to do; see ``budget.delta_problem``."""
    return delta_problem(privacy.delta, privacy.protected, plan.unit.value)


def check_places(config: DictConfig, held: Dataset, plan: Plan) -> None:
    """Raises FedgenError where a record that is replaced by another moves others."""
    by_place = plan.relation is Relation.REPLACE_ONE and plan.unit is Unit.RECORD
    if held.places.moves and by_place:
        raise FedgenError(
            "data",
            f"{held.places.moves}, and {config.names.method} protects records by their place",
            "take a method of sums, e.g. mixture, dp_merf or dpgan",
        )


def _has_room(plan: Plan) -> bool:
    """Whether the words of a secure sum, if it is one, can hold it."""
    sums = plan.aggregation
    if not isinstance(sums, Secure):
        return True
    return all(sums.fits(std, sums.asked * largest) for std, largest in plan.extents)


def _check_meeting(config: DictConfig, plan: Plan) -> None:
    """Raises FedgenError for answers that their aggregation cannot take in."""
    aggregation = plan.aggregation
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
    answers = config.runtime.min_success * aggregation.asked
    if answers < aggregation.threshold:
        raise FedgenError(
            "runtime.min_success",
            f"lets {answers:g} of {aggregation.asked} answers do, and the noise counts on "
            f"{aggregation.threshold}",
            "raise it, or lower privacy.threshold",
        )


def shared_out(config: DictConfig) -> tuple[Dataset, list[Index]]:
    """The data set without the rows held out, and all clients' rows of it."""
    coins = Coins.of(config.seed, config.privacy.noise).at("data")
    held = dataset(config).holding_out(config.held_out, coins)
    if not held.elsewhere:
        check_clients(config.partition.clients, len(held.labels))
    shards = build(config.partition, "partition")(
        images=held.images,
        labels=held.labels,
        classes=held.classes,
        writers=held.writers,
        coins=coins,
    )
    if not held.elsewhere:
        check_shards(shards, config.partition.clients, len(held.labels))
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


def branch_of(
    config: DictConfig, held: Dataset, shards: list[Index], noise_multiplier: float | None
) -> str:
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
    chosen += [whole["runtime"][key] for key in ("threads", "min_success")]
    chosen += [whole.get("audit"), device(config.device), sorted(whole["group"] or [])]
    chosen.append(in_short(noise_multiplier))
    if whole["warm_up"]["method"] is not None:
        chosen.append(whole["warm_up"])
    if held.classes != held.labels.max(initial=-1) + 1:
        chosen.append(held.classes)  # labels that no row has: the rows' digest does not tell
    chosen = _without_packages(chosen)
    facts = json.dumps(chosen, sort_keys=True).encode(), held.digest.encode()
    if factories.is_outside(config.partition["_target_"]):  # settings do not say what it does
        return digest(*facts, *(shard.tobytes() for shard in shards))
    return digest(*facts)


def _without_packages(settings: Any) -> Any:
    """Return plain settings with fedgen's own functions by their last module and name, which are
    unique in a group: a package that is renamed changes no run."""
    if isinstance(settings, dict):
        return {
            key: ".".join(value.split(".")[-2:])
            if key == "_target_" and not factories.is_outside(value)
            else _without_packages(value)
            for key, value in settings.items()
        }
    return [_without_packages(e) for e in settings] if isinstance(settings, list) else settings


def _rehearsed(config: DictConfig, noise_multiplier: float | None) -> str | None:
    """The branch of the run whose coins a deployment uses again, to come to the same bits.

    Raises:
        FedgenError: if there is no such run, or of other noise, or noise is not seeded.
    """
    place = config.runtime.get("rehearses")
    if place is None:
        return None
    key = "runtime.rehearses"
    if config.privacy.noise != "seeded":
        raise FedgenError(key, "is for seeded noise", "take privacy.noise=seeded, or null")
    try:
        identity = read_json(Path(place) / "run.json")
        branch, noise = str(identity["branch"]), identity["noise_multiplier"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedgenError(key, f"{place} is no run directory", "name a finished run") from error
    if noise != in_short(noise_multiplier):  # the same coins at two scales show rows bare
        problem = f"{place} has noise multiplier {noise}, and this {in_short(noise_multiplier)}"
        raise FedgenError(key, problem, "rehearse the same settings")
    return branch


def in_short(noise_multiplier: float | None) -> str | None:
    """Six digits: what solving on another machine may change is below them, and noise that differs
    by less is the same on its grid."""
    return None if noise_multiplier is None else f"{noise_multiplier:.6g}"


def dataset(config: DictConfig) -> Dataset:
    """The data set. Where its test split is drawn, all seeds draw the same: runs of several seeds
    are judged on the same rows, and none on another's training rows."""
    found: object = build(config.data, "data")(coins=Coins.of(0, "seeded").at("data"))
    if not isinstance(found, Dataset):
        problem = f"makes a {type(found).__name__} in place of a Dataset"
        raise FedgenError("data", problem, "see fedgen.data.datasets")
    if not factories.is_outside(config.data["_target_"]):
        return found
    if {found.images.dtype, found.test_images.dtype} != {np.dtype(np.uint8)}:
        problem = f"has images of {found.images.dtype}"
        raise FedgenError("data", problem, "make them uint8, from 0 to 255")
    return checked(*(getattr(found, each.name) for each in fields(found)))


def published_names(ready: Setup) -> list[str] | None:
    """Return the labels' names that are published: those set by ``data.labels``, or the data set's
    own (folder names, unless ``data.names=false``)."""
    own = ready.dataset.names
    return label_names(ready.config) or (None if own is None else list(own))


def label_names(config: DictConfig) -> list[str] | None:
    """The names of labels that a setting tells, and which count as public by that."""
    names = OmegaConf.select(config, "data.labels")
    plain: Any = OmegaConf.to_container(names) if isinstance(names, ListConfig) else names
    return None if plain is None else named(plain)


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
    on_samples = {**plain(config.method), "batch": chosen.batch, "sampling_rate": 1.0}
    made = build(on_samples, "method", without=("strategy",))
    alone = PublicFacts(1, None, facts.classes, facts.shape)
    return warm_up(
        first,
        method,
        lambda: made(facts=alone, noise_multiplier=None, device=device),
        facts.classes,
        chosen.rounds,
        chosen.batch,
    )


def _program(make: Callable[[float | None], Method], noise: float | None) -> ClientProgram:
    return make(noise).client
