"""Open an unfinished run at its last checkpoint, to inspect it, not to publish it. It may be
training in another process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from fedgen.errors import FedgenError
from fedgen.federation import checkpoint
from fedgen.methods.api import Tensors
from fedgen.privacy.accounting import Epsilon
from fedgen.run import setup
from fedgen.run.data_budget import has_dropout, progress_of
from fedgen.run.privacy_record import (
    Accounts,
    count_unplanned,
    open_ledgers,
)
from fedgen.run.resume import check_same_data, open_run
from fedgen.run.setup import Setup
from fedgen.storage.run_dir import RunDir


@dataclass(frozen=True)
class Snapshot:
    """Setup, weights of the generator after ``rounds`` of ``total_rounds`` rounds, and ε so far by
    adversary: of these rounds and of all charges to clients, except clients ``without_bound``.
    """

    run_dir: RunDir
    setup: Setup
    generator: Tensors
    rounds: int
    total_rounds: int
    spent: dict[str, Epsilon]
    without_bound: frozenset[int]

    @property
    def note(self) -> str:
        """Return a one-line description."""
        return f"after {self.rounds} of {self.total_rounds} rounds: the run is not over"


def is_unfinished(path: Path) -> bool:
    """Return whether a run directory has a checkpoint and has published nothing yet."""
    over = (path / "public" / "generator.json").exists() or (path / "results.json").exists()
    return not over and (path / "checkpoints" / checkpoint.NAME).exists()


def load_snapshot(path: Path, evaluation: DictConfig | None = None) -> Snapshot:
    """Return the snapshot of an unfinished run.

    Args:
        evaluation: settings that replace its own.

    Raises:
        FedgenError: if it was altered, or its data are missing.
    """
    run_dir, config, identity = open_run(path, "run")
    if evaluation is not None:
        config.evaluation = evaluation
    ready = setup.setup(config, identity["branch"])
    check_same_data(ready, run_dir, identity, "run")
    with run_dir.reading() as quiet:
        unanswered = has_dropout(ready, run_dir, identity["run"], training=not quiet)
    if unanswered:
        try:
            ready = ready.counting_dropouts(progress_of(ready, run_dir, identity["run"]))
        except FedgenError:  # its budget is spent
            ready = replace(ready, method=ready.with_dropouts())
    saved = checkpoint.load(run_dir.checkpoints)
    assert saved is not None
    state, method, clients = saved[0], ready.method, len(ready.shards)
    fresh = method.server.init(ready.streams.at("server"))
    server = checkpoint.server_state(state, fresh, run_dir.checkpoints)
    of, generator = ready.privacy.budget.rounds, method.server.generator(server)
    seeded = ready.privacy.noise == "seeded"
    count_unplanned(state, run_dir)
    accounts = Accounts(
        method,
        ready.privacy,
        clients,
        open_ledgers(run_dir, identity["run"], clients, seeded),
        Counter() if seeded else run_dir.started_rounds(),
        lambda: unanswered,
    )
    spent, lost = (
        accounts.epsilon_by_adversary(state),
        accounts.without_bound(accounts.spends(state)),
    )
    return Snapshot(run_dir, ready, generator, state.rounds, of, spent, lost)
