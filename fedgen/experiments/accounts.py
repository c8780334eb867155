"""What a run has spent so far, from its ledgers: views, claims, and the record for privacy.json."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dp_accounting import NonPrivateDpEvent

from fedgen.experiments.planning import Privacy
from fedgen.federation.client_app import LEDGER, died_answering
from fedgen.method import Method, Plan
from fedgen.privacy.accounting import TRUSTED, Epsilon, epsilon, epsilons
from fedgen.privacy.budget import release_epsilon, smaller
from fedgen.privacy.events import Spend, Unit, canonical, in_words, to_json, with_noise
from fedgen.privacy.ledger import Account, Ledger, larger, with_told
from fedgen.privacy.releases import Secure
from fedgen.reporting.run_dir import RunDir, or_null

if TYPE_CHECKING:
    from fedgen.federation.rounds import RunState


def amplification(plan: Plan, adversary: str, found: Epsilon) -> tuple[str | None, str | None]:
    """What amplifies a bound that was found against an adversary, or why nothing does."""
    by, reason = plan.amplified_by[adversary], plan.reasons[adversary]
    if found.value is None and plan.claim is not None and found.accountant != TRUSTED:
        return None, "a computation over private rows failed, and what that tells has no bound"
    if by and "secret" not in found.accountant and found.value:
        return None, "the draw helps less than the rows that nobody may exceed"
    return by, reason


def _less(spend: Spend, sums: Secure, fewer: int) -> Spend:
    """A spend in secure sums without ``fewer`` of the shares that their noise counts on."""
    if NonPrivateDpEvent() in spend or fewer >= sums.honest:
        return {NonPrivateDpEvent(): 1}
    return with_noise(spend, math.sqrt((sums.honest - fewer) / sums.honest))


def own_ledgers(run_dir: RunDir, name: str, clients: int, seeded: bool) -> dict[int, Account]:
    """What clients' ledgers come to, of those that are here: one whose private computation failed
    may not answer when it is asked for its account. ``name``: the run's."""
    found = {}
    for client in range(clients):
        path = run_dir.clients / str(client) / LEDGER
        if path.exists():
            found[client] = Ledger(path, name, client, seeded, looking=True).account()
    return found


def a_client_died(run_dir: RunDir) -> bool:
    """Whether a process died over a client's answer; to be asked while nobody answers."""
    return any(map(died_answering, run_dir.clients.glob("*")))


def ended_over_an_answer(run_dir: RunDir) -> bool:
    """Whether a run that is no longer going on left a client's answer unfinished."""
    with run_dir.looked_at() as quiet:  # else it trains on in another process
        return quiet and a_client_died(run_dir)


def count_unplanned(state: RunState, run_dir: RunDir) -> None:
    """Clients whose private computation failed, or who sent what was not planned, have no bound:
    also where that was noted after the checkpoint that the state is of."""
    for client in run_dir.unplanned():
        spend = state.spends.get(client, {})
        state.spends[client] = larger(spend, {NonPrivateDpEvent(): 1})


@dataclass(frozen=True)
class Accounts:
    """Accounts of one run. The clients' ledgers are authoritative.

    ledgers: what they came to, of the clients that told; until the end of a run, none.
    begun: how often each round was begun. unanswered: whether a client was asked and did not
        answer, or a draw was made anew. masks: whether answers travelled under masks; signed:
        whether clients signed for these.
    """

    method: Method
    privacy: Privacy
    clients: int
    ledgers: dict[int, Account] = field(default_factory=dict)
    begun: Counter[int] = field(default_factory=Counter)
    unanswered: Callable[[], bool] = lambda: False
    masks: bool = False
    signed: bool = False
    _planned: dict[int, Spend] = field(default_factory=dict)

    def spends(self, state: RunState) -> dict[int, Spend]:
        """Each client's spend, the largest of three: what its ledger says, what arrived at the
        server, and what all that it was sent costs if it was answered."""
        spends = {}
        for client in range(self.clients):
            told = self.ledgers.get(client)
            rows = max(state.rows[client], told.rows if told else 0)
            found = [state.spends.get(client, {}), *([told.spend] if told else [])]
            spends[client] = with_told(self.planned(rows), found)
            if self.method.plan.before is not None:
                spends[client] = {**spends[client], **canonical(self.method.plan.before)}
        return spends

    def planned(self, rows: int) -> Spend:
        """What a client's answers to so many rows cost by the plan."""
        if rows not in self._planned:
            self._planned[rows] = canonical(self.method.plan.server(rows)) if rows else {}
        return self._planned[rows]

    def without_bound(self, spends: Mapping[int, Spend]) -> frozenset[int]:
        """The clients of some that spent what has no bound, where others did not: a computation
        over their rows failed, or what they sent was not of the plan. The bound of others against
        the server rests on their own noise alone, and stays. Where the plan itself has no bound
        there are none: who was not asked yet has one by chance alone."""
        found = {client for client, spend in spends.items() if NonPrivateDpEvent() in spend}
        some = len(found) < len(spends) and NonPrivateDpEvent() not in self.planned(1)
        return frozenset(found if some else ())

    def costs(self, state: RunState) -> dict[int, Spend]:
        """What each client's spend costs it. In a secure sum the noise of clients ``without_bound``
        is not relied on: they count as colluders beyond those that were counted."""
        spends = self.spends(state)
        lost, sums = self.without_bound(spends), self.method.plan.aggregation
        if not lost or not isinstance(sums, Secure):
            return spends
        return {
            client: spend if client in lost else _less(spend, sums, len(lost))
            for client, spend in spends.items()
        }

    def views(self, state: RunState, stopped: bool = False) -> dict[str, Epsilon]:
        """epsilon by adversary so far, of all clients but those ``without_bound``: of the busiest
        one against the server, of any one in what is published."""
        spends = self.costs(state)
        lost = self.without_bound(spends)
        bounded = [spend for client, spend in spends.items() if client not in lost]
        each = epsilons(bounded, self.privacy.delta, self.method.plan.relation)
        server = max(each, key=lambda found: found.or_infinity)
        return {"server": server, "release": self.release(state, stopped) or server}

    def release(self, state: RunState, stopped: bool) -> Epsilon | None:
        """What the published generator shows of any one of several clients; None for a single one.

        A function of what everybody may know, never of whom the draws chose: the plan after so many
        rounds, or the rows that no client may exceed, whichever bounds it better. A run that its
        budget stopped is accounted as if it had gone on: when it stopped depends on the draws.

        None as well where clients are without a bound: what they added to sums, and when, may not
        be relied on, and the server's bound holds for whoever sees less. An aggregator that clients
        trust makes its noise itself.

        Once a client was asked and did not answer, who did shows the draws, and that the run goes
        on may have been up to them: what counts then is at least what was really answered.
        """
        plan, budget, delta = self.method.plan, self.privacy.budget, self.privacy.delta
        spends = self.spends(state)
        if plan.release is None or self._own_noise_alone(spends):
            return None
        if all(NonPrivateDpEvent() in spend for spend in spends.values()):
            # whatever the plan promised
            return epsilon({NonPrivateDpEvent(): 1}, delta, plan.relation)
        if state.rounds == 0:
            return epsilon({}, delta, plan.relation)
        rounds = budget.rounds if stopped else state.rounds
        found = self.release_after(rounds)
        if found is None or not self.unanswered() or not self.method.cohort.drawn:
            return found
        really = epsilon(self._answered(state, rounds), delta, plan.relation)
        return found if found.or_infinity > really.or_infinity else really

    def _own_noise_alone(self, spends: Mapping[int, Spend]) -> bool:
        """Whether what is published counts on no sum of several clients' noise, nor on draws of
        clients, where it would."""
        of_clients = self.method.plan.release is not None and not self.method.plan.trusted
        return of_clients and bool(self.without_bound(spends))

    def _answered(self, state: RunState, rounds: int) -> Spend:
        """What the busiest client's rows in the published rounds cost, whom the draws chose being
        known: what is asked again counts again, as long as the rounds have as many."""
        plan = self.method.plan
        assert plan.seen is not None
        most = plan.asked(rounds) * plan.rows_per_round
        return canonical(plan.seen(min(max(state.rows.values(), default=0), most)))

    def release_after(self, rounds: int) -> Epsilon | None:
        """As ``release`` after so many rounds, if everybody who is asked answers."""
        plan, budget, delta = self.method.plan, self.privacy.budget, self.privacy.delta
        if plan.release is None:
            return None
        assert plan.seen is not None
        most = canonical(plan.seen(min(budget.rows, plan.asked(rounds) * plan.rows_per_round)))
        cap, stop = epsilon(most, delta, plan.relation), 0.0
        # a stop tells nothing where there is no draw, or the draws count as seen
        if plan.amplified_by["release"] is not None:
            steps, again = budget.rounds, [n for n in self.begun.values() if n > 1]
            stop = self.method.cohort.stop_probability(
                plan.rows_per_round, steps, budget.rows, again
            )
        return smaller(release_epsilon(plan.release(rounds), delta, plan.relation, stop), cap)

    def claimed(self, state: RunState, stopped: bool = False) -> float | None:
        """epsilon by the paper's formula, None where it gives none; of a run that stopped, for as
        many rounds as what is proven counts."""
        claim = self.method.plan.claim
        rounds = self.privacy.budget.rounds if stopped else state.rounds
        if claim is None:
            return None
        return or_null(claim.epsilon(rounds, self.privacy.delta)) if rounds else 0.0

    def published_in_words(self, state: RunState, stopped: bool) -> str:
        """What may be said of the spend to everybody: the plan's events, not the draws' outcome."""
        plan = self.method.plan
        if plan.before is not None:
            return in_words(canonical(plan.before))
        if plan.release is not None and not self._own_noise_alone(self.spends(state)):
            rounds = self.privacy.budget.rounds if stopped else state.rounds
            if self.unanswered() and self.method.cohort.drawn:
                return in_words(self._answered(state, rounds))
            return in_words(canonical(plan.release(rounds)))
        most = max(state.rows.values(), default=0)  # what was done again after a resume counts too
        return in_words(canonical(plan.server(most))) if most else "nothing"

    def record(self, state: RunState, stopped: str | None) -> dict[str, Any]:
        """The content of privacy.json."""
        plan, claim, clients = self.method.plan, self.method.plan.claim, {}
        views = self.views(state, stopped is not None)
        spends = self.costs(state)
        lost = self.without_bound(spends)
        each = epsilons(list(spends.values()), self.privacy.delta, plan.relation)
        for (client, spend), server in zip(spends.items(), each, strict=True):
            clients[str(client)] = {
                "server": or_null(server.value),
                "release": None if client in lost else or_null(views["release"].value),
                "releases": self.ledgers[client].releases
                if client in self.ledgers
                else state.asks[client],
                "events": [[to_json(event), count] for event, count in spend.items()],
            }
        return {
            "schema": 2,
            "delta": self.privacy.delta,
            "protected": self.privacy.protected,
            "unit": plan.unit.value,
            **self._of_persons(),
            "relation": plan.relation.value,
            "sampler": plan.sampler,
            "noise": "none" if self.privacy.noise_multiplier is None else self.privacy.noise,
            "noise_multiplier": self.privacy.noise_multiplier,
            "rounds": state.rounds,
            "stopped": stopped,
            "views": {
                name: self._view(name, found, self._own_noise_alone(spends))
                for name, found in views.items()
            },
            "claimed": None
            if claim is None
            else {
                "epsilon": self.claimed(state, stopped is not None),
                "formula": claim.formula,
                "source": claim.source,
            },
            "aggregation": self._aggregation(self.spends(state), lost),
            "without_bound": sorted(lost),
            "clients": clients,
        }

    def _of_persons(self) -> dict[str, int]:
        if self.method.plan.unit is not Unit.PERSON:
            return {}
        return {"images_per_person": self.method.plan.images_per_person}

    def _aggregation(self, spends: Mapping[int, Spend], lost: frozenset[int]) -> dict[str, Any]:
        """Who made the noise; of secure sums, epsilon against the server if more clients collude
        with it than were counted, up to all others of the cohort."""
        sums = self.method.plan.aggregation
        found: dict[str, Any] = {"kind": type(sums).__name__.lower()}
        if not isinstance(sums, Secure):
            return found
        own_alone = sums.honest - 1
        # masks: as many as ``shamir`` have the secrets of each client (``masking.Graph``)
        # with one colluder more, a server that deviates opens sums of fewer clients
        opened = self.masks and (self.signed or sums.colluders >= sums.threshold // 2)
        one_more = own_alone if opened else 1
        shares = {sums.colluders + 1: min(one_more + len(lost), own_alone)}
        shares[sums.asked - 1] = own_alone
        more = []
        for colluders, fewer in shares.items() if own_alone else ():
            bounded = [_less(s, sums, fewer) for c, s in spends.items() if c not in lost]
            each = epsilons(bounded, self.privacy.delta, self.method.plan.relation)
            worst = max(each, key=lambda one: one.or_infinity)
            more.append({"colluders": colluders, "epsilon": or_null(worst.value)})
        facts = {"asked": sums.asked, "threshold": sums.threshold, "colluders": sums.colluders}
        how = {"masks": self.masks, "signed": self.signed}
        return {**found, **facts, **how, "if_more_collude": more}

    def _view(self, name: str, found: Epsilon, own_noise_alone: bool) -> dict[str, Any]:
        amplified, reason = amplification(self.method.plan, name, found)
        if own_noise_alone and name == "release":
            amplified, reason = None, "some clients are without a bound: others count on their own"
        return {
            "epsilon": or_null(found.value),
            "accountant": found.accountant,
            "second_opinion": or_null(found.second_opinion),
            "amplified_by": amplified,
            "reason": reason,
        }
