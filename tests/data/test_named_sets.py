"""Data sets by name, each read from tiny files in its original format."""

from __future__ import annotations

import bz2
import csv
import hashlib
import io
import json
import pickle
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torchvision
from PIL import Image
from scipy.io import savemat

from fedgen.config.compose import compose
from fedgen.data.archives import archives
from fedgen.data.camelyon17 import camelyon17
from fedgen.data.catalogue import MEDMNIST, TORCHVISION, data_label, public_rows_of
from fedgen.data.datasets import Dataset, Images
from fedgen.data.labels import has_names
from fedgen.data.medmnist import medmnist
from fedgen.data.torchvision import torchvision_set
from fedgen.errors import FedgenError

SETS = torchvision.datasets
Patch = pytest.MonkeyPatch


def pictures(count: int, *shape: int) -> Images:
    """Return images (count, *shape) of random pixels."""
    return np.random.default_rng(count).integers(0, 256, (count, *shape), np.uint8)


def md5(file: Path) -> str:
    return hashlib.md5(file.read_bytes()).hexdigest()


def write_idx(file: Path, array: np.ndarray) -> None:
    """Write an array in the format of MNIST."""
    file.parent.mkdir(parents=True, exist_ok=True)
    magic = [2048 + array.ndim, *array.shape]
    file.write_bytes(np.array(magic, ">i4").tobytes() + array.astype(np.uint8).tobytes())


def cifar(root: Path, patch: Patch, kind: type, key: str, images: Images, test: Images) -> None:
    folder = root / kind.base_folder
    folder.mkdir(parents=True)
    lists = []
    for name, part in (("train", images), ("test", test)):
        rows = part.transpose(0, 3, 1, 2).reshape(len(part), -1)
        content = {"data": rows, key: [row % 10 for row in range(len(part))]}
        (folder / name).write_bytes(pickle.dumps(content))
        lists.append([[name, md5(folder / name)]])
    names = {kind.meta["key"]: [f"thing {n}" for n in range(10 if key == "labels" else 100)]}
    (folder / "names").write_bytes(pickle.dumps(names))
    patch.setattr(kind, "train_list", lists[0])
    patch.setattr(kind, "test_list", lists[1])
    of_names = {"filename": "names", "key": kind.meta["key"], "md5": md5(folder / "names")}
    patch.setattr(kind, "meta", of_names)


@pytest.mark.parametrize(("name", "key"), [("CIFAR10", "labels"), ("CIFAR100", "fine_labels")])
def test_cifar(name: str, key: str, tmp_path: Path, monkeypatch: Patch) -> None:
    images, test = pictures(12, 32, 32, 3), pictures(11, 32, 32, 3)
    cifar(tmp_path, monkeypatch, getattr(SETS, name), key, images, test)
    data = torchvision_set(str(tmp_path), name)
    assert (data.images == images.transpose(0, 3, 1, 2)).all()
    assert (data.test_images == test.transpose(0, 3, 1, 2)).all()
    assert list(data.labels) == [row % 10 for row in range(12)]
    assert data.names is not None and data.names[3] == "thing 3"
    assert len(data.names) == data.classes == TORCHVISION[name].classes
    assert not data.example_keys.moves
    small = torchvision_set(str(tmp_path), name, size=16, channels=1)
    assert small.shape == (1, 16, 16)


def test_svhn_numbers_zero_from_ten(tmp_path: Path, monkeypatch: Patch) -> None:
    images = pictures(12, 32, 32, 3)
    splits = {}
    for split in ("train", "test"):
        file = tmp_path / f"{split}_32x32.mat"
        labels = np.array([*range(1, 11), 3, 4], np.uint8)[:, None]
        savemat(file, {"X": images.transpose(1, 2, 3, 0), "y": labels})
        splits[split] = ["", file.name, md5(file)]
    monkeypatch.setattr(SETS.SVHN, "split_list", splits)
    data = torchvision_set(str(tmp_path), "SVHN")
    assert (data.images == images.transpose(0, 3, 1, 2)).all()
    assert list(data.labels) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 3, 4]


def test_stl10_lists_pixels_by_column(tmp_path: Path, monkeypatch: Patch) -> None:
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    images = pictures(12, 3, 96, 96)
    listed: dict[str, list[list[str]]] = {"train": [], "test": []}
    for split, files in listed.items():
        for file, content in (
            (folder / f"{split}_X.bin", images.transpose(0, 1, 3, 2)),
            (folder / f"{split}_y.bin", np.array([*range(10, 0, -1), 1, 2], np.uint8)),
        ):
            file.write_bytes(content.tobytes())
            files.append([file.name, md5(file)])
    (folder / "class_names.txt").write_text("\n".join(f"thing {n}" for n in range(10)))
    monkeypatch.setattr(SETS.STL10, "train_list", listed["train"])
    monkeypatch.setattr(SETS.STL10, "test_list", listed["test"])
    data = torchvision_set(str(tmp_path), "STL10", size=32)
    assert data.shape == (3, 32, 32)
    assert list(data.labels) == [*range(9, -1, -1), 0, 1]
    assert (torchvision_set(str(tmp_path), "STL10").images == images).all()


@pytest.mark.parametrize("name", ["KMNIST", "EMNIST-letters", "EMNIST-balanced"])
def test_sets_in_the_format_of_mnist(name: str, tmp_path: Path) -> None:
    kind, _, split = name.partition("-")
    images, first = pictures(9, 28, 28), int(name == "EMNIST-letters")
    for part in ("train", "test"):
        prefix = f"emnist-{split}-{part}" if split else ("train" if part == "train" else "t10k")
        stored = images.transpose(0, 2, 1) if split else images
        write_idx(tmp_path / kind / "raw" / f"{prefix}-images-idx3-ubyte", stored)
        labels = np.arange(9, 0, -1) - 1 + first
        write_idx(tmp_path / kind / "raw" / f"{prefix}-labels-idx1-ubyte", labels)
    data = torchvision_set(str(tmp_path), name)
    assert (data.images[:, 0] == images).all()
    assert list(data.labels) == list(range(8, -1, -1))
    assert data.classes == TORCHVISION[name].classes


def test_usps(tmp_path: Path) -> None:
    for file in ("usps.bz2", "usps.t.bz2"):
        lines = [
            f"{label} " + " ".join(f"{pixel}:{-1 if pixel % 2 else 1}" for pixel in range(1, 257))
            for label in (10, 1, 2)
        ]
        (tmp_path / file).write_bytes(bz2.compress("\n".join(lines).encode()))
    data = torchvision_set(str(tmp_path), "USPS")
    assert data.shape == (1, 16, 16) and set(data.images.ravel()) == {0, 255}
    assert list(data.labels) == [9, 0, 1]


def save(folder: Path, name: str, side: int, value: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), (value, 0, 0)).save(folder / name)


def test_eurosat_has_the_split_of_dpimagebench(tmp_path: Path) -> None:
    """23 of 27 images train, by a permutation with seed 0."""
    for label, name in enumerate(("AnnualCrop", "Forest", "River")):
        for image in range(9):
            save(tmp_path / "eurosat" / "2750" / name, f"{name}_{image}.jpg", 64, 30 * label)
    data = torchvision_set(str(tmp_path), "EuroSAT")
    assert data.images.shape == (23, 3, 64, 64) and data.test_images.shape == (4, 3, 64, 64)
    assert data.names == ("AnnualCrop", "Forest", "River")
    assert (data.images[:, 0].mean((1, 2)).round(-1) == 30 * data.labels).all()
    import torch

    torch.manual_seed(0)
    parts = torch.utils.data.random_split(range(27), [23, 4])
    assert [int(label) for label in data.test_labels] == [row // 9 for row in parts[1].indices]
    assert data.example_keys.moves


def test_pcam(tmp_path: Path, monkeypatch: Patch) -> None:
    h5py = pytest.importorskip("h5py")
    folder = tmp_path / "pcam"
    folder.mkdir()
    images, labels = pictures(4, 96, 96, 3), np.array([0, 1, 1, 0])[:, None, None, None]
    for files in SETS.PCAM._FILES.values():
        for part, key, array in (("images", "x", images), ("targets", "y", labels)):
            with h5py.File(folder / files[part][0], "w") as file:
                file[key] = array
    data = torchvision_set(str(tmp_path), "PCAM")
    assert (data.images == images.transpose(0, 3, 1, 2)).all()
    assert list(data.labels) == [0, 1, 1, 0]


def gtsrb(root: Path) -> None:
    base = root / "gtsrb"
    for label in range(2):
        save(
            base / "GTSRB" / "Training" / f"{label:05d}", "00000_00000.ppm", 30 + label, 200 * label
        )
    for number in range(2):
        save(base / "GTSRB" / "Final_Test" / "Images", f"{number:05d}.ppm", 40, 200 * number)
    rows = [{"Filename": f"{number:05d}.ppm", "ClassId": number} for number in range(2)]
    with (base / "GT-final_test.csv").open("w") as file:
        writer = csv.DictWriter(file, ("Filename", "ClassId"), delimiter=";")
        writer.writeheader()
        writer.writerows(rows)


def food101(root: Path) -> None:
    listing = {f"food {label}": [f"food {label}/{label}"] for label in range(2)}
    for label in range(2):
        save(
            root / "food-101" / "images" / f"food {label}", f"{label}.jpg", 30 + label, 200 * label
        )
    (root / "food-101" / "meta").mkdir()
    for split in ("train", "test"):
        (root / "food-101" / "meta" / f"{split}.json").write_text(json.dumps(listing))


def imagenette(root: Path) -> None:
    for split in ("train", "val"):
        for label, wnid in enumerate(("n01440764", "n02102040")):
            save(root / "imagenette2" / split / wnid, f"{wnid}_1.jpeg", 30 + label, 200 * label)


@pytest.mark.parametrize(
    ("name", "write"), [("GTSRB", gtsrb), ("Food101", food101), ("Imagenette", imagenette)]
)
def test_sets_of_files_require_a_size(
    name: str, write: Callable[[Path], None], tmp_path: Path
) -> None:
    """Their images differ in size, and their order is that of the labels."""
    write(tmp_path)
    data = torchvision_set(str(tmp_path), name, size=16)
    assert data.shape == (3, 16, 16) and list(data.labels) == list(data.test_labels) == [0, 1]
    assert abs(data.images[1, 0].mean() - 200) < 3
    assert "data=folder" in data.example_keys.moves
    with pytest.raises(FedgenError, match=rf"data\.size: is not set, but the images of {name}"):
        torchvision_set(str(tmp_path), name)


def test_an_npz_comes_first(tmp_path: Path) -> None:
    arrays = {"train_images": pictures(20, 32, 32, 3), "train_labels": np.arange(20)[::-1] % 10}
    tests = {"test_images": pictures(3, 32, 32, 3), "test_labels": np.zeros(3, int)}
    np.savez(tmp_path / "cifar10.npz", **arrays, **tests)
    assert torchvision_set(str(tmp_path), "CIFAR10", size=8, channels=1).shape == (1, 8, 8)


def test_files_that_are_missing_or_damaged_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        FedgenError, match=r"data\.root: GTSRB is not in .*, and the download failed"
    ):
        torchvision_set(str(tmp_path), "GTSRB", size=16)
    gtsrb(tmp_path)
    (tmp_path / "gtsrb/GTSRB/Training/00000/00000_00000.ppm").write_bytes(b"P6 nonsense")
    with pytest.raises(FedgenError, match=r"data\.root: GTSRB in .* cannot be read"):
        torchvision_set(str(tmp_path), "GTSRB", size=16)


def test_names_in_a_run_directory_may_be_altered(tmp_path: Path) -> None:
    for read in (torchvision_set, medmnist):
        with pytest.raises(FedgenError, match=r"data\.name: there is no '\.\./mnist'"):
            read(str(tmp_path), "../mnist")


def test_facts_come_with_the_name() -> None:
    assert public_rows_of("torchvision", "CIFAR10") == 50_000
    assert public_rows_of("medmnist", "bloodmnist") == 11_959
    assert public_rows_of("folder", None) is None
    with pytest.raises(FedgenError, match=r"no 'cifar10'; choose CIFAR10"):
        public_rows_of("torchvision", "cifar10")
    for name, facts in TORCHVISION.items():
        assert hasattr(SETS, name.partition("-")[0])
        assert facts.rows > facts.classes
    for medical in MEDMNIST.values():
        assert has_names(medical.labels)


def medical_npz(file: Path, labels: np.ndarray, side: int = 28, *channels: int) -> None:
    arrays: dict[str, np.ndarray] = {}
    for split in ("train", "val", "test"):
        arrays[f"{split}_images"] = pictures(len(labels), side, side, *channels)
        arrays[f"{split}_labels"] = labels
    np.savez(file, **arrays)


def test_medmnist(tmp_path: Path) -> None:
    medical_npz(tmp_path / "bloodmnist.npz", np.array([[7], [0], [3]]), 28, 3)
    medical_npz(tmp_path / "bloodmnist_64.npz", np.array([[1], [0], [2]]), 64, 3)
    medical_npz(tmp_path / "retinamnist.npz", np.array([[4], [0], [3]]), 28, 3)
    data = medmnist(str(tmp_path), "bloodmnist")
    assert data.name == "bloodmnist" and data.shape == (3, 28, 28) and data.classes == 8
    assert list(data.labels) == [7, 0, 3] and data.names is not None and data.names[7] == "platelet"
    assert medmnist(str(tmp_path), "bloodmnist", 64, 1).shape == (1, 64, 64)
    assert list(medmnist(str(tmp_path), "retinamnist").labels) == [4, 0, 3]
    with pytest.raises(FedgenError, match=r"data\.root: there is no .*pathmnist_128\.npz"):
        medmnist(str(tmp_path), "pathmnist", 128)
    with pytest.raises(FedgenError, match=r"data\.label: bloodmnist has one label per image"):
        medmnist(str(tmp_path), "bloodmnist", label="edema")


def test_findings_of_chestmnist_are_chosen_by_name(tmp_path: Path) -> None:
    labels = np.zeros((4, 14), int)
    labels[1, 4] = labels[2, 9] = 1
    labels[3, [4, 9]] = 1
    medical_npz(tmp_path / "chestmnist.npz", labels)
    data = medmnist(str(tmp_path), "chestmnist", label=["mass", "edema"])
    assert data.name == "chestmnist" and list(data.labels) == [0, 1, 2, 3]
    assert data.names == ("none", "mass", "edema", "mass+edema")
    for label in (None, "gout"):
        with pytest.raises(FedgenError, match=r"data\.label: .*; choose from atelectasis"):
            medmnist(str(tmp_path), "chestmnist", label=label)


def wilds(root: Path, rows: Sequence[tuple[int, int, int, int]]) -> Path:
    """Write patches; rows list patient, hospital, tumour and split."""
    folder = root / "camelyon17_v1.0"
    lines = [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for number, (patient, center, tumor, split) in enumerate(rows):
        lines.append(f"{number},{patient:03d},1,{number},2,{tumor},0,{center},{split}")
        name = f"patch_patient_{patient:03d}_node_1_x_{number}_y_2.png"
        save(folder / "patches" / f"patient_{patient:03d}_node_1", name, 96, 10 * number)
    (folder / "metadata.csv").write_text("\n".join(lines))
    return folder


def test_camelyon17_has_hospitals_and_patients(tmp_path: Path) -> None:
    rows = [(4, 0, 1, 0), (4, 0, 0, 1), (9, 3, 1, 0), (7, 1, 0, 0), (8, 2, 1, 0), (9, 3, 0, 0)]
    folder = wilds(tmp_path, rows)
    data = camelyon17(str(tmp_path))
    assert data.shape == (3, 32, 32) and data.classes == 2
    assert list(data.images[:, 0, 5, 5]) == [0, 20, 50]  # neither of validation splits
    assert list(data.labels) == [1, 1, 0] and list(data.test_labels) == [1]
    assert data.writers is not None and list(data.writers) == [0, 1, 1]
    assert data.persons is not None and list(data.persons) == [4, 9, 9] and data.has_persons
    assert camelyon17(str(tmp_path), 16, 1).shape == (1, 16, 16)
    short, long = ",patient,node,x_coord,y_coord,tumor,slide,center,split\n0,1,1", 20 * "9"
    for content in ("", "patient,node\n1,2", "a\n" * 3, short, f"{short},1,1,1,1,{long},1"):
        (folder / "metadata.csv").write_text(content)
        with pytest.raises(FedgenError, match=r"data\.root"):
            camelyon17(str(tmp_path))


def dataset_tool(file: Path, images: Images, labels: Sequence[object]) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        names = [f"{row // 10:05d}/img{row:08d}.png" for row in range(len(images))]
        for name, image in zip(names, images, strict=True):
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, "png")
            archive.writestr(name, buffer.getvalue())
        listing = {"labels": [[name, label] for name, label in zip(names, labels, strict=True)]}
        archive.writestr("dataset.json", json.dumps(listing))


def read_archives(root: Path, **settings: int) -> Dataset:
    return archives(str(root), "train_32.zip", "test_32.zip", classes=3, **settings)  # type: ignore[arg-type]


def test_archives_of_dataset_tool(tmp_path: Path) -> None:
    images = pictures(12, 32, 32, 3)
    dataset_tool(tmp_path / "train_32.zip", images, [2, 1, 0] * 4)
    dataset_tool(tmp_path / "test_32.zip", images[:3], [0, 1, 2])
    data = read_archives(tmp_path)
    assert (data.images == images.transpose(0, 3, 1, 2)).all()
    assert list(data.labels) == [2, 1, 0] * 4 and list(data.test_labels) == [0, 1, 2]
    assert read_archives(tmp_path, size=28, channels=1).shape == (1, 28, 28)
    named = archives(str(tmp_path), "train_32.zip", "test_32.zip", labels=["a", "b", "c"])
    assert named.names == ("a", "b", "c")
    with pytest.raises(FedgenError, match=r"data\.classes: is not set"):
        archives(str(tmp_path), "train_32.zip", "test_32.zip")


@pytest.mark.parametrize(
    "listing",
    [
        "not json",
        "[]",
        '{"labels": null}',
        '{"labels": [["00000/img00000000.png", [1]]]}',
        '{"labels": [["00000/img00000000.png", true]]}',
        '{"labels": [["../../etc/passwd", 1]]}',
        '{"labels": [["00000/img00000000.png", 1], ["00000/img00000000.png", 2]]}',
        '{"labels": [["00000/img00000000.png", 3]]}',
    ],
)
def test_malformed_archives_are_one_line(listing: str, tmp_path: Path) -> None:
    images = pictures(2, 32, 32, 3)
    dataset_tool(tmp_path / "test_32.zip", images, [0, 1])
    with zipfile.ZipFile(tmp_path / "train_32.zip", "w") as archive:
        buffer = io.BytesIO()
        Image.fromarray(images[0]).save(buffer, "png")
        archive.writestr("00000/img00000000.png", buffer.getvalue())
        archive.writestr("dataset.json", listing)
    with pytest.raises(FedgenError, match=r"^data"):
        read_archives(tmp_path)


def test_damaged_and_huge_archives_are_one_line(tmp_path: Path) -> None:
    """Archives are data of others: bzip2 and xz inflate without a limit."""
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(tmp_path / "train_32.zip", "w", method) as archive:
            archive.writestr("dataset.json", 10**6 * b" ")
        with pytest.raises(FedgenError, match=r"data\.train: .* is neither stored nor deflated"):
            read_archives(tmp_path)
    with zipfile.ZipFile(tmp_path / "train_32.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("dataset.json", json.dumps({"labels": [["a.png", 1]] * 2}))
    content = bytearray((tmp_path / "train_32.zip").read_bytes())
    content[45:50] = b"\xff" * 5
    (tmp_path / "train_32.zip").write_bytes(bytes(content))
    with pytest.raises(FedgenError, match=r"data\.train: .* is not a readable archive"):
        read_archives(tmp_path)
    (tmp_path / "train_32.zip").unlink()
    with pytest.raises(FedgenError, match=r"data\.train: there is no .*train_32\.zip"):
        read_archives(tmp_path)


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    medical_npz(tmp_path / "breastmnist_64.npz", np.array([0, 1]), 28)
    with pytest.raises(FedgenError, match=r"data\.size: .* has images of 28 pixels a side, not 64"):
        medmnist(str(tmp_path), "breastmnist", 64)


@pytest.mark.parametrize("content", ["not json", "[]", '{"a": [["x"]]}', '{"a": 5}'])
def test_damaged_files_of_torchvision_are_one_line(content: str, tmp_path: Path) -> None:
    food101(tmp_path)
    (tmp_path / "food-101" / "meta" / "train.json").write_text(content)
    with pytest.raises(FedgenError, match=r"data\.root: Food101 in .* cannot be read"):
        torchvision_set(str(tmp_path), "Food101", size=16)


def test_runs_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    images = {"train_images": pictures(3, 28, 28), "test_images": pictures(3, 28, 28)}
    np.savez(tmp_path / "mnist.npz", train_labels=[2, 0, 1], test_labels=[0, 1, 2], **images)
    assert torchvision_set(str(tmp_path), "mnist", kind="MNIST").classes == 10


def test_names_of_data_sets_in_records() -> None:
    for words, label in (
        (["data=torchvision", "data.name=CIFAR10"], "cifar10"),
        (["data=medmnist", "data.name=bloodmnist"], "bloodmnist"),
        (["data=mnist"], "mnist"),
        (["data=digits"], "digits"),
    ):
        config = compose("config", words)
        assert data_label(config) == label
    config = compose("config", ["data=torchvision", "data.name=CIFAR10", "method=mixture"])
    assert config.data.public_rows == config.method.rows == 50_000
