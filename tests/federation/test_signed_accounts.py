"""What participants sign about a run, and what they refuse to sign."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from dp_accounting import NonPrivateDpEvent, SampledWithoutReplacementDpEvent
from flwr.app import Message
from mutation import kills
from tiny import SHARD, STREAMS, make

from fedgen import verify
from fedgen.federation import messages
from fedgen.federation.client.app import client_app
from fedgen.federation.client.context import ClientContext, RunTerms
from fedgen.federation.client.state_store import ClientStore
from fedgen.federation.runtimes.in_process import InProcessGrid
from fedgen.federation.secagg.signing import Signer
from fedgen.federation.signed_accounts import AccountTerms, ReleaseFacts, read_account, sign
from fedgen.methods.plan import Plan
from fedgen.privacy.events import canonical
from fedgen.privacy.ledger import Account, Ledger, spend_from_json

SIGNER = Signer(generate_private_key(SECP384R1()), None)


def plan() -> Plan:
    """Return a plan of four clients with sampled cohorts."""
    return make(noise=1.0, clients=4, routing="per_sample").plan


def terms(has_dropout: bool = False) -> AccountTerms:
    return AccountTerms("run", "00", 4, "secure", plan(), lambda: has_dropout)


def signed_bounds(account: Account, facts: ReleaseFacts, **more: bool) -> list[dict]:
    text = json.loads(terms(**more).statement([0], account, 0, facts))
    assert text["participants"] == 4 and text["clients"] == [[0, 0]]
    return list(text["bounds"])


def charged(samples: int) -> Account:
    return Account(1, samples, canonical(plan().server_event(samples)))


def test_the_first_bound_is_the_public_limit_and_the_second_the_planned_release() -> None:
    """The own count of a participant would reveal how often it was sampled."""
    facts = ReleaseFacts(18, rounds=3, stop_probability=1e-13)
    first, second = signed_bounds(charged(2), facts)
    assert spend_from_json(first["events"]) == canonical(plan().server_event(18))
    assert first["assumes"] == []
    release = plan().release_event
    assert release is not None
    assert spend_from_json(second["events"]) == canonical(release(3))
    assert any(isinstance(e, SampledWithoutReplacementDpEvent) for e in canonical(release(3)))
    assert any("secret and fair sampling" in text for text in second["assumes"])
    assert signed_bounds(charged(6), ReleaseFacts(6))[0]["assumes"] == []


@kills(
    "fedgen/federation/signed_accounts.py",
    "bounds = [_bound(with_reported(planned, [charges]), 0.0, [])]",
    "bounds = [_bound(planned, 0.0, [])]",
)
def test_charges_beyond_the_facts_of_the_coordinator_are_signed() -> None:
    [first] = signed_bounds(charged(12), ReleaseFacts(6))
    assert spend_from_json(first["events"]) == charged(12).spend


@kills("fedgen/federation/signed_accounts.py", "if last_round >= facts.rounds or too_few:",
       "if too_few:")  # fmt: skip
@kills("fedgen/federation/signed_accounts.py", "if last_round >= facts.rounds or too_few:",
       "if last_round >= facts.rounds:")  # fmt: skip
def test_a_release_of_less_than_was_sent_is_not_signed() -> None:
    """Neither of fewer rounds than the participant responded to, nor of fewer query samples."""
    for facts in (
        ReleaseFacts(18, rounds=0),
        ReleaseFacts(18, rounds=3, revealed_samples=11),
        ReleaseFacts(18, rounds=3, revealed_samples=0),
    ):
        with pytest.raises(ValueError, match="more than the coordinator states"):
            signed_bounds(charged(12), facts)
    assert len(signed_bounds(charged(12), ReleaseFacts(18, rounds=3, revealed_samples=12))) == 2


@kills("fedgen/federation/signed_accounts.py", "if release is not None and not revealed:",
       "if release is not None:")  # fmt: skip
def test_after_a_dropout_nothing_amplified_is_signed() -> None:
    facts = ReleaseFacts(18, rounds=3)
    assert len(signed_bounds(charged(6), facts, has_dropout=True)) == 1


def test_charges_without_a_bound_are_not_signed() -> None:
    with pytest.raises(ValueError, match="no bound"):
        signed_bounds(Account(1, 1, {NonPrivateDpEvent(): 1}), ReleaseFacts(1))


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"samples": -1}', '{"samples": true}', '{"samples": 1, "rounds": 2.5}',
     '{"samples": 1, "stop_probability": 2.0}', '{"samples": 1, "more": 1}'],
)  # fmt: skip
def test_invalid_facts_are_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        ReleaseFacts.parse(text)


def signed(text: str) -> str:
    return json.dumps(sign(text, SIGNER))


VALID = {"format": verify.ACCOUNT, "run": "run", "settings": "00", "clients": [[1, 1]]}


@kills("fedgen/federation/signed_accounts.py", "if facts != (run, [[client, client]], str):",
       "if False:")  # fmt: skip
@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"text": 1, "key": "", "signature": ""}',
        signed("[" * 10**5), signed("[]"), signed("{}"),
        *(signed(json.dumps({**VALID, **change})) for change in (
            {"format": verify.RELEASE}, {"run": "other"}, {"clients": [[0, 1]]},
            {"clients": [[2, 2]]}, {"settings": None}, {"settings": ["00"]},
        )),
    ],
)  # fmt: skip
def test_a_coordinator_refuses_what_is_no_account(text: str) -> None:
    """Also a text that its sender signed correctly."""
    with pytest.raises(ValueError, match="account"):
        read_account(text, "run", 1)
    assert read_account(signed(json.dumps(VALID)), "run", 1)["key"]


@kills(
    "fedgen/federation/client/app.py",
    "        raise PastRoundError  # the signed account would be too small",
    "        pass",
)
def test_a_client_responds_to_nothing_after_it_has_signed(tmp_path: Path) -> None:
    """Its account would be too small. It may sign again."""
    ledger = Ledger(tmp_path / "0" / "ledger.jsonl", "run", 0, seeded=False)
    store = ClientStore(tmp_path, in_memory=True)
    limits = RunTerms(18, signer=SIGNER, account=terms())
    context = ClientContext(0, make(noise=1.0).client, SHARD, STREAMS, store, ledger, limits)
    grid = InProcessGrid(client_app(lambda _: context), 1, timeout=60, serialize=False)
    method = make(noise=1.0)
    server = method.server.init(STREAMS)

    def reply(kind: str, server_round: int = 0) -> Message:
        query = method.server.query(server, server_round, STREAMS)
        content = messages.pack_query(server_round, query)
        if kind == messages.SIGN:
            content = messages.pack_text(ReleaseFacts(6).text())
        [answer] = grid.send_and_receive([Message(content, dst_node_id=2, message_type=kind)])
        return answer

    assert not reply(messages.ASK).has_error()
    texts = [messages.read_text(reply(messages.SIGN)) for _ in range(2)]
    assert texts[0] == texts[1], "signatures are deterministic"
    text, key = verify.read_signed(json.loads(texts[0]), verify.ACCOUNT, ())
    assert text["run"] == "run" and key.startswith("SHA256:")
    assert reply(messages.ASK, 1).has_error()
    assert ledger.releases == 1
