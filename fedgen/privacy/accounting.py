"""Convert a spend to ε at a given δ, with a second bound for comparison.

A noise multiplier is the standard deviation over the L2 sensitivity under the neighbouring
relation, so a Gaussian release costs the same under both relations. Gaussian releases compose
exactly. Releases with secret sampling are bounded twice, by privacy loss distributions and by Renyi
divergences, and, where all sampling is of one kind, a third time as if the adversary saw it. All
bounds hold; the smallest is reported.

| sampling | add or remove one | replace one |
|---|---|---|
| Poisson | the sampled Gaussian of dp_accounting | ``subsampling`` at the same rate |
| Poisson, several records of one person | ``group_sampling_pmfs``, no second bound | refused |
| fixed size | refused: it changes the number of records | ``subsampling`` |
"""

from __future__ import annotations

import logging
import math
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
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from numpy.typing import NDArray

from fedgen.privacy.events import (
    Contribution,
    PoissonSampledGroup,
    Relation,
    RevealedSampling,
    Selection,
    Spend,
    canonical,
    with_sampling_revealed,
)
from fedgen.privacy.gaussian_dp import gaussian_epsilon, smallest_epsilon
from fedgen.privacy.privacy_profiles import (
    Leaves,
    as_if_always_sampled,
    check_neighbours,
    divergences,
    gaussian_of,
    is_sampled_gaussian,
    leaves_of,
    mu_without_sampling,
    pld_profile,
    rate_of,
    revealed_profile,
    selection_profile,
)
from fedgen.privacy.selection import ACCOUNTANT
from fedgen.privacy.subsampling import (
    ORDERS,
)

# dp_accounting warns about each fractional order whose series does not converge, and skips it
logging.getLogger("absl").setLevel(logging.ERROR)

_HIGHEST_ORDER = 2**14  # Renyi order of a claim
_ORDER_STRIDE = 8  # stride of the coarse search over Renyi orders
_MAX_DISTINCT = 128  # spends that are accounted individually

TRUSTED_AGGREGATOR_ACCOUNTANT = "no bound against a trusted aggregator"

Accountant = Callable[[Spend, float, Relation], "Epsilon"]
"""(spend, delta, relation) -> ε: ``epsilon`` or ``rough_epsilon``."""


@dataclass(frozen=True)
class Epsilon:
    """An (ε, δ) bound; ``value`` is None without a bound."""

    value: float | None
    accountant: str
    second_opinion: float | None

    @property
    def or_infinity(self) -> float:
        """The value, or infinity without a bound."""
        return math.inf if self.value is None else self.value


def epsilon(spend: Spend, delta: float, relation: Relation) -> Epsilon:
    """Return the smallest proven ε of a spend at ``delta`` in (0, 1).

    Raises:
        ValueError: if data sets have no neighbours under ``relation`` for a kind of sampling, or
            the spend mixes kinds of events without a common accountant.
    """
    return _epsilon(leaves_of(spend), delta, relation)


def rough_epsilon(spend: Spend, delta: float, relation: Relation) -> Epsilon:
    """Return a bound like ``epsilon``, in milliseconds: for subsampling by Renyi divergences alone.
    Sampling of several records of a person takes as long as in ``epsilon``."""
    leaves = leaves_of(spend)
    if {type(event) for event, _ in leaves} & {
        PoissonSampledDpEvent,
        SampledWithoutReplacementDpEvent,
    }:
        return Epsilon(_by_rdp(leaves, delta, relation), "RDP of secret sampling", None)
    return epsilon(spend, delta, relation)


def epsilons(spends: Sequence[Spend], delta: float, relation: Relation) -> list[Epsilon]:
    """Return ε of each of many spends, in seconds for thousands.

    For very many distinct spends, counts are rounded up to a geometric ladder (the largest count is
    kept): still valid bounds, slightly above the smallest.
    """
    leaves = [leaves_of(spend) for spend in spends]
    subsampled = {
        spend_leaves
        for spend_leaves in leaves
        if any(type(event) is not GaussianDpEvent for event, _ in spend_leaves)
    }
    if len(subsampled) > _MAX_DISTINCT:
        counts = [count for spend_leaves in subsampled for _, count in spend_leaves]
        ladder = np.unique(np.ceil(np.geomspace(min(counts), max(counts), _MAX_DISTINCT)))
        ladder[-1] = max(counts)

        def round_up(count: int) -> int:
            return int(ladder[np.searchsorted(ladder, count)])

        leaves = [
            tuple((event, round_up(count)) for event, count in spend_leaves)
            if spend_leaves in subsampled
            else spend_leaves
            for spend_leaves in leaves
        ]
    return [_epsilon(spend_leaves, delta, relation) for spend_leaves in leaves]


@lru_cache(maxsize=8192)
def _epsilon(leaves: Leaves, delta: float, relation: Relation) -> Epsilon:
    kinds = {type(event) for event, _ in leaves}
    if not leaves:
        return Epsilon(0.0, "nothing released", 0.0)
    check_neighbours(leaves, relation)
    if Selection in kinds:
        by_selection = selection_profile(leaves, relation)
        value = smallest_epsilon(lambda eps: float(by_selection(np.array([eps]))[0]), delta)
        return Epsilon(value, ACCOUNTANT, None)
    if NonPrivateDpEvent in kinds:
        return Epsilon(None, "no bound", None)
    if Contribution in kinds:
        return Epsilon(None, TRUSTED_AGGREGATOR_ACCOUNTANT, None)
    if RevealedSampling in kinds:
        leaves = tuple(with_sampling_revealed(dict(leaves)).items())
        if len(leaves) > 1:
            return _epsilon(as_if_always_sampled(leaves), delta, relation)
        [(event, count)] = leaves
        value = revealed_epsilon(event.probability, event.event.noise_multiplier, count, delta)
        return Epsilon(value, "exact Gaussian mixture over the number of inclusions", None)
    mu = mu_without_sampling(leaves)
    exact = gaussian_epsilon(mu, delta)
    if kinds == {GaussianDpEvent}:
        return Epsilon(exact, "Gaussian, exact", _gaussian_rdp(mu, delta))
    by_pld, by_rdp = _by_pld(leaves, delta, relation), _by_rdp(leaves, delta, relation)
    # sampling never costs more than no sampling, nor than revealed sampling
    if_revealed = _as_if_revealed(leaves, delta)
    if exact <= min(by_pld, by_rdp, if_revealed):
        value, accountant, second_opinion = exact, "Gaussian, without sampling", min(by_pld, by_rdp)
    elif if_revealed < min(by_pld, by_rdp):
        value, accountant = if_revealed, "exact Gaussian mixture over secret inclusions"
        second_opinion = min(by_pld, by_rdp)
    elif by_rdp <= by_pld:
        value, accountant, second_opinion = by_rdp, "RDP of secret sampling", by_pld
    else:
        value, accountant, second_opinion = by_pld, "PLD of secret sampling", by_rdp
    if (
        second_opinion == by_rdp
        and second_opinion > 2 * value
        and _is_floor(leaves, delta, relation)
    ):
        return Epsilon(value, accountant, None)
    return Epsilon(value, accountant, None if math.isinf(second_opinion) else second_opinion)


def _is_floor(leaves: Leaves, delta: float, relation: Relation) -> bool:
    """Return whether the RDP bound is limited by the available orders: with ten times the noise it
    barely decreases, so it is no estimate of ε."""
    noisier: Leaves = tuple((_scale_leaf_noise(event, 10), count) for event, count in leaves)
    return _by_rdp(noisier, delta, relation) > 0.8 * _by_rdp(leaves, delta, relation)


def _scale_leaf_noise(event: DpEvent, factor: float) -> DpEvent:
    """Return a leaf with ``factor`` times its noise multiplier."""
    noisier = GaussianDpEvent(gaussian_of(event).noise_multiplier * factor)
    match event:
        case PoissonSampledDpEvent(sampling_probability=rate):
            return PoissonSampledDpEvent(rate, noisier)
        case SampledWithoutReplacementDpEvent(source_dataset_size=population, sample_size=taken):
            return SampledWithoutReplacementDpEvent(population, taken, noisier)
        case _:
            return noisier


# --- Renyi divergences ----------------------------------------------------------------------------


def _gaussian_rdp(mu: float, delta: float) -> float:
    # high orders, since the bound is at least log(1 / delta) / order
    high = np.geomspace(ORDERS[-1], 1e12, 2000)
    orders = np.concatenate([np.linspace(1.01, 2, 100), np.asarray(ORDERS, dtype=float), high])
    return _rdp_to_epsilon(orders, orders * mu**2 / 2, delta)


@lru_cache(maxsize=4096)
def _by_rdp(leaves: Leaves, delta: float, relation: Relation) -> float:
    """Return the smallest ε over Renyi orders, searched on a coarse subset and then around its best
    order: each order gives a valid bound, so missing the best order is not an error. Infinity for
    groups, whose divergences are unknown."""
    if any(isinstance(event, PoissonSampledGroup) for event, _ in leaves):
        return math.inf
    pure = all(is_sampled_gaussian(event, relation) for event, _ in leaves)
    orders = tuple(rdp.DEFAULT_RDP_ORDERS) if pure else ORDERS
    small = [index for index, order in enumerate(orders) if order in range(2, 2 * _ORDER_STRIDE)]
    indices = sorted({*range(0, len(orders), _ORDER_STRIDE), *small, len(orders) - 1})
    for _ in range(2):
        subset = tuple(orders[index] for index in indices)
        value, best = _at_orders(leaves, delta, relation, subset)
        centre = orders.index(best)
        indices = list(
            range(max(centre - _ORDER_STRIDE, 0), min(centre + _ORDER_STRIDE + 1, len(orders)))
        )
    return value


def _at_orders(
    leaves: Leaves, delta: float, relation: Relation, orders: tuple[float, ...]
) -> tuple[float, float]:
    """Return ε from some orders, and the best order."""
    values = divergences(leaves, relation, orders)
    value, best = rdp.compute_epsilon(list(orders), list(values), delta)
    return float(value), best


def _rdp_to_epsilon(
    orders: NDArray[np.float64], values: NDArray[np.float64], delta: float
) -> float:
    return float(rdp.compute_epsilon(list(orders), list(values), delta)[0])


# --- privacy loss distributions -------------------------------------------------------------------


def _by_pld(leaves: Leaves, delta: float, relation: Relation) -> float:
    """Return ε by privacy loss distributions; infinity without a profile below δ."""
    profile = pld_profile(leaves, delta, relation)
    if profile is None:
        return math.inf

    def delta_at(eps: float) -> float:
        return float(profile(np.array([eps]))[0])

    if not delta_at(math.inf) <= delta:  # also for NaN
        return math.inf
    # get_epsilon_for_delta fails where exp(-loss) underflows
    return smallest_epsilon(delta_at, delta, 1e-7)


# --- sampling that the adversary sees -------------------------------------------------------------


def _as_if_revealed(leaves: Leaves, delta: float) -> float:
    """Return ε if the adversary saw each sample, if all are of one kind; otherwise infinity."""
    if len(leaves) > 1 or isinstance(leaves[0][0], PoissonSampledGroup):
        return math.inf
    [(event, count)] = leaves
    return revealed_epsilon(rate_of(event), gaussian_of(event).noise_multiplier, count, delta)


def revealed_epsilon(probability: float, sigma: float, samples: int, delta: float) -> float:
    """Return ε if the subset of a record is visited Binomial(samples, probability) times and the
    adversary sees the visits (``revealed_profile``)."""
    profile = revealed_profile(probability, sigma, samples, delta)
    return smallest_epsilon(lambda eps: float(profile(np.array([eps]))[0]), delta)


# --- claims of papers -----------------------------------------------------------------------------


def claimed_by_rdp(event: DpEvent, delta: float, relation: Relation) -> float:
    """Return ε as papers compute it: dp_accounting's RDP of an event as the paper counts it, with
    sampling without replacement by Wang, Balle, Kasiviswanathan 2019. A claim to print next to the
    proven ε, not a bound: the accounting of a paper may not match its algorithm."""
    return _claimed(tuple(sorted(canonical(event).items(), key=str)), delta, relation)


@lru_cache(maxsize=1024)  # similar runs need the same rounds
def _claimed(spend: tuple[tuple[DpEvent, int], ...], delta: float, relation: Relation) -> float:
    orders = list(rdp.DEFAULT_RDP_ORDERS)
    while True:
        accountant = rdp.RdpAccountant(orders, neighboring_relation=_RDP_RELATIONS[relation])
        for event, count in spend:
            accountant.compose(event, count)
        value, best = accountant.get_epsilon_and_optimal_order(delta)
        without_replacement = any(
            isinstance(event, SampledWithoutReplacementDpEvent) for event, _ in spend
        )
        if best < max(orders) or max(orders) >= _HIGHEST_ORDER or without_replacement:
            return float(value)
        orders.append(2 * max(orders))  # the optimum is at the highest order: extend


_RDP_RELATIONS = {
    Relation.REPLACE_ONE: rdp.NeighborRel.REPLACE_ONE,
    Relation.ADD_OR_REMOVE_ONE: rdp.NeighborRel.ADD_OR_REMOVE_ONE,
}
