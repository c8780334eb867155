"""The cost of a data set over all secure runs: no release is taken back."""

from __future__ import annotations

import json
import shutil
import sqlite3
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutation import kills
from PIL import Image
from tiny import Train, tiny

from fedgen import cli
from fedgen.config.compose import compose
from fedgen.errors import FedgenError, Interrupted
from fedgen.federation.client.context import LEDGER
from fedgen.federation.rounds import RunState
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import Relation, RevealedSampling, Spend, Unit
from fedgen.privacy.ledger import Ledger, died_while_responding
from fedgen.privacy.spend_db import Entry, SpendDb, composed_epsilon
from fedgen.run import train as training
from fedgen.run.setup import Setup

EVENT = GaussianDpEvent(2.0)
SECURE = [
    *tiny("dpgan_small"),
    "method=dpgan_small",
    "privacy.noise=secure",
    "privacy.target_epsilon=null",
    "privacy.noise_multiplier=2",
]


def entry(run: str, most: int = 10, data: str = "rows") -> Entry:
    kinds = Unit.RECORD, Relation.ADD_OR_REMOVE_ONE
    return Entry(run, data, "shares", f"runs/{run}", *kinds, {EVENT: most})


def anything(entry: Entry, others: object) -> None:
    """A check that every run passes."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which nothing was spent."""
    monkeypatch.setenv("FEDGEN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@kills(
    "fedgen/privacy/spend_db.py",
    "if any(count > before.get(event, 0) for event, count in recorded.items()):",
    "if False:",
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 2), max_size=12))
def test_releases_of_all_copies_of_a_run_are_counted(tmp_path: Path, turns: list[int]) -> None:
    """Each release that may leave was recorded before."""
    file, run, released = SpendDb(tmp_path / "spent.sqlite"), str(turns), 0
    file.register(entry(run, most=0, data=run), anything)
    ledgers = [0, 0, 0]
    for copy in turns:
        before, ledgers[copy] = ledgers[copy], ledgers[copy] + 1
        with suppress(FedgenError):
            file.charge(run, 0, {EVENT: before}, {EVENT: ledgers[copy]})
            released += 1
    assert file.charged(run, 0).get(EVENT, 0) == released
    assert released == len(turns) or len(set(turns)) > 1


def test_spend_never_decreases(tmp_path: Path) -> None:
    file = SpendDb(tmp_path / "spent.sqlite")
    file.register(entry("a"), anything)
    file.charge("a", 0, {}, {EVENT: 3})
    file.record_dropout("a")
    for words in (
        "DELETE FROM runs",
        "DELETE FROM charges",
        "UPDATE charges SET count = count - 1",
        "UPDATE charges SET run = 'b'",
        "DELETE FROM shown",
    ):
        opened = sqlite3.connect(file.path)
        with pytest.raises(sqlite3.IntegrityError):
            opened.execute(words)
        opened.close()


def _charge(path: Path) -> int:
    released = 0
    for count in range(30):
        with suppress(FedgenError):
            SpendDb(path).charge("a", 0, {EVENT: count}, {EVENT: count + 1})
            released += 1
    return released


@pytest.mark.slow
def test_simultaneous_charges_of_copies_are_counted_together(tmp_path: Path) -> None:
    path = tmp_path / "spent.sqlite"
    with ProcessPoolExecutor(4, mp_context=get_context("forkserver")) as pool:
        released = sum(pool.map(_charge, [path] * 4))
    assert SpendDb(path).charged("a", 0) == {EVENT: released}


def test_a_copy_cannot_continue_next_to_the_run(tmp_path: Path) -> None:
    """Also if both were opened before either had spent."""
    file = SpendDb(tmp_path / "spent.sqlite")
    ledgers = [Ledger(tmp_path / n / LEDGER, "run", 0, False, file) for n in ("run", "copy")]
    ledgers[0].charge(0, "a", 1, EVENT)
    with pytest.raises(FedgenError, match="a copy of run run is also charging"):
        ledgers[1].charge(0, "a", 1, EVENT)
    assert file.charged("run", 0) == {EVENT: 1}


@kills(
    "fedgen/privacy/spend_db.py",
    "return with_reported(self.max_spend, spends)",
    "return with_reported({}, spends)",
)
def test_an_unfinished_run_counts_with_its_whole_budget(tmp_path: Path) -> None:
    file = SpendDb(tmp_path / "spent.sqlite")
    for run in ("a", "b"):
        file.register(entry(run), anything)
    file.register(entry("no common ε", data="others"), anything)
    file.charge("a", 0, {}, {EVENT: 2})
    file.charge("a", 1, {}, {EVENT: 4})
    assert [each.spend[EVENT] for each in file.entries("rows")] == [10, 10]
    file.finish("a", {EVENT: 3})
    both = file.entries("rows")
    assert [each.spend[EVENT] for each in both] == [4, 10], "the busiest client's own word"
    expected = epsilon({EVENT: 14}, 1e-5, Relation.ADD_OR_REMOVE_ONE)
    assert composed_epsilon(both, 1e-5) == expected


@kills(
    "fedgen/privacy/spend_db.py",
    "if not is_finished and not entry.has_dropout and entry.max_spend == registered:",
    "if not is_finished and not entry.has_dropout and registered is not None:",
)
@kills(
    "fedgen/privacy/spend_db.py",
    "if not is_finished and not entry.has_dropout and entry.max_spend == registered:",
    "if is_finished or (not entry.has_dropout and entry.max_spend == registered):",
)
def test_an_extended_run_is_checked_again(tmp_path: Path) -> None:
    """Whatever process extended it: the rounds in a run directory are not locked."""
    file, checked = SpendDb(tmp_path / "spent.sqlite"), list[Entry]()

    def note(entry: Entry, others: object) -> None:
        checked.append(entry)

    for most in (10, 10, 5, 20):
        file.register(replace(entry("a", most), reserve={EVENT: 2 * most}), note)
    assert [each.spend for each in checked] == [{EVENT: 10}, {EVENT: 20}]
    [result] = file.entries("rows")
    assert (result.max_spend, result.reserve) == ({EVENT: 20}, {EVENT: 40})

    def refuse(entry: Entry, others: object) -> None:
        raise FedgenError("privacy.budget_epsilon", "it is too much", "spend less")

    with pytest.raises(FedgenError, match="too much"):
        file.register(entry("a", 30), refuse)
    # one that was over counted with less, and others may have taken the rest
    file.charge("a", 0, {}, {EVENT: 7})
    file.finish("a", {EVENT: 7})
    with pytest.raises(FedgenError, match="too much"):
        file.register(entry("a", 20), refuse)
    assert [each.spend for each in file.entries("rows")] == [{EVENT: 7}]
    file.register(entry("a", 5), note)
    assert checked[-1].spend == {EVENT: 7}, "what was spent stays spent"


@kills("fedgen/privacy/spend_db.py", '"" if self.unit is Unit.RECORD else self.partition', '""')
def test_the_cost_of_a_client_adds_up_over_the_same_records(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In other runs its records are those of many clients: there is neither a sum nor a budget."""
    clients = ["method=gs_wgan_small", *tiny("gs_wgan_small"), "partition=iid", "rounds=1"]
    clients += ["partition.clients=4", "privacy.noise=secure", "method.warm_start=0"]
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert cli.run(["train", *clients, f"seed={seed}", f"run_dir={tmp_path / name}"]) == 0
    result = spent(capsys)
    first, second, third = (run["epsilon"] for run in result["runs"])
    same, other = (each["epsilon"] for each in result["together"])
    assert max(first, second) < same <= first + second
    assert other == third
    assert cli.run(["train", *clients, "privacy.budget_epsilon=1000"]) == 2
    assert "cannot be added to this one" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["file", "file/below", "~no-such-user/there", "/proc/nowhere"])
def test_an_unusable_home_is_refused(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    there = tmp_path / place if place.startswith("file") else place
    monkeypatch.setenv("FEDGEN_HOME", str(there))
    assert cli.run(["train", *SECURE, f"run_dir={tmp_path / 'run'}"]) == 2
    assert "FEDGEN_HOME" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_damaged_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "spent.sqlite"
    path.write_text("no database, but a text that is longer than its header" * 10)
    with pytest.raises(FedgenError, match=r"spent\.sqlite.*FEDGEN_HOME"):
        SpendDb(path).entries("rows")


@kills(
    "fedgen/privacy/ledger.py",
    "            self._outside.charge(self._run, self._client, before, so_far)",
    "            pass",
)
def test_a_ledger_killed_between_its_two_charges_catches_up(tmp_path: Path) -> None:
    file, path = SpendDb(tmp_path / "spent.sqlite"), tmp_path / "0" / LEDGER
    Ledger(path, "run", 0, seeded=False).charge(0, "a", 1, EVENT)
    assert file.charged("run", 0) == {}
    Ledger(path, "run", 0, False, file, read_only=True)
    assert file.charged("run", 0) == {}
    ledger = Ledger(path, "run", 0, False, file)
    assert file.charged("run", 0) == {EVENT: 1}
    before = path.read_bytes()
    ledger.charge(1, "b", 1, EVENT)
    assert file.charged("run", 0) == {EVENT: 2}
    for less in (before, before[:-5], b""):
        path.write_bytes(less)
        with pytest.raises(FedgenError, match="lacks releases"):
            Ledger(path, "run", 0, False, file, read_only=True)
        assert path.read_bytes() == less
        with pytest.raises(FedgenError, match="lacks releases"):
            Ledger(path, "run", 0, False, file)


def spent(capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    assert cli.run(["account", "spent", "output=json"]) == 0
    result: dict = json.loads(capsys.readouterr().out)
    return result


@kills(
    "fedgen/run/data_budget.py",
    "composed_epsilon([*others, entry], delta)",
    "composed_epsilon([entry], delta)",
)
def test_runs_on_the_same_records_add_up(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In any partition; a refused run costs nothing and leaves nothing."""
    assert spent(capsys)["runs"] == []
    several = ["partition=iid", "partition.clients=3", "runtime=in_process"]
    for name, words in {"one": [], "three": several}.items():
        assert cli.run(["train", *SECURE, *words, f"run_dir={tmp_path / name}"]) == 0
    result = spent(capsys)
    assert [run["over"] for run in result["runs"]] == [True, True]
    privacy = [json.loads((tmp_path / n / "privacy.json").read_text()) for n in ("one", "three")]
    alone = [each["views"]["server"]["epsilon"] for each in privacy]
    assert [run["epsilon"] for run in result["runs"]] == pytest.approx(alone)
    [together] = result["together"]
    assert max(alone) < together["epsilon"] <= sum(alone)

    assert cli.run(["account", "spent"]) == 0
    assert "together: proven ε" in capsys.readouterr().out
    assert cli.run(["train", f"resume={tmp_path / 'three'}"]) == 0
    assert f"(2 in all): ε = {together['epsilon']:.2f}" in capsys.readouterr().out
    budget = f"privacy.budget_epsilon={together['epsilon'] + 0.01}"
    third = ["train", *SECURE, budget, f"run_dir={tmp_path / 'third'}"]
    assert cli.run(third) == 2
    assert "privacy.budget_epsilon: other runs on these data (2)" in capsys.readouterr().err
    assert not (tmp_path / "third").exists()
    assert len(spent(capsys)["runs"]) == 2
    assert cli.run([*third, f"privacy.budget_epsilon={2 * sum(alone)}"]) == 0
    # another method protects other neighbours: there is no sum
    other = ["method=gs_wgan_small", *tiny("gs_wgan_small"), *several, "privacy.noise=secure"]
    assert cli.run(["train", *other, "privacy.budget_epsilon=100", f"run_dir={home}/g"]) == 2
    assert "cannot be added to this one" in capsys.readouterr().err
    assert cli.run(["train", *SECURE, "privacy.noise=seeded", budget]) == 2
    assert "a seeded run is an experiment" in capsys.readouterr().err
    (tmp_path / "photos" / "all").mkdir(parents=True)
    for grey in range(30):
        Image.new("L", (8, 8), grey).save(tmp_path / "photos" / "all" / f"{grey}.png")
    assert cli.run(["account", "spent", "data=folder", f"data.path={tmp_path}/photos"]) == 0
    output = capsys.readouterr().out
    assert "secure runs: 0" in output
    places = ", ".join(str(tmp_path / name) for name in ("one", "three", "third"))
    assert f"secure runs on other data: {places}" in output


@kills(
    "fedgen/data/datasets.py",
    "image_digest.encode() for image_digest in sorted(self._digests)",
    "image_digest.encode() for image_digest in self._digests",
)
def test_the_same_images_have_one_account(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In another order, with other labels, or with another test split."""
    rng = np.random.default_rng(0)
    images, order = rng.integers(0, 256, (40, 1, 8, 8), dtype=np.uint8), rng.permutation(40)
    labels = np.arange(40) % 4
    files = {
        "as they were": {"train_images": images, "train_labels": labels},
        "shuffled": {"train_images": images[order], "train_labels": labels[order]},
        "renamed": {"train_images": images, "train_labels": labels[::-1]},
        "others": {"train_images": 255 - images, "train_labels": labels},
    }
    for place, (name, arrays) in enumerate(files.items()):
        tests = {"test_images": images[place : place + 4], "test_labels": labels[:4]}
        np.savez(tmp_path / f"{name}.npz", **arrays, **tests)
        words = ["data=folder", f"data.path={tmp_path}/{name}.npz", "data.classes=4"]
        command = ["train", *SECURE, *words, "rounds=1", f"run_dir={tmp_path / name}"]
        assert cli.run(command) == 0
    capsys.readouterr()
    assert cli.run(["account", "spent", *words, "output=json"]) == 0
    output = [Path(run["folder"]).name for run in json.loads(capsys.readouterr().out)["runs"]]
    assert output == ["others"]
    words[1] = f"data.path={tmp_path}/shuffled.npz"
    assert cli.run(["account", "spent", *words, "output=json"]) == 0
    output = [Path(run["folder"]).name for run in json.loads(capsys.readouterr().out)["runs"]]
    assert output == ["as they were", "shuffled", "renamed"]


@kills(
    "fedgen/data/datasets.py",
    "        test = [digest(image.tobytes()) for image in self.test_images]",
    "        test: list[str] = []",
)
def test_a_folder_with_renamed_files_has_one_account(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names decide the test split, so that other images train."""
    for place in ("before", "after"):
        for i in range(40):
            (tmp_path / place / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
            name = f"{i}.png" if place == "before" else f"renamed{i}.png"
            Image.new("L", (8, 8), 3 * i).save(tmp_path / place / "ab"[i % 2] / name)
    shared = [*SECURE, "data=folder", "data.labels=[a,b]", "data.public_rows=30", "rounds=1"]
    for place in ("before", "after"):
        words = [*shared, f"data.path={tmp_path / place}", f"run_dir={tmp_path}/run-{place}"]
        assert cli.run(["train", *words]) == 0
    assert "on these images (2 in all)" in capsys.readouterr().out
    more = [*shared, f"data.path={tmp_path / 'after'}", "privacy.budget_epsilon=0.2"]
    assert cli.run(["train", *more]) == 2
    assert "other runs on these data (2)" in capsys.readouterr().err


def test_the_account_does_not_depend_on_the_test_split(tmp_path: Path) -> None:
    """Nor on other files in the folder; also in a database of an earlier version, which stores
    less."""
    file, one = SpendDb(tmp_path / "spent.sqlite"), entry("a", data="rows")
    file.register(replace(one, full_data="rows and test"), anything)
    file.register(replace(one, run="b", full_data="rows and other test"), anything)
    file.register(replace(one, run="c", data="fewer rows", full_data="rows and test"), anything)
    file.register(replace(one, run="d", data="others", full_data="all others"), anything)
    assert [each.run for each in file.entries("rows", "rows and test")] == ["a", "b", "c"]
    assert [each.run for each in file.runs_on_same_data("b")] == ["a", "b"]
    assert [each.run for each in file.runs_on_same_data("c")] == ["a", "c"]
    with closing(sqlite3.connect(file.path)) as opened, opened:
        opened.executescript("DROP TABLE wholes; DROP TABLE shown; DROP TABLE reserved")
    assert [each.run for each in file.entries("rows", "rows and test")] == ["a", "b"]


@kills(
    "fedgen/privacy/spend_db.py",
    '"" if self.unit is Unit.RECORD else self.partition',
    'self.partition if self.unit is Unit.CLIENT else ""',
)
@kills(
    "fedgen/run/setup.py",
    "            return self.dataset.digest_of(self.shards)",
    "            return self.partition_digest",
)
def test_accounts_of_persons_or_clients_are_separate(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The owner of a record follows from its content, not from its position; runs that no sum
    counts are listed."""
    rng = np.random.default_rng(0)
    pixels, order = rng.integers(0, 256, (40, 1, 8, 8), dtype=np.uint8), np.arange(40)[::-1]
    persons = np.repeat([0, 1, 1, 1], 10)
    files = {
        "once": (pixels, persons),
        "shuffled": (pixels[order], persons[order]),
        "others": (pixels[order], persons),
    }
    tests = {
        "test_images": pixels[:4],
        "test_labels": np.zeros(4, int),
        "train_labels": np.arange(40) % 4,
    }
    shared = [*SECURE, "data=folder", "data.classes=4", "rounds=1", "runtime=in_process"]
    units = {
        "person": ["privacy.unit=person", "data.public_persons=20"],
        "client": ["privacy.unit=client", "privacy.aggregation=secure", "partition=by_writer"],
    }
    for unit, words in units.items():
        for name, (images, who) in files.items():
            file = tmp_path / f"{name}.npz"
            np.savez(file, train_images=images, train_writer=who, train_person=who, **tests)
            run = f"run_dir={tmp_path}/{unit}-{name}"
            assert cli.run(["train", *shared, *words, f"data.path={file}", run]) == 0
            output = capsys.readouterr().out
            assert ("(2 in all)" in output) == (name == "shuffled"), output
            others = {"person": {"others": 2}, "client": {"once": 3, "shuffled": 3, "others": 5}}
            more = others[unit].get(name)
            assert (f"not counted: {more} more" in output) == (more is not None), output


@kills(
    "fedgen/privacy/spend_db.py",
    "reserve = with_reported(entry.reserve, [_reserve(file, entry.run) or {}])",
    "reserve = entry.reserve",
)
@kills(
    "fedgen/privacy/ledger.py",
    "(with_sampling_revealed(spend) if revealed else spend for spend in spends)",
    "spends",
)
@kills(
    "fedgen/privacy/spend_db.py",
    "with_reported(max_spend, [(previous or {}) if was_finished else {}])",
    "max_spend",
)
@kills(
    "fedgen/privacy/spend_db.py",
    "if not is_finished and not entry.has_dropout and entry",
    "if entry",
)
def test_revealed_samples_count_without_amplification(tmp_path: Path) -> None:
    """Also those that clients charged as secret, once each."""
    file, drawn = SpendDb(tmp_path / "spent.sqlite"), PoissonSampledDpEvent(0.5, EVENT)
    kinds = Unit.CLIENT, Relation.ADD_OR_REMOVE_ONE
    one = Entry("a", "rows", "shares", "runs/a", *kinds, {drawn: 10})
    seen = RevealedSampling(0.5, EVENT)
    file.register(replace(one, reserve={seen: 12}), anything)
    file.charge("a", 0, {}, {drawn: 4})
    assert file.entries("rows")[0].spend == {drawn: 10}
    assert not file.has_dropout("a")
    file.record_dropout("a")
    assert file.has_dropout("a", reserved=False) and not file.has_dropout("b")
    assert file.entries("rows")[0].spend == {seen: 12}
    checked = list[Entry]()
    file.register(
        replace(one, max_spend={drawn: 5}, reserve={seen: 5}),
        lambda entry, others: checked.append(entry),
    )
    assert [entry.spend for entry in checked] == [{seen: 12}], "it may be above a budget now"
    assert file.entries("rows")[0].spend == {seen: 12}, "nothing is taken back"
    file.finish("a", {seen: 3})
    assert file.entries("rows")[0].spend == {seen: 4}, "it is over"
    file.finish("a", {drawn: 1})
    assert file.entries("rows")[0].spend == {seen: 4}, "and stays at that"


class Dying:
    """A database whose process may be killed before it writes a charge."""

    def __init__(self, file: SpendDb) -> None:
        self.file, self.dies = file, False

    def charged(self, run: str, client: int) -> Spend:
        return self.file.charged(run, client)

    def reserve(self, run: str, client: int) -> None:
        self.file.reserve(run, client)

    def charge(self, run: str, client: int, before: Spend, spent: Spend) -> None:
        if self.dies:
            raise SystemExit
        self.file.charge(run, client, before, spent)


@kills("fedgen/privacy/spend_db.py", ", row).rowcount == 0:", ", row).rowcount < 0:")
@kills(
    "fedgen/privacy/spend_db.py",
    'tables = ("shown", "reserved") if reserved else ("shown",)',
    'tables = ("shown",)',
)
@kills(
    "fedgen/privacy/spend_db.py",
    'file.execute("DELETE FROM reserved WHERE run = ? AND client = ?", (run, client))',
    'file.execute("DELETE FROM reserved WHERE run = ?", (run,))',
)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["responds", "dies", "dies, charged", "fails", "starts anew"]),
            st.integers(0, 1),
        ),
        max_size=10,
    )
)
def test_reservations_charge_at_least_as_much_as_marks_in_folders(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, int]]
) -> None:
    """Against the former rule, on random histories of two clients: crashes were detected by marks
    in client folders. No history has a smaller spend, and histories without crashes have the
    same."""
    folder = tmp_path_factory.mktemp("home")
    file, seen = SpendDb(folder / "spent.sqlite"), RevealedSampling(0.5, EVENT)
    drawn = PoissonSampledDpEvent(0.5, EVENT)
    kinds = Unit.CLIENT, Relation.ADD_OR_REMOVE_ONE
    one = Entry("run", "rows", "shares", "runs/a", *kinds, {drawn: 20}, reserve={seen: 20})
    file.register(one, anything)
    process = [Dying(file), Dying(file)]

    def start(client: int) -> Ledger:
        process[client].dies = False
        return Ledger(folder / str(client) / LEDGER, "run", client, False, process[client])

    ledgers, responding, died, failed = [start(0), start(1)], [False] * 2, [False] * 2, False
    for round_, (what, client) in enumerate(history):
        if what == "fails":
            file.record_dropout("run")
            failed = True
        elif what == "starts anew":
            ledgers[client] = start(client)
        else:
            died[client] |= responding[client]
            responding[client] = what == "dies"
            ledgers[client].reserve()
            if what == "dies":
                ledgers[client] = start(client)
                continue
            process[client].dies = what == "dies, charged"
            with suppress(SystemExit):
                ledgers[client].charge(round_, str(round_), 1, drawn)
            if process[client].dies:
                ledgers[client] = start(client)
        by_marks = failed or any(responding) or any(died)
        marked = [died_while_responding(folder / str(number)) for number in range(2)]
        assert marked >= [one or other for one, other in zip(responding, died, strict=True)]
        [counted] = file.entries("rows")
        assert counted.spend in ({drawn: 20}, {seen: 20})
        if by_marks:
            assert counted.spend == {seen: 20}
        elif all(what in ("responds", "starts anew") for what, _ in history):
            assert counted.spend == {drawn: 20}


def files_of(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


@kills(
    "fedgen/privacy/ledger.py",
    "if any(self._spend[event] < count for event, count in charged.items()):",
    "if False:",
)
@kills("fedgen/run/train.py", "            check_intact(run_dir, ready, name)", "            pass")
def test_outdated_copies_and_truncated_ledgers_cannot_resume(
    home: Path, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory that lacks charged rounds is refused."""

    def stop(ready: Setup, state: RunState, content: object) -> None:
        if state.rounds == 10:
            raise KeyboardInterrupt

    run, copied, cut = tmp_path / "run", tmp_path / "copied", tmp_path / "cut"
    words = ["rounds=12", "runtime.checkpoint_every=4", "sample_every=1", f"run_dir={run}"]
    with pytest.raises(Interrupted):
        training.train(compose("config", [*SECURE, *words]), watch=stop)
    shutil.copytree(run, copied)
    shutil.copytree(run, cut)
    ledger = cut / "clients" / "0" / LEDGER
    lines = ledger.read_text().splitlines(keepends=True)
    assert len(lines) == 6, "two rounds a message"
    ledger.write_text("".join(lines[:-1]))
    before = files_of(cut)
    assert cli.run(["train", f"resume={cut}"]) == 2
    assert "lacks releases that were charged" in capsys.readouterr().err
    assert files_of(cut) == before

    assert cli.run(["train", f"resume={run}"]) == 0
    before = files_of(copied)
    assert cli.run(["train", f"resume={copied}"]) == 2
    assert "lacks releases that were charged" in capsys.readouterr().err
    assert files_of(copied) == before
    [row] = spent(capsys)["runs"]
    privacy = json.loads((run / "privacy.json").read_text())
    assert row["epsilon"] == pytest.approx(privacy["views"]["server"]["epsilon"])
    assert privacy["clients"]["0"]["releases"] == 6, "rounds 9 and 10 twice"
    assert privacy["rounds"] == 10, "and so no 11 and 12"
