"""Build the setup of a run's clients, in this or another process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedgen.federation.client.context import ClientSetup, RunTerms
from fedgen.privacy.events import canonical
from fedgen.privacy.spend_db import SpendDb
from fedgen.randomness import RandomStreams
from fedgen.run import setup
from fedgen.run.resume import check_same_data, check_same_noise, open_run
from fedgen.run.setup import Setup
from fedgen.storage.run_dir import RunDir
from fedgen.testing.faults import FaultyClients


@dataclass(frozen=True)
class RunClientSetup:
    """Build the setup of a run's clients in another process, from its run directory."""

    path: str

    def __call__(self) -> ClientSetup:
        """Return the client setup."""
        run_dir, config, identity = open_run(Path(self.path), "run_dir")
        ready = setup.setup(config, identity["branch"])
        check_same_noise(ready, identity, "run_dir")
        check_same_data(ready, run_dir, identity, "run_dir")
        return client_setup(ready, run_dir, identity["run"])


def client_setup(ready: Setup, run_dir: RunDir, name: str) -> ClientSetup:
    """Return what a process needs to run the clients of a run."""
    runtime, folder = ready.config.runtime, run_dir.clients.absolute()
    # only streams derived from the seed: the secret streams of the server stay there
    streams = RandomStreams.from_seed(ready.config.seed, "seeded").at("faults")
    faulty = FaultyClients(ready.faults, streams, runtime.timeout, folder)
    secure = ready.privacy.noise == "secure"
    most = canonical(ready.method.plan.server_event(ready.privacy.budget.samples_per_client))
    terms = RunTerms(
        ready.privacy.budget.samples_per_client,
        name,
        # with one kind of query, the query samples of an honest server bound the spend
        limits=most if len(most) > 1 else None,
        aggregation=ready.method.plan.aggregation,
        stores_response=secure and ready.method.plan.resends_responses,
        masked_sums=runtime.masks,
        reserves=secure and ready.dropouts_reveal_cohorts,
    )
    return ClientSetup(
        program=ready.program,
        shard=lambda client: ready.dataset.shard(ready.shards[client]),
        seed=ready.config.seed,
        domain=ready.domain,
        noise=ready.privacy.noise,
        folder=folder,
        terms=terms,
        in_memory=runtime.get("store") == "memory",
        cache_bytes=runtime.get("cache_gb", 0.0) * 1e9,
        threads=runtime.threads,
        spend_db=SpendDb.default() if secure else None,
        mods=(faulty,) if ready.faults.total else (),
        repetition=ready.repetition,
    )
