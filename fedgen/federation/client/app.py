"""The Flower ClientApp of every method and runtime, with the privacy checks of a client."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

import torch
from dp_accounting import NonPrivateDpEvent
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from fedgen.errors import missing_resource
from fedgen.federation import messages
from fedgen.federation.client.context import ClientContext, write_error
from fedgen.federation.messages import Response
from fedgen.federation.secagg.masking import (
    KEY_BYTES,
    SEALED_BYTES,
    Masker,
    MaskingError,
    mask_context,
)
from fedgen.federation.secagg.signing import (
    CREDENTIAL_BYTES,
    agreement,
    announcement,
    signers_needed,
)
from fedgen.federation.signed_accounts import ReleaseFacts, sign
from fedgen.methods.api import Query
from fedgen.privacy.aggregation import Secure
from fedgen.privacy.events import canonical, total
from fedgen.storage.io import digest, write_atomic

T = TypeVar("T")

FAILED = 101
"""Error code of every failure of a client. The cause may depend on private records and stays with
the client, in ``errors.jsonl``."""

REFUSED = 104
"""Error code of a site whose policy refuses the request; the reason is in its own log."""

_SIGNED = "signed"
"""Mark in the folder of a client that has signed its account."""

_RESPONSE_VERSION = "exact noise on a grid with one zero, sums in parts"
"""Change this with any code that changes the response to the same query: a run started by an older
version must not treat its responses as repeats, which are free."""


class BudgetError(Exception):
    """A query exceeded the budget of the client, which did not respond."""


class PastRoundError(Exception):
    """A query referred to a past round, or to streams that a response has used; the client did not
    respond. Two responses with the same noise would reveal their difference."""


def client_app(
    find_context: Callable[[Context], ClientContext],
    mods: tuple[Mod, ...] = (),
    without_server: bool = True,
) -> ClientApp:
    """Return the app. It captures no data: ``find_context`` looks the client up by the message's
    context. ``without_server``: see ``LocalNodes``.

    A repeated message receives the same reply, or an error if its response is masked, or if it is
    seeded and the client has trained since; nothing is charged twice. A client handles one message
    at a time, in any process or thread.
    """
    app = ClientApp(mods=list(mods))

    def handler(verb: Callable[[ClientContext, Message], RecordDict]) -> Callable[..., Message]:
        def handle(message: Message, context: Context) -> Message:
            ctx = None
            try:
                ctx = find_context(context)
                with ctx.ledger.locked():
                    content = verb(ctx, message)
            except Exception as error:  # only a code is sent, never the exception's text
                if ctx is not None:
                    folder = ctx.store.folder(ctx.index)
                    write_error(folder, message.metadata.message_type, error)
                if not without_server and missing_resource(error) is not None:
                    raise
                return Message(Error(FAILED), reply_to=message)
            return Message(content, reply_to=message)

        return handle

    for kind, verb in _HANDLERS.items():
        category, action = kind.split(".")
        getattr(app, category)(action)(handler(verb))
    return app


@lru_cache(maxsize=1)
def _process_label() -> str:
    """Return the properties of the process that responses depend on to the last bit."""
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "no cuda"
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"torch {torch.__version__} {cpu} {cuda}"


# --- message handlers -----------------------------------------------------------------------------


def _hello(ctx: ClientContext, message: Message) -> RecordDict:
    return messages.pack_partition(ctx.index)


def _account(ctx: ClientContext, message: Message) -> RecordDict:
    return messages.pack_account(ctx.ledger.account())


def _sign(ctx: ClientContext, message: Message) -> RecordDict:
    """Return a signed account of the spend, for readers of a release."""
    account, signer = ctx.terms.account, ctx.terms.signer
    if account is None or signer is None:
        raise ValueError("this client signs no account")
    facts = ReleaseFacts.parse(messages.read_text(message))
    # the round of the ledger: a restored state would be behind
    statement = account.statement([ctx.index], ctx.ledger.account(), ctx.ledger.last_round, facts)
    write_atomic(ctx.store.folder(ctx.index) / _SIGNED, b"")  # no release may follow
    return messages.pack_text(json.dumps(sign(statement, signer)))


def _keep(ctx: ClientContext, message: Message) -> RecordDict:
    ctx.store.keep(ctx.index, messages.read_round(message), messages.read_confirmed(message))
    return messages.pack_acknowledgement()


def _restore(ctx: ClientContext, message: Message) -> RecordDict:
    ctx.store.restore(ctx.index, messages.read_round(message))
    return messages.pack_acknowledgement()


def _forget(ctx: ClientContext, message: Message) -> RecordDict:
    ctx.store.forget(ctx.index)
    return messages.pack_acknowledgement()


def _compute_private(ctx: ClientContext, server_round: int, compute: Callable[[], T]) -> T:
    """Compute on private records. A failure is visible and its information is not bounded: in mode
    ``secure`` the client has no bound from then on; a seeded run, which is an experiment, prints
    the ε of a run without the failure. (Sending only noise would not help: one record would then
    move the sum by the contributions of all records of the client, more than the sensitivity.)"""
    try:
        return compute()
    except Exception:
        _charge_unbounded(ctx, server_round)
        raise


def _charge_unbounded(ctx: ClientContext, server_round: int) -> None:
    """Record that a failure on private records was visible."""
    if ctx.streams.mode == "secure":
        ctx.ledger.charge(server_round, "failed", 0, NonPrivateDpEvent())


def _prepare(ctx: ClientContext, message: Message) -> RecordDict:
    number = messages.read_round(message)
    if not 0 <= number < ctx.program.prepare_steps:
        raise ValueError("unknown part to prepare")
    last_round = ctx.store.last_round(ctx.index, messages.PREPARE)
    if last_round is None or last_round < number:
        parts = _compute_private(
            ctx, 0, lambda: ctx.program.prepare(number, ctx.shard, ctx.streams)
        )
        ctx.store.commit(ctx.index, messages.PREPARE, number, parts, None, str(number))
    return messages.pack_acknowledgement()


def _train(ctx: ClientContext, message: Message) -> RecordDict:
    server_round = messages.read_round(message)
    last_round = ctx.store.last_round(ctx.index, messages.TRAIN)
    if last_round is None or last_round < server_round:
        arrays = messages.read_broadcast(message)
        state = ctx.store.state(ctx.index)
        try:
            streams = ctx.streams.at_release(ctx.ledger.releases)
            changed = ctx.program.train(state, arrays, ctx.shard, server_round, streams)
        except Exception as error:
            if ctx.terms.rehearsal is None:
                _charge_unbounded(ctx, server_round)
                raise
            # a site keeps its previous state, a valid function of its records, and acknowledges
            write_error(ctx.store.folder(ctx.index), message.metadata.message_type, error)
            changed = {}
        message_digest = messages.digest_of(message)
        ctx.store.commit(ctx.index, messages.TRAIN, server_round, changed, None, message_digest)
    return messages.pack_acknowledgement()


def _keys(ctx: ClientContext, message: Message) -> RecordDict:
    server_round, terms = messages.read_round(message), ctx.terms
    last_round = ctx.store.last_round(ctx.index, messages.ASK)
    if server_round <= max(ctx.responded_round, -1 if last_round is None else last_round):
        raise PastRoundError  # a second sum over other clients would reveal this contribution
    if not terms.masked_sums or not isinstance(terms.aggregation, Secure):
        raise MaskingError("this run has no masks")
    context = mask_context(terms.run, server_round, messages.read_keys_for(message))
    masker = Masker(ctx.index, terms.aggregation, context, complete_graph=terms.signer is not None)
    ctx.masker, ctx.keys_round, keys = masker, server_round, masker.announce()
    ctx.agreed = -1, b""  # lists are bound to keys
    if terms.signer is not None:
        text = announcement(context, masker.client, masker.sums, keys, terms.accepted_request)
        keys += terms.signer.sign(text)
    return messages.pack_texts(server_round, {ctx.index: keys})


def _shares(ctx: ClientContext, message: Message) -> RecordDict:
    masker, signer = _masker(ctx, message), ctx.terms.signer
    announced = messages.read_texts(message, KEY_BYTES + (CREDENTIAL_BYTES if signer else 0))
    server_round, rejected = messages.read_round(message), []
    if signer is not None:
        for client, text in announced.items():
            keys_ = text[:KEY_BYTES]
            signed_text = announcement(
                masker.context, client, masker.sums, keys_, ctx.terms.accepted_request
            )
            try:
                signer.check(client, signed_text, text[KEY_BYTES:])
            except MaskingError as error:
                write_error(ctx.store.folder(ctx.index), messages.SHARES, error)
                rejected.append(client)
    if rejected:
        return messages.pack_rejected(server_round, rejected)
    keys = {client: text[:KEY_BYTES] for client, text in announced.items()}
    return messages.pack_texts(server_round, masker.seal_shares(keys))


def _open(ctx: ClientContext, message: Message) -> RecordDict:
    broken = _masker(ctx, message).open(messages.read_texts(message, SEALED_BYTES))
    for client in broken:
        error = MaskingError(f"the sealed share of client {client} fails authentication")
        write_error(ctx.store.folder(ctx.index), messages.OPEN, error)
    return messages.pack_rejected(messages.read_round(message), broken)


def _agree(ctx: ClientContext, message: Message) -> RecordDict:
    """Sign the lists of a round, and no other lists in that round."""
    server_round, signer = messages.read_round(message), ctx.terms.signer
    masker, lists = _masker(ctx, message), messages.read_responders(message)
    text = agreement(masker.context, masker.keys, *lists)
    if signer is None:
        raise MaskingError("this run has no signatures")
    # after masking, a client announces no other keys in this round, so it signs one text only
    masker.check_lists(*map(set, lists))
    last, signed = ctx.agreed
    if last == server_round and signed != text:
        raise MaskingError("different lists were already signed for this round")
    ctx.agreed = server_round, text
    return messages.pack_texts(server_round, {ctx.index: signer.sign(text)})


def _reveal(ctx: ClientContext, message: Message) -> RecordDict:
    server_round, signer = messages.read_round(message), ctx.terms.signer
    masker = _masker(ctx, message)
    lists = messages.read_responders(message)
    if signer is not None:
        text = agreement(masker.context, masker.keys, *lists)
        signatures = messages.read_texts(message, CREDENTIAL_BYTES)
        if ctx.agreed != (server_round, text) or not set(signatures) <= set(masker.keys):
            raise MaskingError("the lists differ from the signed ones")
        signers = [
            client
            for client, credential in signatures.items()
            if signer.is_signed_by(client, text, credential)
        ]
        if len(signers) < signers_needed(masker.sums):
            raise MaskingError("too few signatures")
    return messages.pack_texts(server_round, masker.reveal(*lists))


def _masker(ctx: ClientContext, message: Message) -> Masker:
    """Return the mask secrets for the round of a message."""
    if ctx.masker is None or ctx.keys_round != messages.read_round(message):
        raise MaskingError("no keys were announced for this round")
    return ctx.masker


def _outgoing(ctx: ClientContext, response: Response, message: Message) -> RecordDict:
    """Return the reply with a response: masked if the run has masks; without masks only within a
    simulation."""
    if ctx.terms.masked_sums:
        words, masker = response.arrays["answer"], _masker(ctx, message)
        masked = masker.mask(words.reshape(-1).view(f"u{words.itemsize}"))
        response = replace(
            response, arrays={"answer": masked.view(words.dtype).reshape(words.shape)}
        )
    return messages.pack_response(response)


def _check_query(ctx: ClientContext, server_round: int, query: Query, message: Message) -> None:
    """Raise an exception for an invalid query, independent of private records."""
    if ctx.terms.masked_sums:
        context = mask_context(ctx.terms.run, server_round, messages.framed_digest(message.content))
        masker = _masker(ctx, message)
        if masker.context != context:
            raise MaskingError("keys were announced for another query")
        if not masker.is_ready:
            raise MaskingError("no shares have been opened for this query")
    arrays = [*query.samples.items(), *query.shared.items()]
    if query.count > ctx.terms.samples:
        raise BudgetError
    if (
        not messages.is_query(message)
        or query.count < 1
        or any(len(values) != query.count for values in query.samples.values())
    ):
        raise ValueError("invalid query")
    if not messages.is_finite(message):
        raise ValueError("the query is not finite")
    kind = repr([(name, value.dtype, tuple(value.shape)) for name, value in arrays])
    has_integers = any(
        not value.is_floating_point() for _, value in arrays
    )  # integers may be indices
    if ctx.terms.rehearsal is not None and (has_integers or kind not in ctx.rehearsed):
        streams = ctx.streams.at("rehearsal")
        ctx.program.respond(
            ctx.store.state(ctx.index), query, ctx.terms.rehearsal, server_round, streams
        )
        ctx.rehearsed.add(kind)


def _respond(ctx: ClientContext, message: Message) -> RecordDict:
    server_round = messages.read_round(message)
    if ctx.terms.account is not None and (ctx.store.folder(ctx.index) / _SIGNED).exists():
        raise PastRoundError  # the signed account would be too small
    last_round = ctx.store.last_round(ctx.index, messages.ASK)
    # a seeded response is recomputed bit for bit; a masked one is sent once: keys mask one message
    caches_response = ctx.streams.mode == "secure" and not ctx.terms.masked_sums
    if last_round == server_round and caches_response:
        return messages.pack_response(ctx.store.response(ctx.index))
    is_earlier = last_round is not None and server_round < last_round
    if is_earlier or (last_round == server_round and ctx.terms.masked_sums):
        raise PastRoundError
    if ctx.streams.mode == "secure" and server_round <= ctx.responded_round:
        raise PastRoundError  # restoring the state does not undo a response
    query = messages.read_query(message)
    _check_query(ctx, server_round, query, message)
    # a resumed run may reach the same round with a different query (a client was late, the machine
    # differs), which must not share the noise of the first: seeded streams depend on the query, and
    # secret ones are always fresh
    history = ctx.store.history(ctx.index)
    # the domain of the streams is included: a response with other streams is charged
    domain = str(ctx.streams.domain)
    # a stored response belongs to this run and is the same on every machine
    machine = ctx.terms.run if ctx.terms.stores_response else _process_label()
    identity = _RESPONSE_VERSION, machine, domain, history, messages.digest_of(message)
    query_digest = digest(*(part.encode() for part in identity))
    response = (
        ctx.store.stored_response(ctx.index, query_digest) if ctx.terms.stores_response else None
    )
    charged = response is not None and ctx.ledger.last == query_digest
    repeat = charged or ctx.ledger.is_repeated(server_round, query_digest)
    if last_round == server_round and not repeat:
        raise PastRoundError  # another query, or the client has trained since
    if not repeat and ctx.ledger.rows + query.count > ctx.terms.samples:
        raise BudgetError
    if ctx.ledger.is_second_query(server_round, query_digest) and not ctx.program.resamples:
        raise PastRoundError
    ctx.responded_round = server_round
    if response is None:
        state = ctx.store.state(ctx.index)
        streams = ctx.streams.at_release(ctx.ledger.releases).for_release(query_digest)
        if ctx.terms.reserves:
            ctx.ledger.reserve()  # until the charge
        release = _compute_private(
            ctx,
            server_round,
            lambda: ctx.program.respond(state, query, ctx.shard, server_round, streams),
        )
        response = messages.response_from(release, ctx.terms.aggregation)
    if not repeat and ctx.terms.limits is not None:
        after = total([ctx.ledger.account().spend, canonical(response.event)])
        if any(count > ctx.terms.limits.get(event, 0) for event, count in after.items()):
            raise BudgetError
    if ctx.terms.stores_response:
        ctx.store.store_response(ctx.index, query_digest, response)
    if not charged:  # before the response is sent
        ctx.ledger.charge(server_round, query_digest, query.count, response.event)
    cached = response if caches_response else None
    ctx.store.commit(ctx.index, messages.ASK, server_round, {}, cached)
    return _outgoing(ctx, response, message)


_HANDLERS = {
    messages.HELLO: _hello,
    messages.ACCOUNT: _account,
    messages.SIGN: _sign,
    messages.KEEP: _keep,
    messages.RESTORE: _restore,
    messages.FORGET: _forget,
    messages.PREPARE: _prepare,
    messages.TRAIN: _train,
    messages.KEYS: _keys,
    messages.SHARES: _shares,
    messages.OPEN: _open,
    messages.ASK: _respond,
    messages.AGREE: _agree,
    messages.REVEAL: _reveal,
}
