"""Selection record (``selection.json``): the event of a release that ``fedgen tune`` selected, and
the spend of clients in all runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedgen.errors import FedgenError
from fedgen.privacy.events import Selection, Spend, from_json, to_json
from fedgen.privacy.ledger import spend_from_json, spend_to_json
from fedgen.storage.run_dir import RunDir


@dataclass(frozen=True)
class SelectionRecord:
    """A run that was selected by a noisy score.

    event: event of the release.
    grid_size: number of grid points.
    grid_point: settings of the selected run, as overrides.
    client_spends: spend of each client in all runs; it reveals their number.
    """

    event: Selection
    grid_size: int
    grid_point: str
    client_spends: Mapping[int, Spend]

    @property
    def release_spend(self) -> Spend:
        """Spend of the release."""
        return {self.event: 1}

    @property
    def public_facts(self) -> dict[str, Any]:
        """Facts about the selection that may be published."""
        return {
            "grid_points": self.grid_size,
            "mean_runs": self.event.mean,
            "shape": self.event.shape,
        }

    def write(self, run_dir: RunDir) -> None:
        """Write the record into the directory of the run."""
        content = {
            "schema": 1,
            "event": to_json(self.event),
            "grid_size": self.grid_size,
            "grid_point": self.grid_point,
            "clients": {f"{c}": spend_to_json(spend) for c, spend in self.client_spends.items()},
        }
        run_dir.write("selection", content)


def read_selection_record(run_dir: RunDir) -> SelectionRecord | None:
    """Return the record of a run directory; None if the run was not selected by ``fedgen tune``.

    Raises:
        FedgenError: if it was altered.
    """
    content = run_dir.selection("run_dir")
    if content is None:
        return None
    try:
        event = from_json(content["event"])
        if not isinstance(event, Selection):
            raise ValueError("another event")
        spends = {
            int(client): spend_from_json(events) for client, events in content["clients"].items()
        }
    except (ValueError, TypeError) as error:
        path = run_dir.path / "selection.json"
        raise FedgenError("run_dir", f"{path} was altered", "restore it") from error
    return SelectionRecord(event, content["grid_size"], content["grid_point"], spends)
