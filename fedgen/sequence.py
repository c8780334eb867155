"""Methods that ask for one sum after another: each a sum over rows of clipped contributions with
noise, each question made of what was published before.

A ``SumSequence`` is the plan of these releases. All clients answer all of it; they have no state,
and nothing is drawn but the batches of a sum that has such. So a run can go on between any two, and
every release costs what its own mechanism says, whoever asks for it and when: a client answers the
sum that a question names, and charges that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from dp_accounting import ComposedDpEvent, DpEvent
from torch import Tensor

from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.files import digest
from fedgen.method import (
    TRUSTING,
    Claim,
    ClientProgram,
    Method,
    Plan,
    PublicFacts,
    Query,
    ServerProgram,
    State,
    WorstCase,
)
from fedgen.privacy.accounting import claimed_by_rdp
from fedgen.privacy.batches import AllRows, Batches
from fedgen.privacy.events import Contribution, Relation, Unit, repeat
from fedgen.privacy.mechanisms import (
    Answers,
    ClientGaussian,
    PlainClient,
    PlainSum,
    SumGaussian,
    total,
)
from fedgen.privacy.per_example import ClippedSum
from fedgen.privacy.releases import Secure, Sent, Trusted
from fedgen.privacy.routing import Routing

RELATION = Relation.ADD_OR_REMOVE_ONE
ALL_ROWS = AllRows()

OfRows = SumGaussian | PlainSum
OfClients = ClientGaussian | PlainClient
Contribute = Callable[[Mapping[str, Tensor], Tensor, Tensor], ClippedSum]
"""(what the question holds, images (n, ...) in [0, 1], labels (n,)) -> the sum of what these rows
contribute, each clipped to the mechanism's norm."""


@dataclass(frozen=True)
class Prepared:
    """What contributions are made of in place of images, where it is the same in all repeats: a
    client's process keeps it.

    names: of what it follows from in a question. of: (what the question holds, images) -> (n, ...).
    """

    names: tuple[str, ...]
    of: Callable[[Mapping[str, Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Asked:
    """A sum that is asked for ``repeats`` times in a row.

    name: what questions call it. size: of the sum. at_once: rows in memory. prepared: what
        its contributions are made of; None: images.
    """

    name: str
    size: int
    mechanism: OfRows | OfClients
    contribution: Contribute
    repeats: int = 1
    at_once: int = 2048
    prepared: Prepared | None = None

    @property
    def private(self) -> bool:
        """Whether it is noised."""
        return isinstance(self.mechanism, SumGaussian | ClientGaussian)


@dataclass(frozen=True)
class Sums:
    """Who shares the noise of the sums of a sequence, and how it grows.

    noise_multiplier: of all of them together, as of one Gaussian: a sum that has ``share`` of the
        budget, asked for ``repeats`` times, has sqrt(repeats / share) times as much, and squared
        ratios of sensitivity to noise add up (Dong, Roth, Su 2022, corollary 3.3). None: no noise.
    rows: a public number near that of all clients' rows; each divides by its equal share. At client
        level a client's contribution is the mean over its rows.
    """

    facts: PublicFacts
    noise_multiplier: float | None
    rows: float

    def mechanism(
        self,
        share: float = 1.0,
        repeats: int = 1,
        *,
        clip: float = 1.0,
        batches: Batches = ALL_ROWS,
        peak: float = 1.0,
        of_client: float = 1.0,
    ) -> OfRows | OfClients:
        """Of contributions of norm ``clip`` at most; ``peak``: of one's entries, over ``clip``;
        ``of_client``: what a client's mean of them is clipped to, over ``clip``."""
        # an aggregator that is trusted clips again what a client sends as a whole
        most = clip * of_client if self.facts.unit is Unit.CLIENT else math.inf
        meeting = self.facts.aggregation(self.facts.clients, most)
        if self.noise_multiplier is None:
            if self.facts.unit is Unit.CLIENT:
                return PlainClient()
            return PlainSum(batches, self.rows / self.facts.clients, self.facts.of_rows)
        noise = self.noise_multiplier * (repeats / share) ** 0.5
        if self.facts.unit is Unit.CLIENT:
            return ClientGaussian(most, noise, RELATION, aggregation=meeting)
        each = self.rows / self.facts.clients
        unit, most = self.facts.of_rows, self.facts.images_per_person
        return SumGaussian(clip, noise, batches, each, RELATION, unit, meeting, peak, most)


def std_of_mean(mechanism: OfRows | OfClients, clients: int) -> float:
    """Of the noise in each number of the clients' mean answer, if all answer."""
    if isinstance(mechanism.aggregation, Trusted):
        return mechanism.std / clients
    if isinstance(mechanism.aggregation, Secure):
        return float(mechanism.aggregation.share_std(mechanism.std) / clients**0.5)
    return float(mechanism.std / clients**0.5)


_sealed: list[tuple[bytes, str]] = []  # the last questions of this process, and their digests


def _seal(shared: Tensor) -> str:
    """A digest, made once for what many clients of a process are asked by one after the other: to
    compare takes a tenth of the time."""
    data = shared.numpy().tobytes()
    for before, found in _sealed:
        if before == data:
            return found
    _sealed[:] = [(data, digest(data)), *_sealed[:1]]
    return _sealed[0][1]


@dataclass(frozen=True)
class SumSequence:
    """All that a run asks its clients for, in order."""

    asked: tuple[Asked, ...]
    device: str

    @cached_property
    def _by_round(self) -> list[Asked]:
        return [each for each in self.asked for _ in range(each.repeats)]

    @property
    def rounds(self) -> int:
        """How many rounds ask."""
        return len(self._by_round)

    def at(self, round_: int) -> Asked:
        """What is asked in a round; the last sum in those after."""
        return self._by_round[min(round_, self.rounds - 1)]

    def repeats(self, name: str) -> int:
        """How often a sum is asked for."""
        return sum(each.name == name for each in self._by_round)

    def question(self, round_: int, shared: Mapping[str, Tensor]) -> Query:
        """The question of a round, with what clients need to answer it."""
        return Query({self.at(round_).name: torch.zeros(1)}, shared)

    @property
    def client(self) -> ClientProgram:
        """Answers what it is asked."""
        return ClientProgram(self._answer)

    def _answer(self, state: State, query: Query, shard: Shard, round_: int, coins: Coins) -> Sent:
        del state
        [asked] = [each for each in self.asked if each.name in query.rows]
        here, private = coins.at(asked.name, round_), shard.on(self.device)
        shared = {name: value.to(self.device) for name, value in query.shared.items()}

        def rows(some: Tensor) -> tuple[Tensor, Tensor]:
            return private.rows(some)

        if (prepared := asked.prepared) is not None:
            parts = torch.split(torch.arange(len(shard)), asked.at_once)
            seals = [_seal(query.shared[name]) for name in prepared.names]
            made = private.kept(
                " ".join(seals),
                lambda: torch.cat([prepared.of(shared, private.rows(some)[0]) for some in parts]),
            )

            def rows(some: Tensor) -> tuple[Tensor, Tensor]:
                return made[some.to(made.device)], private.labels[some.to(made.device)]

        def sums(of: OfRows) -> Iterator[ClippedSum]:
            for some in of.parts(len(shard), here, asked.at_once):
                yield asked.contribution(shared, *rows(torch.from_numpy(some)))

        def mean() -> Tensor:
            whole = PlainSum(ALL_ROWS, max(len(shard), 1), Unit.CLIENT)
            return whole.noised(asked.size, sums(whole), here)

        if isinstance(asked.mechanism, ClientGaussian | PlainClient):
            return asked.mechanism.release(asked.size, mean, here)
        return asked.mechanism.release((asked.size,), sums(asked.mechanism), here)

    def method(
        self,
        server: ServerProgram,
        plan: Plan,
        clients: int,
        worst_cases: Callable[[], Sequence[WorstCase]],
        settled: Mapping[str, int] | None = None,
    ) -> Method:
        """Of a server that asks for this sequence, all clients each time."""
        return Method(
            self.client,
            server,
            plan,
            Routing("mean", clients),
            0,
            lambda: self._whole(worst_cases()),
            self.total,
            settled or {},
        )

    def _whole(self, found: Sequence[WorstCase]) -> Sequence[WorstCase]:
        """Raises FedgenError for a sum that no attack would try."""
        tried = {name for worst in found for name in worst.query.rows}
        for each in self.asked:
            if each.name not in tried:
                problem = (
                    f"no worst case asks for the sum {each.name!r}, and no attack would try it"
                )
                remedy = f"add sequence.worst_case({each.name!r}, ...) to its worst cases"
                raise FedgenError("method", problem, remedy)
        return found

    def worst_case(
        self,
        name: str,
        shared: Mapping[str, Tensor],
        first: tuple[State, Shard],
        second: tuple[State, Shard],
        read: Callable[[Tensor], Tensor] = lambda answer: answer,
    ) -> WorstCase:
        """Of one of the sums; see ``WorstCase``."""
        [number] = [n for n, each in enumerate(self.asked) if each.name == name]
        round_, mechanism = self._starts[number], self.asked[number].mechanism
        event, question = mechanism.event(), self.question(round_, shared)
        worst = WorstCase(question, first, second, read, round_, event)
        return worst.of_person(mechanism.most if isinstance(mechanism, SumGaussian) else 1)

    def total(self, answers: Answers, round_: int, coins: Coins) -> Tensor:
        """The sum of what clients answered, in double precision."""
        return total(self.at(round_).mechanism)(answers, round_, coins)

    def event(self, answered: int) -> DpEvent:
        """Of the first so many releases. Of more: a round that is done again is one of the
        sequence, and all of them are counted for it."""
        counts = [
            max(0, min(each.repeats, answered - start)) + max(0, answered - self.rounds)
            for each, start in zip(self.asked, self._starts, strict=True)
        ]
        events = [
            repeat(each.mechanism.event(), n)
            for each, n in zip(self.asked, counts, strict=True)
            if n
        ]
        return events[0] if len(events) == 1 else ComposedDpEvent(events)

    @cached_property
    def _starts(self) -> list[int]:
        return [sum(before.repeats for before in self.asked[:n]) for n in range(len(self.asked))]

    def plan(
        self,
        sampler: str,
        draws: str | None,
        paper: tuple[str, str] | None,
        length: int | None = None,
    ) -> Plan:
        """Of these releases: against everybody, or where an aggregator makes the noise, against all
        others.

        Args:
            sampler: the draws that gate data, in words. draws: how they amplify; None: there are
                none.
            paper: the formula and the source of a claim; None: nobody made one.
            length: see ``Plan``.
        """
        first = self.asked[0].mechanism
        private = all(each.private for each in self.asked)
        trusted = isinstance(first.aggregation, Trusted)
        by = draws if private else None
        reason = None if by else "all rows are in each sum: there is no draw"
        reason = reason if private else "nothing is clipped and nothing is noised"
        claim = None
        if private and paper is not None and first.unit is not Unit.PERSON:  # no paper counts them
            claim = Claim(
                lambda rounds, delta: claimed_by_rdp(
                    self.event(min(rounds, self.rounds)), delta, RELATION
                ),
                *paper,
            )
        return Plan(
            unit=first.unit,
            relation=RELATION,
            sampler=sampler,
            rows_per_round=1,
            answer=lambda _, round_: (1, self.at(round_).size),
            server=(lambda n: repeat(Contribution(), n)) if trusted else self.event,
            release=(lambda rounds: self.event(min(rounds, self.rounds))) if trusted else None,
            seen=self.event if trusted else None,
            amplified_by={"server": None if trusted else by, "release": by},
            reasons={"server": TRUSTING if trusted else reason, "release": reason},
            claim=claim,
            asking_rounds=self.rounds,
            length=length,
            aggregation=first.aggregation,
            images_per_person=first.most if isinstance(first, SumGaussian) else 1,
            extents=tuple(
                each.mechanism.extent
                for each in self.asked
                if isinstance(each.mechanism, SumGaussian | ClientGaussian)
            ),
        )
