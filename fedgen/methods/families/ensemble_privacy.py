"""Privacy of a critic ensemble: the critics of a single client, or several clients with one critic
each, all of which respond, or a secret sample of them.

A single client protects its records: one record belongs to one critic, hence affects one of the
averaged responses. Several clients are each protected as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from dp_accounting import DpEvent, GaussianDpEvent
from torch import Tensor

from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.methods.api import (
    ClientProgram,
    Method,
    PublicFacts,
    Query,
    ServerProgram,
    State,
    WorstCase,
)
from fedgen.methods.families.critic_ensemble import (
    Companion,
    CriticOutput,
    Critics,
    CriticStep,
    Networks,
    Score,
    Settings,
    critic_adam,
)
from fedgen.methods.families.critic_rotation import Rotation, critics_at_once
from fedgen.methods.plan import Claim, Plan
from fedgen.privacy.aggregation import Aggregation, Secure
from fedgen.privacy.batch_sampling import Participation
from fedgen.privacy.bounds import Bound
from fedgen.privacy.events import Relation, Unit, repeat
from fedgen.privacy.mechanisms import RowGaussian, aggregator
from fedgen.privacy.routing import Mode, Routing, Sampling
from fedgen.randomness import RandomStreams


@dataclass(frozen=True)
class EnsemblePrivacy:
    """Public parameters of the routing of query samples.

    bound: set that contains the response to a query sample before noise.
    critics: number of critics of a single client; each of several clients holds one.
    routing, responders, sampling: see ``Routing``; over critics for one client, over clients for
        several.
    by_clients: each client decides secretly in each round whether to contribute; a client that does
        not sends noise only.
    on_query: critics train when they are sampled, instead of on a public rotation.

    Raises:
        FedgenError: for contradicting parameters.
    """

    facts: PublicFacts
    bound: Bound
    critics: int
    routing: Mode = "mean"
    responders: int = 1
    sampling: Sampling = "fixed"
    by_clients: bool = False
    on_query: bool = False

    def __post_init__(self) -> None:
        _check(self)
        _check_sampling(self)

    @property
    def is_federated(self) -> bool:
        """Whether clients respond with one critic each."""
        return self.facts.clients > 1

    @property
    def members(self) -> int:
        """Number of critics of a client."""
        return 1 if self.is_federated else self.critics

    @property
    def unit(self) -> Unit:
        """Protected unit."""
        return Unit.CLIENT if self.is_federated else Unit.RECORD

    @property
    def inner_routing(self) -> Routing:
        """Routing over the critics of a client."""
        if self.is_federated:
            return Routing("mean", 1)
        return Routing(self.routing, self.members, self.responders)

    @property
    def cohort(self) -> Routing:
        """Routing over clients by the server."""
        if not self.is_federated:
            return Routing("mean", 1)
        if self.by_clients:
            return Routing("mean", self.facts.clients)
        return Routing(self.routing, self.facts.clients, self.responders, self.sampling)

    @property
    def participation(self) -> Participation:
        """Secret participation of a client."""
        if not self.by_clients:
            return Participation()
        return Participation(self.responders / self.facts.clients, self.facts.cohorts_hidden)

    @property
    def aggregation(self) -> Aggregation:
        """Aggregation of the clients' responses."""
        radius = self.bound.radius / self.participation.rate
        return self.facts.aggregation(self.cohort.responses_per_sample, radius)

    @property
    def relation(self) -> Relation:
        """Neighbouring relation of the mechanism."""
        summed = self.is_federated and not self.aggregation.is_local
        if self.by_clients or (summed and not self.cohort.is_sampled):
            return Relation.ADD_OR_REMOVE_ONE
        return Relation.REPLACE_ONE

    def mechanism(self, noise_multiplier: float | None) -> RowGaussian:
        """Return the mechanism of a response; ``noise_multiplier`` None: no noise."""
        if noise_multiplier is None:
            routing, participation = self.inner_routing, self.participation
            return RowGaussian(
                self.bound, 0.0, routing, False, self.unit, participation=participation
            )
        return RowGaussian(
            self.bound,
            noise_multiplier,
            self.inner_routing,
            not self.on_query,
            self.unit,
            self.relation,
            self.participation,
            self.aggregation,
        )


def rdp_claim(gate: DpEvent, samples: int, formula: str, source: str) -> Claim:
    """Return the claim of a paper that composes RDP of ``gate`` over the query samples of all
    rounds."""
    relation = Relation.REPLACE_ONE
    return Claim.by_rdp(lambda rounds: repeat(gate, rounds * samples), relation, formula, source)


def votes_claim(
    noise_multiplier: float | None, samples: int, formula: str, source: str
) -> Claim | None:
    """Return the claim of a paper whose teachers all vote on each query sample; None without
    noise."""
    if noise_multiplier is None:
        return None
    return rdp_claim(GaussianDpEvent(noise_multiplier), samples, formula, source)


def build_critics(
    privacy: EnsemblePrivacy,
    noise_multiplier: float | None,
    nets: Networks,
    step: CriticStep,
    output: CriticOutput,
    generator_loss: Callable[[Score, Tensor, Tensor], Tensor],
    samples: int,
    response_shape: tuple[int, ...],
    settings: Settings,
    companion: Companion | None = None,
) -> Critics:
    """Return the critics of a client; see ``Critics``.

    Args:
        samples: number of query samples.
        response_shape: shape of the response to one of them.
    """
    turn_size = min(settings["critics_per_step"], privacy.members)
    at_once = critics_at_once(nets.critic, nets.device)
    # companions start with the first turn of their stack, so stacks with companions do not join
    rotation = Rotation(privacy.members, turn_size, at_once, joins_stacks=companion is None)
    return Critics(
        nets,
        privacy.mechanism(noise_multiplier),
        step,
        output,
        response_shape,
        privacy.inner_routing,
        privacy.on_query and not privacy.is_federated,
        samples,
        rotation,
        settings["critic_steps"],
        settings["critic_batch"],
        settings["warm_start"],
        generator_loss,
        critic_adam(settings),
        companion,
    )


def build_method(
    privacy: EnsemblePrivacy,
    client: Critics,
    server: ServerProgram,
    settings: Settings,
    claim: Claim | None,
) -> Method:
    """Return the method of these critics and this server."""
    facts, federated, samples = privacy.facts, privacy.is_federated, client.samples_per_query
    critics_per_step = settings["critics_per_step"]

    return Method(
        ClientProgram(
            client.respond,
            client.train,
            len(client.rotation.groups) if client.warm_start else 0,
            client.prepare,
            resamples=not client.on_query,
        ),
        server,
        _plan(privacy, client.mechanism, samples, client.response_shape, claim),
        privacy.cohort,
        None if federated and privacy.on_query else min(critics_per_step, facts.clients),
        lambda: [_worst_case(privacy, client, server)],
        aggregator(client.mechanism),
    )


def _worst_case(privacy: EnsemblePrivacy, critics: Critics, server: ServerProgram) -> WorstCase:
    """Return neighbours whose first critics give extreme and opposite scores to any query: for
    label 1, whose embedding is far larger than the one that the norm of the table is estimated
    from, scores and gradients exceed any bound. Where a client is removed as a whole, the second
    has no records and contributes nothing."""
    streams, shape = RandomStreams.from_seed(0, "seeded"), privacy.facts.shape
    query = server.query(server.init(streams), 0, streams)
    assert query is not None
    labels = torch.ones_like(query.samples["labels"])
    stacks = critics.rotation.stacks
    state = {f"critics.{members.start}": critics.fresh(members, streams) for members in stacks}

    def extreme(sign: float) -> State:
        stack = {name: value.clone() for name, value in state["critics.0"].items()}
        stack["label.weight"][0] = 1e3 * sign
        stack["label.weight"][0, 0] = 1e-3
        stack["label.u"][0] = torch.eye(privacy.facts.classes)[0]
        return {**state, "critics.0": stack}

    empty = Shard(torch.zeros(0, *shape, dtype=torch.uint8), torch.zeros(0, dtype=torch.long))
    one = Shard(torch.zeros(1, *shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    removed = privacy.relation is Relation.ADD_OR_REMOVE_ONE
    return WorstCase(
        Query({**query.samples, "labels": labels}, query.shared),
        (extreme(1.0), one if removed else empty),
        (extreme(-1.0), empty),
    )


def _plan(
    privacy: EnsemblePrivacy,
    mechanism: RowGaussian,
    samples: int,
    response_shape: tuple[int, ...],
    claim: Claim | None,
) -> Plan:
    """Return the plan of a run.

    With several clients, the server knows the cohort and, with local noise, sees each response, so
    a client's cost is that of its own responses. Against the release adversary alone, the cohort is
    secret, and the generator depends on the sums of the responses. With local noise, a fixed number
    of responders and a run that ends at a dropout, the noise of all responders adds up in these
    sums (a responder is not this adversary, because it knows its own noise). A single client
    samples its critics secretly, which amplifies against the server as well, as does secret
    participation of clients. Where clients share the noise of a sum, the noise of ``mechanism`` is
    that of the sum.
    """
    facts, federated, trains_on_query = privacy.facts, privacy.is_federated, privacy.on_query
    routing = privacy.cohort if federated else privacy.inner_routing
    hidden = not trains_on_query and (facts.cohorts_hidden or not federated)
    noise, participation = mechanism.noise_multiplier, mechanism.participation
    aggregation = mechanism.aggregation
    by_clients = participation.rate < 1
    noise_adds_up = federated and aggregation.is_local and not by_clients
    noise_adds_up = noise_adds_up and facts.requires_all and routing.has_fixed_size

    def server(responses: int) -> DpEvent:
        if federated and not by_clients:
            return mechanism.event(responses)
        return repeat(mechanism.event(samples), responses // samples)

    def release(rounds: int) -> DpEvent:
        if noise_adds_up:
            return repeat(routing.event_of_sum(samples, noise, hidden), rounds)
        if by_clients:
            return repeat(mechanism.event(samples), rounds)
        return repeat(routing.event(samples, noise, hidden), rounds)

    def event_of_known_cohort(responses: int) -> DpEvent:
        all_members = Routing("mean", routing.responses_per_sample if noise_adds_up else 1)
        return all_members.event_of_sum(responses, noise, hidden=False)

    if by_clients:
        sampler = f"participation of each client at rate {participation.rate:.4g}"
        amplified_by = f"secret participation at rate {participation.rate:.4g}"
        reason = None if participation.hidden else "a dropout reveals the sampled cohort"
    else:
        sampler, amplified_by = _sampling_in_words(routing, "clients" if federated else "critics")
        reason = _not_amplified_because(routing, trains_on_query, hidden)
    queried = federated and not by_clients
    plan = Plan.from_mechanism(
        mechanism,
        server,
        lambda samples, _: (samples, *response_shape),
        samples_per_round=samples,
        sampler=sampler,
        amplified_by=None if reason else amplified_by,
        not_amplified_because=reason,
        server_reason="the server knows the cohort" if queried else None,
        claim=claim,
    )
    is_full_secure_sum = isinstance(aggregation, Secure) and not routing.is_sampled
    is_seen_as_server = not queried or is_full_secure_sum
    if not mechanism.is_private or (is_seen_as_server and not aggregation.is_trusted):
        return plan
    plan = replace(plan, release_event=release, event_if_sampling_revealed=event_of_known_cohort)
    if not noise_adds_up or routing.responses_per_sample == 1:
        return plan
    return _with_added_noise(plan)


def _sampling_in_words(routing: Routing, members: str) -> tuple[str, str]:
    """Return descriptions of the sampler and of its amplification."""
    sample = f"sample of {routing.sample_size} of {routing.population} {members}"
    mode = routing.mode.replace("_", " ")
    sampler = f"{routing.sampling} {sample}, {mode}" if routing.is_sampled else "none"
    return sampler, f"secret {sample}"


def _with_added_noise(plan: Plan) -> Plan:
    """Mention in the words on the release that the noise of all responders adds up."""
    gain, reason = plan.amplified_by["release"], plan.not_amplified_because["release"]
    gain = gain and f"{gain}, whose noise adds up"
    reason = reason and f"{reason}; the noise of all responders adds up"
    return replace(
        plan,
        amplified_by={**plan.amplified_by, "release": gain},
        not_amplified_because={**plan.not_amplified_because, "release": reason},
    )


def _not_amplified_because(routing: Routing, trains_on_query: bool, hidden: bool) -> str | None:
    """Return why the sampling of responders does not amplify; None if it does."""
    if not routing.is_sampled:
        return "all members respond to every query sample: no subsampling"
    if trains_on_query:
        return "critics train when they are sampled, so their state depends on past samples"
    if routing.sampling == "poisson":
        return "a missing response reveals who is outside a Poisson cohort"
    return None if hidden else "a dropout reveals the sampled cohort"


def _check(privacy: EnsemblePrivacy) -> None:
    """Raise FedgenError for contradicting parameters."""
    facts, population = (
        privacy.facts,
        privacy.facts.clients if privacy.is_federated else privacy.members,
    )
    if facts.records is not None and privacy.members > facts.records:
        raise FedgenError(
            "method.critics",
            f"{privacy.members} critics exceed {facts.records} records",
            "lower it: each critic needs its own records",
        )
    if not 1 <= privacy.responders <= population:
        raise FedgenError(
            "method.responders", f"cannot sample {privacy.responders} of {population}", "lower it"
        )
    if privacy.sampling == "poisson" and not privacy.is_federated:
        raise FedgenError(
            "method.cohort_sampling",
            "a single client samples a fixed number of critics",
            "set method.cohort_sampling=fixed, or use several clients",
        )
    if privacy.on_query and privacy.routing == "mean":
        raise FedgenError(
            "method.critic_schedule",
            "on_query requires sampling, and routing=mean has none",
            "set method.critic_schedule=public",
        )


def _check_sampling(privacy: EnsemblePrivacy) -> None:
    """Raise FedgenError for an invalid sampling of clients, or an invalid sum of their
    responses."""
    facts, federated = privacy.facts, privacy.is_federated
    if facts.unit is not None and facts.unit is not privacy.unit:
        raise FedgenError(
            "privacy.unit",
            f"cannot be {facts.unit.value} with {facts.clients} client(s)",
            "several clients are protected as a whole; a single client protects records",
        )
    if privacy.by_clients and (not federated or privacy.routing != "per_step" or privacy.on_query):
        raise FedgenError(
            "method.sampled_by",
            "clients requires several clients and one decision per round",
            "use several clients, method.routing=per_step and method.critic_schedule=public, or "
            "method.sampled_by=server",
        )
    if facts.aggregation_kind not in ("secure", "trusted") or not federated:
        return
    if privacy.routing == "per_sample":
        raise FedgenError(
            "privacy.aggregation",
            f"{facts.aggregation_kind} needs the same clients to respond to every query sample",
            "set method.routing=mean or per_step, or privacy.aggregation=local",
        )
    if privacy.sampling == "poisson" and privacy.routing != "mean" and not privacy.by_clients:
        raise FedgenError(
            "privacy.aggregation",
            f"{facts.aggregation_kind} needs a fixed number of responses, and Poisson cohorts vary",
            "set method.sampled_by=clients, or method.cohort_sampling=fixed",
        )
