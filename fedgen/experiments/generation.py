"""Samples of a generator."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from fedgen.coins import Coins
from fedgen.errors import FedgenError
from fedgen.experiments import settings
from fedgen.experiments.settings import Setup, build
from fedgen.method import Method, PublicFacts, Tensors

_CLIENTS = 10**9


def judged_samples(
    ready: Setup, generator: Tensors, count: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The samples that a run is judged by, with uniform labels."""
    coins, classes = ready.coins.at("evaluation"), ready.dataset.classes
    labels = torch.randint(0, classes, (count,), generator=coins.public("labels"))
    return draw_samples(ready.method, generator, labels, coins.at("samples")), labels.numpy()


def draw_samples(
    method: Method, generator: Tensors, labels: Tensor, coins: Coins
) -> NDArray[np.uint8]:
    """Samples (n, channels, height, width) uint8, made in batches of 1,000."""
    batches = [
        method.server.sample(generator, part, coins.at("batch", number))
        for number, part in enumerate(torch.split(labels, 1000))
    ]
    images: NDArray[np.uint8] = (torch.cat(batches) * 255).round().to(torch.uint8).numpy()
    return images


def describe(ready: Setup) -> str:
    """What is needed beside the weights to draw samples: public parameters alone."""
    method = OmegaConf.to_container(ready.config.method, resolve=True)
    facts = {"classes": ready.dataset.classes, "shape": list(ready.dataset.shape)}
    return json.dumps({"schema": 1, "method": method, **facts}, indent=2) + "\n"


def load_generator(path: Path, device: str) -> tuple[Method, Tensors, int]:
    """The generator of a finished run, or of its ``public`` folder handed out: the method that
    samples it, its weights, the number of labels.

    Raises:
        FedgenError: if there is none.
    """
    folder = path / "public" if (path / "public").is_dir() else path
    try:
        described = json.loads((folder / "generator.json").read_text())
        weights = safetensors.torch.load((folder / "generator.safetensors").read_bytes())
        # how many clients there were is not told; more than a draw could be of
        facts = PublicFacts(_CLIENTS, None, described["classes"], tuple(described["shape"]))
        make = build(OmegaConf.create(described["method"]), without=("strategy",))
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise FedgenError(
            "run", f"{path} has no readable generator", f"finish it: fedgen train resume={path}"
        ) from error
    device = settings.device(device)
    method: Method = make(facts=facts, noise_multiplier=None, device=device)
    return method, {name: each.to(device) for name, each in weights.items()}, facts.classes


def sample(config: DictConfig) -> Path:
    """Writes samples of a finished run: images (n, channels, height, width) uint8, labels (n,).
    Needs its ``public`` folder alone."""
    out = Path(config.out)
    if out.suffix != ".npz":
        raise FedgenError("out", f"{out} is no .npz file", "give out=FILE.npz")
    if not isinstance(config.n, int) or config.n < 1:
        raise FedgenError("n", f"must be a positive whole number, got {config.n!r}", "e.g. n=1000")
    settings.check_seed(config)
    method, generator, classes = load_generator(Path(config.run), config.device)
    coins = Coins.of(config.seed, "seeded").at("sample")
    labels = torch.randint(0, classes, (config.n,), generator=coins.public("labels"))
    images = draw_samples(method, generator, labels, coins)
    try:
        np.savez_compressed(out, images=images, labels=labels.numpy())
    except OSError as error:
        raise FedgenError("out", f"{out} cannot be written", "choose another place") from error
    return out
