"""Secure sums as the server asks for them: one question, one sum, and of whom it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
from flwr.app import Message, RecordDict

from fedgen.federation import messages
from fedgen.federation.failures import UnansweredError
from fedgen.federation.masking import (
    KEY_BYTES,
    SEALED_BYTES,
    SHARE_BYTES,
    MaskingError,
    check_keys,
    context_of,
    graph,
    unmasked,
)
from fedgen.federation.messages import Answer
from fedgen.federation.signing import CREDENTIAL_BYTES
from fedgen.privacy.releases import Secure

T = TypeVar("T")


class Exchange(Protocol):
    """(kind of message, client -> content, (client, reply) -> what is made of it) -> by client, of
    those that answered; raises FedgenError if they are too few of the cohort."""

    def __call__(
        self, kind: str, asked: Mapping[int, RecordDict], read: Callable[[int, Message], T], /
    ) -> dict[int, T]: ...


def whose(answers: Mapping[int, Answer]) -> list[int]:
    """Of whom the sum of some answers is: each by itself, or in a part that was added up."""
    own = {client for client, answer in answers.items() if answer.arrays and not answer.of}
    return sorted(own.union(*(answer.of for answer in answers.values())))


def that_are_there(answers: Mapping[int, Answer]) -> tuple[dict[int, Answer], list[int]]:
    """The answers that arrived by themselves or in a part that did, and the clients of the others:
    a part that was lost took its terms along, and noise that is counted on with them.

    Raises:
        UnansweredError: if a client is in two parts: it would count twice.
    """
    parts = Counter(client for answer in answers.values() for client in answer.of)
    if any(count > 1 for count in parts.values()):
        raise UnansweredError("runtime", "a client is in two parts of a sum", "go on with resume=")
    lost = [c for c, answer in answers.items() if not answer.arrays and c not in parts]
    return {c: answer for c, answer in answers.items() if c not in lost}, lost


def under_masks(
    server_round: int,
    asked: Mapping[int, RecordDict],
    sums: Secure,
    run: str,
    signed: bool,
    exchange: Exchange,
    leave_out: Callable[[str, int], None],
    read: Callable[[int, Message], Answer],
) -> dict[int, Answer]:
    """Asks for a sum, and learns nothing else (``masking.py``): who answered, the words of all of
    them with the first. ``signed``: whether clients sign what the others rely on.

    A client with invalid keys or shares is excluded before any client responds. If one client
    rejects another's signature or sealed share, one of the two violates the protocol:
    ``_violators`` decides who is excluded, and the exchange restarts with fresh keys. Wrong
    revealed shares are ignored if the others suffice (``masking.unmasked``); invalid words cannot
    be attributed.

    Args:
        leave_out: called with (kind of failure, client) for each excluded or named client.

    Raises:
        UnansweredError: if too few answer or help.
    """

    def announcement(client: int, reply: Message) -> bytes:
        told = messages.read_texts(reply, length)
        if set(told) != {client}:
            raise ValueError("keys of another client")
        check_keys(told[client])
        return told[client]

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
        if set(dealt) != set(net.around(client)) - {client}:
            raise ValueError("shares for others than the neighbours")
        return dealt

    def leave_out_violators(rejections: Mapping[int, set[int]]) -> bool:
        violators = _violators(rejections, net.shamir)
        for client in violators:
            leave_out("contradicted", client)
        cohort.difference_update(violators)
        return bool(violators)

    def texts(length: int) -> Callable[[int, Message], dict[int, bytes]]:
        return lambda client, reply: messages.read_texts(reply, length)

    question = messages.framed_digest(next(iter(asked.values())))
    hello = messages.pack_keys_for(server_round, question)
    length = KEY_BYTES + (CREDENTIAL_BYTES if signed else 0)
    cohort = set(asked)
    while True:
        announced = exchange(messages.KEYS, dict.fromkeys(sorted(cohort), hello), announcement)
        for client in _copies(announced):
            leave_out("copied", client)
            del announced[client]
        cohort = set(announced)
        keys = {client: text[:KEY_BYTES] for client, text in announced.items()}
        if len(keys) < sums.threshold:
            raise UnansweredError(
                "runtime",
                f"only {len(keys)} of {len(asked)} clients announced distinct keys for round "
                f"{server_round + 1}; a secure sum needs at least {sums.threshold}",
                "resume with resume=",
            )
        net = graph(keys, sums, signed)
        book = messages.pack_texts(server_round, announced)
        replies = exchange(messages.SHARES, dict.fromkeys(keys, book), dealt_by)
        cohort.intersection_update(replies)
        dealt = {client: each for client, each in replies.items() if isinstance(each, dict)}
        if leave_out_violators({c: each for c, each in replies.items() if isinstance(each, set)}):
            continue
        inboxes = {
            client: {other: each[client] for other, each in dealt.items() if client in each}
            for client in dealt
        }
        sealed = {c: messages.pack_texts(server_round, inbox) for c, inbox in inboxes.items()}
        opened = exchange(messages.OPEN, sealed, rejected_by)
        if not leave_out_violators(opened):
            break
    answers = exchange(messages.ASK, {client: asked[client] for client in opened}, read)
    answered, silent = set(answers), set(dealt) - set(answers)
    lists = messages.pack_lists(server_round, sorted(answered), sorted(silent))
    if signed:
        heard = exchange(messages.AGREE, dict.fromkeys(answers, lists), texts(CREDENTIAL_BYTES))
        agreed = {client: each[client] for client, each in heard.items() if client in each}
        lists = messages.with_texts(lists, agreed)
    told = exchange(messages.REVEAL, dict.fromkeys(answers, lists), texts(SHARE_BYTES))
    first = min(answers)
    sample = answers[first].arrays["answer"]
    total = np.zeros(sample.size, f"u{sample.itemsize}")
    for answer in answers.values():
        total += answer.arrays["answer"].reshape(-1).view(total.dtype)
    try:
        context = context_of(run, server_round, question)
        words, wrong = unmasked(total, keys, answered, silent, told, sums, context, signed)
    except MaskingError as error:
        raise UnansweredError(
            "runtime",
            f"the sum of round {server_round + 1} cannot be unmasked: {error}",
            "go on with resume=",
        ) from error
    for client in _violators(wrong, net.shamir):
        leave_out("wrong share", client)
    found = {client: replace(each, arrays={}) for client, each in answers.items()}
    whole = replace(
        answers[first],
        arrays={"answer": words.view(sample.dtype).reshape(sample.shape)},
        of=tuple(sorted(answers)),
    )
    return {**found, first: whole}


def _copies(announced: Mapping[int, bytes]) -> list[int]:
    """Return the clients that share a key with another client. Which of them copied it cannot be
    determined, so all are returned."""
    counts = Counter(key for text in announced.values() for key in (text[:32], text[32:64]))
    return [c for c, text in announced.items() if max(counts[text[:32]], counts[text[32:64]]) > 1]


def _violators(rejections: Mapping[int, set[int]], certain: int) -> set[int]:
    """Choose clients to exclude so that no rejection remains between the others.

    Of the neighbours of an honest client fewer than ``certain`` violate the protocol (``Graph``'s
    ``shamir``), so a client that contradicts as many is a violator and is excluded alone. Of all
    other pairs that contradict each other both are excluded: one of them is a violator.
    """
    pairs = {frozenset((c, other)) for c, others in rejections.items() for other in others}
    counts = Counter(client for pair in pairs for client in pair)
    violators = {client for client, count in counts.items() if count >= certain}
    return violators.union(*(pair for pair in pairs if not pair & violators))
