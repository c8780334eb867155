"""Signed accounts: bounds on the spend of participants in a release (``verify.py``).

A participant signs bounds on its releases, each sufficient for ε against a reader of the published
generator:

    the first     an upper limit on its charges: it assumes only its own noise
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

from fedgen import verify
from fedgen.federation.secagg.signing import Signer
from fedgen.methods.plan import Plan
from fedgen.privacy.aggregation import Secure
from fedgen.privacy.events import Spend, canonical, with_sampling_revealed
from fedgen.privacy.ledger import Account, spend_to_json, with_reported
from fedgen.storage.io import parse_json
from fedgen.verify import ACCOUNT, ACCOUNTS
from fedgen.version import VERSION

_POINT = 49  # bytes of a compressed public key
_TRUSTED_AGGREGATOR = "aggregator: its operator added the noise and revealed no message"


@dataclass(frozen=True)
class ReleaseFacts:
    """Facts about a release that its coordinator knows.

    samples: query samples that no participant has exceeded; public.
    rounds: rounds in the release; None: the release depends on all messages of a participant.
    revealed_samples: query samples if sampled cohorts count as revealed; None: they are secret.
    stop_probability: probability that the run ends early because of its samples.
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
        facts = cls(**parse_json(text))
        counts = [(facts.samples, 0)]
        counts += [(n, 1) for n in (facts.rounds, facts.revealed_samples) if n is not None]
        if not all(type(n) is int and least <= n <= 10**12 for n, least in counts):
            raise ValueError("a count is not an integer in range")
        if type(facts.stop_probability) is not float or not 0 <= facts.stop_probability <= 1:
            raise ValueError("stop_probability is not in [0, 1]")
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
    """Facts about a run that a participant includes in its signed account.

    run: its name.
    settings_digest: digest of its settings, as the participant received them.
    participants: their number.
    noise: mode of its noise.
    has_dropout: whether the sampled cohorts of this participant count as revealed.
    """

    run: str
    settings_digest: str
    participants: int
    noise: str
    plan: Plan
    has_dropout: Callable[[], bool] = lambda: False

    def statement(
        self, clients: Iterable[int], account: Account, last_round: int, facts: ReleaseFacts
    ) -> str:
        """Return the text to sign.

        Args:
            clients: the participants that it is about.
            account: their charges; of several, the largest count of each event.
            last_round: the last round that they responded to, from 0.

        Raises:
            ValueError: if the charges have no bound, or exceed the facts.
        """
        revealed, plan = self.has_dropout(), self.plan
        charges = with_sampling_revealed(account.spend) if revealed else account.spend
        if NonPrivateDpEvent() in charges:
            raise ValueError("the charges have no bound")
        if facts.rounds is not None:
            published = plan.queries_in(facts.rounds) * plan.samples_per_round
            too_few = facts.revealed_samples is not None and (
                facts.revealed_samples < max(1, min(account.samples, published))
            )
            if last_round >= facts.rounds or too_few:
                raise ValueError("the release contains more than the coordinator states")
        planned = canonical(plan.server_event(facts.samples)) if facts.samples else {}
        bounds = [_bound(with_reported(planned, [charges]), 0.0, [])]
        release = facts.release_spend(plan)
        if release is not None and not revealed:
            bounds.append(_bound(release, facts.stop_probability, self._assumptions(facts)))
        return self._text(clients, bounds)

    def selected_statement(self, clients: Iterable[int], spend: Spend) -> str:
        """Return the text to sign about a run that was selected among several. It omits total
        charges, which would reveal the number of runs.

        Args:
            spend: the selection.
        """
        assumes = [
            "coordinator: sampled the number of runs and the grid point of each as stated, "
            "published the run with the highest noisy score, and keeps all other runs and their "
            "number secret",
        ]
        if self.plan.is_trusted:
            assumes.append(_TRUSTED_AGGREGATOR)
        return self._text(clients, [_bound(spend, 0.0, assumes)])

    def _text(self, clients: Iterable[int], bounds: list[dict[str, Any]]) -> str:
        plan, sums = self.plan, self.plan.aggregation
        aggregation: dict[str, Any] = {"kind": type(sums).__name__.lower()}
        if isinstance(sums, Secure):
            counts = {name: getattr(sums, name) for name in ("asked", "threshold", "colluders")}
            aggregation |= {**counts, "honest": sums.honest}
        content = {
            "format": ACCOUNT,
            "run": self.run,
            "settings": self.settings_digest,
            "fedgen": VERSION,
            "clients": _ranges(clients),
            "participants": self.participants,
            "noise": self.noise,
            "unit": plan.unit.value,
            "relation": plan.relation.value,
            "aggregation": aggregation,
            "bounds": bounds,
        }
        return json.dumps(content, sort_keys=True)

    def _assumptions(self, facts: ReleaseFacts) -> list[str]:
        assumptions = [f"coordinator: the release is that of {facts.rounds} rounds"]
        if self.plan.is_trusted:
            assumptions.append(_TRUSTED_AGGREGATOR)
        else:
            assumptions.append("participants: all others added their noise to sums")
        if facts.revealed_samples is not None:
            count = f"{facts.revealed_samples:,} query samples of a participant"
            assumptions.append(f"coordinator: the release depends on at most {count}")
        elif (by := self.plan.amplified_by["release"]) is not None:
            stop = facts.stop_probability
            assumptions.append(f"coordinator: secret and fair sampling, as planned ({by})")
            assumptions.append(
                f"coordinator: sampling ended the run early with probability at most {stop:.3g}"
            )
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


def sign(text: str, signer: Signer) -> dict[str, str]:
    """Return a text with its public key and signature, as ``verify.read_signed`` reads it."""
    credential = signer.sign(text.encode())
    point, signature = credential[:_POINT], credential[_POINT:]
    encoded = {"key": point, "signature": signature}
    return {
        "text": text,
        **{name: base64.b64encode(part).decode() for name, part in encoded.items()},
    }


def read_account(text: str, run: str, client: int) -> dict[str, str]:
    """Return the signed account (``sign``) that a client of a run sent.

    Raises:
        ValueError: unless it is a signed account of this run and client; its bounds are checked by
            ``verify`` alone.
    """
    try:
        entry = parse_json(text)
        statement, _ = verify.read_signed(entry, ACCOUNT, ())
        facts = statement["run"], statement["clients"], type(statement["settings"])
    except (verify.VerificationError, *verify.MALFORMED) as error:
        raise ValueError("invalid signed account") from error
    if facts != (run, [[client, client]], str):
        raise ValueError("an account of another run or client")
    return {name: str(entry[name]) for name in ("text", "key", "signature")}


def account_file(
    run: str, settings_digest: str, clients: int, accounts: Iterable[Mapping[str, str]]
) -> str:
    """Return the content of ``account.json``.

    Args:
        clients: number of participants.
        accounts: signed texts (``sign``).
    """
    content = {
        "format": ACCOUNTS,
        "run": run,
        "settings": settings_digest,
        "clients": clients,
        "accounts": list(accounts),
    }
    return json.dumps(content, indent=1) + "\n"
