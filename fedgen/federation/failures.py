"""Failures of clients as the server sees them: a kind, never a cause. The cause stays with the
client; simulations can read the files of their clients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flwr.app import Message

from fedgen.errors import FedgenError
from fedgen.federation.client.app import FAILED, REFUSED
from fedgen.federation.client.context import ERRORS, last_error
from fedgen.federation.flower_compat import (
    CLIENT_RAISED,
    MESSAGE_UNAVAILABLE,
    NODE_UNAVAILABLE,
    REPLY_UNAVAILABLE,
    UNKNOWN,
)

DEADLINE, DIED = 102, 103
"""Codes of our own grids: the client exceeded its deadline; its process died repeatedly."""

NON_DROPOUTS = ("late", "repeated", "unsigned")
"""Kinds of failure that do not reveal a sampled cohort."""

_KINDS = {
    FAILED: "failed",
    REFUSED: "refused",
    DEADLINE: "deadline",
    DIED: "died",
    CLIENT_RAISED: "raised",
    UNKNOWN: "unknown",
    MESSAGE_UNAVAILABLE: "deadline",  # Flower: the time to live of the message has passed
    REPLY_UNAVAILABLE: "deadline",
    NODE_UNAVAILABLE: "unavailable",
}

_MAX_CAUSE = 300  # letters
_MAX_NAMED = 5  # clients


@dataclass(frozen=True)
class Failure:
    """A client that was sent a message and returned no valid response, or several.

    kind: failed, refused (by the policy of a site), raised, died, deadline, unavailable, unknown;
        malformed (no release in the response, or of another shape), not finite, too long (for
        honest noise: see ``Plan.max_norm``), unplanned (a release with other noise than planned);
        for a secure sum: copied (announced a key also announced by another client), contradicted
        (rejected another client's signature or sealed share, or was rejected), wrong share
        (revealed a share inconsistent with the reconstructed secret, or dealt it); late, repeated
        (response to a message that is over); unsigned (no signed account after the last round).
    """

    kind: str
    client: int
    round: int


def failure_kind(reply: Message) -> str:
    """Return the kind of an error response."""
    return _KINDS.get(reply.error.code, f"code {reply.error.code}")


class NoResponseError(FedgenError):
    """Too few clients responded."""


def _list_clients(clients: set[int]) -> str:
    listed, remaining = sorted(clients)[:_MAX_NAMED], len(clients) - _MAX_NAMED
    word = "clients" if len(clients) > 1 else "client"
    return f"{word} {', '.join(map(str, listed))}" + (
        f" and {remaining} more" if remaining > 0 else ""
    )


@dataclass(frozen=True)
class FailureCauses:
    """Causes of failures, for clients whose files are available.

    folder: folder with one subfolder per client.
    printed: whether messages of exceptions, which may contain records, may be printed; only in
        seeded runs.
    """

    folder: Path
    printed: bool

    def describe(self, failures: list[Failure]) -> str:
        """Return the cause of one of the failures and where to read more, or an empty string."""
        for failure in failures:
            path = self.folder / str(failure.client) / ERRORS
            if failure.kind == "failed" and path.is_file():  # others write no error
                return f"{self._last(path)}(see {path}); "
        return ""

    def _last(self, path: Path) -> str:
        if (line := last_error(path)) is None:
            return ""
        text = f"{line['error']}: {line['problem']}" if self.printed else str(line["error"])
        if self.printed and "at" in line:
            text = f"{line['at']}: {text}"
        line_text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return f"{line_text[:_MAX_CAUSE]}... " if len(line_text) > _MAX_CAUSE else f"{line_text} "


def too_few(
    place: str,
    clients: int,
    failures: list[Failure],
    causes: FailureCauses,
    silent: int | None = None,
) -> NoResponseError:
    """Return the error for too few responses.

    Args:
        place: description of the exchange.
        silent: number of clients that did not respond, including earlier in the round; None: those
            of ``failures``.
        causes: causes of failures, if known.
    """
    missing = len(failures) if silent is None else silent
    by_kind: dict[str, set[int]] = {}
    for failure in failures:
        by_kind.setdefault(failure.kind, set()).add(failure.client)
    kinds = ", ".join(f"{kind}: {_list_clients(by_kind[kind])}" for kind in sorted(by_kind))
    remedy = (
        "fix it and use resume=, or start a new run without these clients (group=[...]), or with a "
        "lower runtime.min_success"
    )
    if set(by_kind) == {"failed"} and missing == clients:
        remedy = "fix it and continue with resume="
    if by_kind.keys() & {"copied", "contradicted"}:
        remedy = (
            "among clients that reject each other or announce the same key, at least one violates "
            "the protocol: compare fedgen node log at each, then start a new run without it"
        )
    if set(by_kind) == {"refused"}:
        remedy = "fedgen node log at the site gives the reason; then use resume= or start a new run"
    return NoResponseError(
        "runtime.min_success",
        f"{missing} of {clients} clients did not respond {place} ({kinds})",
        f"{causes.describe(failures)}{remedy}",
    )
