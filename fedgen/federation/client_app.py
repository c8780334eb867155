"""The Flower ClientApp: the same for every method, and the guard at a client's door."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.federation import messages
from fedgen.federation.client_store import ClientStore
from fedgen.federation.messages import Answer
from fedgen.method import ClientProgram
from fedgen.privacy.ledger import Ledger


class BudgetError(Exception):
    """A client was asked for more rows than its budget allows; it answered nothing."""


class PastRoundError(Exception):
    """A client was asked about a round before its last; it answered nothing. A round's noise is a
    function of the round: with another question it would cancel out of the two answers."""


@dataclass
class ClientHome:
    """What one client has at hand. ``rows`` is its budget for the run, which it enforces itself."""

    number: int
    program: ClientProgram
    shard: Shard
    coins: Coins
    store: ClientStore
    ledger: Ledger
    rows: int


def client_app(find_home: Callable[[Context], ClientHome]) -> ClientApp:
    """The app. It captures no data: ``find_home`` looks the client up by the message's context.

    A message that was handled before gets the reply that it got then, so that nothing is spent
    twice.
    """
    app = ClientApp()

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        return Message(messages.pack_partition(find_home(context).number), reply_to=message)

    @app.train("prepare")
    def prepare(message: Message, context: Context) -> Message:
        home = find_home(context)
        number = messages.read_place(message)
        done = home.store.done(home.number, messages.PREPARE)
        if done is None or done < number:
            parts = home.program.prepare(number, home.shard, home.coins)
            home.store.commit(home.number, messages.PREPARE, number, parts, None)
        return Message(messages.pack_acknowledgement(), reply_to=message)

    @app.train("broadcast")
    def train(message: Message, context: Context) -> Message:
        home = find_home(context)
        server_round = messages.read_place(message)
        done = home.store.done(home.number, messages.TRAIN)
        if done is None or done < server_round:
            arrays = messages.read_broadcast(message)
            state = home.store.state(home.number)
            changed = home.program.train(state, arrays, home.shard, server_round, home.coins)
            home.store.commit(home.number, messages.TRAIN, server_round, changed, None)
        return Message(messages.pack_acknowledgement(), reply_to=message)

    @app.query("ask")
    def ask(message: Message, context: Context) -> Message:
        home = find_home(context)
        server_round = messages.read_place(message)
        done = home.store.done(home.number, messages.ASK)
        if done == server_round:
            last = home.store.answer(home.number)
            return Message(messages.pack_answer(last), reply_to=message)
        if done is not None and server_round < done:
            raise PastRoundError
        query = messages.read_query(message)
        repeat = home.ledger.is_repeat(server_round)
        if not repeat and home.ledger.rows + query.count > home.rows:
            raise BudgetError
        state = home.store.state(home.number)
        release = home.program.answer(state, query, home.shard, server_round, home.coins)
        home.ledger.charge(server_round, query.count, release.event)  # before anything leaves
        reply = messages.pack_release(release)
        kept = Answer(release.arrays, release.event, release.unit)
        home.store.commit(home.number, messages.ASK, server_round, {}, kept)
        return Message(reply, reply_to=message)

    return app
