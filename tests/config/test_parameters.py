"""Settings of a method are checked against the types that its function declares."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from mutation import kills

from fedgen.config.compose import compose
from fedgen.config.constraints import Decay, NonNegative
from fedgen.config.parameters import check_parameters
from fedgen.config.registry import to_plain
from fedgen.errors import FedgenError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def own(
    *,
    ema: Decay | None,
    penalty: NonNegative,
    rate: float,
    weights: NDArray[Any] | None = None,
    **_: object,
) -> None:
    """Parameters of an extension's method, one of a type that only type checkers import."""


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare this module as an extension."""
    monkeypatch.setenv("FEDGEN_EXTENSIONS", __name__)


def settings_of(method: str) -> dict[str, Any]:
    """Return the shipped settings of a method and its network."""
    return to_plain(compose("config", [f"method={method}"]).method)


DPGAN = ("method", settings_of("dpgan"))
DATALENS = ("method", settings_of("datalens"))
UNET = ("method.network", settings_of("dpdm")["network"])
SINKHORN, MERF = ("method", settings_of("dp_sinkhorn")), ("method", settings_of("dp_merf"))
MERF_AE = ("method", settings_of("dp_merf_ae"))
COMPANION = ("method.companion", settings_of("dp_gan_dpac")["companion"])
OWN = ("method", {"type": f"{__name__}.own", "ema": 0.5, "penalty": 1, "rate": 1.0})
Chosen = tuple[str, dict[str, Any]]
SHAPE, CODE = (f"does not accept the argument '{name}'" for name in ("shape", "code"))


@pytest.mark.parametrize(
    ("chosen", "name", "value"),
    [
        (DPGAN, "ema", 0.0),
        (DPGAN, "betas", [0.0, 0.999]),
        (DPGAN, "mode_seeking", 0),
        (DPGAN, "clip", 1e-9),
        (DPGAN, "discriminator_steps", "adaptive"),
        (DPGAN, "discriminator_steps", 5),
        (DATALENS, "warm_start", 0),
        (DATALENS, "threshold", 0.0),
        (UNET, "attention", [7]),
        (UNET, "attention", []),
        (OWN, "ema", 0.0),
        (OWN, "ema", None),
        (OWN, "penalty", 0),
    ],
)
def test_valid_values(chosen: Chosen, name: str, value: object) -> None:
    check_parameters({**chosen[1], name: value}, chosen[0])


@pytest.mark.parametrize(
    ("chosen", "name", "value", "problem"),
    [
        (DPGAN, "ema", 1.0, "must be below 1"),
        (DPGAN, "ema", -0.1, "must be 0 or more"),
        (DPGAN, "betas", [0.5, 1.0], "must be below 1"),
        (DPGAN, "betas", [0.5], "must have at least 2 entries"),
        (DPGAN, "betas", [0.5, "x"], "must be a number"),
        (DPGAN, "clip", 1e-10, "must be at least 1e-09"),
        (DPGAN, "clip", float("inf"), "must be finite"),
        (DPGAN, "batch", 0, "must be positive"),
        (DPGAN, "batch", 1.5, "must be a whole number"),
        (DPGAN, "batch", "many", "must be a whole number"),
        (DPGAN, "discriminator_steps", "often", "choose a number or adaptive"),
        (DPGAN, "generator", 3, "or set method.generator.NAME=VALUE"),
        (DPGAN, "loss", "hinge", "choose method/loss=hinge|logistic|wasserstein, or"),
        (DATALENS, "warm_start", -1, "must be 0 or more"),
        (DATALENS, "warm_start", 0.5, "must be a whole number"),
        (UNET, "attention", [0.5], "must be a whole number"),
        (SINKHORN, "debiased", 1.5, "must be at most 1"),
        (SINKHORN, "sampling_rate", 2.0, "must be at most 1"),
        (MERF, "bandwidth", 1e-9, "must be at least 1e-06"),
        (MERF, "bandwidth", float("nan"), "must be finite"),
        (MERF_AE, "embedding_noise", 1e-6, "must be at least 0.001"),
        (MERF_AE, "sampling_rate", 1.5, "must be at most 1"),
        (COMPANION, "critic_share", 1.1, "must be at most 1"),
        (OWN, "ema", 1.0, "must be below 1"),
        (OWN, "penalty", -1, "must be 0 or more"),
        (OWN, "rate", 0, "must be positive"),
    ],
)
def test_invalid_values(chosen: Chosen, name: str, value: object, problem: str) -> None:
    with pytest.raises(FedgenError, match=rf"^{chosen[0]}\.{name}: .*{re.escape(problem)}"):
        check_parameters({**chosen[1], name: value}, chosen[0])


def test_a_list_has_as_many_entries_as_declared() -> None:
    with pytest.raises(FedgenError, match=r"^method\.betas: must have at most 2 entries"):
        check_parameters({**DPGAN[1], "betas": [0.5, 0.9, 0.9]}, "method")


@kills("fedgen/config/parameters.py", "if missing and arguments is not None", "if False")
@pytest.mark.parametrize("name", ["batch", "generator", "generator.width", "betas"])
def test_a_missing_setting_is_refused(name: str) -> None:
    """Also in a nested group, whose function would be called without it."""
    settings = settings_of("dpgan")
    inside, _, last = name.rpartition(".")
    del (settings[inside] if inside else settings)[last]
    with pytest.raises(FedgenError, match=rf"^method\.{name}: is missing"):
        check_parameters(settings, "method")


@kills(
    "fedgen/config/parameters.py",
    "if not_accepted and not declared.accepts_any_argument",
    "if False",
)
@pytest.mark.parametrize(
    ("method", "word", "problem"),
    [
        (
            "gs_wgan_small",
            {"type": "autoencoder", "width": 4},
            SHAPE,
        ),
        (
            "dpgan",
            {"type": "autoencoder", "width": 4, "code": 2},
            SHAPE,
        ),
        ("dp_merf_ae", {"type": "dcgan", "width": 4}, CODE),
    ],
)
def test_networks_are_checked_against_their_method(
    method: str, word: dict[str, Any], problem: str
) -> None:
    with pytest.raises(FedgenError, match=rf"^method\.generator\.type: .* {problem}"):
        check_parameters({**settings_of(method), "generator": word}, "method")
