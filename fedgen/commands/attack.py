"""Run ``fedgen attack``: membership inference on a published generator, beside the proven bound.

The owner of the images attacks a finished run:

    likelihood ratio  repeats the run with and without each of several canaries, and compares the
                      weights of generators, and their samples
    density, nearest  compares training images with the test split, by samples around them
    label             compares how well a classifier of samples predicts their labels

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
from fedgen.data.canaries import Canaries, presence
from fedgen.errors import FedgenError, Interrupted
from fedgen.evaluation.membership import (
    CONFIDENCE,
    Floats,
    OperatingPoint,
    SampleClassifier,
    bandwidth,
    flat,
    likelihood_ratios,
    operating_point,
    proximity_by_label,
    roc,
)
from fedgen.evaluation.utility import Images, Labels
from fedgen.privacy.guarantee import FALSE_POSITIVE_RATES, Guarantee
from fedgen.randomness import RandomStreams
from fedgen.reporting.figures import attack_curves
from fedgen.reporting.headline import describe_attacks
from fedgen.reporting.privacy_statement import guarantee_of
from fedgen.reporting.progress import RunProgress
from fedgen.run import setup
from fedgen.run.generator import PublishedGenerator, load_generator
from fedgen.run.resume import check_runtime_is_local, open_run
from fedgen.run.setup import Setup
from fedgen.run.worker_pool import complete
from fedgen.storage.folders import make_folder

LIKELIHOOD_RATIOS = "likelihood ratio of weights", "likelihood ratio of samples"
_MAX_RECORDS = 5000  # of each side, for attacks on one run
_MAX_WEIGHTS = 2000
_BATCH = 1000


@dataclass(frozen=True)
class Attack:
    """Scores of one attack, (rows, columns), of which rows are independent, and which of them are
    of members."""

    name: str
    scores: Floats
    present: NDArray[np.bool_]

    def points(self, streams: RandomStreams) -> list[OperatingPoint]:
        """Return its points at the stated false positive rates that it can show."""
        points = [
            operating_point(self.scores, self.present, fpr, streams.at(self.name))
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
        raise FedgenError("repetitions", "must be even: they come in pairs", "add one")
    run_dir, trained, identity = open_run(Path(config.run), "run")
    if not run_dir.finished:
        remedy = f"finish it: fedgen train resume={run_dir.path}"
        raise FedgenError("run", f"{run_dir.path} is not finished", remedy)
    if trained.names.data == "public_facts":
        problem = "its images are at the sites, and the attack needs them"
        raise FedgenError("run", problem, "attack a simulation with the same settings")
    ready = setup.setup(trained)
    if identity["data"] != ready.dataset.digest:
        problem = f"{run_dir.path} was trained on different data"
        raise FedgenError("run", problem, "restore the original data set")
    run_dir.check_digests("run")
    generator = load_generator(run_dir.path, config.device)
    attacks = _attacks_on_run(config, ready, generator)
    if config.repetitions:
        config.canaries = config.canaries or ready.dataset.classes
        attacks = [*_attacks_on_repetitions(config, trained, run_dir.path), *attacks]
    record, proven = run_dir.privacy(), None
    if not record["without_bound"] and record["views"]["release"]["epsilon"] is not None:
        proven = guarantee_of(record["views"]["release"], record["delta"])
    streams = RandomStreams.from_seed(config.seed, "seeded").at("attack")
    points = {each.name: each.points(streams) for each in attacks}
    result = _record(config, record["unit"], run_dir.results()["generator_sha256"], points, proven)
    run_dir.write("attack", result)
    curves = {each.name: roc(each.scores, each.present) for each in attacks}
    attack_curves(curves, proven, run_dir.path / "attack.png")
    lines = [
        *describe_attacks(result),
        str(run_dir.path / "attack.json"),
        str(run_dir.path / "attack.png"),
    ]
    return _check("\n".join(lines), result)


def _record(
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
        "attacks": {name: [asdict(point) for point in each] for name, each in points.items()},
        "proven": None
        if proven is None
        else [{"fpr": fpr, "tpr": proven.tpr(fpr)} for fpr in FALSE_POSITIVE_RATES],
    }


def _check(text: str, record: Mapping[str, Any]) -> str:
    """Return the text; raise FedgenError if an attack on the protected unit exceeds its bound."""
    proven = {point["fpr"]: point["tpr"] for point in record["proven"] or ()}
    points = [point for name in LIKELIHOOD_RATIOS for point in record["attacks"].get(name, ())]
    if any(point["low"] > proven.get(point["fpr"], 1.0) for point in points):
        print(text)
        problem = (
            f"the interval of an attack ({record['confidence']:.0%}) is above the proven bound"
        )
        remedy = (
            "repeat it with another seed and more repetitions; report a second as SECURITY.md says"
        )
        raise FedgenError("attack", problem, remedy)
    return text


# --- one run --------------------------------------------------------------------------------------


def _attacks_on_run(
    config: DictConfig, ready: Setup, generator: PublishedGenerator
) -> list[Attack]:
    """Return attacks that compare training images with the test split."""
    streams = RandomStreams.from_seed(config.seed, "seeded").at("attack")
    data, rows = ready.dataset, np.unique(np.concatenate(ready.shards))
    order = torch.randperm(len(rows), generator=streams.public("members")).numpy()
    rows = rows[order[: min(_MAX_RECORDS, len(data.test_labels))]]
    others = slice(0, _MAX_RECORDS)
    images = np.concatenate([data.images[rows], data.test_images[others]])
    labels = np.concatenate([data.labels[rows], data.test_labels[others]])
    present = (np.arange(len(labels)) < len(rows))[:, None]
    samples = draw(generator, config.samples, np.arange(data.classes), streams)
    if len(np.unique(samples[1])) < 2:
        return []
    classifier = SampleClassifier(*samples, data.classes, streams)
    features = classifier.features(samples[0])
    scores = proximity_by_label(
        classifier.features(images), labels, features, samples[1], bandwidth(features)
    )
    chosen = classifier.probabilities(images)[np.arange(len(labels)), labels]
    return [
        Attack("density of samples in learned features", scores[:, 1:2], present),
        Attack("nearest sample in learned features", scores[:, 2:3], present),
        Attack("label predicted from the image", chosen[:, None], present),
    ]


def draw(
    generator: PublishedGenerator, count: int, labels: NDArray[np.int64], streams: RandomStreams
) -> tuple[Images, Labels]:
    """Return samples of these labels, in turn; all images of a generator that publishes a set. The
    same streams for several generators of one run show how they differ, without sampling noise."""
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
        raise Interrupted(f"{error}; the same command continues") from error
    if failed:
        problem = f"{len(failed)} of {len(runs)} repetitions failed"
        raise FedgenError("repetitions", problem, f"see {failed[0]}")
    audit_streams = RandomStreams.from_seed(trained.seed, "seeded").at("audit")
    numbers = range(config.repetitions)
    present = np.stack([presence(config.canaries, number, audit_streams) for number in numbers])
    described = list(_statistics(config, runs, canaries))
    weights, samples = (np.stack(each) for each in zip(*described, strict=True))
    return [
        Attack(name, likelihood_ratios(statistics, present), present)
        for name, statistics in zip(LIKELIHOOD_RATIOS, (weights[:, None], samples), strict=True)
    ]


def _repetition(trained: DictConfig, canaries: int, number: int, place: Path) -> DictConfig:
    """Return the settings of a repetition of a run."""
    check_runtime_is_local(trained, "repetitions of this run need its cluster: {}")
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
    canary, by pixels and by learned features, (canaries, statistics). The classifier and the widths
    of kernels are those of the first repetition."""
    streams = RandomStreams.from_seed(config.seed, "seeded").at("attack")
    images = np.concatenate([shard.images.numpy() for shard in canaries.included])
    labels = np.concatenate([shard.labels.numpy() for shard in canaries.included])
    owner = np.repeat(np.arange(len(canaries.included)), [len(s) for s in canaries.included])
    classifier, widths = None, list[float]()
    with RunProgress() as progress:
        for number, each in enumerate(runs.values()):
            generator = load_generator(Path(each.run_dir), config.device)
            drawn, drawn_labels = draw(generator, config.samples, np.unique(labels), streams)
            if classifier is None and len(np.unique(drawn_labels)) > 1:
                classifier = SampleClassifier(drawn, drawn_labels, generator.classes, streams)
            maps = [flat, *([classifier.features] if classifier else [])]
            spaces = [(each_map(images), each_map(drawn)) for each_map in maps]
            if not number:
                widths = [bandwidth(samples) for _, samples in spaces]
            statistics = np.concatenate(
                [
                    proximity_by_label(records, labels, samples, drawn_labels, width)
                    for (records, samples), width in zip(spaces, widths, strict=True)
                ],
                axis=1,
            )
            means = np.zeros((len(canaries.included), statistics.shape[1]))
            np.add.at(means, owner, statistics)
            progress.show("statistics", number + 1, len(runs), "")
            yield _weights(generator, streams), means / np.bincount(owner)[:, None]


def _weights(generator: PublishedGenerator, streams: RandomStreams) -> Floats:
    """Return the weights of a generator, of each tensor at most ``_MAX_WEIGHTS``, at random."""
    parts = []
    for name, tensor in sorted(generator.weights.items()):
        values = tensor.flatten().double().cpu()
        order = torch.randperm(len(values), generator=streams.public("weights", name))
        parts.append(values[order[:_MAX_WEIGHTS]].numpy())
    return np.concatenate(parts)
