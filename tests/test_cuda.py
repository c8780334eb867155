"""Properties that hold on a CPU also hold on a GPU: noise, sensitivity, and every method."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from tiny import CASES, PARTITIONS, Train, fingerprint, tiny
from torch import Tensor
from torch.nn import functional as F

from fedgen import cli
from fedgen.models.cdcgan import Discriminator
from fedgen.models.dct import ExactDct
from fedgen.models.scattering import Scattering
from fedgen.privacy.clipping import Precision, clipped_sum
from fedgen.privacy.gaussian_noise import rounded_gaussian
from fedgen.randomness import RandomStreams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STREAMS = RandomStreams.from_seed(3, "seeded")


def test_noise_equals_that_of_a_cpu() -> None:
    mean = torch.linspace(-5, 5, 3_000_000, dtype=torch.float64)
    result = [
        rounded_gaussian(mean.to(where), 1500.0, STREAMS, "noise") for where in ("cpu", "cuda")
    ]
    assert torch.equal(result[0], result[1].cpu())


def test_the_inverse_normal_has_the_required_precision() -> None:
    rng = np.random.default_rng(0)
    u = np.concatenate([2.0 ** -rng.uniform(1, 29, 2000), rng.uniform(0.3, 0.5, 500), [2.0**-29]])
    z = torch.special.ndtri(torch.from_numpy(u).cuda()).cpu().numpy()
    with mpmath.workprec(200):
        exact = [-mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * mpmath.mpf(float(each))) for each in u]
        worst = max(abs(a - mpmath.mpf(float(b))) for a, b in zip(exact, z, strict=True))
    assert worst < 2.0**-44


def logistic(logits: Tensor) -> Tensor:
    return F.softplus(-logits)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_the_clipped_sum_equals_that_of_a_cpu(precision: Precision) -> None:
    torch.manual_seed(0)
    module = Discriminator(10, (1, 28, 28), 32)
    weights = {name: value.detach() for name, value in module.named_parameters()}
    inputs = torch.rand(70, 1, 28, 28), torch.randint(0, 10, (70,))
    expected = clipped_sum(module, weights, inputs, logistic, 0.5)
    result = clipped_sum(
        module.cuda(),
        {name: value.cuda() for name, value in weights.items()},
        tuple(each.cuda() for each in inputs),
        logistic,
        0.5,
        precision=precision,
    )
    off = float((result.flat().cpu() - expected.flat()).norm() / expected.flat().norm())
    print("CUDA", precision, off)
    assert off < (1e-5 if precision == "float32" else 0.05)
    assert float(result.norms.min()) > 0 and not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("rows", [64, 512])
def test_one_example_moves_the_sum_by_at_most_the_clip_norm(rows: int) -> None:
    """Examples with equal gradients, on the paper's network: rounding in single precision is below
    its allowance."""
    torch.manual_seed(0)
    module = Discriminator(10, (1, 28, 28), 128).cuda()
    weights = {name: value.detach() for name, value in module.named_parameters()}
    inputs = torch.rand(1, 1, 28, 28).cuda(), torch.randint(0, 10, (1,)).cuda()
    clip = 1e-3
    sums = [
        clipped_sum(
            module, weights, tuple(e.expand(n, *e.shape[1:]) for e in inputs), logistic, clip
        )
        for n in (1, rows - 1, rows)
    ]
    one, less, more = (result.flat() for result in sums)
    assert float((more - less).norm()) <= clip
    print("CUDA beside", rows, float((more - less - one).norm()) / clip)
    assert float((more - less - one).norm()) <= clip * 2**-11


@pytest.mark.parametrize(("method", "clients"), CASES)
def test_every_method_runs_and_repeats(train: Train, method: str, clients: str) -> None:
    """At the ε of a CPU, and to the same bit."""
    words = [f"method={method}", *PARTITIONS[clients], "rounds=4"]
    runs = [
        train(*words, f"device={d}", name=n)
        for n, d in (("a", "cuda"), ("b", "cuda"), ("c", "cpu"))
    ]
    pages = [json.loads((run / "privacy.json").read_text())["views"] for run in runs]
    assert pages[0] == pages[2]
    assert math.isfinite(pages[0]["release"]["epsilon"])
    first, again, _ = (fingerprint(run)["generator"] for run in runs)
    assert first == again


def test_a_run_resumes_to_the_same_bit(train: Train, tmp_path: Path) -> None:
    small = [word for word in tiny("dpgan") if not word.startswith("rounds")]
    words = ["method=dpgan", "rounds=12", "device=cuda", "runtime.checkpoint_every=4"]
    whole = fingerprint(train(*words, name="whole"))
    run = tmp_path / "died"
    command = [sys.executable, "-m", "fedgen.cli", "train", *small, *words, f"run_dir={run}"]
    died = subprocess.run([*command, "runtime.faults.server_dies=8"], capture_output=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert cli.run(["train", f"resume={run}"]) == 0
    assert fingerprint(run) == whole


def test_exact_features_are_equal_on_both_devices() -> None:
    images = torch.rand(40, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    features, coefficients = Scattering((3, 28, 28), "cuda"), ExactDct.of((28, 28), 24)
    assert torch.equal(features(images).cpu(), Scattering((3, 28, 28), "cpu")(images))
    assert torch.equal(features(images[:7]), features(images)[:7])
    assert torch.equal(coefficients(images.cuda()).cpu(), coefficients(images))
