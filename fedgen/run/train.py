"""Train a run from configuration to results. This module calls every other package in turn."""

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

from fedgen.config.build import build
from fedgen.errors import FedgenError, Interrupted
from fedgen.evaluation.coherence import coherence, verdict
from fedgen.federation import checkpoint
from fedgen.federation.failures import NON_DROPOUTS, Failure, FailureCauses, NoResponseError
from fedgen.federation.rounds import RoundFacts, Rounds, RunState
from fedgen.federation.runtimes.server_app import server_app
from fedgen.federation.secagg.signing import Signer
from fedgen.federation.signed_accounts import account_file
from fedgen.methods.api import Tensors
from fedgen.methods.families.pretraining import main_method_state
from fedgen.privacy.ledger import Account, elementwise_max
from fedgen.privacy.spend_db import SpendDb
from fedgen.randomness import RandomStreams
from fedgen.reporting.figures import partition
from fedgen.reporting.progress import RunProgress
from fedgen.run import setup
from fedgen.run.clients import RunClientSetup, client_setup
from fedgen.run.data_budget import finish_run, has_dropout, progress_of, register_run
from fedgen.run.evaluation import JUDGED, check_test_split, evaluate_run
from fedgen.run.memory import PeakMemory
from fedgen.run.metrics_log import MetricsLog, RoundCallback, is_due
from fedgen.run.privacy_record import Accounts, count_unplanned, open_ledgers
from fedgen.run.publish import (
    Clock,
    build_results,
    epsilon_figure,
    is_unselected,
    publish,
    registry_facts,
)
from fedgen.run.resume import (
    ENDED,
    check_intact,
    check_longer,
    check_same_run,
    check_shorter,
    new_identity,
    open_run,
    resumed_config,
)
from fedgen.run.selection_record import read_selection_record
from fedgen.run.setup import Setup
from fedgen.run.signals import Interrupt
from fedgen.storage.io import (
    check_no_links,
    digest,
    fedgen_home,
    private_umask,
    stored_key,
    write_atomic,
)
from fedgen.storage.keys import MACHINE_KEY, load_or_create_key
from fedgen.storage.run_dir import RunDir
from fedgen.testing.faults import FaultyGrid

_WARM_START_CHECKPOINT_SECONDS = 30.0
_RESUME = re.compile(r"resume=(?=[\s,;]|$)")  # the name is appended later
_CHECKPOINT_SECONDS = 600.0  # a round of 1,000 clients takes most of a minute
_CARRIED = ("generator", "average", "adam", "discriminator")  # networks that ``start`` loads

RuntimeRunner = Callable[[Callable[[Grid], None]], None]
"""Runs a function with a Grid that is connected to the run's clients."""


def train(
    config: DictConfig, play: RuntimeRunner | None = None, watch: RoundCallback | None = None
) -> Path:
    """Train as configured, or resume ``config.resume``; return the run directory.

    Args:
        play: a running federation to train on; None: the configured runtime.

    Raises:
        FedgenError: for a mistake of the user, or too few responses.
        Interrupted: if the run was asked to end.
    """
    with private_umask():
        return _train(config, play, watch)


def _train(config: DictConfig, play: RuntimeRunner | None, watch: RoundCallback | None) -> Path:
    new = config.resume is None
    longer = until = None  # rounds of a resumed run, above or below its own
    if config.start is not None and (Path(str(config.start)) / "checkpoints").exists():
        check_no_links(Path(str(config.start)), "start")
    if new:
        _check_masks(config, play)
        ready = setup.setup(config)
        _check_runtime(ready)
        run_dir, name = new_identity(ready)
        shared_out = len(ready.shards) > 1 and not ready.dataset.is_remote
        if shared_out and ready.privacy.noise == "seeded":  # the labels of clients are private
            partition(_label_counts(ready), run_dir.path / "partition.png")
    else:
        run_dir, before, identity = open_run(Path(config.resume), "resume")
        rounds, config = config.rounds, resumed_config(before, config)
        longer, until = (rounds, None) if (rounds or 0) > before.rounds else (None, rounds)
        _check_masks(config, play)
        ready, name = setup.setup(config, identity["branch"]), identity["run"]
        _check_runtime(ready)
        if longer is not None:
            check_longer(run_dir, ready, identity, longer)
        if until is not None:
            check_shorter(run_dir, ready, until)
        check_same_run(run_dir, ready, identity)
    with run_dir.locked("run_dir" if new else "resume"):
        if not new:
            check_intact(run_dir, ready, name)
            if open_run(run_dir.path, "resume")[2] != identity:
                problem = f"{run_dir.path} was changed by another process just now"
                raise FedgenError("resume", problem, "try again")
            run_dir.prepare_resume()
            if longer is not None:
                register_run(ready, run_dir, name)  # it may cost more now
                run_dir.keep_previous(before.rounds)
                run_dir.identify({**identity, "rounds": longer})
        if ready.privacy.noise == "secure":
            path = run_dir.checkpoints / checkpoint.SAMPLING_KEY
            # a new key may have been resampled until all sampled clients responded
            if not path.exists() and run_dir.started_rounds():
                run_dir.unanswered.touch()
            ready = replace(ready, streams=ready.streams.with_secret_key(stored_key(path)))
        if not new and has_dropout(ready, run_dir, name):
            run_dir.unanswered.touch()
            ready = ready.counting_dropouts(progress_of(ready, run_dir, name))
        training = Training(ready, run_dir, name, watch, until)
        try:
            return training.run(play or training.run_on_runtime)
        except NoResponseError as error:
            training.mark_dropout()
            remedy = _RESUME.sub(lambda _: f"fedgen train resume={run_dir.path}", error.remedy)
            raise NoResponseError(error.key, error.problem, remedy) from error
        except FedgenError:
            if new and not training.begun:  # no client was queried: nothing is lost
                finish_run(training.spent, name, [])
                run_dir.undo()
            raise


def _check_masks(config: DictConfig, play: RuntimeRunner | None) -> None:
    """Raise FedgenError if messages of one round to a client may reach several processes: the
    secrets of its masks stay in the process that created them."""
    if config.runtime.masks and (play is not None or config.names.runtime == "flower"):
        raise FedgenError(
            "runtime.masks",
            "Flower's engine moves clients between processes, and masks stay in one",
            "take runtime=ray or in_process, or set it to false: the sum is the same",
        )


def _check_runtime(ready: Setup) -> None:
    """Raise FedgenError if the runtime cannot access the records, or the test split is too
    small."""
    config, deployed = ready.config, ready.config.names.runtime == "deployed"
    if deployed and not ready.dataset.is_remote:
        problem = "queries nodes, which hold their own images"
        raise FedgenError("runtime", problem, "take data=public_facts partition=nodes")
    if not deployed and ready.dataset.is_remote:
        raise FedgenError("data", "public_facts has no images", "take runtime=deployed")
    if deployed and config.evaluation.samples:
        problem = "the server has no images to evaluate with"
        remedy = "set evaluation=none; judge samples by fedgen evaluate samples=... data=..."
        raise FedgenError("evaluation", problem, remedy)
    if deployed and (ready.faults.total or config.corruption.fraction):
        problem = "faults and bugs are planted in simulations alone"
        raise FedgenError("runtime", problem, "set runtime.faults and corruption.fraction to 0")
    if config.evaluation.samples:
        distinct = ready.method.server.distinct_images
        check_test_split(config.evaluation, ready.dataset, distinct)


class Training:
    """A run on the server: its rounds and its output.

    until: rounds after which it should end; None: those of its budget.
    """

    def __init__(
        self,
        ready: Setup,
        run_dir: RunDir,
        name: str,
        watch: RoundCallback | None = None,
        until: int | None = None,
    ) -> None:
        self.ready, self.run_dir, self.name, self._watch = ready, run_dir, name, watch
        self.spent: SpendDb | None = None  # account in which a secure run is registered
        self.config, self.method = ready.config, ready.method
        self.clients = len(ready.shards)
        self._until = until
        self._reserves = ready.privacy.noise == "secure" and ready.dropouts_reveal_cohorts
        self.accounts = Accounts(
            ready.method,
            ready.privacy,
            self.clients,
            started=run_dir.started_rounds() if ready.privacy.noise == "secure" else Counter(),
            dropouts=run_dir.unanswered.exists,
            masks=self.config.runtime.masks,
            signed=ready.dataset.is_remote and self.config.runtime.masks,
            selected=read_selection_record(run_dir),
        )
        self.clock = Clock()
        self.stopped: str | None = None
        self.begun = False  # whether clients were called
        self._signed_accounts: list[dict[str, str]] = []  # of remote clients
        self._over = False  # all rounds are done; only output may be missing
        self._kept, self._kept_rounds = time.monotonic(), -1
        self.progress = RunProgress()
        self.interrupt = Interrupt(self.progress.say)

    def run(self, play: RuntimeRunner) -> Path:
        """Train, then write all output of the run."""
        self.spent = register_run(self.ready, self.run_dir, self.name, over=self._is_finished())
        if self.spent is not None and self.run_dir.unanswered.exists():
            self.spent.record_dropout(self.name)
        state = self._restore()
        log_arguments = self.ready, self.run_dir, self.accounts, self.clock, self.progress
        self._metrics_log = MetricsLog(*log_arguments, self.name, self._watch, state.rounds)
        with self.progress, PeakMemory() as self.memory:
            try:
                with self.interrupt:
                    play(lambda grid: self._rounds(grid, state))
                if self.interrupt.asked:  # in the last round: writing output may take long
                    raise Interrupted(self._resume_command(f"after round {state.rounds}"))
                return self._write_output(state)
            except KeyboardInterrupt:
                where = "before its end"
                if self._reserves and has_dropout(self.ready, self.run_dir, self.name):
                    where = "during a response, so that it resumes at a larger ε"
                raise Interrupted(self._resume_command(where)) from None
            finally:
                self._metrics_log.close()

    def run_on_runtime(self, main: Callable[[Grid], None]) -> None:
        """Train on the configured runtime."""
        play = build(self.config.runtime, "runtime")
        local_setup = client_setup(self.ready, self.run_dir, self.name)
        again = RunClientSetup(str(self.run_dir.path.absolute()))
        play(server=server_app(main), setup=local_setup, clients=self.clients, rebuild=again)

    def _rounds(self, grid: Grid, state: RunState) -> None:
        """Run the rounds, as the ServerApp does."""
        self.begun = True
        largest = getattr(grid, "largest", math.inf)
        if self.ready.faults.total:
            # like the faults of clients
            streams = RandomStreams.from_seed(self.config.seed, "seeded").at("faults")
            grid = FaultyGrid(grid, self.ready.faults, streams)
        strategy_config = self.config.method.strategy
        settings = (
            {"type": strategy_config} if isinstance(strategy_config, str) else strategy_config
        )
        strategy = build(settings, "method.strategy")(
            method=self.method, streams=self.ready.streams.at("strategy")
        )
        rounds = Rounds(
            grid,
            strategy,
            self.method,
            state,
            clients=self.clients,
            min_success=self.config.runtime.min_success,
            timeout=self.config.runtime.timeout,
            on_round=self._on_round_start,
            on_failure=self._on_failure,
            max_samples=self.ready.privacy.budget.samples_per_client,
            causes=FailureCauses(
                self.run_dir.clients, printed=self.ready.privacy.noise == "seeded"
            ),
            masks=self.config.runtime.masks,
            remote=self.ready.dataset.is_remote,
            run=self.name,
            max_response_bytes=largest,
            on_sum=self._on_sum_opened,
            say=self.progress.say,
        )
        nodes = rounds.hello()
        if self.ready.dataset.is_remote:
            self._check_remote_nodes(rounds, nodes, state)
        if not self._over:
            rounds.restore()
            self._train(rounds, state)
            if self.ready.privacy.noise == "secure":
                self.accounts.ledgers.update(self._own_ledgers())
            self.accounts.ledgers.update(rounds.accounts())
            self._checkpoint(state, last=True)
        if self.ready.dataset.is_remote and self.ready.privacy.noise == "secure":
            facts = self.accounts.release_facts(state, self.stopped is not None)
            self._signed_accounts = rounds.signed_accounts(facts)
        rounds.forget()

    def _check_remote_nodes(self, rounds: Rounds, nodes: dict[int, int], state: RunState) -> None:
        """Check that each remote client is the same as before and has lost no charges. Its charges
        since the last checkpoint count.

        Raises:
            FedgenError: if one differs, or lacks charges that the server has seen.
        """
        first = self.run_dir.nodes(nodes)
        if first != nodes:
            moved = next(client for client in nodes if first.get(client) != nodes[client])
            problem = f"client {moved} was another node before"
            raise FedgenError("resume", problem, "start the nodes with the numbers that they had")
        ledgers = rounds.accounts(required=1.0)
        for client, account in ledgers.items():
            seen = dict(state.spends.get(client, {}))
            seen.pop(NonPrivateDpEvent(), None)
            if any(account.spend.get(event, 0) < count for event, count in seen.items()):
                problem = f"the ledger of client {client} lacks releases that the server received"
                raise FedgenError("resume", problem, "restore it: spend is never forgotten")
        self._check_responses_complete(state, ledgers)
        if self._over:
            self.accounts.ledgers.update(ledgers)
        elif self.ready.privacy.noise == "secure":
            self._merge_later_charges(state, ledgers)

    def _merge_later_charges(self, state: RunState, ledgers: Mapping[int, Account]) -> None:
        """Merge the charges that ledgers have after the checkpoint into the state, unless stored
        responses are sent again."""
        if self.method.plan.resends_responses:
            return
        for client, account in ledgers.items():
            state.spends[client] = elementwise_max(state.spends.get(client, {}), account.spend)
            state.samples[client] = max(state.samples[client], account.samples)
            state.queries[client] = max(state.queries[client], account.releases)

    def _on_round_start(self, round_: int) -> None:
        if self.ready.privacy.noise == "secure":  # else repeats are identical
            self.run_dir.mark_started(round_)
            self.accounts.started[round_] += 1

    def _on_sum_opened(self, round_: int, query: str, clients: list[int]) -> None:
        """Raise NoResponseError for a second sum over other clients with the same streams, after a
        seeded run was resumed: the difference would be the response of one client. In mode
        ``secure``, streams are new each time.
        """
        if self.ready.privacy.noise == "secure":
            return
        of = digest(json.dumps(clients).encode())
        if self.run_dir.record_sum(query, of) != of:
            raise NoResponseError(
                "resume",
                f"round {round_ + 1} was summed over a different set of clients before",
                "resume when the same nodes respond, or start a new run",
            )

    def _on_failure(self, failure: Failure) -> None:
        if failure.kind not in NON_DROPOUTS:
            self.mark_dropout()
        self.run_dir.add_failure(asdict(failure))

    def mark_dropout(self) -> None:
        """Record that a missing response may have revealed a cohort, before anything else can end
        the process: in the account of the data, which no copy reverts, and in the directory."""
        if not self.run_dir.unanswered.exists():
            try:
                if self.spent is not None:
                    self.spent.record_dropout(self.name)
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
                raise Interrupted(self._resume_command(f"after round {state.rounds}"))

        def prepared(done: int, of: int) -> None:
            self.progress.show("warm start", done, of, "")
            if time.monotonic() - self._kept > _WARM_START_CHECKPOINT_SECONDS:
                keep()
            stop_if_asked()

        def finished(state: RunState, facts: RoundFacts) -> None:
            self._metrics_log.log_round(state, facts)
            last = state.rounds == self.ready.privacy.budget.rounds
            due = is_due(state, facts, self.config.runtime.checkpoint_every)
            due |= time.monotonic() - self._kept > _CHECKPOINT_SECONDS
            # responses are not queried again; seeded ones can be
            once, secret = self.method.plan.one_time_queries, self.ready.privacy.noise == "secure"
            due |= state.rounds == once
            due |= state.rounds < once and self.method.plan.is_short and secret
            # of an actor that died, another one has computed the response
            died = self._reserves and has_dropout(self.ready, self.run_dir, self.name)
            if (due and not last) or died:
                keep()
            if died:
                raise NoResponseError(
                    "runtime",
                    "the process of a client died during a response, which may reveal whether "
                    "it was sampled",
                    f"fedgen train resume={self.run_dir.path} resumes at the ε that accounts "
                    "for it",
                )
            self._inject_server_death(state, facts)
            if not last:
                stop_if_asked()

        if not state.prepared:
            rounds.prepare(prepared)
            keep()
        stop_if_asked()
        streams, budget = self.ready.streams.at("server"), self.ready.privacy.budget
        until = min(self._until or budget.rounds, budget.rounds)  # a dropout may have left fewer
        self.stopped = rounds.run(streams, budget, finished, until)
        if self.stopped is None and state.rounds < budget.rounds:
            self.stopped = ENDED
            # the time of ending may depend on the responses: the ε of all rounds covers that
            state.samples = Counter(dict.fromkeys(range(self.clients), budget.samples_per_client))
        if self.stopped:
            self._metrics_log.finish(state)

    def _resume_command(self, where: str) -> str:
        return f"interrupted {where}; continue with: fedgen train resume={self.run_dir.path}"

    def _inject_server_death(self, state: RunState, facts: RoundFacts) -> None:
        """Kill the server after a round, once, as an injected fault."""
        mark, fatal = self.run_dir.path / "server_died", self.config.runtime.faults.server_dies
        if state.rounds - facts.rounds < fatal <= state.rounds and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_finished(self) -> bool:
        """Return whether no client is left to query; an extended run queries more."""
        saved = checkpoint.load(self.run_dir.checkpoints)
        return saved is not None and self._has_all_rounds(saved[1])

    def _has_all_rounds(self, metadata: checkpoint.Metadata) -> bool:
        rounds = self.ready.privacy.budget.rounds
        return metadata.finished and rounds <= metadata.total_rounds

    def _restore(self) -> RunState:
        """Return the state of the last checkpoint, or an initial one. In mode ``secure``, releases
        after the checkpoint remain charged: they are repeated with new noise or, if the plan says
        so, sent again."""
        saved = checkpoint.load(self.run_dir.checkpoints)
        fresh = self.method.server.init(self.ready.streams.at("server"))
        ledgers = self._own_ledgers()
        self._check_responses_complete(saved[0] if saved else RunState(fresh), ledgers)
        if saved is None:
            self.run_dir.truncate()
            state = RunState(_start_state(fresh, self.config.start))
        else:
            state, metadata = saved
            state.server = checkpoint.server_state(state, fresh, self.run_dir.checkpoints)
            self.run_dir.truncate(metadata.metrics[0])
            self.clock = Clock(metadata.seconds, metadata.parts)
            self._over, self.stopped = self._has_all_rounds(metadata), metadata.stopped
            if metadata.finished and not self._over:  # it was extended
                self.stopped, state.kept_tags = None, {}
        state.failures = self.run_dir.failures()
        count_unplanned(state, self.run_dir)
        if self._over:
            self.accounts.ledgers.update(ledgers)
        elif self.ready.privacy.noise == "secure":
            self._merge_later_charges(state, ledgers)
        return state

    def _check_responses_complete(self, kept: RunState, ledgers: Mapping[int, Account]) -> None:
        """Raise FedgenError if a client was charged for a sum that is in no checkpoint, and the
        plan has no substitute for it."""
        plan = self.method.plan
        if plan.resends_responses or self.ready.privacy.noise == "seeded":
            return
        if kept.rounds >= plan.one_time_queries and plan.query_rounds is None:
            return
        again = plan.is_short and plan.query_rounds is not None and not plan.is_trusted
        remedy = " (with privacy.threshold=all secure sums are sent again)" if again else ""
        for client, account in ledgers.items():
            if account.releases > kept.queries[client]:
                raise FedgenError(
                    "resume",
                    f"client {client} was charged for a response to round {kept.rounds + 1} "
                    "that was lost, and the plan includes no further one",
                    f"start a new run{remedy}; the ε of this one stays spent",
                )

    def _own_ledgers(self) -> dict[int, Account]:
        seeded = self.ready.privacy.noise == "seeded"
        return open_ledgers(self.run_dir, self.name, self.clients, seeded)

    def _checkpoint(self, state: RunState, last: bool = False) -> None:
        metadata = checkpoint.Metadata(
            metrics=self.run_dir.size(),
            started=self.accounts.started.total(),
            seconds=self.clock.rounds,
            parts=self.clock.parts,
            finished=last,
            total_rounds=self.ready.privacy.budget.rounds,
            stopped=self.stopped,
        )
        checkpoint.save(self.run_dir.checkpoints, state, metadata)
        self._kept, self._kept_rounds = time.monotonic(), state.rounds

    # --- output -----------------------------------------------------------------------------------

    def _write_output(self, state: RunState) -> Path:
        """Write the privacy record first, then the release, then its evaluation."""
        for path in self.run_dir.clients.glob("*/*.safetensors"):
            path.unlink()  # critics of clients that missed the last message
        finish_run(
            self.spent, self.name, [self.accounts.planned(n) for n in state.samples.values()]
        )
        record = self.accounts.record(state, self.stopped)
        words = self.accounts.describe_release(state, self.stopped is not None)
        if (registry := registry_facts(self.ready, self.run_dir, record, words)) is not None:
            record["registry"] = registry
        self.run_dir.write("privacy", record)
        # after a resume without enough budget for another round
        if self.stopped and state.rounds < self.method.plan.min_rounds:
            raise FedgenError(
                "rounds", f"{self.stopped}; the generator was not trained", "start a new run"
            )
        if self.accounts.selected is None:
            epsilon_figure(self.run_dir, self.ready.privacy.delta)
        weights = self.method.server.generator(state.server)
        # same memory layout as after loading, on which rounding may depend
        generator = {name: value.contiguous() for name, value in sorted(weights.items())}
        if self.ready.privacy.noise == "secure" and not is_unselected(self.ready, record):
            self._write_account(state)
        sha256, grid = publish(self.ready, self.run_dir, generator, record, words)
        results = build_results(
            self.ready, self.run_dir, state, record, self.clock, self.memory.peak, self.stopped
        )
        results |= {"generator_sha256": sha256, "coherence": coherence(grid)}
        labels = np.arange(self.ready.dataset.classes).repeat(10)  # as in publish
        results["looks"] = (
            verdict(grid, labels) if self.method.server.distinct_images is None else None
        )
        before = self.run_dir.results() if self.run_dir.finished else {}
        if before.get("generator_sha256") == results["generator_sha256"]:
            # resumed at its end: it may have been evaluated differently since
            kept = {name: before[name] for name in JUDGED if name in before}
            self.run_dir.write("results", {**results, **kept})
            return self.run_dir.path
        # written first without it: a failed evaluation loses nothing
        nothing: dict[str, Any] = {"gen2real": {}, "real2real": {}, "real2gen": {}}
        self.run_dir.write("results", {**results, **nothing, "judged": False})
        judged = evaluate_run(self.ready, generator, self.progress, self.run_dir)
        self.run_dir.write("results", {**results, **judged})
        return self.run_dir.path

    def _write_account(self, state: RunState) -> None:
        """Write the signed accounts: of remote clients by their own keys, of a simulation by the
        key of this machine."""
        accounts, stopped = self._signed_accounts, self.stopped is not None
        if self.ready.dataset.is_remote:
            statements = [json.loads(account["text"]) for account in accounts]
            lost = self.accounts.without_bound(self.accounts.spends(state))
            digests = {text["settings"] for text in statements}
            settings_digest = min(digests, default="")
            accounts = [
                account
                for account, text in zip(accounts, statements, strict=True)
                if text["clients"][0][0] not in lost
            ]
        else:
            settings_digest = self.run_dir.identity()["settings"]
            signer = Signer(load_or_create_key(fedgen_home() / MACHINE_KEY), None)
            accounts = self.accounts.signed_account(
                state, stopped, self.name, settings_digest, signer
            )
        text = account_file(self.name, settings_digest, self.clients, accounts)
        write_atomic(self.run_dir.public / "account.json", text.encode(), shared=True)


def _start_state(fresh: Tensors, start: str | None) -> Tensors:
    """Return the initial state of the server, with networks and optimizers of the run ``start``
    unless None.

    Raises:
        FedgenError: if there is no such run, it has other networks, or nothing to start from.
    """
    if start is None:
        return fresh
    saved = checkpoint.load(RunDir(Path(str(start))).checkpoints)
    if saved is None:
        raise FedgenError("start", f"{start} has no checkpoint", "give a run directory")
    fresh_tensors, start_tensors = (
        {name: value for name, value in state.items() if name.split("/")[0] in _CARRIED}
        for state in (fresh, main_method_state(saved[0].server))
    )
    if not any(name.startswith("generator/") for name in fresh_tensors):
        raise FedgenError("start", "the method has no generator that learns", "take start=null")
    shapes = [
        {name: value.shape for name, value in state.items()}
        for state in (fresh_tensors, start_tensors)
    ]
    if shapes[0] != shapes[1]:
        raise FedgenError("start", f"{start} has other networks", "take the same method's settings")
    return {
        **fresh,
        **{name: start_tensors[name].to(value.device) for name, value in fresh_tensors.items()},
    }


def _label_counts(ready: Setup) -> NDArray[np.int64]:
    """Return the number of images per client and label, (clients, classes)."""
    classes = ready.dataset.classes
    labels = (ready.dataset.labels[shard] for shard in ready.shards)
    return np.stack([np.bincount(client_labels, minlength=classes) for client_labels in labels])
