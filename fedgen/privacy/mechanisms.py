"""Clip: what bounds a client's contribution, and what the sum of them is private to.

| mechanism | bounds | sensitivity, add or remove one / replace one | of |
|---|---|---|---|
| ``RowGaussian`` | each row by itself | its ``bounds.py`` diameter / the same | GS-WGAN, votes |
| ``JointGaussian`` | a whole matrix | 2C / 2C | DP-Sinkhorn |
| ``SumGaussian`` | each example of a sum | C / 2C | DP-SGD (``descent``); DP-MERF (once) |
| ``ClientGaussian`` | a client's vector | C / 2C | FedAvg-GAN; DP-MERF at client level |
| ``ClientMean`` | a client's mean over a batch | C / 2C | DP-SGD at client level |

A gradient row or matrix is an arbitrary function of the data behind it: without a record it may
become any other in the ball, hence 2C under both relations. In a sum, what is removed counts zero,
as does a client that is removed as a whole (``RowGaussian`` of unit client: radius / diameter).
A noise multiplier is std over the sensitivity under the mechanism's relation. Before anything is
bounded, what is not finite becomes zero; the wire shows nothing of it. Who makes the noise, and
what leaves the client, is the mechanism's ``aggregation`` (``releases.py``). What a client adds to
a sum of several has the sensitivity of the sum: a neighbour changes one client's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from dp_accounting import DpEvent, GaussianDpEvent, NonPrivateDpEvent
from numpy.typing import NDArray
from torch import Tensor

from fedgen.coins import Coins
from fedgen.errors import FedgenError
from fedgen.privacy.batches import ALWAYS, Batches, OwnDraw, Rows
from fedgen.privacy.bounds import Bound
from fedgen.privacy.events import Relation, Unit, of_group, repeat
from fedgen.privacy.per_example import ClippedSum, clip_rows
from fedgen.privacy.releases import LOCAL, SEAL, Aggregation, Release, Sent, noised
from fedgen.privacy.routing import Routing

Answers = Sequence[NDArray[Any]]


class Summed(Protocol):
    """A mechanism whose answers several clients add up."""

    @property
    def aggregation(self) -> Aggregation: ...

    @property
    def std(self) -> float: ...


def total(mechanism: Summed) -> Callable[[Answers, int, Coins], Tensor]:
    """(answers, round, coins) -> the sum of what clients sent, in double precision."""
    return lambda answers, round_, coins: mechanism.aggregation.total(answers, mechanism.std, coins)


_UNLIKELY = 200.0  # nats
_MOST_PARTS = 10_000  # of a batch


@dataclass(frozen=True)
class RowGaussian:
    """Bounded rows, averaged over those who answer them, plus Gaussian noise: GS-WGAN's sanitizer
    (paper, equations 8 to 11) for any routing of rows to critics, and a noisy count of votes.

    Answer r is (1 / m) * sum over its m answerers of bound(row) + N(0, (sigma * S)^2 I), with
    S = diameter / m: one answerer's contribution is an arbitrary function of its data within the
    bound, so exchanging, adding or removing its data moves the mean by at most S. A client that is
    removed as a whole contributes nothing: S = radius / m. N rows, each asked for where those
    before it have led, are one Gaussian of noise multiplier sigma / sqrt(N), exactly. What is made
    of the noisy mean (a threshold, the most frequent bin) is post-processing.

    bound: the set that every answer to a row is made to lie in.
    routing: the draw of answerers inside the client; one critic is ``Routing("mean", 1)``.
    hidden: that draw is secret and leaves no trace in any state (see ``Routing.event``).
    draw: the client's own coin, whether it contributes to a round at all. What it contributes is
        divided by the coin's probability, so that the mean over all clients is what it would be.
    """

    bound: Bound
    noise_multiplier: float
    routing: Routing
    hidden: bool
    unit: Unit
    relation: Relation = Relation.REPLACE_ONE
    draw: OwnDraw = ALWAYS
    aggregation: Aggregation = LOCAL

    def sensitivity(self, relation: Relation) -> float:
        """L2 sensitivity of one answered row."""
        whole = self.unit is Unit.CLIENT and relation is Relation.ADD_OR_REMOVE_ONE
        moved = self.bound.radius if whole else self.bound.diameter
        return moved / self.routing.answers_per_row / self.draw.rate

    @property
    def std(self) -> float:
        """Of the noise in each number."""
        return self.noise_multiplier * self.sensitivity(self.relation)

    @property
    def extent(self) -> tuple[float, float]:
        """Std of the noise in each number, and the largest that a contribution is meant to have."""
        return self.std, self.bound.peak / self.draw.rate

    def longest(self, size: int) -> float:
        """What no row of a release, ``size`` numbers, is longer than (see ``_longest``)."""
        return _longest(self.bound.radius / self.draw.rate, self.std, size)

    def event(self, rows: int) -> DpEvent:
        """What a release of ``rows`` rows costs. The client's coin gates all of them together."""
        if self.draw.rate < 1:
            return self.draw.event(GaussianDpEvent(self.noise_multiplier / math.sqrt(rows)))
        return self.routing.event(rows, self.noise_multiplier, self.hidden)

    def release(
        self,
        shape: tuple[int, ...],
        answers: Iterable[tuple[Tensor, Tensor]],
        coins: Coins,
        contributes: bool = True,
    ) -> Sent:
        """Sanitizes raw answers to ``shape[0]`` rows.

        Args:
            shape: the shape of the release, rows first.
            answers: pairs of row indices (n,) and raw answers (n, *shape[1:]), unbounded; none are
                made if the client's coin says so.
            coins: of this client and round; the noise is drawn here.
            contributes: whether the client has anything to contribute.

        Raises:
            ValueError: if a row is not answered as often as the sensitivity assumes.
        """
        summed = torch.zeros(shape, dtype=torch.float64)
        if self.draw.drawn(coins) and contributes:
            summed, counts = _bounded_sum(shape, answers, self.bound)
            if not torch.equal(counts, torch.full_like(counts, self.routing.answers_per_row)):
                raise ValueError("every row needs the number of answers its sensitivity assumes")
        exact = summed / self.routing.answers_per_row / self.draw.rate
        return self.aggregation.sent(exact, self.std, self.event(shape[0]), self.unit, coins)


@dataclass(frozen=True)
class JointGaussian:
    """One gradient matrix from one batch, clipped as a whole (Frobenius norm), plus Gaussian noise:
    DP-Sinkhorn's released code. Its paper clips each row instead, one batch behind all of them, and
    counts each as if it had a batch of its own."""

    clip: float
    noise_multiplier: float
    batches: Batches
    relation: Relation
    unit: Unit
    aggregation: Aggregation = LOCAL

    def __post_init__(self) -> None:
        _check_neighbours(self.batches, self.relation)

    def sensitivity(self, relation: Relation) -> float:
        """L2 sensitivity of the matrix; the same under both relations."""
        del relation
        return 2 * self.clip

    @property
    def std(self) -> float:
        """Of the noise in each number."""
        return self.noise_multiplier * self.sensitivity(self.relation)

    @property
    def extent(self) -> tuple[float, float]:
        """Std of the noise in each number, and the largest that a contribution is meant to have."""
        return self.std, self.clip

    def longest(self, size: int) -> float:
        """What no row of the matrix, ``size`` numbers, is longer than (see ``_longest``)."""
        return _longest(self.clip, self.std, size)

    def event(self) -> DpEvent:
        """What one release costs."""
        return self.batches.event(GaussianDpEvent(self.noise_multiplier))

    def draw(self, rows: int, coins: Coins) -> Rows:
        """The batch behind the next release."""
        return self.batches.draw(rows, coins)

    def release(self, matrix: Tensor, coins: Coins) -> Sent:
        """Sanitizes a raw matrix (any shape), a function of the batch that was drawn."""
        clipped = clip_rows(matrix.detach().to("cpu", torch.float32)[None], self.clip)[0]
        return self.aggregation.sent(clipped, self.std, self.event(), self.unit, coins)


@dataclass(frozen=True)
class PlainMatrix:
    """As ``JointGaussian``, without clip and noise: the non-private reference."""

    batches: Batches
    unit: Unit
    aggregation, std = LOCAL, 0.0

    def event(self) -> DpEvent:
        """No bound."""
        return NonPrivateDpEvent()

    def draw(self, rows: int, coins: Coins) -> Rows:
        """See ``JointGaussian.draw``."""
        return self.batches.draw(rows, coins)

    def release(self, matrix: Tensor, coins: Coins) -> Release:
        """The raw matrix."""
        del coins
        raw = matrix.detach().to("cpu", torch.float32).numpy()
        return Release({"answer": raw}, self.event(), self.unit, SEAL)


@dataclass(frozen=True)
class SumGaussian:
    """A sum over the rows of a batch, each row's contribution clipped, plus Gaussian noise, divided
    by a public number: DP-SGD (Abadi et al. 2016, algorithm 1), and with all rows, once, the mean
    embedding of DP-MERF.

    The sum of nothing is released and charged like any other: an empty batch does not show.
    A batch is summed in parts (``parts``): a row more leaves the arithmetic of all parts but its
    own as it was, to the last bit, and these are added in double precision.

    divisor: the expected size of a batch, or the public number of rows; never a realized size.
    peak: of the entries of what a row adds, over C.
    most: rows that one person has at most, of unit person. The noise multiplier is that of one.
    """

    clip: float
    noise_multiplier: float
    batches: Batches
    divisor: float
    relation: Relation
    unit: Unit
    aggregation: Aggregation = LOCAL
    peak: float = 1.0
    most: int = 1

    def __post_init__(self) -> None:
        _check_neighbours(self.batches, self.relation)

    def sensitivity(self, relation: Relation) -> float:
        """L2 sensitivity of what is released to one row, before the noise."""
        return _of_a_sum(relation) * self.clip / self.divisor

    @property
    def std(self) -> float:
        """Of the noise in each number."""
        return self.noise_multiplier * self.sensitivity(self.relation)

    @property
    def extent(self) -> tuple[float, float]:
        """Std of the noise in each number, and the largest that ``divisor`` rows come to."""
        return self.std, self.peak * self.clip

    def event(self) -> DpEvent:
        """What one release costs."""
        return of_group(self.batches.event(GaussianDpEvent(self.noise_multiplier)), self.most)

    def parts(self, rows: int, coins: Coins, about: int) -> list[Rows]:
        """The batch behind the next release, in parts of ``about`` so many rows."""
        return _parts(self.batches, rows, coins, self.divisor, about)

    def noised(self, size: int, sums: Iterable[ClippedSum], coins: Coins) -> Tensor:
        """Sanitizes a sum of clipped contributions, where they are: (size,) in single precision,
        noised in full whatever the aggregation.

        Args:
            size: entries of the sum, known whatever the batch.
            sums: over the parts of the batch.

        Raises:
            ValueError: for a part that was clipped to more than the sensitivity assumes.
        """
        return noised(self._exact(size, sums), self.std, coins)

    def _exact(self, size: int, sums: Iterable[ClippedSum]) -> Tensor:
        total: Tensor | None = None
        for part in sums:
            if part.clip > self.clip:
                raise ValueError("a part was clipped to more than the sensitivity assumes")
            flat = part.flat()
            total = flat if total is None else total.add_(flat)
        total = torch.zeros(size, dtype=torch.float64) if total is None else total
        return total.div_(self.divisor)

    def release(self, shape: tuple[int, ...], sums: Iterable[ClippedSum], coins: Coins) -> Sent:
        """The sum, of this shape, to leave the client."""
        exact = self._exact(math.prod(shape), sums).view(1, *shape)
        return self.aggregation.sent(exact, self.std, self.event(), self.unit, coins)


@dataclass(frozen=True)
class PlainSum:
    """As ``SumGaussian``, without clip and noise: the non-private reference."""

    batches: Batches
    divisor: float
    unit: Unit
    aggregation, std = LOCAL, 0.0

    def event(self) -> DpEvent:
        """No bound."""
        return NonPrivateDpEvent()

    def parts(self, rows: int, coins: Coins, about: int) -> list[Rows]:
        """See ``SumGaussian.parts``."""
        return _parts(self.batches, rows, coins, self.divisor, about)

    def noised(self, size: int, sums: Iterable[ClippedSum], coins: Coins) -> Tensor:
        """The raw sum; see ``SumGaussian.noised``."""
        del coins
        total: Tensor | None = None
        for part in sums:
            flat = part.flat()
            total = flat if total is None else total.add_(flat)
        total = torch.zeros(size, dtype=torch.float64) if total is None else total
        return (total / self.divisor).to(torch.float32)

    def release(self, shape: tuple[int, ...], sums: Iterable[ClippedSum], coins: Coins) -> Release:
        """The raw sum; see ``SumGaussian.release``."""
        gradients = self.noised(math.prod(shape), sums, coins).view(1, *shape).cpu().numpy()
        return Release({"answer": gradients}, self.event(), self.unit, SEAL)


@dataclass(frozen=True)
class ClientMean:
    """As ``SumGaussian``, at client level: what a client contributes to a sum is the mean over a
    batch of its rows, each row's contribution clipped to C, so that the mean is no longer than C
    whatever its rows are and however many. Plus Gaussian noise: DP-FedSGD (McMahan et al. 2018,
    algorithm 1, with one local step).

    Neighbours are a client with its rows, and one without any, which contributes nothing and sends
    noise all the same. All of a client's rows may change together, so that the draw among them
    hides nothing, and costs as little: the event is a Gaussian that nothing gates.

    expected: rows of a batch about, a public number that says how many parts it is summed in.
    """

    clip: float
    noise_multiplier: float
    batches: Batches
    expected: float
    relation: Relation
    aggregation: Aggregation = LOCAL
    unit = Unit.CLIENT

    def sensitivity(self, relation: Relation) -> float:
        """L2 sensitivity of the sum of all clients' means, before the noise."""
        return _of_a_sum(relation) * self.clip

    @property
    def std(self) -> float:
        """Of the noise in each number of the sum."""
        return self.noise_multiplier * self.sensitivity(self.relation)

    @property
    def extent(self) -> tuple[float, float]:
        """Std of the noise in each number, and the largest that a contribution has."""
        return self.std, self.clip

    def event(self) -> DpEvent:
        """What one release costs."""
        return GaussianDpEvent(self.noise_multiplier)

    def parts(self, rows: int, coins: Coins, about: int) -> list[Rows]:
        """The batch behind the next release, in parts of ``about`` so many rows."""
        return _parts(self.batches, rows, coins, self.expected, about)

    def noised(self, size: int, sums: Iterable[ClippedSum], coins: Coins) -> Tensor:
        """See ``SumGaussian.noised``."""
        return noised(self._mean(size, sums), self.std, coins)

    def _mean(self, size: int, sums: Iterable[ClippedSum]) -> Tensor:
        total, rows = None, 0
        for part in sums:
            if part.clip > self.clip:
                raise ValueError("a part was clipped to more than the sensitivity assumes")
            flat = part.flat()
            total, rows = flat if total is None else total.add_(flat), rows + len(part.norms)
        total = torch.zeros(size, dtype=torch.float64) if total is None else total
        # whatever was counted: what leaves is no longer than C
        return clip_rows(total[None] / max(rows, 1), self.clip)[0]

    def release(self, shape: tuple[int, ...], sums: Iterable[ClippedSum], coins: Coins) -> Sent:
        """The mean, of this shape, to leave the client."""
        exact = self._mean(math.prod(shape), sums).view(1, *shape)
        return self.aggregation.sent(exact, self.std, self.event(), self.unit, coins)


GradientSum = SumGaussian | ClientMean | PlainSum
"""What DP-SGD asks of a batch of rows, or does without privacy."""


def _parts(batches: Batches, rows: int, coins: Coins, divisor: float, about: int) -> list[Rows]:
    """A batch in a public number of parts. A row's part is a coin of its own, as its place in the
    batch is: given the coins of all others, a row more changes no other part."""
    batch = batches.draw(rows, coins)
    number = min(max(1, round(divisor / about)), _MOST_PARTS)
    if number == 1:
        return [batch]
    part = coins.secret_bits(rows, "part")[batch] % np.uint64(number)
    return [batch[part == each] for each in range(number)]


def descent(
    mechanism: GradientSum,
    start: Mapping[str, Tensor],
    size: int,
    sums: Callable[[Mapping[str, Tensor], Coins], Iterable[ClippedSum]],
    move: Callable[[Mapping[str, Tensor], Tensor, Coins], Mapping[str, Tensor]],
    steps: Sequence[Coins],
) -> Release:
    """The point that a descent along noised sums comes to: DP-SGD (Abadi et al. 2016, algorithm 1).
    Everything stays on the device that the point is on.

    Each step is a release of its own, asked for where those before it have led. The point follows
    from them alone, so releasing it costs their adaptive composition and no more.

    Args:
        start: the point to begin at: public, or released before.
        size: entries of a sum.
        sums: (point, coins) -> clipped sums over a step's batch. Alone in seeing rows.
        move: (point, noised sum (size,), coins) -> the next point.
        steps: the coins of each step.
    """
    point = start
    for here in steps:
        point = move(point, mechanism.noised(size, sums(point, here), here), here)
    whole = torch.cat([point[name].flatten() for name in sorted(point)])
    arrays = {"answer": whole.to("cpu", torch.float32).numpy()[None]}
    return Release(arrays, repeat(mechanism.event(), len(steps)), mechanism.unit, SEAL)


@dataclass(frozen=True)
class ClientGaussian:
    """A client's whole contribution, a vector of norm at most C: DP-FedAvg (McMahan et al. 2018),
    and any statistic at client level. Who takes part is public; the neighbour of a client is one
    that contributes nothing, and sends its noise all the same.

    draw: the client's own coin, whether it contributes to a round; what it contributes is divided
        by the coin's probability, so that the mean over all clients is what it would be.
    """

    clip: float
    noise_multiplier: float
    relation: Relation
    draw: OwnDraw = ALWAYS
    aggregation: Aggregation = LOCAL
    unit = Unit.CLIENT

    def sensitivity(self, relation: Relation) -> float:
        """L2 sensitivity of the sum of all contributions, before the noise."""
        return _of_a_sum(relation) * self.clip / self.draw.rate

    @property
    def std(self) -> float:
        """Of the noise in each number of the sum."""
        return self.noise_multiplier * self.sensitivity(self.relation)

    @property
    def extent(self) -> tuple[float, float]:
        """Std of the noise in each number, and the largest that a contribution is meant to have."""
        return self.std, self.clip / self.draw.rate

    def longest(self, size: int) -> float:
        """What no contribution of ``size`` numbers is longer than (see ``_longest``)."""
        return _longest(self.clip / self.draw.rate, self.std, size)

    def event(self) -> DpEvent:
        """What one release costs."""
        return self.draw.event(GaussianDpEvent(self.noise_multiplier))

    def release(self, size: int, vector: Callable[[], Tensor], coins: Coins) -> Sent:
        """A client's part (1, size): its vector, which is made if the client's coin says so, or
        nothing; and the noise."""
        exact = torch.zeros((1, size))
        if self.draw.drawn(coins):
            raw = vector().detach().to("cpu", torch.float32).view(1, size)
            exact = clip_rows(raw, self.clip) / self.draw.rate
        return self.aggregation.sent(exact, self.std, self.event(), self.unit, coins)


@dataclass(frozen=True)
class PlainClient:
    """As ``ClientGaussian``, without clip and noise: the non-private reference."""

    draw: OwnDraw = ALWAYS
    unit = Unit.CLIENT
    aggregation, std = LOCAL, 0.0

    def event(self) -> DpEvent:
        """No bound."""
        return NonPrivateDpEvent()

    def release(self, size: int, vector: Callable[[], Tensor], coins: Coins) -> Sent:
        """A client's part as it is."""
        raw = torch.zeros((1, size))
        if self.draw.drawn(coins):
            raw = vector().detach().to("cpu", torch.float32).view(1, size) / self.draw.rate
        return Release({"answer": raw.numpy()}, self.event(), self.unit, SEAL)


def _longest(clip: float, std: float, size: int) -> float:
    """An L2 norm that a vector of norm ``clip`` at most, and noise of ``std`` in each of its
    ``size`` numbers, exceeds with probability below e^-200: what is longer is no honest answer.

    Proof. The noise's squared norm over std^2 is chi-squared with ``size`` degrees of freedom, and
    exceeds size + 2 sqrt(size t) + 2 t with probability at most e^-t (Laurent and Massart 2000,
    lemma 1). A hundredth more pays for the grid, which moves each number by less than std / 1,024,
    and for single precision, whose least numbers are paid for apart. An honest client is
    taken for another in no run that anybody will see: the probability is below rounding in any
    delta, times any e^epsilon that is worth a run.
    """
    least = math.sqrt(size) * 2**-24
    squared = size + 2 * math.sqrt(size * _UNLIKELY) + 2 * _UNLIKELY
    return 1.01 * (clip + std * math.sqrt(squared)) + least


def _of_a_sum(relation: Relation) -> int:
    """By how many clip norms a neighbour moves a sum of clipped contributions."""
    return 1 if relation is Relation.ADD_OR_REMOVE_ONE else 2


def _check_neighbours(batches: Batches, relation: Relation) -> None:
    """Raises FedgenError for a draw that is not defined for both of two neighbours."""
    if not batches.allows(relation):
        raise FedgenError(
            "privacy.relation",
            f"{type(batches).__name__} has no neighbours by {relation.value.replace('_', ' ')}",
            "draw by Poisson, or take replace_one",
        )


@dataclass(frozen=True)
class NoMechanism:
    """Nothing is noised: the non-private reference. Its event has no bound.

    bound: what votes are made to lie in; gradients are not clipped.
    """

    bound: Bound
    routing: Routing
    unit: Unit
    draw: OwnDraw = ALWAYS
    relation = Relation.REPLACE_ONE
    aggregation, std = LOCAL, 0.0

    def event(self, rows: int) -> DpEvent:
        """No bound."""
        return repeat(NonPrivateDpEvent(), rows)

    def release(
        self,
        shape: tuple[int, ...],
        answers: Iterable[tuple[Tensor, Tensor]],
        coins: Coins,
        contributes: bool = True,
    ) -> Sent:
        """The mean of the raw answers to each row; see ``RowGaussian.release``."""
        summed = torch.zeros(shape, dtype=torch.float64)
        if self.draw.drawn(coins) and contributes:
            summed, _ = _bounded_sum(shape, answers, self.bound)
        mean = (summed / self.routing.answers_per_row / self.draw.rate).float()
        return Release({"answer": mean.numpy()}, self.event(shape[0]), self.unit, SEAL)


def _bounded_sum(
    shape: tuple[int, ...], answers: Iterable[tuple[Tensor, Tensor]], bound: Bound
) -> tuple[Tensor, Tensor]:
    """Sum of bounded answers per row in double precision, and how many answers each row had."""
    total = torch.zeros(shape, dtype=torch.float64)
    counts = torch.zeros(shape[0], dtype=torch.long)
    for index, rows in answers:
        total.index_add_(0, index, bound.enforce(rows.detach().to("cpu", torch.float32)).double())
        counts.index_add_(0, index, torch.ones_like(index))
    return total, counts


Mechanism = RowGaussian | NoMechanism
