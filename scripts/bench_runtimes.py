"""What a runtime adds to a bare loop over the same client and server functions.

GS-WGAN with narrow networks (width 4: the work is not what is measured), 28x28 images, 32 samples a
query, every client answering each of them. The same rounds run twice in turn: as plain function
calls, and through messages, grid, client store and ledger. Prints a table, and last a line of JSON.

    python scripts/bench_runtimes.py [--clients 20] [--rounds 30]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.federation.client_app import ClientHome, client_app
from fedgen.federation.client_store import ClientStore
from fedgen.federation.in_process import InProcessGrid
from fedgen.federation.rounds import Rounds, RunState
from fedgen.method import Method, PublicFacts
from fedgen.methods.gs_wgan import gs_wgan
from fedgen.models import dcgan
from fedgen.privacy.budget import Budget
from fedgen.privacy.ledger import Ledger
from strategies.sample_gradients import SampleGradients


def method(clients: int) -> Method:
    """GS-WGAN with narrow networks."""
    return gs_wgan(
        PublicFacts(clients, None, 10, (1, 28, 28)),
        1.0,
        generator=partial(dcgan.Generator, width=4),
        critic=partial(dcgan.Critic, width=4),
        latent=10,
        batch=32,
        fakes_per_label=4,
        generator_learning_rate=1e-3,
        generator_betas=(0.5, 0.9),
        ema=0.99,
        critics=1,
        critics_per_step=1,
        critic_schedule="public",
        critic_steps=1,
        critic_batch=8,
        critic_learning_rate=1e-3,
        critic_betas=(0.5, 0.9),
        gradient_penalty=10.0,
        drift_penalty=1e-3,
        warm_start=0,
        clip=1.0,
        sanitize="samples",
        routing="mean",
        answerers=1,
        cohort_sampling="fixed",
        device="cpu",
    )


class Bare:
    """The loop without anything around it."""

    def __init__(self, made: Method, shards: list[Shard], coins: Coins) -> None:
        self.method, self.shards, self.coins = made, shards, coins
        self.server = dict(made.server.init(coins.at("server")))
        self.states: list[dict] = [{} for _ in shards]

    def round(self, number: int) -> None:
        """One round of plain calls."""
        client, server, coins = self.method.client, self.method.server, self.coins
        here = coins.at("server")
        broadcast = server.broadcast(self.server, number, here)
        trained = number % len(self.shards)
        self.states[trained] |= client.train(
            self.states[trained],
            broadcast,
            self.shards[trained],
            number,
            coins.at("client", trained),
        )
        query = server.query(self.server, number, here)
        total = torch.zeros(query.rows["images"].shape)
        for i, (state, shard) in enumerate(zip(self.states, self.shards, strict=True)):
            release = client.answer(state, query, shard, number, coins.at("client", i))
            total += torch.from_numpy(release.arrays["gradients"])
        self.server = dict(server.update(self.server, total / len(self.shards), number, here))


class InProcess:
    """The same rounds through messages, grid, store and ledger."""

    def __init__(
        self,
        made: Method,
        shards: list[Shard],
        coins: Coins,
        root: Path,
        memory: bool,
        serialize: bool,
    ) -> None:
        store = ClientStore(root, memory)
        homes = {
            i: ClientHome(
                i,
                made.client,
                shard,
                coins.at("client", i),
                store,
                Ledger(root / str(i) / "ledger.jsonl", "bench", i, seeded=True),
                10**9,
            )
            for i, shard in enumerate(shards)
        }
        app = client_app(lambda context: homes[int(str(context.node_config["partition-id"]))])
        strategy = SampleGradients(made.cohort, made.trained_per_round, coins.at("strategy"))
        state = RunState(made.server.init(coins.at("server")))
        self.rounds = Rounds(InProcessGrid(app, len(shards), serialize), strategy, made, state)
        self.rounds.hello()
        self.coins = coins

    def round(self, number: int) -> None:
        """One round."""
        budget = Budget(number + 1, 10**9, 0.0)
        self.rounds.run(self.coins.at("server"), budget, lambda *_: None)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    coins, clients = Coins.of(0, "seeded"), arguments.clients
    shards = [
        Shard(torch.randint(0, 256, (50, 1, 28, 28), dtype=torch.uint8), torch.arange(50) % 10)
        for _ in range(clients)
    ]
    made = method(clients)
    with tempfile.TemporaryDirectory() as root:
        runners = {
            "bare loop": Bare(made, shards, coins),
            "in process": InProcess(made, shards, coins, Path(root) / "a", True, False),
            "in process, serialized": InProcess(made, shards, coins, Path(root) / "b", True, True),
            "in process, disk store": InProcess(
                made, shards, coins, Path(root) / "c", False, False
            ),
        }
        times: dict[str, list[float]] = {name: [] for name in runners}
        for number in range(arguments.rounds):
            for name, runner in runners.items():
                begin = time.perf_counter()
                runner.round(number)
                times[name].append((time.perf_counter() - begin) * 1e3)
    median = {name: statistics.median(values[2:]) for name, values in times.items()}
    print(f"{clients} clients, {arguments.rounds} rounds, B = 32, medians")
    print(f"{'':26}{'ms a round':>12}{'added ms per client and round':>32}")
    added = {n: (value - median["bare loop"]) / clients for n, value in median.items()}
    for name, value in median.items():
        print(f"{name:26}{value:12.2f}{added[name]:32.3f}")
    print(
        json.dumps(
            {
                "in_process_ms_per_client": round(added["in process"], 4),
                "in_process_over_bare": round(median["in process"] / median["bare loop"], 4),
                "in_process_serialized_ms_per_client": round(added["in process, serialized"], 4),
                "in_process_disk_ms_per_client": round(added["in process, disk store"], 4),
            }
        )
    )


if __name__ == "__main__":
    main()
