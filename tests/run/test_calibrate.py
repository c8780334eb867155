"""Noise for a target that is stated as the power of an attack."""

from __future__ import annotations

import pytest
from mutation import kills

from fedgen import account
from fedgen.config.compose import compose
from fedgen.errors import FedgenError
from fedgen.run.setup import setup

METHODS = {
    "one sum": {"method": "dp_merf_small", "rounds": 3},
    "sampled batches": {"method": "dpgan_small", "rounds": 40, "data.public_rows": 1400},
    "secret cohorts": {
        "method": "gs_wgan_small",
        "partition": "iid",
        "partition.clients": 10,
        "runtime": "in_process",
        "privacy.adversary": "release",
        "rounds": 20,
    },
}
TARGETS = {
    "mu": {"privacy.target_mu": 0.8},
    "advantage": {"privacy.target_advantage": 0.25},
    "tpr": {"privacy.target_tpr": 0.05},
    "tpr at a rate": {"privacy.target_tpr": 0.02, "privacy.at_fpr": 0.001},
}


@kills("fedgen/run/calibrate.py", "lambda curve: curve.tpr(fpr)", "lambda curve: curve.tpr(0.5)")
@kills("fedgen/run/calibrate.py", "other.planned(method(sigma), config, server)", "1 / sigma")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("target", TARGETS)
def test_noise_meets_the_target_closely(method: str, target: str) -> None:
    """And the power that is printed for the run is below it."""
    words = {"data": "digits", **METHODS[method], **TARGETS[target]}
    row = account(words)
    [(key, value), *_] = TARGETS[target].items()
    view = words.get("privacy.adversary", "server")
    stated = row["guarantee"][view]
    if key == "privacy.target_advantage":
        reached = stated["advantage"]
    elif key == "privacy.target_tpr":
        reached = stated["tpr"][f"{words.get('privacy.at_fpr', 0.01):g}"]
    elif stated["mu"] is not None:
        reached = stated["mu"]
    else:  # the power of its Gaussian
        assert stated["tpr"]["0.01"] <= 0.0637  # Φ(Φ^-1(0.01) + 0.8)
        return
    assert 0.98 * value <= reached <= value * (1 + 1e-9)


def refused(*words: str) -> str:
    with pytest.raises(FedgenError) as error:
        setup(compose("config", ["method=dp_merf_small", "data=digits", *words]))
    return str(error.value)


@kills("fedgen/config/compose.py", 'overrides.append(f"{_TARGETS[0]}=null")', "pass")
def test_one_target_at_a_time() -> None:
    """The default for ε gives way; two that are asked for do not go together."""
    config = compose("config", ["privacy.target_mu=1"])
    assert (config.privacy.target_epsilon, config.privacy.target_mu) == (None, 1)
    assert compose("config", ["privacy.target_mu=null"]).privacy.target_epsilon == 10
    both = ("privacy.target_mu=1", "privacy.target_epsilon=3")
    assert refused(*both).startswith("privacy.target_mu: cannot be combined with privacy.target_ep")
    two = ("privacy.target_mu=1", "privacy.target_tpr=0.1")
    assert refused(*two).startswith("privacy.target_tpr: cannot be combined with privacy.target_mu")
    noise = ("privacy.target_mu=1", "privacy.noise_multiplier=3")
    assert refused(*noise).startswith("privacy.noise_multiplier: cannot be combined with")
    assert "the rate by chance" in refused("privacy.target_tpr=0.01")
    assert "must be below 1" in refused("privacy.target_advantage=1")
    assert "none has no target" in refused("privacy=none", "privacy.target_mu=1")
