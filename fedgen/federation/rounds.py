"""The round loop: messages over a Grid, counts, and a stop before the budget is overspent."""

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

from fedgen.coins import Coins
from fedgen.errors import FedgenError
from fedgen.federation import messages
from fedgen.federation.failures import Causes, Failure, kind_of, too_few
from fedgen.federation.messages import Answer
from fedgen.federation.nodes import seconds_for
from fedgen.federation.sums import that_are_there, under_masks, whose
from fedgen.method import Method, Query, Tensors
from fedgen.privacy.budget import Budget
from fedgen.privacy.events import Spend, canonical, with_draws_seen
from fedgen.privacy.ledger import Account
from fedgen.privacy.releases import Secure

T = TypeVar("T")

_AT_ONCE = 64  # calls to prepare between two looks at the clock: each may take minutes
_START_SECONDS = 60.0  # until all nodes are there
_SILENT_SECONDS = 5.0  # before it is said that somebody is waited for
_POLL_SECONDS = 0.003  # between looks at a grid that has nothing yet


class Strategy(Protocol):
    """What the loop needs of a strategy."""

    nodes: dict[int, int]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]: ...

    def configure_query(self, server_round: int, query: Query) -> list[Message]: ...

    def route(self, server_round: int, rows: int) -> dict[int, list[int]]: ...

    def aggregate_query(
        self, server_round: int, answers: dict[int, Answer], rows: int
    ) -> Tensor | None: ...


@dataclass
class RunState:
    """All that the server knows between rounds.

    rounds: rounds completed. server: the server program's state. tag: of the clients' states that
    go with it; kept: the last tag under which each client kept its own. spends: what each client
    released, as the server saw it. asks, rows: how often each client was asked, and for how many
    rows, counted as sent. sent, received: bytes to and from each client in rounds and preparation.
    failures: how many of each kind.
    """

    server: Tensors
    rounds: int = 0
    prepared: bool = False
    tag: int = 0
    kept: dict[int, int] = field(default_factory=dict)
    spends: dict[int, Spend] = field(default_factory=dict)
    asks: Counter[int] = field(default_factory=Counter)
    rows: Counter[int] = field(default_factory=Counter)
    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class RoundFacts:
    """What a round showed to the server: everything here follows from releases.

    rounds: how many it was in one exchange.
    answer_norm: mean L2 norm of the mean answers (None if nobody was asked); mostly noise.
    seconds: by part: critics, routing (answers), generator.
    """

    rounds: int
    clients: int
    answer_norm: float | None
    seconds: dict[str, float]


class _UnusableError(Exception):
    """A reply that cannot be used; the kind of failure that it is."""


class Rounds:
    """One run's exchange with its clients.

    Args:
        clients: number of clients.
        min_success: the share of those that were sent a message who must answer it.
        timeout: seconds that a client may take for a message of a round.
        begins: called with each round before anybody is asked.
        failed: called with each failure.
        rows: that a client may answer, at most, as it counts itself.
        causes: of clients' failures, as far as they are known.
        masks: whether answers travel under masks; run: its name, which these are made for; signed:
            whether clients sign for these.
        largest: limit on a response, in bytes.
        opens: called with each secure sum before it is looked at: (round, digest of the question,
            whose it is).
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
        begins: Callable[[int], None],
        failed: Callable[[Failure], None],
        rows: int,
        causes: Causes,
        masks: bool = False,
        signed: bool = False,
        run: str = "",
        largest: float = math.inf,
        opens: Callable[[int, str, list[int]], None] = lambda round_, asked, clients: None,
        says: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.grid, self.strategy, self.method, self.state = grid, strategy, method, state
        self._count, self._min_success, self._timeout = clients, min_success, timeout
        self._begins, self._failed, self._causes = begins, failed, causes
        self._masks, self._signed, self._run, self._opens = masks, signed, run, opens
        self._says, self._largest = says, largest
        self._clients: dict[int, int] = {}  # node -> client
        trained = method.trained_per_round or clients
        turns = -(-clients // trained)  # rounds until each client was asked to train
        self._missed: deque[list[Failure]] = deque(maxlen=turns)
        self._over: deque[dict[str, Failure]] = deque(maxlen=4)  # of the last exchanges
        self._canonical: dict[DpEvent, Spend] = {}
        # what is published of several clients' sums rests on the noise of each
        self._of_plan: set[DpEvent] = set()
        self._planned_rows: set[int] = set()
        self._most_rows = rows
        self._plan_for(rows)

    def hello(self) -> dict[int, int]:
        """Learns which node is which client: node ids are random, and in no order.

        Returns:
            client -> node.

        Raises:
            FedgenError: if there are not as many clients as the run has.
        """
        until = time.monotonic() + _START_SECONDS
        silent = until - _START_SECONDS + _SILENT_SECONDS
        while len(nodes := sorted(self.grid.get_node_ids())) != self._count:
            if time.monotonic() > until or len(nodes) > self._count:
                raise FedgenError(
                    "partition.clients",
                    f"the run has {self._count} clients, the federation {len(nodes)} node(s)",
                    "start as many nodes as there are clients",
                )
            if time.monotonic() > silent:
                silent = math.inf
                here = f"waiting for clients: {len(nodes)} of {self._count} are here"
                self._says(f"{here}, for {until - time.monotonic():.0f} seconds more")
            time.sleep(0.1)
        self._clients = {node: place for place, node in enumerate(nodes)}  # until they have spoken
        asked = [
            Message(messages.pack_hello(), dst_node_id=node, message_type=messages.HELLO)
            for node in nodes
        ]

        def partition(client: int, reply: Message) -> int:
            return messages.read_partition(reply)

        found = self._exchange(asked, "the greeting", partition, must=1.0)
        if sorted(found.values()) != list(range(self._count)):
            raise FedgenError(
                "partition.clients",
                f"the nodes say that they are clients {sorted(found.values())}",
                f"give each of 0 to {self._count - 1} to one node, as its partition-id",
            )
        self._clients = {nodes[place]: client for place, client in found.items()}
        self.strategy.nodes = {client: node for node, client in self._clients.items()}
        return dict(self.strategy.nodes)

    def restore(self) -> None:
        """Has every client go back to the state that goes with the server's, or to the last one
        that it kept, if it did not hear later calls.

        Raises:
            FedgenError: if one cannot.
        """
        asked = [
            self._message(
                messages.pack_place(self.state.kept.get(client, 0)), messages.RESTORE, client
            )
            for client in sorted(self.strategy.nodes)
        ]
        self._exchange(asked, "the call to go back to its state", _acknowledged, must=1.0)

    def keep(self) -> None:
        """Has every client hold on to its state, under the next tag."""
        self.state.tag += 1
        asked = self._to_all(messages.KEEP, messages.pack_place(self.state.tag))
        found = self._exchange(asked, "the call to keep its state", _acknowledged)
        self.state.kept |= dict.fromkeys(found, self.state.tag)

    def forget(self) -> None:
        """Has every client drop its state: critics saw private rows, and their use is over."""
        asked = self._to_all(messages.FORGET, messages.pack_hello())
        self._exchange(asked, "the farewell", _acknowledged, must=0.0)

    def accounts(self, must: float = 0.0) -> dict[int, Account]:
        """What the clients' ledgers come to, of those that answer. A client's word can raise its ε,
        never lower it: what it spent at another cost than the plan's, or for more rows than it
        may answer, has no bound. ``must``: the share that must answer."""
        asked = self._to_all(messages.ACCOUNT, messages.pack_hello())

        def read(client: int, reply: Message) -> Account:
            account = messages.read_account(reply)
            most = max(account.spend.values(), default=0)
            if not self._is_planned(account.spend) or most > self._most_rows:
                return replace(account, spend={NonPrivateDpEvent(): 1})
            return account

        return self._exchange(asked, "the call for accounts", read, must=must)

    def prepare(self, prepared: Callable[[int, int], None]) -> None:
        """Has every client make its state, part by part. ``prepared``: (done, of) now and then."""
        if self.state.prepared:
            return
        wanted = [
            (client, number)
            for number in range(self.method.client.preparations)
            for client in sorted(self.strategy.nodes)
        ]
        for start in range(0, len(wanted), _AT_ONCE):
            asked = [
                self._message(messages.pack_place(number), messages.PREPARE, client)
                for client, number in wanted[start : start + _AT_ONCE]
            ]
            self._exchange(asked, "the call to prepare", _acknowledged, count=True)
            prepared(start + len(asked), len(wanted))
        self.state.prepared = True

    def run(
        self,
        coins: Coins,
        budget: Budget,
        finished: Callable[[RunState, RoundFacts], None],
        until: int,
    ) -> str | None:
        """Rounds until there are so many, asked as if all that ``budget`` allows followed; returns
        why it stopped them early, or None."""
        while self.state.rounds < until:
            server_round = self.state.rounds
            query = self.method.server.query(self.state.server, server_round, coins)
            if query is None:
                finished(self.state, self._alone(server_round, coins))
                continue
            left = (budget.rounds - server_round) * self.method.plan.rows_per_round
            if query.count > left:
                query = query.take(list(range(left)))
            asked = self.strategy.route(server_round, query.count)
            over = [c for c, rows in asked.items() if self.state.rows[c] + len(rows) > budget.rows]
            if over:
                return (
                    f"round {server_round + 1} would ask client {over[0]} for more than its "
                    f"{budget.rows} rows"
                )
            finished(self.state, self._round(server_round, query, coins))
        return None

    def _alone(self, server_round: int, coins: Coins) -> RoundFacts:
        """A round that asks nobody."""
        start = time.perf_counter()
        state = self.state
        state.server = self.method.server.alone(state.server, server_round, coins)
        state.rounds += 1
        return RoundFacts(1, 0, None, {"generator": time.perf_counter() - start})

    def _round(self, server_round: int, query: Query, coins: Coins) -> RoundFacts:
        state, server, plan = self.state, self.method.server, self.method.plan
        start = time.perf_counter()
        self._begins(server_round)
        broadcast = messages.pack_arrays(server.broadcast(state.server, server_round, coins))
        config = ConfigRecord({"rows": query.count})
        asked = self.strategy.configure_train(server_round, broadcast, config, self.grid)
        self._have_trained(list(asked), f"in round {server_round + 1}")
        trained = time.perf_counter()
        questions = self.strategy.configure_query(server_round, query)
        routed = self.strategy.route(server_round, query.count)
        for rows in routed.values():
            self._plan_for(len(rows))
        self._check_size(server_round, max(map(len, routed.values()), default=0))
        for client, rows in routed.items():  # spent as soon as it is sent
            state.asks[client] += 1
            state.rows[client] += len(rows)

        def read(client: int, reply: Message) -> Answer:
            rows = len(routed[client])
            return self._read(client, reply, plan.answer(rows, server_round), max(rows, 1))

        place = f"in round {server_round + 1}"
        if plan.aggregation.adds_up:
            answers = self._sum(server_round, questions, place, read)
        else:
            answers = self._exchange(questions, place, read, count=True)
        mean = self.strategy.aggregate_query(server_round, answers, query.count)
        answered = time.perf_counter()
        norm = None
        if mean is not None:
            norm = float(torch.linalg.vector_norm(mean.flatten(1), dim=1).mean())
            state.server = server.update(state.server, mean, server_round, coins)
        rounds = query.count // plan.rows_per_round
        state.rounds += rounds
        seconds = {
            "critics": trained - start,
            "routing": answered - trained,
            "generator": time.perf_counter() - answered,
        }
        return RoundFacts(rounds, len(answers), norm, seconds)

    def _check_size(self, server_round: int, rows: int) -> None:
        """Raises FedgenError, before any client is charged, for responses that would not arrive."""
        plan = self.method.plan
        item = max(kind.itemsize for kind in plan.aggregation.arrive_as)
        size = math.prod(plan.answer(rows, server_round)) * item
        if size > self._largest:
            raise FedgenError(
                "runtime.superlink",
                f"a response of {size / 2**20:.1f} MB exceeds the link's request limit",
                f"restart fedgen link with largest={math.ceil(size / 2**20) + 1}, then resume=",
            )

    def _sum(
        self,
        server_round: int,
        questions: list[Message],
        place: str,
        read: Callable[[int, Message], Answer],
    ) -> dict[int, Answer]:
        """Asks for a secure sum. All are asked the same, and told of whom it is to be the sum: the
        same question to another cohort finds other coins."""
        [content, *others] = [each.content for each in questions]
        assert all(each is content for each in others)
        cohort = sorted(self._clients[each.metadata.dst_node_id] for each in questions)
        content = messages.for_cohort(content, cohort)
        for each in questions:
            each.content = content

        failures: list[Failure] = []  # of this round

        def exchange(
            kind: str, asked: Mapping[int, RecordDict], read: Callable[[int, Message], T]
        ) -> dict[int, T]:
            sent = [self._message(each, kind, client) for client, each in asked.items()]
            replies, failed = self._send(sent, read, count=True)
            failures.extend(failed)
            if len(replies) < self._min_success * len(cohort):
                raise too_few(
                    place, len(cohort), failures, self._causes, len(cohort) - len(replies)
                )
            return replies

        def leave_out(kind: str, client: int) -> None:
            failures.append(self._fail(kind, client))

        asked = dict.fromkeys(cohort, content)
        if self._masks:
            sums, run = self.method.plan.aggregation, self._run
            assert isinstance(sums, Secure)
            answers = under_masks(
                server_round, asked, sums, run, self._signed, exchange, leave_out, read
            )
        else:
            part = partial(self._part, set(cohort), read)
            answers, lost = that_are_there(exchange(messages.ASK, asked, part))
            for client in lost:
                leave_out("unavailable", client)
            if len(answers) < self._min_success * len(cohort):
                raise too_few(place, len(cohort), failures, self._causes)
        self._opens(server_round, messages.digest_of(questions[0]), whose(answers))
        return answers

    def _part(
        self,
        cohort: set[int],
        read: Callable[[int, Message], Answer],
        client: int,
        reply: Message,
    ) -> Answer:
        """An answer, or what a process of a simulation has added up: each of its clients would have
        sent as much."""
        answer = read(client, reply)
        size = sum(each.count_bytes() for each in reply.content.array_records.values())
        if not cohort.issuperset(answer.of):
            raise _UnusableError("malformed")
        for other in set(answer.of) - {client}:
            self.state.received[other] += size
        return answer

    def _plan_for(self, rows: int) -> None:
        """Has the plan's events for so many rows count as planned."""
        if rows not in self._planned_rows:
            self._planned_rows.add(rows)
            self._of_plan |= set(canonical(self.method.plan.server(rows)) if rows else ())

    def _is_planned(self, spend: Spend) -> bool:
        """Whether all of it is of the plan, draws that a gap may have shown included: clients do
        not know of one."""
        return any(self._of_plan.issuperset(each) for each in (spend, with_draws_seen(spend)))

    def _note(self, client: int, event: DpEvent) -> None:
        if event not in self._canonical:
            self._canonical[event] = canonical(event)
        spend = dict(self.state.spends.get(client, {}))
        for leaf, count in self._canonical[event].items():
            spend[leaf] = spend.get(leaf, 0) + count
        self.state.spends[client] = spend

    def _have_trained(self, asked: list[Message], place: str) -> None:
        """Has clients train. A round's few may all miss their turn: what counts is the share of the
        clients that missed their last one."""
        _, failures = self._send(asked, _acknowledged, count=True)
        self._missed.append(failures)
        missed = [failure for turn in self._missed for failure in turn]
        of = len(asked) if self._missed.maxlen == 1 else self._count
        if of - len(missed) < self._min_success * of:
            raise too_few(f"when they were to train, lastly {place}", of, missed, self._causes)

    def _read(self, client: int, reply: Message, shape: tuple[int, ...], most: int) -> Answer:
        """A client's answer, if it is one to what it was asked, at a cost of the plan's, at most
        ``most`` times."""
        try:
            answer = messages.read_answer(reply, self.method.plan.aggregation)
            spend = canonical(answer.event)
        except (ValueError, ArithmeticError, TypeError) as error:
            raise _UnusableError("malformed") from error
        counts = spend.values()
        if not self._is_planned(spend) or not 0 < min(counts) <= max(counts) <= most:
            self._note(client, NonPrivateDpEvent())  # it left the client, at a cost of its own
            raise _UnusableError("unplanned")
        self._note(client, answer.event)
        if not answer.arrays and not self._masks:
            return answer  # added to another's
        if not answer.arrays or (found := answer.arrays["answer"]).shape != shape:
            raise _UnusableError("malformed")
        flat = found.reshape(shape[0], math.prod(shape[1:]))
        norms = np.linalg.norm(flat.astype(np.float64), axis=1)
        if not np.isfinite(norms).all():
            raise _UnusableError("not finite")
        if (norms > self.method.plan.longest).any():
            raise _UnusableError("too long")
        return answer

    def _message(self, content: RecordDict, kind: str, client: int) -> Message:
        return Message(content, dst_node_id=self.strategy.nodes[client], message_type=kind)

    def _to_all(self, kind: str, content: RecordDict) -> list[Message]:
        return [self._message(content, kind, client) for client in sorted(self.strategy.nodes)]

    def _exchange(
        self,
        asked: Iterable[Message],
        place: str,
        read: Callable[[int, Message], T],
        must: float | None = None,
        count: bool = False,
    ) -> dict[int, T]:
        """Sends messages and waits for the replies; see ``_send``.

        Args:
            place: what the exchange is, in words.
            must: the share that must answer; None: the run's.

        Raises:
            FedgenError: if too few answered.
        """
        sent = list(asked)
        found, failures = self._send(sent, read, count)
        share = self._min_success if must is None else must
        if len(sent) - len(failures) < share * len(sent):  # a client may be sent several
            raise too_few(place, len(sent), failures, self._causes)
        return found

    def _send(
        self, sent: list[Message], read: Callable[[int, Message], T], count: bool
    ) -> tuple[dict[int, T], list[Failure]]:
        """Sends messages and waits until each is answered, by an error at the latest: grids see to
        that. Replies to messages of the past are dropped.

        Args:
            read: (client, reply) -> what is made of it.
            count: whether these bytes count (they are the messages' own).

        Returns:
            client -> what was made of its reply; and who failed.
        """
        sizes: dict[int, int] = {}
        waiting: dict[str, int] = {}
        failures: list[Failure] = []
        for message in sent:  # when Flower gives up: it counts from now, with the wait for a turn
            seconds = seconds_for(message, self._timeout) * len(sent)
            if math.isfinite(seconds):
                message.metadata.ttl = seconds
        self.grid.push_messages(sent)
        for message in sent:
            client = self._clients[message.metadata.dst_node_id]
            if not message.metadata.message_id:  # Flower knows no such node any more
                failures.append(self._fail("unavailable", client))
                continue
            waiting[message.metadata.message_id] = client
            if count:
                key = id(message.content)
                if key not in sizes:
                    sizes[key] = messages.count_bytes(message)
                self.state.sent[client] += sizes[key]
        over: dict[str, Failure] = {}
        found: dict[int, T] = {}
        while waiting:
            replies = list(self.grid.pull_messages(list(waiting)))
            if not replies:
                time.sleep(_POLL_SECONDS)
            for reply in replies:
                name = reply.metadata.reply_to_message_id
                if name not in waiting:
                    self._drop(name, over)
                    continue
                client = waiting.pop(name)
                over[name] = Failure("repeated", client, self.state.rounds + 1)
                if reply.has_error():
                    over[name] = Failure("late", client, self.state.rounds + 1)
                    failures.append(self._fail(kind_of(reply), client))
                    continue
                try:
                    if count:
                        self.state.received[client] += messages.count_bytes(reply)
                    found[client] = read(client, reply)
                except _UnusableError as error:
                    failures.append(self._fail(str(error), client))
                except ValueError:  # it is not what was asked for, or Flower cannot count it
                    failures.append(self._fail("malformed", client))
        self._over.append(over)
        return found, failures

    def _drop(self, name: str, over: dict[str, Failure]) -> None:
        """A reply to a message that is over: noted, and not used."""
        for exchange in (over, *self._over):
            if name in exchange:
                self._note_failure(exchange[name])

    def _fail(self, kind: str, client: int) -> Failure:
        failure = Failure(kind, client, self.state.rounds + 1)
        self._note_failure(failure)
        return failure

    def _note_failure(self, failure: Failure) -> None:
        self.state.failures[failure.kind] += 1
        self._failed(failure)


def _acknowledged(client: int, reply: Message) -> None:
    """There is nothing to read."""
