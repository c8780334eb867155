"""Samples that are noise are told by themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedgen import cli
from fedgen.coins import Coins
from fedgen.data.datasets import digits
from fedgen.evaluation.coherence import NOISE, coherence

RNG = np.random.default_rng(0)


def test_noise_images_and_nothing() -> None:
    noise = RNG.integers(0, 256, (500, 3, 16, 16), dtype=np.uint8)
    assert abs(coherence(noise)) < 0.02
    assert coherence(np.repeat(noise[:1], 20, axis=0)) == 0.0
    ramps = np.linspace(0, 1, 16) * RNG.uniform(50, 255, (200, 1, 1, 1))
    assert coherence(np.broadcast_to(ramps, (200, 1, 16, 16)).astype(np.uint8)) > 0.9
    assert coherence(digits(Coins.of(0, "seeded")).images) == pytest.approx(0.37, abs=0.01)


@pytest.mark.parametrize(("method", "noise", "said"), [("dp_hp_small", 1e4, True),
                                                       ("mixture_small", 1.0, False)])  # fmt: skip
def test_a_run_says_so(
    method: str, noise: float, said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"method={method}", "rounds=20", "evaluation=none", "privacy.target_epsilon=null"]
    words += [f"privacy.noise_multiplier={noise}", f"run_dir={tmp_path / 'run'}"]
    assert cli.run(["train", *words]) == 0
    assert ("look like noise" in capsys.readouterr().out) == said
    assert NOISE == 0.1
