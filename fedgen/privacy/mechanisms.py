"""Clip and noise: the only room where privacy noise is drawn, and the only maker of a Release.

| mechanism | bounds | sensitivity, add or remove one / replace one | of |
|---|---|---|---|
| ``RowGaussian`` | each row by itself | 2C / 2C, over the answerers of a row | GS-WGAN |
| ``JointGaussian`` | a whole matrix | 2C / 2C | DP-Sinkhorn |
| ``SumGaussian`` | each example of a sum | C / 2C | DP-SGD (``descent``); DP-MERF (once) |
| ``TrustedAggregate`` | each client's vector | C / 2C | FedAvg-GAN |

A gradient row or matrix is an arbitrary function of the data behind it: without a record it may
become any other in the ball, hence 2C under both relations. In a sum, what is removed counts zero.
A noise multiplier is std over the sensitivity under the mechanism's relation. Before anything is
bounded, what is not finite becomes zero; the wire shows nothing of it. What is released lies on a
grid that follows from the noise alone (see ``_noised``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from dp_accounting import DpEvent, GaussianDpEvent, NonPrivateDpEvent
from torch import Tensor

from fedgen.coins import Coins
from fedgen.errors import FedgenError
from fedgen.privacy.batches import Batches, Rows
from fedgen.privacy.events import Contribution, Relation, Unit, repeat
from fedgen.privacy.noise import grid_of, rounded_gaussian
from fedgen.privacy.per_example import ClippedSum, clip_rows
from fedgen.privacy.routing import Routing

_SEAL = object()
_GRID_BITS = 10  # below the noise's standard deviation
_UNLIKELY = 200.0  # nats


@dataclass(frozen=True)
class Release:
    """Sanitized arrays and the privacy event that they cost. Made by this module alone."""

    arrays: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]
    event: DpEvent
    unit: Unit
    _seal: object = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self._seal is not _SEAL:
            raise TypeError("a Release is made by a mechanism, nothing else")


@dataclass(frozen=True)
class RowGaussian:
    """Clipped rows, averaged over those who answer them, plus Gaussian noise: GS-WGAN's sanitizer
    (paper, equations 8 to 11) for any routing of rows to critics.

    Answer r is (1 / m) * sum over its m answerers of clip(row, C) + N(0, (sigma * S)^2 I), with
    S = 2 C / m: one answerer's contribution is an arbitrary function of its data within a ball of
    radius C, so exchanging, adding or removing its data moves the mean by at most S.

    routing: the draw of answerers inside the client; one critic is ``Routing("mean", 1)``.
    hidden: that draw is secret and leaves no trace in any state (see ``Routing.event``).
    """

    clip: float
    noise_multiplier: float
    routing: Routing
    hidden: bool
    unit: Unit

    def sensitivity(self, relation: Relation) -> float:
        """L2 sensitivity of one answered row; the same under both relations."""
        del relation  # a removed record may turn a gradient row into any other one: 2C under both
        return 2 * self.clip / self.routing.answers_per_row

    def longest(self, size: int) -> float:
        """What no row of a release, ``size`` numbers, is longer than (see ``_longest``)."""
        std = self.noise_multiplier * self.sensitivity(Relation.REPLACE_ONE)
        return _longest(self.clip, std, size)

    def event(self, rows: int) -> DpEvent:
        """What a release of ``rows`` rows costs."""
        return self.routing.event(rows, self.noise_multiplier, self.hidden)

    def release(
        self, shape: tuple[int, ...], answers: Iterable[tuple[Tensor, Tensor]], coins: Coins
    ) -> Release:
        """Sanitizes raw answers to ``shape[0]`` rows.

        Args:
            shape: the shape of the release, rows first.
            answers: pairs of row indices (n,) and raw answers (n, *shape[1:]), unclipped.
            coins: of this client and round; the noise is drawn here.

        Raises:
            ValueError: if a row is not answered as often as the sensitivity assumes.
        """
        total, counts = _clipped_sum(shape, answers, self.clip)
        if not torch.equal(counts, torch.full_like(counts, self.routing.answers_per_row)):
            raise ValueError("every row needs the number of answers that its sensitivity assumes")
        std = self.noise_multiplier * self.sensitivity(Relation.REPLACE_ONE)
        noisy = _noised(total / self.routing.answers_per_row, std, coins)
        return Release({"answer": noisy.numpy()}, self.event(shape[0]), self.unit, _SEAL)


@dataclass(frozen=True)
class JointGaussian:
    """One gradient matrix from one batch, clipped as a whole (Frobenius norm), plus Gaussian noise:
    DP-Sinkhorn's released code. Its paper clips each row instead, one batch behind all of them, and
    counts a single row's cost."""

    clip: float
    noise_multiplier: float
    batches: Batches
    relation: Relation
    unit: Unit

    def __post_init__(self) -> None:
        _check_neighbours(self.batches, self.relation)

    def sensitivity(self, relation: Relation) -> float:
        """L2 sensitivity of the matrix; the same under both relations."""
        del relation
        return 2 * self.clip

    def longest(self, size: int) -> float:
        """What no row of the matrix, ``size`` numbers, is longer than (see ``_longest``)."""
        return _longest(self.clip, self.noise_multiplier * self.sensitivity(self.relation), size)

    def event(self) -> DpEvent:
        """What one release costs."""
        return self.batches.event(GaussianDpEvent(self.noise_multiplier))

    def draw(self, rows: int, coins: Coins) -> Rows:
        """The batch behind the next release."""
        return self.batches.draw(rows, coins)

    def release(self, matrix: Tensor, coins: Coins) -> Release:
        """Sanitizes a raw matrix (any shape), a function of the batch that was drawn."""
        clipped = clip_rows(matrix.detach().to("cpu", torch.float32)[None], self.clip)[0]
        std = self.noise_multiplier * self.sensitivity(self.relation)
        noisy = _noised(clipped, std, coins)
        return Release({"answer": noisy.numpy()}, self.event(), self.unit, _SEAL)


@dataclass(frozen=True)
class PlainMatrix:
    """As ``JointGaussian``, without clip and noise: the non-private reference."""

    batches: Batches
    unit: Unit

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
        return Release({"answer": raw}, self.event(), self.unit, _SEAL)


@dataclass(frozen=True)
class SumGaussian:
    """A sum over the rows of a batch, each row's contribution clipped, plus Gaussian noise, divided
    by a public number: DP-SGD (Abadi et al. 2016, algorithm 1), and with all rows, once, the mean
    embedding of DP-MERF.

    The sum of nothing is released and charged like any other: an empty batch does not show.
    A batch is summed in parts (``parts``): a row more leaves the arithmetic of all parts but its
    own as it was, to the last bit, and these are added in double precision.

    divisor: the expected size of a batch, or the public number of rows; never a realized size.
    """

    clip: float
    noise_multiplier: float
    batches: Batches
    divisor: float
    relation: Relation
    unit: Unit

    def __post_init__(self) -> None:
        _check_neighbours(self.batches, self.relation)

    def sensitivity(self, relation: Relation) -> float:
        """L2 sensitivity of what is released, before the noise."""
        return _of_a_sum(relation) * self.clip / self.divisor

    def event(self) -> DpEvent:
        """What one release costs."""
        return self.batches.event(GaussianDpEvent(self.noise_multiplier))

    def parts(self, rows: int, coins: Coins, about: int) -> list[Rows]:
        """The batch behind the next release, in parts of ``about`` so many rows."""
        return _parts(self.batches, rows, coins, self.divisor, about)

    def noised(self, size: int, sums: Iterable[ClippedSum], coins: Coins) -> Tensor:
        """Sanitizes a sum of clipped contributions, where they are: (size,) in single precision.

        Args:
            size: entries of the sum, known whatever the batch.
            sums: over the parts of the batch.

        Raises:
            ValueError: for a part that was clipped to more than the sensitivity assumes.
        """
        total: Tensor | None = None
        for part in sums:
            if part.clip > self.clip:
                raise ValueError("a part was clipped to more than the sensitivity assumes")
            flat = part.flat()
            total = flat if total is None else total.add_(flat)
        total = torch.zeros(size, dtype=torch.float64) if total is None else total
        std = self.noise_multiplier * self.sensitivity(self.relation)
        return _noised(total.div_(self.divisor), std, coins)

    def release(self, shape: tuple[int, ...], sums: Iterable[ClippedSum], coins: Coins) -> Release:
        """``noised``, of this shape, to leave the client."""
        noisy = self.noised(math.prod(shape), sums, coins).view(1, *shape)
        return Release({"answer": noisy.cpu().numpy()}, self.event(), self.unit, _SEAL)


@dataclass(frozen=True)
class PlainSum:
    """As ``SumGaussian``, without clip and noise: the non-private reference."""

    batches: Batches
    divisor: float
    unit: Unit

    def event(self) -> DpEvent:
        """No bound."""
        return NonPrivateDpEvent()

    def parts(self, rows: int, coins: Coins, about: int) -> list[Rows]:
        """See ``SumGaussian.parts``."""
        return _parts(self.batches, rows, coins, self.divisor, about)

    def noised(self, size: int, sums: Iterable[ClippedSum], coins: Coins) -> Tensor:
        """The raw sum; see ``SumGaussian.noised``."""
        del coins
        found = [part.flat() for part in sums] or [torch.zeros(size, dtype=torch.float64)]
        return (torch.stack(found).sum(0) / self.divisor).to(torch.float32)

    def release(self, shape: tuple[int, ...], sums: Iterable[ClippedSum], coins: Coins) -> Release:
        """The raw sum; see ``SumGaussian.release``."""
        gradients = self.noised(math.prod(shape), sums, coins).view(1, *shape).cpu().numpy()
        return Release({"answer": gradients}, self.event(), self.unit, _SEAL)


def _parts(batches: Batches, rows: int, coins: Coins, divisor: float, about: int) -> list[Rows]:
    """A batch in a public number of parts. A row's part is a coin of its own, as its place in the
    batch is: given the coins of all others, a row more changes no other part."""
    batch, number = batches.draw(rows, coins), max(1, round(divisor / about))
    if number == 1:
        return [batch]
    part = coins.secret_bits(rows, "part")[batch] % np.uint64(number)
    return [batch[part == each] for each in range(number)]


def descent(
    mechanism: SumGaussian | PlainSum,
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
    return Release(arrays, repeat(mechanism.event(), len(steps)), mechanism.unit, _SEAL)


@dataclass(frozen=True)
class Clipped:
    """A bounded contribution without noise: for an aggregator with the mechanism inside, and for
    nobody else. Made by such a mechanism alone; it cannot be packed into a reply of a method whose
    server is not trusted."""

    arrays: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]
    event: DpEvent
    unit: Unit
    _seal: object = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self._seal is not _SEAL:
            raise TypeError("a Clipped is made by a mechanism, nothing else")


@dataclass(frozen=True)
class TrustedAggregate:
    """The mean of clients' clipped vectors over the expected number of clients, plus Gaussian
    noise, all inside an aggregator that clients trust: FedAvg-GAN (Augenstein et al. 2020), as
    DP-FedAvg (McMahan et al. 2018). There is no bound against the aggregator itself.

    A client that was drawn and does not contribute counts as zero, like one that was not drawn: the
    others do not stand in for it, and the divisor stays.

    entries: of a vector, a public number.
    expected: clients in a cohort, in expectation; weights are uniform, since a weight by the number
        of a client's rows would move the mean by more than C / expected.
    """

    entries: int
    clip: float
    noise_multiplier: float
    cohorts: Batches
    expected: float
    relation: Relation

    def __post_init__(self) -> None:
        _check_neighbours(self.cohorts, self.relation)

    def sensitivity(self, relation: Relation) -> float:
        """L2 sensitivity of the mean, before the noise."""
        return _of_a_sum(relation) * self.clip / self.expected

    def event(self) -> DpEvent:
        """What one release costs, to whoever sees it and not the cohort."""
        return self.cohorts.event(GaussianDpEvent(self.noise_multiplier))

    def contribution(self, vector: Tensor) -> Clipped:
        """A client's part (entries,), of norm at most C."""
        clipped = clip_rows(vector.detach().to("cpu", torch.float32)[None], self.clip)
        return Clipped({"answer": clipped.numpy()}, Contribution(), Unit.CLIENT, _SEAL)

    def release(self, cohort: Iterable[Tensor], coins: Coins) -> Release:
        """The noised mean (1, entries) of a cohort's contributions (of none: noise alone). They are
        clipped again: the aggregator does not trust what arrives."""
        total = torch.zeros((1, self.entries), dtype=torch.float64)
        for each in cohort:
            total += clip_rows(each, self.clip)
        std = self.noise_multiplier * self.sensitivity(self.relation)
        noisy = _noised(total / self.expected, std, coins)
        return Release({"answer": noisy.numpy()}, self.event(), Unit.CLIENT, _SEAL)


@dataclass(frozen=True)
class PlainAggregate:
    """As ``TrustedAggregate``, without clip and noise: the non-private reference."""

    entries: int
    expected: float

    def event(self) -> DpEvent:
        """No bound."""
        return NonPrivateDpEvent()

    def contribution(self, vector: Tensor) -> Clipped:
        """A client's part as it is."""
        raw = vector.detach().to("cpu", torch.float32).numpy()[None]
        return Clipped({"answer": raw}, NonPrivateDpEvent(), Unit.CLIENT, _SEAL)

    def release(self, cohort: Iterable[Tensor], coins: Coins) -> Release:
        """The mean; see ``TrustedAggregate.release``."""
        del coins
        total = torch.zeros((1, self.entries))
        for each in cohort:
            total += each
        mean = (total / self.expected).numpy()
        return Release({"answer": mean}, self.event(), Unit.CLIENT, _SEAL)


Aggregate = TrustedAggregate | PlainAggregate


def _noised(exact: Tensor, std: float, coins: Coins) -> Tensor:
    """``exact`` + N(0, std^2), rounded to multiples of a power of two near std / 1,024, where
    ``exact`` is.

    Floating point has holes: noise takes but some values, and a sum that one neighbour can reach
    and another cannot tells them apart, whatever epsilon says (Mironov 2012). Here each multiple
    has the probability that a Gaussian around ``exact`` gives it, however far out
    (``rounded_gaussian``); rounding itself is post-processing.
    """
    grid = grid_of(std, _GRID_BITS)
    whole = rounded_gaussian(exact.to(torch.float64) / grid, std / grid, coins, "release")
    return whole.mul_(grid).to(torch.float32)


def _longest(clip: float, std: float, size: int) -> float:
    """An L2 norm that a vector of norm ``clip`` at most, and noise of ``std`` in each of its
    ``size`` numbers, exceeds with probability below e^-200: what is longer is no honest answer.

    Proof. The noise's squared norm over std^2 is chi-squared with ``size`` degrees of freedom, and
    exceeds size + 2 sqrt(size t) + 2 t with probability at most e^-t (Laurent and Massart 2000,
    lemma 1). A hundredth more pays for the grid, which moves each number by less than std / 1,024,
    and for single or half precision, whose least numbers are paid for apart. An honest client is
    taken for another in no run that anybody will see: the probability is below rounding in any
    delta, times any e^epsilon that is worth a run.
    """
    least = math.sqrt(size) * 2**-24  # of numbers in half precision
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
    """Nothing is clipped, nothing is noised: the non-private reference. Its event has no bound."""

    routing: Routing
    unit: Unit

    def event(self, rows: int) -> DpEvent:
        """No bound."""
        return repeat(NonPrivateDpEvent(), rows)

    def release(
        self, shape: tuple[int, ...], answers: Iterable[tuple[Tensor, Tensor]], coins: Coins
    ) -> Release:
        """The mean of the raw answers to each row; see ``RowGaussian.release``."""
        del coins
        total, _ = _clipped_sum(shape, answers, math.inf)
        mean = (total / self.routing.answers_per_row).float()
        return Release({"answer": mean.numpy()}, self.event(shape[0]), self.unit, _SEAL)


def _clipped_sum(
    shape: tuple[int, ...], answers: Iterable[tuple[Tensor, Tensor]], clip: float
) -> tuple[Tensor, Tensor]:
    """Sum of clipped answers per row in double precision, and how many answers each row had."""
    total = torch.zeros(shape, dtype=torch.float64)
    counts = torch.zeros(shape[0], dtype=torch.long)
    for index, rows in answers:
        rows = rows.detach().to("cpu", torch.float32)
        total.index_add_(0, index, (rows if math.isinf(clip) else clip_rows(rows, clip)).double())
        counts.index_add_(0, index, torch.ones_like(index))
    return total, counts


Mechanism = RowGaussian | NoMechanism
