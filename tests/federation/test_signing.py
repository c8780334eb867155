"""A server that deviates from the masking protocol, against clients that sign."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from flwr.app import Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from mutation import kills

from fedgen.federation import messages
from fedgen.federation.client import app
from fedgen.federation.client.context import ClientContext, RunTerms
from fedgen.federation.client.state_store import ClientStore
from fedgen.federation.flower_compat import identify_process
from fedgen.federation.secagg.masking import KEY_BYTES, MaskingError, build_graph, mask_context
from fedgen.federation.secagg.secret_sharing import SHARE_BYTES
from fedgen.federation.secagg.signing import (
    CREDENTIAL_BYTES,
    Signer,
    agreement,
    announcement,
    fingerprint,
    signers_needed,
)
from fedgen.privacy.aggregation import Secure
from fedgen.privacy.ledger import Ledger
from fedgen.randomness import RandomStreams

SUMS = Secure(4, 3, 0)
KEYS = [generate_private_key(SECP384R1()) for _ in range(5)]
PEERS = {client: fingerprint(key.public_key()) for client, key in enumerate(KEYS[:4])}


@pytest.fixture
def homes(tmp_path: Path) -> list[ClientContext]:
    """Return four sites that exchanged their fingerprints."""
    identify_process(1)
    return [
        ClientContext(
            client,
            None,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            RandomStreams.from_seed(0, "secure"),
            ClientStore(tmp_path, in_memory=True),
            Ledger(tmp_path / f"{client}.jsonl", "run", client, False),
            RunTerms(
                1, "run", aggregation=SUMS, masked_sums=True, signer=Signer(KEYS[client], PEERS)
            ),
        )
        for client in range(4)
    ]


def asked(content: RecordDict) -> Message:
    return Message(content, dst_node_id=2, message_type=messages.KEYS)


def texts(content: RecordDict, length: int) -> dict[int, bytes]:
    return messages.read_texts(asked(content), length)


def announced(homes: list[ClientContext], server_round: int = 0) -> dict[int, bytes]:
    result = {}
    for home in homes:
        reply = app._keys(home, asked(messages.pack_keys_for(server_round, "question")))
        result |= texts(reply, KEY_BYTES + CREDENTIAL_BYTES)
    return result


def masked(homes: list[ClientContext], book: Mapping[int, bytes]) -> list[np.ndarray]:
    """Return the shares, and the masked words of one client."""
    dealt = {}
    for home in homes:
        reply = app._shares(home, asked(messages.pack_texts(0, book)))
        dealt[home.index] = texts(reply, 2 * SHARE_BYTES + 16)
    ones = np.ones(8, np.uint32)
    result = []
    for home in homes:
        inbox = {other: each[home.index] for other, each in dealt.items() if other != home.index}
        assert home.masker is not None
        assert home.masker.open(inbox) == []
        result.append(home.masker.mask(ones))
    return result


def agreed(home: ClientContext, answered: list[int], silent: list[int]) -> dict[int, bytes]:
    reply = app._agree(home, asked(messages.pack_responders(0, answered, silent)))
    return texts(reply, CREDENTIAL_BYTES)


def revealed(
    home: ClientContext, answered: list[int], silent: list[int], signatures: Mapping[int, bytes]
) -> dict[int, bytes]:
    lists = messages.with_texts(messages.pack_responders(0, answered, silent), signatures)
    return texts(app._reveal(home, asked(lists)), SHARE_BYTES)


def rejected(home: ClientContext, book: Mapping[int, bytes]) -> set[int]:
    """Return whose announcements a client rejects; it sends no shares then."""
    reply = asked(app._shares(home, asked(messages.pack_texts(0, book))))
    with pytest.raises(ValueError, match="is missing"):
        messages.read_texts(reply, SHARE_BYTES)
    return messages.read_rejected(reply)


ALL = [0, 1, 2, 3]


def test_an_honest_server_receives_the_shares(homes: list[ClientContext]) -> None:
    masked(homes, announced(homes))
    signatures: dict[int, bytes] = {}
    for home in homes:
        signatures |= agreed(home, ALL, [])
    for home in homes:
        assert set(revealed(home, ALL, [], signatures)) == set(ALL)


def test_a_false_signature_under_the_lists_does_not_stop_others(homes: list[ClientContext]) -> None:
    masked(homes, announced(homes))
    signatures: dict[int, bytes] = {}
    for home in homes:
        signatures |= agreed(home, ALL, [])
    signatures[3] = signatures[3][:-1] + bytes([signatures[3][-1] ^ 1])
    for home in homes:
        assert set(revealed(home, ALL, [], signatures)) == set(ALL)


@kills(
    "fedgen/federation/client/app.py", "signer.check(client, signed_text, text[KEY_BYTES:])", "pass"
)
@kills(
    "fedgen/federation/secagg/signing.py",
    ("if self.peers is not None and self.peers.get(client) != _point_fingerprint(point):"),
    "if False:",
)
def test_an_invented_client_is_detected(homes: list[ClientContext]) -> None:
    """With keys of its own under a peer's number, by any signer."""
    book, forged = announced(homes), bytes(range(KEY_BYTES))
    context = mask_context("run", 0, "question")
    for text in (
        forged + Signer(KEYS[4], None).sign(announcement(context, 3, SUMS, forged)),
        forged + book[3][KEY_BYTES:],
        book[2],
    ):
        assert rejected(homes[0], {**book, 3: text}) == {3}


@kills(
    "fedgen/federation/secagg/signing.py",
    'return _text(b"keys", context, run_digest,',
    'return _text(b"keys", run_digest,',
)
def test_keys_serve_one_round_of_one_run_and_cohort(homes: list[ClientContext]) -> None:
    before = announced(homes, 1)
    now = announced(homes, 0)
    assert rejected(homes[0], {**now, 3: before[3]}) == {3}
    keys = now[3][:KEY_BYTES]
    for context, sums in (("other", SUMS), ("run", Secure(4, 3, 1)), ("run", Secure(5, 3, 0))):
        text = announcement(mask_context(context, 0, "question"), 3, sums, keys)
        with pytest.raises(MaskingError, match="did not sign"):
            homes[0].terms.signer.check(3, text, now[3][KEY_BYTES:])  # type: ignore[union-attr]


@kills(
    "fedgen/federation/client/app.py", "if last == server_round and signed != text:", "if False:"
)
@kills(
    "fedgen/federation/client/app.py", "if len(signers) < signers_needed(masker.sums):", "if False:"
)
def test_both_secrets_of_a_client_are_never_revealed(homes: list[ClientContext]) -> None:
    """The server claims to some that client 3 responded, and to others that it did not: shares of
    its seed together with its key would unmask its words."""
    masked(homes, announced(homes))
    there: dict[int, bytes] = {}
    for home in homes[:3]:
        there |= agreed(home, ALL, [])
    with pytest.raises(MaskingError, match="different lists were already signed"):
        agreed(homes[0], [0, 1, 2], [3])
    with pytest.raises(MaskingError, match="the lists overlap or omit this client"):
        agreed(homes[3], [0, 1, 2], [3])
    assert len(there) >= signers_needed(SUMS)
    assert revealed(homes[0], ALL, [], there)
    with pytest.raises(MaskingError):
        revealed(homes[3], [0, 1, 2], [3], there)
    with pytest.raises(MaskingError, match="the lists differ"):
        revealed(homes[1], [0, 1, 2], [3], there)
    with pytest.raises(MaskingError, match="too few signatures"):
        revealed(homes[2], ALL, [], {0: there[0], 1: there[1]})


@kills("fedgen/federation/client/app.py", "masker.check_lists(*map(set, lists))", "assert lists")
def test_only_responders_sign_lists(homes: list[ClientContext]) -> None:
    """A client that signed before it responded could announce other keys, and sign other lists."""
    book = announced(homes)
    for home in homes:
        app._shares(home, asked(messages.pack_texts(0, book)))
    with pytest.raises(MaskingError, match="no message was masked"):
        agreed(homes[0], ALL, [])


@kills(
    "fedgen/federation/secagg/masking.py",
    "        shamir = (len(keys) + sums.colluders) // 2 + 1\n",
    "        pass\n",
)
@given(asked=st.integers(2, 60), data=st.data())
def test_no_two_disjoint_sets_of_honest_clients_reconstruct_a_secret(
    asked: int, data: st.DataObject
) -> None:
    """A server that forwards shares to some clients only would learn their sum; the signers can
    meet each requested threshold."""
    threshold = data.draw(st.integers(asked // 2 + 1, asked))
    sums = Secure(asked, threshold, data.draw(st.integers(0, threshold - 1)))
    count = data.draw(st.integers(threshold, asked))
    keys = {client: client.to_bytes(KEY_BYTES, "big") for client in range(count)}
    shamir = build_graph(keys, sums, complete=True).shamir
    assert 2 * (shamir - sums.colluders) > count - sums.colluders
    assert shamir <= signers_needed(sums)


@kills(
    "fedgen/federation/secagg/signing.py",
    "return max(sums.threshold, (sums.asked + sums.colluders) // 2 + 1)",
    "return sums.threshold",
)
@given(asked=st.integers(2, 60), data=st.data())
def test_two_lists_would_need_an_honest_client_that_signed_both(
    asked: int, data: st.DataObject
) -> None:
    threshold = data.draw(st.integers(asked // 2 + 1, asked))
    colluders = data.draw(st.integers(0, threshold - 1))
    needed = signers_needed(Secure(asked, threshold, colluders))
    honest = asked - colluders
    assert needed >= threshold
    assert 2 * (needed - colluders) > honest


def test_keys_are_not_checked_without_fingerprints(homes: list[ClientContext]) -> None:
    text = agreement(mask_context("run", 0, "question"), {}, [0], [1])
    result, untold = Signer(KEYS[0], PEERS), Signer(KEYS[0], None)
    credential = Signer(KEYS[4], None).sign(text)
    untold.check(2, text, credential)
    with pytest.raises(MaskingError, match="client 2 does not match its fingerprint"):
        result.check(2, text, credential)
    for broken in (
        credential[:-1] + bytes([credential[-1] ^ 1]),
        bytes(CREDENTIAL_BYTES),
        credential[49:] + bytes(49),
    ):
        with pytest.raises(MaskingError):
            untold.check(2, text, broken)


def test_silent_clients_may_be_the_servers_choice() -> None:
    """On a ring, a server that knows the graph could silence all neighbours of a few clients, and
    open their sum. Clients that sign are all neighbours of each other."""
    sums, keys = Secure(240, 160, 0), {c: c.to_bytes(KEY_BYTES, "big") for c in range(240)}
    assert build_graph(keys, sums).degree < 80, "those of a simulation have few neighbours"
    whole = build_graph(keys, sums, complete=True)
    assert whole.degree == 239 and len(whole.neighbours(7)) == 240
    assert whole.shamir > 239 // 2


@kills(
    "fedgen/federation/client/app.py",
    "complete_graph=terms.signer is not None",
    "complete_graph=False",
)
def test_clients_that_sign_are_neighbours_of_all(homes: list[ClientContext]) -> None:
    announced(homes)
    assert all(home.masker is not None and home.masker.complete_graph for home in homes)
