"""Samples of a generator, and what they are good for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from fedgen.coins import Coins
from fedgen.data.datasets import Dataset
from fedgen.errors import FedgenError
from fedgen.evaluation.inception_score import inception_score, judge, probabilities
from fedgen.evaluation.utility import Images, Labels, accuracies
from fedgen.experiments import settings
from fedgen.experiments.settings import Setup, build
from fedgen.method import Method, PublicFacts, Tensors
from fedgen.reporting.progress import RunProgress
from fedgen.reporting.run_dir import RunDir

CACHE = Path("~/.cache/fedgen").expanduser()


def evaluate(
    chosen: DictConfig, ready: Setup, generator: Tensors, progress: RunProgress
) -> dict[str, Any]:
    """gen2real, and the same classifiers trained on real rows, tested on the test split and on
    samples (``real2real``, ``real2gen``: they touch private rows outside a mechanism, and stay on
    the server side)."""
    data, count = ready.dataset, len(chosen.classifiers)
    if not count:
        return {"gen2real": {}, "real2real": {}, "real2gen": {}}
    coins, done = ready.coins.at("evaluation"), itertools.count(1)
    real = torch.randperm(len(data.labels), generator=coins.public("real"))[
        : chosen.samples
    ].numpy()

    def step(_: str) -> None:
        progress.show("evaluation", next(done), 2 * count, "")

    rows, samples = (data.images[real], data.labels[real]), _samples(chosen, ready, generator)
    test = data.test_images, data.test_labels
    found = {
        **_accuracies(chosen, ready, samples, {"gen2real": test}, step),
        **_accuracies(chosen, ready, rows, {"real2real": test, "real2gen": samples}, step),
    }
    if chosen.inception_score:
        found["inception_score"] = _inception_scores(data, samples[0])
    return found


def _inception_scores(data: Dataset, images: Images) -> dict[str, Any]:
    """Of samples, and of the real splits beside them, by a judge that is trained on real rows."""
    net = judge(data.images, data.labels, data.classes, CACHE / "judges")
    splits = {"generated": images, "train": data.images, "test": data.test_images}
    said = {name: probabilities(net, each) for name, each in splits.items()}
    hits = said["test"].argmax(1) == data.test_labels
    scores = {}
    for name, each in said.items():
        mean, std = inception_score(each)
        scores[name] = {"mean": mean, "std": std, "n": len(each)}
    return {**scores, "judge_accuracy": float(hits.mean())}


def gen2real(
    chosen: DictConfig, ready: Setup, generator: Tensors, done: Callable[[str], None]
) -> dict[str, Any]:
    """Classifiers trained on samples, tested on the real test split. ``done``: told each name."""
    test = {"gen2real": (ready.dataset.test_images, ready.dataset.test_labels)}
    found = _accuracies(chosen, ready, _samples(chosen, ready, generator), test, done)["gen2real"]
    return dict(found)


def _samples(chosen: DictConfig, ready: Setup, generator: Tensors) -> tuple[Images, Labels]:
    """The samples that are judged, with uniform labels."""
    coins, classes = ready.coins.at("evaluation"), ready.dataset.classes
    labels = torch.randint(0, classes, (chosen.samples,), generator=coins.public("labels"))
    return draw_samples(ready.method, generator, labels, coins.at("samples")), labels.numpy()


def _accuracies(
    chosen: DictConfig,
    ready: Setup,
    rows: tuple[Images, Labels],
    tests: dict[str, tuple[Images, Labels]],
    done: Callable[[str], None],
) -> dict[str, Any]:
    classifiers = {name: build(each) for name, each in chosen.classifiers.items()}
    return accuracies(classifiers, *rows, tests, ready.dataset.classes, chosen.seeds, done)


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
        facts = PublicFacts(2, None, described["classes"], tuple(described["shape"]))
        make = build(OmegaConf.create(described["method"]), without=("strategy",))
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise FedgenError(
            "run", f"{path} has no readable generator", f"finish it: fedgen train resume={path}"
        ) from error
    method: Method = make(facts=facts, noise_multiplier=None, device=settings.device(device))
    return method, weights, facts.classes


def sample(config: DictConfig) -> Path:
    """Writes samples of a finished run: images (n, channels, height, width) uint8, labels (n,).
    Needs its ``public`` folder alone."""
    out = Path(config.out)
    if out.suffix != ".npz":
        raise FedgenError("out", f"{out} is no .npz file", "give out=FILE.npz")
    if not isinstance(config.n, int) or config.n < 1:
        raise FedgenError("n", f"must be a positive whole number, got {config.n!r}", "e.g. n=1000")
    method, generator, classes = load_generator(Path(config.run), config.device)
    coins = Coins.of(config.seed, "seeded").at("sample")
    labels = torch.randint(0, classes, (config.n,), generator=coins.public("labels"))
    images = draw_samples(method, generator, labels, coins)
    try:
        np.savez_compressed(out, images=images, labels=labels.numpy())
    except OSError as error:
        raise FedgenError("out", f"{out} cannot be written", "choose another place") from error
    return out


def evaluate_run(config: DictConfig) -> Path:
    """Evaluates a finished run again and renews its results."""
    settings.check_evaluation(config)
    run_dir, trained, _ = RunDir.open(Path(config.run), "run")
    results = run_dir.results()
    trained.evaluation = config.evaluation
    ready = settings.setup(trained)
    _, generator, _ = load_generator(Path(config.run), config.device)
    with RunProgress() as progress:
        judged = evaluate(config.evaluation, ready, generator, progress)
    run_dir.write("results", {**results, **judged})
    return run_dir.path
