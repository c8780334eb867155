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

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, open_dict

from fedgen.config.compose import compose
from fedgen.data.canaries import Canaries, presence_in_repetition, units_of
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
    true_positive_rates,
)
from fedgen.evaluation.utility import Images, Labels
from fedgen.privacy.guarantee import FALSE_POSITIVE_RATES, Guarantee
from fedgen.randomness import RandomStreams
from fedgen.reporting.figures import roc_curves
from fedgen.reporting.headline import describe_attacks
from fedgen.reporting.privacy_statement import guarantee_of
from fedgen.reporting.progress import RunProgress
from fedgen.run import setup
from fedgen.run.generator import PublishedGenerator, draw_samples, load_generator
from fedgen.run.resume import check_runtime_is_local, open_run
from fedgen.run.setup import Setup
from fedgen.run.worker_pool import complete
from fedgen.storage.folders import make_folder
from fedgen.storage.run_dir import RunDir

LIKELIHOOD_RATIOS = "likelihood ratio (weights)", "likelihood ratio (samples)"
_MAX_RECORDS = 5000  # limit on members, and on non-members, of attacks without repetitions
_MAX_WEIGHTS = 2000  # per tensor
_FALSE_ALARM = 0.001  # limit on the probability that a correct program is refuted
_CURVE_RATES = np.geomspace(1e-3, 1, 61).tolist()


@dataclass(frozen=True)
class Attack:
    """Scores of one attack and their membership, (rows, columns); see ``operating_point``."""

    name: str
    scores: Floats
    members: NDArray[np.bool_]

    def points(
        self, streams: RandomStreams, confidence: float = CONFIDENCE
    ) -> list[OperatingPoint]:
        """Return operating points at ``FALSE_POSITIVE_RATES``, without those that need more
        non-members.

        Args:
            confidence: of each interval.
        """
        points = [
            operating_point(self.scores, self.members, fpr, streams.at(self.name), confidence)
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
    if trained.get("audit") is not None:
        problem = f"{run_dir.path} was an audit, with canaries among the images"
        raise FedgenError("run", problem, "attack a run of fedgen train")
    if trained.get("score") is not None and config.repetitions:
        problem = f"{run_dir.path} was selected by fedgen tune, and repetitions do not select"
        raise FedgenError("run", problem, "set repetitions=0, or attack a run of fedgen train")
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
    samples = sample_images(generator, config.samples, _streams(config))
    classifier = None
    if len(np.unique(samples[1])) > 1:
        classifier = SampleClassifier(*samples, generator.classes, _streams(config))
    attacks = []
    if config.repetitions:
        if (ended := run_dir.results()["rounds"]) < trained.rounds:
            print(f"the run ended after {ended} of {trained.rounds} rounds; repetitions train all")
        units = units_of(run_setup.dataset, run_setup.shards, run_setup.method.plan.unit)
        config.canaries = config.canaries or min(run_setup.dataset.classes, len(units))
        _check_size(config)
        attacks += _attacks_on_repetitions(config, trained, run_dir.path, classifier)
    if classifier is not None:
        attacks += _attacks_on_run(config, run_setup, samples, classifier)
    privacy, proven = run_dir.privacy(), None
    if not privacy["without_bound"] and privacy["views"]["release"]["epsilon"] is not None:
        proven = guarantee_of(privacy["views"]["release"], privacy["delta"])
    result = _results(config, run_dir, attacks, proven)
    run_dir.write("attack", result)
    roc_curves({"": result["curves"]}, run_dir.path / "attack.png")
    print("\n".join(describe_attacks(result)))
    check_bound(attacks, proven, _streams(config))
    return "\n".join(str(run_dir.path / name) for name in ("attack.json", "attack.png"))


def _streams(config: DictConfig) -> RandomStreams:
    return RandomStreams.from_seed(config.seed, "seeded").at("attack")


def _check_size(config: DictConfig) -> None:
    """Raise FedgenError for too few repetitions to measure the larger false positive rate."""
    least = math.ceil(1 / FALSE_POSITIVE_RATES[-1]) - 1
    if config.repetitions * config.canaries // 2 < least:
        repetitions = 2 * math.ceil(least / config.canaries)
        problem = (
            f"{config.repetitions} with {config.canaries} canaries are too few to measure a false "
            f"positive rate of {100 * FALSE_POSITIVE_RATES[-1]:g} %"
        )
        raise FedgenError("repetitions", problem, f"take {repetitions} or more")


def _results(
    config: DictConfig, run_dir: RunDir, attacks: Sequence[Attack], proven: Guarantee | None
) -> dict[str, Any]:
    """Return the content of ``attack.json``."""
    streams = _streams(config)
    return {
        "schema": 1,
        "generator_sha256": run_dir.results()["generator_sha256"],
        "unit": run_dir.privacy()["unit"],
        "seed": config.seed,
        "repetitions": config.repetitions,
        "canaries": config.canaries if config.repetitions else 0,
        "samples": config.samples,
        "confidence": CONFIDENCE,
        "attacks": {
            attack_.name: [asdict(point) for point in attack_.points(streams)]
            for attack_ in attacks
        },
        "proven": None
        if proven is None
        else [{"fpr": fpr, "tpr": proven.tpr(fpr)} for fpr in FALSE_POSITIVE_RATES],
        "curves": {
            "fpr": _CURVE_RATES,
            "attacks": {
                attack_.name: true_positive_rates(attack_.scores, attack_.members, _CURVE_RATES)
                for attack_ in attacks
            },
            "proven": None if proven is None else [proven.tpr(fpr) for fpr in _CURVE_RATES],
        },
    }


def check_bound(
    attacks: Sequence[Attack], proven: Guarantee | None, streams: RandomStreams
) -> None:
    """Raise FedgenError if an attack on the protected unit exceeds its bound. Attacks on a correct
    program do so with probability at most ``_FALSE_ALARM``, if the scores within a repetition are
    independent."""
    on_unit = [attack_ for attack_ in attacks if attack_.name in LIKELIHOOD_RATIOS]
    tests = len(LIKELIHOOD_RATIOS) * len(FALSE_POSITIVE_RATES)
    for attack_ in on_unit if proven is not None else ():
        assert proven is not None
        for point in attack_.points(streams, 1 - 2 * _FALSE_ALARM / tests):
            if point.low > proven.tpr(point.fpr):
                problem = f"{attack_.name} exceeds the proven bound"
                remedy = (
                    "attack the run with another seed=N, which trains other repetitions; report a "
                    "second one as SECURITY.md says"
                )
                raise FedgenError("run", problem, remedy)


# --- one run --------------------------------------------------------------------------------------


def _attacks_on_run(
    config: DictConfig,
    run_setup: Setup,
    samples: tuple[Images, Labels],
    classifier: SampleClassifier,
) -> list[Attack]:
    """Return attacks that compare training images with the test split, both chosen at random."""
    streams, data = _streams(config), run_setup.dataset
    trained = np.unique(np.concatenate(run_setup.shards))
    count = min(_MAX_RECORDS, len(trained), len(data.test_labels))
    chosen, tested = (
        torch.randperm(total, generator=streams.public(name)).numpy()[:count]
        for name, total in (("members", len(trained)), ("non-members", len(data.test_labels)))
    )
    images = np.concatenate([data.images[trained[chosen]], data.test_images[tested]])
    labels = np.concatenate([data.labels[trained[chosen]], data.test_labels[tested]])
    members = (np.arange(2 * count) < count)[:, None]
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
    generator: PublishedGenerator, count: int, streams: RandomStreams
) -> tuple[Images, Labels]:
    """Return samples with as many of each label; for a generator that publishes a fixed set, all
    its images. The same streams for several generators (common random numbers) remove sampling
    noise from their comparison."""
    total = generator.method.server.distinct_images or count
    labels = torch.arange(total) % generator.classes
    images = draw_samples(generator.method, generator.weights, labels, streams.at("samples"))
    return images, labels.numpy()


# --- repetitions ----------------------------------------------------------------------------------


def _attacks_on_repetitions(
    config: DictConfig, trained: DictConfig, run: Path, classifier: SampleClassifier | None
) -> list[Attack]:
    """Train the repetitions, and return the likelihood ratios of all canaries in each."""
    check_runtime_is_local(trained, "attack a run with a local runtime, not one at {}")
    place = run / "attack" / f"seed{config.seed}_canaries{config.canaries}"
    try:
        make_folder(place)
    except FedgenError as error:
        raise FedgenError("run", error.problem, "make room for this folder") from error
    runs = {
        f"{number}": _repetition(trained, config, number, place / f"{number}")
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
    except FedgenError as error:
        if error.key == "run_dir":
            raise FedgenError("run", error.problem, f"move {place} away") from error
        raise
    except Interrupted as error:
        raise Interrupted(f"{error}; repeat the command to resume") from error
    if failed:
        problem = f"{len(failed)} of {len(runs)} repetitions failed"
        raise FedgenError("repetitions", problem, f"see {failed[0]}")
    audit_streams = setup.canary_streams(runs["0"])
    numbers = range(config.repetitions)
    members = np.stack(
        [presence_in_repetition(config.canaries, number, audit_streams) for number in numbers]
    )
    described = list(_statistics(config, runs, canaries, classifier))
    weights, samples = (np.stack(parts) for parts in zip(*described, strict=True))
    return [
        Attack(name, log_likelihood_ratios(statistics, members), members)
        for name, statistics in zip(LIKELIHOOD_RATIOS, (weights[:, None], samples), strict=True)
    ]


def _repetition(
    trained: DictConfig, attack_config: DictConfig, number: int, place: Path
) -> DictConfig:
    """Return the settings of a repetition of a run."""
    config, quiet = trained.copy(), compose("config", ["evaluation=none", "logger=none"])
    with open_dict(config):
        config.audit = {
            "releases": 0,
            "noise_multiplier": None,
            "canaries": attack_config.canaries,
            "confidence": CONFIDENCE,
            "repetition": number,
            "seed": attack_config.seed,
        }
    config.evaluation, config.logger, config.evaluate_every = quiet.evaluation, quiet.logger, 0
    config.names.evaluation = config.names.logger = "none"
    config.runtime.faults = quiet.runtime.faults
    config.privacy.noise, config.privacy.budget_epsilon = "seeded", None
    config.run_dir = str(place)
    return config


def _statistics(
    config: DictConfig,
    runs: Mapping[str, DictConfig],
    canaries: Canaries,
    classifier: SampleClassifier | None,
) -> Iterator[tuple[Floats, Floats]]:
    """Yield the weights of each repetition, and the proximity of its samples to the records of each
    canary, by pixels and in the features of a classifier, (canaries, statistics). Kernel bandwidths
    are those of the first repetition."""
    streams = _streams(config)
    records = np.concatenate([shard.images.numpy() for shard in canaries.included])
    labels = np.concatenate([shard.labels.numpy() for shard in canaries.included])
    owner = np.repeat(np.arange(len(canaries.included)), [len(s) for s in canaries.included])
    maps, widths = [flat, *([classifier.features] if classifier else [])], list[float]()
    with RunProgress() as progress:
        for number, repetition in enumerate(runs.values()):
            generator = load_generator(Path(repetition.run_dir), config.device)
            images, image_labels = sample_images(generator, config.samples, streams)
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
