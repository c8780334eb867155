"""What the commands do, from Python::

    import fedgen

    run = fedgen.train(method="dp_merf_small", data="digits", epsilon=1.0, rounds=500)
    run.epsilon, run.samples(100, labels=[3, 5]).images, run.results["gen2real"]
    fedgen.load("runs/mine/public").samples(1000)

Settings are those of the command line. Keywords are groups and settings without a dot; a dictionary
before them holds any: ``fedgen.train({"method.ema": 0.9, "privacy.delta": 1e-6}, data="mnist")``.
``epsilon`` is short for ``privacy.target_epsilon``. A mistake is a ``FedgenError``, in the words of
the command line.

A call leaves torch's threads and its choice of algorithms as they were. This module switches TF32
off for convolutions, for good: on a GPU it rounds more than a proof allows.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedgen.coins import Coins
from fedgen.data.datasets import as_images
from fedgen.errors import FedgenError
from fedgen.experiments import account as accounting
from fedgen.experiments import audit as auditing
from fedgen.experiments import evaluation, training
from fedgen.experiments.configuration import compose
from fedgen.experiments.generation import Published, draw_samples, labels_of, load_generator
from fedgen.experiments.overrides import in_grammar
from fedgen.reporting.run_dir import RunDir

Settings = Mapping[str, Any]


class Samples(NamedTuple):
    """Images (n, channels, height, width) uint8, and their labels (n,)."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Generator:
    """A published generator.

    path: a finished run, or its ``public`` folder alone. device: that samples are drawn on.
    """

    path: Path
    device: str = "auto"

    @cached_property
    def _loaded(self) -> Published:
        return load_generator(self.path, self.device)

    @property
    def classes(self) -> int:
        """Number of labels."""
        return self._loaded.classes

    @property
    def labels(self) -> list[str] | None:
        """Names of the labels, if they were published: where ``data.labels`` told them."""
        return self._loaded.labels

    def samples(
        self,
        n: int | np.integer[Any],
        labels: Sequence[int | str] | NDArray[np.integer[Any]] | None = None,
        seed: int | np.integer[Any] = 0,
    ) -> Samples:
        """``n`` images, of ``labels`` (numbers or names) or of all, uniformly: those of ``fedgen
        sample``.

        Raises:
            FedgenError: for labels that there are not, more images than a set has, or a seed that
                is none.
        """
        with _as_it_was():
            found = self._loaded
            coins = Coins.of(seed, "seeded").at("sample")
            listed = labels.tolist() if isinstance(labels, np.ndarray) else labels
            chosen = labels_of(found, n, listed, coins)
            images = draw_samples(found.method, found.weights, chosen, coins)
            return Samples(images, chosen.numpy())

    def classify(self, images: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Labels (n,) of images (n, channels, height, width), (n, height, width) or (n, height,
        width, 3) uint8, by the private classifier that was published with the generator.

        Raises:
            FedgenError: if there is none, or for images that are none of its size.
        """
        with _as_it_was():
            classify = self._loaded.method.server.classify
            if classify is None:
                remedy = "train one: method=mixture, with a teacher (method.teacher=ridge)"
                raise FedgenError("run", "published no classifier", remedy)
            given, shape = as_images("what was given", np.asarray(images)), self._loaded.shape
            if given.shape[1:] != shape:
                problem = f"are of shape {list(given.shape[1:])}, and it knows {list(shape)}"
                raise FedgenError("images", problem, "bring them to this size")
            found = classify(self._loaded.weights, torch.from_numpy(given).float() / 255)
            return np.asarray(found.cpu().numpy())


@dataclass(frozen=True)
class Run(Generator):
    """A finished run, in its directory."""

    @property
    def results(self) -> dict[str, Any]:
        """``results.json``."""
        return RunDir(self.path).results()

    @property
    def privacy(self) -> dict[str, Any]:
        """``privacy.json``: what is proven for each client and adversary, beside what a paper's
        formula would claim."""
        self.results  # noqa: B018 (which repeat its ε)
        return RunDir(self.path).privacy()

    @property
    def epsilon(self) -> float:
        """What is proven against everybody, the server included, of any client; infinity where
        there is no bound."""
        return self.epsilons["server"]

    @property
    def epsilons(self) -> dict[str, float]:
        """What is proven by adversary, ``server`` and ``release``, of any client."""
        record = self.privacy
        values = {name: view["epsilon"] for name, view in record["views"].items()}
        none = bool(record["without_bound"])  # of some client
        return {n: math.inf if none or value is None else value for n, value in values.items()}


def train(settings: Settings | None = None, /, **more: Any) -> Run:
    """Trains, as ``fedgen train`` does; with ``resume=DIR`` goes on.

    Raises:
        FedgenError: for a mistake, or if too few clients answered.
        Interrupted: by Ctrl-C, after a checkpoint.
    """
    with _as_it_was():
        return Run(training.train(compose("config", _words(settings, more))))


def load(path: str | Path, device: str = "auto") -> Generator:
    """The generator of a run directory, or of a ``public`` folder that somebody handed over.

    Raises:
        FedgenError: if there is none, or it is not what the run wrote.
    """
    if not isinstance(path, str | PathLike) or "\0" in (place := os.fsdecode(path)):
        raise FedgenError("path", f"{path!r} is no path", "give a run directory, as text")
    found = Path(place)
    made = (Run if (found / "results.json").exists() else Generator)(found, device)
    made.classes  # noqa: B018 (loads it)
    return made


def account(settings: Settings | None = None, /, **more: Any) -> dict[str, Any]:
    """What a run with these settings would cost, before it runs: a row of ``fedgen account
    output=json``."""
    with _as_it_was():
        config = compose("account", _words(settings, {**more, "output": "json"}))
        [row] = json.loads(accounting.account(config))
        return dict(row)


def evaluate(
    images: NDArray[np.uint8],
    labels: NDArray[np.integer[Any]],
    settings: Settings | None = None,
    /,
    **more: Any,
) -> dict[str, Any]:
    """Judges samples that anybody made, as ``fedgen evaluate samples=FILE.npz data=NAME`` does.

    Args:
        images: (n, channels, height, width), (n, height, width) or (n, height, width, 3) uint8.
        labels: (n,).
        settings, more: ``data`` that they were made after, ``evaluation`` and more.

    Raises:
        FedgenError: for images that do not fit the data.
    """
    with _as_it_was(), tempfile.TemporaryDirectory() as place:
        file = Path(place) / "samples.npz"
        for name, each in (("images", images), ("labels", labels)):
            if np.asarray(each).dtype.hasobject:
                raise FedgenError(name, "is no array of numbers", "give one of uint8 or integers")
        np.savez(file, images=images, labels=labels)
        config = compose("evaluate", _words(settings, {**more, "samples": str(file)}))
        try:
            found, _ = evaluation.judge_samples(config)
        except FedgenError as error:  # nobody knows of this file
            words = [error.key, error.problem, error.remedy]
            key, problem, remedy = (each.replace(str(file), "what was given") for each in words)
            raise FedgenError(key, problem, remedy) from None
        return {name: value for name, value in found.items() if name != "samples"}


def audit(settings: Settings | None = None, /, **more: Any) -> auditing.Audited:
    """Attacks a client program and a run, as ``fedgen audit`` does.

    Raises:
        FedgenError: for a mistake, or if an attack refutes a proven epsilon.
    """
    with _as_it_was():
        return auditing.audit(compose("audit", _words(settings, more)))


def _words(settings: Settings | None, more: Settings) -> list[str]:
    """Settings as the command line has them."""
    if not isinstance(settings, Mapping | None):
        raise FedgenError("settings", "are no dictionary", 'e.g. {"method.ema": 0.9}')
    known = {**(settings or {}), **more}
    if "epsilon" in known:
        known["privacy.target_epsilon"] = known.pop("epsilon")
    return [f"{key}={in_grammar(value)}" for key, value in known.items()]


@contextmanager
def _as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    exact = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        # a device that nobody has used yet has no state to keep, and asking would begin it
        begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices=range(torch.cuda.device_count() if begun else 0)):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(exact, warn_only=warns)
