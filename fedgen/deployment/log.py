"""Log the outgoing messages of a site in a file for its owner, one line per message, written before
the message is sent."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from fedgen.config.schema import target_of
from fedgen.errors import FedgenError
from fedgen.federation import messages
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import Relation, Spend
from fedgen.privacy.ledger import spend_from_json, spend_to_json
from fedgen.reporting.progress import format_bytes, format_epsilon
from fedgen.storage.io import parse_json, read_bounded

NAME = "log.jsonl"

_TEXTS = {
    messages.HELLO: "reported its client number",
    messages.ACCOUNT: "reported its spend in this run",
    messages.SIGN: "signed an account of its spend in this run, for readers of the release",
    messages.PREPARE: "reported that it is ready",
    messages.TRAIN: "reported that it has trained",
    messages.ASK: "sent a noised response",
    messages.KEYS: "announced keys for masks",
    messages.SHARES: "sent sealed shares of the secrets of its masks",
    messages.OPEN: "reported which sealed shares it could open",
    messages.AGREE: "signed the list of responders",
    messages.REVEAL: "revealed shares that remove the masks from a sum",
    messages.KEEP: "confirmed that its state is stored",
    messages.RESTORE: "restored a stored state",
    messages.FORGET: "deleted its state",
}


class Log:
    """The log of a node with this home folder."""

    def __init__(self, home: Path) -> None:
        self._path = home / NAME

    def run_opened(
        self, run: str, names: dict[str, str], settings: dict[str, Any], relation: Relation
    ) -> None:
        """Log a run in which this site takes part."""
        logged_settings = {
            "names": names,
            "privacy": settings["privacy"],
            "rounds": settings["rounds"],
        }
        line = {
            "what": "opened",
            "run": run,
            "settings": logged_settings,
            "relation": relation.value,
        }
        self._add(line)

    def run_refused(self, run: str, why: str) -> None:
        """Log a run that the policy refuses."""
        self._add({"what": "refused", "run": run, "why": why})

    def response_sent(
        self,
        run: str,
        kind: str,
        size: int,
        spend: Spend,
        code: int | None,
        rejected: Collection[int] = (),
    ) -> None:
        """Log an outgoing message.

        Args:
            spend: for a response, privacy events charged to the run so far.
            rejected: clients whose signatures or sealed shares this node rejects.
        """
        line: dict[str, Any] = {"what": "left", "run": run, "kind": kind, "bytes": size}
        if spend:
            line["spend"] = spend_to_json(spend)
        if rejected:
            line["rejected"] = sorted(rejected)
        self._add(line if code is None else {**line, "error": code})

    def _add(self, line: dict[str, Any]) -> None:
        stamped = {"time": time.strftime("%Y-%m-%d %H:%M:%S"), **line}
        with self._path.open("a") as file:
            file.write(json.dumps(stamped) + "\n")


_LARGEST = 2**28  # limit on the log in bytes


def plain(text: str) -> str:
    """Return untrusted text without control characters for terminals."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show(config: DictConfig) -> str:
    """Return the last ``lines`` of the log as text, with ε so far for each response.

    Raises:
        FedgenError: if there is no log.
    """
    home = Path(config.home).expanduser()
    path = home / NAME
    if not path.exists() and (home / "lock").exists():
        return "this node has sent nothing yet"
    if not path.exists():
        raise FedgenError("home", f"no node has used {home}", "give the folder of a node")
    try:
        lines = [parse_json(line) for line in read_bounded(path, _LARGEST).decode().splitlines()]
        runs = {line["run"]: line for line in lines if line["what"] == "opened"}
        words = [_format(line, runs) for line in lines[-config.lines :]]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise FedgenError("home", f"{path} was altered", "restore it") from error
    sent = sum(int(line.get("bytes", 0)) for line in lines)
    return "\n".join([*words, f"{len(lines)} lines, {format_bytes(sent)} were sent in all"])


def _describe_target(privacy: Mapping[str, Any]) -> str:
    if (name := target_of(privacy)) is None:
        return f"noise multiplier {privacy['noise_multiplier']}"
    return f"{name.replace('_', ' ').replace('epsilon', 'ε')} {privacy[name]}"


def _format(line: dict[str, Any], runs: Mapping[str, dict[str, Any]]) -> str:
    place = f"{line['time']}  {line['run'][:8]}"
    if line["what"] == "refused":
        return f"{place}  refused: {plain(line['why'])}"
    if line["what"] == "opened":
        names, privacy = line["settings"]["names"], line["settings"]["privacy"]
        return (
            f"{place}  accepted: {names['method']}, {_describe_target(privacy)}, "
            f"δ {privacy['delta']:g}, noise {privacy['noise']}"
        )
    if "error" in line:
        return f"{place}  sent a code of failure ({line['error']}) to {plain(line['kind'])}"
    if "rejected" in line:
        clients = ", ".join(str(int(client)) for client in line["rejected"])
        word = "clients" if len(line["rejected"]) > 1 else "client"
        return f"{place}  rejected the signature or sealed share of {word} {clients}"
    text = f"{place}  {_TEXTS[line['kind']]}, {format_bytes(line['bytes'])}"
    if "spend" not in line:
        return text
    opened = runs[line["run"]]
    delta, relation = opened["settings"]["privacy"]["delta"], Relation(opened["relation"])
    spent_epsilon = epsilon(spend_from_json(line["spend"]), delta, relation)
    return f"{text}; ε so far {format_epsilon(spent_epsilon.value)}"
