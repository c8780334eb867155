"""Private selection: the best of a random number of runs (Papernot, Steinke 2022, "Hyperparameter
tuning with Renyi differential privacy", ICLR).

A run Q chooses a point of a grid uniformly at random, trains with its settings, and adds noise to
the score of the result; its output contains point, result and score. The mechanism samples a number
K independently of the data, repeats Q with independent randomness, and releases the output with the
highest score. K and all other outputs stay secret.

K has a truncated negative binomial distribution with shape η >= 0 (here; the paper allows η > -1)
and parameter γ in (0, 1). If Q has Renyi divergences D(λ) under the neighbouring relation, the
mechanism has at most

    D(λ) + (1 + η) ((1 - 1/λ') D(λ') + log(1/γ) / λ') + log(E[K]) / (λ - 1)

for all λ > 1 and λ' >= 1 (theorem 2 of the paper).

**Several points.** D(λ) is the largest divergence D_s(λ) at any point s. Proof: the choice is
independent of the data and part of the output, so exp((λ - 1) D(λ)) is the mean of
exp((λ - 1) D_s(λ)) over s, hence at most the maximum.

**Ties.** Equal scores are resolved in favour of the first run. Given K, the runs are exchangeable,
so this has the same distribution as independent uniform tie-breakers in the outputs, which make the
order total, as the theorem assumes.

**K is sampled** by inversion, with 200 random bits and 80 decimal digits. The total variation
distance to the distribution with the computed γ, which the bound uses, is below ``COUNT_ERROR``.
That changes δ(ε) by at most (1 + e^ε) times as much.
"""

from __future__ import annotations

import math
import random
from decimal import Context, Decimal, localcontext

import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from numpy.typing import NDArray
from scipy.optimize import brentq

COUNT_ERROR = 1e-50
"""Bound on the total variation distance between the distribution of the sampled K and that with γ.
"""

ACCOUNTANT = "private selection among secret runs, RDP (Papernot, Steinke 2022, theorem 2)"
REAL_ORDERS = (
    *rdp.DEFAULT_RDP_ORDERS,
    *(float(order) for order in np.unique(np.geomspace(66, 2**15, 60).round())),
)
"""Renyi orders of runs of Gaussians and Poisson samples, for added or removed records."""


def gamma_of(mean: float, shape: float) -> float:
    """Return γ of the truncated negative binomial distribution with this mean.

    Args:
        mean: E[K] > 1.
        shape: η >= 0.
    """
    return float(brentq(lambda gamma: _mean(gamma, shape) - mean, 1e-12, 1 - 1e-12, xtol=1e-15))


def _mean(gamma: float, shape: float) -> float:
    """Return E[K] (definition 1 of the paper)."""
    if shape == 0:
        return (1 / gamma - 1) / -math.log(gamma)
    return shape * (1 - gamma) / gamma / -math.expm1(shape * math.log(gamma))


def selection_divergences(
    divergences: NDArray[np.float64], orders: NDArray[np.float64], mean: float, shape: float
) -> NDArray[np.float64]:
    """Return the Renyi divergences of the best of K runs.

    Args:
        divergences: of one run, at each order.
        orders: above 1.
        mean, shape: of K.
    """
    log_inverse_gamma = -math.log(gamma_of(mean, shape))
    constant = (1 + shape) * np.min((1 - 1 / orders) * divergences + log_inverse_gamma / orders)
    bounds = divergences + constant + math.log(mean) / (orders - 1)
    # a Renyi divergence does not decrease in the order: a bound holds at all lower orders
    result: NDArray[np.float64] = np.minimum.accumulate(bounds[::-1])[::-1]
    return result


def sample_count(mean: float, shape: float, source: random.Random) -> int:
    """Return a sample of K.

    Args:
        source: secret randomness.
    """
    with localcontext(Context(prec=80)):
        gamma, eta = Decimal(gamma_of(mean, shape)), Decimal(shape)
        if shape == 0:
            probability = (gamma - 1) / gamma.ln()
        else:
            probability = eta * (1 - gamma) / ((-eta * gamma.ln()).exp() - 1)
        remaining, count = Decimal(source.getrandbits(200)) / 2**200, 1
        while remaining >= probability:
            remaining -= probability
            probability *= (1 - gamma) * (count + eta) / (count + 1)
            count += 1
    return count


def delta_at(
    divergences: NDArray[np.float64], orders: NDArray[np.float64], eps: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return δ at each ε from Renyi divergences (Canonne, Kamath, Steinke 2020, proposition 12),
    plus the effect of ``COUNT_ERROR``; for all ε at once, unlike ``rdp.compute_delta``."""
    logs = (orders - 1) * (divergences - eps[:, None])
    logs += (orders - 1) * np.log1p(-1 / orders) - np.log(orders)
    error = COUNT_ERROR * (1 + np.exp(np.minimum(eps, 700)))
    return np.asarray(np.exp(np.minimum(logs.min(axis=1), 0)) + error)
