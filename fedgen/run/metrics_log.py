"""Metrics, sample images and progress of a running experiment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedgen.config.build import build
from fedgen.data.catalogue import data_label
from fedgen.errors import FedgenError
from fedgen.federation.rounds import RoundFacts, RunState
from fedgen.privacy.accounting import Epsilon
from fedgen.reporting.figures import sample_grid
from fedgen.reporting.loggers import Logger
from fedgen.reporting.progress import (
    RunProgress,
    format_bytes,
    format_epsilon,
    format_pace,
)
from fedgen.run.calibrate import planned_bounds
from fedgen.run.evaluation import utilities
from fedgen.run.generator import judged_samples
from fedgen.run.preflight import data_warnings, delta_warnings, preset_warnings
from fedgen.run.privacy_record import Accounts
from fedgen.run.publish import Clock, samples_per_label
from fedgen.run.setup import Setup
from fedgen.storage.run_dir import RunDir

_HELD_OUT_IMAGES = 1000  # held-out images evaluated per line
_LINES = 20  # minimum number of lines, if there are as many rounds

RoundCallback = Callable[[Setup, RunState, Epsilon], None]
"""Called with each sample image: the setup of the run, its state, and ε against a reader of the
release."""


class MetricsLog:
    """Log the metrics of a run; the first line states the planned cost.

    Args:
        clock: clock that counts the rounds.
        name: name of the run.
        rounds: rounds done before a resume.
    """

    def __init__(
        self,
        ready: Setup,
        run_dir: RunDir,
        accounts: Accounts,
        clock: Clock,
        progress: RunProgress,
        name: str,
        watch: RoundCallback | None,
        rounds: int,
    ) -> None:
        self._ready, self._run_dir, self._accounts = ready, run_dir, accounts
        self._clock, self._progress, self._watch = clock, progress, watch
        self._config, self._server = ready.config, ready.method.server
        log_to = build(self._config.logger, "logger")
        self._logger: Logger = log_to(place=run_dir.path, name=name, rounds=rounds)
        self._last: RoundFacts | None = None
        self._announce()

    def close(self) -> None:
        """Close the log."""
        self._logger.close()

    def log_round(self, state: RunState, facts: RoundFacts) -> None:
        """Log numbers and pictures after a round, at the configured intervals."""
        self._clock.add(facts)
        self._last = facts
        last = state.rounds == self._ready.privacy.budget.rounds
        if self._config.evaluate_every and is_due(state, facts, self._config.evaluate_every):
            self._judge(state)
        first = state.rounds == facts.rounds
        often = min(self._config.log_every, max(1, self._ready.privacy.budget.rounds // _LINES))
        if is_due(state, facts, often) or last or first:
            self._log(state, facts, early=False)
        if is_due(state, facts, self._config.sample_every) or last:
            self._draw_samples(state, early=False)

    def finish(self, state: RunState) -> None:
        """Log the last round of a run that ended early."""
        if self._last is not None:
            self._log(state, self._last, early=True)
            self._draw_samples(state, early=True)

    def _announce(self) -> None:
        if self._accounts.selected is not None:  # finished, and its bound is that of the selection
            return
        privacy, plan = self._ready.privacy, self._ready.method.plan
        bounds = planned_bounds(self._ready.method, self._ready.privacy)
        views = {name: bound.epsilon for name, bound in bounds.items()}
        if self._accounts.started or self._accounts.dropouts():  # resumed
            release_epsilon = self._accounts.release_after(privacy.budget.rounds)
            views["release"] = release_epsilon or views["release"]
        server, release = (format_epsilon(views[name].value) for name in ("server", "release"))
        noise = "none" if privacy.noise_multiplier is None else f"{privacy.noise_multiplier:.4g}"
        clients = len(self._ready.shards)
        self._progress.say(
            f"{self._config.names.method} on {data_label(self._config)}: "
            f"{clients} client{'s' if clients > 1 else ''}, at most "
            f"{privacy.budget.rounds} rounds, proven ε ≤ {server} (server), {release} "
            f"(release) per {plan.unit.value} at δ = {privacy.delta:g}, noise multiplier {noise}"
        )
        warnings = delta_warnings(self._ready) + preset_warnings(self._config)
        for warning in [*warnings, *(f"warning: {w}" for w in data_warnings(self._ready))]:
            self._progress.say(warning)

    def _log(self, state: RunState, facts: RoundFacts, early: bool) -> None:
        _check_finite(state, self._server.generator(state.server).values())
        views = self._accounts.epsilon_by_adversary(state, early)
        streams = self._ready.streams.at("shown", state.rounds)
        metrics = self._server.metrics(
            state.server, self._ready.held_out(_HELD_OUT_IMAGES), streams
        )
        down, up = sum(state.sent.values()), sum(state.received.values())
        line = {
            "round": state.rounds,
            "epsilon": {name: view.value for name, view in views.items()},
            "claimed_epsilon": self._accounts.claimed_epsilon(state, early),
            "answer_norm": facts.response_norm,
            **metrics,
            "clients": facts.clients,
            "bytes": {"up": up, "down": down},
            "failures": sum(state.failures.values()),
        }
        self._run_dir.add_metrics(line)
        scalars = {f"epsilon/{name}": view.value for name, view in views.items()}
        scalars |= {"answer_norm": facts.response_norm, **metrics}
        scalars |= {f"seconds/{name}": seconds for name, seconds in facts.seconds.items()}
        for name, number in scalars.items():
            if number is not None:
                self._logger.scalar(name, number, state.rounds)
        self._progress.show(
            "rounds",
            state.rounds,
            self._ready.privacy.budget.rounds,
            f"ε {format_epsilon(views['server'].value)} server, "
            f"{format_epsilon(views['release'].value)} release  "
            f"{format_bytes(up)} up, {format_bytes(down)} down  "
            f"{format_pace(state.rounds, self._clock.rounds)}{_describe_failures(state.failures)}",
        )

    def _judge(self, state: RunState) -> None:
        """Log gen2real."""
        evaluation, generator = self._config.evaluation, self._server.generator(state.server)
        samples = judged_samples(self._ready, generator, evaluation.samples, self._progress)
        streams, data = self._ready.streams.at("evaluation"), self._ready.dataset
        gen2real = utilities(evaluation, data, samples, streams, self._progress, real=False)[
            "gen2real"
        ]
        self._run_dir.add_metrics({"round": state.rounds, "gen2real": gen2real})
        for name, scores in gen2real.items():
            if scores["mean"] is not None:
                self._logger.scalar(f"gen2real/{name}", scores["mean"], state.rounds)

    def _draw_samples(self, state: RunState, early: bool) -> None:
        images = samples_per_label(self._ready, self._server.generator(state.server))
        name = f"round_{state.rounds:06d}.png"
        sample_grid(images, 10, self._run_dir.samples / name)
        self._logger.image("samples", _sheet(self._run_dir.samples / name), state.rounds)
        if self._watch is not None:
            # its state depends only on published noisy sums
            self._watch(
                self._ready, state, self._accounts.epsilon_by_adversary(state, early)["release"]
            )


def is_due(state: RunState, facts: RoundFacts, every: int) -> bool:
    """Return whether the last exchange reached or passed a multiple of ``every`` rounds."""
    return state.rounds // every > (state.rounds - facts.rounds) // every


def _check_finite(state: RunState, generator: Iterable[Tensor]) -> None:
    """Raise FedgenError for a generator that has diverged; its last checkpoint is kept."""
    if not all(value.isfinite().all() for value in generator):
        problem = f"the generator has diverged by round {state.rounds}"
        raise FedgenError("method", problem, "lower the learning rates")


def _describe_failures(failures: Counter[str]) -> str:
    if not failures:
        return ""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(failures.items()))
    return f"  failures: {kinds}"


def _sheet(path: Path) -> NDArray[np.uint8]:
    from PIL import Image

    pixels = np.asarray(Image.open(path))
    return pixels[..., None] if pixels.ndim == 2 else pixels
