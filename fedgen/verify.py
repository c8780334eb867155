"""Verify a release of fedgen: ``python verify.py PACKAGE.zip [SHA256:KEY ...]``.

This file needs Python 3.11, dp-accounting and cryptography, and not fedgen. It reads the package as
data, writes nothing, and exits with 0 only if all checks pass. Take it from a source that you
trust: a publisher could alter the copy in a package.

In ``manifest.json`` the coordinator signs the digests of all files, and in ``account.json`` each
participant signs bounds on its releases: privacy events and their counts. ε and the trade-off curve
are recomputed from these events and compared with ``generator.json``, ``PRIVACY.md``, ``README.md``
and ``registry.yaml``. If fingerprints of keys are given, only these keys are accepted.

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
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.special import log_ndtr, ndtr, ndtri
from scipy.stats import binom

ACCOUNTS, ACCOUNT, RELEASE = "fedgen accounts 1", "fedgen account 1", "fedgen release 1"
"""Formats of ``account.json``, of a participant's text in it, and of the manifest's text."""
MANIFEST = "manifest.json"
FILES = ("PRIVACY.md", "README.md", "account.json", "generator.json", "generator.safetensors")
OPTIONAL = ("samples.png", "audit.json", "registry.yaml", "verify.py")
LIMITS = {"account.json": 2**26, "generator.safetensors": 2**34}  # bytes; others: 4 MiB
TOLERANCE = 2e-3  # of ε, absolute and relative: the accountants discretise losses differently
STATEMENTS = {
    "PRIVACY.md": r"with ε = ([\d.]+|∞) and δ = ([\d.e-]+)",
    "README.md": r"\(([\d.]+|∞), ([\d.e-]+)\)-differential privacy",
    "registry.yaml": r"epsilon: ([\d.]+)\n\s+delta: ([\d.e-]+)",
}
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


class Event(NamedTuple):
    """A Gaussian release at noise multiplier ``sigma`` for one record, from a sample that contains
    each of ``size`` records of a group with probability ``rate``."""

    kind: str
    sigma: float
    rate: float = 1.0
    size: int = 1


Spend = tuple[tuple[Event, int], ...]


def read_event(data: Mapping[str, Any]) -> Event | None:
    """Parse a privacy event; return None for an event without noise."""
    kind, gate = data["event"], data.get("gates", data)
    if kind in ("contribution", "non_private"):
        return None
    key = {"revealed_draw": "probability", "draw": "take"}.get(kind, "rate")
    rate = 1.0 if kind == "gaussian" else float(data[key]) / (data["of"] if kind == "draw" else 1)
    event = Event(kind, float(gate["noise_multiplier"]), rate, int(data.get("size", 1)))
    check(kind in KINDS, "format", "an unknown privacy event")
    in_range = 1e-6 < event.sigma < 1e12 and 0 < rate <= 1 and 0 < event.size <= 10**4
    check(in_range and gate["event"] == "gaussian", "format", "an invalid privacy event")
    return event


def gaussian_delta(mu: Any, eps: Any) -> Any:
    """Return δ(ε) of Gaussian releases (Balle and Wang 2018, theorem 8)."""
    first, second = log_ndtr(mu / 2 - eps / mu), eps + log_ndtr(-mu / 2 - eps / mu)
    return np.exp(first) * -np.expm1(np.minimum(second - first, 0))


@lru_cache(maxsize=64)
def profile_of(spend: Spend, relation: str, delta: float) -> Profile:
    """Return an upper bound on δ(ε) of composed events: the minimum of the bounds without
    amplification, with sampling revealed to the adversary, and from privacy loss distributions."""
    mu = math.sqrt(sum(count * (event.size / event.sigma) ** 2 for event, count in spend))
    bounds: list[Profile] = [lambda eps: float(gaussian_delta(mu, eps)) if mu else 0.0]
    kinds = {event.kind for event, _ in spend}
    if len(spend) == 1 and spend[0][0].size == 1 and kinds != {"gaussian"}:
        [(event, count)] = spend
        tail, visits = 1e-4 * delta, binom(count, event.rate)
        low, high = visits.ppf(tail), visits.isf(tail)
        numbers = np.arange(max(1, low), high + 1)
        weights, rest = visits.pmf(numbers), float(visits.sf(high) + visits.cdf(max(low, 1) - 1))
        rest -= float(visits.pmf(0)) if low <= 1 else 0.0
        mus = np.sqrt(numbers) / event.sigma
        bounds.append(lambda eps: float(weights @ gaussian_delta(mus, eps)) + rest)
    if kinds - {"gaussian"} and "revealed_draw" not in kinds:
        bounds.append(loss_profile(spend, relation, delta))
    return lambda eps: min(1.0, *(bound(eps) for bound in bounds))


def loss_profile(spend: Spend, relation: str, delta: float) -> Profile:
    """Return the bound of composed privacy loss distributions (Doroshenko et al. 2022)."""
    releases, mus = (
        sum(count for _, count in spend),
        [event.size / event.sigma for event, _ in spend],
    )
    max_loss = max(mus) ** 2 / 2 + 9 * max(mus)
    std_bound = math.sqrt(sum(n * (e.rate * e.size / e.sigma) ** 2 for e, n in spend))
    scale = max(1.0, std_bound)  # ε may be off by a thousandth of it
    step = max(
        min(1e-3 * scale, math.sqrt(1e-3 * scale / releases), std_bound / 300), max_loss / 1e6
    )
    if max_loss > 600 or releases > 10**7:
        return lambda eps: 1.0
    total = pld.identity(step)
    for event, count in spend:
        loss = privacy_loss(event, relation, step, max_loss).self_compose(count, 1e-4 * delta)
        total = total.compose(loss, 1e-4 * delta)
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
    inner = np.log1p(np.expm1(grid) / event.rate)
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

    spends: set[Spend]
    stop: float
    assumes: set[str]

    def profile(self, relation: str, delta: float, group: int = 1) -> Profile:
        """Return the bound on δ(ε) for every participant, for a group of records together."""
        profiles = []
        for spend in self.spends:
            known = relation == "add_or_remove_one" and all(event.size == 1 for event, _ in spend)
            known &= all(event.kind in ("poisson", "gaussian") for event, _ in spend)
            gaussian = all(event.kind == "gaussian" for event, _ in spend)
            check(
                group == 1 or known or gaussian, "epsilon", "no group bound exists for these events"
            )
            events = [(event._replace(size=event.size * group), count) for event, count in spend]
            if gaussian or group == 1:
                events = [(e._replace(sigma=e.sigma / group), count) for e, count in spend]
            profiles.append(profile_of(tuple(events), relation, delta))
        stop = self.stop
        return lambda eps: min(
            1.0, max(profile(eps) for profile in profiles) + stop * (1 + math.exp(min(eps, 700)))
        )


def proofs_of(accounts: Sequence[Any], missing: int) -> list[Proof]:
    """Return the bounds that all accounts have, those without assumptions first. The noise of
    participants without an account is not relied on in a secure sum."""
    honest, factor, proofs = accounts[0]["aggregation"].get("honest"), 1.0, []
    same = all(account["aggregation"] == accounts[0]["aggregation"] for account in accounts)
    check(same, "run", "accounts state different aggregations")
    if honest is not None and missing:
        check(
            missing < honest,
            "coverage",
            f"{missing} participants signed no account; fewer than {honest} may",
        )
        factor = math.sqrt(1 - missing / honest)
    for bounds in zip(*(account["bounds"] for account in accounts), strict=False):
        spends = set()
        for bound in bounds:
            events = [(read_event(event), count) for event, count in bound["events"]]
            valid = all(type(count) is int and 0 < count <= 10**12 for _, count in events)
            check(valid and len(events) <= 1000, "format", "an invalid count")
            noisy = [(e._replace(sigma=factor * e.sigma), count) for e, count in events if e]
            spends.add(tuple(noisy) if len(noisy) == len(events) else None)
        stop = max(float(bound["stop_probability"]) for bound in bounds)
        check(0 <= stop <= 1, "format", "an invalid probability")
        if None not in spends:
            assumes = {str(text) for bound in bounds for text in bound["assumes"]}
            proofs.append(Proof({spend for spend in spends if spend is not None}, stop, assumes))
    return proofs


def check_curve(stated: Mapping[str, Any], profile: Profile, truncated: float) -> None:
    """Raise VerificationError unless a stated curve and its figures follow from a profile.

    Args:
        truncated: mass of losses that the accountants truncate.
    """
    rates = np.array([float(rate) for rate in stated["tpr"]])
    if stated["mu"] is not None:
        mu = float(stated["mu"])
        points = np.linspace(0, mu * mu / 2 + 6 * mu, 60)
        deltas = gaussian_delta(mu, points) if mu else np.zeros(60)
        powers, advantage = ndtr(ndtri(rates) + mu), 2 * ndtr(mu / 2) - 1
        fpr = ndtr(ndtri(0.01) - mu)
        check(stated["rho"] >= mu * mu / 2 - 1e-9, "curve", "ρ is below μ²/2")
    else:
        points, deltas = np.array(stated["profile"], float).T
        grow, fall = np.exp(points), np.exp(-points)
        lines = [deltas + np.outer(rates, grow), 1 - fall * (1 - deltas - rates[:, None])]
        powers = np.minimum(np.concatenate(lines, axis=1).min(axis=1), 1)
        advantage = ((grow - 1 + 2 * deltas) / (grow + 1)).min()
        fpr = max((fall * (0.01 - deltas)).max(), (1 - deltas - grow * 0.99).max(), 0)
    for point, delta in zip(points, deltas, strict=True):
        proven = profile(point * (1 + TOLERANCE) + TOLERANCE)
        problem = f"recomputed δ({point:.4g}) = {proven:.3g} exceeds {delta:.3g}"
        check(proven <= delta * (1 + 1e-3) + truncated, "curve", problem)
    priors = np.array([float(prior) for prior in stated["posterior"]])
    beliefs = priors * 0.01 / (priors * 0.01 + (1 - priors) * fpr)
    implied = [*powers, *beliefs, min(advantage, 1)]
    claims = [*stated["tpr"].values(), *stated["posterior"].values(), stated["advantage"]]
    holds = all(claim >= value - 1e-6 for claim, value in zip(claims, implied, strict=True))
    check(
        holds, "curve", "a rate, posterior or advantage is below the value that the curve implies"
    )


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
    data = json.loads(entry["text"])
    check(data["format"] == kind, "format", f"expected the format {kind!r}")
    return data, name


def verify(path: str, keys: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return what a package proves, what is asserted, and what is assumed, as (kind, text).

    Args:
        keys: fingerprints of the accepted keys; empty: any key.

    Raises:
        VerificationError: unless all checks pass.
    """
    try:
        return _verify(*read_package(path), keys)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError,
            RecursionError, ZeroDivisionError) as error:  # fmt: skip
        raise VerificationError("format", f"{type(error).__name__}: {error}"[:200]) from error
    except (OSError, RuntimeError, NotImplementedError, EOFError, zipfile.BadZipFile,
            zlib.error) as error:  # fmt: skip
        raise VerificationError("zip", f"the archive cannot be read ({error})") from error


def _verify(
    texts: Mapping[str, bytes], digests: dict[str, str], keys: Sequence[str]
) -> list[tuple[str, str]]:
    manifest, coordinator = read_signed(json.loads(texts[MANIFEST]), RELEASE, keys)
    del digests[MANIFEST]
    changed = sorted({name for name, _ in manifest["files"].items() ^ digests.items()})
    check(not changed, "digest", f"files that differ from the manifest: {', '.join(changed)}")
    generator, account = (json.loads(texts[f"{name}.json"]) for name in ("generator", "account"))
    stated, weights = generator["privacy"], digests["generator.safetensors"]
    check(
        generator["generator_sha256"] == weights, "digest", "generator.json describes other weights"
    )
    check(account["format"] == ACCOUNTS, "format", f"not {ACCOUNTS}")
    expected = {name: account[name] for name in ("run", "settings")}
    expected |= {name: stated[name] for name in ("unit", "relation", "noise")}
    check(
        account["run"] == manifest["run"],
        "run",
        "account.json and manifest.json name different runs",
    )
    check(stated["noise"] == "secure", "noise", "an experiment: the noise is derived from a seed")
    accounts, signers, covered, clients = [], set[str](), set[int](), int(account["clients"])
    for entry in account["accounts"]:
        signed, key = read_signed(entry, ACCOUNT, keys)
        differing = [name for name, value in expected.items() if signed[name] != value]
        check(not differing, "run", f"an account and the release differ in {', '.join(differing)}")
        for first, last in signed["clients"]:
            check(
                0 <= first <= last < clients <= 10**6,
                "format",
                "a participant number is out of range",
            )
            numbers = set(range(first, last + 1))
            check(not numbers & covered, "coverage", "a participant is listed in two accounts")
            covered |= numbers
        accounts.append(signed)
        signers.add(key)
    missing, unbounded = clients - len(covered), stated.get("without_bound", {}).get("clients", 0)
    unsigned = f"{missing:,} of {clients:,} participants signed no account"
    check(accounts and missing <= unbounded, "coverage", unsigned)
    delta, claimed = float(stated["delta"]), float(stated["epsilon"])
    problem = VerificationError("epsilon", "no account has a bound")
    for proof in proofs_of(accounts, missing):
        try:
            epsilon = check_proof(proof, stated, delta)
            break
        except VerificationError as error:
            problem = error
    else:
        raise problem
    for name, pattern in ((n, p) for n, p in STATEMENTS.items() if n in texts):
        pairs = re.findall(pattern, texts[name].decode())
        least = claimed - 1e-9, delta * (1 - 1e-9)
        agrees = [
            float(e.replace("∞", "inf")) >= least[0] and float(d) >= least[1] for e, d in pairs
        ]
        check(agrees and all(agrees), "statement", f"{name} states no (ε, δ), or smaller values")
    scope = f"per {stated['unit']}, neighbours: {stated['relation'].replace('_', ' ')}"
    rows = [("proven", f"ε = {claimed:.4f} at δ = {delta:g} {scope}; recomputed: {epsilon:.4f}")]
    rows += [("proven", "the trade-off curve, true positive rates, advantage and posteriors")]
    text = f"{len(covered):,} of {clients:,} participants signed that they released at most this"
    rows += [("asserted", f"{text}; {', '.join(sorted(signers))}")]
    rows += [("asserted", f"coordinator: the files belong to run {manifest['run']}; {coordinator}")]
    if "audit.json" in texts:
        rows += [("asserted", f"coordinator: {audit_summary(json.loads(texts['audit.json']))}")]
    rows += [("assumed", text) for text in sorted(proof.assumes)]
    rows += [
        (
            "assumed",
            "participants run unmodified fedgen, so that their noise has the stated distribution",
        )
    ]
    if not keys:
        rows += [
            (
                "assumed",
                "key ownership: obtain the fingerprints from the participants, and pass them",
            )
        ]
    if unbounded:
        rows += [("not covered", f"{unbounded:,} of {clients:,} participants have no bound")]
    return rows


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
    groups = {"1": stated["epsilon"], **(stated["group_epsilon"] or {})}
    epsilons = {}
    for size, claimed in groups.items():
        if claimed is not None:
            profile = proof.profile(stated["relation"], delta, int(size))
            epsilons[size] = epsilon_at(profile, delta)
            problem = (
                f"recomputed ε for {size} records is {epsilons[size]:.4f}, above {claimed:.4f}"
            )
            check(epsilons[size] <= claimed * (1 + TOLERANCE) + TOLERANCE, "epsilon", problem)
    check_curve(stated["guarantee"], proof.profile(stated["relation"], delta), 1e-3 * delta)
    return epsilons["1"]


def format_rows(rows: Sequence[tuple[str, str]]) -> str:
    """Return the result of ``verify`` as text."""
    return "\n".join(f"{kind:11} {escape_control_codes(text)}" for kind, text in rows)


def escape_control_codes(text: str) -> str:
    """Escape control codes, which terminals would execute, in untrusted text."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:1000])


def main(arguments: Sequence[str]) -> int:
    """Print what a package proves; return the exit status."""
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
