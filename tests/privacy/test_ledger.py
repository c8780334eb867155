"""Ledgers: append-only, never forgetting, never counting twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, SampledWithoutReplacementDpEvent
from hypothesis import given
from hypothesis import strategies as st

from fedgen.errors import FedgenError
from fedgen.privacy.events import repeat
from fedgen.privacy.ledger import Ledger, larger, spends_from_json, spends_to_json

EVENT = repeat(SampledWithoutReplacementDpEvent(10, 1, GaussianDpEvent(1.5)), 8)


def ledger(path: Path, seeded: bool = True, run: str = "r", client: int = 3) -> Ledger:
    return Ledger(path / "ledger.jsonl", run, client, seeded)


def test_a_charge_is_on_disk_at_once(tmp_path: Path) -> None:
    ledger(tmp_path).charge(0, 8, EVENT)
    again = ledger(tmp_path)
    assert sum(again.spend().values()) == 8
    assert (again.releases, again.rows) == (1, 8)


def test_a_repeated_round_is_charged_once_if_seeded_and_again_if_secure(tmp_path: Path) -> None:
    for seeded, expected in ((True, 1), (False, 2)):
        place = tmp_path / str(seeded)
        ledger(place, seeded).charge(4, 8, EVENT)
        resumed = ledger(place, seeded)
        resumed.charge(4, 8, EVENT)
        assert resumed.releases == expected
        assert ledger(place, seeded).spend() == resumed.spend()


def test_a_seeded_ledger_can_be_rewound(tmp_path: Path) -> None:
    """Later rounds stay on file, and count when the run comes to them again."""
    written = ledger(tmp_path)
    for server_round in range(4):
        written.charge(server_round, 8, EVENT)
    file = (tmp_path / "ledger.jsonl").read_text()
    resumed = ledger(tmp_path)
    resumed.rewind(2)
    assert (resumed.releases, resumed.rows) == (2, 16)
    assert resumed.is_repeat(3)
    for server_round in range(2, 5):
        resumed.charge(server_round, 8, EVENT)
        assert resumed.releases == server_round + 1
    assert (tmp_path / "ledger.jsonl").read_text().startswith(file)
    assert ledger(tmp_path).spend() == resumed.spend()


def test_a_secure_ledger_cannot(tmp_path: Path) -> None:
    written = ledger(tmp_path, seeded=False)
    written.charge(0, 8, EVENT)
    written.rewind(0)
    assert written.releases == 1


def test_a_torn_last_line_is_a_charge_that_never_was(tmp_path: Path) -> None:
    ledger(tmp_path).charge(0, 8, EVENT)
    file = tmp_path / "ledger.jsonl"
    whole = file.read_text()
    for cut in range(1, 20):
        file.write_text(whole + whole.splitlines()[1][:-cut])
        found = ledger(tmp_path)
        assert found.releases == 1
        found.charge(1, 8, EVENT)
        assert ledger(tmp_path).releases == 2
        file.write_text(whole)


@pytest.mark.parametrize("other", [{"run": "s"}, {"client": 4}])
def test_another_runs_or_clients_ledger_is_refused(tmp_path: Path, other: dict) -> None:
    ledger(tmp_path).charge(0, 8, EVENT)
    with pytest.raises(FedgenError, match="belongs to another run or client"):
        ledger(tmp_path, **other)


def test_a_broken_file_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    ledger(tmp_path).charge(0, 8, EVENT)
    file = tmp_path / "ledger.jsonl"
    broken = file.read_bytes().replace(b"gaussian", b"gauss\xff\xff") + b"torn"
    file.write_bytes(broken)
    with pytest.raises(FedgenError, match="is not a ledger any more"):
        ledger(tmp_path)
    assert file.read_bytes() == broken


def test_a_broken_line_is_refused(tmp_path: Path) -> None:
    ledger(tmp_path).charge(0, 8, EVENT)
    file = tmp_path / "ledger.jsonl"
    file.write_text(file.read_text().replace("gaussian", "gausian"))
    with pytest.raises(FedgenError, match="is not a ledger any more"):
        ledger(tmp_path)


spends = st.dictionaries(st.floats(0.5, 9).map(GaussianDpEvent), st.integers(1, 99), max_size=3)


@given(st.dictionaries(st.integers(0, 50), spends, max_size=4))
def test_json_keeps_spends(given_spends: dict) -> None:
    assert spends_from_json(spends_to_json(given_spends)) == given_spends


@given(spends, spends)
def test_the_larger_count_counts(mine: dict, theirs: dict) -> None:
    found = larger(mine, theirs)
    assert found == larger(theirs, mine)
    assert all(found[event] >= count for s in (mine, theirs) for event, count in s.items())
