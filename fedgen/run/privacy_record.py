"""Compute the spend of a run from its ledgers: views, claims, and the record in privacy.json."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

from dp_accounting import NonPrivateDpEvent

from fedgen.federation.client.context import LEDGER
from fedgen.federation.secagg.signing import Signer
from fedgen.federation.signed_accounts import AccountTerms, ReleaseFacts, sign
from fedgen.methods.api import Method
from fedgen.methods.plan import Plan
from fedgen.privacy import guarantee
from fedgen.privacy.accounting import TRUSTED_AGGREGATOR_ACCOUNTANT, Epsilon, epsilons
from fedgen.privacy.aggregation import Secure
from fedgen.privacy.budget import Bound, bound_of, release_bound, smaller_bound
from fedgen.privacy.events import (
    Spend,
    Unit,
    canonical,
    describe,
    scale_noise,
    to_json,
)
from fedgen.privacy.groups import group_epsilons
from fedgen.privacy.guarantee import Guarantee, worst_guarantee
from fedgen.privacy.ledger import Account, Ledger, elementwise_max, with_reported
from fedgen.run.calibrate import Privacy
from fedgen.run.selection_record import SelectionRecord
from fedgen.storage.run_dir import RunDir
from fedgen.storage.schemas import or_null

if TYPE_CHECKING:
    from fedgen.federation.rounds import RunState


def amplification(plan: Plan, adversary: str, bound: Epsilon) -> tuple[str | None, str | None]:
    """Return what amplifies the bound against an adversary, or why nothing does."""
    by, reason = plan.amplified_by[adversary], plan.not_amplified_because[adversary]
    if (
        bound.value is None
        and plan.claim is not None
        and bound.accountant != TRUSTED_AGGREGATOR_ACCOUNTANT
    ):
        return None, (
            "a computation over private records failed, and what the failure reveals has no bound"
        )
    if by and "secret" not in bound.accountant and bound.value:
        return None, "the limit on queries per client gives a smaller bound than sampling"
    return by, reason


def _with_fewer_shares(spend: Spend, sums: Secure, fewer: int) -> Spend:
    """Return a spend in secure sums whose noise lacks the shares of ``fewer`` clients."""
    if NonPrivateDpEvent() in spend or fewer >= sums.honest:
        return {NonPrivateDpEvent(): 1}
    return scale_noise(spend, math.sqrt((sums.honest - fewer) / sums.honest))


def open_ledgers(run_dir: RunDir, name: str, clients: int, seeded: bool) -> dict[int, Account]:
    """Return the spends in the ledgers of clients whose files are available: a client whose private
    computation failed may not respond when its account is queried.

    Args:
        name: name of the run.
    """
    accounts = {}
    for client in range(clients):
        path = run_dir.clients / str(client) / LEDGER
        if path.exists():
            accounts[client] = Ledger(path, name, client, seeded, read_only=True).account()
    return accounts


def count_unplanned(state: RunState, run_dir: RunDir) -> None:
    """Mark clients whose private computation failed, or that sent unplanned releases, as without a
    bound, including those recorded after the checkpoint of the state."""
    for client in run_dir.unplanned():
        spend = state.spends.get(client, {})
        state.spends[client] = elementwise_max(spend, {NonPrivateDpEvent(): 1})


@dataclass(frozen=True)
class Accounts:
    """Accounts of one run. The ledgers of clients are authoritative.

    ledgers: spends of the clients that reported; empty until the end of a run.
    started: number of attempts of each round.
    dropouts: returns whether a queried client did not respond, or a cohort was sampled anew.
    masks: whether responses were sent under masks.
    signed: whether clients signed keys and lists.
    selected: selection record of a run that fedgen tune selected; else None.
    """

    method: Method
    privacy: Privacy
    clients: int
    ledgers: dict[int, Account] = field(default_factory=dict)
    started: Counter[int] = field(default_factory=Counter)
    dropouts: Callable[[], bool] = lambda: False
    masks: bool = False
    signed: bool = False
    selected: SelectionRecord | None = None
    _planned: dict[int, Spend] = field(default_factory=dict)

    def spends(self, state: RunState) -> dict[int, Spend]:
        """Return the spend of each client, the largest of three: its ledger, the responses that the
        server received, and the cost of responding to every query sent to it. For a selected run,
        return the total over all runs of ``fedgen tune``."""
        if self.selected is not None:
            return dict(self.selected.client_spends)
        spends = {}
        for client in range(self.clients):
            account = self.ledgers.get(client)
            rows = max(state.samples[client], account.samples if account else 0)
            reported = [state.spends.get(client, {}), *([account.spend] if account else [])]
            spends[client] = with_reported(self.planned(rows), reported)
            if self.method.plan.prior_event is not None:
                spends[client] = {**spends[client], **canonical(self.method.plan.prior_event)}
        return spends

    def planned(self, rows: int) -> Spend:
        """Return the planned spend of a client for this number of query samples."""
        if rows not in self._planned:
            self._planned[rows] = canonical(self.method.plan.server_event(rows)) if rows else {}
        return self._planned[rows]

    def without_bound(self, spends: Mapping[int, Spend]) -> frozenset[int]:
        """Return the clients whose spend has no bound, if that of others has one: a computation
        over their records failed, or they sent unplanned releases. The bound of others against the
        server depends only on their own noise and holds. If the plan itself has no bound, return
        none: a client that was not queried yet has one only by chance."""
        unbounded = {client for client, spend in spends.items() if NonPrivateDpEvent() in spend}
        others_bounded = len(unbounded) < len(spends) and NonPrivateDpEvent() not in self.planned(1)
        return frozenset(unbounded if others_bounded else ())

    def effective_spends(self, state: RunState) -> dict[int, Spend]:
        """Return the spend of each client that ε is computed from. In a secure sum, the noise of
        clients ``without_bound`` is not relied on: they count as additional colluders."""
        spends = self.spends(state)
        lost, sums = self.without_bound(spends), self.method.plan.aggregation
        if not lost or not isinstance(sums, Secure):
            return spends
        return {
            client: spend if client in lost else _with_fewer_shares(spend, sums, len(lost))
            for client, spend in spends.items()
        }

    def _bounded_spends(self, state: RunState) -> list[Spend]:
        """Return the effective spends of all clients except those ``without_bound``."""
        spends = self.effective_spends(state)
        lost = self.without_bound(spends)
        return [spend for client, spend in spends.items() if client not in lost]

    def epsilon_by_adversary(self, state: RunState, stopped: bool = False) -> dict[str, Epsilon]:
        """Return ε so far by adversary, over all clients except those ``without_bound``: the
        largest against the server, and the common bound against a reader of the release."""
        bounded = self._bounded_spends(state)
        bounds = epsilons(bounded, self.privacy.delta, self.method.plan.relation)
        server = max(bounds, key=lambda bound: bound.or_infinity)
        return {"server": server, "release": self.release(state, stopped) or server}

    def guarantees(self, state: RunState, stopped: bool) -> dict[str, Guarantee | None]:
        """Return the trade-off curve that belongs to each ε of ``epsilon_by_adversary``."""
        relation, delta = self.method.plan.relation, self.privacy.delta
        bounded = self._bounded_spends(state)
        curves = {"server": worst_guarantee(bounded, delta, relation)}
        release = self._release(state, stopped)
        if release is None:
            return {**curves, "release": curves["server"]}
        return {**curves, "release": release.guarantee(delta, relation)}

    def group_epsilons(
        self, state: RunState, stopped: bool
    ) -> dict[str, dict[str, float | None] | None]:
        """Return ε of several records of one person at a client against each adversary; None where
        no bound is known."""
        plan, delta = self.method.plan, self.privacy.delta
        if plan.unit is not Unit.RECORD:
            return dict.fromkeys(("server", "release"))
        bounded = self._bounded_spends(state)
        server = group_epsilons(bounded, delta, plan.relation)
        release = self._release(state, stopped)
        if release is None:
            return {"server": server, "release": server}
        reader = None
        if not release.stop_probability:
            reader = group_epsilons([release.spend], delta, plan.relation)
        return {"server": server, "release": reader}

    def release(self, state: RunState, stopped: bool) -> Epsilon | None:
        """Return ε of any one of several clients against a reader of the release; None for a single
        client: see ``_release``."""
        release = self._release(state, stopped)
        return None if release is None else release.epsilon

    def _release(self, state: RunState, stopped: bool) -> Bound | None:
        """Return ε of any one of several clients against a reader of the release; None for a single
        client.

        The result is a function of public facts, not of the sampled cohorts: the plan after as many
        rounds, or the query samples that no client may exceed, whichever gives the better bound. A
        run that its budget stopped is accounted as if it had continued, because the time of
        stopping depends on the cohorts.

        The result is also None if clients are without a bound: what they added to sums, and when,
        cannot be relied on, and the bound against the server holds for a reader of the release too.
        A trusted aggregator adds its noise itself.

        After a dropout, the set of responders reveals the sampled cohort, and whether the run
        continues may depend on it. The result then covers at least the actual responses.

        The bound of a selected run is that of the selection.
        """
        if self.selected is not None:
            return bound_of(
                self.selected.release_spend, self.privacy.delta, self.method.plan.relation
            )
        plan, budget, delta = self.method.plan, self.privacy.budget, self.privacy.delta
        spends = self.spends(state)
        if plan.release_event is None or self._own_noise_alone(spends):
            return None
        if all(NonPrivateDpEvent() in spend for spend in spends.values()):
            # independent of the plan
            return bound_of({NonPrivateDpEvent(): 1}, delta, plan.relation)
        if state.rounds == 0:
            return bound_of({}, delta, plan.relation)
        rounds = budget.rounds if stopped else state.rounds
        planned = self._release_after(rounds)
        if planned is None or not self.dropouts() or not self.method.cohort.is_sampled:
            return planned
        revealed = self._spend_if_cohorts_revealed(state, rounds)
        really = bound_of(revealed, delta, plan.relation)
        return planned if planned.epsilon.or_infinity > really.epsilon.or_infinity else really

    def _own_noise_alone(self, spends: Mapping[int, Spend]) -> bool:
        """Return whether the release relies neither on sums of the noise of several clients nor on
        sampled cohorts, where it would otherwise."""
        of_clients = self.method.plan.release_event is not None and not self.method.plan.is_trusted
        return of_clients and bool(self.without_bound(spends))

    def _spend_if_cohorts_revealed(self, state: RunState, rounds: int) -> Spend:
        """Return the spend of the busiest client in the published rounds if cohorts are known:
        repeated queries count again, up to the number of rounds."""
        plan = self.method.plan
        assert plan.event_if_sampling_revealed is not None
        most = plan.queries_in(rounds) * plan.samples_per_round
        return canonical(
            plan.event_if_sampling_revealed(min(max(state.samples.values(), default=0), most))
        )

    def release_after(self, rounds: int) -> Epsilon | None:
        """Return ``release`` after this many rounds without dropouts."""
        release = self._release_after(rounds)
        return None if release is None else release.epsilon

    def _release_after(self, rounds: int) -> Bound | None:
        plan, budget, delta = self.method.plan, self.privacy.budget, self.privacy.delta
        if plan.release_event is None:
            return None
        assert plan.event_if_sampling_revealed is not None
        most = canonical(
            plan.event_if_sampling_revealed(
                min(budget.samples_per_client, plan.queries_in(rounds) * plan.samples_per_round)
            )
        )
        cap, stop = bound_of(most, delta, plan.relation), 0.0
        # stopping reveals nothing without sampling, or if the cohorts count as revealed
        if plan.amplified_by["release"] is not None:
            steps, again = budget.rounds, [n for n in self.started.values() if n > 1]
            stop = self.method.cohort.stop_probability(
                plan.samples_per_round, steps, budget.samples_per_client, again
            )
        event = plan.release_event(rounds)
        return smaller_bound(release_bound(event, delta, plan.relation, stop), cap)

    def release_facts(self, state: RunState, stopped: bool) -> ReleaseFacts:
        """Return the public facts that participants need to sign bounds for readers of the
        release."""
        plan, budget = self.method.plan, self.privacy.budget
        ledgers = [account.samples for account in self.ledgers.values()]
        max_samples = max([*state.samples.values(), *ledgers], default=0)
        release = self._release(state, stopped)
        if release is None:
            return ReleaseFacts(max_samples)
        rounds = budget.rounds if stopped else state.rounds
        most = plan.queries_in(rounds) * plan.samples_per_round
        limit = max_samples
        if self.method.cohort.is_sampled:  # the largest number would reveal a cohort
            unlimited = plan.is_trusted
            limit = min(most, budget.samples_per_client) if unlimited else budget.samples_per_client
        revealed = min(budget.samples_per_client, most), min(max_samples, most)
        for samples in (None, *revealed):
            facts = ReleaseFacts(limit, rounds, samples, release.stop_probability)
            if facts.release_spend(plan) == release.spend:
                return facts
        return ReleaseFacts(limit)

    def signed_account(
        self, state: RunState, stopped: bool, run: str, settings_digest: str, signer: Signer
    ) -> list[dict[str, str]]:
        """Return a list with one signed account for all clients that have a bound; empty if none
        has."""
        spends = self.spends(state)
        bounded = sorted(set(spends) - self.without_bound(spends))
        no_spend: Spend = {}
        charged = reduce(elementwise_max, (spends[client] for client in bounded), no_spend)
        terms = AccountTerms(
            run, settings_digest, self.clients, self.privacy.noise, self.method.plan
        )
        if self.selected is not None:
            return [sign(terms.selected_statement(bounded, self.selected.release_spend), signer)]
        facts = self.release_facts(state, stopped)
        account = Account(0, facts.revealed_samples or 0, charged)
        try:
            text = terms.statement(bounded, account, -1, facts)
        except ValueError:
            return []
        return [sign(text, signer)]

    def claimed_epsilon(self, state: RunState, stopped: bool = False) -> float | None:
        """Return ε by the formula of the paper, None if it has none; for a run that stopped, for as
        many rounds as the proven ε covers."""
        claim = self.method.plan.claim
        rounds = self.privacy.budget.rounds if stopped else state.rounds
        if claim is None:
            return None
        return or_null(claim.epsilon(rounds, self.privacy.delta)) if rounds else 0.0

    def describe_release(self, state: RunState, stopped: bool) -> str:
        """Return the public description of the spend: planned events, not sampled cohorts."""
        plan = self.method.plan
        if plan.prior_event is not None:
            return describe(canonical(plan.prior_event))
        if self.selected is not None:
            return describe(self.selected.release_spend)
        if plan.release_event is not None and not self._own_noise_alone(self.spends(state)):
            rounds = self.privacy.budget.rounds if stopped else state.rounds
            if self.dropouts() and self.method.cohort.is_sampled:
                return describe(self._spend_if_cohorts_revealed(state, rounds))
            return describe(canonical(plan.release_event(rounds)))
        most = max(state.samples.values(), default=0)  # repeated rounds after a resume count too
        return describe(canonical(plan.server_event(most))) if most else "nothing"

    def record(self, state: RunState, stopped: str | None) -> dict[str, Any]:
        """Return the content of privacy.json."""
        plan, claim, clients = self.method.plan, self.method.plan.claim, {}
        views = self.epsilon_by_adversary(state, stopped is not None)
        curves = self.guarantees(state, stopped is not None)
        groups = self.group_epsilons(state, stopped is not None)
        spends = self.effective_spends(state)
        lost = self.without_bound(spends)
        bounds = epsilons(list(spends.values()), self.privacy.delta, plan.relation)
        for (client, spend), server in zip(spends.items(), bounds, strict=True):
            clients[str(client)] = {
                "server": or_null(server.value),
                "release": None if client in lost else or_null(views["release"].value),
                "releases": self._releases(client, state),
                "events": [[to_json(event), count] for event, count in spend.items()],
            }
        return {
            "schema": 2,
            "delta": self.privacy.delta,
            "protected": self.privacy.protected,
            "unit": plan.unit.value,
            **({} if self.selected is None else {"selection": self.selected.public_facts}),
            "relation": plan.relation.value,
            "sampler": plan.sampler,
            "noise": "none" if self.privacy.noise_multiplier is None else self.privacy.noise,
            "noise_multiplier": self.privacy.noise_multiplier,
            "rounds": state.rounds,
            "stopped": stopped,
            "views": {
                name: {
                    **self._view(name, bound, self._own_noise_alone(spends)),
                    "guarantee": guarantee.to_json(curves[name]),
                    "group_epsilon": groups[name],
                }
                for name, bound in views.items()
            },
            "claimed": None
            if claim is None
            else {
                "epsilon": self.claimed_epsilon(state, stopped is not None),
                "formula": claim.formula,
                "source": claim.source,
            },
            "aggregation": self._aggregation(self.spends(state), lost),
            "without_bound": sorted(lost),
            "clients": clients,
        }

    def _releases(self, client: int, state: RunState) -> int:
        """Return the number of responses of a client; for a selected run, in all runs."""
        if self.selected is not None:
            return sum(self.selected.client_spends[client].values())
        ledger = self.ledgers.get(client)
        return state.queries[client] if ledger is None else ledger.releases

    def _aggregation(self, spends: Mapping[int, Spend], lost: frozenset[int]) -> dict[str, Any]:
        """Describe where the noise was added; for secure sums, also ε against the server if more
        clients collude than assumed, up to all others of the cohort."""
        sums = self.method.plan.aggregation
        aggregation: dict[str, Any] = {"kind": type(sums).__name__.lower()}
        if not isinstance(sums, Secure):
            return aggregation
        own_alone = sums.honest - 1
        # masks: ``shamir`` clients hold shares of the secrets of each client (``masking.Graph``)
        # with one more colluder, a deviating server can open sums of fewer clients
        opened = self.masks and (self.signed or sums.colluders >= sums.threshold // 2)
        one_more = own_alone if opened else 1
        shares = {sums.colluders + 1: min(one_more + len(lost), own_alone)}
        shares[sums.asked - 1] = own_alone
        more = []
        # of a selected run they would reveal the number of runs
        shown = own_alone and self.selected is None
        for colluders, fewer in shares.items() if shown else ():
            bounded = [
                _with_fewer_shares(s, sums, fewer) for c, s in spends.items() if c not in lost
            ]
            bounds = epsilons(bounded, self.privacy.delta, self.method.plan.relation)
            worst = max(bounds, key=lambda one: one.or_infinity)
            more.append({"colluders": colluders, "epsilon": or_null(worst.value)})
        facts = {"asked": sums.asked, "threshold": sums.threshold, "colluders": sums.colluders}
        how = {"masks": self.masks, "signed": self.signed}
        return {**aggregation, **facts, **how, "if_more_collude": more}

    def _view(self, name: str, bound: Epsilon, own_noise_alone: bool) -> dict[str, Any]:
        amplified, reason = amplification(self.method.plan, name, bound)
        if own_noise_alone and name == "release":
            amplified = None
            reason = (
                "some clients have no bound, so that of every other client counts only its own "
                "noise"
            )
        return {
            "epsilon": or_null(bound.value),
            "accountant": bound.accountant,
            "second_opinion": or_null(bound.second_opinion),
            "amplified_by": amplified,
            "reason": reason,
        }
