"""Messages of a client, and who adds the noise of a sum: only this package generates noise.

| aggregation | message of a client | noise added by | the server learns |
|---|---|---|---|
| ``Local`` | a ``Release``: its contribution with the full noise | each client | each release |
| ``Secure`` | a ``Share``: its contribution with a share of the noise | all clients | the sum |
| ``Trusted`` | a ``Clipped``: its contribution | the aggregator | each contribution |

An aggregation adds up the messages of a cohort of clients. A mechanism (``mechanisms.py``) bounds
each contribution and states the sensitivity of their sum.

**Secure sums.** Of n queried clients, at least ``threshold`` respond or no sum is unmasked, and t
collude with the server: h = threshold - t shares of noise are certainly part of the sum and unknown
to everyone who sees it. For noise of standard deviation s in the sum, each client adds N(0, s^2 /
h) to its contribution and rounds to a multiple of g; the sum is known modulo 2^32 g, or 2^64 g
where 2^32 is too small.

Claim: given the set of responders, what the server and the t colluders learn is post-processing of
X + N(0, s^2), where X is the sum of the honest contributions, up to a term below e^-10^4.

Proof. The t subtract their own messages. Take h of the remaining honest clients; the shares of the
others are independent of these, and adding them is post-processing. A Gaussian rounded to multiples
of g has at these the density of the Gaussian plus a uniform on [-g/2, g/2]. Its characteristic
function is sum_j f(w + 2 pi j / g) exp(i x (w + 2 pi j / g)), where f is that of Gaussian plus
uniform and j runs over all integers (Poisson summation). In the product of h of these, the terms
with equal j are the transform of round(X + N(0, s^2) + U_1 + ... + U_(h-1)). All others have sum_i
(w + 2 pi j_i / g)^2 >= 4 pi^2 (h - 1) / (h g^2), hence a factor of at most exp(-2 pi^2 (s^2 / (h
g^2)) (h - 1) / h): with s / sqrt(h) >= 2^6 g and h >= 2 this is below e^-40,000, and below e^-10^4
after multiplication by the number of entries, the number of releases and the width of the sum's
distribution. Rounding the Gaussian mechanism plus h - 1 independent uniforms is post-processing, as
is the remainder modulo the ring. A single share (h = 1) is a rounded Gaussian. So the event is that
of the exact Gaussian mechanism with standard deviation s: rounding follows the noise and does not
increase any norm. (Kairouz, Liu, Steinke 2021 round first and pay for it.)

Assumptions: only the sum leaves the aggregation, one sum per query (``fedgen/federation``); honest
clients follow the protocol; the response of a client to a query enters one sum only: a query that
is repeated, or sent to other clients, uses other random streams or, where no sum is unmasked unless
all respond (``requires_all``), leads to the same responses and the same sum.
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

from fedgen.errors import FedgenError
from fedgen.privacy.clipping import clip_rows
from fedgen.privacy.events import Contribution, Unit
from fedgen.privacy.gaussian_noise import grid_spacing, rounded_gaussian
from fedgen.randomness import RandomStreams
from fedgen.storage.io import digest

SEAL = object()
"""Token without which no message of a client can be created; private to this package."""

_GRID_BITS = 10  # grid step relative to the standard deviation of the noise
_SHARE_BITS = 6  # the same for a share
_TAIL = 8  # standard deviations of noise that the ring has room for
_ROOM = 8  # multiple of the assumed sum that the ring has room for


@dataclass(frozen=True)
class _Sealed:
    """Arrays and their privacy event. Only the privacy package creates them."""

    arrays: Mapping[str, NDArray[Any]]
    event: DpEvent
    unit: Unit
    _seal: object = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self._seal is not SEAL:
            raise TypeError(f"only a mechanism creates a {type(self).__name__}")


class Release(_Sealed):
    """Sanitized output, for anyone."""


class Share(_Sealed):
    """Bounded contribution with a share of the noise, as ring elements (int32 or int64), for a
    secure sum only: a single share is not private. Its event is that of the sum."""


class Clipped(_Sealed):
    """Bounded contribution without noise, only for an aggregator that runs the mechanism."""


Sent = Release | Share | Clipped


@dataclass(frozen=True)
class Local:
    """Each client adds the full noise: protection against everyone."""

    leaves, adds_up, requires_all = Release, False, True
    is_local, is_trusted = True, False
    accepted_dtypes = (torch.float32,)

    def sent(
        self, exact: Tensor, std: float, event: DpEvent, unit: Unit, streams: RandomStreams
    ) -> Sent:
        """Return the message for a contribution (rows first).

        Args:
            std, event: standard deviation and event of the release.
        """
        noisy = noised(exact, std, streams)
        return Release({"answer": noisy.cpu().numpy()}, event, unit, SEAL)

    def total(self, messages: Sequence[NDArray[Any]], std: float, streams: RandomStreams) -> Tensor:
        """Return the sum of the messages in double precision; sums of multiples of a grid are
        exact."""
        del std, streams
        return _sum(messages)

    def mean_std(self, std: float, clients: int) -> float:
        """Return the standard deviation of the noise in the mean of all clients' messages."""
        return std / math.sqrt(clients)


@dataclass(frozen=True)
class Secure:
    """Each of the ``asked`` clients adds a share of the noise; see the module.

    threshold: minimum number of responses to unmask a sum.
    colluders: number of clients that reveal to the server what they added to the sum, noise
        included.
    bits: bits of a ring element; 64 if the sum does not fit into 32 (``fits``).
    """

    asked: int
    threshold: int
    colluders: int
    bits: Literal[32, 64] = 32
    leaves, adds_up = Share, True
    is_local = is_trusted = False

    @property
    def accepted_dtypes(self) -> tuple[torch.dtype, ...]:
        """Accepted types of ring elements."""
        return (torch.int32,) if self.bits == 32 else (torch.int64,)

    @property
    def requires_all(self) -> bool:
        """Whether responses that are sent again can only form the same sum."""
        return self.threshold == self.asked

    @property
    def honest(self) -> int:
        """h: shares that are certainly in the sum and unknown to everyone who sees it."""
        return self.threshold - self.colluders

    def share_std(self, std: float) -> float:
        """Return the standard deviation of each client's noise such that the noise of the sum has
        at least ``std``."""
        return std / math.sqrt(self.honest)

    def mean_std(self, std: float, clients: int) -> float:
        """See ``Local.mean_std``."""
        return self.share_std(std) / math.sqrt(clients)

    def sent(
        self, exact: Tensor, std: float, event: DpEvent, unit: Unit, streams: RandomStreams
    ) -> Sent:
        """See ``Local.sent``; ``std`` and ``event`` are those of the sum."""
        share = self.share_std(std)
        grid = grid_spacing(share, _SHARE_BITS)
        rounded = rounded_gaussian(exact.to(torch.float64) / grid, share / grid, streams, "share")
        if self.bits == 32:  # exact, also beyond 64 bits
            rounded = torch.remainder(rounded, 2.0**32)
        words = (
            rounded.to(torch.int64).cpu().numpy().astype(f"i{self.bits // 8}")
        )  # modulo the ring
        return Share({"answer": words}, event, unit, SEAL)

    def total(self, messages: Sequence[NDArray[Any]], std: float, streams: RandomStreams) -> Tensor:
        """Decode the sum of ring elements, in double precision.

        Raises:
            FedgenError: for a sum near the end of the ring's range, which may have overflowed.
        """
        del streams
        words = np.zeros(messages[0].shape, f"u{self.bits // 8}")
        for message in messages:
            words += message.view(words.dtype)
        decoded = torch.from_numpy(words.view(f"i{self.bits // 8}").astype(np.float64))
        if decoded.numel() and float(decoded.abs().max()) >= self._max_sum:
            raise FedgenError(
                "privacy.aggregation",
                "the sum is out of range: a client sent invalid values (masks hide which one), or "
                "data.public_rows is far too small",
                "check the messages of each site (fedgen node log), start a new run without "
                "untrusted "
                "sites, or raise data.public_rows",
            )
        return decoded * grid_spacing(self.share_std(std), _SHARE_BITS)

    @property
    def _max_sum(self) -> float:
        """Largest absolute value of a sum, in multiples of the grid."""
        return 0.9 * 2.0 ** (self.bits - 1)

    def fits(self, std: float, max_entry: float) -> bool:
        """Return whether the ring holds a sum with entries up to ``max_entry`` plus its noise, and
        double precision represents each contribution exactly. An overflow corrupts the sum, not
        privacy."""
        share = self.share_std(std)
        grid = grid_spacing(share, _SHARE_BITS)
        noise = _TAIL * share * math.sqrt(self.asked)
        exact = _ROOM * max_entry / self.asked < 2.0**52 * grid
        return exact and _ROOM * max_entry + noise < self._max_sum * grid

    def check_range(self, std: float, max_entry: float) -> None:
        """Raise FedgenError for a sum that does not fit; see ``fits``."""
        if not self.fits(std, max_entry):
            raise FedgenError(
                "privacy.aggregation",
                f"{self.bits} bits cannot hold a sum up to {max_entry:g} plus noise of std {std:g}",
                "raise the noise, or use a smaller data.public_rows",
            )


@dataclass(frozen=True)
class Trusted:
    """The aggregator adds the noise: clients trust it, and there is no bound against it.

    clip: L2 norm that the aggregator clips each row of a contribution to, because it does not trust
        the messages of clients; infinity if there is no such norm.
    """

    clip: float
    leaves, adds_up, requires_all = Clipped, False, False  # a repeated sum has other noise
    is_local, is_trusted = False, True
    accepted_dtypes = (torch.float32, torch.float64)

    def sent(
        self, exact: Tensor, std: float, event: DpEvent, unit: Unit, streams: RandomStreams
    ) -> Sent:
        """See ``Local.sent``; without noise."""
        del std, event, streams
        arrays = {"answer": exact.cpu().numpy()}
        return Clipped(arrays, Contribution(), unit, SEAL)

    def total(self, messages: Sequence[NDArray[Any]], std: float, streams: RandomStreams) -> Tensor:
        """Return the noisy sum in double precision. The noise is derived from the messages: a
        repeated round may receive other messages, which must not share the noise of the first."""
        context = digest(*(message.tobytes() for message in messages))
        if not math.isinf(self.clip):
            messages = [
                clip_rows(torch.from_numpy(message), self.clip).numpy() for message in messages
            ]
        return noised(_sum(messages), std, streams.salted(context)).double()

    def mean_std(self, std: float, clients: int) -> float:
        """See ``Local.mean_std``."""
        return std / clients


Aggregation = Local | Secure | Trusted
LOCAL = Local()


def _sum(messages: Sequence[NDArray[Any]]) -> Tensor:
    total = torch.from_numpy(messages[0]).to(torch.float64, copy=True)
    for message in messages[1:]:
        total += torch.from_numpy(message)
    return total


def noised(exact: Tensor, std: float, streams: RandomStreams) -> Tensor:
    """Return ``exact`` + N(0, std^2), rounded to multiples of a power of two near std / 1,024, on
    the device of ``exact``.

    Floating-point noise takes only some values, so a sum that is reachable for one data set but not
    for its neighbour distinguishes them regardless of epsilon (Mironov 2012). Here each multiple
    has exactly the probability that a Gaussian around ``exact`` assigns to it, including the tails
    (``rounded_gaussian``); rounding itself is post-processing. The result is a function of these
    integers alone, so its bytes reveal nothing else: it contains no negative zero.
    """
    grid = grid_spacing(std, _GRID_BITS)
    rounded = rounded_gaussian(exact.to(torch.float64) / grid, std / grid, streams, "release")
    return rounded.mul_(grid).to(torch.float32)
