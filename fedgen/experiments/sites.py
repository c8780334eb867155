"""What a process needs to be home to a run's clients, here or elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedgen.coins import Coins
from fedgen.experiments import settings
from fedgen.experiments.identity import check_same_noise, check_same_rows, opened
from fedgen.experiments.settings import Setup
from fedgen.federation.client_app import Site, Terms
from fedgen.federation.faults import FaultyClients
from fedgen.privacy.events import canonical
from fedgen.privacy.spent import SpentFile
from fedgen.reporting.run_dir import RunDir


@dataclass(frozen=True)
class SiteOf:
    """Makes the site of a run in another process, from its directory."""

    path: str

    def __call__(self) -> Site:
        """See the class."""
        run_dir, config, identity = opened(Path(self.path), "run_dir")
        ready = settings.setup(config, identity["branch"])
        check_same_noise(ready, identity, "run_dir")
        check_same_rows(ready, run_dir, identity, "run_dir")
        return site(ready, run_dir, identity["run"])


def site(ready: Setup, run_dir: RunDir, name: str) -> Site:
    """What a process needs to be home to a run's clients."""
    runtime, folder = ready.config.runtime, run_dir.clients.absolute()
    # coins of the seed alone: the server's secret ones do not leave it
    coins = Coins.of(ready.config.seed, "seeded").at("faults")
    faulty = FaultyClients(ready.faults, coins, runtime.timeout, folder)
    secure = ready.privacy.noise == "secure"
    most = canonical(ready.method.plan.server(ready.privacy.budget.rows))
    terms = Terms(
        ready.privacy.budget.rows,
        name,
        # of one kind, an honest server's rows are all there is to count
        limits=most if len(most) > 1 else None,
        aggregation=ready.method.plan.aggregation,
        holds=secure and ready.method.plan.sends_again,
        masks=runtime.masks,
        marks=secure and ready.gaps_show,
    )
    return Site(
        program=ready.program,
        shard=lambda client: ready.dataset.shard(ready.shards[client]),
        seed=ready.config.seed,
        branch=ready.branch,
        noise=ready.privacy.noise,
        folder=folder,
        terms=terms,
        in_memory=runtime.get("store") == "memory",
        cache_bytes=runtime.get("cache_gb", 0.0) * 1e9,
        threads=runtime.threads,
        spent=SpentFile.at_home() if secure else None,
        mods=(faulty,) if ready.faults.total else (),
    )
