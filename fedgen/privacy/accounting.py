"""From a spend to epsilon at a given delta, with a second opinion.

A noise multiplier is std over L2 sensitivity under the stated neighbouring relation, so a Gaussian
release costs the same under both. Gaussian releases compose exactly. What a secret draw gates is
bounded twice, by privacy loss distributions and by Renyi divergences, and where all draws are of
one kind a third time, as if the adversary saw them. The smallest is reported: all hold, none always
wins.

| draw | add or remove one | replace one |
|---|---|---|
| Poisson | the sampled Gaussian, by dp_accounting | ``secret_draws`` at the same rate |
| Poisson, several rows of one | ``group_draw_pmfs``, no second bound | refused |
| fixed size | refused: it changes the number of rows | ``secret_draws`` |
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
)
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr
from scipy.stats import binom

from fedgen.privacy.events import (
    Contribution,
    PoissonSampledGroup,
    Relation,
    RevealedDraw,
    Spend,
    canonical,
    with_draws_seen,
)
from fedgen.privacy.secret_draws import (
    ORDERS,
    group_draw_pmfs,
    largest_loss,
    subset_draw_pmf,
    subset_draw_rdp,
)

# dp_accounting warns of each fractional order at which a series does not converge; it leaves it out
logging.getLogger("absl").setLevel(logging.ERROR)

# Below, the noise hides so little that a draw's loss is out of floating point's range.
_LEAST_SIGMA = 0.02
_MOST_CELLS = 1e6  # of the grid of one release's loss
_MOST_RELEASES = 1e7  # and five times as many cells, of a composed loss
_MOST_EPSILON = 1e100  # beyond, a bound's own rounding is above delta
_HIGHEST_ORDER = 2**14  # of a claim
_FEW = 8  # one in so many orders of Renyi divergence is looked at first
_MOST_DIFFERENT = 128  # spends of which each is accounted by itself

TRUSTED = "no bound against whom clients trust"

Leaves = tuple[tuple[DpEvent, int], ...]
Accountant = Callable[[Spend, float, Relation], "Epsilon"]
"""(spend, delta, relation) -> epsilon, as ``epsilon`` and ``rough_epsilon``."""


@dataclass(frozen=True)
class Epsilon:
    """An (epsilon, delta) bound; ``value`` is None where there is none."""

    value: float | None
    accountant: str
    second_opinion: float | None

    @property
    def or_infinity(self) -> float:
        """The value, infinity for no bound."""
        return math.inf if self.value is None else self.value


def epsilon(spend: Spend, delta: float, relation: Relation) -> Epsilon:
    """The smallest proven epsilon of a spend at ``delta`` in (0, 1).

    Raises:
        ValueError: if a draw has no neighbours under ``relation``, or the spend mixes kinds that
            have no common accountant.
    """
    return _epsilon(_leaves(spend), delta, relation)


def rough_epsilon(spend: Spend, delta: float, relation: Relation) -> Epsilon:
    """As ``epsilon``, in milliseconds: a bound too, of draws by Renyi divergence alone. Draws of
    several rows of a person take as long as there."""
    leaves = _leaves(spend)
    if {type(event) for event, _ in leaves} & {
        PoissonSampledDpEvent,
        SampledWithoutReplacementDpEvent,
    }:
        return Epsilon(_by_rdp(leaves, delta, relation), "RDP of secret draws", None)
    return epsilon(spend, delta, relation)


def epsilons(spends: Sequence[Spend], delta: float, relation: Relation) -> list[Epsilon]:
    """epsilon of each of many spends, in seconds for thousands.

    Of very many different ones, counts are rounded up to a ladder from the least to the largest
    (the largest stays): bounds all the same, a little above the smallest.
    """
    leaves = [_leaves(spend) for spend in spends]
    drawn = {
        each for each in leaves if any(type(event) is not GaussianDpEvent for event, _ in each)
    }
    if len(drawn) > _MOST_DIFFERENT:
        counts = [count for each in drawn for _, count in each]
        ladder = np.unique(np.ceil(np.geomspace(min(counts), max(counts), _MOST_DIFFERENT)))
        ladder[-1] = max(counts)

        def up(count: int) -> int:
            return int(ladder[np.searchsorted(ladder, count)])

        leaves = [tuple((e, up(n)) for e, n in each) if each in drawn else each for each in leaves]
    return [_epsilon(each, delta, relation) for each in leaves]


def _leaves(spend: Spend) -> Leaves:
    items = sorted(spend.items(), key=lambda item: repr(item[0]))
    return tuple((event, count) for event, count in items if count > 0)


@lru_cache(maxsize=8192)
def _epsilon(leaves: Leaves, delta: float, relation: Relation) -> Epsilon:
    kinds = {type(event) for event, _ in leaves}
    if not leaves:
        return Epsilon(0.0, "nothing released", 0.0)
    if SampledWithoutReplacementDpEvent in kinds and relation is not Relation.REPLACE_ONE:
        raise ValueError("a draw of a fixed number has no neighbours by adding or removing one")
    if PoissonSampledGroup in kinds and relation is not Relation.ADD_OR_REMOVE_ONE:
        raise ValueError("several rows of one are added or removed, and not replaced")
    if NonPrivateDpEvent in kinds:
        return Epsilon(None, "no bound", None)
    if Contribution in kinds:
        return Epsilon(None, TRUSTED, None)
    if RevealedDraw in kinds:
        leaves = tuple(with_draws_seen(dict(leaves)).items())
        if len(leaves) > 1:  # as if all of them took the record each time
            always = Counter[DpEvent]()
            for event, count in leaves:
                always[_gaussian(event)] += count
            return _epsilon(_leaves(always), delta, relation)
        [(event, count)] = leaves
        found = revealed_epsilon(event.probability, event.event.noise_multiplier, count, delta)
        return Epsilon(found, "mixture of exact Gaussians over the number of visits", None)
    mu = math.sqrt(sum(count / _gaussian(event).noise_multiplier ** 2 for event, count in leaves))
    exact = gaussian_epsilon(mu, delta)
    if kinds == {GaussianDpEvent}:
        return Epsilon(exact, "Gaussian, exact", _gaussian_rdp(mu, delta))
    by_pld, by_rdp = _by_pld(leaves, delta, relation), _by_rdp(leaves, delta, relation)
    # a draw never costs more than what it gates, nor more than if it were seen
    seen = _as_if_seen(leaves, delta)
    if exact <= min(by_pld, by_rdp, seen):
        found, by, second = exact, "Gaussian, as if always drawn", min(by_pld, by_rdp)
    elif seen < min(by_pld, by_rdp):
        found, by = seen, "exact Gaussians over the visits of secret draws"
        second = min(by_pld, by_rdp)
    elif by_rdp <= by_pld:
        found, by, second = by_rdp, "RDP of secret draws", by_pld
    else:
        found, by, second = by_pld, "PLD of secret draws", by_rdp
    if second == by_rdp and second > 2 * found and _is_floor(leaves, delta, relation):
        return Epsilon(found, by, None)
    return Epsilon(found, by, None if math.isinf(second) else second)


def _is_floor(leaves: Leaves, delta: float, relation: Relation) -> bool:
    """Return whether the RDP bound is limited by the available orders: with ten times the noise it
    barely decreases, so it is no estimate of ε."""
    noisier: Leaves = tuple((_with_noise(event, 10), count) for event, count in leaves)
    return _by_rdp(noisier, delta, relation) > 0.8 * _by_rdp(leaves, delta, relation)


def _with_noise(event: DpEvent, factor: float) -> DpEvent:
    """Return a leaf with ``factor`` times its noise multiplier."""
    noisier = GaussianDpEvent(_gaussian(event).noise_multiplier * factor)
    match event:
        case PoissonSampledDpEvent(sampling_probability=rate):
            return PoissonSampledDpEvent(rate, noisier)
        case SampledWithoutReplacementDpEvent(source_dataset_size=population, sample_size=taken):
            return SampledWithoutReplacementDpEvent(population, taken, noisier)
        case _:
            return noisier


def _gaussian(event: DpEvent) -> GaussianDpEvent:
    """What a leaf releases when its draw, if any, is favourable."""
    if isinstance(event, PoissonSampledGroup):
        return GaussianDpEvent(event.event.noise_multiplier / event.size)
    return event if isinstance(event, GaussianDpEvent) else event.event


def _rate(event: DpEvent) -> float:
    """The probability that a leaf's draw takes one given record or subset; any of a group."""
    match event:
        case PoissonSampledGroup(sampling_probability=rate, size=size):
            return float(-math.expm1(size * math.log1p(-rate)))
        case PoissonSampledDpEvent(sampling_probability=rate):
            return float(rate)
        case SampledWithoutReplacementDpEvent(source_dataset_size=population, sample_size=taken):
            return float(taken / population)
        case _:
            return 1.0


# --- Gaussian: exact (Balle and Wang 2018, theorem 8) ---------------------------------------------


def gaussian_delta(mu: float | NDArray[np.float64], eps: float) -> NDArray[np.float64]:
    """delta at ``eps`` of Gaussian releases with sensitivity over std equal to ``mu`` > 0."""
    mu = np.asarray(mu, dtype=float)
    with np.errstate(over="ignore", under="ignore"):
        first = log_ndtr(mu / 2 - eps / mu)
        second = eps + log_ndtr(-mu / 2 - eps / mu)
        return np.asarray(np.exp(first) * -np.expm1(np.minimum(second - first, 0.0)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """epsilon at ``delta`` of Gaussian releases with sensitivity over std equal to ``mu``."""
    return _smallest_epsilon(lambda eps: float(gaussian_delta(mu, eps)), delta)


def _smallest_epsilon(delta_at: Callable[[float], float], delta: float, to: float = 1e-10) -> float:
    """The least epsilon with ``delta_at(epsilon) <= delta``, found to ``to`` and rounded up;
    infinity if there is none."""
    if delta_at(0.0) <= delta:
        return 0.0
    high = 1.0
    while delta_at(high) > delta:
        high *= 2
        if high > _MOST_EPSILON:
            return math.inf
    return float(brentq(lambda eps: delta_at(eps) - delta, 0.0, high, xtol=to)) + 10 * to


# --- Renyi divergences ----------------------------------------------------------------------------


def _gaussian_rdp(mu: float, delta: float) -> float:
    # high orders, since the bound is at least log(1 / delta) / order
    high = np.geomspace(ORDERS[-1], 1e12, 2000)
    orders = np.concatenate([np.linspace(1.01, 2, 100), np.asarray(ORDERS, dtype=float), high])
    return _rdp_to_epsilon(orders, orders * mu**2 / 2, delta)


@lru_cache(maxsize=4096)
def _by_rdp(leaves: Leaves, delta: float, relation: Relation) -> float:
    """The least over orders, looked for among a few of all, and then around the best of these: each
    order gives a bound, so that the best one may be missed, and nothing be wrong. Infinity for
    draws of groups: nobody has their divergences."""
    if any(isinstance(event, PoissonSampledGroup) for event, _ in leaves):
        return math.inf
    pure = all(_is_sampled_gaussian(event, relation) for event, _ in leaves)
    orders = tuple(rdp.DEFAULT_RDP_ORDERS) if pure else ORDERS
    small = [place for place, order in enumerate(orders) if order in range(2, 2 * _FEW)]
    places = sorted({*range(0, len(orders), _FEW), *small, len(orders) - 1})
    for _ in range(2):
        some = tuple(orders[place] for place in places)
        found, best = _at_orders(leaves, delta, relation, some)
        around = orders.index(best)
        places = list(range(max(around - _FEW, 0), min(around + _FEW + 1, len(orders))))
    return found


def _at_orders(
    leaves: Leaves, delta: float, relation: Relation, orders: tuple[float, ...]
) -> tuple[float, float]:
    """epsilon from some orders, and the order that gives it."""
    values = np.zeros(len(orders))
    for event, count in leaves:
        sigma = _gaussian(event).noise_multiplier
        if _is_sampled_gaussian(event, relation):
            values += count * np.array(_sampled_gaussian_rdp(_rate(event), sigma, orders))
        else:
            whole = tuple(int(order) for order in orders)
            values += count * np.array(subset_draw_rdp(_rate(event), 1 / sigma, whole))
    found, best = rdp.compute_epsilon(list(orders), list(values), delta)
    return float(found), best


def _is_sampled_gaussian(event: DpEvent, relation: Relation) -> bool:
    """Whether a leaf's loss is that of q N(1) + (1 - q) N(0) against N(0), in both directions."""
    poisson = isinstance(event, PoissonSampledDpEvent) and relation is Relation.ADD_OR_REMOVE_ONE
    return poisson or isinstance(event, GaussianDpEvent)


@lru_cache(maxsize=256)
def _sampled_gaussian_rdp(
    rate: float, sigma: float, orders: tuple[float, ...]
) -> tuple[float, ...]:
    """Mironov, Talwar, Zhang 2019, as dp_accounting computes it."""
    accountant = rdp.RdpAccountant(orders)
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)))
    return tuple(accountant.rdp)


def _rdp_to_epsilon(
    orders: NDArray[np.float64], values: NDArray[np.float64], delta: float
) -> float:
    return float(rdp.compute_epsilon(list(orders), list(values), delta)[0])


# --- privacy loss distributions -------------------------------------------------------------------


def _by_pld(leaves: Leaves, delta: float, relation: Relation) -> float:
    """Infinity where it cannot say: noise too small, too many cells, a delta near rounding."""
    if any(_gaussian(event).noise_multiplier < _LEAST_SIGMA for event, _ in leaves):
        return math.inf
    step, cells = _discretization(leaves)
    releases = sum(count for _, count in leaves)
    # compositions are powers of Fourier transforms, which leave their rounding in all cells
    rounding = 2 * float(np.finfo(float).eps) * (releases + cells)
    if max(cells / 5, releases) > _MOST_RELEASES or rounding > 0.1 * delta:
        return math.inf
    whole: pld.PrivacyLossDistribution | None = None
    for event, count in leaves:
        part = _loss(event, relation, step).self_compose(count, 1e-3 * delta)
        whole = part if whole is None else whole.compose(part, 1e-3 * delta)
    assert whole is not None
    found = whole.get_delta_for_epsilon

    def delta_at(eps: float) -> float:
        return float(found(eps)) + rounding

    if not delta_at(math.inf) <= delta:  # nor if it is no number
        return math.inf
    # not get_epsilon_for_delta: it gives up where exp(-loss) underflows
    return _smallest_epsilon(delta_at, delta, 1e-7)


@lru_cache(maxsize=64)
def _loss(event: DpEvent, relation: Relation, step: float) -> pld.PrivacyLossDistribution:
    """The loss of one release, on a grid."""
    if isinstance(event, PoissonSampledGroup):
        pmfs = group_draw_pmfs(*_visits(event), event.event.noise_multiplier, step)
        return pld.PrivacyLossDistribution(*pmfs)
    sigma = _gaussian(event).noise_multiplier
    if _is_sampled_gaussian(event, relation):
        return pld.from_gaussian_mechanism(
            sigma, sampling_prob=_rate(event), value_discretization_interval=step
        )
    return pld.PrivacyLossDistribution(subset_draw_pmf(_rate(event), 1 / sigma, step))


def _visits(event: PoissonSampledGroup) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How many rows of a group a batch has, and how likely; what is too rare for floating point
    counts for the whole group."""
    counts = np.arange(event.size + 1, dtype=float)
    weights = binom.pmf(counts, event.size, event.sampling_probability)
    kept = weights > 0
    kept[-1] = True
    weights[-1] += max(1 - weights.sum(), 1e-300)
    return counts[kept], weights[kept] / weights[kept].sum()


def _discretization(leaves: Leaves) -> tuple[float, float]:
    """A grid fine enough that rounding adds little to epsilon (1e-3, or 1e-4 of it): each release's
    loss is rounded to connected dots, up by at most a quarter of a cell's square in the mean. And
    about how many cells the composed loss will have, of releases and of their sum."""
    variance, top, releases = 0.0, 0.0, 0
    for event, count in leaves:
        rate, mu = _rate(event), 1 / _gaussian(event).noise_multiplier
        rarely, often = rate * (mu**4 / 4 + mu**2), rate**2 * math.expm1(min(mu**2, 50.0))
        if isinstance(event, PoissonSampledGroup):
            (counts, weights), one = _visits(event), 1 / event.event.noise_multiplier
            rarely = float(weights @ ((counts * one) ** 4 / 4 + (counts * one) ** 2))
            pairs = np.expm1(np.minimum(np.outer(counts, counts) * one**2, 50.0))
            often = float(weights @ pairs @ weights)
        variance += count * min(rarely, often)
        top, releases = max(top, largest_loss(rate, mu)), releases + count
    spread = math.sqrt(variance)
    wide = max(1.0, spread)
    fine = min(max(spread / 300, 1e-4), math.sqrt(2e-3 * wide / releases), 1e-3 * wide)
    step = float(f"{max(fine, top / _MOST_CELLS):.1g}")  # rounded, so that neighbours share it
    return step, (2 * top + variance + 20 * spread) / step


# --- draws that the adversary sees ----------------------------------------------------------------


def _as_if_seen(leaves: Leaves, delta: float) -> float:
    """epsilon against one who sees each draw, where all are draws of one kind; else infinity."""
    if len(leaves) > 1 or isinstance(leaves[0][0], PoissonSampledGroup):
        return math.inf
    [(event, count)] = leaves
    return revealed_epsilon(_rate(event), _gaussian(event).noise_multiplier, count, delta)


def revealed_epsilon(probability: float, sigma: float, draws: int, delta: float) -> float:
    """epsilon when the record's subset is visited a Binomial(draws, probability) number of times
    and the adversary sees the visits.

    Proof: given the draws the transcript is a composition of N Gaussians, profile
    delta_G(eps; sqrt(N) / sigma); the draws do not depend on the data, and the hockey-stick
    divergence of a mixture over a common public coin is the mean of the divergences.
    """
    few = 5e-4 * delta  # beside what is counted, on either side
    low = binom.ppf(few, draws, probability)
    high = draws - binom.ppf(few, draws, 1 - probability)  # isf loses tails below 1e-16
    visits = np.arange(max(1, int(low)), int(high) + 2)
    weights = binom.pmf(visits, draws, probability)
    beyond = float(binom.sf(visits[-1], draws, probability))
    if visits[0] > 1:
        beyond += float(binom.cdf(visits[0] - 1, draws, probability))
    mus = np.sqrt(visits) / sigma

    def delta_at(eps: float) -> float:
        return float(weights @ gaussian_delta(mus, eps)) + beyond

    return _smallest_epsilon(delta_at, delta)


# --- what a paper's formula would claim -----------------------------------------------------------


def claimed_by_rdp(event: DpEvent, delta: float, relation: Relation) -> float:
    """epsilon as papers compute it: dp_accounting's RDP of an event as the paper counts it, draws
    without replacement by Wang, Balle, Kasiviswanathan 2019. A claim to print beside what is
    proven, never a bound: what is counted may not be what happens."""
    return _claimed(tuple(sorted(canonical(event).items(), key=str)), delta, relation)


@lru_cache(maxsize=1024)  # runs of a kind ask for the same rounds
def _claimed(spend: tuple[tuple[DpEvent, int], ...], delta: float, relation: Relation) -> float:
    orders = list(rdp.DEFAULT_RDP_ORDERS)
    while True:
        accountant = rdp.RdpAccountant(orders, neighboring_relation=_THEIRS[relation])
        for event, count in spend:
            accountant.compose(event, count)
        found, best = accountant.get_epsilon_and_optimal_order(delta)
        drawn = any(isinstance(event, SampledWithoutReplacementDpEvent) for event, _ in spend)
        if best < max(orders) or max(orders) >= _HIGHEST_ORDER or drawn:
            return float(found)
        orders.append(2 * max(orders))  # the optimum is at the highest order: extend


_THEIRS = {
    Relation.REPLACE_ONE: rdp.NeighborRel.REPLACE_ONE,
    Relation.ADD_OR_REMOVE_ONE: rdp.NeighborRel.ADD_OR_REMOVE_ONE,
}
