"""The Flower ClientApp: the same for every method and runtime, and the guard at a client's door."""

from __future__ import annotations

import json
import platform
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from dp_accounting import NonPrivateDpEvent
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from fedgen import coins, factories
from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.errors import lacks
from fedgen.federation import messages
from fedgen.federation.client_store import ClientStore
from fedgen.federation.masking import KEY_BYTES, SEALED_BYTES, Masker, MaskingError, context_of
from fedgen.federation.messages import Answer
from fedgen.federation.signing import (
    CREDENTIAL_BYTES,
    Signer,
    agreement,
    announcement,
    signers_needed,
)
from fedgen.files import digest
from fedgen.method import ClientProgram, Query
from fedgen.privacy.events import Spend, canonical, total
from fedgen.privacy.ledger import Ledger, Outside
from fedgen.privacy.releases import LOCAL, Aggregation, Secure

T = TypeVar("T")

FAILED = 101
"""The code of every failure of a client. It says no more: what went wrong may tell of its rows, and
stays with the client, in ``errors.jsonl``."""

REFUSED = 104
"""The code of a site whose policy does not allow what is asked; why is in its own log."""

_ANSWERS = "exact noise on a grid with one zero, sums in parts"
"""To be changed with whatever makes an answer to the same question another one: a run that an older
version began must not take its answers for repeats, which cost nothing."""

LEDGER, ERRORS = "ledger.jsonl", "errors.jsonl"
_ANSWERING, _DIED = "answering", "died"  # marks: it is, or a process died over it
_TAIL = 2**20  # bytes of a file of errors that are looked at for the last


class BudgetError(Exception):
    """A client was asked for more rows than its budget allows; it answered nothing."""


class PastRoundError(Exception):
    """A client was asked about a round before its last, or again under coins that a first answer
    has used; it answered nothing. Two answers under one noise would show their difference."""


@dataclass(frozen=True)
class Terms:
    """What each client of a run holds itself to, whatever it is asked.

    rows: its budget for the run, which it enforces itself.
    run: the run's name.
    limits: how often each event of the plan may be charged; None: where rows say all of it.
    aggregation: who makes the noise of what clients answer.
    holds: whether an answer is written down before it is charged, and sent again by a run that
        goes on (``Plan.sends_again``).
    masks: whether answers travel under masks (``masking.py``); a simulation's sums need none.
    signer: what keys and lists of these are signed by (``signing.py``); None: nothing is signed.
    about: what all clients of the run must have been asked to take part in, if they sign.
    rehearsal: rows that are no secret. What a question makes of them is tried first, so that one
        that fails by what it is fails before it meets a private row; None: it is not tried.
    marks: whether a client leaves a mark behind where its process dies over an answer: that one is
        missing, or late, may show what it drew.
    """

    rows: int
    run: str = ""
    limits: Spend | None = None
    aggregation: Aggregation = LOCAL
    holds: bool = False
    masks: bool = False
    signer: Signer | None = None
    about: bytes = b""
    rehearsal: Shard | None = None
    marks: bool = False


@dataclass(frozen=True)
class Site:
    """What a process needs to be home to clients; it can be pickled.

    program: makes the client program.
    shard: client -> its rows.
    seed, noise: of the coins. In mode ``secure`` each process flips its own.
    branch: what sets this run's coins apart from those of others under the same seed.
    folder: where clients keep their files, on a file system that all processes see.
    terms: of all its clients.
    in_memory, cache_bytes: see ``ClientStore``.
    threads: of torch.
    spent: where spend is written down outside of the run (``SpentFile``); None: nowhere.
    mods: Flower mods around the app.
    """

    program: Callable[[], ClientProgram]
    shard: Callable[[int], Shard]
    seed: int
    branch: str
    noise: coins.Mode
    folder: Path
    terms: Terms
    in_memory: bool
    cache_bytes: float
    threads: int
    spent: Outside | None = None
    mods: tuple[Mod, ...] = ()


@dataclass
class ClientHome:
    """What one client has at hand. ``answered``: the last round that this process answered;
    ``masker``: its secrets of round ``keyed``, of this process alone; ``agreed``: the last round
    whose lists it signed, and their text; ``tried``: kinds of questions that did not fail."""

    number: int
    program: ClientProgram
    shard: Shard
    coins: Coins
    store: ClientStore
    ledger: Ledger
    terms: Terms
    answered: int = -1
    masker: Masker | None = None
    keyed: int = -1
    agreed: tuple[int, bytes] = (-1, b"")
    tried: set[str] = field(default_factory=set)


class Homes:
    """The clients that live in this process, made when they are first called."""

    def __init__(self, site: Site) -> None:
        torch.set_num_threads(site.threads)
        self._site, self._program = site, site.program()
        self._coins = Coins.of(site.seed, site.noise)
        if site.branch:
            self._coins = self._coins.at("branch", site.branch)
        self._store = ClientStore(site.folder, site.in_memory, site.cache_bytes)
        self._homes: dict[int, ClientHome] = {}
        self._lock = threading.Lock()

    def __call__(self, context: Context) -> ClientHome:
        """The home of the client that a message is for."""
        return self.of(partition_of(context))

    def of(self, client: int) -> ClientHome:
        """The home of a client."""
        with self._lock:  # one home for each: it remembers what it answered
            if client not in self._homes:
                try:
                    self._homes[client] = self._make(client)
                except Exception as error:
                    write_down(self._store.folder(client), "home", error)
                    raise
            return self._homes[client]

    def _make(self, client: int) -> ClientHome:
        site, folder = self._site, self._store.folder(client)
        ledger = folder / LEDGER, site.terms.run, client, site.noise == "seeded", site.spent
        return ClientHome(
            client,
            self._program,
            site.shard(client),
            self._coins.at("client", client),
            self._store,
            Ledger(*ledger),
            site.terms,
        )


def partition_of(context: Context) -> int:
    """Which client a message is for."""
    return int(str(context.node_config["partition-id"]))


def client_app(
    find_home: Callable[[Context], ClientHome], mods: tuple[Mod, ...] = (), alone: bool = True
) -> ClientApp:
    """The app. It captures no data: ``find_home`` looks the client up by the message's context.
    ``alone``: see ``Nodes``.

    A message that was handled before gets the reply that it got then, so that nothing is spent
    twice. A client handles one message at a time, whatever process or thread it arrives in.
    """
    app = ClientApp(mods=list(mods))

    def handler(verb: Callable[[ClientHome, Message], RecordDict]) -> Callable[..., Message]:
        def handle(message: Message, context: Context) -> Message:
            home = None
            try:
                home = find_home(context)
                with home.ledger.locked():
                    content = verb(home, message)
            except Exception as error:  # a code leaves, never the exception's text
                if home is not None:
                    folder = home.store.folder(home.number)
                    write_down(folder, message.metadata.message_type, error)
                if not alone and lacks(error) is not None:
                    raise
                return Message(Error(FAILED), reply_to=message)
            return Message(content, reply_to=message)

        return handle

    for kind, verb in _VERBS.items():
        category, action = kind.split(".")
        getattr(app, category)(action)(handler(verb))
    return app


@lru_cache(maxsize=1)
def _here() -> str:
    """Where a state repeats to the last bit."""
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "no cuda"
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"torch {torch.__version__} {cpu} {cuda}"


def write_down(folder: Path, kind: str, error: Exception) -> None:
    """Keeps what went wrong where the client keeps its files."""
    trace = traceback.format_exception(error)
    line = {"kind": kind, "error": type(error).__name__, "problem": str(error), "trace": trace}
    if (own := factories.raised_in(error)) is not None:
        line["at"] = own
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ERRORS).open("a") as file:
        file.write(json.dumps(line) + "\n")


def last_error(file: Path) -> dict[str, Any] | None:
    """What was written down last in such a file; None if it is not whole, as its writer may have
    died of it."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - _TAIL))
            line = json.loads(opened.read().decode(errors="replace").splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return None
    whole = isinstance(line, dict) and {"error", "problem", "trace"} <= line.keys()
    return line if whole else None


# --- what a client does when it gets a message ----------------------------------------------------


def _hello(home: ClientHome, message: Message) -> RecordDict:
    return messages.pack_partition(home.number)


def _account(home: ClientHome, message: Message) -> RecordDict:
    return messages.pack_account(home.ledger.account())


def _keep(home: ClientHome, message: Message) -> RecordDict:
    home.store.keep(home.number, messages.read_place(message))
    return messages.pack_acknowledgement()


def _restore(home: ClientHome, message: Message) -> RecordDict:
    home.store.restore(home.number, messages.read_place(message))
    return messages.pack_acknowledgement()


def _forget(home: ClientHome, message: Message) -> RecordDict:
    home.store.forget(home.number)
    return messages.pack_acknowledgement()


def _privately(home: ClientHome, server_round: int, compute: Callable[[], T]) -> T:
    """What private rows give. A failure over them shows, and what it tells is not bounded: in mode
    ``secure`` the client has no bound from then on; a seeded run, which is an experiment, prints
    the epsilon of a run in which it does not happen. (Noise alone in its place would not do:
    one record would then move a sum over many by its whole, more than was counted.)
    """
    try:
        return compute()
    except Exception:
        _no_bound(home, server_round)
        raise


def _no_bound(home: ClientHome, server_round: int) -> None:
    """Writes down that a failure over private rows was shown."""
    if home.coins.mode == "secure":
        home.ledger.charge(server_round, "failed", 0, NonPrivateDpEvent())


@contextmanager
def _marked(home: ClientHome) -> Iterator[None]:
    """Leaves a mark behind, for good, where the process dies meanwhile."""
    folder = home.store.folder(home.number)
    if home.terms.marks:
        if (folder / _ANSWERING).exists():
            (folder / _DIED).touch()
        (folder / _ANSWERING).touch()
    yield
    (folder / _ANSWERING).unlink(missing_ok=True)


def died_answering(folder: Path) -> bool:
    """Whether a process died over an answer of the client whose folder this is, by its marks; it is
    to be asked while nobody answers."""
    return any((folder / mark).exists() for mark in (_ANSWERING, _DIED))


def _prepare(home: ClientHome, message: Message) -> RecordDict:
    number = messages.read_place(message)
    if not 0 <= number < home.program.preparations:
        raise ValueError("there is no such part to prepare")
    done = home.store.done(home.number, messages.PREPARE)
    if done is None or done < number:
        parts = _privately(home, 0, lambda: home.program.prepare(number, home.shard, home.coins))
        home.store.commit(home.number, messages.PREPARE, number, parts, None, str(number))
    return messages.pack_acknowledgement()


def _train(home: ClientHome, message: Message) -> RecordDict:
    server_round = messages.read_place(message)
    done = home.store.done(home.number, messages.TRAIN)
    if done is None or done < server_round:
        arrays = messages.read_broadcast(message)
        state = home.store.state(home.number)
        try:
            changed = home.program.train(state, arrays, home.shard, server_round, home.coins)
        except Exception as error:
            if home.terms.rehearsal is None:
                _no_bound(home, server_round)
                raise
            # at a site of its own a client keeps what it had, which is as good a state of its rows
            # as another, and says what it would have said
            write_down(home.store.folder(home.number), message.metadata.message_type, error)
            changed = {}
        told = messages.digest_of(message)
        home.store.commit(home.number, messages.TRAIN, server_round, changed, None, told)
    return messages.pack_acknowledgement()


def _keys(home: ClientHome, message: Message) -> RecordDict:
    server_round, terms = messages.read_place(message), home.terms
    done = home.store.done(home.number, messages.ASK)
    if server_round <= max(home.answered, -1 if done is None else done):
        raise PastRoundError  # a second sum over others would show what this client sent
    if not terms.masks or not isinstance(terms.aggregation, Secure):
        raise MaskingError("nothing is masked here")
    context = context_of(terms.run, server_round, messages.read_keys_for(message))
    masker = Masker(home.number, terms.aggregation, context, whole=terms.signer is not None)
    home.masker, home.keyed, keys = masker, server_round, masker.announce()
    home.agreed = -1, b""  # lists of other keys are other lists
    if terms.signer is not None:
        said = announcement(context, masker.me, masker.sums, keys, terms.about)
        keys += terms.signer.sign(said)
    return messages.pack_texts(server_round, {home.number: keys})


def _shares(home: ClientHome, message: Message) -> RecordDict:
    masker, signer = _masker(home, message), home.terms.signer
    told = messages.read_texts(message, KEY_BYTES + (CREDENTIAL_BYTES if signer else 0))
    server_round, rejected = messages.read_place(message), []
    if signer is not None:
        for client, text in told.items():
            keys_ = text[:KEY_BYTES]
            said = announcement(masker.context, client, masker.sums, keys_, home.terms.about)
            try:
                signer.check(client, said, text[KEY_BYTES:])
            except MaskingError as error:
                write_down(home.store.folder(home.number), messages.SHARES, error)
                rejected.append(client)
    if rejected:
        return messages.pack_rejected(server_round, rejected)
    keys = {client: text[:KEY_BYTES] for client, text in told.items()}
    return messages.pack_texts(server_round, masker.deal(keys))


def _open(home: ClientHome, message: Message) -> RecordDict:
    broken = _masker(home, message).open(messages.read_texts(message, SEALED_BYTES))
    for client in broken:
        error = MaskingError(f"the sealed share of client {client} fails authentication")
        write_down(home.store.folder(home.number), messages.OPEN, error)
    return messages.pack_rejected(messages.read_place(message), broken)


def _agree(home: ClientHome, message: Message) -> RecordDict:
    """Signs the lists of a round, and no others in that round."""
    server_round, signer = messages.read_place(message), home.terms.signer
    masker, lists = _masker(home, message), messages.read_lists(message)
    text = agreement(masker.context, masker.book, *lists)
    if signer is None:
        raise MaskingError("nothing is signed here")
    # a client that masked words announces no other keys in this round: what it signs is one text
    masker.check_lists(*map(set, lists))
    last, signed = home.agreed
    if last == server_round and signed != text:
        raise MaskingError("other lists were signed for this round")
    home.agreed = server_round, text
    return messages.pack_texts(server_round, {home.number: signer.sign(text)})


def _reveal(home: ClientHome, message: Message) -> RecordDict:
    server_round, signer = messages.read_place(message), home.terms.signer
    masker = _masker(home, message)
    lists = messages.read_lists(message)
    if signer is not None:
        text = agreement(masker.context, masker.book, *lists)
        signatures = messages.read_texts(message, CREDENTIAL_BYTES)
        if home.agreed != (server_round, text) or not set(signatures) <= set(masker.book):
            raise MaskingError("these are not the lists that were agreed on")
        signers = [c for c, credential in signatures.items() if signer.is_by(c, text, credential)]
        if len(signers) < signers_needed(masker.sums):
            raise MaskingError("too few agree")
    return messages.pack_texts(server_round, masker.reveal(*lists))


def _masker(home: ClientHome, message: Message) -> Masker:
    """The secrets that keys were announced of for the round of a message."""
    if home.masker is None or home.keyed != messages.read_place(message):
        raise MaskingError("no keys were announced for this round")
    return home.masker


def _leaving(home: ClientHome, answer: Answer, message: Message) -> RecordDict:
    """The reply that takes an answer to the server: a share leaves under masks where there are
    any, and without them only within a simulation."""
    if home.terms.masks:
        words, masker = answer.arrays["answer"], _masker(home, message)
        masked = masker.mask(words.reshape(-1).view(f"u{words.itemsize}"))
        answer = replace(answer, arrays={"answer": masked.view(words.dtype).reshape(words.shape)})
    return messages.pack_answer(answer)


def _check_question(home: ClientHome, server_round: int, query: Query, message: Message) -> None:
    """Raises an exception for a question that is none, whatever the client's rows are."""
    if home.terms.masks:
        context = context_of(home.terms.run, server_round, messages.framed_digest(message.content))
        masker = _masker(home, message)
        if masker.context != context:
            raise MaskingError("keys were announced for another query")
        if not masker.is_ready:
            raise MaskingError("no shares have been opened for this query")
    arrays = [*query.rows.items(), *query.shared.items()]
    if query.count > home.terms.rows:
        raise BudgetError
    if (
        not messages.is_question(message)
        or query.count < 1
        or any(len(rows) != query.count for rows in query.rows.values())
    ):
        raise ValueError("a question of no rows")
    if not messages.is_finite(message):
        raise ValueError("a question that is not finite")
    kind = repr([(name, each.dtype, tuple(each.shape)) for name, each in arrays])
    whole = any(not each.is_floating_point() for _, each in arrays)  # numbers that may index
    if home.terms.rehearsal is not None and (whole or kind not in home.tried):
        coins = home.coins.at("rehearsal")
        home.program.answer(
            home.store.state(home.number), query, home.terms.rehearsal, server_round, coins
        )
        home.tried.add(kind)


def _ask(home: ClientHome, message: Message) -> RecordDict:
    server_round = messages.read_place(message)
    done = home.store.done(home.number, messages.ASK)
    if done == server_round and not home.terms.masks:
        return messages.pack_answer(home.store.answer(home.number))
    if done is not None and server_round <= done:
        raise PastRoundError
    if home.coins.mode == "secure" and server_round <= home.answered:
        raise PastRoundError  # a state that was restored does not take an answer back
    query = messages.read_query(message)
    _check_question(home, server_round, query, message)
    # a run that goes on, or is done again, otherwise than the first (a client was late, the machine
    # is another) comes to the same round with another question, which must not share the noise of
    # the first: seeded coins follow from the question, and secret ones are new each time
    history = home.store.history(home.number)
    # where the coins fall is a part of it too: an answer by others is another one, and charged
    place = str(home.coins.place)
    # and an answer that is held is this run's alone, and the same wherever it goes on
    where = home.terms.run if home.terms.holds else _here()
    told = _ANSWERS, where, place, history, messages.digest_of(message)
    asked = digest(*(each.encode() for each in told))
    answer = home.store.held(home.number, asked) if home.terms.holds else None
    charged = answer is not None and home.ledger.last == asked
    repeat = charged or home.ledger.is_repeat(server_round, asked)
    if not repeat and home.ledger.rows + query.count > home.terms.rows:
        raise BudgetError
    if home.ledger.is_second(server_round, asked) and not home.program.draws_anew:
        raise PastRoundError
    home.answered = server_round
    if answer is None:
        state = home.store.state(home.number)
        coins = home.coins.of_release(asked)
        with _marked(home):
            release = _privately(
                home,
                server_round,
                lambda: home.program.answer(state, query, home.shard, server_round, coins),
            )
        answer = messages.answer_of(release, home.terms.aggregation)
    if not repeat and home.terms.limits is not None:
        after = total([home.ledger.account().spend, canonical(answer.event)])
        if any(count > home.terms.limits.get(event, 0) for event, count in after.items()):
            raise BudgetError
    if home.terms.holds:
        home.store.hold(home.number, asked, answer)
    if not charged:  # before anything leaves
        home.ledger.charge(server_round, asked, query.count, answer.event)
    home.store.commit(home.number, messages.ASK, server_round, {}, answer)
    return _leaving(home, answer, message)


_VERBS = {
    messages.HELLO: _hello,
    messages.ACCOUNT: _account,
    messages.KEEP: _keep,
    messages.RESTORE: _restore,
    messages.FORGET: _forget,
    messages.PREPARE: _prepare,
    messages.TRAIN: _train,
    messages.KEYS: _keys,
    messages.SHARES: _shares,
    messages.OPEN: _open,
    messages.ASK: _ask,
    messages.AGREE: _agree,
    messages.REVEAL: _reveal,
}
