"""Who answers which row: the draws that route generated samples to critics or clients.

The same draw serves inside a client (over its critics, drawn by the client) and across clients
(over their ids, drawn by the server), so its event and its coins are written once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Literal

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, SampledWithoutReplacementDpEvent
from scipy.stats import binom

from fedgen.privacy.events import RevealedDraw, repeat

Mode = Literal["per_sample", "per_step", "mean"]
Sampling = Literal["fixed", "poisson"]


@dataclass(frozen=True)
class Routing:
    """Public parameters of the draw of ``take`` members out of ``population``.

    mode: ``per_sample`` draws anew for each row, ``per_step`` once for all rows of a step, ``mean``
        draws nobody: all members answer every row.
    take: members drawn (fixed size), or the expected number (Poisson).
    sampling: ``fixed`` draws exactly ``take`` without replacement, ``poisson`` each member
        independently with probability take / population.
    """

    mode: Mode
    population: int
    take: int = 1
    sampling: Sampling = "fixed"

    @property
    def answers_per_row(self) -> int:
        """How many members answer a row (in expectation, for Poisson draws)."""
        return self.population if self.mode == "mean" else self.take

    @property
    def drawn(self) -> bool:
        """Whether some answer a row and others do not."""
        return self.mode != "mean" and self.take < self.population

    @property
    def count_is_fixed(self) -> bool:
        """Whether each row is answered by exactly ``answers_per_row`` members."""
        return self.mode == "mean" or self.sampling == "fixed"

    def draw(self, rows: int, rng: Random) -> dict[int, list[int]]:
        """Member -> the rows (ascending) that it answers; members without a row are left out."""
        routed: dict[int, list[int]] = {}
        everyone = list(range(rows))
        if self.mode == "mean":
            return dict.fromkeys(range(self.population), everyone)
        if self.mode == "per_step":
            return dict.fromkeys(sorted(self._members(rng)), everyone) if rows else {}
        for row in everyone:
            for member in self._members(rng):
                routed.setdefault(member, []).append(row)
        return dict(sorted(routed.items()))

    def _members(self, rng: Random) -> list[int]:
        if self.sampling == "fixed":
            return rng.sample(range(self.population), self.take)
        rate = self.take / self.population
        return [member for member in range(self.population) if rng.random() < rate]

    def event(self, rows: int, noise_multiplier: float, hidden: bool) -> DpEvent:
        """What routing ``rows`` rows costs one subset or client, seen from outside of the draw.

        ``hidden``: nobody outside sees the draw, and nothing but the answer depends on it. A
        Poisson draw is not amplified even then: the absence of an answer is no Gaussian near its
        presence, as the theorem on secret draws needs.
        """
        if not self.drawn:
            return repeat(GaussianDpEvent(noise_multiplier), rows)
        draws = self._draws(rows)
        gate = GaussianDpEvent(noise_multiplier / math.sqrt(rows / draws))
        if hidden and self.sampling == "fixed":
            return repeat(SampledWithoutReplacementDpEvent(self.population, self.take, gate), draws)
        return repeat(RevealedDraw(self.take / self.population, gate), draws)

    def event_of_sums(self, rows: int, noise_multiplier: float, hidden: bool) -> DpEvent:
        """What routing ``rows`` rows costs one client, for whoever sees none of the noise, and of
        the k answers to a row only their sum: ``event`` at sqrt(k) times the noise.

        Each of the k adds noise of its own, of std sigma S, so that their sum is one Gaussian
        mechanism of std sqrt(k) sigma S. Given the other k - 1, it is the client's answer or that
        of one who was drawn in its place: their means are S apart at most, as with one answer.

        That each answer lies on a grid of step g changes nothing. Rounded to it, a Gaussian has at
        its points the density of the Gaussian plus a uniform on [-g/2, g/2]. The sum of k such has
        the density of a Gaussian plus k uniforms, but for exp(-(pi sigma S / g)^2 / 2) (Poisson
        summation, here below 10^-10^5): that is what rounding makes of the Gaussian mechanism plus
        k - 1 uniforms, which is post-processing.

        Without one of its terms a sum would have less noise: the number of answers must be fixed,
        and whoever is asked must answer, in full precision.
        """
        assert self.count_is_fixed
        return self.event(rows, math.sqrt(self.answers_per_row) * noise_multiplier, hidden)

    def _draws(self, rows: int) -> int:
        return rows if self.mode == "per_sample" else 1

    def busiest(self, rows: int, steps: int, tail: float) -> int:
        """Rows that no member answers more of in ``steps`` steps, but for probability ``tail``."""
        if not self.drawn:
            return rows * steps
        draws = self._draws(rows)
        visits = binom.isf(tail / self.population, draws * steps, self.take / self.population)
        return min(int(visits) * rows // draws, rows * steps)

    def stop_probability(self, rows: int, steps: int, cap: int, again: Sequence[int] = ()) -> float:
        """An upper bound on the probability that some member is asked for more than ``cap``.

        ``again``: of each step that was done more than once, by the same draw, how often.
        """
        if not self.drawn:
            return float(cap < rows * (steps + sum(again) - len(again)))
        draws, rate = self._draws(rows), self.take / self.population
        visits = cap * draws // rows
        once, repeated = draws * max(0, steps - len(again)), tuple(sorted(again))
        return min(1.0, self.population * _more_visits(visits, once, draws, repeated, rate))


@lru_cache(maxsize=256)
def _more_visits(visits: int, once: int, draws: int, again: tuple[int, ...], rate: float) -> float:
    """The probability of more than ``visits`` in ``once`` draws that count once, and for each of
    ``again`` in ``draws`` more that count so often."""
    if visits >= once + draws * sum(again):
        return 0.0
    if not again:
        return float(binom.sf(visits, once, rate))
    upto = np.arange(visits + 1)
    more = binom.sf(upto, once, rate)
    for times in again:
        before = more
        more = binom.sf(upto // times, draws, rate)  # by the draws of this step alone
        for drawn in range(min(draws, visits // times) + 1):
            rest = before[: visits + 1 - times * drawn]
            more[times * drawn :] += binom.pmf(drawn, draws, rate) * rest
    return float(more[-1])
