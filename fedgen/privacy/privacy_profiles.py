"""Privacy profiles: upper bounds on δ(ε) of a spend, each valid at every ε.

A profile is exact for Gaussian releases. For sampled ones there are three: by privacy loss
distributions, by Renyi divergences, and as if the adversary saw the samples. ``accounting`` reads ε
off them, ``guarantee`` the power of attacks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
)
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from numpy.typing import NDArray
from scipy.stats import binom

from fedgen.privacy.events import (
    PoissonSampledGroup,
    Relation,
    RevealedSampling,
    Selection,
    Spend,
    with_sampling_revealed,
)
from fedgen.privacy.gaussian_dp import gaussian_delta
from fedgen.privacy.selection import REAL_ORDERS, delta_at, selection_divergences
from fedgen.privacy.subsampling import (
    ORDERS,
    group_sampling_pmfs,
    largest_loss,
    subset_sampling_pmf,
    subset_sampling_rdp,
)

_MIN_SIGMA = 0.02  # with less noise, the loss of a sample exceeds the range of floating point
_MAX_CELLS = 1e6  # grid cells of the loss of one release
_FEW_POINTS = 64
_MAX_RELEASES = 1e7  # composed releases; and a fifth of the cells of a composed loss

Leaves = tuple[tuple[DpEvent, int], ...]
Profile = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""ε -> upper bound on δ."""


def leaves_of(spend: Spend) -> Leaves:
    """Return the events of a spend with their counts above 0, in a fixed order."""
    items = sorted(spend.items(), key=lambda item: repr(item[0]))
    return tuple((event, count) for event, count in items if count > 0)


def profiles(spend: Spend, delta: float, relation: Relation) -> list[Profile]:
    """Return bounds on δ(ε), each valid at every ε >= 0, of a spend in which every event has noise.
    ``accounting.epsilon`` returns the smallest ε that they imply.

    Args:
        delta: δ of ``epsilon``, by which discretised losses are truncated; the truncated mass is
            included in each bound.

    Raises:
        ValueError: as for ``epsilon``.
    """
    leaves = leaves_of(spend)
    check_neighbours(leaves, relation)
    if any(isinstance(event, Selection) for event, _ in leaves):
        return [selection_profile(leaves, relation)]
    if any(isinstance(event, RevealedSampling) for event, _ in leaves):
        leaves = leaves_of(with_sampling_revealed(dict(leaves)))
        if len(leaves) > 1:
            leaves = as_if_always_sampled(leaves)
    mu = mu_without_sampling(leaves)
    bounds: list[Profile] = [lambda eps: gaussian_delta(mu, eps)] if leaves else [np.zeros_like]
    if all(isinstance(event, GaussianDpEvent) for event, _ in leaves):
        return bounds
    if len(leaves) == 1 and not isinstance(leaves[0][0], PoissonSampledGroup):
        [(event, count)] = leaves
        bounds.append(
            revealed_profile(rate_of(event), gaussian_of(event).noise_multiplier, count, delta)
        )
        if isinstance(event, RevealedSampling):
            return bounds
    if (by_pld := pld_profile(leaves, delta, relation)) is not None:
        bounds.append(by_pld)
    elif not any(isinstance(event, PoissonSampledGroup) for event, _ in leaves):
        at_orders = divergences(leaves, relation, ORDERS)

        def by_rdp(eps: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.array([rdp.compute_delta(ORDERS, at_orders, point)[0] for point in eps])

        bounds.append(by_rdp)
    return bounds


def check_neighbours(leaves: Leaves, relation: Relation) -> None:
    """Raise ValueError if data sets have no neighbours under ``relation`` for a kind of
    sampling."""
    kinds = {type(event) for event, _ in leaves}
    if SampledWithoutReplacementDpEvent in kinds and relation is not Relation.REPLACE_ONE:
        raise ValueError("fixed-size sampling has no neighbours by adding or removing a record")
    if PoissonSampledGroup in kinds and relation is not Relation.ADD_OR_REMOVE_ONE:
        raise ValueError("the records of a person are added or removed, not replaced")


def as_if_always_sampled(leaves: Leaves) -> Leaves:
    """Return the leaves as if every sample contained the record."""
    always = Counter[DpEvent]()
    for event, count in leaves:
        always[gaussian_of(event)] += count
    return leaves_of(always)


def mu_without_sampling(leaves: Leaves) -> float:
    """Return sensitivity over standard deviation of all releases together, without sampling."""
    return math.sqrt(
        sum(count / gaussian_of(event).noise_multiplier ** 2 for event, count in leaves)
    )


def gaussian_of(event: DpEvent) -> GaussianDpEvent:
    """Return the Gaussian that a leaf releases if its sample contains the record."""
    if isinstance(event, PoissonSampledGroup):
        return GaussianDpEvent(event.event.noise_multiplier / event.size)
    return event if isinstance(event, GaussianDpEvent) else event.event


def rate_of(event: DpEvent) -> float:
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


def divergences(
    leaves: Leaves, relation: Relation, orders: tuple[float, ...]
) -> NDArray[np.float64]:
    """Return the Renyi divergence of all releases together at each order."""
    values = np.zeros(len(orders))
    for event, count in leaves:
        sigma = gaussian_of(event).noise_multiplier
        if is_sampled_gaussian(event, relation):
            values += count * np.array(_sampled_gaussian_rdp(rate_of(event), sigma, orders))
        else:
            integer_orders = tuple(int(order) for order in orders)
            values += count * np.array(
                subset_sampling_rdp(rate_of(event), 1 / sigma, integer_orders)
            )
    return values


def is_sampled_gaussian(event: DpEvent, relation: Relation) -> bool:
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


@lru_cache(maxsize=64)
def selection_profile(leaves: Leaves, relation: Relation) -> Profile:
    """Return the profile of a selection among runs (``fedgen.privacy.selection``). A run with
    samples of several records of a person, or with revealed ones, is accounted as if all its
    samples contained the record.

    Raises:
        ValueError: if the spend contains other events or several selections.
    """
    [(selection, count), *others] = leaves
    if others or count != 1 or not isinstance(selection, Selection):
        raise ValueError("no accountant composes a selection with other events")
    spends = []
    for spend in selection.alternatives:
        check_neighbours(spend, relation)
        unbounded = {type(event) for event, _ in spend} & {PoissonSampledGroup, RevealedSampling}
        spends.append(as_if_always_sampled(spend) if unbounded else spend)
    pure = all(is_sampled_gaussian(event, relation) for spend in spends for event, _ in spend)
    orders = tuple(sorted(REAL_ORDERS)) if pure else ORDERS  # other divergences: integer orders
    largest = np.max([divergences(spend, relation, orders) for spend in spends], axis=0)
    at, shape = np.array(orders, dtype=float), selection.shape
    selected = selection_divergences(largest, at, selection.mean, shape)
    return lambda eps: delta_at(selected, at, eps)


# --- privacy loss distributions -------------------------------------------------------------------


@lru_cache(maxsize=4)
def pld_profile(leaves: Leaves, delta: float, relation: Relation) -> Profile | None:
    """Return the profile of the composed privacy loss distribution; None if noise is too small,
    cells too many, or δ too close to rounding."""
    if any(gaussian_of(event).noise_multiplier < _MIN_SIGMA for event, _ in leaves):
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

    def profile(eps: NDArray[np.float64]) -> NDArray[np.float64]:
        # a sequence takes as long as some hundred points, and exp(ε) may overflow in it
        many = len(eps) > _FEW_POINTS
        deltas = np.array(delta_for_epsilon(eps)) if many else np.full_like(eps, np.nan)
        single = np.isnan(deltas)
        deltas[single] = [delta_for_epsilon(float(point)) for point in eps[single]]
        return deltas + rounding

    return profile


@lru_cache(maxsize=64)
def _loss(event: DpEvent, relation: Relation, step: float) -> pld.PrivacyLossDistribution:
    """Return the privacy loss distribution of one release on a grid."""
    if isinstance(event, PoissonSampledGroup):
        pmfs = group_sampling_pmfs(*_group_counts(event), event.event.noise_multiplier, step)
        return pld.PrivacyLossDistribution(*pmfs)
    sigma = gaussian_of(event).noise_multiplier
    if is_sampled_gaussian(event, relation):
        return pld.from_gaussian_mechanism(
            sigma, sampling_prob=rate_of(event), value_discretization_interval=step
        )
    return pld.PrivacyLossDistribution(subset_sampling_pmf(rate_of(event), 1 / sigma, step))


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
        rate, mu = rate_of(event), 1 / gaussian_of(event).noise_multiplier
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
        return np.array([weights @ gaussian_delta(mus, point) for point in eps]) + tail_mass

    return profile
