"""How a client fails to answer, as the server sees it: a kind, never a cause. The cause stays with
the client; whoever simulates clients has their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flwr.app import Message

from fedgen.errors import FedgenError
from fedgen.federation.client_app import ERRORS, FAILED, REFUSED, last_error
from fedgen.federation.flower_compat import (
    CLIENT_RAISED,
    MESSAGE_UNAVAILABLE,
    NODE_UNAVAILABLE,
    REPLY_UNAVAILABLE,
    UNKNOWN,
)

DEADLINE, DIED = 102, 103
"""Codes of our own grids: the client did not answer in time; its process died, again and again."""

DROPPED = ("late", "repeated")

_KINDS = {
    FAILED: "failed",
    REFUSED: "refused",
    DEADLINE: "deadline",
    DIED: "died",
    CLIENT_RAISED: "raised",
    UNKNOWN: "unknown",
    MESSAGE_UNAVAILABLE: "deadline",  # Flower's: the message outlived its time to live
    REPLY_UNAVAILABLE: "deadline",
    NODE_UNAVAILABLE: "unavailable",
}

_LONGEST_CAUSE = 300  # letters
_MOST_NAMED = 5  # clients


@dataclass(frozen=True)
class Failure:
    """A client that was sent a message and did not answer it well, or not once.

    kind: failed, refused (by a site's policy), raised, died, deadline, unavailable, unknown;
        malformed (no release in the reply, or not of the shape that was asked for), not finite, too
        long (for honest noise: see ``Plan.longest``), unplanned (a release of other noise than was
        planned); for a secure sum: copied (announced a key also announced by another client),
        contradicted (rejected another client's signature or sealed share, or was rejected), wrong
        share (revealed a share inconsistent with the reconstructed secret, or dealt it); late,
        repeated (a reply to a message that is over: ``DROPPED``).
    """

    kind: str
    client: int
    round: int


def kind_of(reply: Message) -> str:
    """What an error reply says."""
    return _KINDS.get(reply.error.code, f"code {reply.error.code}")


class UnansweredError(FedgenError):
    """Too few clients answered."""


def _named(clients: set[int]) -> str:
    shown, more = sorted(clients)[:_MOST_NAMED], len(clients) - _MOST_NAMED
    word = "clients" if len(clients) > 1 else "client"
    return f"{word} {', '.join(map(str, shown))}" + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Causes:
    """What went wrong inside of clients, where their files are at hand.

    folder: of the clients, each with one of its own. told: whether what an exception says may be
        printed, which may be a row: in experiments alone.
    """

    folder: Path
    told: bool

    def of(self, failures: list[Failure]) -> str:
        """The cause of one of the failures and where to read more, or nothing."""
        for failure in failures:
            path = self.folder / str(failure.client) / ERRORS
            if failure.kind == "failed" and path.is_file():  # else it wrote nothing of this
                return f"{self._last(path)}(see {path}); "
        return ""

    def _last(self, path: Path) -> str:
        if (line := last_error(path)) is None:
            return ""
        text = f"{line['error']}: {line['problem']}" if self.told else str(line["error"])
        if self.told and "at" in line:
            text = f"{line['at']}: {text}"
        words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return f"{words[:_LONGEST_CAUSE]}... " if len(words) > _LONGEST_CAUSE else f"{words} "


def too_few(
    place: str, asked: int, failures: list[Failure], causes: Causes, silent: int | None = None
) -> UnansweredError:
    """The error of an exchange that too few clients answered.

    Args:
        place: what they were asked, in words.
        silent: how many did not answer, some of them earlier in the round; None: those of
            ``failures``.
        causes: of failures, as far as they are known.
    """
    missing = len(failures) if silent is None else silent
    of_kind: dict[str, set[int]] = {}
    for failure in failures:
        of_kind.setdefault(failure.kind, set()).add(failure.client)
    kinds = ", ".join(f"{kind}: {_named(of_kind[kind])}" for kind in sorted(of_kind))
    remedy = "mend it and try resume=, or start anew with a lower runtime.min_success"
    if set(of_kind) == {"failed"} and missing == asked:
        remedy = "mend it and go on with resume="
    if of_kind.keys() & {"copied", "contradicted"}:
        remedy = (
            "of clients that reject each other, or announce the same key, at least one violates "
            "the protocol: compare fedgen node log at each, then start a new run without it"
        )
    if set(of_kind) == {"refused"}:
        remedy = "fedgen node log at a site says why; then resume=, or start anew"
    return UnansweredError(
        "runtime.min_success",
        f"{missing} of {asked} clients did not answer {place} ({kinds})",
        f"{causes.of(failures)}{remedy}",
    )
