"""Conversion of arrays and releases to Flower records and back. Arrays are raw little-endian bytes.

A reply can only contain an acknowledgement, a client index, the sum of a ledger, keys and sealed
shares of masks with signatures, a signed account, or the message that the aggregation expects
(Release, Share or Clipped).
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

from fedgen.methods.api import Query
from fedgen.privacy.aggregation import Aggregation, Sent
from fedgen.privacy.events import Unit, from_json, to_json
from fedgen.privacy.ledger import Account, spend_from_json, spend_to_json
from fedgen.storage.io import digest, parse_json

HELLO, ACCOUNT, SIGN = "query.hello", "query.account", "query.sign"
"""Message types: request the client index; request the spend; request a signed account of it."""
PREPARE, TRAIN, ASK = "train.prepare", "train.broadcast", "query.ask"
"""Message types: prepare a part of the state; train; respond to a query."""
KEYS, SHARES, OPEN, REVEAL = "query.keys", "query.shares", "query.open", "query.reveal"
"""Message types of a masked sum: announce keys, deal shares, open received shares, reveal shares
(``masking.py``)."""
AGREE = "query.agree"
"""Message type: sign the lists of responders and dropouts (``signing.py``)."""
IN_A_ROUND = (TRAIN, KEYS, SHARES, OPEN, ASK, AGREE, REVEAL)
"""Message types of a round, in order; they have a deadline, unlike preparing, keeping and
restoring."""
KEEP, RESTORE, FORGET = "train.keep", "train.restore", "train.forget"
"""Message types: keep the state under a tag; restore it (tag 0: the initial state); delete it."""

T = TypeVar("T")

_RAW = "fedgen.raw"
_KNOWN_TYPES = ("bool", "uint8", "int16", "int32", "int64", "float32", "float64")
_MAX_EVENT_CHARACTERS = 10_000  # characters of an event
_MAX_TEXT = 2**20  # characters of a text
_ROWS, _SHARED, _ARRAYS, _FACTS, _PLACE = "rows", "shared", "arrays", "facts", "place"
_TEXTS, _SUMMED_CLIENTS, _COHORT, _ASKED = "texts", "summed_clients", "cohort", "asked"
_CONFIRMED = "confirmed"
_REJECTED = "rejected"


@dataclass(frozen=True)
class Response:
    """A received message of a client: arrays and their privacy event. Without arrays, they were
    added to those of another client, whose ``clients`` lists the summed clients."""

    arrays: Mapping[str, NDArray[np.generic]]
    event: DpEvent
    unit: Unit
    clients: tuple[int, ...] = ()


def pack_arrays(arrays: Mapping[str, Tensor | NDArray[np.generic]]) -> ArrayRecord:
    """Pack named arrays (numpy or torch, any device) into a record."""
    record = {}
    for name, value in arrays.items():
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
        little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
        record[name] = Array(
            dtype=array.dtype.name,
            shape=tuple(array.shape),
            stype=_RAW,
            data=little_endian.tobytes(),
        )
    return ArrayRecord(record)


def unpack_arrays(record: ArrayRecord) -> dict[str, Tensor]:
    """Unpack a record of ``pack_arrays`` to torch tensors with their own memory.

    Raises:
        ValueError: if the bytes do not match the stated type and shape.
    """
    arrays = {}
    for name, array in record.items():
        if array.stype != _RAW or array.dtype not in _KNOWN_TYPES:
            raise ValueError(f"array {name} has an unknown encoding or type")
        flat = np.frombuffer(array.data, dtype=np.dtype(array.dtype).newbyteorder("<"))
        native = flat.astype(np.dtype(array.dtype), copy=True)
        arrays[name] = torch.from_numpy(native.reshape(array.shape))
    return arrays


def pack_hello() -> RecordDict:
    """Pack the request for the client index of a node."""
    return RecordDict({_FACTS: ConfigRecord({"hello": True})})


def pack_round(number: int) -> RecordDict:
    """Pack a single number: a round, a part to prepare, or a tag."""
    return RecordDict({_FACTS: ConfigRecord({_PLACE: number})})


def pack_keep(tag: int, confirmed: int) -> RecordDict:
    """Pack the request to keep the state under a tag, with the last tag that the client has
    confirmed; 0: none."""
    return RecordDict({_FACTS: ConfigRecord({_PLACE: tag, _CONFIRMED: confirmed})})


def read_confirmed(message: Message) -> int:
    """Return the confirmed tag of a request to keep the state."""
    return int(str(_fact(message, _CONFIRMED)))


def pack_keys_for(server_round: int, query: str) -> RecordDict:
    """Pack the request for keys for a round, with the digest of its query."""
    return RecordDict({_FACTS: ConfigRecord({_PLACE: server_round, _ASKED: query})})


def read_keys_for(message: Message) -> str:
    """Return the digest of the query that keys are requested for."""
    return str(_fact(message, _ASKED))


def pack_broadcast(server_round: int, arrays: ArrayRecord) -> RecordDict:
    """Pack the arrays that clients train on in a round."""
    return RecordDict({_FACTS: ConfigRecord({_PLACE: server_round}), _ARRAYS: arrays})


def pack_query(server_round: int, query: Query) -> RecordDict:
    """Pack the query of a round."""
    records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        _FACTS: ConfigRecord({_PLACE: server_round}),
        _ROWS: pack_arrays(query.samples),
    }
    if query.shared:
        records[_SHARED] = pack_arrays(query.shared)
    return RecordDict(records)


def read_round(message: Message) -> int:
    """Return the round of a broadcast or query, the number of a part to prepare, or a tag."""
    return _read_round(message.content)


def _read_round(content: RecordDict) -> int:
    return int(str(content.config_records[_FACTS][_PLACE]))


def add_cohort(content: RecordDict, clients: list[int]) -> RecordDict:
    """Add the cohort whose responses will be summed, as a digest, because it is secret to
    clients."""
    facts = content.config_records[_FACTS]
    cohort = digest(*map(_number, clients))
    return RecordDict({**content, _FACTS: ConfigRecord({**facts, _COHORT: cohort})})


def _cached_last(function: Callable[[RecordDict], T]) -> Callable[[RecordDict], T]:
    """Cache the result for the last content, which many clients of a process receive in turn."""
    last: list[tuple[RecordDict, T]] = []

    def cached(content: RecordDict) -> T:
        if not last or last[0][0] is not content:
            last[:] = [(content, function(content))]
        return last[0][1]

    return cached


@_cached_last
def _digest(content: RecordDict) -> str:
    cohort = content.config_records[_FACTS].get(_COHORT)
    parts = [str(_read_round(content)).encode(), *([str(cohort).encode()] if cohort else [])]
    for name, record in sorted(content.array_records.items()):
        for key, array in sorted(record.items()):
            parts += [f"{name} {key} {array.dtype} {array.shape}".encode(), array.data]
    return digest(*parts)


def digest_of(message: Message) -> str:
    """Return the digest of a message's arrays, round and cohort, which identifies a query in a
    seeded run. Two queries with the same digest can be constructed, so in mode ``secure`` no secret
    or noise stream depends on it."""
    return _digest(message.content)


@_cached_last
def _finite(content: RecordDict) -> bool:
    arrays = [array for record in content.array_records.values() for array in record.values()]
    floats = [array for array in arrays if array.dtype.startswith("float")]
    return all(
        bool(np.isfinite(np.frombuffer(array.data, np.dtype(array.dtype).newbyteorder("<"))).all())
        for array in floats
    )


def is_finite(message: Message) -> bool:
    """Return whether all values of a message's arrays are finite."""
    return _finite(message.content)


def framed_digest(content: RecordDict) -> str:
    """Return an unambiguous digest of a query; masks are bound to it."""
    facts = content.config_records[_FACTS]
    parts = [str(facts[_PLACE]).encode(), str(facts.get(_COHORT, "")).encode()]
    for name, record in sorted(content.array_records.items()):
        for key, array in sorted(record.items()):
            header = (name, key, array.dtype, str(tuple(array.shape)))
            parts += [*(item.encode() for item in header), array.data]
    return digest(*(len(item).to_bytes(8, "big") + item for item in parts))


def is_query(message: Message) -> bool:
    """Return whether a message contains exactly the arrays of a query."""
    return {_ROWS} <= set(message.content.array_records) <= {_ROWS, _SHARED}


def read_broadcast(message: Message) -> dict[str, Tensor]:
    """Return the arrays of a broadcast."""
    return unpack_arrays(message.content.array_records[_ARRAYS])


def read_query(message: Message) -> Query:
    """Return the query of a message."""
    records = message.content.array_records
    shared = unpack_arrays(records[_SHARED]) if _SHARED in records else {}
    return Query(unpack_arrays(records[_ROWS]), shared)


def pack_texts(server_round: int, texts: Mapping[int, bytes]) -> RecordDict:
    """Pack a round and bytes by client: keys or sealed shares."""
    return RecordDict(
        {_FACTS: ConfigRecord({_PLACE: server_round}), _TEXTS: _pack_by_client(texts)}
    )


def with_texts(content: RecordDict, texts: Mapping[int, bytes]) -> RecordDict:
    """Add bytes by client to a message: signatures of its lists."""
    return RecordDict({**content, _TEXTS: _pack_by_client(texts)})


def _pack_by_client(texts: Mapping[int, bytes]) -> ConfigRecord:
    # their number first: Flower cannot count the bytes of an empty record
    parts = [_number(len(texts)), *(_number(client) + text for client, text in texts.items())]
    return ConfigRecord({"all": b"".join(parts)})


def read_texts(message: Message, length: int) -> dict[int, bytes]:
    """Return bytes by client. Raises ValueError unless there are ``length`` bytes per client, and
    each client occurs once."""
    return _read_by_client(message, _TEXTS, length)


def _read_by_client(message: Message, record: str, length: int) -> dict[int, bytes]:
    """Return bytes by client of a record. ``length``: bytes per client; 0: a list of clients."""
    try:
        data = message.content.config_records[record]["all"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"record {record!r} is missing") from error
    if not isinstance(data, bytes) or len(data) < 8 or (len(data) - 8) % (8 + length):
        raise ValueError("byte strings have the wrong length")
    by_client: dict[int, bytes] = {}
    for start in range(8, len(data), 8 + length):
        [client] = _numbers(data[start : start + 8])
        if client in by_client:
            raise ValueError("duplicate client")
        by_client[client] = data[start + 8 : start + 8 + length]
    return by_client


def pack_rejected(server_round: int, clients: list[int]) -> RecordDict:
    """Pack the clients whose announcements or shares the sender rejects."""
    numbers = b"".join(map(_number, [len(clients), *clients]))
    return RecordDict({_FACTS: ConfigRecord({_PLACE: server_round, _REJECTED: numbers})})


def read_rejected(message: Message) -> set[int]:
    """Return the clients of ``pack_rejected``; empty if the message rejects none."""
    facts = message.content.config_records.get(_FACTS)
    if facts is None:
        raise ValueError("no facts")
    rejected = facts.get(_REJECTED, b"")
    if not isinstance(rejected, bytes) or len(rejected) % 8:
        raise ValueError("rejected clients are no list")
    return set(_numbers(rejected)[1:])


def pack_responders(server_round: int, answered: list[int], silent: list[int]) -> RecordDict:
    """Pack the lists of responders and dropouts."""
    lists = {"answered": answered, "silent": silent}
    facts = {
        name: b"".join(map(_number, [len(clients), *clients])) for name, clients in lists.items()
    }
    return RecordDict({_FACTS: ConfigRecord({_PLACE: server_round, **facts})})


def read_responders(message: Message) -> tuple[list[int], list[int]]:
    """Return the lists of ``pack_responders``."""
    answered, silent = (_fact(message, name) for name in ("answered", "silent"))
    if not isinstance(answered, bytes) or not isinstance(silent, bytes):
        raise ValueError("no lists")
    return _numbers(answered)[1:], _numbers(silent)[1:]


def _number(client: int) -> bytes:
    return client.to_bytes(8, "big")


def _numbers(text: bytes) -> list[int]:
    return [int.from_bytes(text[start : start + 8], "big") for start in range(0, len(text), 8)]


def pack_acknowledgement() -> RecordDict:
    """Pack an acknowledgement without content."""
    return RecordDict({_FACTS: ConfigRecord({"done": True})})


def pack_partition(partition: int) -> RecordDict:
    """Pack the client index of a node."""
    return RecordDict({_FACTS: ConfigRecord({"partition": partition})})


def read_partition(message: Message) -> int:
    """Return the client index. Raises ValueError if there is none."""
    return _int(_fact(message, "partition"))


def _fact(message: Message, name: str) -> object:
    """Return a fact of a message. Raises ValueError if it is missing."""
    try:
        return message.content.config_records[_FACTS][name]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no {name}") from error


def _int(value: object) -> int:
    if type(value) is not int or not 0 <= value <= 10**12:
        raise ValueError(f"{value!r} is not a count")
    return value


def pack_account(account: Account) -> RecordDict:
    """Pack the sum of a ledger. It is a function of the server's queries and reveals nothing new to
    it."""
    facts: dict[str, int | str] = {"releases": account.releases, "rows": account.samples}
    facts["spend"] = json.dumps(spend_to_json(account.spend))
    return RecordDict({_FACTS: ConfigRecord({**facts})})


def read_account(message: Message) -> Account:
    """Return the account of a message. Raises ValueError if it is invalid."""
    releases, samples = (_int(_fact(message, name)) for name in ("releases", "rows"))
    try:
        spend = spend_from_json(parse_json(str(_fact(message, "spend"))))
    except Exception as error:  # a client may send anything
        raise ValueError("no account") from error
    if not all(type(count) is int and 0 < count <= 10**12 for count in spend.values()):
        raise ValueError("no account")
    return Account(releases, samples, spend)


def pack_text(text: str) -> RecordDict:
    """Pack one text: facts about a release, or a signed account."""
    return RecordDict({_FACTS: ConfigRecord({_TEXTS: text})})


def read_text(message: Message) -> str:
    """Return the text of ``pack_text``. Raises ValueError if there is none, or it is too long."""
    text = _fact(message, _TEXTS)
    if not isinstance(text, str) or len(text) > _MAX_TEXT:
        raise ValueError("the text is missing or too long")
    return text


def response_from(message: Sent, aggregation: Aggregation) -> Response:
    """Return what may leave a client: what its aggregation accepts, and nothing else.

    Raises:
        TypeError: for anything else.
    """
    if not isinstance(message, aggregation.leaves):
        raise TypeError(f"{type(message).__name__} must not leave a client")
    return Response(message.arrays, message.event, message.unit)


def pack_response(response: Response) -> RecordDict:
    """Pack a response of ``response_from``."""
    facts = ConfigRecord({"event": _event_text(response.event), "unit": response.unit.value})
    return RecordDict({_FACTS: facts, _ARRAYS: pack_arrays(response.arrays)})


def sum_responses(replies: list[tuple[int, Message]]) -> list[Message]:
    """Sum the ring elements of several clients' replies to one query into one reply: used by
    processes that host many clients. All other replies are unchanged, except that duplicates are
    dropped."""
    groups: dict[tuple[str, *tuple[int, ...]], list[tuple[int, Message]]] = {}
    unique = {reply.metadata.reply_to_message_id: (client, reply) for client, reply in replies}
    for client, reply in unique.values():
        if not reply.has_error() and _ARRAYS in reply.content.array_records:
            words_record = reply.content.array_records[_ARRAYS]["answer"]
            if words_record.dtype in ("int32", "int64"):  # ring elements
                groups.setdefault((words_record.dtype, *words_record.shape), []).append(
                    (client, reply)
                )
    for shares in groups.values():
        total: NDArray[Any] | None = None
        for _, reply in shares:
            words = unpack_arrays(reply.content.array_records[_ARRAYS])["answer"].numpy()
            unsigned = words.view(f"u{words.itemsize}")
            total = unsigned if total is None else total + unsigned
            del reply.content[_ARRAYS]
        assert total is not None
        [(_, first_reply), *_] = shares
        first_reply.content[_SUMMED_CLIENTS] = _pack_by_client(
            {client: b"" for client, _ in shares}
        )
        first_reply.content[_ARRAYS] = pack_arrays({"answer": total.view(words.dtype)})
    return [reply for _, reply in unique.values()]


def response_frame(response: Response) -> tuple[bytes, NDArray[np.generic]]:
    """Return the frame of a packed response (everything except the numbers), and the numbers."""
    [numbers] = response.arrays.values()
    content = pack_response(response)
    frame = [[*map(repr, content[_FACTS].items())]]
    for name, array in content.array_records[_ARRAYS].items():
        frame.append([name, array.dtype, str(array.shape), array.stype, str(len(array.data))])
    return json.dumps([list(content), frame]).encode(), numbers


@lru_cache(maxsize=1024)
def _event_text(event: DpEvent) -> str:
    return json.dumps(to_json(event))


@lru_cache(maxsize=1024)
def _parse_event(text: str) -> DpEvent:
    return from_json(parse_json(text))


def read_response(message: Message, aggregation: Aggregation) -> Response:
    """Return the response of a message. Raises ValueError for any other content."""
    text = str(_fact(message, "event"))
    if len(text) > _MAX_EVENT_CHARACTERS:
        raise ValueError("no event")
    try:
        event, unit = _parse_event(text), Unit(str(_fact(message, "unit")))
        if aggregation.adds_up and _ARRAYS not in message.content.array_records:
            return Response({}, event, unit)
        values = unpack_arrays(message.content.array_records[_ARRAYS])["answer"]
        is_sum = aggregation.adds_up and _SUMMED_CLIENTS in message.content
        clients = tuple(_read_by_client(message, _SUMMED_CLIENTS, 0)) if is_sum else ()
    except Exception as error:  # a client may send anything
        raise ValueError("no release") from error
    if values.dtype not in aggregation.accepted_dtypes:
        raise ValueError("no release")
    return Response({"answer": values.numpy()}, event, unit, clients)


def count_bytes(message: Message) -> int:
    """Return the size of a message's content as Flower counts it, excluding the list of
    summed clients, which only simulations add."""
    return sum(
        record.count_bytes() for name, record in message.content.items() if name != _SUMMED_CLIENTS
    )
