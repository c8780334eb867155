"""Verify a release of fedgen: ``python verify.py PACKAGE.zip [SHA256:KEY ...]``.

This file needs Python 3.11, dp-accounting and cryptography, and not fedgen. It reads the package as
data, writes nothing, and exits with 0 only if all checks pass. Take it from a source that you
trust: a publisher could alter the copy in a package.

In ``manifest.json`` the coordinator signs the digests of all files, and in ``account.json`` each
participant signs bounds on its releases: privacy events and their counts. ε and the trade-off curve
are recomputed from these events and compared with ``generator.json``, and with the sentence on
(ε, δ) in ``PRIVACY.md`` and ``README.md``. Other text is not compared: rely on the printed figures.
If fingerprints of keys are given, only these keys are accepted.

Error codes: zip, format, digest, signature, key, run, noise, coverage, epsilon, curve, statement,
audit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.hashes import SHA384
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from scipy.special import gammaln, log_ndtr, logsumexp, ndtr, ndtri
from scipy.stats import binom

ACCOUNTS, ACCOUNT, RELEASE = "fedgen accounts 1", "fedgen account 1", "fedgen release 1"
"""Formats of ``account.json``, of a participant's text in it, and of the manifest's text."""
MANIFEST = "manifest.json"
FILES = ("PRIVACY.md", "README.md", "account.json", "generator.json", "generator.safetensors")
OPTIONAL = ("samples.png", "audit.json", "registry.yaml", "verify.py")
LIMITS = {"account.json": 2**24, "generator.safetensors": 2**34}  # bytes; others: 4 MiB
MIN_DELTA, MAX_DELTA = 1e-15, 0.01
MAX_ACCOUNTS, MAX_BOUNDS, MAX_SPENDS, MAX_EVENTS, MAX_SIZES = 20_000, 3, 8, 32, 2_000
FPRS, PRIORS, MAX_POINTS = ["0.001", "0.01"], ["0.01", "0.1", "0.5"], 3_000
INTEGER_ORDERS = [*map(float, (*range(2, 65), *range(68, 257, 4), *range(272, 1025, 16)))]
REAL_ORDERS = [1 + x / 10 for x in range(1, 640)] + [float(round(65 * 1.1**x)) for x in range(70)]
TOLERANCE = 2e-3  # of ε, absolute and relative: the accountants discretise losses differently
NUMBER = r"([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?|∞)"
STATEMENTS = {
    "PRIVACY.md": f"with ε = {NUMBER} and δ = {NUMBER}",
    "README.md": rf"\({NUMBER}, {NUMBER}\)-differential privacy",
}
ALWAYS_ASSUMED = (
    "participants run unmodified fedgen, so that their noise has the stated distribution",
    "coordinator: the generator was computed from the releases of this run only",
    "publisher: all other text, of which one sentence with (ε, δ) was compared; see above instead",
)
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError,
             RecursionError, ZeroDivisionError, MemoryError)  # fmt: skip
"""Errors of JSON data, read without a check of each type; before ``UNREADABLE``, which includes
their base classes."""
UNREADABLE = (OSError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error)
"""Errors of an archive."""
KINDS = ("gaussian", "draw", "poisson", "poisson_group", "revealed_draw")
Profile = Callable[[float], float]  # ε -> upper bound on δ


class VerificationError(Exception):
    """A package that fails verification, with one of the error codes of the module."""

    def __init__(self, code: str, problem: str) -> None:
        super().__init__(f"{code}: {problem}")
        self.code = code


def check(holds: object, code: str, problem: str) -> None:
    """Raise VerificationError unless a condition holds."""
    if not holds:
        raise VerificationError(code, problem)


def up(value: float) -> str:
    """Format a number with four digits after the point, rounded up."""
    return f"{math.ceil(value * 1e4 - 1e-9) / 1e4:.4f}"


def read_json(text: bytes | str) -> Any:
    """Return JSON data without duplicate keys, NaN or infinity."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        check(len(dict(pairs)) == len(pairs), "format", "a key occurs twice")
        return dict(pairs)

    def constant(name: str) -> None:
        raise VerificationError("format", f"{name} is not a number")

    return json.loads(text, object_pairs_hook=unique, parse_constant=constant)


def number(value: Any) -> float:
    """Return a finite JSON number."""
    valid = type(value) in (int, float) and abs(value) < 1e300
    check(valid, "format", f"{value!r} is not a number"[:100])
    return float(value)


class Event(NamedTuple):
    """A Gaussian release at noise multiplier ``sigma`` for one record, from a sample that contains
    each of ``size`` records of a group with probability ``rate``."""

    kind: str
    sigma: float
    rate: float = 1.0
    size: int = 1


Spend = tuple[tuple[Event, int], ...]


class Selection(NamedTuple):
    """The best of K runs, each with one of several spends; K is secret, and has a truncated
    negative binomial distribution with this mean and shape."""

    alternatives: tuple[Spend, ...]
    mean: float
    shape: float


def read_event(data: Mapping[str, Any]) -> Event | None:
    """Parse a privacy event; return None for an event without noise."""
    kind, gate = data["event"], data.get("gates", data)
    if kind in ("contribution", "non_private"):
        return None
    key = {"revealed_draw": "probability", "draw": "take"}.get(kind, "rate")
    rate = 1.0 if kind == "gaussian" else number(data[key])
    rate /= number(data["of"]) if kind == "draw" else 1
    check(kind in KINDS, "format", "an unknown privacy event")
    size = int(number(data["size"])) if kind == "poisson_group" else 1
    event = Event(kind, number(gate["noise_multiplier"]), rate, size)
    in_range = 1e-6 < event.sigma < 1e12 and 0 < rate <= 1 and 0 < event.size <= 1000
    check(in_range and gate["event"] == "gaussian", "format", "an invalid privacy event")
    return event


def gaussian_delta(mu: Any, eps: Any) -> Any:
    """Return δ(ε) of Gaussian releases (Balle and Wang 2018, theorem 8)."""
    first, second = log_ndtr(mu / 2 - eps / mu), eps + log_ndtr(-mu / 2 - eps / mu)
    return np.exp(first) * -np.expm1(np.minimum(second - first, 0))


@lru_cache(maxsize=64)
def profile_of(spend: Spend, relation: str, delta: float) -> Profile:
    """Return an upper bound on δ(ε) of composed events: the minimum of the bounds without
    amplification, with sampling revealed to the adversary, from privacy loss distributions, and
    from Renyi divergences."""
    mu = math.sqrt(sum(count * (event.size / event.sigma) ** 2 for event, count in spend))
    bounds: list[Profile] = [lambda eps: float(gaussian_delta(mu, eps)) if mu else 0.0]
    kinds = {event.kind for event, _ in spend}
    if len(spend) == 1 and spend[0][0].size == 1 and kinds != {"gaussian"}:
        [(event, count)] = spend
        tail, visits = truncated(delta), binom(count, event.rate)
        low, high = visits.ppf(tail), visits.isf(tail)
        check(high - low < 200_000, "format", "too many samples")
        numbers = np.arange(max(1, low), high + 1)
        weights, rest = visits.pmf(numbers), float(visits.sf(high) + visits.cdf(max(low, 1) - 1))
        rest -= float(visits.pmf(0)) if low <= 1 else 0.0
        mus = np.sqrt(numbers) / event.sigma
        bounds.append(lambda eps: float(weights @ gaussian_delta(mus, eps)) + rest)
    if kinds - {"gaussian"} and "revealed_draw" not in kinds:
        bounds.append(loss_profile(spend, relation, delta))
        bounds.append(renyi_profile(spend, relation))
    return lambda eps: min(1.0, *(bound(eps) for bound in bounds))


def truncated(delta: float) -> float:
    """Return the mass of losses that is truncated at a time, and added to δ."""
    return min(1e-4 * delta, 1e-10)


def renyi_profile(spend: Spend, relation: str) -> Profile:
    """Return the bound by Renyi divergences; none for groups of records.

    Poisson samples of added records: Mironov, Talwar, Zhang 2019, by dp_accounting. A replaced
    record in a sample: a bound of our own for integer orders, proven in
    ``fedgen.privacy.subsampling.subset_sampling_rdp``.
    """
    if any(event.size > 1 or event.sigma < 0.02 for event, _ in spend):
        return lambda eps: 1.0
    orders = orders_of([spend], relation)
    at_orders = divergences(spend, orders)
    return lambda eps: float(rdp.compute_delta(orders, list(at_orders), eps)[0])


def orders_of(spends: Sequence[Spend], relation: str) -> list[float]:
    """Return the Renyi orders: real ones where dp_accounting computes every divergence, else
    integers."""
    kinds = {event.kind for spend in spends for event, _ in spend if event.rate < 1}
    by_dp_accounting = not kinds or (relation == "add_or_remove_one" and kinds == {"poisson"})
    return REAL_ORDERS if by_dp_accounting else INTEGER_ORDERS


def divergences(spend: Spend, orders: list[float]) -> Any:
    """Return the Renyi divergence of composed events at each order."""
    if orders == REAL_ORDERS:
        accountant = rdp.RdpAccountant(orders)
        for event, count in spend:
            gaussian = GaussianDpEvent(event.sigma)
            accountant.compose(PoissonSampledDpEvent(event.rate, gaussian), count)
        return np.array(accountant.rdp)
    at_orders = np.zeros(len(orders))
    for event, count in spend:
        moments = [log_moment(event, int(order)) / (order - 1) for order in orders]
        at_orders += count * np.array(moments)
    return at_orders


@lru_cache(maxsize=16)
def selection_profile(selection: Selection, relation: str) -> Profile:
    """Return the bound of a selection (Papernot, Steinke 2022, theorem 2), from the largest Renyi
    divergence of a run at each order. Groups of records, and samples revealed to the adversary,
    count as always sampled."""
    spends = [
        tuple(
            (Event("gaussian", event.sigma / event.size), count)
            if event.size > 1 or event.kind == "revealed_draw"
            else (event, count)
            for event, count in spend
        )
        for spend in selection.alternatives
    ]
    order_list, eta = orders_of(spends, relation), selection.shape
    orders = np.array(order_list)
    worst = np.max([divergences(spend, order_list) for spend in spends], axis=0)
    low, high = 1e-12, 1 - 1e-12
    for _ in range(200):  # γ of the distribution; the mean decreases in it
        gamma = math.sqrt(low * high)
        tail = -math.log(gamma) if eta == 0 else -math.expm1(eta * math.log(gamma)) / eta
        low, high = (gamma, high) if (1 - gamma) / gamma / tail > selection.mean else (low, gamma)
    gamma = low  # the lower end gives the larger bound
    extra = (1 + eta) * min((1 - 1 / orders) * worst - math.log(gamma) / orders)
    bounds = worst + extra + math.log(selection.mean) / (orders - 1)
    monotone = list(np.minimum.accumulate(bounds[::-1])[::-1])
    return lambda eps: float(rdp.compute_delta(order_list, monotone, eps)[0])


def log_moment(event: Event, order: int) -> float:
    """Return (order - 1) times the Renyi divergence of a release with a replaced record."""
    j, mu = np.arange(2, order + 1, dtype=float), 1 / event.sigma
    if event.rate == 1:
        return order * (order - 1) * mu**2 / 2
    log_t2 = mu**2 + math.log(-math.expm1(-(mu**2)))
    logs = math.log(2) + j * (j - 1) * mu**2 / 2
    logs[0] = log_t2
    if order >= 3:
        logs[1] = min(logs[1], 0.5 * (math.log(2) + log_t2 + 6 * mu**2))
    binomials = gammaln(order + 1) - gammaln(j + 1) - gammaln(order - j + 1)
    return float(np.logaddexp(0.0, logsumexp(binomials + j * math.log(event.rate) + logs)))


def loss_profile(spend: Spend, relation: str, delta: float) -> Profile:
    """Return the bound of composed privacy loss distributions (Doroshenko et al. 2022)."""
    releases = sum(count for _, count in spend)
    mu = max(event.size / event.sigma for event, _ in spend)
    max_loss = mu**2 / 2 + 9 * mu
    std_bound = math.sqrt(sum(n * (e.rate * e.size / e.sigma) ** 2 for e, n in spend))
    scale = max(1.0, std_bound)  # ε may be off by a thousandth of it
    step = max(
        min(1e-3 * scale, math.sqrt(1e-3 * scale / releases), std_bound / 300),
        max_loss * max(1e-6, 2e-14 / delta),  # fewer cells: rounding stays below δ
    )
    if max_loss > 5000 or releases > 10**7:
        return lambda eps: 1.0
    total = pld.identity(step)
    for event, count in spend:
        loss = privacy_loss(event, relation, step, max_loss).self_compose(count, truncated(delta))
        total = total.compose(loss, truncated(delta))
    rounding = 4e-16 * (releases + (4 * max_loss + 40 * std_bound) / step)
    return lambda eps: float(total.get_delta_for_epsilon(eps)) + rounding


def privacy_loss(
    event: Event, relation: str, step: float, max_loss: float
) -> pld.PrivacyLossDistribution:
    """Return the privacy loss of one release. A replaced record in a sample at rate γ has profile γ
    δ(log(1 + (e^ε - 1) / γ)), mirrored below 0 (Balle, Barthe, Gaboardi 2018, theorem 2)."""
    if event.size > 1:
        return group_privacy_loss(event, step)
    if event.kind == "gaussian" or (event.kind == "poisson" and relation == "add_or_remove_one"):
        return pld.from_gaussian_mechanism(
            event.sigma, sampling_prob=event.rate, value_discretization_interval=step
        )
    cells = math.ceil(max_loss / step)
    grid = np.arange(cells + 1) * step
    inner = np.log1p(np.expm1(np.minimum(grid, 700)) / event.rate)  # less: a larger δ
    above = event.rate * gaussian_delta(1 / event.sigma, inner)
    below = 1 - np.exp(-grid[1:]) * (1 - above[1:])
    profile = np.concatenate([below[::-1], above])
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, -cells, cells, profile)
    return pld.PrivacyLossDistribution(pmf)


def group_privacy_loss(event: Event, step: float) -> pld.PrivacyLossDistribution:
    """Return the privacy loss of one release for a person with several records in a Poisson sample:
    Σ binom(k) N(k, σ²) against N(0, σ²) (Ganesh 2024, "Tight group-level DP guarantees ...")."""
    sigma, counts = event.sigma, range(event.size + 1)
    weights = binom.pmf(counts, event.size, event.rate)
    terms = [(count, weight) for count, weight in zip(counts, weights, strict=True) if weight > 0]
    x = np.linspace(-9 * sigma, event.size + 9 * sigma, 200_001)
    losses = np.full_like(x, -np.inf)
    for count, weight in terms:
        losses = np.logaddexp(losses, math.log(weight) + count * (x - count / 2) / sigma**2)
    points = np.arange(math.floor(losses[0] / step), math.ceil(losses[-1] / step) + 1)
    x = np.interp(points * step, losses, x)
    above, below = np.zeros_like(x), np.zeros_like(x)
    for count, weight in terms:
        above += weight * ndtr((count - x) / sigma)
        below += weight * np.exp(log_ndtr((x - count) / sigma) - points * step)
    removed = above - np.exp(points * step + log_ndtr(-x / sigma))
    added = (ndtr(x / sigma) - below)[::-1]
    create = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap
    first, last = int(points[0]), int(points[-1])
    pmfs = [
        create(step, low, high, np.minimum.accumulate(np.clip(deltas, 0, 1)))
        for low, high, deltas in ((first, last, removed), (-last, -first, added))
    ]
    return pld.PrivacyLossDistribution(*pmfs)


def epsilon_at(profile: Profile, delta: float) -> float:
    """Return ε at δ, rounded up; infinity if there is none below 1e6."""
    low, high = 0.0, 1.0
    while profile(high) > delta and high < 1e6:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if profile(middle) > delta else (low, middle)
    return high if high < 1e6 else math.inf


class Proof(NamedTuple):
    """Bounds signed by the participants: the events of each, the probability that the run stops
    early, which reveals something, and assumptions."""

    spends: set[Spend | Selection]
    stop: float
    assumes: set[str]

    def profile(self, relation: str, delta: float, group: int = 1) -> Profile:
        """Return the bound on δ(ε) for every participant, for a group of records together."""
        profiles = []
        for spend in self.spends:
            if isinstance(spend, Selection):
                profiles.append(selection_profile(of_group(spend, relation, group), relation))
                continue
            kinds = {event.kind for event, _ in spend}
            single = all(event.size == 1 for event, _ in spend) and kinds <= {"poisson", "gaussian"}
            known = kinds <= {"gaussian"} or (relation == "add_or_remove_one" and single)
            check(group == 1 or known, "epsilon", "no group bound exists for these events")
            events = [(event._replace(size=event.size * group), count) for event, count in spend]
            check(sum(e.size for e, _ in events) <= MAX_SIZES, "format", "too large groups")
            profiles.append(profile_of(tuple(events), relation, delta))
        stop = self.stop
        return lambda eps: min(
            1.0, max(profile(eps) for profile in profiles) + stop * (1 + math.exp(min(eps, 700)))
        )

    def mu(self) -> float | None:
        """Return μ if all events are Gaussian and the run cannot stop early; else None."""
        mus = []
        for spend in self.spends:
            if isinstance(spend, Selection) or any(e.kind != "gaussian" for e, _ in spend):
                return None
            mus.append(math.sqrt(sum(n / e.sigma**2 for e, n in spend)))
        return None if self.stop else max(mus)


def of_group(selection: Selection, relation: str, group: int) -> Selection:
    """Return the selection for a group of ``group`` records."""
    events = [event for spend in selection.alternatives for event, _ in spend]
    gaussian = all(event.kind == "gaussian" for event in events)
    known = gaussian or (relation == "add_or_remove_one" and all(e.size == 1 for e in events))
    check(group == 1 or known, "epsilon", "no group bound exists for these events")
    spends = [
        tuple((event._replace(size=event.size * group), count) for event, count in spend)
        for spend in selection.alternatives
    ]
    return selection._replace(alternatives=tuple(spends))


def proofs_of(accounts: Sequence[Any], missing: int) -> list[Proof]:
    """Return the bounds that all accounts have, those without assumptions first. The noise of
    participants without an account is not relied on."""
    aggregation, factor, proofs = accounts[0]["aggregation"], 1.0, []
    same = all(account["aggregation"] == aggregation for account in accounts)
    check(same, "run", "accounts state different aggregations")
    if missing and aggregation["kind"] == "secure":
        honest = int(aggregation["honest"])
        problem = f"{missing} participants signed no account; fewer than {honest} may"
        check(missing < honest, "coverage", problem)
        factor = math.sqrt(1 - missing / honest)
    of_account = [account["bounds"] for account in accounts]
    if missing and aggregation["kind"] == "local":  # the others rely on the noise of all
        of_account = [bounds[:1] for bounds in of_account]
    for bounds in list(zip(*of_account, strict=False))[:MAX_BOUNDS]:
        spends = {read_bound(bound["events"], factor) for bound in bounds}
        check(len(spends) <= MAX_SPENDS, "format", "too many different accounts")
        stop = max(number(bound["stop_probability"]) for bound in bounds)
        check(0 <= stop <= 1, "format", "an invalid probability")
        if None not in spends:
            assumes = {str(text) for bound in bounds for text in bound["assumes"]}
            proofs.append(Proof({spend for spend in spends if spend is not None}, stop, assumes))
    return proofs


def read_bound(data: Sequence[Any], factor: float) -> Spend | Selection | None:
    """Parse the events or the selection of a bound; None if an event has no noise."""
    if len(data) != 1 or data[0][0]["event"] != "select":
        return read_spend(data, factor)
    [[selection, count]] = data
    alternatives, mean, shape = (selection[key] for key in ("alternatives", "mean", "shape"))
    in_range = 1 < number(mean) <= 1e6 and 0 <= number(shape) <= 1e6 and count == 1
    check(in_range and 0 < len(alternatives) <= MAX_EVENTS, "format", "an invalid selection")
    spends = [read_spend(spend, factor) for spend in alternatives]
    check(all(spend != () for spend in spends), "format", "a run without events")
    return None if None in spends else Selection(tuple(filter(None, spends)), mean, shape)


def read_spend(data: Sequence[Any], factor: float) -> Spend | None:
    """Parse events with their counts, with ``factor`` times the noise; None if one has no noise."""
    check(len(data) <= MAX_EVENTS, "format", "too many events")
    events = [(read_event(event), count) for event, count in data]
    valid = all(type(count) is int and 0 < count <= 10**12 for _, count in events)
    check(valid, "format", "an invalid count")
    noisy = [(e._replace(sigma=factor * e.sigma), count) for e, count in events if e is not None]
    return tuple(noisy) if len(noisy) == len(events) else None


def check_curve(stated: Mapping[str, Any], profile: Profile, mu: float | None) -> None:
    """Raise VerificationError unless a stated trade-off curve and its figures follow.

    Args:
        mu: μ of the releases if they are Gaussian; else None.
    """
    listed = list(stated["tpr"]) == FPRS and list(stated["posterior"]) == PRIORS
    check(listed, "format", "other rates or priors than usual")
    rates = np.array([float(rate) for rate in FPRS])
    if stated["mu"] is not None:
        claimed = number(stated["mu"])
        follows = mu is not None and claimed >= mu * (1 - 1e-9) and stated["profile"] is None
        check(follows, "curve", f"μ = {claimed} does not follow from the events ({mu})")
        powers, advantage = ndtr(ndtri(rates) + claimed), 2 * ndtr(claimed / 2) - 1
        fpr = ndtr(ndtri(0.01) - claimed)
        check(number(stated["rho"]) >= claimed**2 / 2 - 1e-9, "curve", "ρ is below μ²/2")
    else:
        check(stated["rho"] is None, "curve", "ρ is stated without μ")
        check(0 < len(stated["profile"]) <= MAX_POINTS, "format", "too many points, or none")
        points, deltas = np.array([[number(v) for v in pair] for pair in stated["profile"]]).T
        ascending = points[0] >= 0 and (np.diff(points) > 0).all() and points[-1] <= 700
        check(ascending and ((deltas >= 0) & (deltas <= 1)).all(), "format", "an invalid profile")
        for point, delta in zip(points, deltas, strict=True):
            proven = profile(point * (1 + TOLERANCE) + TOLERANCE)
            problem = f"recomputed δ({point:.4g}) = {proven:.3g} exceeds {delta:.3g}"
            check(proven <= delta * (1 + 1e-3) + 1e-8, "curve", problem)
        grow, fall = np.exp(points), np.exp(-points)
        lines = [deltas + np.outer(rates, grow), 1 - fall * (1 - deltas - rates[:, None])]
        powers = np.minimum(np.concatenate(lines, axis=1).min(axis=1), 1)
        advantage = ((grow - 1 + 2 * deltas) / (grow + 1)).min()
        fpr = max((fall * (0.01 - deltas)).max(), (1 - deltas - grow * 0.99).max(), 0)
    priors = np.array([float(prior) for prior in PRIORS])
    beliefs = priors * 0.01 / (priors * 0.01 + (1 - priors) * fpr)
    implied = [*powers, *beliefs, min(advantage, 1)]
    claims = [*stated["tpr"].values(), *stated["posterior"].values(), stated["advantage"]]
    holds = all(1 >= number(c) >= value - 1e-6 for c, value in zip(claims, implied, strict=True))
    check(holds, "curve", "a rate, posterior or advantage is not what the curve implies")


def read_package(path: str) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the content of each file of a package, except the weights, and the digests of all."""
    texts, digests = {}, {}
    with zipfile.ZipFile(path) as archive:
        members = [(*m.filename.partition("/")[::2], m) for m in archive.infolist()]
        names = [name for _, name, _ in members]
        known = set(FILES) <= set(names) <= {*FILES, *OPTIONAL, MANIFEST}
        single = len(set(names)) == len(names) and len({folder for folder, *_ in members}) == 1
        check(
            known and MANIFEST in names and single,
            "zip",
            f"missing, unexpected or duplicate files: {sorted(names)}"[:300],
        )
        for _, name, member in members:
            plain = member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            check(plain and not member.flag_bits & 1, "zip", f"{name} is packed in another way")
            check(member.file_size <= LIMITS.get(name, 2**22), "zip", f"{name} is too large")
            hasher, kept = hashlib.sha256(), b""
            with archive.open(member) as file:
                while part := file.read(2**24):
                    hasher.update(part)
                    kept += part if name != "generator.safetensors" else b""
            texts[name], digests[name] = kept, hasher.hexdigest()
    return texts, digests


def read_signed(entry: Mapping[str, str], kind: str, keys: Sequence[str]) -> tuple[Any, str]:
    """Return a signed text as data, and the fingerprint of its key (ECDSA on P-384)."""
    point, signature = (
        base64.b64decode(entry[name], validate=True) for name in ("key", "signature")
    )
    numbers = (int.from_bytes(half, "big") for half in (signature[:48], signature[48:]))
    name = "SHA256:" + base64.b64encode(hashlib.sha256(point).digest()).decode().rstrip("=")
    try:
        key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), point)
        signed = utils.encode_dss_signature(*numbers)
        key.verify(signed, entry["text"].encode(), ec.ECDSA(SHA384()))
    except (InvalidSignature, ValueError) as error:
        raise VerificationError(
            "signature", f"the signature of {name} on a {kind!r} text is invalid"
        ) from error
    check(not keys or name in keys, "key", f"{name} is not one of the accepted keys")
    data = read_json(entry["text"])
    check(data["format"] == kind, "format", f"expected the format {kind!r}")
    return data, name


def verify(path: str, keys: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return the claims of a package as (kind, text): proven, asserted, assumed, not covered.

    Args:
        keys: fingerprints of the accepted keys; empty: any key.

    Raises:
        VerificationError: unless all checks pass.
    """
    try:
        return _verify(*read_package(path), keys)
    except MALFORMED as error:
        raise VerificationError("format", f"{type(error).__name__}: {error}"[:200]) from error
    except UNREADABLE as error:
        raise VerificationError("zip", f"the archive cannot be read ({error})") from error


def _verify(
    texts: Mapping[str, bytes], digests: dict[str, str], keys: Sequence[str]
) -> list[tuple[str, str]]:
    manifest, coordinator = read_signed(read_json(texts[MANIFEST]), RELEASE, keys)
    del digests[MANIFEST]
    changed = sorted({name for name, _ in manifest["files"].items() ^ digests.items()})
    check(not changed, "digest", f"files that differ from the manifest: {', '.join(changed)}")
    generator, account = (read_json(texts[f"{name}.json"]) for name in ("generator", "account"))
    stated, weights = generator["privacy"], digests["generator.safetensors"]
    same = generator["generator_sha256"] == weights
    check(same, "digest", "generator.json describes other weights")
    check(account["format"] == ACCOUNTS, "format", f"not {ACCOUNTS}")
    same = account["run"] == manifest["run"]
    check(same, "run", "account.json and manifest.json name different runs")
    check(stated["noise"] == "secure", "noise", "an experiment: the noise is derived from a seed")
    clients = account["clients"]
    check(type(clients) is int and 0 < clients <= 10**6, "format", "an invalid number of clients")
    accounts, signers, covered = read_accounts(account, stated, keys)
    mixed = coordinator in signers and len(signers) > 1
    check(not mixed, "key", f"{coordinator} signed as coordinator and as one of several")
    missing, lost = clients - covered, stated.get("without_bound", {"clients": 0, "of": clients})
    unsigned = f"{missing:,} of {clients:,} participants signed no account"
    accounted = accounts and missing == lost["clients"] and lost["of"] == clients
    check(accounted, "coverage", f"{unsigned}; {lost['clients']} are stated to have no bound")
    unused = sorted(set(keys) - signers - {coordinator})
    check(not unused, "key", f"{', '.join(unused)} signed nothing")
    delta, claimed = number(stated["delta"]), number(stated["epsilon"])
    in_range = MIN_DELTA <= delta <= MAX_DELTA
    check(in_range, "epsilon", f"δ = {delta:g} is not in [{MIN_DELTA}, {MAX_DELTA}]")
    problem = VerificationError("epsilon", "no account has a bound")
    for proof in proofs_of(accounts, missing):
        try:
            epsilon = check_proof(proof, stated, delta)
            break
        except VerificationError as error:
            problem = error
    else:
        raise problem
    for name in STATEMENTS:
        check_statement(name, texts[name].decode(), claimed, delta)
    if missing:
        said = f"{missing:,} of the {clients:,} clients" in texts["PRIVACY.md"].decode()
        check(said, "statement", "PRIVACY.md does not say how many clients have no bound")
    scope = f"per {stated['unit']}, neighbours: {stated['relation'].replace('_', ' ')}"
    rows = [("proven", f"ε = {up(claimed)} at δ = {delta:g} {scope}; recomputed: {up(epsilon)}")]
    curve = stated["guarantee"]
    tpr = ", ".join(f"{up(100 * p)} % at {100 * float(f):g} %" for f, p in curve["tpr"].items())
    beliefs = ", ".join(f"{p} to {up(value)}" for p, value in curve["posterior"].items())
    text = f"true positive rates {tpr} false positives; advantage {up(curve['advantage'])}"
    rows += [("proven", f"trade-off curve: at most {text}; posteriors from {beliefs}")]
    groups = {size: value for size, value in (stated["group_epsilon"] or {}).items() if value}
    if groups:
        listed = ", ".join(f"{size}: {up(value)}" for size, value in groups.items())
        rows += [("proven", f"ε by number of records of one person: {listed}")]
    text = f"{covered:,} of {clients:,} participants signed that they released at most this"
    rows += [("asserted", f"{text}; {', '.join(sorted(signers))}")]
    rows += [("asserted", f"coordinator: the files belong to run {manifest['run']}; {coordinator}")]
    if coordinator in signers and clients > 1:
        rows += [("assumed", "a simulation: the coordinator signed for all participants")]
    if "audit.json" in texts:
        rows += [("asserted", f"coordinator: {audit_summary(read_json(texts['audit.json']))}")]
    rows += [("assumed", text) for text in sorted(proof.assumes)]
    rows += [("assumed", text) for text in ALWAYS_ASSUMED]
    if not keys:
        text = "key ownership: obtain the fingerprints from the participants, and pass them"
        rows += [("assumed", text)]
    if missing:
        rows += [("not covered", f"{missing:,} of {clients:,} participants have no bound")]
    return rows


def read_accounts(
    account: Mapping[str, Any], stated: Mapping[str, Any], keys: Sequence[str]
) -> tuple[list[Any], set[str], int]:
    """Return the signed texts, the fingerprints of their keys, and the number of participants."""
    expected = {name: account[name] for name in ("run", "settings")}
    expected |= {name: stated[name] for name in ("unit", "relation", "noise")}
    expected |= {"participants": account["clients"]}
    accounts, signers, covered = [], set[str](), set[int]()
    check(len(account["accounts"]) <= MAX_ACCOUNTS, "format", "too many accounts")
    for entry in account["accounts"]:
        signed, key = read_signed(entry, ACCOUNT, keys)
        differing = [name for name, value in expected.items() if signed[name] != value]
        check(not differing, "run", f"an account and the release differ in {', '.join(differing)}")
        for first, last in signed["clients"]:
            in_range = 0 <= first <= last < account["clients"]
            check(in_range, "format", "a participant number is out of range")
            numbers = set(range(first, last + 1))
            check(not numbers & covered, "coverage", "a participant is listed in two accounts")
            covered |= numbers
        accounts.append(signed)
        signers.add(key)
    return accounts, signers, len(covered)


def check_statement(name: str, text: str, claimed: float, delta: float) -> None:
    """Raise VerificationError unless a text states (ε, δ), and no smaller values."""
    plain = "<!--" not in text and all(c in "0123456789" for c in text if c.isnumeric())
    check(plain, "statement", f"{name} contains comments or digits that are not ASCII")
    pairs = re.findall(STATEMENTS[name], text)
    least = claimed - 1e-9, delta * (1 - 1e-9)
    agrees = [float(e.replace("∞", "inf")) >= least[0] and float(d) >= least[1] for e, d in pairs]
    check(agrees and all(agrees), "statement", f"{name} states no (ε, δ), or smaller values")
    smaller = [e for e in re.findall(r"ε\D{0,20}?([0-9]+\.?[0-9]*)", text) if float(e) < least[0]]
    check(not smaller, "statement", f"{name} states ε = {', '.join(smaller)}")


def audit_summary(audit: Mapping[str, Any]) -> str:
    """Describe attacks on the client program. Raises VerificationError if one refutes ε."""
    points = [(float(point["lower_bound"]), point["proven"]) for point in audit["points"]]
    bounded = [(bound, float(proven)) for bound, proven in points if proven is not None]
    check(all(bound <= proven for bound, proven in bounded), "audit", "an attack refutes ε")
    check(bounded, "audit", "audit.json contains no attack with a proven bound")
    bound, proven = max(bounded, key=lambda pair: pair[0] / pair[1] if pair[1] else 0.0)
    where = f"tightest lower bound: ε ≥ {bound:.2f} (proven: {proven:.2f})"
    return f"{len(points)} attacks on the client program with reduced noise; {where}"


def check_proof(proof: Proof, stated: Mapping[str, Any], delta: float) -> float:
    """Raise VerificationError unless the stated figures follow from a proof; return its ε."""
    profile = proof.profile(stated["relation"], delta)
    epsilon = epsilon_at(profile, delta)
    listed = (stated["group_epsilon"] or {}).items()
    groups = [(size, value) for size, value in listed if value is not None]
    check({size for size, _ in groups} <= {"2", "5", "10"}, "format", "an unknown size of groups")
    claims = [("one record", stated["epsilon"], epsilon)]
    for size, claimed in groups:
        group = proof.profile(stated["relation"], delta, int(size))
        claims.append((f"{size} records", claimed, epsilon_at(group, delta)))
    for name, claimed, proven in claims:
        holds = proven <= number(claimed) * (1 + TOLERANCE) + TOLERANCE
        check(holds, "epsilon", f"recomputed ε for {name} is {proven:.4f}, stated {claimed}")
    check_curve(stated["guarantee"], profile, proof.mu())
    return epsilon


def format_rows(rows: Sequence[tuple[str, str]]) -> str:
    """Return the result of ``verify`` as text."""
    return "\n".join(f"{kind:11} {escape_control_codes(text)}" for kind, text in rows)


def escape_control_codes(text: str) -> str:
    """Escape control codes, which terminals would execute, in untrusted text."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:1000])


def main(arguments: Sequence[str]) -> int:
    """Print the claims of a package; return the exit status."""
    if not arguments or arguments[0].startswith("-"):
        print("usage: python verify.py PACKAGE.zip [SHA256:KEY ...]", file=sys.stderr)
        return 2
    try:
        rows = verify(arguments[0], arguments[1:])
    except VerificationError as error:
        print(
            f"{arguments[0]} does not verify: {escape_control_codes(str(error))}", file=sys.stderr
        )
        return 1
    print(format_rows(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
