"""A run that is not over, as it stood at its last checkpoint: to be looked at, not handed out. It
may be going on in another process meanwhile."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from fedgen.errors import FedgenError
from fedgen.experiments import settings
from fedgen.experiments.accounts import (
    Accounts,
    count_unplanned,
    ended_over_an_answer,
    own_ledgers,
)
from fedgen.experiments.identity import check_same_rows, opened
from fedgen.experiments.settings import Setup
from fedgen.experiments.spent import showed_draws
from fedgen.federation import checkpoint
from fedgen.method import Tensors
from fedgen.privacy.accounting import Epsilon
from fedgen.reporting.run_dir import RunDir


@dataclass(frozen=True)
class Unfinished:
    """Its set-up, its generator's weights after ``rounds`` of ``of``, and what has been spent so
    far, by adversary: of the rounds until then, and of all that clients were charged, but for
    clients ``without_bound``."""

    run_dir: RunDir
    ready: Setup
    generator: Tensors
    rounds: int
    of: int
    spent: dict[str, Epsilon]
    without_bound: frozenset[int]

    @property
    def note(self) -> str:
        """What it is, for people."""
        return f"after {self.rounds} of {self.of} rounds: the run is not over"


def is_unfinished(path: Path) -> bool:
    """Whether a run directory has a checkpoint, and has published nothing yet."""
    over = (path / "public" / "generator.json").exists() or (path / "results.json").exists()
    return not over and (path / "checkpoints" / checkpoint.NAME).exists()


def unfinished(path: Path, evaluation: DictConfig | None = None) -> Unfinished:
    """The run in a directory that ``is_unfinished``. ``evaluation``: settings in place of its own.

    Raises:
        FedgenError: if it was altered, or its data are not there.
    """
    run_dir, config, identity = opened(path, "run")
    if evaluation is not None:
        config.evaluation = evaluation
    ready = settings.setup(config, identity["branch"])
    check_same_rows(ready, run_dir, identity, "run")
    unanswered = showed_draws(ready, run_dir, identity["run"]) or _died(ready, run_dir)
    if unanswered:
        try:
            ready = ready.counting_gaps()
        except FedgenError:  # it has spent all that it may
            ready = replace(ready, method=ready.with_gaps())
    found = checkpoint.load(run_dir.checkpoints)
    assert found is not None
    state, method, clients = found[0], ready.method, len(ready.shards)
    fresh = method.server.init(ready.coins.at("server"))
    server = checkpoint.server_of(state, fresh, run_dir.checkpoints)
    of, generator = ready.privacy.budget.rounds, method.server.generator(server)
    seeded = ready.privacy.noise == "seeded"
    count_unplanned(state, run_dir)
    accounts = Accounts(
        method,
        ready.privacy,
        clients,
        own_ledgers(run_dir, identity["run"], clients, seeded),
        Counter() if seeded else run_dir.begun(),
        lambda: unanswered,
    )
    spent, lost = accounts.views(state), accounts.without_bound(accounts.spends(state))
    return Unfinished(run_dir, ready, generator, state.rounds, of, spent, lost)


def _died(ready: Setup, run_dir: RunDir) -> bool:
    """Whether the run ended over an answer, and did not go on since: as it will count then."""
    draws_are_secret = ready.privacy.noise == "secure" and ready.gaps_show
    return draws_are_secret and ended_over_an_answer(run_dir)
