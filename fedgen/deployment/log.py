"""What left a site, in a file that its owner can read: a line a message.

Written before the message leaves."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from fedgen.errors import FedgenError
from fedgen.federation import messages
from fedgen.files import as_json, read_bounded
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import Relation, Spend
from fedgen.privacy.ledger import spend_from_json, spend_to_json
from fedgen.reporting.progress import bytes_in_words, epsilon_in_words

NAME = "log.jsonl"

_IN_WORDS = {
    messages.HELLO: "said which client it is",
    messages.ACCOUNT: "told what it has spent in this run",
    messages.PREPARE: "said that it is ready",
    messages.TRAIN: "said that it has trained",
    messages.ASK: "sent a noised answer",
    messages.KEYS: "announced keys for masks",
    messages.SHARES: "dealt sealed shares of its masks' secrets",
    messages.OPEN: "reported which sealed shares it could open",
    messages.AGREE: "signed who answered, and who did not",
    messages.REVEAL: "revealed shares that remove the masks from a sum",
    messages.KEEP: "said that it kept its state",
    messages.RESTORE: "said that it went back to its state",
    messages.FORGET: "said that it dropped its state",
}


class Log:
    """The log of the node that is at home in a folder."""

    def __init__(self, home: Path) -> None:
        self._path = home / NAME

    def opened(
        self, run: str, names: dict[str, str], settings: dict[str, Any], relation: Relation
    ) -> None:
        """A run that this site takes part in."""
        chosen = {"names": names, "privacy": settings["privacy"], "rounds": settings["rounds"]}
        line = {"what": "opened", "run": run, "settings": chosen, "relation": relation.value}
        self._add(line)

    def refused(self, run: str, why: str) -> None:
        """A run that the policy does not allow."""
        self._add({"what": "refused", "run": run, "why": why})

    def left(
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


_LARGEST = 2**28  # bytes of a log


def plain(text: str) -> str:
    """A text that others had a hand in, without what a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show(config: DictConfig) -> str:
    """The log in words: the last ``lines`` of it, with ε so far wherever an answer left.

    Raises:
        FedgenError: if there is none.
    """
    home = Path(config.home).expanduser()
    path = home / NAME
    if not path.exists() and (home / "lock").exists():
        return "nothing has left this node yet"
    if not path.exists():
        raise FedgenError("home", f"no node was at home in {home}", "name a node's folder")
    try:
        lines = [as_json(each) for each in read_bounded(path, _LARGEST).decode().splitlines()]
        runs = {line["run"]: line for line in lines if line["what"] == "opened"}
        words = [_words(line, runs) for line in lines[-config.lines :]]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise FedgenError("home", f"{path} was altered", "restore it") from error
    sent = sum(int(line.get("bytes", 0)) for line in lines)
    return "\n".join([*words, f"{len(lines)} lines, {bytes_in_words(sent)} were sent in all"])


def _words(line: dict[str, Any], runs: Mapping[str, dict[str, Any]]) -> str:
    place = f"{line['time']}  {line['run'][:8]}"
    if line["what"] == "refused":
        return f"{place}  refused: {plain(line['why'])}"
    if line["what"] == "opened":
        names, privacy = line["settings"]["names"], line["settings"]["privacy"]
        return (
            f"{place}  takes part: {names['method']}, target ε {privacy['target_epsilon']}, "
            f"δ {privacy['delta']:g}, noise {privacy['noise']}"
        )
    if "error" in line:
        return f"{place}  sent a code of failure ({line['error']}) to {plain(line['kind'])}"
    if "rejected" in line:
        clients = ", ".join(str(int(client)) for client in line["rejected"])
        word = "clients" if len(line["rejected"]) > 1 else "client"
        return f"{place}  rejected the signature or sealed share of {word} {clients}"
    said = f"{place}  {_IN_WORDS[line['kind']]}, {bytes_in_words(line['bytes'])}"
    if "spend" not in line:
        return said
    opened = runs[line["run"]]
    delta, relation = opened["settings"]["privacy"]["delta"], Relation(opened["relation"])
    found = epsilon(spend_from_json(line["spend"]), delta, relation)
    return f"{said}; ε so far {epsilon_in_words(found.value)}"
