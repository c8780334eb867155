"""A server that does not follow the protocol of masks, against clients that sign."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from flwr.app import Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedgen.coins import Coins
from fedgen.federation import client_app, messages
from fedgen.federation.client_app import ClientHome, Terms
from fedgen.federation.client_store import ClientStore
from fedgen.federation.flower_compat import identify_process
from fedgen.federation.masking import KEY_BYTES, SHARE_BYTES, MaskingError, context_of, graph
from fedgen.federation.signing import (
    CREDENTIAL_BYTES,
    Signer,
    agreement,
    announcement,
    fingerprint,
    signers_needed,
)
from fedgen.privacy.ledger import Ledger
from fedgen.privacy.releases import Secure

SUMS = Secure(4, 3, 0)
KEYS = [generate_private_key(SECP384R1()) for _ in range(5)]
PEERS = {client: fingerprint(key.public_key()) for client, key in enumerate(KEYS[:4])}


@pytest.fixture
def homes(tmp_path: Path) -> list[ClientHome]:
    """Four sites that told each other their fingerprints."""
    identify_process(1)
    return [
        ClientHome(
            client,
            None,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            Coins.of(0, "secure"),
            ClientStore(tmp_path, in_memory=True),
            Ledger(tmp_path / f"{client}.jsonl", "run", client, False),
            Terms(1, "run", aggregation=SUMS, masks=True, signer=Signer(KEYS[client], PEERS)),
        )
        for client in range(4)
    ]


def asked(content: RecordDict) -> Message:
    return Message(content, dst_node_id=2, message_type=messages.KEYS)


def texts(content: RecordDict, length: int) -> dict[int, bytes]:
    return messages.read_texts(asked(content), length)


def announced(homes: list[ClientHome], server_round: int = 0) -> dict[int, bytes]:
    found = {}
    for home in homes:
        reply = client_app._keys(home, asked(messages.pack_keys_for(server_round, "question")))
        found |= texts(reply, KEY_BYTES + CREDENTIAL_BYTES)
    return found


def masked(homes: list[ClientHome], book: Mapping[int, bytes]) -> list[np.ndarray]:
    """Shares dealt, and words of one under masks."""
    dealt = {}
    for home in homes:
        reply = client_app._shares(home, asked(messages.pack_texts(0, book)))
        dealt[home.number] = texts(reply, 2 * SHARE_BYTES + 16)
    ones = np.ones(8, np.uint32)
    found = []
    for home in homes:
        inbox = {other: each[home.number] for other, each in dealt.items() if other != home.number}
        assert home.masker is not None
        assert home.masker.open(inbox) == []
        found.append(home.masker.mask(ones))
    return found


def agreed(home: ClientHome, answered: list[int], silent: list[int]) -> dict[int, bytes]:
    reply = client_app._agree(home, asked(messages.pack_lists(0, answered, silent)))
    return texts(reply, CREDENTIAL_BYTES)


def revealed(
    home: ClientHome, answered: list[int], silent: list[int], signatures: Mapping[int, bytes]
) -> dict[int, bytes]:
    lists = messages.with_texts(messages.pack_lists(0, answered, silent), signatures)
    return texts(client_app._reveal(home, asked(lists)), SHARE_BYTES)


def rejected(home: ClientHome, book: Mapping[int, bytes]) -> set[int]:
    """Whose announcements a client rejects; it deals no shares then."""
    reply = asked(client_app._shares(home, asked(messages.pack_texts(0, book))))
    with pytest.raises(ValueError, match="no texts"):
        messages.read_texts(reply, SHARE_BYTES)
    return messages.read_rejected(reply)


ALL = [0, 1, 2, 3]


def test_who_follows_the_protocol_gets_the_shares(homes: list[ClientHome]) -> None:
    masked(homes, announced(homes))
    signatures: dict[int, bytes] = {}
    for home in homes:
        signatures |= agreed(home, ALL, [])
    for home in homes:
        assert set(revealed(home, ALL, [], signatures)) == set(ALL)


def test_a_false_signature_under_the_lists_stops_nobody(homes: list[ClientHome]) -> None:
    masked(homes, announced(homes))
    signatures: dict[int, bytes] = {}
    for home in homes:
        signatures |= agreed(home, ALL, [])
    signatures[3] = signatures[3][:-1] + bytes([signatures[3][-1] ^ 1])
    for home in homes:
        assert set(revealed(home, ALL, [], signatures)) == set(ALL)


def test_a_client_that_the_server_invents_is_noticed(homes: list[ClientHome]) -> None:
    """With keys of its own under a peer's number, whoever signs them."""
    book, forged = announced(homes), bytes(range(KEY_BYTES))
    context = context_of("run", 0, "question")
    for text in (
        forged + Signer(KEYS[4], None).sign(announcement(context, 3, SUMS, forged)),
        forged + book[3][KEY_BYTES:],
        book[2],
    ):
        assert rejected(homes[0], {**book, 3: text}) == {3}


def test_keys_serve_one_round_of_one_run_and_cohort(homes: list[ClientHome]) -> None:
    before = announced(homes, 1)
    now = announced(homes, 0)
    assert rejected(homes[0], {**now, 3: before[3]}) == {3}
    keys = now[3][:KEY_BYTES]
    for context, sums in (("other", SUMS), ("run", Secure(4, 3, 1)), ("run", Secure(5, 3, 0))):
        text = announcement(context_of(context, 0, "question"), 3, sums, keys)
        with pytest.raises(MaskingError, match="did not sign"):
            homes[0].terms.signer.check(3, text, now[3][KEY_BYTES:])  # type: ignore[union-attr]


def test_both_secrets_of_a_client_are_never_revealed(homes: list[ClientHome]) -> None:
    """The server tells some that client 3 answered, and others that it did not: shares of its seed
    and of its key together would bare its words."""
    masked(homes, announced(homes))
    there: dict[int, bytes] = {}
    for home in homes[:3]:
        there |= agreed(home, ALL, [])
    with pytest.raises(MaskingError, match="other lists were signed"):
        agreed(homes[0], [0, 1, 2], [3])
    with pytest.raises(MaskingError, match="not two lists of one cohort"):
        agreed(homes[3], [0, 1, 2], [3])
    assert len(there) >= signers_needed(SUMS)
    assert revealed(homes[0], ALL, [], there)
    with pytest.raises(MaskingError):
        revealed(homes[3], [0, 1, 2], [3], there)
    with pytest.raises(MaskingError, match="not the lists"):
        revealed(homes[1], [0, 1, 2], [3], there)
    with pytest.raises(MaskingError, match="too few agree"):
        revealed(homes[2], ALL, [], {0: there[0], 1: there[1]})


def test_lists_are_signed_by_those_who_answered_alone(homes: list[ClientHome]) -> None:
    """A client that signed before it answered could announce other keys, and sign other lists."""
    book = announced(homes)
    for home in homes:
        client_app._shares(home, asked(messages.pack_texts(0, book)))
    with pytest.raises(MaskingError, match="nothing was masked"):
        agreed(homes[0], ALL, [])


@given(asked=st.integers(2, 60), data=st.data())
def test_no_two_disjoint_sets_of_honest_clients_give_a_secret_back(
    asked: int, data: st.DataObject
) -> None:
    """A server that passes shares on to some alone would have the sum of these; and what it asks
    for, those who sign can give."""
    threshold = data.draw(st.integers(asked // 2 + 1, asked))
    sums = Secure(asked, threshold, data.draw(st.integers(0, threshold - 1)))
    count = data.draw(st.integers(threshold, asked))
    keys = {client: client.to_bytes(KEY_BYTES, "big") for client in range(count)}
    shamir = graph(keys, sums, whole=True).shamir
    assert 2 * (shamir - sums.colluders) > count - sums.colluders
    assert shamir <= signers_needed(sums)


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


def test_any_key_will_do_where_nobody_was_told(homes: list[ClientHome]) -> None:
    text = agreement(context_of("run", 0, "question"), {}, [0], [1])
    told, untold = Signer(KEYS[0], PEERS), Signer(KEYS[0], None)
    credential = Signer(KEYS[4], None).sign(text)
    untold.check(2, text, credential)
    with pytest.raises(MaskingError, match="client 2 is not the peer"):
        told.check(2, text, credential)
    for broken in (
        credential[:-1] + bytes(1),
        bytes(CREDENTIAL_BYTES),
        credential[49:] + bytes(49),
    ):
        with pytest.raises(MaskingError):
            untold.check(2, text, broken)


def test_who_is_silent_may_be_the_servers_choice() -> None:
    """On a ring the server, who knows it, could have all on both sides of a few be silent, and open
    the sum of those few. Clients that sign are all neighbours of each other."""
    sums, keys = Secure(240, 160, 0), {c: c.to_bytes(KEY_BYTES, "big") for c in range(240)}
    assert graph(keys, sums).degree < 80, "those of a simulation have few neighbours"
    whole = graph(keys, sums, whole=True)
    assert whole.degree == 239 and len(whole.around(7)) == 240
    assert whole.shamir > 239 // 2


def test_clients_that_sign_are_neighbours_of_all(homes: list[ClientHome]) -> None:
    announced(homes)
    assert all(home.masker is not None and home.masker.whole for home in homes)
