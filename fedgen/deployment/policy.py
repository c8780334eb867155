"""A site's own policy: what a run may ask of its rows, whatever the coordinator says.

The site solves the noise and counts ε itself, from the settings that it was sent; what a run would
cost is its own figure, against a server that keeps all it sees.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from fedgen import factories
from fedgen.errors import FedgenError
from fedgen.experiments.planning import view
from fedgen.experiments.settings import Decided, wrong_delta
from fedgen.files import read_yaml
from fedgen.privacy.budget import LARGEST_DELTA
from fedgen.privacy.releases import Local, Secure
from fedgen.reporting.progress import epsilon_in_words

_KEY = "policy"


class RefusedError(Exception):
    """What a site's policy does not allow. Its text stays with the site."""


@dataclass(frozen=True)
class Policy:
    """What a site allows.

    epsilon, delta: of one run, at most, against the server, per ``unit``.
    budget_epsilon: of all runs that this node takes part in together; None: no limit. A file that
        does not say has ``epsilon``.
    units: whose privacy ε may be about: record, client.
    methods: names of methods; None: all.
    aggregations: local, secure.
    threshold: answers that a secure sum must rest on, at least.
    colluders: clients that must be counted as colluding with the server, at least.
    rehearsal: whether runs with seeded noise are answered: these have no privacy at all.
    peers: client -> fingerprint of its node's key; None: whoever the server says.
    """

    epsilon: float
    delta: float
    budget_epsilon: float | None = None
    units: tuple[str, ...] = ("record", "client")
    methods: tuple[str, ...] | None = None
    aggregations: tuple[str, ...] = ("secure",)
    threshold: int = 2
    colluders: int = 0
    rehearsal: bool = False
    peers: dict[int, str] | None = None


def read(path: Path) -> Policy:
    """A policy from a file of YAML.

    Raises:
        FedgenError: for the first line that says nothing.
    """
    try:
        found = yaml.safe_load(read_yaml(path))
    except OSError as error:
        raise FedgenError(_KEY, f"{path} cannot be read ({error.strerror})", _REMEDY) from error
    except (ValueError, yaml.YAMLError) as error:
        raise FedgenError(_KEY, f"{path} is no YAML ({str(error)[:100]})", _REMEDY) from error
    if not isinstance(found, dict):
        raise FedgenError(_KEY, f"{path} has no settings", _REMEDY)
    known = [each.name for each in fields(Policy)]
    for name in found:
        if name not in known:
            raise FedgenError(
                f"{_KEY}.{name}", "is not a setting", f"choose of: {', '.join(known)}"
            )
    for name in ("epsilon", "delta"):
        if name not in found:
            raise FedgenError(f"{_KEY}.{name}", "is not given", _REMEDY)
    for name in ("epsilon", "delta", "budget_epsilon"):
        given = found.get(name)
        if isinstance(given, str) and _PLAIN_FLOAT.fullmatch(given):  # YAML takes 1e-5 for a word
            found[name] = float(given)
    for name, check in _KINDS.items():
        if name in found and not check(found[name]):
            choices = _CHOICES.get(name)
            remedy = f"give a list of: {', '.join(choices())}" if choices else _REMEDY
            raise FedgenError(f"{_KEY}.{name}", f"cannot be {found[name]!r}", remedy)
    if found["delta"] > LARGEST_DELTA:
        problem = f"{found['delta']:g} is above {LARGEST_DELTA:g}: it permits publishing records"
        raise FedgenError(f"{_KEY}.delta", problem, "e.g. 1e-5, well below 1 / number of records")
    found.setdefault("budget_epsilon", found["epsilon"])
    peers = found.get("peers")
    if peers and len(set(peers.values())) < len(peers):
        raise FedgenError(f"{_KEY}.peers", "one fingerprint stands twice", _REMEDY)
    lists = {name: tuple(found[name]) for name in _CHOICES if found.get(name) is not None}
    return Policy(**{**found, **lists})


_REMEDY = "see docs/deployment.md"
_PLAIN_FLOAT = re.compile(r"[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _methods() -> list[str]:
    known = {path.stem for place in factories.places() for path in place.glob("method/*.yaml")}
    known |= {path.stem for path in factories.places()[0].glob("warm_up/*.yaml")}
    return sorted(known)


_CHOICES: dict[str, Callable[[], Sequence[str]]] = {
    "units": lambda: ("record", "client"),
    "methods": _methods,
    "aggregations": lambda: ("local", "secure"),
}


def _some_of(name: str) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        allowed = _CHOICES[name]()
        return isinstance(value, list) and bool(value) and all(each in allowed for each in value)

    return check


def _of_peers(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and all(_count(client) and isinstance(print_, str) for client, print_ in value.items())
    )


_KINDS = {
    "epsilon": _number,
    "delta": lambda value: _number(value) and value < 1,
    "budget_epsilon": lambda value: value is None or _number(value),
    "units": _some_of("units"),
    "methods": lambda value: value is None or _some_of("methods")(value),
    "aggregations": _some_of("aggregations"),
    "threshold": _count,
    "colluders": _count,
    "rehearsal": lambda value: isinstance(value, bool),
    "peers": _of_peers,
}


def check_settings(policy: Policy, config: DictConfig) -> None:
    """Holds what a run's settings say against a policy, before anything is made of them.

    Raises:
        RefusedError: for the first thing that it does not allow.
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
    if config.rounds > _MOST_ROUNDS:
        raise RefusedError(f"{config.rounds} rounds are more than {_MOST_ROUNDS}")


_MOST_ROUNDS = 200_000  # twice what any published recipe has: counting ε takes time


def check_cost(policy: Policy, config: DictConfig, found: Decided) -> None:
    """Holds what a run would cost, and who would make its noise, against a policy.

    Raises:
        RefusedError: for the first thing that it does not allow.
    """
    plan, privacy = found.method.plan, config.privacy
    sums = plan.aggregation
    if plan.unit.value not in policy.units:
        raise RefusedError(f"ε would be about a {plan.unit.value}, which is not allowed")
    if not isinstance(sums, Local | Secure):
        raise RefusedError("the server would make the noise itself")
    kind = type(sums).__name__.lower()
    if kind not in policy.aggregations:
        raise RefusedError(f"privacy.aggregation={kind} is not allowed")
    if isinstance(sums, Secure):
        if not config.runtime.masks:
            raise RefusedError("a secure sum without masks shows each answer to the server")
        if sums.threshold < policy.threshold:
            raise RefusedError(
                f"sums would rest on {sums.threshold} answers, below {policy.threshold}"
            )
        if sums.colluders < policy.colluders:
            raise RefusedError(
                f"{sums.colluders} clients are counted as colluding, below {policy.colluders}"
            )
    if privacy.noise == "secure" and (wrong := wrong_delta(found.privacy, plan)) is not None:
        raise RefusedError(f"δ = {wrong[0]}")
    rows = found.privacy.budget.rows
    cost = view(found.method, found.privacy.budget, config.rounds, rows, privacy.delta, True)
    if cost.or_infinity > policy.epsilon:
        raise RefusedError(
            f"the run would cost ε = {epsilon_in_words(cost.value)} against the server, above "
            f"{policy.epsilon:g}"
        )
