"""The round loop: messages over a grid, counts, and a stop before the budget is exceeded."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import torch
from dp_accounting import DpEvent, NonPrivateDpEvent
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedgen.errors import FedgenError
from fedgen.federation import messages
from fedgen.federation.failures import Failure, FailureCauses, failure_kind, too_few
from fedgen.federation.messages import Response
from fedgen.federation.runtimes.local_nodes import message_timeout
from fedgen.federation.secagg.server import MaskedSum, clients_in, present
from fedgen.federation.signed_accounts import ReleaseFacts, read_account
from fedgen.methods.api import Method, Query, Tensors
from fedgen.privacy.aggregation import Secure
from fedgen.privacy.budget import Budget
from fedgen.privacy.events import Spend, canonical, with_sampling_revealed
from fedgen.privacy.ledger import Account
from fedgen.randomness import RandomStreams

T = TypeVar("T")

_BATCH_SIZE = 64  # prepare calls per exchange: each may take minutes
_START_SECONDS = 60.0  # until all nodes are connected
_DEFAULT_REPLY_SECONDS = 600.0  # of a remote node outside rounds, without runtime.timeout
_SILENT_SECONDS = 5.0  # before a message about missing nodes
_POLL_SECONDS = 0.003
_STATE_CHANGING = (messages.PREPARE, messages.TRAIN, messages.ASK)


class Strategy(Protocol):
    """The interface of a strategy that the loop requires."""

    nodes: dict[int, int]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]: ...

    def configure_query(self, server_round: int, query: Query) -> list[Message]: ...

    def route(self, server_round: int, rows: int) -> dict[int, list[int]]: ...

    def aggregate_query(
        self, server_round: int, answers: dict[int, Response], rows: int
    ) -> Tensor | None: ...


@dataclass
class RunState:
    """State of the server between rounds.

    server: state of the server program.
    rounds: rounds completed.
    tag: last tag sent in keep messages; kept_tags: tag of the last state that each client kept.
    spends: spend of each client as observed by the server.
    queries, samples: queries and query samples sent to each client.
    sent, received: bytes to and from each client in rounds and preparation.
    failures: number of failures by kind.
    """

    server: Tensors
    rounds: int = 0
    prepared: bool = False
    tag: int = 0
    kept_tags: dict[int, int] = field(default_factory=dict)
    spends: dict[int, Spend] = field(default_factory=dict)
    queries: Counter[int] = field(default_factory=Counter)
    samples: Counter[int] = field(default_factory=Counter)
    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class RoundFacts:
    """Observations of the server about a round, all of them functions of releases.

    rounds: number of rounds in one exchange.
    response_norm: mean L2 norm of the mean responses (None without a query), mostly noise.
    seconds: duration by part: critics, routing (responses), generator.
    """

    rounds: int
    clients: int
    response_norm: float | None
    seconds: dict[str, float]


class _UnusableError(Exception):
    """An invalid reply, with its kind of failure."""


class Rounds:
    """Exchange of one run with its clients.

    Args:
        clients: number of clients.
        min_success: minimum share of the clients that were sent a message that must respond.
        timeout: deadline of a client for a message of a round, in seconds.
        on_round: called with each round before any client is queried.
        on_failure: called with each failure.
        max_samples: maximum number of query samples of a client, enforced by the client.
        causes: causes of failures, if known.
        masks: whether responses are masked; run: name of the run, which masks are bound to.
        remote: whether clients are remote nodes, which sign keys and lists.
        max_response_bytes: limit on the arrays of a response, in bytes.
        on_sum: called with each secure sum before it is used: (round, digest of the query,
            clients).
        say: prints a line.
    """

    def __init__(
        self,
        grid: Grid,
        strategy: Strategy,
        method: Method,
        state: RunState,
        *,
        clients: int,
        min_success: float,
        timeout: float | None,
        on_round: Callable[[int], None],
        on_failure: Callable[[Failure], None],
        max_samples: int,
        causes: FailureCauses,
        masks: bool = False,
        remote: bool = False,
        run: str = "",
        max_response_bytes: float = math.inf,
        on_sum: Callable[[int, str, list[int]], None] = lambda round_, query_digest, clients: None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.grid, self.strategy, self.method, self.state = grid, strategy, method, state
        self._count, self._min_success, self._timeout = clients, min_success, timeout
        self._begins, self._failed, self._causes = on_round, on_failure, causes
        self._masks, self._remote, self._run, self._opens = masks, remote, run, on_sum
        self._says, self._largest = say, max_response_bytes
        self._clients: dict[int, int] = {}  # node -> client
        trained = method.trained_per_round or clients
        turns = -(-clients // trained)  # rounds of a full rotation
        self._missed: deque[list[Failure]] = deque(maxlen=turns)
        self._changed_clients: set[int] = (
            set()
        )  # their state may have changed since their last acknowledged keep message
        self._signing = False  # whether the current exchange requests signed accounts
        self._over: deque[dict[str, Failure]] = deque(maxlen=4)  # messages of the last exchanges
        self._canonical: dict[DpEvent, Spend] = {}
        # the bound on sums of several clients requires the planned noise of each
        self._of_plan: set[DpEvent] = set()
        self._planned_rows: set[int] = set()
        self._most_rows = max_samples
        self._plan_for(max_samples)

    def hello(self) -> dict[int, int]:
        """Learn the client index of each node; node ids are random.

        Returns:
            client -> node.

        Raises:
            FedgenError: if the number of clients differs from the run's.
        """
        until = time.monotonic() + _START_SECONDS
        silent = until - _START_SECONDS + _SILENT_SECONDS
        while len(nodes := sorted(self.grid.get_node_ids())) != self._count:
            if time.monotonic() > until or len(nodes) > self._count:
                raise FedgenError(
                    "partition.clients",
                    f"the run has {self._count} clients, the federation {len(nodes)} node(s)",
                    "start one node per client",
                )
            if time.monotonic() > silent:
                silent = math.inf
                waiting = f"waiting for clients: {len(nodes)} of {self._count} are connected"
                self._says(f"{waiting}, {until - time.monotonic():.0f} seconds left")
            time.sleep(0.1)
        self._clients = {node: position for position, node in enumerate(nodes)}  # provisional
        sent = [
            Message(messages.pack_hello(), dst_node_id=node, message_type=messages.HELLO)
            for node in nodes
        ]

        def partition(client: int, reply: Message) -> int:
            return messages.read_partition(reply)

        indices = self._exchange(sent, "to the greeting", partition, required=1.0)
        if sorted(indices.values()) != list(range(self._count)):
            raise FedgenError(
                "partition.clients",
                f"the nodes have the indices {sorted(indices.values())}",
                f"give each of 0 to {self._count - 1} to one node, as its partition-id",
            )
        self._clients = {nodes[position]: client for position, client in indices.items()}
        self.strategy.nodes = {client: node for node, client in self._clients.items()}
        return dict(self.strategy.nodes)

    def restore(self) -> None:
        """Restore each client to the state that corresponds to the server's, or to the last one
        that it kept if it missed later keep messages.

        Raises:
            FedgenError: if a client fails.
        """
        sent = [
            self._message(
                messages.pack_round(self.state.kept_tags.get(client, 0)), messages.RESTORE, client
            )
            for client in sorted(self.strategy.nodes)
        ]
        self._exchange(sent, "to the restore message", _acknowledged, required=1.0)

    def keep(self) -> None:
        """Have each client with a changed state keep it under the next tag; skip all others."""
        self.state.tag += 1
        sent = [
            self._message(
                messages.pack_keep(self.state.tag, self.state.kept_tags.get(client, 0)),
                messages.KEEP,
                client,
            )
            for client in sorted(self._changed_clients)
        ]
        acknowledged, failures = self._send(sent, _acknowledged, count=False)
        # clients without a message have kept their state: the share is that of all clients
        clients = len(self.strategy.nodes)
        if clients - len(failures) < self._min_success * clients:
            raise too_few("to the keep message", clients, failures, self._causes)
        self.state.kept_tags |= dict.fromkeys(acknowledged, self.state.tag)
        self._changed_clients -= acknowledged.keys()

    def forget(self) -> None:
        """Have each client delete its state: critics have seen private records and are no longer
        needed."""
        sent = self._broadcast(messages.FORGET, messages.pack_hello())
        self._exchange(sent, "to the forget message", _acknowledged, required=0.0)

    def accounts(self, required: float = 0.0) -> dict[int, Account]:
        """Return the ledger sums of responding clients. A client can raise its own ε but not lower
        it: spend of events outside the plan, or for more query samples than allowed, has no bound.
        ``required``: share of clients that must respond."""
        sent = self._broadcast(messages.ACCOUNT, messages.pack_hello())

        def read(client: int, reply: Message) -> Account:
            account = messages.read_account(reply)
            max_count = max(account.spend.values(), default=0)
            if not self._is_planned(account.spend) or max_count > self._most_rows:
                return replace(account, spend={NonPrivateDpEvent(): 1})
            return account

        return self._exchange(sent, "to the account message", read, required=required)

    def signed_accounts(self, facts: ReleaseFacts) -> list[dict[str, str]]:
        """Return the signed accounts of responding clients (``signed_accounts``); an invalid one
        counts as a failure of its client."""
        sent = self._broadcast(messages.SIGN, messages.pack_text(facts.text()))
        self._signing = True

        def read(client: int, reply: Message) -> dict[str, str]:
            return read_account(messages.read_text(reply), self._run, client)

        accounts = self._exchange(sent, "to the sign message", read, required=0.0)
        self._signing = False
        return [accounts[client] for client in sorted(accounts)]

    def prepare(self, prepared: Callable[[int, int], None]) -> None:
        """Have each client prepare its state, part by part. ``prepared``: called with (done,
        total)."""
        if self.state.prepared:
            return
        calls = [
            (client, number)
            for number in range(self.method.client.prepare_steps)
            for client in sorted(self.strategy.nodes)
        ]
        for start in range(0, len(calls), _BATCH_SIZE):
            sent = [
                self._message(messages.pack_round(number), messages.PREPARE, client)
                for client, number in calls[start : start + _BATCH_SIZE]
            ]
            self._exchange(sent, "to the prepare message", _acknowledged, count=True)
            prepared(start + len(sent), len(calls))
        self.state.prepared = True

    def run(
        self,
        streams: RandomStreams,
        budget: Budget,
        finished: Callable[[RunState, RoundFacts], None],
        until: int,
    ) -> str | None:
        """Run until ``until`` rounds are completed, with the same queries as if all rounds of
        ``budget`` followed; return the reason for stopping early, or None."""
        while self.state.rounds < until:
            server_round = self.state.rounds
            query = self.method.server.query(self.state.server, server_round, streams)
            if query is None:
                finished(self.state, self._server_round(server_round, streams))
                continue
            remaining = (budget.rounds - server_round) * self.method.plan.samples_per_round
            if query.count > remaining:
                query = query.take(list(range(remaining)))
            routed = self.strategy.route(server_round, query.count)
            exceeding = [
                client
                for client, indices in routed.items()
                if self.state.samples[client] + len(indices) > budget.samples_per_client
            ]
            if exceeding:
                return (
                    f"round {server_round + 1} would exceed the budget of client {exceeding[0]}: "
                    f"{budget.samples_per_client} query samples"
                )
            finished(self.state, self._round(server_round, query, streams))
        return None

    def _server_round(self, server_round: int, streams: RandomStreams) -> RoundFacts:
        """Run a round without clients."""
        start = time.perf_counter()
        state = self.state
        state.server = self.method.server.server_step(state.server, server_round, streams)
        state.rounds += 1
        return RoundFacts(1, 0, None, {"generator": time.perf_counter() - start})

    def _round(self, server_round: int, query: Query, streams: RandomStreams) -> RoundFacts:
        state, server, plan = self.state, self.method.server, self.method.plan
        start = time.perf_counter()
        self._begins(server_round)
        broadcast = messages.pack_arrays(server.broadcast(state.server, server_round, streams))
        config = ConfigRecord({"rows": query.count})
        sent = self.strategy.configure_train(server_round, broadcast, config, self.grid)
        self._train(list(sent), f"in round {server_round + 1}")
        trained = time.perf_counter()
        queries = self.strategy.configure_query(server_round, query)
        routed = self.strategy.route(server_round, query.count)
        for indices in routed.values():
            self._plan_for(len(indices))
        self._check_size(server_round, max(map(len, routed.values()), default=0))
        for client, indices in routed.items():  # charged as soon as it is sent
            state.queries[client] += 1
            state.samples[client] += len(indices)

        def read(client: int, reply: Message) -> Response:
            indices = len(routed[client])
            return self._read(
                client, reply, plan.response_shape(indices, server_round), max(indices, 1)
            )

        description = f"in round {server_round + 1}"
        if plan.aggregation.adds_up:
            responses = self._sum(server_round, queries, description, read)
        else:
            responses = self._exchange(queries, description, read, count=True)
        mean = self.strategy.aggregate_query(server_round, responses, query.count)
        responded = time.perf_counter()
        norm = None
        if mean is not None:
            norm = float(torch.linalg.vector_norm(mean.flatten(1), dim=1).mean())
            state.server = server.update(state.server, mean, server_round, streams)
        rounds = query.count // plan.samples_per_round
        state.rounds += rounds
        seconds = {
            "critics": trained - start,
            "routing": responded - trained,
            "generator": time.perf_counter() - responded,
        }
        return RoundFacts(rounds, len(responses), norm, seconds)

    def _check_size(self, server_round: int, samples: int) -> None:
        """Raise FedgenError, before any client is charged, for responses that would exceed the
        link's limit."""
        plan = self.method.plan
        item = max(kind.itemsize for kind in plan.aggregation.accepted_dtypes)
        size = math.prod(plan.response_shape(samples, server_round)) * item
        if size > self._largest:
            raise FedgenError(
                "runtime.superlink",
                f"a response of {size / 2**20:.1f} MB exceeds the link's request limit",
                f"restart fedgen link with largest={math.ceil(size / 2**20) + 1}, then resume=",
            )

    def _sum(
        self,
        server_round: int,
        queries: list[Message],
        description: str,
        read: Callable[[int, Message], Response],
    ) -> dict[int, Response]:
        """Query a secure sum. All clients receive the same query and the digest of the cohort: the
        same query to another cohort uses other streams."""
        [content, *other_contents] = [query.content for query in queries]
        assert all(query is content for query in other_contents)
        cohort = sorted(self._clients[query.metadata.dst_node_id] for query in queries)
        content = messages.add_cohort(content, cohort)
        for query in queries:
            query.content = content

        failures: list[Failure] = []  # of this round

        def exchange(
            kind: str, contents: Mapping[int, RecordDict], read: Callable[[int, Message], T]
        ) -> dict[int, T]:
            sent = [self._message(content_, kind, client) for client, content_ in contents.items()]
            replies, failed = self._send(sent, read, count=True)
            failures.extend(failed)
            if len(replies) < self._min_success * len(cohort):
                raise too_few(
                    description, len(cohort), failures, self._causes, len(cohort) - len(replies)
                )
            return replies

        def leave_out(kind: str, client: int) -> None:
            failures.append(self._fail(kind, client))

        content_by_client = dict.fromkeys(cohort, content)
        if self._masks:
            sums, run = self.method.plan.aggregation, self._run
            assert isinstance(sums, Secure)
            masked = MaskedSum(
                server_round, content_by_client, sums, run, self._remote, exchange, leave_out
            )
            responses = masked.query(read)
        else:
            read_share = partial(self._read_share, set(cohort), read)
            responses, missing = present(exchange(messages.ASK, content_by_client, read_share))
            for client in missing:
                leave_out("unavailable", client)
            if len(responses) < self._min_success * len(cohort):
                raise too_few(description, len(cohort), failures, self._causes)
        self._opens(server_round, messages.digest_of(queries[0]), clients_in(responses))
        return responses

    def _read_share(
        self,
        cohort: set[int],
        read: Callable[[int, Message], Response],
        client: int,
        reply: Message,
    ) -> Response:
        """Read a response, or the sum of several that a process of a simulation has formed; each of
        its clients would have sent as much."""
        response = read(client, reply)
        size = sum(record.count_bytes() for record in reply.content.array_records.values())
        if not cohort.issuperset(response.clients):
            raise _UnusableError("malformed")
        for other in set(response.clients) - {client}:
            self.state.received[other] += size
        return response

    def _plan_for(self, samples: int) -> None:
        """Accept the plan's events for this number of query samples."""
        if samples not in self._planned_rows:
            self._planned_rows.add(samples)
            self._of_plan |= set(
                canonical(self.method.plan.server_event(samples)) if samples else ()
            )

    def _is_planned(self, spend: Spend) -> bool:
        """Return whether all events belong to the plan, including revealed samples: clients do not
        know of dropouts."""
        revealed = with_sampling_revealed(spend)
        return any(self._of_plan.issuperset(leaves) for leaves in (spend, revealed))

    def _record_spend(self, client: int, event: DpEvent) -> None:
        if event not in self._canonical:
            self._canonical[event] = canonical(event)
        spend = dict(self.state.spends.get(client, {}))
        for leaf, count in self._canonical[event].items():
            spend[leaf] = spend.get(leaf, 0) + count
        self.state.spends[client] = spend

    def _train(self, sent: list[Message], description: str) -> None:
        """Have clients train. The few clients of one round may all fail; the share of clients that
        missed their last turn counts."""
        _, failures = self._send(sent, _acknowledged, count=True)
        self._missed.append(failures)
        missed = [failure for turn in self._missed for failure in turn]
        total = len(sent) if self._missed.maxlen == 1 else self._count
        if total - len(missed) < self._min_success * total:
            raise too_few(f"to training, most recently {description}", total, missed, self._causes)

    def _read(
        self, client: int, reply: Message, shape: tuple[int, ...], max_count: int
    ) -> Response:
        """Return a client's response if it matches the query and charges planned events at most
        ``max_count`` times."""
        try:
            response = messages.read_response(reply, self.method.plan.aggregation)
            spend = canonical(response.event)
        except (ValueError, ArithmeticError, TypeError) as error:
            raise _UnusableError("malformed") from error
        counts = spend.values()
        if not self._is_planned(spend) or not 0 < min(counts) <= max(counts) <= max_count:
            self._record_spend(client, NonPrivateDpEvent())  # it left the client at an unknown cost
            raise _UnusableError("unplanned")
        self._record_spend(client, response.event)
        if not response.arrays and not self._masks:
            return response  # summed into another response
        if not response.arrays or (values := response.arrays["answer"]).shape != shape:
            raise _UnusableError("malformed")
        flat = values.reshape(shape[0], math.prod(shape[1:]))
        norms = np.linalg.norm(flat.astype(np.float64), axis=1)
        if not np.isfinite(norms).all():
            raise _UnusableError("not finite")
        if (norms > self.method.plan.max_norm).any():
            raise _UnusableError("too long")
        return response

    def _message(self, content: RecordDict, kind: str, client: int) -> Message:
        return Message(content, dst_node_id=self.strategy.nodes[client], message_type=kind)

    def _broadcast(self, kind: str, content: RecordDict) -> list[Message]:
        return [self._message(content, kind, client) for client in sorted(self.strategy.nodes)]

    def _exchange(
        self,
        sent: Iterable[Message],
        description: str,
        read: Callable[[int, Message], T],
        required: float | None = None,
        count: bool = False,
    ) -> dict[int, T]:
        """Send messages and wait for the replies; see ``_send``.

        Args:
            description: description of the exchange.
            required: share of messages that must be answered; None: that of the run.

        Raises:
            FedgenError: for too few replies.
        """
        sent = list(sent)
        results, failures = self._send(sent, read, count)
        share = self._min_success if required is None else required
        if len(sent) - len(failures) < share * len(sent):  # a client may be sent several
            raise too_few(description, len(sent), failures, self._causes)
        return results

    def _send(
        self, sent: list[Message], read: Callable[[int, Message], T], count: bool
    ) -> tuple[dict[int, T], list[Failure]]:
        """Send messages and wait until each has a reply, possibly an error; grids guarantee this.
        Replies to past messages are dropped.

        Args:
            read: (client, reply) -> result.
            count: whether the bytes count.

        Returns:
            client -> result, and the failures.
        """
        sizes: dict[int, int] = {}
        waiting: dict[str, int] = {}
        failures: list[Failure] = []
        for message in sent:
            if self._remote:
                seconds = remote_timeout(message.metadata.message_type, self._timeout)
            else:  # Flower's deadline starts now and includes waiting for a worker
                seconds = message_timeout(message, self._timeout) * len(sent)
            if math.isfinite(seconds):
                message.metadata.ttl = seconds
        self.grid.push_messages(sent)
        for message in sent:
            client = self._clients[message.metadata.dst_node_id]
            if message.metadata.message_type in _STATE_CHANGING:
                self._changed_clients.add(client)
            if not message.metadata.message_id:  # the node is no longer registered
                failures.append(self._fail("unavailable", client))
                continue
            waiting[message.metadata.message_id] = client
            if count:
                key = id(message.content)
                if key not in sizes:
                    sizes[key] = messages.count_bytes(message)
                self.state.sent[client] += sizes[key]
        finished: dict[str, Failure] = {}
        results: dict[int, T] = {}
        while waiting:
            replies = list(self.grid.pull_messages(waiting))
            if not replies:
                time.sleep(_POLL_SECONDS)
            for reply in replies:
                message_id = reply.metadata.reply_to_message_id
                if message_id not in waiting:
                    self._ignore(message_id, finished)
                    continue
                client = waiting.pop(message_id)
                finished[message_id] = Failure("repeated", client, self.state.rounds + 1)
                if reply.has_error():
                    finished[message_id] = Failure("late", client, self.state.rounds + 1)
                    failures.append(self._fail(failure_kind(reply), client))
                    continue
                try:
                    if count:
                        self.state.received[client] += messages.count_bytes(reply)
                    results[client] = read(client, reply)
                except _UnusableError as error:
                    failures.append(self._fail(str(error), client))
                except ValueError:  # unexpected content, or Flower cannot count its bytes
                    failures.append(self._fail("malformed", client))
        self._over.append(finished)
        return results, failures

    def _ignore(self, message_id: str, finished: dict[str, Failure]) -> None:
        """Record a reply to a past message without using it."""
        for exchange in (finished, *self._over):
            if message_id in exchange:
                self._note_failure(exchange[message_id])

    def _fail(self, kind: str, client: int) -> Failure:
        kind = "unsigned" if self._signing else kind
        failure = Failure(kind, client, self.state.rounds + 1)
        self._note_failure(failure)
        return failure

    def _note_failure(self, failure: Failure) -> None:
        self.state.failures[failure.kind] += 1
        self._failed(failure)


def remote_timeout(kind: str, timeout: float | None) -> float:
    """Return the deadline for the reply of a remote node, in seconds. A node that dies never
    replies to a message that it has received, so only preparation has no deadline, and the messages
    of a round without ``runtime.timeout``. A greeting includes the calibration of noise at the
    site.

    Args:
        kind: message type.
        timeout: ``runtime.timeout``.
    """
    if kind == messages.PREPARE:
        return math.inf
    if timeout is None:
        return math.inf if kind in messages.IN_A_ROUND else _DEFAULT_REPLY_SECONDS
    return max(timeout, _START_SECONDS) if kind == messages.HELLO else timeout


def _acknowledged(client: int, reply: Message) -> None:
    """Read nothing."""
