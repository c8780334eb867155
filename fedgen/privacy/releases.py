"""What may leave a client, and who makes the noise of a sum: noise is drawn in this package alone.

| aggregation | leaves a client | noise of | the server learns |
|---|---|---|---|
| ``Local`` | a ``Release``: its contribution, noised in full | each client | each release |
| ``Secure`` | a ``Share``: its contribution and a share of the noise | all clients | the sum |
| ``Trusted`` | a ``Clipped``: its contribution | the aggregator | each contribution |

An aggregation adds up what a cohort of clients sent. A mechanism (``mechanisms.py``) bounds each
contribution and states the sensitivity of their sum.

**Secure sums.** Of n clients that are asked, ``threshold`` answer or nothing is opened, and t
collude with the server: h = threshold - t shares of noise are in the sum for certain, and nobody
who looks at it knows them. For noise of std s in the sum each client adds N(0, s^2 / h) to its
contribution and rounds to a multiple of g; the sum is known modulo 2^32 g, or 2^64 g where that
has no room for it.

Claim: given who answered, what the server and the t learn is post-processing of
X + N(0, s^2), X the sum of the honest contributions, but for a term below e^-10^4.

Proof. The t subtract what they sent. Of the honest rest, take h; the others' shares are independent
of these, and adding them is post-processing. A Gaussian rounded to multiples of g has at these the
density of the Gaussian plus a uniform on [-g/2, g/2]. Its characteristic function is
sum_j f(w + 2 pi j / g) exp(i x (w + 2 pi j / g)), f that of Gaussian and uniform, j all integers
(Poisson summation). In the product of h of these, the terms with the same j in each are the
transform of round(X + N(0, s^2) + U_1 + ... + U_(h-1)). All others have
sum_i (w + 2 pi j_i / g)^2 >= 4 pi^2 (h - 1) / (h g^2), and so a factor of at most
exp(-2 pi^2 (s^2 / (h g^2)) (h - 1) / h): with s / sqrt(h) >= 2^6 g and h >= 2 below e^-40,000,
which is below e^-10^4 with all that numbers, releases and the width of the sum's law put before
it. Rounding the Gaussian mechanism and h - 1 independent uniforms is post-processing of it, as is
the remainder modulo the ring. One share alone (h = 1) is a rounded Gaussian. So the event is that
of the exact Gaussian mechanism with std s: rounding comes after the noise, and stretches no norm.
(Kairouz, Liu, Steinke 2021 round before it, and pay for that.)

What is assumed: nothing but the sum leaves the aggregation, one sum a question
(``fedgen/federation``); the honest follow the protocol; what a client answered to one question is
in one sum alone: a question that is asked again, or of others, finds other coins, or where
nothing is opened unless all answer (``opens_one``) the same answers and the same sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from dp_accounting import DpEvent
from numpy.typing import NDArray
from torch import Tensor

from fedgen.coins import Coins
from fedgen.errors import FedgenError
from fedgen.files import digest
from fedgen.privacy.events import Contribution, Unit
from fedgen.privacy.noise import grid_of, rounded_gaussian
from fedgen.privacy.per_example import clip_rows

SEAL = object()
"""Of what leaves a client: the privacy room's own."""

_GRID_BITS = 10  # below the noise's standard deviation
_SHARE_BITS = 6  # below that of a share
_TAIL = 8  # standard deviations of a sum's noise that the ring has room for
_MANY = 8  # times the rows that were promised, which it has room for


@dataclass(frozen=True)
class _Sealed:
    """Arrays, and the privacy event that they cost. Made by the privacy package alone."""

    arrays: Mapping[str, NDArray[Any]]
    event: DpEvent
    unit: Unit
    _seal: object = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self._seal is not SEAL:
            raise TypeError(f"a {type(self).__name__} is made by a mechanism, nothing else")


class Release(_Sealed):
    """Sanitized, for anybody."""


class Share(_Sealed):
    """A bounded contribution with a share of the noise, as words of a ring (int32 or int64), for a
    secure sum and for nobody else: one share hides little. Its event is the sum's."""


class Clipped(_Sealed):
    """A bounded contribution without noise, for an aggregator with the mechanism inside, and for
    nobody else."""


Sent = Release | Share | Clipped


@dataclass(frozen=True)
class Local:
    """Every client noises in full, against everybody."""

    leaves, adds_up, opens_one = Release, False, True
    arrive_as = (torch.float32,)

    def sent(self, exact: Tensor, std: float, event: DpEvent, unit: Unit, coins: Coins) -> Sent:
        """A contribution (rows first) on its way; ``std``, ``event``: of what it is released as."""
        noisy = noised(exact, std, coins)
        return Release({"answer": noisy.cpu().numpy()}, event, unit, SEAL)

    def total(self, answers: Sequence[NDArray[Any]], std: float, coins: Coins) -> Tensor:
        """The sum of what arrived, in double precision: sums of multiples of a grid are exact."""
        del std, coins
        return _added(answers)


@dataclass(frozen=True)
class Secure:
    """Each of the ``asked`` clients adds a share of the noise; see the module.

    threshold: answers without which nothing is opened. colluders: clients that tell the server what
        they added. bits: width of a word of the ring; 64 if the sum does not fit 32 (``fits``).
    """

    asked: int
    threshold: int
    colluders: int
    bits: Literal[32, 64] = 32
    leaves, adds_up = Share, True

    @property
    def arrive_as(self) -> tuple[torch.dtype, ...]:
        """Accepted types of words."""
        return (torch.int32,) if self.bits == 32 else (torch.int64,)

    @property
    def opens_one(self) -> bool:
        """Whether the same answers, sent again, can come to no other sum than the first time."""
        return self.threshold == self.asked

    @property
    def honest(self) -> int:
        """h: shares that are in the sum for certain, and that nobody who sees it knows."""
        return self.threshold - self.colluders

    def share_std(self, std: float) -> float:
        """Of each client's noise, if the sum is to have ``std`` at least."""
        return std / math.sqrt(self.honest)

    def sent(self, exact: Tensor, std: float, event: DpEvent, unit: Unit, coins: Coins) -> Sent:
        """See ``Local.sent``; ``std``, ``event``: of the sum."""
        share = self.share_std(std)
        grid = grid_of(share, _SHARE_BITS)
        whole = rounded_gaussian(exact.to(torch.float64) / grid, share / grid, coins, "share")
        if self.bits == 32:  # exactly, also where it is beyond what 64 bits hold
            whole = torch.remainder(whole, 2.0**32)
        words = whole.to(torch.int64).cpu().numpy().astype(f"i{self.bits // 8}")  # modulo the ring
        return Share({"answer": words}, event, unit, SEAL)

    def total(self, answers: Sequence[NDArray[Any]], std: float, coins: Coins) -> Tensor:
        """The sum that words of the ring stand for, in double precision.

        Raises:
            FedgenError: for one that lies near the end of the ring's range: it may have gone past.
        """
        del coins
        words = np.zeros(answers[0].shape, f"u{self.bits // 8}")
        for each in answers:
            words += each.view(words.dtype)
        whole = torch.from_numpy(words.view(f"i{self.bits // 8}").astype(np.float64))
        if whole.numel() and float(whole.abs().max()) >= self._most:
            raise FedgenError(
                "privacy.aggregation",
                "the sum is out of range: a client sent invalid values (masks hide which one), or "
                "data.public_rows is far too small",
                "see what each site sent (fedgen node log), start a new run without untrusted "
                "sites, or raise data.public_rows",
            )
        return whole * grid_of(self.share_std(std), _SHARE_BITS)

    @property
    def _most(self) -> float:
        """Largest absolute value of a sum, in units of the grid."""
        return 0.9 * 2.0 ** (self.bits - 1)

    def fits(self, std: float, largest: float) -> bool:
        """Whether the ring holds a sum with entries up to ``largest`` plus its noise, and double
        precision represents each contribution exactly. An overflow spoils the sum, not privacy."""
        share = self.share_std(std)
        grid = grid_of(share, _SHARE_BITS)
        noise = _TAIL * share * math.sqrt(self.asked)
        exact = _MANY * largest / self.asked < 2.0**52 * grid
        return exact and _MANY * largest + noise < self._most * grid

    def check_range(self, std: float, largest: float) -> None:
        """Raises FedgenError for a sum that does not fit; see ``fits``."""
        if not self.fits(std, largest):
            raise FedgenError(
                "privacy.aggregation",
                f"{self.bits} bits cannot hold a sum up to {largest:g} beside noise of std {std:g}",
                "raise the noise, or take smaller public numbers of rows",
            )


@dataclass(frozen=True)
class Trusted:
    """The aggregator makes the noise: clients trust it, and there is no bound against it.

    clip: L2 norm that each row of a contribution is clipped to again: the aggregator does not trust
        what arrives. Infinity where it knows no such norm.
    """

    clip: float
    leaves, adds_up, opens_one = Clipped, False, False  # sent again, they meet other noise
    arrive_as = (torch.float32, torch.float64)

    def sent(self, exact: Tensor, std: float, event: DpEvent, unit: Unit, coins: Coins) -> Sent:
        """See ``Local.sent``; nothing is noised yet."""
        del std, event, coins
        arrays = {"answer": exact.cpu().numpy()}
        return Clipped(arrays, Contribution(), unit, SEAL)

    def total(self, answers: Sequence[NDArray[Any]], std: float, coins: Coins) -> Tensor:
        """The noised sum, in double precision. Its noise follows from what arrived: a round that is
        done again may bring other answers, which must not share the noise of the first."""
        told = digest(*(each.tobytes() for each in answers))
        if not math.isinf(self.clip):
            answers = [clip_rows(torch.from_numpy(each), self.clip).numpy() for each in answers]
        return noised(_added(answers), std, coins.salted(told)).double()


Aggregation = Local | Secure | Trusted
LOCAL = Local()


def _added(answers: Sequence[NDArray[Any]]) -> Tensor:
    total = torch.from_numpy(answers[0]).to(torch.float64, copy=True)
    for each in answers[1:]:
        total += torch.from_numpy(each)
    return total


def noised(exact: Tensor, std: float, coins: Coins) -> Tensor:
    """``exact`` + N(0, std^2), rounded to multiples of a power of two near std / 1,024, where
    ``exact`` is.

    Floating point has holes: noise takes but some values, and a sum that one neighbour can reach
    and another cannot tells them apart, whatever epsilon says (Mironov 2012). Here each multiple
    has the probability that a Gaussian around ``exact`` gives it, however far out
    (``rounded_gaussian``); rounding itself is post-processing. The result is a function of those
    integers alone, so that its bytes reveal nothing besides them: it holds no negative zero.
    """
    grid = grid_of(std, _GRID_BITS)
    whole = rounded_gaussian(exact.to(torch.float64) / grid, std / grid, coins, "release")
    return whole.mul_(grid).to(torch.float32)
