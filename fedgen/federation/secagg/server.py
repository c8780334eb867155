"""The server's side of secure aggregation: one query, one sum, and the clients in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
from flwr.app import Message, RecordDict

from fedgen.federation import messages
from fedgen.federation.failures import NoResponseError
from fedgen.federation.messages import Response
from fedgen.federation.secagg.masking import (
    KEY_BYTES,
    SEALED_BYTES,
    Graph,
    MaskingError,
    Words,
    build_graph,
    check_keys,
    mask_context,
    unmask,
)
from fedgen.federation.secagg.secret_sharing import SHARE_BYTES
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


@dataclass(frozen=True)
class _Dealt:
    """Keys of the clients, their graph, those that dealt shares, and those that opened them."""

    keys: dict[int, bytes]
    graph: Graph
    dealers: set[int]
    opened: list[int]


@dataclass(frozen=True)
class MaskedSum:
    """One query of a sum by secure aggregation (``masking.py``), which reveals nothing else to the
    server.

    A client with invalid keys or shares is excluded before any client responds. If one client
    rejects another's signature or sealed share, one of the two violates the protocol:
    ``_violators`` decides who is excluded, and the exchange restarts with fresh keys. Wrong
    revealed shares are ignored if the others suffice (``masking.unmask``); invalid ring elements
    cannot be attributed.

    signed: whether clients sign keys and lists.
    exclude: called with (kind of failure, client) for each excluded or named client.
    """

    server_round: int
    contents: Mapping[int, RecordDict]
    sums: Secure
    run: str
    signed: bool
    exchange: Exchange
    exclude: Callable[[str, int], None]

    def query(self, read: Callable[[int, Message], Response]) -> dict[int, Response]:
        """Return the responses; that of the first responder has the sum.

        Raises:
            NoResponseError: if too few clients respond or help.
        """
        dealt = self._deal()
        contents = {client: self.contents[client] for client in dealt.opened}
        responses = self.exchange(messages.ASK, contents, read)
        dropouts = dealt.dealers - responses.keys()
        revealed = self._reveal(sorted(responses), sorted(dropouts))
        first = min(responses)
        sample = responses[first].arrays["answer"]
        total = np.zeros(sample.size, f"u{sample.itemsize}")
        for response in responses.values():
            total += response.arrays["answer"].reshape(-1).view(total.dtype)
        words = self._unmask(total, dealt, set(responses), dropouts, revealed)
        # a client's own list of summed clients is not trusted
        without_arrays = {
            client: replace(item, arrays={}, clients=()) for client, item in responses.items()
        }
        with_sum = replace(
            responses[first],
            arrays={"answer": words.view(sample.dtype).reshape(sample.shape)},
            clients=tuple(sorted(responses)),
        )
        return {**without_arrays, first: with_sum}

    @property
    def _digest(self) -> str:
        return messages.framed_digest(next(iter(self.contents.values())))

    def _deal(self) -> _Dealt:
        """Exchange keys and shares (keys, shares, open), until no client rejects another's."""
        cohort = set(self.contents)

        def exclude_violators(rejections: Mapping[int, set[int]]) -> bool:
            violators = _violators(rejections, graph.shamir)
            for client in violators:
                self.exclude("contradicted", client)
            cohort.difference_update(violators)
            return bool(violators)

        while True:
            announced = self._announcements(cohort)
            cohort = set(announced)
            keys = {client: text[:KEY_BYTES] for client, text in announced.items()}
            graph = build_graph(keys, self.sums, self.signed)
            dealt, rejections = self._shares(announced, graph)
            cohort.intersection_update(dealt.keys() | rejections.keys())
            if exclude_violators(rejections):
                continue
            opened = self._open(dealt)
            if not exclude_violators(opened):
                return _Dealt(keys, graph, set(dealt), list(opened))

    def _announcements(self, cohort: set[int]) -> dict[int, bytes]:
        """Return the announced keys of each client, with its credential if clients sign."""
        length = KEY_BYTES + (CREDENTIAL_BYTES if self.signed else 0)

        def announcement(client: int, reply: Message) -> bytes:
            texts = messages.read_texts(reply, length)
            if set(texts) != {client}:
                raise ValueError("keys of a different client")
            check_keys(texts[client])
            return texts[client]

        request = messages.pack_keys_for(self.server_round, self._digest)
        announced = self.exchange(
            messages.KEYS, dict.fromkeys(sorted(cohort), request), announcement
        )
        for client in _copies(announced):
            self.exclude("copied", client)
            del announced[client]
        if len(announced) < self.sums.threshold:
            raise NoResponseError(
                "runtime",
                f"only {len(announced)} of {len(self.contents)} clients announced distinct keys "
                f"for round {self.server_round + 1}; a secure sum needs at least "
                f"{self.sums.threshold}",
                "continue with resume=",
            )
        return announced

    def _shares(
        self, announced: Mapping[int, bytes], graph: Graph
    ) -> tuple[dict[int, dict[int, bytes]], dict[int, set[int]]]:
        """Return the sealed shares of each client for each neighbour, and the signatures that
        others reject."""

        def dealt_by(client: int, reply: Message) -> dict[int, bytes] | set[int]:
            if self.signed and (rejected := messages.read_rejected(reply)):
                if not rejected <= announced.keys():
                    raise ValueError("rejects clients that announced no keys")
                return rejected
            dealt = messages.read_texts(reply, SEALED_BYTES)
            if set(dealt) != set(graph.neighbours(client)) - {client}:
                raise ValueError("shares for clients other than the neighbours")
            return dealt

        announcements = messages.pack_texts(self.server_round, announced)
        replies = self.exchange(messages.SHARES, dict.fromkeys(announced, announcements), dealt_by)
        return (
            {client: item for client, item in replies.items() if isinstance(item, dict)},
            {client: item for client, item in replies.items() if isinstance(item, set)},
        )

    def _open(self, dealt: Mapping[int, Mapping[int, bytes]]) -> dict[int, set[int]]:
        """Deliver the sealed shares; return the clients whose shares each one rejects."""
        inboxes = {
            client: {other: item[client] for other, item in dealt.items() if client in item}
            for client in dealt
        }

        def rejected_by(client: int, reply: Message) -> set[int]:
            rejected = messages.read_rejected(reply)
            if not rejected <= inboxes[client].keys():
                raise ValueError("rejects clients that dealt it no share")
            return rejected

        sealed = {
            client: messages.pack_texts(self.server_round, inbox)
            for client, inbox in inboxes.items()
        }
        return self.exchange(messages.OPEN, sealed, rejected_by)

    def _reveal(self, responders: list[int], dropouts: list[int]) -> dict[int, dict[int, bytes]]:
        """Return the shares that each responder reveals: signed lists first, if clients sign."""

        def texts(length: int) -> Callable[[int, Message], dict[int, bytes]]:
            return lambda client, reply: messages.read_texts(reply, length)

        lists = messages.pack_responders(self.server_round, responders, dropouts)
        if self.signed:
            signatures = self.exchange(
                messages.AGREE, dict.fromkeys(responders, lists), texts(CREDENTIAL_BYTES)
            )
            agreed = {client: item[client] for client, item in signatures.items() if client in item}
            lists = messages.with_texts(lists, agreed)
        return self.exchange(messages.REVEAL, dict.fromkeys(responders, lists), texts(SHARE_BYTES))

    def _unmask(
        self,
        total: Words,
        dealt: _Dealt,
        responders: set[int],
        dropouts: set[int],
        revealed: Mapping[int, Mapping[int, bytes]],
    ) -> Words:
        """Return the sum without masks, and name the clients that revealed wrong shares."""
        context = mask_context(self.run, self.server_round, self._digest)
        try:
            words, wrong = unmask(
                total, dealt.keys, responders, dropouts, revealed, self.sums, context, self.signed
            )
        except MaskingError as error:
            raise NoResponseError(
                "runtime",
                f"the sum of round {self.server_round + 1} cannot be unmasked: {error}",
                "continue with resume=",
            ) from error
        for client in _violators(wrong, dealt.graph.shamir):
            self.exclude("wrong share", client)
        return words


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
