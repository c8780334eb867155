"""The client app: idempotent, charged before a release leaves, and enforcing its own budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dp_accounting import NonPrivateDpEvent
from flwr.app import Context, Error, Message, RecordDict
from mutation import kills
from tiny import SHARD, STREAMS, make

from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.federation import messages
from fedgen.federation.client import app as app_module
from fedgen.federation.client.app import FAILED, client_app
from fedgen.federation.client.context import (
    ERRORS,
    SAMPLING_KEY,
    ClientContext,
    ClientContexts,
    ClientSetup,
    RunTerms,
)
from fedgen.federation.client.state_store import ClientStore
from fedgen.federation.flower_compat import identify_process
from fedgen.federation.runtimes.in_process import InProcessGrid
from fedgen.methods.api import Query, State
from fedgen.privacy.aggregation import LOCAL, Sent
from fedgen.privacy.batch_sampling import Participation
from fedgen.privacy.events import canonical
from fedgen.privacy.ledger import Ledger
from fedgen.randomness import Mode, RandomStreams

identify_process(1)  # some messages are created before any grid exists
Ask = Callable[[int], Message]
CONTEXT = Context(1, 2, {"partition-id": 0}, RecordDict(), {})


@pytest.fixture
def client_context(tmp_path: Path) -> ClientContext:
    return make_context(tmp_path, "seeded")


def make_context(folder: Path, noise: Mode) -> ClientContext:
    ledger = Ledger(folder / "0" / "ledger.jsonl", "run", 0, seeded=noise == "seeded")
    store, streams = ClientStore(folder, in_memory=True), RandomStreams.from_seed(0, noise)
    return ClientContext(0, make(noise=1.0).client, SHARD, streams, store, ledger, RunTerms(18))


@pytest.fixture
def ask(client_context: ClientContext) -> Ask:
    return make_ask(client_context)


def make_ask(client_context: ClientContext) -> Ask:
    method = make(noise=1.0)
    server = method.server.init(STREAMS)
    grid = InProcessGrid(client_app(lambda _: client_context), 1, timeout=60, serialize=False)

    def once(server_round: int) -> Message:
        query = method.server.query(server, server_round, STREAMS)
        content = messages.pack_query(server_round, query)
        message = Message(content, dst_node_id=2, message_type=messages.ASK)
        [reply] = grid.send_and_receive([message])
        return reply

    return once


@kills(
    "fedgen/federation/client/app.py",
    'caches_response = ctx.streams.mode == "secure"',
    'caches_response = ctx.streams.mode != "secure"',
)
@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_a_repeated_query_gets_the_same_response_without_a_charge(
    noise: Mode, tmp_path: Path
) -> None:
    """A seeded response is recomputed; one with secret noise is stored: its noise would be new."""
    client_context = make_context(tmp_path, noise)
    ask = make_ask(client_context)
    first, again, next_ = (messages.read_response(ask(r), LOCAL) for r in (0, 0, 1))
    assert (first.arrays["answer"] == again.arrays["answer"]).all()
    assert (first.arrays["answer"] != next_.arrays["answer"]).any()
    assert client_context.ledger.releases == 2


@kills(
    "fedgen/federation/client/app.py",
    "if last_round == server_round and not repeat:",
    "if False:",
)
def test_a_query_after_further_training_is_not_charged_twice(
    client_context: ClientContext, ask: Ask
) -> None:
    """The response could not be recomputed: the state is another one."""
    assert not ask(0).has_error()
    client_context.store.commit(0, messages.TRAIN, 1, {}, None, "digest of a message")
    assert ask(0).has_error()
    assert client_context.ledger.releases == 1


def test_a_past_round_is_not_answered_again(client_context: ClientContext, ask: Ask) -> None:
    """It would have the same noise: a server with another query could subtract it."""
    assert not ask(0).has_error()
    assert not ask(1).has_error()
    assert ask(0).has_error()
    assert client_context.ledger.releases == 2


@kills(
    "fedgen/federation/client/app.py",
    "ctx.ledger.rows + query.count > ctx.terms.samples",
    "ctx.ledger.rows > ctx.terms.samples",
)
def test_the_client_enforces_its_budget(client_context: ClientContext, ask: Ask) -> None:
    replies = [ask(server_round) for server_round in range(4)]
    assert [reply.has_error() for reply in replies] == [False, False, False, True]
    assert client_context.ledger.rows == 18


@kills(
    "fedgen/federation/client/app.py",
    "if not repeat and ctx.terms.limits is not None:",
    "if ctx.terms.limits is None:",
)
def test_no_kind_of_release_is_charged_more_often_than_planned(
    client_context: ClientContext, ask: Ask
) -> None:
    """The total budget is not used up, but that for this kind is."""
    client_context.terms = replace(
        client_context.terms, limits=canonical(make(noise=1.0).plan.server_event(6))
    )
    assert [ask(server_round).has_error() for server_round in range(3)] == [False, True, True]
    assert client_context.ledger.account().spend == client_context.terms.limits


@kills(
    "fedgen/federation/client/app.py",
    (
        "    if not charged:  # before the response is sent\n"
        "        ctx.ledger.charge(server_round, query_digest, query.count, "
        "response.event)\n"
        "    cached = response if caches_response else None\n"
        "    ctx.store.commit(ctx.index, messages.ASK, server_round, {}, cached)\n"
    ),
    (
        "    cached = response if caches_response else None\n"
        "    ctx.store.commit(ctx.index, messages.ASK, server_round, {}, cached)\n"
        "    ctx.ledger.charge(server_round, query_digest, query.count, "
        "response.event)\n"
    ),
)
def test_a_charge_precedes_the_response(
    client_context: ClientContext, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails after the release is computed, its cost is recorded."""

    def fail(*_: object) -> None:
        raise OSError("the line is dead")

    monkeypatch.setattr(client_context.store, "commit", fail)
    assert ask(0).has_error()
    assert client_context.ledger.releases == 1


@kills(
    "fedgen/federation/client/state_store.py",
    "return response if stored_query == query else None",
    "return response",
)
def test_a_charged_response_is_sent_again_after_a_death(tmp_path: Path) -> None:
    """The stored response is sent once, for the same query; another query is a new release."""
    client_context = make_context(tmp_path, "secure")
    ask = make_ask(client_context)
    limits = canonical(make(noise=1.0).plan.server_event(12))
    client_context.terms = replace(client_context.terms, stores_response=True, limits=limits)
    first = messages.read_response(ask(0), LOCAL)
    # its process is gone, and its state is back at the last checkpoint
    client_context.responded_round = -1
    client_context.store.restore(0, 0)
    assert (messages.read_response(ask(0), LOCAL).arrays["answer"] == first.arrays["answer"]).all()
    assert client_context.ledger.releases == 1
    client_context.responded_round = -1
    client_context.store.restore(0, 0)
    assert (messages.read_response(ask(1), LOCAL).arrays["answer"] != first.arrays["answer"]).any()
    assert client_context.ledger.releases == 2
    client_context.responded_round = -1
    client_context.store.restore(0, 0)
    assert ask(0).has_error(), "its answer is no longer held, and a third is not planned"
    assert client_context.ledger.releases == 2


@kills(
    "fedgen/federation/client/app.py",
    "charged = response is not None and ctx.ledger.last == query_digest",
    "charged = response is not None",
)
def test_a_stored_response_is_charged_when_it_leaves(
    client_context: ClientContext, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    client_context.terms = replace(client_context.terms, stores_response=True)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as full:
        full.setattr(client_context.ledger, "charge", fail)
        assert ask(0).has_error()
    assert client_context.ledger.releases == 0
    client_context.responded_round = -1
    assert not ask(0).has_error()
    assert client_context.ledger.releases == 1


def test_an_altered_stored_response_is_not_sent(client_context: ClientContext, ask: Ask) -> None:
    client_context.terms = replace(client_context.terms, stores_response=True)
    assert not ask(0).has_error()
    path = client_context.store.folder(0) / "answer.held"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(FedgenError, match="altered"):
        client_context.store.check(0, 0)
    client_context.responded_round = -1
    client_context.store.restore(0, 0)
    assert ask(0).has_error()


def test_a_release_that_cannot_be_charged_does_not_leave(
    client_context: ClientContext, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(client_context.ledger, "charge", fail)
    assert ask(0).has_error()


@kills(
    "fedgen/federation/client/app.py",
    "Message(Error(FAILED), reply_to=message)",
    "Message(Error(FAILED, str(error)), reply_to=message)",
)
def test_the_text_of_an_exception_stays_at_the_client(
    client_context: ClientContext, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply is a code; the text is in the client's folder."""

    def fail(*_: object) -> None:
        raise ValueError("label of row 17 is 3")

    monkeypatch.setattr(client_context.store, "commit", fail)
    reply = ask(0)
    assert reply.error == Error(FAILED)
    assert "label of row" not in repr(reply.__dict__)
    [line] = (client_context.store.folder(0) / ERRORS).read_text().splitlines()
    assert json.loads(line)["problem"] == "label of row 17 is 3"


@pytest.mark.parametrize("mode", ["seeded", "secure"])
def test_a_failure_over_private_records_has_no_bound(
    client_context: ClientContext, ask: Ask, mode: str
) -> None:
    """In mode secure it is charged as unbounded; a seeded run is an experiment anyway."""
    client_context.streams = RandomStreams.from_seed(0, mode)  # type: ignore[arg-type]

    def fail(*_: object, **__: object) -> None:
        raise ValueError("label of row 17 is 3")

    object.__setattr__(client_context.program.respond.__self__, "weights", fail)  # type: ignore[attr-defined]
    assert ask(0).has_error()
    result = client_context.ledger.account().spend
    assert (result == {NonPrivateDpEvent(): 1}) == (mode == "secure")


def test_restoring_a_state_does_not_repeat_its_noise(
    client_context: ClientContext, ask: Ask
) -> None:
    """In mode secure the noise of a process is a function of the round: a client that returns to a
    state before its response must not send another response with the same noise."""
    client_context.streams = RandomStreams.from_seed(7, "secure")
    assert not ask(0).has_error()
    client_context.store.restore(0, 0)
    assert ask(0).has_error()
    assert not ask(1).has_error()


def test_another_query_in_a_round_has_other_noise_and_a_charge(
    client_context: ClientContext, tmp_path: Path
) -> None:
    """An interrupted seeded run may reach a round with another query. Under the same noise, the
    difference of two responses would reveal the gradients."""
    client_context.ledger = Ledger(tmp_path / "seeded.jsonl", "run", 0, seeded=True)
    grid = InProcessGrid(client_app(lambda _: client_context), 1, timeout=60, serialize=False)
    server = make(noise=1.0).server

    def ask(seed: int) -> torch.Tensor:
        client_context.store.restore(0, 0)
        query = server.query(server.init(RandomStreams.from_seed(seed, "seeded")), 0, STREAMS)
        message = Message(messages.pack_query(0, query), dst_node_id=2, message_type=messages.ASK)
        [reply] = grid.send_and_receive([message])
        return torch.from_numpy(messages.read_response(reply, LOCAL).arrays["answer"])

    first, other = ask(1), ask(2)
    assert client_context.ledger.releases == 2
    # independent noise of std 2 * C * sigma on each of 6 * 64 numbers: its difference has std 2.83
    assert 2.3 < float((first - other).std()) < 3.4
    assert torch.equal(ask(1), first)
    assert torch.equal(ask(2), other)
    assert client_context.ledger.releases == 2, (
        "the same question after the same past is the same release"
    )


@kills(
    "fedgen/federation/client/app.py",
    "streams = ctx.streams.at_release(ctx.ledger.releases).for_release(query_digest)",
    "streams = ctx.streams.at_release(ctx.ledger.releases)",
)
def test_a_repeated_run_shares_noise_only_for_equal_queries(
    client_context: ClientContext, tmp_path: Path
) -> None:
    """With the same seed and settings it may differ, because other clients failed."""
    grid = InProcessGrid(client_app(lambda _: client_context), 1, timeout=60, serialize=False)
    server = make(noise=1.0).server
    answers = []
    for run, start in enumerate([1, 2, 1]):
        client_context.ledger = Ledger(tmp_path / f"{run}.jsonl", f"run {run}", 0, seeded=True)
        client_context.store.restore(0, 0)
        query = server.query(server.init(RandomStreams.from_seed(start, "seeded")), 0, STREAMS)
        message = Message(messages.pack_query(0, query), dst_node_id=2, message_type=messages.ASK)
        [reply] = grid.send_and_receive([message])
        answers.append(messages.read_response(reply, LOCAL).arrays["answer"])
        assert client_context.ledger.releases == 1
    first, other, again = answers
    assert (first == again).all()
    assert 2.3 < float((first - other).std()) < 3.4  # as above: independent


def test_noise_depends_on_the_client_state(client_context: ClientContext, tmp_path: Path) -> None:
    """A critic with another history responds to the same query with other noise."""
    client_context.ledger = Ledger(tmp_path / "seeded.jsonl", "run", 0, seeded=True)
    grid = InProcessGrid(client_app(lambda _: client_context), 1, timeout=60, serialize=False)
    method = make(noise=1.0)
    server = method.server.init(STREAMS)
    question = messages.pack_query(0, method.server.query(server, 0, STREAMS))
    result = []
    for scale in (1.0, 0.5):
        client_context.store.restore(0, 0)
        images = method.server.broadcast(server, 0, STREAMS)["images"] * scale
        content = messages.pack_broadcast(0, messages.pack_arrays({"images": images}))
        train = Message(content, dst_node_id=2, message_type=messages.TRAIN)
        ask = Message(question, dst_node_id=2, message_type=messages.ASK)
        replies = grid.send_and_receive([train, ask])
        result += [
            messages.read_response(reply, LOCAL) for reply in replies if "arrays" in reply.content
        ]
    assert client_context.ledger.releases == 2
    difference = result[0].arrays["answer"] - result[1].arrays["answer"]
    assert 2.3 < difference.std() < 3.4


def test_a_response_of_other_streams_is_charged(
    client_context: ClientContext, ask: Ask, tmp_path: Path
) -> None:
    """A run that another version started may name its streams otherwise."""
    client_context.ledger = Ledger(tmp_path / "seeded.jsonl", "run", 0, seeded=True)
    first = messages.read_response(ask(0), LOCAL).arrays["answer"]
    client_context.streams = client_context.streams.at("branch", "another")
    client_context.store.restore(0, 0)
    client_context.responded_round = -1
    assert (messages.read_response(ask(0), LOCAL).arrays["answer"] != first).any()
    assert client_context.ledger.releases == 2


def test_a_response_of_an_older_version_is_charged(
    client_context: ClientContext, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answered the same query otherwise: a resume repeats nothing of it."""
    client_context.ledger = Ledger(tmp_path / "seeded.jsonl", "run", 0, seeded=True)
    with monkeypatch.context() as older:
        older.setattr(app_module, "_RESPONSE_VERSION", "noise by round")
        assert not ask(0).has_error()
    client_context.store.restore(0, 0)
    assert not ask(0).has_error()
    assert client_context.ledger.releases == 2


def test_the_account_is_that_of_the_ledger(client_context: ClientContext, ask: Ask) -> None:
    ask(0)
    ask(1)
    grid = InProcessGrid(client_app(lambda _: client_context), 1, timeout=60, serialize=True)
    message = Message(messages.pack_hello(), dst_node_id=2, message_type=messages.ACCOUNT)
    [reply] = grid.send_and_receive([message])
    account = messages.read_account(reply)
    assert account == client_context.ledger.account()
    assert account.releases == 2


def test_training_returns_no_information(client_context: ClientContext) -> None:
    """The acknowledgement of a training message is the same for any records."""
    method = make(noise=1.0)
    grid = InProcessGrid(client_app(lambda _: client_context), 1, timeout=60, serialize=False)
    broadcast = method.server.broadcast(method.server.init(STREAMS), 0, STREAMS)
    content = messages.pack_broadcast(0, messages.pack_arrays(broadcast))
    replies = []
    for shard in (SHARD, type(SHARD)(255 - SHARD.images, torch.zeros_like(SHARD.labels))):
        client_context.shard = shard
        message = Message(content, dst_node_id=2, message_type=messages.TRAIN)
        replies.extend(grid.send_and_receive([message]))
    assert replies[0].content == replies[1].content == messages.pack_acknowledgement()


@kills(
    "fedgen/federation/client/app.py",
    "ctx.streams.at_release(ctx.ledger.releases).for_release",
    "RandomStreams.from_seed(0, 'secure').for_release",
)
@kills(
    "fedgen/federation/client/context.py",
    "streams = streams.with_secret_key(_sampling_key(folder))",
    "pass",
)
@kills(
    "fedgen/federation/client/app.py", "at_release(ctx.ledger.releases).for", "at_release(0).for"
)
def test_deaths_do_not_select_the_samples_of_a_response(tmp_path: Path) -> None:
    """A process that dies whenever its client does not participate, and is restarted, has the same
    sample each time. Charged responses have independent samples: of 64 decisions at rate 1/2,
    between 8 and 56 are positive, except with probability 1e-10."""
    method = make(noise=1.0)
    whole, decisions = method.client.respond, []

    def respond(
        state: State, query: Query, shard: Shard, round_: int, streams: RandomStreams
    ) -> Sent:
        decisions.append(Participation(0.5).is_sampled(streams))
        if len(decisions) < 3 and not decisions[-1]:
            raise SystemExit
        return whole(state, query, shard, round_, streams)

    program = replace(method.client, respond=respond)
    terms, folder = RunTerms(10**6, "run", reserves=True), tmp_path / "clients"
    setup = ClientSetup(
        lambda: program, lambda _: SHARD, 0, "", "secure", folder, terms, False, 0.0, threads=1
    )
    content = method.server.query(method.server.init(STREAMS), 0, STREAMS)
    released = []
    for server_round in range(64):
        decisions.clear()
        while True:
            context = ClientContexts(setup).get(0)  # of a new process
            query = messages.pack_query(server_round, content)
            message = Message(query, dst_node_id=2, message_type=messages.ASK)
            try:
                reply = client_app(lambda _: context)(message, CONTEXT)  # noqa: B023
            except SystemExit:
                continue
            assert not reply.has_error()
            break
        assert len(set(decisions)) == 1
        released.append(decisions[0])
    assert 8 <= sum(released) <= 56
    assert (folder / "0" / SAMPLING_KEY).stat().st_mode & 0o077 == 0


@kills(
    "fedgen/federation/client/context.py",
    "if not path.exists() and died_while_responding(folder):",
    "if False:",
)
def test_an_interrupted_response_needs_its_sampling_key(tmp_path: Path) -> None:
    terms = RunTerms(18, "run", reserves=True)
    program = make(noise=1.0).client
    setup = ClientSetup(
        lambda: program, lambda _: SHARD, 0, "", "secure", tmp_path, terms, False, 0.0, threads=1
    )
    first = ClientContexts(setup).get(0)
    first.ledger.reserve()
    assert ClientContexts(setup).get(0).streams.secret_key == first.streams.secret_key
    (tmp_path / "0" / SAMPLING_KEY).unlink()
    for _ in range(2):
        with pytest.raises(FedgenError, match=r"sampling\.key: is missing"):
            ClientContexts(setup).get(0)
