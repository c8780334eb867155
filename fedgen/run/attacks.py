"""Attacks on a client program, the bytes of its replies, and a whole run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from dp_accounting import DpEvent, GaussianDpEvent
from numpy.typing import NDArray
from torch import Tensor

from fedgen.data.canaries import Canaries
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.federation import messages
from fedgen.federation.rounds import RunState
from fedgen.methods.api import Method, ServerProgram, State, WorstCase
from fedgen.methods.plan import Plan
from fedgen.privacy.accounting import Epsilon, epsilon
from fedgen.privacy.aggregation import Release, Secure, Sent
from fedgen.privacy.audit_bounds import (
    byte_features,
    feature_lower_bound,
    gaussian_lower_bound,
    lower_bound,
    one_run_lower_bound,
)
from fedgen.privacy.calibration import min_noise_multiplier
from fedgen.privacy.events import Spend, canonical
from fedgen.randomness import RandomStreams
from fedgen.run.setup import Setup
from fedgen.storage.schemas import or_null

_SUMMED_RELEASES = (1, 2, 4, 8)  # releases seen by one attack on the client program


MIN_TRIALS = 100


TARGET_EPSILON = 4.0  # an epsilon


HIGH_NOISE = 1e9  # noise multiplier at which values reveal nothing


_LOW_NOISE = 1e-4  # noise multiplier at which released values reveal the exact ones


BYTES_OF_REPLY = "bytes of a reply"


@dataclass(frozen=True)
class LowerBound:
    """A lower bound on ε from an attack, after a number of releases or rounds, with the proven
    ε."""

    releases: int
    lower_bound: float
    proven: float | None
    of: str = "run"

    @property
    def broken(self) -> bool:
        """Return whether the proof is refuted."""
        return self.proven is not None and self.lower_bound > self.proven


def distinguishing_noise(ready: Setup, sight: Adversary, kind: int) -> float:
    """Return the noise multiplier at which one release costs ``TARGET_EPSILON``: neighbours are
    always distinguished at much less noise, and never at much more. Any value if a release does not
    depend on it.
    """
    if ready.method.worst_cases()[kind].custom_noise:
        return 1.0

    def at(noise: float) -> float:
        method = ready.at_noise(noise)
        spend = _cost(method.plan, method.worst_cases()[kind], sight, 1)
        return epsilon(spend, ready.config.privacy.delta, method.plan.relation).or_infinity

    return min_noise_multiplier(at, TARGET_EPSILON)


@dataclass(frozen=True)
class Adversary:
    """View of an attack in a round.

    sees_sum: number of responses whose sum it sees.
    sampling_is_secret: whether responders are sampled secretly, so that the attacked client may not
        be among them.
    event: (plan, query samples) -> their event against it.
    """

    name: str
    sees_sum: int
    sampling_is_secret: bool
    event: Callable[[Plan, int], DpEvent]


def adversaries(method: Method) -> list[Adversary]:
    """Return the views to attack: the output of the mechanism of one client (or of a trusted
    aggregator); for a secure sum, as many shares as its noise assumes; if the release depends on
    sums of the responses of several clients, such a sum, with and without sampling of
    responders."""
    plan, cohort = method.plan, method.cohort
    if isinstance(plan.aggregation, Secure):
        shares = plan.aggregation.honest
        name = f"secure sum of {shares} honest shares"
        return [Adversary(name, shares, False, partial(accounted_event, trusted=False))]
    views = [
        Adversary("client program", 1, False, partial(accounted_event, trusted=plan.is_trusted))
    ]
    if plan.release_event is None or plan.is_trusted or not cohort.has_fixed_size:
        return views
    several = cohort.responses_per_sample
    name = f"sum of {several} clients" if several > 1 else "one of the clients"
    if several > 1:
        views.append(Adversary(name, several, False, _sum_event))
    if plan.amplified_by["release"] is not None:
        views.append(Adversary(f"{name}, secretly sampled", several, True, _sampling_event))
    return views


def accounted_event(plan: Plan, rows: int, trusted: bool) -> DpEvent:
    """Return the event of this number of query samples, against the adversary of the method."""
    return _sampling_event(plan, rows) if trusted else plan.server_event(rows)


def _cost(plan: Plan, worst: WorstCase, sight: Adversary, count: int) -> Spend:
    """Return the spend of this number of responses to a query."""
    if worst.event is not None:
        return canonical(worst.event, count)
    return canonical(sight.event(worst.plan or plan, count * worst.query.count))


def _sum_event(plan: Plan, rows: int) -> DpEvent:
    assert plan.event_if_sampling_revealed is not None
    return plan.event_if_sampling_revealed(rows)


def _sampling_event(plan: Plan, rows: int) -> DpEvent:
    assert plan.release_event is not None
    return plan.release_event(rows // plan.samples_per_round)


def attack(
    method: Method,
    plan: Plan,
    worst: WorstCase,
    sight: Adversary,
    *,
    releases: int,
    confidence: float,
    delta: float,
    streams: RandomStreams,
    report_progress: Callable[[int], None] = lambda done: None,
) -> list[LowerBound]:
    """Distinguish two neighbours by many releases of the client programs of a method; ``plan``
    gives the proven ε.

    All bounds hold simultaneously with ``confidence``. The adversary knows both neighbours and
    scores a release by its projection onto their difference. It does not know what is sampled
    secretly (cohorts, batches), so it finds less where secret sampling amplifies. In a sum, all
    other clients respond like the second neighbour, each with its own noise.
    """
    together = [count for count in _SUMMED_RELEASES if releases // count >= MIN_TRIALS]
    confidence_per_bound = 1 - (1 - confidence) / len(together)  # all hold simultaneously
    direction = _direction(method, worst, streams)
    scores = np.zeros((2, releases))
    for trial in range(releases):
        for side, (state, shard) in enumerate((worst.first, worst.second)):
            side_streams = streams.at("side", side)
            if sight.sees_sum == 1 and not sight.sampling_is_secret:
                seen = _play(method, worst, state, shard, trial, side_streams).astype(float)
            else:
                seen = _play_sum(method, worst, sight, state, shard, trial, side_streams)
            scores[side, trial] = float((seen * direction).sum())
        if trial % 100 == 99:
            report_progress(2 * trial + 2)
    points = []
    for count in together:
        trials = releases // count
        summed = scores[:, : trials * count].reshape(2, trials, count).sum(2)
        spend = _cost(plan, worst, sight, count)
        gaussian = all(isinstance(event, GaussianDpEvent) for event in spend)
        bound = gaussian_lower_bound if gaussian else lower_bound
        proven = epsilon(spend, delta, plan.relation).value
        epsilon_bound = bound(summed[0], summed[1], delta, confidence_per_bound)
        points.append(LowerBound(count, epsilon_bound, proven, sight.name))
    return points


def attack_bytes(ready: Setup, releases: int, confidence: float, delta: float) -> LowerBound:
    """Attack the bytes of a client's reply.

    The scores of ``attack`` are linear in the released numbers and cannot detect signs of zeros,
    types or texts. Here the noise multiplier is so large that the numbers reveal nothing, and each
    feature of the bytes is tried (``byte_features``). If the frames (all but the numbers) of the
    two neighbours differ, the proof is refuted.

    Returns:
        The largest lower bound on ε over all kinds of query, with the ε proven for that kind.
    """
    method, quiet = ready.at_noise(HIGH_NOISE), ready.at_noise(_LOW_NOISE)
    kinds = [kind for kind, worst in enumerate(method.worst_cases()) if not worst.custom_noise]
    confidence_per_kind, points = 1 - (1 - confidence) / max(len(kinds), 1), []
    for kind in kinds:
        streams, worst = ready.streams.at("audit", "bytes", kind), method.worst_cases()[kind]
        exact = [_respond(quiet, quiet.worst_cases()[kind], side, streams)[1] for side in (0, 1)]
        between = np.sign(exact[0].astype(float) - exact[1].astype(float)).astype(np.int8)
        replies = [
            [
                _respond(method, worst, side, streams.at("side", side, "trial", trial))
                for trial in range(releases)
            ]
            for side in (0, 1)
        ]
        features = [
            np.stack([byte_features(numbers, between) for _, numbers in side]) for side in replies
        ]
        frames = [{frame for frame, _ in side} for side in replies]
        proven = epsilon(
            _cost(method.plan, worst, adversaries(method)[0], 1), delta, method.plan.relation
        )
        bound = math.inf if frames[0] != frames[1] else 0.0
        bound = max(
            bound, feature_lower_bound(features[0], features[1], delta, confidence_per_kind)
        )
        points.append(LowerBound(1, bound, proven.value, BYTES_OF_REPLY))
    return max(
        points, key=lambda point: point.lower_bound, default=LowerBound(1, 0.0, 0.0, BYTES_OF_REPLY)
    )


def _respond(
    method: Method, worst: WorstCase, side: int, streams: RandomStreams
) -> tuple[bytes, NDArray[np.generic]]:
    """Return the frame and the numbers of one neighbour's reply. With an aggregation other than
    ``Local`` the numbers are those of the sum."""
    state, shard = (worst.first, worst.second)[side]
    aggregation = (worst.plan or method.plan).aggregation
    sent = method.client.respond(state, worst.query, shard, worst.round, streams)
    frame, numbers = messages.response_frame(messages.response_from(sent, aggregation))
    if not aggregation.is_local:
        numbers = method.aggregate([numbers], worst.round, streams).numpy()
    return frame, numbers


def _play_sum(
    method: Method,
    worst: WorstCase,
    sight: Adversary,
    state: State,
    shard: Shard,
    trial: int,
    streams: RandomStreams,
) -> NDArray[np.float64]:
    """Return the sum of the responses to each query sample, of the attacked client 0 and of
    others."""
    count = worst.query.count
    rows_by_client = {client: list(range(count)) for client in range(sight.sees_sum)}
    if sight.sampling_is_secret:
        rows_by_client = method.cohort.assign(count, streams.secret("cohort", trial))
    answers: dict[int, Sent] = {}
    for client, rows in rows_by_client.items():
        neighbour = (state, shard) if client == 0 else worst.second
        query, client_streams = worst.query.take(rows), streams.at("trial", trial, "client", client)
        answers[client] = method.client.respond(
            neighbour[0], query, neighbour[1], worst.round, client_streams
        )
    if not method.plan.aggregation.is_local:
        arrived = [answer.arrays["answer"] for answer in answers.values()]
        return worst.read(
            method.aggregate(arrived, worst.round, streams.at("total", trial))
        ).numpy()
    total: NDArray[np.float64] | None = None
    for client, answer in answers.items():
        assert isinstance(answer, Release)
        read = worst.read(torch.from_numpy(answer.arrays["answer"])).numpy()
        total = np.zeros((count, *read.shape[1:])) if total is None else total
        total[rows_by_client[client]] += read
    assert total is not None
    return total


def _play(
    method: Method, worst: WorstCase, state: State, shard: Shard, trial: int, streams: RandomStreams
) -> NDArray[Any]:
    """Return the output of the mechanism of the client, or of an aggregation over this client
    only."""
    trial_streams = streams.at("trial", trial)
    answer = method.client.respond(state, worst.query, shard, worst.round, trial_streams)
    output = torch.from_numpy(answer.arrays["answer"])
    if not method.plan.aggregation.is_local:
        aggregation_streams = streams.at("aggregate", trial)
        drawn = method.cohort.assign(worst.query.count, aggregation_streams.secret("cohort"))
        alone = answer.arrays["answer"] if 0 in drawn else np.zeros(output.shape, np.float32)
        output = method.aggregate([alone], worst.round, aggregation_streams)
    read: NDArray[Any] = worst.read(output).numpy()
    return read


def _direction(method: Method, worst: WorstCase, streams: RandomStreams) -> NDArray[np.float32]:
    """Return the normalized difference between the releases of two neighbours per query sample:
    with the same streams their noise is equal, and the input of a trusted aggregator has none yet.
    A query sample that is routed to others is tried again."""
    direction: NDArray[np.float32] | None = None

    def sent(state: State, shard: Shard, trial: int) -> NDArray[Any]:
        shared_streams = streams.at("direction")
        if not method.plan.is_trusted:
            return _play(method, worst, state, shard, trial, shared_streams)
        shared_streams = shared_streams.at("trial", trial)
        answer = method.client.respond(
            state, worst.query, shard, worst.round, shared_streams
        ).arrays["answer"]
        read: NDArray[Any] = worst.read(torch.from_numpy(answer)).numpy()
        return read

    for trial in range(1000):
        first, second = (sent(state, shard, trial) for state, shard in (worst.first, worst.second))
        between = first - second
        flat = between.reshape(len(between), -1)
        norms = np.linalg.norm(flat, axis=1, keepdims=True)
        unit = (flat / np.maximum(norms, 1e-12) * (norms > 1e-6)).reshape(between.shape)
        if direction is None:
            direction = np.zeros_like(between)
        empty = ~direction.reshape(len(direction), -1).any(axis=1)
        direction[empty] = unit[empty]
        if direction.reshape(len(direction), -1).any(axis=1).all():
            return direction
    raise FedgenError("audit", "two neighbours release the same", "this is no worst case")


def guess_canaries(ready: Setup, state: RunState, proven: Epsilon) -> LowerBound:
    """Guess from the view of the server which canaries were in the run: the half with the clearest
    scores, a quarter in and a quarter out. The bounds at all pictures of a run hold simultaneously.
    """
    assert ready.canaries is not None
    present = ready.canaries.present
    scores = canary_scores(ready.method.server, state, ready.canaries, ready.streams.at("audit"))
    order, quarter = np.argsort(scores, kind="stable"), max(1, len(present) // 4)
    correct = int(present[order[-quarter:]].sum() + (~present[order[:quarter]]).sum())
    pictures = ready.privacy.budget.rounds // ready.config.sample_every + 1
    confidence = 1 - (1 - ready.config.audit.confidence) / pictures
    delta = ready.config.privacy.delta
    bound = one_run_lower_bound(correct, 2 * quarter, len(present), delta, confidence)
    return LowerBound(state.rounds, bound, or_null(proven.value))


def canary_scores(
    server: ServerProgram, state: RunState, canaries: Canaries, streams: RandomStreams
) -> NDArray[np.float64]:
    """Return the score of the records of each canary, minus that of the records in its place
    without it, if any, (m,)."""

    def mean(shards: list[Shard]) -> NDArray[np.float64]:
        rows = [shard.rows(torch.arange(len(shard))) for shard in shards]
        images, labels = (torch.cat([pair[place] for pair in rows]) for place in (0, 1))
        record_scores: Tensor = server.membership_scores(state.server, images, labels, streams)
        parts = torch.split(record_scores.double(), [len(shard) for shard in shards])
        return np.array([float(part.mean()) for part in parts])

    inside = mean(canaries.included)
    return inside if canaries.excluded is None else inside - mean(canaries.excluded)
