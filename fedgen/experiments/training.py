"""A training run from configuration to results: calls every other package in turn."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import NonPrivateDpEvent
from flwr.serverapp import Grid
from numpy.typing import NDArray
from omegaconf import DictConfig

from fedgen.coins import Coins
from fedgen.errors import FedgenError, Interrupted
from fedgen.evaluation.coherence import coherence, verdict
from fedgen.experiments import settings
from fedgen.experiments.accounts import Accounts, a_client_died, count_unplanned, own_ledgers
from fedgen.experiments.building import build
from fedgen.experiments.diary import Diary, Watch, is_due
from fedgen.experiments.evaluation import JUDGED, check_judged, judge_run
from fedgen.experiments.identity import (
    ENDED,
    check_intact,
    check_longer,
    check_same_run,
    check_shorter,
    going_on,
    new_run,
    opened,
)
from fedgen.experiments.interrupt import Interrupt
from fedgen.experiments.kinds import SAME_ON_EVERY_RUNTIME
from fedgen.experiments.outcome import Clock, epsilon_figure, publish, results_of
from fedgen.experiments.settings import Setup
from fedgen.experiments.sites import SiteOf, site
from fedgen.experiments.spent import close, enter, show, showed_draws
from fedgen.federation import checkpoint
from fedgen.federation.failures import DROPPED, Causes, Failure, UnansweredError
from fedgen.federation.faults import FaultyGrid
from fedgen.federation.rounds import RoundFacts, Rounds, RunState
from fedgen.federation.server_app import server_app
from fedgen.files import check_no_links, digest, private_umask
from fedgen.method import Tensors
from fedgen.privacy.ledger import Account, larger
from fedgen.privacy.spent import SpentFile
from fedgen.reporting.figures import partition
from fedgen.reporting.memory import PeakMemory
from fedgen.reporting.progress import RunProgress
from fedgen.reporting.run_dir import RunDir
from fedgen.warm_up import last_method

# settings of the runtime group that are the run's, not the runtime's
_NOT_THE_RUNTIMES = ("store", "cache_gb", "checkpoint_every", *SAME_ON_EVERY_RUNTIME)
_WARM_START_CHECKPOINT_SECONDS = 30.0
_RESUME = re.compile(r"resume=(?=[\s,;]|$)")  # of a run that is not named yet
_CHECKPOINT_SECONDS = 600.0  # a round of a thousand clients takes most of a minute
_CARRIED = ("generator", "average", "adam", "discriminator")  # by a run to one that it starts

Play = Callable[[Callable[[Grid], None]], None]
"""Calls what it is given with a Grid to the run's clients."""


def train(config: DictConfig, play: Play | None = None, watch: Watch | None = None) -> Path:
    """Trains as configured, or goes on with ``config.resume``; returns the run directory.

    ``play``: the federation to train on, where one is running; None: the configured runtime.

    Raises:
        FedgenError: for a mistake of the user's, or if too few clients answered.
        Interrupted: if the run was asked to end.
    """
    with private_umask():
        return _train(config, play, watch)


def _train(config: DictConfig, play: Play | None, watch: Watch | None) -> Path:
    new = config.resume is None
    longer = until = None  # of how many rounds a run that goes on is to be, beyond its own or below
    if config.start is not None:
        check_no_links(Path(str(config.start)), "start")
    if new:
        _check_masks(config, play)
        ready = settings.setup(config)
        _check_rows(ready)
        run_dir, name = new_run(ready)
        shared_out = len(ready.shards) > 1 and not ready.dataset.elsewhere
        if shared_out and ready.privacy.noise == "seeded":  # who has which labels is private
            partition(_label_counts(ready), run_dir.path / "partition.png")
    else:
        run_dir, before, identity = opened(Path(config.resume), "resume")
        rounds, config = config.rounds, going_on(before, config)
        longer, until = (rounds, None) if (rounds or 0) > before.rounds else (None, rounds)
        _check_masks(config, play)
        ready, name = settings.setup(config, identity["branch"]), identity["run"]
        _check_rows(ready)
        if longer is not None:
            check_longer(run_dir, ready, identity, longer)
        if until is not None:
            check_shorter(run_dir, ready, until)
        check_same_run(run_dir, ready, identity)
    with run_dir.locked("run_dir" if new else "resume"):
        if not new:
            check_intact(run_dir, ready, name)
            if opened(run_dir.path, "resume")[2] != identity:
                problem = f"{run_dir.path} was changed by another process just now"
                raise FedgenError("resume", problem, "try again")
            run_dir.prepare_resume()
            if longer is not None:
                enter(ready, run_dir, name)  # which may cost more now
                run_dir.set_aside(before.rounds)
                run_dir.identify({**identity, "rounds": longer})
        if ready.privacy.noise == "secure":
            key, made = checkpoint.key_of_draws(run_dir.checkpoints)
            ready = replace(ready, coins=ready.coins.drawing_by(key))
            if made and run_dir.begun():  # drawn anew, perhaps until all who are drawn answer
                run_dir.unanswered.touch()
            if not new and ready.gaps_show and a_client_died(run_dir):
                run_dir.unanswered.touch()
        if not new and showed_draws(ready, run_dir, name):
            run_dir.unanswered.touch()
            ready = ready.counting_gaps()
        training = Training(ready, run_dir, name, watch, until)
        try:
            return training.go(play or training.on_its_runtime)
        except UnansweredError as error:
            training.mark_unanswered()
            remedy = _RESUME.sub(lambda _: f"fedgen train resume={run_dir.path}", error.remedy)
            raise UnansweredError(error.key, error.problem, remedy) from error
        except FedgenError:
            if new and not training.begun:  # nobody was told anything: nothing is lost
                close(training.spent, name, [])
                run_dir.undo()
            raise


def _check_masks(config: DictConfig, play: Play | None) -> None:
    """Raises FedgenError where a client's messages of one round may reach several processes: the
    secrets behind its masks do not leave the one that made them."""
    if config.runtime.masks and (play is not None or config.names.runtime == "flower"):
        raise FedgenError(
            "runtime.masks",
            "Flower's engine moves clients between processes, and masks stay in one",
            "take runtime=ray or in_process, or set it to false: the sum is the same",
        )


def _check_rows(ready: Setup) -> None:
    """Raise FedgenError if the runtime cannot reach the rows, or if the test split is too small."""
    config, deployed = ready.config, ready.config.names.runtime == "deployed"
    if deployed and not ready.dataset.elsewhere:
        problem = "asks nodes with rows of their own, and reads none here"
        raise FedgenError("runtime", problem, "take data=public_facts partition=nodes")
    if not deployed and ready.dataset.elsewhere:
        raise FedgenError("data", "public_facts has no rows", "take runtime=deployed")
    if deployed and config.evaluation.samples:
        problem = "there are no rows here to judge by"
        remedy = "set evaluation=none; judge samples by fedgen evaluate samples=... data=..."
        raise FedgenError("evaluation", problem, remedy)
    if deployed and (ready.faults.total or config.corruption.fraction):
        problem = "faults and bugs are planted in simulations alone"
        raise FedgenError("runtime", problem, "set runtime.faults and corruption.fraction to 0")
    if config.evaluation.samples and ready.method.server.distinct is None:
        check_judged(config.evaluation, ready.dataset)


class Training:
    """One run as the server sees it: its rounds, and what it leaves behind. ``until``: after how
    many it is told to end; None: after those of its budget."""

    def __init__(
        self,
        ready: Setup,
        run_dir: RunDir,
        name: str,
        watch: Watch | None = None,
        until: int | None = None,
    ) -> None:
        self.ready, self.run_dir, self.name, self._watch = ready, run_dir, name, watch
        self.spent: SpentFile | None = None  # where a secure run was entered
        self.config, self.method = ready.config, ready.method
        self.clients = len(ready.shards)
        self._until = until
        self._marks = ready.privacy.noise == "secure" and ready.gaps_show
        self.accounts = Accounts(
            ready.method,
            ready.privacy,
            self.clients,
            begun=run_dir.begun() if ready.privacy.noise == "secure" else Counter(),
            unanswered=run_dir.unanswered.exists,
            masks=self.config.runtime.masks,
            signed=ready.dataset.elsewhere and self.config.runtime.masks,
        )
        self.clock = Clock()
        self.stopped: str | None = None
        self.begun = False  # clients were called
        self._over = False  # all rounds are done; only what a run leaves may be missing
        self._kept, self._kept_rounds = time.monotonic(), -1
        self.progress = RunProgress()
        self.interrupt = Interrupt(self.progress.say)

    def go(self, play: Play) -> Path:
        """Trains, then writes everything that a run leaves."""
        self.spent = enter(self.ready, self.run_dir, self.name, over=self._is_over())
        gaps = self.run_dir.unanswered.exists()
        if gaps:
            show(self.spent, self.ready, self.name)
        state = self._restore()
        if gaps and not self._over:  # which may be beyond the budget of its data now
            enter(self.ready, self.run_dir, self.name, anew=True)
        told = self.ready, self.run_dir, self.accounts, self.clock, self.progress
        self._diary = Diary(*told, self.name, self._watch, state.rounds)
        with self.progress, PeakMemory() as self.memory:
            try:
                with self.interrupt:
                    play(lambda grid: self._rounds(grid, state))
                if self.interrupt.asked:  # in the last round: what is left may take long
                    raise Interrupted(self._how_to_go_on(f"after round {state.rounds}"))
                return self._leave(state)
            except KeyboardInterrupt:
                raise Interrupted(self._how_to_go_on("before its end")) from None
            finally:
                self._diary.close()

    def on_its_runtime(self, main: Callable[[Grid], None]) -> None:
        """Plays a run on the runtime that is configured for it."""
        play = build(self.config.runtime, "runtime", without=_NOT_THE_RUNTIMES)
        here = site(self.ready, self.run_dir, self.name)
        again = SiteOf(str(self.run_dir.path.absolute()))
        play(server_app(main), here, self.clients, again)

    def _rounds(self, grid: Grid, state: RunState) -> None:
        """What the ServerApp does."""
        self.begun = True
        largest = getattr(grid, "largest", math.inf)
        if self.ready.faults.total:
            coins = Coins.of(self.config.seed, "seeded").at("faults")  # as the clients'
            grid = FaultyGrid(grid, self.ready.faults, coins)
        strategy = build(self.config.method.strategy, "method.strategy")(
            method=self.method, coins=self.ready.coins.at("strategy")
        )
        rounds = Rounds(
            grid,
            strategy,
            self.method,
            state,
            clients=self.clients,
            min_success=self.config.runtime.min_success,
            timeout=self.config.runtime.timeout,
            begins=self._begins,
            failed=self._failed,
            rows=self.ready.privacy.budget.rows,
            causes=Causes(self.run_dir.clients, told=self.ready.privacy.noise == "seeded"),
            masks=self.config.runtime.masks,
            signed=self.ready.dataset.elsewhere,
            run=self.name,
            largest=largest,
            opens=self._opens,
            says=self.progress.say,
        )
        nodes = rounds.hello()
        if self.ready.dataset.elsewhere:
            self._check_elsewhere(rounds, nodes, state)
        if not self._over:
            rounds.restore()
            self._train(rounds, state)
            if self.ready.privacy.noise == "secure":
                self.accounts.ledgers.update(self._own_ledgers())
            self.accounts.ledgers.update(rounds.accounts())
            self._checkpoint(state, last=True)
        rounds.forget()

    def _check_elsewhere(self, rounds: Rounds, nodes: dict[int, int], state: RunState) -> None:
        """Of clients whose files are not here: that each is who it was, and has forgotten nothing.
        What it was charged for since the last checkpoint counts.

        Raises:
            FedgenError: if one is another, or lacks what the server has seen.
        """
        first = self.run_dir.nodes(nodes)
        if first != nodes:
            moved = next(client for client in nodes if first.get(client) != nodes[client])
            problem = f"client {moved} was another node before"
            raise FedgenError("resume", problem, "start the nodes with the numbers that they had")
        told = rounds.accounts(must=1.0)
        for client, account in told.items():
            seen = dict(state.spends.get(client, {}))
            seen.pop(NonPrivateDpEvent(), None)
            if any(account.spend.get(event, 0) < count for event, count in seen.items()):
                problem = f"the ledger of client {client} lacks what the server has seen"
                raise FedgenError("resume", problem, "restore it: spend is never forgotten")
        self._check_no_answer_is_lost(state, told)
        if self._over:
            self.accounts.ledgers.update(told)
        elif self.ready.privacy.noise == "secure":
            self._charge(state, told)

    def _charge(self, state: RunState, ledgers: Mapping[int, Account]) -> None:
        """Counts what clients were charged for after the checkpoint that a run goes on from."""
        if self.method.plan.sends_again:
            return
        for client, account in ledgers.items():
            state.spends[client] = larger(state.spends.get(client, {}), account.spend)
            state.rows[client] = max(state.rows[client], account.rows)
            state.asks[client] = max(state.asks[client], account.releases)

    def _begins(self, round_: int) -> None:
        if self.ready.privacy.noise == "secure":  # else what is done again repeats to the bit
            self.run_dir.begin(round_)
            self.accounts.begun[round_] += 1

    def _opens(self, round_: int, asked: str, clients: list[int]) -> None:
        """Raises UnansweredError for a second sum over other clients by the same coins, after a
        seeded run went on: their difference would be what one client sent. In mode ``secure``
        coins are new each time."""
        if self.ready.privacy.noise == "secure":
            return
        of = digest(json.dumps(clients).encode())
        if self.run_dir.opened(asked, of) != of:
            raise UnansweredError(
                "resume",
                f"round {round_ + 1} was added up over other clients before",
                "go on when the same ones answer, or start a new run",
            )

    def _failed(self, failure: Failure) -> None:
        if failure.kind not in DROPPED:
            self.mark_unanswered()
        self.run_dir.add_failure(asdict(failure))

    def mark_unanswered(self) -> None:
        """Notes that a missing answer may have shown a draw, before anything else can end the
        process: in what the data have cost, which no copy takes back, and in the directory."""
        if not self.run_dir.unanswered.exists():
            try:
                show(self.spent, self.ready, self.name)
            finally:
                self.run_dir.unanswered.touch()

    def _train(self, rounds: Rounds, state: RunState) -> None:
        def keep() -> None:
            rounds.keep()
            self._checkpoint(state)

        def stop_if_asked() -> None:
            if self.interrupt.asked:
                if self._kept_rounds != state.rounds or not state.prepared:
                    keep()
                raise Interrupted(self._how_to_go_on(f"after round {state.rounds}"))

        def prepared(done: int, of: int) -> None:
            self.progress.show("warm start", done, of, "")
            if time.monotonic() - self._kept > _WARM_START_CHECKPOINT_SECONDS:
                keep()
            stop_if_asked()

        def finished(state: RunState, facts: RoundFacts) -> None:
            self._diary.after(state, facts)
            last = state.rounds == self.ready.privacy.budget.rounds
            due = is_due(state, facts, self.config.runtime.checkpoint_every)
            due |= time.monotonic() - self._kept > _CHECKPOINT_SECONDS
            # what clients said once is not asked again; what follows from the seed can be
            once, secret = self.method.plan.once, self.ready.privacy.noise == "secure"
            due |= state.rounds == once
            due |= state.rounds < once and self.method.plan.short and secret
            died = self._marks and a_client_died(self.run_dir)
            if (due and not last) or died:
                keep()
            if died:
                raise UnansweredError(
                    "runtime",
                    "a client's process died over an answer, and that may show what it drew",
                    f"fedgen train resume={self.run_dir.path} goes on, and counts that",
                )
            self._die_if_told_to(state, facts)
            if not last:
                stop_if_asked()

        if not state.prepared:
            rounds.prepare(prepared)
            keep()
        stop_if_asked()
        coins, budget = self.ready.coins.at("server"), self.ready.privacy.budget
        until = min(self._until or budget.rounds, budget.rounds)  # a gap may have left fewer
        self.stopped = rounds.run(coins, budget, finished, until)
        if self.stopped is None and state.rounds < budget.rounds:
            self.stopped = ENDED
            # when to end may have been chosen by what was seen: the ε of all rounds covers that
            state.rows = Counter(dict.fromkeys(range(self.clients), budget.rows))
        if self.stopped:
            self._diary.at_its_end(state)

    def _how_to_go_on(self, where: str) -> str:
        return f"interrupted {where}; go on with: fedgen train resume={self.run_dir.path}"

    def _die_if_told_to(self, state: RunState, facts: RoundFacts) -> None:
        """A fault of the server's: killed after a round, once."""
        mark, fatal = self.run_dir.path / "server_died", self.config.runtime.faults.server_dies
        if state.rounds - facts.rounds < fatal <= state.rounds and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_over(self) -> bool:
        """Whether nobody is left to be asked: of a run that was made longer somebody is."""
        found = checkpoint.load(self.run_dir.checkpoints)
        rounds = self.ready.privacy.budget.rounds
        return found is not None and found[1].over and rounds <= found[1].of

    def _restore(self) -> RunState:
        """The state of the last checkpoint, or a fresh one. In ``secure`` mode, what was released
        after it stays spent: done again, it is released anew, or where a plan says so is sent
        again."""
        found = checkpoint.load(self.run_dir.checkpoints)
        fresh = self.method.server.init(self.ready.coins.at("server"))
        ledgers = self._own_ledgers()
        self._check_no_answer_is_lost(found[0] if found else RunState(fresh), ledgers)
        if found is None:
            self.run_dir.cut()
            state = RunState(_started(fresh, self.config.start))
        else:
            state, beside = found
            state.server = checkpoint.server_of(state, fresh, self.run_dir.checkpoints)
            self.run_dir.cut(beside.metrics[0])
            self.clock = Clock(beside.seconds, beside.parts)
            self._over, self.stopped = self._is_over(), beside.stopped
            if beside.over and not self._over:  # it has more now
                self.stopped, state.kept = None, {}
        state.failures = self.run_dir.failures()
        count_unplanned(state, self.run_dir)
        if self._over:
            self.accounts.ledgers.update(ledgers)
        elif self.ready.privacy.noise == "secure":
            self._charge(state, ledgers)
        return state

    def _check_no_answer_is_lost(self, kept: RunState, ledgers: Mapping[int, Account]) -> None:
        """Raises FedgenError if a client was charged for a sum that is in no checkpoint, of a plan
        that has no other in its place."""
        plan = self.method.plan
        if plan.sends_again or self.ready.privacy.noise == "seeded":
            return
        if kept.rounds >= plan.once and plan.asking_rounds is None:
            return
        again = plan.short and plan.asking_rounds is not None and not plan.trusted
        remedy = " (with privacy.threshold=all secure sums are sent again)" if again else ""
        for client, account in ledgers.items():
            if account.releases > kept.asks[client]:
                raise FedgenError(
                    "resume",
                    f"client {client} was charged for an answer to round {kept.rounds + 1} that "
                    "was lost, and no other is planned for",
                    f"start a new run{remedy}; what this one spent stays spent",
                )

    def _own_ledgers(self) -> dict[int, Account]:
        seeded = self.ready.privacy.noise == "seeded"
        return own_ledgers(self.run_dir, self.name, self.clients, seeded)

    def _checkpoint(self, state: RunState, last: bool = False) -> None:
        beside = checkpoint.Beside(
            metrics=self.run_dir.extent(),
            begun=self.accounts.begun.total(),
            seconds=self.clock.rounds,
            parts=self.clock.parts,
            over=last,
            of=self.ready.privacy.budget.rounds,
            stopped=self.stopped,
        )
        checkpoint.save(self.run_dir.checkpoints, state, beside)
        self._kept, self._kept_rounds = time.monotonic(), state.rounds

    # --- what it leaves ---------------------------------------------------------------------------

    def _leave(self, state: RunState) -> Path:
        """The record of privacy first, then what is published, then how good it is."""
        for path in self.run_dir.clients.glob("*/*.safetensors"):
            path.unlink()  # critics of clients that did not hear the farewell
        close(self.spent, self.name, [self.accounts.planned(n) for n in state.rows.values()])
        record = self.accounts.record(state, self.stopped)
        self.run_dir.write("privacy", record)
        # after a resume that has nothing left to spend, or not enough to ask for all
        if self.stopped and state.rounds < self.method.plan.least:
            raise FedgenError("rounds", f"{self.stopped}; nothing was learnt", "start a new run")
        epsilon_figure(self.run_dir, self.ready.privacy.delta)
        found = self.method.server.generator(state.server)
        # laid out as whoever loads them has them: how a product is rounded may hang on that
        generator = {name: value.contiguous() for name, value in sorted(found.items())}
        words = self.accounts.published_in_words(state, self.stopped is not None)
        sha256, grid = publish(self.ready, self.run_dir, generator, record, words)
        results = results_of(
            self.ready, self.run_dir, state, record, self.clock, self.memory.peak, self.stopped
        )
        results |= {"generator_sha256": sha256, "coherence": coherence(grid)}
        labels = np.arange(self.ready.dataset.classes).repeat(10)  # as publish draws them
        results["looks"] = verdict(grid, labels) if self.method.server.distinct is None else None
        before = self.run_dir.results() if self.run_dir.finished else {}
        if before.get("generator_sha256") == results["generator_sha256"]:
            # resumed at its end: it may have been judged in another way since
            kept = {name: before[name] for name in JUDGED if name in before}
            self.run_dir.write("results", {**results, **kept})
            return self.run_dir.path
        # a first time without: nothing of a run is lost if its evaluation fails
        nothing: dict[str, Any] = {"gen2real": {}, "real2real": {}, "real2gen": {}}
        self.run_dir.write("results", {**results, **nothing, "judged": False})
        judged = judge_run(self.ready, generator, self.progress, self.run_dir)
        self.run_dir.write("results", {**results, **judged})
        return self.run_dir.path


def _started(fresh: Tensors, start: str | None) -> Tensors:
    """The server's fresh state, with networks and optimizers of the run ``start`` unless None.

    Raises:
        FedgenError: if there is no such run, or of other networks, or nothing to begin with.
    """
    if start is None:
        return fresh
    found = checkpoint.load(RunDir(Path(str(start))).checkpoints)
    if found is None:
        raise FedgenError("start", f"{start} has no checkpoint", "name a run directory")
    own, there = (
        {name: each for name, each in state.items() if name.split("/")[0] in _CARRIED}
        for state in (fresh, last_method(found[0].server))
    )
    if not any(name.startswith("generator/") for name in own):
        raise FedgenError("start", "the method has no generator that learns", "take start=null")
    shapes = [{name: each.shape for name, each in state.items()} for state in (own, there)]
    if shapes[0] != shapes[1]:
        raise FedgenError("start", f"{start} has other networks", "take the same method's settings")
    return {**fresh, **{name: there[name].to(value.device) for name, value in own.items()}}


def _label_counts(ready: Setup) -> NDArray[np.int64]:
    """(clients, classes)"""
    classes = ready.dataset.classes
    labels = (ready.dataset.labels[shard] for shard in ready.shards)
    return np.stack([np.bincount(each, minlength=classes) for each in labels])
