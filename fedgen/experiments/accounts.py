"""What a run has spent so far, from its ledgers: views, claims, and the record for privacy.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedgen.experiments.settings import Privacy
from fedgen.federation.rounds import RunState
from fedgen.method import Plan
from fedgen.privacy.accounting import Epsilon, epsilon
from fedgen.privacy.budget import release_epsilon, smaller
from fedgen.privacy.events import Spend, canonical, in_words, to_json
from fedgen.privacy.ledger import Ledger, larger
from fedgen.reporting.run_dir import or_null


@dataclass(frozen=True)
class Accounts:
    """Accounts of one run. The clients' ledgers are authoritative."""

    plan: Plan
    privacy: Privacy
    ledgers: dict[int, Ledger]

    def spends(self, state: RunState) -> dict[int, Spend]:
        """Each client's spend: its own ledger's or the server's, whichever is larger."""
        return {
            client: larger(ledger.spend(), state.spends.get(client, {}))
            for client, ledger in self.ledgers.items()
        }

    def views(self, state: RunState) -> dict[str, Epsilon]:
        """epsilon of the busiest client so far, by adversary."""
        distinct = {tuple(sorted(s.items(), key=repr)) for s in self.spends(state).values()}
        server = max(
            (epsilon(dict(spend), self.privacy.delta) for spend in distinct),
            key=lambda found: found.or_infinity,
        )
        return {"server": server, "release": self._release(state, server)}

    def _release(self, state: RunState, server: Epsilon) -> Epsilon:
        """What the published generator shows of a client that spent ``server``."""
        if self.plan.release is None or state.rounds == 0:
            return server
        event, stop = self.plan.release(state.rounds), self.privacy.budget.stop_probability
        return smaller(release_epsilon(event, self.privacy.delta, stop), server)

    def claimed(self, rounds: int) -> float | None:
        """epsilon by the paper's formula, None where it gives none."""
        claim = self.plan.claim
        return None if claim is None else or_null(claim.epsilon(rounds, self.privacy.delta))

    def published_in_words(self, state: RunState) -> str:
        """What may be said of the spend to everybody. Of several clients, how often each was asked
        is nobody's business but the server's: their draws are described, not counted."""
        if self.plan.release is not None:
            return in_words(canonical(self.plan.release(state.rounds)))
        if len(self.ledgers) == 1:
            return in_words(canonical(self.plan.server(state.rounds * self.plan.rows_per_round)))
        return "what the busiest client released"

    def record(self, state: RunState, stopped: str | None) -> dict[str, Any]:
        """The content of privacy.json."""
        plan, claim, clients = self.plan, self.plan.claim, {}
        for client, spend in self.spends(state).items():
            server = epsilon(spend, self.privacy.delta)
            clients[str(client)] = {
                "server": or_null(server.value),
                "release": or_null(self._release(state, server).value),
                "releases": self.ledgers[client].releases,
                "events": [[to_json(event), count] for event, count in spend.items()],
            }
        views = self.views(state)
        return {
            "schema": 1,
            "delta": self.privacy.delta,
            "unit": plan.unit.value,
            "relation": plan.relation.value,
            "sampler": plan.sampler,
            "noise": self.privacy.noise,
            "noise_multiplier": self.privacy.noise_multiplier,
            "rounds": state.rounds,
            "stopped": stopped,
            "views": {name: self._view(name, views) for name in views},
            "claimed": None
            if claim is None
            else {
                "epsilon": self.claimed(state.rounds),
                "formula": claim.formula,
                "source": claim.source,
            },
            "clients": clients,
        }

    def _view(self, name: str, views: dict[str, Epsilon]) -> dict[str, Any]:
        found = views[name]
        amplified, reason = self.plan.amplified_by[name], self.plan.reasons[name]
        if name == "release" and self.plan.release is not None and found is views["server"]:
            amplified, reason = None, "what the server sees bounds it better than the draw"
        return {
            "epsilon": or_null(found.value),
            "accountant": found.accountant,
            "second_opinion": found.second_opinion,
            "amplified_by": amplified,
            "reason": reason,
        }
