"""A method's settings are held against the types that its function declares."""

from __future__ import annotations

import re

import pytest
from omegaconf import OmegaConf

from fedgen.errors import FedgenError
from fedgen.experiments.building import check_parameters
from fedgen.parameters import Decay, NonNegative

DPGAN, DATALENS = "fedgen.methods.dpgan.dpgan", "fedgen.methods.datalens.datalens"
UNET = "fedgen.models.unet.UNet"


def own(*, ema: Decay | None, penalty: NonNegative, rate: float) -> None:
    """As somebody else's method may declare its parameters."""


OWN = f"{__name__}.own"


@pytest.mark.parametrize(
    ("target", "name", "value"),
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
def test_what_may_be(target: str, name: str, value: object) -> None:
    check_parameters("method", OmegaConf.create({"_target_": target, name: value}))


@pytest.mark.parametrize(
    ("target", "name", "value", "problem"),
    [
        (DPGAN, "ema", 1.0, "must be below 1"),
        (DPGAN, "ema", -0.1, "must be 0 or more"),
        (DPGAN, "betas", [0.5, 1.0], "must be below 1"),
        (DPGAN, "betas", [0.5], "must be two numbers"),
        (DPGAN, "betas", [0.5, "x"], "must be numbers"),
        (DPGAN, "clip", 1e-10, "must be at least 1e-09"),
        (DPGAN, "clip", float("inf"), "must be finite"),
        (DPGAN, "batch", 0, "must be positive"),
        (DPGAN, "batch", 1.5, "must be a whole number"),
        (DPGAN, "batch", "many", "must be a number"),
        (DPGAN, "discriminator_steps", "often", "choose a number or adaptive"),
        (DPGAN, "generator", 3, "it is a group of settings"),
        (DATALENS, "warm_start", -1, "must be 0 or more"),
        (DATALENS, "warm_start", 0.5, "must be a whole number"),
        (UNET, "attention", [0.5], "must be whole numbers"),
        (OWN, "ema", 1.0, "must be below 1"),
        (OWN, "penalty", -1, "must be 0 or more"),
        (OWN, "rate", 0, "must be positive"),
    ],
)
def test_what_may_not_be(target: str, name: str, value: object, problem: str) -> None:
    with pytest.raises(FedgenError, match=rf"^method\.{name}: .*{re.escape(problem)}"):
        check_parameters("method", OmegaConf.create({"_target_": target, name: value}))
