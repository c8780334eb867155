"""Run ``fedgen check``: test whether a method satisfies the contract of all methods.

It trains short runs in a temporary folder and attacks the client program. The output also lists
what cannot be tested: only the author of a method knows its worst neighbours.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, open_dict
from torch import Tensor

from fedgen.commands.audit import check_audit
from fedgen.config.compose import compose
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError, Interrupted
from fedgen.federation.client.context import ERRORS, last_error
from fedgen.federation.failures import NoResponseError
from fedgen.methods.api import Method
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.aggregation import Release
from fedgen.privacy.events import Relation, Unit, canonical, from_json, total
from fedgen.randomness import RandomStreams
from fedgen.reporting.privacy_statement import guarantee_of
from fedgen.reporting.progress import RunProgress, format_epsilon
from fedgen.run import setup
from fedgen.run.attacks import Adversary, adversaries, attack, distinguishing_noise
from fedgen.run.calibrate import other_target
from fedgen.run.generator import draw_samples, labels_of, load_generator
from fedgen.run.setup import Setup
from fedgen.run.train import train
from fedgen.storage.run_dir import RunDir

_CLIENTS = 4
_MAX_RECORDS = 300  # records next to the additional one
_MAX_ATTEMPTS = 100  # random streams tried until the additional record is sampled
_LOW_NOISE = 1e-4  # noise standard deviation over sensitivity
_NOISE_VALUES = 3000  # for a precision of 1 %
_TOLERANCE = 1.1  # factor over a bound
NOT_CHECKED = """\
not checked; the author must ensure it: worst_cases returns the true worst case, and the server
receives nothing from clients except their responses"""


@dataclass(frozen=True)
class CheckResult:
    """Result of one check; ``passed``: None if it could not be decided."""

    name: str
    detail: str
    passed: bool | None


def check(config: DictConfig) -> str:
    """Train and attack a method with these settings; return the results as text.

    Raises:
        FedgenError: for an invalid setting, or if a check fails.
    """
    for key in ("resume", "run_dir", "start", "group"):
        if config[key] is not None:
            problem = "is not supported: a check trains several temporary runs"
            raise FedgenError(key, problem, "leave it out")
    if config.privacy.noise != "seeded":
        problem = "must be seeded, because a check compares repeated runs"
        raise FedgenError("privacy.noise", problem, "leave it out")
    check_audit(config.audit)
    if not config.audit.releases:
        raise FedgenError("audit.releases", "0 releases leave nothing to attack", "e.g. 4000")
    run_config = config.copy()
    with open_dict(run_config):
        del run_config.audit  # no canaries
    with tempfile.TemporaryDirectory() as folder:
        try:
            setup.setup(run_config).method.worst_cases()  # before running for minutes
            results = [
                *_runs(_smallest_run(run_config), Path(folder)),
                *_attacks(run_config, config.audit),
            ]
        except Interrupted:
            raise Interrupted("interrupted; start the check again") from None
        except FedgenError as error:
            for file in Path(folder).glob(f"*/clients/*/{ERRORS}"):  # deleted with the folder
                if (last := last_error(file)) is not None:
                    print("".join(last["trace"]), end="")
            if not isinstance(error, NoResponseError):
                raise
            cause = error.remedy.partition("(see ")[0].strip()  # the rest names deleted files
            raise FedgenError("method", error.problem, f"{cause}; fix it") from error
    signs = {True: "pass    ", False: "FAIL    ", None: "untested"}
    lines = [f"{signs[result.passed]}  {result.name}: {result.detail}" for result in results]
    broken = [result for result in results if result.passed is False]
    text = "\n".join([*lines, NOT_CHECKED])
    if broken:
        print(text)
        problem = f"{config.names.method} fails {len(broken)} of {len(results)} checks"
        raise FedgenError("method", problem, "fix it before you rely on its ε")
    return text


def _smallest_run(config: DictConfig) -> DictConfig:
    """Return settings of a run without evaluation."""
    few = config.copy()
    quiet = compose("config", ["evaluation=none", "runtime=in_process"])
    few.evaluation, few.names.evaluation = quiet.evaluation, "none"
    few.evaluate_every, few.sample_every, few.log_every = 0, 1, 1
    with open_dict(few):
        runtime_settings = {key: few.runtime[key] for key in quiet.runtime if key in few.runtime}
        few.runtime = {**quiet.runtime, **runtime_settings, "type": quiet.runtime.type}
        few.runtime.checkpoint_every = 1
    few.names.runtime = "in_process"
    return few


# --- runs -----------------------------------------------------------------------------------------


def _runs(config: DictConfig, folder: Path) -> list[CheckResult]:
    first = _train(config, folder / "first")
    on_disk = config.copy()
    on_disk.runtime.store, on_disk.runtime.serialize = "disk", True
    return [
        *check_run(first, config),
        check_same(_train(config, folder / "repeated"), first, "a run is reproducible"),
        check_same(
            _train(on_disk, folder / "on disk"), first, "states on disk do not change the result"
        ),
        _check_resume(config, folder / "interrupted", first),
        *_check_clients(config, folder),
    ]


def _train(config: DictConfig, place: Path) -> RunDir:
    run_config = config.copy()
    run_config.run_dir = str(place)
    print(f"training run '{place.name}':", flush=True)
    return RunDir(train(run_config))


def check_run(run: RunDir, config: DictConfig) -> list[CheckResult]:
    """Check a finished run of any method with these settings."""
    return [check_budget(run, config), check_accounting(run), check_samples(run)]


def check_budget(run: RunDir, config: DictConfig) -> CheckResult:
    """Check the budget against its adversary."""
    adversary, target = config.privacy.adversary, config.privacy.target_epsilon
    record = run.privacy()
    view = record["views"][adversary]
    if (other := other_target(config)) is not None:
        reached = other.measure(guarantee_of(view, record["delta"]))
        detail = f"{other.key}={other.value:g} against {adversary}: {reached:.4g}"
        return CheckResult("a run stays within its budget", detail, reached <= other.value)
    proven = view["epsilon"]
    detail = f"ε {format_epsilon(proven)} against {adversary}"
    if target is None:
        detail = f"{detail}; privacy.target_epsilon is not set"
        return CheckResult("a run stays within its budget", detail, None)
    return CheckResult(
        "a run stays within its budget",
        f"{detail}, of {target}",
        proven is not None and proven <= target,
    )


def check_accounting(run: RunDir) -> CheckResult:
    """Check that the printed ε is at least that of the lines in the ledger of each client."""
    printed, lines = run.privacy(), 0
    relation, name = Relation(printed["relation"]), "the printed ε covers every ledger"
    for client, page in printed["clients"].items():
        entries = (run.clients / client / "ledger.jsonl").read_text().splitlines()[1:]
        spend = total([canonical(from_json(json.loads(line)["event"])) for line in entries])
        lines += len(entries)
        least = epsilon(spend, printed["delta"], relation).or_infinity if spend else 0.0
        server = math.inf if page["server"] is None else page["server"]
        if server < least * (1 - 1e-9):
            detail = (
                f"client {client}: ε {format_epsilon(server)} is below ε {least:.4g} of its ledger"
            )
            return CheckResult(name, detail, False)
    return CheckResult(name, f"{lines} releases", True)


def check_samples(run: RunDir) -> CheckResult:
    """Check that samples need only ``public/``."""
    published = load_generator(run.public, "cpu")
    method, generator = published.method, published.weights
    streams = RandomStreams.from_seed(0, "seeded").at("sample")
    count = method.server.distinct_images or 10 * published.classes
    labels = labels_of(published, count, None, streams)
    images = method.server.sample(generator, labels, streams)
    fits = bool(images.isfinite().all() and images.min() >= 0 and images.max() <= 1)
    fits &= tuple(images.shape) == (count, *published.shape)
    again = draw_samples(method, generator, labels, streams)
    fits &= np.array_equal(again, draw_samples(method, generator, labels, streams))
    detail = f"{count} of shape {tuple(images.shape[1:])}, from public/ alone"
    return CheckResult("samples are valid images and reproducible", detail, fits)


def check_same(run: RunDir, first: RunDir, name: str) -> CheckResult:
    """Check that two runs have the same generator and ε."""
    of_first, of_run = first.results()["generator_sha256"], run.results()["generator_sha256"]
    same = of_first == of_run and first.privacy()["views"] == run.privacy()["views"]
    detail = "bit-identical generator, and ε" if same else "the generator or ε differs"
    return CheckResult(name, detail, same)


def _check_resume(config: DictConfig, place: Path, first: RunDir) -> CheckResult:
    """Check a run that is interrupted at its second picture, as by Ctrl-C, and resumed."""
    run_config, calls = config.copy(), []
    run_config.run_dir = str(place)

    def interrupt(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt

    print("training run 'interrupted':", flush=True)
    name = "an interrupted run resumes"
    try:
        train(run_config, watch=interrupt)
    except Interrupted:
        if len(calls) < 2:  # interrupted as by Ctrl-C
            raise
        return check_same(RunDir(train(compose("config", [f"resume='{place}'"]))), first, name)
    return CheckResult(name, "too short to interrupt: use more rounds", None)


def _check_clients(config: DictConfig, folder: Path) -> list[CheckResult]:
    """Check several clients, with and without secure sums; a method may refuse what it does not
    support."""
    words = ["partition=iid", f"partition.clients={_CLIENTS}"]
    shared = config.copy()
    with open_dict(shared):
        shared.partition = compose("config", words).partition
    shared.names.partition = "iid"
    results = []
    for kind, scenario in (
        (config.privacy.aggregation, "several clients"),
        ("secure", "secure sums"),
    ):
        run_config = shared.copy()
        run_config.privacy.aggregation = kind
        name = f"{scenario} stay within the budget"
        try:
            run = _train(run_config, folder / scenario.replace(" ", "-"))
        except FedgenError as error:
            results.append(CheckResult(name, f"refused ({error})", None))
            continue
        budget = check_budget(run, run_config)
        results.append(CheckResult(name, budget.detail, budget.passed))
    return results


# --- attacks --------------------------------------------------------------------------------------


def _attacks(config: DictConfig, audit: DictConfig) -> list[CheckResult]:
    """Attack each kind of query and each view: with the stated noise, and with half of it."""
    ready = setup.setup(config)
    results = [_check_sensitivity(ready, kind) for kind in range(len(ready.method.worst_cases()))]
    for adversary in adversaries(ready.method):
        for kind, worst in enumerate(ready.method.worst_cases()):
            name = f"{adversary.name}, {next(iter(worst.query.samples))}"
            noise = audit.noise_multiplier or distinguishing_noise(ready, adversary, kind)
            refuted, detail = _attack(ready, adversary, kind, (noise, noise), audit)
            results.append(
                CheckResult(f"no attack refutes the proof ({name})", detail, not refuted)
            )
            if worst.custom_noise:  # independent of that of the run
                continue
            refuted, detail = _attack(ready, adversary, kind, (noise, noise / 2), audit)
            if not refuted:
                detail += ": the attack is too weak to decide, e.g. because of secret sampling"
            results.append(
                CheckResult(f"halved noise is detected ({name})", detail, refuted or None)
            )
    return results


def _check_sensitivity(ready: Setup, kind: int) -> CheckResult:
    """Check that one more record among up to 300 of the first client's (white, grey, black, noise
    or a duplicate, under two labels) changes the sum by no more than accounted. It is appended
    last, so that all others keep their positions."""
    full_noise, low_noise = ready.at_noise(1.0), ready.at_noise(_LOW_NOISE)
    worst = full_noise.worst_cases()[kind]
    query = next(iter(worst.query.samples))
    name = f"adding a record changes a sum by at most its sensitivity ({query})"
    plan = full_noise.plan
    local = plan.aggregation.is_local and plan.unit is Unit.RECORD
    if worst.custom_noise:
        return CheckResult(name, "the noise of a warm-up is fixed", None)
    if not local or plan.relation is not Relation.ADD_OR_REMOVE_ONE or worst.event is None:
        detail = "requires aggregation=local, unit=record and add-or-remove neighbours"
        return CheckResult(name, detail, None)
    [leaf] = canonical(worst.event)  # one Gaussian, with or without sampling
    proven = 1 / getattr(leaf, "event", leaf).noise_multiplier
    first_shard = ready.dataset.shard(ready.shards[0])
    images, labels = first_shard.images[:_MAX_RECORDS], first_shard.labels[:_MAX_RECORDS]
    source = ready.streams.at("check").public("rows")

    def response(
        method: Method, more: list[tuple[Tensor, int]], streams: int
    ) -> NDArray[np.float64]:
        rows = torch.cat([images, *(row[None] for row, _ in more)])
        shard = Shard(rows, torch.cat([labels, torch.tensor([label for _, label in more]).long()]))
        client_streams = ready.streams.at("check", kind, streams)
        release = method.client.respond({}, worst.query, shard, worst.round, client_streams)
        assert isinstance(release, Release)
        return np.asarray(release.arrays["answer"], float).ravel()

    noise = torch.randint(0, 256, images.shape[1:], generator=source, dtype=torch.uint8)
    candidates = [*(torch.full_like(noise, grey) for grey in (255, 219, 0)), noise, images[0]]
    for streams in range(_MAX_ATTEMPTS):
        without = response(low_noise, [], streams)
        with_record = response(low_noise, [(noise, int(labels[-1]))], streams)
        if np.abs(with_record - without).max() > 0:
            break
    else:
        return CheckResult(name, f"none of {_MAX_ATTEMPTS} samples included the record", None)
    noises = [
        response(full_noise, [], number) - response(low_noise, [], number)
        for number in range(-(-_NOISE_VALUES // without.size))
    ]
    unit = float(np.std(noises)) * proven
    ratio = max(
        float(np.linalg.norm(response(low_noise, [(record, label)], streams) - without)) / unit
        for record in candidates
        for label in (int(labels[-1]), (int(labels[-1]) + 1) % ready.dataset.classes)
    )
    detail = f"largest change: {ratio:.2f} times the accounted sensitivity"
    return CheckResult(name, detail, ratio < _TOLERANCE)


def _attack(
    ready: Setup, adversary: Adversary, kind: int, noise: tuple[float, float], audit: DictConfig
) -> tuple[bool, str]:
    """Attack a client program with ``noise`` multipliers (claimed, actual); return whether its
    claimed ε is refuted, and both bounds as text."""
    claimed, actual = map(ready.at_noise, noise)
    with RunProgress() as progress:
        points = attack(
            actual,
            claimed.plan,
            claimed.worst_cases()[kind],
            adversary,
            releases=audit.releases,
            confidence=audit.confidence,
            delta=ready.config.privacy.delta,
            streams=ready.streams.at("check", adversary.name, kind),
            report_progress=lambda done: progress.show(
                "simulated releases", done, 2 * audit.releases, ""
            ),
        )
    closest = max(points, key=lambda point: point.lower_bound / (point.proven or 1))
    proven = format_epsilon(closest.proven)
    detail = f"the attack shows ε ≥ {closest.lower_bound:.2f}; proven for its view: {proven}"
    return any(point.broken for point in points), detail
