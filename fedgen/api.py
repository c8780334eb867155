"""Run the commands from Python::

    import fedgen

    run = fedgen.train(method="dp_merf_small", data="digits", epsilon=1.0, rounds=500)
    run.epsilon, run.samples(100, labels=[3, 5]).images, run.results["gen2real"]
    fedgen.load("runs/mine/public").samples(1000)

Settings are those of the command line. Keywords are groups and settings without a dot; a dictionary
in front may contain any: ``fedgen.train({"method.ema": 0.9, "privacy.delta": 1e-6},
data="mnist")``. ``epsilon`` is short for ``privacy.target_epsilon``. A mistake raises
``FedgenError`` with the message of the command line.

A call restores torch's threads and its choice of algorithms. Importing this module disables TF32
for convolutions permanently: on a GPU, its rounding exceeds what the proofs allow.
"""

from __future__ import annotations

import base64
import glob
import html
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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedgen.commands import account as accounting
from fedgen.commands import audit as auditing
from fedgen.commands import evaluate as evaluation
from fedgen.commands import release as releasing
from fedgen.commands import report as reporting
from fedgen.config.compose import compose
from fedgen.config.overrides import to_override_value
from fedgen.data.datasets import as_images
from fedgen.errors import FedgenError
from fedgen.privacy.guarantee import Guarantee, of_pair
from fedgen.randomness import RandomStreams
from fedgen.reporting.privacy_statement import guarantee_of
from fedgen.reporting.progress import format_epsilon
from fedgen.run import train as training
from fedgen.run.generator import PublishedGenerator, draw_samples, labels_of, load_generator
from fedgen.storage.run_dir import RunDir

if TYPE_CHECKING:
    import pandas

Settings = Mapping[str, Any]


class Samples(NamedTuple):
    """Images (n, channels, height, width) uint8, and their labels (n,)."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Generator:
    """A published generator.

    path: a finished run, its ``public`` folder, or a package of ``fedgen release``.
    device: device for sampling.
    """

    path: Path
    device: str = "auto"

    @cached_property
    def _loaded(self) -> PublishedGenerator:
        return load_generator(self.path, self.device)

    @property
    def classes(self) -> int:
        """Number of labels."""
        return self._loaded.classes

    @property
    def labels(self) -> list[str] | None:
        """Names of the labels, if they were published."""
        return self._loaded.labels

    def samples(
        self,
        n: int | np.integer[Any],
        labels: Sequence[int | str] | NDArray[np.integer[Any]] | None = None,
        seed: int | np.integer[Any] = 0,
    ) -> Samples:
        """Return ``n`` images of ``labels`` (numbers or names), or of all labels, uniformly, as
        ``fedgen sample`` does.

        Raises:
            FedgenError: for unknown labels, more images than a set has, or an invalid seed.
        """
        with _restored_environment():
            published = self._loaded
            streams = RandomStreams.from_seed(seed, "seeded").at("sample")
            listed = labels.tolist() if isinstance(labels, np.ndarray) else labels
            image_labels = labels_of(published, n, listed, streams)
            images = draw_samples(published.method, published.weights, image_labels, streams)
            return Samples(images, image_labels.numpy())

    def classify(self, images: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Return labels (n,) of images (n, channels, height, width), (n, height, width) or (n,
        height, width, 3) uint8, by the private classifier that was published with the generator.

        Raises:
            FedgenError: if there is none, or for images of another size.
        """
        with _restored_environment():
            classify = self._loaded.method.server.classify
            if classify is None:
                remedy = "train one: method=mixture method.private_classifier=ridge"
                raise FedgenError("run", "published no classifier", remedy)
            batch, shape = as_images("what was given", np.asarray(images)), self._loaded.shape
            if batch.shape[1:] != shape:
                problem = f"are of shape {list(batch.shape[1:])}, and it knows {list(shape)}"
                raise FedgenError("images", problem, "bring them to this size")
            predicted = classify(self._loaded.weights, torch.from_numpy(batch).float() / 255)
            return np.asarray(predicted.cpu().numpy())


@dataclass(frozen=True)
class Run(Generator):
    """A finished run, in its directory."""

    @property
    def results(self) -> dict[str, Any]:
        """``results.json``."""
        return RunDir(self.path).results()

    @property
    def privacy(self) -> dict[str, Any]:
        """Content of ``privacy.json``: the proven ε per client and adversary, and the claim of the
        paper's formula."""
        self.results  # noqa: B018 (which repeat its ε)
        return RunDir(self.path).privacy()

    @property
    def epsilon(self) -> float:
        """Proven ε of any client against everyone, including the server; infinity without a
        bound."""
        return self.epsilons["server"]

    @property
    def epsilons(self) -> dict[str, float]:
        """Proven ε of any client by adversary, ``server`` and ``release``."""
        record = self.privacy
        values = {name: view["epsilon"] for name, view in record["views"].items()}
        none = bool(record["without_bound"])  # for some client
        return {n: math.inf if none or value is None else value for n, value in values.items()}

    @property
    def guarantee(self) -> Guarantee:
        """Trade-off curve against everyone, including the server: ``run.guarantee.tpr(0.01)`` is
        the largest true positive rate of a membership attack on any client's data at 1 % false
        positives. See also ``fpr``, ``advantage``, ``posterior`` and ``mu``."""
        return self.guarantees["server"]

    @property
    def guarantees(self) -> dict[str, Guarantee]:
        """Trade-off curves by adversary, ``server`` and ``release``."""
        record, epsilons = self.privacy, self.epsilons
        return {
            name: guarantee_of(view, record["delta"])
            if math.isfinite(epsilons[name])
            else of_pair(math.inf, record["delta"])
            for name, view in record["views"].items()
        }

    def _repr_html_(self) -> str:
        """Return a summary for notebooks: ε, a picture of samples, and the files."""
        record, privacy = self.results, self.privacy
        rows = [
            f"<tr><td>{name}</td><td>{format_epsilon(None if math.isinf(e) else e)}</td></tr>"
            for name, e in self.epsilons.items()
        ]
        title = html.escape(f"{record['method']} on {record['data']}")
        unit = html.escape(f"ε per {privacy['unit']} at δ = {privacy['delta']:g} against")
        parts = [
            f"<b>{title}</b>",
            f"<table><tr><th>{unit}</th><th></th></tr>{''.join(rows)}</table>",
        ]
        if (picture := self.path / "public" / "samples.png").is_file():
            encoded = base64.b64encode(picture.read_bytes()).decode()
            parts.append(f'<img alt="samples" src="data:image/png;base64,{encoded}">')
        parts.append(f"<p><code>{html.escape(str(self.path))}</code></p>")
        return f"<div>{''.join(parts)}</div>"


def train(settings: Settings | None = None, /, **more: Any) -> Run:
    """Train as ``fedgen train`` does; ``resume=DIR`` resumes.

    Raises:
        FedgenError: for a mistake, or too few responses.
        Interrupted: by Ctrl-C, after a checkpoint.
    """
    with _restored_environment():
        return Run(training.train(compose("config", _overrides(settings, more))))


def load(path: str | Path, device: str = "auto") -> Generator:
    """Return the generator of a run directory, or of an untrusted ``public`` folder or package.

    Raises:
        FedgenError: if there is none, or it differs from what the run wrote.
    """
    if not isinstance(path, str | PathLike) or "\0" in (place := os.fsdecode(path)):
        raise FedgenError("path", f"{path!r} is no path", "give a run directory, as text")
    directory = Path(place)
    generator = (Run if (directory / "results.json").exists() else Generator)(directory, device)
    generator.classes  # noqa: B018 (loads it)
    return generator


def account(settings: Settings | None = None, /, **more: Any) -> dict[str, Any]:
    """Return the cost of a run with these settings before it starts: a row of ``fedgen account
    output=json``."""
    with _restored_environment():
        config = compose("account", _overrides(settings, {**more, "output": "json"}))
        [row] = json.loads(accounting.account(config))
        return dict(row)


def evaluate(
    images: NDArray[np.uint8],
    labels: NDArray[np.integer[Any]],
    settings: Settings | None = None,
    /,
    **more: Any,
) -> dict[str, Any]:
    """Evaluate any samples, as ``fedgen evaluate samples=FILE.npz data=NAME`` does.

    Args:
        images: (n, channels, height, width), (n, height, width) or (n, height, width, 3) uint8.
        labels: (n,).
        settings, more: the ``data`` that they imitate, ``evaluation``, and other settings.

    Raises:
        FedgenError: for images that do not fit the data.
    """
    with _restored_environment(), tempfile.TemporaryDirectory() as place:
        file = Path(place) / "samples.npz"
        for name, array in (("images", images), ("labels", labels)):
            if np.asarray(array).dtype.hasobject:
                raise FedgenError(name, "is no array of numbers", "give one of uint8 or integers")
        np.savez(file, images=images, labels=labels)
        config = compose("evaluate", _overrides(settings, {**more, "samples": str(file)}))
        try:
            results, _ = evaluation.judge_samples(config)
        except FedgenError as error:  # the file is not visible to the caller
            words = [error.key, error.problem, error.remedy]
            key, problem, remedy = (word.replace(str(file), "what was given") for word in words)
            raise FedgenError(key, problem, remedy) from None
        return {name: value for name, value in results.items() if name != "samples"}


def results(pattern: str) -> pandas.DataFrame:
    """Return a row for each trained run: folder, method, data, seed, ε by adversary, and the
    accuracy of each classifier trained on samples (``gen2real.NAME``).

    Args:
        pattern: run directories, e.g. ``runs/*``; others are ignored.

    Raises:
        FedgenError: if there is none, or pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise FedgenError("pandas", "is not installed", "pip install pandas") from error
    places = map(Path, sorted(glob.glob(os.path.expanduser(pattern))))  # noqa: PTH111, PTH207
    runs = [Run(place) for place in places if RunDir(place).trained]
    if not runs:
        raise FedgenError("pattern", f"{pattern} matches no trained run", "e.g. runs/*")
    rows = []
    for run in runs:
        record = run.results
        row = {"run": str(run.path), **{key: record[key] for key in ("method", "data", "seed")}}
        row |= {f"epsilon.{adversary}": value for adversary, value in run.epsilons.items()}
        scores = record["gen2real"].items()
        rows.append(row | {f"gen2real.{name}": score["mean"] for name, score in scores})
    return pandas.DataFrame(rows)


def report(
    runs: str | Path | Sequence[str | Path],
    out: str | Path,
    settings: Settings | None = None,
    /,
    **more: Any,
) -> Path:
    """Write a page about runs, as ``fedgen report`` does, and return its path."""
    runs = [runs] if isinstance(runs, str | Path) else list(runs)
    return reporting.report(
        compose("report", _overrides(settings, {**more, "runs": runs, "out": out}))
    )


def release(
    run: str | Path, out: str | Path, settings: Settings | None = None, /, **more: Any
) -> Path:
    """Train again with secret noise and pack a ZIP file for publication, as ``fedgen release``
    does; return the file.

    Args:
        run: directory of the rehearsal.
        settings, more: other settings of the command, e.g. ``{"about.file": "about.yaml"}``.

    Raises:
        FedgenError: for a run that cannot be released.
    """
    with _restored_environment():
        config = compose("release", _overrides(settings, {**more, "run": run, "out": out}))
        return releasing.release(config)[1]


def audit(settings: Settings | None = None, /, **more: Any) -> auditing.AuditResult:
    """Attack a client program and a run, as ``fedgen audit`` does.

    Raises:
        FedgenError: for a mistake, or if an attack refutes a proven ε.
    """
    with _restored_environment():
        return auditing.audit(compose("audit", _overrides(settings, more)))


def _overrides(settings: Settings | None, more: Settings) -> list[str]:
    """Return settings as overrides of the command line."""
    if not isinstance(settings, Mapping | None):
        raise FedgenError("settings", "must be a dictionary", 'e.g. {"method.ema": 0.9}')
    merged = {**(settings or {}), **more}
    if "epsilon" in merged:
        merged["privacy.target_epsilon"] = merged.pop("epsilon")
    return [f"{key}={to_override_value(value)}" for key, value in merged.items()]


@contextmanager
def _restored_environment() -> Iterator[None]:
    threads = torch.get_num_threads()
    exact = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        # an unused device has no state to keep, and asking would initialize it
        begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices=range(torch.cuda.device_count() if begun else 0)):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(exact, warn_only=warns)
