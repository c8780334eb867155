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
from scipy.stats import binom

from fedgen.privacy.events import (
    Contribution,
    PoissonSampledGroup,
    Relation,
    RevealedSampling,
    Spend,
    canonical,
    with_sampling_revealed,
)
from fedgen.privacy.gaussian_dp import gaussian_delta, gaussian_epsilon, smallest_epsilon
from fedgen.privacy.subsampling import (
    ORDERS,
    group_sampling_pmfs,
    largest_loss,
    subset_sampling_pmf,
    subset_sampling_rdp,
)

# dp_accounting warns about each fractional order whose series does not converge, and skips it
logging.getLogger("absl").setLevel(logging.ERROR)

_MIN_SIGMA = 0.02  # with less noise, the loss of a sample exceeds the range of floating point
_MAX_CELLS = 1e6  # grid cells of the loss of one release
_MAX_RELEASES = 1e7  # composed releases; and a fifth of the cells of a composed loss
_HIGHEST_ORDER = 2**14  # Renyi order of a claim
_ORDER_STRIDE = 8  # stride of the coarse search over Renyi orders
_MAX_DISTINCT = 128  # spends that are accounted individually

TRUSTED_AGGREGATOR_ACCOUNTANT = "no bound against a trusted aggregator"

Leaves = tuple[tuple[DpEvent, int], ...]
Profile = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""ε -> upper bound on δ."""
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
    return _epsilon(_leaves(spend), delta, relation)


def rough_epsilon(spend: Spend, delta: float, relation: Relation) -> Epsilon:
    """Return a bound like ``epsilon``, in milliseconds: for subsampling by Renyi divergences alone.
    Sampling of several records of a person takes as long as in ``epsilon``."""
    leaves = _leaves(spend)
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
    leaves = [_leaves(spend) for spend in spends]
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


def _leaves(spend: Spend) -> Leaves:
    items = sorted(spend.items(), key=lambda item: repr(item[0]))
    return tuple((event, count) for event, count in items if count > 0)


@lru_cache(maxsize=8192)
def _epsilon(leaves: Leaves, delta: float, relation: Relation) -> Epsilon:
    kinds = {type(event) for event, _ in leaves}
    if not leaves:
        return Epsilon(0.0, "nothing released", 0.0)
    _check_neighbours(leaves, relation)
    if NonPrivateDpEvent in kinds:
        return Epsilon(None, "no bound", None)
    if Contribution in kinds:
        return Epsilon(None, TRUSTED_AGGREGATOR_ACCOUNTANT, None)
    if RevealedSampling in kinds:
        leaves = tuple(with_sampling_revealed(dict(leaves)).items())
        if len(leaves) > 1:
            return _epsilon(_as_if_always_sampled(leaves), delta, relation)
        [(event, count)] = leaves
        value = revealed_epsilon(event.probability, event.event.noise_multiplier, count, delta)
        return Epsilon(value, "exact Gaussian mixture over the number of inclusions", None)
    mu = _mu_without_sampling(leaves)
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


def profiles(spend: Spend, delta: float, relation: Relation) -> list[Profile]:
    """Return bounds on δ(ε), each of them valid at every ε >= 0, for a spend whose events all have
    noise: those that ``epsilon`` chooses from.

    Args:
        delta: δ of ``epsilon``, by which discretised losses are truncated; the truncated mass is
            included in each bound.

    Raises:
        ValueError: as for ``epsilon``.
    """
    leaves = _leaves(spend)
    _check_neighbours(leaves, relation)
    if any(isinstance(event, RevealedSampling) for event, _ in leaves):
        leaves = _leaves(with_sampling_revealed(dict(leaves)))
        if len(leaves) > 1:
            leaves = _as_if_always_sampled(leaves)
    mu = _mu_without_sampling(leaves)
    found: list[Profile] = [lambda eps: gaussian_delta(mu, eps)] if leaves else [np.zeros_like]
    if all(isinstance(event, GaussianDpEvent) for event, _ in leaves):
        return found
    if len(leaves) == 1 and not isinstance(leaves[0][0], PoissonSampledGroup):
        [(event, count)] = leaves
        found.append(
            revealed_profile(_rate(event), _gaussian(event).noise_multiplier, count, delta)
        )
        if isinstance(event, RevealedSampling):
            return found
    if (by_pld := _pld_profile(leaves, delta, relation)) is not None:
        found.append(by_pld)
    elif not any(isinstance(event, PoissonSampledGroup) for event, _ in leaves):
        divergences = _divergences(leaves, relation, ORDERS)

        def by_rdp(eps: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.array([rdp.compute_delta(ORDERS, divergences, one)[0] for one in eps])

        found.append(by_rdp)
    return found


def _check_neighbours(leaves: Leaves, relation: Relation) -> None:
    """Raise ValueError if data sets have no neighbours under ``relation`` for a kind of
    sampling."""
    kinds = {type(event) for event, _ in leaves}
    if SampledWithoutReplacementDpEvent in kinds and relation is not Relation.REPLACE_ONE:
        raise ValueError("fixed-size sampling has no neighbours by adding or removing a record")
    if PoissonSampledGroup in kinds and relation is not Relation.ADD_OR_REMOVE_ONE:
        raise ValueError("the records of a person are added or removed, not replaced")


def _as_if_always_sampled(leaves: Leaves) -> Leaves:
    """Return the leaves as if every sample contained the record."""
    always = Counter[DpEvent]()
    for event, count in leaves:
        always[_gaussian(event)] += count
    return _leaves(always)


def _mu_without_sampling(leaves: Leaves) -> float:
    """Return sensitivity over standard deviation of all releases together, without sampling."""
    return math.sqrt(sum(count / _gaussian(event).noise_multiplier ** 2 for event, count in leaves))


def _is_floor(leaves: Leaves, delta: float, relation: Relation) -> bool:
    """Return whether the RDP bound is limited by the available orders: with ten times the noise it
    barely decreases, so it is no estimate of ε."""
    noisier: Leaves = tuple((_scale_leaf_noise(event, 10), count) for event, count in leaves)
    return _by_rdp(noisier, delta, relation) > 0.8 * _by_rdp(leaves, delta, relation)


def _scale_leaf_noise(event: DpEvent, factor: float) -> DpEvent:
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
    """Return the Gaussian that a leaf releases if its sample contains the record."""
    if isinstance(event, PoissonSampledGroup):
        return GaussianDpEvent(event.event.noise_multiplier / event.size)
    return event if isinstance(event, GaussianDpEvent) else event.event


def _rate(event: DpEvent) -> float:
    """Return the probability that a sample contains a given record or subset, or any of a group."""
    match event:
        case PoissonSampledGroup(sampling_probability=rate, size=size):
            return float(-math.expm1(size * math.log1p(-rate)))
        case PoissonSampledDpEvent(sampling_probability=rate) | RevealedSampling(probability=rate):
            return float(rate)
        case SampledWithoutReplacementDpEvent(source_dataset_size=population, sample_size=taken):
            return float(taken / population)
        case _:
            return 1.0


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
    pure = all(_is_sampled_gaussian(event, relation) for event, _ in leaves)
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
    values = _divergences(leaves, relation, orders)
    value, best = rdp.compute_epsilon(list(orders), list(values), delta)
    return float(value), best


def _divergences(
    leaves: Leaves, relation: Relation, orders: tuple[float, ...]
) -> NDArray[np.float64]:
    """Return the Renyi divergence of all releases together at each order."""
    values = np.zeros(len(orders))
    for event, count in leaves:
        sigma = _gaussian(event).noise_multiplier
        if _is_sampled_gaussian(event, relation):
            values += count * np.array(_sampled_gaussian_rdp(_rate(event), sigma, orders))
        else:
            integer_orders = tuple(int(order) for order in orders)
            values += count * np.array(subset_sampling_rdp(_rate(event), 1 / sigma, integer_orders))
    return values


def _is_sampled_gaussian(event: DpEvent, relation: Relation) -> bool:
    """Return whether the loss of a leaf is that of q N(1) + (1 - q) N(0) against N(0) and vice
    versa."""
    poisson = isinstance(event, PoissonSampledDpEvent) and relation is Relation.ADD_OR_REMOVE_ONE
    return poisson or isinstance(event, GaussianDpEvent)


@lru_cache(maxsize=256)
def _sampled_gaussian_rdp(
    rate: float, sigma: float, orders: tuple[float, ...]
) -> tuple[float, ...]:
    """Return Renyi divergences (Mironov, Talwar, Zhang 2019), computed by dp_accounting."""
    accountant = rdp.RdpAccountant(orders)
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)))
    return tuple(accountant.rdp)


def _rdp_to_epsilon(
    orders: NDArray[np.float64], values: NDArray[np.float64], delta: float
) -> float:
    return float(rdp.compute_epsilon(list(orders), list(values), delta)[0])


# --- privacy loss distributions -------------------------------------------------------------------


def _by_pld(leaves: Leaves, delta: float, relation: Relation) -> float:
    """Return ε by privacy loss distributions; infinity without a profile below δ."""
    profile = _pld_profile(leaves, delta, relation)
    if profile is None:
        return math.inf

    def delta_at(eps: float) -> float:
        return float(profile(np.array([eps]))[0])

    if not delta_at(math.inf) <= delta:  # also for NaN
        return math.inf
    # get_epsilon_for_delta fails where exp(-loss) underflows
    return smallest_epsilon(delta_at, delta, 1e-7)


@lru_cache(maxsize=4)
def _pld_profile(leaves: Leaves, delta: float, relation: Relation) -> Profile | None:
    """Return the profile of the composed privacy loss distribution; None if noise is too small,
    cells too many, or δ too close to rounding."""
    if any(_gaussian(event).noise_multiplier < _MIN_SIGMA for event, _ in leaves):
        return None
    step, cells = _discretization(leaves)
    releases = sum(count for _, count in leaves)
    # composition by Fourier transforms leaves rounding errors in all cells
    rounding = 2 * float(np.finfo(float).eps) * (releases + cells)
    if max(cells / 5, releases) > _MAX_RELEASES or rounding > 0.1 * delta:
        return None
    composed: pld.PrivacyLossDistribution | None = None
    for event, count in leaves:
        loss = _loss(event, relation, step).self_compose(count, 1e-3 * delta)
        composed = loss if composed is None else composed.compose(loss, 1e-3 * delta)
    assert composed is not None
    delta_for_epsilon = composed.get_delta_for_epsilon
    return lambda eps: np.asarray(delta_for_epsilon(eps)) + rounding


@lru_cache(maxsize=64)
def _loss(event: DpEvent, relation: Relation, step: float) -> pld.PrivacyLossDistribution:
    """Return the privacy loss distribution of one release on a grid."""
    if isinstance(event, PoissonSampledGroup):
        pmfs = group_sampling_pmfs(*_group_counts(event), event.event.noise_multiplier, step)
        return pld.PrivacyLossDistribution(*pmfs)
    sigma = _gaussian(event).noise_multiplier
    if _is_sampled_gaussian(event, relation):
        return pld.from_gaussian_mechanism(
            sigma, sampling_prob=_rate(event), value_discretization_interval=step
        )
    return pld.PrivacyLossDistribution(subset_sampling_pmf(_rate(event), 1 / sigma, step))


def _group_counts(event: PoissonSampledGroup) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the possible numbers of a group's records in a batch and their probabilities;
    probabilities below the range of floating point are assigned to the whole group."""
    counts = np.arange(event.size + 1, dtype=float)
    weights = binom.pmf(counts, event.size, event.sampling_probability)
    kept = weights > 0
    kept[-1] = True
    weights[-1] += max(1 - weights.sum(), 1e-300)
    return counts[kept], weights[kept] / weights[kept].sum()


def _discretization(leaves: Leaves) -> tuple[float, float]:
    """Return a grid step so fine that rounding adds little to ε (1e-3, or 1e-4 of it): connecting
    the dots rounds the loss of a release up by at most a quarter of a squared cell on average. Also
    return the approximate number of cells of the composed loss, for the releases and their sum."""
    variance, largest, releases = 0.0, 0.0, 0
    for event, count in leaves:
        rate, mu = _rate(event), 1 / _gaussian(event).noise_multiplier
        rare_bound, frequent_bound = (
            rate * (mu**4 / 4 + mu**2),
            rate**2 * math.expm1(min(mu**2, 50.0)),
        )
        if isinstance(event, PoissonSampledGroup):
            (counts, weights), step_mu = _group_counts(event), 1 / event.event.noise_multiplier
            rare_bound = float(weights @ ((counts * step_mu) ** 4 / 4 + (counts * step_mu) ** 2))
            pairs = np.expm1(np.minimum(np.outer(counts, counts) * step_mu**2, 50.0))
            frequent_bound = float(weights @ pairs @ weights)
        variance += count * min(rare_bound, frequent_bound)
        largest, releases = max(largest, largest_loss(rate, mu)), releases + count
    std = math.sqrt(variance)
    scale = max(1.0, std)
    resolution = min(max(std / 300, 1e-4), math.sqrt(2e-3 * scale / releases), 1e-3 * scale)
    step = float(
        f"{max(resolution, largest / _MAX_CELLS):.1g}"
    )  # rounded, so that similar spends share it
    return step, (2 * largest + variance + 20 * std) / step


# --- sampling that the adversary sees -------------------------------------------------------------


def _as_if_revealed(leaves: Leaves, delta: float) -> float:
    """Return ε if the adversary saw each sample, if all are of one kind; otherwise infinity."""
    if len(leaves) > 1 or isinstance(leaves[0][0], PoissonSampledGroup):
        return math.inf
    [(event, count)] = leaves
    return revealed_epsilon(_rate(event), _gaussian(event).noise_multiplier, count, delta)


def revealed_epsilon(probability: float, sigma: float, samples: int, delta: float) -> float:
    """Return ε if the subset of a record is visited Binomial(samples, probability) times and the
    adversary sees the visits (``revealed_profile``)."""
    profile = revealed_profile(probability, sigma, samples, delta)
    return smallest_epsilon(lambda eps: float(profile(np.array([eps]))[0]), delta)


def revealed_profile(probability: float, sigma: float, samples: int, delta: float) -> Profile:
    """Return the privacy profile if the subset of a record is visited Binomial(samples,
    probability) times and the adversary sees the visits; of the visits, probability 1e-3
    ``delta`` is left out and added to each δ.

    Proof: given the samples, the transcript is a composition of N Gaussians, one for each visit,
    with profile delta_G(eps; sqrt(N) / sigma). The samples do not depend on the data, and the
    hockey-stick divergence of a mixture over common public randomness is the mean of the
    divergences.
    """
    tail = 5e-4 * delta  # probability left out on either side
    low = binom.ppf(tail, samples, probability)
    high = samples - binom.ppf(tail, samples, 1 - probability)  # isf loses tails below 1e-16
    visits = np.arange(max(1, int(low)), int(high) + 2)
    weights = binom.pmf(visits, samples, probability)
    tail_mass = float(binom.sf(visits[-1], samples, probability))
    if visits[0] > 1:
        tail_mass += float(binom.cdf(visits[0] - 1, samples, probability))
    mus = np.sqrt(visits) / sigma

    def profile(eps: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array([weights @ gaussian_delta(mus, one) for one in eps]) + tail_mass

    return profile


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
