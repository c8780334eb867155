"""A training run from configuration to results: the walk through every room."""

from __future__ import annotations

import hashlib
import resource
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from flwr.app import Context
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from fedgen.errors import FedgenError
from fedgen.experiments import settings
from fedgen.experiments.accounts import Accounts
from fedgen.experiments.generation import describe, draw_samples, evaluate
from fedgen.experiments.settings import Setup, build, view
from fedgen.federation import checkpoint
from fedgen.federation.client_app import ClientHome, client_app
from fedgen.federation.client_store import ClientStore
from fedgen.federation.rounds import ClientFailedError, RoundFacts, Rounds, RunState
from fedgen.federation.server_app import server_app, start
from fedgen.files import digest, write_whole
from fedgen.method import Tensors
from fedgen.privacy.ledger import Ledger
from fedgen.reporting.figures import epsilon_against_rounds, sample_grid
from fedgen.reporting.progress import RunProgress, bytes_in_words, epsilon_in_words
from fedgen.reporting.run_dir import RunDir
from fedgen.reporting.words import statement

_WARM_START_CHECKPOINT_SECONDS = 30.0


@dataclass
class Clock:
    """Seconds spent, also before a resume."""

    rounds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, facts: RoundFacts) -> None:
        """Counts a round."""
        self.rounds += sum(facts.seconds.values())
        for name, seconds in facts.seconds.items():
            self.parts[name] = self.parts.get(name, 0.0) + seconds


def train(config: DictConfig) -> Path:
    """Trains as configured, or goes on with ``config.resume``; returns the run directory."""
    if config.resume is None:
        ready = settings.setup(config)
        run_dir, name = _new_run(ready)
        with run_dir.locked():
            return Training(ready, run_dir, name).go()
    run_dir, config, identity = RunDir.open(Path(config.resume), "resume")
    ready = settings.setup(config)
    _check_same_run(run_dir, ready, identity)
    with run_dir.locked():
        return Training(ready, run_dir, identity["run"]).go()


def _new_run(ready: Setup) -> tuple[RunDir, str]:
    """A run directory, and the run's name: seeded runs with the same settings are the same run."""
    config = ready.config
    name = secrets.token_hex(8) if ready.privacy.noise == "secure" else _settings_digest(config)
    place = config.run_dir or time.strftime(
        f"runs/{config.names.method}-{config.names.data}-%Y%m%d-%H%M%S"
    )
    identity = {"run": name, "data": ready.dataset.digest()}
    return RunDir.create(Path(place), config, identity), name


def _settings_digest(config: DictConfig) -> str:
    alone = OmegaConf.masked_copy(config, [str(k) for k in config if k != "run_dir"])
    return digest(OmegaConf.to_yaml(alone, resolve=True, sort_keys=True).encode())


def _check_same_run(run_dir: RunDir, ready: Setup, identity: dict[str, Any]) -> None:
    """Raises FedgenError if a run cannot go on as the run that it was: with other data or settings
    the same coins would sanitize something else."""
    if identity["data"] != ready.dataset.digest():
        raise FedgenError("resume", f"{run_dir.path} was trained on other data", "bring it back")
    if ready.privacy.noise == "seeded" and identity["run"] != _settings_digest(ready.config):
        raise FedgenError("resume", f"{run_dir.path}/config.yaml was altered", "restore it")
    if (run_dir.checkpoints / checkpoint.NAME).exists():
        for client in range(len(ready.shards)):
            if not (run_dir.clients / str(client) / "ledger.jsonl").exists():
                raise FedgenError(
                    "resume",
                    f"the ledger of client {client} is missing from {run_dir.path}",
                    "restore it: spend is never forgotten",
                )
    elif (run_dir.path / "privacy.json").exists():
        raise FedgenError("resume", f"{run_dir.checkpoints} is missing", "restore it")


class Training:
    """One run: its clients' homes, its rounds, and what it leaves behind."""

    def __init__(self, ready: Setup, run_dir: RunDir, name: str) -> None:
        self.ready, self.run_dir = ready, run_dir
        self.config, self.method = ready.config, ready.method
        self.store = ClientStore(run_dir.clients, ready.config.runtime.store == "memory")
        seeded = ready.privacy.noise == "seeded"
        self.ledgers = {
            client: Ledger(run_dir.clients / str(client) / "ledger.jsonl", name, client, seeded)
            for client in range(len(ready.shards))
        }
        self.homes = {
            client: ClientHome(
                client,
                ready.method.client,
                ready.dataset.shard(index),
                ready.coins.at("client", client),
                self.store,
                self.ledgers[client],
                ready.privacy.budget.rows,
            )
            for client, index in enumerate(ready.shards)
        }
        self.accounts = Accounts(ready.method, ready.privacy, self.ledgers)
        self.clock = Clock()
        self.stopped: str | None = None
        self._last_facts: RoundFacts | None = None
        self._over = False  # all rounds are done; only what a run leaves may be missing
        self._kept = time.monotonic()
        self.progress = RunProgress()

    def go(self) -> Path:
        """Trains, then writes everything that a run leaves."""
        state = self._restore()
        app = client_app(self._home)
        grid = build(self.config.runtime.grid)(app=app, clients=len(self.homes))
        strategy = build(self.config.method.strategy)(
            cohort=self.method.cohort,
            trained_per_round=self.method.trained_per_round,
            coins=self.ready.coins.at("strategy"),
        )
        rounds = Rounds(grid, strategy, self.method, state)
        server_coins = self.ready.coins.at("server")

        def run(_: object) -> None:
            if self._over:
                return
            rounds.hello()
            rounds.prepare(lambda done, of: self._prepared(state, done, of))
            self._checkpoint(state)
            self.stopped = rounds.run(server_coins, self.ready.privacy.budget, self._finished)
            if self.stopped and self._last_facts is not None:
                self._log(state, self._last_facts)
                self._draw_samples(state)

        self._announce()
        with self.progress:
            try:
                start(server_app(run), grid)
            except ClientFailedError as error:
                cause = getattr(grid, "exception", None)
                raise cause if isinstance(cause, FedgenError) else error from cause
            return self._leave(state)

    def _home(self, context: Context) -> ClientHome:
        return self.homes[int(str(context.node_config["partition-id"]))]

    def _restore(self) -> RunState:
        """The state of the last checkpoint, or a fresh one. In ``secure`` mode, what was asked
        after it stays asked."""
        found = checkpoint.load(self.run_dir.checkpoints, self.store)
        if found is None:
            self.run_dir.cut_metrics(0)
            state = RunState(self.method.server.init(self.ready.coins.at("server")))
        else:
            state, extra = found
            self.run_dir.cut_metrics(extra["metrics"])
            self.clock = Clock(extra["seconds"], extra["parts"])
            self._over, self.stopped = extra["over"], extra["stopped"]
        for client, ledger in self.ledgers.items():
            own, seen = ledger.spend(), state.spends.get(client, {})
            if any(own.get(event, 0) < count for event, count in seen.items()):
                raise FedgenError(
                    "resume",
                    f"the ledger of client {client} lacks what the server has seen",
                    "restore it: spend is never forgotten",
                )
            ledger.rewind(state.rounds)
            state.rows[client] = max(state.rows[client], ledger.rows)
        self._board = _board(self.run_dir, state.rounds)
        return state

    def _checkpoint(self, state: RunState, last: bool = False) -> None:
        extra = {
            "metrics": self.run_dir.metrics_size(),
            "seconds": self.clock.rounds,
            "parts": self.clock.parts,
            "over": last,
            "stopped": self.stopped,
        }
        checkpoint.save(self.run_dir.checkpoints, state, None if last else self.store, extra)
        self._kept = time.monotonic()

    # --- while it runs ----------------------------------------------------------------------------

    def _announce(self) -> None:
        privacy, plan = self.ready.privacy, self.method.plan
        epsilons = {
            name: view(
                self.method,
                privacy.budget,
                privacy.budget.rounds,
                privacy.budget.rows,
                privacy.delta,
                name == "server",
            ).value
            for name in ("server", "release")
        }
        noise = "none" if privacy.noise_multiplier is None else f"{privacy.noise_multiplier:.4g}"
        self.progress.say(
            f"{self.config.names.method} on {self.config.names.data}: "
            f"{len(self.homes)} client{'s' if len(self.homes) > 1 else ''}, at most "
            f"{privacy.budget.rounds} rounds, proven ε ≤ {epsilon_in_words(epsilons['server'])} "
            f"(server), {epsilon_in_words(epsilons['release'])} (release) per {plan.unit.value} at "
            f"δ = {privacy.delta:g}, noise multiplier {noise}"
        )

    def _prepared(self, state: RunState, done: int, of: int) -> None:
        """A warm start may take hours: keep what is done."""
        self.progress.show("warm start", done, of, "")
        if time.monotonic() - self._kept > _WARM_START_CHECKPOINT_SECONDS:
            self._checkpoint(state)

    def _finished(self, state: RunState, facts: RoundFacts) -> None:
        """After each round: numbers, pictures and checkpoints as often as configured."""
        self.clock.add(facts)
        self._last_facts = facts
        last = state.rounds == self.ready.privacy.budget.rounds
        if state.rounds % self.config.log_every == 0 or last or state.rounds == 1:
            self._log(state, facts)
        if state.rounds % self.config.sample_every == 0 or last:
            self._draw_samples(state)
        if state.rounds % self.config.runtime.checkpoint_every == 0 and not last:
            self._checkpoint(state)

    def _log(self, state: RunState, facts: RoundFacts) -> None:
        views = self.accounts.views(state, self.stopped is not None)
        down, up = sum(state.sent.values()), sum(state.received.values())
        line = {
            "round": state.rounds,
            "epsilon": {name: found.value for name, found in views.items()},
            "claimed_epsilon": self.accounts.claimed(state.rounds),
            "answer_norm": facts.answer_norm,
            "clients": facts.clients,
            "bytes": {"up": up, "down": down},
        }
        self.run_dir.add_metrics(line)
        for name, found in views.items():
            if found.value is not None:
                self._board.add_scalar(f"epsilon/{name}", found.value, state.rounds)
        if facts.answer_norm is not None:
            self._board.add_scalar("answer_norm", facts.answer_norm, state.rounds)
        for name, seconds in facts.seconds.items():
            self._board.add_scalar(f"seconds/{name}", seconds, state.rounds)
        self.progress.show(
            "rounds",
            state.rounds,
            self.ready.privacy.budget.rounds,
            f"ε {epsilon_in_words(views['server'].value)} server, "
            f"{epsilon_in_words(views['release'].value)} release  "
            f"{bytes_in_words(up)} up, {bytes_in_words(down)} down  "
            f"{state.rounds / self.clock.rounds:.3g} rounds/s",
        )

    def _draw_samples(self, state: RunState) -> None:
        labels = torch.arange(self.ready.dataset.classes).repeat_interleave(10)
        images = self._sample(self.method.server.generator(state.server), labels, "grid")
        name = f"round_{state.rounds:06d}.png"
        sample_grid(images, 10, self.run_dir.samples / name)
        self._board.add_image("samples", _sheet(self.run_dir.samples / name), state.rounds)

    def _sample(self, generator: Tensors, labels: Tensor, purpose: str) -> NDArray[np.uint8]:
        return draw_samples(self.method, generator, labels, self.ready.coins.at("samples", purpose))

    # --- what it leaves ---------------------------------------------------------------------------

    def _leave(self, state: RunState) -> Path:
        """The record of privacy first, then what is published, then how good it is."""
        self._checkpoint(state, last=True)
        self.store.forget()
        record = self.accounts.record(state, self.stopped)
        self.run_dir.write("privacy", record)
        self._figure()
        generator = self.method.server.generator(state.server)
        labels = torch.arange(self.ready.dataset.classes).repeat_interleave(10)
        sample_grid(
            self._sample(generator, labels, "grid"), 10, self.run_dir.public / "samples.png"
        )
        weights = {name: value.cpu().contiguous() for name, value in sorted(generator.items())}
        data = safetensors.torch.save(weights)
        write_whole(self.run_dir.public / "generator.safetensors", data)
        write_whole(self.run_dir.public / "generator.json", describe(self.ready).encode())
        words = self.accounts.published_in_words(state, self.stopped is not None)
        write_whole(self.run_dir.public / "PRIVACY.md", statement(record, words).encode())
        results = self._results(state, record, hashlib.sha256(data).hexdigest())
        # a first time without: nothing of a run is lost if its evaluation fails
        self.run_dir.write("results", {**results, "gen2real": {}, "real2real": {}})
        judged = evaluate(self.ready.config.evaluation, self.ready, generator, self.progress)
        self.run_dir.write("results", {**results, **judged})
        self._board.close()
        return self.run_dir.path

    def _figure(self) -> None:
        lines = self.run_dir.metrics()
        epsilon_against_rounds(
            [line["round"] for line in lines],
            {
                "server (proven)": [line["epsilon"]["server"] for line in lines],
                "release (proven)": [line["epsilon"]["release"] for line in lines],
                "claimed by the paper's formula": [line["claimed_epsilon"] for line in lines],
            },
            self.ready.privacy.delta,
            self.run_dir.path / "epsilon.png",
        )

    def _results(self, state: RunState, record: dict[str, Any], sha256: str) -> dict[str, Any]:
        rounds = max(state.rounds, 1)
        return {
            "schema": 1,
            "method": self.config.names.method,
            "data": self.config.names.data,
            "clients": len(self.homes),
            "rounds": state.rounds,
            "seed": self.config.seed,
            "stopped": self.stopped,
            "epsilon": {name: found["epsilon"] for name, found in record["views"].items()},
            "bytes": {
                "up": sum(state.received.values()),
                "down": sum(state.sent.values()),
                "per_client": {
                    str(client): {"up": state.received[client], "down": state.sent[client]}
                    for client in self.homes
                },
            },
            "seconds": self.clock.rounds,
            "rounds_per_second": state.rounds / self.clock.rounds if self.clock.rounds else None,
            "seconds_per_round": {n: s / rounds for n, s in self.clock.parts.items()},
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "generator_sha256": sha256,
        }


def _board(run_dir: RunDir, rounds: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run_dir.path), purge_step=rounds + 1)


def _sheet(path: Path) -> NDArray[np.uint8]:
    from PIL import Image

    pixels = np.asarray(Image.open(path))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
