"""``fedgen debug`` compares clients, from end to end."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutation import kills
from PIL import Image

from fedgen import cli
from fedgen.data.corruption import sample_bugged_clients
from fedgen.privacy.gaussian_dp import gaussian_epsilon
from fedgen.randomness import RandomStreams

DIGITS = ["partition=iid", "partition.clients=8", "runtime.threads=1"]


def clients(place: Path) -> dict[int, dict[str, Any]]:
    result = json.loads((place / "results.json").read_text())["clients"]
    return {row["client"]: row for row in result}


@pytest.fixture(scope="module")
def rotated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("debug") / "run"
    fault = ["corruption.fraction=0.25", "corruption.fault=rotated"]
    assert cli.run(["debug", *DIGITS, *fault, f"run_dir={place}"]) == 0
    return place


def test_clients_with_a_fault_are_found_and_explained(rotated: Path) -> None:
    found = {number: row for number, row in clients(rotated).items() if row["differs"]}
    assert len(found) == 2
    for row in found.values():
        assert row["explanation"]["fault"] == "rotated by 90 degrees counterclockwise"
        assert 0.8 < row["explanation"]["share"] < 1.2 and row["p_value"] < 0.01
    width, height = Image.open(rotated / "clients.png").size
    assert width > 600 and height > 400  # a row per client
    epsilon = json.loads((rotated / "results.json").read_text())["epsilon"]
    assert 9.9 < epsilon["server"] <= 10 and epsilon["release"] == epsilon["server"]


def test_no_clean_client_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["debug", *DIGITS, f"run_dir={tmp_path / 'run'}"]) == 0
    assert not any(row["differs"] for row in clients(tmp_path / "run").values())
    assert "none of 8 clients differs" in capsys.readouterr().out


def test_a_repeated_command_resumes(
    rotated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "run"
    shutil.copytree(rotated, place)
    fault = ["corruption.fraction=0.25", "corruption.fault=rotated"]
    before = (place / "results.json").read_bytes()
    (place / "results.json").unlink()
    trained = (place / "statistics" / "results.json").stat().st_mtime_ns
    assert cli.run(["debug", *DIGITS, *fault, f"run_dir={place}"]) == 0
    assert (place / "results.json").read_bytes() == before
    assert (place / "statistics" / "results.json").stat().st_mtime_ns == trained
    assert cli.run(["debug", *DIGITS, f"run_dir={place}"]) == 2  # another experiment
    assert "run_dir" in capsys.readouterr().err
    assert (place / "results.json").read_bytes() == before


def test_a_group_of_clients_keeps_its_numbers(tmp_path: Path) -> None:
    words = [*DIGITS, "group=[7,6,5,3,2,1]", f"run_dir={tmp_path / 'run'}"]
    assert cli.run(["debug", *words]) == 0
    assert sorted(clients(tmp_path / "run")) == [1, 2, 3, 5, 6, 7]
    named = ["corruption.fraction=0.13", "corruption.fault=inverted"]
    for group, name in ((["group=[7,6,5,4,3,2]"], "part"), ([], "all")):
        assert cli.run(["debug", *DIGITS, *named, *group, f"run_dir={tmp_path / name}"]) == 0
    part, everyone = (clients(tmp_path / name) for name in ("part", "all"))
    assert [n for n in part if part[n]["differs"]] == [
        n for n in everyone if everyone[n]["differs"]
    ]


@kills("fedgen/commands/debug.py", " clients < FEWEST:", " clients < 1:")
@kills("fedgen/commands/debug.py", "if images < _MIN_COUNT * noise:", "if False:")
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["partition.clients=4"], "partition: 4 client(s) are too few"),
        (["partition=single"], "partition: 1 client(s) are too few"),
        (
            ["privacy.target_epsilon=0.05"],
            "privacy: the noise in the number of images of a client",
        ),
        (["privacy.unit=client"], "privacy: the noise is too large"),
        (["privacy.aggregation=trusted"], "privacy.aggregation: "),
        (["privacy.aggregation=secure"], "debug.set_size: 8 clients give 4 sets of 2"),
        (
            ["privacy.aggregation=secure", "partition.clients=20", "debug.set_size=1"],
            "debug.set_size: 20 clients give 20 sets of 1",
        ),
        (["privacy=none"], "privacy: adds no noise"),
        (["method.sums=1"], "method.sums: is 1, and there are 8 clients"),
        (["group=[0,1,2]"], "group: 3 client(s) are too few"),
        (["group=3"], "group"),
        (["group=[a,b]"], "group"),
        (["resume=x"], "resume"),
        (["corruption.fault=melted"], "corruption.fault"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    words: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "run"
    default = [] if words == ["partition=single"] else DIGITS
    assert cli.run(["debug", *default, *words, f"run_dir={place}"]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1
    assert not place.exists()


def test_a_foreign_folder_is_left_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert cli.run(["debug", *DIGITS, f"run_dir={tmp_path}"]) == 2
    assert "contains other files" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_the_run_can_be_sampled(rotated: Path, tmp_path: Path) -> None:
    words = [f"run={rotated / 'statistics'}", "n=20", f"out={tmp_path / 'samples.png'}"]
    assert cli.run(["sample", *words]) == 0


def test_the_contact_sheet_is_marked_as_generated(rotated: Path) -> None:
    assert (
        "trainedAlgorithmicMedia" in Image.open(rotated / "clients.png").text["XML:com.adobe.xmp"]
    )


# --- secure sums ----------------------------------------------------------------------------------

SECURE = ["partition=iid", "partition.clients=24", "privacy.aggregation=secure", "debug.set_size=4",
          "runtime.threads=1"]  # fmt: skip


@pytest.mark.slow
@kills("fedgen/commands/debug.py", 'name.count(".") < halvings', "True")
@kills("fedgen/commands/debug.py", "for depth in range(len(parts))]", "for depth in [0]]")
@pytest.mark.parametrize("halvings", [0, 1])
def test_secure_sums_of_sets_are_halved(
    halvings: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The set with the faulty client is found, and then its half: no sum is of one client. Clients
    of a halved set are charged for two sums."""
    place = tmp_path / "run"
    fault = ["corruption.fraction=0.04", "corruption.fault=inverted", f"debug.halvings={halvings}"]
    assert cli.run(["debug", *SECURE, *fault, f"run_dir={place}"]) == 0
    output = capsys.readouterr().out
    streams = RandomStreams.from_seed(0, "seeded").at("data")
    [faulty] = np.flatnonzero(sample_bugged_clients(24, 0.04, streams))
    results = json.loads((place / "results.json").read_text())
    sets = [row["clients"] for row in results["clients"]]
    assert sorted(itertools.chain(*sets)) == list(range(24))
    assert sorted(map(len, sets)) == ([2, 2] * halvings + [4] * (6 - halvings))
    found = [row for row in results["clients"] if row["differs"]]
    assert [faulty in row["clients"] for row in found] == [True]
    assert found[0]["explanation"]["share"] == pytest.approx(1 / (4 - 2 * halvings), abs=0.15)
    one = json.loads((place / "set-0" / "results.json").read_text())["epsilon"]["server"]
    assert 9.9 < one <= 10
    if halvings:  # two Gaussian releases with the noise of one at this ε
        noise = json.loads((place / "set-0" / "privacy.json").read_text())["noise_multiplier"]
        two = gaussian_epsilon(math.sqrt(2) / noise, 1e-5)
        assert results["epsilon"]["server"] == pytest.approx(two, rel=0.01)
        assert "for the clients of 2 sums" in output
    else:
        assert results["epsilon"]["server"] == pytest.approx(one)
    before = (place / "results.json").read_bytes()
    assert cli.run(["debug", *SECURE, *fault, f"run_dir={place}"]) == 0
    assert (place / "results.json").read_bytes() == before
