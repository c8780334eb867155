"""A training run from configuration to results: the walk through every room."""

from __future__ import annotations

import hashlib
import json
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
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from fedgen.coins import Coins
from fedgen.errors import FedgenError
from fedgen.evaluation.utility import accuracies
from fedgen.experiments import settings
from fedgen.experiments.settings import Setup, build, view
from fedgen.federation import checkpoint
from fedgen.federation.client_app import ClientHome, client_app
from fedgen.federation.client_store import ClientStore
from fedgen.federation.rounds import ClientFailedError, RoundFacts, Rounds, RunState
from fedgen.federation.server_app import server_app, start
from fedgen.method import Tensors
from fedgen.privacy.accounting import Epsilon, epsilon
from fedgen.privacy.events import in_words, to_json
from fedgen.privacy.ledger import Ledger, larger
from fedgen.reporting.figures import epsilon_against_rounds, sample_grid
from fedgen.reporting.progress import RunProgress, bytes_in_words, epsilon_in_words
from fedgen.reporting.run_dir import RunDir, or_null, write_text

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
    if config.resume is not None:
        run_dir, config, identity = RunDir.open(Path(config.resume), "resume")
        ready = settings.setup(config)
    else:
        ready = settings.setup(config)
        run_dir, identity = _new_run(config)
    return Training(ready, run_dir, identity).go()


def _new_run(config: DictConfig) -> tuple[RunDir, dict[str, Any]]:
    settled = {k: v for k, v in OmegaConf.to_container(config, resolve=True).items()  # type: ignore[union-attr]
               if k != "run_dir"}
    name = hashlib.blake2b(json.dumps(settled, sort_keys=True).encode(), digest_size=8).hexdigest()
    if config.privacy.noise == "secure":
        name = secrets.token_hex(8)  # two runs with the same settings are two runs
    place = config.run_dir or time.strftime(
        f"runs/{config.names.method}-{config.names.data}-%Y%m%d-%H%M%S"
    )
    identity = {"run": name}
    return RunDir.create(Path(place), config, identity), identity


class Training:
    """One run: its clients' homes, its rounds, and what it leaves behind."""

    def __init__(self, ready: Setup, run_dir: RunDir, identity: dict[str, Any]) -> None:
        self.ready, self.run_dir = ready, run_dir
        self.config, self.method = ready.config, ready.method
        self.store = ClientStore(run_dir.clients, ready.config.runtime.store == "memory")
        seeded = ready.privacy.noise == "seeded"
        self.ledgers = {
            client: Ledger(
                run_dir.clients / str(client) / "ledger.jsonl", identity["run"], client, seeded
            )
            for client in range(len(ready.shards))
        }
        self.homes = {
            client: ClientHome(
                client, ready.method.client, ready.dataset.shard(index),
                ready.coins.at("client", client), self.store, self.ledgers[client],
                ready.privacy.budget.rows,
            )
            for client, index in enumerate(ready.shards)
        }
        self.clock = Clock()
        self.stopped: str | None = None
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
            rounds.hello()
            rounds.prepare(self._prepared)
            self._checkpoint(state)
            self.stopped = rounds.run(server_coins, self.ready.privacy.budget, self._finished)

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
        if self.ready.privacy.noise == "secure":
            for client, ledger in self.ledgers.items():
                state.rows[client] = max(state.rows[client], ledger.rows)
        self._board = _board(self.run_dir, state.rounds)
        return state

    def _checkpoint(self, state: RunState, last: bool = False) -> None:
        extra = {
            "metrics": self.run_dir.metrics_size(),
            "seconds": self.clock.rounds,
            "parts": self.clock.parts,
        }
        checkpoint.save(self.run_dir.checkpoints, state, None if last else self.store, extra)

    # --- while it runs ----------------------------------------------------------------------------

    def _announce(self) -> None:
        privacy, plan = self.ready.privacy, self.method.plan
        epsilons = {
            name: view(
                self.method, privacy.budget, privacy.budget.rounds, privacy.budget.rows,
                privacy.delta, name == "server",
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

    def _prepared(self, done: int, of: int) -> None:
        self.progress.show("warm start", done, of, "")

    def _finished(self, state: RunState, facts: RoundFacts) -> None:
        """After each round: numbers, pictures and checkpoints as often as configured."""
        self.clock.add(facts)
        last = state.rounds == self.ready.privacy.budget.rounds
        if state.rounds % self.config.log_every == 0 or last or state.rounds == 1:
            self._log(state, facts)
        if state.rounds % self.config.sample_every == 0 or last:
            self._draw_samples(state)
        if state.rounds % self.config.runtime.checkpoint_every == 0 and not last:
            self._checkpoint(state)

    def _log(self, state: RunState, facts: RoundFacts) -> None:
        views = self._views(state)
        down, up = sum(state.sent.values()), sum(state.received.values())
        line = {
            "round": state.rounds,
            "epsilon": {name: found.value for name, found in views.items()},
            "claimed_epsilon": self._claimed(state.rounds),
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
            "rounds", state.rounds, self.ready.privacy.budget.rounds,
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

    def _sample(self, generator: Tensors, labels: Tensor, purpose: str) -> Any:
        return draw_samples(self.ready, generator, labels, self.ready.coins.at("samples", purpose))

    # --- privacy ----------------------------------------------------------------------------------

    def _views(self, state: RunState) -> dict[str, Epsilon]:
        """epsilon of the busiest client, by adversary, so far."""
        spends = {tuple(sorted(s.items(), key=repr)) for s in self._spends(state).values()}
        delta = self.ready.privacy.delta
        server = max(
            (epsilon(dict(spend), delta) for spend in spends),
            key=lambda found: found.or_infinity,
            default=epsilon({}, delta),
        )
        return {"server": server, "release": self._release(state, server)}

    def _release(self, state: RunState, server: Epsilon) -> Epsilon:
        """What the published generator shows of a client that spent ``server``."""
        event = self.method.plan.release
        if event is None or state.rounds == 0:
            return server
        budget, delta = self.ready.privacy.budget, self.ready.privacy.delta
        found = settings.release_epsilon(event(state.rounds), delta, budget.stop_probability)
        return settings.smaller(found, server)

    def _spends(self, state: RunState) -> dict[int, Any]:
        """Each client's spend: its own ledger's or the server's, whichever is larger."""
        return {
            client: larger(ledger.spend(), state.spends.get(client, {}))
            for client, ledger in self.ledgers.items()
        }

    def _claimed(self, rounds: int) -> float | None:
        claim = self.method.plan.claim
        return None if claim is None else or_null(claim.epsilon(rounds, self.ready.privacy.delta))

    def _privacy_record(self, state: RunState) -> dict[str, Any]:
        plan, privacy = self.method.plan, self.ready.privacy
        claim = plan.claim
        clients = {}
        for client, spend in self._spends(state).items():
            server = epsilon(spend, privacy.delta)
            clients[str(client)] = {
                "server": or_null(server.value),
                "release": or_null(self._release(state, server).value),
                "releases": self.ledgers[client].releases,
                "events": [[to_json(event), count] for event, count in spend.items()],
            }
        views = {}
        for name, found in self._views(state).items():
            amplified, reason = plan.amplified_by[name], plan.reasons[name]
            if name == "release" and plan.release is not None and found.accountant == "Gaussian, exact":
                amplified, reason = None, "the bound against the server is the smaller one"
            views[name] = {
                "epsilon": or_null(found.value),
                "accountant": found.accountant,
                "second_opinion": found.second_opinion,
                "amplified_by": amplified,
                "reason": reason,
            }
        return {
            "schema": 1,
            "delta": privacy.delta,
            "unit": plan.unit.value,
            "relation": plan.relation.value,
            "sampler": plan.sampler,
            "noise": privacy.noise,
            "noise_multiplier": privacy.noise_multiplier,
            "rounds": state.rounds,
            "stopped": self.stopped,
            "views": views,
            "claimed": None if claim is None else {
                "epsilon": self._claimed(state.rounds),
                "formula": claim.formula,
                "source": claim.source,
            },
            "clients": clients,
        }

    # --- what it leaves ---------------------------------------------------------------------------

    def _leave(self, state: RunState) -> Path:
        """The record of privacy first, then what is published, then how good it is."""
        self._checkpoint(state, last=True)
        self.store.forget()
        record = self._privacy_record(state)
        self.run_dir.write("privacy", record)
        self._figure()
        generator = self.method.server.generator(state.server)
        labels = torch.arange(self.ready.dataset.classes).repeat_interleave(10)
        sample_grid(
            self._sample(generator, labels, "grid"), 10, self.run_dir.public / "samples.png"
        )
        weights = {name: value.cpu().contiguous() for name, value in sorted(generator.items())}
        data = safetensors.torch.save(weights)
        (self.run_dir.public / "generator.safetensors").write_bytes(data)
        words = in_words(max(self._spends(state).values(), key=lambda s: sum(s.values())))
        write_text(self.run_dir.public / "PRIVACY.md", statement(record, words))
        self._write_results(state, record, generator, hashlib.sha256(data).hexdigest())
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

    def _write_results(
        self, state: RunState, record: dict[str, Any], generator: Tensors, digest: str
    ) -> None:
        utility = evaluate(self.ready, generator, self.progress)
        rounds = max(state.rounds, 1)
        self.run_dir.write("results", {
            "schema": 1,
            "method": self.config.names.method,
            "data": self.config.names.data,
            "clients": len(self.homes),
            "rounds": state.rounds,
            "seed": self.config.seed,
            "stopped": self.stopped,
            "epsilon": {name: found["epsilon"] for name, found in record["views"].items()},
            **utility,
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
            "generator_sha256": digest,
        })


def evaluate(ready: Setup, generator: Tensors, progress: RunProgress) -> dict[str, Any]:
    """gen2real, and the same classifiers trained on real rows (``real2real``: it touches private
    rows outside a mechanism, and stays on the server side)."""
    chosen, data = ready.config.evaluation, ready.dataset
    classifiers = {name: build(each) for name, each in chosen.classifiers.items()}
    if not classifiers:
        return {"gen2real": {}, "real2real": {}}
    coins = ready.coins.at("evaluation")
    labels = torch.randint(0, data.classes, (chosen.samples,), generator=coins.public("labels"))
    images = draw_samples(ready, generator, labels, coins.at("samples"))
    real = torch.randperm(len(data.labels), generator=coins.public("real"))[: chosen.samples]
    done = 0

    def step(_: str) -> None:
        nonlocal done
        done += 1
        progress.show("evaluation", done, 2 * len(classifiers), "")

    rest = (data.test_images, data.test_labels, data.classes, chosen.seeds, step)
    real_index = real.numpy()
    return {
        "gen2real": accuracies(classifiers, images, labels.numpy(), *rest),
        "real2real": accuracies(
            classifiers, data.images[real_index], data.labels[real_index], *rest
        ),
    }


def draw_samples(ready: Setup, generator: Tensors, labels: Tensor, coins: Coins) -> Any:
    """Samples (n, channels, height, width) uint8, made in batches of 1,000."""
    batches = [
        ready.method.server.sample(generator, part, coins.at("batch", number))
        for number, part in enumerate(labels.split(1000))
    ]
    return (torch.cat(batches) * 255).round().to(torch.uint8).numpy()


def statement(record: dict[str, Any], words: str) -> str:
    """The privacy statement that goes with what is published."""
    unit = "one record (one image and its label)" if record["unit"] == "record" else (
        "one client (all of its images)"
    )
    release = record["views"]["release"]
    head = ""
    if record["noise"] == "seeded":
        head = (
            "**An experiment, not for release.** The noise of this run follows from its seed: "
            "whoever knows the seed can remove it.\n\n"
        )
    if release["epsilon"] is None:
        bound = f"There is no bound: {release['reason']}."
    else:
        bound = (
            f"(ε, δ)-differential privacy with ε = {release['epsilon']:.4g} and "
            f"δ = {record['delta']:g} ({release['accountant']}), against anybody who sees this "
            "folder and nothing else of the run."
        )
    return (
        f"# What this generator tells about the private data\n\n{head}{bound}\n\n"
        f"- Protected is {unit}; neighbours: {record['relation'].replace('_', ' ')}.\n"
        f"- Draws: {record['sampler']}. {release['amplified_by'] or 'No amplification'}"
        f"{'' if release['amplified_by'] else ': ' + (release['reason'] or '')}.\n"
        f"- Busiest client: {words}.\n"
        "- Not covered: timing, what is known from elsewhere, and choices among several runs.\n"
    )


def _board(run_dir: RunDir, rounds: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run_dir.path), purge_step=rounds + 1)  # type: ignore[no-untyped-call]


def _sheet(path: Path) -> Any:
    from PIL import Image

    pixels = np.asarray(Image.open(path))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def load_run(path: Path) -> tuple[Setup, RunDir, Tensors]:
    """A finished run: its setup, and its published generator.

    Raises:
        FedgenError: if it has not been finished.
    """
    run_dir, config, _ = RunDir.open(path, "run")
    file = run_dir.public / "generator.safetensors"
    try:
        weights = safetensors.torch.load(file.read_bytes())
    except (OSError, safetensors.SafetensorError) as error:
        raise FedgenError(
            "run", f"{path} has no readable generator", f"finish it: fedgen train resume={path}"
        ) from error
    return settings.setup(config), run_dir, weights


def sample(config: DictConfig) -> Path:
    """Writes samples of a finished run: images (n, channels, height, width) uint8, labels (n,)."""
    out = Path(config.out)
    if out.suffix != ".npz":
        raise FedgenError("out", f"{out} is no .npz file", "give out=FILE.npz")
    if not isinstance(config.n, int) or config.n < 1:
        raise FedgenError("n", f"must be a positive whole number, got {config.n!r}", "e.g. n=1000")
    ready, _, generator = load_run(Path(config.run))
    coins = Coins.of(config.seed, "seeded").at("sample")
    labels = torch.randint(
        0, ready.dataset.classes, (config.n,), generator=coins.public("labels")
    )
    images = draw_samples(ready, generator, labels, coins)
    try:
        np.savez_compressed(out, images=images, labels=labels.numpy())
    except OSError as error:
        raise FedgenError("out", f"{out} cannot be written", "choose another place") from error
    return out


def evaluate_run(config: DictConfig) -> Path:
    """Evaluates a finished run again and renews its results."""
    ready, run_dir, generator = load_run(Path(config.run))
    ready.config.evaluation = config.evaluation
    with RunProgress() as progress:
        utility = evaluate(ready, generator, progress)
    results = json.loads((run_dir.path / "results.json").read_text())
    run_dir.write("results", {**results, **utility})
    return run_dir.path


def summary(path: Path) -> str:
    """What a run came to, for people."""
    results = json.loads((path / "results.json").read_text())
    record = json.loads((path / "privacy.json").read_text())
    eps = {name: epsilon_in_words(value) for name, value in results["epsilon"].items()}
    lines = [
        f"proven ε {eps['server']} (server), {eps['release']} (release) per {record['unit']} at "
        f"δ = {record['delta']:g}"
        + (f"; the paper's formula would claim {record['claimed']['epsilon']:.4g}"
           if record["claimed"] and record["claimed"]["epsilon"] is not None else "")
    ]
    if record["noise"] == "seeded":
        lines.append("noise follows from the seed: an experiment, not for release")
    if results["stopped"]:
        lines.append(f"stopped after round {results['rounds']}: {results['stopped']}")
    for name, found in results["gen2real"].items():
        real = results["real2real"][name]["mean"]
        lines.append(f"gen2real {name}: {found['mean']:.1%} (trained on real rows: {real:.1%})")
    parts = ", ".join(f"{n} {s:.3g} s" for n, s in results["seconds_per_round"].items())
    if results["rounds_per_second"]:
        lines.append(
            f"{results['rounds_per_second']:.3g} rounds/s ({parts} a round), peak memory "
            f"{bytes_in_words(results['peak_rss_bytes'])}"
        )
    for name in ("public/samples.png", "public/generator.safetensors", "privacy.json",
                 "results.json", "epsilon.png"):
        lines.append(str(path / name))
    return "\n".join(lines)


