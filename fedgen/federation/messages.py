"""Arrays and releases to Flower records and back. Arrays travel as raw little-endian bytes.

Only an empty acknowledgement, a client's number, its ledger's sum, keys and sealed shares of masks
with signatures, and what its aggregation takes (a Release; a Share; a Clipped) can be packed into a
reply.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from dp_accounting import DpEvent
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedgen.files import as_json, digest
from fedgen.method import Query
from fedgen.privacy.events import Unit, from_json, to_json
from fedgen.privacy.ledger import Account, spend_from_json, spend_to_json
from fedgen.privacy.releases import Aggregation, Sent

HELLO, ACCOUNT = "query.hello", "query.account"
"""Message types: who are you; what have you spent."""
PREPARE, TRAIN, ASK = "train.prepare", "train.broadcast", "query.ask"
"""Make one part of your state; train; answer."""
KEYS, SHARES, OPEN, REVEAL = "query.keys", "query.shares", "query.open", "query.reveal"
"""Message types of a masked sum: announce keys, deal shares, open received shares, reveal shares
(``masking.py``)."""
AGREE = "query.agree"
"""Sign who answered and who did not (``signing.py``)."""
IN_A_ROUND = (TRAIN, KEYS, SHARES, OPEN, ASK, AGREE, REVEAL)
"""What has a deadline, in this order. To prepare, to keep and to restore may take their time."""
KEEP, RESTORE, FORGET = "train.keep", "train.restore", "train.forget"
"""Hold on to your state under a tag; go back to it (tag 0: to nothing)."""

T = TypeVar("T")

_RAW = "fedgen.raw"
_KNOWN_TYPES = ("bool", "uint8", "int16", "int32", "int64", "float32", "float64")
_MOST_WORDS = 10_000  # of an event, as text
_ROWS, _SHARED, _ARRAYS, _FACTS, _PLACE = "rows", "shared", "arrays", "facts", "place"
_TEXTS, _OF, _COHORT, _ASKED = "texts", "of", "cohort", "asked"
_REJECTED = "rejected"


@dataclass(frozen=True)
class Answer:
    """What was sent, as it arrives: arrays, and what they cost the client. Without arrays: they
    were added to another's on the way, which says of whom it is the sum."""

    arrays: Mapping[str, NDArray[np.generic]]
    event: DpEvent
    unit: Unit
    of: tuple[int, ...] = ()


def pack_arrays(arrays: Mapping[str, Tensor | NDArray[np.generic]]) -> ArrayRecord:
    """Named arrays (numpy or torch, any device) as a record."""
    record = {}
    for name, value in arrays.items():
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        record[name] = Array(
            dtype=array.dtype.name, shape=tuple(array.shape), stype=_RAW, data=little.tobytes()
        )
    return ArrayRecord(record)


def unpack_arrays(record: ArrayRecord) -> dict[str, Tensor]:
    """The inverse of ``pack_arrays``, as torch tensors with memory of their own.

    Raises:
        ValueError: if the bytes are not those of an array of the stated type and shape.
    """
    arrays = {}
    for name, array in record.items():
        if array.stype != _RAW or array.dtype not in _KNOWN_TYPES:
            raise ValueError(f"array {name} is not raw, or of no type that is sent")
        flat = np.frombuffer(array.data, dtype=np.dtype(array.dtype).newbyteorder("<"))
        native = flat.astype(np.dtype(array.dtype), copy=True)
        arrays[name] = torch.from_numpy(native.reshape(array.shape))
    return arrays


def pack_hello() -> RecordDict:
    """Asks a node for its partition."""
    return RecordDict({_FACTS: ConfigRecord({"hello": True})})


def pack_place(place: int) -> RecordDict:
    """A number alone: of a part to prepare, of a tag to keep or restore."""
    return RecordDict({_FACTS: ConfigRecord({_PLACE: place})})


def pack_keys_for(server_round: int, asked: str) -> RecordDict:
    """Asks for keys: for a round, and the digest of the question that is to come in it."""
    return RecordDict({_FACTS: ConfigRecord({_PLACE: server_round, _ASKED: asked})})


def read_keys_for(message: Message) -> str:
    """The digest of the question that keys are asked for."""
    return str(_fact(message, _ASKED))


def pack_broadcast(server_round: int, arrays: ArrayRecord) -> RecordDict:
    """What clients train on in a round."""
    return RecordDict({_FACTS: ConfigRecord({_PLACE: server_round}), _ARRAYS: arrays})


def pack_query(server_round: int, query: Query) -> RecordDict:
    """What a client is asked in a round."""
    records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        _FACTS: ConfigRecord({_PLACE: server_round}),
        _ROWS: pack_arrays(query.rows),
    }
    if query.shared:
        records[_SHARED] = pack_arrays(query.shared)
    return RecordDict(records)


def read_place(message: Message) -> int:
    """The round of a broadcast or query, the number of a part to prepare, a tag."""
    return _place(message.content)


def _place(content: RecordDict) -> int:
    return int(str(content.config_records[_FACTS][_PLACE]))


def for_cohort(content: RecordDict, clients: list[int]) -> RecordDict:
    """A question that says of whom its answers will be the sum: by a digest, since who else was
    drawn is not for a client to know."""
    facts = content.config_records[_FACTS]
    cohort = digest(*map(_number, clients))
    return RecordDict({**content, _FACTS: ConfigRecord({**facts, _COHORT: cohort})})


def _of_the_last(work: Callable[[RecordDict], T]) -> Callable[[RecordDict], T]:
    """Works once for a content that many clients of a process are handed one after the other."""
    last: list[tuple[RecordDict, T]] = []

    def found(content: RecordDict) -> T:
        if not last or last[0][0] is not content:
            last[:] = [(content, work(content))]
        return last[0][1]

    return found


@_of_the_last
def _digest(content: RecordDict) -> str:
    cohort = content.config_records[_FACTS].get(_COHORT)
    parts = [str(_place(content)).encode(), *([str(cohort).encode()] if cohort else [])]
    for name, record in sorted(content.array_records.items()):
        for key, array in sorted(record.items()):
            parts += [f"{name} {key} {array.dtype} {array.shape}".encode(), array.data]
    return digest(*parts)


def digest_of(message: Message) -> str:
    """A digest of a message's arrays, of its place, and of the cohort that it is for: what a seeded
    run knows a question by. Somebody can make up two questions that share it: no secret coin
    follows from it."""
    return _digest(message.content)


@_of_the_last
def _finite(content: RecordDict) -> bool:
    arrays = [each for record in content.array_records.values() for each in record.values()]
    floats = [each for each in arrays if each.dtype.startswith("float")]
    return all(
        bool(np.isfinite(np.frombuffer(each.data, np.dtype(each.dtype).newbyteorder("<"))).all())
        for each in floats
    )


def is_finite(message: Message) -> bool:
    """Whether all numbers in a message's arrays are."""
    return _finite(message.content)


def framed_digest(content: RecordDict) -> str:
    """A digest of a question that no other question has: what masks are made for."""
    facts = content.config_records[_FACTS]
    parts = [str(facts[_PLACE]).encode(), str(facts.get(_COHORT, "")).encode()]
    for name, record in sorted(content.array_records.items()):
        for key, array in sorted(record.items()):
            words = (name, key, array.dtype, str(tuple(array.shape)))
            parts += [*(word.encode() for word in words), array.data]
    return digest(*(len(part).to_bytes(8, "big") + part for part in parts))


def is_question(message: Message) -> bool:
    """Whether a message holds the arrays of a question, and no others."""
    return {_ROWS} <= set(message.content.array_records) <= {_ROWS, _SHARED}


def read_broadcast(message: Message) -> dict[str, Tensor]:
    """The arrays of a broadcast."""
    return unpack_arrays(message.content.array_records[_ARRAYS])


def read_query(message: Message) -> Query:
    """The query of an instruction."""
    records = message.content.array_records
    shared = unpack_arrays(records[_SHARED]) if _SHARED in records else {}
    return Query(unpack_arrays(records[_ROWS]), shared)


def pack_texts(server_round: int, texts: Mapping[int, bytes]) -> RecordDict:
    """A round, and bytes by client: keys, or sealed shares."""
    return RecordDict({_FACTS: ConfigRecord({_PLACE: server_round}), _TEXTS: _by_client(texts)})


def with_texts(content: RecordDict, texts: Mapping[int, bytes]) -> RecordDict:
    """Add bytes by client to a message: signatures of its lists."""
    return RecordDict({**content, _TEXTS: _by_client(texts)})


def _by_client(texts: Mapping[int, bytes]) -> ConfigRecord:
    # their number first: Flower cannot count the bytes of what is empty
    parts = [_number(len(texts)), *(_number(c) + text for c, text in texts.items())]
    return ConfigRecord({"all": b"".join(parts)})


def read_texts(message: Message, length: int) -> dict[int, bytes]:
    """Bytes by client. Raises ValueError if they are not ``length`` each, of one client each."""
    try:
        whole = message.content.config_records[_TEXTS]["all"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("no texts") from error
    if not isinstance(whole, bytes) or len(whole) % (8 + length) != 8:
        raise ValueError("texts of another length")
    found: dict[int, bytes] = {}
    for start in range(8, len(whole), 8 + length):
        [client] = _numbers(whole[start : start + 8])
        if client in found:
            raise ValueError("one client twice")
        found[client] = whole[start + 8 : start + 8 + length]
    return found


def pack_rejected(server_round: int, clients: list[int]) -> RecordDict:
    """Pack the clients whose announcements or shares the sender rejects."""
    numbers = b"".join(map(_number, [len(clients), *clients]))
    return RecordDict({_FACTS: ConfigRecord({_PLACE: server_round, _REJECTED: numbers})})


def read_rejected(message: Message) -> set[int]:
    """The inverse of ``pack_rejected``; empty if the message rejects none."""
    facts = message.content.config_records.get(_FACTS)
    if facts is None:
        raise ValueError("no facts")
    rejected = facts.get(_REJECTED, b"")
    if not isinstance(rejected, bytes) or len(rejected) % 8:
        raise ValueError("rejected clients are no list")
    return set(_numbers(rejected)[1:])


def pack_lists(server_round: int, answered: list[int], silent: list[int]) -> RecordDict:
    """Whose words arrived, and whose did not."""
    lists = {"answered": answered, "silent": silent}
    facts = {n: b"".join(map(_number, [len(each), *each])) for n, each in lists.items()}
    return RecordDict({_FACTS: ConfigRecord({_PLACE: server_round, **facts})})


def read_lists(message: Message) -> tuple[list[int], list[int]]:
    """The inverse of ``pack_lists``."""
    answered, silent = (_fact(message, name) for name in ("answered", "silent"))
    if not isinstance(answered, bytes) or not isinstance(silent, bytes):
        raise ValueError("no lists")
    return _numbers(answered)[1:], _numbers(silent)[1:]


def _number(client: int) -> bytes:
    return client.to_bytes(8, "big")


def _numbers(text: bytes) -> list[int]:
    return [int.from_bytes(text[at : at + 8], "big") for at in range(0, len(text), 8)]


def pack_acknowledgement() -> RecordDict:
    """Done; nothing else is said."""
    return RecordDict({_FACTS: ConfigRecord({"done": True})})


def pack_partition(partition: int) -> RecordDict:
    """Which partition a node is."""
    return RecordDict({_FACTS: ConfigRecord({"partition": partition})})


def read_partition(message: Message) -> int:
    """The inverse of ``pack_partition``. Raises ValueError if the message says no number."""
    return _whole(_fact(message, "partition"))


def _fact(message: Message, name: str) -> object:
    """Raises ValueError if the message has none of this name."""
    try:
        return message.content.config_records[_FACTS][name]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no {name}") from error


def _whole(found: object) -> int:
    if type(found) is not int or not 0 <= found <= 10**12:
        raise ValueError(f"{found!r} is no count")
    return found


def pack_account(account: Account) -> RecordDict:
    """What a ledger comes to. It follows from what the server asked and when: it tells nothing
    new to it."""
    facts: dict[str, int | str] = {"releases": account.releases, "rows": account.rows}
    facts["spend"] = json.dumps(spend_to_json(account.spend))
    return RecordDict({_FACTS: ConfigRecord({**facts})})


def read_account(message: Message) -> Account:
    """The inverse of ``pack_account``. Raises ValueError if the message holds none."""
    releases, rows = (_whole(_fact(message, name)) for name in ("releases", "rows"))
    try:
        spend = spend_from_json(as_json(str(_fact(message, "spend"))))
    except Exception as error:  # whatever a client made of it, it is no account
        raise ValueError("no account") from error
    if not all(type(count) is int and 0 < count <= 10**12 for count in spend.values()):
        raise ValueError("no account")
    return Account(releases, rows, spend)


def answer_of(sent: Sent, aggregation: Aggregation) -> Answer:
    """Return what may leave a client: what its aggregation accepts, and nothing else.

    Raises:
        TypeError: for anything else.
    """
    if not isinstance(sent, aggregation.leaves):
        raise TypeError(f"{type(sent).__name__} must not leave a client")
    return Answer(sent.arrays, sent.event, sent.unit)


def pack_answer(answer: Answer) -> RecordDict:
    """What ``answer_of`` made, the first time or again."""
    facts = ConfigRecord({"event": _event_text(answer.event), "unit": answer.unit.value})
    return RecordDict({_FACTS: facts, _ARRAYS: pack_arrays(answer.arrays)})


def added_up(replies: list[tuple[int, Message]]) -> list[Message]:
    """Replies of some clients to one question, with the words of a secure sum in one of them: what
    a process that is home to many clients sends on. All else stays as it is, but for a reply that
    is there twice: what a client sent counts once."""
    alike: dict[tuple[str, *tuple[int, ...]], list[tuple[int, Message]]] = {}
    once = {reply.metadata.reply_to_message_id: (client, reply) for client, reply in replies}
    for client, reply in once.values():
        if not reply.has_error() and _ARRAYS in reply.content.array_records:
            sent = reply.content.array_records[_ARRAYS]["answer"]
            if sent.dtype in ("int32", "int64"):  # words of a ring
                alike.setdefault((sent.dtype, *sent.shape), []).append((client, reply))
    for shares in alike.values():
        total: NDArray[Any] | None = None
        for _, reply in shares:
            words = unpack_arrays(reply.content.array_records[_ARRAYS])["answer"].numpy()
            unsigned = words.view(f"u{words.itemsize}")
            total = unsigned if total is None else total + unsigned
            del reply.content[_ARRAYS]
        assert total is not None
        [(_, first), *_] = shares
        clients = b"".join(_number(client) for client, _ in shares)
        facts = first.content.config_records[_FACTS]
        first.content[_FACTS] = ConfigRecord({**facts, _OF: clients})
        first.content[_ARRAYS] = pack_arrays({"answer": total.view(words.dtype)})
    return [reply for _, reply in once.values()]


def frame_of(answer: Answer) -> tuple[bytes, NDArray[np.generic]]:
    """Return the frame of a packed answer (everything but the numbers), and the numbers."""
    [numbers] = answer.arrays.values()
    content = pack_answer(answer)
    frame = [[*map(repr, content[_FACTS].items())]]
    for name, array in content.array_records[_ARRAYS].items():
        frame.append([name, array.dtype, str(array.shape), array.stype, str(len(array.data))])
    return json.dumps([list(content), frame]).encode(), numbers


@lru_cache(maxsize=1024)
def _event_text(event: DpEvent) -> str:
    return json.dumps(to_json(event))


@lru_cache(maxsize=1024)
def _event_of(text: str) -> DpEvent:
    return from_json(as_json(text))


def read_answer(message: Message, aggregation: Aggregation) -> Answer:
    """What its aggregation takes, as it arrived. Raises ValueError if the message holds none,
    whatever it holds."""
    text = str(_fact(message, "event"))
    if len(text) > _MOST_WORDS:
        raise ValueError("no event")
    try:
        event, unit = _event_of(text), Unit(str(_fact(message, "unit")))
        if aggregation.adds_up and _ARRAYS not in message.content.array_records:
            return Answer({}, event, unit)
        found = unpack_arrays(message.content.array_records[_ARRAYS])["answer"]
        of = message.content.config_records[_FACTS].get(_OF, b"") if aggregation.adds_up else b""
        clients = tuple(_numbers(of)) if isinstance(of, bytes) else ()
    except Exception as error:  # whatever a client made of it, it is no release
        raise ValueError("no release") from error
    if found.dtype not in aggregation.arrive_as:
        raise ValueError("no release")
    return Answer({"answer": found.numpy()}, event, unit, clients)


def count_bytes(message: Message) -> int:
    """Size of a message's content, as Flower counts it."""
    return sum(record.count_bytes() for record in message.content.values())
