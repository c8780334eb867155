"""Collapsed generators, diverged ones, and samples that are noise are recognised without real
images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny import rounds_override

from fedgen import cli
from fedgen.data.digits import digits
from fedgen.evaluation.coherence import NOISE, coherence, diversity, verdict
from fedgen.randomness import RandomStreams

RNG = np.random.default_rng(0)


def test_noise_images_and_nothing() -> None:
    noise = RNG.integers(0, 256, (500, 3, 16, 16), dtype=np.uint8)
    assert abs(coherence(noise)) < 0.02
    assert coherence(np.repeat(noise[:1], 20, axis=0)) == 0.0
    ramps = np.linspace(0, 1, 16) * RNG.uniform(50, 255, (200, 1, 1, 1))
    assert coherence(np.broadcast_to(ramps, (200, 1, 16, 16)).astype(np.uint8)) > 0.9
    assert coherence(digits(RandomStreams.from_seed(0, "seeded")).images) == pytest.approx(
        0.37, abs=0.01
    )


@pytest.mark.parametrize(("method", "noise", "message"), [("dpgan_small", 1e2, True),
                                                       ("mixture_small", 1.0, False)])  # fmt: skip
def test_a_run_reports_a_failed_generator(
    method: str, noise: float, message: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        f"method={method}",
        *rounds_override(method, 20),
        "evaluation=none",
        "privacy.target_epsilon=null",
    ]
    words += [f"privacy.noise_multiplier={noise}", f"run_dir={tmp_path / 'run'}"]
    assert cli.run(["train", *words]) == 0
    assert ("look like noise" in capsys.readouterr().out) == message
    assert NOISE == 0.1


def test_collapse_divergence_and_noise_are_distinguished() -> None:
    data = digits(RandomStreams.from_seed(0, "seeded"))
    images, labels = data.images, data.labels
    assert verdict(images, labels) is None
    assert 45 < diversity(images, labels) < 65
    first = np.array([np.flatnonzero(labels == label)[0] for label in range(10)])
    one = images[first][labels]
    assert diversity(one, labels) == 0.0
    assert verdict(one, labels) == "collapsed"
    jitter = np.clip(one + RNG.normal(0, 3, one.shape), 0, 255).astype(np.uint8)
    assert verdict(jitter, labels) == "collapsed"
    noise = RNG.integers(0, 256, images.shape, dtype=np.uint8)
    assert verdict(noise, labels) == "noise"
    assert verdict(np.full_like(images, 255), labels) == "diverged"
    assert verdict(np.full_like(images, 100), labels) == "collapsed"
    assert verdict((noise > 127).astype(np.uint8) * 255, labels) == "diverged"
    binary = (images > 127).astype(np.uint8) * 255
    assert verdict(binary, labels) is None, "black and white pictures are no divergence"


def test_one_collapsed_label_is_found_among_others() -> None:
    data = digits(RandomStreams.from_seed(0, "seeded"))
    images, labels = data.images.copy(), data.labels
    images[labels == 3] = images[labels == 3][0]
    assert verdict(images, labels) == "collapsed"


def test_a_diverged_run_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["method=gs_wgan_small", "method.generator_learning_rate=100", "rounds=6"]
    words += ["method.critics=4", "method.critics_per_step=1", "method.warm_start=1"]
    quick = ["evaluation.samples=60", "evaluation.classifiers.cnn.epochs=1"]
    assert cli.run(["train", *words, *quick, f"run_dir={tmp_path / 'run'}"]) == 0
    output = capsys.readouterr().out
    assert "training diverged" in output and "look like noise" not in output
    assert "diversity within labels: " in output and "(real images: " in output
