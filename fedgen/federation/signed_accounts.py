"""Signed accounts: what each participant vouches for in a release (``verify.py``).

A participant signs bounds on what left it, each sufficient for ε against a reader of the release:

    the first     its charges, at most: no assumption beyond its own noise
    the second    where the release depends on less than all of its messages: the events that the
                  plan of the run gives for the release, with the facts that only the coordinator
                  knows as assumptions

Published counts are functions of public facts: where cohorts are secretly sampled, the charges of
one participant would reveal how often it was sampled, so the first bound is the limit of all.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dp_accounting import NonPrivateDpEvent

from fedgen.federation.secagg.signing import Signer
from fedgen.methods.plan import Plan
from fedgen.privacy.aggregation import Secure
from fedgen.privacy.events import Spend, canonical
from fedgen.privacy.ledger import spend_to_json, with_reported
from fedgen.verify import ACCOUNT, ACCOUNTS
from fedgen.version import VERSION

_POINT = 49  # bytes of a compressed public key


@dataclass(frozen=True)
class ReleaseFacts:
    """Facts about a release that its coordinator knows.

    samples: query samples that no participant has exceeded; public.
    rounds: rounds in the release; None: the release depends on all messages of a participant.
    revealed_samples: query samples if sampled cohorts count as revealed; None: they are secret.
    stop_probability: probability that the run ends early because of what was sampled.
    """

    samples: int
    rounds: int | None = None
    revealed_samples: int | None = None
    stop_probability: float = 0.0

    def text(self) -> str:
        """Return the facts as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> ReleaseFacts:
        """Return the facts of JSON data. Raises ValueError or TypeError for invalid data."""
        facts = cls(**json.loads(text))
        counts = facts.samples, facts.rounds or 0, facts.revealed_samples or 0
        if not all(type(count) is int and 0 <= count <= 10**12 for count in counts):
            raise ValueError("not a count")
        if type(facts.stop_probability) is not float or not 0 <= facts.stop_probability <= 1:
            raise ValueError("not a probability")
        return facts

    def release_spend(self, plan: Plan) -> Spend | None:
        """Return the spend of the release by the plan; None if it depends on all messages."""
        if self.rounds is None or plan.release_event is None:
            return None
        if self.revealed_samples is None:
            return canonical(plan.release_event(self.rounds))
        assert plan.event_if_sampling_revealed is not None
        return canonical(plan.event_if_sampling_revealed(self.revealed_samples))


@dataclass(frozen=True)
class AccountTerms:
    """Facts about a run that a participant vouches for.

    run: its name.
    plan_digest: digest of its settings, as the participant received them.
    noise: mode of its noise.
    account_for_dropouts: returns charges as they count if a response was missing.
    """

    run: str
    plan_digest: str
    noise: str
    plan: Plan
    account_for_dropouts: Callable[[Spend], Spend] = lambda spend: spend

    def statement(self, clients: Iterable[int], own: Spend, facts: ReleaseFacts) -> str:
        """Return the text to sign.

        Args:
            clients: the participants that it is about.
            own: their charges; of several, the largest count of each event.

        Raises:
            ValueError: if the charges have no bound.
        """
        own = self.account_for_dropouts(own)
        if NonPrivateDpEvent() in own:
            raise ValueError("there is no bound to sign")
        planned = canonical(self.plan.server_event(facts.samples)) if facts.samples else {}
        bounds = [_bound(with_reported(planned, [own]), 0.0, [])]
        release = facts.release_spend(self.plan)
        if release is not None:
            bounds.append(_bound(release, facts.stop_probability, self._assumptions(facts)))
        sums = self.plan.aggregation
        aggregation: dict[str, Any] = {"kind": type(sums).__name__.lower()}
        if isinstance(sums, Secure):
            counts = {name: getattr(sums, name) for name in ("asked", "threshold", "colluders")}
            aggregation |= {**counts, "honest": sums.honest}
        content = {
            "format": ACCOUNT,
            "run": self.run,
            "plan": self.plan_digest,
            "fedgen": VERSION,
            "clients": _ranges(clients),
            "noise": self.noise,
            "unit": self.plan.unit.value,
            "relation": self.plan.relation.value,
            "aggregation": aggregation,
            "bounds": bounds,
        }
        return json.dumps(content, sort_keys=True)

    def _assumptions(self, facts: ReleaseFacts) -> list[str]:
        assumptions = [f"coordinator: the release is that of {facts.rounds} rounds"]
        if self.plan.is_trusted:
            assumptions.append("aggregator: its operator added the noise and revealed no message")
        elif facts.revealed_samples is None and self.plan.amplified_by["release"] is not None:
            assumptions.append("coordinator: cohorts were secretly sampled, as planned")
        return assumptions


def _bound(spend: Spend, stop_probability: float, assumptions: list[str]) -> dict[str, Any]:
    return {
        "events": spend_to_json(spend),
        "stop_probability": stop_probability,
        "assumes": assumptions,
    }


def _ranges(clients: Iterable[int]) -> list[list[int]]:
    """Return the numbers as ranges [first, last]."""
    ranges: list[list[int]] = []
    for client in sorted(clients):
        if ranges and ranges[-1][1] == client - 1:
            ranges[-1][1] = client
        else:
            ranges.append([client, client])
    return ranges


def signed(text: str, signer: Signer) -> dict[str, str]:
    """Return a text with its public key and signature, as ``verify.opened`` reads it."""
    credential = signer.sign(text.encode())
    point, signature = credential[:_POINT], credential[_POINT:]
    encoded = {"key": point, "signature": signature}
    return {
        "text": text,
        **{name: base64.b64encode(part).decode() for name, part in encoded.items()},
    }


def account_file(
    run: str, plan_digest: str, clients: int, accounts: Iterable[Mapping[str, str]]
) -> str:
    """Return the content of ``account.json``.

    Args:
        clients: number of participants.
        accounts: signed texts (``signed``).
    """
    content = {
        "format": ACCOUNTS,
        "run": run,
        "plan": plan_digest,
        "clients": clients,
        "accounts": list(accounts),
    }
    return json.dumps(content, indent=1) + "\n"
