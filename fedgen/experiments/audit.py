"""``fedgen audit``: attacks on a client program and on a whole run, beside what is proven."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from dp_accounting import DpEvent, GaussianDpEvent
from numpy.typing import NDArray
from omegaconf import DictConfig
from torch import Tensor

from fedgen.coins import Coins
from fedgen.data.canaries import Canaries
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.experiments import settings, validation
from fedgen.experiments.settings import Setup
from fedgen.experiments.training import train
from fedgen.federation import messages
from fedgen.federation.rounds import RunState
from fedgen.method import Method, Plan, ServerProgram, State, WorstCase
from fedgen.privacy.accounting import Epsilon, epsilon
from fedgen.privacy.audit import (
    byte_features,
    feature_lower_bound,
    gaussian_lower_bound,
    lower_bound,
    one_run_lower_bound,
)
from fedgen.privacy.calibration import least_noise
from fedgen.privacy.events import Spend, canonical
from fedgen.privacy.releases import Local, Release, Secure, Sent
from fedgen.reporting.figures import lower_bounds
from fedgen.reporting.progress import RunProgress, epsilon_in_words
from fedgen.reporting.run_dir import RunDir, or_null

_TOGETHER = (1, 2, 4, 8)  # releases that one attack on the client program sees
_LEAST_TRIALS = 100
_TELLING = 4.0  # an epsilon
_HIGH_NOISE = 1e9  # noise multiplier at which values reveal nothing
_LOW_NOISE = 1e-4  # noise multiplier at which released values reveal the exact ones
_BYTES = "bytes of a reply"


@dataclass(frozen=True)
class Point:
    """What an attack ``of`` something shows after so many releases or rounds, and what is proven
    then."""

    after: int
    lower_bound: float
    proven: float | None
    of: str = "run"

    @property
    def broken(self) -> bool:
        """Whether the proof is refuted."""
        return self.proven is not None and self.lower_bound > self.proven


@dataclass(frozen=True)
class Audited:
    """What attacks found: on the client program, on a run's pictures; and in words."""

    program: list[Point]
    run: list[Point]
    text: str


def audit(config: DictConfig) -> Audited:
    """Attacks the client program of a configuration, then trains a run with canaries and attacks
    that.

    Raises:
        FedgenError: for a setting that does not work, or if an attack refutes a proven epsilon.
    """
    chosen = config.audit
    check_audit(chosen)
    if config.resume is not None:
        raise FedgenError("resume", "an audit begins anew", "finish its run by fedgen train")
    ready = settings.setup(config)
    found: list[Point] = []
    lines, noises = [], {}
    kinds = range(len(ready.method.worst_cases()))
    attacks = [(sight, kind) for sight in sights(ready.method) for kind in kinds]
    for number, (sight, kind) in enumerate(attacks if chosen.releases else []):
        noise = chosen.noise_multiplier or telling_noise(ready, sight, kind)
        method = ready.at_noise(noise)
        worst = method.worst_cases()[kind]
        fixed = worst.fixed
        if len(kinds) > 1:
            sight = replace(sight, name=f"{sight.name}, {next(iter(worst.query.rows))}")
        trials = max(2 * _LEAST_TRIALS, chosen.releases // sight.together)
        stage = f"{sight.name}, {number + 1}/{len(attacks)}"
        with RunProgress() as progress:
            points = attack(
                method,
                method.plan,
                worst,
                sight,
                releases=trials,
                confidence=chosen.confidence,
                delta=config.privacy.delta,
                coins=ready.coins.at("audit", number),
                told=partial(_told, progress, 2 * trials, stage),
            )
        found, noises[sight.name] = found + points, None if fixed else noise
        of = "the warm-up's noise" if fixed else f"noise multiplier {noise:.4g}"
        lines += [
            f"{sight.name}, {trials:,} releases of each of two neighbours at {of}, "
            f"{point.after} together: "
            f"{_in_words(point, chosen.confidence)}"
            for point in points
        ]
    if chosen.releases:
        point = attack_bytes(ready, chosen.releases, chosen.confidence, config.privacy.delta)
        found.append(point)
        lines.append(
            f"{_BYTES}, {chosen.releases:,} releases of each of two neighbours at noise "
            f"multiplier {_HIGH_NOISE:g}: {_in_words(point, chosen.confidence)}"
        )
    guessed: list[Point] = []
    if chosen.canaries:
        run = train(
            config, watch=lambda ready, state, proven: guessed.append(guess(ready, state, proven))
        )
        run_dir = RunDir(run)
        facts = {"releases": chosen.releases, "noise_multipliers": noises}
        record: dict[str, Any] = {
            "schema": 2,
            "confidence": chosen.confidence,
            "delta": config.privacy.delta,
            "program": {**facts, "points": [asdict(point) for point in found]},
            "run": {"canaries": chosen.canaries, "points": [asdict(point) for point in guessed]},
        }
        run_dir.write("audit", record)
        lower_bounds(
            {
                **{
                    f"{name}, releases": [
                        (p.after, p.lower_bound, p.proven) for p in found if p.of == name
                    ]
                    for name in noises
                },
                "run, rounds": [(p.after, p.lower_bound, p.proven) for p in guessed],
            },
            config.privacy.delta,
            chosen.confidence,
            run / "audit.png",
        )
        lines += [
            f"run with {chosen.canaries} canaries, after round {guessed[-1].after}: "
            f"{_in_words(guessed[-1], chosen.confidence)}",
            str(run / "audit.json"),
            str(run / "audit.png"),
        ]
    text = "\n".join(lines)
    if any(point.broken for point in (*found, *guessed)):
        print(text)
        raise FedgenError("audit", "an attack shows more than is proven", "do not use this build")
    head = []
    if noises and not chosen.noise_multiplier:
        head = [
            f"client programs at noise of their own: one release costs ε = {_TELLING:g}, where an "
            "attack can see something (audit.noise_multiplier=... sets another)"
        ]
    return Audited(found, guessed, "\n".join([*head, text, "no attack refutes what is proven"]))


def _told(progress: RunProgress, of: int, stage: str, done: int) -> None:
    progress.show("simulated releases", done, of, stage)


def telling_noise(ready: Setup, sight: Sight, kind: int) -> float:
    """The noise multiplier at which one release costs ``_TELLING``: much less is always seen, and
    much more never. Any, where a release does not go by it."""
    if ready.method.worst_cases()[kind].fixed:
        return 1.0

    def at(noise: float) -> float:
        method = ready.at_noise(noise)
        spend = _cost(method.plan, method.worst_cases()[kind], sight, 1)
        return epsilon(spend, ready.config.privacy.delta, method.plan.relation).or_infinity

    return least_noise(at, _TELLING)


def check_audit(chosen: DictConfig) -> None:
    """Raises FedgenError for an audit that cannot be."""
    for key, least in (("releases", 2 * _LEAST_TRIALS), ("canaries", 4)):
        if chosen[key] and not least <= chosen[key] <= 10**7:
            raise FedgenError(
                f"audit.{key}", f"must be 0 or at least {least}, got {chosen[key]}", "correct it"
            )
    if not chosen.releases and not chosen.canaries:
        raise FedgenError("audit.releases", "there is nothing to audit by", "raise it, or canaries")
    if not 0.9 <= chosen.confidence < 1:
        problem = f"must be at least 0.9 and below 1, got {chosen.confidence:g}"
        raise FedgenError("audit.confidence", problem, "e.g. 0.95")
    noise = chosen.noise_multiplier
    if noise is not None and not validation.LEAST <= noise <= validation.MOST:
        problem = f"must lie in {validation.LEAST:g}..{validation.MOST:g}, got {noise:g}"
        raise FedgenError("audit.noise_multiplier", problem, "e.g. 1")


def _in_words(point: Point, confidence: float) -> str:
    verdict = " - the proof is REFUTED" if point.broken else ""
    return (
        f"ε ≥ {point.lower_bound:.2f} with confidence {confidence:g}, proven ε = "
        f"{epsilon_in_words(point.proven)}{verdict}"
    )


# --- the client program ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Sight:
    """What an attack sees of a round.

    together: the answers whose sum it sees. drawn: whether those who answer are drawn in secret,
    so that the attacked client may not be among them.
    event: (plan, rows) -> what so many answered rows cost against it.
    """

    name: str
    together: int
    drawn: bool
    event: Callable[[Plan, int], DpEvent]


def sights(method: Method) -> list[Sight]:
    """What there is to attack: what leaves the mechanism of one client (or of the aggregator that
    clients trust); of a secure sum, no more shares than its noise counts on; where what is
    published is a function of the sums of several clients' answers, such a sum, with the draw of
    those who answer and without."""
    plan, cohort = method.plan, method.cohort
    if isinstance(plan.aggregation, Secure):
        shares = plan.aggregation.honest
        name = f"secure sum of {shares} honest shares"
        return [Sight(name, shares, False, partial(counted, trusted=False))]
    found = [Sight("client program", 1, False, partial(counted, trusted=plan.trusted))]
    if plan.release is None or plan.trusted or not cohort.count_is_fixed:
        return found
    several = cohort.answers_per_row
    name = f"sum of {several} clients" if several > 1 else "one of the clients"
    if several > 1:
        found.append(Sight(name, several, False, _of_sums))
    if plan.amplified_by["release"] is not None:
        found.append(Sight(f"{name}, drawn in secret", several, True, _of_draws))
    return found


def counted(plan: Plan, rows: int, trusted: bool) -> DpEvent:
    """What so many answered rows cost against whom the method protects."""
    return _of_draws(plan, rows) if trusted else plan.server(rows)


def _cost(plan: Plan, worst: WorstCase, sight: Sight, count: int) -> Spend:
    """Of so many answers to a question."""
    if worst.event is not None:
        return canonical(worst.event, count)
    return canonical(sight.event(worst.plan or plan, count * worst.query.count))


def _of_sums(plan: Plan, rows: int) -> DpEvent:
    assert plan.seen is not None
    return plan.seen(rows)


def _of_draws(plan: Plan, rows: int) -> DpEvent:
    assert plan.release is not None
    return plan.release(rows // plan.rows_per_round)


def attack(
    method: Method,
    plan: Plan,
    worst: WorstCase,
    sight: Sight,
    *,
    releases: int,
    confidence: float,
    delta: float,
    coins: Coins,
    told: Callable[[int], None] = lambda done: None,
) -> list[Point]:
    """Tells two neighbours apart by many releases that a method's client programs make, as far as
    ``sight`` goes; ``plan`` says what is proven.

    The bounds of all points hold together with ``confidence``. The adversary knows both neighbours,
    and scores a release by its length along what lies between them. It does not know the draws:
    where a secret draw amplifies, it finds less. In a sum, all others answer as the second
    neighbour does, each with noise of its own.
    """
    together = [count for count in _TOGETHER if releases // count >= _LEAST_TRIALS]
    each = 1 - (1 - confidence) / len(together)  # so that all of them hold together
    direction = _direction(method, worst, coins)
    scores = np.zeros((2, releases))
    for trial in range(releases):
        for side, (state, shard) in enumerate((worst.first, worst.second)):
            here = coins.at("side", side)
            if sight.together == 1 and not sight.drawn:
                seen = _released(method, worst, state, shard, trial, here).astype(float)
            else:
                seen = _summed(method, worst, sight, state, shard, trial, here)
            scores[side, trial] = float((seen * direction).sum())
        if trial % 100 == 99:
            told(2 * trial + 2)
    points = []
    for count in together:
        trials = releases // count
        summed = scores[:, : trials * count].reshape(2, trials, count).sum(2)
        spend = _cost(plan, worst, sight, count)
        gaussian = all(isinstance(event, GaussianDpEvent) for event in spend)
        bound = gaussian_lower_bound if gaussian else lower_bound
        proven = epsilon(spend, delta, plan.relation).value
        found = bound(summed[0], summed[1], delta, each)
        points.append(Point(count, found, proven, sight.name))
    return points


def attack_bytes(ready: Setup, releases: int, confidence: float, delta: float) -> Point:
    """Attack the bytes of a client's reply.

    The scores of ``attack`` are linear in the released numbers and cannot detect signs of zeros,
    types or texts. Here the noise multiplier is so large that the numbers reveal nothing, and each
    feature of the bytes is tried (``byte_features``). If the frames (all but the numbers) of the
    two neighbours differ, the proof is refuted.

    Returns:
        The query with the largest lower bound on ε, and the ε proven for it.
    """
    method, quiet = ready.at_noise(_HIGH_NOISE), ready.at_noise(_LOW_NOISE)
    kinds = [kind for kind, worst in enumerate(method.worst_cases()) if not worst.fixed]
    each, found = 1 - (1 - confidence) / max(len(kinds), 1), []
    for kind in kinds:
        coins, worst = ready.coins.at("audit", "bytes", kind), method.worst_cases()[kind]
        exact = [_reply(quiet, quiet.worst_cases()[kind], side, coins)[1] for side in (0, 1)]
        between = np.sign(exact[0].astype(float) - exact[1].astype(float)).astype(np.int8)
        replies = [
            [
                _reply(method, worst, side, coins.at("side", side, "trial", trial))
                for trial in range(releases)
            ]
            for side in (0, 1)
        ]
        features = [
            np.stack([byte_features(numbers, between) for _, numbers in side]) for side in replies
        ]
        frames = [{frame for frame, _ in side} for side in replies]
        proven = epsilon(
            _cost(method.plan, worst, sights(method)[0], 1), delta, method.plan.relation
        )
        bound = math.inf if frames[0] != frames[1] else 0.0
        bound = max(bound, feature_lower_bound(features[0], features[1], delta, each))
        found.append(Point(1, bound, proven.value, _BYTES))
    return max(found, key=lambda point: point.lower_bound, default=Point(1, 0.0, 0.0, _BYTES))


def _reply(
    method: Method, worst: WorstCase, side: int, coins: Coins
) -> tuple[bytes, NDArray[np.generic]]:
    """Return the frame and the numbers of one neighbour's reply. With an aggregation other than
    ``Local`` the numbers are those of the sum."""
    state, shard = (worst.first, worst.second)[side]
    aggregation = (worst.plan or method.plan).aggregation
    sent = method.client.answer(state, worst.query, shard, worst.round, coins)
    frame, numbers = messages.frame_of(messages.answer_of(sent, aggregation))
    if not isinstance(aggregation, Local):
        numbers = method.total([numbers], worst.round, coins).numpy()
    return frame, numbers


def _summed(
    method: Method,
    worst: WorstCase,
    sight: Sight,
    state: State,
    shard: Shard,
    trial: int,
    coins: Coins,
) -> NDArray[np.float64]:
    """The sum of the answers to each row, of the attacked client, 0, and of others."""
    count = worst.query.count
    asked = {client: list(range(count)) for client in range(sight.together)}
    if sight.drawn:
        asked = method.cohort.draw(count, coins.secret("cohort", trial))
    answers: dict[int, Sent] = {}
    for client, rows in asked.items():
        own = (state, shard) if client == 0 else worst.second
        query, here = worst.query.take(rows), coins.at("trial", trial, "client", client)
        answers[client] = method.client.answer(own[0], query, own[1], worst.round, here)
    if not isinstance(method.plan.aggregation, Local):
        arrived = [each.arrays["answer"] for each in answers.values()]
        return worst.read(method.total(arrived, worst.round, coins.at("total", trial))).numpy()
    total: NDArray[np.float64] | None = None
    for client, answer in answers.items():
        assert isinstance(answer, Release)
        read = worst.read(torch.from_numpy(answer.arrays["answer"])).numpy()
        total = np.zeros((count, *read.shape[1:])) if total is None else total
        total[asked[client]] += read
    assert total is not None
    return total


def _released(
    method: Method, worst: WorstCase, state: State, shard: Shard, trial: int, coins: Coins
) -> NDArray[Any]:
    """What leaves the mechanism: the client's, or that of an aggregation, of this client alone."""
    here = coins.at("trial", trial)
    answer = method.client.answer(state, worst.query, shard, worst.round, here)
    found = torch.from_numpy(answer.arrays["answer"])
    if not isinstance(method.plan.aggregation, Local):
        here = coins.at("aggregate", trial)
        drawn = method.cohort.draw(worst.query.count, here.secret("cohort"))
        alone = answer.arrays["answer"] if 0 in drawn else np.zeros(found.shape, np.float32)
        found = method.total([alone], worst.round, here)
    read: NDArray[Any] = worst.read(found).numpy()
    return read


def _direction(method: Method, worst: WorstCase, coins: Coins) -> NDArray[np.float32]:
    """What lies between the two neighbours' releases, each row of length one: under the same coins
    their noise is the same, and what an aggregator is trusted with has none yet. A row that a draw
    gives to others is tried again."""
    found: NDArray[np.float32] | None = None

    def sent(state: State, shard: Shard, trial: int) -> NDArray[Any]:
        here = coins.at("direction")
        if not method.plan.trusted:
            return _released(method, worst, state, shard, trial, here)
        here = here.at("trial", trial)
        answer = method.client.answer(state, worst.query, shard, worst.round, here).arrays["answer"]
        read: NDArray[Any] = worst.read(torch.from_numpy(answer)).numpy()
        return read

    for trial in range(1000):
        first, second = (sent(state, shard, trial) for state, shard in (worst.first, worst.second))
        between = first - second
        flat = between.reshape(len(between), -1)
        norms = np.linalg.norm(flat, axis=1, keepdims=True)
        unit = (flat / np.maximum(norms, 1e-12) * (norms > 1e-6)).reshape(between.shape)
        if found is None:
            found = np.zeros_like(between)
        empty = ~found.reshape(len(found), -1).any(axis=1)
        found[empty] = unit[empty]
        if found.reshape(len(found), -1).any(axis=1).all():
            return found
    raise FedgenError("audit", "two neighbours release the same", "this is no worst case")


# --- a run ----------------------------------------------------------------------------------------


def guess(ready: Setup, state: RunState, proven: Epsilon) -> Point:
    """Guesses, from what the server has, which canaries were in the run: the half that it is surest
    of, a quarter in and a quarter out. The bounds of all of a run's pictures hold together."""
    assert ready.canaries is not None
    present = ready.canaries.present
    scores = recognized(ready.method.server, state, ready.canaries, ready.coins.at("audit"))
    order, quarter = np.argsort(scores, kind="stable"), max(1, len(present) // 4)
    correct = int(present[order[-quarter:]].sum() + (~present[order[:quarter]]).sum())
    pictures = ready.privacy.budget.rounds // ready.config.sample_every + 1
    confidence = 1 - (1 - ready.config.audit.confidence) / pictures
    delta = ready.config.privacy.delta
    bound = one_run_lower_bound(correct, 2 * quarter, len(present), delta, confidence)
    return Point(state.rounds, bound, or_null(proven.value))


def recognized(
    server: ServerProgram, state: RunState, canaries: Canaries, coins: Coins
) -> NDArray[np.float64]:
    """How much each canary's rows are recognized, over those that are there without it (m,)."""

    def mean(shards: list[Shard]) -> NDArray[np.float64]:
        rows = [shard.rows(torch.arange(len(shard))) for shard in shards]
        images, labels = (torch.cat([pair[place] for pair in rows]) for place in (0, 1))
        found: Tensor = server.recognize(state.server, images, labels, coins)
        parts = torch.split(found.double(), [len(shard) for shard in shards])
        return np.array([float(part.mean()) for part in parts])

    inside = mean(canaries.inside)
    return inside if canaries.outside is None else inside - mean(canaries.outside)
