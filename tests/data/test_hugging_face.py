"""Data sets of the ``datasets`` library: images and labels are read as they were written."""

from __future__ import annotations

import csv
import io
import shutil
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from tiny import STREAMS, Train, tiny

from fedgen import cli
from fedgen.data.folders import folder
from fedgen.data.hugging_face import hugging_face
from fedgen.errors import FedgenError
from fedgen.reporting.parquet import write_parquet

NAMES = ["cat", "dog"]
ROWS = 60


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def made(rows: int = ROWS, channels: int = 3) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (rows, channels, 16, 16), dtype=np.uint8)
    return images, np.arange(rows) % 2


def written(place: Path, **more: list[Any]) -> Path:
    """Write Parquet files of two splits, with additional columns."""
    place.mkdir()
    images, labels = made()
    for split in ("train", "test"):
        file = place / f"{split}-00000-of-00001.parquet"
        write_parquet(images, labels.tolist(), NAMES, file)
        if split == "train" and more:
            result = datasets.Dataset.from_parquet(str(file), cache_dir=str(place.parent / "made"))
            for name, values in more.items():
                result = result.add_column(name, values)
            result.to_parquet(str(file))
    return place


def test_images_are_read_as_they_were_written(tmp_path: Path) -> None:
    persons = [f"p{n // 3}" for n in range(ROWS)]
    place = written(tmp_path / "set", hospital=["south", "north"] * (ROWS // 2), who=persons)
    result = hugging_face(str(place), client="hospital", person="who")
    images, labels = made()
    assert (result.images == images).all() and (result.labels == labels).all()
    assert (result.test_images == images).all() and (result.test_labels == labels).all()
    assert result.classes == 2
    assert result.writers is not None and result.writers.tolist() == [1, 0] * (ROWS // 2)
    assert result.persons is not None and len(set(result.persons.tolist())) == ROWS // 3
    assert all(len(set(result.persons[n : n + 3].tolist())) == 1 for n in range(0, ROWS, 3))
    copied = [each for each in (tmp_path / "cache").rglob("*") if each.stat().st_size]
    assert not copied, "private rows stay where they are"


def test_no_test_split_is_sampled(tmp_path: Path) -> None:
    """By position, one record less would move others between the splits."""
    place = written(tmp_path / "set")
    (place / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(FedgenError, match="needs splits train and test, but has train; split it"):
        hugging_face(str(place))


@pytest.mark.parametrize("name", ["validation.parquet", "data/test/0.parquet"])
def test_splits_are_named_as_on_the_hub(name: str, tmp_path: Path) -> None:
    place = written(tmp_path / "set")
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    (place / "test-00000-of-00001.parquet").rename(place / name)
    result = hugging_face(str(place))
    assert len(result.labels) == len(result.test_labels) == ROWS


def test_folders_of_labels_with_a_table(tmp_path: Path) -> None:
    """``imagefolder`` has the same images as ``data=folder``, resized to one size."""
    images, labels = made()
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        for split in ("train", "test"):
            file = tmp_path / "set" / split / NAMES[label] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.transpose(1, 2, 0)).resize((16 + number, 16 + number)).save(file)
    result = hugging_face(str(tmp_path / "set"), size=8, channels=1)
    assert result.shape == (1, 8, 8) and result.classes == 2
    with pytest.raises(FedgenError, match="square and of one size"):
        hugging_face(str(tmp_path / "set"))


def pictures(place: Path, rows: int, changed: int | None = None) -> Path:
    """Write an ``imagefolder`` of 3 labels, in which one image may have moved from the first label
    to the last."""
    images, _ = made(rows)
    for number, image in enumerate(images):
        label = "abc"[number * 3 // rows] if number != changed else "c"
        for split in ("train", "test"):
            file = place / split / label / f"{number:03}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.transpose(1, 2, 0)).save(file)
    return place


def test_changing_a_label_reassigns_no_other_image(tmp_path: Path) -> None:
    """The library sorts an image folder by label."""
    before = hugging_face(str(pictures(tmp_path / "before", 30)))
    after = hugging_face(str(pictures(tmp_path / "after", 30, changed=3)))
    assert not before.example_keys.moves
    assert (before.images == after.images).all()
    assert (before.labels != after.labels).sum() == 1
    for split in ("train", "test"):
        for image in (tmp_path / "after" / split / "b").iterdir():
            image.unlink()
    assert hugging_face(str(tmp_path / "after")).names == ("a", "b", "c")
    nested = pictures(tmp_path / "deeper" / "images", 30).parent
    assert hugging_face(str(nested)).names == ("a", "b", "c")


def test_names_that_cannot_name_folders_are_not_published(tmp_path: Path) -> None:
    """A generator with such names could not be loaded."""
    images, labels = made()
    (tmp_path / "set").mkdir()
    for split in ("train", "test"):
        file = tmp_path / "set" / f"{split}.parquet"
        write_parquet(images, labels.tolist(), ["cat/dog", "bird"], file)
    with pytest.raises(FedgenError, match=r"data\.names: .*not valid folder names"):
        hugging_face(str(tmp_path / "set"))
    assert hugging_face(str(tmp_path / "set"), names=False).names is None


def test_positions_in_a_sorted_data_set_are_not_fixed(tmp_path: Path) -> None:
    images, _ = made()
    for split in ("train", "test"):
        (tmp_path / "set").mkdir(exist_ok=True)
        file = tmp_path / "set" / f"{split}.parquet"
        write_parquet(images, [0] * 30 + [1] * 30, NAMES, file)
    assert hugging_face(str(tmp_path / "set")).example_keys.moves
    assert not hugging_face(str(written(tmp_path / "mixed"))).example_keys.moves


@pytest.mark.parametrize("labels", [[0, 5, 10], [10, 5, 0]])
def test_integer_labels_are_sorted_as_numbers(labels: list[int], tmp_path: Path) -> None:
    place = written(tmp_path / "set", code=[[0, 5, 10][n % 3] for n in range(ROWS)])
    shutil.copy(place / "train-00000-of-00001.parquet", place / "test-00000-of-00001.parquet")
    result = hugging_face(str(place), label="code", labels=labels)  # type: ignore[arg-type]
    assert result.labels.tolist() == [labels.index([0, 5, 10][n % 3]) for n in range(ROWS)]


@pytest.mark.parametrize("kind", ["struct", "bytes alone", "column"])
def test_images_without_the_schema_of_the_library(kind: str, tmp_path: Path) -> None:
    images, labels = made()
    files = []
    for image in images:
        out = io.BytesIO()
        Image.fromarray(image.transpose(1, 2, 0)).save(out, "png")
        files.append(out.getvalue())
    cells: list[Any] = files
    if kind != "column":
        cells = [{"bytes": each} for each in files]
    if kind == "struct":
        cells = [each | {"path": "x.png"} for each in cells]
    table = pyarrow.table({"image": cells, "label": labels.tolist()})
    (tmp_path / "set").mkdir()
    for split in ("train", "test"):
        pyarrow.parquet.write_table(table, tmp_path / "set" / f"{split}.parquet")
    result = hugging_face(str(tmp_path / "set"), labels=NAMES)
    assert (result.images == images).all()
    with pytest.raises(FedgenError, match=r"data\.image: .* contains no images; name one of image"):
        hugging_face(str(tmp_path / "set"), image="label", label="label", labels=NAMES)


def test_labels_in_a_given_order(tmp_path: Path) -> None:
    place = written(tmp_path / "set")
    assert (hugging_face(str(place), labels=["dog", "cat"]).labels == 1 - made()[1]).all()
    more = hugging_face(str(place), labels=["bird", "cat", "dog"])
    assert more.classes == 3 and (more.labels == made()[1] + 1).all()
    with pytest.raises(FedgenError, match=r"data\.labels: lacks labels of the data: cat"):
        hugging_face(str(place), labels=["dog"])


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"path": None}, r"data\.path: is not set"),
    ({"path": "missing/nothing"}, r"data\.path: .*cannot be read"),
    ({"image": "picture"}, r"data\.image: .*no column 'picture'; name one of image, label"),
    ({"image": "label"}, r"data\.image: the column 'label' .*no images"),
    ({"client": "site"}, r"data\.client: .*no column 'site'"),
    ({"label": "note"}, r"data\.labels: is not set"),
    ({"label": "note", "labels": NAMES}, r"data\.labels: lacks labels of the data: hm"),
]


@pytest.mark.parametrize("changed, message", MISTAKES, ids=lambda v: str(v)[:40])
def test_invalid_settings_are_one_line(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    place = written(tmp_path / "set", note=["hm"] * ROWS)
    with pytest.raises(FedgenError, match=message) as raised:
        hugging_face(**({"path": str(place)} | changed))
    assert "\n" not in str(raised.value)


def test_code_in_a_data_set_is_not_run(tmp_path: Path) -> None:
    place = tmp_path / "set"
    place.mkdir()
    (place / "set.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')")
    with pytest.raises(FedgenError, match=r"data\.path"):
        hugging_face(str(place))
    assert not (tmp_path / "owned").exists() and "set" not in sys.modules


@pytest.mark.parametrize("named", ["image", "card", "address"])
def test_paths_out_of_the_folder_are_refused(named: str, tmp_path: Path) -> None:
    """Neither the path of an image, nor a card that names other files or a server's."""
    elsewhere = written(tmp_path / "elsewhere")
    Image.fromarray(made()[0][0].transpose(1, 2, 0)).save(tmp_path / "secret.png")
    place = written(tmp_path / "set")
    if named == "image":
        rows = {"image": [{"bytes": None, "path": str(tmp_path / "secret.png")}] * 40}
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
        table = datasets.Dataset.from_dict({**rows, "label": NAMES * 20}, features)
        for split in ("train", "test"):
            table.to_parquet(str(place / f"{split}-00000-of-00001.parquet"))
        with pytest.raises(FedgenError, match="40 of 40 files cannot be read as images"):
            hugging_face(str(place), labels=NAMES)
        return
    other = elsewhere / "train-00000-of-00001.parquet"
    other = "http://127.0.0.1:9/x.parquet" if named == "address" else other
    files = f"  data_files:\n  - split: train\n    path: {other}\n"
    (place / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n{files}---\n")
    (place / "train-00000-of-00001.parquet").unlink()
    with pytest.raises(FedgenError, match="needs splits train and test, but has test"):
        hugging_face(str(place))


@pytest.mark.parametrize("key", ["client", "person"])
@pytest.mark.parametrize("value", [None, float("nan"), 0.5, ["a"]], ids=repr)
def test_a_missing_client_or_person_is_one_line(key: str, value: object, tmp_path: Path) -> None:
    values = [value] * ROWS if not isinstance(value, type(None)) else [None, *["a"] * (ROWS - 1)]
    place = written(tmp_path / "set", who=values)
    with pytest.raises(FedgenError, match=f"data.{key}: .*neither text nor integers"):
        hugging_face(str(place), **{key: "who"})


def test_an_invalid_image_is_named_by_its_row(tmp_path: Path) -> None:
    place = tmp_path / "set"
    place.mkdir()
    rows = {"image": [{"bytes": b"no image", "path": None}, None], "label": ["cat", "dog"]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    for split in ("train", "test"):
        datasets.Dataset.from_dict(rows, features).to_parquet(str(place / f"{split}.parquet"))
    with pytest.raises(FedgenError, match="2 of 2 files cannot be read as images: row 0, row 1"):
        hugging_face(str(place), labels=NAMES)


def test_training_on_exported_samples(train: Train, tmp_path: Path) -> None:
    place = written(tmp_path / "set", site=["a", "b"] * (ROWS // 2))
    words = [
        *tiny("dp_merf_small"),
        "method=dp_merf_small",
        "data=hugging_face",
        "data.public_rows=60",
    ]
    clients = ["partition=by_folder", "data.client=site", "privacy.aggregation=secure"]
    run = train(*words, f"data.path={place}", *clients)
    again = tmp_path / "again"
    again.mkdir()
    for split, n in (("train", 50), ("test", 20)):
        assert cli.run(["sample", f"run={run}", f"n={n}", f"out={again}/{split}.parquet"]) == 0
    result = hugging_face(str(again))
    assert (len(result.labels), len(result.test_labels)) == (50, 20) and result.shape == (3, 16, 16)
    assert cli.run(["data", "check", "data=hugging_face", f"data.path={again}"]) == 0


def test_a_table_is_the_same_as_parquet_and_as_csv(tmp_path: Path) -> None:
    images, labels = made()
    lines = []
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image.transpose(1, 2, 0)).save(tmp_path / f"{number}.png")
        lines.append((f"{number}.png", NAMES[label], f"site{number % 3}", str(number // 2)))
    heading = ("path", "label", "client", "person")
    with (tmp_path / "images.csv").open("w", newline="") as table:
        csv.writer(table).writerows([heading, *lines])
    columns = dict(zip(heading, map(list, zip(*lines, strict=True)), strict=True))
    datasets.Dataset.from_dict(columns).to_parquet(str(tmp_path / "images.parquet"))
    first, second = (
        folder(STREAMS, None, str(tmp_path / f"images.{kind}"), labels=NAMES)
        for kind in ("csv", "parquet")
    )
    assert first.digest == second.digest and first.images_digest == second.images_digest
    (tmp_path / "images.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(FedgenError, match="no readable Parquet file"):
        folder(STREAMS, None, str(tmp_path / "images.parquet"), labels=NAMES)
