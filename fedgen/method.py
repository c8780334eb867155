"""The contract between a method and everything else.

A method is a record of functions: state goes in, state comes out. Public parameters are frozen
inside of them; private facts are arguments, and leave a client as what ``releases`` seals alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dp_accounting import DpEvent
from numpy.typing import NDArray
from torch import Tensor

from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.privacy.events import Relation, Unit
from fedgen.privacy.releases import LOCAL, Aggregation, Secure, Sent, Trusted
from fedgen.privacy.routing import Routing

Tensors = Mapping[str, Tensor]
"""Named tensors."""

State = Mapping[str, Tensors]
"""A client's state: named parts, each read when it is asked for. A part that was never written is
missing from the mapping."""


@dataclass(frozen=True)
class Query:
    """What the server asks: arrays with one row per question, and arrays common to all rows."""

    rows: Tensors
    shared: Tensors = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of rows."""
        return next(iter(self.rows.values())).shape[0]

    def take(self, index: list[int]) -> Query:
        """Some of the rows."""
        if index == list(range(self.count)):
            return self
        return Query({name: rows[index] for name, rows in self.rows.items()}, self.shared)


def _nothing(*_: object) -> State:
    return {}


@dataclass(frozen=True)
class ClientProgram:
    """The only code that sees private rows.

    answer: (state, query, shard, round, coins) -> what is sent: a Release, or what the plan's
        aggregation takes. Changes nothing that ``train`` or a later ``answer`` reads. A second
        question in the same round finds other coins.
    train: (state, broadcast, shard, round, coins) -> changed parts. On a public schedule; nothing
        leaves.
    preparations: how many calls of ``prepare`` make a client ready (a public number).
    prepare: (number, shard, coins) -> the parts of the state that it makes; server independent.
    draws_anew: whether its secret draws are its own then; not if ``train`` has to know them.
    """

    answer: Callable[[State, Query, Shard, int, Coins], Sent]
    train: Callable[[State, Tensors, Shard, int, Coins], State] = _nothing
    preparations: int = 0
    prepare: Callable[[int, Shard, Coins], State] = _nothing
    draws_anew: bool = True

    @property
    def keeps_state(self) -> bool:
        """Whether a client holds anything from round to round."""
        return self.train is not _nothing


@dataclass(frozen=True, kw_only=True)
class ServerProgram:
    """Holds the generator; post-processing all the way.

    init: coins -> state.
    broadcast: (state, round, coins) -> what clients train on, if they do.
    query: (state, round, coins) -> what clients answer. With the rows of several rounds it stands
        for them all; one that the run has no room for is cut to what is left. None: this round is
        the server's alone.
    update: (state, answers (the strategy's mean), round, coins) -> state.
    generator: state -> what may be published: the weights that ``sample`` reads.
    sample: (generator, labels (n,), coins) -> images (n, channels, height, width) in [0, 1].
    classify: (generator, images) -> labels (n,), where a private classifier is published with it.
    recognize: (state, images, labels, coins) -> (n,): how much the server takes images for rows
        that trained; larger is likelier. What an audit of a run guesses by.
    shown: (state, rows held out of training or None, coins) -> numbers for the log, by name. What
        held-out rows tell is no part of the state.
    alone: (state, round, coins) -> state: a round without a query.
    begin: (state, draw) -> state, once, where another method went before (``fedgen.warm_up``).
        draw: labels (n,) -> its images of them, like ``sample``'s.
    distinct: how many images there are, as many of each label, where what is published is a set;
        None: as many as wanted.
    """

    init: Callable[[Coins], Tensors]
    broadcast: Callable[[Tensors, int, Coins], Tensors] = lambda state, round_, coins: {}
    query: Callable[[Tensors, int, Coins], Query | None]
    update: Callable[[Tensors, Tensor, int, Coins], Tensors]
    generator: Callable[[Tensors], Tensors]
    sample: Callable[[Tensors, Tensor, Coins], Tensor]
    recognize: Callable[[Tensors, Tensor, Tensor, Coins], Tensor]
    shown: Callable[[Tensors, Shard | None, Coins], Mapping[str, float]] = lambda *_: {}
    alone: Callable[[Tensors, int, Coins], Tensors] = lambda state, round_, coins: state
    begin: Callable[[Tensors, Callable[[Tensor], Tensor]], Tensors] = lambda state, draw: state
    classify: Callable[[Tensors, Tensor], Tensor] | None = None
    distinct: int | None = None


@dataclass(frozen=True)
class WorstCase:
    """Two neighbouring clients and a question, made so that what they release is as far apart as
    their mechanism allows: what an audit of the client program plays.

    first, second: a client's state (which may be any function of its rows) and its rows.
    read: answer -> the part that tells most, rows first.
    round: in which it is asked, where rounds differ. event: what an answer to it costs then; None:
        as the first of ``plan``. plan: None: the method's own. fixed: whether it is answered at a
        noise multiplier that is not the method's.
    """

    query: Query
    first: tuple[State, Shard]
    second: tuple[State, Shard]
    read: Callable[[Tensor], Tensor] = lambda answer: answer
    round: int = 0
    event: DpEvent | None = None
    plan: Plan | None = None
    fixed: bool = False

    def of_person(self, images: int) -> WorstCase:
        """The same, where somebody has so many images."""
        (state, first), (other, second) = self.first, self.second
        more, less = (state, first.times(images)), (other, second.times(images))
        return replace(self, first=more, second=less)


Kind = Literal["local", "secure", "trusted"]
"""Who makes the noise of a sum; see ``fedgen.privacy.releases``."""


TRUSTING = "the server takes in contributions without noise, and clients trust it: no bound"
"""Why there is no bound against an aggregator."""


@dataclass(frozen=True)
class PublicFacts:
    """What everybody may know about the data before a run: the number of clients, of labels, the
    images' shape (channels, height, width), and the rows of a single client: replacing one record
    keeps their number. How many rows each of several clients has is private: None.

    all_answer: whether a run ends when a client does not answer. One that goes on without it shows
        by the gap whom a secret draw chose.
    unanswered: whether a client was asked in this run and did not answer.
    aggregating: who makes the noise of a sum of answers (``privacy.aggregation``); None: as the
        method was published.
    ring_bits: of a word of a secure sum (``Secure.bits``).
    threshold, colluders: of a secure sum; None: two thirds of those asked.
    unit: whose data is to be protected; None: as the method was published.
    images_per_person: how many images of one person a client trains on at most, of unit person.
    """

    clients: int
    rows: int | None
    classes: int
    shape: tuple[int, int, int]
    all_answer: bool = True
    unanswered: bool = False
    aggregating: Kind | None = None
    ring_bits: Literal[32, 64] = 32
    threshold: int | Literal["all"] | None = None
    colluders: int = 0
    unit: Unit | None = None
    images_per_person: int = 1

    def aggregated_by(self, kind: Kind) -> PublicFacts:
        """The same facts where ``kind`` makes the noise of sums."""
        threshold = self.threshold if kind == "secure" else None
        return replace(self, aggregating=kind, threshold=threshold)

    @property
    def of_rows(self) -> Unit:
        """The unit of sums over rows."""
        return Unit.RECORD if self.unit is None else self.unit

    def aggregation(
        self, asked: int, clip: float = math.inf, published: Kind = "local"
    ) -> Aggregation:
        """How the answers of ``asked`` clients meet.

        Args:
            clip: what an aggregator that is trusted clips each row of an answer to; infinity: it
                knows no such norm.
            published: the kind that the method was published with.

        Raises:
            FedgenError: for a secure sum that cannot be.
        """
        kind = self.aggregating or published
        if kind != "secure" and self.threshold is not None:
            problem = f"counts answers to a secure sum, and these are {kind}"
            raise FedgenError(
                "privacy.threshold", problem, "leave it out, or set privacy.aggregation=secure"
            )
        if kind == "local":
            return LOCAL
        if kind == "trusted":
            return Trusted(clip)
        if self.clients == 1:
            raise FedgenError(
                "privacy.aggregation",
                "secure adds up what several clients send, and there is one",
                "take local: it is the same noise, or partition=iid or by_writer",
            )
        threshold = -(-2 * asked // 3) if self.threshold is None else self.threshold
        threshold = asked if threshold == "all" else threshold
        if not max(asked / 2, self.colluders) < threshold <= asked:
            raise FedgenError(
                "privacy.threshold",
                f"{threshold} of {asked} answers, with {self.colluders} colluders, is no threshold",
                "take more than half of those asked, more than privacy.colluders, and not more "
                "than all",
            )
        return Secure(asked, threshold, self.colluders, self.ring_bits)

    @property
    def draws_are_hidden(self) -> bool:
        """Whether nothing shows whom a secret draw of clients chose."""
        return self.all_answer and not self.unanswered


@dataclass(frozen=True)
class Claim:
    """The epsilon that a paper's formula gives for these settings, from (rounds, delta). Never a
    bound."""

    epsilon: Callable[[int, float], float]
    formula: str
    source: str


_SHORT = 100
"""Questions of a plan that is short."""


@dataclass(frozen=True)
class Plan:
    """The spend promised before a run.

    sampler: the draws that gate data, in words.
    rows_per_round: rows of a query that one round takes.
    asking_rounds: how many rounds at the start ask clients; those after are the server's alone.
        None: all.
    rest: rounds in between that are the server's alone: the first of them, and how many.
    length: rounds of a run, where the method has a number of its own; None: as many as are wanted.
    before: what was spent on what the run begins with, by each client. None: nothing.
    answer: (rows of a query, round) -> shape of the answer.
    longest: an L2 norm that no row of an honest answer exceeds; infinity where the method knows
        none, and where an aggregator clips what arrives, or sees sums alone.
    server: rows answered by one client in the run -> its event, as the server sees it.
    release: rounds -> any client's event as the published generator shows it, a function of public
        parameters alone: whom the draws chose is not for everybody. None where one client is all
        there is, and the server's bound holds for both.
    seen: rows answered by one client -> its event as the published generator shows it to one who
        knows whom the draws chose. None as ``release``.
    amplified_by: what amplifies, per view, in words; reasons: why nothing does.
    aggregation: who makes the noise of a sum of answers.
    images_per_person: of unit person: how many count at a client, at most; of others 1.
    extents: of each kind of sum: std of its noise, and the largest number that one contribution is
        meant to hold.
    """

    unit: Unit
    relation: Relation
    sampler: str
    rows_per_round: int
    answer: Callable[[int, int], tuple[int, ...]]
    server: Callable[[int], DpEvent]
    release: Callable[[int], DpEvent] | None
    seen: Callable[[int], DpEvent] | None
    amplified_by: Mapping[str, str | None]
    reasons: Mapping[str, str | None]
    claim: Claim | None
    asking_rounds: int | None = None
    rest: tuple[int, int] = (0, 0)
    length: int | None = None
    before: DpEvent | None = None
    longest: float = math.inf
    aggregation: Aggregation = LOCAL
    extents: tuple[tuple[float, float], ...] = ()
    images_per_person: int = 1

    @property
    def short(self) -> bool:
        """Whether what is asked once is so little that a secure run is kept after each answer."""
        return 0 < self.once <= _SHORT

    @property
    def sends_again(self) -> bool:
        """Whether a round that is done again, in mode ``secure`` too, takes the answers that were
        charged for it: nothing is left for others, and a run could not end without them."""
        return self.asking_rounds is not None and self.short and self.aggregation.opens_one

    @property
    def trusted(self) -> bool:
        """Whether clients trust an aggregator: there is no bound against it."""
        return isinstance(self.aggregation, Trusted)

    def asked(self, rounds: int) -> int:
        """How many of so many rounds ask clients."""
        first, count = self.rest
        rounds -= min(max(rounds - first, 0), count)
        return rounds if self.asking_rounds is None else min(rounds, self.asking_rounds)

    def rounds(self, asked: int) -> int:
        """After how many rounds so many have asked clients."""
        first, count = self.rest
        return asked if asked <= first else asked + count

    @property
    def once(self) -> int:
        """How many rounds at the start ask what is not asked again."""
        return self.rest[0] if self.asking_rounds is None else self.asking_rounds

    @property
    def least(self) -> int:
        """Rounds without which a run comes to nothing."""
        return sum(self.rest) + 1 if any(self.rest) else self.asking_rounds or 1


@dataclass(frozen=True)
class Method:
    """A method: what clients do, what the server does, and what it will cost.

    cohort: the draw that routes a query's rows to clients.
    trained_per_round: clients that a public rotation trains each round; None trains those that the
        round asks.
    worst_cases: what an audit plays, of each kind of question.
    settled: settings that were left open (null) and follow from the noise, as numbers.
    total: (answers to one question, round, coins) -> their sum, in double precision, with what
        noise the aggregator adds.
    """

    client: ClientProgram
    server: ServerProgram
    plan: Plan
    cohort: Routing
    trained_per_round: int | None
    worst_cases: Callable[[], Sequence[WorstCase]]
    total: Callable[[Sequence[NDArray[Any]], int, Coins], Tensor]
    settled: Mapping[str, int] = field(default_factory=dict)
