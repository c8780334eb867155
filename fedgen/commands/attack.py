"""Run ``fedgen attack``: membership inference on a run, compared with the proven bound.

The owner of the images runs it, because scores are compared with the true membership:

    likelihood ratio       retrains the generator with and without each of several canaries, and
                           attacks the weights and the samples of each repetition
    sample density,        compare training images with the test split, by the samples of the
    nearest sample         generator around them
    classifier confidence  compares them by the probability of their label, according to a
                           classifier trained on samples

Everything here accesses private images outside any mechanism: results stay with the owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, open_dict

from fedgen.config.compose import compose
from fedgen.data.canaries import Canaries, presence_in_repetition
from fedgen.errors import FedgenError, Interrupted
from fedgen.evaluation.membership import (
    CONFIDENCE,
    Floats,
    OperatingPoint,
    SampleClassifier,
    bandwidth,
    flat,
    log_likelihood_ratios,
    operating_point,
    proximity_by_label,
    roc,
)
from fedgen.evaluation.utility import Images, Labels
from fedgen.privacy.guarantee import FALSE_POSITIVE_RATES, Guarantee
from fedgen.randomness import RandomStreams
from fedgen.reporting.figures import roc_curves
from fedgen.reporting.headline import describe_attacks
from fedgen.reporting.privacy_statement import guarantee_of
from fedgen.reporting.progress import RunProgress
from fedgen.run import setup
from fedgen.run.generator import PublishedGenerator, load_generator
from fedgen.run.resume import check_runtime_is_local, open_run
from fedgen.run.setup import Setup
from fedgen.run.worker_pool import complete
from fedgen.storage.folders import make_folder

LIKELIHOOD_RATIOS = "likelihood ratio (weights)", "likelihood ratio (samples)"
_MAX_RECORDS = 5000  # limit on members, and on non-members, of attacks without repetitions
_MAX_WEIGHTS = 2000  # per tensor
_BATCH = 1000


@dataclass(frozen=True)
class Attack:
    """Scores of one attack and their membership, (rows, columns); see ``operating_point``."""

    name: str
    scores: Floats
    members: NDArray[np.bool_]

    def points(self, streams: RandomStreams) -> list[OperatingPoint]:
        """Return operating points at ``FALSE_POSITIVE_RATES``, without those that need more
        non-members."""
        points = [
            operating_point(self.scores, self.members, fpr, streams.at(self.name))
            for fpr in FALSE_POSITIVE_RATES
        ]
        return [point for point in points if point is not None]


def attack(config: DictConfig) -> str:
    """Attack a run; write ``attack.json`` and ``attack.png`` into its directory and return the
    results as text.

    Raises:
        FedgenError: for a run that cannot be attacked, or if an attack exceeds the proven bound.
    """
    if config.repetitions % 2:
        problem = f"{config.repetitions} is odd, and repetitions come in complementary pairs"
        raise FedgenError("repetitions", problem, f"take {config.repetitions + 1}")
    run_dir, trained, identity = open_run(Path(config.run), "run")
    if not run_dir.finished:
        remedy = f"finish it: fedgen train resume={run_dir.path}"
        raise FedgenError("run", f"{run_dir.path} is not finished", remedy)
    if trained.names.data == "public_facts":
        problem = "its images are at the sites, and the attack needs them"
        raise FedgenError("run", problem, "attack a simulation with the same settings")
    run_setup = setup.setup(trained)
    if identity["data"] != run_setup.dataset.digest:
        problem = f"{run_dir.path} was trained on different data"
        raise FedgenError("run", problem, "restore the original data set")
    run_dir.check_digests("run")
    generator = load_generator(run_dir.path, config.device)
    attacks = _attacks_on_run(config, run_setup, generator)
    if config.repetitions:
        config.canaries = config.canaries or run_setup.dataset.classes
        attacks = [*_attacks_on_repetitions(config, trained, run_dir.path), *attacks]
    privacy, proven = run_dir.privacy(), None
    if not privacy["without_bound"] and privacy["views"]["release"]["epsilon"] is not None:
        proven = guarantee_of(privacy["views"]["release"], privacy["delta"])
    streams = RandomStreams.from_seed(config.seed, "seeded").at("attack")
    points = {attack_.name: attack_.points(streams) for attack_ in attacks}
    result = _results(
        config, privacy["unit"], run_dir.results()["generator_sha256"], points, proven
    )
    run_dir.write("attack", result)
    curves = {attack_.name: roc(attack_.scores, attack_.members) for attack_ in attacks}
    roc_curves(curves, proven, run_dir.path / "attack.png")
    lines = [
        *describe_attacks(result),
        str(run_dir.path / "attack.json"),
        str(run_dir.path / "attack.png"),
    ]
    return _check_bound("\n".join(lines), result)


def _results(
    config: DictConfig,
    unit: str,
    sha256: str,
    points: Mapping[str, list[OperatingPoint]],
    proven: Guarantee | None,
) -> dict[str, Any]:
    return {
        "schema": 1,
        "generator_sha256": sha256,
        "unit": unit,
        "repetitions": config.repetitions,
        "canaries": config.canaries if config.repetitions else 0,
        "samples": config.samples,
        "confidence": CONFIDENCE,
        "attacks": {name: [asdict(point) for point in listed] for name, listed in points.items()},
        "proven": None
        if proven is None
        else [{"fpr": fpr, "tpr": proven.tpr(fpr)} for fpr in FALSE_POSITIVE_RATES],
    }


def _check_bound(text: str, results: Mapping[str, Any]) -> str:
    """Return ``text``; if an attack on the protected unit exceeds its bound, print it and raise
    FedgenError."""
    proven = {point["fpr"]: point["tpr"] for point in results["proven"] or ()}
    points = [point for name in LIKELIHOOD_RATIOS for point in results["attacks"].get(name, ())]
    if any(point["low"] > proven.get(point["fpr"], 1.0) for point in points):
        print(text)
        problem = "an attack exceeds the proven bound: the lower end of its interval is above it"
        remedy = (
            "attack the same settings with another seed; report a second one as SECURITY.md says"
        )
        raise FedgenError("run", problem, remedy)
    return text


# --- one run --------------------------------------------------------------------------------------


def _attacks_on_run(
    config: DictConfig, run_setup: Setup, generator: PublishedGenerator
) -> list[Attack]:
    """Return attacks that compare training images with the test split."""
    streams = RandomStreams.from_seed(config.seed, "seeded").at("attack")
    data, rows = run_setup.dataset, np.unique(np.concatenate(run_setup.shards))
    order = torch.randperm(len(rows), generator=streams.public("members")).numpy()
    rows = rows[order[: min(_MAX_RECORDS, len(data.test_labels))]]
    tested = slice(0, _MAX_RECORDS)
    images = np.concatenate([data.images[rows], data.test_images[tested]])
    labels = np.concatenate([data.labels[rows], data.test_labels[tested]])
    members = (np.arange(len(labels)) < len(rows))[:, None]
    samples = sample_images(generator, config.samples, np.arange(data.classes), streams)
    if len(np.unique(samples[1])) < 2:
        return []
    classifier = SampleClassifier(*samples, data.classes, streams)
    features = classifier.features(samples[0])
    scores = proximity_by_label(
        classifier.features(images), labels, features, samples[1], bandwidth(features)
    )
    confidence = classifier.probabilities(images)[np.arange(len(labels)), labels]
    return [
        Attack("sample density", scores[:, 1:2], members),
        Attack("nearest sample", scores[:, 2:3], members),
        Attack("classifier confidence", confidence[:, None], members),
    ]


def sample_images(
    generator: PublishedGenerator, count: int, labels: NDArray[np.int64], streams: RandomStreams
) -> tuple[Images, Labels]:
    """Return ``count`` samples, cycling through ``labels``; for a generator that publishes a fixed
    set, all its images. The same streams for several generators (common random numbers) remove
    sampling noise from their comparison."""
    server = generator.method.server
    if server.distinct_images is not None:
        wanted = np.arange(server.distinct_images) % generator.classes
    else:
        wanted = labels[np.arange(count) % len(labels)]
    parts = [
        server.sample(generator.weights, part, streams.at("samples", number)).cpu()
        for number, part in enumerate(torch.split(torch.from_numpy(wanted), _BATCH))
    ]
    return (torch.cat(parts) * 255).round().to(torch.uint8).numpy(), wanted


# --- repetitions ----------------------------------------------------------------------------------


def _attacks_on_repetitions(config: DictConfig, trained: DictConfig, run: Path) -> list[Attack]:
    """Train the repetitions, and return the likelihood ratios of all canaries in each."""
    place = run / "attack"
    make_folder(place)
    runs = {
        f"{number}": _repetition(trained, config.canaries, number, place / f"{number}")
        for number in range(config.repetitions)
    }
    try:
        canaries = setup.setup(runs["0"].copy()).canaries
    except FedgenError as error:
        if error.key == "audit.canaries":  # named differently here
            raise FedgenError("canaries", error.problem, error.remedy) from error
        raise
    assert canaries is not None
    try:
        failed = complete(runs, place, config.jobs, "repetitions")
    except Interrupted as error:
        raise Interrupted(f"{error}; repeat the command to resume") from error
    if failed:
        problem = f"{len(failed)} of {len(runs)} repetitions failed"
        raise FedgenError("repetitions", problem, f"see {failed[0]}")
    audit_streams = RandomStreams.from_seed(trained.seed, "seeded").at("audit")
    numbers = range(config.repetitions)
    members = np.stack(
        [presence_in_repetition(config.canaries, number, audit_streams) for number in numbers]
    )
    described = list(_statistics(config, runs, canaries))
    weights, samples = (np.stack(parts) for parts in zip(*described, strict=True))
    return [
        Attack(name, log_likelihood_ratios(statistics, members), members)
        for name, statistics in zip(LIKELIHOOD_RATIOS, (weights[:, None], samples), strict=True)
    ]


def _repetition(trained: DictConfig, canaries: int, number: int, place: Path) -> DictConfig:
    """Return the settings of a repetition of a run."""
    check_runtime_is_local(trained, "attack a run with a local runtime, not one at {}")
    config, quiet = trained.copy(), compose("config", ["evaluation=none", "logger=none"])
    with open_dict(config):
        config.audit = {
            "releases": 0,
            "noise_multiplier": None,
            "canaries": canaries,
            "confidence": CONFIDENCE,
            "repetition": number,
        }
    config.evaluation, config.logger, config.evaluate_every = quiet.evaluation, quiet.logger, 0
    config.names.evaluation = config.names.logger = "none"
    config.runtime.faults = quiet.runtime.faults
    config.privacy.noise, config.privacy.budget_epsilon = "seeded", None
    config.run_dir = str(place)
    return config


def _statistics(
    config: DictConfig, runs: Mapping[str, DictConfig], canaries: Canaries
) -> Iterator[tuple[Floats, Floats]]:
    """Yield the weights of each repetition, and the proximity of its samples to the records of each
    canary, by pixels and by learned features, (canaries, statistics). The classifier and the kernel
    bandwidths are fitted to the samples of the first repetition."""
    streams = RandomStreams.from_seed(config.seed, "seeded").at("attack")
    records = np.concatenate([shard.images.numpy() for shard in canaries.included])
    labels = np.concatenate([shard.labels.numpy() for shard in canaries.included])
    owner = np.repeat(np.arange(len(canaries.included)), [len(s) for s in canaries.included])
    classifier, widths = None, list[float]()
    with RunProgress() as progress:
        for number, repetition in enumerate(runs.values()):
            generator = load_generator(Path(repetition.run_dir), config.device)
            images, image_labels = sample_images(
                generator, config.samples, np.unique(labels), streams
            )
            if classifier is None and len(np.unique(image_labels)) > 1:
                classifier = SampleClassifier(images, image_labels, generator.classes, streams)
            maps = [flat, *([classifier.features] if classifier else [])]
            spaces = [(feature_map(records), feature_map(images)) for feature_map in maps]
            if not number:
                widths = [bandwidth(samples) for _, samples in spaces]
            statistics = np.concatenate(
                [
                    proximity_by_label(points, labels, samples, image_labels, width)
                    for (points, samples), width in zip(spaces, widths, strict=True)
                ],
                axis=1,
            )
            means = np.zeros((len(canaries.included), statistics.shape[1]))
            np.add.at(means, owner, statistics)
            progress.show("statistics", number + 1, len(runs), "")
            yield _selected_weights(generator, streams), means / np.bincount(owner)[:, None]


def _selected_weights(generator: PublishedGenerator, streams: RandomStreams) -> Floats:
    """Return at most ``_MAX_WEIGHTS`` randomly selected weights of each tensor."""
    parts = []
    for name, tensor in sorted(generator.weights.items()):
        values = tensor.flatten().double().cpu()
        order = torch.randperm(len(values), generator=streams.public("weights", name))
        parts.append(values[order[:_MAX_WEIGHTS]].numpy())
    return np.concatenate(parts)
