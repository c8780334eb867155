"""Tables of images: read completely, or refused in one line."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutation import kills
from PIL import Image

from fedgen import cli
from fedgen.data.datasets import Dataset
from fedgen.data.folders import folder
from fedgen.data.tables import read_listing
from fedgen.errors import FedgenError
from fedgen.randomness import RandomStreams

STREAMS = RandomStreams.from_seed(0, "seeded")


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """Write 24 images of six patients at two clinics."""
    (tmp_path / "scans").mkdir()
    lines = ["path,label,client,person,split"]
    for number in range(24):
        Image.new("L", (8, 8), number).save(tmp_path / "scans" / f"{number}.png")
        label, clinic = ("ill", "well")[number % 2], ("north", "süd")[number % 6 // 3]
        split = "test" if number >= 18 else "train"
        lines.append(f"scans/{number}.png,{label},{clinic},patient {number % 6},{split}")
    table = tmp_path / "scans.csv"
    table.write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    return table


def read(table: Path) -> Dataset:
    return folder(STREAMS, None, str(table), labels=["ill", "well"])


def test_a_table_of_images(scans: Path) -> None:
    data = read(scans)
    assert (data.classes, data.shape) == (2, (1, 8, 8))
    assert sorted(data.images[:, 0, 0, 0]) == list(range(18))
    assert sorted(data.test_images[:, 0, 0, 0]) == list(range(18, 24))
    assert data.writers is not None and data.persons is not None
    for image, label, clinic, person in zip(
        data.images[:, 0, 0, 0], data.labels, data.writers, data.persons, strict=True
    ):
        assert (label, clinic, person) == (image % 2, image % 6 // 3, image % 6)


def test_the_order_of_a_table_has_no_effect(scans: Path) -> None:
    before = read(scans)
    head, *lines = scans.read_text("utf-8-sig").splitlines()
    scans.write_text("\n".join([head, *reversed(lines)]))
    after = read(scans)
    assert before.digest == after.digest
    assert np.array_equal(before.images, after.images)


def test_columns_that_are_not_named_are_not_read(scans: Path) -> None:
    lines = [",".join(line.split(",")[:2]) for line in scans.read_text("utf-8-sig").splitlines()]
    scans.write_text("\n".join(lines))
    data = read(scans)
    assert data.writers is None and data.persons is None
    assert len(data.labels) + len(data.test_labels) == 24


@pytest.mark.slow
def test_a_run_per_person_from_a_table(scans: Path, tmp_path: Path) -> None:
    words = ["method=dp_merf_small", "data=folder", f"data.path={scans}", "data.public_rows=18",
             "data.labels=[ill,well]",
             "partition=by_folder", "privacy.unit=person", "data.public_persons=6",
             "privacy.aggregation=secure", "rounds=3", "evaluation=none",
             "runtime=in_process", "privacy.noise=secure"]  # fmt: skip
    assert cli.run(["train", *words, f"run_dir={tmp_path / 'run'}"]) == 0
    packed = [f"run={tmp_path / 'run'}", f"out={tmp_path / 'a.zip'}", "registry=false"]
    assert cli.run(["release", *packed, "audit=false"]) == 0
    assert cli.run(["verify", str(tmp_path / "a.zip")]) == 0
    statement = (tmp_path / "run" / "public" / "PRIVACY.md").read_text()
    assert "all images of one person at one client together" in statement


def test_data_check_counts_the_persons(scans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.run(["data", "check", "data=folder", f"data.path={scans}", "data.labels=[ill,well]"])
        == 0
    )
    output = capsys.readouterr().out
    assert "6 persons, with 3 images each" in output
    assert "privacy.unit=person data.public_persons=6" in output


def test_a_possible_person_column_is_warned_of(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A patient in a column that is not named is not protected as a person."""
    scans.write_text(scans.read_text("utf-8-sig").replace("client,person", "client,patient"))
    words = ["data=folder", f"data.path={scans}", "data.labels=[ill,well]"]
    result = "columns that are not read: 'patient' (see client, person, split)"
    assert cli.run(["data", "check", *words]) == 0
    assert f"warning: {result}" in capsys.readouterr().out
    words += ["method=dp_merf_small", "data.public_rows=18", "rounds=2", "evaluation=none"]
    assert cli.run(["train", *words, f"run_dir={tmp_path / 'run'}"]) == 0
    assert f"warning: {result}" in capsys.readouterr().out


def test_images_without_persons_are_warned_of(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["method=dp_merf_small", "data=folder", f"data.path={scans}", "data.public_rows=18",
             "data.labels=[ill,well]",
             "rounds=2", "evaluation=none"]  # fmt: skip
    assert cli.run(["train", *words, f"run_dir={tmp_path / 'run'}"]) == 0
    assert "ε protects single images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no image"),
        ("path,label\n", "lists no image"),
        ("file,label\na.png,x\n", "no column path"),
        ("path,label\na.png\n", "line 2 has not as many fields"),
        ("path,label\na.png,x,y\n", "line 2 has not as many fields"),
        ("path,label\n/etc/hostname,x\n", "not a file below the table's folder"),
        ("path,label\na/../../b.png,x\n", "not a file below the table's folder"),
        ("path,label\n,x\n", "not a file below the table's folder"),
        ("path,label,label\na.png,x,x\n", "two columns with the same name"),
        ("path,label,split\na.png,x,dev\n", "there is no split 'dev'"),
        ("path,label,person\na.png,x,\n", "the person is empty"),
        ('path,label\n"a.png,x\n', "no readable CSV"),
        ("path,label\nabsent.png,x\n", "is not a file"),
        (f"path,label\n{'a' * 5000}.png,x\n", "is not a file|leads out"),
    ],
)
def test_invalid_tables_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text(text)
    Image.new("L", (8, 8), 3).save(tmp_path / "a.png")
    with pytest.raises(FedgenError, match=message) as result:
        folder(STREAMS, None, str(tmp_path / "list.csv"), labels=["x", "y"])
    assert len(str(result.value)) < 1000


def test_labels_are_a_setting(scans: Path) -> None:
    with pytest.raises(FedgenError, match=r"labels are public.*data.labels=\[ill,well\]"):
        folder(STREAMS, None, str(scans))


def test_an_image_listed_twice_is_refused(tmp_path: Path) -> None:
    """Under any spelling of its path; and files that are not regular are not read."""
    Image.new("L", (8, 8), 3).save(tmp_path / "a.png")
    (tmp_path / "b.png").symlink_to(tmp_path / "a.png")
    (tmp_path / "c.png").symlink_to(tmp_path / "c.png")
    os.mkfifo(tmp_path / "d.png")
    table = tmp_path / "list.csv"
    for other, result in (("a.png", "more than once"), ("./a.png", "more than once"),
                        ("b.png", "more than once"), ("c.png", "leads out|is not a file"),
                        ("d.png", "is not a file")):  # fmt: skip
        table.write_text(f"path,label\na.png,x\n{other},x\n")
        with pytest.raises(FedgenError, match=result):
            folder(STREAMS, None, str(table), labels=["x"])


def test_names_are_normalised(scans: Path) -> None:
    text = scans.read_text("utf-8-sig")
    scans.write_text(text.replace("süd,patient 3", "su\u0308d , patient 3 ", 1))
    data = read(scans)
    assert data.persons is not None and data.writers is not None
    assert (data.persons.max(), data.writers.max()) == (5, 1)


def test_naming_persons_changes_the_run_and_not_the_account(scans: Path) -> None:
    before = read(scans)
    scans.write_text(scans.read_text("utf-8-sig").replace("patient 5", "patient 4"))
    after = read(scans)
    assert before.digest != after.digest
    assert before.images_digest == after.images_digest


@kills(
    "fedgen/data/tables.py", "if table.parent.resolve() not in file.parents:", "if table is None:"
)
def test_links_out_of_the_folder_are_not_followed(scans: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.png"
    Image.new("L", (8, 8), 3).save(outside)
    home = tmp_path / "handed over"
    home.mkdir()
    (home / "a.png").symlink_to(outside)
    (home / "list.csv").write_text("path,label\na.png,x\n")
    with pytest.raises(FedgenError, match="outside the table's folder"):
        folder(STREAMS, None, str(home / "list.csv"), labels=["x"])


@given(st.binary(max_size=200))
def test_any_bytes_are_a_table_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    table = tmp_path_factory.mktemp("any") / "list.csv"
    table.write_bytes(raw)
    with pytest.raises(FedgenError):
        read_listing(table, ["x"])
        raise FedgenError("data.path", "a table after all", "")
