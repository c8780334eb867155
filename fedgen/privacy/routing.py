"""Routing of query samples to critics or clients.

The same sampling serves inside a client (over its critics, sampled by the client) and across
clients (over their indices, sampled by the server), with one event for both.
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

from fedgen.privacy.events import RevealedSampling, repeat

Mode = Literal["per_sample", "per_step", "mean"]
Sampling = Literal["fixed", "poisson"]


@dataclass(frozen=True)
class Routing:
    """Public parameters of sampling ``sample_size`` members out of ``population``.

    mode: ``per_sample`` samples members for each query sample, ``per_step`` once for all of a step;
        with ``mean`` all members respond to every query sample.
    sample_size: number of sampled members, or its expectation for Poisson sampling.
    sampling: ``fixed`` samples ``sample_size`` members without replacement, ``poisson`` each member
        independently with probability sample_size / population.
    """

    mode: Mode
    population: int
    sample_size: int = 1
    sampling: Sampling = "fixed"

    @property
    def responses_per_sample(self) -> int:
        """Number of members that respond to a query sample (expected, for Poisson sampling)."""
        return self.population if self.mode == "mean" else self.sample_size

    @property
    def is_sampled(self) -> bool:
        """Whether only some members respond to a query sample."""
        return self.mode != "mean" and self.sample_size < self.population

    @property
    def has_fixed_size(self) -> bool:
        """Whether exactly ``responses_per_sample`` members respond to each query sample."""
        return self.mode == "mean" or self.sampling == "fixed"

    def assign(self, samples: int, rng: Random) -> dict[int, list[int]]:
        """Return member -> query samples (ascending) to respond to; unassigned members are
        omitted."""
        routed: dict[int, list[int]] = {}
        all_samples = list(range(samples))
        if self.mode == "mean":
            return dict.fromkeys(range(self.population), all_samples)
        if self.mode == "per_step":
            return dict.fromkeys(sorted(self._members(rng)), all_samples) if samples else {}
        for sample in all_samples:
            for member in self._members(rng):
                routed.setdefault(member, []).append(sample)
        return dict(sorted(routed.items()))

    def _members(self, rng: Random) -> list[int]:
        if self.sampling == "fixed":
            return rng.sample(range(self.population), self.sample_size)
        rate = self.sample_size / self.population
        return [member for member in range(self.population) if rng.random() < rate]

    def event(self, samples: int, noise_multiplier: float, hidden: bool) -> DpEvent:
        """Return the event of ``samples`` query samples for one subset or client, for an outside
        adversary.

        hidden: whether no other party sees the sample, and nothing but the response depends on it.
            Poisson sampling is not amplified even then: a missing response is not a Gaussian close
            to the response, as the theorem on subsampling requires.
        """
        if not self.is_sampled:
            return repeat(GaussianDpEvent(noise_multiplier), samples)
        draws = self._cohorts(samples)
        gate = GaussianDpEvent(noise_multiplier / math.sqrt(samples / draws))
        if hidden and self.sampling == "fixed":
            return repeat(
                SampledWithoutReplacementDpEvent(self.population, self.sample_size, gate), draws
            )
        return repeat(RevealedSampling(self.sample_size / self.population, gate), draws)

    def event_of_sum(self, samples: int, noise_multiplier: float, hidden: bool) -> DpEvent:
        """Return the event of ``samples`` query samples for one client, for an adversary who sees
        none of the noise and, of the k responses to a query sample, only their sum: ``event`` with
        sqrt(k) times the noise.

        Each of the k adds independent noise of standard deviation sigma S, so their sum is one
        Gaussian mechanism of standard deviation sqrt(k) sigma S. Given the other k - 1, the k-th
        response is that of the client or of the one sampled in its place: the means differ by at
        most S, as with one response.

        Rounding each response to a grid of step g changes nothing. A Gaussian rounded to the grid
        has at its points the density of the Gaussian plus a uniform on [-g/2, g/2]. The sum of k
        such has the density of a Gaussian plus k uniforms, up to a term of exp(-(pi sigma S / g)^2
        / 2) (Poisson summation, here below 10^-10^5): this is the Gaussian mechanism plus k - 1
        uniforms, rounded, which is post-processing.

        Without one of its terms, a sum would have less noise: the number of responses must be
        fixed, and every queried member must respond, in full precision.
        """
        assert self.has_fixed_size
        return self.event(samples, math.sqrt(self.responses_per_sample) * noise_multiplier, hidden)

    def _cohorts(self, samples: int) -> int:
        return samples if self.mode == "per_sample" else 1

    def max_load(self, samples: int, steps: int, tail: float) -> int:
        """Return the number of query samples that no member exceeds in ``steps`` steps, except with
        probability at most ``tail``."""
        if not self.is_sampled:
            return samples * steps
        draws = self._cohorts(samples)
        visits = binom.isf(
            tail / self.population, draws * steps, self.sample_size / self.population
        )
        return min(int(visits) * samples // draws, samples * steps)

    def stop_probability(
        self, samples: int, steps: int, cap: int, repeated: Sequence[int] = ()
    ) -> float:
        """Return an upper bound on the probability that any member is assigned more than ``cap``
        query samples.

        ``repeated``: for each step that ran more than once with the same sample, the number of
            times.
        """
        if not self.is_sampled:
            return float(cap < samples * (steps + sum(repeated) - len(repeated)))
        draws, rate = self._cohorts(samples), self.sample_size / self.population
        visits = cap * draws // samples
        once, repeated = draws * max(0, steps - len(repeated)), tuple(sorted(repeated))
        return min(1.0, self.population * _exceeding_visits(visits, once, draws, repeated, rate))


@lru_cache(maxsize=256)
def _exceeding_visits(
    visits: int, once: int, draws: int, repeats: tuple[int, ...], rate: float
) -> float:
    """Return the probability of more than ``visits`` visits: ``once`` samples count once, and for
    each entry of ``repeats``, ``draws`` further samples count that many times."""
    if visits >= once + draws * sum(repeats):
        return 0.0
    if not repeats:
        return float(binom.sf(visits, once, rate))
    thresholds = np.arange(visits + 1)
    exceeding = binom.sf(thresholds, once, rate)
    for times in repeats:
        previous = exceeding
        exceeding = binom.sf(thresholds // times, draws, rate)  # by the samples of this step alone
        for hits in range(min(draws, visits // times) + 1):
            remaining = previous[: visits + 1 - times * hits]
            exceeding[times * hits :] += binom.pmf(hits, draws, rate) * remaining
    return float(exceeding[-1])
