"""The record of a run that ``fedgen tune`` selected, ``selection.json``: the cost of all runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedgen.errors import FedgenError
from fedgen.privacy.events import Selection, Spend, from_json, to_json
from fedgen.privacy.ledger import spend_from_json, spend_to_json
from fedgen.storage.run_dir import RunDir


@dataclass(frozen=True)
class SelectedRun:
    """A run that was selected by a noisy score.

    event: the selection, whose cost covers a reader of the release.
    settings: number of settings among which it chose.
    spends: spend of each client in all runs together; it reveals their number.
    """

    event: Selection
    settings: int
    spends: Mapping[int, Spend]

    @property
    def spend(self) -> Spend:
        """Spend of the release."""
        return {self.event: 1}

    @property
    def facts(self) -> dict[str, Any]:
        """Public facts of the selection."""
        return {"settings": self.settings, "mean": self.event.mean, "shape": self.event.shape}

    def write(self, run_dir: RunDir) -> None:
        """Write the record into the directory of the run."""
        clients = {f"{client}": spend_to_json(spend) for client, spend in self.spends.items()}
        content = {"event": to_json(self.event), "settings": self.settings, "clients": clients}
        run_dir.write("selection", {"schema": 1, **content})


def read_selected(run_dir: RunDir) -> SelectedRun | None:
    """Return the record of a run directory; None for other runs.

    Raises:
        FedgenError: if it was altered.
    """
    content = run_dir.selection("run_dir")
    if content is None:
        return None
    try:
        event = from_json(content["event"])
        spends = {
            int(client): spend_from_json(events) for client, events in content["clients"].items()
        }
    except (ValueError, TypeError) as error:
        path = run_dir.path / "selection.json"
        raise FedgenError("run_dir", f"{path} was altered", "restore it") from error
    if not isinstance(event, Selection):
        raise FedgenError("run_dir", f"{run_dir.path}/selection.json was altered", "restore it")
    return SelectedRun(event, content["settings"], spends)
