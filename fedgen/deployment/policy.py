"""Policies of sites: what a run may compute on the records of a site, independent of the
coordinator.

The site calibrates the noise and computes ε itself from the settings it received, against a server
that keeps everything it sees.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from fedgen.config.extensions import config_folders
from fedgen.errors import FedgenError
from fedgen.privacy.aggregation import Local, Secure
from fedgen.privacy.budget import MAX_DELTA
from fedgen.reporting.progress import format_epsilon
from fedgen.run.calibrate import bound_for
from fedgen.run.setup import ResolvedMethod, delta_problem_of
from fedgen.storage.io import read_yaml

_KEY = "policy"


class RefusedError(Exception):
    """The policy of a site refuses a run. The message stays at the site."""


@dataclass(frozen=True)
class Policy:
    """Policy of a site.

    epsilon, delta: limit per run, against the server, per ``unit``.
    budget_epsilon: limit on all runs of this node together; None: no limit; missing in the file:
        ``epsilon``.
    units: allowed units: record, client, person.
    methods: names of allowed methods; None: all.
    aggregations: local, secure.
    threshold: minimum number of responses in a secure sum.
    colluders: minimum number of clients assumed to collude with the server.
    rehearsal: whether runs with seeded noise, which have no privacy, are allowed.
    peers: client -> fingerprint of the key of its node; None: as stated by the server.
    """

    epsilon: float
    delta: float
    budget_epsilon: float | None = None
    units: tuple[str, ...] = ("record", "client", "person")
    methods: tuple[str, ...] | None = None
    aggregations: tuple[str, ...] = ("secure",)
    threshold: int = 2
    colluders: int = 0
    rehearsal: bool = False
    peers: dict[int, str] | None = None


def read(path: Path) -> Policy:
    """Read a policy from a YAML file.

    Raises:
        FedgenError: for the first invalid line.
    """
    try:
        settings = yaml.safe_load(read_yaml(path))
    except OSError as error:
        raise FedgenError(_KEY, f"{path} cannot be read ({error.strerror})", _REMEDY) from error
    except (ValueError, yaml.YAMLError) as error:
        raise FedgenError(_KEY, f"{path} is no YAML ({str(error)[:100]})", _REMEDY) from error
    if not isinstance(settings, dict):
        raise FedgenError(_KEY, f"{path} has no settings", _REMEDY)
    setting_names = [field.name for field in fields(Policy)]
    for name in settings:
        if name not in setting_names:
            raise FedgenError(
                f"{_KEY}.{name}", "is not a setting", f"choose from: {', '.join(setting_names)}"
            )
    for name in ("epsilon", "delta"):
        if name not in settings:
            raise FedgenError(f"{_KEY}.{name}", "is not given", _REMEDY)
    for name in ("epsilon", "delta", "budget_epsilon"):
        value = settings.get(name)
        if isinstance(value, str) and _PLAIN_FLOAT.fullmatch(value):  # YAML reads 1e-5 as a string
            settings[name] = float(value)
    for name, check in _KINDS.items():
        if name in settings and not check(settings[name]):
            choices = _CHOICES.get(name)
            remedy = f"give a list of: {', '.join(choices())}" if choices else _REMEDY
            raise FedgenError(f"{_KEY}.{name}", f"cannot be {settings[name]!r}", remedy)
    if settings["delta"] > MAX_DELTA:
        problem = f"{settings['delta']:g} is above {MAX_DELTA:g}: it permits publishing records"
        raise FedgenError(f"{_KEY}.delta", problem, "e.g. 1e-5, well below 1 / number of records")
    settings.setdefault("budget_epsilon", settings["epsilon"])
    peers = settings.get("peers")
    if peers and len(set(peers.values())) < len(peers):
        raise FedgenError(f"{_KEY}.peers", "a fingerprint is listed twice", _REMEDY)
    lists = {name: tuple(settings[name]) for name in _CHOICES if settings.get(name) is not None}
    return Policy(**{**settings, **lists})


_REMEDY = "see docs/deployment.md"
_PLAIN_FLOAT = re.compile(r"[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _methods() -> list[str]:
    names = {path.stem for place in config_folders() for path in place.glob("method/*.yaml")}
    names |= {path.stem for path in config_folders()[0].glob("warm_up/*.yaml")}
    return sorted(names)


_CHOICES: dict[str, Callable[[], Sequence[str]]] = {
    "units": lambda: ("record", "client", "person"),
    "methods": _methods,
    "aggregations": lambda: ("local", "secure"),
}


def _choices(name: str) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        allowed = _CHOICES[name]()
        return (
            isinstance(value, list) and bool(value) and all(choice in allowed for choice in value)
        )

    return check


def _peers(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and all(_count(client) and isinstance(print_, str) for client, print_ in value.items())
    )


_KINDS = {
    "epsilon": _number,
    "delta": lambda value: _number(value) and value < 1,
    "budget_epsilon": lambda value: value is None or _number(value),
    "units": _choices("units"),
    "methods": lambda value: value is None or _choices("methods")(value),
    "aggregations": _choices("aggregations"),
    "threshold": _count,
    "colluders": _count,
    "rehearsal": lambda value: isinstance(value, bool),
    "peers": _peers,
}


def check_settings(policy: Policy, config: DictConfig) -> None:
    """Check the settings of a run against a policy before anything is built.

    Raises:
        RefusedError: for the first setting that it refuses.
    """
    privacy = config.privacy
    if privacy.noise != "secure" and not policy.rehearsal:
        raise RefusedError("privacy.noise=seeded has no privacy, and rehearsals are not allowed")
    if policy.methods is not None:
        for name in (config.names.method, config.names.warm_up):
            if name not in (*policy.methods, "none"):
                raise RefusedError(f"method {name} is not allowed")
    if privacy.delta > policy.delta:
        raise RefusedError(f"δ = {privacy.delta:g} is above {policy.delta:g}")
    if config.rounds is None:
        raise RefusedError("the request has no number of rounds")
    if config.rounds > _MOST_ROUNDS:
        raise RefusedError(f"{config.rounds} rounds are more than {_MOST_ROUNDS}")


_MOST_ROUNDS = 200_000  # twice the longest published recipe: accounting takes time


def check_cost(policy: Policy, config: DictConfig, resolved: ResolvedMethod) -> None:
    """Check the cost of a run and its aggregation against a policy.

    Raises:
        RefusedError: for the first violation.
    """
    plan, privacy = resolved.method.plan, config.privacy
    sums = plan.aggregation
    if plan.unit.value not in policy.units:
        raise RefusedError(f"ε would be about a {plan.unit.value}, which is not allowed")
    if not isinstance(sums, Local | Secure):
        raise RefusedError("the server would add the noise itself")
    kind = type(sums).__name__.lower()
    if kind not in policy.aggregations:
        raise RefusedError(f"privacy.aggregation={kind} is not allowed")
    if isinstance(sums, Secure):
        if not config.runtime.masks:
            raise RefusedError("a secure sum without masks reveals each response to the server")
        if sums.threshold < policy.threshold:
            raise RefusedError(
                f"sums would need only {sums.threshold} responses, below {policy.threshold}"
            )
        if sums.colluders < policy.colluders:
            raise RefusedError(
                f"{sums.colluders} clients are counted as colluding, below {policy.colluders}"
            )
    if (
        privacy.noise == "secure"
        and (wrong := delta_problem_of(resolved.privacy, plan)) is not None
    ):
        raise RefusedError(f"δ = {wrong[0]}")
    budget = resolved.privacy.budget
    rows = budget.samples_per_client
    cost = bound_for(resolved.method, budget, config.rounds, rows, privacy.delta, True).epsilon
    if cost.or_infinity > policy.epsilon:
        raise RefusedError(
            f"the run would cost ε = {format_epsilon(cost.value)} against the server, above "
            f"{policy.epsilon:g}"
        )
