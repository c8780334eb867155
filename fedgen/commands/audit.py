"""Run ``fedgen audit``: attack a client program and a whole run, and compare with the proven ε."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedgen.errors import FedgenError
from fedgen.reporting.figures import lower_bounds
from fedgen.reporting.progress import RunProgress, format_epsilon
from fedgen.run import setup
from fedgen.run.attacks import (
    BYTES_OF_REPLY,
    HIGH_NOISE,
    MIN_TRIALS,
    TARGET_EPSILON,
    LowerBound,
    adversaries,
    attack,
    attack_bytes,
    distinguishing_noise,
    guess_canaries,
)
from fedgen.run.setup import Setup
from fedgen.run.train import train
from fedgen.storage.run_dir import RunDir

_RELEASE_TRIALS = 400
_RELEASE_SECONDS = 60.0
_RELEASE_CONFIDENCE = 0.99


@dataclass(frozen=True)
class AuditResult:
    """Results of the attacks on the client program and on a run at each of its pictures, also as
    text."""

    program: list[LowerBound]
    run: list[LowerBound]
    text: str


def audit(config: DictConfig) -> AuditResult:
    """Attack the client program of a configuration, then train a run with canaries and attack it.

    Raises:
        FedgenError: for an invalid setting, or if an attack refutes a proven ε.
    """
    settings = config.audit
    check_audit(settings)
    if config.resume is not None:
        raise FedgenError("resume", "an audit cannot be resumed", "finish its run by fedgen train")
    ready = setup.setup(config)
    program = ProgramAttacks()
    if settings.releases:
        program = attack_program(ready, settings)
    guessed: list[LowerBound] = []
    lines = program.lines
    if settings.canaries:
        run = train(
            config,
            watch=lambda ready, state, proven: guessed.append(guess_canaries(ready, state, proven)),
        )
        _write(config, run, program, guessed)
        lines += [
            f"run with {settings.canaries} canaries, after round {guessed[-1].releases}: "
            f"{_describe(guessed[-1], settings.confidence)}",
            str(run / "audit.json"),
            str(run / "audit.png"),
        ]
    text = "\n".join(lines)
    if any(point.broken for point in (*program.points, *guessed)):
        print(text)
        raise FedgenError(
            "audit", "an attack refutes the proven ε", "report it as SECURITY.md says"
        )
    head = []
    if program.noises and not settings.noise_multiplier:
        head = [
            f"client programs are attacked at less noise: one release costs ε = {TARGET_EPSILON:g},"
            " where an attack has most power (audit.noise_multiplier=... sets another noise)"
        ]
    text = "\n".join([*head, text, "no attack refutes the proven ε"])
    return AuditResult(program.points, guessed, text)


@dataclass
class ProgramAttacks:
    """Attacks on the client program: bounds, their description, and the noise multiplier of each
    view (None: its own)."""

    points: list[LowerBound] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    noises: dict[str, float | None] = field(default_factory=dict)


def attack_program(ready: Setup, settings: DictConfig) -> ProgramAttacks:
    """Attack the client program, from each view and for each kind of query, and the bytes of its
    replies.

    Args:
        settings: settings ``audit.*``.
    """
    delta, result = ready.config.privacy.delta, ProgramAttacks()
    kinds = range(len(ready.method.worst_cases()))
    attacks = [(sight, kind) for sight in adversaries(ready.method) for kind in kinds]
    for number, (sight, kind) in enumerate(attacks):
        noise = settings.noise_multiplier or distinguishing_noise(ready, sight, kind)
        method = ready.at_noise(noise)
        worst = method.worst_cases()[kind]
        fixed = worst.custom_noise
        if len(kinds) > 1:
            sight = replace(sight, name=f"{sight.name}, {next(iter(worst.query.samples))}")
        trials = max(2 * MIN_TRIALS, settings.releases // sight.sees_sum)
        stage = f"{sight.name}, {number + 1}/{len(attacks)}"
        with RunProgress() as progress:
            points = attack(
                method,
                method.plan,
                worst,
                sight,
                releases=trials,
                confidence=settings.confidence,
                delta=delta,
                streams=ready.streams.at("audit", number),
                report_progress=partial(_progress_callback, progress, 2 * trials, stage),
            )
        result.points += points
        result.noises[sight.name] = None if fixed else noise
        of = "the warm-up's noise" if fixed else f"noise multiplier {noise:.4g}"
        result.lines += [
            f"{sight.name}, {trials:,} releases of each of two neighbours at {of}, "
            f"{point.releases} together: "
            f"{_describe(point, settings.confidence)}"
            for point in points
        ]
    point = attack_bytes(ready, settings.releases, settings.confidence, delta)
    result.points.append(point)
    result.lines.append(
        f"{BYTES_OF_REPLY}, {settings.releases:,} releases of each of two neighbours at noise "
        f"multiplier {HIGH_NOISE:g}: {_describe(point, settings.confidence)}"
    )
    return result


def estimate_seconds(ready: Setup, releases: int) -> float:
    """Estimate the duration of ``attack_program`` by timing one response to each kind of query."""
    method, seconds = ready.method, 0.0
    for number, worst in enumerate(method.worst_cases()):
        state, shard = worst.first
        for _ in range(2):  # the first also initialises libraries
            begin = time.perf_counter()
            streams = ready.streams.at("audit", "timing", number)
            method.client.respond(state, worst.query, shard, worst.round, streams)
        response = time.perf_counter() - begin
        responses = [
            max(2 * MIN_TRIALS * sight.sees_sum, releases) for sight in adversaries(method)
        ]
        seconds += 2 * response * (sum(responses) + releases)
    return seconds


def audit_release(ready: Setup, run: Path, mode: bool | str) -> dict[str, Any] | None:
    """Attack the client program of a run before its release. All bounds hold jointly with 99 %
    confidence, so that at most 1 % of correct releases are refused.

    Args:
        run: its directory.
        mode: True, or "auto": attack if it is estimated to take at most a minute.

    Returns:
        The content of ``audit.json``; None if it was skipped.

    Raises:
        FedgenError: if an attack refutes the proven ε.
    """
    seconds = estimate_seconds(ready, _RELEASE_TRIALS)
    if mode == "auto" and seconds > _RELEASE_SECONDS:
        minutes = math.ceil(seconds / 60)
        print(f"audit skipped: estimated duration {minutes} min; audit=true runs it")
        return None
    attacks = (len(adversaries(ready.method)) * len(ready.method.worst_cases())) + 1
    settings = OmegaConf.create(
        {
            "releases": _RELEASE_TRIALS,
            "noise_multiplier": None,
            "confidence": 1 - (1 - _RELEASE_CONFIDENCE) / attacks,
        }
    )
    program = attack_program(ready, settings)
    if any(point.broken for point in program.points):
        print("\n".join(program.lines))
        remedy = (
            f"do not publish; fedgen release run={run} attacks again, at no ε: report a second "
            "refutation as SECURITY.md says"
        )
        raise FedgenError("audit", "an attack refutes the proven ε", remedy)
    return {
        "schema": 1,
        "releases": _RELEASE_TRIALS,
        "confidence": _RELEASE_CONFIDENCE,
        "points": [asdict(point) for point in program.points],
    }


def _write(
    config: DictConfig, run: Path, program: ProgramAttacks, guessed: list[LowerBound]
) -> None:
    """Write ``audit.json`` and ``audit.png`` into the run directory."""
    settings, delta = config.audit, config.privacy.delta
    facts = {"releases": settings.releases, "noise_multipliers": program.noises}
    record: dict[str, Any] = {
        "schema": 2,
        "confidence": settings.confidence,
        "delta": delta,
        "program": {**facts, "points": [asdict(point) for point in program.points]},
        "run": {"canaries": settings.canaries, "points": [asdict(point) for point in guessed]},
    }
    RunDir(run).write("audit", record)
    panels = {
        f"{name}, releases": [
            (p.releases, p.lower_bound, p.proven) for p in program.points if p.of == name
        ]
        for name in program.noises
    }
    panels["run, rounds"] = [(p.releases, p.lower_bound, p.proven) for p in guessed]
    lower_bounds(panels, delta, settings.confidence, run / "audit.png")


def _progress_callback(progress: RunProgress, of: int, stage: str, done: int) -> None:
    progress.show("simulated releases", done, of, stage)


def check_audit(settings: DictConfig) -> None:
    """Raise FedgenError for an invalid audit."""
    for key, least in (("releases", 2 * MIN_TRIALS), ("canaries", 4)):
        if settings[key] and not least <= settings[key] <= 10**7:
            raise FedgenError(
                f"audit.{key}", f"must be 0 or at least {least}, got {settings[key]}", "correct it"
            )
    if not settings.releases and not settings.canaries:
        raise FedgenError(
            "audit.releases", "0 releases and 0 canaries leave nothing to attack", "raise either"
        )


def _describe(point: LowerBound, confidence: float) -> str:
    verdict = " - the proof is REFUTED" if point.broken else ""
    return (
        f"ε ≥ {point.lower_bound:.2f} with confidence {confidence:g}, proven ε = "
        f"{format_epsilon(point.proven)}{verdict}"
    )
