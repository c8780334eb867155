"""Ledgers: append-only, complete, without double counting."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, SampledWithoutReplacementDpEvent
from hypothesis import given
from hypothesis import strategies as st
from mutation import kills

from fedgen.errors import FedgenError
from fedgen.privacy.events import repeat
from fedgen.privacy.ledger import Ledger, elementwise_max, spend_from_json, spend_to_json

EVENT = repeat(SampledWithoutReplacementDpEvent(10, 1, GaussianDpEvent(1.5)), 8)


def ledger(path: Path, seeded: bool = True, run: str = "r", client: int = 3) -> Ledger:
    return Ledger(path / "ledger.jsonl", run, client, seeded)


@kills(
    "fedgen/privacy/ledger.py",
    "                self._record(int(entry",
    "                entry or self._record(int(entry",
)
def test_a_charge_is_on_disk_at_once(tmp_path: Path) -> None:
    ledger(tmp_path).charge(0, "q", 8, EVENT)
    again = ledger(tmp_path)
    assert sum(again.account().spend.values()) == 8
    assert (again.releases, again.rows) == (1, 8)


def test_a_repeated_round_is_charged_once_if_seeded_and_again_if_secure(tmp_path: Path) -> None:
    for seeded, expected in ((True, 1), (False, 2)):
        place = tmp_path / str(seeded)
        ledger(place, seeded).charge(4, "q", 8, EVENT)
        resumed = ledger(place, seeded)
        resumed.charge(4, "q", 8, EVENT)
        assert resumed.releases == expected
        assert ledger(place, seeded).account() == resumed.account()


def test_another_query_in_a_round_is_charged_again(tmp_path: Path) -> None:
    mine = ledger(tmp_path)
    for asked, releases, second in (
        ("a", 1, False),
        ("b", 2, True),
        ("a", 2, False),
        ("b", 2, True),
    ):
        assert mine.is_second_query(0, asked) == second
        mine.charge(0, asked, 8, EVENT)
        assert mine.releases == releases
        mine = ledger(tmp_path)


def test_several_processes_share_a_ledger(tmp_path: Path) -> None:
    """Each sees the charges of others before it handles a message."""
    first, second = ledger(tmp_path), ledger(tmp_path)
    for server_round in range(6):
        mine = (first, second)[server_round % 2]
        with mine.locked():
            assert mine.releases == server_round
            mine.charge(server_round, "q", 8, EVENT)
            assert mine.is_repeated(server_round, "q")
    assert ledger(tmp_path).account() == second.account()


def test_two_handlers_of_one_client_take_turns(tmp_path: Path) -> None:
    order: list[str] = []
    mine, other = ledger(tmp_path), ledger(tmp_path)

    def late() -> None:
        with other.locked():
            order.append("late")

    with mine.locked():
        thread = threading.Thread(target=late)
        thread.start()
        time.sleep(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "late"]


def test_a_torn_last_line_is_not_a_charge(tmp_path: Path) -> None:
    ledger(tmp_path).charge(0, "q", 8, EVENT)
    file = tmp_path / "ledger.jsonl"
    whole = file.read_text()
    for cut in range(1, 20):
        file.write_text(whole + whole.splitlines()[1][:-cut])
        result = ledger(tmp_path)
        assert result.releases == 1
        result.charge(1, "q", 8, EVENT)
        assert ledger(tmp_path).releases == 2
        file.write_text(whole)


@pytest.mark.parametrize("other", [{"run": "s"}, {"client": 4}])
def test_a_ledger_of_another_run_or_client_is_refused(tmp_path: Path, other: dict) -> None:
    ledger(tmp_path).charge(0, "q", 8, EVENT)
    with pytest.raises(FedgenError, match="belongs to a different run or client"):
        ledger(tmp_path, **other)


def test_a_broken_file_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    ledger(tmp_path).charge(0, "q", 8, EVENT)
    file = tmp_path / "ledger.jsonl"
    broken = file.read_bytes().replace(b"gaussian", b"gauss\xff\xff") + b"torn"
    file.write_bytes(broken)
    with pytest.raises(FedgenError, match="was altered"):
        ledger(tmp_path)
    assert file.read_bytes() == broken


@pytest.mark.parametrize("harm", ["change", "leave out", "swap", "repeat"])
def test_an_altered_history_is_refused(tmp_path: Path, harm: str) -> None:
    written = ledger(tmp_path)
    for server_round in range(4):
        written.charge(server_round, "q", 8, EVENT)
    file = tmp_path / "ledger.jsonl"
    lines = file.read_text().splitlines()
    if harm == "change":
        lines[2] = lines[2].replace('"rows": 8', '"rows": 7')
    elif harm == "leave out":
        del lines[2]
    elif harm == "swap":
        lines[2], lines[3] = lines[3], lines[2]
    else:
        lines.insert(2, lines[2])
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(FedgenError, match="was altered"):
        ledger(tmp_path)


def test_a_broken_line_is_refused(tmp_path: Path) -> None:
    ledger(tmp_path).charge(0, "q", 8, EVENT)
    file = tmp_path / "ledger.jsonl"
    file.write_text(file.read_text().replace("gaussian", "gausian"))
    with pytest.raises(FedgenError, match="was altered"):
        ledger(tmp_path)


spends = st.dictionaries(st.floats(0.5, 9).map(GaussianDpEvent), st.integers(1, 99), max_size=3)


@given(spends)
def test_json_keeps_spends(given_spend: dict) -> None:
    assert spend_from_json(spend_to_json(given_spend)) == given_spend


@given(spends, spends)
def test_the_larger_count_counts(mine: dict, theirs: dict) -> None:
    result = elementwise_max(mine, theirs)
    assert result == elementwise_max(theirs, mine)
    assert all(result[event] >= count for s in (mine, theirs) for event, count in s.items())
