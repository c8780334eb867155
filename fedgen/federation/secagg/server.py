"""The server's side of secure aggregation: one query, one sum, and the clients in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
from flwr.app import Message, RecordDict

from fedgen.federation import messages
from fedgen.federation.failures import NoResponseError
from fedgen.federation.messages import Response
from fedgen.federation.secagg.masking import (
    KEY_BYTES,
    SEALED_BYTES,
    SHARE_BYTES,
    MaskingError,
    build_graph,
    check_keys,
    mask_context,
    unmask,
)
from fedgen.federation.secagg.signing import CREDENTIAL_BYTES
from fedgen.privacy.aggregation import Secure

T = TypeVar("T")


class Exchange(Protocol):
    """(kind of message, client -> content, (client, reply) -> result) -> client -> result, for
    responders; raises FedgenError if they are too few of the cohort."""

    def __call__(
        self, kind: str, asked: Mapping[int, RecordDict], read: Callable[[int, Message], T], /
    ) -> dict[int, T]: ...


def clients_in(responses: Mapping[int, Response]) -> list[int]:
    """Return the clients in the sum of some responses, individual or already summed."""
    individual = {
        client for client, response in responses.items() if response.arrays and not response.clients
    }
    return sorted(individual.union(*(response.clients for response in responses.values())))


def present(responses: Mapping[int, Response]) -> tuple[dict[int, Response], list[int]]:
    """Return the responses that arrived individually or within a sum, and the missing clients: a
    lost partial sum contained their contributions and their noise.

    Raises:
        NoResponseError: if a client is part of two partial sums and would count twice.
    """
    counts = Counter(client for response in responses.values() for client in response.clients)
    if any(count > 1 for count in counts.values()):
        raise NoResponseError(
            "runtime", "a client is part of two partial sums", "continue with resume="
        )
    missing = [
        client
        for client, response in responses.items()
        if not response.arrays and client not in counts
    ]
    return {
        client: response for client, response in responses.items() if client not in missing
    }, missing


def masked_sum(
    server_round: int,
    contents: Mapping[int, RecordDict],
    sums: Secure,
    run: str,
    signed: bool,
    exchange: Exchange,
    exclude: Callable[[str, int], None],
    read: Callable[[int, Message], Response],
) -> dict[int, Response]:
    """Query a sum by secure aggregation (``masking.py``), which reveals nothing else to the server,
    and return the responses; that of the first responder has the sum. ``signed``: whether clients
    sign keys and lists.

    A client with invalid keys or shares is excluded before any client responds. If one client
    rejects another's signature or sealed share, one of the two violates the protocol:
    ``_violators`` decides who is excluded, and the exchange restarts with fresh keys. Wrong
    revealed shares are ignored if the others suffice (``masking.unmask``); invalid ring elements
    cannot be attributed.

    Args:
        exclude: called with (kind of failure, client) for each excluded or named client.

    Raises:
        NoResponseError: if too few clients respond or help.
    """

    def announcement(client: int, reply: Message) -> bytes:
        announced = messages.read_texts(reply, length)
        if set(announced) != {client}:
            raise ValueError("keys of a different client")
        check_keys(announced[client])
        return announced[client]

    def rejected_by(client: int, reply: Message) -> set[int]:
        rejected = messages.read_rejected(reply)
        if not rejected <= inboxes[client].keys():
            raise ValueError("rejects clients that dealt it no share")
        return rejected

    def dealt_by(client: int, reply: Message) -> dict[int, bytes] | set[int]:
        if signed and (rejected := messages.read_rejected(reply)):
            if not rejected <= keys.keys():
                raise ValueError("rejects clients that announced no keys")
            return rejected
        dealt = messages.read_texts(reply, SEALED_BYTES)
        if set(dealt) != set(graph.neighbours(client)) - {client}:
            raise ValueError("shares for clients other than the neighbours")
        return dealt

    def leave_out_violators(rejections: Mapping[int, set[int]]) -> bool:
        violators = _violators(rejections, graph.shamir)
        for client in violators:
            exclude("contradicted", client)
        cohort.difference_update(violators)
        return bool(violators)

    def texts(length: int) -> Callable[[int, Message], dict[int, bytes]]:
        return lambda client, reply: messages.read_texts(reply, length)

    query = messages.framed_digest(next(iter(contents.values())))
    key_request = messages.pack_keys_for(server_round, query)
    length = KEY_BYTES + (CREDENTIAL_BYTES if signed else 0)
    cohort = set(contents)
    while True:
        announced = exchange(
            messages.KEYS, dict.fromkeys(sorted(cohort), key_request), announcement
        )
        for client in _copies(announced):
            exclude("copied", client)
            del announced[client]
        cohort = set(announced)
        keys = {client: text[:KEY_BYTES] for client, text in announced.items()}
        if len(keys) < sums.threshold:
            raise NoResponseError(
                "runtime",
                f"only {len(keys)} of {len(contents)} clients announced distinct keys for round "
                f"{server_round + 1}; a secure sum needs at least {sums.threshold}",
                "continue with resume=",
            )
        graph = build_graph(keys, sums, signed)
        announcements = messages.pack_texts(server_round, announced)
        replies = exchange(messages.SHARES, dict.fromkeys(keys, announcements), dealt_by)
        cohort.intersection_update(replies)
        dealt = {client: item for client, item in replies.items() if isinstance(item, dict)}
        if leave_out_violators(
            {client: item for client, item in replies.items() if isinstance(item, set)}
        ):
            continue
        inboxes = {
            client: {other: item[client] for other, item in dealt.items() if client in item}
            for client in dealt
        }
        sealed = {
            client: messages.pack_texts(server_round, inbox) for client, inbox in inboxes.items()
        }
        opened = exchange(messages.OPEN, sealed, rejected_by)
        if not leave_out_violators(opened):
            break
    responses = exchange(messages.ASK, {client: contents[client] for client in opened}, read)
    responders, dropouts = set(responses), set(dealt) - set(responses)
    responder_lists = messages.pack_responders(server_round, sorted(responders), sorted(dropouts))
    if signed:
        signatures = exchange(
            messages.AGREE, dict.fromkeys(responses, responder_lists), texts(CREDENTIAL_BYTES)
        )
        agreed = {client: item[client] for client, item in signatures.items() if client in item}
        responder_lists = messages.with_texts(responder_lists, agreed)
    revealed = exchange(
        messages.REVEAL, dict.fromkeys(responses, responder_lists), texts(SHARE_BYTES)
    )
    first = min(responses)
    sample = responses[first].arrays["answer"]
    total = np.zeros(sample.size, f"u{sample.itemsize}")
    for response in responses.values():
        total += response.arrays["answer"].reshape(-1).view(total.dtype)
    try:
        context = mask_context(run, server_round, query)
        words, wrong = unmask(total, keys, responders, dropouts, revealed, sums, context, signed)
    except MaskingError as error:
        raise NoResponseError(
            "runtime",
            f"the sum of round {server_round + 1} cannot be unmasked: {error}",
            "continue with resume=",
        ) from error
    for client in _violators(wrong, graph.shamir):
        exclude("wrong share", client)
    without_arrays = {client: replace(item, arrays={}) for client, item in responses.items()}
    with_sum = replace(
        responses[first],
        arrays={"answer": words.view(sample.dtype).reshape(sample.shape)},
        clients=tuple(sorted(responses)),
    )
    return {**without_arrays, first: with_sum}


def _copies(announced: Mapping[int, bytes]) -> list[int]:
    """Return the clients that share a key with another client. Which of them copied it cannot be
    determined, so all are returned."""
    counts = Counter(key for text in announced.values() for key in (text[:32], text[32:64]))
    return [
        client
        for client, text in announced.items()
        if max(counts[text[:32]], counts[text[32:64]]) > 1
    ]


def _violators(rejections: Mapping[int, set[int]], certain: int) -> set[int]:
    """Choose clients to exclude so that no rejection remains between the others.

    Of the neighbours of an honest client fewer than ``certain`` violate the protocol (``Graph``'s
    ``shamir``), so a client that contradicts as many is a violator and is excluded alone. Of all
    other pairs that contradict each other both are excluded: one of them is a violator.
    """
    pairs = {
        frozenset((client, other)) for client, others in rejections.items() for other in others
    }
    counts = Counter(client for pair in pairs for client in pair)
    violators = {client for client, count in counts.items() if count >= certain}
    return violators.union(*(pair for pair in pairs if not pair & violators))
