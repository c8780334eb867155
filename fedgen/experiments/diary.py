"""What a run tells while it goes on: lines of metrics, pictures of samples, progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedgen.errors import FedgenError
from fedgen.experiments.account import planned_views
from fedgen.experiments.accounts import Accounts
from fedgen.experiments.building import build
from fedgen.experiments.data import of_delta, of_little_use, of_the_digits
from fedgen.experiments.evaluation import utilities
from fedgen.experiments.generation import judged_samples
from fedgen.experiments.outcome import Clock, ten_of_each
from fedgen.experiments.settings import Setup
from fedgen.federation.rounds import RoundFacts, RunState
from fedgen.privacy.accounting import Epsilon
from fedgen.privacy.events import Unit
from fedgen.reporting.figures import sample_grid
from fedgen.reporting.loggers import Logger
from fedgen.reporting.progress import (
    RunProgress,
    bytes_in_words,
    epsilon_in_words,
    pace_in_words,
)
from fedgen.reporting.run_dir import RunDir

_HELD_OUT_SHOWN = 1000  # rows that each line of metrics looks at
_LINES = 20  # of metrics, at least, where there are as many rounds

Watch = Callable[[Setup, RunState, Epsilon], None]
"""Called with each picture of samples: a run's set-up, its state, epsilon against whoever has what
the server makes of the answers."""


class Diary:
    """Opens with what the run is to cost, and is told of each round.

    Args:
        clock: to count the rounds on. name: of the run. rounds: that it had before.
    """

    def __init__(
        self,
        ready: Setup,
        run_dir: RunDir,
        accounts: Accounts,
        clock: Clock,
        progress: RunProgress,
        name: str,
        watch: Watch | None,
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
        """Nothing more is told."""
        self._logger.close()

    def after(self, state: RunState, facts: RoundFacts) -> None:
        """After each round: numbers and pictures as often as configured."""
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

    def at_its_end(self, state: RunState) -> None:
        """After a run that has ended before its last round: what its last one came to."""
        if self._last is not None:
            self._log(state, self._last, early=True)
            self._draw_samples(state, early=True)

    def _announce(self) -> None:
        privacy, plan = self._ready.privacy, self._ready.method.plan
        views = planned_views(self._ready)
        if self._accounts.begun or self._accounts.unanswered():  # it goes on
            found = self._accounts.release_after(privacy.budget.rounds)
            views["release"] = found or views["release"]
        server, release = (epsilon_in_words(views[name].value) for name in ("server", "release"))
        noise = "none" if privacy.noise_multiplier is None else f"{privacy.noise_multiplier:.4g}"
        clients = len(self._ready.shards)
        self._progress.say(
            f"{self._config.names.method} on {self._config.names.data}: "
            f"{clients} client{'s' if clients > 1 else ''}, at most "
            f"{privacy.budget.rounds} rounds, proven ε ≤ {server} (server), {release} "
            f"(release) per {plan.unit.value} at δ = {privacy.delta:g}, noise multiplier {noise}"
        )
        if self._ready.dataset.shows_persons and plan.unit is Unit.RECORD:
            self._progress.say(
                "ε is about single images, and the data tell whom each shows: see "
                "privacy.unit=person"
            )
        warnings = of_delta(self._ready) + of_the_digits(self._config)
        for warning in [*warnings, *of_little_use(self._ready)]:
            self._progress.say(warning)

    def _log(self, state: RunState, facts: RoundFacts, early: bool) -> None:
        _check_finite(state, self._server.generator(state.server).values())
        views = self._accounts.views(state, early)
        coins = self._ready.coins.at("shown", state.rounds)
        shown = self._server.shown(state.server, self._ready.held_out(_HELD_OUT_SHOWN), coins)
        down, up = sum(state.sent.values()), sum(state.received.values())
        line = {
            "round": state.rounds,
            "epsilon": {name: found.value for name, found in views.items()},
            "claimed_epsilon": self._accounts.claimed(state, early),
            "answer_norm": facts.answer_norm,
            **shown,
            "clients": facts.clients,
            "bytes": {"up": up, "down": down},
            "failures": sum(state.failures.values()),
        }
        self._run_dir.add_metrics(line)
        scalars = {f"epsilon/{name}": found.value for name, found in views.items()}
        scalars |= {"answer_norm": facts.answer_norm, **shown}
        scalars |= {f"seconds/{name}": seconds for name, seconds in facts.seconds.items()}
        for name, number in scalars.items():
            if number is not None:
                self._logger.scalar(name, number, state.rounds)
        self._progress.show(
            "rounds",
            state.rounds,
            self._ready.privacy.budget.rounds,
            f"ε {epsilon_in_words(views['server'].value)} server, "
            f"{epsilon_in_words(views['release'].value)} release  "
            f"{bytes_in_words(up)} up, {bytes_in_words(down)} down  "
            f"{pace_in_words(state.rounds, self._clock.rounds)}{_in_words(state.failures)}",
        )

    def _judge(self, state: RunState) -> None:
        """A line of metrics with gen2real."""
        chosen, generator = self._config.evaluation, self._server.generator(state.server)
        samples = judged_samples(self._ready, generator, chosen.samples, self._progress)
        coins, data = self._ready.coins.at("evaluation"), self._ready.dataset
        found = utilities(chosen, data, samples, coins, self._progress, real=False)["gen2real"]
        self._run_dir.add_metrics({"round": state.rounds, "gen2real": found})
        for name, scores in found.items():
            if scores["mean"] is not None:
                self._logger.scalar(f"gen2real/{name}", scores["mean"], state.rounds)

    def _draw_samples(self, state: RunState, early: bool) -> None:
        images = ten_of_each(self._ready, self._server.generator(state.server))
        name = f"round_{state.rounds:06d}.png"
        sample_grid(images, 10, self._run_dir.samples / name)
        self._logger.image("samples", _sheet(self._run_dir.samples / name), state.rounds)
        if self._watch is not None:
            # its state follows from what is published of the answers: their noised sums
            self._watch(self._ready, state, self._accounts.views(state, early)["release"])


def is_due(state: RunState, facts: RoundFacts, every: int) -> bool:
    """Whether the last exchange came to, or past, a multiple of ``every`` rounds."""
    return state.rounds // every > (state.rounds - facts.rounds) // every


def _check_finite(state: RunState, generator: Iterable[Tensor]) -> None:
    """Raises FedgenError for a generator that has diverged; its last checkpoint is kept."""
    if not all(value.isfinite().all() for value in generator):
        problem = f"the generator has diverged by round {state.rounds}"
        raise FedgenError("method", problem, "lower the learning rates")


def _in_words(failures: Counter[str]) -> str:
    if not failures:
        return ""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(failures.items()))
    return f"  failures: {kinds}"


def _sheet(path: Path) -> NDArray[np.uint8]:
    from PIL import Image

    pixels = np.asarray(Image.open(path))
    return pixels[..., None] if pixels.ndim == 2 else pixels
