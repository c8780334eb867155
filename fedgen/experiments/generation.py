"""Samples of a generator, and what they are good for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig
from torch import Tensor

from fedgen.coins import Coins
from fedgen.errors import FedgenError
from fedgen.evaluation.utility import accuracies
from fedgen.experiments import settings
from fedgen.experiments.settings import Setup, build
from fedgen.method import Tensors
from fedgen.reporting.progress import RunProgress
from fedgen.reporting.run_dir import RunDir


def evaluate(ready: Setup, generator: Tensors, progress: RunProgress) -> dict[str, Any]:
    """gen2real, and the same classifiers trained on real rows (``real2real``: it touches private
    rows outside a mechanism, and stays on the server side)."""
    chosen, data = ready.config.evaluation, ready.dataset
    classifiers = {name: build(each) for name, each in chosen.classifiers.items()}
    if not classifiers:
        return {"gen2real": {}, "real2real": {}}
    coins = ready.coins.at("evaluation")
    labels = torch.randint(0, data.classes, (chosen.samples,), generator=coins.public("labels"))
    images = draw_samples(ready, generator, labels, coins.at("samples"))
    real = torch.randperm(len(data.labels), generator=coins.public("real"))[: chosen.samples]
    done = 0

    def step(_: str) -> None:
        nonlocal done
        done += 1
        progress.show("evaluation", done, 2 * len(classifiers), "")

    rest = (data.test_images, data.test_labels, data.classes, chosen.seeds, step)
    real_index = real.numpy()
    return {
        "gen2real": accuracies(classifiers, images, labels.numpy(), *rest),
        "real2real": accuracies(
            classifiers, data.images[real_index], data.labels[real_index], *rest
        ),
    }


def draw_samples(
    ready: Setup, generator: Tensors, labels: Tensor, coins: Coins
) -> NDArray[np.uint8]:
    """Samples (n, channels, height, width) uint8, made in batches of 1,000."""
    batches = [
        ready.method.server.sample(generator, part, coins.at("batch", number))
        for number, part in enumerate(torch.split(labels, 1000))
    ]
    images: NDArray[np.uint8] = (torch.cat(batches) * 255).round().to(torch.uint8).numpy()
    return images


def load_run(path: Path) -> tuple[Setup, RunDir, Tensors]:
    """A finished run: its setup, and its published generator.

    Raises:
        FedgenError: if it has not been finished.
    """
    run_dir, config, _ = RunDir.open(path, "run")
    file = run_dir.public / "generator.safetensors"
    try:
        weights = safetensors.torch.load(file.read_bytes())
    except (OSError, safetensors.SafetensorError) as error:
        raise FedgenError(
            "run", f"{path} has no readable generator", f"finish it: fedgen train resume={path}"
        ) from error
    return settings.setup(config), run_dir, weights


def sample(config: DictConfig) -> Path:
    """Writes samples of a finished run: images (n, channels, height, width) uint8, labels (n,)."""
    out = Path(config.out)
    if out.suffix != ".npz":
        raise FedgenError("out", f"{out} is no .npz file", "give out=FILE.npz")
    if not isinstance(config.n, int) or config.n < 1:
        raise FedgenError("n", f"must be a positive whole number, got {config.n!r}", "e.g. n=1000")
    ready, _, generator = load_run(Path(config.run))
    coins = Coins.of(config.seed, "seeded").at("sample")
    labels = torch.randint(0, ready.dataset.classes, (config.n,), generator=coins.public("labels"))
    images = draw_samples(ready, generator, labels, coins)
    try:
        np.savez_compressed(out, images=images, labels=labels.numpy())
    except OSError as error:
        raise FedgenError("out", f"{out} cannot be written", "choose another place") from error
    return out


def evaluate_run(config: DictConfig) -> Path:
    """Evaluates a finished run again and renews its results."""
    ready, run_dir, generator = load_run(Path(config.run))
    ready.config.evaluation = config.evaluation
    with RunProgress() as progress:
        utility = evaluate(ready, generator, progress)
    results = json.loads((run_dir.path / "results.json").read_text())
    run_dir.write("results", {**results, **utility})
    return run_dir.path
